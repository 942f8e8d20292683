/* engine_general.c: see engine_general.h. */
#include "daemon/engine_general.h"

#include <stdio.h>
#include <stdlib.h>

#include "daemon/cards.h"
#include "daemon/engine_answer.h"
#include "daemon/engine_pool.h"
#include "daemon/engine_pools.h"
#include "daemon/engine_session.h"
#include "daemon/log.h"
#include "daemon/stats.h"

static void reply_pool(struct engine *e, struct request *req, const struct pool *p)
{
    struct kv_pool_spec ks;
    Attnd__PoolReply body = ATTND__POOL_REPLY__INIT;
    Attnd__Reply header = ATTND__REPLY__INIT;
    body.pool = pool_handle(e, p);
    body.spec = p->spec.wire;
    kv_pool_info(e->parts.kv, p->id, &ks, &body.n_free_blocks);
    if (e->parts.cards != NULL)
        body.n_free_blocks += (uint32_t)cards_pool_count(e->parts.cards, e, p->id.index).free;
    header.body_case = ATTND__REPLY__BODY_POOL;
    header.pool = &body;
    engine_answer(e, req, &header);
}

static void give_pool(struct engine *e, struct request *req, struct pool *p, uint32_t session)
{
    pool_hold(e, p, session);
    reply_pool(e, req, p);
}

static void run_pool_create(struct engine *e, struct request *req, uint32_t session)
{
    const Attnd__PoolSpec *spec = req->wire.header->pool_create->spec;
    struct tenant *who = session_tenant(e, session);
    struct pool *p;
    char why[2 * WHY_BYTES];
    if (spec == NULL) {
        engine_refuse(e, req, ATTN_EINVAL, "pool_create.spec is missing");
        return;
    }
    if (engine_is_draining(e) && pool_find(e, who, spec->name) == NULL) {
        engine_refuse(e, req, ATTN_EDRAINING, "the daemon is draining: no new pools");
        return;
    }
    attn_status st = pool_create(e, who, spec, &p, why, sizeof why);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", why);
    else
        give_pool(e, req, p, session);
}

static void run_pool_describe(struct engine *e, struct request *req, uint32_t session)
{
    const char *name = req->wire.header->pool_describe->name;
    struct pool *p = pool_find(e, session_tenant(e, session), name);
    if (p == NULL)
        engine_refuse(e, req, ATTN_ENOTFOUND, "no pool is named \"%.100s\"", name);
    else
        give_pool(e, req, p, session);
}

/* The operator sees all, a tenant what is its own. */
static void run_stats(struct engine *e, struct request *req, const struct tenant *who)
{
    Attnd__StatsReply body = ATTND__STATS_REPLY__INIT;
    Attnd__Reply header = ATTND__REPLY__INIT;
    char *json = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&json, &n);
    attn_status st = f == NULL                 ? ATTN_ENOMEM
                     : tenant_is_operator(who) ? stats_write_json(f)
                                               : stats_write_tenant_json(f, who->stats);
    if (f != NULL && fclose(f) != 0)
        st = ATTN_ENOMEM;
    body.json = json;
    header.body_case = ATTND__REPLY__BODY_STATS;
    header.stats = &body;
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "no memory for the stats");
    else
        engine_answer(e, req, &header);
    free(json);
}

/* What changes the daemon for everybody: refuses it to whom it may not, and logs who did it. */
static bool admin_enter(struct engine *e, struct request *req, const char *what)
{
    char who[PRINCIPAL_TEXT_BYTES];
    principal_format(&req->principal, who);
    if (request_may_administer(req)) {
        log_info("admin: %s, asked for by %s", what, who);
        return true;
    }
    log_warn("admin: %s refused to %s", what, who);
    engine_refuse(e, req, ATTN_EAUTH,
                  "%s is for root, the daemon's user and the admin socket (listen.admin); you are "
                  "%s",
                  what, who);
    return false;
}

static void run_drain(struct engine *e, struct request *req)
{
    Attnd__Reply header = ATTND__REPLY__INIT;
    if (!admin_enter(e, req, "drain"))
        return;
    engine_drain(e);
    engine_answer(e, req, &header);
}

bool general_run(struct engine *e, struct request *req, uint32_t session)
{
    switch (req->wire.header->body_case) {
    case ATTND__REQUEST__BODY_POOL_CREATE:
        run_pool_create(e, req, session);
        return true;
    case ATTND__REQUEST__BODY_POOL_DESCRIBE:
        run_pool_describe(e, req, session);
        return true;
    case ATTND__REQUEST__BODY_STATS:
        run_stats(e, req, session_tenant(e, session));
        return true;
    case ATTND__REQUEST__BODY_DRAIN:
        run_drain(e, req);
        return true;
    default:
        return false;
    }
}
