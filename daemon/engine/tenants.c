/* tenants.c: applies a new file of tenants to a running engine. Sessions of removed tenants end at
 * once, their sequences like those of expired sessions, a pool once it has no sequences. */
#include "daemon/engine/tenants.h"

#include <inttypes.h>

#include "daemon/base/log.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/pool/create.h"

static void take_tenants(struct engine *e, struct tenants *now)
{
    tenants_close(atomic_exchange(&e->new_tenants, now)); /* an older file, not applied yet */
    engine_wake(e);
}

/* The primary comes last, so that the others know every tenant that it admits. */
void engine_take_tenants(struct engine *e, struct tenants *now)
{
    for (uint32_t i = 1; i < peers_n(e); i++) {
        struct tenants *copy;
        if (tenants_copy(now, &copy) == ATTN_OK)
            take_tenants(peers_at(e, i), copy);
        else
            log_error("listen.tenants: no memory for those of card %" PRIu32, i);
    }
    take_tenants(e, now);
}

static bool is_gone(const struct tenant *who)
{
    return who != NULL && who->is_gone;
}

static void end_sessions(struct engine *e)
{
    for (uint32_t slot = 0; slot < e->env.cfg->max_sessions; slot++) {
        const struct session *s = session_at(e->env.sessions, slot);
        if (s->id != 0 && is_gone(s->tenant))
            session_kill(e, slot, "its tenant is gone");
    }
}

/* Drops pools of removed tenants. true: some are left, with open sequences or unfinished work. */
static bool drop_pools(struct engine *e)
{
    bool is_more = false;
    char why[WHY_BYTES];
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;)
        if (is_gone(tenants_of_id(e->env.tenants, p->tenant)))
            is_more |= pool_drop(e, p, why, sizeof why) != ATTN_OK;
    return is_more;
}

void tenants_turn(struct engine *e)
{
    if (atomic_load_explicit(&e->new_tenants, memory_order_relaxed) != NULL) {
        struct tenants *now = atomic_exchange(&e->new_tenants, NULL);
        if (now != NULL && !tenants_update(e->env.tenants, now))
            log_warn(
                "listen.tenants: some new tenants have no place before those who are gone have "
                "ended; reload again");
        if (e->env.card > 0)
            return; /* the primary ends their sessions and pools */
        end_sessions(e);
        e->has_gone_tenants = true;
    }
    if (e->has_gone_tenants)
        e->has_gone_tenants = drop_pools(e);
}
