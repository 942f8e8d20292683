/* prefix.c: remembers on which card the beginnings of prompts are.
 *
 * For each opened prompt, the hashes of its beginnings of some lengths are stored with its card in
 * a table without locks. A later prompt goes to the card of its longest beginning that is found.
 * This is only a guess, since the card's cache may have dropped the blocks. A hash collision, or an
 * entry that another one has overwritten, costs a cache miss.
 */
#include "daemon/cards/prefix.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "daemon/cards/cards.h"
#include "daemon/cards/internal.h"

/* Lengths of the beginnings, in tokens. */
static const uint32_t lengths[] = {16, 64, 256, 1024, 4096, 16384};
enum { N_LENGTHS = sizeof lengths / sizeof lengths[0], CARD_BITS = 3 };
static_assert(CARDS_MAX == 1 << CARD_BITS, "a card fits");

/* Hash of the first n tokens; an entry has the card in its lowest bits, which are 0 here. */
static uint64_t hash_of(const struct cards *c, const Attnd__Open *o, uint32_t n)
{
    uint64_t seed = c->prefix_seed ^ o->pool ^ (o->adapter << 1);
    uint64_t hash = XXH3_64bits_withSeed(o->tokens, n * sizeof o->tokens[0], seed);
    return hash & ~(uint64_t)(CARDS_MAX - 1);
}

static _Atomic uint64_t *entry(struct cards *c, uint64_t hash)
{
    return &c->prefixes[(hash >> CARD_BITS) % CARDS_PREFIXES];
}

uint32_t cards_prefix_card(struct cards *c, const Attnd__Open *o)
{
    for (uint32_t i = N_LENGTHS; i-- > 0;) {
        if (o->n_tokens < lengths[i])
            continue;
        uint64_t hash = hash_of(c, o, lengths[i]);
        uint64_t there = atomic_load_explicit(entry(c, hash), memory_order_relaxed);
        uint32_t card = (uint32_t)(there ^ hash);
        if (there != 0 && (there ^ hash) < c->peers.n && !card_is_lost(c->peers.at[card]))
            return card;
    }
    return CARDS_MAX;
}

void cards_prefix_note(struct cards *c, const Attnd__Open *o, uint32_t card)
{
    for (uint32_t i = 0; i < N_LENGTHS && o->n_tokens >= lengths[i]; i++) {
        uint64_t hash = hash_of(c, o, lengths[i]);
        atomic_store_explicit(entry(c, hash), hash | card, memory_order_relaxed);
    }
}
