/* resize.c: changes the number of a pool's blocks while it is used: for the holder of a handle, and
 * by name for operators. */
#include <stdio.h>

#include "clients/libattn/pool/pool.h"

struct resize_taking {
    uint32_t n_blocks, n_free_blocks;
};

static attn_status take_size(struct client_request *r, const struct wire_reply *reply)
{
    struct resize_taking *t = r->take_arg;
    const Attnd__PoolReply *b = reply->header->pool;
    if (reply->header->body_case != ATTND__REPLY__BODY_POOL || b->spec == NULL) {
        snprintf(r->result.message, sizeof r->result.message, "answer to a resize without a pool");
        return ATTN_EPROTO;
    }
    *t = (struct resize_taking){b->spec->n_blocks, b->n_free_blocks};
    return ATTN_OK;
}

static attn_status resize(attn_client *c, const char *tenant, const char *name, uint32_t n_blocks,
                          uint64_t timeout_us, struct resize_taking *out)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__PoolResize r = ATTND__POOL_RESIZE__INIT;
    r.name = (char *)name; /* packing only reads it, and the tenant */
    r.tenant = (char *)(tenant != NULL ? tenant : "");
    r.n_blocks = n_blocks;
    req.body_case = ATTND__REQUEST__BODY_POOL_RESIZE;
    req.pool_resize = &r;
    return client_call(c, &req, timeout_us, take_size, out);
}

attn_status attn_pool_resize(attn_pool *p, uint32_t n_blocks, uint64_t timeout_us)
{
    struct resize_taking t;
    if (p == NULL)
        return error_set(ATTN_EINVAL, "pool is NULL");
    attn_status st = client_check(p->client);
    if (st == ATTN_OK)
        st = pool_check(p);
    if (st == ATTN_OK)
        st = resize(p->client, NULL, p->spec.name, n_blocks, timeout_us, &t);
    if (st != ATTN_OK)
        return st;
    p->spec.n_blocks = t.n_blocks;
    p->n_free_blocks = t.n_free_blocks;
    return ATTN_OK;
}

attn_status attn_client_pool_resize(attn_client *c, const char *tenant, const char *name,
                                    uint32_t n_blocks, uint64_t timeout_us,
                                    uint32_t *out_free_blocks)
{
    struct resize_taking t;
    if (name == NULL || out_free_blocks == NULL)
        return error_set(ATTN_EINVAL, "name or out_free_blocks is NULL");
    attn_status st = client_check(c);
    if (st == ATTN_OK)
        st = resize(c, tenant, name, n_blocks, timeout_us, &t);
    if (st == ATTN_OK)
        *out_free_blocks = t.n_free_blocks;
    return st;
}
