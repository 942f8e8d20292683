/* See cuda.h. */
#include "tests/kernels/simt/cuda/cuda.h"
