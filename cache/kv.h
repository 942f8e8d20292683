/* kv.h: metadata of the paged KV cache: which blocks hold which tokens of which sequence.
 *
 * Knows block ids, lengths and names; knows no device, no bytes of K or V, no socket, no clock. All
 * state lives in one arena, a memfd of fixed-size tables with indices instead of pointers, so that
 * a successor process can map it and an inspector can read it.
 *
 * Truth     owners, pool records, sequence records, block tables and their holes, per-layer
 *           lengths, token ids, published blocks, the copy journal, appends answered early.
 * Derived   reference counts, free lists, the order of eviction, the indexes of names and of
 *           published blocks, owners' lists: kv_recover rebuilds them,
 *           kv_check proves them equal. Writes are ordered so that a kill at any instruction leaves
 *           a truth that kv_recover accepts, with every committed length intact.
 * Thread    one writer (the engine thread). kv_stats may be read from any thread.
 * Cost      every operation is O(1) per block it touches, whatever the number of sequences.
 * Errors    a failed operation changes nothing; kv_last_error has the sentence naming field and
 *           value.
 *
 * An append is two calls: kv_append_reserve before the batch (allocates blocks, copies shared
 * ones), then kv_append_commit or kv_append_cancel when the batch is back. Lengths move at commit
 * only.
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
    uint32_t max_seq_tokens; /* whose ids are kept of a sequence */
    uint32_t max_block_tokens; /* of any pool */
    uint32_t max_owners; /* sessions */
    uint32_t block_layout; /* the caller's version of what blocks hold; an arena of another one is
                              refused */
    /* Idle memory (idle.h), of which an arena says nothing: */
    uint32_t idle_pages; /* below 2^31; 0: there is none */
    uint32_t idle_is_new; /* 1: it has nothing of an arena's that exists: whose blocks are there,
                             is dropped */
};

#define KV_NAME_BYTES 64
#define KV_SPEC_BYTES 16384
#define KV_LABEL_BYTES 52

/* What the cache knows of a pool. spec is the owner's own description (encoded PoolSpec), kept as
 * truth, compared byte by byte when the pool is made again, given back after a restart. */
struct kv_pool_spec {
    char name[KV_NAME_BYTES]; /* among the pools of its tenant */
    uint32_t tenant;
    uint32_t n_layers, n_blocks;
    uint32_t block_tokens; /* a power of two */
    uint32_t spec_bytes;
    const uint8_t *spec;
    uint64_t place; /* the owner's own word, kept as truth: where the blocks are */
    uint32_t window_tokens; /* the longest window of its layers: nothing sees further back than that
                               but for the first kept_tokens; 0: some layer sees everything */
    uint32_t kept_tokens; /* that stay visible whatever the window */
    uint32_t generation; /* of kv_pool_info: pools that this index was before; not compared */
    uint32_t idle_pages; /* that a block takes in idle memory; 0: none ever goes there; not compared
                          */
    uint32_t n_made; /* of kv_pool_info: blocks that it was made with */
};

/* How long published blocks stay that nobody uses, from a token on to where the next range begins.
 * A block has what its first token has; where nothing is said, all zero. */
#define KV_MIN_PRIORITY (-3)
#define KV_MAX_PRIORITY 3
#define KV_MAX_LIFE_S (1u << 20)
#define KV_MAX_RETENTIONS 8 /* of a sequence */
struct kv_retention {
    uint32_t from;
    int32_t priority; /* the lowest go first */
    uint32_t
        life_s; /* since the last use, rounded up to a power of two: among those of its priority
                        it then goes first; 0: for ever */
    uint32_t is_pinned; /* 1: is not evicted, only dropped with its pool */
};

/* What a client says of a sequence's tokens. */
struct kv_tokens {
    const uint32_t *ids;
    uint32_t n;
    uint64_t adapter; /* what else K and V depend on; 0: nothing */
    const struct kv_retention *retention; /* [n_retentions] by token */
    uint32_t n_retentions;
};

/* What a published block holds, wherever its bytes are. */
struct kv_content {
    uint32_t pool, tenant;
    uint32_t index; /* its place in every table that has it */
    uint32_t n_ids;
    uint64_t adapter;
    uint64_t key[2]; /* finds it, proves nothing */
    uint64_t serial; /* of the publication; no two have the same */
    uint64_t parent; /* serial of the block before; 0: it is the first */
    const uint32_t *ids; /* [n_ids] */
};

