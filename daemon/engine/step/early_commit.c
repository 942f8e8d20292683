/* early_commit.c: adds signals to a batch by which the device itself answers bells, and records
 * their early commits in the cache (cache/early_commit.c). Called when a batch is launched and when
 * it is back; engine thread. */
#include "daemon/engine/step/early_commit.h"

#include "cache/kv_append.h"
#include "daemon/base/log.h"
#include "daemon/engine/step/lane.h"

static_assert(BACKEND_MAX_IN_FLIGHT <= KV_EARLY_SLOTS, "each batch in flight has a slot");

void early_init(struct engine *e)
{
    size_t bytes;
    void *words = kv_early_words(e->env.kv, &bytes);
    if (!e->env.is_kept || !lane_is_possible(&e->info))
        return;
    attn_status st = e->env.ops->host_register(e->env.backend, words, bytes);
    e->has_early_commits = st == ATTN_OK;
    if (st != ATTN_OK)
        log_warn("lanes are slower: the device can't write to the cache's tables: %s",
                 attn_status_message(st));
}

void early_fini(struct engine *e)
{
    size_t bytes;
    void *words = kv_early_words(e->env.kv, &bytes);
    if (e->has_early_commits)
        e->env.ops->host_unregister(e->env.backend, words, bytes);
}

static uint32_t slot_of(const struct engine *e, const struct batch *b)
{
    return (uint32_t)(b - e->batches);
}

/* Records the appends of n items of one task, beginning with item i, for an early commit; false: no
 * room. */
static bool put_down(struct engine *e, const struct batch *b, uint32_t i, uint32_t n,
                     uint32_t *n_early)
{
    if (!e->has_early_commits || *n_early + n > kv_early_max(e->env.kv))
        return false;
    for (uint32_t k = i; k < i + n; k++) {
        const struct item *it = b->items[k];
        kv_early_add(e->env.kv, slot_of(e, b), (kv_seq_id){it->seq}, it->task->layer, it->pos,
                     it->n_tokens);
    }
    *n_early += n;
    return true;
}

/* Signals bells whose items are all in this batch, so that their workers need not wait for the
 * host. A bell computed on several cards is never whole in one batch. */
void early_begin(struct engine *e, struct batch *b)
{
    struct backend_word *signals = b->signals + 1; /* [0] is for the cache's signal */
    uint32_t n = 0, n_early = 0, n_items = b->pool->has_words ? b->n_items : 0;
    for (uint32_t i = 0, n_of_task; i < n_items; i += n_of_task) {
        const struct task *t = b->items[i]->task;
        for (n_of_task = 1; i + n_of_task < n_items && b->items[i + n_of_task]->task == t;)
            n_of_task++;
        if (t->req->bell == NULL || t->req->shard != NULL || n_of_task < t->n_items)
            continue;
        if (e->env.is_kept && (t->flags & WIRE_STEP_APPEND) &&
            !put_down(e, b, i, n_of_task, &n_early))
            continue;
        signals[n++] = t->req->bell->done;
        t->req->bell->is_signalled = true;
    }
    if (n_early > 0) {
        size_t bytes;
        uint32_t *words = kv_early_words(e->env.kv, &bytes), slot = slot_of(e, b);
        *--signals = (struct backend_word){words + slot, kv_early_begin(e->env.kv, slot)};
        n++;
    }
    b->device.signals = signals;
    b->device.n_signals = n;
}

bool early_is_answered(const struct engine *e, const struct batch *b)
{
    return kv_early_is_answered(e->env.kv, slot_of(e, b));
}

void early_end(struct engine *e, const struct batch *b)
{
    kv_early_end(e->env.kv, slot_of(e, b));
}
