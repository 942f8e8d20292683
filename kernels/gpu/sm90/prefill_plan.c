/* prefill_plan.c: which pools the prefill kernels compute, and the order of a batch's work. Pure
 * functions of the pool and the batch.
 */
#include "kernels/gpu/sm90/prefill_params.h"
#include "kernels/visible.h"

#include <string.h>

/* K and V of so many bytes are left in the L2 cache until every unit that reads them has done so. */
#define SECTION_BYTES (32u << 20)

bool prefill_supported(const struct backend_pool_config *c, int major)
{
    const uint32_t k = c->head_dim_k, v = c->head_dim_v;
    const bool is_dim = k >= 64 && v >= 64 && k <= 256 && v <= 256;
    return major == 9 && is_dim && c->q_dtype == c->kv_dtype &&
           (c->q_dtype == ATTN_BF16 || c->q_dtype == ATTN_F16) && c->block_tokens >= 16;
}

static uint32_t tiles_of(const struct prefill_pool *p, uint32_t n_tokens)
{
    const uint64_t rows = (uint64_t)n_tokens * p->kv.group, r = prefill_rows(p->dim);
    return (uint32_t)((rows + r - 1) / r);
}

uint64_t prefill_upload_bytes(const struct prefill_pool *p, uint32_t max_items, uint32_t max_tokens)
{
    return ((uint64_t)max_items + tiles_of(p, max_tokens)) * sizeof(struct prefill_entry);
}

/* Tiles of keys of the unit that is tile `tile` of an item's rows. */
static uint32_t cost_of(const struct prefill_pool *p, const struct gpu_item *it, uint32_t tile)
{
    const struct attn_layer_spec *s = &p->specs[it->layer];
    const uint64_t row = (uint64_t)tile * prefill_rows(p->dim);
    const uint64_t end = (uint64_t)it->n_tokens * p->kv.group;
    const uint64_t last = row + prefill_rows(p->dim) < end ? row + prefill_rows(p->dim) : end;
    const uint32_t low = it->pos + (uint32_t)(row / p->kv.group), n_keys = it->pos + it->n_tokens;
    const uint32_t high = it->pos + (uint32_t)((last - 1) / p->kv.group);
    const uint32_t window = s->window_tokens, sinks = s->sink_tokens;
    const struct visible seen =
        visible_to_some(visible_to(window, sinks, s->is_full, low, n_keys),
                        visible_to(window, sinks, s->is_full, high, n_keys));
    return visible_tiles_of(seen, prefill_keys(p->dim)).n;
}

void prefill_prepare(const struct prefill_pool *p, const struct gpu_item *items, uint32_t n,
                     const struct gpu_item *device_items, void *upload,
                     struct prefill_call *out_call)
{
    /* a counting sort by tiles of keys, the most first; long units share a bucket with those of
     * nearly as many */
    enum { BUCKETS = 1024 };
    uint32_t at[BUCKETS + 1] = {0}, most = 0, shift = 0, n_entries = 0;
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t tiles = tiles_of(p, items[i].n_tokens);
        const uint32_t cost = cost_of(p, &items[i], tiles - 1), first = cost_of(p, &items[i], 0);
        most = cost > most ? cost : most; /* costs grow with the tile but for window edges */
        most = first > most ? first : most;
        n_entries += tiles;
        tokens += items[i].pos + items[i].n_tokens;
    }
    while (most >> shift >= BUCKETS)
        shift++;
    struct prefill_entry *list = out_call->inline_entries;
    out_call->upload_bytes = 0;
    if (n_entries > PREFILL_INLINE_ENTRIES) {
        list = upload;
        out_call->upload_bytes = n_entries * sizeof *list;
    }
    for (uint32_t pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t t = tiles_of(p, items[i].n_tokens); t-- > 0;) {
                uint32_t bucket = cost_of(p, &items[i], t) >> shift;
                bucket = bucket < BUCKETS ? BUCKETS - 1 - bucket : 0;
                if (pass == 0)
                    at[bucket + 1]++;
                else
                    list[at[bucket]++] = (struct prefill_entry){.item = i, .tile = t};
            }
        for (uint32_t k = 0; k < BUCKETS && pass == 0; k++)
            at[k + 1] += at[k];
    }
    const uint64_t row_bytes = (p->kv.k_head_bytes + p->kv.v_head_bytes) / p->kv.block_tokens;
    out_call->pool = p;
    out_call->items = device_items;
    out_call->n_entries = n_entries;
    out_call->kv_bytes = tokens * row_bytes * p->kv.num_kv_heads;
    const uint64_t heads = SECTION_BYTES / (tokens * row_bytes);
    out_call->section_heads = heads == 0                   ? 1
                              : heads < p->kv.num_kv_heads ? (uint32_t)heads
                                                           : p->kv.num_kv_heads;
}
