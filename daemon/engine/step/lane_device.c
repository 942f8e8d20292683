/* lane_device.c: opens the regions of lanes on one device and lets all others reach them. */
#include "daemon/engine/step/lane_device.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/engine/core/peers.h"
#include "daemon/engine/step/lane.h"

attn_status lane_check(const struct engine *primary, char *why, size_t why_bytes)
{
    if (!lane_is_possible(&primary->info)) {
        snprintf(why, why_bytes, "backend %s has no memory that a worker can map",
                 primary->env.ops->name);
        return ATTN_ENOTSUP;
    }
    for (uint32_t i = 1; i < peers_n(primary); i++) {
        const struct engine *e = peers_at(primary, i);
        if (peers_are_alike(primary, e))
            continue;
        snprintf(why, why_bytes, "card %" PRIu32 " is of backend %s, card 0 of %s", i,
                 e->env.ops->name, primary->env.ops->name);
        return ATTN_ENOTSUP;
    }
    return ATTN_OK;
}

struct engine *lane_home(struct engine *primary, const uint8_t uuid[16])
{
    struct engine *first = NULL;
    for (uint32_t i = 0; i < peers_n(primary); i++) {
        struct engine *e = peers_at(primary, i);
        if (engine_health(e) != ATTN_OK)
            continue;
        if (memcmp(e->info.id.uuid, uuid, sizeof e->info.id.uuid) == 0)
            return e;
        first = first == NULL ? e : first;
    }
    return first == NULL ? primary : first;
}

struct backend *lane_backend(const struct engine *home, const struct backend_ops **out_ops)
{
    *out_ops = home->env.ops;
    return home->env.backend;
}

/* Lets all cards other than home use the region. */
static attn_status reach(struct engine *home, const struct backend_region *r, char *why,
                         size_t why_bytes)
{
    for (uint32_t i = 0; i < peers_n(home); i++) {
        const struct engine *e = peers_at(home, i);
        if (e == home || engine_health(e) != ATTN_OK ||
            home->env.ops->region_reach(home->env.backend, r, e->env.backend) == ATTN_OK)
            continue;
        snprintf(why, why_bytes, "card %" PRIu32 " (%s) does not reach it", i, e->info.device);
        return ATTN_ENOTSUP;
    }
    return ATTN_OK;
}

attn_status lane_region_open(struct engine *home, uint64_t bytes, int import_fd,
                             struct backend_region *out_r, char *why, size_t why_bytes)
{
    const struct backend_ops *ops = home->env.ops;
    struct backend_region r;
    attn_status st = ops->region_open(home->env.backend, bytes, import_fd, &r, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    st = reach(home, &r, why, why_bytes);
    if (st == ATTN_OK)
        *out_r = r;
    else
        ops->region_close(home->env.backend, &r);
    return st;
}

bool lane_is_stuck(const struct engine *home)
{
    return !is_alone(home) && !peers_all_live(home);
}
