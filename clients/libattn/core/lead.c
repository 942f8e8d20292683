/* lead.c: which thread reads. One at a time does, the leader: any thread that waits while there is
 * no other leader. The others sleep on a condition of their own until their request is done, or
 * until the leader leaves and wakes one of them to be the next.
 */
#include "clients/libattn/core/core.h"

#define TURN_MESSAGES 32 /* read before deadlines are looked at */

/* Deadlines, retries that are due, connections that were lost. */
static void keep_time(struct attn_client *c, uint64_t now)
{
    struct request_list expired = TAILQ_HEAD_INITIALIZER(expired);
    pthread_mutex_lock(&c->lock);
    uint64_t generation = c->t->ops->generation(c->t);
    bool is_probing = false;
    bool is_unknown = c->info.session != 0 && generation != c->known_generation;
    bool is_hopeless =
        c->is_given_up || (c->fail_fast && generation == 0 && c->t->ops->n_failures(c->t) > 0);
    c->next_wake_ns = now + CLIENT_TICK_NS;
    for (struct client_request *r = TAILQ_FIRST(&c->in_flight), *next; r != NULL; r = next) {
        next = TAILQ_NEXT(r, link);
        is_probing |= r->state == REQUEST_PROBING;
        if (now >= r->deadline_ns || is_hopeless) {
            client_request_expire_locked(r);
            TAILQ_INSERT_TAIL(&expired, r, link);
            continue;
        }
        if (r->state == REQUEST_SENT && r->generation != generation) {
            client_request_set_state_locked(r, REQUEST_QUEUED);
            c->counters.n_resent++;
        } else if (r->state == REQUEST_DELAYED && now >= r->resend_ns) {
            client_request_set_state_locked(r, REQUEST_QUEUED);
        }
        uint64_t due = r->state == REQUEST_DELAYED && r->resend_ns < r->deadline_ns
                           ? r->resend_ns
                           : r->deadline_ns;
        if (due < c->next_wake_ns)
            c->next_wake_ns = due;
    }
    pthread_mutex_unlock(&c->lock);
    if ((is_probing || is_unknown) && renewal_send(c) && is_unknown) {
        pthread_mutex_lock(&c->lock);
        c->known_generation = generation;
        pthread_mutex_unlock(&c->lock);
    }
    client_request_finish_all(&expired);
}

static uint32_t read_some(struct attn_client *c)
{
    struct client_message m = c->held; /* the leader's, as the transport's side of reading */
    uint32_t n = 0;
    c->held.base = NULL;
    if (m.base != NULL)
        client_request_take_message(c, &m);
    while (n < TURN_MESSAGES && c->t->ops->recv(c->t, &m)) {
        client_request_take_message(c, &m);
        n++;
    }
    if (n == TURN_MESSAGES)
        c->t->ops->wake(c->t); /* there may be more, for which the descriptor is not readable */
    return n;
}

/* One turn of the leader: reads, keeps time, and sleeps until until_ns if there was nothing. */
static void lead(struct attn_client *c, uint64_t until_ns)
{
    uint32_t n = read_some(c);
    uint64_t now = attn_now_ns();
    pthread_mutex_lock(&c->lock);
    bool is_time = now >= c->next_wake_ns;
    bool is_queued = c->n_queued > 0;
    pthread_mutex_unlock(&c->lock);
    if (is_time)
        keep_time(c, now);
    if (is_time || is_queued)
        client_request_flush(c);
    pthread_mutex_lock(&c->lock);
    uint64_t wake_ns = c->next_wake_ns < until_ns ? c->next_wake_ns : until_ns;
    pthread_mutex_unlock(&c->lock);
    if (n > 0 || is_time || now >= until_ns)
        return;
    if (wake_ns > now)
        c->t->ops->wait(c->t, wake_ns - now);
    if (read_some(c) > 0)
        client_request_flush(c); /* what this made room for, before the caller has its answer */
}

static void follow_locked(struct attn_client *c, const struct client_request *r, uint64_t until_ns)
{
    struct waiter w = {.r = r};
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&w.cond, &attr);
    pthread_condattr_destroy(&attr);
    LIST_INSERT_HEAD(&c->waiters, &w, link);
    struct timespec ts = {.tv_sec = (time_t)(until_ns / 1000000000u),
                          .tv_nsec = (long)(until_ns % 1000000000u)};
    pthread_cond_timedwait(&w.cond, &c->lock, &ts);
    LIST_REMOVE(&w, link);
    pthread_cond_destroy(&w.cond);
}

/* Waits until r is done (r given) or anything completed (r NULL), at most until until_ns. */
static void wait_for(struct attn_client *c, struct client_request *r, uint64_t until_ns,
                     uint32_t *out_n)
{
    pthread_mutex_lock(&c->lock);
    uint64_t n_before = c->n_completed;
    bool is_first = true;
    while (r != NULL ? r->state != REQUEST_DONE : c->n_completed == n_before) {
        uint64_t now = attn_now_ns();
        if (now >= until_ns && !is_first) {
            if (r == NULL)
                break;
            /* its own clock, should the leader be away in a callback */
            if (r->state == REQUEST_QUEUED || r->state == REQUEST_SENT ||
                r->state == REQUEST_DELAYED || r->state == REQUEST_PROBING) {
                client_request_expire_locked(r);
                pthread_mutex_unlock(&c->lock);
                client_request_finish(r);
                pthread_mutex_lock(&c->lock);
                break;
            }
            until_ns = now + CLIENT_MIN_RETRY_NS; /* pinned: about to be done */
        }
        is_first = false;
        if (c->is_led) {
            if (c->is_kept)
                c->t->ops->wake(c->t); /* the keeper makes way */
            follow_locked(c, r, until_ns);
            continue;
        }
        c->is_led = true;
        c->leader = pthread_self();
        pthread_mutex_unlock(&c->lock);
        lead(c, until_ns);
        pthread_mutex_lock(&c->lock);
        c->is_led = false;
    }
    if (!c->is_led)
        client_request_leave_locked(c);
    if (out_n != NULL)
        *out_n = (uint32_t)(c->n_completed - n_before);
    pthread_mutex_unlock(&c->lock);
}

void client_request_leave_locked(struct attn_client *c)
{
    c->is_led = c->is_kept = false;
    if (!LIST_EMPTY(&c->waiters))
        pthread_cond_signal(&LIST_FIRST(&c->waiters)->cond); /* the next leader */
}

bool client_request_may_wait(struct attn_client *c)
{
    pthread_mutex_lock(&c->lock);
    bool is_leader = c->is_led && pthread_equal(c->leader, pthread_self());
    pthread_mutex_unlock(&c->lock);
    return !is_leader;
}

void client_request_wait(struct client_request *r)
{
    wait_for(r->client, r, r->deadline_ns, NULL);
}

void client_request_poll(struct attn_client *c, uint64_t until_ns, uint32_t *out_n)
{
    wait_for(c, NULL, until_ns, out_n);
}
