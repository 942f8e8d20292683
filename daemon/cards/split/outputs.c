/* outputs.c: takes the memory of partial outputs and of the words that signal them, and merges the
 * outputs of all cards on the device or on the host. */
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
    struct backend_region region; /* of the primary's device, if base is there; else host memory */
    uint32_t *words; /* host memory of the primary; one word per card other than the primary */
    struct backend_word words_out[CONFIG_MAX_DEVICES]; /* written when a card's outputs are there */
    struct backend_merge *list;
    uint32_t capacity;
    struct backend_merges merges;
    bool is_on_device; /* the primary's device merges */
};

struct cards_outputs *cards_outputs_new(void)
{
    return calloc(1, sizeof(struct cards_outputs));
}

/* --- memory ----------------------------------------------------------------------------------- */

static void host_give(struct engine *primary, void *p, uint64_t bytes, uint32_t n_known)
{
    for (uint32_t i = 1; i < n_known; i++) {
        const struct engine *e = peers_at(primary, i);
        if (!peers_are_alike(primary, e))
            e->env.ops->host_unregister(e->env.backend, p, bytes);
    }
    primary->env.ops->host_free(primary->env.backend, p, bytes);
}

/* Takes host memory that every card can use. */
static attn_status host_take(struct engine *primary, uint64_t bytes, void **out_p)
{
    void *p;
    attn_status st = primary->env.ops->host_alloc(primary->env.backend, bytes, &p);
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 1; i < primary->peers->n; i++) {
        const struct engine *e = peers_at(primary, i);
        if (!peers_are_alike(primary, e))
            st = e->env.ops->host_register(e->env.backend, p, bytes);
        if (st == ATTN_OK)
            continue;
        host_give(primary, p, bytes, i);
        return st;
    }
    *out_p = p;
    return ATTN_OK;
}

static void give(struct engine *primary, struct cards_outputs *o)
{
    if (o->region.handle != NULL)
        primary->env.ops->region_close(primary->env.backend, &o->region);
    else if (o->base != NULL)
        host_give(primary, o->base, o->bytes, primary->peers->n);
    o->base = NULL;
    o->bytes = 0;
}

void cards_outputs_free(struct engine *primary, struct cards_outputs *o)
{
    if (o == NULL)
        return;
    give(primary, o);
    if (o->words != NULL)
        host_give(primary, o->words, WORDS_BYTES, primary->peers->n);
    free(o->list);
    free(o);
}

/* Takes memory of the primary's device that all cards reach. false: there is none. */
static bool take_region(struct engine *primary, struct cards_outputs *o, uint64_t bytes)
{
    const struct backend_ops *ops = primary->env.ops;
    char why[WHY_BYTES];
    for (uint32_t i = 1; i < primary->peers->n; i++)
        if (!peers_are_alike(primary, peers_at(primary, i)))
            return false;
    if (ops->region_open(primary->env.backend, bytes, -1, &o->region, why, sizeof why) != ATTN_OK)
        return false;
    for (uint32_t i = 1; i < primary->peers->n; i++)
        if (ops->region_reach(primary->env.backend, &o->region,
                              peers_at(primary, i)->env.backend) != ATTN_OK) {
            ops->region_close(primary->env.backend, &o->region);
            return false;
        }
    o->base = o->region.p;
    return true;
}

static attn_status grow(struct engine *primary, struct cards_outputs *o, uint64_t bytes)
{
    uint64_t size = o->bytes < BACKEND_REGION_ALIGN ? BACKEND_REGION_ALIGN : o->bytes;
    void *p = NULL;
    if (bytes <= o->bytes)
        return ATTN_OK;
    while (size < bytes)
        size *= 2;
    give(primary, o);
    if (!o->is_on_device || !take_region(primary, o, size)) {
        attn_status st = host_take(primary, size, &p);
        if (st != ATTN_OK)
            return st;
        o->base = p;
    }
    o->bytes = size;
    return ATTN_OK;
}

/* --- a batch ---------------------------------------------------------------------------------- */

/* Whether the primary's device can merge and all others can signal it. */
static bool can_merge(const struct engine *primary)
{
    bool can = primary->info.features & BACKEND_HAS_MERGES;
    for (uint32_t i = 1; i < primary->peers->n; i++)
        can &= (peers_at(primary, i)->info.features & BACKEND_HAS_WORDS) != 0;
    return can;
}

attn_status cards_outputs_begin(struct engine *primary, struct cards_outputs *o,
                                const struct shard_tensors *t, uint32_t n_cards, uint64_t order)
{
    void *words;
    o->merges.n = 0;
    o->each = tokens_output_bytes(t);
    o->is_on_device = can_merge(primary);
    attn_status st = grow(primary, o, n_cards * o->each);
    if (st == ATTN_OK)
        st = array_reserve(&o->list, &o->capacity, t->n_whole, sizeof *o->list);
    if (st == ATTN_OK && o->words == NULL) {
        st = host_take(primary, WORDS_BYTES, &words);
        if (st == ATTN_OK)
            o->words = words;
    }
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 1; i < n_cards; i++)
        o->words_out[i] = (struct backend_word){o->words + i * WORD_STEP, (uint32_t)order};
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
        last->signals = &o->words_out[card];
        last->n_signals = 1;
        return;
    }
    last->merges = &o->merges;
    last->merge_waits = &o->words_out[1];
    last->n_merge_waits = o->merges.n_parts - 1;
}

void cards_outputs_fail(const struct cards_outputs *o, uint32_t card)
{
    if (card != 0 && o->merges.n > 0)
        __atomic_store_n(o->words_out[card].word, o->words_out[card].value, __ATOMIC_RELEASE);
}

void cards_outputs_merge(const struct cards_outputs *o, const struct backend_pool_config *whole)
{
    if (!o->is_on_device)
        merges_compute(whole, &o->merges);
}
