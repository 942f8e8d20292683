/* attn_time.h: the monotonic clock and the pause instruction for spinning, for all folders. The
 * daemon uses its own clock (daemon/base/clock.h), which tests can replace.
 */
#ifndef ATTN_TIME_H
#define ATTN_TIME_H

#include <stdint.h>
#include <time.h>

/* CLOCK_MONOTONIC in nanoseconds. Any thread. */
static inline uint64_t attn_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* For spin loops: lets the other hardware thread of the core run. */
static inline void attn_cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
