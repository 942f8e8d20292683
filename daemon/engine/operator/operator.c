/* operator.c: requests of operators: lists, statistics, settings, ending sessions and sequences.
 * Run inline on the engine thread. Changes are logged with the name of the requester.
 */
#include "daemon/engine/operator/operator.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/config/settings.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/core/status.h"
#include "daemon/engine/operator/lists.h"
#include "daemon/engine/pool/create.h"
#include "daemon/engine/seq/sequence.h"

static const uint64_t MAX_HOLD_US = UINT64_C(24) * 3600 * 1000000; /* of a drain */

enum {
    MAX_WATCHERS = 16, /* waiting at a time; more are answered at once */
    MAX_WAIT_US = 5000000,
    WHAT_BYTES = 256,
};

/* --- answers ---------------------------------------------------------------------------------- */

/* Answers with the object, of which it takes ownership. */
static attn_status reply_json(struct answer *a, json_t *object)
{
    a->text = object == NULL ? NULL : json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(15));
    json_decref(object);
    if (a->text == NULL || strlen(a->text) > WIRE_MAX_JSON_BYTES)
        return answer_no(a, ATTN_ENOMEM, "no memory for the answer");
    answer_text(a);
    return ATTN_OK;
}

/* --- watching --------------------------------------------------------------------------------- */

void watchers_wake(void *user)
{
    struct engine *e = user;
    if (atomic_load_explicit(&e->n_watchers, memory_order_relaxed) > 0)
        engine_wake(e);
}

static uint64_t watch_until_ns(const struct engine *e, const struct request *req)
{
    uint64_t wait_us = req->wire.header->inspect->wait_us;
    wait_us = wait_us < MAX_WAIT_US ? wait_us : MAX_WAIT_US;
    /* so that its session stays alive */
    wait_us = wait_us < e->lease_ns / 2000 ? wait_us : e->lease_ns / 2000;
    return req->received_ns + wait_us * 1000;
}

/* Whether there are no new events yet, and there is time to wait for them. */
static bool must_wait(struct engine *e, const struct request *req)
{
    return log_count() <= req->wire.header->inspect->after && !engine_is_draining(e) &&
           watch_until_ns(e, req) > e->turn_ns;
}

static bool watch_enter(struct engine *e, struct request *req)
{
    uint32_t n = atomic_load_explicit(&e->n_watchers, memory_order_relaxed);
    if (n == MAX_WATCHERS || !must_wait(e, req))
        return false;
    STAILQ_INSERT_TAIL(&e->watchers, req, queued);
    atomic_store(&e->n_watchers, n + 1);
    return true;
}

void watchers_answer(struct engine *e, bool is_last)
{
    STAILQ_HEAD(, request) all = STAILQ_HEAD_INITIALIZER(all);
    STAILQ_CONCAT(&all, &e->watchers);
    for (struct request *req; (req = STAILQ_FIRST(&all)) != NULL;) {
        STAILQ_REMOVE_HEAD(&all, queued);
        if (!is_last && must_wait(e, req)) {
            STAILQ_INSERT_TAIL(&e->watchers, req, queued);
            continue;
        }
        atomic_fetch_sub(&e->n_watchers, 1);
        struct answer a;
        answer_init(&a);
        attn_status st = reply_json(&a, topic_find("events")->list(e, req->wire.header->inspect));
        engine_end(e, req, st, &a);
    }
}

/* --- requests --------------------------------------------------------------------------------- */

attn_status inspect_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    const Attnd__Inspect *ask = req->wire.header->inspect;
    const struct topic *t = topic_find(ask->topic);
    (void)session;
    if (t == NULL)
        return answer_no(a, ATTN_ENOTSUP, "inspect.topic: this daemon has no \"%.60s\"",
                         ask->topic);
    if (ask->wait_us > 0 && strcmp(t->name, "events") != 0)
        return answer_no(a, ATTN_EINVAL, "inspect.wait_us is %" PRIu64 ", %s come at once",
                         ask->wait_us, t->name);
    a->is_later = ask->wait_us > 0 && watch_enter(e, req);
    return a->is_later ? ATTN_OK : reply_json(a, t->list(e, ask));
}

attn_status pool_drop_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    const Attnd__PoolDrop *d = req->wire.header->pool_drop;
    struct pool *p = pool_find(e, tenants_find(e->env.tenants, d->tenant), d->name);
    (void)session;
    if (p == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "no pool%s%.63s is named \"%.100s\"",
                         d->tenant[0] != '\0' ? " of tenant " : "", d->tenant, d->name);
    return pool_drop(e, p, a->why, sizeof a->why);
}

