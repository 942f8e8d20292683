/* sums.h: checksums of blocks by the device (sums.cu), for gpu_moves.c. */
#ifndef ATTND_GPU_SUMS_H
#define ATTND_GPU_SUMS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GPU_SUM_BLOCKS 64 /* of a launch */

/* A piece of the checksums of n blocks: lanes are XXH3's after from_kib KiB, unless that is 0, and
 * become those n_kib later; at a block's end they are what moves_sum_end takes.
 *
 * Shapes   list [n] blocks; deltas [n][n_kib][8], device; lanes [n][8], host memory */
struct gpu_sums {
    const char *base;
    uint64_t block_bytes; /* a multiple of 128, not below 256 */
    uint64_t *deltas, *lanes;
    uint32_t n, from_kib, n_kib, pad;
    uint64_t begin[8], secret[24]; /* moves_sum_begin */
    uint32_t list[GPU_SUM_BLOCKS];
};
/* The runtime's code. */
int gpu_sums_launch(const struct gpu_sums *a, void *stream);

#ifdef __cplusplus
}
#endif
#endif