struct kv_seq_info {
    uint64_t name; /* the client's 64-bit id */
    uint32_t tenant;
    kv_pool_id pool;
    uint32_t epoch; /* raised by every truncation and adoption; no name has the same twice */
    uint32_t owner; /* session slot, KV_NO_OWNER */
    uint32_t n_blocks; /* entries in its table */
    uint32_t hole_first, hole_past; /* of these [hole_first, hole_past) name no block of its any
                                       more: no window reaches them; equal: all do */
    const uint32_t *block_table; /* [n_blocks] pool-local ids; the row in the arena: valid until the
                                    sequence is closed, entries change at a reserve that copies and
                                    as blocks go to idle memory (kv_is_place) and come back */
    uint32_t n_away; /* of them, those in idle memory */
    bool is_told; /* false: a fork that nobody has written to or settled: block_table may be its
                     source's, valid until either changes, and no effects have told of it */
    const uint32_t *layer_len; /* [n_layers] committed tokens */
    uint32_t n_cached; /* tokens that every layer had when it was opened */
    uint32_t n_ids; /* tokens from the start whose ids are known */
    uint64_t adapter;
};
#define KV_NO_OWNER UINT32_MAX
#define KV_NO_REQUEST 0 /* nobody will repeat it */
#define KV_MAX_SEEN 256 /* requests that open, fork or adopt, remembered for an owner */

/* What the device must do before the append: the caller owns the arrays and sets the capacities;
 * reserve adds entries at n_*. Copies are whole blocks. Of two patches of one entry the later
 * holds. */
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

/* Blocks are those of created pools: total = free + used + cached, a shared block counts once.
 * shared: referenced more than once; forks without a table of their own refer to nothing.
 * published: found by their token ids; cached: those of them that no sequence refers to, which are
 * evicted when blocks run out, but for the pinned ones. tiered: of sequences, in idle memory, and
 * no block of a pool. prefix_hits and prefix_misses: full blocks
 * of the tokens that sequences were opened with. evictions_expired: of the evictions, those whose
 * time to live was over; eviction_age_seconds: the sum of their times since the last use.
 * cached_dropped: cached blocks that went with their pool. damaged: sequences, pools and published
 * blocks that the latest recovery dropped. */
#define KV_STATS_MAP(X)                                                                            \
    X(blocks_total)                                                                                \
    X(blocks_free)                                                                                 \
    X(blocks_used)                                                                                 \
    X(blocks_shared)                                                                               \
    X(blocks_cached)                                                                               \
    X(blocks_pinned)                                                                               \
    X(blocks_published)                                                                            \
    X(blocks_tiered)                                                                               \
    X(sequences)                                                                                   \
    X(pools)                                                                                       \
    X(opens)                                                                                       \
    X(forks)                                                                                       \
    X(truncates)                                                                                   \
    X(closes)                                                                                      \
    X(adoptions)                                                                                   \
    X(copies)                                                                                      \
    X(out_of_blocks)                                                                               \
    X(prefix_hits)                                                                                 \
    X(prefix_misses)                                                                               \
    X(prefix_hit_tokens)                                                                           \
    X(evictions)                                                                                   \
    X(evictions_expired)                                                                           \
    X(eviction_age_seconds)                                                                        \
    X(cached_dropped)                                                                              \
    X(damaged)

struct kv_stats {
#define X(field) uint64_t field;
    KV_STATS_MAP(X)
#undef X
};

/* Where evicted blocks may be kept and come back from: the caller's, told by kv_set_elsewhere.
 * Called while blocks are allocated and sequences opened; may not call the cache. */
struct kv_elsewhere {
    void *arg;
    /* The block makes way; its bytes are still there, and are not once this returns. */
    void (*evicted)(void *arg, const struct kv_content *c, uint32_t block);
    /* Asked by kv_fetch_begin: a block of this content, whatever its serial, which is then noted in
     * c; true: it is there, and stays until the fetch has ended. */
    bool (*find)(void *arg, struct kv_content *c);
    /* The serial that a block of this content has there; 0: there is none. */
    uint64_t (*serial)(void *arg, const struct kv_content *c);
};

struct kv;

