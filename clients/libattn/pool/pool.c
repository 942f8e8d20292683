/* pool.c: handles of pools: making or finding a pool, and releasing it.
 *
 * A session holds a pool once, however many handles of it the client has. So the client counts its
 * handles, and the last one to be released gives up what was held by requests answered until then.
 * A request whose answer is still on its way keeps its hold.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/pool/pool.h"
#include "clients/libattn/pool/spec.h"

attn_status pool_reply_without_body(struct client_request *r, const char *what)
{
    snprintf(r->result.message, sizeof r->result.message, "answer to %s without its body", what);
    return ATTN_EPROTO;
}

attn_status pool_check(const struct attn_pool *p)
{
    if (p->session_number == atomic_load(&p->client->session_number))
        return ATTN_OK;
    return error_set_gone(
        ATTN_GONE_POOL,
        "pool \"%.100s\" is of a session before attn_client_reopen: create it again", p->spec.name);
}

/* ---- holds ---- */

static struct client_hold *find_locked(const struct attn_pool *p)
{
    struct client_hold *h;
    LIST_FOREACH(h, &p->client->holds, link) {
        if (h->session_number == p->session_number && h->pool == p->id)
            break;
    }
    return h;
}

/* The handle holds its pool, which this request found. Takes over hold, which is zeroed. */
static void hold_add(struct attn_pool *p, struct client_hold *hold, uint64_t request)
{
    struct attn_client *c = p->client;
    pthread_mutex_lock(&c->lock);
    struct client_hold *h = find_locked(p);
    if (h == NULL) {
        h = hold;
        *h = (struct client_hold){.session_number = p->session_number, .pool = p->id};
        LIST_INSERT_HEAD(&c->holds, h, link);
    }
    h->n_handles++;
    h->request = request > h->request ? request : h->request;
    pthread_mutex_unlock(&c->lock);
    if (h != hold)
        free(hold);
}

/* The handle counts no more. The request up to which the session releases it; 0: others hold on. */
static uint64_t take_from_count(struct attn_pool *p)
{
    uint64_t request = 0;
    pthread_mutex_lock(&p->client->lock);
    struct client_hold *h = find_locked(p);
    if (h != NULL && !p->is_released) {
        p->is_released = true;
        request = --h->n_handles == 0 ? h->request : 0;
    }
    pthread_mutex_unlock(&p->client->lock);
    return request;
}

/* The session has released holds up to a request, or it is not known to have: then the handle
 * counts again. Meanwhile handles may have come and gone, and another one may have been released,
 * too. */
static void note_answer(struct attn_pool *p, uint64_t request, bool is_done)
{
    pthread_mutex_lock(&p->client->lock);
    struct client_hold *h = find_locked(p);
    if (h != NULL && !is_done) {
        h->n_handles++;
        p->is_released = false;
    } else if (h != NULL && h->n_handles == 0 && h->request == request) {
        LIST_REMOVE(h, link);
        free(h);
    }
    pthread_mutex_unlock(&p->client->lock);
}

/* ---- making and finding ---- */

struct pool_taking {
    struct attn_pool *pool;
    struct client_hold *hold; /* NULL: taken over */
};

static attn_status take_pool(struct client_request *r, const struct wire_reply *reply)
{
    const Attnd__PoolReply *b = reply->header->pool;
    if (reply->header->body_case != ATTND__REPLY__BODY_POOL || b->spec == NULL)
        return pool_reply_without_body(r, "a pool request");
    struct pool_taking *t = r->take_arg;
    struct attn_pool *p = t->pool;
    p->id = b->pool;
    p->n_free_blocks = b->n_free_blocks;
    attn_status st = wire_spec_read(b->spec, &p->spec, &p->memory);
    if (st != ATTN_OK)
        snprintf(r->result.message, sizeof r->result.message,
                 st == ATTN_EPROTO ? "branch_segment_tokens and branch_rates differ in length"
                                   : "no memory for a pool's spec");
    if (st == ATTN_OK) {
        hold_add(p, t->hold, r->id);
        t->hold = NULL;
    }
    return st;
}

static attn_status pool_call(struct attn_client *c, Attnd__Request *req, uint64_t timeout_us,
                             struct attn_pool **out_pool)
{
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    struct attn_pool *p = calloc(1, sizeof *p);
    struct pool_taking t = {.pool = p, .hold = calloc(1, sizeof *t.hold)};
    if (p == NULL || t.hold == NULL) {
        st = error_set(ATTN_ENOMEM, "no memory for a pool");
    } else {
        p->client = c;
        p->session_number = atomic_load(&c->session_number);
        st = client_call(c, req, timeout_us, take_pool, &t);
    }
    free(t.hold);
    if (st == ATTN_OK)
        *out_pool = p;
    else
        attn_pool_close(p);
    return st;
}

