/* attend_rows_bf16.cu: attend_rows.cuh for bf16, and which forms a card has. */
#include "kernels/gpu/attend_rows.cuh"

int gpu::rows_init_bf16(uint32_t shared_bytes)
{
    const int code = rows_with_form<true, false>(0, 0, false, shared_bytes, rows_allow());
    return code ? code : rows_with_form<true, true>(0, 0, false, shared_bytes, rows_allow());
}

int gpu::rows_launch_bf16(const gpu_attend *a, void *stream, bool chained)
{
    if (a->chosen || a->list_tokens)
        return rows_with_form<true, true>(max(a->kv.dk, a->kv.dv), a->rows_per_unit, false,
                                          a->shared_bytes, rows_run{a, stream, chained});
    return rows_with_form<true, false>(max(a->kv.dk, a->kv.dv), a->rows_per_unit, a->is_dilated,
                                       a->shared_bytes, rows_run{a, stream, chained});
}

uint32_t gpu::rows_blocks(const gpu_kv &kv, uint32_t rows, uint32_t shared_bytes)
{
    if (kv.is_quantised || kv.q_dtype == ATTN_F32)
        return 0;
    const int n = rows_with_form<true, false>(max(kv.dk, kv.dv), rows, false, shared_bytes,
                                              rows_at_once{shared_bytes});
    return n > 0 ? (uint32_t)n : 0;
}
