/* canary.h: compares one output of the device, a query row of one head of an item, with the float64
 * reference over the cached K and V. Everything compared is copied first, K and V one block at a
 * time, so that the engine need not wait.
 */
#ifndef ATTND_DAEMON_ENGINE_STEP_CANARY_H
#define ATTND_DAEMON_ENGINE_STEP_CANARY_H

#include "kernels/kv_layout.h"

enum {
    CANARY_MAX_KEYS = 16384, /* longer items are not checked */
    CANARY_MAX_DIM = 256,
};

struct canary_item {
    const struct backend_pool_config *config;
    uint32_t layer, pos, n_tokens;
    const void *q, *out; /* [n_tokens][num_q_heads][...], q_dtype */
    const float *lse; /* [n_tokens][num_q_heads] or NULL */
};

struct canary {
    /* what is checked */
    uint32_t layer, head, kv_head, pos, n_keys, n_blocks;
    uint32_t dk, dv, block_tokens;
    attn_dtype q_dtype, kv_dtype;
    struct kv_layout layout;
    struct attn_layer_spec spec; /* for this head */
    float sink_logit, alibi_slope;
    float q[CANARY_MAX_DIM], got[CANARY_MAX_DIM], got_lse;
    bool has_lse;
    float *k, *v; /* [n_blocks * block_tokens][dk], [dv] */
};

/* Picks row and head by chance, copies q and the device's output, and allocates room for K and V.
 * Release with canary_fini. ATTN_ENOTSUP: too many keys. ATTN_ENOMEM. */
attn_status canary_init(struct canary *c, const struct canary_item *item, uint64_t chance);
void canary_fini(struct canary *c);
/* Does the row see a key of entry i of the item's block table? Others may be another sequence's. */
bool canary_sees_block(const struct canary *c, uint32_t i);
/* Copies from entry i a block as backend block_read returns it. Call it once for each of n_blocks
 * that the row sees. */
void canary_take_block(struct canary *c, uint32_t i, const uint8_t *block);

struct canary_verdict {
    double ratio; /* largest error over its bound: above 1 is wrong; NaN: cannot be judged */
    double got, expected; /* where the error is largest */
    uint32_t element; /* index in the head's output; dv: the lse */
};
/* Computes the reference and compares. Any thread. ATTN_ENOMEM. */
attn_status canary_judge(const struct canary *c, struct canary_verdict *out);

#endif
