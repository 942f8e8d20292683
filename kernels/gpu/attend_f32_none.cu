/* attend_f32_none.cu: in place of attend_f32.cu, whose operands are laid out for one vendor's
 * matrix instructions, where those are not built: attend_vector.cu does its work.
 */
#include "kernels/gpu/attend_matrix.cuh"

int gpu::f32_init()
{
    return 0;
}

bool gpu::f32_fits(const gpu_kv &)
{
    return false;
}

int gpu::f32_launch(const gpu_attend *, void *, bool)
{
    return -1;
}
