/* session_run.c: workers' sessions: hello makes or resumes one, every request renews it, and
 * what a session leaves behind when its lease ends is freed in slices.
 */
#include "daemon/engine/core/session_run.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cache/siphash.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/cards/lane.h"
#include "daemon/cards/move_leave.h"
#include "daemon/cards/names.h"
#include "daemon/cards/session.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/request/step_plans.h"

enum {
    PROTOCOL_VERSION = WIRE_VERSION,
    EXPIRE_SLICE = 64, /* sequences freed a turn */
};

/* The connection is known to be another tenant's: then the session does not exist for it. */
static bool is_hidden(const struct engine *e, const struct principal *p, uint32_t slot)
{
    const struct tenant *who = session_tenant(e, slot);
    const char *name = who != NULL ? who->name : "";
    if (e->parts.tenants == NULL)
        return false;
    return (p->tenant[0] != '\0' && strcmp(p->tenant, name) != 0) ||
           (p->certificate[0] != '\0' && strcmp(p->certificate, name) != 0);
}

struct tenant *session_tenant(const struct engine *e, uint32_t slot)
{
    return session_at(e->parts.sessions, slot)->tenant;
}

void seq_close(struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info;
    kv_seq_info(e->parts.kv, seq, &info);
    tenant_give(tenants_of_id(e->parts.tenants, info.tenant), TENANT_SEQUENCES, 1);
    trace_end(&e->trace, &e->seqs[seq.index].trace);
    if (e->parts.cards != NULL) {
        cards_move_closed(e, seq.index);
        cards_closed(e->parts.cards, e->parts.card, (struct seq_name){info.tenant, info.name});
    }
    kv_seq_close(e->parts.kv, seq);
}

/* Who has a session's number has its tenant's: the connection is this tenant's from now on. */
static void claim_connection(struct principal *p, const struct tenant *who)
{
    if (who != NULL && p->tenant[0] == '\0')
        snprintf(p->tenant, sizeof p->tenant, "%s", who->name);
}

attn_status session_of_request(struct engine *e, struct request *req, uint32_t *out_slot,
                               struct answer *a)
{
    uint64_t id = req->wire.header->session;
    uint32_t slot;
    if (session_find(e->parts.sessions, id, &slot) != ATTN_OK ||
        is_hidden(e, &req->principal, slot)) {
        if (id == 0)
            return answer_no(a, ATTN_ENOTFOUND, "session is 0; say hello first");
        return answer_no(a, ATTN_ENOTFOUND,
                         "session 0x%016" PRIx64 " was never made, or its lease ended", id);
    }
    session_renew(e->parts.sessions, slot, req->taken_ns);
    claim_connection(&req->principal, session_tenant(e, slot));
    *out_slot = slot;
    return ATTN_OK;
}

static void tell_begin(const struct request *req, const struct session *s)
{
    char client[SESSION_NAME_BYTES + 8], who[PRINCIPAL_TEXT_BYTES], peer[PRINCIPAL_TEXT_BYTES + 8];
    log_quote(s->client_name, client, sizeof client);
    log_quote(principal_format(&req->principal, who), peer, sizeof peer);
    log_limited("session begins", LOG_LEVEL_INFO, log_event, "session begins",
                "session=%08" PRIx32 " client=%s peer=%s", session_label(s->id), client, peer);
}

static void tell_end(const struct session *s, const char *why)
{
    char client[SESSION_NAME_BYTES + 8];
    log_quote(s->client_name, client, sizeof client);
    log_limited("session ends", LOG_LEVEL_INFO, log_event, "session ends",
                "session=%08" PRIx32 " client=%s why=\"%s\"", session_label(s->ended_id), client,
                why);
}

