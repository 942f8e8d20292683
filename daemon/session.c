/* session.c: slots in three lists (free, live by age, expired) and a chained hash of the ids. */
#include "daemon/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

struct list {
    uint32_t head, tail;
};

struct session_table {
    struct session *slots;
    uint32_t *buckets;
    uint32_t n_slots, bucket_mask, n_live;
    struct list free, live, expired;
};

static void list_push(struct session_table *t, struct list *l, uint32_t slot)
{
    struct session *s = &t->slots[slot];
    s->prev = l->tail;
    s->next = SESSION_NONE;
    if (l->tail == SESSION_NONE)
        l->head = slot;
    else
        t->slots[l->tail].next = slot;
    l->tail = slot;
}

static void list_remove(struct session_table *t, struct list *l, uint32_t slot)
{
    struct session *s = &t->slots[slot];
    if (s->prev == SESSION_NONE)
        l->head = s->next;
    else
        t->slots[s->prev].next = s->next;
    if (s->next == SESSION_NONE)
        l->tail = s->prev;
    else
        t->slots[s->next].prev = s->prev;
}

static uint32_t *bucket_of(const struct session_table *t, uint64_t id)
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
    t->buckets = malloc(n_buckets * sizeof *t->buckets);
    if (t->slots == NULL || t->buckets == NULL) {
        session_table_close(t);
        return ATTN_ENOMEM;
    }
    t->n_slots = max_sessions;
    t->bucket_mask = n_buckets - 1;
    for (uint32_t i = 0; i < n_buckets; i++)
        t->buckets[i] = SESSION_NONE;
    t->free = t->live = t->expired = (struct list){SESSION_NONE, SESSION_NONE};
    for (uint32_t i = 0; i < max_sessions; i++)
        list_push(t, &t->free, i);
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
    uint32_t slot = t->free.head, other;
    if (slot == SESSION_NONE)
        return ATTN_EOVERLOAD;
    uint64_t id;
    do {
        if (getrandom(&id, sizeof id, 0) != (ssize_t)sizeof id)
            return ATTN_EINTERNAL;
    } while (id == 0 || session_find(t, id, &other) == ATTN_OK);

    list_remove(t, &t->free, slot);
    struct session *s = &t->slots[slot];
    s->id = id;
    s->seen_ns = now_ns;
    s->n_held = 0;
    snprintf(s->client_name, sizeof s->client_name, "%s", client_name);
    s->hash_next = *bucket_of(t, id);
    *bucket_of(t, id) = slot;
    list_push(t, &t->live, slot);
    t->n_live++;
    *out_slot = slot;
    return ATTN_OK;
}

attn_status session_find(const struct session_table *t, uint64_t id, uint32_t *out_slot)
{
    if (id == 0)
        return ATTN_ENOTFOUND;
    for (uint32_t s = *bucket_of(t, id); s != SESSION_NONE; s = t->slots[s].hash_next) {
        if (t->slots[s].id == id) {
            *out_slot = s;
            return ATTN_OK;
        }
    }
    return ATTN_ENOTFOUND;
}

void session_renew(struct session_table *t, uint32_t slot, uint64_t now_ns)
{
    t->slots[slot].seen_ns = now_ns;
    list_remove(t, &t->live, slot);
    list_push(t, &t->live, slot);
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
    uint32_t slot;
    while ((slot = t->live.head) != SESSION_NONE) {
        struct session *s = &t->slots[slot];
        if (now_ns < s->seen_ns || now_ns - s->seen_ns < lease_ns)
            return SESSION_NONE;
        if (s->n_held == 0)
            break;
        session_renew(t, slot, now_ns);
    }
    if (slot == SESSION_NONE)
        return SESSION_NONE;

    uint32_t *link = bucket_of(t, t->slots[slot].id);
    while (*link != slot)
        link = &t->slots[*link].hash_next;
    *link = t->slots[slot].hash_next;
    t->slots[slot].id = 0;
    list_remove(t, &t->live, slot);
    list_push(t, &t->expired, slot);
    t->n_live--;
    return slot;
}

uint64_t session_next_expiry_ns(const struct session_table *t, uint64_t lease_ns)
{
    return t->live.head == SESSION_NONE ? UINT64_MAX : t->slots[t->live.head].seen_ns + lease_ns;
}

uint32_t session_expired_first(const struct session_table *t)
{
    return t->expired.head;
}

void session_release(struct session_table *t, uint32_t slot)
{
    list_remove(t, &t->expired, slot);
    list_push(t, &t->free, slot);
}
