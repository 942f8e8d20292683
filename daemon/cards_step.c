/* cards_step.c: a step whose sequences are on several cards. Each card's engine gets a request of
 * its own over the same message, computes the items that are its own in place, and passes over the
 * others; outputs go into one reply. Whose part is done last answers the step.
 */
#include "daemon/cards_step.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/cards.h"
#include "daemon/cards_internal.h"
#include "daemon/cards_step_part.h"
#include "daemon/engine_answer.h"
#include "daemon/engine_inbox.h"

uint32_t cards_of_step(const struct cards *c, const Attnd__Step *s)
{
    uint32_t of_cards = 0;
    for (size_t i = 0; i < s->n_epoch; i++)
        of_cards |= 1u << card_of_epoch(c, s->epoch[i]);
    return of_cards;
}

/* --- the end ---------------------------------------------------------------------------------- */

/* What the parts took, for the reply and the histograms. */
static void sum_times(struct step_whole *w)
{
    struct request *req = w->req;
    for (uint32_t i = 0; i < w->n_parts; i++) {
        const struct request *p = &w->parts[i].req;
        if (p->taken_ns != 0 && (req->taken_ns == 0 || p->taken_ns < req->taken_ns))
            req->taken_ns = p->taken_ns;
        if (p->batched_ns > req->batched_ns)
            req->batched_ns = p->batched_ns;
        if (p->device_ns > req->device_ns)
            req->device_ns = p->device_ns;
        if (p->done_ns > req->done_ns)
            req->done_ns = p->done_ns;
    }
}

/* Items of a part that was refused as a whole have its status. */
static void fail_refused(struct step_whole *w)
{
    const Attnd__Step *s = w->req->wire.header->step;
    for (uint32_t k = 0; k < w->n_parts; k++) {
        const struct step_part *part = &w->parts[k];
        for (uint32_t i = 0; i < s->n_seq && !part->is_answered; i++) {
            if (card_of_epoch(w->cards, s->epoch[i]) != part->card)
                continue;
            w->item_status[i] = part->refused;
            if (i < w->first_failed) {
                w->first_failed = i;
                snprintf(w->why, sizeof w->why, "%s", part->why);
            }
        }
    }
}

/* The step as a task of one engine would look when all its items are done. */
static struct task *task_of(struct step_whole *w, struct pool *pool)
{
    const Attnd__Step *s = w->req->wire.header->step;
    struct task *t = wire_arena_alloc(&w->req->arena, sizeof *t + s->n_seq * sizeof(struct item));
    if (t == NULL)
        return NULL;
    *t = (struct task){
        .req = w->req,
        .pool = pool,
        .flags = w->flags,
        .layout = w->layout,
        .n_items = (uint32_t)s->n_seq,
        .first_failed = w->first_failed,
        .item_status = w->item_status,
        .payload = w->payload,
        .head_room = w->head_room,
    };
    snprintf(t->why, sizeof t->why, "%s", w->why);
    uint32_t row = 0;
    for (uint32_t i = 0; i < t->n_items; i++) {
        t->items[i] = (struct item){.task = t, .row = row, .n_tokens = s->n_tokens[i]};
        row += s->n_tokens[i];
    }
    return t;
}

static void finish(struct step_whole *w)
{
    struct engine *lead = w->cards->engines[0];
    sum_times(w);
    if (!w->has_task) {
        const struct step_part *first = &w->parts[0];
        engine_refuse(lead, w->req, first->refused, "%s", first->why);
    } else {
        struct pool pool = {.config = w->config};
        fail_refused(w);
        struct task *t = task_of(w, &pool);
        if (t == NULL)
            engine_refuse(lead, w->req, ATTN_ENOMEM, "no memory for the step's answer");
        else
            step_answer(lead, t);
    }
    pthread_mutex_destroy(&w->lock);
    for (uint32_t i = 0; i < w->n_parts; i++)
        wire_arena_reset(&w->parts[i].req.arena);
    free(w);
}

