/* prefill_kernels.h: where prefill_launch.cu finds the kernel for a geometry. One file a dtype
 * instantiates them, so that they compile side by side.
 */
#ifndef ATTND_GPU_PREFILL_KERNELS_H
#define ATTND_GPU_PREFILL_KERNELS_H

#include <cuda.h>

#include "kernels/gpu/sm90/prefill_params.h"

namespace prefill
{

struct prefill_maps {
    CUtensorMap k, v;
};

/* void (*)(prefill_params, prefill_words, prefill_maps) */
typedef const void *kernel_fn;

/* dim: 64, 128, 192 or 256; rows: as prefill_call has them. */
kernel_fn kernel_bf16(uint32_t dim, uint32_t rows, bool has_extras);
kernel_fn kernel_f16(uint32_t dim, uint32_t rows, bool has_extras);

/* The same for quantised K and V. dim: 64 or 128. */
kernel_fn codes_kernel_bf16(uint32_t dim, bool has_extras);
kernel_fn codes_kernel_f16(uint32_t dim, bool has_extras);

/* The same for dilated layers. dim: 64 or 128. */
kernel_fn dilated_kernel_bf16(uint32_t dim, bool has_extras);
kernel_fn dilated_kernel_f16(uint32_t dim, bool has_extras);

/* The same for trees. dim: 64 or 128. */
kernel_fn trees_kernel_bf16(uint32_t dim, uint32_t rows, bool has_extras);
kernel_fn trees_kernel_f16(uint32_t dim, uint32_t rows, bool has_extras);

/* The same of pools whose V is in K, trees too, which need the map of K alone, and what joins the
 * parts of their units: a block for each unit and LATENT_JOIN_ROWS of its rows. */
kernel_fn latent_kernel_bf16(bool has_extras, bool is_listed);
kernel_fn latent_kernel_f16(bool has_extras, bool is_listed);
kernel_fn latent_join_bf16(bool is_listed);
kernel_fn latent_join_f16(bool is_listed);

} // namespace prefill
#endif
