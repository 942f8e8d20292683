/* turn_state.h: requests that wait for the engine's thread (turns.h); structs only. */
#ifndef ATTND_DAEMON_ENGINE_CORE_TURN_STATE_H
#define ATTND_DAEMON_ENGINE_CORE_TURN_STATE_H

#include <sys/queue.h>

#include "daemon/request/request.h"

enum turn_line {
    TURN_ENGINE, /* for the engine's thread */
    TURN_MEMORY, /* for memory that is being cleared: pools made or resized */
    TURN_N_LINES
};

TAILQ_HEAD(turn_list, request);

/* What one tenant's requests wait in. */
struct turn_queue {
    struct turn_list lines[TURN_N_LINES];
    struct flow memory; /* bytes cleared for it; the flow of the thread's time is the tenant's */
    /* time on the thread of its requests, less that of its batches, since both have waited */
    int64_t ahead_ns;
};

struct turns {
    struct turn_queue of[TENANT_MAX + 1]; /* the last: of requests that are no tenant's */
    struct flow nobody; /* flow of the last */
    uint32_t n, n_memory; /* waiting; of these for memory */
    uint64_t memory_clock;
    uint64_t memory_at_ns; /* when the memory was last asked for */
    struct request *clearing; /* whose memory is being cleared; NULL: nobody's */
    uint64_t clear_bytes; /* 0: the handler that ran last need not wait for its memory */
    bool may_clear; /* it runs because it is its turn in the line for memory */
    uint64_t over_ns; /* the turn in work ends then */
    uint64_t spent_ns; /* by requests in this turn of the engine */
    bool is_serving; /* what runs has its turn */
};

#endif
