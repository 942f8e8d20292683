/* queue.c: claims, waiting, waking, deadlines. */
#include "daemon/engine/core/queue.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/engine/core/answer.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/ready.h"
#include "daemon/engine/core/turns.h"

attn_status queue_init(struct engine *e)
{
    uint32_t n = e->env.cfg->max_sequences;
    TAILQ_INIT(&e->held);
    turns_init(e);
    e->next_deadline_ns = UINT64_MAX;
    e->seqs = calloc(n, sizeof *e->seqs);
    e->wake_list = calloc(n, sizeof *e->wake_list);
    e->for_room = calloc(n, sizeof *e->for_room);
    if (e->seqs == NULL || e->wake_list == NULL || e->for_room == NULL)
        return ATTN_ENOMEM;
    for (uint32_t i = 0; i < n; i++)
        TAILQ_INIT(&e->seqs[i].waiting);
    return ATTN_OK;
}

void queue_fini(struct engine *e)
{
    free(e->seqs);
    free(e->wake_list);
    free(e->for_room);
}

/* --- claims ----------------------------------------------------------------------------------- */

/* false: an item of this layer is in work, or too many layers are, or the sequence is copying a
 * block, or CLAIM_ALL has been granted, as it is when there are no claims. */
static bool seq_claim(struct seq_state *s, uint32_t layer)
{
    if (s->n_claims == MAX_CLAIMS || s->is_copying || (layer == CLAIM_ALL && s->n_claims > 0))
        return false;
    for (uint32_t i = 0; i < s->n_claims; i++)
        if (s->claimed[i] == layer || s->claimed[i] == CLAIMED_ALL)
            return false;
    s->claimed[s->n_claims++] = layer == CLAIM_ALL ? CLAIMED_ALL : (uint16_t)layer;
    return true;
}

static void seq_unclaim(struct seq_state *s, uint32_t layer)
{
    uint32_t i = 0;
    while (s->claimed[i] != layer)
        i++;
    s->claimed[i] = s->claimed[--s->n_claims];
}

bool seq_is_busy(const struct engine *e, uint32_t seq)
{
    const struct seq_state *s = &e->seqs[seq];
    return s->n_claims > 0 || !TAILQ_EMPTY(&s->waiting) || s->is_moving;
}

bool seq_take(struct engine *e, uint32_t seq, uint32_t layer)
{
    if (seq_is_busy(e, seq) || !seq_claim(&e->seqs[seq], layer))
        return false;
    e->seqs[seq].n_active++;
    return true;
}

void seq_give(struct engine *e, uint32_t seq, uint32_t layer)
{
    seq_unclaim(&e->seqs[seq], layer);
    e->seqs[seq].n_active--;
    seq_wake_later(e, seq);
}

void seq_unlist(struct engine *e, struct seq_state *s)
{
    if (s->listed_of != 0)
        TAILQ_REMOVE(&e->idle.by_use[s->listed_of - 1], s, by_use);
    s->listed_of = 0;
}

void seq_note_use(struct engine *e, uint32_t seq, uint32_t pool)
{
    struct seq_state *s = &e->seqs[seq];
    if (e->idle.by_use == NULL)
        return;
    seq_unlist(e, s);
    s->listed_of = pool + 1;
    TAILQ_INSERT_TAIL(&e->idle.by_use[pool], s, by_use);
}

/* --- items ------------------------------------------------------------------------------------ */

void seq_wake_later(struct engine *e, uint32_t seq)
{
    struct seq_state *s = &e->seqs[seq];
    if (TAILQ_EMPTY(&s->waiting) || s->is_on_wake_list)
        return;
    s->is_on_wake_list = true;
    e->wake_list[e->n_wakes++] = seq;
}

bool item_enter(struct engine *e, struct item *it)
{
    struct seq_state *s = &e->seqs[it->seq];
    if (TAILQ_EMPTY(&s->waiting) && seq_claim(s, it->task->layer))
        return true;
    it->state = ITEM_WAITING;
    TAILQ_INSERT_TAIL(&s->waiting, it, link);
    return false;
}

