/* engine_operator.c: what operators ask and change: lists, settings, ends of sessions and
 * sequences. Run inline on the engine thread. Who asks for what changes something is logged.
 */
#include "daemon/engine_operator.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/engine_answer.h"
#include "daemon/engine_list.h"
#include "daemon/engine_pool.h"
#include "daemon/engine_pools.h"
#include "daemon/engine_session.h"
#include "daemon/log.h"
#include "daemon/settings.h"

enum {
    MAX_WATCHERS = 16, /* that wait for events; more are answered at once */
    MAX_WAIT_US = 5000000,
    WHAT_BYTES = 256,
};

/* --- answers ---------------------------------------------------------------------------------- */

/* Takes the object over. */
static void answer_json(struct engine *e, struct request *req, json_t *object)
{
    char *text = object == NULL ? NULL : json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(15));
    Attnd__StatsReply body = ATTND__STATS_REPLY__INIT;
    Attnd__Reply header = ATTND__REPLY__INIT;
    body.json = text;
    header.body_case = ATTND__REPLY__BODY_STATS;
    header.stats = &body;
    json_decref(object);
    if (text == NULL || strlen(text) > WIRE_MAX_JSON_BYTES)
        engine_refuse(e, req, ATTN_ENOMEM, "no memory for the answer");
    else
        engine_answer(e, req, &header);
    free(text);
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
    wait_us = wait_us < e->lease_ns / 2000 ? wait_us : e->lease_ns / 2000; /* its session lives */
    return req->received_ns + wait_us * 1000;
}

/* Is there nothing to say yet, and room and time to wait for it? */
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
        answer_json(e, req, topic_find("events")->list(e, req->wire.header->inspect));
    }
}

/* --- requests --------------------------------------------------------------------------------- */

static void run_inspect(struct engine *e, struct request *req, const struct topic *t)
{
    const Attnd__Inspect *ask = req->wire.header->inspect;
    if (t == NULL)
        engine_refuse(e, req, ATTN_ENOTSUP, "inspect.topic: this daemon has no \"%.60s\"",
                      ask->topic);
    else if (ask->wait_us > 0 && strcmp(t->name, "events") != 0)
        engine_refuse(e, req, ATTN_EINVAL, "inspect.wait_us is %" PRIu64 ", %s come at once",
                      ask->wait_us, t->name);
    else if (ask->wait_us == 0 || !watch_enter(e, req))
        answer_json(e, req, t->list(e, ask));
}

static void run_pool_drop(struct engine *e, struct request *req)
{
    const char *name = req->wire.header->pool_drop->name;
    struct pool *p = pool_find(e, NULL, name);
    Attnd__Reply header = ATTND__REPLY__INIT;
    char why[2 * WHY_BYTES];
    attn_status st;
    if (p == NULL)
        engine_refuse(e, req, ATTN_ENOTFOUND, "no pool is named \"%.100s\"", name);
    else if ((st = pool_drop(e, p, why, sizeof why)) != ATTN_OK)
        engine_refuse(e, req, st, "%s", why);
    else
        engine_answer(e, req, &header);
}

static void run_configure(struct engine *e, struct request *req)
{
    const Attnd__Configure *c = req->wire.header->configure;
    char why[2 * WHY_BYTES] = "this daemon's settings can't change";
    attn_status st = ATTN_ENOTSUP;
    if (e->parts.settings != NULL)
        st = settings_set(e->parts.settings, c->name, c->value, why, sizeof why);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", why);
    else
        answer_json(e, req, json_pack("{s:s, s:s}", "name", c->name, "value", c->value));
}

static void run_reload(struct engine *e, struct request *req)
{
    char why[2 * WHY_BYTES] = "this daemon's settings can't change";
    uint32_t n_taken = 0, n_kept = 0;
    attn_status st = ATTN_ENOTSUP;
    if (e->parts.settings != NULL)
        st = settings_reload(e->parts.settings, &n_taken, &n_kept, why, sizeof why);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", why);
    else
        answer_json(e, req,
                    json_pack("{s:I, s:I}", "changed", (json_int_t)n_taken, "need_restart",
                              (json_int_t)n_kept));
}

