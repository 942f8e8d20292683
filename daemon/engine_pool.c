/* engine_pool.c: pools, and what the device must be told of them.
 *
 * Making one: the same name again must mean the same, everything that can refuse is asked before
 * anything is taken, because a pool can't be given back.
 *
 * Effects: what the cache changes in block tables, patches of table entries and copies of blocks,
 * gathers in the pool until its next batch takes it to the device.
 */
#include "daemon/engine_pool.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/engine_ready.h"
#include "daemon/log.h"
#include "kernels/kv_layout.h"

#define FAIL(status, ...) (snprintf(why, why_bytes, __VA_ARGS__), (status))

enum { MIN_BLOCK_TOKENS = 8 };

attn_status pools_init(struct engine *e)
{
    const struct config *c = e->parts.cfg;
    uint32_t max_row_blocks = c->max_seq_tokens / MIN_BLOCK_TOKENS + 1;
    if (max_row_blocks > e->n_blocks)
        max_row_blocks = e->n_blocks;
    /* every block an item can touch, and a few forks of the longest sequence */
    e->copies_capacity = c->max_batch_tokens / MIN_BLOCK_TOKENS + 2 * c->max_batch_items;
    e->patches_capacity = e->copies_capacity + 4 * max_row_blocks;
    e->patches_margin = (BACKEND_MAX_IN_FLIGHT + 1) * e->copies_capacity;
    e->pools = calloc(c->max_pools, sizeof *e->pools);
    return e->pools == NULL ? ATTN_ENOMEM : ATTN_OK;
}

static void effects_fini(struct pool *p)
{
    free(p->fx.patches);
    free(p->fx.copies);
}

void pools_fini(struct engine *e)
{
    for (uint32_t i = 0; i < e->n_pools; i++) {
        pool_spec_fini(&e->pools[i].spec);
        effects_fini(&e->pools[i]);
    }
    free(e->pools);
}

/* --- finding ---------------------------------------------------------------------------------- */

struct pool *pool_of_handle(struct engine *e, uint32_t handle)
{
    return handle == 0 || handle > e->n_pools ? NULL : &e->pools[handle - 1];
}

uint32_t pool_handle(const struct engine *e, const struct pool *p)
{
    return (uint32_t)(p - e->pools) + 1;
}

struct pool *pool_find(struct engine *e, const char *name)
{
    for (uint32_t i = 0; i < e->n_pools; i++)
        if (strcmp(e->pools[i].spec.wire->name, name) == 0)
            return &e->pools[i];
    return NULL;
}

struct pool *pool_of_kv(struct engine *e, kv_pool_id id)
{
    for (uint32_t i = 0; i < e->n_pools; i++)
        if (e->pools[i].id.index == id.index)
            return &e->pools[i];
    return NULL;
}

/* --- making ----------------------------------------------------------------------------------- */

static attn_status effects_init(struct engine *e, struct pool *p)
{
    p->fx = (struct kv_effects){
        .patches = calloc(e->patches_capacity + e->patches_margin, sizeof *p->fx.patches),
        .copies = calloc(e->copies_capacity, sizeof *p->fx.copies),
        .patches_capacity = e->patches_capacity,
        .copies_capacity = e->copies_capacity,
    };
    return p->fx.patches == NULL || p->fx.copies == NULL ? ATTN_ENOMEM : ATTN_OK;
}

static uint32_t row_blocks(const struct engine *e, const struct pool_spec *s)
{
    uint32_t bt = s->wire->block_tokens;
    uint32_t n = e->parts.cfg->max_seq_tokens / bt + (e->parts.cfg->max_seq_tokens % bt != 0);
    return s->wire->n_blocks < n ? s->wire->n_blocks : n;
}

/* Checks the geometry and decides n_blocks. */
static attn_status pool_size(struct engine *e, struct pool *p, char *why, size_t why_bytes)
{
    Attnd__PoolSpec *w = p->spec.wire;
    if (w->num_layers > e->parts.cfg->max_layers)
        return FAIL(ATTN_EINVAL,
                    "num_layers is %" PRIu32 ", %" PRIu32 " are allowed (cache.max_layers)",
                    w->num_layers, e->parts.cfg->max_layers);
    uint64_t free_bytes = e->info.kv_bytes - e->device_bytes;
    uint32_t free_blocks = e->n_blocks, asked = w->n_blocks;
    for (uint32_t i = 0; i < e->n_pools; i++)
        free_blocks -= e->pools[i].spec.wire->n_blocks;

    if (asked == 0)
        w->n_blocks = 1; /* the geometry is judged first, the size after it */
    pool_spec_config(&p->spec, e->parts.cfg->max_sequences, row_blocks(e, &p->spec), &p->config);
    attn_status st = e->parts.ops->pool_check(e->parts.backend, &p->config);
    if (st != ATTN_OK)
        return FAIL(st, "%s", e->parts.ops->last_error(e->parts.backend));
    uint64_t block_bytes = kv_layout_of(&p->config).block_bytes;
    if (asked == 0) {
        uint64_t n = free_bytes / block_bytes;
        p->config.n_blocks = n < free_blocks ? (uint32_t)n : free_blocks;
        while (p->config.n_blocks > 0 &&
               e->parts.ops->pool_bytes(e->parts.backend, &p->config) > free_bytes)
            p->config.n_blocks--;
        w->n_blocks = p->config.n_blocks;
        if (w->n_blocks == 0)
            return FAIL(ATTN_ENOMEM,
                        "a block of %" PRIu64 " bytes does not fit: %" PRIu64 " of %" PRIu64
                        " KV bytes are free",
                        block_bytes, free_bytes, e->info.kv_bytes);
        pool_spec_config(&p->spec, e->parts.cfg->max_sequences, row_blocks(e, &p->spec),
                         &p->config);
    }
    if (w->n_blocks > free_blocks)
        return FAIL(ATTN_ENOMEM, "n_blocks is %" PRIu32 ", %" PRIu32 " block records are free",
                    w->n_blocks, free_blocks);
    p->device_bytes = e->parts.ops->pool_bytes(e->parts.backend, &p->config);
    if (p->device_bytes > free_bytes)
        return FAIL(ATTN_ENOMEM,
                    "n_blocks %" PRIu32 " takes %" PRIu64 " bytes, %" PRIu64 " of %" PRIu64
                    " KV bytes are free",
                    w->n_blocks, p->device_bytes, free_bytes, e->info.kv_bytes);
    return ATTN_OK;
}

