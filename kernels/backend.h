/* backend.h: the boundary between the daemon and a device that computes attention.
 *
 * A backend owns the KV memory of its pools and computes batches over it. It knows blocks and table
 * rows; it does not know sequences' names, tenants, sockets or why a block is where it is.
 *
 * Who owns what   The caller owns the batch and everything it points to, from backend submit until
 *                 poll hands the batch back. Block tables are read during that time, too.
 * Threads         All slots but host_alloc/host_free are called from one thread (the engine
 *                 thread).
 * Order           Batches of one backend run in submission order: a batch sees what the earlier
 *                 ones wrote. Inside a batch: copies first, then all appends, then all attention.
 *                 Two batches in flight that name no table row in common, and have no copies, may
 *                 run at the same time. So the caller sees to it that a token which one of them
 *                 appends is read or written by the other through the same row only. attnd does:
 *                 shared blocks are replaced by copies before they are written (kv_append_reserve),
 *                 forks take committed tokens only (kv_seq_fork), and what a batch in flight uses
 *                 is not freed (control requests wait for a sequence's claims, engine_queue.h).
 * KV layout       [block][layer][K|V][kv_head][block_tokens][head_dim], one range a pool, without
 *                 the V part where V is in K; quantised pools carry one f32 scale a (kv_head,
 *                 token) behind the codes of each K or V part (kv_layout.h computes every stride).
 */
#ifndef ATTND_KERNELS_BACKEND_H
#define ATTND_KERNELS_BACKEND_H

#include "kernels/tree.h"
#include "proto/attn_types.h"

#define BACKEND_ABI 22
#define BACKEND_MAX_IN_FLIGHT 2

/* What leaves f32 room on the way to a score, at any distance, of values of about unit size.
 * Kernels take scores of up to BACKEND_MAX_SCORE in size: their maxima are rounded, which must not
 * make a weight overflow. Beyond the largest soft cap, what rounds tanh off is larger than an lse
 * may be off. */
#define BACKEND_MAX_SCORE 1e7f
#define BACKEND_MAX_SCALE 1e4f
#define BACKEND_MAX_SETTING 1e20f /* sizes of slopes and of sink logits */
#define BACKEND_MIN_SOFT_CAP 1e-6f
#define BACKEND_MAX_SOFT_CAP 1e3f

/* Elements of a head. Where V is in K: a latent, and K has the part with positions behind it. */
#define BACKEND_MAX_HEAD_DIM 512
#define BACKEND_MAX_LATENT_K 576

/* How one layer of a pool attends. All-zero with scale set is plain causal attention. */
struct attn_layer_spec {
    float scale; /* multiplies q.k; > 0, at most BACKEND_MAX_SCALE */
    uint32_t window_tokens; /* 0: unlimited; else query p sees keys (p - window, p] */
    uint32_t sink_tokens; /* with a window: the first tokens that stay visible */
    float soft_cap; /* 0: none; else s -> cap * tanh(s / cap), after scale: BACKEND_MIN_SOFT_CAP to
                       BACKEND_MAX_SOFT_CAP */
    bool is_full; /* not causal: every query of an item sees [0, pos + n_tokens) */
    /* [num_q_heads] extra softmax term without a value, NULL or -inf: none */
    const float *sink_logits;
    const float *alibi_slopes; /* [num_q_heads] adds slope * (key_pos - query_pos), NULL: none */
    uint32_t n_branches; /* 0: not dilated; no window then; one branch has rate 1 */
    struct attn_branch branches[ATTN_MAX_BRANCHES]; /* see dilated.h */
};

