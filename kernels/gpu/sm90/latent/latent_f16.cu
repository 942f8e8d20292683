/* latent_f16.cu: the tuned kernels for f16 pools whose V is in K. */
#include "kernels/gpu/sm90/latent/latent_body.cuh"

namespace prefill
{

kernel_fn latent_kernel_f16(bool has_extras, bool is_listed)
{
    return latent_kernel_of<false>(has_extras, is_listed);
}

kernel_fn latent_join_f16(bool is_listed)
{
    return is_listed ? (kernel_fn)latent_join<false, listed_shape>
                     : (kernel_fn)latent_join<false, latent_shape>;
}

} // namespace prefill
