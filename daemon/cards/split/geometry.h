/* geometry.h: how a pool lies on several cards: what of it each card's device has, and which part
 * of a block that is. Pure arithmetic; a pool on one card is all of it.
 *
 *   whole    each card has all heads, of its own sequences
 *   heads    each card has some of the kv heads, and the q heads that read them, of all sequences
 *   tokens   each card has an equal stripe of the tokens of every block, in the order of the cards
 */
#ifndef ATTND_DAEMON_CARDS_SPLIT_GEOMETRY_H
#define ATTND_DAEMON_CARDS_SPLIT_GEOMETRY_H

#include "kernels/backend.h"

struct pool_split {
    attn_split how; /* never AUTO */
    uint32_t n_cards, card; /* 1: nothing is split */
    uint32_t q_head, kv_head; /* the card's first */
    struct backend_pool_config config; /* what the card's device has */
    struct attn_layer_spec *layers; /* [num_layers] of config; owned */
};

/* whole is borrowed for the call; its layers' arrays for as long as s.
 * Errors   ATTN_ENOTSUP what cannot be split so, by field and value; ATTN_ENOMEM */
attn_status pool_split_init(struct pool_split *s, const struct backend_pool_config *whole,
                            attn_split how, uint32_t n_cards, uint32_t card, char *why,
                            size_t why_bytes);
void pool_split_fini(struct pool_split *s); /* a zeroed one is fine */

/* A pool's sequences are on all cards. */
static inline bool pool_is_split(const struct pool_split *s)
{
    return s->how != ATTN_SPLIT_WHOLE && s->n_cards > 1;
}

/* A block of the card's device and its place in the block as a device with all of it would have
 * it: from the card, and to the card. */
void pool_split_block_in(const struct pool_split *s, const struct backend_pool_config *whole,
                         const uint8_t *shard, uint8_t *block);
void pool_split_block_out(const struct pool_split *s, const struct backend_pool_config *whole,
                          const uint8_t *block, uint8_t *shard);

#endif
