/* kv.h: metadata of the paged KV cache: which blocks hold which tokens of which sequence. This
 * header is what every user needs; the others add one subject each:
 *
 *   kv_pool.h   pools: create, resize, drop       kv_owner.h  sessions and repeated requests
 *   kv_seq.h    sequences: open, fork, truncate   kv_tier.h   evicted blocks, kept elsewhere
 *   kv_append.h appends, trees, early commits, windows   kv_move.h   sequences from and to other
 *   caches, and where they went
 *   kv_idle.h   idle sequences in host memory     tier_store.h a store for kv_tier.h
 *
 * The cache knows block ids, lengths and names. It knows no device, no bytes of K or V, no socket
 * and no clock. All state lives in one arena, a memfd of fixed-size tables with indices instead of
 * pointers, so that a successor process can map it and an inspector can read it.
 *
 * Truth     owners, their reservations, pool records, sequence records, block tables and their
 *           holes, per-layer lengths, token ids, notes, published blocks, the copy journal, early
 *           commits, where sequences went.
 * Derived   reference counts, what owners are charged for, free lists, the order of eviction, the
 *           indexes of names and of published blocks, owners' lists. kv_recover rebuilds them,
 *           kv_check proves them equal.
 *           Writes are ordered so that a kill at any instruction leaves a truth that kv_recover
 *           accepts, with every committed length intact.
 * Thread    All functions are the engine thread's, except kv_stats_read: any thread. None blocks.
 * Owner     Strings, ids and tables that a function returns are in the arena, borrowed; each says
 *           how long they stay. Arguments are copied.
 * Cost      Every operation is O(1) per block it touches, whatever the number of sequences.
 * Errors    A failed operation changes nothing; kv_last_error has the sentence that names field and
 *           value. An index that names no open sequence or pool is ATTN_ENOTFOUND.
 */
#ifndef ATTND_CACHE_KV_H
#define ATTND_CACHE_KV_H

#include "proto/attn_types.h"

typedef struct kv_pool_id {
    uint32_t index;
} kv_pool_id;
typedef struct kv_seq_id {
    uint32_t index; /* also the sequence's row in the block table */
} kv_seq_id;

struct kv_config {
    uint32_t max_pools;
    uint32_t max_blocks; /* of all pools together */
    uint32_t max_sequences; /* open at once, all pools together */
    uint32_t max_seq_blocks; /* entries in a row of the block table */
    uint32_t max_layers; /* of any pool */
    uint32_t max_seq_tokens; /* tokens of a sequence whose ids are stored */
    uint32_t max_block_tokens; /* of any pool */
    uint32_t max_owners; /* sessions */
    uint32_t block_layout; /* the caller's version of the block format; an arena made with another
                              one is refused */
    /* Most pages of 4 KiB for what tables take beyond kv_fixed_bytes; 0: no bound. Not compared: */
    uint32_t table_pages;
    /* Idle memory (kv_idle.h). Not recorded in the arena: */
    uint32_t idle_pages; /* its size, below 2^31; 0: no idle memory */
    uint32_t idle_is_new; /* 1: the memory is new and empty: sequences of an existing arena that
                             have blocks there are dropped */
    /* Events (kv_tier.h). Not compared either: */
    uint64_t events_kept; /* the latest so many; 0: none */
    uint64_t events_from; /* below 2^54: numbers of events are above it; such as a time */
};

/* What the device must do before a launch reads the block table: write these entries, copy these
 * whole blocks. The caller owns the arrays and sets the capacities; functions append at n_patches
 * and n_copies. If there is no room they change nothing and return ATTN_EOVERLOAD. Of two patches
 * of one entry the later one holds. */
struct kv_patch {
    uint32_t row, index, block;
};
struct kv_copy {
    uint32_t src, dst;
};
struct kv_effects {
    struct kv_patch *patches;
    struct kv_copy *copies;
    uint32_t n_patches, n_copies, patches_capacity, copies_capacity;
};

/* Gauges, then counters. Blocks are those of all pools: total = free + used + cached; a shared
 * block counts once. */
