/* clock.c: CLOCK_MONOTONIC, unless a test has put another clock in its place. */
#include "daemon/clock.h"

#include <stddef.h>

#include "proto/attn_time.h"

enum { MIN_TICK_MS = 2, MAX_TICK_MS = 500 };

static uint64_t (*now_ns_in_use)(void) = attn_now_ns;

uint64_t clock_now_ns(void)
{
    return now_ns_in_use();
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
