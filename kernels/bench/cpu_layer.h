/* cpu_layer.h: cpu_layer.c for cpu_bench.c. */
#ifndef ATTND_KERNELS_BENCH_CPU_LAYER_H
#define ATTND_KERNELS_BENCH_CPU_LAYER_H

#include "kernels/backend_bench.h"

struct cpu_layer {
    const struct backend_bench_layer *layer;
    attn_dtype dtype;
    uint32_t n; /* rows of x */
    float *floats;
    uint8_t *sent; /* q, k, v as the pool takes them, each [n][dim] */
    struct backend_item *items; /* the batch's, with q, k, v there */
};

/* false: no memory; close it all the same. */
bool cpu_layer_open(struct cpu_layer *l, attn_dtype dtype, const struct backend_bench_layer *layer,
                    const struct backend_batch *batch);
void cpu_layer_close(struct cpu_layer *l);
attn_status cpu_layer_run(struct backend *b, struct cpu_layer *l, struct backend_batch *batch);

#endif
