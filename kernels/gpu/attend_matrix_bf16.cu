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
    int code = gpu::matrix_init_bf16();
    code = code ? code : gpu::matrix_init_f16();
    if constexpr (gpu::has_fragment_kernels) {
        code = code ? code : gpu::codes_init();
        code = code ? code : gpu::f32_init();
        code = code ? code : gpu::rows_init_bf16(shared_bytes);
        code = code ? code : gpu::rows_init_f16(shared_bytes);
    }
    return code;
}

bool gpu_attend_matrix_takes(const struct gpu_kv *kv, uint64_t rows)
{
    if (kv->q_dtype != ATTN_F32)
        return true;
    if constexpr (gpu::has_fragment_kernels)
        return rows > 16 && gpu::f32_fits(*kv);
    return false;
}

uint32_t gpu_attend_matrix_blocks(const struct gpu_kv *kv, uint32_t rows, uint32_t shared_bytes)
{
    if constexpr (gpu::has_fragment_kernels)
        return gpu::rows_blocks(*kv, rows, shared_bytes);
    return 0;
}

/* Where a pool's items are computed, of so many rows in a thread block. */
enum matrix_family { BY_CODES, BY_F32, BY_ROWS, BY_MATRIX };

static matrix_family family_of(const gpu_kv &kv, uint32_t rows, bool is_sparse)
{
    if constexpr (gpu::has_fragment_kernels) {
        if (!is_sparse && gpu::codes_fit(kv, rows))
            return BY_CODES;
        if (kv.q_dtype == ATTN_F32)
            return BY_F32;
        if (!kv.is_quantised)
            return BY_ROWS;
    }
    return BY_MATRIX;
}

const char *gpu_attend_matrix_name(const struct gpu_kv *kv, uint32_t rows_per_unit, bool is_sparse)
{
    static const char *const names[] = {"attend_codes", "attend_f32", "attend_rows",
                                        "attend_matrix"};
    return names[family_of(*kv, rows_per_unit, is_sparse)];
}

int gpu_attend_matrix_launch(const struct gpu_attend *a, void *stream, int chained)
{
    const bool is_bf16 = a->kv.q_dtype == ATTN_BF16;
    if constexpr (gpu::has_fragment_kernels)
        switch (family_of(a->kv, a->rows_per_unit, a->chosen || a->list_tokens)) {
        case BY_CODES:
            return gpu::codes_launch(a, stream, chained != 0);
        case BY_F32:
            return gpu::f32_launch(a, stream, chained != 0);
        case BY_ROWS:
            return is_bf16 ? gpu::rows_launch_bf16(a, stream, chained != 0)
                           : gpu::rows_launch_f16(a, stream, chained != 0);
        case BY_MATRIX:
            break;
        }
    return is_bf16 ? gpu::matrix_launch_bf16(a, stream, chained != 0)
                   : gpu::matrix_launch_f16(a, stream, chained != 0);
}