/* The KV geometry of a pool. Borrowed for the call; a backend copies what it keeps. */
struct backend_pool_config {
    uint32_t num_layers;
    uint32_t num_q_heads; /* a multiple of num_kv_heads */
    uint32_t num_kv_heads;
    uint32_t head_dim_k; /* of q and k, elements */
    uint32_t head_dim_v; /* of v and out, elements */
    /* A token's V is the first head_dim_v elements of its K, as in latent attention (MLA): items
     * have no v, and the cache stores K alone. */
    bool is_v_in_k;
    /* With is_v_in_k, of pools whose items carry heads before and after the projections between
     * them and the latents, which the backend computes: q is [q_nope_dim elements][the part behind
     * V], out is [out_dim]. A layer has weights w [num_q_heads][q_nope_dim + out_dim][head_dim_v]
     * of q_dtype, a head's W_UK and then its W_UV: q's first part becomes the sum of its elements
     * times w's first rows, out is the products of w's last rows with what attention gives; both
     * are q_dtype in between. 0: q and out are as the cache has them */
    uint32_t q_nope_dim, out_dim;
    uint32_t block_tokens; /* a power of two, 8 to 256 */
    uint32_t n_blocks;
    /* Numbers n_blocks to n_blocks + n_summaries - 1 are no blocks, but summaries of blocks that
     * are elsewhere: they have what choices go by (backend_item.n_chosen), and no bytes. 0 without
     * BACKEND_HAS_SUMMARIES, and in pools of stripes */
    uint32_t n_summaries;
    uint32_t n_table_rows; /* sequences that can be open at once */
    uint32_t max_row_blocks; /* entries in a row of the block table */
    attn_dtype q_dtype; /* of q, k, v and out as they travel: f32, f16, bf16 */
    attn_dtype kv_dtype; /* as stored: q_dtype, fp8_e4m3, int8, nvfp4 or mxfp4 */
    uint64_t kv_place; /* where its memory is to be, as pool_place said; 0: in the first gap */
    bool is_batch_invariant; /* an item's bytes do not depend on what else is in the batch */
    /* Its tokens are the stripe-th of n_stripes stripes of block_tokens in every block of a longer
     * sequence (stripes.h): 2, 4 or 8; 0: they are all there are. Items of dilated layers that
     * attend, those that choose blocks, and no others, have positions of the longer sequence, and
     * do not append; each query sees which of its keys are here, maybe none. */
    uint32_t n_stripes, stripe;
    uint32_t first_kv_head; /* of the sequence's, whose numbers are those of branches */
    const struct attn_layer_spec *layers; /* [num_layers] */
};

/* What copies, and the tables of items with `chosen`, name: blocks, and behind them summaries. */
static inline uint32_t backend_n_names(const struct backend_pool_config *c)
{
    return c->n_blocks + c->n_summaries;
}
/* Holds every value that a key can have. */
static inline attn_dtype backend_extremes_dtype(const struct backend_pool_config *c)
{
    return c->kv_dtype == c->q_dtype ? c->kv_dtype : ATTN_F32;
}
/* Elements of a head's q, and of its out, as items have them. */
static inline uint32_t backend_q_dim(const struct backend_pool_config *c)
{
    return c->q_nope_dim == 0 ? c->head_dim_k : c->q_nope_dim + (c->head_dim_k - c->head_dim_v);
}
static inline uint32_t backend_out_dim(const struct backend_pool_config *c)
{
    return c->out_dim == 0 ? c->head_dim_v : c->out_dim;
}
/* Bytes of a layer's weights; 0: it has none. */
static inline uint64_t backend_weights_bytes(const struct backend_pool_config *c)
{
    return (uint64_t)c->num_q_heads * (c->q_nope_dim + c->out_dim) * c->head_dim_v *
           attn_dtype_bytes(c->q_dtype);
}

enum {
    BACKEND_APPEND = 1 << 0, /* write k and v at [pos, pos + n_tokens) */
    BACKEND_ATTEND = 1 << 1, /* compute out (and lse) of the n_tokens queries */
    /* every query sees [0, pos + n_tokens), as in a full layer; in layers with windows or branches
     * only of items with `ahead` */
    BACKEND_FULL = 1 << 2,
};

/* The tokens that each query of an item visits, and no others: query t those at tokens[starts[t]]
 * to tokens[starts[t + 1]], as positions in its sequence that ascend, each of which it sees. None:
 * its output is that of a query which sees nothing. */
struct backend_lists {
    const uint32_t *starts; /* [n_tokens + 1]; NULL: no lists, queries visit all that they see */
    const uint32_t *tokens;
};

#define BACKEND_MAX_LISTED (1u << 20) /* tokens of all lists of a batch, and blocks of choices */

static inline uint32_t backend_listed(const struct backend_lists *l, uint32_t n_tokens)
{
    return l->starts == NULL ? 0 : l->starts[n_tokens] - l->starts[0];
}

/* One sequence's part of a batch. Addresses but block_table are 16-byte aligned, of memory from
 * host_alloc or host_register, so that a device may read and write it in place, or of the
 * device's own memory where info says BACKEND_HAS_DEVICE_ADDRESSES. block_table
 * and lists are the host's. */
