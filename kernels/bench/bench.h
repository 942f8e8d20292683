/* bench.h: the parts of attnbench among themselves.
 *
 * attnbench.c          tables, CSV
 * attnbench_options.c  arguments
 * attnbench_cells.c    what is measured
 * attnbench_run.c      one cell: fills a pool, times
 * attnbench_check.c    its outputs against the float64 reference
 * attnbench_devices.c  cells on one card and split over several
 * attnbench_dilated.c  the grid of dilated attention, whose rows are other ones
 */
#ifndef ATTND_KERNELS_BENCH_H
#define ATTND_KERNELS_BENCH_H

#include "kernels/backend_bench.h"
#include "kernels/cases.h"
#include "kernels/kv_layout.h"

#define BENCH_PAGED_CELLS 16
#define BENCH_BLOCK_TOKENS 16
#define BENCH_MAX_BATCH 256

struct bench_cell {
    const struct case_geometry *g;
    uint32_t batch, context;
    uint32_t max_context; /* lengths lie evenly between context and this; 0: all are context */
    uint32_t first_context; /* of the first sequence, 0: as the others */
    uint32_t new_tokens; /* query tokens, the last of each context; 0: one */
    uint32_t shared_tokens; /* all sequences begin with the same blocks of so many tokens */
    uint32_t n_prompts; /* the first sequences, which have so many; the others one. 0: all have */
    float best_public_us; /* 0: not known */
    attn_dtype kv_dtype; /* ATTN_DTYPE_NONE: bf16, as q */
};

/* NULL: no such grid. */
const struct bench_cell *bench_cells(const char *grid, uint32_t *out_n);
uint32_t bench_context(const struct bench_cell *c, uint32_t item); /* tokens of a sequence */
uint32_t bench_new_tokens(const struct bench_cell *c); /* of each prompt */
uint32_t bench_item_tokens(const struct bench_cell *c, uint32_t item); /* of a sequence */
uint64_t bench_kv_bytes(const struct bench_cell *c); /* K and V that one step reads */
attn_dtype bench_kv_dtype(const struct bench_cell *c);
double bench_flops(const struct bench_cell *c); /* of causal attention; the diagonal counts half */

struct bench_options {
    const char *backend;
    uint32_t runs, naive_runs, n_threads;
    uint64_t memory_bytes; /* 0: what the largest cell needs */
    uint32_t max_tokens; /* query tokens of a batch */
    bool is_alone; /* runs are waited for one by one */
    uint32_t device_index;
};

enum { BENCH_MAX_DEVICES = 8, BENCH_MAX_DEVICE = 127 };
struct bench_devices {
    uint32_t n, index[BENCH_MAX_DEVICES];
};

/* A device, its memory, and random bytes to fill pools with. */
struct bench {
    const struct backend_ops *ops;
    const struct backend_bench_ops *own; /* what the backend measures of itself */
    struct backend *b;
    struct bench_options options;
    uint64_t kv_bytes;
    uint16_t *random; /* [BENCH_RANDOM_BYTES / 2] bf16, about N(0, 1) */
    uint64_t rng;
    char error[512];
};

/* A cell in device memory: layers full of random K and V, one batch per layer. */
struct bench_setup {
    const struct bench_cell *cell;
    struct backend_pool *pool;
    struct kv_layout layout;
    uint32_t n_layers, n_blocks;
    uint32_t *tables; /* all sequences' blocks behind one another */
    uint32_t *first_block; /* [batch] where a sequence's start in tables */
    uint8_t *host; /* from host_alloc: q, then out of each layer */
    size_t host_bytes;
    struct backend_item *items; /* [n_layers][batch] */
    struct backend_batch *batches, **list; /* [n_layers] */
};

/* Prompts heat the device, which then runs slower: they are timed in bursts, each after a rest. */
#define BENCH_BURST_NS 50000000u
#define BENCH_REST_NS 250000000u

struct bench_times {
    double median_us, min_us;
};

struct bench_error {
    double max_abs, l2;
    bool is_allclose; /* atol = rtol = 0.01 over the rows checked, and no output anywhere is NaN */
    uint64_t n_rows, n_rows_checked; /* (sequence, query token, q head) */
};

/* A pool of the backend, opened anew if earlier pools have used its memory up. */
attn_status bench_pool_open(struct bench *x, const struct backend_pool_config *c,
                            struct backend_pool **out);
struct bench_times bench_times_of(uint64_t *ns, uint32_t n); /* sorts ns */
attn_status bench_time_in_bursts(struct bench *x, struct backend_batch *const *list, uint32_t n,
                                 const char *variant, uint32_t runs, uint64_t *out_ns);
/* The grid of dilated attention, its CSV and all; the exit code. match, csv: NULL: none. */
int bench_dilated(const struct bench_options *o, const char *match, FILE *csv);

/* "0,1": two to eight numbers. */
bool bench_devices_parse(const char *text, struct bench_devices *out);
/* Decode cells on the first card, and split over all by heads and by tokens; the exit code. */
int bench_devices(const struct bench_options *o, const struct bench_devices *devices,
                  const struct bench_cell *c, uint32_t n_cells);
void bench_cell_name(const struct bench_cell *c, char *dst, size_t n);

/* All return false with bench.error set. */
bool bench_open(struct bench *x, const struct bench_options *o, uint64_t largest_bytes);
void bench_close(struct bench *x);
uint64_t bench_setup_bytes(const struct bench_cell *c);
bool bench_setup_open(struct bench *x, const struct bench_cell *c, struct bench_setup *s);
void bench_setup_close(struct bench *x, struct bench_setup *s);
/* variant NULL: what the daemon runs. *out_is_supported false: not for this geometry. */
bool bench_time(struct bench *x, struct bench_setup *s, const char *variant, uint32_t runs,
                struct bench_times *out, bool *out_is_supported);
bool bench_time_read(struct bench *x, uint64_t bytes, struct bench_times *out);
/* Bytes of a block, as pools are filled with; `made` [block_bytes] is for those that have to be. */
const uint8_t *bench_block(const struct bench *x, const struct bench_setup *s, uint32_t block,
                           uint8_t *made);
/* Poisons the outputs, computes one step of two layers, compares with the float64 reference: rows
 * evenly over all, on all cores for about a quarter of a second. */
bool bench_check(struct bench *x, struct bench_setup *s, const char *variant,
                 struct bench_error *out);

#endif
