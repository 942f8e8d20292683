/* move_hold.c: keeps requests for a sequence that is about to leave this card, and all behind them.
 * When it has left they are routed again; if it stays they go on here.
 */
#include "daemon/cards/move_hold.h"

#include "daemon/base/stack.h"
#include "daemon/cards/move_target.h"

static bool does_name(const Attnd__Request *h, uint64_t name)
{
    const Attnd__Step *s = h->body_case == ATTND__REQUEST__BODY_STEP   ? h->step
                           : h->body_case == ATTND__REQUEST__BODY_PLAN ? h->plan->step
                                                                       : NULL;
    uint64_t other;
    uint32_t epoch;
    for (size_t i = 0; s != NULL && i < s->n_seq; i++)
        if (s->seq[i] == name)
            return true;
    if (h->body_case == ATTND__REQUEST__BODY_FORK && h->fork->new_seq == name)
        return true;
    return s == NULL && request_seq(h, &other, &epoch) && other == name;
}

bool cards_hold(struct engine *e, struct request *req)
{
    struct card_leave *l = leave_of(e);
    if (!l->is_stopped || (l->held == NULL && !does_name(req->wire.header, l->move->name.name)))
        return false;
    req->next = NULL;
    if (l->held == NULL)
        l->held = req;
    else
        l->held_last->next = req;
    l->held_last = req;
    return true;
}

struct request *cards_hold_end(struct engine *e)
{
    struct card_leave *l = leave_of(e);
    struct request *list = l->is_stopped ? NULL : l->held;
    if (list != NULL)
        l->held = l->held_last = NULL;
    return list;
}

/* The inbox comes behind what was held back. */
struct request *cards_hold_all(struct engine *e)
{
    struct card_leave *l = leave_of(e);
    struct request *list = l->held;
    struct request *behind = stack_take_all(&e->inbox);
    if (list == NULL)
        return behind;
    l->held_last->next = behind;
    l->held = l->held_last = NULL;
    return list;
}
