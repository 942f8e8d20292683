/* request.c: requests in flight: sending, reading, deadlines, sending again.
 *
 * One thread at a time reads: the leader, any thread that waits while nobody else does. The others
 * sleep on a condition of their own until their request is done or the leader leaves and hands over.
 * The lock is never held while bytes are copied, sent or received, or a callback runs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/client.h"

#define SLOT_BITS 10
#define ID_BITS 31 /* the SP header's id has one bit of its own */
#define REPLY_ARENA_BYTES 4096
#define REPLY_LIMIT_BYTES WIRE_ARENA_LIMIT_BYTES
#define TURN_MESSAGES 32 /* read before deadlines are looked at */

_Static_assert(1u << SLOT_BITS == ATTN_MAX_IN_FLIGHT, "a slot is the low bits of an id");

static uint32_t slot_of(uint64_t id)
{
    return (uint32_t)id & (ATTN_MAX_IN_FLIGHT - 1);
}

static uint32_t wire_id_of(uint64_t id)
{
    return (uint32_t)id & ((1u << ID_BITS) - 1);
}

/* ---- lists, under the lock ---- */

static void link_locked(struct attn_client *c, struct client_request *r)
{
    TAILQ_INSERT_TAIL(&c->in_flight, r, link);
    c->counters.n_in_flight++;
}

static void unlink_locked(struct attn_client *c, struct client_request *r)
{
    if (r->state == REQUEST_QUEUED)
        c->n_queued--;
    TAILQ_REMOVE(&c->in_flight, r, link);
    c->counters.n_in_flight--;
}

static void set_state_locked(struct client_request *r, enum client_request_state state)
{
    struct attn_client *c = r->client;
    c->n_queued += (state == REQUEST_QUEUED) - (r->state == REQUEST_QUEUED);
    r->state = state;
}

static struct client_request *find_locked(struct attn_client *c, uint64_t id)
{
    struct client_request *r = c->slots[slot_of(id)];
    return r != NULL && r->id == id ? r : NULL;
}

/* ---- completion ---- */

static void set_result(struct client_request *r, attn_status st, const char *message)
{
    r->result.status = st;
    snprintf(r->result.message, sizeof r->result.message, "%s", message);
}

void request_finish(struct client_request *r)
{
    struct attn_client *c = r->client;
    r->result.total_ns = attn_now_ns() - r->start_ns;
    if (r->message != NULL)
        c->t->ops->message_free(c->t, r->message);
    r->message = NULL;
    if (r->is_step && r->result.status != ATTN_OK && !r->has_item_status)
        step_fail(r);

    bool is_piece = r->is_piece;
    if (r->cb != NULL) {
        error_from_request(r); /* for attn_last_error_gone in the callback */
        r->cb(r->user, r->id, &r->result);
        request_free(r);
        r = NULL;
    }
    pthread_mutex_lock(&c->lock);
    if (r != NULL)
        r->state = REQUEST_DONE;
    c->n_completed += !is_piece;
    struct waiter *w;
    LIST_FOREACH(w, &c->waiters, link)
    {
        if (w->r == NULL || w->r == r)
            pthread_cond_signal(&w->cond);
    }
    pthread_mutex_unlock(&c->lock);
}

static void finish_all(struct request_list *list)
{
    while (!TAILQ_EMPTY(list)) {
        struct client_request *r = TAILQ_FIRST(list);
        TAILQ_REMOVE(list, r, link);
        request_finish(r);
    }
}

