/* sequence.c: requests on one sequence, except for steps. Run inline on the engine thread once the
 * sequence's older items and requests are done.
 */
#include "daemon/engine/seq/sequence.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "cache/kv_append.h"
#include "cache/kv_owner.h"
#include "cache/kv_tier.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/effects.h"
#include "daemon/engine/core/moved.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/published.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/core/status.h"
#include "daemon/engine/core/turns.h"
#include "daemon/engine/pool/reserve.h"
#include "daemon/engine/seq/export.h"
#include "daemon/engine/step/batch.h"
#include "daemon/engine/step/step.h"
#include "daemon/engine/tier/idle.h"
#include "daemon/engine/tier/promote.h"

/* --- answers ---------------------------------------------------------------------------------- */

static void reply_seq(struct engine *e, kv_seq_id seq, bool has_lengths, struct answer *a)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    const struct pool *p = pool_of_kv(e, info.pool);
    Attnd__SeqReply *body = answer_seq(a);
    body->epoch = info.epoch;
    body->cached_tokens = info.n_cached;
    body->pool = p == NULL ? 0 : pool_handle(e, p);
    if (has_lengths && p != NULL) {
        body->n_layer_len = p->config.num_layers;
        body->layer_len = (uint32_t *)(uintptr_t)info.layer_len; /* packing only reads it */
    }
}

/* Refuses with the cache's last error. */
static attn_status no_by_cache(struct engine *e, attn_status st, struct answer *a)
{
    return answer_no(a, st, "%s", kv_last_error(e->env.kv));
}

/* --- sequences -------------------------------------------------------------------------------- */

static uint64_t n_sequences(const struct engine *e)
{
    struct kv_stats s;
    kv_stats_read(e->env.kv, &s);
    return s.sequences;
}

/* Call before what note_done is to be called for. */
static attn_status note_begin(struct engine *e, struct answer *a)
{
    return peers_request_begin(e) ? ATTN_OK
                                  : answer_no(a, ATTN_EOVERLOAD, "no memory to tell other cards");
}

/* Notes that the request was carried out, so that no card does so again. */
static void note_done(struct engine *e, const struct request *req, uint32_t session)
{
    peers_request_done(e, session, req->wire.header->session, req->wire.request_id);
}

/* A sequence that an open or a fork is about to create. */
struct new_seq {
    kv_seq_id id; /* set by the cache */
    uint64_t n_before; /* open sequences */
    bool is_taken; /* one was taken from the tenant's quota */
};

/* Takes a sequence from the tenant's quota; none if the name is open already. Refuses what could
 * not be noted as carried out. */
static attn_status seq_charge(struct engine *e, struct tenant *who, uint64_t name,
                              struct new_seq *out, struct answer *a)
{
    *out = (struct new_seq){.n_before = n_sequences(e)};
    attn_status st = note_begin(e, a);
    if (st != ATTN_OK)
        return st;
    if (kv_seq_find(e->env.kv, tenant_id(who), name, &out->id) == ATTN_OK)
        return ATTN_OK;
    out->is_taken = tenant_take(who, TENANT_SEQUENCES, 1, a->why, sizeof a->why) == ATTN_OK;
    if (out->is_taken)
        return ATTN_OK;
    return answer_no(a, ATTN_EQUOTA, "tenant %s has all %" PRIu64 " sequences of its quota",
                     who->name, who->most[TENANT_SEQUENCES]);
}

/* Sets up a new sequence, which may share tokens with others. */
static void seq_begin(struct engine *e, kv_seq_id seq)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    peers_seq_opened(e, seq);
    struct seq_state *s = &e->seqs[seq.index];
    trace_begin(&s->trace, e->turn_ns, info.layer_len[0]);
    seq_note_use(e, seq.index, info.pool.index);
    s->kept_epoch = 0;
}