struct backend_item {
    uint32_t flags;
    uint32_t layer;
    uint32_t table_row; /* the sequence's row in the block table */
    uint32_t pos; /* position of the first of n_tokens */
    uint32_t n_tokens; /* >= 1; query t sits at position pos + t */
    const uint32_t *block_table; /* [ceil((pos + n_tokens) / block_tokens)] pool-local block ids */
    const void *q; /* [n_tokens][num_q_heads][backend_q_dim()] q_dtype; ATTEND only */
    const void *k; /* [n_tokens][num_kv_heads][head_dim_k] q_dtype; APPEND only */
    /* [n_tokens][num_kv_heads][head_dim_v] q_dtype; APPEND only; not looked at where V is in K */
    const void *v;
    void *out; /* [n_tokens][num_q_heads][backend_out_dim()] q_dtype; ATTEND only */
    float *lse; /* [n_tokens][num_q_heads] natural log, may be NULL */
    /* [n_tokens], TREE_MAX_NODES at most: the tokens are a tree; query t sees the cached tokens
     * below pos as from position pos + nodes[t].depth, and the nodes that it names. NULL: they
     * follow each other. Not of layers that are full or dilated */
    const struct tree_node *nodes;
    struct backend_lists lists; /* of items that attend; not of trees, nor of dilated layers */
    /* Blocks that each query visits for each kv head, where it sees more; 0: all that it sees. Its
     * newest block is one of them, the sequence's first the second, and the others are those whose
     * keys could have the largest product with a q of the kv head's q heads, by each dimension's
     * largest and smallest value of a block's keys. Of items that attend; not of trees, with lists,
     * nor in layers with a window, branches or ALiBi. In pools of stripes blocks are the longer
     * sequence's, of which the last query sees more, and the batch's extremes say what is known of
     * their keys */
    uint32_t n_chosen;
    /* Of items with n_chosen in pools with n_summaries, else NULL; of host_alloc. Written before
     * poll returns the batch: [n_tokens][num_kv_heads][n_chosen] places in block_table of the
     * blocks that the query visits for the kv head, ascending, UINT32_MAX behind the last; of
     * queries that visit all that they see, too. The tables of these items, and of no others, may
     * name summaries: not where the item appends, and only those that a block was copied to. Every
     * choice is what it would be with the block there. Nothing is read in place of a block that is
     * not there: where one is among those that a query visits for a kv head, its out and lse of
     * that head's q heads may be anything, and all else is right */
    uint32_t *chosen;
    /* The sequence is a part of a longer one, where its first token is the key_base-th: sink tokens
     * are the longer one's, and sink logits count where it is 0. A multiple of the segments of the
     * layer's branches; not in pools of stripes */
    uint32_t key_base;
    /* Of full items, whose queries are behind all keys that they may see: query t is at
     * pos + t + ahead, from where its window reaches back, and its segments. 0, or n_tokens and
     * more */
    uint32_t ahead;
};

/* entry `index` of `row` of the block table becomes `block`; backends with a mirror apply it before
 * anything else of the batch, in any order: those of one entry that is read name the same block */
struct backend_patch {
    uint32_t row, index, block;
};

/* Whole block src -> dst (all layers), before any append of the batch; a dst is in one copy only.
 * Where dst is a summary it becomes that of src, which is full, before whole blocks are copied. A
 * block that comes back is moved in, and needs no copy: its bytes say the same. */
struct backend_copy {
    uint32_t src, dst;
};

/* One token of all layers, K and V with their scales. */
struct backend_token_copy {
    uint32_t from_block, from_slot, to_block, to_slot;
};

/* A word that says how far others are: 4-byte aligned, where an item's addresses may be. It is
 * the caller's and stays until poll has handed the batch back. */
struct backend_word {
    uint32_t *word;
    uint32_t value;
};

/* Has the word reached its value? It may be up to 2^31 - 1 ahead of it, and may wrap. */
static inline bool backend_word_is_reached(const struct backend_word *w)
{
    return (int32_t)(__atomic_load_n(w->word, __ATOMIC_ACQUIRE) - w->value) >= 0;
}

