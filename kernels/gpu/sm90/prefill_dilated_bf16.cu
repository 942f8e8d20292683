/* prefill_dilated_bf16.cu: the tuned prefill kernels of dilated layers for bf16. */
#include "kernels/gpu/sm90/prefill_body.cuh"

namespace prefill
{

kernel_fn dilated_kernel_bf16(uint32_t dim, bool has_extras)
{
    return has_extras ? dilated_kernel_of<true, true>(dim) : dilated_kernel_of<true, false>(dim);
}

} // namespace prefill
