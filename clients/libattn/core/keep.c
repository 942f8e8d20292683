/* keep.c: the keeper, a thread of each client that renews the session's lease while no call does.
 *
 * The keeper reads the answers to its renewals itself, as the leader (lead.c), but only while
 * nothing is in flight and no thread waits; it stops when that changes. If it has read a reply to a
 * request by then, it leaves that to the next leader, so that callbacks run only on the threads
 * that attn.h promises.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#include "clients/libattn/core/core.h"

#define RENEWALS_PER_LEASE                                                                         \
    6 /* looks at what was sent; an idle client renews every third of a lease */
#define PATIENCE_NS 1000000000u /* for an answer, or a new connection */

/* True: another thread has to read now, or there is nothing left to read. */
static bool must_leave_locked(const struct attn_client *c)
{
    return c->is_closing || c->is_renewed || c->held.base != NULL || !LIST_EMPTY(&c->waiters) ||
           !TAILQ_EMPTY(&c->in_flight);
}

/* Reads until the renewal is answered; connects before, if need be. As the leader. */
static void lead(struct attn_client *c, bool is_sent)
{
    uint64_t until_ns = attn_now_ns() + PATIENCE_NS;
    for (bool is_over = false; !is_over;) {
        struct client_message m;
        bool has_message = c->t->ops->recv(c->t, &m);
        if (has_message && m.id == CLIENT_RENEWAL_ID)
            renewal_take(c, &m);
        else if (has_message)
            c->held = m;
        if (!is_sent)
            is_sent = renewal_send(c);
        uint64_t now = attn_now_ns();
        pthread_mutex_lock(&c->lock);
        is_over = must_leave_locked(c) || now >= until_ns;
        pthread_mutex_unlock(&c->lock);
        if (!is_over && !has_message)
            c->t->ops->wait(c->t, CLIENT_TICK_NS);
    }
    if (c->held.base != NULL)
        c->t->ops->wake(c->t); /* makes the descriptor readable for what is held */
    pthread_mutex_lock(&c->lock);
    client_request_leave_locked(c);
    pthread_mutex_unlock(&c->lock);
}

static void renew(struct attn_client *c)
{
    pthread_mutex_lock(&c->lock);
    c->is_renewed = false;
    bool may_lead = !c->is_led && !must_leave_locked(c);
    if (may_lead) {
        c->is_led = c->is_kept = true;
        c->leader = pthread_self();
    }
    pthread_mutex_unlock(&c->lock);
    bool is_sent = renewal_send(c);
    if (may_lead)
        lead(c, is_sent);
}

static void *run(void *arg)
{
    struct attn_client *c = arg;
    pthread_mutex_lock(&c->lock);
    while (!c->is_closing) {
        uint64_t n_sent = c->counters.n_sent;
        uint64_t due_ns = attn_now_ns() + c->info.lease_us * 1000u / RENEWALS_PER_LEASE;
        struct timespec ts = {.tv_sec = (time_t)(due_ns / 1000000000u),
                              .tv_nsec = (long)(due_ns % 1000000000u)};
        while (!c->is_closing &&
               pthread_cond_timedwait(&c->keeper_cond, &c->lock, &ts) != ETIMEDOUT)
            ;
        if (c->is_closing || c->is_session_gone || c->counters.n_sent != n_sent)
            continue;
        pthread_mutex_unlock(&c->lock);
        renew(c);
        pthread_mutex_lock(&c->lock);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

attn_status keeper_start(struct attn_client *c)
{
    pthread_condattr_t attr;
    sigset_t all, before;
    if (c->info.lease_us == 0)
        return ATTN_OK;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->keeper_cond, &attr);
    pthread_condattr_destroy(&attr);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&c->keeper, NULL, run, c);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    c->has_keeper = error == 0;
    return error == 0
               ? ATTN_OK
               : error_set(ATTN_ENOMEM, "no thread to keep the session alive: %s", strerror(error));
}

void keeper_stop(struct attn_client *c)
{
    if (!c->has_keeper)
        return;
    pthread_mutex_lock(&c->lock);
    c->is_closing = true;
    pthread_cond_signal(&c->keeper_cond);
    bool is_kept = c->is_kept;
    pthread_mutex_unlock(&c->lock);
    if (is_kept)
        c->t->ops->wake(c->t);
    pthread_join(c->keeper, NULL);
    c->has_keeper = false;
    if (c->held.base != NULL)
        c->t->ops->message_free(c->t, c->held.base);
    c->held.base = NULL;
}
