/* chosen.h: holds items that choose blocks to the reference, which makes the same choice from
 * float64 extremes, and what they say of their choices (backend_item.chosen).
 */
#ifndef ATTND_TESTS_KERNELS_CHOSEN_H
#define ATTND_TESTS_KERNELS_CHOSEN_H

#include "tests/kernels/check.h"

/* Queries' kv heads. */
struct chosen_count {
    uint64_t n_queries;
    uint64_t n_left_out; /* two blocks' bounds are too close to say which is taken */
    uint64_t n_missed; /* visit a block that is not there, so that their outputs may be anything */
};

/* Of long items some queries, of others all. */
bool chosen_check(struct check *c, const struct check_item *it, struct chosen_count *count);

#endif
