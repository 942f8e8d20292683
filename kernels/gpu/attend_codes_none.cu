/* attend_codes_none.cu: in place of attend_codes.cu, whose operands are laid out for one vendor's
 * matrix instructions, where those are not built: attend_matrix.cuh does its work.
 */
#include "kernels/gpu/attend_matrix.cuh"

int gpu::codes_init()
{
    return 0;
}

bool gpu::codes_fit(const gpu_kv &, uint32_t)
{
    return false;
}

int gpu::codes_launch(const gpu_attend *, void *, bool)
{
    return -1;
}
