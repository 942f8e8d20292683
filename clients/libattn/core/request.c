/* request.c: requests in flight: their slots and lists, how they are sent, and how they end.
 * reply.c says what answers mean, lead.c who reads and waits. The lock is never held while bytes
 * are copied, sent or received, or a callback runs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/core/core.h"

/* ---- lists, under the lock ---- */

static void link_locked(struct attn_client *c, struct client_request *r)
{
    TAILQ_INSERT_TAIL(&c->in_flight, r, link);
    c->counters.n_in_flight++;
    c->n_large += r->is_large;
}

void client_request_unlink_locked(struct attn_client *c, struct client_request *r)
{
    if (r->state == REQUEST_QUEUED)
        c->n_queued--;
    TAILQ_REMOVE(&c->in_flight, r, link);
    c->counters.n_in_flight--;
    c->n_large -= r->is_large;
}

void client_request_set_state_locked(struct client_request *r, enum client_request_state state)
{
    struct attn_client *c = r->client;
    c->n_queued += (state == REQUEST_QUEUED) - (r->state == REQUEST_QUEUED);
    r->state = state;
}

static struct client_request *client_request_find_locked(struct attn_client *c, uint64_t id)
{
    struct client_request *r = c->slots[client_request_slot(id)];
    return r != NULL && r->id == id ? r : NULL;
}

/* ---- completion ---- */

void client_request_set_result(struct client_request *r, attn_status st, const char *message)
{
    r->result.status = st;
    snprintf(r->result.message, sizeof r->result.message, "%s", message);
}

void client_request_finish(struct client_request *r)
{
    struct attn_client *c = r->client;
    r->result.total_ns = attn_now_ns() - r->start_ns;
    if (r->message != NULL)
        c->t->ops->message_free(c->t, r->message);
    r->message = NULL;
    if (r->fail != NULL && r->result.status != ATTN_OK && !r->has_item_status)
        r->fail(r);

    bool is_piece = r->is_piece;
    if (r->cb != NULL) {
        error_from_request(r); /* for attn_last_error_gone in the callback */
        r->cb(r->user, r->id, &r->result);
        client_request_free(r);
        r = NULL;
    }
    pthread_mutex_lock(&c->lock);
    if (r != NULL)
        r->state = REQUEST_DONE;
    c->n_completed += !is_piece;
    struct waiter *w;
    LIST_FOREACH(w, &c->waiters, link) {
        if (w->r == NULL || w->r == r)
            pthread_cond_signal(&w->cond);
    }
    pthread_mutex_unlock(&c->lock);
}

void client_request_finish_all(struct request_list *list)
{
    while (!TAILQ_EMPTY(list)) {
        struct client_request *r = TAILQ_FIRST(list);
        TAILQ_REMOVE(list, r, link);
        client_request_finish(r);
    }
}

void client_request_expire_locked(struct client_request *r)
{
    struct attn_client *c = r->client;
    char why[ATTN_MESSAGE_BYTES];
    uint64_t ms = (r->deadline_ns - r->start_ns) / 1000000u;
    attn_status st = ATTN_ETIMEDOUT;
    if (c->is_given_up) {
        st = ATTN_ECONN;
        snprintf(why, sizeof why, "%.80s was given up", c->url);
    } else if (r->result.status != ATTN_OK) {
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
        if (!c->fail_fast)
            snprintf(within, sizeof within, " within %llu ms", (unsigned long long)ms);
        snprintf(why, sizeof why, "no connection to %.80s%s%s%.110s", c->url, within,
                 reason[0] != 0 ? ": " : "", reason);
    }
    client_request_unlink_locked(c, r);
    r->state = REQUEST_PINNED;
    r->result.n_failed = r->step.n_items;
    client_request_set_result(r, st, why);
    c->counters.n_timed_out++;
}

/* ---- sending ---- */

uint64_t client_max_message(struct attn_client *c)
{
    uint64_t shared = c->t->ops->max_message(c->t);
    pthread_mutex_lock(&c->lock);
    uint64_t most = c->info.max_message_bytes;
    pthread_mutex_unlock(&c->lock);
    return shared != 0 && shared < most ? shared : most;
}

