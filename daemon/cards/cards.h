/* cards.h: what is above the engines of a daemon with several cards: which request goes to which,
 * where sequences are, and what engines tell each other. A daemon with one card has none of it.
 *
 * The first card's engine is the lead: doors give it everything, and engine_submit comes here. An
 * epoch on the wire has the card in its lowest bits, so a request that names one is sent on without
 * a look at anything; a request that only has a sequence's name needs the table of names.
 *
 * Any thread, unless said otherwise.
 */
#ifndef ATTND_DAEMON_CARDS_CARDS_H
#define ATTND_DAEMON_CARDS_CARDS_H

#include "daemon/engine/engine.h"

enum { CARDS_MAX = 8 };

struct cards;
struct engine;
struct pool;

/* For n engines, which join in engine_open. ATTN_ENOMEM, also of random bytes. */
attn_status cards_open(uint32_t n, uint32_t max_pools, uint32_t max_sessions,
                       struct cards **out_cards);
void cards_close(struct cards *c); /* after all engines; NULL is fine */
/* An engine is open; the lead is the first. Main thread. */
void cards_join(struct cards *c, struct engine *e);
uint32_t cards_n(const struct cards *c);
/* How many there are to be. */
uint32_t cards_n_all(const struct cards *c);
struct engine *cards_engine(const struct cards *c, uint32_t card);
/* Bits of an epoch on the wire that name the card. */
uint32_t cards_epoch_bits(const struct cards *c);
/* Some card is not lost. */
bool cards_live(const struct cards *c);

/* No card is lost. */
bool cards_are_whole(const struct cards *c);

/* When the oldest request that any of them holds came; 0: none is held. */
uint64_t cards_oldest_at_ns(const struct cards *c);

/* --- pools ------------------------------------------------------------------------------------ */

struct pool_count {
    /* free: and those that are cached, too */
    uint64_t blocks, free, cached, tiered, sequences, bytes;
};
/* What this card's pools have now. The engine's thread. */
void cards_publish(struct engine *e);
/* The least that any card but this engine's has left of its KV memory, if that is less than
 * most. */
uint64_t cards_least_free_bytes(const struct cards *c, const struct engine *but, uint64_t most);
/* Of all cards but e's own, as they last said; all cards: e is NULL. */
struct pool_count cards_pool_count(const struct cards *c, const struct engine *but, uint32_t index);
/* What the caches of the cards but this engine's count, added. */
void cards_stats_add(const struct cards *c, const struct engine *but, struct kv_stats *sum);
#endif
