/* cpu_rungs_avx2.c: AVX2, FMA and F16C. */
#define ISA_NAME "avx2"
#define ISA_SYMBOL cpu_rungs_avx2
#include "kernels/bench/rungs/cpu_rungs_body.h"
