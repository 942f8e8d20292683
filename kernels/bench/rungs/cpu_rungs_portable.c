/* cpu_rungs_portable.c: the compiler's baseline. */
#define ISA_NAME "portable"
#define ISA_SYMBOL cpu_rungs_portable
#include "kernels/bench/rungs/cpu_rungs_body.h"
