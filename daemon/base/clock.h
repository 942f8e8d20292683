/* clock.h: the daemon's one source of time. Loop, engine, transports, sessions and requests ask
 * clock_now_ns(), so that a test can run all of them on a time of its own.
 */
#ifndef ATTND_DAEMON_BASE_CLOCK_H
#define ATTND_DAEMON_BASE_CLOCK_H

#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

/* CLOCK_MONOTONIC in nanoseconds, or what the clock in use says. Any thread. */
uint64_t clock_now_ns(void);

/* Waits until the semaphore is posted, at most timeout_ns by clock_now_ns. false: it was not. */
bool clock_wait(sem_t *s, uint64_t timeout_ns);

/* What o'clock it is, for people to read: since 1970, CLOCK_REALTIME; nothing is decided by it. */
struct timespec clock_wall(void);

/* When the machine was started, in seconds since 1970. */
double clock_boot_unix_seconds(void);

/* How often to look at deadlines of timeout_us, in milliseconds: the loop's timers only say when to
 * look, what has passed is asked of clock_now_ns. A quarter of the time, 2 ms to 500 ms. */
uint64_t clock_tick_ms(uint64_t timeout_us);

/* Tests: now_ns is asked from now on; NULL: CLOCK_MONOTONIC again. To be called while no thread of
 * the daemon's runs. */
void clock_use(uint64_t (*now_ns)(void));

#endif
