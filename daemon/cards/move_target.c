/* move_target.c: the target's side of a move between cards, and the copying that both sides share.
 * The target reserves blocks for what comes and makes the sequence once it has all; requests use it
 * there only after the source has let it go. Runs on the thread that has the move. */
#include "daemon/cards/move_target.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "cache/kv_move.h"
#include "daemon/base/clock.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/status.h"
#include "daemon/engine/step/batch.h"
#include "daemon/engine/tier/mover.h"

void card_move_notify(struct engine *e, struct card_move *m, enum move_state state)
{
    m->state = state;
    engine_message_push(e, &m->message);
}

void card_move_free(struct card_move *m)
{
    if (m != NULL && m->staging != NULL)
        m->from->env.ops->host_free(m->from->env.backend, m->staging, m->staging_bytes);
    free(m);
}

/* A copy is done. On a backend's thread. */
static void copied(struct backend_moves *moves)
{
    struct card_move *m = moves->user;
    struct cards *c = m->cards;
    bool is_out = !m->list[0].is_in;
    for (uint32_t i = 0; i < moves->n && m->status == ATTN_OK; i++)
        m->status = m->list[i].status;
    if (m->status != ATTN_OK)
        snprintf(m->why, sizeof m->why, "its blocks can't be copied: %s",
                 attn_status_message(m->status));
    card_move_notify(m->to, m, is_out ? MOVE_COMES : MOVE_BROUGHT);
    atomic_fetch_sub(&c->n_copying, 1); /* last: engines that end wait for this */
}

bool card_move_copy(struct engine *e, struct card_move *m)
{
    m->moves = (struct backend_moves){.list = m->list, .n = m->n, .done = copied, .user = m};
    atomic_fetch_add(&m->cards->n_copying, 1);
    attn_status st = e->env.ops->moves_submit(e->env.backend, &m->moves);
    if (st == ATTN_OK)
        return true; /* m is no longer this thread's */
    m->status = st;
    atomic_fetch_sub(&m->cards->n_copying, 1);
    snprintf(m->why, sizeof m->why, "%s", e->env.ops->last_error(e->env.backend));
    return false;
}

/* The move is over: another may begin. */
static void end(struct card_move *m)
{
    struct cards *c = m->cards;
    atomic_store(&c->move_pool, 0);
    atomic_store(&c->move, NULL);
    card_move_free(m);
}

static attn_status take_place(struct engine *e, struct card_move *m)
{
    struct pool *p = pool_of_kv(e, (kv_pool_id){m->pool});
    if (card_has_ended(e) || p == NULL) {
        snprintf(m->why, sizeof m->why, "card %" PRIu32 " is lost, or ends", e->env.card);
        return ATTN_EDEVICE;
    }
    mover_wait(e, p, m->n);
    if (m->import == NULL)
        m->import = kv_seq_import_begin(e->env.kv, p->id);
    attn_status st = m->import == NULL
                         ? ATTN_ENOMEM
                         : kv_seq_import_reserve(e->env.kv, m->import, m->first, m->n);
    if (st != ATTN_OK)
        snprintf(m->why, sizeof m->why, "%s",
                 m->import == NULL ? "no memory" : kv_last_error(e->env.kv));
    return st;
}

static void land(struct engine *e, struct card_move *m)
{
    struct pool *p = pool_of_kv(e, (kv_pool_id){m->pool});
    if (p->fx.n_patches + m->left.n_blocks > p->fx.patches_capacity)
        batch_flush_patches(e, p);
    m->status = kv_seq_import_end(e->env.kv, m->import, &m->left, &p->fx, &m->landed);
    if (m->status != ATTN_OK) {
        snprintf(m->why, sizeof m->why, "%s", kv_last_error(e->env.kv));
        return;
    }
    m->import = NULL;
    m->has_landed = true;
    e->seqs[m->landed.index].is_moving = true;
    e->seqs[m->landed.index].trace = m->trace;
    e->seqs[m->landed.index].kept_epoch = 0; /* truncations at the source are not known here */
    tokens_came(e, clock_now_ns()); /* it may be in the middle of a token */
    e->is_dirty = true;
}

void card_move_brought(struct engine *e, struct card_move *m)
{
    if (m->status == ATTN_OK && m->is_last)
        land(e, m);
    card_move_notify(m->from, m, MOVE_ASKED);
}

void card_move_comes(struct engine *e, struct card_move *m)
{
    struct pool *p = pool_of_kv(e, (kv_pool_id){m->pool});
    if (m->status == ATTN_OK) /* else the source could not copy the blocks out */
        m->status = take_place(e, m);
    if (m->status != ATTN_OK || m->n == 0) {
        card_move_brought(e, m);
        return;
    }
    for (uint32_t i = 0; i < m->n; i++)
        m->list[i] = (struct backend_move){
            .pool = p->device,
            .block = kv_seq_import_block(m->import, m->first + i),
            .is_in = true,
            .peer = m->staging == NULL ? m->peer : NULL,
            .peer_block = m->blocks[i],
            .bytes = m->staging == NULL ? NULL : m->staging + i * pool_block_bytes(p),
            .n_bytes = pool_block_bytes(p),
        };
    m->n_bytes += m->n * pool_block_bytes(p);
    if (!card_move_copy(e, m))
        card_move_brought(e, m);
}

void card_move_dropped(struct engine *e, struct card_move *m)
{
    kv_seq_import_cancel(e->env.kv, m->import);
    if (m->has_landed) {
        e->seqs[m->landed.index].is_moving = false;
        e->seqs[m->landed.index].trace = (struct trace_entry){0};
        kv_seq_close(e->env.kv, m->landed);
    }
    e->is_dirty = true;
    end(m);
}

void card_move_landed(struct engine *e, struct card_move *m)
{
    e->seqs[m->landed.index].is_moving = false;
    e->is_dirty = true;
    end(m);
}