/* Makes room for the patches of a new table row. */
static void make_patch_room(struct engine *e, struct pool *p, size_t n_blocks)
{
    if (p->fx.n_patches + n_blocks > p->fx.patches_capacity)
        batch_flush_patches(e, p);
}

static const struct task_ops promote_ops;

/* Whether the name is open on another card: it has moved since the request was routed here. */
static bool is_elsewhere(struct engine *e, uint32_t session, uint64_t name)
{
    struct seq_name of = {tenant_id(session_tenant(e, session)), name};
    return peers_know_elsewhere(e, of);
}

static attn_status run_move(struct engine *e, struct request *req, kv_seq_id seq, struct answer *a)
{
    uint32_t card = req->wire.header->move->card;
    if (card >= e->peers->n)
        return answer_no(a, ATTN_EINVAL, "move.card is %" PRIu32 ", there are %" PRIu32 " cards",
                         card, e->peers->n);
    return is_alone(e) ? ATTN_OK : e->peers->ops->move(e, req, seq, a);
}

/* Checks what does not depend on the sequences here. */
static attn_status open_check(struct engine *e, const Attnd__Open *o, uint32_t session,
                              const struct pool *p, struct answer *a)
{
    if (engine_is_draining(e))
        return answer_no(a, ATTN_EDRAINING, "the daemon is draining: no new sequences");
    if (!is_alone(e) && engine_health(e) != ATTN_OK)
        return answer_no(a, ATTN_EDEVICE, "the device is lost");
    if (p == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "open.pool is %" PRIu32 ", no such pool", o->pool);
    if (is_elsewhere(e, session, o->seq))
        return answer_no(a, ATTN_EOVERLOAD, "sequence %" PRIu64 " has moved to another card",
                         o->seq);
    if (pool_spans(e, p) && !peers_all_live(e))
        return answer_no(a, ATTN_EDEVICE, "open.pool is %" PRIu32 ": a card of it is lost",
                         o->pool);
    if (pool_is_shard(e, p)) /* its handle was guessed while it is being created */
        return answer_no(a, ATTN_EOVERLOAD, "open.pool is %" PRIu32 ", which is being made",
                         o->pool);
    return ATTN_OK;
}

/* Answers an open or a fork; st is the cache's result. Gives back the quota if no sequence was
 * created. */
static attn_status seq_made(struct engine *e, struct request *req, uint32_t session,
                            const struct new_seq *made, attn_status st, struct answer *a)
{
    if (n_sequences(e) != made->n_before)
        seq_begin(e, made->id);
    else if (made->is_taken)
        tenant_give(session_tenant(e, session), TENANT_SEQUENCES, 1);
    if (st != ATTN_OK)
        return no_by_cache(e, st, a);
    note_done(e, req, session);
    reply_seq(e, made->id, req->wire.header->body_case == ATTND__REQUEST__BODY_FORK, a);
    return ATTN_OK;
}

static attn_status run_open(struct engine *e, struct request *req, uint32_t session,
                            struct answer *a)
{
    const Attnd__Open *o = req->wire.header->open;
    struct tenant *who = session_tenant(e, session);
    struct pool *p = pool_of_handle(e, who, o->pool);
    struct new_seq made;
    attn_status st = open_check(e, o, session, p, a);
    if (st != ATTN_OK)
        return st;
    struct kv_tokens known = {.ids = o->tokens, .n = (uint32_t)o->n_tokens, .adapter = o->adapter};
    if (known.n > p->config.block_tokens && known.n <= e->env.cfg->max_seq_tokens)
        a->is_later = mover_promotes(e, p, tenant_id(who), &known, req, session, &promote_ops);
    if (a->is_later)
        return ATTN_OK; /* it will be run again */
    st = seq_charge(e, who, o->seq, &made, a);
    if (st != ATTN_OK)
        return st;
    make_patch_room(e, p, o->n_tokens / p->config.block_tokens);
    st = kv_seq_open_with(e->env.kv, tenant_id(who), o->seq, p->id, session, req->wire.request_id,
                          &known, &p->fx, &made.id);
    return seq_made(e, req, session, &made, st, a);
}

