/* tables.h: attnbench's tables of whole attention calls over contiguous tensors: the grids `sweep`
 * and `ladder`. Beside the rungs (rungs/rungs.h) stands the product's prompt kernel, "tuned",
 * through the backend's own table.
 *
 * tables.c          the device, one cell: tensors, check, times
 * tables_grids.c    the two grids
 * tables_encoder.c  ten batches of a small encoder
 */
#ifndef ATTND_KERNELS_TABLES_H
#define ATTND_KERNELS_TABLES_H

#include "kernels/bench/rungs/rungs.h"

#include <stdio.h>

#define RUNG_TUNED RUNG_COUNT /* the product's kernel, in lists of rungs */
#define TABLE_RUNGS (RUNG_COUNT + 1)

struct tables_options {
    const char *backend, *match; /* match NULL: every cell */
    const char *rung; /* NULL: every rung */
    uint32_t runs, n_threads;
    uint32_t max_tokens; /* 0: all lengths */
    bool has_f32, has_bf16;
    FILE *csv; /* NULL: none */
};

struct tables {
    struct tables_options options;
    const struct rungs_ops *ops;
    const struct backend_ops *backend;
    const struct backend_bench_ops *own;
    struct rungs *r;
    char device[160];
    float *f32; /* random values, about N(0, 1), that tensors are made of, */
    uint16_t *bf16; /* and the same rounded */
    double matmul_tflops[2]; /* of bf16, of f32 */
    bool is_wrong; /* an output was */
    char error[512];
};

/* One attention call: q, k, v, out [batch][n][heads][dim], full (no mask). */
struct table_cell {
    uint32_t batch, heads, dim, n;
    bool is_f32;
};

struct table_result {
    double avg_ms, std_ms, min_ms, tflops; /* tflops: by avg_ms */
    uint32_t runs;
    uint32_t streams; /* that copies and computing were on */
    double attention_share; /* of the time; 1 where the cell is attention alone */
    double max_abs, l2; /* relative, of the rows checked */
    bool is_right; /* nothing is NaN or inf anywhere, and l2 is within the bound of the type */
    uint64_t rows, rows_checked; /* (sequence, token, head) */
    uint64_t scratch_bytes;
};

/* A cell on the device. */
struct table_setup {
    const struct table_cell *c;
    uint64_t elements, bytes; /* of a tensor */
    void *q, *k, *v, *out, *scratch;
    uint64_t scratch_bytes;
    void *host; /* out, come back */
    uint64_t *checked; /* [n_checked] rows */
    double *want; /* [n_checked][dim] */
    uint32_t n_checked;
};

/* The product's kernel on such tensors. */
struct table_tuned {
    struct backend *b;
    struct backend_pool *pool;
    struct backend_item *items;
    struct backend_batch batch;
    uint32_t *blocks;
    struct bench_work *work;
};

/* All return false with t->error set. Closing accepts what is half open. */
bool tables_open(struct tables *t, const struct tables_options *o);
void tables_close(struct tables *t);
bool table_fail(struct tables *t, attn_status st, const char *what); /* ATTN_OK gives true */

const char *table_rung_name(const struct tables *t, uint32_t rung); /* NULL: not on this device */
/* It is on this device, and wanted. */
bool table_has_rung(const struct tables *t, uint32_t rung);
double table_flops(const struct table_cell *c);
/* Average, deviation and least of n times. */
void table_times(struct table_result *x, const double *ms, uint32_t n);
/* The CSV's lines, if there is one. */
void table_write(const struct tables *t, const char *kernel, uint32_t rung,
                 const struct table_cell *c, const struct table_result *x);
bool table_setup_open(struct tables *t, const struct table_cell *c, struct table_setup *s);
void table_setup_close(struct tables *t, struct table_setup *s);
/* Poisons the output, computes, compares with the float64 reference, times with cold caches. */
bool table_measure(struct tables *t, struct table_setup *s, uint32_t rung,
                   struct table_result *out);
/* is_appended: K and V come new with every run; else they are in the cache already. */
bool table_tuned_open(struct tables *t, const struct table_cell *c, const void *q, const void *k,
                      const void *v, void *out, bool is_appended, struct table_tuned *out_x);
void table_tuned_close(struct tables *t, struct table_tuned *x);

/* Measures and prints; false with t->error. */
bool tables_sweep(struct tables *t);
bool tables_ladder(struct tables *t);
bool tables_encoder(struct tables *t);

#endif