void item_wait_first(struct engine *e, struct item *it)
{
    e->seqs[it->seq].n_claims = 0;
    it->state = ITEM_WAITING;
    TAILQ_INSERT_HEAD(&e->seqs[it->seq].waiting, it, link);
}

void item_leave(struct engine *e, struct item *it)
{
    TAILQ_REMOVE(&e->seqs[it->seq].waiting, it, link);
    seq_wake_later(e, it->seq);
}

void item_ready(struct item *it)
{
    struct task *t = it->task;
    it->state = ITEM_READY;
    TAILQ_INSERT_TAIL(&t->ready_items, it, link);
    t->n_ready++;
    t->n_ready_tokens += it->n_tokens;
    t->pool->ready.n_items++;
}

void item_unready(struct item *it)
{
    struct task *t = it->task;
    TAILQ_REMOVE(&t->ready_items, it, link);
    t->n_ready--;
    t->n_ready_tokens -= it->n_tokens;
    t->pool->ready.n_items--;
}

void item_defer(struct engine *e, struct item *it)
{
    struct seq_state *s = &e->seqs[it->seq];
    item_unready(it);
    seq_unclaim(s, it->task->layer);
    it->state = ITEM_WAITING;
    TAILQ_INSERT_HEAD(&s->waiting, it, link);
}

void item_release(struct engine *e, struct item *it)
{
    struct seq_state *s = &e->seqs[it->seq];
    seq_unclaim(s, it->task->layer);
    if (it->state == ITEM_ACTIVE) {
        s->n_active--;
        s->is_copying = false; /* a copying item is the only active one */
    }
    seq_note_use(e, it->seq, it->task->pool->id.index);
    seq_wake_later(e, it->seq);
}

void item_again(struct engine *e, struct item *it)
{
    struct item_list *waiting = &e->seqs[it->seq].waiting;
    struct item *younger = TAILQ_FIRST(waiting);
    item_release(e, it);
    it->state = ITEM_WAITING;
    while (younger != NULL && younger->task->stamp < it->task->stamp)
        younger = TAILQ_NEXT(younger, link);
    if (younger != NULL)
        TAILQ_INSERT_BEFORE(younger, it, link);
    else
        TAILQ_INSERT_TAIL(waiting, it, link);
    seq_wake_later(e, it->seq);
}

void item_unclaim(struct engine *e, struct item *it)
{
    assert(e->seqs[it->seq].n_claims == 1);
    e->seqs[it->seq].n_claims = 0;
    seq_wake_later(e, it->seq);
}

void item_done(struct item *it)
{
    it->state = ITEM_DONE;
    it->task->n_done++;
}

void item_fail(struct item *it, attn_status st, const char *format, ...)
{
    struct task *t = it->task;
    uint32_t i = (uint32_t)(it - t->items);
    t->item_status[i] = st;
    if (i < t->first_failed) {
        t->first_failed = i;
        int n = snprintf(t->why, sizeof t->why, "item %" PRIu32 " (sequence %" PRIu64 "): ", i,
                         t->req->wire.header->step->seq[i]);
        va_list args;
        va_start(args, format);
        vsnprintf(t->why + n, sizeof t->why - (size_t)n, format, args);
        va_end(args);
    }
    item_done(it);
}

void step_advance(struct engine *e, struct task *t)
{
    if (t->n_done == t->n_items) {
        task_release(e, t);
        step_answer(e, t);
    } else if (t->n_ready > 0 && t->place == TASK_NOWHERE) {
        ready_push_woken(&t->pool->ready, t);
    }
}

/* --- waking ----------------------------------------------------------------------------------- */

