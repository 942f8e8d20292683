/* move.c: moves a sequence from one card to another while it is in use.
 *
 * The source copies full blocks while steps go on; they are held, so they do not change. Blocks
 * that a truncation cuts off meanwhile are noted and copied again. When few blocks are left and no
 * item of the sequence is in flight, the sequence stops: requests for it, and all behind them, are
 * held back. The rest is copied, and the target makes the sequence, with the same epoch and with
 * what is known of the requests that made it (kv_seq_import_end); no request is sent there yet.
 * Then, with the route held for writing, the source closes its sequence, the table of names
 * changes, and the held requests and the source's inbox are sent again. So requests before and
 * after the change stay in order, and each meets the sequence once. A process that dies in between
 * leaves two equal sequences, of which its successor drops one.
 *
 * One move is under way at a time. One thread has it at any moment: the source's engine, the
 * target's, or a backend's that copies. The source decides how it ends.
 *
 * The epoch stays the same. Raising it, with a map from old to new, was rejected: the map would
 * have to outlive every late duplicate. Blocks that a window has freed do not move, nor do those
 * freed meanwhile.
 */
#include "daemon/cards/move.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/kv_move.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/cards/choose.h"
#include "daemon/cards/move_hold.h"
#include "daemon/cards/move_target.h"
#include "daemon/cards/names.h"
#include "daemon/cards/route.h"
#include "daemon/engine/core/answer.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"

enum {
    LAST_BLOCKS = 2, /* full blocks, beside the one begun, that may be copied while it is stopped */
    MOST_LAST_BLOCKS = 16, /* all blocks then, where layers differ much in length */
};
#define CHUNK_BYTES ((uint64_t)1 << 30) /* copied at once; engines begin the next in a turn */
#define STAGED_BYTES ((uint64_t)32 << 20) /* the same through host memory */
static const uint64_t STOP_NS = UINT64_C(1000000000); /* longest stop; then the move is abandoned */
static const uint64_t BUSY_NS = UINT64_C(10000000000); /* longest wait for a moment to stop it */
static const uint64_t SETTLE_NS = UINT64_C(5000000000); /* longest wait for copies at the end */

/* --- the source ------------------------------------------------------------------------------- */

/* Ends this card's shard in the move: a sequence that is still here goes on. */
static void go_on(struct engine *e)
{
    struct card_leave *l = leave_of(e);
    if (l->is_stopped && l->seq != SEQ_NONE) {
        e->seqs[l->seq].is_moving = false;
        seq_wake_later(e, l->seq);
    }
    l->is_stopped = l->wants_stop = l->is_there = false;
    l->move = NULL;
}

static void say_stays(struct engine *e, struct card_move *m, attn_status st, const char *why)
{
    log_limited("sequence stays", LOG_LEVEL_INFO, log_event, "sequence stays",
                "sequence=%" PRIu64 " from=%" PRIu32 " to=%" PRIu32 " why=\"%s\"", m->name.name,
                m->from->env.card, m->to->env.card, why);
    if (m->req != NULL)
        engine_refuse(e, m->req, st, "sequence %" PRIu64 " stays on card %" PRIu32 ": %s",
                      m->name.name, e->env.card, why);
    m->req = NULL;
}

/* Ends the move, which this engine has: the sequence stays, and the target drops its copy. */
static void stays(struct engine *e, struct card_move *m, attn_status st, const char *why)
{
    if (leave_of(e)->move == m) {
        go_on(e);
        say_stays(e, m, st, why);
    }
    card_move_notify(m->to, m, MOVE_DROPPED);
}

/* Gives up a move that the target has: the sequence stays. The target's copy is dropped when the
 * move comes back. */
static void abandon(struct engine *e, attn_status st, const char *why)
{
    struct card_move *m = leave_of(e)->move;
    go_on(e);
    say_stays(e, m, st, why);
}

/* Drops the hold on the source's blocks, which are not read any more. */
static void reading_release(struct engine *e)
{
    kv_seq_import_cancel(e->env.kv, leave_of(e)->reading);
    leave_of(e)->reading = NULL;
    seqs_have_room(e);
}

