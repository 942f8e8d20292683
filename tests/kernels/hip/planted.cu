/* planted.cu: a kernel that gate.sh must refuse: an array that is indexed at run time lies in
 * scratch memory.
 */
#include <hip/hip_runtime.h>

extern "C" __global__ void planted(float *p, const int *index, int n)
{
    float x[64];
    for (int i = 0; i < n; ++i)
        x[index[i]] = p[i];
    for (int i = 0; i < n; ++i)
        p[i] = x[index[n + i]];
}