static void expire_locked(struct client_request *r)
{
    struct attn_client *c = r->client;
    char why[ATTN_MESSAGE_BYTES];
    uint64_t ms = (r->deadline_ns - r->start_ns) / 1000000u;
    attn_status st = ATTN_ETIMEDOUT;
    if (r->result.status != ATTN_OK) {
        st = r->result.status; /* was about to be retried */
        snprintf(why, sizeof why, "%s", r->result.message);
    } else if (c->t->ops->is_connected(c->t)) {
        snprintf(why, sizeof why, "no answer from %s within %llu ms", c->url,
                 (unsigned long long)ms);
    } else {
        char reason[ATTN_MESSAGE_BYTES] = "";
        c->t->ops->why_not(c->t, reason, sizeof reason);
        st = ATTN_ECONN;
        char within[40] = "";
        if (!c->is_hasty)
            snprintf(within, sizeof within, " within %llu ms", (unsigned long long)ms);
        snprintf(why, sizeof why, "no connection to %.80s%s%s%.110s", c->url, within,
                 reason[0] != 0 ? ": " : "", reason);
    }
    unlink_locked(c, r);
    r->state = REQUEST_PINNED;
    r->result.n_failed = r->step.n_items;
    set_result(r, st, why);
    c->counters.n_timed_out++;
}

/* ---- sending ---- */

bool request_fits(const struct client_request *r, size_t head_bytes, uint64_t payload_bytes)
{
    uint64_t max = r->max_message_bytes; /* 0 until hello is answered */
    if (head_bytes == 0) {
        error_set(ATTN_EINVAL, "the request's header is longer than %u bytes",
                  WIRE_MAX_HEADER_BYTES);
        return false;
    }
    if (max == 0 || head_bytes + payload_bytes <= max)
        return true;
    error_set(ATTN_EINVAL, "a message of %llu bytes, the daemon takes %llu (listen.max_message)",
              (unsigned long long)(head_bytes + payload_bytes), (unsigned long long)max);
    return false;
}

static attn_status build(struct client_request *r, void **out_message)
{
    struct attn_client *c = r->client;
    uint64_t now = attn_now_ns();
    uint64_t left_us = r->deadline_ns > now ? (r->deadline_ns - now) / 1000u : 1;
    if (r->is_step)
        return step_build(r, left_us, out_message);

    r->header->session = r->session;
    r->header->timeout_us = left_us;
    size_t bytes = wire_request_head_bytes(r->header);
    if (!request_fits(r, bytes, 0))
        return ATTN_EINVAL;
    void *m = c->t->ops->message_alloc(c->t, bytes, CLIENT_CONTROL_REPLY_BYTES);
    if (m == NULL)
        return ATTN_ENOMEM;
    wire_request_head_encode(r->header, r->id, 0, m);
    *out_message = m;
    return ATTN_OK;
}

/* Sends a message of the request `id`, which is SENT already, because the answer may come before
 * this returns. What cannot be sent now is queued again. */
static bool send_message(struct attn_client *c, uint64_t id, void *message)
{
    if (c->t->ops->send(c->t, wire_id_of(id), message))
        return true;
    pthread_mutex_lock(&c->lock);
    struct client_request *r = find_locked(c, id);
    bool is_waiting = r != NULL && r->state == REQUEST_SENT;
    if (is_waiting) {
        r->message = message;
        r->result.n_sends--;
        set_state_locked(r, REQUEST_QUEUED);
    }
    c->counters.n_sent--;
    bool is_led = c->is_led && !pthread_equal(c->leader, pthread_self());
    pthread_mutex_unlock(&c->lock);
    if (!is_waiting)
        c->t->ops->message_free(c->t, message); /* it ran out of time meanwhile */
    else if (is_led)
        c->t->ops->wake(c->t);
    return false;
}

static void mark_sent_locked(struct client_request *r)
{
    struct attn_client *c = r->client;
    set_state_locked(r, REQUEST_SENT);
    r->generation = c->t->ops->generation(c->t);
    r->result.n_sends++;
    c->counters.n_sent++;
}

