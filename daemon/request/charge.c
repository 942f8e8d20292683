/* charge.c: takes and gives back what a request holds of limited resources. */
#include "daemon/request/charge.h"

#include "daemon/base/stats.h"

/* --- queue ------------------------------------------------------------------------------------ */

static void count_in(struct queue_place p, uint32_t *out_n, uint64_t *out_bytes)
{
    *out_n = atomic_fetch_add(&p.queue->n_requests, 1) + 1;
    *out_bytes = atomic_fetch_add(&p.queue->bytes, p.bytes) + p.bytes;
}

static void count_out(struct queue_place p)
{
    atomic_fetch_sub(&p.queue->bytes, p.bytes);
    atomic_fetch_sub(&p.queue->n_requests, 1);
}

void charge_queue(struct charge *c, struct queue_count *q, uint64_t bytes, uint32_t *out_n,
                  uint64_t *out_bytes)
{
    stats_add(queue_requests, 1);
    stats_add(queue_bytes, bytes);
    c->place = (struct queue_place){q, bytes};
    count_in(c->place, out_n, out_bytes);
}

void charge_queue_move(struct charge *c, struct queue_count *to)
{
    struct queue_place from = c->place;
    uint32_t n;
    uint64_t bytes;
    c->place.queue = to;
    count_in(c->place, &n, &bytes);
    count_out(from);
}

void queue_leave(struct queue_place p)
{
    if (p.queue == NULL)
        return;
    stats_sub(queue_requests, 1);
    stats_sub(queue_bytes, p.bytes);
    count_out(p);
}

/* --- connection ------------------------------------------------------------------------------- */

const char *charge_share(struct charge *c, struct share *share, const struct queue_room *room,
                         char why[SHARE_TEXT_BYTES])
{
    const struct share *full = share_take(share, SHARE_REQUESTS, 1, room->n_free, room->n_all);
    if (full != NULL)
        return share_say(full, SHARE_REQUESTS, room->n_free, why);
    full = share_take(share, SHARE_QUEUE_BYTES, c->place.bytes, room->bytes_free, room->bytes_all);
    if (full != NULL) {
        share_give(share, SHARE_REQUESTS, 1);
        return share_say(full, SHARE_QUEUE_BYTES, room->bytes_free, why);
    }
    c->share = share;
    return NULL;
}

/* --- tenant ----------------------------------------------------------------------------------- */

attn_status charge_tenant(struct charge *c, struct tenant *who, uint64_t bytes, char *why,
                          size_t why_bytes)
{
    attn_status st = tenant_take(who, TENANT_BYTES, bytes, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    c->tenant = who;
    c->tenant_bytes = bytes;
    return ATTN_OK;
}

bool charge_step(struct charge *c)
{
    c->is_tenants_step = c->tenant != NULL;
    return c->is_tenants_step && c->tenant->n_steps++ == 0;
}

static void give_tenant(const struct charge *c, attn_status st)
{
    struct tenant *who = c->tenant;
    tenant_give(who, TENANT_BYTES, c->tenant_bytes);
    if (!c->is_tenants_step)
        return;
    who->n_steps--;
    if (!tenant_is_operator(who))
        atomic_fetch_add_explicit(
            &stats.tenants[who->stats]
                 .used[st == ATTN_OK ? STATS_TENANT_STEPS : STATS_TENANT_FAILED],
            1, memory_order_relaxed);
}

/* --- name ------------------------------------------------------------------------------------- */

void charge_place(struct charge *c, struct seq_name name,
                  void (*unplace)(void *user, struct seq_name name), void *user)
{
    c->name = name;
    c->unplace = unplace;
    c->unplace_user = user;
}

void charge_unplace(struct charge *c)
{
    if (c->unplace != NULL)
        c->unplace(c->unplace_user, c->name);
    c->unplace = NULL;
}

/* --- the end ---------------------------------------------------------------------------------- */

struct queue_place charge_release(struct charge *c, attn_status st)
{
    struct queue_place place = c->place;
    give_tenant(c, st);
    share_give(c->share, SHARE_REQUESTS, 1);
    share_give(c->share, SHARE_QUEUE_BYTES, place.bytes);
    charge_unplace(c);
    *c = (struct charge){.tenant = NULL};
    return place;
}