attn_status probe_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    const Attnd__Probe *ask = req->wire.header->probe;
    struct tenant *who = session_tenant(e, session);
    struct pool *p = pool_of_handle(e, who, ask->pool);
    if (p == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "probe.pool is %" PRIu32 ", no such pool", ask->pool);
    const struct kv_tokens t = {
        .ids = ask->tokens, .n = (uint32_t)ask->n_tokens, .adapter = ask->adapter};
    struct kv_found found = kv_prefix_find(e->env.kv, p->id, tenant_id(who), &t, UINT32_MAX);
    Attnd__ProbeReply *body = answer_room(e, p, session, a);
    body->cached_tokens = found.n_published * p->config.block_tokens;
    body->tier_tokens = found.n_in_tier * p->config.block_tokens;
    return ATTN_OK;
}

static_assert((int)WIRE_MAX_RETENTIONS == KV_MAX_RETENTIONS, "ranges of a sequence");

/* Checks that the sequence belongs to the session and is at this epoch. */
static attn_status check_owner(struct engine *e, kv_seq_id seq, uint64_t name, uint32_t epoch,
                               uint32_t session, struct answer *a)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    if (info.epoch != epoch)
        return answer_no(a, ATTN_ESTALE,
                         "sequence %" PRIu64 ": epoch is %" PRIu32 ", the sequence is at %" PRIu32,
                         name, epoch, info.epoch);
    if (info.owner != session)
        return answer_no(a, ATTN_ESTALE,
                         "sequence %" PRIu64 ": epoch %" PRIu32
                         " belongs to another session; adopt it first",
                         name, epoch);
    return ATTN_OK;
}

static uint32_t len_of_all_layers(const struct engine *e, const struct pool *p, kv_seq_id seq)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    uint32_t len = UINT32_MAX;
    for (uint32_t l = 0; l < p->config.num_layers; l++)
        len = info.layer_len[l] < len ? info.layer_len[l] : len;
    return info.n_nodes > 0 && info.tree_pos < len ? info.tree_pos : len;
}

static attn_status run_fork(struct engine *e, struct request *req, uint32_t session, kv_seq_id src,
                            struct answer *a)
{
    const Attnd__Fork *f = req->wire.header->fork;
    struct tenant *who = session_tenant(e, session);
    struct kv_seq_info info;
    struct new_seq made;
    if (engine_is_draining(e))
        return answer_no(a, ATTN_EDRAINING, "the daemon is draining: no new sequences");
    if (is_elsewhere(e, session, f->new_seq))
        return answer_no(a, ATTN_EEXIST, "sequence %" PRIu64 " is open", f->new_seq);
    kv_seq_info(e->env.kv, src, &info);
    struct pool *p = pool_of_kv(e, info.pool);
    uint32_t len = f->has_len ? f->len : len_of_all_layers(e, p, src);
    attn_status st = seq_charge(e, who, f->new_seq, &made, a);
    if (st != ATTN_OK)
        return st;
    st = kv_seq_fork(e->env.kv, src, f->new_seq, len, session, req->wire.request_id, &made.id);
    return seq_made(e, req, session, &made, st, a);
}

static attn_status run_truncate(struct engine *e, struct request *req, kv_seq_id seq,
                                struct answer *a)
{
    uint32_t epoch;
    attn_status st = kv_seq_truncate(e->env.kv, seq, req->wire.header->truncate->len,
                                     req->wire.request_id, &epoch);
    if (st != ATTN_OK)
        return no_by_cache(e, st, a);
    struct seq_state *s = &e->seqs[seq.index];
    uint32_t len = req->wire.header->truncate->len;
    s->n_kept = len < s->n_kept ? len : s->n_kept;
    peers_seq_epoch(e, seq);
    reply_seq(e, seq, false, a);
    return ATTN_OK;
}

