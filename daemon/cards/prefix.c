/* prefix.c: a prompt goes to the card that is likely to have its beginning.
 *
 * Of each prompt that is opened, beginnings of some lengths are noted with the card that it went
 * to, by their hashes in a table without locks; the longest that is found says where a later prompt
 * would find most. It is a guess: what a card has, its cache says. A hash that stands for two
 * beginnings, or a record that was lost to another thread's, costs a miss.
 */
#include "daemon/cards/prefix.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "daemon/cards/cards.h"
#include "daemon/cards/internal.h"

/* Tokens of the beginnings. The next length is in reach of a prompt that is four times as long. */
static const uint32_t lengths[] = {16, 64, 256, 1024, 4096, 16384};
enum { N_LENGTHS = sizeof lengths / sizeof lengths[0], CARD_BITS = 3 };
static_assert(CARDS_MAX == 1 << CARD_BITS, "a card fits");

/* An entry has the hash without its lowest bits, which are the card. */
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
