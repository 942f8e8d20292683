/* cpu.h: the parts of the cpu backend among themselves.
 *
 * cpu.c      the table: open, blocks, memory
 * batch.c    slots of the table: submit, poll
 * memory.c   the one range of KV memory
 * pool.c     slots of the table: pools
 * append.c   writes k and v, copies blocks
 * attend.c   plans a batch's attention and runs it on the threads
 * project.c  heads to latents before the attention, latents to heads behind it
 * attend_shared.c   keys that items have in common: which, and their partial results
 * bench/     the same attention the obvious way (cpu_naive.c), and measurement (cpu_bench.c)
 *
 * The engine thread owns everything here; workers see a batch only inside cpu_threads_run.
 */
#ifndef ATTND_KERNELS_CPU_CPU_H
#define ATTND_KERNELS_CPU_CPU_H

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/threads.h"
#include "kernels/kv_range.h"
#include "kernels/moves.h"
#include "kernels/plan.h"
#include "kernels/prefix.h"

#define CPU_ERROR_BYTES 256
#define CPU_MAX_TAKERS 8
#define CPU_FEATURES                                                                               \
    (BACKEND_HAS_WORDS | BACKEND_HAS_DEVICE_ADDRESSES | BACKEND_HAS_REGIONS | BACKEND_HAS_MERGES | \
     BACKEND_HAS_TREES | BACKEND_HAS_LISTS | BACKEND_HAS_CHOICE | BACKEND_HAS_PARTS |              \
     BACKEND_HAS_EXTREMES | BACKEND_HAS_SUMMARIES)

/* Memory that is made ready for a pool by a thread of its own: its pages taken, what was in them
 * zeroed. */
struct cpu_clear {
    struct kv_range range; /* bytes 0: none */
    uint64_t old_end; /* what lies from here on was no pool's */
    pthread_t thread;
    bool has_thread;
    _Atomic bool is_done, is_unwanted;
};

/* [block][layer].. of all pools behind one another, in a memfd. */
struct cpu_memory {
    uint8_t *base; /* NULL: none */
    uint64_t bytes;
    struct kv_range *ranges; /* of pools */
    uint64_t n_written; /* bytes from the start that pools had */
    int fd; /* -1: none */
    struct cpu_clear clear;

    /* take the pages, slice by slice from the start, while others work already */
    pthread_t takers[CPU_MAX_TAKERS];
    uint32_t n_takers;
    _Atomic uint64_t next_slice;
    _Atomic bool is_closing;
};

/* bytes must fit what the machine has to spare now. Their pages are taken afterwards, by up to
 * CPU_MAX_TAKERS threads, no more than n_threads, that the call leaves behind. */
attn_status cpu_memory_open(struct cpu_memory *m, uint64_t bytes, int import_fd, uint32_t n_threads,
                            char *why, size_t why_bytes);
/* The pages of this range are taken when it returns, so that touching them can't fail any more.
 * ATTN_ENOMEM: they can't be had. */
attn_status cpu_memory_take(struct cpu_memory *m, uint64_t offset, uint64_t bytes, char *why,
                            size_t why_bytes);
/* Whether the range can be taken and zeroed in no time, or has been; if not, that begins, unless it
 * is still being done for another. Never waits. */
bool cpu_memory_ready(struct cpu_memory *m, uint64_t offset, uint64_t bytes);
/* The range becomes a pool's: its pages are taken, and what a pool has left in them is zeroed, by
 * cpu_memory_ready or now. ATTN_ENOMEM. */
attn_status cpu_memory_give(struct cpu_memory *m, uint64_t offset, uint64_t bytes, char *why,
                            size_t why_bytes);
/* The range is a pool's already: nothing is zeroed. ATTN_ENOMEM. */
attn_status cpu_memory_keep(struct cpu_memory *m, uint64_t offset, uint64_t bytes, char *why,
                            size_t why_bytes);
void cpu_memory_close(struct cpu_memory *m);

struct segment {
    struct attend_rows rows;
    uint32_t first_tile; /* those in front are computed with others' */
    uint32_t group; /* of rows with queries; of an item's: the last one it is in, or PREFIX_NONE */
    uint32_t first_query; /* in shared.queries, where there is a group: of the rows, of the item */
    _Atomic uint32_t n_done; /* splits computed; who computes the last one merges */
};

/* What items of a batch have in common. */
struct shared {
    bool is_off; /* for measurements: nothing is looked for */
    struct prefixes prefixes; /* n_groups 0: nothing */
    struct prefix_item *items; /* [n_items] */
    struct shared_query *queries; /* of order[0], order[1] .. */
    uint32_t *query_of; /* [n_items] its first of queries, if it is in a group */
    size_t *at; /* [n_groups] where a group's results begin in results */
    float *results; /* of a group: [kv_head][query][q head of the kv head] rows of row_floats */
    uint32_t row_floats; /* o, then max and sum */
    uint32_t items_capacity, query_of_capacity, queries_capacity, at_capacity;
    size_t results_capacity;
};