static attn_status run_commit(struct engine *e, struct request *req, kv_seq_id seq,
                              struct answer *a)
{
    const Attnd__Commit *c = req->wire.header->commit;
    struct kv_seq_info info;
    uint32_t epoch;
    kv_seq_info(e->env.kv, seq, &info);
    struct pool *p = pool_of_kv(e, info.pool);
    const struct kv_token_ops ops = {.user = p, .copy = pool_tokens_copy};
    make_patch_room(e, p, c->n_nodes + 1);
    attn_status st = kv_tree_commit(e->env.kv, seq, c->nodes, (uint32_t)c->n_nodes,
                                    req->wire.request_id, &ops, &p->fx, &epoch);
    if (st != ATTN_OK)
        return answer_no(a, st, "%s%s%s", kv_last_error(e->env.kv),
                         st == ATTN_ENOBLOCKS ? MORE_BLOCKS : "",
                         st == ATTN_EDEVICE ? ": the device failed" : "");
    struct seq_state *s = &e->seqs[seq.index];
    s->n_kept = info.tree_pos < s->n_kept ? info.tree_pos : s->n_kept;
    peers_seq_epoch(e, seq);
    reply_seq(e, seq, false, a);
    return ATTN_OK;
}

static attn_status retain(struct engine *e, kv_seq_id seq, const Attnd__Tokens *t)
{
    struct kv_retention ranges[WIRE_MAX_RETENTIONS];
    uint32_t n = (uint32_t)t->n_retention; /* the decoder allows no more */
    for (uint32_t i = 0; i < n && i < WIRE_MAX_RETENTIONS; i++)
        ranges[i] = (struct kv_retention){
            .from = t->retention[i]->first_token,
            .priority = t->retention[i]->priority,
            .life_s = t->retention[i]->time_to_live_s,
            .is_pinned = t->retention[i]->is_pinned,
        };
    return kv_seq_retain(e->env.kv, seq, ranges, n);
}

static attn_status run_tokens(struct engine *e, struct request *req, kv_seq_id seq,
                              struct answer *a)
{
    const Attnd__Tokens *t = req->wire.header->tokens;
    if (t->n_retention > 0 && t->n_tokens > 0)
        return answer_no(a, ATTN_EINVAL,
                         "tokens has %zu tokens and %zu ranges of retention: one of them at a time",
                         t->n_tokens, t->n_retention);
    attn_status st = t->n_retention > 0
                         ? retain(e, seq, t)
                         : kv_seq_tokens(e->env.kv, seq, t->pos, t->tokens, (uint32_t)t->n_tokens);
    if (st != ATTN_OK)
        return no_by_cache(e, st, a);
    reply_seq(e, seq, false, a);
    return ATTN_OK;
}

/* Both of them answer with the note as it is then. */
static attn_status reply_note(struct engine *e, kv_seq_id seq, struct answer *a)
{
    const struct kv_note note = kv_seq_note_get(e->env.kv, seq);
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    Attnd__Note *body = answer_note(a);
    body->seq = info.name;
    body->epoch = info.epoch;
    body->note = (ProtobufCBinaryData){note.n_bytes, (uint8_t *)(uintptr_t)note.bytes};
    return ATTN_OK; /* packing only reads it */
}

static attn_status run_note(struct engine *e, struct request *req, kv_seq_id seq, struct answer *a)
{
    const ProtobufCBinaryData *note = &req->wire.header->note->note;
    attn_status st =
        kv_seq_note(e->env.kv, seq, req->wire.request_id, note->data, (uint32_t)note->len);
    return st != ATTN_OK ? no_by_cache(e, st, a) : reply_note(e, seq, a);
}

/* Any session of the tenant may ask. */
static attn_status run_note_ask(struct engine *e, const Attnd__Note *ask, kv_seq_id seq,
                                struct answer *a)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    if (ask->epoch != 0 && ask->epoch != info.epoch)
        return answer_no(a, ATTN_ESTALE,
                         "note.epoch is %" PRIu32 ", sequence %" PRIu64 " is at %" PRIu32,
                         ask->epoch, ask->seq, info.epoch);
    return reply_note(e, seq, a);
}

