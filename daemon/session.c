/* session.c: slots in three lists (free, live by age, expired) and a chained hash of the ids. */
#include "daemon/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

TAILQ_HEAD(session_list, session);

struct session_table {
    struct session *slots;
    struct session **buckets;
    uint32_t bucket_mask, n_live;
    struct session_list free, live, expired;
};

static uint32_t slot_of(const struct session_table *t, const struct session *s)
{
    return s == NULL ? SESSION_NONE : (uint32_t)(s - t->slots);
}

static struct session **bucket_of(const struct session_table *t, uint64_t id)
{
    return &t->buckets[id & t->bucket_mask]; /* ids are random already */
}

attn_status session_table_open(uint32_t max_sessions, struct session_table **out_table)
{
    struct session_table *t = calloc(1, sizeof *t);
    if (t == NULL)
        return ATTN_ENOMEM;
    uint32_t n_buckets = 16;
    while (n_buckets < max_sessions && n_buckets < 1u << 30)
        n_buckets *= 2;
    t->slots = calloc(max_sessions, sizeof *t->slots);
    t->buckets = calloc(n_buckets, sizeof(struct session *));
    if (t->slots == NULL || t->buckets == NULL) {
        session_table_close(t);
        return ATTN_ENOMEM;
    }
    t->bucket_mask = n_buckets - 1;
    TAILQ_INIT(&t->free);
    TAILQ_INIT(&t->live);
    TAILQ_INIT(&t->expired);
    for (uint32_t i = 0; i < max_sessions; i++)
        TAILQ_INSERT_TAIL(&t->free, &t->slots[i], link);
    *out_table = t;
    return ATTN_OK;
}

void session_table_close(struct session_table *t)
{
    if (t == NULL)
        return;
    free(t->slots);
    free(t->buckets);
    free(t);
}

attn_status session_open(struct session_table *t, const char *client_name, uint64_t now_ns,
                         uint32_t *out_slot)
{
    struct session *s = TAILQ_FIRST(&t->free);
    uint32_t other;
    if (s == NULL)
        return ATTN_EOVERLOAD;
    uint64_t id;
    do {
        if (getrandom(&id, sizeof id, 0) != (ssize_t)sizeof id)
            return ATTN_EINTERNAL;
    } while (id == 0 || session_find(t, id, &other) == ATTN_OK);

    TAILQ_REMOVE(&t->free, s, link);
    s->id = id;
    s->seen_ns = now_ns;
    s->n_held = 0;
    snprintf(s->client_name, sizeof s->client_name, "%s", client_name);
    s->hash_next = *bucket_of(t, id);
    *bucket_of(t, id) = s;
    TAILQ_INSERT_TAIL(&t->live, s, link);
    t->n_live++;
    *out_slot = slot_of(t, s);
    return ATTN_OK;
}

attn_status session_find(const struct session_table *t, uint64_t id, uint32_t *out_slot)
{
    if (id == 0)
        return ATTN_ENOTFOUND;
    for (const struct session *s = *bucket_of(t, id); s != NULL; s = s->hash_next) {
        if (s->id == id) {
            *out_slot = slot_of(t, s);
            return ATTN_OK;
        }
    }
    return ATTN_ENOTFOUND;
}

void session_renew(struct session_table *t, uint32_t slot, uint64_t now_ns)
{
    struct session *s = &t->slots[slot];
    s->seen_ns = now_ns;
    TAILQ_REMOVE(&t->live, s, link);
    TAILQ_INSERT_TAIL(&t->live, s, link);
}

struct session *session_at(struct session_table *t, uint32_t slot)
{
    return &t->slots[slot];
}

uint32_t session_count(const struct session_table *t)
{
    return t->n_live;
}

uint32_t session_expire(struct session_table *t, uint64_t now_ns, uint64_t lease_ns)
{
    struct session *s;
    while ((s = TAILQ_FIRST(&t->live)) != NULL) {
        if (now_ns < s->seen_ns || now_ns - s->seen_ns < lease_ns)
            return SESSION_NONE;
        if (s->n_held == 0)
            break;
        session_renew(t, slot_of(t, s), now_ns);
    }
    if (s == NULL)
        return SESSION_NONE;

    struct session **place = bucket_of(t, s->id);
    while (*place != s)
        place = &(*place)->hash_next;
    *place = s->hash_next;
    s->id = 0;
    TAILQ_REMOVE(&t->live, s, link);
    TAILQ_INSERT_TAIL(&t->expired, s, link);
    t->n_live--;
    return slot_of(t, s);
}

uint64_t session_next_expiry_ns(const struct session_table *t, uint64_t lease_ns)
{
    const struct session *s = TAILQ_FIRST(&t->live);
    return s == NULL ? UINT64_MAX : s->seen_ns + lease_ns;
}

uint32_t session_expired_first(const struct session_table *t)
{
    return slot_of(t, TAILQ_FIRST(&t->expired));
}

void session_release(struct session_table *t, uint32_t slot)
{
    struct session *s = &t->slots[slot];
    TAILQ_REMOVE(&t->expired, s, link);
    TAILQ_INSERT_TAIL(&t->free, s, link);
}
