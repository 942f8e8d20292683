/* weights.c: what pools' heads are projected with: kept for each daemon that will have the pool. */
#include <stdlib.h>
#include <string.h>

#include "cluster_internal.h"

/* With the cluster's lock. NULL: not given. */
static struct layer_weights *find(const struct attn_cluster *c, const char *pool, uint32_t layer)
{
    struct layer_weights *w = c->weights;
    while (w != NULL && (w->layer != layer || strcmp(w->pool, pool) != 0))
        w = w->next;
    return w;
}

static attn_status keep(struct attn_cluster *c, const char *pool, uint32_t layer,
                        const void *weights, uint64_t n_bytes)
{
    attn_status st = ATTN_OK;
    pthread_mutex_lock(&c->lock);
    struct layer_weights *w = find(c, pool, layer);
    if (w == NULL) {
        w = calloc(1, sizeof *w + strlen(pool) + 1);
        if (w != NULL) {
            strcpy(w->pool, pool);
            w->layer = layer;
            w->next = c->weights;
            c->weights = w;
        }
    }
    if (w != NULL) {
        w->bytes = weights;
        w->n_bytes = n_bytes;
    } else {
        st = fail(ATTN_ENOMEM, "no memory");
    }
    pthread_mutex_unlock(&c->lock);
    return st;
}

attn_status weights_give(struct attn_cluster *c, const char *name, attn_pool *pool)
{
    attn_status st = ATTN_OK;
    pthread_mutex_lock(&c->lock);
    for (struct layer_weights *w = c->weights; w != NULL && st == ATTN_OK; w = w->next)
        if (strcmp(w->pool, name) == 0)
            st = attn_pool_weights(pool, w->layer, w->bytes, w->n_bytes);
    pthread_mutex_unlock(&c->lock);
    return st;
}

void weights_free(struct attn_cluster *c)
{
    for (struct layer_weights *w = c->weights, *next; w != NULL; w = next) {
        next = w->next;
        free(w);
    }
}

attn_status attn_cluster_weights(attn_cluster *c, const char *pool, uint32_t layer,
                                 const void *weights, uint64_t n_bytes)
{
    if (c == NULL || pool == NULL || weights == NULL)
        return fail(ATTN_EINVAL, "%s is NULL", c == NULL ? "c" : pool == NULL ? "pool" : "weights");
    /* first, so that a pool that is made meanwhile has them */
    attn_status st = keep(c, pool, layer, weights, n_bytes);
    pthread_mutex_lock(&c->lock);
    struct host *h = c->hosts; /* others come in front, and none goes */
    pthread_mutex_unlock(&c->lock);
    for (; h != NULL && st == ATTN_OK; h = h->next) {
        pthread_mutex_lock(&h->lock);
        for (struct pool_handle *p = h->pools; p != NULL && st == ATTN_OK; p = p->next) {
            if (p->is_retired || strcmp(p->name, pool) != 0)
                continue;
            st = attn_pool_weights(p->pool, layer, weights, n_bytes);
            if (st != ATTN_OK)
                st = fail_at(h);
        }
        pthread_mutex_unlock(&h->lock);
    }
    return st;
}
