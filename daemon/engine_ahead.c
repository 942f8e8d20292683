/* engine_ahead.c: bells that are launched before they are rung (lane.c): whether they may be, and
 * when they are called off, so that nobody waits for a worker that may never ring. */
#include "daemon/engine_ahead.h"

#include "daemon/lane.h"
#include "daemon/stack.h"

/* An announced bell that waits for longer is called off: what must follow in order, the end of the
 * process for one, waits for it. */
static const uint64_t MOST_AHEAD_NS = 20 * 1000 * 1000;

/* Nobody but the lane wants the device. */
static bool is_alone(struct engine *e, const struct lane *l)
{
    const struct lane *other;
    uint32_t n_others = atomic_load_explicit(&e->n_held, memory_order_relaxed) - l->n_busy;
    LIST_FOREACH(other, &e->lanes, entry)
        if (other != l && (other->n_plans > 0 || other->n_busy > 0))
            return false;
    return n_others <= atomic_load_explicit(&e->n_watchers, memory_order_relaxed) &&
           e->parts_waiting == NULL && stack_is_empty(&e->parts_in) &&
           !atomic_load_explicit(&e->is_stopping, memory_order_relaxed);
}

bool engine_may_announce(struct engine *e, const struct lane *l)
{
    return (e->info.features & BACKEND_CAN_GIVE_UP) && l->n_busy < e->max_in_flight &&
           is_alone(e, l);
}

void engine_call_off(struct engine *e)
{
    if (e->n_early > 0)
        e->parts.ops->give_up(e->parts.backend);
}

void lanes_watch(struct engine *e, uint64_t now_ns)
{
    const struct lane *l;
    LIST_FOREACH(l, &e->lanes, entry)
        if (l->n_ahead > 0 &&
            (l->is_closed || now_ns - l->taken_ns > MOST_AHEAD_NS || !is_alone(e, l)))
            engine_call_off(e);
}
