/* kv_layout.h: where a token's K and V live inside a pool. Pure arithmetic, shared by all backends
 * and by the kernels.
 *
 * A pool is [block][layer] of K part, then V part. A part is [kv_head][block_tokens][head_dim]
 * codes and, if quantised, [kv_head][block_tokens] scales. Parts start at multiples of 128 bytes.
 * Where V is in K there is a K part alone, and V is the beginning of its rows, with their scales.
 *
 * Scales of a row, of fp8_e4m3 and int8: one f32. nvfp4: one f32, then an E4M3 for each 16 values;
 * mxfp4: an E8M0 for each 32; both with zeros up to a multiple of 4 bytes. Their codes are E2M1, of
 * each two values the first in the low half of a byte.
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
    uint32_t k_row_bytes, v_row_bytes; /* codes of a head: from one token's to the next one's */
    uint32_t k_scale_bytes, v_scale_bytes; /* scales of such a row; 0 if not quantised */
    uint64_t k_scales; /* offset of K's scales within a layer; 0 if not quantised */
    uint64_t v_scales; /* offset of V's scales within a layer; 0 if not quantised */
    bool is_quantised;
};

static inline uint64_t kv_layout_align(uint64_t n)
{
    return (n + 127) & ~(uint64_t)127;
}

/* Values of a row that have a scale together; 0: all of them. */
static inline uint32_t kv_group(attn_dtype kv_dtype)
{
    return kv_dtype == ATTN_NVFP4 ? 16 : kv_dtype == ATTN_MXFP4 ? 32 : 0;
}

/* Bytes of a row of n elements, and of its scales if kv_dtype quantises. */
static inline uint32_t kv_row_bytes(attn_dtype kv_dtype, uint32_t n)
{
    return n * (uint32_t)attn_dtype_bits(kv_dtype) / 8;
}

static inline uint32_t kv_scale_bytes(attn_dtype kv_dtype, uint32_t n)
{
    const uint32_t group = kv_group(kv_dtype), row = kv_dtype == ATTN_MXFP4 ? 0 : sizeof(float);
    return row + (group == 0 ? 0 : (n / group + 3) / 4 * 4);
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
    const uint64_t rows = (uint64_t)c->num_kv_heads * c->block_tokens;
    const uint32_t dv = c->is_v_in_k ? c->head_dim_k : c->head_dim_v;
    l.is_quantised = c->kv_dtype != c->q_dtype;
    l.k_row_bytes = kv_row_bytes(c->kv_dtype, c->head_dim_k);
    l.v_row_bytes = kv_row_bytes(c->kv_dtype, dv);
    if (l.is_quantised) {
        l.k_scale_bytes = kv_scale_bytes(c->kv_dtype, c->head_dim_k);
        l.v_scale_bytes = kv_scale_bytes(c->kv_dtype, dv);
    }
    l.k_head_bytes = (uint64_t)c->block_tokens * l.k_row_bytes;
    l.v_head_bytes = (uint64_t)c->block_tokens * l.v_row_bytes;
    uint64_t k_codes = rows * l.k_row_bytes, v_codes = rows * l.v_row_bytes;
    l.layer_bytes = kv_layout_align(k_codes + rows * l.k_scale_bytes);
    if (!c->is_v_in_k) {
        l.v_offset = l.layer_bytes;
        l.layer_bytes += kv_layout_align(v_codes + rows * l.v_scale_bytes);
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
