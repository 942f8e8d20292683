/* hello.c: handles hello: identifies the client, creates or resumes its session, and describes the
 * daemon to it; and goodbye. */
#include "daemon/engine/hello.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cache/kv_owner.h"
#include "cache/siphash.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/message.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/pool/reserve.h"
#include "daemon/engine/step/lane_device.h"

enum { PROTOCOL_VERSION = WIRE_VERSION };

static void log_begin(const struct request *req, const struct session *s)
{
    char client[SESSION_NAME_BYTES + 8], who[PRINCIPAL_TEXT_BYTES], peer[PRINCIPAL_TEXT_BYTES + 8];
    log_quote(s->client_name, client, sizeof client);
    log_quote(principal_format(&req->principal, who), peer, sizeof peer);
    log_limited("session begins", LOG_LEVEL_INFO, log_event, "session begins",
                "session=%08" PRIx32 " client=%s peer=%s", session_label(s->id), client, peer);
}

/* The URL on which lanes are opened; "": none. */
static const char *lane_url(const struct engine *e)
{
    const struct config *c = e->env.cfg;
    char why[WHY_BYTES];
    uint32_t n = lane_check(e, why, sizeof why) == ATTN_OK ? c->n_listen : 0;
    for (uint32_t i = 0; i < n; i++)
        if (strncmp(c->listen[i], TRANSPORT_GPU_SCHEME, strlen(TRANSPORT_GPU_SCHEME)) == 0)
            return c->listen[i];
    return "";
}

/* Identifies the sender of a hello; a connection keeps its tenant. */
static attn_status identify(struct engine *e, struct request *req, struct tenant **out, char *why,
                            size_t why_bytes)
{
    struct principal *p = &req->principal;
    char who[PRINCIPAL_TEXT_BYTES];
    attn_status st =
        tenants_identify(e->env.tenants, p, req->wire.header->hello->token, out, why, why_bytes);
    if (st == ATTN_OK && p->tenant[0] != '\0' && strcmp(p->tenant, (*out)->name) != 0) {
        snprintf(why, why_bytes, "hello.token is refused: the connection is another tenant's");
        st = ATTN_EAUTH;
    }
    if (st == ATTN_OK && *out != NULL)
        snprintf(p->tenant, sizeof p->tenant, "%s", (*out)->name);
    if (st != ATTN_OK) {
        stats_add(hellos_refused, 1);
        log_limited("hellos refused", LOG_LEVEL_WARN, log_write, "hello of %s: %s",
                    principal_format(p, who), why);
    }
    return st;
}

/* Key that detects a repeated hello: its nonce; without one, the connection, the reply path and the
 * request id, which a client reuses only to repeat. */
static uint64_t hello_key(const struct engine *e, const struct request *req,
                          const struct tenant *who)
{
    struct {
        uint64_t nonce, serial, request_id, tenant;
        uint64_t way[sizeof req->peer_data / sizeof req->peer_data[0]];
    } of = {.nonce = req->wire.header->hello->nonce, .tenant = tenant_id(who)};
    if (of.nonce == 0) {
        of.serial = req->share == NULL ? 0 : req->share->serial;
        of.request_id = req->wire.request_id;
        memcpy(of.way, req->peer_data, req->peer_data_bytes);
    }
    return siphash(e->hello_secret, &of, sizeof of);
}

/* Finds the session of a repeated hello, or creates one for the tenant. */
static attn_status session_make(struct engine *e, struct request *req, struct tenant *who,
                                uint64_t now_ns, uint32_t *out_slot, char *why, size_t why_bytes)
{
    const Attnd__Hello *h = req->wire.header->hello;
    struct session_hello hello = {h->client_name, hello_key(e, req, who), req->share,
                                  req->transport->is_admin};
    bool is_new = !session_is_known(e->env.sessions, &hello);
    attn_status st = is_new ? tenant_take(who, TENANT_SESSIONS, 1, why, why_bytes) : ATTN_OK;
    if (st != ATTN_OK)
        return st;
    st = session_open(e->env.sessions, &hello, now_ns, out_slot, why, why_bytes);
    if (st != ATTN_OK && is_new)
        tenant_give(who, TENANT_SESSIONS, 1);
    if (st != ATTN_OK || !is_new)
        return st;
    struct session *s = session_at(e->env.sessions, *out_slot);
    s->tenant = who;
    kv_owner_begin(e->env.kv, *out_slot, s->id, tenant_id(who), h->client_name);
    log_begin(req, s);
    e->is_dirty = true;
    st = peers_session_begin(e, *out_slot, s->id, tenant_id(who), h->client_name);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "no memory for a session");
        session_kill(e, *out_slot, why);
    }
    return st;
}

