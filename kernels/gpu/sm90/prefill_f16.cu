/* prefill_f16.cu: the tuned prefill kernels for f16. */
#include "kernels/gpu/sm90/prefill_body.cuh"

namespace prefill
{

kernel_fn kernel_f16(uint32_t dim, uint32_t rows, bool has_extras)
{
    return has_extras ? kernel_of<false, true>(dim, rows) : kernel_of<false, false>(dim, rows);
}

} // namespace prefill
