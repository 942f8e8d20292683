/* prefill_bf16.cu: the tuned prefill kernels for bf16. */
#include "kernels/gpu/sm90/prefill_body.cuh"

namespace prefill
{

kernel_fn kernel_bf16(uint32_t dim, uint32_t rows, bool has_extras)
{
    return has_extras ? kernel_of<true, true>(dim, rows) : kernel_of<true, false>(dim, rows);
}

} // namespace prefill
