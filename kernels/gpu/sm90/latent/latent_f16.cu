/* latent_f16.cu: the tuned kernels for f16 pools whose V is in K. */
#include "kernels/gpu/sm90/latent/latent_body.cuh"

namespace prefill
{

kernel_fn latent_kernel_f16(bool has_extras)
{
    return latent_kernel_of<false>(has_extras);
}

kernel_fn latent_join_f16()
{
    return (kernel_fn)latent_join<false>;
}

} // namespace prefill
