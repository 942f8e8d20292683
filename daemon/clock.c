/* clock.c: CLOCK_MONOTONIC, unless a test has put another clock in its place. */
#include "daemon/clock.h"

#include <stddef.h>

#include "proto/attn_time.h"

static uint64_t (*now_ns_in_use)(void) = attn_now_ns;

uint64_t clock_now_ns(void)
{
    return now_ns_in_use();
}

void clock_use(uint64_t (*now_ns)(void))
{
    now_ns_in_use = now_ns == NULL ? attn_now_ns : now_ns;
}