/* kv_open: fd -1 makes a new arena; else maps an existing one (made with the same config; its size
 * and header are checked, it is sealed against resizing) and runs kv_recover. The fd is duplicated.
 * Errors   ATTN_EINVAL a config value out of range or a foreign arena; ATTN_ENOMEM; ATTN_EINTERNAL
 *          no random key. why gets the sentence. */
attn_status kv_open(const struct kv_config *c, int fd, struct kv **out_kv, char *why,
                    size_t why_bytes);
/* Until it is closed; x is copied. */
void kv_set_elsewhere(struct kv *kv, const struct kv_elsewhere *x);
/* Seconds of a clock that goes on from one process to the next: what ages and times
 * to live are counted by. */
void kv_set_time(struct kv *kv, uint32_t now_s);
/* Of several caches that move sequences to each other: epochs that are made here have `maker` in
 * their lowest bits. The same for an arena, always. */
void kv_set_epochs(struct kv *kv, uint32_t n_bits, uint32_t maker);
void kv_close(struct kv *kv); /* unmaps; the arena lives on in other descriptors; NULL is fine */
int kv_fd(const struct kv *kv); /* the memfd, owned by kv */
/* random, told to belong together with what it is about */
uint64_t kv_arena_id(const struct kv *kv);
const char *kv_last_error(const struct kv *kv);

/* kv_recover: rebuilds all derived state from the truth, rolls the copy journal back and finishes a
 * truncation that was under way. Appends that were reserved and not committed are gone. Table rows
 * may have changed: mirrors are uploaded anew. out_dropped counts sequences that were dropped
 * because their record, table or lengths were damaged, or two of them claimed a block that they
 * cannot share (both are dropped: which one is right cannot be known). */
attn_status kv_recover(struct kv *kv, uint32_t *out_dropped);
/* kv_check: recomputes the derived state and compares. ATTN_EINTERNAL: kv_last_error names the
 * first difference. Reads all tables: for tests and inspectors. */
attn_status kv_check(struct kv *kv);
void kv_stats_read(const struct kv *kv, struct kv_stats *out);

/* kv_pool_drop: forgets a pool; its block records may be another's. Its index is the next pool's.
 * Errors   ATTN_ENOTFOUND; ATTN_EINVAL sequences are open in it; ATTN_EOVERLOAD blocks of it are
 *          held, or on their way into it */
attn_status kv_pool_drop(struct kv *kv, kv_pool_id pool);
/* The bytes of its blocks are gone: closes its sequences and forgets what is published. */
void kv_pool_clear(struct kv *kv, kv_pool_id pool);
/* kv_pool_create: takes a contiguous range of block records. The same name and spec again: the same
 * pool, whatever number of blocks it has since (kv_pool_grow).
 * Errors   ATTN_EEXIST same name, another spec; ATTN_ENOMEM out of pools or blocks;
 * ATTN_EINVAL */
attn_status kv_pool_create(struct kv *kv, const struct kv_pool_spec *s, kv_pool_id *out_pool);
attn_status kv_pool_find(struct kv *kv, uint32_t tenant, const char *name, kv_pool_id *out_pool);
/* ATTN_ENOTFOUND: no such pool. out->spec points into the arena. Free blocks are those that can be
 * had: also what would be evicted for it. */
attn_status kv_pool_info(const struct kv *kv, kv_pool_id pool, struct kv_pool_spec *out,
                         uint32_t *out_free_blocks);
/* After a recovery, for whoever can't use them: drops the pools from `first` on and recovers again,
 * which drops their sequences. out_dropped counts both. */
attn_status kv_pools_drop(struct kv *kv, kv_pool_id first, uint32_t *out_dropped);

/* A pool's number of blocks changes, and nothing else of it. A kill leaves it with the one or the
 * other. Nobody but the caller knows of the blocks' bytes: it has those that come beforehand, and
 * may give away those that went afterwards.
 *
 * kv_pool_room: the most blocks that it can have where its records lie.
 * kv_pool_grow: Errors   ATTN_ENOTFOUND; ATTN_EINVAL it has as many; ATTN_ENOMEM beyond its room
 *
 * kv_pool_shrink_begin: what does not fit in n_blocks is evicted, in the usual order; what is left
 * above them is to be moved: the caller carries out the copies, of whole blocks, then calls
 * kv_pool_shrink_end, which cannot fail, and tells the device of the patches, each of an entry that
 * has changed. Nothing else may be done with the pool in between, and no launch may use it.
 * Errors   nothing changed: ATTN_ENOTFOUND; ATTN_EINVAL n_blocks is 0, or not fewer; ATTN_ENOBLOCKS
 *          more are in use, or pinned; ATTN_EOVERLOAD appends are outstanding, blocks are held or
 *          on their way; ATTN_ENOMEM */