attn_status client_request_memory(struct client_request *r, size_t head_bytes,
                                  uint64_t payload_bytes, uint64_t reply_bytes, void **out_message)
{
    struct attn_client *c = r->client;
    const bool is_shared = c->t->ops->is_shared;
    uint64_t bytes = head_bytes + payload_bytes, most = client_max_message(c);
    if (head_bytes == 0)
        return error_set(ATTN_EINVAL, "the request's header is longer than %u bytes",
                         WIRE_MAX_HEADER_BYTES);
    if (most != 0 && (bytes > most || (is_shared && reply_bytes > most)))
        return error_set(ATTN_EINVAL,
                         "a message of %llu bytes, and %llu for the answer: the daemon takes %llu "
                         "(listen.max_message%s)",
                         (unsigned long long)bytes, (unsigned long long)reply_bytes,
                         (unsigned long long)most, is_shared ? ", listen.shm_client" : "");
    pthread_mutex_lock(&c->lock);
    bool is_behind = is_shared && r->state == REQUEST_NEW && c->n_queued > 0;
    pthread_mutex_unlock(&c->lock);
    if (!is_behind)
        *out_message = c->t->ops->message_alloc(c->t, bytes, (size_t)reply_bytes);
    return is_behind || *out_message == NULL ? ATTN_ENOMEM : ATTN_OK;
}

static attn_status build(struct client_request *r, void **out_message)
{
    struct attn_client *c = r->client;
    uint64_t now = attn_now_ns();
    uint64_t left_us = r->deadline_ns > now ? (r->deadline_ns - now) / 1000u : 1;
    if (r->build != NULL)
        return r->build(r, left_us, out_message);

    r->header->session = r->session;
    r->header->timeout_us = left_us;
    static const struct client_bulk none = {.payload = NULL};
    const struct client_bulk *bulk = r->bulk != NULL ? r->bulk : &none;
    size_t bytes = wire_request_head_bytes(r->header);
    size_t room = bulk->reply_bytes != 0 ? bulk->reply_bytes : CLIENT_CONTROL_REPLY_BYTES;
    attn_status st = client_request_memory(r, bytes, bulk->payload_bytes, room, out_message);
    if (st != ATTN_OK)
        return st;
    wire_request_head_encode(r->header, r->id, bulk->payload_bytes, *out_message);
    if (bulk->payload_bytes > 0)
        attn_client_copy(c, (uint8_t *)*out_message + bytes, bulk->payload, bulk->payload_bytes);
    return ATTN_OK;
}

static bool is_led_elsewhere_locked(const struct attn_client *c)
{
    return c->is_led && !pthread_equal(c->leader, pthread_self());
}

/* Sends a message of the request `id`, which is SENT already, because the answer may come before
 * this returns. What cannot be sent now is queued again. */
static bool send_message(struct attn_client *c, uint64_t id, void *message, bool is_beside)
{
    if (c->t->ops->send(c->t, client_request_wire_id(id), message, is_beside))
        return true;
    pthread_mutex_lock(&c->lock);
    struct client_request *r = client_request_find_locked(c, id);
    bool is_waiting = r != NULL && r->state == REQUEST_SENT; /* else it ran out of time meanwhile */
    bool is_kept = is_waiting && !c->t->ops->is_shared;
    if (is_waiting) {
        r->message = is_kept ? message : NULL;
        r->result.n_sends--;
        client_request_set_state_locked(r, REQUEST_QUEUED);
    }
    c->counters.n_sent--;
    bool is_led = is_waiting && is_led_elsewhere_locked(c);
    pthread_mutex_unlock(&c->lock);
    if (!is_kept)
        c->t->ops->message_free(c->t, message);
    if (is_led)
        c->t->ops->wake(c->t);
    return false;
}

static void mark_sent_locked(struct client_request *r)
{
    struct attn_client *c = r->client;
    client_request_set_state_locked(r, REQUEST_SENT);
    r->generation = c->t->ops->generation(c->t);
    r->result.n_sends++;
    c->counters.n_sent++;
}

