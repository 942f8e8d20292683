/* engine_control.c: requests that are neither steps nor hello, above all those of sequences. Run
 * inline on the engine thread; one that names a sequence waits until the sequence's older items and
 * requests are done.
 */
#include "daemon/engine_control.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/cards.h"
#include "daemon/cards_leave.h"
#include "daemon/cards_move.h"
#include "daemon/cards_name.h"
#include "daemon/cards_session.h"
#include "daemon/engine_answer.h"
#include "daemon/engine_batch.h"
#include "daemon/engine_export.h"
#include "daemon/engine_general.h"
#include "daemon/engine_operator.h"
#include "daemon/engine_pools.h"
#include "daemon/engine_queue.h"
#include "daemon/engine_session.h"
#include "daemon/engine_step.h"
#include "daemon/log.h"
#include "daemon/mover_fetch.h"
#include "daemon/stats.h"

/* --- answers ---------------------------------------------------------------------------------- */

static void reply_seq(struct engine *e, struct request *req, kv_seq_id seq, bool has_lengths)
{
    struct kv_seq_info info;
    kv_seq_info(e->parts.kv, seq, &info);
    const struct pool *p = pool_of_kv(e, info.pool);
    Attnd__SeqReply body = ATTND__SEQ_REPLY__INIT;
    Attnd__Reply header = ATTND__REPLY__INIT;
    body.epoch = info.epoch;
    body.cached_tokens = info.n_cached;
    body.pool = p == NULL ? 0 : pool_handle(e, p);
    if (has_lengths && p != NULL) {
        body.n_layer_len = p->config.num_layers;
        body.layer_len = (uint32_t *)(uintptr_t)info.layer_len; /* packing only reads it */
    }
    header.body_case = ATTND__REPLY__BODY_SEQ;
    header.seq = &body;
    engine_answer(e, req, &header);
}

/* --- sequences -------------------------------------------------------------------------------- */

static uint64_t n_sequences(const struct engine *e)
{
    struct kv_stats s;
    kv_stats_read(e->parts.kv, &s);
    return s.sequences;
}

/* Takes one more sequence of the tenant's quota; of a name that it has, none is taken. */
static attn_status seq_charge(struct engine *e, struct tenant *who, uint64_t name, bool *out_taken,
                              char *why, size_t why_bytes)
{
    kv_seq_id seq;
    *out_taken = false;
    if (kv_seq_find(e->parts.kv, tenant_id(who), name, &seq) == ATTN_OK)
        return ATTN_OK;
    *out_taken = tenant_take(who, TENANT_SEQUENCES, 1, why, why_bytes) == ATTN_OK;
    if (*out_taken)
        return ATTN_OK;
    snprintf(why, why_bytes, "tenant %s has all %" PRIu64 " sequences of its quota", who->name,
             who->most[TENANT_SEQUENCES]);
    return ATTN_EQUOTA;
}

/* The request has been carried out, and is not to be again, by whatever card. */
static void note_done(struct engine *e, const struct request *req, uint32_t session)
{
    if (e->parts.cards != NULL)
        cards_saw(e, session, req->wire.header->session, req->wire.request_id);
}

/* There is one more, with as many tokens as others had. */
static void seq_begin(struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info;
    kv_seq_info(e->parts.kv, seq, &info);
    if (e->parts.cards != NULL)
        cards_opened(e->parts.cards, e->parts.card, (struct seq_name){info.tenant, info.name},
                     info.pool.index, info.epoch);
    trace_begin(&e->seqs[seq.index].trace, e->turn_ns, info.layer_len[0]);
}

/* So that a new row's patches fit. */
static void make_patch_room(struct engine *e, struct pool *p, size_t n_blocks)
{
    if (p->fx.n_patches + n_blocks > p->fx.patches_capacity)
        batch_flush_patches(e, p);
}

static const struct task_ops fetch_ops;

