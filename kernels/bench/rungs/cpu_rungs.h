/* cpu_rungs.h: the rungs that want vectors, compiled once an instruction set by cpu_rungs_*.c. K
 * comes transposed, [dim][n], so that a vector holds neighbouring keys; all is f32, one head at a
 * time, Q scaled by scale * log2 e.
 *
 * vectorised  three passes over the scores of 16 rows: Q K^T, softmax, P V, each 4 rows by 4
 *             vectors of results in registers
 * fused       one pass by tiles of 64 keys for 64 rows: the scores of a tile stay in the L1 cache,
 *             maximum and sum are carried along, what was summed is scaled when the maximum grows
 */
#ifndef ATTND_BENCH_CPU_RUNGS_H
#define ATTND_BENCH_CPU_RUNGS_H

#include "proto/attn_types.h"

#define CPU_RUNG_ROWS 64 /* of a unit of work */

struct cpu_rung_head {
    const float *q, *kt, *v; /* [n][dim], [dim][n], [n][dim] */
    uint32_t n, dim; /* multiples of 64 */
};

struct cpu_rung_isa {
    const char *name;
    /* CPU_RUNG_ROWS rows from row0 into out, [n][dim]; scores: [16][n] */
    void (*vectorised)(const struct cpu_rung_head *h, uint32_t row0, float *scores, float *out);
    void (*fused)(const struct cpu_rung_head *h, uint32_t row0, float *out);
    /* c (+)= a b: [m][n], [m][k], [k][n]; leading dimensions in floats; m of 4, n of 64 */
    void (*product)(float *c, uint64_t ldc, const float *a, uint64_t lda, const float *b,
                    uint64_t ldb, uint32_t m, uint32_t n, uint32_t k, bool is_added);
};

extern const struct cpu_rung_isa cpu_rungs_portable;
#if defined(ATTND_CPU_X86)
extern const struct cpu_rung_isa cpu_rungs_avx2, cpu_rungs_avx512;
#endif

#endif