/* Finds and renews the session that a hello resumes. */
static attn_status session_resume(struct engine *e, uint64_t id, const struct tenant *who,
                                  uint64_t now_ns, uint32_t *out_slot, char *why, size_t why_bytes)
{
    if (session_find(e->env.sessions, id, out_slot) != ATTN_OK ||
        session_tenant(e, *out_slot) != who) {
        snprintf(why, why_bytes,
                 "hello.resume_session 0x%016" PRIx64 " was never made, or its lease ended", id);
        return ATTN_ENOTFOUND;
    }
    session_renew(e->env.sessions, *out_slot, now_ns);
    return ATTN_OK;
}

/* The session's latest request that is remembered; 0: none. */
static uint64_t last_request(const struct engine *e, uint32_t slot)
{
    uint64_t last = kv_owner_last_request(e->env.kv, slot);
    uint64_t of_pools = pools_last_request(e, slot);
    return last > of_pools ? last : of_pools;
}

static void reply_session(struct engine *e, uint32_t slot, uint32_t version, struct answer *a)
{
    Attnd__HelloReply *body = answer_hello(a);
    static char server_version[] = ATTND_VERSION;
    body->protocol_version = version < PROTOCOL_VERSION ? version : PROTOCOL_VERSION;
    body->session = session_at(e->env.sessions, slot)->id;
    body->last_request_id = last_request(e, slot);
    body->boot_id = e->boot_id;
    body->is_kept = e->env.is_kept;
    body->server_version = server_version;
    body->backend = e->info.name;
    body->lease_us = config_now(e->env.cfg, lease_us);
    body->max_message_bytes = config_now(e->env.cfg, max_message_bytes);
    body->max_step_items = config_now(e->env.cfg, max_step_items);
    body->max_step_tokens = config_now(e->env.cfg, max_step_tokens);
    body->max_seq_tokens = e->env.cfg->max_seq_tokens;
    body->max_sequences = e->env.cfg->max_sequences;
    body->lane_url = (char *)(uintptr_t)lane_url(e); /* packing only reads it */
}

attn_status hello_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    const Attnd__Hello *h = req->wire.header->hello;
    struct tenant *who;
    (void)session;
    if (h->protocol_version == 0)
        return answer_no(a, ATTN_EINVAL, "hello.protocol_version is 0, this daemon speaks 1 to %d",
                         PROTOCOL_VERSION);
    if (h->n_required_features > 0) /* this version has no features that a client could require */
        return answer_no(a, ATTN_ENOTSUP,
                         "hello.required_features: this daemon has no feature \"%.100s\"",
                         h->required_features[0]);
    attn_status st = identify(e, req, &who, a->why, sizeof a->why);
    if (st != ATTN_OK)
        return st;
    bool may_move = engine_is_held(e) && request_may_administer(req);
    if (h->resume_session == 0 && engine_is_draining(e) && !may_move)
        return answer_no(a, ATTN_EDRAINING, "the daemon is draining: no new sessions");
    st = h->resume_session != 0
             ? session_resume(e, h->resume_session, who, req->taken_ns, &session, a->why,
                              sizeof a->why)
             : session_make(e, req, who, req->taken_ns, &session, a->why, sizeof a->why);
    if (st == ATTN_OK)
        reply_session(e, session, h->protocol_version, a);
    return st;
}

/* --- goodbye ---------------------------------------------------------------------------------- */

struct look {
    struct peer_ask all; /* first */
    uint32_t slot;
};

/* status: ATTN_EEXIST if the session has a sequence in this engine. */
static void look_for_any(struct engine *e, void *ask)
{
    struct look *l = ask;
    kv_seq_id any;
    l->all.status = kv_owner_any(e->env.kv, l->slot, &any) == ATTN_OK ? ATTN_EEXIST : ATTN_OK;
}

/* Whether nothing is left in the session, on any card. */
static bool is_left_empty(struct engine *e, uint32_t slot)
{
    char why[WHY_BYTES];
    struct look l = {.all = {.why = why, .why_bytes = sizeof why}, .slot = slot};
    uint32_t n_done;
    if (session_at(e->env.sessions, slot)->n_held > 0 ||
        (!is_alone(e) && atomic_load(&e->peers->held[slot]) > 0))
        return false;
    look_for_any(e, &l);
    return l.all.status == ATTN_OK &&
           engine_call_others(e, peers_n(e), look_for_any, &l.all, &n_done) == ATTN_OK;
}

attn_status goodbye_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    uint64_t id = req->wire.request_id, last = last_request(e, session);
    if (id < last)
        return answer_no(a, ATTN_ESTALE,
                         "request %" PRIu64 " of a session whose latest is %" PRIu64, id, last);
    if (id == last) /* repeated: who has resumed the session since may hold pools again */
        return ATTN_OK;
    if (is_left_empty(e, session)) {
        session_leave(e, session);
        return ATTN_OK;
    }
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;)
        pool_release(e, p, session, id);
    pools_unreserve(e, session, id);
    kv_owner_saw(e->env.kv, session, id);
    return ATTN_OK;
}