attn_status pool_create(struct engine *e, const Attnd__PoolSpec *asked, struct pool **out_pool,
                        char *why, size_t why_bytes)
{
    struct pool_spec spec;
    attn_status st = pool_spec_init(&spec, asked, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    struct pool *have = pool_find(e, spec.wire->name);
    if (have != NULL) {
        st = pool_spec_compare(&have->spec, &spec, why, why_bytes);
        pool_spec_fini(&spec);
        if (st == ATTN_OK)
            *out_pool = have;
        return st;
    }
    struct pool *p = &e->pools[e->n_pools];
    if (e->n_pools == e->parts.cfg->max_pools) {
        st = FAIL(ATTN_EOVERLOAD, "%" PRIu32 " pools exist, cache.max_pools is %" PRIu32,
                  e->n_pools, e->parts.cfg->max_pools);
        pool_spec_fini(&spec);
        return st;
    }
    uint8_t *packed = NULL;
    *p = (struct pool){.spec = spec};
    ready_init(&p->ready);
    st = pool_size(e, p, why, why_bytes);
    if (st != ATTN_OK)
        goto fail;
    packed = malloc(pool_spec_packed_bytes(&p->spec));
    st = packed == NULL ? ATTN_ENOMEM : effects_init(e, p);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "no memory for a pool's tables");
        goto fail;
    }
    st = e->parts.ops->pool_open(e->parts.backend, &p->config, &p->device);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "%s", e->parts.ops->last_error(e->parts.backend));
        goto fail;
    }
    e->device_bytes += p->device_bytes; /* taken for good, whatever happens next */

    pool_spec_pack(&p->spec, packed);
    struct kv_pool_spec ks = {.n_layers = p->config.num_layers,
                              .block_tokens = p->config.block_tokens,
                              .n_blocks = p->config.n_blocks,
                              .spec_bytes = (uint32_t)pool_spec_packed_bytes(&p->spec),
                              .spec = packed};
    snprintf(ks.name, sizeof ks.name, "%s", p->spec.wire->name);
    st = kv_pool_create(e->parts.kv, &ks, &p->id);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "%s", kv_last_error(e->parts.kv));
        goto fail;
    }
    free(packed);
    e->n_pools++;
    e->is_dirty = true;
    log_info("pool \"%s\": %" PRIu32 " layers, (%" PRIu32 ", %" PRIu32 ", %" PRIu32 "/%" PRIu32
             ") %s/%s, %" PRIu32 " blocks of %" PRIu32 " tokens, %" PRIu64 " MiB",
             p->spec.wire->name, p->config.num_layers, p->config.num_q_heads,
             p->config.num_kv_heads, p->config.head_dim_k, p->config.head_dim_v,
             attn_dtype_name(p->config.q_dtype), attn_dtype_name(p->config.kv_dtype),
             p->config.n_blocks, p->config.block_tokens, p->device_bytes >> 20);
    *out_pool = p;
    return ATTN_OK;
fail:
    free(packed);
    effects_fini(p);
    pool_spec_fini(&p->spec);
    *p = (struct pool){0};
    return st;
}

/* --- effects ---------------------------------------------------------------------------------- */

void pool_effects_export(const struct pool *p, struct backend_patch *patches,
                         struct backend_copy *copies)
{
    const struct kv_effects *fx = &p->fx;
    for (uint32_t i = 0; i < fx->n_patches; i++)
        patches[i] =
            (struct backend_patch){fx->patches[i].row, fx->patches[i].index, fx->patches[i].block};
    for (uint32_t i = 0; i < fx->n_copies; i++)
        copies[i] = (struct backend_copy){fx->copies[i].src, fx->copies[i].dst};
}

void pool_patch_again(struct engine *e, struct pool *p, const struct backend_patch *patches,
                      uint32_t n_patches)
{
    struct kv_effects *fx = &p->fx;
    uint32_t room = e->patches_capacity + e->patches_margin;
    for (uint32_t i = 0; i < n_patches && fx->n_patches < room; i++) {
        const struct backend_patch *patch = &patches[i];
        struct kv_seq_info info;
        kv_seq_info(e->parts.kv, (kv_seq_id){patch->row}, &info);
        if (patch->index < info.n_blocks && info.pool.index == p->id.index)
            fx->patches[fx->n_patches++] =
                (struct kv_patch){patch->row, patch->index, info.block_table[patch->index]};
    }
}

void pool_cancel_append(struct engine *e, struct pool *p, const struct item *it)
{
    struct kv_effects *fx = &p->fx;
    fx->patches_capacity = e->patches_capacity + e->patches_margin;
    attn_status st = kv_append_cancel(e->parts.kv, (kv_seq_id){it->seq}, it->task->layer, it->pos,
                                      it->n_tokens, fx);
    assert(st == ATTN_OK); /* the margin has room for every copy in flight */
    (void)st;
    fx->patches_capacity = e->patches_capacity;
}
