/* summaries.c: summaries of blocks in idle memory: their numbers, the copies that make them, and
 * which blocks choices took longest ago. */
#include "daemon/engine/tier/summaries.h"

#include <stdlib.h>

#include "daemon/base/log.h"
#include "daemon/engine/core/effects.h"
#include "daemon/keeper/idle_memory.h"

bool summaries_may_be(const struct engine *e, const struct pool *p)
{
    return p->has_summaries && e->env.idle != NULL && e->env.idle->base != NULL;
}

uint32_t summaries_of(const struct engine *e, const struct pool *p)
{
    if (!summaries_may_be(e, p))
        return 0;
    const uint64_t n = e->env.idle->bytes / KV_PAGE_BYTES / p->idle_pages;
    return n < INT32_MAX - p->config.n_blocks ? (uint32_t)n : 0;
}

bool summaries_open(struct pool *p)
{
    if (p->config.n_summaries == 0 || p->has_summaries_open)
        return p->config.n_summaries > 0;
    p->has_summaries_open = p->ops->summaries_open(p->device) == ATTN_OK;
    if (p->has_summaries_open)
        return true;
    log_warn("pool \"%s\": steps that choose blocks need all of their sequence on the device: %s",
             p->spec.wire->name, p->ops->last_error(p->backend));
    summaries_forget(p);
    p->config.n_summaries = 0;
    return false;
}

void summaries_forget(struct pool *p)
{
    p->has_summaries_open = false;
    free(p->has_summary);
    free(p->chosen_at);
    p->has_summary = NULL;
    p->chosen_at = NULL;
}

/* Memory for what is known of the pool's blocks and summaries. */
static bool has_memory(struct pool *p)
{
    if (p->has_summary == NULL)
        p->has_summary = calloc((size_t)p->config.n_summaries + 1, sizeof *p->has_summary);
    if (p->chosen_at == NULL)
        p->chosen_at = calloc(p->config.n_blocks, sizeof *p->chosen_at);
    return p->has_summary != NULL && p->chosen_at != NULL;
}

/* --- which blocks go -------------------------------------------------------------------------- */

void summaries_note(struct engine *e, struct pool *p, uint32_t block)
{
    if (has_memory(p))
        p->chosen_at[block] = e->idle.n_choices;
}

uint32_t summaries_n_full(const struct pool *p, const struct kv_seq_info *info)
{
    uint32_t n = UINT32_MAX;
    for (uint32_t l = 0; l < p->config.num_layers; l++)
        n = info->layer_len[l] < n ? info->layer_len[l] : n;
    return n / p->config.block_tokens;
}

uint32_t summaries_coldest(const struct engine *e, const struct pool *p, uint32_t seq,
                           const uint8_t *needs, uint32_t n_needs, uint32_t most, uint32_t *list)
{
    uint64_t at[MOVER_GROUP];
    uint32_t n = 0;
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){seq}, &info);
    const uint32_t past = summaries_n_full(p, &info);
    most = most < MOVER_GROUP ? most : MOVER_GROUP;
    for (uint32_t i = 0; i < info.n_blocks; i++) {
        const bool is_full = i < past;
        if (needs != NULL && ((i < n_needs && needs[i] != 0) || !is_full))
            continue;
        if (!kv_idle_may_go(e->env.kv, (kv_seq_id){seq}, i))
            continue;
        const bool is_last = i == 0 || !is_full || p->chosen_at == NULL;
        const uint64_t when = is_last ? UINT64_MAX - i : p->chosen_at[info.block_table[i]];
        uint32_t to = n;
        while (to > 0 && at[to - 1] > when)
            to--;
        if (to == most)
            continue;
        n += n < most;
        for (uint32_t k = n - 1; k > to; k--) {
            at[k] = at[k - 1];
            list[k] = list[k - 1];
        }
        at[to] = when;
        list[to] = i;
    }
    return n;
}

/* --- copies ----------------------------------------------------------------------------------- */

void summaries_copy(struct engine *e, struct pool *p, const struct kv_idle_move *m)
{
    struct engine_idle *x = &e->idle;
    struct kv_effects *fx = &p->fx;
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){m->seq}, &info);
    const uint32_t past = summaries_n_full(p, &info);
    x->copies = SUMMARIES_NONE;
    if (!has_memory(p))
        return;
    for (uint32_t i = 0; i < m->n; i++) {
        const uint32_t nth = pool_nth_summary(p, m->entries[i].page);
        x->has_copy[i] = m->entries[i].index < past && nth < p->config.n_summaries &&
                         fx->n_copies < fx->copies_capacity;
        if (!x->has_copy[i])
            continue;
        fx->copies[fx->n_copies++] =
            (struct kv_copy){m->entries[i].block, p->config.n_blocks + nth};
        x->copies = SUMMARIES_WAIT;
    }
}

void summaries_sent(struct engine *e, const struct batch *b)
{
    struct engine_idle *x = &e->idle;
    if (x->copies != SUMMARIES_WAIT || x->out.pool != b->pool)
        return;
    x->copies = SUMMARIES_SENT;
    x->copies_in = b;
}

bool summaries_came(struct engine *e, const struct batch *b, attn_status st)
{
    struct engine_idle *x = &e->idle;
    const bool is_it = x->copies == SUMMARIES_SENT
                           ? x->copies_in == b
                           : x->copies == SUMMARIES_WAIT && x->out.pool == b->pool &&
                                 st != ATTN_OK && b->pool->fx.n_copies == 0; /* refused with them */
    if (is_it)
        x->copies = st == ATTN_OK ? SUMMARIES_MADE : SUMMARIES_NONE;
    return is_it;
}

bool summaries_are_settled(const struct engine *e)
{
    return e->idle.copies == SUMMARIES_NONE || e->idle.copies == SUMMARIES_MADE;
}

void summaries_give_up(struct engine *e)
{
    struct engine_idle *x = &e->idle;
    if (x->copies == SUMMARIES_WAIT) { /* nor may they go when the pool has another size */
        struct kv_effects *fx = &x->out.pool->fx;
        uint32_t n = 0;
        for (uint32_t i = 0; i < fx->n_copies; i++)
            if (fx->copies[i].dst < x->out.pool->config.n_blocks)
                fx->copies[n++] = fx->copies[i];
        fx->n_copies = n;
    }
    if (!summaries_are_settled(e))
        x->copies = SUMMARIES_NONE;
}

void summaries_went(struct engine *e, struct pool *p, uint32_t i, uint32_t page)
{
    const struct engine_idle *x = &e->idle;
    const uint32_t nth = pool_nth_summary(p, page);
    if (p->has_summary != NULL && nth < p->config.n_summaries)
        p->has_summary[nth] = x->copies == SUMMARIES_MADE && x->has_copy[i] &&
                              p->fx.n_patches < p->fx.patches_capacity;
    if (p->has_summary != NULL && nth < p->config.n_summaries && p->has_summary[nth])
        p->fx.patches[p->fx.n_patches++] =
            (struct kv_patch){x->out_move->seq, x->out_move->entries[i].index, KV_PLACE | page};
}
