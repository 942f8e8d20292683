/* attend_rows_bf16.cu: attention of more than 16 rows for bf16, and which
 * forms a card has. */
#include "kernels/gpu/attend_rows.cuh"

int gpu::rows_init_bf16(uint32_t shared_bytes)
{
    return rows_with_form<true>(0, 0, shared_bytes, rows_allow());
}

int gpu::rows_launch_bf16(const gpu_attend *a, void *stream, bool chained)
{
    return rows_with_form<true>(max(a->kv.dk, a->kv.dv), a->rows_per_unit, a->shared_bytes,
                                rows_run{a, stream, chained});
}

bool gpu::rows_fit(const gpu_kv &kv, uint32_t rows, uint32_t shared_bytes)
{
    return !kv.is_quantised && kv.q_dtype != ATTN_F32 &&
           rows_with_form<true>(max(kv.dk, kv.dv), rows, shared_bytes, rows_exists()) == 0;
}
