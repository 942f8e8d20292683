/* decode_f16.cu: the tuned decode kernels for f16. */
#include "kernels/gpu/sm90/decode_kernels.cuh"

namespace decode
{

kernel_fn kernel_f16(decode_kernel kernel, uint32_t head_dim, uint32_t rows, bool has_extras,
                     decode_start start)
{
    return has_extras ? kernel_of<false, true>(kernel, head_dim, rows, start)
                      : kernel_of<false, false>(kernel, head_dim, rows, start);
}

} // namespace decode
