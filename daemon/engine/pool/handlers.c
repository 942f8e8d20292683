/* handlers.c: requests on pools: create, describe, release, reserve, resize. */
#include "daemon/engine/pool/handlers.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/kv_owner.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/published.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/pool/create.h"
#include "daemon/engine/pool/reserve.h"
#include "daemon/engine/pool/resize.h"

static void reply_pool(struct engine *e, const struct pool *p, struct answer *a)
{
    Attnd__PoolReply *body = answer_pool(a);
    body->pool = pool_handle(e, p);
    body->spec = p->spec.wire;
    body->n_free_blocks = (uint32_t)pool_count_all(e, p).free;
}

attn_status pool_create_run(struct engine *e, struct request *req, uint32_t session,
                            struct answer *a)
{
    const Attnd__PoolSpec *spec = req->wire.header->pool_create->spec;
    struct tenant *who = session_tenant(e, session);
    uint64_t id = req->wire.request_id;
    struct pool *p;
    if (spec == NULL)
        return answer_no(a, ATTN_EINVAL, "pool_create.spec is missing");
    if (kv_owner_has_seen(e->env.kv, session, id)) {
        attn_status found = pool_find_same(e, who, spec, &p, a->why, sizeof a->why);
        if (found == ATTN_ENOTFOUND || found == ATTN_EEXIST)
            return answer_no(a, ATTN_ESTALE,
                             "request %" PRIu64 " was carried out before, pool \"%.100s\" is gone "
                             "since",
                             id, spec->name);
        if (found == ATTN_OK)
            reply_pool(e, p, a);
        return found;
    }
    if (engine_is_draining(e) && pool_find(e, who, spec->name) == NULL)
        return answer_no(a, ATTN_EDRAINING, "the daemon is draining: no new pools");
    attn_status st = pool_create(e, who, spec, &p, a->why, sizeof a->why);
    if (st != ATTN_OK)
        return st;
    pool_hold(e, p, session, id);
    kv_owner_saw(e->env.kv, session, id);
    reply_pool(e, p, a);
    return ATTN_OK;
}

attn_status pool_describe_run(struct engine *e, struct request *req, uint32_t session,
                              struct answer *a)
{
    const char *name = req->wire.header->pool_describe->name;
    struct pool *p = pool_find(e, session_tenant(e, session), name);
    if (p == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "no pool is named \"%.100s\"", name);
    /* a repeat that a predecessor carried out holds nothing: the session may have released it
     * since */
    uint64_t id = req->wire.request_id;
    if (!kv_owner_has_seen(e->env.kv, session, id) && pool_hold(e, p, session, id))
        kv_owner_saw(e->env.kv, session, id);
    reply_pool(e, p, a);
    return ATTN_OK;
}

attn_status pool_release_run(struct engine *e, struct request *req, uint32_t session,
                             struct answer *a)
{
    const Attnd__PoolRelease *r = req->wire.header->pool_release;
    struct pool *p = pool_of_handle(e, session_tenant(e, session), r->pool);
    if (p == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "pool_release.pool is %" PRIu32 ", no such pool",
                         r->pool);
    if (r->request == 0 || r->request >= req->wire.request_id)
        return answer_no(a, ATTN_EINVAL,
                         "pool_release.request is %" PRIu64 ", not one before this, %" PRIu64,
                         r->request, req->wire.request_id);
    pool_release(e, p, session, r->request);
    return ATTN_OK;
}

/* A repeat, or what came after a later one, answers with what the session has reserved now. */
attn_status pool_reserve_run(struct engine *e, struct request *req, uint32_t session,
                             struct answer *a)
{
    const Attnd__PoolReserve *r = req->wire.header->pool_reserve;
    struct pool *p = pool_of_handle(e, session_tenant(e, session), r->pool);
    uint64_t id = req->wire.request_id;
    if (p == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "pool_reserve.pool is %" PRIu32 ", no such pool",
                         r->pool);
    attn_status st;
    if (!kv_owner_has_set(e->env.kv, session, p->id, KV_RESERVATION, id)) {
        st = pool_reserve(e, p, session, r->n_blocks, a->why, sizeof a->why);
        if (st != ATTN_OK)
            return st;
        kv_owner_set(e->env.kv, session, p->id, KV_RESERVATION, id);
    }
    answer_room(e, p, session, a);
    return ATTN_OK;
}

/* Sets *who to the owner of the pool: the session's tenant, or the one that an operator names. */
static attn_status resize_owner(struct engine *e, struct request *req, struct tenant **who,
                                struct answer *a)
{
    const char *name = req->wire.header->pool_resize->tenant;
    char asker[PRINCIPAL_TEXT_BYTES];
    if (name[0] == '\0' || (!tenant_is_operator(*who) && strcmp((*who)->name, name) == 0))
        return ATTN_OK;
    if (!request_may_administer(req)) {
        principal_format(&req->principal, asker);
        log_limited("changes refused", LOG_LEVEL_WARN, log_write,
                    "admin: resize of a pool of %.63s refused to %s", name, asker);
        return answer_no(a, ATTN_EAUTH,
                         "pool_resize.tenant is %.63s: only root and the daemon's user may ask "
                         "that; this is %s",
                         name, asker);
    }
    *who = tenants_find(e->env.tenants, name);
    if (*who == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "pool_resize.tenant: no tenant is named \"%.63s\"",
                         name);
    return ATTN_OK;
}

/* A repeat, or what came after a later one, answers with the pool's present size. */
attn_status pool_resize_run(struct engine *e, struct request *req, uint32_t session,
                            struct answer *a)
{
    const Attnd__PoolResize *r = req->wire.header->pool_resize;
    struct tenant *who = session_tenant(e, session);
    uint64_t id = req->wire.request_id;
    attn_status st = resize_owner(e, req, &who, a);
    if (st != ATTN_OK)
        return st;
    struct pool *p = pool_find(e, who, r->name);
    if (p == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "no pool%s%.63s is named \"%.100s\"",
                         r->tenant[0] != '\0' ? " of tenant " : "", r->tenant, r->name);
    if (!kv_owner_has_set(e->env.kv, session, p->id, KV_SIZE, id)) {
        st = pool_resize(e, p, r->n_blocks, a->why, sizeof a->why);
        if (st != ATTN_OK)
            return st;
        kv_owner_set(e->env.kv, session, p->id, KV_SIZE, id);
    }
    reply_pool(e, p, a);
    return ATTN_OK;
}