/* Asks the target to take blocks [first, first + n). They are held here, or a truncation or close
 * could give them to another sequence meanwhile. */
static void ask(struct engine *e, struct card_move *m, uint32_t first, uint32_t n,
                const struct kv_seq_info *info)
{
    const struct pool *p = pool_of_kv(e, info->pool);
    leave_of(e)->reading = kv_seq_export_hold(e->env.kv, (kv_seq_id){leave_of(e)->seq}, first, n);
    leave_of(e)->reading_of = info->pool.index;
    if (leave_of(e)->reading == NULL) {
        stays(e, m, ATTN_ENOMEM, "no memory");
        return;
    }
    m->first = first;
    m->n = n;
    m->peer = p->device;
    memcpy(m->blocks, info->block_table + first, n * sizeof m->blocks[0]);
    leave_of(e)->n_valid = UINT32_MAX;
    if (m->staging == NULL || n == 0) {
        card_move_notify(m->to, m, MOVE_COMES);
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        m->list[i] = (struct backend_move){.pool = p->device,
                                           .block = m->blocks[i],
                                           .bytes = m->staging + i * pool_block_bytes(p),
                                           .n_bytes = pool_block_bytes(p)};
    if (!card_move_copy(e, m)) {
        reading_release(e);
        stays(e, m, m->status, m->why);
    }
}

/* How many blocks of this size may be copied together. */
static uint32_t chunk(const struct card_move *m, uint64_t bytes)
{
    uint64_t n = (m->staging == NULL ? CHUNK_BYTES : m->staging_bytes) / bytes;
    return n < 1 ? 1 : n > CARD_MOVE_BLOCKS ? CARD_MOVE_BLOCKS : (uint32_t)n;
}

/* Copies the next full blocks or, if few are left, the rest once no item is in flight. */
static void go_ahead(struct engine *e, struct card_move *m)
{
    struct card_leave *l = leave_of(e);
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){l->seq}, &info);
    if (info.n_paged_out > 0) {
        stays(e, m, ATTN_EOVERLOAD, "blocks of it are in idle memory");
        return;
    }
    if (info.n_nodes > 0) {
        stays(e, m, ATTN_EOVERLOAD, "it has a tree that is not committed");
        return;
    }
    const struct pool *p = pool_of_kv(e, info.pool);
    uint32_t n_full = info.n_blocks, most = chunk(m, pool_block_bytes(p));
    for (uint32_t i = 0; i < p->config.num_layers; i++) {
        uint32_t n = info.layer_len[i] / p->config.block_tokens;
        n_full = n < n_full ? n : n_full;
    }
    if (l->n_there >= info.hole_first && l->n_there < info.hole_past)
        l->n_there = info.hole_past; /* blocks that a window has freed are skipped */
    bool is_before_hole = l->n_there < info.hole_first;
    if (n_full > l->n_there + LAST_BLOCKS || is_before_hole) {
        uint32_t n = (is_before_hole ? info.hole_first : n_full) - l->n_there;
        l->wants_stop = false;
        ask(e, m, l->n_there, n < most ? n : most, &info);
        return;
    }
    if (!l->wants_stop)
        l->wanted_ns = clock_now_ns();
    l->wants_stop = true;
    if (seq_is_busy(e, l->seq) || info.n_blocks - l->n_there > MOST_LAST_BLOCKS)
        return;
    if (kv_seq_export_read(e->env.kv, (kv_seq_id){l->seq}, &m->left) != ATTN_OK)
        return;
    l->wants_stop = false;
    l->is_stopped = true;
    l->stopped_ns = clock_now_ns();
    e->seqs[l->seq].is_moving = true;
    m->trace = e->seqs[l->seq].trace;
    m->is_last = true;
    ask(e, m, l->n_there, info.n_blocks - l->n_there, &info);
}