struct kv_shrink {
    kv_pool_id pool;
    uint32_t n_blocks, n_copies, n_patches;
    struct kv_copy *copies;
    struct kv_patch *patches;
};
uint32_t kv_pool_room(const struct kv *kv, kv_pool_id pool);
attn_status kv_pool_grow(struct kv *kv, kv_pool_id pool, uint32_t n_blocks);
attn_status kv_pool_shrink_begin(struct kv *kv, kv_pool_id pool, uint32_t n_blocks,
                                 struct kv_shrink *out);
void kv_pool_shrink_end(struct kv *kv, const struct kv_shrink *s);
void kv_shrink_fini(struct kv_shrink *s); /* also of one that was not ended; a zeroed one is fine */

/* Sequences open in a pool; 0: no such pool, too. */
uint32_t kv_pool_sequences(const struct kv *kv, kv_pool_id pool);
/* Of a pool's blocks that can be had, those that would be evicted for it. */
uint32_t kv_pool_cached(const struct kv *kv, kv_pool_id pool);

struct kv_evictable {
    uint32_t block, index; /* index: its place in every table that has it */
    int32_t priority;
    uint32_t age_s, life_s; /* since its last use; 0: lives for ever */
    bool is_expired;
};
/* The pool's blocks that would be evicted next, in their order, n at most; how many there are. */
uint32_t kv_pool_next_evicted(const struct kv *kv, kv_pool_id pool, uint32_t n,
                              struct kv_evictable *out);

/* Late duplicates. Requests that make a sequence or take it over are named by the client's ids,
 * which rise: a request that the owner has sent before changes nothing. If the sequence is still as
 * that request made it (its epoch is), the answer is the same; else, and for ids older than the
 * KV_MAX_SEEN highest, it is ATTN_ESTALE. Everything else is fenced by the epoch, which the caller
 * compares. */

/* A new owner takes this number: nothing of it is seen. id (not 0) and label are its own words,
 * kept as truth; the label is cut to KV_LABEL_BYTES. */
void kv_owner_begin(struct kv *kv, uint32_t owner, uint64_t id, uint32_t tenant, const char *label);
/* The owner is no more; its sequences stay until they are closed. */
void kv_owner_end(struct kv *kv, uint32_t owner);
/* Who has this number: 0 is nobody. The label is the arena's. */
uint64_t kv_owner_id(const struct kv *kv, uint32_t owner);
uint32_t kv_owner_tenant(const struct kv *kv, uint32_t owner);
const char *kv_owner_label(const struct kv *kv, uint32_t owner);
/* The highest id that the owner's requests have had here; 0: none. */
uint64_t kv_owner_last_request(const struct kv *kv, uint32_t owner);
/* A request of this owner's was carried out before, or is older than the KV_MAX_SEEN highest. */
bool kv_owner_has_seen(const struct kv *kv, uint32_t owner, uint64_t request);
/* The request of this owner's has been carried out where this cache does not see it; all those that
 * other's owner of this number has had. */
void kv_owner_saw(struct kv *kv, uint32_t owner, uint64_t request);
void kv_owner_saw_all(struct kv *kv, const struct kv *other, uint32_t owner);
/* Was the sequence's epoch made by this request of its owner? */
bool kv_seq_is_repeat(const struct kv *kv, kv_seq_id seq, uint32_t owner, uint64_t request);

/* kv_seq_open_with: a new sequence of these tokens. It begins with those that published blocks of
 * its tenant, pool and adapter have, never with the last one of t: its layers' lengths and n_cached
 * of kv_seq_info say how many. Adds the row's table entries to fx; a repeat adds nothing.
 * What t says of retention holds for them, too.
 * Errors   ATTN_EEXIST; ATTN_ESTALE; ATTN_ENOTFOUND no such pool; ATTN_EINVAL too many tokens,
 *          retention; ATTN_EOVERLOAD max_sequences are open, or fx is full */
attn_status kv_seq_open_with(struct kv *kv, uint32_t tenant, uint64_t name, kv_pool_id pool,
                             uint32_t owner, uint64_t request, const struct kv_tokens *t,
                             struct kv_effects *fx, kv_seq_id *out_seq);