/* What a batch's choosing items visit. */
struct choice {
    size_t *first; /* [n_items] where an item's lists begin in blocks; SIZE_MAX: it visits all */
    uint32_t *blocks; /* of an item [token][kv_head] lists of cpu_chosen_blocks, or shorter */
    struct backend_block_layer *missing; /* blocks of which nothing is kept yet */
    float *bounds; /* of each thread */
    uint32_t first_capacity, blocks_capacity, missing_capacity, bounds_capacity;
};

/* A query token of a slice of a batch whose heads are projected. */
struct project_token {
    const uint8_t *q;
    uint8_t *out;
    uint32_t layer;
};

/* What a slice of such a batch has between heads and latents. */
struct projected {
    uint8_t *q, *o; /* [token][num_q_heads] rows of head_dim_k, of head_dim_v */
    size_t q_bytes, o_bytes;
    struct backend_item *items;
    struct project_token *tokens;
    uint32_t items_capacity, tokens_capacity;
};

struct backend {
    struct backend_config config;
    struct cpu_memory memory;
    struct cpu_threads *threads;
    const struct cpu_isa *isa;
    struct backend_pool *pools;
    struct moves *moves; /* NULL: nothing was moved yet */
    struct backend_batch *batch; /* submitted, not yet polled */
    bool is_attended, is_done; /* but for its merges; all of it; else it waits for a word */

    struct attend_scratch **scratch; /* [n_threads] */
    struct plan plan;
    struct segment *segments;
    uint32_t *segment_tiles;
    uint32_t segments_capacity, tiles_capacity;
    struct shared shared;
    struct choice choice;
    struct projected projected;
    float *slots; /* partials of split segments */
    size_t slots_capacity;
    uint8_t *evict; /* bench/cpu_bench.c: what is read to empty the caches */
    size_t evict_bytes;
    char error[CPU_ERROR_BYTES];
};

struct backend_pool {
    struct backend *b;
    struct backend_pool *next;
    struct kv_range range;
    struct backend_pool_config config;
    struct attend_geometry geometry;
    uint8_t *base; /* of block 0 */
    /* Of pools that project, at the beginning of the range, in front of base (weights.h); else NULL
     */
    uint8_t *weights;
    struct attn_layer_spec *layers; /* config.layers, with the arrays they point to */
    float *layer_arrays;
    /* choose.c; NULL before any of its items chose */
    uint8_t *has_extremes; /* [backend_n_names][num_layers]; of pools of stripes: those given */
    uint8_t *extremes; /* [backend_n_names][num_layers][num_kv_heads] maxima and minima of keys */
    struct kv_range extremes_range;
};

/* batch.c: slots of the table. */
attn_status cpu_submit(struct backend *b, struct backend_batch *batch);
struct backend_batch *cpu_poll(struct backend *b, uint64_t wait_ns);
/* No slot: what was submitted is computed when it returns. */
void cpu_compute_all(struct backend *b);

/* pool.c: slots of the table. */
attn_status cpu_pool_check(struct backend *b, const struct backend_pool_config *c);
uint64_t cpu_pool_bytes(const struct backend *b, const struct backend_pool_config *c);
attn_status cpu_pool_open(struct backend *b, const struct backend_pool_config *c,
                          struct backend_pool **out_pool);
uint64_t cpu_pool_place(const struct backend_pool *p);
uint32_t cpu_pool_room(const struct backend_pool *p);
bool cpu_pool_memory_ready(struct backend *b, struct backend_pool *p,
                           const struct backend_pool_config *c);
attn_status cpu_pool_resize(struct backend_pool *p, uint32_t n_blocks, uint32_t max_row_blocks);
void cpu_pool_close(struct backend_pool *p);
void cpu_pool_kernels(const struct backend_pool *p, char *out, size_t bytes);
void cpu_pool_free(struct backend_pool *p); /* no slot: what it has beside its range */

/* All copies of whole blocks, then all appends of the batch. */
void cpu_append(struct backend *b, const struct backend_batch *batch);
/* All attention of the batch; fills kv_bytes and n_splits. n_shards: parts that the keys of a query
 * are cut into, 0: as many as keep the threads busy. ATTN_ENOMEM: error is set. */
attn_status cpu_attend(struct backend *b, const struct cpu_isa *isa, struct backend_batch *batch,
                       uint32_t n_shards);

/* project.c: cpu_attend of a pool whose items carry heads, and slots of the table. */
attn_status cpu_project_attend(struct backend *b, const struct cpu_isa *isa,
                               struct backend_batch *batch);
