/* pool_state.h: a pool as the engine has it, a session's hold of it, and what of it any thread may
 * read; structs only. */
#ifndef ATTND_DAEMON_ENGINE_CORE_POOL_STATE_H
#define ATTND_DAEMON_ENGINE_CORE_POOL_STATE_H

#include <stdatomic.h>

#include "cache/kv_pool.h"
#include "daemon/engine/core/task.h"
#include "daemon/request/pool_spec.h"
#include "kernels/backend.h"

/* What a pool's cached tokens have lately cost (engine/core/pace.c). */
struct pace_cost {
    double device_ns, n_visible; /* device time, and the cached tokens that it was for */
};

struct pool {
    kv_pool_id id;
    struct pool_spec spec;
    uint32_t tenant; /* owner; may be a tenant that is no longer configured */
    uint32_t n_made; /* blocks that it was made with; what it has is in spec and config */
    struct backend_pool_config config; /* as clients know it */
    /* What computes it: the engine's device, or of a split pool all devices together (peers.h). */
    const struct backend_ops *ops;
    struct backend *backend;
    struct backend_pool *device;
    bool has_words; /* its batches may have signals */
    uint64_t device_bytes;
    uint32_t generation; /* pools that this one's index was before */
    struct ready_queue ready;
    struct kv_effects fx; /* updates that the next batch carries to the device first */
    uint32_t n_holders; /* sessions that made or found it and live */
    struct pace_cost cost;
};

/* A session's hold of a pool. */
struct hold {
    /* the session's highest that holds it; else, up to which it has released them */
    uint64_t request;
    bool is_held;
};

/* What of a pool any thread may read (published.h). */
struct pool_published {
    _Atomic uint64_t blocks, free, cached, tiered, sequences, bytes;
    _Atomic bool is_split; /* its sequences are the primary's */
};

#endif