/* Outputs of one item that several devices computed, each over other keys: rows are queries' heads,
 * as in an item's out and lse, part k's out_at and lse_at behind the base of part k. A merged out
 * is their sum, weighted by exp(lse), in f32 or better; its lse is that of all. */
struct backend_merge {
    uint64_t out_at, lse_at; /* multiples of 16 */
    void *out; /* as an item's */
    float *lse; /* may be NULL */
    uint32_t pos, n_tokens; /* of the queries */
    uint32_t is_full; /* all of them see as far as the last */
};

enum { BACKEND_MAX_PARTS = 8 };

/* Part k has nothing of queries that see no further than a position below k * stripe; its rows of
 * them are not read. */
struct backend_merges {
    const struct backend_merge *list; /* [n] */
    uint32_t n, n_parts, stripe;
    const void *parts[BACKEND_MAX_PARTS]; /* 16-byte aligned, memory that the device reads */
};

struct backend_block_layer {
    uint32_t block, layer;
};

/* What choices go by in a pool of stripes, where no device has all keys of a block: of n blocks in
 * one layer each, for each kv head the largest value of their keys in each dimension, then the
 * smallest, as backend_extremes_dtype has them. Either they are made of the keys that are here,
 * behind the appends of the batch; or they are given, joined of all stripes, and choices of this
 * batch and of later ones go by them until anything is written to the block in that layer, or the
 * pool is resized, or could not be. Every block that a query has the choice of, but the sequence's
 * first and the query's newest, must have been given. */
struct backend_extremes {
    const struct backend_block_layer *list; /* [n] */
    uint32_t n;
    bool is_given;
    void *bytes; /* [n][num_kv_heads][2][head_dim_k], 64-byte aligned, of host_alloc; written before
                    poll returns the batch where they are made */
};

struct backend_pool;

struct backend_batch {
    struct backend_pool *pool;
    const struct backend_item *items; /* no two APPEND items of one (row, layer) */
    const struct backend_patch *patches;
    const struct backend_copy *copies;
    uint32_t n_items, n_patches, n_copies;
    /* Where info says BACKEND_HAS_WORDS, else NULL. wait: nothing of the batch begins, and no
     * tensor of it is read, before the word has reached its value. The batch holds its place
     * meanwhile: later ones may be held up, and close and what is ordered with batches wait with
     * it. So the caller sees to it that the word is written, and not by a later batch.
     * signals: each word becomes its value when all outputs are there, before poll hands the batch
     * back; not if the batch fails. The device writes them in the order of the list. */
    const struct backend_word *wait, *signals; /* one; [n_signals] */
    uint32_t n_signals;
    /* Where info says BACKEND_HAS_MERGES, else NULL: behind all attention of the batch, when the
     * words have reached their values (which are as `wait`). */
    const struct backend_merges *merges;
    const struct backend_word *merge_waits; /* [n_merge_waits] */
    uint32_t n_merge_waits;
    const struct backend_extremes *extremes; /* where info says BACKEND_HAS_EXTREMES, else NULL */
    void *user; /* the caller's, untouched */

    /* written by the backend before poll returns the batch */
    attn_status status; /* ATTN_OK, or why none of the items can be trusted */
    uint64_t device_ns; /* time on the device */
    uint64_t kv_bytes; /* cached K and V read */
    uint64_t kv_shared_bytes; /* not read, because items had them in common with another */
    uint32_t n_splits; /* parts the attention work was cut into */
};

/* A whole block on its way between a pool and host memory of host_alloc or host_register, laid out
 * as block_read has it; or from a pool of the same geometry of another backend of this module. */
struct backend_move {
    struct backend_pool *pool;
    uint32_t block, peer_block;
    bool is_in; /* to the pool; else out of it */
    const struct backend_pool *peer; /* it comes in from peer_block of this one; NULL: see bytes */
    void *bytes; /* [n_bytes] */
    size_t n_bytes; /* a block's */
    /* written before done is called */
    uint64_t sum[2]; /* XXH3 of 128 bits, low word first, of the bytes that were moved; not of those
                        of a peer's */
    attn_status status; /* of this move */
};

/* What is moved together. The caller's, with its list, until done is called. */
struct backend_moves {
    struct backend_move *list; /* [n], n >= 1, all in or all out */
    uint32_t n;
    void (*done)(struct backend_moves *m); /* once, on a thread of the backend's; must not block */
    void *user; /* the caller's, untouched */

