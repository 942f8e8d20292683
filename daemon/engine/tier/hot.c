/* hot.c: what an item that chooses blocks needs, what it missed, and which of its queries are
 * computed next. */
#include "daemon/engine/tier/hot.h"

#include <string.h>

#include "cache/kv_owner.h"
#include "daemon/engine/core/effects.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/tier/summaries.h"

static uint32_t per_query(const struct item *it)
{
    return it->task->pool->config.num_kv_heads * it->task->n_chosen;
}

/* Blocks that the item's queries see. */
static uint32_t blocks_seen(const struct item *it)
{
    const uint32_t bt = it->task->pool->config.block_tokens;
    return (uint32_t)(((uint64_t)it->pos + it->n_tokens + bt - 1) / bt);
}

static bool attends(const struct item *it)
{
    return (it->task->flags & WIRE_STEP_ATTEND) != 0;
}

/* Whether the sequence's steps choose blocks; a successor knows it of those that do not fit. */
static bool seq_chooses(const struct engine *e, const struct item *it)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){it->seq}, &info);
    return e->seqs[it->seq].chooses || info.n_blocks > it->task->pool->config.n_blocks;
}

static bool may_be_hot(const struct engine *e, const struct item *it)
{
    const struct task *t = it->task;
    if (!attends(it))
        return seq_chooses(e, it);
    return t->n_chosen > 0 && !(t->flags & WIRE_STEP_FULL) &&
           !t->pool->config.layers[t->layer].is_full && it->key_base == 0 && it->ahead == 0;
}

static attn_status make(struct item *it)
{
    struct wire_arena *a = &it->task->req->arena;
    struct hot_item *h = wire_arena_alloc(a, sizeof *h);
    uint8_t *needs = wire_arena_alloc(a, blocks_seen(it));
    bool *has_missed = wire_arena_alloc(a, it->n_tokens * sizeof *has_missed);
    if (h == NULL || needs == NULL || has_missed == NULL)
        return ATTN_ENOMEM;
    *h = (struct hot_item){.n_entries = blocks_seen(it),
                           .n = it->n_tokens,
                           .is_whole = !attends(it) || it->task->n_chosen >= blocks_seen(it),
                           .needs = needs,
                           .has_missed = has_missed};
    it->hot = h;
    return ATTN_OK;
}

/* Marks the blocks that the query visits for any kv head; returns how many were not marked yet. */
static uint32_t mark_chosen(const struct item *it, uint32_t query)
{
    const struct hot_item *h = it->hot;
    const uint32_t *list = h->chosen + (size_t)query * per_query(it);
    uint32_t n = 0;
    for (uint32_t i = 0; i < per_query(it); i++)
        if (list[i] != UINT32_MAX && h->needs[list[i]] == 0) {
            h->needs[list[i]] = 1;
            n++;
        }
    return n;
}

/* Marks what every query needs, the sequence's first block and the newest from this query on, and
 * what can't go, since a layer has not filled it; returns how many. */
static uint32_t mark_fixed(const struct item *it, const struct kv_seq_info *info, uint32_t query)
{
    const struct pool *p = it->task->pool;
    const struct hot_item *h = it->hot;
    uint32_t newest = (it->pos + query) / p->config.block_tokens,
             n_full = summaries_n_full(p, info);
    newest = newest < n_full ? newest : n_full;
    memset(h->needs, 0, h->n_entries);
    h->needs[0] = 1;
    memset(h->needs + newest, 1, h->n_entries - newest);
    return 1 + h->n_entries - newest;
}

/* Whether blocks of its sequence are away; then it has memory for its table. ATTN_ENOMEM. */
static attn_status look(const struct engine *e, struct item *it)
{
    struct hot_item *h = it->hot;
    h->is_partial =
        (!h->is_whole || !attends(it)) && kv_idle_n_paged_out(e->env.kv, (kv_seq_id){it->seq}) > 0;
    if (h->is_partial && h->table == NULL)
        h->table = wire_arena_alloc(&it->task->req->arena, h->n_entries * sizeof *h->table);
    return h->is_partial && h->table == NULL ? ATTN_ENOMEM : ATTN_OK;
}

attn_status hot_prepare(struct engine *e, struct item *it)
{
    const bool is_hot = may_be_hot(e, it) && summaries_open(it->task->pool);
    struct kv_seq_info info;
    if (attends(it) || is_hot)
        e->seqs[it->seq].chooses = is_hot;
    if (!is_hot) {
        if (it->hot != NULL && it->hot->is_appended) /* as a whole it would append again */
            return ATTN_ENOMEM;
        it->hot = NULL;
        return ATTN_OK;
    }
    if ((it->hot == NULL && make(it) != ATTN_OK) || look(e, it) != ATTN_OK)
        return ATTN_ENOMEM;
    if (it->hot->is_whole) {
        const uint32_t first = attends(it) ? 0 : it->pos / it->task->pool->config.block_tokens;
        memset(it->hot->needs, 0, first);
        memset(it->hot->needs + first, 1, it->hot->n_entries - first);
        return ATTN_OK;
    }
    kv_seq_info(e->env.kv, (kv_seq_id){it->seq}, &info);
    mark_fixed(it, &info, it->hot->first);
    for (uint32_t q = 0; q < it->hot->n && it->hot->chosen != NULL; q++)
        mark_chosen(it, it->hot->first + q);
    return ATTN_OK;
}

