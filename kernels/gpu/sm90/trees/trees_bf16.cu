/* trees_bf16.cu: the tuned prefill kernels of trees for bf16. */
#include "kernels/gpu/sm90/prefill_body.cuh"

namespace prefill
{

kernel_fn trees_kernel_bf16(uint32_t dim, uint32_t rows, bool has_extras)
{
    return has_extras ? trees_kernel_of<true, true>(dim, rows)
                      : trees_kernel_of<true, false>(dim, rows);
}

} // namespace prefill