/* A queued request whose message could not be built. True: it has failed for that; false: there is
 * no memory for it now. */
static bool fail_unbuilt_locked(struct client_request *r, attn_status st)
{
    struct attn_client *c = r->client;
    if (st == ATTN_ENOMEM) {
        client_request_set_state_locked(r, REQUEST_QUEUED);
        return false;
    }
    client_request_unlink_locked(c, r);
    pthread_mutex_unlock(&c->lock);
    r->result.n_failed = r->step.n_items;
    client_request_set_result(r, st, attn_last_error()->message);
    client_request_finish(r);
    pthread_mutex_lock(&c->lock);
    return true;
}

void client_request_flush(struct attn_client *c)
{
    bool may_go_on = true;
    pthread_mutex_lock(&c->lock);
    struct client_request *r = TAILQ_FIRST(&c->in_flight);
    while (may_go_on && c->n_queued > 0 && r != NULL) {
        if (r->state != REQUEST_QUEUED) {
            r = TAILQ_NEXT(r, link);
            continue;
        }
        void *message = r->message;
        r->message = NULL;
        client_request_set_state_locked(r, REQUEST_PINNED);
        pthread_mutex_unlock(&c->lock);
        attn_status st = message == NULL ? build(r, &message) : ATTN_OK;

        pthread_mutex_lock(&c->lock);
        if (st != ATTN_OK) {
            may_go_on = fail_unbuilt_locked(r, st);
        } else {
            mark_sent_locked(r);
            uint64_t id = r->id;
            bool is_beside = r->is_beside;
            pthread_mutex_unlock(&c->lock);
            may_go_on = send_message(c, id, message, is_beside);
            pthread_mutex_lock(&c->lock);
        }
        r = TAILQ_FIRST(&c->in_flight); /* r itself may be gone: its thread timed out */
    }
    pthread_mutex_unlock(&c->lock);
}

/* ---- for the other files ---- */

/* Whether n more such ids leave those in flight among the highest that a session remembers. */
static bool may_be_known_locked(const struct attn_client *c, uint32_t n)
{
    enum { MAX_KNOWN = 256 }; /* docs/protocol/replies.md */
    uint64_t oldest = c->n_known;
    for (uint32_t i = 0; i < ATTN_MAX_IN_FLIGHT && n > 0; i++) {
        const struct client_request *r = c->slots[i];
        if (r != NULL && r->n_known > 0 && r->state != REQUEST_DONE && r->known_from < oldest)
            oldest = r->known_from;
    }
    return c->n_known + n - oldest <= MAX_KNOWN;
}

