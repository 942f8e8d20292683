/* piece.h: tokens that lie behind one another in a block: where they are, and those of FP4 pools
 * decoded to floats, scales included. A part of tile.h, compiled with its flags.
 */
#ifndef ATTND_KERNELS_CPU_PIECE_H
#define ATTND_KERNELS_CPU_PIECE_H

#include "kernels/cpu/isa.h"
#include "kernels/cpu/vec.h"

/* One piece of a tile. */
struct piece {
    const uint8_t *k, *v; /* codes of its first token; k is NULL if no row sees any */
    const uint8_t *k_scales, *v_scales; /* of its tokens, if quantised */
};

/* The piece of the rows' item whose first token is `token`. */
INLINE struct piece piece_of(const struct attend_rows *r, uint32_t kv_head, uint32_t token)
{
    const struct attend_geometry *g = r->g;
    const struct kv_layout *l = &g->layout;
    uint32_t block = r->item->block_table[token >> g->block_shift];
    uint32_t at = token & (g->block_tokens - 1);
    const size_t row = (size_t)kv_head * g->block_tokens + at;
    const uint8_t *base = r->layer + block * l->block_bytes;
    struct piece p = {
        .k = base + row * l->k_row_bytes,
        .v = base + l->v_offset + row * l->v_row_bytes,
    };
    if (l->is_quantised) {
        p.k_scales = base + l->k_scales + row * l->k_scale_bytes;
        p.v_scales = base + l->v_scales + row * l->v_scale_bytes;
    }
    return p;
}

/* One line, each beside a load: in bursts they find no free miss buffers and are dropped. */
INLINE void prefetch(const uint8_t *p)
{
    __builtin_prefetch(p, 0, 3);
}

/* The floats of a row of n FP4 values. */
INLINE void decode_row(attn_dtype kv_dtype, const uint8_t *codes, const uint8_t *scales, uint32_t n,
                       uint8_t *to)
{
    for (uint32_t d = 0; d < n; d += VEC) {
        const vf x = vf_load_e2m1(codes + d / 2) * vec_group_scale(kv_dtype, scales, d);
        memcpy(to + d * sizeof(float), &x, sizeof x);
    }
}

/* Decodes token j of a piece to row `to` of the scratch's tile. */
static void decode_token(const struct attend_geometry *g, const struct piece *from, uint32_t j,
                         struct attend_scratch *x, uint32_t to)
{
    const struct kv_layout *l = &g->layout;
    decode_row(g->kv_dtype, from->k + (size_t)j * l->k_row_bytes,
               from->k_scales + (size_t)j * l->k_scale_bytes, g->dk,
               x->k + (size_t)to * g->dk * sizeof(float));
    if (l->v_offset != 0)
        decode_row(g->kv_dtype, from->v + (size_t)j * l->v_row_bytes,
                   from->v_scales + (size_t)j * l->v_scale_bytes, g->dv,
                   x->v + (size_t)to * g->dv * sizeof(float));
}

/* Decodes the n tokens of a piece to the scratch's tile, from row `to` on, with keys of 0 behind
 * them up to a multiple of `multiple`; fetches the piece ahead (its k NULL: none). Returns where
 * they are: in the scratch, without scales. */
static struct piece decode_piece(const struct attend_geometry *g, const struct piece *from,
                                 const struct piece *ahead, uint32_t n, uint32_t multiple,
                                 struct attend_scratch *x, uint32_t to)
{
    const struct kv_layout *l = &g->layout;
    for (uint32_t j = 0; j < n; j++) {
        for (uint32_t i = 0; ahead->k != NULL && i < l->k_row_bytes; i += 64)
            prefetch(ahead->k + (size_t)j * l->k_row_bytes + i);
        for (uint32_t i = 0; ahead->k != NULL && l->v_offset != 0 && i < l->v_row_bytes; i += 64)
            prefetch(ahead->v + (size_t)j * l->v_row_bytes + i);
        decode_token(g, from, j, x, to + j);
    }
    const size_t k_row = g->dk * sizeof(float);
    uint8_t *k = x->k + to * k_row;
    memset(k + n * k_row, 0, (multiple - 1 - (n - 1) % multiple) * k_row);
    return (struct piece){.k = k,
                          .v = l->v_offset == 0 ? k : x->v + (size_t)to * g->dv * sizeof(float)};
}

#endif