/* kv_seq_tokens: the ids of tokens [pos, pos + n), appended already or not. Those that are known
 * may be given again. Full blocks whose ids are known are published when every layer has them and
 * no append of the sequence is outstanding.
 * Errors   ATTN_EINVAL n is 0, pos leaves a gap, an id differs from the one given, too many */
attn_status kv_seq_tokens(struct kv *kv, kv_seq_id seq, uint32_t pos, const uint32_t *ids,
                          uint32_t n);
/* kv_seq_retain: from now on, in place of what was said from r[0].from on. Holds for what is
 * published already, too. Forks have what their source has.
 * Errors   ATTN_EINVAL names the range */
attn_status kv_seq_retain(struct kv *kv, kv_seq_id seq, const struct kv_retention *r, uint32_t n);
/* Blocks that come back. kv_fetch_begin takes a block for each of the tokens' next full blocks that
 * are elsewhere, behind those that are published: n_most at most, as many as there is room for.
 * Their bytes are then the caller's to write; nobody else has them meanwhile, and what is before
 * them stays. kv_fetch_end publishes the first n_there of them as cached blocks, if that is still
 * what they are, and gives the others back. A fetch is no truth: a successor knows nothing of it.
 * NULL: nothing is elsewhere, there is no room, or no memory.
 * Of a pool that has one nothing may be dropped or cleared. */
struct kv_fetch;
struct kv_fetch *kv_fetch_begin(struct kv *kv, kv_pool_id pool, uint32_t tenant,
                                const struct kv_tokens *t, uint32_t n_most);
/* How many blocks kv_fetch_begin would take if that many are free. */
uint32_t kv_fetch_size(const struct kv *kv, kv_pool_id pool, uint32_t tenant,
                       const struct kv_tokens *t, uint32_t n_most);
uint32_t kv_fetch_block(const struct kv_fetch *f, uint32_t i); /* in the order of find's trues */
void kv_fetch_end(struct kv *kv, struct kv_fetch *f, uint32_t n_there);
/* What a block holds; false: it is not published. The ids are the arena's. */
bool kv_block_content(const struct kv *kv, kv_pool_id pool, uint32_t block, struct kv_content *out);

attn_status kv_seq_find(struct kv *kv, uint32_t tenant, uint64_t name, kv_seq_id *out_seq);
void kv_seq_info(const struct kv *kv, kv_seq_id seq, struct kv_seq_info *out);
/* The ids of its first n_ids tokens; the arena's. */
const uint32_t *kv_seq_ids(const struct kv *kv, kv_seq_id seq);
/* kv_seq_next: *seq becomes the first open sequence whose index is at least seq's and below end.
 * ATTN_ENOTFOUND: no such index and none above; ATTN_EOVERLOAD: none below end, *seq is end. */
attn_status kv_seq_next(const struct kv *kv, uint32_t end, kv_seq_id *seq);
/* kv_warm: a hint that n <= KV_WARM_MAX sequences will be found and appended to at these positions
 * soon. Brings what that touches into the processor's caches, all misses side by side instead of
 * one after another. Changes nothing. out_seq[i] is the likely id, index UINT32_MAX if there is
 * none. */
#define KV_WARM_MAX 64
void kv_warm(const struct kv *kv, uint32_t tenant, const uint64_t *names, const uint32_t *pos,
             uint32_t n, kv_seq_id *out_seq);
/* kv_seq_fork: a new sequence that shares the blocks of src's first len tokens; every layer of src
 * must have at least len (ATTN_EINVAL). The new sequence's lengths are all len. Costs the same for
 * any len: it has no row of the block table before it is written to or settled (but where layers
 * have windows), or src is where both have tokens.
 * Errors   as kv_seq_open_with; ATTN_EOVERLOAD also: src has a copy pending, or blocks in idle
 *          memory */
attn_status kv_seq_fork(struct kv *kv, kv_seq_id src, uint64_t new_name, uint32_t len,
                        uint32_t owner, uint64_t request, kv_seq_id *out_seq);
/* kv_seq_settle: before a device reads the sequence's row: if nobody was told of it yet, adds all
 * its entries to fx. kv_append_reserve does the same.
 * Errors   ATTN_EOVERLOAD fx is full */
