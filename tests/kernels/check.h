/* check.h: runs sequences through a backend's vtable and compares with the float64 reference. Used
 * by the tests of every backend.
 *
 * A check owns one open backend; a run is one pool with a few sequences whose K and V it remembers.
 * Blocks are poisoned with NaN before use, outputs before each batch. Failures print what and where
 * (with the seed) and return false; nothing aborts.
 */
#ifndef ATTND_TESTS_KERNELS_CHECK_H
#define ATTND_TESTS_KERNELS_CHECK_H

#include "kernels/backend_bench.h"
#include "kernels/kv_layout.h"
#include "tests/kernels/cases.h"

#define CHECK_LAYERS 2
#define CHECK_MAX_SEQS 8
#define CHECK_MAX_COPIES 64 /* of a batch */
#define CHECK_MAX_TOKENS 1024 /* of a sequence */

struct check_seq {
    uint32_t len, n_blocks;
    uint32_t layer;
    uint32_t *table; /* [max_row_blocks] */
    uint32_t *own; /* the same, with no entry lost to others */
    float *k, *v; /* [CHECK_MAX_TOKENS][kv heads][dim], as the cache should read */
};

/* One item of a batch to be made; out and lse lie in the check's arena until the next run. */
struct check_item {
    uint32_t seq, pos, n_tokens, flags;
    bool wants_lse;
    const int32_t *parents; /* [n_tokens] of a tree; NULL: none */
    struct backend_lists lists; /* the caller's, until the next run */
    uint32_t n_chosen; /* check_outputs does not know it */
    bool wants_chosen;
    uint32_t key_base, ahead;
    void *q, *k, *v, *out; /* filled by check_submit */
    float *lse;
    uint32_t *chosen;
};

struct check {
    const struct backend_ops *ops;
    const struct backend_bench_ops *bench;
    struct backend *b;
    const char *name; /* as the backend was asked for */
    uint64_t seed, rng;
    uint8_t *arena; /* from host_alloc */
    size_t arena_bytes, arena_used;

    struct backend_pool *pool;
    struct backend_pool_config config;
    struct attn_layer_spec specs[CHECK_LAYERS];
    bool needs_room; /* as much as the pool's again is left of the KV memory */
    bool has_plain_layer; /* the last layer is not dilated, whatever the runs' layers are */
    struct check_seq seqs[CHECK_MAX_SEQS];
    uint32_t n_seqs, next_block;
    uint32_t foreign_block; /* of somebody else: what entries under a window name */
    struct backend_patch *patches;
    uint32_t n_patches;
    bool had_patches; /* the batch before */
    struct backend_copy copies[CHECK_MAX_COPIES];
    uint32_t n_copies;
    void *poison; /* one block */
    struct backend_item *front; /* the items of the batch before */
    uint32_t n_front, n_batches;
    uint64_t kv_bytes, kv_shared_bytes; /* of the batch before, as the backend said */
};

/* The beginning of a test program's main, whose arguments are [NAME [EVERY [OFFSET [TESTS]]]]:
 * opens the backend (cpu, cuda, hip; default cpu) and says what it is. EVERY and OFFSET replace
 * what is there; TESTS is a pattern of the tests to run, after ! of those to leave out. Not 0: the
 * program's exit code, 77 if the backend cannot be opened here. */
int check_start(struct check *c, int argc, char **argv, uint64_t seed, uint32_t *every,
                uint32_t *offset);
/* The tear-down of its group of tests: closes what check_start opened last. */
int check_close(void **state);

/* A pool of config (n_blocks, n_table_rows, max_row_blocks and layers are filled in here) with
 * n_seqs empty sequences; every block is poisoned. The layers are spec, with random sink logits and
 * slopes where asked. ATTN_ENOTSUP: the backend refuses the geometry, or it has groups of FP4
 * values that are not whole. */
attn_status check_run_begin(struct check *c, const struct backend_pool_config *config,
                            const struct attn_layer_spec *spec, bool has_sink_logits,
                            bool has_alibi, uint32_t n_seqs);
/* The same of a case's. */
attn_status check_begin(struct check *c, const struct case_geometry *g, struct case_dtype d,
                        const struct case_options *o, uint32_t n_seqs);