    /* the backend's */
    struct backend_moves *next;
    uint32_t n_taken, n_done;
};

struct backend_config {
    uint64_t kv_bytes; /* KV memory of all pools together; taken at open, never grows */
    uint32_t max_batch_items; /* in one batch */
    uint32_t max_batch_tokens; /* query tokens in one batch */
    uint32_t n_threads; /* cpu: threads including the caller, 0: one a core */
    int32_t device_index; /* gpus */
    int import_fd; /* KV memory of a predecessor to map instead of taking new, -1: none */
};

enum {
    BACKEND_HAS_WORDS = 1 << 0, /* batches may have wait and signals */
    BACKEND_HAS_DEVICE_ADDRESSES = 1 << 1, /* items may lie in the device's memory */
    BACKEND_HAS_REGIONS = 1 << 2, /* region_open and the four behind it */
    BACKEND_HAS_MERGES = 1 << 3, /* batches may have merges; it has words and regions, too */
    BACKEND_HAS_TREES = 1 << 4, /* items may have nodes; it has tokens_copy */
    BACKEND_HAS_LISTS = 1 << 5, /* items may have lists */
    BACKEND_HAS_CHOICE = 1 << 6, /* items may have n_chosen */
    BACKEND_HAS_PARTS = 1 << 7, /* items may have key_base and ahead */
    BACKEND_HAS_EXTREMES =
        1 << 8, /* batches may have extremes, items of pools of stripes n_chosen */
    BACKEND_HAS_SUMMARIES = 1 << 9, /* pools may have n_summaries; it has choices, too */
};

/* Which device it is, for a process that would share memory of it. All zeros: host memory. */
struct backend_device_id {
    uint8_t uuid[16];
    uint32_t driver_version; /* as the driver counts: 13000 is 13.0 */
    uint32_t is_shared; /* processes run side by side on it (MPS), not in time slices */
};

/* Memory of the device that several processes map. */
struct backend_region {
    uint8_t *p; /* its address for the device */
    uint64_t bytes;
    void *handle; /* the backend's */
};
#define BACKEND_REGION_ALIGN (2u << 20) /* its bytes are a multiple */

/* n rows of row_bytes each, a step behind one another on either side. */
struct backend_rows {
    void *to;
    const void *from;
    uint64_t row_bytes, to_step, from_step;
    uint32_t n;
};

struct backend_info {
    char name[16]; /* "cpu", "cuda", "hip" */
    char device[128]; /* "AMD EPYC ..., avx512", "NVIDIA H200" */
    char driver[128]; /* versions of what drives it, empty for the cpu */
    uint64_t kv_bytes; /* as taken */
    uint32_t max_in_flight; /* batches that submit accepts before one must be polled */
    uint32_t n_processors; /* threads or SMs */
    uint32_t features; /* BACKEND_HAS_... */
    struct backend_device_id id;
    uint64_t memory_bytes_per_s; /* what the device's memory can give; 0: not known */
    uint64_t reached; /* devices of this module, opened by this process, whose memory it works with
                         where it is, by number; others' comes through the host's */
};

struct backend;

/* The table a backend fills. Unless said otherwise a slot may be called only between open and
 * close, on the engine thread. Every failure leaves a sentence naming field and value (or the
 * failed device call) in last_error. */
struct backend_ops {
    uint32_t abi; /* BACKEND_ABI */
    const char *name;

    /* How many devices there are, by the driver's numbers; without a driver 0. NULL: one, whatever
     * its number. */
    uint32_t (*n_devices)(void);
    /* Takes the device and its KV memory. May block for seconds. On failure *out_b is still set
     * when memory allowed, only for last_error and close. Errors: ATTN_ENOTSUP no such device or
     * driver, ATTN_ENOMEM kv_bytes does not fit (message names both sizes). */
    attn_status (*open)(const struct backend_config *c, struct backend **out_b);
    /* Accepts NULL and half-opened backends; waits for batches in flight. */
    void (*close)(struct backend *b);
    const char *(*last_error)(const struct backend *b); /* never NULL; valid until the next call */
    void (*info)(const struct backend *b, struct backend_info *out);

