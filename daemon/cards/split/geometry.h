/* geometry.h: how a pool is divided over several cards: what each card's device has of it, and
 * which part of a block that is. Pure arithmetic.
 *
 *   whole    each card has all heads, of its own sequences
 *   heads    each card has some of the kv heads, with the q heads that read them, of all sequences
 *   tokens   each card has an equal stripe of the tokens of every block, in the order of the cards
 */
#ifndef ATTND_DAEMON_CARDS_SPLIT_GEOMETRY_H
#define ATTND_DAEMON_CARDS_SPLIT_GEOMETRY_H

#include "kernels/backend.h"

struct pool_split {
    attn_split how; /* never AUTO */
    uint32_t n_cards, card; /* n_cards 1: nothing is split */
    uint32_t q_head, kv_head; /* the card's first heads */
    struct backend_pool_config config; /* of the pool that the card's device has */
    struct attn_layer_spec *layers; /* [num_layers] of config; owned */
};

/* Computes the shard of a card. whole is borrowed for the call, its layers' arrays for as long as
 * s. Errors ATTN_ENOTSUP it can't be split this way: why names field and value; ATTN_ENOMEM */
attn_status pool_split_init(struct pool_split *s, const struct backend_pool_config *whole,
                            attn_split how, uint32_t n_cards, uint32_t card, char *why,
                            size_t why_bytes);
void pool_split_fini(struct pool_split *s); /* a zeroed one is fine */

/* Whether the pool's sequences are spread over all cards. */
static inline bool pool_is_split(const struct pool_split *s)
{
    return s->how != ATTN_SPLIT_WHOLE && s->n_cards > 1;
}

/* Copies between a block of the card's device and the block of a device that had the whole pool:
 * from the card (in), and to the card (out). */
void pool_split_block_in(const struct pool_split *s, const struct backend_pool_config *whole,
                         const uint8_t *shard, uint8_t *block);
void pool_split_block_out(const struct pool_split *s, const struct backend_pool_config *whole,
                          const uint8_t *block, uint8_t *shard);

#endif