static void asked(struct engine *e, struct card_move *m)
{
    struct card_leave *l = leave_of(e);
    reading_release(e);
    if (l->move != m)
        stays(e, m, ATTN_EOVERLOAD, "it was abandoned");
    else if (l->seq == SEQ_NONE)
        stays(e, m, ATTN_ENOTFOUND, "it was closed");
    else if (engine_health(e) != ATTN_OK)
        stays(e, m, ATTN_EDEVICE, "its card is lost");
    else if (m->status != ATTN_OK)
        stays(e, m, m->status, m->why);
    else if (m->is_last)
        l->is_there = true;
    else {
        l->n_there = m->first + m->n < l->n_valid ? m->first + m->n : l->n_valid;
        go_ahead(e, m);
    }
}

static void card_move_step(struct engine *e, struct engine_message *message)
{
    struct card_move *m = (struct card_move *)message;
    switch (m->state) {
    case MOVE_COMES:
        card_move_comes(e, m);
        return;
    case MOVE_BROUGHT:
        card_move_brought(e, m);
        return;
    case MOVE_ASKED:
        asked(e, m);
        return;
    case MOVE_LEFT:
        card_move_landed(e, m);
        return;
    case MOVE_DROPPED:
        card_move_dropped(e, m);
        return;
    }
}

static void say_moved(const struct card_move *m, uint64_t stopped_ns)
{
    uint64_t now_ns = clock_now_ns();
    uint32_t from = m->from->env.card, to = m->to->env.card;
    stats_card_add(from, STATS_CARD_MOVED_OUT, 1);
    stats_card_add(to, STATS_CARD_MOVED_IN, 1);
    stats_card_add(to, STATS_CARD_MOVED_BYTES, m->n_bytes);
    stats_card_add(from, STATS_CARD_STOPPED, now_ns - stopped_ns);
    log_limited("sequence moves", LOG_LEVEL_INFO, log_event, "sequence moves",
                "sequence=%" PRIu64 " from=%" PRIu32 " to=%" PRIu32 " blocks=%" PRIu32
                " bytes=%" PRIu64 " us=%" PRIu64 " stopped_us=%" PRIu64,
                m->name.name, from, to, m->left.n_blocks, m->n_bytes, (now_ns - m->begun_ns) / 1000,
                (now_ns - stopped_ns) / 1000);
}

/* The target has all blocks: hands the sequence over to it. */
static void leave(struct engine *e, struct card_move *m)
{
    struct cards *c = m->cards;
    struct card_leave *l = leave_of(e);
    struct request *req = m->req;
    pthread_rwlock_wrlock(&c->route);
    if (card_is_lost(m->to)) {
        pthread_rwlock_unlock(&c->route);
        stays(e, m, ATTN_EDEVICE, "the other card is lost");
        return;
    }
    struct request *list = cards_hold_all(e);
    say_moved(m, l->stopped_ns);
    e->seqs[l->seq].is_moving = false;
    e->seqs[l->seq].trace = (struct trace_entry){0};
    kv_seq_close(e->env.kv, (kv_seq_id){l->seq});
    cards_moved(c, m->name, m->to->env.card, m->left.epoch);
    l->seq = SEQ_NONE;
    go_on(e);
    card_move_notify(m->to, m, MOVE_LEFT); /* before any request there; m is the target's now */
    cards_send_again(c, list, e);
    pthread_rwlock_unlock(&c->route);
    e->is_dirty = true;
    if (req != NULL) {
        struct answer a;
        answer_init(&a);
        engine_end(e, req, ATTN_OK, &a);
    }
}

/* --- what begins one -------------------------------------------------------------------------- */

/* Takes host memory for copies between backends that can't copy directly. false: there is none. */
static bool stage(struct card_move *m, uint64_t bytes)
{
    const struct engine_env *from = &m->from->env, *to = &m->to->env;
    void *staging;
    if (from->ops->moves_submit == to->ops->moves_submit)
        return true;
    m->staging_bytes =
        STAGED_BYTES > MOST_LAST_BLOCKS * bytes ? STAGED_BYTES : MOST_LAST_BLOCKS * bytes;
    if (from->ops->host_alloc(from->backend, m->staging_bytes, &staging) != ATTN_OK)
        return false;
    m->staging = staging;
    return true;
}

