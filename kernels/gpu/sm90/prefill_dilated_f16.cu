/* prefill_dilated_f16.cu: the tuned prefill kernels of dilated layers for f16. */
#include "kernels/gpu/sm90/prefill_body.cuh"

namespace prefill
{

kernel_fn dilated_kernel_f16(uint32_t dim, bool has_extras)
{
    return has_extras ? dilated_kernel_of<false, true>(dim) : dilated_kernel_of<false, false>(dim);
}

} // namespace prefill