attn_status kv_seq_settle(struct kv *kv, kv_seq_id seq, struct kv_effects *fx);
/* kv_seq_truncate: layers longer than len become len and the epoch rises by one, all or (killed
 * half way) all after recovery; blocks past the longest layer are let go.
 * Errors   ATTN_EINVAL len is beyond the longest layer; ATTN_EOVERLOAD appends are outstanding */
attn_status kv_seq_truncate(struct kv *kv, kv_seq_id seq, uint32_t len, uint64_t request,
                            uint32_t *out_epoch);
/* kv_seq_close: lets go of all blocks at once: the caller has seen to it that no launch still uses
 * them. Outstanding appends are cancelled. */
void kv_seq_close(struct kv *kv, kv_seq_id seq);
/* kv_seq_adopt: another owner (or KV_NO_OWNER), the next epoch; both change together.
 * Errors   ATTN_ESTALE */
attn_status kv_seq_adopt(struct kv *kv, kv_seq_id seq, uint32_t owner, uint64_t request,
                         uint32_t *out_epoch);
/* Any one sequence of an owner, for freeing in slices: ATTN_ENOTFOUND when it has none. */
attn_status kv_owner_any(struct kv *kv, uint32_t owner, kv_seq_id *out_seq);

/* A sequence that leaves for another cache, where it is the same at the same epoch: repeated
 * requests are answered as here. What it points to is this cache's, and stays as long as nothing of
 * the sequence changes. */
struct kv_departure {
    uint64_t name, request, owner_id;
    uint32_t tenant, epoch, made, owner;
    uint32_t n_blocks, n_cached;
    uint32_t hole; /* hole_past of kv_seq_info */
    const uint32_t *layer_len;
    struct kv_tokens tokens;
};
/* ATTN_EOVERLOAD: appends are outstanding, blocks are in idle memory. When the other cache has it,
 * it is closed here. */
attn_status kv_seq_depart(struct kv *kv, kv_seq_id seq, struct kv_departure *out);

/* And one that comes. Its blocks are set aside first, and are no truth until it is whole: a
 * successor knows nothing of them. Their bytes are the caller's to write; nobody else has them
 * meanwhile. kv_arrival_end makes the sequence of those that it has, and lets go of the rest.
 * Of a pool that has one nothing may be dropped or cleared. */
struct kv_arrival;
struct kv_arrival *kv_arrival_begin(struct kv *kv, kv_pool_id pool); /* NULL: no memory, no pool */
/* It has those of entries [first, first + n) then. ATTN_ENOBLOCKS, ATTN_ENOMEM: it has what it
 * had. */
attn_status kv_arrival_reserve(struct kv *kv, struct kv_arrival *a, uint32_t first, uint32_t n);
uint32_t kv_arrival_block(const struct kv_arrival *a, uint32_t i);
/* Adds the row's table entries to fx. a is gone.
 * Errors   a stays as it is: ATTN_EEXIST; ATTN_ENOTFOUND its owner is not here; ATTN_EOVERLOAD
 *          max_sequences are open, fx is full; ATTN_EINVAL it lacks blocks that d has */
attn_status kv_arrival_end(struct kv *kv, struct kv_arrival *a, const struct kv_departure *d,
                           struct kv_effects *fx, kv_seq_id *out_seq);
void kv_arrival_cancel(struct kv *kv, struct kv_arrival *a); /* NULL is fine */

/* Holds n blocks of the sequence from entry first on, while somebody reads them beside the launches
 * of this cache: whatever becomes of the sequence, nothing is written to them. kv_arrival_cancel
 * lets go of them. NULL: no memory. */
struct kv_arrival *kv_departure_hold(struct kv *kv, kv_seq_id seq, uint32_t first, uint32_t n);
/* The same of n published blocks that nobody refers to: they do not make way, and can be found.
 * kv_cached_let_go puts them back where they were among those that go next, but for those that a
 * sequence has had meanwhile: it has just used them. Their pool is not dropped before that. */
struct kv_arrival *kv_cached_hold(struct kv *kv, kv_pool_id pool, const uint32_t *blocks,
                                  uint32_t n);
void kv_cached_let_go(struct kv *kv, struct kv_arrival *a);

