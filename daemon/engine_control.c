/* engine_control.c: everything but steps: sessions, pools, sequences, stats, drain. Run inline on the
 * engine thread; those that name a sequence wait until its older items and requests are done.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/engine_internal.h"
#include "daemon/log.h"

enum {
    PROTOCOL_VERSION = WIRE_VERSION,
    EXPIRE_SLICE = 64, /* sequences freed a turn */
};

/* --- answers ----------------------------------------------------------------------------------- */

static void reply(struct engine *e, struct request *req, const Attnd__Reply *header)
{
    uint8_t *payload;
    attn_status st = request_reply_begin(req, header, 0, &payload);
    if (st == ATTN_EINVAL)
        engine_refuse(e, req, st, "the reply does not fit into the room of %zu bytes given for it",
                      req->room->capacity_bytes);
    else if (st != ATTN_OK)
        engine_refuse(e, req, st, "no message buffer is left for the reply");
    else
        engine_answer(e, req, (attn_status)header->status);
}

static void reply_pool(struct engine *e, struct request *req, const struct pool *p)
{
    struct kv_pool_spec ks;
    Attnd__PoolReply body = ATTND__POOL_REPLY__INIT;
    Attnd__Reply header = ATTND__REPLY__INIT;
    body.pool = pool_handle(e, p);
    body.spec = p->spec.wire;
    kv_pool_info(e->kv, p->id, &ks, &body.n_free_blocks);
    header.body_case = ATTND__REPLY__BODY_POOL;
    header.pool = &body;
    reply(e, req, &header);
}

static void reply_seq(struct engine *e, struct request *req, kv_seq_id seq, bool has_lengths)
{
    struct kv_seq_info info;
    kv_seq_info(e->kv, seq, &info);
    const struct pool *p = NULL;
    for (uint32_t i = 0; i < e->n_pools; i++)
        if (e->pools[i].id.index == info.pool.index)
            p = &e->pools[i];
    Attnd__SeqReply body = ATTND__SEQ_REPLY__INIT;
    Attnd__Reply header = ATTND__REPLY__INIT;
    body.epoch = info.epoch;
    body.pool = p == NULL ? 0 : pool_handle(e, p);
    if (has_lengths && p != NULL) {
        body.n_layer_len = p->config.num_layers;
        body.layer_len = (uint32_t *)(uintptr_t)info.layer_len; /* packing only reads it */
    }
    header.body_case = ATTND__REPLY__BODY_SEQ;
    header.seq = &body;
    reply(e, req, &header);
}

/* --- sessions ---------------------------------------------------------------------------------- */

attn_status session_of_request(struct engine *e, const struct request *req, uint64_t now_ns,
                               uint32_t *out_slot, char *why, size_t why_bytes)
{
    uint64_t id = req->wire.header->session;
    uint32_t slot;
    if (session_find(e->sessions, id, &slot) != ATTN_OK) {
        if (id == 0)
            snprintf(why, why_bytes, "session is 0; say hello first");
        else
            snprintf(why, why_bytes, "session 0x%016" PRIx64 " was never made, or its lease ended",
                     id);
        return ATTN_ENOTFOUND;
    }
    session_renew(e->sessions, slot, now_ns);
    *out_slot = slot;
    return ATTN_OK;
}

static void run_hello(struct engine *e, struct request *req, uint64_t now_ns)
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
        if (session_find(e->sessions, h->resume_session, &slot) != ATTN_OK) {
            engine_refuse(e, req, ATTN_ENOTFOUND,
                          "hello.resume_session 0x%016" PRIx64
                          " was never made, or its lease ended",
                          h->resume_session);
            return;
        }
        session_renew(e->sessions, slot, now_ns);
    } else {
        if (engine_is_draining(e)) {
            engine_refuse(e, req, ATTN_EDRAINING, "the daemon is draining: no new sessions");
            return;
        }
        attn_status st = session_open(e->sessions, h->client_name, now_ns, &slot);
        if (st != ATTN_OK) {
            engine_refuse(e, req, st, "%" PRIu32 " sessions are open, max_sessions is %" PRIu32,
                          session_count(e->sessions), e->cfg->max_sessions);
            return;
        }
        e->is_dirty = true;
    }
    Attnd__HelloReply body = ATTND__HELLO_REPLY__INIT;
    Attnd__Reply header = ATTND__REPLY__INIT;
    char version[] = ATTND_VERSION;
    body.protocol_version =
        h->protocol_version < PROTOCOL_VERSION ? h->protocol_version : PROTOCOL_VERSION;
    body.session = session_at(e->sessions, slot)->id;
    body.server_version = version;
    body.backend = e->info.name;
    body.lease_us = e->lease_ns / 1000;
    body.max_message_bytes = e->cfg->max_message_bytes;
    body.max_step_items = e->cfg->max_step_items;
    body.max_step_tokens = e->cfg->max_step_tokens;
    body.max_seq_tokens = e->cfg->max_seq_tokens;
    header.body_case = ATTND__REPLY__BODY_HELLO;
    header.hello = &body;
    reply(e, req, &header);
}