uint32_t hot_chosen(const struct item *it)
{
    return it->hot == NULL || it->hot->is_whole ? 0 : it->hot->n * per_query(it);
}

void hot_launch(struct engine *e, const struct item *it, uint32_t *chosen, struct backend_item *d)
{
    const struct backend_pool_config *c = &it->task->pool->config;
    const struct hot_item *h = it->hot;
    const size_t el = attn_dtype_bytes(c->q_dtype), heads = c->num_q_heads;
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){it->seq}, &info);
    const uint32_t n_seen = (it->pos + h->first + h->n - 1) / c->block_tokens + 1;
    for (uint32_t i = 0; h->is_partial && i < n_seen; i++) {
        const uint32_t entry = info.block_table[i];
        const bool is_unused = kv_is_place(entry) && !attends(it); /* any block's name will do */
        h->table[i] = is_unused ? 0 : pool_block_name(it->task->pool, entry);
    }
    if (h->is_partial)
        d->block_table = h->table;
    if (h->is_whole)
        return;
    d->chosen = chosen;
    if (!h->is_appended)
        return;
    d->flags &= ~(uint32_t)BACKEND_APPEND;
    d->k = d->v = NULL;
    d->pos += h->first;
    d->n_tokens = h->n;
    d->q = (const uint8_t *)d->q + h->first * heads * backend_q_dim(c) * el;
    d->out = (uint8_t *)d->out + h->first * heads * backend_out_dim(c) * el;
    if (d->lse != NULL)
        d->lse += h->first * heads;
}

/* Counts the blocks that a query visited, and notes that they were used; false: some are away. */
static bool saw_all(struct engine *e, const struct item *it, const uint32_t *list,
                    const uint32_t *row)
{
    struct pool *p = it->task->pool;
    const struct hot_item *h = it->hot;
    uint32_t n_away = 0, n = 0;
    for (uint32_t i = 0; i < per_query(it); i++) {
        if (list[i] == UINT32_MAX)
            continue;
        n++;
        if (h->is_partial && h->table[list[i]] >= p->config.n_blocks)
            n_away++;
        else if (!kv_is_place(row[list[i]]))
            summaries_note(e, p, row[list[i]]);
    }
    if (h->chosen == NULL) { /* else it was counted when it missed */
        e->idle.n_chosen_here += n - n_away;
        e->idle.n_chosen_away += n_away;
    }
    return n_away == 0;
}

/* Keeps what all queries chose, the first time. */
static attn_status keep_chosen(struct item *it, const uint32_t *chosen)
{
    struct wire_arena *a = &it->task->req->arena;
    const size_t n = (size_t)it->n_tokens * per_query(it);
    uint32_t *list = wire_arena_alloc(a, n * sizeof *list);
    if (list == NULL)
        return ATTN_ENOMEM;
    memcpy(list, chosen, n * sizeof *list);
    it->hot->chosen = list;
    return ATTN_OK;
}

/* Blocks that are there, that the marked ones do not include, and that can't make way for them:
 * others share them, or a layer has not filled them. */
static uint32_t n_stuck(const struct engine *e, const struct item *it,
                        const struct kv_seq_info *info)
{
    const struct hot_item *h = it->hot;
    const uint32_t n_full = summaries_n_full(it->task->pool, info);
    uint32_t n = 0;
    for (uint32_t i = 0; i < info->n_blocks; i++)
        n += !(i < h->n_entries && h->needs[i] != 0) && !kv_is_place(info->block_table[i]) &&
             (i >= n_full || !kv_idle_may_go(e->env.kv, (kv_seq_id){it->seq}, i));
    return n;
}

/* The next queries that missed blocks, as many as the pool may have room for; false: none is
 * left. */
static bool choose_next(struct engine *e, struct item *it)
{
    struct hot_item *h = it->hot;
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){it->seq}, &info);
    const uint64_t room = info.n_blocks - info.n_paged_out +
                          (uint64_t)kv_pool_free_for(e->env.kv, info.pool, info.owner);
    uint32_t q = 0;
    while (q < it->n_tokens && !h->has_missed[q])
        q++;
    if (q == it->n_tokens)
        return false;
    h->first = q;
    uint64_t n = mark_fixed(it, &info, q) + mark_chosen(it, q);
    n += n_stuck(e, it, &info);
    while (++q < it->n_tokens && h->has_missed[q] && (n += mark_chosen(it, q)) <= room)
        ;
    h->n = q - h->first;
    return true;
}

attn_status hot_came(struct engine *e, struct item *it, const struct backend_item *d,
                     bool *out_again)
{
    struct hot_item *h = it->hot;
    struct kv_seq_info info;
    bool has_missed = false;
    kv_seq_info(e->env.kv, (kv_seq_id){it->seq}, &info);
    *out_again = false;
    if (h->is_whole)
        return ATTN_OK;
    h->is_appended = true;
    e->idle.n_choices++;
    for (uint32_t q = 0; q < h->n; q++) {
        const uint32_t *list = d->chosen + (size_t)q * per_query(it);
        h->has_missed[h->first + q] = !saw_all(e, it, list, info.block_table);
        has_missed |= h->has_missed[h->first + q];
    }
    if (h->chosen == NULL && has_missed && keep_chosen(it, d->chosen) != ATTN_OK)
        return ATTN_ENOMEM;
    *out_again = h->chosen != NULL && choose_next(e, it);
    return ATTN_OK;
}
