/* pool.h: a pool's handle, which sequences, steps and lanes are given. pool.c makes and releases
 * it, resize.c changes the size of its pool, spec.h has its spec on the wire.
 */
#ifndef ATTN_POOL_H
#define ATTN_POOL_H

#include "clients/libattn/core/core.h"

struct attn_pool {
    struct attn_client *client;
    uint32_t session_number; /* of the session it was made in */
    uint32_t id, n_free_blocks;
    bool is_released;
    struct attn_pool_spec spec;
    void *memory; /* what spec points to */
};

/* pool.c */

/* ATTN_ENOTFOUND: the pool is of an earlier session. */
attn_status pool_check(const struct attn_pool *p);
/* ATTN_EPROTO, with the sentence in r's result: the answer to `what` lacks its body. */
attn_status pool_reply_without_body(struct client_request *r, const char *what);

#endif
