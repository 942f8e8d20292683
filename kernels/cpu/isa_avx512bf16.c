/* isa_avx512bf16.c: AVX-512 with bf16 dot products for the scores of bf16 pools. */
#define ISA_NAME "avx512bf16"
#define ISA_SYMBOL cpu_isa_avx512bf16
#include "kernels/cpu/tile.h"
