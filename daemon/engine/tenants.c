/* tenants.c: applies a new file of tenants to a running engine. Sessions of removed tenants end at
 * once, their sequences like those of expired sessions, a pool once it has no sequences. */
#include "daemon/engine/tenants.h"

#include <inttypes.h>

#include "daemon/base/log.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/pool/create.h"

/* --- tables ----------------------------------------------------------------------------------- */

static attn_status tables_take(void *user, uint32_t tenant, uint64_t bytes, char *why,
                               size_t why_bytes)
{
    struct engine *e = user;
    return tenant_take(tenants_of_id(e->env.tenants, tenant), TENANT_TABLE_BYTES, bytes, why,
                       why_bytes);
}

static void tables_give(void *user, uint32_t tenant, uint64_t bytes)
{
    struct engine *e = user;
    tenant_give(tenants_of_id(e->env.tenants, tenant), TENANT_TABLE_BYTES, bytes);
}

static void tables_count(void *user, uint32_t tenant, uint64_t bytes)
{
    struct engine *e = user;
    tenant_count(tenants_of_id(e->env.tenants, tenant), TENANT_TABLE_BYTES, bytes);
}

void tenants_count_tables(struct engine *e, bool is_on)
{
    const struct kv_room_ops ops = {
        .user = e, .take = tables_take, .give = tables_give, .count = tables_count};
    kv_set_room_ops(e->env.kv, is_on ? &ops : NULL);
}

/* --- another file ----------------------------------------------------------------------------- */

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
    for (uint32_t slot = 0; slot < session_slots(e->env.cfg->max_sessions); slot++) {
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