/* Begins a move. false: another one is under way, or there is no memory. */
static bool begin(struct engine *e, kv_seq_id seq, uint32_t to, struct request *req)
{
    struct cards *c = cards_of(e);
    struct card_move *m = calloc(1, sizeof *m), *none = NULL;
    struct kv_seq_info info;
    if (m == NULL)
        return false;
    kv_seq_info(e->env.kv, seq, &info);
    m->cards = c;
    m->from = e;
    m->to = c->peers.at[to];
    m->name = (struct seq_name){info.tenant, info.name};
    m->pool = info.pool.index;
    m->req = req;
    m->message.on_message = card_move_step;
    m->begun_ns = clock_now_ns();
    if (leave_of(e)->move != NULL || !stage(m, pool_block_bytes(pool_of_kv(e, info.pool))) ||
        !atomic_compare_exchange_strong(&c->move, &none, m)) {
        card_move_free(m);
        return false;
    }
    atomic_store(&c->move_pool, m->pool + 1);
    leave_of(e)->move = m;
    leave_of(e)->seq = seq.index;
    leave_of(e)->n_there = 0;
    go_ahead(e, m);
    return true;
}

attn_status cards_move_ask(struct engine *e, struct request *req, kv_seq_id seq, struct answer *a)
{
    const Attnd__Move *ask = req->wire.header->move;
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    if (pool_spans(e, pool_of_kv(e, info.pool)))
        return answer_no(a, ATTN_ENOTSUP,
                         "sequence %" PRIu64 " is in a split pool, which lies on all cards",
                         ask->seq);
    if (ask->card == e->env.card)
        return ATTN_OK;
    if (card_is_lost(peers_at(e, ask->card)))
        return answer_no(a, ATTN_EDEVICE, "move.card is %" PRIu32 ", which is lost", ask->card);
    a->is_later = begin(e, seq, ask->card, req);
    return a->is_later ? ATTN_OK : answer_no(a, ATTN_EOVERLOAD, "another sequence is being moved");
}

/* Begins a move if this card has too much memory or load in use. */
static void look(struct engine *e, uint64_t now_ns)
{
    kv_seq_id seq;
    uint32_t to;
    if (cards_choose(e, now_ns, &seq, &to))
        begin(e, seq, to, NULL);
}

/* --- the engine's turns ----------------------------------------------------------------------- */

bool cards_move_turn(struct engine *e)
{
    struct card_leave *l = leave_of(e);
    uint64_t now_ns = e->turn_ns;
    struct card_move *m = l->move;
    if (m == NULL) {
        uint64_t every_ns = config_now(e->env.cfg, balance_us) * 1000;
        if (every_ns > 0 && now_ns - l->looked_ns >= every_ns && !card_has_ended(e))
            look(e, now_ns);
        return false;
    }
    if (l->is_there) {
        leave(e, m);
        return true;
    }
    if (l->wants_stop) {
        if (l->seq == SEQ_NONE)
            stays(e, m, ATTN_ENOTFOUND, "it was closed");
        else if (engine_health(e) != ATTN_OK)
            stays(e, m, ATTN_EDEVICE, "its card is lost");
        else if (now_ns > l->wanted_ns + BUSY_NS)
            stays(e, m, ATTN_EOVERLOAD, "it is always in work");
        else
            go_ahead(e, m);
    } else if (l->is_stopped && now_ns > l->stopped_ns + STOP_NS) {
        abandon(e, ATTN_EOVERLOAD, "the other card does not answer");
    }
    return false;
}

void cards_move_stop(struct engine *e)
{
    struct cards *c = cards_of(e);
    struct card_leave *l = leave_of(e);
    uint64_t begun_ns = clock_now_ns();
    if (l->move != NULL && l->wants_stop)
        stays(e, l->move, ATTN_EDRAINING, "the daemon stops");
    else if (l->move != NULL && !l->is_there)
        abandon(e, ATTN_EDRAINING, "the daemon stops");
    while (atomic_load(&c->n_copying) > 0 && clock_now_ns() - begun_ns < SETTLE_NS)
        sched_yield();
}

void cards_move_fini(struct cards *c)
{
    if (c != NULL)
        card_move_free(atomic_load(&c->move));
}