    /* Can this geometry be computed? ATTN_ENOTSUP names the missing feature, ATTN_EINVAL the
     * field. */
    attn_status (*pool_check)(struct backend *b, const struct backend_pool_config *c);
    /* Bytes the pool's blocks would take from kv_bytes. */
    uint64_t (*pool_bytes)(const struct backend *b, const struct backend_pool_config *c);
    /* Whether pool_open with this config, or pool_resize of p to its n_blocks (p NULL: open), would
     * find its memory clear. If not, it begins to be cleared beside the batches, unless other
     * memory is: ask again. Never waits. NULL: there is nothing to wait for. */
    bool (*memory_ready)(struct backend *b, struct backend_pool *p,
                         const struct backend_pool_config *c);
    /* Takes a range of the KV memory; a pool of the same geometry and place after an import finds
     * its bytes, another pool's are zeroed. ATTN_ENOMEM: message names wanted and free bytes. */
    attn_status (*pool_open)(struct backend *b, const struct backend_pool_config *c,
                             struct backend_pool **out_pool);
    /* Where its range is; never 0. */
    uint64_t (*pool_place)(const struct backend_pool *p);
    /* The most blocks that it can have where it is: what follows its range is no pool's. */
    uint32_t (*pool_room)(const struct backend_pool *p);
    /* Its range becomes that of n_blocks, where it is, and its rows have room for max_row_blocks;
     * what the table's entries and the blocks say stays, of blocks below both counts. What is new
     * has been zeroed when this returns. Summaries have other numbers then, and are of nothing, as
     * after an error. Waits for batches in flight, of which none may be of this pool, nor any move.
     * Errors, nothing else changed: ATTN_ENOMEM more than its room, or no memory for what else it
     * needs; ATTN_EDEVICE. Fewer blocks, and no longer rows, always succeed. */
    attn_status (*pool_resize)(struct backend_pool *p, uint32_t n_blocks, uint32_t max_row_blocks);
    /* Takes the KV memory for what choices go by, of blocks and of the pool's n_summaries, which
     * the first batch with either of them takes else. Batches may be in flight. ATTN_ENOMEM, whose
     * message names wanted and free bytes: the pool has no summaries from now on. NULL: the backend
     * has none. */
    attn_status (*summaries_open)(struct backend_pool *p);
    /* Gives the range back. Waits for batches in flight, of which none may be of this pool. */
    void (*pool_close)(struct backend_pool *p);
    /* What computes which work of the pool, and why that, in one line for people: "steps, prompts:
     * attend_rows (...); trees, lists: ...". At most bytes, with the 0. NULL: it doesn't say. */
    void (*pool_kernels)(const struct backend_pool *p, char *out, size_t bytes);

    /* Of pools with q_nope_dim; NULL: the backend has none, and no such pool may be opened.
     * weights_write takes n bytes of a layer's weights from offset on; what is there already is
     * compared. Weights live where blocks do: a pool that finds its blocks after an import finds
     * them. No batch may attend in a layer
     * that has not all of them. Errors, nothing changed: ATTN_EINVAL it begins behind what is
     * there, or passes the end; ATTN_EEXIST other bytes are there. */
    attn_status (*weights_write)(struct backend_pool *p, uint32_t layer, uint64_t offset,
                                 const void *bytes, uint64_t n);
    /* How many bytes of the layer's weights are there, from the start. */
    uint64_t (*weights_have)(const struct backend_pool *p, uint32_t layer);
    /* n bytes of a layer's weights from offset on. Blocks until done. Errors: ATTN_EINVAL not all
     * of them are there; ATTN_EDEVICE. */
    attn_status (*weights_read)(struct backend_pool *p, uint32_t layer, uint64_t offset, uint64_t n,
                                void *out_bytes);

    /* Starts a batch; never waits for the device. ATTN_OK: it comes back exactly once from poll,
     * whatever happens. Error: nothing was started. A batch without ATTEND items is fine. */
    attn_status (*submit)(struct backend *b, struct backend_batch *batch);
    /* The oldest batch in flight if it is done within wait_ns (0: look only), else NULL. */
    struct backend_batch *(*poll)(struct backend *b, uint64_t wait_ns);

