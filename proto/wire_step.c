/* wire_step.c: computes where a step's tensors are in its request and reply. */
#include "proto/wire.h"

#include <stdio.h>

/* Places a tensor of rows x heads x dim elements at the next multiple of WIRE_ALIGN past *end,
 * which is below 2^32. false: the payload would pass 32 bits. */
static bool place(uint64_t rows, uint64_t heads, uint64_t dim, uint64_t element_bytes,
                  uint64_t *end, uint64_t *out_offset)
{
    uint64_t bytes;
    uint64_t offset = (*end + (WIRE_ALIGN - 1)) & ~(uint64_t)(WIRE_ALIGN - 1);
    if (__builtin_mul_overflow(rows, heads, &bytes) || __builtin_mul_overflow(bytes, dim, &bytes) ||
        __builtin_mul_overflow(bytes, element_bytes, &bytes) ||
        __builtin_add_overflow(bytes, offset, &bytes) || bytes > UINT32_MAX)
        return false;
    *out_offset = offset;
    *end = bytes;
    return true;
}

static attn_status step_tokens(const Attnd__Step *s, uint64_t *out_tokens, char *why,
                               size_t why_bytes)
{
    uint64_t n = 0;
    if (s->n_n_tokens == 0) {
        snprintf(why, why_bytes, "step has no items");
        return ATTN_EINVAL;
    }
    for (size_t i = 0; i < s->n_n_tokens; i++) {
        if (s->n_tokens[i] == 0) {
            snprintf(why, why_bytes, "step.n_tokens[%zu] is 0", i);
            return ATTN_EINVAL;
        }
        if (s->n_tokens[i] > UINT32_MAX - s->pos[i]) {
            snprintf(why, why_bytes, "step.pos[%zu] %u and step.n_tokens[%zu] %u pass 32 bits", i,
                     s->pos[i], i, s->n_tokens[i]);
            return ATTN_EINVAL;
        }
        n += s->n_tokens[i];
    }
    *out_tokens = n;
    return ATTN_OK;
}

attn_status wire_step_layout_of(const Attnd__Step *s, const struct wire_shape *shape,
                                struct wire_step_layout *out, char *why, size_t why_bytes)
{
    const uint32_t num_q_heads = shape->num_q_heads, num_kv_heads = shape->num_kv_heads;
    const attn_dtype dtype = shape->q_dtype;
    const uint32_t known = WIRE_STEP_APPEND | WIRE_STEP_ATTEND | WIRE_STEP_LSE | WIRE_STEP_TREE |
                           WIRE_STEP_FULL | WIRE_STEP_SPARSE | WIRE_STEP_CHOOSE | WIRE_STEP_PART;
    bool is_append = s->flags & WIRE_STEP_APPEND, is_attend = s->flags & WIRE_STEP_ATTEND;
    uint64_t element_bytes = attn_dtype_bytes(dtype);
    struct wire_step_layout l = {0};

    if ((!is_append && !is_attend) || (s->flags & ~known)) {
        snprintf(why, why_bytes,
                 "step.flags is 0x%x, it must be append 1, attend 2 or both; lse is 4, tree 8, "
                 "full 16, sparse 32, choose 64, part 128",
                 s->flags);
        return ATTN_EINVAL;
    }
    if ((s->flags & WIRE_STEP_LSE) && !is_attend) {
        snprintf(why, why_bytes, "step.flags is 0x%x, lse 4 needs attend 2", s->flags);
        return ATTN_EINVAL;
    }
    if ((s->flags & WIRE_STEP_TREE) && (!is_append || !is_attend)) {
        snprintf(why, why_bytes, "step.flags is 0x%x, tree 8 needs append 1 and attend 2",
                 s->flags);
        return ATTN_EINVAL;
    }
    if ((s->flags & WIRE_STEP_FULL) && (is_append || !is_attend)) {
        snprintf(why, why_bytes, "step.flags is 0x%x, full 16 needs attend 2 without append 1",
                 s->flags);
        return ATTN_EINVAL;
    }
    if ((s->flags & WIRE_STEP_SPARSE) && (!is_attend || (s->flags & WIRE_STEP_TREE))) {
        snprintf(why, why_bytes, "step.flags is 0x%x, sparse 32 needs attend 2 without tree 8",
                 s->flags);
        return ATTN_EINVAL;
    }
    if ((s->flags & WIRE_STEP_CHOOSE) &&
        (!is_attend || (s->flags & (WIRE_STEP_TREE | WIRE_STEP_SPARSE)))) {
        snprintf(why, why_bytes,
                 "step.flags is 0x%x, choose 64 needs attend 2 without tree 8 and sparse 32",
                 s->flags);
        return ATTN_EINVAL;
    }
    if ((s->flags & WIRE_STEP_CHOOSE) && (s->flags & WIRE_STEP_PART)) {
        snprintf(why, why_bytes,
                 "step.flags is 0x%x, choose 64 is not of parts 128: blocks are chosen of a whole "
                 "sequence",
                 s->flags);
        return ATTN_EINVAL;
    }
    if (element_bytes == 0 || (attn_dtype)s->dtype != dtype) {
        snprintf(why, why_bytes, "step.dtype is %s (%d), the pool's q_dtype is %s",
                 attn_dtype_name((attn_dtype)s->dtype), (int)s->dtype, attn_dtype_name(dtype));
        return ATTN_EINVAL;
    }
    attn_status st = step_tokens(s, &l.n_tokens, why, why_bytes);
    if (st != ATTN_OK)
        return st;

    bool fits = true;
    if (is_attend)
        fits = place(l.n_tokens, num_q_heads, wire_q_dim(shape), element_bytes, &l.request_bytes,
                     &l.q_offset) &&
               place(l.n_tokens, num_q_heads, wire_out_dim(shape), element_bytes, &l.reply_bytes,
                     &l.out_offset);
    if (fits && (s->flags & WIRE_STEP_LSE))
        fits = place(l.n_tokens, num_q_heads, 1, sizeof(float), &l.reply_bytes, &l.lse_offset);
    if (fits && is_append)
        fits = place(l.n_tokens, num_kv_heads, shape->head_dim_k, element_bytes, &l.request_bytes,
                     &l.k_offset);
    if (fits && is_append && !shape->is_v_in_k)
        fits = place(l.n_tokens, num_kv_heads, shape->head_dim_v, element_bytes, &l.request_bytes,
                     &l.v_offset);
    if (fits && (s->flags & WIRE_STEP_SPARSE))
        fits = place(l.n_tokens, s->n_indices, 1, sizeof(int32_t), &l.request_bytes,
                     &l.indices_offset);
    if (!fits) {
        snprintf(why, why_bytes, "step of %llu tokens makes a payload past 32 bits",
                 (unsigned long long)l.n_tokens);
        return ATTN_EINVAL;
    }
    *out = l;
    return ATTN_OK;
}
