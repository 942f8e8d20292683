/* kv_layout.h: where a token's K and V live inside a pool. Pure arithmetic, shared by all backends
 * and by the kernels.
 *
 * A pool is [block][layer] of K part, then V part. A part is [kv_head][block_tokens][head_dim]
 * codes and, if quantised, [kv_head][block_tokens] f32 scales. Parts start at multiples of 128
 * bytes. Where V is in K there is a K part alone, and V is the beginning of its rows, with their
 * scales.
 */
#ifndef ATTND_KERNELS_KV_LAYOUT_H
#define ATTND_KERNELS_KV_LAYOUT_H

#include "kernels/backend.h"

struct kv_layout {
    uint64_t block_bytes; /* all layers */
    uint64_t layer_bytes; /* K part and V part of one layer of one block */
    uint64_t v_offset; /* V part within a layer; 0: V is in K */
    uint64_t k_head_bytes; /* [block_tokens][head_dim_k] */
    uint64_t v_head_bytes; /* [block_tokens] of V's rows */
    uint64_t v_row_bytes; /* from a token's V to the next one's */
    uint64_t k_scales; /* offset of K's scales within a layer; 0 if not quantised */
    uint64_t v_scales; /* offset of V's scales within a layer; 0 if not quantised */
    bool is_quantised;
};

static inline uint64_t kv_layout_align(uint64_t n)
{
    return (n + 127) & ~(uint64_t)127;
}

/* Elements that the cache stores of a token, for each kv head. */
static inline uint64_t kv_stored_elements(const struct backend_pool_config *c)
{
    return c->head_dim_k + (uint64_t)(c->is_v_in_k ? 0 : c->head_dim_v);
}

/* c must have passed backend_pool_config_check. */
static inline struct kv_layout kv_layout_of(const struct backend_pool_config *c)
{
    struct kv_layout l = {0};
    uint64_t e = attn_dtype_bytes(c->kv_dtype), scales = 0;
    l.is_quantised = c->kv_dtype != c->q_dtype;
    if (l.is_quantised)
        scales = (uint64_t)c->num_kv_heads * c->block_tokens * sizeof(float);
    l.k_head_bytes = (uint64_t)c->block_tokens * c->head_dim_k * e;
    l.v_row_bytes = (c->is_v_in_k ? c->head_dim_k : c->head_dim_v) * e;
    l.v_head_bytes = c->block_tokens * l.v_row_bytes;
    uint64_t k_codes = l.k_head_bytes * c->num_kv_heads, v_codes = l.v_head_bytes * c->num_kv_heads;
    l.layer_bytes = kv_layout_align(k_codes + scales);
    if (!c->is_v_in_k) {
        l.v_offset = l.layer_bytes;
        l.layer_bytes += kv_layout_align(v_codes + scales);
    }
    l.block_bytes = l.layer_bytes * c->num_layers;
    if (l.is_quantised) {
        l.k_scales = k_codes;
        l.v_scales = l.v_offset + v_codes;
    }
    return l;
}

#define KV_LAYOUT_VERSION 1 /* raised by every change of the layout: kept caches end with it */
#define KV_LAYOUT_V_IN_K (1u << 16) /* added to it where blocks have no V part */

/* The number that says how a pool's blocks are laid out, wherever they go. */
static inline uint32_t kv_layout_number(const struct backend_pool_config *c)
{
    return KV_LAYOUT_VERSION + (c->is_v_in_k ? KV_LAYOUT_V_IN_K : 0);
}

#endif
