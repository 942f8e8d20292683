/* trees_f16.cu: the tuned prefill kernels of trees for f16. */
#include "kernels/gpu/sm90/prefill_body.cuh"

namespace prefill
{

kernel_fn trees_kernel_f16(uint32_t dim, uint32_t rows, bool has_extras)
{
    return has_extras ? trees_kernel_of<false, true>(dim, rows)
                      : trees_kernel_of<false, false>(dim, rows);
}

} // namespace prefill
