/* hold.c: which pools a client's handles hold. A session holds a pool once, however many handles it
 * has of it, so the last of them lets go: of what it held by requests that were answered until
 * then. One whose answer is on its way holds on. */
#include <stdlib.h>

#include "clients/libattn/client.h"

static struct client_hold *find_locked(const struct attn_pool *p)
{
    struct client_hold *h;
    LIST_FOREACH(h, &p->client->holds, link) {
        if (h->session_number == p->session_number && h->pool == p->id)
            break;
    }
    return h;
}

void hold_add(struct attn_pool *p, struct client_hold *hold, uint64_t request)
{
    struct attn_client *c = p->client;
    pthread_mutex_lock(&c->lock);
    struct client_hold *h = find_locked(p);
    if (h == NULL) {
        h = hold;
        *h = (struct client_hold){.session_number = p->session_number, .pool = p->id};
        LIST_INSERT_HEAD(&c->holds, h, link);
    }
    h->n_handles++;
    h->request = request > h->request ? request : h->request;
    pthread_mutex_unlock(&c->lock);
    if (h != hold)
        free(hold);
}

void holds_free(struct attn_client *c)
{
    while (!LIST_EMPTY(&c->holds)) {
        struct client_hold *h = LIST_FIRST(&c->holds);
        LIST_REMOVE(h, link);
        free(h);
    }
}

/* The handle counts no more. The request up to which the session lets go; 0: others hold on. */
static uint64_t take_from_count(struct attn_pool *p)
{
    uint64_t request = 0;
    pthread_mutex_lock(&p->client->lock);
    struct client_hold *h = find_locked(p);
    if (h != NULL && !p->is_released) {
        p->is_released = true;
        request = --h->n_handles == 0 ? h->request : 0;
    }
    pthread_mutex_unlock(&p->client->lock);
    return request;
}

/* The session has let go up to a request, or it is not known to have: then the handle counts
 * again. Handles may have come and gone meanwhile, and another of them may have done the same. */
static void note_answer(struct attn_pool *p, uint64_t request, bool is_done)
{
    pthread_mutex_lock(&p->client->lock);
    struct client_hold *h = find_locked(p);
    if (h != NULL && !is_done) {
        h->n_handles++;
        p->is_released = false;
    } else if (h != NULL && h->n_handles == 0 && h->request == request) {
        LIST_REMOVE(h, link);
        free(h);
    }
    pthread_mutex_unlock(&p->client->lock);
}

attn_status attn_pool_release(attn_pool *p, uint64_t timeout_us)
{
    if (p == NULL)
        return error_set(ATTN_EINVAL, "pool is NULL");
    attn_status st = client_check(p->client);
    if (st != ATTN_OK)
        return st;
    if (pool_check(p) != ATTN_OK)
        return ATTN_OK; /* went with its session */
    uint64_t request = take_from_count(p);
    if (request == 0)
        return ATTN_OK;
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__PoolRelease release = ATTND__POOL_RELEASE__INIT;
    release.pool = p->id;
    release.request = request;
    req.body_case = ATTND__REQUEST__BODY_POOL_RELEASE;
    req.pool_release = &release;
    st = client_call(p->client, &req, timeout_us, NULL, NULL);
    if (st == ATTN_ENOTFOUND)
        st = ATTN_OK; /* it has gone, or the session has */
    note_answer(p, request, st == ATTN_OK);
    return st;
}
