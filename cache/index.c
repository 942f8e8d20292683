/* index.c: (tenant, name) -> sequence: open addressing with linear probing, at most half full.
 *
 * A slot's home, where a search for it starts, follows from its tag alone, so removal can shift
 * later slots back and leaves no tombstones. The hash is keyed with the arena's random key: clients
 * choose names, not slots. Derived.
 */
#include "cache/kv_internal.h"

static uint32_t tag_of(const struct kv *kv, uint32_t tenant, uint64_t name)
{
    uint64_t words[2] = {tenant, name};
    return (uint32_t)siphash(kv->key, words, sizeof words);
}

uint32_t kv_index_find(const struct kv *kv, uint32_t tenant, uint64_t name)
{
    uint32_t tag = tag_of(kv, tenant, name);
    for (uint32_t i = tag & kv->index_mask;; i = (i + 1) & kv->index_mask) {
        struct kv_index_slot slot = kv->slots[i];
        if (slot.seq == 0)
            return 0;
        if (slot.tag != tag)
            continue;
        const struct kv_seq_rec *s = &kv->seqs[slot.seq - 1];
        if (s->name == name && s->tenant == tenant)
            return slot.seq;
    }
}

void kv_index_put(struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    uint32_t tag = tag_of(kv, s->tenant, s->name);
    uint32_t i = tag & kv->index_mask;
    while (kv->slots[i].seq != 0)
        i = (i + 1) & kv->index_mask;
    kv->slots[i] = (struct kv_index_slot){.tag = tag, .seq = seq + 1};
}

void kv_index_remove(struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    uint32_t mask = kv->index_mask;
    uint32_t hole = tag_of(kv, s->tenant, s->name) & mask;
    while (kv->slots[hole].seq != seq + 1)
        hole = (hole + 1) & mask;
    /* A later slot of the run moves into the hole unless its home lies between the two. */
    for (uint32_t i = (hole + 1) & mask; kv->slots[i].seq != 0; i = (i + 1) & mask) {
        uint32_t home = kv->slots[i].tag & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            kv->slots[hole] = kv->slots[i];
            hole = i;
        }
    }
    kv->slots[hole] = (struct kv_index_slot){0};
}

/* Each loop prefetches the cache lines that the next one reads. */
void kv_warm(const struct kv *kv, uint32_t tenant, const uint64_t *names, const uint32_t *pos,
             uint32_t n, kv_seq_id *out_seq)
{
    uint32_t tags[KV_WARM_MAX];
    for (uint32_t k = 0; k < n; k++) {
        tags[k] = tag_of(kv, tenant, names[k]);
        __builtin_prefetch(&kv->slots[tags[k] & kv->index_mask]);
    }
    for (uint32_t k = 0; k < n; k++) {
        uint32_t i = tags[k] & kv->index_mask;
        while (kv->slots[i].seq != 0 && kv->slots[i].tag != tags[k])
            i = (i + 1) & kv->index_mask;
        uint32_t seq = kv->slots[i].seq - 1; /* wraps to UINT32_MAX */
        out_seq[k].index = seq;
        if (seq == UINT32_MAX)
            continue;
        __builtin_prefetch(&kv->seqs[seq], 1);
        __builtin_prefetch(kv_lens(kv, seq), 1);
    }
    for (uint32_t k = 0; k < n; k++) {
        uint32_t seq = out_seq[k].index;
        if (seq == UINT32_MAX)
            continue;
        uint32_t i = pos[k] >> kv->pools[kv->seqs[seq].pool].block_shift;
        if (i < kv->config.max_seq_blocks)
            __builtin_prefetch(kv_row(kv, seq) + i, 1);
    }
}
