/* cpu_rungs_avx512.c: AVX-512 F, BW, DQ and VL. */
#define ISA_NAME "avx512"
#define ISA_SYMBOL cpu_rungs_avx512
#include "kernels/bench/rungs/cpu_rungs_body.h"
