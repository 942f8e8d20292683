/* attend_matrix_f16.cu: the tensor-core kernels for f16. */
#include "kernels/gpu/attend_matrix.cuh"

int gpu::matrix_init_f16()
{
    return with_config<false>(nullptr, matrix_allow());
}

int gpu::matrix_launch_f16(const gpu_attend *a, void *stream, bool chained)
{
    return with_config<false>(a, matrix_run{a, stream, chained});
}