attn_status attn_pool_create(attn_client *c, const struct attn_pool_spec *spec, uint64_t timeout_us,
                             attn_pool **out_pool)
{
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    if (spec == NULL || out_pool == NULL || spec->name == NULL)
        return error_set(ATTN_EINVAL, "spec, spec->name or out_pool is NULL");
    const size_t least = offsetof(struct attn_pool_spec, is_v_in_k);
    /* of a library without q_nope_dim: is_v_in_k, and nothing to fill the struct up */
    const size_t older = least + 2 * sizeof(uint32_t);
    if ((spec->struct_size != sizeof *spec && spec->struct_size != least &&
         spec->struct_size != older) ||
        spec->layer_struct_size != sizeof(struct attn_layer))
        return error_set(
            ATTN_EINVAL, "attn_pool_spec sizes %u and %u: this library knows %zu and %zu",
            spec->struct_size, spec->layer_struct_size, sizeof *spec, sizeof(struct attn_layer));
    if (spec->n_layers > WIRE_MAX_LAYERS || spec->num_q_heads > WIRE_MAX_HEADS ||
        (spec->n_layers > 0 && spec->layers == NULL))
        return error_set(ATTN_EINVAL, "%u layers, %u q heads: expected at most %u and %u",
                         spec->n_layers, spec->num_q_heads, WIRE_MAX_LAYERS, WIRE_MAX_HEADS);

    struct attn_pool_spec all = {.struct_size = sizeof all};
    struct wire_spec w;
    memcpy(&all, spec,
           spec->struct_size == older ? offsetof(struct attn_pool_spec, q_nope_dim)
                                      : spec->struct_size);
    all.struct_size = sizeof all;
    st = wire_spec_init(&w, &all);
    if (st == ATTN_OK) {
        Attnd__Request req = ATTND__REQUEST__INIT;
        Attnd__PoolCreate create = ATTND__POOL_CREATE__INIT;
        create.spec = &w.spec;
        req.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
        req.pool_create = &create;
        st = pool_call(c, &req, timeout_us, out_pool);
    }
    wire_spec_fini(&w);
    return st;
}

attn_status attn_pool_describe(attn_client *c, const char *name, uint64_t timeout_us,
                               attn_pool **out_pool)
{
    if (name == NULL || out_pool == NULL)
        return error_set(ATTN_EINVAL, "name or out_pool is NULL");
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__PoolDescribe describe = ATTND__POOL_DESCRIBE__INIT;
    describe.name = (char *)name;
    req.body_case = ATTND__REQUEST__BODY_POOL_DESCRIBE;
    req.pool_describe = &describe;
    return pool_call(c, &req, timeout_us, out_pool);
}

void attn_pool_close(attn_pool *p)
{
    if (p == NULL)
        return;
    free(p->weights);
    free(p->memory);
    free(p);
}

const struct attn_pool_spec *attn_pool_spec_of(const attn_pool *p)
{
    return &p->spec;
}

attn_status attn_pool_set_wire_dtype(attn_pool *p, attn_dtype dtype)
{
    if (p == NULL)
        return error_set(ATTN_EINVAL, "pool is NULL");
    const bool is_coded = dtype == ATTN_FP8_E4M3 && p->spec.q_dtype == ATTN_BF16;
    if (!is_coded && dtype != ATTN_DTYPE_NONE && dtype != p->spec.q_dtype)
        return error_set(ATTN_EINVAL,
                         "wire dtype %s and a pool of %s: tensors travel in the pool's dtype, or "
                         "those of a pool of bf16 in fp8_e4m3",
                         attn_dtype_name(dtype), attn_dtype_name(p->spec.q_dtype));
    if (is_coded && p->client->t->ops->is_shared)
        return error_set(ATTN_ENOTSUP,
                         "wire dtype fp8_e4m3: shared memory is read where it is, in bf16");
    p->is_coded = is_coded;
    return ATTN_OK;
}

uint32_t attn_pool_free_blocks(const attn_pool *p)
{
    return p->n_free_blocks;
}

attn_status attn_pool_release(attn_pool *p, uint64_t timeout_us)
{
    if (p == NULL)
        return error_set(ATTN_EINVAL, "pool is NULL");
    attn_status st = client_check(p->client);
    if (st != ATTN_OK)
        return st;
    if (pool_check(p) != ATTN_OK)
        return ATTN_OK; /* went with its session */
    uint64_t request = take_from_count(p);
    if (request == 0)
        return ATTN_OK;
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__PoolRelease release = ATTND__POOL_RELEASE__INIT;
    release.pool = p->id;
    release.request = request;
    req.body_case = ATTND__REQUEST__BODY_POOL_RELEASE;
    req.pool_release = &release;
    st = client_call(p->client, &req, timeout_us, NULL, NULL);
    if (st == ATTN_ENOTFOUND)
        st = ATTN_OK; /* it has gone, or the session has */
    note_answer(p, request, st == ATTN_OK);
    return st;
}
