/* session.c: the table of sessions: slots in three lists (free, live by age, expired) and two
 * chained hashes, of ids and of the hellos that made them. Only the engine changes the hash of ids,
 * with the lock held; so it reads it without the lock, and others read it with the lock. */
#include "daemon/request/session.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

TAILQ_HEAD(session_list, session);

struct session_table {
    struct session *slots;
    struct session **buckets, **hello_buckets;
    uint32_t bucket_mask, n_live, n_max;
    uint32_t n_taken, n_aside; /* slots that are not free; of these, set aside */
    pthread_mutex_t lock; /* protects the hash of ids */
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
    uint32_t n_slots = session_slots(max_sessions);
    t->slots = calloc(n_slots, sizeof *t->slots);
    t->buckets = calloc(n_buckets, sizeof(struct session *));
    t->hello_buckets = calloc(n_buckets, sizeof(struct session *));
    TAILQ_INIT(&t->free);
    TAILQ_INIT(&t->live);
    TAILQ_INIT(&t->expired);
    if (t->slots == NULL || t->buckets == NULL || t->hello_buckets == NULL) {
        session_table_close(t);
        return ATTN_ENOMEM;
    }
    t->bucket_mask = n_buckets - 1;
    t->n_max = max_sessions;
    pthread_mutex_init(&t->lock, NULL);
    for (uint32_t i = 0; i < n_slots; i++)
        TAILQ_INSERT_TAIL(&t->free, &t->slots[i], link);
    *out_table = t;
    return ATTN_OK;
}

void session_table_close(struct session_table *t)
{
    struct session *s;
    if (t == NULL)
        return;
    TAILQ_FOREACH(s, &t->live, link)
        share_unref(s->share);
    free(t->slots);
    free(t->buckets);
    free(t->hello_buckets);
    free(t);
}

static struct session *find_hello(const struct session_table *t, uint64_t key)
{
    struct session *s = t->hello_buckets[key & t->bucket_mask];
    while (s != NULL && s->hello_key != key)
        s = s->hello_next;
    return s;
}

bool session_is_known(const struct session_table *t, const struct session_hello *hello)
{
    return find_hello(t, hello->key) != NULL;
}

static void slot_take(struct session_table *t, struct session *s, bool is_aside)
{
    TAILQ_REMOVE(&t->free, s, link);
    s->is_aside = is_aside;
    t->n_aside += is_aside;
    t->n_taken++;
}

/* Counts one more session, if a slot is free and the connection and its principal may have it. */
static attn_status take_place(struct session_table *t, struct share *share, char *why,
                              size_t why_bytes)
{
    uint32_t n_taken = t->n_taken - t->n_aside;
    uint64_t n_free = t->n_max - (t->n_live < t->n_max ? t->n_live : t->n_max);
    char text[SHARE_TEXT_BYTES];
    if (n_taken >= t->n_max) {
        snprintf(why, why_bytes, "%" PRIu32 " sessions are open, engine.max_sessions is %" PRIu32,
                 t->n_live, t->n_max);
        return ATTN_EOVERLOAD;
    }
    const struct share *full = share_take(share, SHARE_SESSIONS, 1, n_free, t->n_max);
    if (full == NULL)
        return ATTN_OK;
    snprintf(why, why_bytes, "%s", share_say(full, SHARE_SESSIONS, n_free, text));
    return ATTN_EOVERLOAD;
}

/* Makes a free slot live. */
static void session_begin(struct session_table *t, struct session *s, uint64_t id,
                          const struct session_hello *hello, bool is_aside, uint64_t now_ns)
{
    slot_take(t, s, is_aside);
    s->seen_ns = now_ns;
    atomic_store_explicit(&s->touched_ns, 0, memory_order_relaxed);
    s->n_held = 0;
    s->share = is_aside ? NULL : hello->share;
    if (s->share != NULL)
        share_ref(s->share);
    snprintf(s->client_name, sizeof s->client_name, "%s", hello->client_name);
    s->hello_key = hello->key;
    struct session **same = &t->hello_buckets[hello->key & t->bucket_mask];
    s->hello_next = *same;
    *same = s;
    pthread_mutex_lock(&t->lock);
    s->id = id;
    s->hash_next = *bucket_of(t, id);
    *bucket_of(t, id) = s;
    pthread_mutex_unlock(&t->lock);
    TAILQ_INSERT_TAIL(&t->live, s, link);
    t->n_live++;
}

