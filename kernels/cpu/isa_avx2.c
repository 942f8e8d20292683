/* isa_avx2.c: AVX2, FMA and F16C. */
#define ISA_NAME "avx2"
#define ISA_SYMBOL cpu_isa_avx2
#include "kernels/cpu/tile.h"