/* The leader sends what is queued, oldest first, as long as the transport takes it. */
static void flush_queue(struct attn_client *c)
{
    pthread_mutex_lock(&c->lock);
    struct client_request *r = TAILQ_FIRST(&c->in_flight);
    while (c->n_queued > 0 && r != NULL) {
        if (r->state != REQUEST_QUEUED) {
            r = TAILQ_NEXT(r, link);
            continue;
        }
        void *message = r->message;
        r->message = NULL;
        set_state_locked(r, REQUEST_PINNED);
        pthread_mutex_unlock(&c->lock);
        if (message == NULL && build(r, &message) != ATTN_OK)
            message = NULL;

        pthread_mutex_lock(&c->lock);
        if (message == NULL) { /* out of memory: try again at the next tick */
            set_state_locked(r, REQUEST_DELAYED);
            r->resend_ns = attn_now_ns() + CLIENT_TICK_NS;
            r = TAILQ_NEXT(r, link);
            continue;
        }
        mark_sent_locked(r);
        uint64_t id = r->id;
        pthread_mutex_unlock(&c->lock);
        bool is_sent = send_message(c, id, message);
        pthread_mutex_lock(&c->lock);
        if (!is_sent)
            break;
        r = TAILQ_FIRST(&c->in_flight); /* r itself may be gone: its thread timed out */
    }
    pthread_mutex_unlock(&c->lock);
}

/* ---- reading ---- */

/* True if the request is to be asked again, later. */
static bool retry_locked(struct client_request *r)
{
    if (r->n_retries_left == 0 || !attn_status_is_retryable(r->result.status))
        return false;
    uint64_t delay_ns = r->result.retry_after_us * 1000u;
    if (delay_ns < CLIENT_MIN_RETRY_NS)
        delay_ns = CLIENT_MIN_RETRY_NS;
    uint64_t now = attn_now_ns();
    if (delay_ns >= r->deadline_ns || now >= r->deadline_ns - delay_ns)
        return false;
    r->n_retries_left--;
    r->resend_ns = now + delay_ns;
    return true;
}

