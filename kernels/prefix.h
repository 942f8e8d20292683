/* prefix.h: which items of a batch have the beginning of their block tables in common, so that what
 * is there can be read once for all of them. Pure C, no device; tests check it without one.
 *
 * A group is some items and a range of blocks that all of them have at the same place of their
 * tables. Groups form trees: a group's range begins where that of its parent ends, and its members
 * are some of its parent's. What is left of an item behind its last group is the item's own.
 */
#ifndef ATTND_KERNELS_PREFIX_H
#define ATTND_KERNELS_PREFIX_H

#include "proto/attn_types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct prefix_item {
    const uint32_t *table; /* [n_blocks] */
    uint32_t n_blocks; /* its first ones, which all its queries see whole; 0: it is in no group */
    uint32_t n_queries;
    /* over K and V, if it is computed by itself; 0: those of its queries at once. An item that
     * takes more may be a group alone. */
    uint32_t n_passes;
    uint32_t layer; /* items of different layers have nothing in common */
};

/* When a group pays: where the bytes of K and V that are read less are more than it costs. */
struct prefix_cost {
    uint32_t align_blocks; /* >= 1: groups begin and end at multiples of it */
    uint32_t queries_at_once; /* >= 1: whose rows share one pass over K and V */
    uint64_t block_bytes; /* what a pass reads of a block */
    uint64_t query_bytes; /* of a query's partial result, written and read */
    uint64_t group_bytes; /* what a group costs beside that */
};

#define PREFIX_NONE UINT32_MAX

struct prefix_group {
    uint32_t parent; /* a group in front of this one, or PREFIX_NONE */
    uint32_t first_block, end_block;
    uint32_t first, n; /* its items are order[first] .. order[first + n - 1] */
    uint32_t n_queries; /* of all of them */
    uint64_t saved_bytes; /* that passes do not read */
};

struct prefixes {
    struct prefix_group *groups;
    uint32_t *order; /* items that may be in groups */
    uint32_t *group_of; /* [n_items] the last group of an item, or PREFIX_NONE; if there are groups
                         */
    uint32_t n_groups, n_ordered;
    struct prefix_key *keys;
    struct prefix_span *spans;
    uint32_t *buckets;
    uint32_t groups_capacity, order_capacity, group_of_capacity, keys_capacity, spans_capacity,
        buckets_capacity;
};

/* prefixes_find: fills *p, growing its arrays (reuse one to avoid allocation; zero it first).
 * What comes out is a function of the arguments alone.
 * Cost     O(n_items) where no two tables begin with the same block; else the tables of those that
 *          do are sorted and compared.
 * Errors   ATTN_EINVAL config out of range; ATTN_ENOMEM. *p then has no groups and can be used
 *          again. */
attn_status prefixes_find(struct prefixes *p, const struct prefix_cost *c,
                          const struct prefix_item *items, uint32_t n_items);
/* Accepts NULL and zeroed ones. */
void prefixes_fini(struct prefixes *p);

#ifdef __cplusplus
}
#endif

#endif
