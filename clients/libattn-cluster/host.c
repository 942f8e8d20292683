/* host.c: a client for each daemon, made when it is first wanted, and its pools. */
#include <stdlib.h>
#include <string.h>

#include "cluster_internal.h"
#include "proto/attn_time.h"

#define PAUSE_NS                                                                                   \
    1000000000u /* after a daemon did not answer: who comes meanwhile is told so at once */

void host_free(struct host *h)
{
    for (struct pool_handle *p = h->pools, *next; p != NULL; p = next) {
        next = p->next;
        attn_pool_close(p->pool);
        free(p);
    }
    attn_client_close(h->client);
    json_decref(h->record);
    pthread_mutex_destroy(&h->lock);
    free(h->name);
    free(h->url);
    free(h);
}

struct host *host_of(struct attn_cluster *c, const char *name, json_t *record)
{
    struct host *h = c->hosts;
    while (h != NULL && (h->is_gone || strcmp(h->name, name) != 0))
        h = h->next;
    if (h == NULL) {
        h = calloc(1, sizeof *h);
        if (h == NULL)
            return NULL;
        pthread_mutex_init(&h->lock, NULL);
        h->name = strdup(name);
        h->url = strdup(text_of(record, "url"));
        if (h->name == NULL || h->url == NULL) {
            host_free(h);
            return NULL;
        }
        h->next = c->hosts;
        c->hosts = h;
    }
    json_decref(h->record);
    h->record = json_incref(record);
    return h;
}

void host_end(struct attn_cluster *c, const char *name)
{
    for (struct host *h = c->hosts; h != NULL; h = h->next) {
        if (h->is_gone || strcmp(h->name, name) != 0)
            continue;
        h->is_gone = true;
        attn_client_give_up(atomic_load(&h->client)); /* what waits for it ends */
    }
}

void host_answered(struct host *h, attn_status st)
{
    atomic_store(&h->failed_at_ns, st == ATTN_ECONN || st == ATTN_ETIMEDOUT ? attn_now_ns() : 0);
}

bool host_is_silent(const struct host *h)
{
    uint64_t at = atomic_load(&h->failed_at_ns);
    return at != 0 && attn_now_ns() - at < PAUSE_NS;
}

static attn_status connect_host(struct attn_cluster *c, struct host *h, uint64_t timeout_us)
{
    attn_client *client = NULL;
    if (host_is_silent(h))
        return fail(ATTN_ECONN, "member %.60s (%.100s) did not answer a moment ago", h->name,
                    h->url);
    attn_status st = attn_client_open(h->url, &c->client, timeout_us, &client);
    host_answered(h, st);
    if (st != ATTN_OK)
        return fail_at(h);
    atomic_store(&h->client, client);
    pthread_mutex_lock(&c->lock);
    if (h->is_gone)
        attn_client_give_up(client);
    pthread_mutex_unlock(&c->lock);
    return ATTN_OK;
}

/* Another session, since the daemon was restarted without its cache. With the host's lock. */
static bool reopen(struct host *h, uint64_t timeout_us)
{
    if (attn_client_reopen(h->client, timeout_us) != ATTN_OK)
        return false;
    for (struct pool_handle *p = h->pools; p != NULL; p = p->next)
        p->is_retired = true;
    return true;
}

static attn_status create_pool(struct host *h, const struct attn_pool_spec *spec,
                               uint64_t timeout_us, attn_pool **out_pool)
{
    attn_status st = attn_pool_create(h->client, spec, timeout_us, out_pool);
    if (st == ATTN_ENOTFOUND && attn_last_error_gone() == ATTN_GONE_SESSION &&
        reopen(h, timeout_us))
        st = attn_pool_create(h->client, spec, timeout_us, out_pool);
    return st;
}

attn_status host_pool(struct attn_cluster *c, struct host *h, const struct attn_pool_spec *spec,
                      uint64_t timeout_us, attn_pool **out_pool)
{
    attn_status st = ATTN_OK;
    pthread_mutex_lock(&h->lock);
    if (atomic_load(&h->client) == NULL)
        st = connect_host(c, h, timeout_us);
    struct pool_handle *p = h->pools;
    while (st == ATTN_OK && p != NULL && (p->is_retired || strcmp(p->name, spec->name) != 0))
        p = p->next;
    if (st == ATTN_OK && p == NULL) {
        p = calloc(1, sizeof *p + strlen(spec->name) + 1);
        st = p != NULL ? create_pool(h, spec, timeout_us, &p->pool) : ATTN_ENOMEM;
        if (st == ATTN_OK)
            st = weights_give(c, spec->name, p->pool);
        if (st == ATTN_OK) {
            strcpy(p->name, spec->name);
            p->next = h->pools;
            h->pools = p;
        } else {
            st = p != NULL ? fail_at(h) : fail(ATTN_ENOMEM, "no memory");
            if (p != NULL)
                attn_pool_close(p->pool);
            free(p);
        }
    }
    if (st == ATTN_OK)
        *out_pool = p->pool;
    pthread_mutex_unlock(&h->lock);
    return st;
}

bool host_begin_anew(struct host *h, attn_pool *seen, uint64_t timeout_us)
{
    attn_gone gone = attn_last_error_gone();
    if (gone != ATTN_GONE_SESSION && gone != ATTN_GONE_POOL)
        return false;
    bool is_done = true;
    pthread_mutex_lock(&h->lock);
    for (struct pool_handle *p = h->pools; p != NULL; p = p->next) {
        if (p->pool != seen || p->is_retired)
            continue; /* another thread has seen to it */
        p->is_retired = gone == ATTN_GONE_POOL;
        is_done = p->is_retired || reopen(h, timeout_us);
    }
    pthread_mutex_unlock(&h->lock);
    return is_done;
}
