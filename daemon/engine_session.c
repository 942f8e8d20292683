/* engine_session.c: workers' sessions: hello makes or resumes one, every request renews it, and
 * what a session leaves behind when its lease ends is freed in slices.
 */
#include "daemon/engine_session.h"

#include <inttypes.h>
#include <stdio.h>

#include "daemon/engine_answer.h"
#include "daemon/engine_queue.h"
#include "daemon/stats.h"

enum {
    PROTOCOL_VERSION = WIRE_VERSION,
    EXPIRE_SLICE = 64, /* sequences freed a turn */
};

attn_status session_of_request(struct engine *e, const struct request *req, uint64_t now_ns,
                               uint32_t *out_slot, char *why, size_t why_bytes)
{
    uint64_t id = req->wire.header->session;
    uint32_t slot;
    if (session_find(e->parts.sessions, id, &slot) != ATTN_OK) {
        if (id == 0)
            snprintf(why, why_bytes, "session is 0; say hello first");
        else
            snprintf(why, why_bytes, "session 0x%016" PRIx64 " was never made, or its lease ended",
                     id);
        return ATTN_ENOTFOUND;
    }
    session_renew(e->parts.sessions, slot, now_ns);
    *out_slot = slot;
    return ATTN_OK;
}

void hello_admit(struct engine *e, struct request *req, uint64_t now_ns)
{
    const Attnd__Hello *h = req->wire.header->hello;
    if (h->protocol_version == 0) {
        engine_refuse(e, req, ATTN_EINVAL,
                      "hello.protocol_version is 0, this daemon speaks 1 to %d", PROTOCOL_VERSION);
        return;
    }
    if (h->n_required_features > 0) { /* this version has none that a client could require */
        engine_refuse(e, req, ATTN_ENOTSUP,
                      "hello.required_features: this daemon has no feature \"%.100s\"",
                      h->required_features[0]);
        return;
    }
    uint32_t slot;
    if (h->resume_session != 0) {
        if (session_find(e->parts.sessions, h->resume_session, &slot) != ATTN_OK) {
            engine_refuse(e, req, ATTN_ENOTFOUND,
                          "hello.resume_session 0x%016" PRIx64
                          " was never made, or its lease ended",
                          h->resume_session);
            return;
        }
        session_renew(e->parts.sessions, slot, now_ns);
    } else {
        if (engine_is_draining(e)) {
            engine_refuse(e, req, ATTN_EDRAINING, "the daemon is draining: no new sessions");
            return;
        }
        attn_status st = session_open(e->parts.sessions, h->client_name, now_ns, &slot);
        if (st != ATTN_OK) {
            engine_refuse(e, req, st,
                          "%" PRIu32 " sessions are open, engine.max_sessions is %" PRIu32,
                          session_count(e->parts.sessions), e->parts.cfg->max_sessions);
            return;
        }
        kv_owner_begin(e->parts.kv, slot);
        e->is_dirty = true;
    }
    Attnd__HelloReply body = ATTND__HELLO_REPLY__INIT;
    Attnd__Reply header = ATTND__REPLY__INIT;
    char version[] = ATTND_VERSION;
    body.protocol_version =
        h->protocol_version < PROTOCOL_VERSION ? h->protocol_version : PROTOCOL_VERSION;
    body.session = session_at(e->parts.sessions, slot)->id;
    body.last_request_id = kv_owner_last_request(e->parts.kv, slot);
    body.server_version = version;
    body.backend = e->info.name;
    body.lease_us = e->lease_ns / 1000;
    body.max_message_bytes = e->parts.cfg->max_message_bytes;
    body.max_step_items = e->parts.cfg->max_step_items;
    body.max_step_tokens = e->parts.cfg->max_step_tokens;
    body.max_seq_tokens = e->parts.cfg->max_seq_tokens;
    header.body_case = ATTND__REPLY__BODY_HELLO;
    header.hello = &body;
    engine_answer(e, req, &header);
}

bool sessions_expire(struct engine *e, uint64_t now_ns)
{
    while (session_expire(e->parts.sessions, now_ns, e->lease_ns) != SESSION_NONE) {
        stats_add(leases_expired, 1);
        e->is_dirty = true;
    }
    for (uint32_t n = 0; n < EXPIRE_SLICE; n++) {
        uint32_t slot = session_expired_first(e->parts.sessions);
        kv_seq_id seq;
        if (slot == SESSION_NONE)
            return false;
        if (kv_owner_any(e->parts.kv, slot, &seq) != ATTN_OK) {
            session_release(e->parts.sessions, slot);
            continue;
        }
        if (seq_is_busy(e, seq.index))
            return false; /* its last batch is on the device; the next turn looks again */
        kv_seq_close(e->parts.kv, seq);
        stats_add(sequences_expired, 1);
        e->is_dirty = true;
    }
    return true;
}