/* The session has left the live ones; what it leaves behind, sessions_expire frees. */
static void session_ended(struct engine *e, uint32_t slot, const char *why)
{
    kv_owner_end(e->parts.kv, slot);
    if (e->parts.card == 0) /* whose they are */
        tenant_give(session_tenant(e, slot), TENANT_SESSIONS, 1);
    pools_let_go(e, slot);
    e->is_dirty = true;
    if (e->parts.card > 0)
        return;
    step_plans_end(e->plans, session_at(e->parts.sessions, slot)->ended_id);
    tell_end(session_at(e->parts.sessions, slot), why);
    if (e->parts.cards != NULL)
        cards_session_end(e->parts.cards, slot, session_at(e->parts.sessions, slot)->ended_id,
                          session_kill);
}

void session_kill(struct engine *e, uint32_t slot, const char *why)
{
    session_end(e->parts.sessions, slot);
    session_ended(e, slot, why);
    tasks_refuse_of(e, slot, ATTN_ENOTFOUND, why);
}

/* Where lanes are opened; "": nowhere. */
static const char *lane_url(const struct engine *e)
{
    const struct config *c = e->parts.cfg;
    char why[WHY_BYTES];
    uint32_t n = cards_lane_check(e, why, sizeof why) == ATTN_OK ? c->n_listen : 0;
    for (uint32_t i = 0; i < n; i++)
        if (strncmp(c->listen[i], TRANSPORT_GPU_SCHEME, strlen(TRANSPORT_GPU_SCHEME)) == 0)
            return c->listen[i];
    return "";
}

/* Who says hello; a connection is one tenant's for good. */
static attn_status identify(struct engine *e, struct request *req, struct tenant **out, char *why,
                            size_t why_bytes)
{
    struct principal *p = &req->principal;
    char who[PRINCIPAL_TEXT_BYTES];
    attn_status st =
        tenants_identify(e->parts.tenants, p, req->wire.header->hello->token, out, why, why_bytes);
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

/* What tells a repeated hello from another: its nonce; of a client that gives none, the connection,
 * the way back and the request id, which the same client uses again only to repeat. */
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

/* The session of a hello of the tenant's: a new one, or that of the same hello before. */
static attn_status session_make(struct engine *e, struct request *req, struct tenant *who,
                                uint64_t now_ns, uint32_t *out_slot, char *why, size_t why_bytes)
{
    const Attnd__Hello *h = req->wire.header->hello;
    struct session_hello hello = {h->client_name, hello_key(e, req, who), req->share};
    bool is_new = !session_is_known(e->parts.sessions, &hello);
    attn_status st = is_new ? tenant_take(who, TENANT_SESSIONS, 1, why, why_bytes) : ATTN_OK;
    if (st != ATTN_OK)
        return st;
    st = session_open(e->parts.sessions, &hello, now_ns, out_slot, why, why_bytes);
    if (st != ATTN_OK && is_new)
        tenant_give(who, TENANT_SESSIONS, 1);
    if (st != ATTN_OK || !is_new)
        return st;
    struct session *s = session_at(e->parts.sessions, *out_slot);
    s->tenant = who;
    kv_owner_begin(e->parts.kv, *out_slot, s->id, tenant_id(who), h->client_name);
    tell_begin(req, s);
    e->is_dirty = true;
    if (e->parts.cards == NULL)
        return ATTN_OK;
    st = cards_session_begin(e->parts.cards, *out_slot, s->id, tenant_id(who), h->client_name);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "no memory for a session");
        session_kill(e, *out_slot, why);
    }
    return st;
}

/* The session that a hello resumes. */
static attn_status session_resume(struct engine *e, uint64_t id, const struct tenant *who,
                                  uint64_t now_ns, uint32_t *out_slot, char *why, size_t why_bytes)
{
    if (session_find(e->parts.sessions, id, out_slot) != ATTN_OK ||
        session_tenant(e, *out_slot) != who) {
        snprintf(why, why_bytes,
                 "hello.resume_session 0x%016" PRIx64 " was never made, or its lease ended", id);
        return ATTN_ENOTFOUND;
    }
    session_renew(e->parts.sessions, *out_slot, now_ns);
    return ATTN_OK;
}