/* Sets the result of a pinned request from its reply. */
static void take_reply(struct client_request *r, struct client_message *m)
{
    uint8_t memory[REPLY_ARENA_BYTES];
    char why[ATTN_MESSAGE_BYTES - 32] = ""; /* leaves room for words before it */
    struct wire_arena arena;
    struct wire_reply reply;
    wire_arena_init(&arena, memory, sizeof memory, REPLY_LIMIT_BYTES);
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
        set_result(r, st,
                   st != ATTN_OK && h->message[0] == '\0' ? attn_status_message(st) : h->message);
        if (r->take != NULL && (st == ATTN_OK || r->is_step))
            r->result.status = r->take(r, &reply);
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
    case ATTND__REQUEST__BODY_POOL_CREATE:
    case ATTND__REQUEST__BODY_STATS:
    case ATTND__REQUEST__BODY_DRAIN:
        r->gone = ATTN_GONE_SESSION;
        return true;
    case ATTND__REQUEST__BODY_STEP:
    case ATTND__REQUEST__BODY_OPEN:
    case ATTND__REQUEST__BODY_POOL_DESCRIBE:
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

void request_probed(struct attn_client *c)
{
    struct request_list known = TAILQ_HEAD_INITIALIZER(known);
    pthread_mutex_lock(&c->lock);
    for (struct client_request *r = TAILQ_FIRST(&c->in_flight), *next; r != NULL; r = next) {
        next = TAILQ_NEXT(r, link);
        if (r->state != REQUEST_PROBING)
            continue;
        if (c->is_session_gone && r->session == c->info.session)
            r->gone = ATTN_GONE_SESSION;
        unlink_locked(c, r);
        r->state = REQUEST_PINNED;
        TAILQ_INSERT_TAIL(&known, r, link);
    }
    pthread_mutex_unlock(&c->lock);
    finish_all(&known);
}

void request_take_message(struct attn_client *c, struct client_message *m)
{
    if (m->id == CLIENT_RENEWAL_ID) {
        keeper_take(c, m);
        request_probed(c);
        return;
    }
    pthread_mutex_lock(&c->lock);
    struct client_request *r = c->slots[slot_of(m->id)];
    if (r == NULL || wire_id_of(r->id) != m->id || r->state == REQUEST_NEW ||
        r->state == REQUEST_PROBING || r->state == REQUEST_PINNED || r->state == REQUEST_DONE) {
        c->counters.n_stray++;
        pthread_mutex_unlock(&c->lock);
        c->t->ops->message_free(c->t, m->base);
        return;
    }
    set_state_locked(r, REQUEST_PINNED);
    pthread_mutex_unlock(&c->lock);

    take_reply(r, m);
    c->t->ops->message_free(c->t, m->base);

    pthread_mutex_lock(&c->lock);
    if (retry_locked(r)) {
        set_state_locked(r, REQUEST_DELAYED);
        c->counters.n_retried++;
        if (r->resend_ns < c->next_wake_ns)
            c->next_wake_ns = r->resend_ns;
        pthread_mutex_unlock(&c->lock);
        return;
    }
    if (probe_locked(r)) {
        set_state_locked(r, REQUEST_PROBING);
        pthread_mutex_unlock(&c->lock);
        keeper_renew(c); /* if it can't be sent, or is lost: again at the next tick */
        return;
    }
    unlink_locked(c, r);
    pthread_mutex_unlock(&c->lock);
    request_finish(r);
}

/* Deadlines, retries that are due, connections that were lost. */
static void keep_time(struct attn_client *c, uint64_t now)
{
    struct request_list expired = TAILQ_HEAD_INITIALIZER(expired);
    pthread_mutex_lock(&c->lock);
    uint64_t generation = c->t->ops->generation(c->t);
    bool is_probing = false;
    bool is_hopeless = c->is_hasty && generation == 0 && c->t->ops->n_failures(c->t) > 0;
    c->next_wake_ns = now + CLIENT_TICK_NS;
    for (struct client_request *r = TAILQ_FIRST(&c->in_flight), *next; r != NULL; r = next) {
        next = TAILQ_NEXT(r, link);
        is_probing |= r->state == REQUEST_PROBING;
        if (now >= r->deadline_ns || is_hopeless) {
            expire_locked(r);
            TAILQ_INSERT_TAIL(&expired, r, link);
            continue;
        }
        if (r->state == REQUEST_SENT && r->generation != generation) {
            set_state_locked(r, REQUEST_QUEUED);
            c->counters.n_resent++;
        } else if (r->state == REQUEST_DELAYED && now >= r->resend_ns) {
            set_state_locked(r, REQUEST_QUEUED);
        }
        uint64_t due = r->state == REQUEST_DELAYED && r->resend_ns < r->deadline_ns
                           ? r->resend_ns
                           : r->deadline_ns;
        if (due < c->next_wake_ns)
            c->next_wake_ns = due;
    }
    pthread_mutex_unlock(&c->lock);
    if (is_probing)
        keeper_renew(c);
    finish_all(&expired);
}

static uint32_t read_some(struct attn_client *c)
{
    struct client_message m = c->held; /* the leader's, as the transport's side of reading */
    uint32_t n = 0;
    c->held.base = NULL;
    if (m.base != NULL)
        request_take_message(c, &m);
    while (n < TURN_MESSAGES && c->t->ops->recv(c->t, &m)) {
        request_take_message(c, &m);
        n++;
    }
    if (n == TURN_MESSAGES)
        c->t->ops->wake(c->t); /* more may be there, of which the descriptor does not tell */
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
        flush_queue(c);
    pthread_mutex_lock(&c->lock);
    uint64_t wake_ns = c->next_wake_ns < until_ns ? c->next_wake_ns : until_ns;
    is_queued = c->n_queued > 0;
    pthread_mutex_unlock(&c->lock);
    c->t->ops->want_send(c->t, is_queued);
    if (n > 0 || is_time || now >= until_ns)
        return;
    if (wake_ns > now)
        c->t->ops->wait(c->t, wake_ns - now);
    read_some(c);
}

/* ---- waiting ---- */

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
                expire_locked(r);
                pthread_mutex_unlock(&c->lock);
                request_finish(r);
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
        request_leave_locked(c);
    if (out_n != NULL)
        *out_n = (uint32_t)(c->n_completed - n_before);
    pthread_mutex_unlock(&c->lock);
}

/* ---- for the other files ---- */

void request_leave_locked(struct attn_client *c)
{
    c->is_led = c->is_kept = false;
    if (!LIST_EMPTY(&c->waiters))
        pthread_cond_signal(&LIST_FIRST(&c->waiters)->cond); /* the next leader */
}