void cpu_projected_fini(struct projected *p);
attn_status cpu_weights_write(struct backend_pool *p, uint32_t layer, uint64_t offset,
                              const void *bytes, uint64_t n);
uint64_t cpu_weights_have(const struct backend_pool *p, uint32_t layer);
attn_status cpu_weights_read(struct backend_pool *p, uint32_t layer, uint64_t offset, uint64_t n,
                             void *out_bytes);

/* choose.c: chooses for the batch's items. ATTN_ENOMEM: error is set. */
attn_status cpu_choose(struct backend *b, const struct cpu_isa *isa,
                       const struct backend_batch *batch);
void cpu_choice_fini(struct choice *c);
/* Makes the summaries that the batch copies blocks to. ATTN_ENOMEM: error is set. */
attn_status cpu_summaries_make(struct backend *b, const struct cpu_isa *isa,
                               const struct backend_batch *batch);
/* Makes or keeps the batch's extremes. ATTN_ENOMEM: error is set. */
attn_status cpu_extremes_exchange(struct backend *b, const struct cpu_isa *isa,
                                  const struct backend_batch *batch);
/* The most blocks that a query of the item visits; 0: all. */
uint32_t cpu_chosen_blocks(const struct backend_pool *p, const struct backend_item *item);
/* Keys of the blocks that the query visits for a kv head, there or not. */
uint32_t cpu_chosen_keys(const struct backend_pool *p, const struct backend_item *item,
                         uint32_t token);
/* Places of those blocks in its table, ascending; of the i-th item of the batch, which chooses. */
const uint32_t *cpu_chosen_list(const struct backend *b, const struct backend_pool *p,
                                const struct backend_item *item, uint32_t i, uint32_t token,
                                uint32_t kv_head);
/* The block's bytes change, or those that the item appends to. */
void cpu_extremes_forget(struct backend_pool *p, uint32_t block);
void cpu_extremes_forget_item(struct backend_pool *p, const struct backend_item *item);
/* Gives back what they take of the KV memory; a choice takes it again. */
void cpu_extremes_free(struct backend_pool *p);
attn_status cpu_summaries_open(struct backend_pool *p);
/* Can they be made again? Not in a pool of stripes, which knows its own keys alone, nor where there
 * are summaries. */
bool cpu_extremes_can_go(const struct backend_pool *p);

/* attend_shared.c: finds what the batch's items have in common where computing that once for all
 * pays. ATTN_ENOMEM. */
attn_status cpu_shared_find(struct backend *b, const struct cpu_isa *isa,
                            const struct backend_batch *batch);
void cpu_shared_fini(struct shared *s);
/* Query tokens whose rows, of one kv head, share a pass over K and V; 0: a token has too many. */
uint32_t cpu_shared_queries_at_once(const struct attend_geometry *g, const struct cpu_isa *isa);
/* The item's keys that are in groups: a multiple of TILE_TOKENS. */
uint32_t cpu_shared_keys(const struct backend *b, const struct attend_geometry *g, uint32_t item);
/* Bytes of K and V that are read once instead of once per item. */
uint64_t cpu_shared_bytes(const struct backend *b, const struct backend_batch *batch);
/* A segment with queries is computed: *p is kept as its group's results. */
void cpu_shared_keep(struct backend *b, const struct segment *s, const struct attend_partial *p);
/* Adds the results of the segment's group, and of those in front, to *p. */
void cpu_shared_add(const struct backend *b, const struct segment *s,
                    const struct attend_partial *p);
attn_status cpu_attend_naive(struct backend *b, const struct backend_batch *batch);

/* Writes the sentence for last_error. */
__attribute__((format(printf, 2, 3))) static inline void cpu_fail(struct backend *b,
                                                                  const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(b->error, sizeof b->error, format, args);
    va_end(args);
}

/* Where one head's row of K (or V) of a token is, and its scales (NULL if not quantised). */
static inline uint8_t *cpu_row(const struct backend_pool *p, const struct backend_item *item,
                               uint32_t token, uint32_t kv_head, bool is_v, uint8_t **out_scales)
{
    const struct attend_geometry *g = &p->geometry;
    const struct kv_layout *l = &g->layout;
    uint32_t at = token & (g->block_tokens - 1);
    uint64_t block = item->block_table[token >> g->block_shift];
    uint8_t *layer = p->base + block * l->block_bytes + item->layer * l->layer_bytes;
    size_t head_row = (size_t)kv_head * g->block_tokens + at;
    *out_scales = NULL;
    if (l->is_quantised)
        *out_scales = layer + (is_v ? l->v_scales + head_row * l->v_scale_bytes
                                    : l->k_scales + head_row * l->k_scale_bytes);
    return layer + (is_v ? l->v_offset + head_row * l->v_row_bytes : head_row * l->k_row_bytes);
}

#endif