static void tell_session(struct engine *e, uint32_t slot, uint32_t version, struct answer *a)
{
    Attnd__HelloReply *body = answer_hello(a);
    static char server_version[] = ATTND_VERSION;
    body->protocol_version = version < PROTOCOL_VERSION ? version : PROTOCOL_VERSION;
    body->session = session_at(e->parts.sessions, slot)->id;
    uint64_t last = kv_owner_last_request(e->parts.kv, slot);
    uint64_t of_pools = pools_last_request(e, slot);
    uint64_t of_plans = step_plans_latest(e->plans, body->session);
    last = last > of_pools ? last : of_pools;
    body->last_request_id = last > of_plans ? last : of_plans;
    body->boot_id = e->boot_id;
    body->is_kept = e->parts.is_kept;
    body->server_version = server_version;
    body->backend = e->info.name;
    body->lease_us = config_now(e->parts.cfg, lease_us);
    body->max_message_bytes = config_now(e->parts.cfg, max_message_bytes);
    body->max_step_items = config_now(e->parts.cfg, max_step_items);
    body->max_step_tokens = config_now(e->parts.cfg, max_step_tokens);
    body->max_seq_tokens = e->parts.cfg->max_seq_tokens;
    body->max_plans = STEP_PLANS_OF_SESSION;
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
    if (h->n_required_features > 0) /* this version has none that a client could require */
        return answer_no(a, ATTN_ENOTSUP,
                         "hello.required_features: this daemon has no feature \"%.100s\"",
                         h->required_features[0]);
    attn_status st = identify(e, req, &who, a->why, sizeof a->why);
    if (st != ATTN_OK)
        return st;
    if (h->resume_session == 0 && engine_is_draining(e))
        return answer_no(a, ATTN_EDRAINING, "the daemon is draining: no new sessions");
    st = h->resume_session != 0
             ? session_resume(e, h->resume_session, who, req->taken_ns, &session, a->why,
                              sizeof a->why)
             : session_make(e, req, who, req->taken_ns, &session, a->why, sizeof a->why);
    if (st == ATTN_OK)
        tell_session(e, session, h->protocol_version, a);
    return st;
}

/* A longer lease counts at once. A shorter one counts once the old one is over: who renews in time
 * has said hello by then, and was told. */
static void lease_turn(struct engine *e, uint64_t now_ns)
{
    uint64_t lease_ns = config_now(e->parts.cfg, lease_us) * 1000;
    if (lease_ns != e->next_lease_ns) {
        e->next_lease_ns = lease_ns;
        e->next_lease_at_ns = now_ns + e->lease_ns;
    }
    if (lease_ns > e->lease_ns || now_ns >= e->next_lease_at_ns)
        e->lease_ns = lease_ns;
}

bool sessions_expire(struct engine *e, uint64_t now_ns)
{
    uint32_t silent;
    lease_turn(e, now_ns);
    const _Atomic uint32_t *held = e->parts.cards == NULL ? NULL : cards_held(e->parts.cards);
    while (e->parts.card == 0 && (silent = session_expire(e->parts.sessions, now_ns, e->lease_ns,
                                                          held)) != SESSION_NONE) {
        session_ended(e, silent, "its lease ended");
        stats_add(leases_expired, 1);
    }
    for (uint32_t n = 0; n < EXPIRE_SLICE; n++) {
        uint32_t slot = session_expired_first(e->parts.sessions);
        kv_seq_id seq;
        if (slot == SESSION_NONE)
            return false;
        if (kv_owner_any(e->parts.kv, slot, &seq) != ATTN_OK) {
            if (session_at(e->parts.sessions, slot)->n_held > 0)
                return false; /* it was killed, and a batch of it is on the device */
            if (e->parts.cards != NULL && !cards_session_let_go(e, slot))
                return false; /* another card has something of it */
            session_release(e->parts.sessions, slot);
            continue;
        }
        if (seq_is_busy(e, seq.index))
            return false; /* its last batch is on the device; the next turn looks again */
        seq_close(e, seq);
        stats_add(sequences_expired, 1);
        e->is_dirty = true;
    }
    return true;
}
