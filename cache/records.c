/* records.c: helpers for all files of the cache: whether a record is in use, the seals over
 * records, and the sentence of a failed call.
 *
 * The lowest file of the cache: it reads truth, writes none, and calls only the hash.
 */
#include "cache/kv_internal.h"

#include <stdarg.h>
#include <stdio.h>

attn_status kv_fail(struct kv *kv, attn_status st, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(kv->error, sizeof kv->error, fmt, ap);
    va_end(ap);
    return st;
}

const char *kv_last_error(const struct kv *kv)
{
    return kv->error;
}

attn_status kv_paged_out(struct kv *kv, uint32_t seq)
{
    return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: %u of its blocks are in idle memory",
                   (unsigned long long)kv->seqs[seq].name, kv->links[seq].n_paged_out);
}

struct kv_seq_rec *kv_seq_live(const struct kv *kv, uint32_t seq)
{
    if (seq >= kv->config.max_sequences || kv->seqs[seq].state != KV_LIVE)
        return NULL;
    return &kv->seqs[seq];
}

uint32_t kv_seq_seal(const struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_given_rec *g = &kv->given[seq];
    uint64_t words[] = {seq, s->tenant, s->name, s->pool, g->adapter, g->n_cached};
    return (uint32_t)siphash(kv->key, words, sizeof words);
}

struct kv_pool_rec *kv_pool_live(const struct kv *kv, uint32_t pool)
{
    if (pool >= kv->config.max_pools || kv->pools[pool].state != KV_LIVE)
        return NULL;
    return &kv->pools[pool];
}

uint64_t kv_pool_seal(const struct kv *kv, uint32_t pool)
{
    const struct kv_pool_rec *p = &kv->pools[pool];
    uint64_t spec = siphash(kv->key, kv->specs + (size_t)pool * KV_SPEC_BYTES, p->spec_bytes);
    uint64_t name = siphash(kv->key, p->name, sizeof p->name);
    uint64_t words[] = {
        pool, p->n_layers, p->block_tokens, p->n_made,        p->first_block, p->spec_bytes, spec,
        name, p->place,    p->tenant,       p->window_tokens, p->kept_tokens, p->idle_pages,
    };
    return siphash(kv->key, words, sizeof words);
}

uint64_t kv_pool_sized(const struct kv *kv, uint32_t pool, uint32_t n_blocks)
{
    const struct kv_pool_rec *p = &kv->pools[pool];
    uint64_t words[] = {pool, p->seal, n_blocks};
    return (siphash(kv->key, words, sizeof words) & ~(uint64_t)UINT32_MAX) | n_blocks;
}