static attn_status run_close(struct engine *e, kv_seq_id seq)
{
    seq_close(e, seq);
    seq_closed(e, seq.index);
    return ATTN_OK;
}

/* A close, which may say that it ends a move. */
static attn_status run_close_as_owner(struct engine *e, struct request *req, uint32_t session,
                                      kv_seq_id seq, struct answer *a)
{
    const Attnd__Close *c = req->wire.header->close;
    attn_status st = c->moved == NULL ? ATTN_OK : moved_check(c->moved, a);
    if (st != ATTN_OK)
        return st;
    if (c->moved != NULL)
        moved_note(e, tenant_id(session_tenant(e, session)), c);
    return run_close(e, seq);
}

static attn_status run_adopt(struct engine *e, struct request *req, uint32_t session, kv_seq_id seq,
                             struct answer *a)
{
    const Attnd__Adopt *ask = req->wire.header->adopt;
    struct kv_seq_info info;
    uint32_t epoch;
    kv_seq_info(e->env.kv, seq, &info);
    if (ask->epoch != 0 && ask->epoch != info.epoch &&
        !kv_seq_is_repeat(e->env.kv, seq, session, req->wire.request_id))
        return answer_no(a, ATTN_ESTALE,
                         "adopt.epoch is %" PRIu32 ", sequence %" PRIu64 " is at %" PRIu32,
                         ask->epoch, ask->seq, info.epoch);
    attn_status st = note_begin(e, a);
    if (st != ATTN_OK)
        return st;
    st = kv_seq_adopt(e->env.kv, seq, session, req->wire.request_id, &epoch);
    if (st != ATTN_OK)
        return no_by_cache(e, st, a);
    peers_seq_epoch(e, seq);
    note_done(e, req, session);
    reply_seq(e, seq, true, a);
    return ATTN_OK;
}

/* The same session has it at the next epoch, which it learns by adopting it. */
static attn_status run_retire(struct engine *e, kv_seq_id seq, struct answer *a)
{
    struct kv_seq_info info;
    uint32_t epoch;
    kv_seq_info(e->env.kv, seq, &info);
    attn_status st = kv_seq_adopt(e->env.kv, seq, info.owner, KV_NO_REQUEST, &epoch);
    if (st != ATTN_OK)
        return no_by_cache(e, st, a);
    peers_seq_epoch(e, seq);
    return ATTN_OK;
}

/* The tenant in whose namespace a request's sequence is looked up. */
static uint32_t tenant_of_request(const struct engine *e, const struct request *req,
                                  uint32_t session)
{
    const Attnd__Request *h = req->wire.header;
    if (h->body_case == ATTND__REQUEST__BODY_KILL)
        return tenant_id(tenants_find(e->env.tenants, h->kill->tenant));
    if (h->body_case == ATTND__REQUEST__BODY_RETIRE)
        return tenant_id(tenants_find(e->env.tenants, h->retire->tenant));
    if (h->body_case == ATTND__REQUEST__BODY_MOVE)
        return tenant_id(tenants_find(e->env.tenants, h->move->tenant));
    return tenant_id(session_tenant(e, session));
}

/* Runs a request that needs a sequence owned by the session, at the epoch that it names. begun: of
 * its task, which an import has. */
