/* prefill_codes_bf16.cu: the tuned prefill kernels of quantised pools for bf16 queries. */
#include "kernels/gpu/sm90/prefill_body.cuh"

namespace prefill
{

kernel_fn codes_kernel_bf16(uint32_t dim, bool has_extras)
{
    return has_extras ? codes_kernel_of<true, true>(dim) : codes_kernel_of<true, false>(dim);
}

} // namespace prefill
