/* ahead.c: see ahead.h. */
#include "daemon/engine/step/ahead.h"

#include "cache/kv_append.h"
#include "daemon/base/log.h"
#include "daemon/engine/step/lane.h"

static_assert(BACKEND_MAX_IN_FLIGHT <= KV_AHEAD_SLOTS, "each batch in flight has a slot");

void ahead_init(struct engine *e)
{
    size_t bytes;
    void *words = kv_ahead_words(e->env.kv, &bytes);
    if (!e->env.is_kept || !lane_is_possible(&e->info))
        return;
    attn_status st = e->env.ops->host_register(e->env.backend, words, bytes);
    e->has_ahead = st == ATTN_OK;
    if (st != ATTN_OK)
        log_warn("lanes are slower: the device can't write to the cache's tables: %s",
                 attn_status_message(st));
}

void ahead_fini(struct engine *e)
{
    size_t bytes;
    void *words = kv_ahead_words(e->env.kv, &bytes);
    if (e->has_ahead)
        e->env.ops->host_unregister(e->env.backend, words, bytes);
}

static uint32_t slot_of(const struct engine *e, const struct batch *b)
{
    return (uint32_t)(b - e->batches);
}

/* Puts down the appends of n items, of one task, from the i-th on; false: there is no room. */
static bool put_down(struct engine *e, const struct batch *b, uint32_t i, uint32_t n,
                     uint32_t *n_ahead)
{
    if (!e->has_ahead || *n_ahead + n > kv_ahead_max(e->env.kv))
        return false;
    for (uint32_t k = i; k < i + n; k++) {
        const struct item *it = b->items[k];
        kv_ahead_add(e->env.kv, slot_of(e, b), (kv_seq_id){it->seq}, it->task->layer, it->pos,
                     it->n_tokens);
    }
    *n_ahead += n;
    return true;
}

/* Bells that are whole in this batch: their workers need not wait for the host. What several cards
 * compute is whole nowhere. */
void ahead_begin(struct engine *e, struct batch *b)
{
    struct backend_word *signals = b->signals + 1; /* behind the cache's */
    uint32_t n = 0, n_ahead = 0, n_items = b->pool->has_words ? b->n_items : 0;
    for (uint32_t i = 0, n_of_task; i < n_items; i += n_of_task) {
        const struct task *t = b->items[i]->task;
        for (n_of_task = 1; i + n_of_task < n_items && b->items[i + n_of_task]->task == t;)
            n_of_task++;
        if (t->req->bell == NULL || t->req->shard != NULL || n_of_task < t->n_items)
            continue;
        if (e->env.is_kept && (t->flags & WIRE_STEP_APPEND) &&
            !put_down(e, b, i, n_of_task, &n_ahead))
            continue;
        signals[n++] = t->req->bell->done;
        t->req->bell->is_signalled = true;
    }
    if (n_ahead > 0) {
        size_t bytes;
        uint32_t *words = kv_ahead_words(e->env.kv, &bytes), slot = slot_of(e, b);
        *--signals = (struct backend_word){words + slot, kv_ahead_begin(e->env.kv, slot)};
        n++;
    }
    b->device.signals = signals;
    b->device.n_signals = n;
}

bool ahead_is_answered(const struct engine *e, const struct batch *b)
{
    return kv_ahead_is_answered(e->env.kv, slot_of(e, b));
}

void ahead_end(struct engine *e, const struct batch *b)
{
    kv_ahead_end(e->env.kv, slot_of(e, b));
}