bool sessions_expire(struct engine *e, uint64_t now_ns)
{
    while (session_expire(e->sessions, now_ns, e->lease_ns) != SESSION_NONE) {
        stats_add(leases_expired, 1);
        e->is_dirty = true;
    }
    for (uint32_t n = 0; n < EXPIRE_SLICE; n++) {
        uint32_t slot = session_expired_first(e->sessions);
        kv_seq_id seq;
        if (slot == SESSION_NONE)
            return false;
        if (kv_owner_any(e->kv, slot, &seq) != ATTN_OK) {
            session_release(e->sessions, slot);
            continue;
        }
        if (seq_is_busy(e, seq.index))
            return false; /* its last batch is on the device; the next turn looks again */
        kv_seq_close(e->kv, seq);
        stats_add(sequences_expired, 1);
        e->is_dirty = true;
    }
    return true;
}

/* --- sequences --------------------------------------------------------------------------------- */

static void run_open(struct engine *e, struct request *req, uint32_t session)
{
    const Attnd__Open *o = req->wire.header->open;
    struct pool *p = pool_of_handle(e, o->pool);
    kv_seq_id seq;
    if (engine_is_draining(e)) {
        engine_refuse(e, req, ATTN_EDRAINING, "the daemon is draining: no new sequences");
        return;
    }
    if (p == NULL) {
        engine_refuse(e, req, ATTN_ENOTFOUND, "open.pool is %" PRIu32 ", no such pool", o->pool);
        return;
    }
    attn_status st = kv_seq_open(e->kv, TENANT, o->seq, p->id, session, req->wire.request_id, &seq);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", kv_last_error(e->kv));
    else
        reply_seq(e, req, seq, false);
}

/* The sequence must be the session's, at this epoch. */
static attn_status check_owner(struct engine *e, kv_seq_id seq, uint64_t name, uint32_t epoch,
                               uint32_t session, char *why, size_t why_bytes)
{
    struct kv_seq_info info;
    kv_seq_info(e->kv, seq, &info);
    if (info.epoch != epoch)
        snprintf(why, why_bytes,
                 "sequence %" PRIu64 ": epoch is %" PRIu32 ", the sequence is at %" PRIu32, name,
                 epoch, info.epoch);
    else if (info.owner != session)
        snprintf(why, why_bytes,
                 "sequence %" PRIu64 ": epoch %" PRIu32
                 " belongs to another session; adopt it first",
                 name, epoch);
    else
        return ATTN_OK;
    return ATTN_ESTALE;
}

static uint32_t len_of_all_layers(const struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info;
    kv_seq_info(e->kv, seq, &info);
    uint32_t len = UINT32_MAX;
    for (uint32_t i = 0; i < e->n_pools; i++)
        if (e->pools[i].id.index == info.pool.index)
            for (uint32_t l = 0; l < e->pools[i].config.num_layers; l++)
                len = info.layer_len[l] < len ? info.layer_len[l] : len;
    return len;
}

static void run_fork(struct engine *e, struct request *req, uint32_t session, kv_seq_id src)
{
    const Attnd__Fork *f = req->wire.header->fork;
    if (engine_is_draining(e)) {
        engine_refuse(e, req, ATTN_EDRAINING, "the daemon is draining: no new sequences");
        return;
    }
    struct kv_seq_info info;
    kv_seq_info(e->kv, src, &info);
    struct pool *p = NULL;
    for (uint32_t i = 0; i < e->n_pools; i++)
        if (e->pools[i].id.index == info.pool.index)
            p = &e->pools[i];
    if (p->fx.n_patches + info.n_blocks > p->fx.patches_capacity)
        batch_flush_patches(e, p);
    uint32_t len = f->has_len ? f->len : len_of_all_layers(e, src);
    kv_seq_id seq;
    attn_status st =
        kv_seq_fork(e->kv, src, f->new_seq, len, session, req->wire.request_id, &p->fx, &seq);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", kv_last_error(e->kv));
    else
        reply_seq(e, req, seq, true);
}

