/* choice.h: how much a query visits that chooses blocks (backend_item.n_chosen), known here alone.
 * Which blocks they are is kernels/cpu/choose.c's and kernels/gpu/choose.cu's to say.
 */
#ifndef ATTND_KERNELS_CHOICE_H
#define ATTND_KERNELS_CHOICE_H

#include "kernels/stripes.h"

struct choice_size {
    uint32_t n_blocks; /* that the query sees; of the last, the newest, maybe a part */
    uint32_t n; /* that it visits, the newest among them */
    uint32_t n_keys; /* in these, of those that are here */
};

/* Of a query that sees the sequence's keys below end, which is not 0. Blocks of 1 << block_shift
 * tokens are here, each the stripe of one of the sequence's where s says so. */
VISIBLE_FN struct choice_size choice_of(uint32_t n_chosen, uint32_t block_shift, struct stripes s,
                                        uint32_t end)
{
    struct choice_size c;
    c.n_blocks = (s.every == 0 ? (end - 1) >> block_shift : (end - 1) / s.every) + 1;
    c.n = n_chosen < c.n_blocks ? n_chosen : c.n_blocks;
    c.n_keys = stripes_before(s, end) - ((c.n_blocks - c.n) << block_shift);
    return c;
}

#endif
