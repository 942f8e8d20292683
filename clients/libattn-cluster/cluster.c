/* cluster.c: connect, close, who is there. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster_internal.h"
#include "proto/attn_time.h"

bool attn_cluster_may_follow(attn_status st)
{
    return st == ATTN_ENOTFOUND || st == ATTN_ESTALE || st == ATTN_EMOVED || st == ATTN_ECONN ||
           st == ATTN_ETIMEDOUT;
}

static attn_status set_options(struct attn_cluster *c, const struct attn_cluster_options *o)
{
    static const struct attn_cluster_options defaults = {.struct_size = sizeof defaults};
    o = o != NULL ? o : &defaults;
    if (o->struct_size != sizeof *o)
        return fail(ATTN_EINVAL, "attn_cluster_options.struct_size is %u, must be %zu",
                    o->struct_size, sizeof *o);
    uint32_t n = o->client != NULL ? o->client->struct_size : 0;
    if (n > sizeof c->client)
        return fail(ATTN_EINVAL, "attn_client_options.struct_size is %u, must be %zu", n,
                    sizeof c->client);
    if (n > 0)
        memcpy(&c->client, o->client, n);
    c->client.struct_size = sizeof c->client;
    c->client.fail_fast = 1; /* a member is there or is not */
    c->timeout_us = o->timeout_us != 0 ? o->timeout_us : 10000000;
    c->idle_us = o->idle_us != 0 ? o->idle_us : 1000000;
    c->probe_us = o->probe_us != 0 ? o->probe_us : 500000;
    c->rebuild = o->rebuild;
    c->user = o->user;
    return ATTN_OK;
}

static attn_status start_thread(struct attn_cluster *c)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&c->thread, NULL, watch_run, c);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc == 0 ? ATTN_OK : fail(ATTN_ENOMEM, "no thread: %s", strerror(rc));
}

static void free_cluster(struct attn_cluster *c)
{
    for (struct host *h = c->hosts, *next; h != NULL; h = next) {
        next = h->next;
        host_free(h);
    }
    if (c->registry != NULL)
        c->registry->close(c->registry);
    weights_free(c);
    json_decref(c->now);
    json_decref(c->suspects);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c->url);
    free(c);
}

static attn_status await_members(struct attn_cluster *c)
{
    uint64_t until = until_of(c, 0);
    attn_status st = ATTN_OK;
    pthread_mutex_lock(&c->lock);
    while (json_object_size(c->now) == 0 && attn_now_ns() < until)
        watch_wait(c, left_us(until));
    if (json_object_size(c->now) == 0)
        st = fail(ATTN_ECONN, "%.100s has no members: %.120s", c->url,
                  c->is_known && !c->is_frozen ? "nobody has registered there"
                  : c->why[0] != '\0'          ? c->why
                                               : "it was not read yet");
    pthread_mutex_unlock(&c->lock);
    return st;
}

attn_status attn_cluster_connect(const char *url, const struct attn_cluster_options *o,
                                 attn_cluster **out_cluster)
{
    static const char scheme[] = "cluster+";
    if (out_cluster == NULL)
        return fail(ATTN_EINVAL, "out_cluster is NULL");
    char why[WHY_BYTES] = "no memory";
    if (url == NULL || strncmp(url, scheme, strlen(scheme)) != 0)
        return fail(ATTN_EINVAL, "url is %.100s, expected cluster+etcd:// or cluster+file://",
                    url != NULL ? url : "NULL");
    struct attn_cluster *c = calloc(1, sizeof *c);
    if (c == NULL)
        return fail(ATTN_ENOMEM, "no memory");
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&c->lock, NULL);
    c->url = strdup(url);
    c->now = json_object();
    c->suspects = json_object();
    attn_status st = c->url != NULL && c->now != NULL && c->suspects != NULL
                         ? set_options(c, o)
                         : fail(ATTN_ENOMEM, "no memory");
    if (st == ATTN_OK) {
        st = registry_open(url + strlen(scheme), &c->ends, &c->registry, why);
        st = st == ATTN_OK ? start_thread(c) : fail(st, "%s", why);
    }
    if (st != ATTN_OK) {
        free_cluster(c);
        return st;
    }
    st = await_members(c);
    if (st != ATTN_OK) {
        attn_cluster_close(c);
        return st;
    }
    *out_cluster = c;
    return ATTN_OK;
}

void attn_cluster_close(attn_cluster *c)
{
    if (c == NULL)
        return;
    pthread_mutex_lock(&c->lock);
    atomic_store(&c->ends, true);
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
    free_cluster(c);
}

attn_status attn_cluster_members(attn_cluster *c, char **out_json)
{
    if (c == NULL || out_json == NULL)
        return fail(ATTN_EINVAL, "%s is NULL", c == NULL ? "c" : "out_json");
    pthread_mutex_lock(&c->lock);
    json_t *all =
        json_pack("{s:O,s:b,s:s}", "members", c->now, "is_frozen", c->is_frozen, "why", c->why);
    char *text = all != NULL ? json_dumps(all, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    json_decref(all);
    pthread_mutex_unlock(&c->lock);
    if (text == NULL)
        return fail(ATTN_ENOMEM, "no memory");
    *out_json = text;
    return ATTN_OK;
}
