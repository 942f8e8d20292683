/* prefill_codes_f16.cu: the tuned prefill kernels of quantised pools for f16 queries. */
#include "kernels/gpu/sm90/prefill_body.cuh"

namespace prefill
{

kernel_fn codes_kernel_f16(uint32_t dim, bool has_extras)
{
    return has_extras ? codes_kernel_of<false, true>(dim) : codes_kernel_of<false, false>(dim);
}

} // namespace prefill