attn_status configure_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    const Attnd__Configure *c = req->wire.header->configure;
    (void)session;
    if (e->env.settings == NULL)
        return answer_no(a, ATTN_ENOTSUP, "this daemon's settings can't change");
    attn_status st = settings_set(e->env.settings, c->name, c->value, a->why, sizeof a->why);
    if (st != ATTN_OK)
        return st;
    return reply_json(a, json_pack("{s:s, s:s}", "name", c->name, "value", c->value));
}

attn_status reload_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    uint32_t n_taken = 0, n_kept = 0;
    (void)req;
    (void)session;
    if (e->env.settings == NULL)
        return answer_no(a, ATTN_ENOTSUP, "this daemon's settings can't change");
    attn_status st = settings_reload(e->env.settings, &n_taken, &n_kept, a->why, sizeof a->why);
    if (st != ATTN_OK)
        return st;
    return reply_json(a, json_pack("{s:I, s:I}", "changed", (json_int_t)n_taken, "need_restart",
                                   (json_int_t)n_kept));
}

/* The only live session with this label; SESSION_NONE: none, or several. */
static uint32_t session_of_label(struct engine *e, const char *label, uint32_t *out_n)
{
    uint32_t found = SESSION_NONE;
    *out_n = 0;
    for (uint32_t slot = 0; slot < session_slots(e->env.cfg->max_sessions); slot++) {
        uint64_t id = session_at(e->env.sessions, slot)->id;
        char text[16];
        snprintf(text, sizeof text, "%08" PRIx32, session_label(id));
        if (id != 0 && strcmp(text, label) == 0 && (*out_n)++ == 0)
            found = slot;
    }
    return *out_n == 1 ? found : SESSION_NONE;
}

static attn_status kill_session(struct engine *e, const Attnd__Kill *kill, struct answer *a)
{
    uint32_t n, slot = session_of_label(e, kill->session, &n);
    if (slot == SESSION_NONE)
        return answer_no(a, n == 0 ? ATTN_ENOTFOUND : ATTN_EINVAL,
                         "kill.session \"%.20s\": %" PRIu32 " sessions are called so",
                         kill->session, n);
    session_kill(e, slot, "an operator ended it");
    return ATTN_OK;
}

attn_status kill_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    const Attnd__Kill *kill = req->wire.header->kill;
    return kill->session[0] != '\0' ? kill_session(e, kill, a) : control_on_seq(e, req, session, a);
}

/* Describes the requested change for the log; false: the request changes nothing. */
static bool what_changes(const Attnd__Request *h, char *out, size_t out_bytes)
{
    switch (h->body_case) {
    case ATTND__REQUEST__BODY_POOL_DROP:
        snprintf(out, out_bytes, "drop of pool %.63s", h->pool_drop->name);
        return true;
    case ATTND__REQUEST__BODY_CONFIGURE:
        snprintf(out, out_bytes, "%.63s = %.63s", h->configure->name, h->configure->value);
        return true;
    case ATTND__REQUEST__BODY_RELOAD:
        snprintf(out, out_bytes, "reload");
        return true;
    case ATTND__REQUEST__BODY_KILL:
        if (h->kill->session[0] != '\0')
            snprintf(out, out_bytes, "end of session %.20s", h->kill->session);
        else
            snprintf(out, out_bytes, "end of sequence %" PRIu64 "%s%.63s", h->kill->seq,
                     h->kill->tenant[0] != '\0' ? " of " : "", h->kill->tenant);
        return true;
    case ATTND__REQUEST__BODY_RETIRE:
        snprintf(out, out_bytes, "next epoch of sequence %" PRIu64 "%s%.63s", h->retire->seq,
                 h->retire->tenant[0] != '\0' ? " of " : "", h->retire->tenant);
        return true;
    case ATTND__REQUEST__BODY_MOVE:
        snprintf(out, out_bytes, "move of sequence %" PRIu64 "%s%.63s to card %" PRIu32,
                 h->move->seq, h->move->tenant[0] != '\0' ? " of " : "", h->move->tenant,
                 h->move->card);
        return true;
    default:
        return false;
    }
}

/* The tenant that a request names as the owner of its sequence or pool; NULL: none. */
static const char *named_tenant(const Attnd__Request *h)
{
    const char *name = "";
    if (h->body_case == ATTND__REQUEST__BODY_MOVE)
        name = h->move->tenant;
    else if (h->body_case == ATTND__REQUEST__BODY_RETIRE)
        name = h->retire->tenant;
    else if (h->body_case == ATTND__REQUEST__BODY_KILL && h->kill->session[0] == '\0')
        name = h->kill->tenant;
    else if (h->body_case == ATTND__REQUEST__BODY_POOL_DROP)
        name = h->pool_drop->tenant;
    return name[0] != '\0' ? name : NULL;
}

