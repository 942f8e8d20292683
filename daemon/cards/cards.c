/* cards.c: see cards.h. */
#include <stdlib.h>
#include <sys/random.h>

#include "daemon/base/stats.h"
#include "daemon/cards/internal.h"
#include "daemon/cards/names.h"
#include "daemon/engine/core/pool_table.h"

attn_status cards_open(uint32_t n, uint32_t max_pools, uint32_t max_sessions,
                       struct cards **out_cards)
{
    struct cards *c = calloc(1, sizeof *c);
    if (c == NULL)
        return ATTN_ENOMEM;
    c->n = n;
    while (1u << c->epoch_bits < n)
        c->epoch_bits++;
    c->max_pools = max_pools;
    c->max_sessions = max_sessions;
    pthread_mutex_init(&c->lock, NULL);
    pthread_rwlock_init(&c->route, NULL);
    c->slots = calloc(max_sessions, sizeof *c->slots);
    c->held = calloc(max_sessions, sizeof *c->held);
    bool is_whole =
        c->slots != NULL && c->held != NULL &&
        getrandom(&c->prefix_seed, sizeof c->prefix_seed, 0) == (ssize_t)sizeof c->prefix_seed;
    for (uint32_t i = 0; i < n; i++) {
        c->pools[i] = calloc(max_pools, sizeof *c->pools[i]);
        c->n_names[i] = calloc(max_pools, sizeof *c->n_names[i]);
        is_whole &= c->pools[i] != NULL && c->n_names[i] != NULL;
    }
    if (!is_whole) {
        cards_close(c);
        return ATTN_ENOMEM;
    }
    *out_cards = c;
    return ATTN_OK;
}

void cards_close(struct cards *c)
{
    if (c == NULL)
        return;
    cards_name_fini(c);
    for (uint32_t i = 0; i < c->n; i++) {
        free(c->pools[i]);
        free(c->n_names[i]);
    }
    free(c->slots);
    free(c->held);
    pthread_mutex_destroy(&c->lock);
    pthread_rwlock_destroy(&c->route);
    free(c);
}

void cards_join(struct cards *c, struct engine *e)
{
    c->engines[e->parts.card] = e;
    c->has_tenants |= e->parts.tenants != NULL;
    c->n_joined++;
}

uint32_t cards_n(const struct cards *c)
{
    return c->n_joined;
}

uint32_t cards_n_all(const struct cards *c)
{
    return c->n;
}

struct engine *cards_engine(const struct cards *c, uint32_t card)
{
    return c->engines[card];
}

uint32_t cards_epoch_bits(const struct cards *c)
{
    return c->epoch_bits;
}

bool cards_live(const struct cards *c)
{
    for (uint32_t i = 0; i < c->n_joined; i++)
        if (!card_is_lost(c->engines[i]))
            return true;
    return false;
}

uint64_t cards_oldest_at_ns(const struct cards *c)
{
    uint64_t oldest = 0;
    for (uint32_t i = 0; i < c->n_joined; i++) {
        uint64_t at = atomic_load_explicit(&c->engines[i]->oldest_at_ns, memory_order_relaxed);
        oldest = at != 0 && (oldest == 0 || at < oldest) ? at : oldest;
    }
    return oldest;
}

bool cards_are_whole(const struct cards *c)
{
    for (uint32_t i = 0; i < c->n; i++)
        if (card_is_lost(c->engines[i]))
            return false;
    return true;
}

/* --- pools ------------------------------------------------------------------------------------ */

static void pool_say(struct engine *e, const struct pool *p, uint32_t index)
{
    struct card_pool *told = &e->parts.cards->pools[e->parts.card][index];
    struct kv_pool_spec ks = {0};
    uint32_t n_free = 0;
    bool is_split = p != NULL && pool_is_split(&p->split);
    if (p != NULL && (!is_split || e->parts.card == 0)) /* its blocks are counted there */
        kv_pool_info(e->parts.kv, p->id, &ks, &n_free);
    atomic_store_explicit(&told->is_split, is_split, memory_order_relaxed);
    atomic_store_explicit(&told->blocks, ks.n_blocks, memory_order_relaxed);
    atomic_store_explicit(&told->free, n_free, memory_order_relaxed);
    atomic_store_explicit(&told->cached, p == NULL ? 0 : kv_pool_cached(e->parts.kv, p->id),
                          memory_order_relaxed);
    atomic_store_explicit(&told->tiered, p == NULL ? 0 : kv_idle_pool_away(e->parts.kv, p->id),
                          memory_order_relaxed);
    atomic_store_explicit(&told->sequences, p == NULL ? 0 : kv_pool_sequences(e->parts.kv, p->id),
                          memory_order_relaxed);
    atomic_store_explicit(&told->bytes, p == NULL ? 0 : p->device_bytes, memory_order_relaxed);
}

void cards_publish(struct engine *e)
{
    uint32_t card = e->parts.card;
    atomic_store_explicit(&e->parts.cards->free_bytes[card], e->info.kv_bytes - e->device_bytes,
                          memory_order_relaxed);
    for (uint32_t i = 0; i < e->parts.cfg->max_pools; i++)
        pool_say(e, pool_of_kv(e, (kv_pool_id){i}), i);
    stats_card_set(card, STATS_CARD_SEQUENCES, e->gauges.sequences);
    stats_card_set(card, STATS_CARD_BLOCKS, e->gauges.blocks_total);
    stats_card_set(card, STATS_CARD_FREE, e->gauges.blocks_free);
    stats_card_set(card, STATS_CARD_MEMORY, e->info.kv_bytes);
}

uint64_t cards_least_free_bytes(const struct cards *c, const struct engine *but, uint64_t most)
{
    for (uint32_t i = 0; i < c->n_joined; i++) {
        uint64_t n = atomic_load_explicit(&c->free_bytes[i], memory_order_relaxed);
        most = c->engines[i] != but && n < most ? n : most;
    }
    return most;
}

struct pool_count cards_pool_count(const struct cards *c, const struct engine *but, uint32_t index)
{
    struct pool_count sum = {0};
    for (uint32_t i = 0; i < c->n_joined; i++) {
        struct card_pool *p = &c->pools[i][index];
        if (c->engines[i] == but)
            continue;
        sum.blocks += atomic_load_explicit(&p->blocks, memory_order_relaxed);
        sum.cached += atomic_load_explicit(&p->cached, memory_order_relaxed);
        sum.free += atomic_load_explicit(&p->free, memory_order_relaxed);
        sum.tiered += atomic_load_explicit(&p->tiered, memory_order_relaxed);
        sum.sequences += atomic_load_explicit(&p->sequences, memory_order_relaxed);
        sum.bytes += atomic_load_explicit(&p->bytes, memory_order_relaxed);
    }
    return sum;
}

void cards_stats_add(const struct cards *c, const struct engine *but, struct kv_stats *sum)
{
    struct kv_stats s;
    for (uint32_t i = 0; i < c->n_joined; i++) {
        if (c->engines[i] == but)
            continue;
        kv_stats_read(c->engines[i]->parts.kv, &s);
#define X(field) sum->field += s.field;
        KV_STATS_MAP(X)
#undef X
    }
}