/* The live session of this label; SESSION_NONE: none, or several. */
static uint32_t session_of_label(struct engine *e, const char *label, uint32_t *out_n)
{
    uint32_t found = SESSION_NONE;
    *out_n = 0;
    for (uint32_t slot = 0; slot < e->parts.cfg->max_sessions; slot++) {
        uint64_t id = session_at(e->parts.sessions, slot)->id;
        char text[16];
        snprintf(text, sizeof text, "%08" PRIx32, session_label(id));
        if (id != 0 && strcmp(text, label) == 0 && (*out_n)++ == 0)
            found = slot;
    }
    return *out_n == 1 ? found : SESSION_NONE;
}

static void run_kill_session(struct engine *e, struct request *req)
{
    const char *label = req->wire.header->kill->session;
    Attnd__Reply header = ATTND__REPLY__INIT;
    uint32_t n, slot = session_of_label(e, label, &n);
    if (slot == SESSION_NONE) {
        engine_refuse(e, req, n == 0 ? ATTN_ENOTFOUND : ATTN_EINVAL,
                      "kill.session \"%.20s\": %" PRIu32 " sessions are called so", label, n);
        return;
    }
    session_kill(e, slot, "an operator ended it");
    engine_answer(e, req, &header);
}

/* Which change is asked for, for the log; false: none. */
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
    case ATTND__REQUEST__BODY_MOVE:
        snprintf(out, out_bytes, "move of sequence %" PRIu64 "%s%.63s to card %" PRIu32,
                 h->move->seq, h->move->tenant[0] != '\0' ? " of " : "", h->move->tenant,
                 h->move->card);
        return true;
    default:
        return false;
    }
}

/* Whose sequence a request is about by the tenant's name; NULL: it names none. */
static const char *named_tenant(const Attnd__Request *h)
{
    const char *name = h->body_case == ATTND__REQUEST__BODY_MOVE   ? h->move->tenant
                       : h->body_case == ATTND__REQUEST__BODY_KILL ? h->kill->tenant
                                                                   : "";
    return name[0] != '\0' ? name : NULL;
}

bool operator_run(struct engine *e, struct request *req)
{
    const Attnd__Request *h = req->wire.header;
    bool is_inspect = h->body_case == ATTND__REQUEST__BODY_INSPECT;
    const struct topic *t = is_inspect ? topic_find(h->inspect->topic) : NULL;
    char what[WHAT_BYTES], who[PRINCIPAL_TEXT_BYTES];
    if (!what_changes(h, what, sizeof what) && !is_inspect)
        return false;
    principal_format(&req->principal, who);
    bool is_for_all = t != NULL && t->is_for_all && e->parts.tenants == NULL;
    if (!is_for_all && !request_may_administer(req)) {
        if (!is_inspect)
            log_limited("changes refused", LOG_LEVEL_WARN, log_write, "admin: %s refused to %s",
                        what, who);
        engine_refuse(e, req, ATTN_EAUTH,
                      "only root and the daemon's user may ask that; this is %s", who);
        return true;
    }
    if (!is_inspect)
        log_info("admin: %s, asked for by %s", what, who);
    if (is_inspect)
        run_inspect(e, req, t);
    else if (h->body_case == ATTND__REQUEST__BODY_POOL_DROP)
        run_pool_drop(e, req);
    else if (h->body_case == ATTND__REQUEST__BODY_CONFIGURE)
        run_configure(e, req);
    else if (h->body_case == ATTND__REQUEST__BODY_RELOAD)
        run_reload(e, req);
    else if (h->body_case == ATTND__REQUEST__BODY_KILL && h->kill->session[0] != '\0')
        run_kill_session(e, req);
    else if (named_tenant(h) != NULL && tenants_find(e->parts.tenants, named_tenant(h)) == NULL)
        engine_refuse(e, req, ATTN_ENOTFOUND, "%s.tenant: no tenant is named \"%.63s\"",
                      h->body_case == ATTND__REQUEST__BODY_MOVE ? "move" : "kill", named_tenant(h));
    else
        return false; /* of a sequence: it waits until nothing of that is in work */
    return true;
}