static void seq_wake(struct engine *e, uint32_t seq)
{
    struct seq_state *s = &e->seqs[seq];
    struct item *it;
    while ((it = TAILQ_FIRST(&s->waiting)) != NULL && seq_claim(s, it->task->layer)) {
        TAILQ_REMOVE(&s->waiting, it, link);
        it->task->ops->wake(e, it);
        if (TAILQ_FIRST(&s->waiting) == it)
            break; /* it waits for blocks now */
    }
}

void seqs_wake(struct engine *e)
{
    while (e->n_wakes > 0) {
        uint32_t seq = e->wake_list[--e->n_wakes];
        e->seqs[seq].is_on_wake_list = false;
        seq_wake(e, seq);
    }
}

bool seq_waits_for_room(struct engine *e, uint32_t seq)
{
    bool is_new = !e->seqs[seq].waits_for_room;
    if (is_new)
        e->for_room[e->n_for_room++] = seq;
    e->seqs[seq].waits_for_room = true;
    return is_new;
}

void seqs_have_room(struct engine *e)
{
    while (e->n_for_room > 0) {
        uint32_t seq = e->for_room[--e->n_for_room];
        e->seqs[seq].waits_for_room = false;
        seq_wake_later(e, seq);
    }
}

void seq_closed(struct engine *e, uint32_t seq)
{
    struct item_list old = TAILQ_HEAD_INITIALIZER(old);
    struct item *it;
    e->seqs[seq].chooses = false;
    TAILQ_CONCAT(&old, &e->seqs[seq].waiting, link);
    while ((it = TAILQ_FIRST(&old)) != NULL) {
        TAILQ_REMOVE(&old, it, link);
        it->seq = SEQ_NONE;
        it->task->ops->wake(e, it);
    }
}

/* --- held tasks ------------------------------------------------------------------------------- */

void task_hold(struct engine *e, struct task *t)
{
    t->stamp = e->next_stamp++;
    TAILQ_INSERT_TAIL(&e->held, t, held);
    session_hold(e, t->session);
    if (t->req->deadline_ns < e->next_deadline_ns)
        e->next_deadline_ns = t->req->deadline_ns;
}

void task_release(struct engine *e, struct task *t)
{
    TAILQ_REMOVE(&e->held, t, held);
    session_unhold(e, t->session);
}

/* Some of its items are not in a batch yet. */
static bool is_refusable(const struct task *t)
{
    return t->n_done + t->n_active < t->n_items;
}

void tasks_refuse(struct engine *e, attn_status st, const char *why)
{
    for (struct task *t = TAILQ_FIRST(&e->held), *next; t != NULL; t = next) {
        next = TAILQ_NEXT(t, held);
        if (is_refusable(t))
            t->ops->refuse(e, t, st, why);
    }
    seqs_wake(e);
}

void tasks_refuse_of(struct engine *e, uint32_t session, attn_status st, const char *why)
{
    for (struct task *t = TAILQ_FIRST(&e->held), *next; t != NULL; t = next) {
        next = TAILQ_NEXT(t, held);
        if (t->session == session && is_refusable(t))
            t->ops->refuse(e, t, st, why);
    }
    turns_refuse_of(e, session, st, why);
}

void tasks_expire(struct engine *e, uint64_t now_ns)
{
    if (now_ns < e->next_deadline_ns)
        return;
    e->next_deadline_ns = turns_expire(e, now_ns);
    for (struct task *t = TAILQ_FIRST(&e->held), *next; t != NULL; t = next) {
        next = TAILQ_NEXT(t, held);
        uint64_t deadline_ns = t->req->deadline_ns;
        if (!is_refusable(t))
            continue;
        if (deadline_ns <= now_ns) {
            char why[WHY_BYTES];
            snprintf(why, sizeof why, "%" PRIu64 " us passed before a batch could take it",
                     (now_ns - t->req->received_ns) / 1000);
            t->ops->refuse(e, t, ATTN_EDEADLINE, why);
        } else if (deadline_ns < e->next_deadline_ns) {
            e->next_deadline_ns = deadline_ns;
        }
    }
}
