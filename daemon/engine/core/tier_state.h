/* tier_state.h: blocks in host memory and on disk, those of idle sequences, and those on their way
 * (engine/tier); structs only, of the engine's thread but for what is atomic. */
#ifndef ATTND_DAEMON_ENGINE_CORE_TIER_STATE_H
#define ATTND_DAEMON_ENGINE_CORE_TIER_STATE_H

#include <stdatomic.h>
#include <sys/queue.h>

#include "cache/kv_idle.h"
#include "cache/tier_store.h"
#include "daemon/engine/core/pool_state.h"

struct kv_promote;
struct kv_seq_import;
struct kv_evictable;
struct tier_disk;

/* Blocks that are moved together (engine/tier/mover.c). */
enum {
    MOVER_GROUP = 32, /* most that go out together */
    MOVER_PROMOTE = 64, /* most that come for a request at a time */
    MOVER_AHEAD = 64, /* blocks of a pool to keep available without waiting for a copy */
    MOVER_SCAN = 4096, /* of those that are evicted next, looked at */
};
struct mover_group {
    struct backend_moves moves; /* first: what done is given */
    struct engine *engine;
    void (*came)(struct engine *e, struct mover_group *g);
    struct pool *pool;
    bool is_under_way;
};

struct mover_demote { /* of a pool to host memory */
    struct mover_group group;
    struct backend_move list[MOVER_GROUP];
    struct tier_block *to[MOVER_GROUP];
    uint64_t serial[MOVER_GROUP];
    struct kv_seq_import *reading; /* held, while their bytes are read */
};
struct mover_spill { /* of host memory to the file */
    struct mover_group group;
    struct backend_move list[MOVER_GROUP];
    struct tier_block *from[MOVER_GROUP], *to[MOVER_GROUP];
};
struct mover_found {
    struct tier_block *host, *disk; /* one of them is NULL */
};
struct mover_promote { /* to a pool, by way of host memory */
    LIST_ENTRY(mover_promote) link;
    struct mover_group group; /* of what comes from the file, then of all */
    struct kv_promote *kv;
    struct task *task; /* that waits; NULL: none any more */
    uint32_t n, n_there;
    struct mover_found from[MOVER_PROMOTE];
    struct backend_move list[MOVER_PROMOTE];
};

/* Blocks in tiers (engine/tier/tier.h). */
struct engine_tier {
    struct tier_store *blocks; /* in host memory; NULL: there are no tiers */
    struct tier_store *disk_blocks; /* NULL: none on disk, as the next */
    struct tier_disk *disk;
    struct tier_store_stats last_published, last_disk_published; /* as the stats have it */
    uint64_t out_bytes, in_bytes, disk_out_bytes, disk_in_bytes; /* moved since, as the next */
    uint64_t n_disk_errors, n_waits;

    _Atomic(struct backend_moves *) came; /* done, not looked at */
    _Atomic uint32_t n_notifying; /* threads that say so just now */
    struct mover_demote demote;
    struct mover_spill spill;
    LIST_HEAD(, mover_promote) promotions;
    struct mover_found found[MOVER_PROMOTE]; /* of the promotion that begins */
    uint32_t n_found;
    bool has_met; /* it came upon what another promotion brings */
    struct task_list queue; /* to be run again when something has come */
    uint32_t **kept; /* [max_pools][n_blocks] low words of the serials that have a copy in a tier */
    struct kv_evictable *next_out; /* [MOVER_SCAN] */
    bool has_changed; /* pools' blocks have changed since the last mover_demote_next */
    uint64_t out_at_ns, disk_at_ns; /* after an error: no demotion before this time */
    uint64_t n_spilled_of; /* blocks.filled when nothing was left to spill */
};

/* Blocks of idle sequences (engine/tier/idle.h). */
struct engine_idle {
    struct seq_list *by_use; /* [max_pools] oldest first; NULL: none make way, as all below */
    struct mover_group out, in;
    struct kv_idle_move *out_move, *in_move; /* under way; NULL: nothing is */
    uint64_t out_for; /* stamp of the request that what goes makes way for */
    bool is_out_void; /* an older one asks for its sequence: it stays */
    bool is_registered;
    struct backend_move out_list[MOVER_GROUP], in_list[MOVER_PROMOTE];
    uint64_t out_bytes, in_bytes, n_waits, n_damaged; /* since they were published */
};

#endif
