/* lane.c: see lane.h. */
#include "daemon/cards/lane.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/cards/internal.h"
#include "daemon/cards/step.h"
#include "daemon/engine/step/lane.h"

attn_status cards_lane_check(const struct engine *lead, char *why, size_t why_bytes)
{
    const struct cards *c = lead->parts.cards;
    if (!lane_is_possible(&lead->info)) {
        snprintf(why, why_bytes, "backend %s has no memory that a worker can map",
                 lead->parts.ops->name);
        return ATTN_ENOTSUP;
    }
    for (uint32_t i = 1; c != NULL && i < c->n_joined; i++) {
        const struct engine *e = c->engines[i];
        if (cards_are_alike(lead, e))
            continue;
        snprintf(why, why_bytes, "card %" PRIu32 " is of backend %s, card 0 of %s", i,
                 e->parts.ops->name, lead->parts.ops->name);
        return ATTN_ENOTSUP;
    }
    return ATTN_OK;
}

struct engine *cards_lane_home(struct engine *lead, const uint8_t uuid[16])
{
    const struct cards *c = lead->parts.cards;
    struct engine *first = NULL;
    for (uint32_t i = 0; c != NULL && i < c->n_joined; i++) {
        struct engine *e = c->engines[i];
        if (card_is_lost(e))
            continue;
        if (memcmp(e->info.id.uuid, uuid, sizeof e->info.id.uuid) == 0)
            return e;
        first = first == NULL ? e : first;
    }
    return first == NULL ? lead : first;
}

struct backend *cards_lane_backend(const struct engine *home, const struct backend_ops **out_ops)
{
    *out_ops = home->parts.ops;
    return home->parts.backend;
}

/* Lets all cards but home work with the region. */
static attn_status reach(struct engine *home, const struct backend_region *r, char *why,
                         size_t why_bytes)
{
    const struct cards *c = home->parts.cards;
    for (uint32_t i = 0; c != NULL && i < c->n_joined; i++) {
        const struct engine *e = c->engines[i];
        if (e == home || card_is_lost(e) ||
            home->parts.ops->region_reach(home->parts.backend, r, e->parts.backend) == ATTN_OK)
            continue;
        snprintf(why, why_bytes, "card %" PRIu32 " (%s) does not reach it", i, e->info.device);
        return ATTN_ENOTSUP;
    }
    return ATTN_OK;
}

attn_status cards_lane_open(struct engine *home, uint64_t bytes, int import_fd,
                            struct backend_region *out_r, char *why, size_t why_bytes)
{
    const struct backend_ops *ops = home->parts.ops;
    struct backend_region r;
    attn_status st = ops->region_open(home->parts.backend, bytes, import_fd, &r, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    st = reach(home, &r, why, why_bytes);
    if (st == ATTN_OK)
        *out_r = r;
    else
        ops->region_close(home->parts.backend, &r);
    return st;
}

uint32_t cards_lane_others(struct engine *lead, const struct request *plan)
{
    struct cards *c = lead->parts.cards;
    pthread_rwlock_rdlock(&c->route);
    uint32_t of_cards = cards_of_step(c, plan);
    pthread_rwlock_unlock(&c->route);
    return of_cards & ~1u;
}

bool cards_lane_is_stuck(const struct engine *home)
{
    return home->parts.cards != NULL && !cards_are_whole(home->parts.cards);
}
