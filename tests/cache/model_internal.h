/* model_internal.h: shared by the files that implement model.h: model.c (the state), model_apply.c
 * (operations on the model), model_draw.c (random operations) and model_check.c (operations on the
 * cache, and the comparison).
 */
#ifndef TESTS_CACHE_MODEL_INTERNAL_H
#define TESTS_CACHE_MODEL_INTERNAL_H

#include "tests/cache/model.h"

/* Three prompts that part after 4 and after 8 tokens. */
static inline uint32_t model_id(uint32_t prompt, uint32_t pos)
{
    return pos * 3 + (prompt > 0 && pos >= prompt * M_BLOCK_TOKENS ? prompt : 0);
}

/* What an append writes to a cell. */
static inline uint32_t model_value(uint32_t seed, uint32_t layer, uint32_t pos)
{
    return (seed * 31 + layer) * 2654435761u + pos * 40503u;
}

static inline uint8_t model_note_byte(uint32_t seed, uint32_t i)
{
    return (uint8_t)((seed * 2654435761u + i * 40503u) >> 11);
}

/* Parents of a tree's nodes: each -1 or an earlier one. */
static inline int32_t model_parent(uint32_t seed, uint32_t node)
{
    return (int32_t)((seed >> node % 16) % (node + 1)) - 1;
}

/* The path to the node, from one without a parent on; returns its length, M_TOKENS at most. */
static inline uint32_t model_path(uint32_t seed, uint32_t node, uint32_t out[M_TOKENS])
{
    uint32_t n = 0;
    for (int32_t i = (int32_t)node; i >= 0; i = model_parent(seed, (uint32_t)i))
        n++;
    for (int32_t i = (int32_t)node, at = (int32_t)n; i >= 0; i = model_parent(seed, (uint32_t)i))
        out[--at] = (uint32_t)i;
    return n;
}

/* The entry that a move by index names as number i. */
static inline uint32_t model_listed(const struct op *op, uint32_t i)
{
    return op->listed >> 3 * i % 27 & 7;
}

/* Tokens that no tree has, at most. */
static inline uint32_t model_below_tree(const struct model_seq *s)
{
    return s->n_nodes > 0 ? s->tree_pos : UINT32_MAX;
}

/* Entry i names something; and that a block, not idle memory. */
bool model_holds_entry(const struct model_seq *s, uint32_t i);
bool model_has_block(const struct model_seq *s, uint32_t i);
uint32_t model_n_paged_out(const struct model_seq *s);

/* Nothing is outstanding of the sequence; of any. */
bool model_is_quiet(const struct model *m, uint32_t slot);
bool model_are_all_quiet(const struct model *m);
uint32_t model_n_open(const struct model *m);
/* Of the pool as it is. */
uint32_t model_n_blocks(const struct model *m);
/* Distinct blocks with a reference. */
uint32_t model_n_used(const struct model *m);
/* References to a block: tables, old blocks of pending copies, and what moves. */
uint32_t model_references(const struct model *m, uint64_t block);
/* NULL: it is not published. */
struct model_published *model_published_block(struct model *m, uint64_t block);

/* A reference is gone: a published block that nobody has any more was used now. */
void model_release(struct model *m, uint64_t block);
/* Of n_full blocks that are used or published, a published one goes that is not pinned; false:
 * there are fewer. */
bool model_make_room(struct model *m, uint32_t n_full);
/* Blocks that an allocation finds, whatever is reserved. */
uint32_t model_n_available(const struct model *m);
/* Entries with blocks of the owner's sequences. */
uint32_t model_charged(const struct model *m, uint32_t owner);
/* What the pool owes: to owners, to pending copies and moves, to pins; and what it has besides. */
uint32_t model_owes(const struct model *m);
/* Entries with blocks that the owner may have besides its own; of those that are there anyway. */
uint32_t model_n_free_for(const struct model *m, uint32_t owner);
uint32_t model_n_shareable(const struct model *m, uint32_t owner);
bool model_has_reservations(const struct model *m);
void model_drop_lost(struct model *m);
/* Can the owner have n more blocks? If not, published ones that are pinned and behind one that is
 * gone go first. */
bool model_has_room(struct model *m, uint32_t owner, uint32_t n);
/* What the sequence says holds for what is published of its ids. */
void model_retain(struct model *m, uint32_t slot);
uint64_t model_block_new(struct model *m);

/* Publishes what the sequence has full blocks and ids of. */
void model_publish(struct model *m, uint32_t slot);
/* It looks again from its first n_blocks on, if it had come further. */
void model_look_from(struct model *m, struct model_seq *s, uint32_t n_blocks);
/* A new sequence begins with what is published of its ids. */
void model_begin_with(struct model *m, uint32_t slot);

#endif
