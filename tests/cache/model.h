/* model.h: a naive model of the cache, a simulated device, and random operations on cache,
 * model and device.
 *
 * The model keeps plain arrays and counts by searching; it predicts the status of every operation.
 * Its blocks have ids of its own that are never used twice. The device is an array of cells, one
 * for each (block, layer, token), written as a backend would: copies, then appends, at reserve.
 */
#ifndef TESTS_KV_MODEL_H
#define TESTS_KV_MODEL_H

#include "cache/kv_idle.h"
#include "tests/cache/kv_test.h"

#define M_LAYERS 2
#define M_BLOCK_TOKENS 4
#ifndef M_BLOCKS
#define M_BLOCKS 14
#endif
#define M_ROW 6
#define M_TOKENS (M_ROW * M_BLOCK_TOKENS)
#define M_TENANTS 2
#define M_NAMES 5
#define M_SLOTS (M_TENANTS * M_NAMES) /* slot = tenant * M_NAMES + name */
#define M_SEQUENCES 7
#define M_OWNERS 3
/* Of all layers of the pool; 0: they see everything. */
#ifndef M_WINDOW
#define M_WINDOW 0
#define M_KEPT 0
#endif
/* Of idle memory, one for each block there. */
#ifndef M_PAGES
#define M_PAGES 0
#endif
/* How often sequences say that their blocks are pinned, or are not; 0: never. */
#ifndef M_RETAINS
#define M_RETAINS 0
#endif
/* How often owners reserve blocks; 0: never. */
#ifndef M_RESERVES
#define M_RESERVES 0
#endif
/* How often trees grow and paths are committed. */
#ifndef M_TREES
#define M_TREES (M_PAGES > 0 ? 8 : M_RESERVES > 0 ? 5 : 10)
#endif
#define M_KEPT_BLOCKS ((M_KEPT + M_BLOCK_TOKENS - 1) / M_BLOCK_TOKENS)

struct model_seq {
    bool is_open;
    uint32_t owner, epoch;
    uint64_t request; /* that made the epoch */
    uint32_t n_blocks;
    uint64_t block[M_ROW];
    bool is_paged_out[M_ROW]; /* in idle memory, in place of a block */
    uint32_t hole; /* entries below name no block, past the kept ones */
    uint32_t len[M_LAYERS], latest[M_LAYERS];
    uint32_t token[M_LAYERS][M_TOKENS];
    uint32_t n_nodes, tree_pos, tree_seed; /* n_nodes 0: no tree */
    uint64_t adapter;
    uint32_t prompt, n_ids, id[M_TOKENS];
    enum { SAID_NOTHING, SAID_UNPINNED, SAID_PINNED } said; /* of all its blocks */
    uint32_t note_seed, note_bytes, note_epoch;
    uint64_t note_request; /* 0: no note was set */
    uint32_t n_looked_at; /* leading blocks that are published, the last as serial parent */
    uint64_t parent;
};

struct model_published {
    uint64_t serial, parent, used; /* serial 0: none */
    uint64_t block, adapter;
    bool was_found, is_pinned;
    uint32_t tenant, index;
    uint32_t id[M_BLOCK_TOKENS], token[M_LAYERS][M_BLOCK_TOKENS];
};

struct model_pending {
    bool is_outstanding, will_commit;
    uint32_t pos, n, value_seed;
    uint32_t n_copies, index[M_ROW];
    uint64_t old_block[M_ROW];
};

/* Blocks on their way; of what the cache chose, and of what it says it did. */
struct model_move {
    bool is_under_way, is_in, is_closed;
    uint32_t slot, n, index[M_ROW];
    bool is_gone[M_ROW];
    uint64_t block[M_ROW]; /* that go, or are set aside */
};

