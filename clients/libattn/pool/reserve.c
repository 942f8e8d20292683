/* reserve.c: blocks of a pool that are the session's, whatever others do. */
#include <stdio.h>

#include "clients/libattn/pool/pool.h"

static attn_status take_room(struct client_request *r, const struct wire_reply *reply)
{
    uint32_t *n_free_blocks = r->take_arg;
    if (reply->header->body_case != ATTND__REPLY__BODY_PROBE)
        return pool_reply_without_body(r, "a reservation");
    *n_free_blocks = reply->header->probe->n_free_blocks;
    return ATTN_OK;
}

attn_status attn_pool_reserve(attn_pool *p, uint32_t n_blocks, uint64_t timeout_us,
                              uint32_t *out_free_blocks)
{
    uint32_t n_free_blocks;
    if (p == NULL)
        return error_set(ATTN_EINVAL, "pool is NULL");
    attn_status st = client_check(p->client);
    if (st == ATTN_OK)
        st = pool_check(p);
    if (st != ATTN_OK)
        return st;
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__PoolReserve r = ATTND__POOL_RESERVE__INIT;
    r.pool = p->id;
    r.n_blocks = n_blocks;
    req.body_case = ATTND__REQUEST__BODY_POOL_RESERVE;
    req.pool_reserve = &r;
    st = client_call(p->client, &req, timeout_us, take_room, &n_free_blocks);
    if (st == ATTN_OK && out_free_blocks != NULL)
        *out_free_blocks = n_free_blocks;
    return st;
}
