/* move_leave.c: what handlers report and ask about the sequence that is moving to another card:
 * that it was cut or closed, whether it is moving. */
#include "daemon/cards/move_leave.h"

#include "daemon/cards/internal.h"

void cards_move_cut(struct engine *e, uint32_t seq, uint32_t n_blocks)
{
    struct card_leave *l = leave_of(e);
    if (l->move == NULL || l->seq != seq)
        return;
    uint32_t n = n_blocks > 0 ? n_blocks - 1 : 0; /* the last one may be written again */
    l->n_valid = n < l->n_valid ? n : l->n_valid;
    if (l->wants_stop && l->n_there > n) /* no copy is under way: correct n_there itself */
        l->n_there = n;
}

void cards_move_closed(struct engine *e, uint32_t seq)
{
    if (leave_of(e)->move != NULL && leave_of(e)->seq == seq)
        leave_of(e)->seq = SEQ_NONE;
}

bool cards_move_reads(const struct engine *e, uint32_t pool)
{
    return leave_of(e)->reading != NULL && leave_of(e)->reading_of == pool;
}

bool cards_move_is_of(struct engine *e, uint32_t pool)
{
    return atomic_load(&cards_of(e)->move_pool) == pool + 1;
}

bool cards_move_is_of_seq(const struct engine *e, uint32_t seq)
{
    const struct card_leave *l = leave_of(e);
    return l->move != NULL && l->seq == seq;
}

bool cards_move_is_there(const struct engine *e)
{
    return leave_of(e)->is_there;
}
