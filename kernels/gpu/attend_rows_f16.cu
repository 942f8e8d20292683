/* attend_rows_f16.cu: attend_rows.cuh for f16. */
#include "kernels/gpu/attend_rows.cuh"

int gpu::rows_init_f16(uint32_t shared_bytes)
{
    const int code = rows_with_form<false, false>(0, 0, false, shared_bytes, rows_allow());
    return code ? code : rows_with_form<false, true>(0, 0, false, shared_bytes, rows_allow());
}

int gpu::rows_launch_f16(const gpu_attend *a, void *stream, bool chained)
{
    if (a->chosen || a->list_tokens)
        return rows_with_form<false, true>(max(a->kv.dk, a->kv.dv), a->rows_per_unit, false,
                                           a->shared_bytes, rows_run{a, stream, chained});
    return rows_with_form<false, false>(max(a->kv.dk, a->kv.dv), a->rows_per_unit, a->is_dilated,
                                        a->shared_bytes, rows_run{a, stream, chained});
}
