/* batch_state.h: a batch of items that go to the device together. */
#ifndef ATTND_DAEMON_ENGINE_CORE_BATCH_STATE_H
#define ATTND_DAEMON_ENGINE_CORE_BATCH_STATE_H

#include "daemon/engine/core/pool_state.h"

struct batch {
    struct backend_batch device; /* user points back here */
    struct pool *pool;
    struct backend_item *device_items; /* [max_batch_items] */
    struct item **items; /* [max_batch_items] */
    struct backend_word *signals; /* [1 + max_batch_items] */
    struct backend_patch *patches; /* [patches_capacity + patches_margin] */
    struct backend_copy *copies; /* [copies_capacity] */
    uint32_t n_items, n_tokens, n_tasks;
    /* [BACKEND_MAX_LISTED] of host_alloc; NULL: no item has said its choices yet */
    uint32_t *chosen;
    uint32_t n_chosen; /* of these, taken by its items */
    uint32_t n_listed; /* tokens of its items' lists, and blocks that they choose, at most */
    uint64_t n_visible; /* cached tokens that its items attend to */
    uint64_t submitted_ns;
    uint64_t charged_ns; /* to its tenant; an estimate until the batch is back */
    bool is_again; /* its one item is the canary's, of no step */
    bool is_in_flight;
};

#endif
