/* health.h: whether the process is alive, ready or draining: the state behind /healthz, /readyz and
 * systemd's watchdog. The gauges of the same names only show it. Any thread. */
#ifndef ATTND_DAEMON_BASE_HEALTH_H
#define ATTND_DAEMON_BASE_HEALTH_H

#include "proto/attn_types.h"

/* HEALTH_ENGINE + i is the engine of card i. */
enum health_thread {
    HEALTH_ENGINE,
    HEALTH_LAST_ENGINE = HEALTH_ENGINE + 7,
    HEALTH_LOOP,
    HEALTH_N_THREADS
};

/* Heartbeat of the calling thread: at least once a second, also when it is idle. */
void health_beat(enum health_thread who);
/* Whether the thread exists: always for the loop and the first engine; for another engine from its
 * first beat to health_end. */
bool health_is_there(enum health_thread who);
/* The thread ends normally: its silence is no stall from now on. */
void health_end(enum health_thread who);
/* Whether the thread has beaten before and has then been silent for more than timeout_ns. true:
 * *out_silent_ns says for how long. */
bool health_is_stalled(enum health_thread who, uint64_t timeout_ns, uint64_t *out_silent_ns);
const char *health_thread_name(enum health_thread who); /* "event loop" */

/* Ready: everything is started and nothing is stopping. */
void health_set_ready(bool is_ready);
bool health_is_ready(void);
/* Draining: new sequences are refused, steps are still served. */
void health_set_draining(bool is_draining);
bool health_is_draining(void);

/* Whether the settings that were read last, at the start or on SIGHUP, are good; else others are in
 * use. */
void health_set_settings_good(bool is_good);
bool health_settings_are_good(void);

/* Counts an output that the canary found wrong; how many there were. */
void health_found_wrong(void);
uint64_t health_n_wrong(void);

#endif
