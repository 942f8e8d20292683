/* canary.h: compares one output of the device, a query row of an item, with the float64 reference
 * over the cached K and V: the heads of one kv head, all of them unless they see many keys
 * together. Everything compared is copied first, K and V one block at a time, weights one head at a
 * time, so that the engine need not wait.
 */
#ifndef ATTND_DAEMON_ENGINE_STEP_CANARY_H
#define ATTND_DAEMON_ENGINE_STEP_CANARY_H

#include "kernels/kv_layout.h"
#include "kernels/visible.h"

enum {
    CANARY_MAX_KEYS = 16384, /* longer items are not checked */
    CANARY_MAX_DIM = BACKEND_MAX_LATENT_K,
    CANARY_MAX_QUERIES = 64, /* of an item, that are kept to compute it again */
    CANARY_MAX_HEAD_KEYS = 8 * CANARY_MAX_KEYS, /* keys that all heads see together */
    CANARY_MAX_WEIGHT_BYTES = 32 << 20, /* of all heads */
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
    uint32_t layer, kv_head, pos, n_keys, n_blocks;
    uint32_t head, n_heads; /* the first, and how many: of the kv head's */
    uint32_t group; /* q heads of a kv head */
    uint32_t n_chosen; /* 0: the row visits all that it sees */
    uint32_t dk, dv, block_tokens;
    uint32_t q_dim, out_dim; /* of q and out as items have them */
    uint32_t q_nope_dim; /* 0: they are dk and dv, else canary_take_weights is to be called */
    attn_dtype q_dtype, kv_dtype;
    struct kv_layout layout;
    struct attn_layer_spec spec; /* for these heads: its arrays are biases */
    float *biases; /* [n_heads] sink logits, [n_heads] slopes; those that the layer has */
    float *got; /* [n_heads][out_dim], [n_heads] lse */
    uint8_t *weights; /* [n_heads][q_nope_dim + out_dim][dv], as q_dtype; NULL: no projections */
    uint32_t n_weighed; /* heads whose weights are there */
    bool has_lse;
    float *k, *v; /* [n_blocks * block_tokens][dk], [dv] */
    /* the row, the last of them, and what came before it in the item, so that the same kernels
     * compute it again: positions pos + 1 - n_queries on, as q_dtype */
    uint32_t n_queries, num_q_heads;
    uint8_t *queries; /* [n_queries][num_q_heads][q_dim] */
};

/* Picks row and heads by chance, copies queries and the device's output, and allocates room for K
 * and V. Release with canary_fini. ATTN_ENOTSUP: too many keys. ATTN_ENOMEM. */
attn_status canary_init(struct canary *c, const struct canary_item *item, uint64_t chance);
void canary_fini(struct canary *c);
/* The keys that the row sees; of a dilated layer all, though it sees fewer. */
struct visible canary_visible(const struct canary *c);
/* Does the row see a key of entry i of the item's block table? Others may be another sequence's. */
bool canary_sees_block(const struct canary *c, uint32_t i);
/* Copies from entry i a block as backend block_read returns it. Call it once for each of n_blocks
 * that the row sees. */
void canary_take_block(struct canary *c, uint32_t i, const uint8_t *block);

/* Of pools with projections: whether it wants weights, of another head each time, which lie at
 * canary_weights_at in its layer's, so many bytes; it takes them as the layer has them. */
bool canary_wants_weights(const struct canary *c);
uint64_t canary_weights_at(const struct canary *c);
uint64_t canary_weights_bytes(const struct canary *c);
void canary_take_weights(struct canary *c, const void *bytes);

/* Keeps of the queries only the row's. */
void canary_keep_row(struct canary *c);
/* Takes the output of the queries, computed again, in place of the first: [n_queries][num_q_heads]
 * [out_dim] and, if it has one, lse. */
void canary_take_output(struct canary *c, const void *out, const float *lse);

/* --- canary_judge.c --------------------------------------------------------------------------- */

struct canary_verdict {
    /* largest error over its bound: above 1 is wrong; NaN: no head can be judged, for some value is
     * NaN or inf or beyond what f32 has room for on the way, which a worker's values can be, or two
     * blocks are too alike to say in f32 which of them is chosen */
    double ratio;
    double got, expected; /* where the error is largest */
    uint32_t head; /* of the layer's */
    uint32_t element; /* index in the head's output; out_dim: the lse */
};
/* Computes the reference and compares. Any thread. ATTN_ENOMEM. */
attn_status canary_judge(const struct canary *c, struct canary_verdict *out);

#endif
