/* choose.c: chooses which sequence this card should give to which other card. cards/balance.c says
 * how many blocks should go, from the cards' free blocks and device times.
 */
#include "daemon/cards/choose.h"

#include "daemon/base/stats.h"
#include "daemon/cards/balance.h"
#include "daemon/cards/internal.h"
#include "daemon/engine/core/pool_table.h"

/* Blocks of a sequence's table, without those that its windows have released. */
static uint32_t blocks_of(const struct kv_seq_info *info)
{
    return info->n_blocks - (info->hole_past - info->hole_first);
}

/* Blocks of the pool's sequences that were in steps since the last look. */
static uint64_t active_blocks(struct engine *e, uint32_t pool)
{
    uint64_t n = 0;
    struct kv_seq_info info;
    for (kv_seq_id id = {0}; kv_seq_next(e->env.kv, UINT32_MAX, &id) == ATTN_OK; id.index++) {
        kv_seq_info(e->env.kv, id, &info);
        if (info.pool.index == pool && e->seqs[id.index].step_stamp >= leave_of(e)->looked_stamp)
            n += blocks_of(&info);
    }
    return n;
}

/* The pool's largest sequence of at most `most` blocks, with none paged out and at most half of its
 * tokens shared, that is found in the cache when it was opened. */
static bool pick(struct engine *e, uint32_t pool, uint64_t most, bool must_be_active,
                 kv_seq_id *out)
{
    struct kv_seq_info info;
    uint32_t best = 0;
    for (kv_seq_id id = {0}; kv_seq_next(e->env.kv, UINT32_MAX, &id) == ATTN_OK; id.index++) {
        kv_seq_info(e->env.kv, id, &info);
        bool is_active = e->seqs[id.index].step_stamp >= leave_of(e)->looked_stamp;
        uint32_t n = blocks_of(&info);
        if (info.pool.index != pool || n <= best || n > most || info.n_paged_out > 0 ||
            2 * (uint64_t)info.n_cached > info.layer_len[0] || (must_be_active && !is_active))
            continue;
        best = n;
        *out = id;
    }
    return best > 0;
}

bool cards_choose(struct engine *e, uint64_t now_ns, kv_seq_id *out_seq, uint32_t *out_to)
{
    struct cards *c = cards_of(e);
    struct card_leave *l = leave_of(e);
    struct balance_card cards[CARDS_MAX];
    uint64_t took_ns = now_ns - l->looked_ns;
    for (uint32_t i = 0; i < c->peers.n; i++) {
        uint64_t busy_ns = stats_card_get(i, STATS_CARD_DEVICE);
        uint64_t permille = (busy_ns - l->busy_ns[i]) * 1000 / took_ns;
        cards[i] =
            (struct balance_card){.is_lost = card_is_lost(c->peers.at[i]),
                                  .busy_permille = permille < 1000 ? (uint32_t)permille : 1000};
        l->busy_ns[i] = busy_ns;
    }
    bool is_chosen = false;
    for (struct pool *p = NULL; !is_chosen && (p = pool_next(e, p)) != NULL;) {
        uint32_t pool = p->id.index;
        if (pool_spans(e, p) || atomic_load(&c->move) != NULL)
            continue;
        for (uint32_t i = 0; i < c->peers.n; i++) {
            cards[i].n_blocks =
                atomic_load_explicit(&c->peers.at[i]->published[pool].blocks, memory_order_relaxed);
            cards[i].n_free =
                atomic_load_explicit(&c->peers.at[i]->published[pool].free, memory_order_relaxed);
        }
        struct balance_move to = balance_room(cards, c->peers.n, e->env.card);
        bool is_load = to.n_blocks == 0;
        if (is_load && cards[e->env.card].busy_permille >= 500)
            to = balance_load(cards, c->peers.n, e->env.card, active_blocks(e, pool));
        is_chosen = to.n_blocks > 0 && pick(e, pool, to.n_blocks, is_load, out_seq);
        *out_to = to.to;
    }
    l->looked_ns = now_ns;
    l->looked_stamp = e->next_stamp;
    return is_chosen;
}
