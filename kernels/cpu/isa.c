/* isa.c: which variants this CPU can run. Compiled for the baseline. */
#include "kernels/cpu/isa.h"

#if defined(ATTND_CPU_X86)
#include <cpuid.h>
#endif

uint32_t cpu_isa_supported(const struct cpu_isa *out[4])
{
    uint32_t n = 0;
    out[n++] = &cpu_isa_portable;
#if defined(ATTND_CPU_X86)
    __builtin_cpu_init();
    unsigned eax, ebx, ecx = 0, edx; /* clang 14 has no name for f16c */
    __get_cpuid(1, &eax, &ebx, &ecx, &edx);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (ecx & bit_F16C))
        out[n++] = &cpu_isa_avx2;
    if (n == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        out[n++] = &cpu_isa_avx512;
    if (n == 3 && __builtin_cpu_supports("avx512bf16"))
        out[n++] = &cpu_isa_avx512bf16;
#endif
    return n;
}
