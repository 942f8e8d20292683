/* pool.h: a pool's handle, which sequences, steps and lanes are given. pool.c makes and releases
 * it, resize.c changes the size of its pool, weights.c sends
 * what its layers project with, spec.h has its spec on the wire.
 */
#ifndef ATTN_POOL_H
#define ATTN_POOL_H

#include "clients/libattn/core/core.h"

struct attn_pool {
    struct attn_client *client;
    uint32_t session_number; /* of the session it was made in */
    uint32_t id, n_free_blocks;
    bool is_released;
    bool is_coded; /* q, k and v travel as codes (proto/wire_codes.h) */
    struct attn_pool_spec spec;
    void *memory; /* what spec points to */
    const void **weights; /* [num_layers] the caller's, NULL: not given; NULL: none were */
};

/* What the daemon and wire_step_layout_of need of the pool. */
static inline struct wire_shape pool_shape(const struct attn_pool *p)
{
    const struct attn_pool_spec *s = &p->spec;
    return (struct wire_shape){s->num_q_heads,    s->num_kv_heads, s->head_dim_k, s->head_dim_v,
                               s->is_v_in_k != 0, s->q_dtype,      s->q_nope_dim, s->out_dim};
}

/* pool.c */

/* ATTN_ENOTFOUND: the pool is of an earlier session. */
attn_status pool_check(const struct attn_pool *p);
/* weights.c: whether the layer has weights to send. */
bool pool_has_weights(const struct attn_pool *p, uint32_t layer);
/* ATTN_EPROTO, with the sentence in r's result: the answer to `what` lacks its body. */
attn_status pool_reply_without_body(struct client_request *r, const char *what);

#endif
