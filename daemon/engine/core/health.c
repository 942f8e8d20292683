/* health.c: whether the engine's device works or is lost. */
#include "daemon/engine/core/health.h"

#include "daemon/base/log.h"
#include "daemon/base/stats.h"

attn_status engine_health(const struct engine *e)
{
    return (attn_status)atomic_load_explicit(&e->health, memory_order_relaxed);
}

void device_lose(struct engine *e, const char *what)
{
    if (atomic_exchange(&e->health, ATTN_EDEVICE) == ATTN_OK)
        log_error("device lost: %s", what);
    stats_card_set(e->env.card, STATS_CARD_LOST, 1);
}
