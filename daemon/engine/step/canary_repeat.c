/* canary_repeat.c: computes again what the canary doubts, from the queries that it has kept. */
#include "daemon/engine/step/canary_repeat.h"

#include <string.h>

#include "cache/kv_append.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/step/batch.h"
#include "daemon/engine/step/canary_watch.h"
#include "daemon/engine/tier/idle.h"

static bool take_memory(struct canary_watch *w, struct pool *p)
{
    const struct canary *c = &w->item;
    size_t rows = (size_t)c->n_queries * c->num_q_heads, element = attn_dtype_bytes(c->q_dtype);
    size_t q_bytes = rows * c->q_dim * element, out_bytes = rows * c->out_dim * element;
    void *memory;
    w->pool = p;
    w->out_at = (q_bytes + 63) / 64 * 64;
    w->lse_at = w->out_at + (out_bytes + 63) / 64 * 64;
    w->memory_bytes = w->lse_at + rows * sizeof(float);
    if (p->ops->host_alloc(p->backend, w->memory_bytes, &memory) != ATTN_OK)
        return false;
    w->memory = memory;
    memcpy(w->memory, c->queries, q_bytes);
    memset(w->memory + w->out_at, 0xff, w->memory_bytes - w->out_at); /* NaN */
    return true;
}

bool canary_repeat(struct engine *e)
{
    struct canary_watch *w = e->canary;
    if (atomic_load(&w->state) != CANARY_DOUBTED)
        return false;
    struct canary *c = &w->item;
    struct pool *p;
    const uint32_t *table = canary_table(e, w, &p);
    if (table == NULL || w->is_written || idle_has(e, w->seq)) {
        canary_leave(w, "the sequence has changed");
        return true;
    }
    if (!seq_take(e, w->seq, c->layer))
        return false;
    if (kv_seq_sees(e->env.kv, (kv_seq_id){w->seq}, c->pos + 1 - c->n_queries) != ATTN_OK)
        canary_keep_row(c);
    struct backend_item item = {.flags = BACKEND_ATTEND,
                                .layer = c->layer,
                                .table_row = w->seq,
                                .pos = c->pos + 1 - c->n_queries,
                                .n_tokens = c->n_queries,
                                .block_table = table,
                                .n_chosen = c->n_chosen};
    if (kv_seq_materialize(e->env.kv, (kv_seq_id){w->seq}, &p->fx) == ATTN_OK &&
        take_memory(w, p)) {
        item.q = w->memory;
        item.out = w->memory + w->out_at;
        item.lse = c->has_lse ? (float *)(void *)(w->memory + w->lse_at) : NULL;
        if (batch_launch_again(e, p, &item, c->n_keys)) {
            atomic_store(&w->state, CANARY_REPEATING);
            return true;
        }
    }
    seq_give(e, w->seq, c->layer);
    canary_leave(w, "it can't be computed again");
    return true;
}
