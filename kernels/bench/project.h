/* project.h: the products and the norm around attention, for what backends measure of a whole
 * layer. Plain kernels: they say what a layer costs here, and compete with no library.
 */
#ifndef ATTND_KERNELS_BENCH_PROJECT_H
#define ATTND_KERNELS_BENCH_PROJECT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PROJECT_EPSILON 1e-5f

/* y = x w^T (+ added); everything in device memory, of dtype (attn_dtype: f32, f16, bf16). */
struct gpu_project {
    const void *x; /* [n][dim] */
    const void *w; /* [dim][dim], a row for each element of y */
    const void *added; /* [n][dim] or NULL */
    void *y; /* [n][dim] */
    uint32_t n, dim; /* dim: a multiple of 64 */
    uint32_t dtype, pad;
};
int gpu_project_launch(const struct gpu_project *a, void *stream);

/* y = (x - mean) / deviation of each row; w and added are not read. */
int gpu_norm_launch(const struct gpu_project *a, void *stream);

#ifdef __cplusplus
}
#endif
#endif
