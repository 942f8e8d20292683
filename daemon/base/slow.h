/* slow.h: the latest steps that took longer than stats.slow_step, with their stages. Any thread. */
#ifndef ATTND_DAEMON_BASE_SLOW_H
#define ATTND_DAEMON_BASE_SLOW_H

#include "daemon/base/stages.h"
#include "proto/attn_types.h"

enum { SLOW_MAX = 128, SLOW_WHO_BYTES = 48 };

struct slow_step {
    uint64_t number; /* counts all slow steps, from 1 */
    uint64_t unix_ns; /* when its reply was written */
    uint64_t request_id, session;
    uint64_t stage_ns[STAGE_N];
    uint32_t pool, layer, n_items, n_tokens;
    attn_status status;
    const char *transport; /* "ipc"; static */
    char who[SLOW_WHO_BYTES]; /* the peer's principal as text */
};

/* Sets how long a step must take to be slow; 0: none is. */
void slow_set_threshold_ns(uint64_t ns);
/* Whether a step that took total_ns is slow. */
bool slow_is(uint64_t total_ns);
/* Keeps a copy of the step and numbers it. */
void slow_add(const struct slow_step *s);
/* Copies the latest slow steps, oldest first; returns how many. */
uint32_t slow_read(struct slow_step out[SLOW_MAX]);

#endif
