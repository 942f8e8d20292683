/* canary.h: compares one output of the device, a query row of one head of an item, with the float64
 * reference over the cached K and V. Everything compared is copied first, K and V one block at a
 * time, so that the engine need not wait.
 */
#ifndef ATTND_DAEMON_ENGINE_STEP_CANARY_H
#define ATTND_DAEMON_ENGINE_STEP_CANARY_H

#include "kernels/kv_layout.h"

enum {
    CANARY_MAX_KEYS = 16384, /* longer items are not checked */
    CANARY_MAX_DIM = BACKEND_MAX_LATENT_K,
    CANARY_MAX_QUERIES = 64, /* of an item, that are kept to compute it again */
    CANARY_MAX_WEIGHTS = 2 * BACKEND_MAX_HEAD_DIM * BACKEND_MAX_HEAD_DIM, /* elements of a head */
    CANARY_PROJECTED = 16, /* elements of a head that are compared behind its projection */
};

struct canary_item {
    const struct backend_pool_config *config;
    uint32_t layer, pos, n_tokens;
    bool is_full; /* each row sees all keys, whatever the layer is */
    uint32_t n_chosen; /* as backend_item.n_chosen */
    const void *q, *out; /* [n_tokens][num_q_heads][...], q_dtype, as items have them */
    const float *lse; /* [n_tokens][num_q_heads] or NULL */
};

struct canary {
    /* what is checked */
    uint32_t layer, head, kv_head, pos, n_keys, n_blocks;
    uint32_t group; /* q heads of a kv head */
    uint32_t n_chosen; /* 0: the row visits all that it sees */
    uint32_t dk, dv, block_tokens;
    uint32_t q_dim, out_dim; /* of q and out as items have them */
    uint32_t q_nope_dim; /* 0: they are dk and dv, else canary_take_weights is to be called */
    uint32_t first; /* element that is compared, then every out_dim / CANARY_PROJECTED-th */
    attn_dtype q_dtype, kv_dtype;
    struct kv_layout layout;
    struct attn_layer_spec spec; /* for this head */
    float sink_logit, alibi_slope;
    float q[CANARY_MAX_DIM], got[CANARY_MAX_DIM], got_lse;
    double q_error; /* how far the rounding of projections may move a score, over its |k| */
    float *weights; /* [q_nope_dim + out_dim][dv], of the head */
    bool has_lse;
    float *k, *v; /* [n_blocks * block_tokens][dk], [dv] */
    /* the row, the last of them, and what came before it in the item, so that the same kernels
     * compute it again: positions pos + 1 - n_queries on, as q_dtype */
    uint32_t n_queries, num_q_heads;
    uint8_t *queries; /* [n_queries][num_q_heads][q_dim] */
};

/* Picks row and head by chance, copies queries and the device's output, and allocates room for K
 * and V. Release with canary_fini. ATTN_ENOTSUP: too many keys. ATTN_ENOMEM. */
attn_status canary_init(struct canary *c, const struct canary_item *item, uint64_t chance);
void canary_fini(struct canary *c);
/* Does the row see a key of entry i of the item's block table? Others may be another sequence's. */
bool canary_sees_block(const struct canary *c, uint32_t i);
/* Copies from entry i a block as backend block_read returns it. Call it once for each of n_blocks
 * that the row sees. */
void canary_take_block(struct canary *c, uint32_t i, const uint8_t *block);

/* Of pools with projections: the head's weights lie at canary_weights_at in its layer's, so many
 * bytes; they are given once, as the layer has them. ATTN_ENOMEM */
uint64_t canary_weights_at(const struct canary *c);
uint64_t canary_weights_bytes(const struct canary *c);
attn_status canary_take_weights(struct canary *c, const void *bytes);

/* Keeps of the queries only the row's. */
void canary_keep_row(struct canary *c);
/* Takes the output of the queries, computed again, in place of the first: [n_queries][num_q_heads]
 * [out_dim] and, if it has one, lse. */
void canary_take_output(struct canary *c, const void *out, const float *lse);

struct canary_verdict {
    /* largest error over its bound: above 1 is wrong; NaN: cannot be judged, for some value is NaN
     * or inf or beyond what f32 has room for on the way, which a worker's values can be, or two
     * blocks are too alike to say in f32 which of them is chosen */
    double ratio;
    double got, expected; /* where the error is largest */
    uint32_t element; /* index in the head's output; out_dim: the lse */
};
/* Computes the reference and compares. Any thread. ATTN_ENOMEM. */
attn_status canary_judge(const struct canary *c, struct canary_verdict *out);

#endif
