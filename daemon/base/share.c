/* share.c: counts what connections and their principals hold, and applies the rule that bounds it.
 * The lock protects the list of principals and the references; counts are atomic. */
#include "daemon/base/share.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    SURE_PART = 32, /* a connection may hold a 32nd of the total while any is left */
    SPARED_PART = 4, /* a quarter stays free for connections that hold less than that */
};

struct share_table {
    pthread_mutex_t lock; /* protects principals, n_made and all n_refs */
    LIST_HEAD(, share) principals; /* users, certificates, addresses: few */
    uint64_t n_made;
    _Atomic uint32_t peer_percent, principal_percent;
};

struct share_table *share_table_open(uint32_t peer_percent, uint32_t principal_percent)
{
    struct share_table *t = calloc(1, sizeof *t);
    if (t == NULL)
        return NULL;
    pthread_mutex_init(&t->lock, NULL);
    LIST_INIT(&t->principals);
    t->peer_percent = peer_percent;
    t->principal_percent = principal_percent;
    return t;
}

void share_table_close(struct share_table *t)
{
    if (t == NULL)
        return;
    pthread_mutex_destroy(&t->lock);
    free(t);
}

void share_table_set(struct share_table *t, uint32_t peer_percent, uint32_t principal_percent)
{
    atomic_store(&t->peer_percent, peer_percent);
    atomic_store(&t->principal_percent, principal_percent);
}

static struct share *share_new(struct share_table *t, const struct principal *who)
{
    struct share *s = calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    s->table = t;
    s->who = *who;
    s->serial = ++t->n_made;
    s->n_refs = 1;
    return s;
}

/* The principal's share with one more reference, made if it is new. NULL: no memory. The lock is
 * held. */
static struct share *principal_open(struct share_table *t, const struct principal *who)
{
    struct share *s;
    LIST_FOREACH(s, &t->principals, entry) {
        if (principal_is_same(&s->who, who)) {
            s->n_refs++;
            return s;
        }
    }
    s = share_new(t, who);
    if (s != NULL)
        LIST_INSERT_HEAD(&t->principals, s, entry);
    return s;
}

static void unref_locked(struct share *s)
{
    if (s == NULL || --s->n_refs > 0)
        return;
    if (s->principal == NULL)
        LIST_REMOVE(s, entry);
    unref_locked(s->principal);
    free(s);
}

struct share *share_open(struct share_table *t, const struct principal *who)
{
    pthread_mutex_lock(&t->lock);
    struct share *principal = principal_open(t, who), *s = NULL;
    if (principal != NULL)
        s = share_new(t, who);
    if (s != NULL)
        s->principal = principal;
    else
        unref_locked(principal);
    pthread_mutex_unlock(&t->lock);
    return s;
}

void share_ref(struct share *s)
{
    pthread_mutex_lock(&s->table->lock);
    s->n_refs++;
    pthread_mutex_unlock(&s->table->lock);
}

void share_unref(struct share *s)
{
    if (s == NULL)
        return;
    struct share_table *t = s->table;
    pthread_mutex_lock(&t->lock);
    unref_locked(s);
    pthread_mutex_unlock(&t->lock);
}

static bool is_allowed(const struct share *s, uint64_t held, uint64_t n, uint64_t n_free,
                       uint64_t n_total)
{
    bool is_peer = s->principal != NULL;
    uint32_t percent = atomic_load_explicit(
        is_peer ? &s->table->peer_percent : &s->table->principal_percent, memory_order_relaxed);
    if (held == 0 || (is_peer && held + n <= n_total / SURE_PART))
        return true;
    if (is_peer && percent < 100 && n_free < n + n_total / SPARED_PART)
        return false;
    return (held + n) * 100 <= percent * (held + n_free);
}

const struct share *share_take(struct share *s, enum share_kind kind, uint64_t n, uint64_t n_free,
                               uint64_t n_total)
{
    for (struct share *at = s; at != NULL; at = at->principal) {
        uint64_t held = atomic_fetch_add_explicit(&at->held[kind], n, memory_order_relaxed);
        if (is_allowed(at, held, n, n_free, n_total))
            continue;
        for (struct share *back = s; back != at->principal; back = back->principal)
            atomic_fetch_sub_explicit(&back->held[kind], n, memory_order_relaxed);
        return at;
    }
    return NULL;
}

void share_add(struct share *s, enum share_kind kind, uint64_t n)
{
    for (; s != NULL; s = s->principal)
        atomic_fetch_add_explicit(&s->held[kind], n, memory_order_relaxed);
}

void share_give(struct share *s, enum share_kind kind, uint64_t n)
{
    for (; s != NULL; s = s->principal)
        atomic_fetch_sub_explicit(&s->held[kind], n, memory_order_relaxed);
}

uint64_t share_held(const struct share *s, enum share_kind kind)
{
    return s == NULL ? 0 : atomic_load_explicit(&s->held[kind], memory_order_relaxed);
}

const char *share_say(const struct share *holder, enum share_kind kind, uint64_t n_free,
                      char out[SHARE_TEXT_BYTES])
{
    static const struct {
        const char *what, *setting;
    } kinds[] = {
        [SHARE_PEERS] = {"connections", "listen.max_peers"},
        [SHARE_SESSIONS] = {"sessions", "engine.max_sessions"},
        [SHARE_REQUESTS] = {"requests in the queue", "engine.max_queue_requests"},
        [SHARE_QUEUE_BYTES] = {"bytes in the queue", "engine.max_queue"},
        [SHARE_LARGE_BYTES] = {"bytes of message buffers", "cache.io_memory"},
        [SHARE_SMALL_BYTES] = {"bytes of message buffers", "cache.io_memory"},
        [SHARE_MESSAGES] = {"messages and unread replies", "engine.max_queue_requests"},
        [SHARE_SHM_BYTES] = {"bytes of shared memory", "listen.shm_memory"},
    };
    char who[PRINCIPAL_TEXT_BYTES] = "this connection";
    bool is_principal = holder->principal == NULL;
    if (is_principal && holder->who.kind == PRINCIPAL_USER)
        snprintf(who, sizeof who, "uid %ld", (long)holder->who.uid);
    else if (is_principal)
        principal_format(&holder->who, who);
    snprintf(out, SHARE_TEXT_BYTES,
             "%s has %" PRIu64 " %s; the %" PRIu64 " that %s leaves are for others (listen.%s)",
             who, share_held(holder, kind), kinds[kind].what, n_free, kinds[kind].setting,
             is_principal ? "principal_share" : "peer_share");
    return out;
}
