/* step.c: carries out a step whose sequences are on several cards. Each card's engine gets a
 * request of its own for the same message, computes its own items in place and skips the others;
 * all outputs go into one reply. The engine that finishes the last shard answers the step.
 */
#include "daemon/cards/step.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/cards/cards.h"
#include "daemon/cards/internal.h"
#include "daemon/cards/names.h"
#include "daemon/cards/step_shard.h"
#include "daemon/engine/core/answer.h"
#include "daemon/engine/core/inbox.h"

/* The sequences that a step names. */
struct step_items {
    const Attnd__Step *step;
    uint32_t tenant;
};

static struct step_items items_of(struct cards *c, const struct request *req)
{
    const Attnd__Request *h = req->wire.header;
    bool must_ask = c->has_tenants && atomic_load(&c->n_moved) > 0;
    return (struct step_items){.step = h->body_case == ATTND__REQUEST__BODY_PLAN ? h->plan->step
                                                                                 : h->step,
                               .tenant = must_ask ? cards_tenant(c, h->session) : TENANT_OPERATOR};
}

/* The card of item i. The caller holds the route, or the answer could change at once. */
static uint32_t card_of_item(struct cards *c, const struct step_items *of, size_t i)
{
    if (atomic_load_explicit(&c->n_moved, memory_order_relaxed) == 0)
        return card_of_epoch(c, of->step->epoch[i]);
    return cards_at(c, (struct seq_name){of->tenant, of->step->seq[i]}, of->step->epoch[i]);
}

uint32_t cards_of_step(struct cards *c, const struct request *req)
{
    struct step_items of = items_of(c, req);
    uint32_t of_cards = 0;
    for (size_t i = 0; i < of.step->n_epoch; i++)
        of_cards |= 1u << card_of_item(c, &of, i);
    return of_cards;
}

/* --- the end ---------------------------------------------------------------------------------- */

