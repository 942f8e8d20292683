/* tier_state.h: blocks in host memory and on disk, those of idle sequences, and those being moved
 * (engine/tier); structs only. Engine thread, except for atomic fields. */
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
    MOVER_PROMOTE = 64, /* most that come in together, for a request */
    MOVER_AHEAD = 64, /* blocks that a pool keeps available without waiting for a copy */
    MOVER_SCAN = 4096, /* most of the next evictable blocks to look at */
};
struct mover_group {
    struct backend_moves moves; /* first: done gets this address */
    struct engine *engine;
    void (*came)(struct engine *e, struct mover_group *g);
    struct pool *pool;
    bool is_under_way;
};

struct mover_demote { /* from a pool to host memory */
    struct mover_group group;
    struct backend_move list[MOVER_GROUP];
    struct tier_block *to[MOVER_GROUP];
    uint64_t serial[MOVER_GROUP];
    struct kv_seq_import *reading; /* holds the blocks while they are read */
};
struct mover_spill { /* from host memory to the file */
    struct mover_group group;
    struct backend_move list[MOVER_GROUP];
    struct tier_block *from[MOVER_GROUP], *to[MOVER_GROUP];
};
struct mover_found {
    struct tier_block *host, *disk; /* one of them is NULL */
};
struct mover_promote { /* to a pool, by way of host memory */
    LIST_ENTRY(mover_promote) link;
    struct mover_group group; /* first the blocks from the file, then all */
    struct kv_promote *kv;
    struct task *task; /* waiting for it; NULL: none, or none any more */
    uint32_t n, n_there;
    struct mover_found from[MOVER_PROMOTE];
    struct backend_move list[MOVER_PROMOTE];
};

/* Blocks in tiers (engine/tier/tier.h). */
struct engine_tier {
    struct tier_store *blocks; /* in host memory; NULL: there are no tiers */
    struct tier_store *disk_blocks; /* NULL: none on disk; so is disk */
    struct tier_disk *disk;
    /* as last published in the statistics */
    struct tier_store_stats last_published, last_disk_published;
    /* moved since then; the next line too */
    uint64_t out_bytes, in_bytes, disk_out_bytes, disk_in_bytes;
    uint64_t n_disk_errors, n_waits;

    _Atomic(struct backend_moves *) came; /* moves done, not yet handled */
    _Atomic uint32_t n_notifying; /* threads that are just reporting one */
    struct mover_demote demote;
    struct mover_spill spill;
    LIST_HEAD(, mover_promote) promotions;
    struct mover_found found[MOVER_PROMOTE]; /* for the promotion that begins */
    uint32_t n_found;
    bool has_met; /* it needs a block that another promotion brings */
    struct task_list queue; /* tasks to run again when something has arrived */
    uint32_t **kept; /* [max_pools][n_blocks] low words of the serials that have a copy in a tier */
    struct kv_evictable *next_out; /* [MOVER_SCAN] */
    bool has_changed; /* pools' blocks have changed since the last mover_demote_next */
    uint64_t out_at_ns, disk_at_ns; /* after an error: no demotion before this time */
    uint64_t n_spilled_of; /* blocks.filled when nothing was left to spill */
};

/* Copies that leave summaries of blocks that go (engine/tier/summaries.h): with the next batch of
 * the pool, on their way, done. */
enum summaries_are { SUMMARIES_NONE, SUMMARIES_WAIT, SUMMARIES_SENT, SUMMARIES_MADE };

/* Blocks of idle sequences (engine/tier/idle.h). */
struct engine_idle {
    /* [max_pools] oldest first; NULL: idle sequences don't make way, and the fields below are
     * unused */
    struct seq_list *by_use;
    struct mover_group out, in;
    struct kv_idle_move *out_move, *in_move; /* in progress; NULL: none */
    uint64_t out_for; /* stamp of the request that the blocks going out make way for */
    bool is_out_void; /* an older request needs that sequence: it stays */
    bool is_out_there; /* the bytes going out have come */
    enum summaries_are copies; /* of the blocks going out */
    const struct batch *copies_in; /* SENT: that has them */
    bool has_copy[MOVER_GROUP]; /* [out_move->n] */
    uint64_t n_choices; /* batches whose choices were seen: the clock of pool.chosen_at */
    bool is_registered;
    struct backend_move out_list[MOVER_GROUP], in_list[MOVER_PROMOTE];
    uint64_t out_bytes, in_bytes, n_waits, n_damaged; /* since they were published */
    uint64_t n_chosen_here, n_chosen_away; /* the same */
};

#endif