    /* Whole blocks to and from host memory ([layer][K|V][kv_head][block_tokens][head_dim], with
     * scales if quantised), after all batches submitted before. Block until done. */
    attn_status (*block_read)(struct backend_pool *p, uint32_t block, void *out_bytes);
    attn_status (*block_write)(struct backend_pool *p, uint32_t block, const void *bytes);
    /* Copies n tokens, after all batches submitted before; no block is both read and written.
     * Blocks until done. ATTN_EINVAL a block or slot out of range; ATTN_EDEVICE. */
    attn_status (*tokens_copy)(struct backend_pool *p, const struct backend_token_copy *list,
                               uint32_t n);
    /* Begins to move blocks beside the batches and returns at once. A move waits for nothing, so
     * the caller sees to it that until it is done no batch writes to a block that goes out, a
     * peer's too (its bytes are worthless then), and none reads or writes one that comes in. close
     * waits for all of them. ATTN_OK: done is called, whatever happens.
     * Errors: ATTN_EINVAL a block out of range; ATTN_ENOMEM; ATTN_EDEVICE; nothing was begun. */
    attn_status (*moves_submit)(struct backend *b, struct backend_moves *m);

    /* A descriptor that keeps the KV memory alive beyond this process; the caller closes it.
     * ATTN_ENOTSUP where the device cannot. */
    attn_status (*export_memory)(struct backend *b, int *out_fd);

    /* Host memory the device reads and writes in place, 4096-byte aligned. Any thread. */
    attn_status (*host_alloc)(struct backend *b, size_t bytes, void **out_p);
    void (*host_free)(struct backend *b, void *p, size_t bytes);
    /* The same for memory that exists (page-aligned). */
    attn_status (*host_register)(struct backend *b, void *p, size_t bytes);
    void (*host_unregister)(struct backend *b, void *p, size_t bytes);

    /* Where info says BACKEND_HAS_REGIONS. region_open takes new memory (import_fd -1), whose bytes
     * may be anything, or maps what another process exported, all of which must be as large;
     * import_fd stays the caller's. ATTN_ENOMEM, ATTN_EINVAL: why says what does not fit. A region
     * outlives who made it; no batch may use it from region_close on. Any thread. */
    attn_status (*region_open)(struct backend *b, uint64_t bytes, int import_fd,
                               struct backend_region *out_r, char *why, size_t why_bytes);
    attn_status (*region_export)(struct backend *b, const struct backend_region *r, int *out_fd);
    void (*region_close)(struct backend *b, struct backend_region *r); /* a zeroed one is fine */
    /* Another backend of this module may use it from now on. ATTN_ENOTSUP: it doesn't reach it. */
    attn_status (*region_reach)(struct backend *b, const struct backend_region *r,
                                struct backend *other);
    /* Between memory of host_alloc and a region that the backend may use, beside the batches: it
     * waits for none of them. Blocks until done. ATTN_EDEVICE. */
    attn_status (*rows_copy)(struct backend *b, const struct backend_rows *r);
};

/* The table every loadable module (attnd-cuda.so, attnd-hip.so) exports under this name. */
#define BACKEND_MODULE_SYMBOL "attnd_backend_module"
typedef const struct backend_ops *(*backend_module_fn)(void);

/* The built-in CPU backend. */
const struct backend_ops *backend_cpu(void);

/* Checks what every backend needs of a geometry (ranges, multiples, sizes that overflow) and names
 * the field and value in why. Backends call it first in pool_check. */
attn_status backend_pool_config_check(const struct backend_pool_config *c, char *why,
                                      size_t why_bytes);

/* What is wrong with the item's flags in its layer, which is one of the pool's; NULL: nothing. */
const char *backend_item_fault(const struct backend_pool_config *c,
                               const struct backend_item *item);
/* Tokens of the item's lists, or blocks that its queries choose, of all kv heads. */
uint64_t backend_item_listed(const struct backend_pool_config *c, const struct backend_item *item);
/* One past the last of the pool's own tokens that the item is about. */
uint64_t backend_item_end(const struct backend_pool_config *c, const struct backend_item *item);

/* Checks a batch's extremes, NULL is fine. ATTN_EINVAL: why names what it is. Backends that have
 * them call it in submit. */
attn_status backend_extremes_check(const struct backend_pool_config *c,
                                   const struct backend_extremes *x, char *why, size_t why_bytes);

/* Checks a batch's wait, signals and merges for a backend of that name and info.features.
 * ATTN_EINVAL, ATTN_ENOTSUP: why names what it is. Backends with any of them call it in submit. */
attn_status backend_words_check(const struct backend_batch *batch, const char *name,
                                uint32_t features, char *why, size_t why_bytes);

#endif
