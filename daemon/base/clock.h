/* clock.h: the daemon's one source of time. Loop, engine, transports, sessions and requests call
 * clock_now_ns(), so that a test can run all of them on a simulated clock.
 */
#ifndef ATTND_DAEMON_BASE_CLOCK_H
#define ATTND_DAEMON_BASE_CLOCK_H

#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

/* Nanoseconds of CLOCK_MONOTONIC, or of the clock that a test has set. Any thread. */
uint64_t clock_now_ns(void);

/* Waits until the semaphore is posted, for at most timeout_ns of clock_now_ns. false: it timed
 * out. */
bool clock_wait(sem_t *s, uint64_t timeout_ns);

/* CLOCK_REALTIME (since 1970), for people to read, and for numbers to begin at
 * that were not there before: no decision depends on it. */
struct timespec clock_wall(void);

/* When the machine was started, in seconds since 1970. */
double clock_boot_unix_seconds(void);

/* Period in milliseconds of a loop timer that checks deadlines of timeout_us: a quarter of it, 2 to
 * 500 ms. The timer only says when to check; clock_now_ns says whether a deadline has passed. */
uint64_t clock_tick_ms(uint64_t timeout_us);

/* For tests: makes now_ns the clock; NULL: CLOCK_MONOTONIC again. Call it while no thread of the
 * daemon runs. */
void clock_use(uint64_t (*now_ns)(void));

#endif
