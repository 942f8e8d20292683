/* latent_bf16.cu: the tuned kernels for bf16 pools whose V is in K. */
#include "kernels/gpu/sm90/latent/latent_body.cuh"

namespace prefill
{

kernel_fn latent_kernel_bf16(bool has_extras, bool is_listed)
{
    return latent_kernel_of<true>(has_extras, is_listed);
}

kernel_fn latent_join_bf16(bool is_listed)
{
    return is_listed ? (kernel_fn)latent_join<true, listed_shape>
                     : (kernel_fn)latent_join<true, latent_shape>;
}

} // namespace prefill
