/* in_flight.h: requests in flight, and the steps among them.
 *
 * A request is in a slot of the client from client_request_start until it completes (blocking calls
 * and steps with a callback) or until it is waited for (steps with a ticket). All fields are
 * guarded by the client's lock, but for a request that is REQUEST_PINNED: that one belongs to the
 * thread that reads (the leader), which works on it without the lock.
 */
#ifndef ATTN_IN_FLIGHT_H
#define ATTN_IN_FLIGHT_H

#include <sys/queue.h>

#include "clients/libattn/attn.h"
#include "clients/libattn/transport/transport.h"
#include "proto/wire.h"

#define REQUEST_SLOT_BITS 10
#define REQUEST_ID_BITS 31 /* the SP header's id has one bit of its own */
/* Wire ids of requests that have no slot; those of slots are larger. */
#define CLIENT_RENEWAL_ID 1u

_Static_assert(1u << REQUEST_SLOT_BITS == ATTN_MAX_IN_FLIGHT, "a slot is the low bits of an id");

enum client_request_state {
    REQUEST_NEW, /* being built by the thread that starts it, or in pieces; in no list */
    REQUEST_QUEUED, /* to be sent when the transport can */
    REQUEST_SENT,
    REQUEST_DELAYED, /* to be sent again at resend_ns */
    REQUEST_PROBING, /* answered; done when it is known whether the session is gone */
    REQUEST_PINNED, /* the leader builds, sends or takes it */
    REQUEST_DONE,
};

struct client_request {
    TAILQ_ENTRY(client_request) link; /* in flight, in the order of start */
    struct attn_client *client;
    enum client_request_state state;
    uint64_t id; /* low bits: the slot */
    void *message; /* built and not yet sent, or NULL; never in shared memory */
    uint64_t start_ns, deadline_ns, resend_ns;
    uint64_t generation; /* of the connection it was sent on */
    uint32_t n_retries_left;
    uint64_t session; /* as the request was made */
    uint32_t n_known; /* ids that the session remembers once they are carried out */
    uint64_t known_from; /* how many of those were given out before */

    /* what is asked: a header of the caller's, or a step */
    Attnd__Request *header;
    const struct client_bulk *bulk; /* that travels with the header; NULL: nothing */
    const struct attn_pool *pool; /* of a step */
    struct attn_step step;
    struct wire_step_layout layout;

    /* Takes over what a reply says: a good one, or any of a step. On the leader, without the lock.
     * Returns the request's status and, for a failure of its own, puts the sentence into
     * result.message. NULL: nothing to take. */
    attn_status (*take)(struct client_request *r, const struct wire_reply *reply);
    void *take_arg;
    /* Encodes the message, into client_request_memory, whose errors it has. On the thread that
     * starts the request, and on the leader if it had to queue or is sent again. NULL: the message
     * is header and bulk. */
    attn_status (*build)(struct client_request *r, uint64_t timeout_us, void **out_message);
    /* The request failed as a whole, with result.status. Without the lock. NULL: nothing to do. */
    void (*fail)(struct client_request *r);

    attn_step_cb cb; /* NULL: a thread waits, or will wait by ticket */
    void *user;
    bool is_step, is_claimed;
    bool is_piece; /* of another step, which its completion counts for */
    bool is_large; /* a step that its thread waits for, with so much to carry that others should
                      not wait behind it */
    bool is_beside; /* a large one that no other in flight comes before or after */
    bool has_item_status; /* the reply had a status for each item */
    attn_gone gone; /* with ATTN_ENOTFOUND */
    struct attn_result result;
};

TAILQ_HEAD(request_list, client_request);

static inline uint32_t client_request_slot(uint64_t id)
{
    return (uint32_t)id & (ATTN_MAX_IN_FLIGHT - 1);
}

static inline uint32_t client_request_wire_id(uint64_t id)
{
    return (uint32_t)id & ((1u << REQUEST_ID_BITS) - 1);
}

/* request.c */

/* A zeroed request with a slot, its id and its deadline. n_known: how many of its ids the session
 * remembers, at most WIRE_MAX_CALLS; *out_r is NULL while that many could make the session forget
 * ids that are in flight. ATTN_EOVERLOAD: no slot; ATTN_ENOMEM. */
attn_status client_request_new(struct attn_client *c, uint64_t timeout_us, uint32_t n_known,
                               struct client_request **out_r);
/* Frees a request that is in no list, and its slot. Not locked. */
void client_request_free(struct client_request *r);
/* The largest message and the largest answer, by what the daemon has said and by the memory that is
 * shared with it now; 0: not known yet. */
uint64_t client_max_message(struct attn_client *c);
/* Memory of the transport for r's message. ATTN_EINVAL: larger than the daemon takes, the sentence
 * is left in attn_last_error; ATTN_ENOMEM. Memory that is shared with the daemon is given whole and
 * in the order of starts: none (ATTN_ENOMEM) while a request from before r waits for some. */
attn_status client_request_memory(struct client_request *r, size_t head_bytes,
                                  uint64_t payload_bytes, uint64_t reply_bytes, void **out_message);
/* Builds and sends. On failure the request is still the caller's. */
attn_status client_request_start(struct client_request *r);
/* Sends what is queued, oldest first, as long as the transport takes it. The leader. */
void client_request_flush(struct attn_client *c);
/* The step of a ticket, to be waited for by the caller alone; NULL: none, or it is waited for. */
struct client_request *client_request_claim(struct attn_client *c, attn_ticket ticket);
void client_request_set_result(struct client_request *r, attn_status st, const char *message);
/* r has its result and is in no list: runs its callback, or wakes the thread that waits. Without
 * the lock. */
void client_request_finish(struct client_request *r);
/* The same of all of a list, which is empty then. */
void client_request_finish_all(struct request_list *list);
/* Completes all in flight with ATTN_ECONN. */
void client_request_fail_all(struct attn_client *c);
/* The rest under the lock. Takes r from the list of those in flight. */
void client_request_unlink_locked(struct attn_client *c, struct client_request *r);
void client_request_set_state_locked(struct client_request *r, enum client_request_state state);
/* Unlinks r, out of time, with the result that says so. */
void client_request_expire_locked(struct client_request *r);

/* reply.c */

/* A message that was read, by a leader: its request is completed, or asked again, or probed. */
void client_request_take_message(struct attn_client *c, struct client_message *m);

/* lead.c */

/* False on the thread that runs a callback: it must not wait. */
bool client_request_may_wait(struct attn_client *c);
/* Waits until r, started and without a callback, is done. */
void client_request_wait(struct client_request *r);
/* Reads and completes until something completed or until_ns. */
void client_request_poll(struct attn_client *c, uint64_t until_ns, uint32_t *out_n);
/* The leader leaves; one of those who wait goes on. Under the lock. */
void client_request_leave_locked(struct attn_client *c);

#endif
