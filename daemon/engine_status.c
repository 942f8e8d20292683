/* engine_status.c: whether the engine drains and whether its device is lost, as others ask and tell
 * it. */
#include "daemon/engine_state.h"
#include "daemon/health.h"

void engine_drain(struct engine *e)
{
    atomic_store(&e->is_draining, true);
    health_set_draining(true);
}

bool engine_is_draining(const struct engine *e)
{
    return atomic_load(&e->is_draining);
}

bool engine_is_drained(const struct engine *e)
{
    return atomic_load(&e->is_draining) && engine_is_idle(e);
}

bool engine_is_idle(const struct engine *e)
{
    return atomic_load(&e->n_held) == 0;
}

attn_status engine_health(const struct engine *e)
{
    return (attn_status)atomic_load_explicit(&e->health, memory_order_relaxed);
}
