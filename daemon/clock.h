/* clock.h: the daemon's one source of time. Loop, engine, transports, sessions and requests ask clock_now_ns(), so
 * that a test can run all of them on a time of its own.
 */
#ifndef ATTND_DAEMON_CLOCK_H
#define ATTND_DAEMON_CLOCK_H

#include <stdint.h>

/* CLOCK_MONOTONIC in nanoseconds, or what the clock in use says. Any thread. */
uint64_t clock_now_ns(void);

/* Tests: now_ns is asked from now on; NULL: CLOCK_MONOTONIC again. To be called while no thread of the daemon's runs. */
void clock_use(uint64_t (*now_ns)(void));

#endif