static void run_truncate(struct engine *e, struct request *req, kv_seq_id seq)
{
    attn_status st = kv_seq_truncate(e->kv, seq, req->wire.header->truncate->len);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", kv_last_error(e->kv));
    else
        reply_seq(e, req, seq, false);
}

static void run_close(struct engine *e, struct request *req, kv_seq_id seq)
{
    Attnd__Reply header = ATTND__REPLY__INIT;
    kv_seq_close(e->kv, seq);
    reply(e, req, &header);
    seq_closed(e, seq.index);
}

static void run_adopt(struct engine *e, struct request *req, uint32_t session, kv_seq_id seq)
{
    uint32_t epoch;
    attn_status st = kv_seq_adopt(e->kv, seq, session, &epoch);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", kv_last_error(e->kv));
    else
        reply_seq(e, req, seq, true);
}

/* Name and epoch of the sequence that a request is about. false: it is about none. */
static bool seq_of_request(const Attnd__Request *h, uint64_t *out_name, uint32_t *out_epoch)
{
    *out_epoch = 0;
    switch (h->body_case) {
    case ATTND__REQUEST__BODY_OPEN:
        *out_name = h->open->seq;
        return true;
    case ATTND__REQUEST__BODY_FORK:
        *out_name = h->fork->seq;
        *out_epoch = h->fork->epoch;
        return true;
    case ATTND__REQUEST__BODY_TRUNCATE:
        *out_name = h->truncate->seq;
        *out_epoch = h->truncate->epoch;
        return true;
    case ATTND__REQUEST__BODY_CLOSE:
        *out_name = h->close->seq;
        *out_epoch = h->close->epoch;
        return true;
    case ATTND__REQUEST__BODY_ADOPT:
        *out_name = h->adopt->seq;
        return true;
    default:
        return false;
    }
}

/* Runs a request about a sequence that nothing is in work of. */
static void run_on_seq(struct engine *e, struct request *req, uint32_t session)
{
    const Attnd__Request *h = req->wire.header;
    uint64_t name = 0;
    uint32_t epoch;
    kv_seq_id seq;
    char why[WHY_BYTES];
    seq_of_request(h, &name, &epoch);
    e->is_dirty = true;
    if (h->body_case == ATTND__REQUEST__BODY_OPEN) {
        run_open(e, req, session);
        return;
    }
    if (kv_seq_find(e->kv, TENANT, name, &seq) != ATTN_OK) {
        engine_refuse(e, req, ATTN_ENOTFOUND, "sequence %" PRIu64 " is not open", name);
        return;
    }
    if (h->body_case == ATTND__REQUEST__BODY_ADOPT) {
        run_adopt(e, req, session, seq);
        return;
    }
    attn_status st = check_owner(e, seq, name, epoch, session, why, sizeof why);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", why);
    else if (h->body_case == ATTND__REQUEST__BODY_FORK)
        run_fork(e, req, session, seq);
    else if (h->body_case == ATTND__REQUEST__BODY_TRUNCATE)
        run_truncate(e, req, seq);
    else
        run_close(e, req, seq);
}

/* The index of the sequence that the request has to wait for; SEQ_NONE: it can run. */
static uint32_t seq_to_wait_for(struct engine *e, const struct request *req)
{
    uint64_t name;
    uint32_t epoch;
    kv_seq_id seq;
    if (!seq_of_request(req->wire.header, &name, &epoch) ||
        kv_seq_find(e->kv, TENANT, name, &seq) != ATTN_OK || !seq_is_busy(e, seq.index))
        return SEQ_NONE;
    return seq.index;
}

void control_run(struct engine *e, struct task *t)
{
    struct request *req = t->req;
    uint32_t session = t->session;
    task_unlink(e, t);
    run_on_seq(e, req, session);
}