attn_status client_request_new(struct attn_client *c, uint64_t timeout_us, uint32_t n_known,
                               struct client_request **out_r)
{
    struct client_request *r = calloc(1, sizeof *r);
    if (r == NULL)
        return error_set(ATTN_ENOMEM, "no memory for a request");
    pthread_mutex_lock(&c->lock);
    if (c->is_given_up) {
        pthread_mutex_unlock(&c->lock);
        free(r);
        return error_set(ATTN_ECONN, "%.80s was given up", c->url);
    }
    if (c->n_free_slots == 0) {
        pthread_mutex_unlock(&c->lock);
        free(r);
        return error_set(ATTN_EOVERLOAD, "%u requests of this client are in flight, the most",
                         ATTN_MAX_IN_FLIGHT);
    }
    if (!may_be_known_locked(c, n_known)) {
        pthread_mutex_unlock(&c->lock);
        free(r);
        *out_r = NULL;
        return ATTN_OK;
    }
    uint32_t slot = c->free_slots[--c->n_free_slots];
    c->id_high += 2; /* a message of several calls has the ids behind its own, too */
    if ((c->id_high & ((1u << (REQUEST_ID_BITS - REQUEST_SLOT_BITS)) - 1)) < 2)
        c->id_high += 2; /* no wire id below the first of slots */
    r->id = (uint64_t)c->id_high << REQUEST_SLOT_BITS | slot;
    r->session = c->info.session;
    r->n_known = n_known;
    r->known_from = c->n_known;
    c->n_known += n_known;
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

void client_request_free(struct client_request *r)
{
    struct attn_client *c = r->client;
    pthread_mutex_lock(&c->lock);
    c->slots[client_request_slot(r->id)] = NULL;
    c->free_slots[c->n_free_slots++] = client_request_slot(r->id);
    pthread_mutex_unlock(&c->lock);
    free(r);
}

static bool share_sequence(const struct attn_step *a, const struct attn_step *b)
{
    for (uint32_t i = 0; i < a->n_items; i++)
        for (uint32_t k = 0; k < b->n_items; k++)
            if (a->items[i].seq.id == b->items[k].seq.id)
                return true;
    return false;
}

/* Whether r, about to be sent, may go beside the others: where large steps are not alone, and none
 * of the steps in flight has a sequence of r's. Steps after r can't have: r's thread waits for it,
 * and what other threads do has no order with it. */
static bool may_go_beside_locked(struct attn_client *c, const struct client_request *r)
{
    enum { MOST_PAIRS = 1 << 16 }; /* looked at under the lock, some 50 us */
    uint64_t n_pairs = 0;
    c->has_company |= !TAILQ_EMPTY(&c->in_flight) && (r->is_large || c->n_large > 0);
    if (!r->is_large || !c->has_company)
        return false;
    const struct client_request *other;
    TAILQ_FOREACH(other, &c->in_flight, link) {
        n_pairs += (uint64_t)other->step.n_items * r->step.n_items;
        if (n_pairs > MOST_PAIRS || share_sequence(&other->step, &r->step))
            return false;
    }
    return true;
}

attn_status client_request_start(struct client_request *r)
{
    struct attn_client *c = r->client;
    const bool is_shared = c->t->ops->is_shared;
    void *message = NULL;
    uint64_t id = r->id;
    attn_status st = build(r, &message);
    if (st == ATTN_ENOMEM && !is_shared)
        error_set(st, "no memory for a message");
    if (st != ATTN_OK && (st != ATTN_ENOMEM || !is_shared))
        return st;

    pthread_mutex_lock(&c->lock);
    bool is_queued = c->n_queued > 0 || message == NULL; /* keeps the order of starts */
    bool is_beside = r->is_beside = may_go_beside_locked(c, r);
    link_locked(c, r);
    if (is_queued) {
        r->message = is_shared ? NULL : message;
        client_request_set_state_locked(r, REQUEST_QUEUED);
    } else {
        mark_sent_locked(r);
    }
    bool is_led = is_led_elsewhere_locked(c);
    pthread_mutex_unlock(&c->lock);
    if (!is_queued) {
        send_message(c, id, message, is_beside);
        return ATTN_OK;
    }
    if (is_shared && message != NULL)
        c->t->ops->message_free(c->t, message); /* room that those before it may wait for */
    if (is_shared && is_led)
        c->t->ops->wake(c->t);
    return ATTN_OK;
}

struct client_request *client_request_claim(struct attn_client *c, attn_ticket ticket)
{
    pthread_mutex_lock(&c->lock);
    struct client_request *r = client_request_find_locked(c, ticket);
    if (r != NULL && (!r->is_step || r->cb != NULL || r->is_claimed))
        r = NULL;
    if (r != NULL)
        r->is_claimed = true;
    pthread_mutex_unlock(&c->lock);
    return r;
}

void client_request_fail_all(struct attn_client *c)
{
    pthread_mutex_lock(&c->lock);
    while (!TAILQ_EMPTY(&c->in_flight)) {
        struct client_request *r = TAILQ_FIRST(&c->in_flight);
        client_request_unlink_locked(c, r);
        r->state = REQUEST_PINNED;
        r->result.n_failed = r->step.n_items;
        client_request_set_result(r, ATTN_ECONN, "the client was closed");
        pthread_mutex_unlock(&c->lock);
        client_request_finish(r);
        pthread_mutex_lock(&c->lock);
    }
    pthread_mutex_unlock(&c->lock);
}
