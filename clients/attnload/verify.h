/* verify.h: keeps a random sample of a run's outputs and their lse, and recomputes it in float64
 * afterwards, from K, V and q that are made again (data.h). One a worker; not shared between
 * threads. */
#ifndef ATTNLOAD_VERIFY_H
#define ATTNLOAD_VERIFY_H

#include "clients/attnload/data.h"
#include "clients/attnload/options.h"

/* One query token's output of one kv head's group of q heads. */
struct verify_sample {
    struct data_stream data;
    uint32_t layer, pos, kv_head;
};

struct verify {
    const struct options *o;
    struct verify_sample *samples; /* [capacity] */
    uint8_t *outs; /* [capacity][group][dim of v] dtype */
    float *lses; /* [capacity][group] */
    size_t out_bytes; /* of one sample */
    const void *weights;
    uint32_t group; /* q heads of a kv head */
    uint32_t n, capacity;
    uint64_t n_seen, random;
};

struct verify_result {
    uint64_t n_verified, n_mismatched;
    double max_error, max_l2; /* absolute; relative L2 of a sample */
    double max_lse_error; /* absolute */
    /* with --choose-blocks instead: what share of a query's softmax over all that it sees is in the
     * blocks that it visits */
    double sum_recall, min_recall; /* of rows: n_rows of them */
    uint64_t n_rows;
    char first[160]; /* the first mismatch in words */
};

/* Capacity 0: keeps nothing. weights: with --heads, the caller's. */
attn_status verify_init(struct verify *v, const struct options *o, const void *weights,
                        uint32_t capacity, uint64_t seed);
void verify_fini(struct verify *v);
/* out, lse: the rows [num_q_heads][preset_dim_out] and [num_q_heads] of the token at pos; NULL only
 * at capacity 0. Each offer is kept equally likely. */
void verify_offer(struct verify *v, const struct data_stream *data, uint32_t layer, uint32_t pos,
                  const void *out, const float *lse);
/* Recomputes all that was kept and adds to *r. ATTN_ENOMEM. */
attn_status verify_run(struct verify *v, struct verify_result *r);
void verify_join(struct verify_result *dst, const struct verify_result *src);

#endif