static attn_status run_as_owner(struct engine *e, struct request *req, uint32_t session,
                                kv_seq_id seq, struct transfer **begun, struct answer *a)
{
    uint64_t name = 0;
    uint32_t epoch = 0;
    request_seq(req->wire.header, &name, &epoch);
    attn_status st = check_owner(e, seq, name, epoch, session, a);
    if (st != ATTN_OK)
        return st;
    switch (req->wire.header->body_case) {
    case ATTND__REQUEST__BODY_FORK:
        return run_fork(e, req, session, seq, a);
    case ATTND__REQUEST__BODY_TRUNCATE:
        return run_truncate(e, req, seq, a);
    case ATTND__REQUEST__BODY_COMMIT:
        return run_commit(e, req, seq, a);
    case ATTND__REQUEST__BODY_TOKENS:
        return run_tokens(e, req, seq, a);
    case ATTND__REQUEST__BODY_NOTE:
        return run_note(e, req, seq, a);
    case ATTND__REQUEST__BODY_IMPORT:
        return import_begin(e, req, seq, begun, a);
    default:
        return run_close_as_owner(e, req, session, seq, a);
    }
}

/* Answers a fork without a source: it may be a repeat. */
static attn_status run_late_fork(struct engine *e, struct request *req, uint32_t session,
                                 struct answer *a)
{
    const Attnd__Fork *f = req->wire.header->fork;
    kv_seq_id seq;
    if (kv_seq_find(e->env.kv, tenant_of_request(e, req, session), f->new_seq, &seq) != ATTN_OK)
        return moved_or_gone(e, tenant_of_request(e, req, session), f->seq, f->epoch, a->why,
                             sizeof a->why);
    if (!kv_seq_is_repeat(e->env.kv, seq, session, req->wire.request_id))
        return answer_no(a, ATTN_EEXIST, "sequence %" PRIu64 " is open", f->new_seq);
    reply_seq(e, seq, true, a);
    return ATTN_OK;
}

/* Runs a request on a sequence of which nothing is in work, or begins a transfer, which has a
 * task. */
static attn_status run_on_seq(struct engine *e, struct request *req, uint32_t session,
                              struct transfer **begun, struct answer *a)
{
    const Attnd__Request *h = req->wire.header;
    uint64_t name = 0;
    uint32_t epoch;
    kv_seq_id seq;
    e->is_dirty = true;
    if (h->body_case == ATTND__REQUEST__BODY_OPEN)
        return run_open(e, req, session, a);
    request_seq(h, &name, &epoch);
    bool is_here =
        kv_seq_find(e->env.kv, tenant_of_request(e, req, session), name, &seq) == ATTN_OK;
    if (!is_here && h->body_case == ATTND__REQUEST__BODY_FORK)
        return run_late_fork(e, req, session, a);
    if (!is_here)
        return moved_or_gone(e, tenant_of_request(e, req, session), name, epoch, a->why,
                             sizeof a->why);
    switch (h->body_case) {
    case ATTND__REQUEST__BODY_KILL:
        return run_close(e, seq);
    case ATTND__REQUEST__BODY_RETIRE:
        return run_retire(e, seq, a);
    case ATTND__REQUEST__BODY_MOVE:
        return run_move(e, req, seq, a);
    case ATTND__REQUEST__BODY_ADOPT:
        return run_adopt(e, req, session, seq, a);
    case ATTND__REQUEST__BODY_EXPORT:
        return export_begin(e, req, seq, begun, a);
    case ATTND__REQUEST__BODY_NOTE:
        if (h->note->has_note)
            return run_as_owner(e, req, session, seq, begun, a);
        return run_note_ask(e, h->note, seq, a);
    case ATTND__REQUEST__BODY_TRUNCATE:
    case ATTND__REQUEST__BODY_COMMIT:
        if (!kv_seq_is_repeat(e->env.kv, seq, session, req->wire.request_id))
            return run_as_owner(e, req, session, seq, begun, a);
        reply_seq(e, seq, false, a); /* a repeat of the request that already raised this epoch */
        return ATTN_OK;
    default:
        return run_as_owner(e, req, session, seq, begun, a);
    }
}

/* --- waiting ---------------------------------------------------------------------------------- */

