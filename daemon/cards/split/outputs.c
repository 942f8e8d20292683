/* outputs.c: see outputs.h. */
#include "daemon/cards/split/outputs.h"

#include <stdlib.h>

#include "daemon/base/log.h"
#include "daemon/engine/core/peers.h"
#include "kernels/grow.h"
#include "kernels/merge.h"

enum { WORDS_BYTES = 4096, WORD_STEP = 16 /* each in a cache line of its own */ };

struct cards_outputs {
    uint8_t *base; /* [card][each] */
    uint64_t bytes, each;
    struct backend_region region; /* it is there; else host memory */
    uint32_t *words; /* host memory of the lead's; one of each card but the lead */
    struct backend_word told[CONFIG_MAX_DEVICES]; /* when a card's are there */
    struct backend_merge *list;
    uint32_t capacity;
    struct backend_merges merges;
    bool is_on_device; /* the lead's merges */
};

struct cards_outputs *cards_outputs_new(void)
{
    return calloc(1, sizeof(struct cards_outputs));
}

/* --- memory ----------------------------------------------------------------------------------- */

static void host_give(struct engine *lead, void *p, uint64_t bytes, uint32_t n_known)
{
    for (uint32_t i = 1; i < n_known; i++) {
        const struct engine *e = peers_at(lead, i);
        if (!peers_are_alike(lead, e))
            e->parts.ops->host_unregister(e->parts.backend, p, bytes);
    }
    lead->parts.ops->host_free(lead->parts.backend, p, bytes);
}

/* Host memory that every card works with. */
static attn_status host_take(struct engine *lead, uint64_t bytes, void **out_p)
{
    void *p;
    attn_status st = lead->parts.ops->host_alloc(lead->parts.backend, bytes, &p);
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 1; i < lead->peers->n; i++) {
        const struct engine *e = peers_at(lead, i);
        if (!peers_are_alike(lead, e))
            st = e->parts.ops->host_register(e->parts.backend, p, bytes);
        if (st == ATTN_OK)
            continue;
        host_give(lead, p, bytes, i);
        return st;
    }
    *out_p = p;
    return ATTN_OK;
}

static void give(struct engine *lead, struct cards_outputs *o)
{
    if (o->region.handle != NULL)
        lead->parts.ops->region_close(lead->parts.backend, &o->region);
    else if (o->base != NULL)
        host_give(lead, o->base, o->bytes, lead->peers->n);
    o->base = NULL;
    o->bytes = 0;
}

void cards_outputs_free(struct engine *lead, struct cards_outputs *o)
{
    if (o == NULL)
        return;
    give(lead, o);
    if (o->words != NULL)
        host_give(lead, o->words, WORDS_BYTES, lead->peers->n);
    free(o->list);
    free(o);
}

/* Memory of the lead's device that all cards reach; false: there is none. */
static bool take_region(struct engine *lead, struct cards_outputs *o, uint64_t bytes)
{
    const struct backend_ops *ops = lead->parts.ops;
    char why[WHY_BYTES];
    for (uint32_t i = 1; i < lead->peers->n; i++)
        if (!peers_are_alike(lead, peers_at(lead, i)))
            return false;
    if (ops->region_open(lead->parts.backend, bytes, -1, &o->region, why, sizeof why) != ATTN_OK)
        return false;
    for (uint32_t i = 1; i < lead->peers->n; i++)
        if (ops->region_reach(lead->parts.backend, &o->region, peers_at(lead, i)->parts.backend) !=
            ATTN_OK) {
            ops->region_close(lead->parts.backend, &o->region);
            return false;
        }
    o->base = o->region.p;
    return true;
}

static attn_status grow(struct engine *lead, struct cards_outputs *o, uint64_t bytes)
{
    uint64_t size = o->bytes < BACKEND_REGION_ALIGN ? BACKEND_REGION_ALIGN : o->bytes;
    void *p = NULL;
    if (bytes <= o->bytes)
        return ATTN_OK;
    while (size < bytes)
        size *= 2;
    give(lead, o);
    if (!o->is_on_device || !take_region(lead, o, size)) {
        attn_status st = host_take(lead, size, &p);
        if (st != ATTN_OK)
            return st;
        o->base = p;
    }
    o->bytes = size;
    return ATTN_OK;
}

/* --- a batch ---------------------------------------------------------------------------------- */

/* The lead's device merges, and the others tell it. */
static bool can_merge(const struct engine *lead)
{
    bool can = lead->info.features & BACKEND_HAS_MERGES;
    for (uint32_t i = 1; i < lead->peers->n; i++)
        can &= (peers_at(lead, i)->info.features & BACKEND_HAS_WORDS) != 0;
    return can;
}

attn_status cards_outputs_begin(struct engine *lead, struct cards_outputs *o,
                                const struct part_tensors *t, uint32_t n_cards, uint64_t order)
{
    void *words;
    o->merges.n = 0;
    o->each = tokens_output_bytes(t);
    o->is_on_device = can_merge(lead);
    attn_status st = grow(lead, o, n_cards * o->each);
    if (st == ATTN_OK)
        st = array_reserve(&o->list, &o->capacity, t->n_whole, sizeof *o->list);
    if (st == ATTN_OK && o->words == NULL) {
        st = host_take(lead, WORDS_BYTES, &words);
        if (st == ATTN_OK)
            o->words = words;
    }
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 1; i < n_cards; i++)
        o->told[i] = (struct backend_word){o->words + i * WORD_STEP, (uint32_t)order};
    o->merges = (struct backend_merges){.list = o->list,
                                        .n = tokens_merges(t, o->list),
                                        .n_parts = n_cards,
                                        .stripe = t->split->config.block_tokens};
    for (uint32_t i = 0; i < n_cards; i++)
        o->merges.parts[i] = cards_outputs_of(o, i);
    return ATTN_OK;
}

uint8_t *cards_outputs_of(const struct cards_outputs *o, uint32_t card)
{
    return o->base == NULL ? NULL : o->base + card * o->each;
}

void cards_outputs_attach(const struct cards_outputs *o, uint32_t card, struct backend_batch *last)
{
    if (!o->is_on_device || o->merges.n == 0)
        return;
    if (card != 0) {
        last->signals = &o->told[card];
        last->n_signals = 1;
        return;
    }
    last->merges = &o->merges;
    last->merge_waits = &o->told[1];
    last->n_merge_waits = o->merges.n_parts - 1;
}

void cards_outputs_fail(const struct cards_outputs *o, uint32_t card)
{
    if (card != 0 && o->merges.n > 0)
        __atomic_store_n(o->told[card].word, o->told[card].value, __ATOMIC_RELEASE);
}

void cards_outputs_merge(const struct cards_outputs *o, const struct backend_pool_config *whole)
{
    if (!o->is_on_device)
        merges_compute(whole, &o->merges);
}
