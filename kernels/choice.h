/* choice.h: how much a query visits that chooses blocks (backend_item.n_chosen), known here alone.
 * Which blocks they are is kernels/cpu/choose.c's and kernels/gpu/choose.cu's to say.
 */
#ifndef ATTND_KERNELS_CHOICE_H
#define ATTND_KERNELS_CHOICE_H

#include "kernels/visible.h"

struct choice_size {
    uint32_t n_blocks; /* that the query sees; of the last, the newest, maybe a part */
    uint32_t n; /* that it visits, the newest among them */
    uint32_t n_keys; /* in these */
};

/* Of a query that sees the keys below end, which is not 0. */
VISIBLE_FN struct choice_size choice_of(uint32_t n_chosen, uint32_t block_shift, uint32_t end)
{
    struct choice_size c;
    c.n_blocks = ((end - 1) >> block_shift) + 1;
    c.n = n_chosen < c.n_blocks ? n_chosen : c.n_blocks;
    c.n_keys = end - ((c.n_blocks - c.n) << block_shift);
    return c;
}

#endif