static void part_reply(struct request *req)
{
    struct step_part *part = req->part;
    struct step_whole *w = part->whole;
    if (!part->is_answered) {
        part->refused = req->status;
        snprintf(part->why, sizeof part->why, "%s", req->why);
    }
    if (atomic_fetch_sub(&w->n_left, 1) == 1)
        finish(w);
}

/* --- the beginning ---------------------------------------------------------------------------- */

static void part_init(struct step_part *part, struct step_whole *w, uint32_t card,
                      const struct transport_ops *ops)
{
    const struct request *req = w->req;
    part->whole = w;
    part->card = card;
    request_init(&part->req, ops, NULL);
    part->req.part = part;
    part->req.principal = req->principal;
    part->req.msg = req->msg;
    part->req.room = req->room;
    part->req.wire = req->wire;
    part->req.began_ns = req->began_ns;
    part->req.received_ns = req->received_ns;
    part->req.deadline_ns = req->deadline_ns;
}

/* The first item whose sequence an earlier one has, too; n_items: none. slots: 2 * n_items or more,
 * a power of two. */
static uint32_t first_twin(const Attnd__Step *s, uint32_t *slots, uint32_t n_slots)
{
    memset(slots, 0, n_slots * sizeof *slots);
    for (uint32_t i = 0; i < s->n_seq; i++) {
        uint64_t hash = s->seq[i] * 0x9e3779b97f4a7c15u; /* spreads ids that are counted up */
        uint32_t at = (uint32_t)(hash >> 32) & (n_slots - 1);
        for (; slots[at] != 0; at = (at + 1) & (n_slots - 1))
            if (s->seq[slots[at] - 1] == s->seq[i])
                return i;
        slots[at] = i + 1;
    }
    return (uint32_t)s->n_seq;
}

/* No card sees that a sequence which it has is named again for another. */
static bool refuse_twins(struct engine *lead, struct request *req)
{
    const Attnd__Step *s = req->wire.header->step;
    uint32_t n_slots = 4;
    while (n_slots < 2 * s->n_seq)
        n_slots *= 2;
    uint32_t *slots = wire_arena_alloc(&req->arena, n_slots * sizeof *slots);
    if (slots == NULL) {
        engine_refuse(lead, req, ATTN_ENOMEM, "no memory for a step of %zu items", s->n_seq);
        return true;
    }
    uint32_t i = first_twin(s, slots, n_slots);
    if (i == s->n_seq)
        return false;
    engine_refuse(lead, req, ATTN_EINVAL, "step.seq[%" PRIu32 "] %" PRIu64 " is in this step twice",
                  i, s->seq[i]);
    return true;
}

void cards_step_split(struct cards *c, struct request *req, uint32_t of_cards)
{
    static const struct transport_ops part_ops = {.label = STATS_IPC, .reply = part_reply};
    struct engine *lead = c->engines[0], *engines[CARDS_MAX];
    uint32_t n = (uint32_t)__builtin_popcount(of_cards), n_items;
    if (!engine_admit(lead, req) || refuse_twins(lead, req))
        return;
    n_items = (uint32_t)req->wire.header->step->n_seq;
    size_t head_bytes = sizeof(struct step_whole) + n * sizeof(struct step_part);
    struct step_whole *w = malloc(head_bytes + n_items * sizeof(int32_t));
    if (w == NULL) {
        engine_refuse(lead, req, ATTN_ENOMEM, "no memory for a step of %" PRIu32 " items", n_items);
        return;
    }
    *w = (struct step_whole){.cards = c, .req = req, .first_failed = n_items, .n_parts = n};
    w->item_status = (int32_t *)(void *)((uint8_t *)w + head_bytes);
    memset(w->item_status, 0, n_items * sizeof(int32_t));
    memset(w->parts, 0, n * sizeof *w->parts);
    atomic_init(&w->n_left, n);
    pthread_mutex_init(&w->lock, NULL);
    for (uint32_t card = 0, i = 0; card < c->n; card++) {
        if ((of_cards >> card & 1) == 0)
            continue;
        engines[i] = c->engines[card];
        part_init(&w->parts[i++], w, card, &part_ops);
    }
    for (uint32_t i = 0; i < n; i++) /* w is gone with the last */
        engine_take(engines[i], &w->parts[i].req);
}
