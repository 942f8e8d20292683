/* pool_state.h: an engine's pool, a session's hold of it, and the counts that any thread may read;
 * structs only. */
#ifndef ATTND_DAEMON_ENGINE_CORE_POOL_STATE_H
#define ATTND_DAEMON_ENGINE_CORE_POOL_STATE_H

#include <stdatomic.h>

#include "cache/kv_pool.h"
#include "daemon/engine/core/task.h"
#include "daemon/request/pool_spec.h"
#include "kernels/backend.h"

/* Recent cost of a pool's cached tokens (engine/core/pace.c). */
struct pace_cost {
    double device_ns, n_visible; /* device time, and the cached tokens seen in it */
};

struct pool {
    kv_pool_id id;
    struct pool_spec spec;
    uint32_t tenant; /* owner; may be a tenant that is no longer configured */
    uint32_t n_made; /* blocks at creation; the present number is in spec and config */
    struct backend_pool_config config; /* as clients know it */
    /* Where it is computed: on the engine's device or, if split, on all devices together
     * (peers.h). */
    const struct backend_ops *ops;
    struct backend *backend;
    struct backend_pool *device;
    bool has_words; /* its batches may have signals */
    bool has_trees; /* its steps may be trees, and their paths be committed */
    bool has_lists; /* its steps may be sparse */
    bool has_choice; /* its steps may have choose_blocks */
    bool has_parts; /* its items may have key_base and ahead */
    bool has_summaries; /* its steps may choose blocks that are in idle memory */
    uint64_t device_bytes;
    uint32_t generation; /* number of earlier pools at this index */
    struct ready_queue ready;
    struct kv_effects fx; /* updates that the next batch carries to the device first */
    uint32_t n_holders; /* live sessions that created or found it */
    struct pace_cost cost;
    uint32_t idle_pages; /* of a block in idle memory */
    /* engine/tier/summaries.h */
    bool has_summaries_open; /* memory for them has been taken */
    bool *has_summary; /* [config.n_summaries] NULL before a step chose, as chosen_at */
    uint64_t *chosen_at; /* [config.n_blocks] when a choice last took the block */
};

/* A session's hold of a pool. */
struct hold {
    /* held: the session's highest request that holds it; else the request up to which it released
     * it */
    uint64_t request;
    bool is_held;
};

/* What any thread may read of a pool (published.h). */
struct pool_published {
    _Atomic uint64_t blocks, free, cached, reserved, tiered, sequences, bytes;
    _Atomic bool is_split; /* all its sequences belong to the primary */
};

#endif