struct model {
    struct model_move move;
    uint32_t n_out, n_in;
    struct model_seq seq[M_SLOTS];
    struct model_pending pending[M_SLOTS][M_LAYERS];
    struct model_published published[M_BLOCKS];
    uint64_t next_block, clock;
    uint32_t n_hits, n_evicted, n_taken_back, n_unseen, n_lost;
    uint32_t n_less; /* blocks than M_BLOCKS */
    uint32_t reserved[M_OWNERS];
    uint32_t n_short; /* refused though there were free blocks, for what others have reserved */
    uint32_t n_unpinned; /* for the same reason */
    uint32_t ended; /* the highest epoch of a closed sequence */
    uint64_t last_request;
    struct model_seen {
        uint64_t floor, id[KV_MAX_SEEN]; /* highest first */
        uint32_t n;
    } seen[M_OWNERS];
};

enum op_kind {
    OP_OPEN,
    OP_FORK,
    OP_TRUNCATE,
    OP_CLOSE,
    OP_ADOPT,
    OP_TOKENS,
    OP_RESERVE,
    OP_TREE, /* a reserve of its nodes */
    OP_PATH, /* commits the path to node pos - 1; 0: none */
    OP_COMMIT,
    OP_CANCEL,
    OP_RECOVER,
    OP_UNSEEN,
    OP_FREE_TO,
    OP_RESIZE,
    OP_RETAIN,
    OP_SET_ASIDE,
    OP_MOVE_OUT,
    OP_MOVE_IN,
    OP_MOVE_END,
    OP_NOTE, /* of n bytes, made from value_seed */
    OP_N_KINDS
};

#define M_LISTED (1u << 31)
struct op {
    enum op_kind kind;
    uint32_t slot, to_slot, layer, pos, n, owner, value_seed;
    uint32_t prompt; /* whose ids are given */
    uint32_t tree_seed; /* of the parents */
    uint64_t adapter;
    uint64_t request;
    bool will_commit;
    bool is_copied; /* of a reserve */
    uint32_t
        /* of a move: M_LISTED and entries, 3 bits each; 0: which ones is the cache's to say */
        listed;
};

struct device {
    uint32_t cell[M_BLOCKS][M_LAYERS][M_BLOCK_TOKENS];
    uint32_t page[M_PAGES + 1][M_LAYERS][M_BLOCK_TOKENS];
};

/* model_apply.c */
/* The status that the cache must give; m changes as the cache must. */
attn_status model_apply(struct model *m, const struct op *op);
/* What is left of m after a kill and a recovery. */
void model_recover(struct model *m);

/* model_draw.c */
/* A random operation that makes sense for the model's state. *random is the generator's state. */
struct op model_op(const struct model *m, uint64_t *random);
const char *op_text(const struct op *op);

/* model_check.c */
extern const struct kv_config model_config;
/* Where bytes are that move or that a resize copies; set by who tests. */
extern struct device *model_device;
/* Blocks that resizes have copied. */
extern uint32_t model_n_moved;

/* A new arena with the pool that the model expects. */
struct kv *model_kv_open(void);
/* The same operation on the cache; a resize with its copies. t has been reset; mirror, if any, gets
 * the patches. */
attn_status model_kv_apply(struct kv *kv, const struct op *op, struct test_fx *t,
                           uint32_t mirror[M_SEQUENCES][M_ROW]);
/* The mirror has its row then. */
void model_kv_materialize(struct kv *kv, kv_seq_id seq, uint32_t mirror[M_SEQUENCES][M_ROW]);
/* What a batch does after a reserve that succeeded: m as after model_apply. */
void model_device_run(struct device *d, struct kv *kv, const struct model *m, const struct op *op,
                      const struct test_fx *t);
/* After an operation that succeeded: what of it only the cache knows, if it may be so; empty, or
 * why not. */
const char *model_learn(struct model *m, struct kv *kv, const struct op *op);
/* Empty, or a sentence with the first difference between the cache (and the device) and m: what
 * clients can see, and which blocks are shared. */
const char *model_difference(struct kv *kv, const struct model *m, const struct device *d);
/* The same without the sharing. */
const char *model_visible_difference(struct kv *kv, const struct model *m, const struct device *d);
/* Empty, or why what is published is not what both have and what some of them has, or not as it
 * was. */
const char *model_published_difference(struct kv *kv, const struct model *a, const struct model *b,
                                       const struct device *d);

#endif
