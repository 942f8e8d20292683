/* mover.c: drives block moves between pools, host memory and the file: begins demotions and
 * promotions, handles finished ones, and can wait for all. */
#include "daemon/engine/tier/mover.h"

#include <sched.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/engine/tier/demote.h"
#include "daemon/engine/tier/group.h"
#include "daemon/engine/tier/idle.h"
#include "daemon/engine/tier/promote.h"

static const uint64_t SETTLE_NS = UINT64_C(5000000000);

bool mover_turn(struct engine *e)
{
    if (e->tier.blocks == NULL)
        return e->idle.by_use != NULL && mover_take_back(e);
    tier_store_set_time(e->tier.blocks, (uint32_t)(e->turn_ns / UINT64_C(1000000000)));
    if (e->tier.disk_blocks != NULL)
        tier_store_set_time(e->tier.disk_blocks, (uint32_t)(e->turn_ns / UINT64_C(1000000000)));
    bool has_any = mover_take_back(e), has_changed = e->tier.has_changed;
    e->tier.has_changed = false; /* tasks run now may set it again */
    if (has_changed)
        mover_run_queue(e);
    if (e->is_dirty || has_changed)
        mover_demote_next(e);
    mover_spill_next(e);
    return has_any || e->tier.has_changed;
}

void mover_wait(struct engine *e, const struct pool *p, uint64_t n)
{
    uint64_t begun_ns = clock_now_ns();
    while (mover_holds(e, p, n) && clock_now_ns() - begun_ns <= SETTLE_NS)
        if (!mover_take_back(e))
            sched_yield();
}

static bool is_drained(const struct engine *e, const struct pool *p)
{
    const struct engine_tier *t = &e->tier;
    const struct mover_promote *f;
    LIST_FOREACH(f, &t->promotions, link)
        if (p == NULL || f->group.pool == p)
            return false;
    if (t->spill.group.is_under_way) /* may concern any pool */
        return false;
    return !t->demote.group.is_under_way || (p != NULL && t->demote.group.pool != p);
}

bool mover_drain(struct engine *e, const struct pool *p)
{
    uint64_t begun_ns = clock_now_ns();
    if (e->tier.blocks == NULL && e->idle.by_use == NULL)
        return true;
    while (!is_drained(e, p) || !idle_is_drained(e, p)) {
        idle_hurry(e);
        if (mover_take_back(e))
            continue;
        if (clock_now_ns() - begun_ns > SETTLE_NS)
            return false;
        sched_yield();
    }
    while (p == NULL && atomic_load(&e->tier.n_notifying) > 0)
        sched_yield();
    return true;
}

attn_status mover_init(struct engine *e)
{
    TAILQ_INIT(&e->tier.queue);
    LIST_INIT(&e->tier.promotions);
    return mover_demote_init(e);
}

void mover_fini(struct engine *e)
{
    mover_demote_fini(e);
}
