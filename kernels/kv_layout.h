/* kv_layout.h: where a token's K and V live inside a pool. Pure arithmetic, shared by all backends
 * and by the kernels.
 *
 * A pool is [block][layer] of K part, then V part. A part is [kv_head][block_tokens][head_dim]
 * codes and, if quantised, [kv_head][block_tokens] f32 scales. Parts start at multiples of 128
 * bytes.
 */
#ifndef ATTND_KERNELS_KV_LAYOUT_H
#define ATTND_KERNELS_KV_LAYOUT_H

#include "kernels/backend.h"

struct kv_layout {
    uint64_t block_bytes; /* all layers */
    uint64_t layer_bytes; /* K part and V part of one layer of one block */
    uint64_t v_offset; /* V part within a layer */
    uint64_t k_head_bytes; /* [block_tokens][head_dim_k] */
    uint64_t v_head_bytes; /* [block_tokens][head_dim_v] */
    uint64_t k_scales; /* offset of K's scales within a layer; 0 if not quantised */
    uint64_t v_scales; /* offset of V's scales within a layer; 0 if not quantised */
    bool is_quantised;
};

static inline uint64_t kv_layout_align(uint64_t n)
{
    return (n + 127) & ~(uint64_t)127;
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
    l.v_head_bytes = (uint64_t)c->block_tokens * c->head_dim_v * e;
    uint64_t k_codes = l.k_head_bytes * c->num_kv_heads, v_codes = l.v_head_bytes * c->num_kv_heads;
    l.v_offset = kv_layout_align(k_codes + scales);
    l.layer_bytes = l.v_offset + kv_layout_align(v_codes + scales);
    l.block_bytes = l.layer_bytes * c->num_layers;
    if (l.is_quantised) {
        l.k_scales = k_codes;
        l.v_scales = l.v_offset + v_codes;
    }
    return l;
}

#define KV_LAYOUT_VERSION 1 /* raised by every change of the layout: kept caches end with it */

#endif