attn_status session_open(struct session_table *t, const struct session_hello *hello,
                         uint64_t now_ns, uint32_t *out_slot, char *why, size_t why_bytes)
{
    struct session *s = find_hello(t, hello->key);
    uint32_t other;
    uint64_t id;
    if (s != NULL) {
        *out_slot = slot_of(t, s);
        session_renew(t, *out_slot, now_ns);
        return ATTN_OK;
    }
    bool is_aside = hello->is_admin && t->n_aside < SESSION_N_ASIDE;
    attn_status st = is_aside ? ATTN_OK : take_place(t, hello->share, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    do {
        if (getrandom(&id, sizeof id, 0) != (ssize_t)sizeof id) {
            share_give(is_aside ? NULL : hello->share, SHARE_SESSIONS, 1);
            snprintf(why, why_bytes, "no random bytes for a session's id");
            return ATTN_EINTERNAL;
        }
    } while (id == 0 || session_find(t, id, &other) == ATTN_OK);
    s = TAILQ_FIRST(&t->free);
    session_begin(t, s, id, hello, is_aside, now_ns);
    *out_slot = slot_of(t, s);
    return ATTN_OK;
}

attn_status session_restore(struct session_table *t, uint32_t slot, uint64_t id,
                            const char *client_name, uint64_t now_ns)
{
    struct session *s = &t->slots[slot];
    uint32_t other;
    if (id != 0 && session_find(t, id, &other) == ATTN_OK)
        return ATTN_EEXIST;
    if (id != 0) {
        /* its hello is not known any more, so a late repetition makes another session */
        struct session_hello hello = {.client_name = client_name, .key = id};
        session_begin(t, s, id, &hello, false, now_ns);
    } else {
        slot_take(t, s, false);
        TAILQ_INSERT_TAIL(&t->expired, s, link);
    }
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

void session_touch(struct session_table *t, uint64_t id, uint64_t now_ns)
{
    uint32_t slot;
    pthread_mutex_lock(&t->lock);
    if (session_find(t, id, &slot) == ATTN_OK)
        atomic_store_explicit(&t->slots[slot].touched_ns, now_ns, memory_order_relaxed);
    pthread_mutex_unlock(&t->lock);
}

struct session *session_at(struct session_table *t, uint32_t slot)
{
    return &t->slots[slot];
}

uint32_t session_count(const struct session_table *t)
{
    return t->n_live;
}

static bool is_held(const struct session_table *t, const struct session *s,
                    const _Atomic uint32_t *held)
{
    return s->n_held > 0 || (held != NULL && atomic_load(&held[slot_of(t, s)]) > 0);
}

uint32_t session_expire(struct session_table *t, uint64_t now_ns, uint64_t lease_ns,
                        const _Atomic uint32_t *held)
{
    struct session *s;
    while ((s = TAILQ_FIRST(&t->live)) != NULL) {
        if (now_ns < s->seen_ns || now_ns - s->seen_ns < lease_ns)
            return SESSION_NONE;
        uint64_t touched_ns = atomic_load_explicit(&s->touched_ns, memory_order_relaxed);
        bool is_waiting = is_held(t, s, held);
        if (!is_waiting && touched_ns <= s->seen_ns)
            break;
        session_renew(t, slot_of(t, s), is_waiting ? now_ns : touched_ns);
    }
    if (s == NULL)
        return SESSION_NONE;
    session_end(t, slot_of(t, s));
    return slot_of(t, s);
}

void session_end(struct session_table *t, uint32_t slot)
{
    struct session *s = &t->slots[slot];
    pthread_mutex_lock(&t->lock);
    struct session **place = bucket_of(t, s->id);
    while (*place != s)
        place = &(*place)->hash_next;
    *place = s->hash_next;
    s->ended_id = s->id;
    s->id = 0;
    pthread_mutex_unlock(&t->lock);
    place = &t->hello_buckets[s->hello_key & t->bucket_mask];
    while (*place != s)
        place = &(*place)->hello_next;
    *place = s->hello_next;
    share_give(s->share, SHARE_SESSIONS, 1);
    share_unref(s->share);
    s->share = NULL;
    TAILQ_REMOVE(&t->live, s, link);
    TAILQ_INSERT_TAIL(&t->expired, s, link);
    t->n_live--;
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
    t->n_aside -= s->is_aside;
    t->n_taken--;
}
