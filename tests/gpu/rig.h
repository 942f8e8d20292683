/* rig.h: a backend with one pool and a few sequences, driven the way the engine drives it: blocks
 * are allocated, shared and copied on write here, table changes go out as patches. Two rigs fed by
 * the same seed make the same batches, so their results can be compared.
 */
#ifndef ATTND_TESTS_GPU_RIG_H
#define ATTND_TESTS_GPU_RIG_H

#include "kernels/backend.h"

#define RIG_POLL_NS UINT64_C(600000000000) /* ends what hangs; a busy machine is slow */

#define RIG_MAX_SEQS 160
#define RIG_MAX_ITEMS 256
#define RIG_MAX_LAYERS 4

struct rig_seq {
    bool is_open;
    uint32_t n_blocks;
    uint32_t len[RIG_MAX_LAYERS];
    uint32_t *blocks; /* [max_row_blocks] */
};

struct rig {
    const struct backend_ops *ops;
    struct backend *b;
    struct backend_pool *pool;
    struct backend_pool_config config;
    char *memory; /* host memory for q, k, v, out, lse: reset before every batch */
    size_t memory_bytes, memory_used;
    uint32_t *refs; /* [n_blocks] */
    uint32_t first_block, next_block; /* blocks below first_block are never given out */
    struct rig_seq seqs[RIG_MAX_SEQS];
    struct backend_item items[RIG_MAX_ITEMS];
    struct backend_patch *patches;
    struct backend_copy *copies;
    uint32_t n_items, n_patches, n_copies, patches_capacity;
};

uint32_t rig_random(uint64_t *state); /* 32 bits */
float rig_normal(uint64_t *state);

/* A pool of plain geometry to change: bf16, 8/2 heads of 64, blocks of 16, one layer. */
struct backend_pool_config rig_config(const struct attn_layer_spec *layers, uint32_t n_layers);

/* The begin of a test program [NAME [TESTS]]: loads the backend (default cuda), takes the seed
 * from ATTND_TEST_SEED, and filters the tests. 0, or what the program ends with, and why on
 * stdout: 77 without a device, 1 if the backend cannot be loaded (what was built must load where
 * there is no driver, too) or opened. */
int rig_start(int argc, char **argv, const struct backend_ops **out_ops, uint64_t *out_seed);
/* Opens backend and pool; fails the test if that fails. kv_bytes 0: what the pool needs. */
void rig_open(struct rig *r, const struct backend_ops *ops, const struct backend_pool_config *c,
              uint64_t kv_bytes, int import_fd);
void rig_close(struct rig *r);

void rig_begin(struct rig *r); /* a new batch */
void *rig_take(struct rig *r, size_t bytes); /* host memory, 64-byte aligned, poisoned with 0xff */
/* Adds an item that appends n tokens (random k, v from *state) at pos and attends with them. */
struct backend_item *rig_step(struct rig *r, uint32_t seq, uint32_t layer, uint32_t pos, uint32_t n,
                              uint32_t flags, uint64_t *state);
void rig_fork(struct rig *r, uint32_t from, uint32_t to, uint32_t len);
void rig_truncate(struct rig *r, uint32_t seq, uint32_t len);
void rig_drop(struct rig *r, uint32_t seq);
/* Runs the batch and waits; fails the test if the batch fails. */
void rig_run(struct rig *r);

/* Fail the test, naming what and the seed, unless two rigs of the same history agree.
 * items: the relative L2 distance of the outputs and the largest difference of the lse; NaN-safe.
 * blocks: every block in use holds the same bytes, up to where its tokens end. */
void rig_compare_items(const struct rig *a, const struct rig *b, const char *what, uint64_t seed);
void rig_compare_blocks(struct rig *a, struct rig *b, const char *what, uint64_t seed);

#endif