/* Does a step of shape have more pairs of a query, one of n_q_heads each, and a key than
 * ATTND_TEST_PAIRS, if that is set? A few such cases would take the executor most of a walk's time;
 * their geometries have shorter shapes, their shapes smaller geometries. */
bool check_is_too_long(const struct case_shape *shape, uint32_t n_q_heads);
/* 1; with ATTND_TEST_PAIRS n: of what a test walks beside the product, one in n then. */
uint32_t check_step(uint32_t n);
/* What a shape appends before its step, and the step. Returns the step's items. */
uint32_t check_shape(const struct case_shape *shape, struct check_item history[CASE_MAX_ITEMS],
                     uint32_t *out_n_history, struct check_item step[CASE_MAX_ITEMS]);
/* Random q, k, v (about unit size); allocates blocks in random order; poisons outputs; submits one
 * batch and waits. Every other one is submitted while the batch before it is in flight once more,
 * which must give the same bytes. poison_k and poison_v of check_poison are applied to what is
 * appended. */
bool check_submit(struct check *c, struct check_item *items, uint32_t n_items);
/* The next append of seq writes value at (token within the item, kv head, element). */
struct check_poison {
    bool is_set, is_v;
    uint32_t token, kv_head, element;
    float value;
};
extern struct check_poison check_poison;
/* The empty sequence `to` begins with the first n_blocks of `from`, in the same layer. */
void check_fork(struct check *c, uint32_t from, uint32_t to, uint32_t n_blocks);
/* Gives the sequence's block `index` another id, by a device copy in the next batch; the old block
 * is poisoned after it. */
void check_move_block(struct check *c, uint32_t seq, uint32_t index);
/* Does a query that says it visits these places of its table, n at most, visit a block that is not
 * there? Then its outputs may be anything. NULL: it has said nothing. */
bool check_is_missed(const struct check *c, const uint32_t *table, const uint32_t *said,
                     uint32_t n);
/* The block becomes a summary in the next batch, and is poisoned after it. */
void check_send_away(struct check *c, uint32_t seq, uint32_t index, uint32_t summary);
/* It is in this block from the next batch on, of these bytes. */
bool check_bring_back(struct check *c, uint32_t seq, uint32_t index, uint32_t block,
                      const void *bytes);
/* Every attended item against the reference: places of NaN and inf first, then the bound. */
bool check_outputs(struct check *c, const struct check_item *items, uint32_t n_items);
/* Submits the batch before again and compares bytes. What it did to block tables is part of it:
 * such a batch has q staged, so that it may be cut otherwise than one that changes none. */
bool check_again(struct check *c, const struct check_item *items, uint32_t n_items);
/* Submits the items once more, with these of their flags and outputs of their own, which out_again
 * has. */
bool check_repeat(struct check *c, const struct check_item *items, uint32_t n_items, uint32_t flags,
                  struct check_item *out_again);
/* Each item alone, attend only, gives the same bytes. */
bool check_alone(struct check *c, const struct check_item *items, uint32_t n_items);
/* Computes the items once more, attend only, through time_batch; their outputs are poisoned first.
 * ATTN_ENOTSUP: no such variant for this geometry. */
attn_status check_time(struct check *c, const char *variant, struct check_item *items,
                       uint32_t n_items);

/* Another backend of the check's kind, which is open, with little memory; a pool that it may have,
 * of plain layers and one row; and bytes of a block of it. */
struct check_small {
    struct backend *b;
    struct backend_config config;
    struct attn_layer_spec layers[CHECK_LAYERS];
    struct backend_pool_config pool;
    uint64_t block_bytes;
    uint8_t *in, *out, *zeros; /* in: none is 0 */
};
void check_small_open(struct check *c, struct check_small *s, uint64_t kv_bytes, uint32_t n_blocks);
void check_small_close(struct check *c, struct check_small *s);
/* Blocks [first, past) of a pool of s are `like`. */
void check_small_blocks(struct check *c, const struct check_small *s, struct backend_pool *p,
                        uint32_t first, uint32_t past, const uint8_t *like);

uint32_t check_random(struct check *c, uint32_t below);
float check_normal(struct check *c); /* about N(0, 1) */

#endif
