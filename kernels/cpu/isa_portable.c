/* isa_portable.c: portable C, no intrinsics; the compiler's baseline. */
#define ISA_NAME "portable"
#define ISA_SYMBOL cpu_isa_portable
#include "kernels/cpu/tile.h"