void control_dispatch(struct engine *e, struct task *t)
{
    uint32_t seq = seq_to_wait_for(e, t->req);
    if (seq == SEQ_NONE) {
        control_run(e, t);
        return;
    }
    t->items[0].seq = seq;
    seq_queue_push(&e->seqs[seq], &t->items[0]);
}

/* --- the rest ---------------------------------------------------------------------------------- */

static void run_pool_create(struct engine *e, struct request *req)
{
    const Attnd__PoolSpec *spec = req->wire.header->pool_create->spec;
    struct pool *p;
    char why[2 * WHY_BYTES];
    if (spec == NULL) {
        engine_refuse(e, req, ATTN_EINVAL, "pool_create.spec is missing");
        return;
    }
    if (engine_is_draining(e) && pool_find(e, spec->name) == NULL) {
        engine_refuse(e, req, ATTN_EDRAINING, "the daemon is draining: no new pools");
        return;
    }
    attn_status st = pool_create(e, spec, &p, why, sizeof why);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", why);
    else
        reply_pool(e, req, p);
}

static void run_pool_describe(struct engine *e, struct request *req)
{
    const char *name = req->wire.header->pool_describe->name;
    const struct pool *p = pool_find(e, name);
    if (p == NULL)
        engine_refuse(e, req, ATTN_ENOTFOUND, "no pool is named \"%.100s\"", name);
    else
        reply_pool(e, req, p);
}

static void run_stats(struct engine *e, struct request *req)
{
    char *json = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&json, &n);
    if (f == NULL) {
        engine_refuse(e, req, ATTN_ENOMEM, "no memory for the stats");
        return;
    }
    stats_write_json(f);
    bool is_complete = fclose(f) == 0;
    if (!is_complete) {
        engine_refuse(e, req, ATTN_ENOMEM, "no memory for the stats");
    } else {
        Attnd__StatsReply body = ATTND__STATS_REPLY__INIT;
        Attnd__Reply header = ATTND__REPLY__INIT;
        body.json = json;
        header.body_case = ATTND__REPLY__BODY_STATS;
        header.stats = &body;
        reply(e, req, &header);
    }
    free(json);
}

static void run_drain(struct engine *e, struct request *req)
{
    Attnd__Reply header = ATTND__REPLY__INIT;
    log_info("a client asks to drain");
    engine_drain(e);
    reply(e, req, &header);
}

void control_admit(struct engine *e, struct request *req, uint64_t now_ns)
{
    char why[WHY_BYTES];
    uint32_t session;
    if (req->wire.header->body_case == ATTND__REQUEST__BODY_HELLO) {
        run_hello(e, req, now_ns);
        return;
    }
    attn_status st = session_of_request(e, req, now_ns, &session, why, sizeof why);
    if (st != ATTN_OK) {
        engine_refuse(e, req, st, "%s", why);
        return;
    }
    switch (req->wire.header->body_case) {
    case ATTND__REQUEST__BODY_POOL_CREATE:
        run_pool_create(e, req);
        return;
    case ATTND__REQUEST__BODY_POOL_DESCRIBE:
        run_pool_describe(e, req);
        return;
    case ATTND__REQUEST__BODY_STATS:
        run_stats(e, req);
        return;
    case ATTND__REQUEST__BODY_DRAIN:
        run_drain(e, req);
        return;
    case ATTND__REQUEST__BODY_EXPORT:
        engine_refuse(e, req, ATTN_ENOTSUP, "export: this daemon can't export sequences");
        return;
    case ATTND__REQUEST__BODY_IMPORT:
        engine_refuse(e, req, ATTN_ENOTSUP, "import: this daemon can't import sequences");
        return;
    default:
        break;
    }
    uint32_t seq = seq_to_wait_for(e, req);
    if (seq == SEQ_NONE) {
        run_on_seq(e, req, session);
        return;
    }
    struct task *t = wire_arena_alloc(&req->arena, sizeof(struct task) + sizeof(struct item));
    if (t == NULL) {
        engine_refuse(e, req, ATTN_ENOMEM, "no memory for a request that waits");
        return;
    }
    *t = (struct task){.req = req, .session = session, .n_items = 1};
    t->items[0] = (struct item){.task = t, .seq = seq};
    task_link(e, t);
    seq_queue_push(&e->seqs[seq], &t->items[0]);
}