/* The index of the sequence that the request names; SEQ_NONE: none, or not open. */
static uint32_t seq_named(struct engine *e, const struct request *req, uint32_t session)
{
    uint32_t tenant = tenant_of_request(e, req, session);
    uint64_t name;
    uint32_t epoch;
    kv_seq_id seq;
    if (!request_seq(req->wire.header, &name, &epoch) ||
        kv_seq_find(e->env.kv, tenant, name, &seq) != ATTN_OK)
        return SEQ_NONE;
    return seq.index;
}

/* Whether it copies blocks, which may take several turns. */
static bool is_transfer(const struct request *req)
{
    const Attnd__Request *h = req->wire.header;
    return (h->body_case == ATTND__REQUEST__BODY_EXPORT && h->export->n_blocks > 0) ||
           (h->body_case == ATTND__REQUEST__BODY_IMPORT && h->import->n_sums > 0);
}

/* Whether the request reads or writes the block table, so that no block may be in idle memory. */
static bool needs_blocks(const struct request *req)
{
    Attnd__Request__BodyCase body = req->wire.header->body_case;
    return body == ATTND__REQUEST__BODY_FORK || body == ATTND__REQUEST__BODY_IMPORT ||
           body == ATTND__REQUEST__BODY_COMMIT;
}

/* Brings the sequence's blocks back if needed. true: they are on their way, and the task waits. */
static bool blocks_come(struct engine *e, struct task *t, attn_status *st, struct answer *a)
{
    struct item *it = &t->items[0];
    struct kv_seq_info info;
    if (e->idle.by_use == NULL || it->seq == SEQ_NONE || !needs_blocks(t->req))
        return false;
    kv_seq_info(e->env.kv, (kv_seq_id){it->seq}, &info);
    make_patch_room(e, pool_of_kv(e, info.pool), info.n_paged_out);
    const struct idle_ask ask = {.seq = it->seq, .stamp = t->stamp};
    switch (idle_brings(e, &ask, a->why, sizeof a->why)) {
    case IDLE_HERE:
        return false;
    case IDLE_NEVER:
        *st = ATTN_ENOBLOCKS;
        return false;
    case IDLE_COMES:
    case IDLE_NEEDS_PATCHES: /* some batch is in flight */
        break;
    }
    seq_waits_for_room(e, it->seq);
    item_wait_first(e, it);
    return true;
}

/* Gives the sequence back, if the task has it. */
static void let_go(struct engine *e, struct item *it)
{
    if (it->seq != SEQ_NONE) {
        e->seqs[it->seq].n_active = 0;
        item_unclaim(e, it);
    }
    it->state = ITEM_DONE;
}

/* Goes on with a transfer, which has the sequence until it has ended. */
static bool transfer_run(struct engine *e, struct task *t)
{
    struct request *req = t->req;
    struct answer a;
    answer_init(&a);
    attn_status st = transfer_more(e, req, (kv_seq_id){t->items[0].seq}, t->transfer, &a);
    if (a.is_later)
        return false;
    let_go(e, &t->items[0]);
    task_release(e, t);
    engine_end(e, req, st, &a);
    return true;
}

/* Has its turn: false: it wants another. */
static bool control_run(struct engine *e, struct task *t)
{
    struct request *req = t->req;
    struct item *it = &t->items[0];
    struct answer a;
    attn_status st = ATTN_OK;
    if (t->transfer != NULL)
        return transfer_run(e, t);
    if (it->seq == SEQ_NONE && (it->seq = seq_named(e, req, t->session)) != SEQ_NONE &&
        !item_enter(e, it))
        return true; /* it was opened meanwhile, and is in work */
    answer_init(&a);
    if (blocks_come(e, t, &st, &a))
        return true;
    bool copies = is_transfer(req) && it->seq != SEQ_NONE;
    if (copies && st == ATTN_OK)
        st = run_on_seq(e, req, t->session, &t->transfer, &a);
    if (t->transfer != NULL) {
        t->n_active = 1; /* it can't be refused any more, nor the sequence make way */
        e->seqs[it->seq].n_active = 1;
        return transfer_run(e, t);
    }
    let_go(e, it);
    task_release(e, t);
    if (st == ATTN_OK && !copies)
        st = run_on_seq(e, req, t->session, NULL, &a);
    if (!a.is_later)
        engine_end(e, req, st, &a);
    return true;
}

