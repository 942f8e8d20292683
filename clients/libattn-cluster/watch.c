/* watch.c: the thread that reads the registry, as clients/cluster/src/attnd_cluster/members.py.
 *
 * A member whose lease ended is a suspect: nothing new goes there, what is there goes on, until its
 * fate is decided. Who saw the lease end while the registry was there decides at once; who was
 * without it, or away itself, gives the member's agent GRACE first.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "cluster_internal.h"
#include "proto/attn_time.h"

#define GRACE_NS 10000000000u
#define BACK "back:"

struct watch {
    struct attn_cluster *c;
    char store[64];
    uint64_t lost_at_ns, heard_at_ns; /* 0: never lost */
};

void watch_wait(struct attn_cluster *c, uint64_t us)
{
    uint64_t at = attn_now_ns() + us * 1000;
    struct timespec until = {(time_t)(at / 1000000000u), (long)(at % 1000000000u)};
    pthread_cond_timedwait(&c->changed, &c->lock, &until);
}

/* Whether one registration goes on with another, at the same place. */
static bool goes_on(const json_t *member, const json_t *old)
{
    const char *before = text_of(old, "registration");
    bool is_same = strcmp(text_of(member, "registration"), before) == 0;
    size_t i;
    json_t *was;
    json_array_foreach(json_object_get(member, "was"), i, was) is_same |=
        json_is_string(was) && strcmp(json_string_value(was), before) == 0;
    return is_same && strcmp(text_of(member, "url"), text_of(old, "url")) == 0;
}

static void suspect(struct attn_cluster *c, const char *name, json_t *record, bool is_awaited)
{
    json_object_set_new(c->suspects, name,
                        json_pack("{s:O,s:I,s:b}", "record", record, "since",
                                  (json_int_t)attn_now_ns(), "is_awaited", is_awaited));
}

/* Takes what the registry has now. */
static void take(struct attn_cluster *c, json_t *members)
{
    const char *name;
    json_t *record;
    pthread_mutex_lock(&c->lock);
    json_object_foreach(c->now, name, record)
    {
        if (json_object_get(members, name) == NULL)
            suspect(c, name, record, false);
    }
    json_object_foreach(members, name, record)
    {
        const json_t *old = json_object_get(c->now, name);
        if (old == NULL)
            old = json_object_get(json_object_get(c->suspects, name), "record");
        if (old != NULL && !goes_on(record, old))
            host_end(c, name); /* and another came in its place */
        json_object_del(c->suspects, name);
        host_of(c, name, record);
    }
    json_decref(c->now);
    c->now = members;
    c->is_known = true;
    c->is_frozen = false;
    c->why[0] = '\0';
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

/* Decides of suspects as far as the time for it had come at `now`, before the registry was read:
 * what an agent wrote until then was seen. Only this thread changes them. */
static void judge(struct watch *w, uint64_t now)
{
    struct attn_cluster *c = w->c;
    bool is_calm = w->lost_at_ns == 0 || now > w->lost_at_ns + GRACE_NS;
    const char *name;
    void *next;
    json_t *one;
    json_object_foreach_safe(c->suspects, next, name, one)
    {
        json_t *record = json_object_get(one, "record");
        uint64_t since = (uint64_t)json_integer_value(json_object_get(one, "since"));
        bool may_wait = json_is_true(json_object_get(one, "is_awaited")) || !is_calm;
        char fate[FATE_BYTES] = "dead";
        if (may_wait && now < since + GRACE_NS)
            continue;
        if (!c->registry->is_static &&
            !c->registry->decide(c->registry, text_of(record, "registration"), 2 * c->idle_us,
                                 fate)) {
            w->lost_at_ns = attn_now_ns();
            return;
        }
        pthread_mutex_lock(&c->lock);
        if (strncmp(fate, BACK, strlen(BACK)) == 0) {
            json_t *again = json_copy(record);
            json_object_set_new(again, "registration", json_string(fate + strlen(BACK)));
            suspect(c, name, again, true);
            json_decref(again);
        } else {
            host_end(c, name);
            json_object_del(c->suspects, name);
        }
        pthread_cond_broadcast(&c->changed);
        pthread_mutex_unlock(&c->lock);
    }
}

static void look(struct watch *w)
{
    struct attn_cluster *c = w->c;
    char store[64] = "", why[WHY_BYTES] = "";
    uint64_t asked_at = attn_now_ns();
    json_t *members = c->registry->read(c->registry, 2 * c->idle_us, store, why);
    uint64_t now = attn_now_ns();
    if (members == NULL) {
        w->lost_at_ns = now;
        pthread_mutex_lock(&c->lock);
        c->is_frozen = true;
        memcpy(c->why, why, sizeof why);
        pthread_cond_broadcast(&c->changed);
        pthread_mutex_unlock(&c->lock);
        return;
    }
    /* this process was away, and others may have been, too; or it is another registry */
    bool was_away = w->heard_at_ns != 0 && now - w->heard_at_ns > 2000 * c->idle_us;
    if (was_away || (w->store[0] != '\0' && strcmp(w->store, store) != 0))
        w->lost_at_ns = now;
    w->heard_at_ns = now;
    memcpy(w->store, store, sizeof store);
    take(c, members);
    judge(w, asked_at);
}

void *watch_run(void *cluster)
{
    struct attn_cluster *c = cluster;
    struct watch w = {.c = c};
    while (!atomic_load(&c->ends)) {
        uint64_t next = attn_now_ns() + 1000 * c->idle_us;
        look(&w);
        pthread_mutex_lock(&c->lock);
        for (uint64_t now; !atomic_load(&c->ends) && (now = attn_now_ns()) < next;)
            watch_wait(c, (next - now) / 1000 + 1);
        pthread_mutex_unlock(&c->lock);
    }
    return NULL;
}