/* The sequence has another epoch, by a request. */
static void seq_has_epoch(struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info;
    if (e->parts.cards == NULL)
        return;
    kv_seq_info(e->parts.kv, seq, &info);
    cards_epoch(e->parts.cards, e->parts.card, (struct seq_name){info.tenant, info.name},
                info.epoch);
    cards_move_cut(e, seq.index, info.n_blocks);
}

/* The name is open on another card: it has moved there since the request was sent here. */
static bool is_elsewhere(struct engine *e, uint32_t session, uint64_t name)
{
    struct seq_name of = {tenant_id(session_tenant(e, session)), name};
    return e->parts.cards != NULL && cards_are_elsewhere(e->parts.cards, e->parts.card, of);
}

static void run_open(struct engine *e, struct request *req, uint32_t session)
{
    const Attnd__Open *o = req->wire.header->open;
    struct tenant *who = session_tenant(e, session);
    struct pool *p = pool_of_handle(e, who, o->pool);
    kv_seq_id seq;
    char why[WHY_BYTES];
    if (engine_is_draining(e)) {
        engine_refuse(e, req, ATTN_EDRAINING, "the daemon is draining: no new sequences");
        return;
    }
    if (e->parts.cards != NULL && engine_health(e) != ATTN_OK) {
        engine_refuse(e, req, ATTN_EDEVICE, "the device is lost");
        return;
    }
    if (p == NULL) {
        engine_refuse(e, req, ATTN_ENOTFOUND, "open.pool is %" PRIu32 ", no such pool", o->pool);
        return;
    }
    if (is_elsewhere(e, session, o->seq)) {
        engine_refuse(e, req, ATTN_EOVERLOAD, "sequence %" PRIu64 " has moved to another card",
                      o->seq);
        return;
    }
    if (pool_is_split(&p->split) && !cards_are_whole(e->parts.cards)) {
        engine_refuse(e, req, ATTN_EDEVICE, "open.pool is %" PRIu32 ": a card of it is lost",
                      o->pool);
        return;
    }
    if (pool_is_split(&p->split) && e->parts.card > 0) { /* its handle was guessed as it was made */
        engine_refuse(e, req, ATTN_EOVERLOAD, "open.pool is %" PRIu32 ", which is being made",
                      o->pool);
        return;
    }
    struct kv_tokens known = {.ids = o->tokens, .n = (uint32_t)o->n_tokens, .adapter = o->adapter};
    if (known.n > p->config.block_tokens && known.n <= e->parts.cfg->max_seq_tokens &&
        mover_fetches(e, p, tenant_id(who), &known, req, session, &fetch_ops))
        return; /* it is run again */
    bool is_taken;
    attn_status st = seq_charge(e, who, o->seq, &is_taken, why, sizeof why);
    if (st == ATTN_OK) {
        uint64_t n_before = n_sequences(e);
        make_patch_room(e, p, o->n_tokens / p->config.block_tokens);
        st = kv_seq_open_with(e->parts.kv, tenant_id(who), o->seq, p->id, session,
                              req->wire.request_id, &known, &p->fx, &seq);
        if (n_sequences(e) != n_before)
            seq_begin(e, seq);
        else if (is_taken)
            tenant_give(who, TENANT_SEQUENCES, 1);
        if (st != ATTN_OK)
            snprintf(why, sizeof why, "%s", kv_last_error(e->parts.kv));
    }
    if (st != ATTN_OK) {
        engine_refuse(e, req, st, "%s", why);
        return;
    }
    note_done(e, req, session);
    reply_seq(e, req, seq, false);
}

static_assert((int)WIRE_MAX_RETENTIONS == KV_MAX_RETENTIONS, "ranges of a sequence");