/* Sums up the times of the shards, for the reply and the histograms. */
static void sum_times(struct step_whole *w)
{
    struct request *req = w->req;
    for (const struct step_shard *shard = w->shards; shard != NULL; shard = shard->next) {
        const struct request *p = &shard->req;
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

/* Gives the items of a shard that was refused as a whole its status. */
static void fail_refused(struct step_whole *w)
{
    const Attnd__Step *s = w->req->wire.header->step;
    for (const struct step_shard *shard = w->shards; shard != NULL; shard = shard->next) {
        for (uint32_t i = 0; i < s->n_seq && !shard->is_answered; i++) {
            if (!cards_step_is_of(shard, i))
                continue;
            w->item_status[i] = shard->refused;
            if (i < w->first_failed) {
                w->first_failed = i;
                snprintf(w->why, sizeof w->why, "%s", shard->why);
            }
        }
    }
}

/* A task as one engine would have it for the whole step when all items are done. NULL: no
 * memory. */
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

static void whole_free(struct step_whole *w)
{
    while (w->shards != NULL) {
        struct step_shard *shard = w->shards;
        w->shards = shard->next;
        free(shard);
    }
    free(w->shard_of);
    free(w);
}

static void finish(struct step_whole *w)
{
    struct engine *primary = w->cards->peers.at[0];
    sum_times(w);
    for (struct step_shard *shard = w->shards; shard != NULL; shard = shard->next)
        wire_arena_reset(&shard->req.arena); /* its connection may end with the answer */
    if (!w->has_task) {
        const struct step_shard *first = w->shards;
        while (first->next != NULL)
            first = first->next;
        engine_refuse(primary, w->req, first->refused, "%s", first->why);
    } else {
        struct pool pool = {.config = w->config};
        fail_refused(w);
        struct task *t = task_of(w, &pool);
        if (t == NULL)
            engine_refuse(primary, w->req, ATTN_ENOMEM, "no memory for the step's answer");
        else
            step_answer(primary, t);
    }
    pthread_mutex_destroy(&w->lock);
    whole_free(w);
}

static void shard_reply(struct request *req)
{
    struct step_shard *shard = req->shard;
    struct step_whole *w = shard->whole;
    if (!shard->is_answered) {
        shard->refused = req->status;
        snprintf(shard->why, sizeof shard->why, "%s", req->why);
    }
    if (atomic_fetch_sub(&w->n_left, 1) == 1)
        finish(w);
}

/* --- the beginning ---------------------------------------------------------------------------- */

/* Adds a shard for a card; the list of shards is read only when the last is done. NULL: no
 * memory. */
static struct step_shard *shard_new(struct step_whole *w, uint32_t card)
{
    static const struct transport_ops ops = {.label = STATS_IPC, .reply = shard_reply};
    const struct request *req = w->req;
    struct step_shard *shard = calloc(1, sizeof *shard);
    if (shard == NULL)
        return NULL;
    shard->whole = w;
    shard->card = card;
    request_init(&shard->req, &ops, NULL);
    shard->req.arena.source = req->arena.source; /* counted as the step's own */
    shard->req.shard = shard;
    shard->req.principal = req->principal;
    shard->req.msg = req->msg;
    shard->req.room = req->room;
    shard->req.wire = req->wire;
    shard->req.bell = req->bell;
    shard->req.is_widened = req->is_widened;
    shard->req.began_ns = req->began_ns;
    shard->req.received_ns = req->received_ns;
    shard->req.deadline_ns = req->deadline_ns;
    pthread_mutex_lock(&w->lock);
    shard->number = w->n_shards++;
    shard->next = w->shards;
    w->shards = shard;
    pthread_mutex_unlock(&w->lock);
    return shard;
}

/* The first item that repeats the sequence of an earlier one; n_seq: none. n_slots: a power of two,
 * at least 2 * n_seq. */
static uint32_t first_twin(const Attnd__Step *s, uint32_t *slots, uint32_t n_slots)
{
    memset(slots, 0, n_slots * sizeof *slots);
    for (uint32_t i = 0; i < s->n_seq; i++) {
        uint64_t hash = s->seq[i] * 0x9e3779b97f4a7c15u; /* spreads consecutive ids */
        uint32_t at = (uint32_t)(hash >> 32) & (n_slots - 1);
        for (; slots[at] != 0; at = (at + 1) & (n_slots - 1))
            if (s->seq[slots[at] - 1] == s->seq[i])
                return i;
        slots[at] = i + 1;
    }
    return (uint32_t)s->n_seq;
}

/* Refuses a step that names a sequence twice. Checked here, since the two items could be on
 * different cards, of which neither would notice. true: it was refused. */
static bool refuse_twins(struct engine *primary, struct request *req)
{
    const Attnd__Step *s = req->wire.header->step;
    uint32_t n_slots = 4;
    while (n_slots < 2 * s->n_seq)
        n_slots *= 2;
    uint32_t *slots = wire_arena_alloc(&req->arena, n_slots * sizeof *slots);
    if (slots == NULL) {
        engine_refuse(primary, req, ATTN_ENOMEM, "no memory for a step of %zu items", s->n_seq);
        return true;
    }
    uint32_t i = first_twin(s, slots, n_slots);
    if (i == s->n_seq)
        return false;
    engine_refuse(primary, req, ATTN_EINVAL,
                  "step.seq[%" PRIu32 "] %" PRIu64 " is in this step twice", i, s->seq[i]);
    return true;
}

uint64_t cards_step_bytes(uint32_t n_cards)
{
    return n_cards <= 1 ? 0 : sizeof(struct step_whole) + n_cards * sizeof(struct step_shard);
}

static struct step_whole *whole_new(struct cards *c, struct request *req)
{
    uint32_t n_items = (uint32_t)req->wire.header->step->n_seq;
    struct step_whole *w = calloc(1, sizeof *w + n_items * sizeof w->item_status[0]);
    if (w == NULL)
        return NULL;
    w->cards = c;
    w->req = req;
    w->first_failed = n_items;
    w->shard_of = calloc(n_items, sizeof *w->shard_of);
    if (w->shard_of == NULL) {
        free(w);
        return NULL;
    }
    pthread_mutex_init(&w->lock, NULL);
    return w;
}

/* Makes a shard for each card and assigns each item to its card's. false: no memory. */
static bool whole_split(struct step_whole *w, uint32_t of_cards,
                        struct step_shard *shards[CARDS_MAX])
{
    struct step_items of = items_of(w->cards, w->req);
    for (uint32_t card = 0; card < w->cards->peers.n; card++) {
        shards[card] = NULL;
        if ((of_cards >> card & 1) != 0 && (shards[card] = shard_new(w, card)) == NULL)
            return false;
    }
    for (size_t i = 0; i < of.step->n_seq; i++)
        atomic_store_explicit(&w->shard_of[i], shards[card_of_item(w->cards, &of, i)]->number,
                              memory_order_relaxed);
    return true;
}

void cards_step_split(struct cards *c, struct request *req, struct engine *from, uint32_t of_cards)
{
    struct engine *primary = c->peers.at[0];
    struct step_shard *shards[CARDS_MAX];
    if (from != NULL)
        charge_queue_move(&req->charge, &primary->queue);
    else if (!engine_admit(primary, req))
        return;
    if (refuse_twins(primary, req))
        return;
    struct step_whole *w = whole_new(c, req);
    if (w == NULL || !whole_split(w, of_cards, shards)) {
        if (w != NULL)
            whole_free(w);
        engine_refuse(primary, req, ATTN_ENOMEM, "no memory for a step of %zu items",
                      req->wire.header->step->n_seq);
        return;
    }
    atomic_init(&w->n_left, w->n_shards);
    for (uint32_t card = 0, n = w->n_shards; n > 0; card++) { /* w may be freed after the last */
        if ((of_cards >> card & 1) == 0)
            continue;
        engine_take(c->peers.at[card], &shards[card]->req);
        n--;
    }
}

void cards_shard_again(struct cards *c, struct request *req)
{
    struct step_shard *shard = req->shard, *shards[CARDS_MAX] = {0};
    struct step_whole *w = shard->whole;
    struct step_items of = items_of(c, w->req);
    bool is_whole = true;
    uint32_t first = CARDS_MAX;
    for (uint32_t i = 0; i < of.step->n_seq && is_whole; i++) {
        if (!cards_step_is_of(shard, i))
            continue;
        uint32_t card = card_of_item(c, &of, i);
        first = first == CARDS_MAX ? card : first;
        shards[first] = shard; /* this shard goes to its first item's card */
        if (shards[card] == NULL) {
            shards[card] = shard_new(w, card);
            is_whole = shards[card] != NULL;
            if (is_whole)
                atomic_fetch_add(&w->n_left, 1);
        }
        if (is_whole)
            atomic_store_explicit(&w->shard_of[i], shards[card]->number, memory_order_relaxed);
    }
    shard->card = first;
    for (uint32_t card = 0; card < c->peers.n; card++)
        if (shards[card] != NULL && shards[card] != shard)
            engine_take(c->peers.at[card], &shards[card]->req);
    engine_hand_over(c->peers.at[first], req);
}
