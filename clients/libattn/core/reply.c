/* reply.c: what the daemon's answers mean for their requests: a result, asking again, or asking
 * what is gone. On the leader.
 */
#include <stdio.h>
#include <string.h>

#include "clients/libattn/core/core.h"

#define ARENA_BYTES 4096

/* True if the request is to be asked again, later. */
static bool retry_locked(struct client_request *r)
{
    bool is_patient = r->bulk != NULL && r->result.status == ATTN_EOVERLOAD;
    if (!is_patient && (r->n_retries_left == 0 || !attn_status_is_retryable(r->result.status)))
        return false;
    uint64_t delay_ns = r->result.retry_after_us * 1000u;
    if (delay_ns < CLIENT_MIN_RETRY_NS)
        delay_ns = CLIENT_MIN_RETRY_NS;
    uint64_t now = attn_now_ns();
    if (delay_ns >= r->deadline_ns || now >= r->deadline_ns - delay_ns)
        return false;
    r->n_retries_left -= !is_patient;
    r->resend_ns = now + delay_ns;
    return true;
}

/* A daemon that has lost its device ends. If its successor will know the session, the request waits
 * for the connection to that one, and is sent again. */
static bool wait_for_successor_locked(struct client_request *r)
{
    struct attn_client *c = r->client;
    return r->result.status == ATTN_EDEVICE && c->is_kept_daemon && r->session == c->info.session &&
           attn_now_ns() < r->deadline_ns;
}

/* A close that was sent twice and then found nothing was carried out the first time. */
static bool is_closed_already(const struct client_request *r)
{
    attn_status st = r->result.status;
    return (st == ATTN_ENOTFOUND || st == ATTN_EMOVED) && r->header != NULL &&
           r->result.n_sends > 1 && r->header->body_case == ATTND__REQUEST__BODY_CLOSE;
}

/* Sets the result of a pinned request from its reply. */
static void take_reply(struct client_request *r, struct client_message *m)
{
    uint8_t memory[ARENA_BYTES];
    char why[ATTN_MESSAGE_BYTES - 32] = ""; /* leaves room for words before it */
    struct wire_arena arena;
    struct wire_reply reply;
    wire_arena_init(&arena, memory, sizeof memory, WIRE_ARENA_LIMIT_BYTES);
    attn_status st = wire_reply_decode(m->base, m->bytes, &arena, &reply, why, sizeof why);
    const Attnd__Reply *h = st == ATTN_OK ? reply.header : NULL;
    if (st == ATTN_OK && (reply.request_id != r->id || h->status > 0)) {
        snprintf(why, sizeof why, "request id %llu and status %d, asked as %llu",
                 (unsigned long long)reply.request_id, (int)h->status, (unsigned long long)r->id);
        st = ATTN_EPROTO;
    }
    r->has_item_status = false;
    r->result.n_failed = r->step.n_items;
    if (st != ATTN_OK) {
        r->result.status = st;
        snprintf(r->result.message, sizeof r->result.message, "malformed reply: %s", why);
    } else {
        r->result.queue_ns = h->queue_ns;
        r->result.device_ns = h->device_ns;
        r->result.retry_after_us = h->retry_after_us;
        st = (attn_status)h->status;
        client_request_set_result(
            r, st, st != ATTN_OK && h->message[0] == '\0' ? attn_status_message(st) : h->message);
        if (r->take != NULL && (st == ATTN_OK || r->is_step))
            r->result.status = r->take(r, &reply);
        if (is_closed_already(r))
            client_request_set_result(r, ATTN_OK, "");
    }
    wire_arena_reset(&arena);
}