/* Lists without any tenant's data are open to all. */
static bool is_for_all(const struct engine *e, const Attnd__Request *h)
{
    const struct topic *t =
        h->body_case == ATTND__REQUEST__BODY_INSPECT ? topic_find(h->inspect->topic) : NULL;
    return t != NULL && t->is_for_all && e->env.tenants == NULL;
}

attn_status operator_check(struct engine *e, const struct request *req, struct answer *a)
{
    const Attnd__Request *h = req->wire.header;
    char what[WHAT_BYTES], who[PRINCIPAL_TEXT_BYTES];
    bool is_change = what_changes(h, what, sizeof what);
    principal_format(&req->principal, who);
    if (!is_for_all(e, h) && !request_may_administer(req)) {
        if (is_change)
            log_limited("changes refused", LOG_LEVEL_WARN, log_write, "admin: %s refused to %s",
                        what, who);
        return answer_no(a, ATTN_EAUTH, "only root and the daemon's user may ask that; this is %s",
                         who);
    }
    if (is_change)
        log_info("admin: %s, asked for by %s", what, who);
    const char *tenant = named_tenant(h);
    if (tenant != NULL && tenants_find(e->env.tenants, tenant) == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "%s.tenant: no tenant is named \"%.63s\"",
                         h->body_case == ATTND__REQUEST__BODY_MOVE        ? "move"
                         : h->body_case == ATTND__REQUEST__BODY_RETIRE    ? "retire"
                         : h->body_case == ATTND__REQUEST__BODY_POOL_DROP ? "pool_drop"
                                                                          : "kill",
                         tenant);
    return ATTN_OK;
}

/* The operator sees all statistics, a tenant its own. */
attn_status stats_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    const struct tenant *who = session_tenant(e, session);
    size_t n = 0;
    FILE *f = open_memstream(&a->text, &n);
    (void)req;
    attn_status st = f == NULL                 ? ATTN_ENOMEM
                     : tenant_is_operator(who) ? stats_write_json(f)
                                               : stats_write_tenant_json(f, who->stats);
    if (f != NULL && fclose(f) != 0)
        st = ATTN_ENOMEM;
    if (st != ATTN_OK)
        return answer_no(a, st, "no memory for the stats");
    answer_text(a);
    return ATTN_OK;
}

/* Starts a drain if the requester may ask for it. Both outcomes are logged. */
attn_status drain_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    char who[PRINCIPAL_TEXT_BYTES];
    (void)session;
    principal_format(&req->principal, who);
    if (!request_may_administer(req)) {
        log_limited("changes refused", LOG_LEVEL_WARN, log_write, "admin: drain refused to %s",
                    who);
        return answer_no(a, ATTN_EAUTH,
                         "drain is for root, the daemon's user and the admin socket "
                         "(listen.admin); you are %s",
                         who);
    }
    uint64_t hold_us = req->wire.header->drain->hold_us;
    if (hold_us > MAX_HOLD_US)
        return answer_no(a, ATTN_EINVAL,
                         "drain.hold_us is %" PRIu64 ", at most %" PRIu64 " (a day)", hold_us,
                         MAX_HOLD_US);
    if (hold_us == 0)
        log_info("admin: drain, asked for by %s", who);
    else
        log_info("admin: drain, for %" PRIu64 " ms not of open sequences, asked for by %s",
                 hold_us / 1000, who);
    engine_drain(e, hold_us);
    return ATTN_OK;
}

/* Appends are served for engine.fence from when the operator asked, on all cards. */
attn_status fence_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    uint64_t fence_us = config_now(e->env.cfg, fence_us),
             sent_ns = req->wire.header->fence->sent_ns;
    (void)session;
    if (fence_us == 0)
        return answer_no(a, ATTN_EINVAL, "engine.fence is 0: this daemon has no fence");
    if (sent_ns > req->received_ns)
        return answer_no(a, ATTN_EINVAL,
                         "fence.sent_ns is %" PRIu64 ", CLOCK_MONOTONIC is %" PRIu64, sent_ns,
                         req->received_ns);
    for (uint32_t i = 0; i < peers_n(e); i++) {
        _Atomic uint64_t *until_ns = &peers_at(e, i)->fence_ns;
        if (sent_ns + fence_us * 1000 > atomic_load(until_ns)) /* else it comes late */
            atomic_store(until_ns, sent_ns + fence_us * 1000);
    }
    return ATTN_OK;
}
