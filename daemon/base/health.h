/* health.h: whether the process lives, is ready, drains: what /healthz, /readyz and systemd's
 * watchdog decide by. The gauges of the same names only show it. Any thread. */
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

/* The calling thread shows life. Each does so at least once a second, also when idle. */
void health_beat(enum health_thread who);
/* The loop and the first engine, and whatever else shows life. */
bool health_is_there(enum health_thread who);
/* It ends, as it should: its silence means nothing from now on. */
void health_end(enum health_thread who);
/* It has shown life once, and none for longer than timeout_ns. *out_silent_ns says for how long. */
bool health_is_stalled(enum health_thread who, uint64_t timeout_ns, uint64_t *out_silent_ns);
const char *health_thread_name(enum health_thread who); /* "event loop" */

/* Serves: all is started and nothing is stopped yet. */
void health_set_ready(bool is_ready);
bool health_is_ready(void);
/* No new sequences are taken any more; steps are. */
void health_set_draining(bool is_draining);
bool health_is_draining(void);

/* The canary has found an output wrong; how many it has. */
void health_found_wrong(void);
uint64_t health_n_wrong(void);

#endif