/* kv_append_reserve: makes [pos, pos + n) of this layer writable: allocates missing blocks,
 * replaces shared ones by copies (journalled until commit). pos <= layer length, or ATTN_EINVAL
 * naming both. All or nothing.
 *
 * A reserve that copies changes table entries of committed tokens. So it is alone on its sequence:
 * it is refused while other reserves are outstanding, and others are refused until it is committed
 * or cancelled. Items that only attend read the table, too: the caller counts them, and waits for
 * them where kv_append_copies is true.
 * Errors   ATTN_EINVAL gap, layer, too long for max_seq_blocks; ATTN_ENOBLOCKS; ATTN_EOVERLOAD must
 *          wait, fx or the journal is full */
attn_status kv_append_reserve(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                              uint32_t n_tokens, struct kv_effects *fx);
/* True if kv_append_reserve of this range would replace a shared block by a copy: it changes
 * entries of the block table that a batch in flight may be reading, so the caller waits for that
 * batch. */
bool kv_append_copies(const struct kv *kv, kv_seq_id seq, uint32_t pos, uint32_t n_tokens);
/* The batch is done: the layer's length becomes max(length, pos + n); replaced blocks are let
 * go. */
void kv_append_commit(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                      uint32_t n_tokens);
/* The batch failed: replaced blocks come back (their table entries are added to fx for mirrors);
 * lengths stay; blocks allocated past the longest layer are let go unless another reserve of the
 * sequence is outstanding.
 * Errors   ATTN_EOVERLOAD fx has less room for patches than the reserve made copies: nothing
 *          changed, cancel again */
attn_status kv_append_cancel(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                             uint32_t n_tokens, struct kv_effects *fx);

/* Appends that a device answers by itself, before they are committed. Each is put down between its
 * reserve and the launch of its batch; a batch in flight has a slot, below KV_AHEAD_SLOTS, and at
 * most kv_ahead_max of them. kv_ahead_begin says which value the device is to give the slot's word
 * (kv_ahead_words) before it tells anybody else. Once it has, a successor finds the appends as if
 * they had been committed. kv_ahead_is_told: it has, so they are to be committed, whatever else
 * became of the device. kv_ahead_end: all are, or none was answered and all will be cancelled.
 * The words are whole pages, for devices that must know of memory that they write. */
#define KV_AHEAD_SLOTS 2
#define KV_AHEAD_WORDS_BYTES 4096
uint32_t kv_ahead_max(const struct kv *kv);
uint32_t *kv_ahead_words(const struct kv *kv, size_t *out_bytes);
void kv_ahead_add(struct kv *kv, uint32_t slot, kv_seq_id seq, uint32_t layer, uint32_t pos,
                  uint32_t n_tokens);
uint32_t kv_ahead_begin(struct kv *kv, uint32_t slot);
bool kv_ahead_is_told(const struct kv *kv, uint32_t slot);
void kv_ahead_end(struct kv *kv, uint32_t slot); /* one that was not begun is fine */

/* Windows. Where all layers of a pool have one, blocks that no query can see any more are let go
 * of; what is left is a hole in the table. A query may still come at the position of a layer's
 * latest append (a retry), so the layer that is furthest back there decides. From then on an
 * append, a truncation or a fork whose next query would see the hole is refused, ATTN_EINVAL.
 *
 * kv_seq_free_unseen: the caller has seen to it that no launch reads the sequence. Does nothing
 * while appends are outstanding, and until every layer has been appended to since the last
 * recovery. */
void kv_seq_free_unseen(struct kv *kv, kv_seq_id seq);
/* Whether all that a query at this position sees is there; else, with the sentence, ATTN_EINVAL. */
attn_status kv_seq_sees(struct kv *kv, kv_seq_id seq, uint32_t pos);
/* kv_seq_free_to: blocks [first, past) are freed, as they were in the cache that the sequence is
 * copied from, if they are not yet. Layers that end at first go on at past, the others are as long
 * already. The new entries are added to fx: of what is freed, any block. All or nothing.
 * Errors   ATTN_ENOTFOUND; ATTN_EINVAL some layer has no window, the pool's keep another number of
 *          blocks than first, too long, a layer ends between them; ATTN_EOVERLOAD appends are
 *          outstanding, blocks are in idle memory, fx is full */
attn_status kv_seq_free_to(struct kv *kv, kv_seq_id seq, uint32_t first, uint32_t past,
                           struct kv_effects *fx);
/* kv_append_reserve of tokens that are copied with those before them that are still seen, the first
 * ones first: none is asked about before all are there. */
attn_status kv_copy_reserve(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                            uint32_t n_tokens, struct kv_effects *fx);

#endif
