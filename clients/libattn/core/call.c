/* call.c: calls that send one request and wait for its answer, and which clients may be called. */
#include "clients/libattn/core/core.h"

#include <stdatomic.h>

static atomic_uint fork_generation;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void forked(void)
{
    atomic_fetch_add(&fork_generation, 1);
}

static void fork_init(void)
{
    pthread_atfork(NULL, NULL, forked);
}

uint32_t client_fork_generation(void)
{
    pthread_once(&fork_once, fork_init);
    return atomic_load(&fork_generation);
}

bool client_is_ours(const struct attn_client *c)
{
    return c->fork_generation == atomic_load_explicit(&fork_generation, memory_order_relaxed);
}

attn_status client_check(const struct attn_client *c)
{
    if (c == NULL)
        return error_set(ATTN_EINVAL, "client is NULL");
    if (!client_is_ours(c))
        return error_set(ATTN_EINVAL, "client was opened before fork and is the parent's");
    return ATTN_OK;
}

/* How many of the request's ids a session remembers, at most: see docs/protocol/replies.md. */
static uint32_t n_known(const Attnd__Request *header)
{
    switch (header->body_case) {
    case ATTND__REQUEST__BODY_CALLS:
        return (uint32_t)header->calls->n_calls;
    case ATTND__REQUEST__BODY_OPEN:
    case ATTND__REQUEST__BODY_FORK:
    case ATTND__REQUEST__BODY_ADOPT:
    case ATTND__REQUEST__BODY_POOL_CREATE:
        return 1;
    default:
        return 0;
    }
}

/* Makes the request once its ids can't make the session forget those of others in flight. */
static attn_status request_new(struct attn_client *c, const Attnd__Request *header,
                               uint64_t timeout_us, struct client_request **out_r)
{
    uint64_t began_ns = attn_now_ns();
    if (timeout_us == 0)
        timeout_us = c->default_timeout_us;
    for (;;) {
        uint64_t now = attn_now_ns(), passed_us = (now - began_ns) / 1000;
        if (passed_us >= timeout_us)
            return error_set(ATTN_ETIMEDOUT, "requests before it were not answered within %llu ms",
                             (unsigned long long)(timeout_us / 1000));
        attn_status st = client_request_new(c, timeout_us - passed_us, n_known(header), out_r);
        if (st != ATTN_OK || *out_r != NULL)
            return st;
        uint64_t left_us = timeout_us - passed_us, tick_us = CLIENT_TICK_NS / 1000;
        client_request_poll(c, now + (left_us < tick_us ? left_us : tick_us) * 1000, NULL);
    }
}

attn_status client_call(struct attn_client *c, Attnd__Request *header, uint64_t timeout_us,
                        attn_status (*take)(struct client_request *, const struct wire_reply *),
                        void *take_arg)
{
    return client_call_bulk(c, header, NULL, timeout_us, take, take_arg);
}

attn_status client_call_bulk(struct attn_client *c, Attnd__Request *header,
                             const struct client_bulk *bulk, uint64_t timeout_us,
                             attn_status (*take)(struct client_request *,
                                                 const struct wire_reply *),
                             void *take_arg)
{
    struct client_request *r;
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    if (!client_request_may_wait(c))
        return error_set(ATTN_EINVAL, "a call that waits was made inside a completion callback");
    st = request_new(c, header, timeout_us, &r);
    if (st != ATTN_OK)
        return st;
    r->header = header;
    r->bulk = bulk;
    r->take = take;
    r->take_arg = take_arg;
    st = client_request_start(r);
    if (st == ATTN_OK) {
        client_request_wait(r);
        st = error_from_request(r);
    }
    client_request_free(r);
    return st;
}

struct attn_client_info client_info(struct attn_client *c)
{
    pthread_mutex_lock(&c->lock);
    struct attn_client_info info = c->info;
    pthread_mutex_unlock(&c->lock);
    return info;
}
