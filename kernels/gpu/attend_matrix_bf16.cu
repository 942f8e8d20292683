/* attend_matrix_bf16.cu: the tensor-core kernels for bf16, and the entry points for all types. */
#include "kernels/gpu/attend_matrix.cuh"

int gpu::matrix_init_bf16()
{
    return with_config<true>(nullptr, matrix_allow());
}

int gpu::matrix_launch_bf16(const gpu_attend *a, void *stream, bool chained)
{
    return with_config<true>(a, matrix_run{a, stream, chained});
}

int gpu_attend_matrix_init(uint32_t shared_bytes)
{
    int code = gpu::codes_init();
    code = code ? code : gpu::matrix_init_bf16();
    code = code ? code : gpu::f32_init();
    code = code ? code : gpu::matrix_init_f16();
    if constexpr (gpu::has_rows_kernels) {
        code = code ? code : gpu::rows_init_bf16(shared_bytes);
        code = code ? code : gpu::rows_init_f16(shared_bytes);
    }
    return code;
}

bool gpu_attend_matrix_takes(const struct gpu_kv *kv, uint64_t rows)
{
    return kv->q_dtype != ATTN_F32 || (rows > 16 && gpu::f32_fits(*kv));
}

uint32_t gpu_attend_matrix_blocks(const struct gpu_kv *kv, uint32_t rows, uint32_t shared_bytes)
{
    if constexpr (gpu::has_rows_kernels)
        return gpu::rows_blocks(*kv, rows, shared_bytes);
    return 0;
}

int gpu_attend_matrix_launch(const struct gpu_attend *a, void *stream, int chained)
{
    if (!a->chosen && gpu::codes_fit(a))
        return gpu::codes_launch(a, stream, chained != 0);
    if (a->kv.q_dtype == ATTN_F32)
        return gpu::f32_launch(a, stream, chained != 0);
    if constexpr (gpu::has_rows_kernels)
        if (!a->kv.is_quantised && !a->chosen)
            return a->kv.q_dtype == ATTN_BF16 ? gpu::rows_launch_bf16(a, stream, chained != 0)
                                              : gpu::rows_launch_f16(a, stream, chained != 0);
    if (a->kv.q_dtype == ATTN_BF16)
        return gpu::matrix_launch_bf16(a, stream, chained != 0);
    return gpu::matrix_launch_f16(a, stream, chained != 0);
}
