/* step_shard.c: what an engine asks and reports about its shard of a step over several cards: which
 * items it has, where its outputs go, what it is answered with. */
#include "daemon/cards/step_shard.h"

#include <stdio.h>

bool cards_step_is_of(const struct step_shard *shard, uint32_t item)
{
    return atomic_load_explicit(&shard->whole->shard_of[item], memory_order_relaxed) ==
           shard->number;
}

bool cards_step_is_foreign(const struct request *req, uint32_t item)
{
    return !cards_step_is_of(req->shard, item);
}

bool cards_step_counts(const struct request *req)
{
    return req->shard->number == 0;
}

attn_status cards_step_reserve(struct task *t, size_t head)
{
    struct step_whole *w = t->req->shard->whole;
    attn_status st = ATTN_OK;
    pthread_mutex_lock(&w->lock);
    if (w->payload == NULL && w->req->bell != NULL)
        w->payload = w->req->bell->out;
    else if (w->payload == NULL)
        st = request_reply_reserve(w->req, head + t->layout.reply_bytes);
    if (w->payload == NULL && st == ATTN_OK) {
        w->head_room = head;
        w->payload = w->req->reply->data + head;
    }
    t->head_room = w->head_room;
    t->payload = w->payload;
    pthread_mutex_unlock(&w->lock);
    return st;
}

attn_status cards_step_shard_done(struct task *t)
{
    struct step_shard *shard = t->req->shard;
    struct step_whole *w = shard->whole;
    attn_status st = ATTN_OK;
    pthread_mutex_lock(&w->lock);
    shard->is_answered = true;
    w->has_task = true;
    w->config = t->pool->config;
    w->layout = t->layout;
    w->flags = t->flags;
    for (uint32_t i = 0; i < t->n_items; i++)
        if (cards_step_is_of(shard, i))
            w->item_status[i] = t->item_status[i];
    if (t->first_failed < t->n_items)
        st = (attn_status)t->item_status[t->first_failed];
    if (t->first_failed < w->first_failed) {
        w->first_failed = t->first_failed;
        snprintf(w->why, sizeof w->why, "%s", t->why);
    }
    pthread_mutex_unlock(&w->lock);
    return st;
}
