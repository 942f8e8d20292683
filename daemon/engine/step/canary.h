/* canary.h: one output of the device against the float64 reference: one query row of one head of an
 * item, over the K and V that the cache holds. What is compared is copied here first, a block at a
 * time, so that the engine need not wait for it.
 */
#ifndef ATTND_DAEMON_ENGINE_STEP_CANARY_H
#define ATTND_DAEMON_ENGINE_STEP_CANARY_H

#include "kernels/kv_layout.h"

enum {
    CANARY_MAX_KEYS = 16384, /* longer items are not looked at */
    CANARY_MAX_DIM = 256,
};

struct canary_item {
    const struct backend_pool_config *config;
    uint32_t layer, pos, n_tokens;
    const void *q, *out; /* [n_tokens][num_q_heads][...], q_dtype */
    const float *lse; /* [n_tokens][num_q_heads] or NULL */
};

struct canary {
    /* what is looked at */
    uint32_t layer, head, kv_head, pos, n_keys, n_blocks;
    uint32_t dk, dv, block_tokens;
    attn_dtype q_dtype, kv_dtype;
    struct kv_layout layout;
    struct attn_layer_spec spec; /* of this head */
    float sink_logit, alibi_slope;
    float q[CANARY_MAX_DIM], got[CANARY_MAX_DIM], got_lse;
    bool has_lse;
    float *k, *v; /* [n_blocks * block_tokens][dk], [dv] */
};

/* Picks row and head by chance, copies q and what was computed, and takes memory for K and V.
 * ATTN_ENOTSUP: too many keys. ATTN_ENOMEM. canary_fini when it is done with. */
attn_status canary_init(struct canary *c, const struct canary_item *item, uint64_t chance);
void canary_fini(struct canary *c);
/* Entry i of the item's block table, as backend block_read gives it; each of n_blocks once. */
void canary_take_block(struct canary *c, uint32_t i, const uint8_t *block);

struct canary_verdict {
    double ratio; /* largest error over its bound: beyond 1 is wrong; NaN: nothing can be said */
    double got, expected; /* where it is largest */
    uint32_t element; /* of the head; dv: its lse */
};
/* Any thread. ATTN_ENOMEM. */
attn_status canary_judge(const struct canary *c, struct canary_verdict *out);

#endif