/* The sequence must be the session's, at this epoch. */
static attn_status check_owner(struct engine *e, kv_seq_id seq, uint64_t name, uint32_t epoch,
                               uint32_t session, char *why, size_t why_bytes)
{
    struct kv_seq_info info;
    kv_seq_info(e->parts.kv, seq, &info);
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

static uint32_t len_of_all_layers(const struct engine *e, const struct pool *p, kv_seq_id seq)
{
    struct kv_seq_info info;
    kv_seq_info(e->parts.kv, seq, &info);
    uint32_t len = UINT32_MAX;
    for (uint32_t l = 0; l < p->config.num_layers; l++)
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
    if (is_elsewhere(e, session, f->new_seq)) {
        engine_refuse(e, req, ATTN_EEXIST, "sequence %" PRIu64 " is open", f->new_seq);
        return;
    }
    struct kv_seq_info info;
    kv_seq_info(e->parts.kv, src, &info);
    struct pool *p = pool_of_kv(e, info.pool);
    make_patch_room(e, p, info.n_blocks);
    uint32_t len = f->has_len ? f->len : len_of_all_layers(e, p, src);
    struct tenant *who = session_tenant(e, session);
    kv_seq_id seq;
    char why[WHY_BYTES];
    bool is_taken;
    attn_status st = seq_charge(e, who, f->new_seq, &is_taken, why, sizeof why);
    if (st == ATTN_OK) {
        uint64_t n_before = n_sequences(e);
        st = kv_seq_fork(e->parts.kv, src, f->new_seq, len, session, req->wire.request_id, &p->fx,
                         &seq);
        if (n_sequences(e) != n_before)
            seq_begin(e, seq);
        else if (is_taken)
            tenant_give(who, TENANT_SEQUENCES, 1);
        if (st != ATTN_OK)
            snprintf(why, sizeof why, "%s", kv_last_error(e->parts.kv));
    }
    if (st != ATTN_OK) {
        engine_refuse(e, req, st, "%s", why);
        return;
    }
    note_done(e, req, session);
    reply_seq(e, req, seq, true);
}

static void run_truncate(struct engine *e, struct request *req, kv_seq_id seq)
{
    uint32_t epoch;
    attn_status st = kv_seq_truncate(e->parts.kv, seq, req->wire.header->truncate->len,
                                     req->wire.request_id, &epoch);
    if (st != ATTN_OK) {
        engine_refuse(e, req, st, "%s", kv_last_error(e->parts.kv));
        return;
    }
    seq_has_epoch(e, seq);
    reply_seq(e, req, seq, false);
}

static attn_status retain(struct engine *e, kv_seq_id seq, const Attnd__Tokens *t)
{
    struct kv_retention ranges[WIRE_MAX_RETENTIONS];
    uint32_t n = (uint32_t)t->n_retention; /* the decoder lets no more through */
    for (uint32_t i = 0; i < n && i < WIRE_MAX_RETENTIONS; i++)
        ranges[i] = (struct kv_retention){
            .from = t->retention[i]->first_token,
            .priority = t->retention[i]->priority,
            .life_s = t->retention[i]->time_to_live_s,
            .is_pinned = t->retention[i]->is_pinned,
        };
    return kv_seq_retain(e->parts.kv, seq, ranges, n);
}

static void run_tokens(struct engine *e, struct request *req, kv_seq_id seq)
{
    const Attnd__Tokens *t = req->wire.header->tokens;
    if (t->n_retention > 0 && t->n_tokens > 0) {
        engine_refuse(e, req, ATTN_EINVAL,
                      "tokens has %zu tokens and %zu ranges of retention: one of them at a time",
                      t->n_tokens, t->n_retention);
        return;
    }
    attn_status st = t->n_retention > 0 ? retain(e, seq, t)
                                        : kv_seq_tokens(e->parts.kv, seq, t->pos, t->tokens,
                                                        (uint32_t)t->n_tokens);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", kv_last_error(e->parts.kv));
    else
        reply_seq(e, req, seq, false);
}

static void run_close(struct engine *e, struct request *req, kv_seq_id seq)
{
    Attnd__Reply header = ATTND__REPLY__INIT;
    seq_close(e, seq);
    engine_answer(e, req, &header);
    seq_closed(e, seq.index);
}

static void run_adopt(struct engine *e, struct request *req, uint32_t session, kv_seq_id seq)
{
    const Attnd__Adopt *a = req->wire.header->adopt;
    struct kv_seq_info info;
    uint32_t epoch;
    kv_seq_info(e->parts.kv, seq, &info);
    if (a->epoch != 0 && a->epoch != info.epoch &&
        !kv_seq_is_repeat(e->parts.kv, seq, session, req->wire.request_id)) {
        engine_refuse(e, req, ATTN_ESTALE,
                      "adopt.epoch is %" PRIu32 ", sequence %" PRIu64 " is at %" PRIu32, a->epoch,
                      a->seq, info.epoch);
        return;
    }
    attn_status st = kv_seq_adopt(e->parts.kv, seq, session, req->wire.request_id, &epoch);
    if (st != ATTN_OK) {
        engine_refuse(e, req, st, "%s", kv_last_error(e->parts.kv));
        return;
    }
    seq_has_epoch(e, seq);
    note_done(e, req, session);
    reply_seq(e, req, seq, true);
}

/* Whose names a request's sequence is looked up among. */
static uint32_t tenant_of_request(const struct engine *e, const struct request *req,
                                  uint32_t session)
{
    const Attnd__Request *h = req->wire.header;
    if (h->body_case == ATTND__REQUEST__BODY_KILL)
        return tenant_id(tenants_find(e->parts.tenants, h->kill->tenant));
    if (h->body_case == ATTND__REQUEST__BODY_MOVE)
        return tenant_id(tenants_find(e->parts.tenants, h->move->tenant));
    return tenant_id(session_tenant(e, session));
}

/* Runs a request about a sequence that nothing is in work of. */
static void run_on_seq(struct engine *e, struct request *req, uint32_t session)
{
    const Attnd__Request *h = req->wire.header;
    uint64_t name = 0;
    uint32_t epoch;
    kv_seq_id seq;
    char why[WHY_BYTES];
    request_seq(h, &name, &epoch);
    e->is_dirty = true;
    if (h->body_case == ATTND__REQUEST__BODY_OPEN) {
        run_open(e, req, session);
        return;
    }
    uint32_t tenant = tenant_of_request(e, req, session);
    if (kv_seq_find(e->parts.kv, tenant, name, &seq) != ATTN_OK) {
        engine_refuse(e, req, ATTN_ENOTFOUND, "sequence %" PRIu64 " is not open", name);
        return;
    }
    if (h->body_case == ATTND__REQUEST__BODY_KILL) {
        run_close(e, req, seq);
        return;
    }
    if (h->body_case == ATTND__REQUEST__BODY_MOVE) {
        cards_move_ask(e, req, seq);
        return;
    }
    if (h->body_case == ATTND__REQUEST__BODY_ADOPT) {
        run_adopt(e, req, session, seq);
        return;
    }
    if (h->body_case == ATTND__REQUEST__BODY_EXPORT) {
        export_run(e, req, seq);
        return;
    }
    if (h->body_case == ATTND__REQUEST__BODY_TRUNCATE &&
        kv_seq_is_repeat(e->parts.kv, seq, session, req->wire.request_id)) {
        reply_seq(e, req, seq, false); /* it names the epoch that it ended itself */
        return;
    }
    attn_status st = check_owner(e, seq, name, epoch, session, why, sizeof why);
    if (st != ATTN_OK)
        engine_refuse(e, req, st, "%s", why);
    else if (h->body_case == ATTND__REQUEST__BODY_FORK)
        run_fork(e, req, session, seq);
    else if (h->body_case == ATTND__REQUEST__BODY_TRUNCATE)
        run_truncate(e, req, seq);
    else if (h->body_case == ATTND__REQUEST__BODY_TOKENS)
        run_tokens(e, req, seq);
    else if (h->body_case == ATTND__REQUEST__BODY_IMPORT)
        import_run(e, req, seq);
    else
        run_close(e, req, seq);
}

/* --- waiting ---------------------------------------------------------------------------------- */

/* The index of the sequence that the request is about; SEQ_NONE: none, or none that is open. */
static uint32_t seq_named(struct engine *e, const struct request *req, uint32_t session)
{
    uint32_t tenant = tenant_of_request(e, req, session);
    uint64_t name;
    uint32_t epoch;
    kv_seq_id seq;
    if (!request_seq(req->wire.header, &name, &epoch) ||
        kv_seq_find(e->parts.kv, tenant, name, &seq) != ATTN_OK)
        return SEQ_NONE;
    return seq.index;
}

static void control_run(struct engine *e, struct task *t)
{
    struct request *req = t->req;
    uint32_t session = t->session;
    task_let_go(e, t);
    run_on_seq(e, req, session);
}

static void control_wake(struct engine *e, struct item *it)
{
    bool was_closed = it->seq == SEQ_NONE;
    if (was_closed)
        it->seq = seq_named(e, it->task->req, it->task->session);
    if (!was_closed || it->seq == SEQ_NONE || item_enter(e, it))
        control_run(e, it->task);
}

static void control_refuse(struct engine *e, struct task *t, attn_status st, const char *why)
{
    struct request *req = t->req;
    item_leave(e, &t->items[0]);
    task_let_go(e, t);
    engine_refuse(e, req, st, "%s", why);
}

static const struct task_ops control_ops = {.wake = control_wake, .refuse = control_refuse};

static void fetch_refuse(struct engine *e, struct task *t, attn_status st, const char *why)
{
    struct request *req = t->req;
    mover_forget(e, t);
    task_let_go(e, t);
    engine_refuse(e, req, st, "%s", why);
}

/* An open that waits for blocks from elsewhere; then for its sequence, if there is one by now. */
static void fetch_wake(struct engine *e, struct item *it)
{
    it->task->ops = &control_ops;
    control_wake(e, it);
}

static const struct task_ops fetch_ops = {.wake = fetch_wake, .refuse = fetch_refuse};

/* Runs the request, or has it wait for its sequence. */
static void enter(struct engine *e, struct request *req, uint32_t session)
{
    uint32_t seq = seq_named(e, req, session);
    if (seq == SEQ_NONE || !seq_is_busy(e, seq)) {
        run_on_seq(e, req, session);
        return;
    }
    struct task *t = wire_arena_alloc(&req->arena, sizeof(struct task) + sizeof(struct item));
    if (t == NULL) {
        engine_refuse(e, req, ATTN_ENOMEM, "no memory for a request that waits");
        return;
    }
    *t = (struct task){
        .ops = &control_ops, .req = req, .session = session, .layer = CLAIM_ALL, .n_items = 1};
    t->items[0] = (struct item){.task = t, .seq = seq};
    task_hold(e, t);
    item_enter(e, &t->items[0]); /* it waits: the sequence is busy */
}

void control_admit(struct engine *e, struct request *req, uint64_t now_ns)
{
    char why[WHY_BYTES];
    uint32_t session;
    attn_status st = session_of_request(e, req, now_ns, &session, why, sizeof why);
    if (st != ATTN_OK) {
        engine_refuse(e, req, st, "%s", why);
        return;
    }
    if (operator_run(e, req) || general_run(e, req, session))
        return;
    if (req->wire.header->body_case == ATTND__REQUEST__BODY_IMPORT) {
        /* as large as steps, and may wait as they do */
        st = bytes_charge(e, req, session, req->msg->n_bytes, why, sizeof why);
        if (st != ATTN_OK) {
            engine_refuse(e, req, st, "%s", why);
            return;
        }
    }
    enter(e, req, session);
}
