/* clock.c: CLOCK_MONOTONIC, unless a test has put another clock in its place. */
#include "daemon/base/clock.h"

#include <stddef.h>

#include "proto/attn_time.h"

static const uint64_t LOOK_NS =
    100 * 1000 * 1000; /* longest wait by the system's clock before clock_now_ns is read again */
enum { MIN_TICK_MS = 2, MAX_TICK_MS = 500 };

static uint64_t (*now_ns_in_use)(void) = attn_now_ns;

uint64_t clock_now_ns(void)
{
    return now_ns_in_use();
}

struct timespec clock_wall(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now;
}

static double seconds(struct timespec t)
{
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

double clock_boot_unix_seconds(void)
{
    struct timespec since;
    clock_gettime(CLOCK_BOOTTIME, &since);
    return seconds(clock_wall()) - seconds(since);
}

bool clock_wait(sem_t *s, uint64_t timeout_ns)
{
    for (uint64_t start_ns = clock_now_ns(), passed_ns;;) {
        passed_ns = clock_now_ns() - start_ns;
        if (passed_ns >= timeout_ns)
            return sem_trywait(s) == 0;
        uint64_t ns = timeout_ns - passed_ns < LOOK_NS ? timeout_ns - passed_ns : LOOK_NS;
        struct timespec until = clock_wall(); /* the clock that sem_timedwait uses */
        ns += (uint64_t)until.tv_nsec;
        until.tv_sec += (time_t)(ns / 1000000000);
        until.tv_nsec = (long)(ns % 1000000000);
        if (sem_timedwait(s, &until) == 0)
            return true;
    }
}

uint64_t clock_tick_ms(uint64_t timeout_us)
{
    uint64_t ms = timeout_us / 4000;
    return ms < MIN_TICK_MS ? MIN_TICK_MS : ms > MAX_TICK_MS ? MAX_TICK_MS : ms;
}

void clock_use(uint64_t (*now_ns)(void))
{
    now_ns_in_use = now_ns == NULL ? attn_now_ns : now_ns;
}