/* Whether a request that found nothing there knows what is gone; else it has to be probed. */
static bool knows_gone(struct client_request *r)
{
    int asked = r->is_step ? ATTND__REQUEST__BODY_STEP : (int)r->header->body_case;
    if (r->has_item_status) {
        r->gone = ATTN_GONE_SEQ;
        return true;
    }
    switch (asked) {
    case ATTND__REQUEST__BODY_HELLO:
    case ATTND__REQUEST__BODY_GOODBYE:
    case ATTND__REQUEST__BODY_POOL_CREATE:
    case ATTND__REQUEST__BODY_STATS:
    case ATTND__REQUEST__BODY_DRAIN:
    case ATTND__REQUEST__BODY_INSPECT:
    case ATTND__REQUEST__BODY_RELOAD:
    case ATTND__REQUEST__BODY_CALLS:
        r->gone = ATTN_GONE_SESSION;
        return true;
    case ATTND__REQUEST__BODY_STEP:
    case ATTND__REQUEST__BODY_OPEN:
    case ATTND__REQUEST__BODY_PROBE:
    case ATTND__REQUEST__BODY_POOL_DESCRIBE:
    case ATTND__REQUEST__BODY_POOL_RELEASE:
    case ATTND__REQUEST__BODY_POOL_RESERVE:
    case ATTND__REQUEST__BODY_WEIGHTS:
        r->gone = ATTN_GONE_POOL;
        return false;
    default:
        r->gone = ATTN_GONE_SEQ;
        return false;
    }
}

/* Says in r->gone what is gone, as far as it is known. True: the daemon has to be asked. */
static bool probe_locked(struct client_request *r)
{
    struct attn_client *c = r->client;
    if (r->result.status != ATTN_ENOTFOUND)
        return false;
    if (r->session == c->info.session && c->is_session_gone)
        r->gone = ATTN_GONE_SESSION;
    else if (knows_gone(r))
        c->is_session_gone |= r->gone == ATTN_GONE_SESSION && r->session == c->info.session;
    else
        return r->session == c->info.session;
    return false;
}

/* A renewal was answered: requests that were probed can be completed. Without the lock. */
static void finish_probed(struct attn_client *c)
{
    struct request_list known = TAILQ_HEAD_INITIALIZER(known);
    pthread_mutex_lock(&c->lock);
    for (struct client_request *r = TAILQ_FIRST(&c->in_flight), *next; r != NULL; r = next) {
        next = TAILQ_NEXT(r, link);
        if (r->state != REQUEST_PROBING)
            continue;
        if (c->is_session_gone && r->session == c->info.session)
            r->gone = ATTN_GONE_SESSION;
        client_request_unlink_locked(c, r);
        r->state = REQUEST_PINNED;
        TAILQ_INSERT_TAIL(&known, r, link);
    }
    pthread_mutex_unlock(&c->lock);
    client_request_finish_all(&known);
}

void client_request_take_message(struct attn_client *c, struct client_message *m)
{
    if (m->id == CLIENT_RENEWAL_ID) {
        renewal_take(c, m);
        finish_probed(c);
        return;
    }
    pthread_mutex_lock(&c->lock);
    struct client_request *r = c->slots[client_request_slot(m->id)];
    if (r == NULL || client_request_wire_id(r->id) != m->id || r->state == REQUEST_NEW ||
        r->state == REQUEST_PROBING || r->state == REQUEST_PINNED || r->state == REQUEST_DONE) {
        c->counters.n_stray++;
        pthread_mutex_unlock(&c->lock);
        c->t->ops->message_free(c->t, m->base);
        return;
    }
    client_request_set_state_locked(r, REQUEST_PINNED);
    pthread_mutex_unlock(&c->lock);

    take_reply(r, m);
    c->t->ops->message_free(c->t, m->base);

    pthread_mutex_lock(&c->lock);
    if (retry_locked(r)) {
        client_request_set_state_locked(r, REQUEST_DELAYED);
        c->counters.n_retried++;
        if (r->resend_ns < c->next_wake_ns)
            c->next_wake_ns = r->resend_ns;
        pthread_mutex_unlock(&c->lock);
        return;
    }
    if (wait_for_successor_locked(r)) {
        client_request_set_state_locked(r,
                                        REQUEST_SENT); /* over a connection that is about to end */
        pthread_mutex_unlock(&c->lock);
        return;
    }
    if (probe_locked(r)) {
        client_request_set_state_locked(r, REQUEST_PROBING);
        pthread_mutex_unlock(&c->lock);
        renewal_send(c); /* if it can't be sent, or is lost: again at the next tick */
        return;
    }
    client_request_unlink_locked(c, r);
    pthread_mutex_unlock(&c->lock);
    client_request_finish(r);
}
