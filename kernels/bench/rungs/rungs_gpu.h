/* rungs_gpu.h: the launches of the rungs' kernels, which rungs_gpu.c makes. They return the
 * runtime's code; stream is the runtime's. n is a multiple of 64, dim 64, 128 or 256.
 */
#ifndef ATTND_BENCH_RUNGS_GPU_H
#define ATTND_BENCH_RUNGS_GPU_H

#include "kernels/bench/rungs/rungs.h"

#ifdef __cplusplus
extern "C" {
#endif

int rung_naive_launch(const struct rung_call *c, void *stream);
int rung_vectorised_launch(const struct rung_call *c, void *stream);
int rung_shared_launch(const struct rung_call *c, void *stream); /* dim 64 */
int rung_warp_launch(const struct rung_call *c, void *stream); /* dim 64 */
int rung_matrix_launch(const struct rung_call *c, void *stream);

/* shared_bytes: that a thread block may have on the device. init lets the kernels that fit have
 * theirs; once, on the device. */
int rung_matrix_init(uint32_t shared_bytes);
bool rung_matrix_fits(const struct rung_call *c, uint32_t shared_bytes);
uint64_t rung_matrix_scratch(const struct rung_call *c);

int rung_matmul_launch(const struct rung_matmul *m, void *stream);
int rung_norm_launch(const void *x, void *out, uint32_t rows, uint32_t width, bool is_f32,
                     void *stream);
int rung_gelu_launch(void *x, uint64_t n, bool is_f32, void *stream);

#ifdef __cplusplus
}
#endif
#endif
