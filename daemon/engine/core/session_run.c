/* session_run.c: workers' sessions: every request renews its session, and the sequences of a
 * session whose lease has ended are freed in slices.
 */
#include "daemon/engine/core/session_run.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cache/kv_owner.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/core/turns.h"

enum { EXPIRE_SLICE = 64 /* sequences freed per turn, or as many as take TURN_NS */ };

/* Whether the connection is known to belong to another tenant: for it, the session does not
 * exist. */
static bool is_hidden(const struct engine *e, const struct principal *p, uint32_t slot)
{
    const struct tenant *who = session_tenant(e, slot);
    const char *name = who != NULL ? who->name : "";
    if (e->env.tenants == NULL)
        return false;
    return (p->tenant[0] != '\0' && strcmp(p->tenant, name) != 0) ||
           (p->certificate[0] != '\0' && strcmp(p->certificate, name) != 0);
}

struct tenant *session_tenant(const struct engine *e, uint32_t slot)
{
    return session_at(e->env.sessions, slot)->tenant;
}

void seq_close(struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    tenant_give(tenants_of_id(e->env.tenants, info.tenant), TENANT_SEQUENCES, 1);
    trace_end(&e->trace, &e->seqs[seq.index].trace);
    peers_seq_closes(e, seq);
    kv_seq_close(e->env.kv, seq);
}

/* A session id proves its tenant, so the connection belongs to this tenant from now on. */
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
    if (session_find(e->env.sessions, id, &slot) != ATTN_OK ||
        is_hidden(e, &req->principal, slot)) {
        if (id == 0)
            return answer_no(a, ATTN_ENOTFOUND, "session is 0; say hello first");
        return answer_no(a, ATTN_ENOTFOUND,
                         "session 0x%016" PRIx64 " was never made, or its lease ended", id);
    }
    session_renew(e->env.sessions, slot, req->taken_ns);
    claim_connection(&req->principal, session_tenant(e, slot));
    *out_slot = slot;
    return ATTN_OK;
}

/* why NULL: its client said goodbye. Those that do hide none of those that do not. */
static void log_end(const struct session *s, const char *why)
{
    char client[SESSION_NAME_BYTES + 8];
    log_quote(s->client_name, client, sizeof client);
    if (why == NULL)
        log_limited("sessions given up", LOG_LEVEL_INFO, log_event, "session ends",
                    "session=%08" PRIx32 " client=%s why=\"its client said goodbye\"",
                    session_label(s->ended_id), client);
    else
        log_limited("session ends", LOG_LEVEL_INFO, log_event, "session ends",
                    "session=%08" PRIx32 " client=%s why=\"%s\"", session_label(s->ended_id),
                    client, why);
}

/* After a session has ended; sessions_expire frees its sequences. */
static void session_ended(struct engine *e, uint32_t slot, const char *why)
{
    kv_owner_end(e->env.kv, slot);
    if (e->env.card == 0) /* the primary counts tenants' sessions */
        tenant_give(session_tenant(e, slot), TENANT_SESSIONS, 1);
    pools_unhold(e, slot);
    e->is_dirty = true;
    if (e->env.card > 0)
        return;
    log_end(session_at(e->env.sessions, slot), why);
    peers_session_end(e, slot, session_at(e->env.sessions, slot)->ended_id);
}

void session_kill(struct engine *e, uint32_t slot, const char *why)
{
    session_end(e->env.sessions, slot);
    session_ended(e, slot, why);
    tasks_refuse_of(e, slot, ATTN_ENOTFOUND, why);
}

void session_leave(struct engine *e, uint32_t slot)
{
    session_end(e->env.sessions, slot);
    session_ended(e, slot, NULL);
}

/* A longer lease applies at once. A shorter one applies after one old lease: by then, clients that
 * renew in time have read it from a hello's reply. */
static void lease_turn(struct engine *e, uint64_t now_ns)
{
    uint64_t lease_ns = config_now(e->env.cfg, lease_us) * 1000;
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
    while (is_primary(e) && (silent = session_expire(e->env.sessions, now_ns, e->lease_ns,
                                                     e->peers->held)) != SESSION_NONE) {
        session_ended(e, silent, "its lease ended");
        stats_add(leases_expired, 1);
    }
    uint64_t began_ns = 0;
    for (uint32_t n = 0; n < EXPIRE_SLICE; n++) {
        uint32_t slot = session_expired_first(e->env.sessions);
        kv_seq_id seq;
        if (slot == SESSION_NONE)
            return false;
        if (n == 0)
            began_ns = clock_now_ns();
        else if (clock_now_ns() - began_ns >= TURN_NS)
            return true;
        if (kv_owner_any(e->env.kv, slot, &seq) != ATTN_OK) {
            if (session_at(e->env.sessions, slot)->n_held > 0)
                return false; /* it was killed, and a batch with its items is on the device */
            if (!peers_session_release(e, slot))
                return false; /* another card still has something of it */
            session_release(e->env.sessions, slot);
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