attn_status request_new(struct attn_client *c, uint64_t timeout_us, struct client_request **out_r)
{
    struct client_request *r = calloc(1, sizeof *r);
    if (r == NULL)
        return error_set(ATTN_ENOMEM, "no memory for a request");
    pthread_mutex_lock(&c->lock);
    if (c->n_free_slots == 0) {
        pthread_mutex_unlock(&c->lock);
        free(r);
        return error_set(ATTN_EOVERLOAD, "%u requests of this client are in flight, the most",
                         ATTN_MAX_IN_FLIGHT);
    }
    uint32_t slot = c->free_slots[--c->n_free_slots];
    if ((++c->id_high & ((1u << (ID_BITS - SLOT_BITS)) - 1)) == 0)
        c->id_high++; /* no wire id below the first of slots */
    r->id = (uint64_t)c->id_high << SLOT_BITS | slot;
    r->session = c->info.session;
    r->max_message_bytes = c->info.max_message_bytes;
    c->slots[slot] = r;
    pthread_mutex_unlock(&c->lock);
    if (timeout_us == 0)
        timeout_us = c->default_timeout_us;
    if (timeout_us > INT64_MAX / 1000000)
        timeout_us = INT64_MAX / 1000000;
    r->client = c;
    r->n_retries_left = c->max_retries;
    r->start_ns = attn_now_ns();
    r->deadline_ns = r->start_ns + timeout_us * 1000u;
    r->result.struct_size = sizeof r->result;
    *out_r = r;
    return ATTN_OK;
}

void request_free(struct client_request *r)
{
    struct attn_client *c = r->client;
    pthread_mutex_lock(&c->lock);
    c->slots[slot_of(r->id)] = NULL;
    c->free_slots[c->n_free_slots++] = slot_of(r->id);
    pthread_mutex_unlock(&c->lock);
    free(r);
}

attn_status request_start(struct client_request *r)
{
    struct attn_client *c = r->client;
    void *message = NULL;
    uint64_t id = r->id;
    attn_status st = build(r, &message);
    if (st == ATTN_ENOMEM)
        error_set(st, "no memory for a message");
    if (st != ATTN_OK)
        return st;

    pthread_mutex_lock(&c->lock);
    bool is_behind = c->n_queued > 0; /* keep the order of starts */
    link_locked(c, r);
    if (is_behind) {
        r->message = message;
        set_state_locked(r, REQUEST_QUEUED);
    } else {
        mark_sent_locked(r);
    }
    pthread_mutex_unlock(&c->lock);
    if (!is_behind)
        send_message(c, id, message);
    return ATTN_OK;
}

struct client_request *request_claim(struct attn_client *c, attn_ticket ticket)
{
    pthread_mutex_lock(&c->lock);
    struct client_request *r = find_locked(c, ticket);
    if (r != NULL && (!r->is_step || r->cb != NULL || r->is_claimed))
        r = NULL;
    if (r != NULL)
        r->is_claimed = true;
    pthread_mutex_unlock(&c->lock);
    return r;
}

bool request_may_wait(struct attn_client *c)
{
    pthread_mutex_lock(&c->lock);
    bool is_leader = c->is_led && pthread_equal(c->leader, pthread_self());
    pthread_mutex_unlock(&c->lock);
    return !is_leader;
}

void request_wait(struct client_request *r)
{
    wait_for(r->client, r, r->deadline_ns, NULL);
}

void request_poll(struct attn_client *c, uint64_t until_ns, uint32_t *out_n)
{
    wait_for(c, NULL, until_ns, out_n);
}

void request_fail_all(struct attn_client *c)
{
    pthread_mutex_lock(&c->lock);
    while (!TAILQ_EMPTY(&c->in_flight)) {
        struct client_request *r = TAILQ_FIRST(&c->in_flight);
        unlink_locked(c, r);
        r->state = REQUEST_PINNED;
        r->result.n_failed = r->step.n_items;
        set_result(r, ATTN_ECONN, "the client was closed");
        pthread_mutex_unlock(&c->lock);
        request_finish(r);
        pthread_mutex_lock(&c->lock);
    }
    pthread_mutex_unlock(&c->lock);
}