#define KV_STATS_MAP(X)                                                                            \
    X(blocks_total)                                                                                \
    X(blocks_free)                                                                                 \
    X(blocks_used)                                                                                 \
    X(blocks_shared) /* referenced more than once, lazy forks not counted */                       \
    X(blocks_cached) /* published, used by no sequence; evicted when blocks run out */             \
    X(blocks_pinned) /* cached blocks that are never evicted */                                    \
    X(blocks_reserved) /* set aside by owners, in use or not */                                    \
    X(blocks_published) /* can be found by their token ids */                                      \
    X(table_bytes) /* counted against kv_config.table_pages */                                     \
    X(blocks_tiered) /* blocks in idle memory, which take no block of a pool */                    \
    X(sequences)                                                                                   \
    X(pools)                                                                                       \
    X(opens)                                                                                       \
    X(forks)                                                                                       \
    X(truncates)                                                                                   \
    X(closes)                                                                                      \
    X(adoptions)                                                                                   \
    X(copies)                                                                                      \
    X(out_of_blocks)                                                                               \
    X(prefix_hits) /* full blocks of the tokens given at open: found */                            \
    X(prefix_misses) /* those not found */                                                         \
    X(prefix_hit_tokens)                                                                           \
    X(evictions)                                                                                   \
    X(evictions_expired) /* of these, blocks past their time to live */                            \
    X(eviction_age_seconds) /* sum over evictions of the time since last use */                    \
    X(cached_dropped) /* cached blocks dropped with their pool */                                  \
    X(damaged) /* sequences, pools and published blocks that the latest recovery dropped */

struct kv_stats {
#define X(field) uint64_t field;
    KV_STATS_MAP(X)
#undef X
};

struct kv;

/* Whether an arena can be made with this config. ATTN_EINVAL: why names what is out of range. */
attn_status kv_config_check(const struct kv_config *c, char *why, size_t why_bytes);

/* kv_open: makes a new arena (fd -1), or maps an existing one and runs kv_recover.
 *
 * An existing arena must have been made with the same config; its size and header are checked, and
 * it is sealed against resizing.
 * Owner    fd is duplicated; the caller keeps its own.
 * Errors   with a sentence in why: ATTN_EINVAL a config value is out of range, or fd is not a
 *          usable arena; ATTN_ENOMEM; ATTN_EINTERNAL no random key */
attn_status kv_open(const struct kv_config *c, int fd, struct kv **out_kv, char *why,
                    size_t why_bytes);
/* Unmaps the arena, which lives on while other descriptors hold it. Promotions, imports and idle
 * moves in progress are lost, as after a kill. NULL is allowed. */
void kv_close(struct kv *kv);
/* The arena's memfd, owned by kv until kv_close. */
int kv_fd(const struct kv *kv);
/* A random id of the arena, the same for its whole life. Stored beside the memory that holds the
 * blocks' bytes, it shows whether the two belong together. */
uint64_t kv_arena_id(const struct kv *kv);
/* The most memory that an arena of this config ever takes, but for what kv_config.table_pages
 * bounds: a sequence's ids and table entries beyond the first page of each, notes, and the records
 * of blocks. */
uint64_t kv_fixed_bytes(const struct kv_config *c);
/* The same with all of that. */
uint64_t kv_full_bytes(const struct kv_config *c);
/* The sentence of the latest failure; valid until the next one. */
const char *kv_last_error(const struct kv *kv);
/* Sets the current time in seconds, from a clock that continues across processes. Ages and times to
 * live are measured by it. */
void kv_set_time(struct kv *kv, uint32_t now_s);

/* Whom the memory beyond kv_fixed_bytes that sequences take is counted for. take: ATTN_EQUOTA with
 * a sentence in why, nothing is taken. */
struct kv_room_ops {
    void *user;
    attn_status (*take)(void *user, uint32_t tenant, uint64_t bytes, char *why, size_t why_bytes);
    void (*give)(void *user, uint32_t tenant, uint64_t bytes);
    void (*count)(void *user, uint32_t tenant, uint64_t bytes); /* takes, whatever the bound */
};
/* What the open sequences have is given back by the old ones, and counted by the new ones. NULL:
 * nobody counts. */
void kv_set_room_ops(struct kv *kv, const struct kv_room_ops *ops);

/* kv_recover: rebuilds all derived state from the truth, rolls the copy journal back and finishes a
 * truncation that was under way. Appends that were reserved and not committed are lost. Rows of the
 * block table may have changed: upload them anew.
 *
 * out_dropped counts what was dropped as damaged: sequences with a damaged record, table or length;
 * published blocks; and both sequences of a pair that claims a block which they cannot share (which
 * one is right cannot be known). Never fails. */
attn_status kv_recover(struct kv *kv, uint32_t *out_dropped);
/* kv_check: recomputes the derived state and compares. Reads all tables: for tests and inspectors.
 * Errors   ATTN_EINTERNAL kv_last_error names the first difference; ATTN_ENOMEM */
attn_status kv_check(struct kv *kv);
void kv_stats_read(const struct kv *kv, struct kv_stats *out);

#endif