/* The task has its sequence, or there is none: it runs, or waits for its turn. */
static void control_ready(struct engine *e, struct task *t)
{
    t->items[0].state = ITEM_READY;
    if (turns_must_wait(e)) {
        turns_add(e, t->req, t);
        return;
    }
    struct request *req = t->req;
    bool is_nested = e->turns.is_serving;
    uint32_t of = turns_of(e, req);
    uint64_t began_ns = is_nested ? 0 : turn_begin(e);
    if (!control_run(e, t))
        turns_add_first(e, req, t);
    if (!is_nested)
        turn_end(e, of, began_ns, false);
}

static void control_wake(struct engine *e, struct item *it)
{
    bool was_closed = it->seq == SEQ_NONE;
    if (was_closed)
        it->seq = seq_named(e, it->task->req, it->task->session);
    if (!was_closed || it->seq == SEQ_NONE || item_enter(e, it))
        control_ready(e, it->task);
}

static void control_refuse(struct engine *e, struct task *t, attn_status st, const char *why)
{
    struct request *req = t->req;
    struct item *it = &t->items[0];
    if (it->state == ITEM_READY) {
        turns_remove(e, req);
        let_go(e, it);
    } else {
        item_leave(e, it);
    }
    task_release(e, t);
    engine_refuse(e, req, st, "%s", why);
}

static const struct task_ops control_ops = {
    .wake = control_wake, .refuse = control_refuse, .run = control_run};

static void promote_refuse(struct engine *e, struct task *t, attn_status st, const char *why)
{
    struct request *req = t->req;
    mover_forget(e, t);
    task_release(e, t);
    engine_refuse(e, req, st, "%s", why);
}

/* An open that has waited for blocks from a tier: now waits for its sequence, if it is open by
 * now. */
static void promote_wake(struct engine *e, struct item *it)
{
    it->task->ops = &control_ops;
    control_wake(e, it);
}

static const struct task_ops promote_ops = {.wake = promote_wake, .refuse = promote_refuse};

attn_status control_on_seq(struct engine *e, struct request *req, uint32_t session,
                           struct answer *a)
{
    uint32_t seq = seq_named(e, req, session);
    bool is_free = seq == SEQ_NONE || !seq_is_busy(e, seq), must_wait = turns_must_wait(e);
    if (seq == SEQ_NONE && must_wait) {
        turns_add(e, req, NULL); /* behind what may open it */
        a->is_later = true;
        return ATTN_OK;
    }
    bool is_short = !is_transfer(req) && (!needs_blocks(req) || !idle_has(e, seq));
    if (is_free && !must_wait && (seq == SEQ_NONE || is_short))
        return run_on_seq(e, req, session, NULL, a);
    struct task *t = wire_arena_alloc(&req->arena, sizeof(struct task) + sizeof(struct item));
    if (t == NULL)
        return answer_no(a, ATTN_ENOMEM, "no memory for a request that waits");
    *t = (struct task){
        .ops = &control_ops, .req = req, .session = session, .layer = CLAIM_ALL, .n_items = 1};
    t->items[0] = (struct item){.task = t, .seq = seq};
    task_hold(e, t);
    a->is_later = true;
    if (item_enter(e, &t->items[0]))
        control_ready(e, t);
    return ATTN_OK;
}

attn_status control_import(struct engine *e, struct request *req, uint32_t session,
                           struct answer *a)
{
    attn_status st = fence_check(e, req, a->why, sizeof a->why);
    if (st == ATTN_OK && req->charge.tenant == NULL) /* else it is served anew */
        st = bytes_charge(e, req, session, req->msg->n_bytes, a->why, sizeof a->why);
    return st != ATTN_OK ? st : control_on_seq(e, req, session, a);
}
