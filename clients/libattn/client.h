/* client.h: what libattn's files share: the client, its requests in flight, and the two ways to make
 * one. attn.h says how the library behaves.
 *
 * A request is in a slot of the client from request_start until it completes (blocking calls and
 * steps with a callback) or until it is waited for (steps with a ticket). All fields are guarded by
 * the client's lock, but for a request that is REQUEST_PINNED: that one belongs to the thread that
 * reads (the leader), which works on it without the lock.
 */
#ifndef ATTN_CLIENT_H
#define ATTN_CLIENT_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

#include "clients/libattn/attn.h"
#include "clients/libattn/transport.h"
#include "proto/attn_time.h"
#include "proto/wire.h"

#define CLIENT_DEFAULT_TIMEOUT_US 10000000u
#define CLIENT_TICK_NS 20000000u /* how often a waiting thread looks for a new connection */
#define CLIENT_MIN_RETRY_NS 1000000u
#define CLIENT_PROTOCOL_VERSION 1u
/* Wire ids of requests that have no slot; those of slots are larger. */
#define CLIENT_RENEWAL_ID 1u
/* room for the reply of anything but a step: stats as JSON, or the spec of a pool */
#define CLIENT_CONTROL_REPLY_BYTES (320u << 10)
#define CLIENT_STEP_REPLY_HEAD_BYTES 1024u /* of a step's reply, beside tensors and item statuses */

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
    void *message; /* built and not yet sent, or NULL */
    uint64_t start_ns, deadline_ns, resend_ns;
    uint64_t generation; /* of the connection it was sent on */
    uint32_t n_retries_left;
    uint64_t session, max_message_bytes; /* as the request was made */

    /* what is asked: a header of the caller's, or a step */
    Attnd__Request *header;
    const struct attn_pool *pool; /* of a step */
    struct attn_step step;
    struct wire_step_layout layout;

    /* Takes over what a reply says: a good one, or any of a step. On the leader, without the lock.
     * Returns the request's status and, for a failure of its own, puts the sentence into
     * result.message. NULL: nothing to take. */
    attn_status (*take)(struct client_request *r, const struct wire_reply *reply);
    void *take_arg;

    attn_step_cb cb; /* NULL: somebody waits */
    void *user;
    bool is_step, is_claimed;
    bool is_piece; /* of another step: nobody waits for it alone */
    bool has_item_status; /* the reply told of each item */
    attn_gone gone; /* with ATTN_ENOTFOUND */
    struct attn_result result;
};

/* A thread that waits while another one reads; on its stack. */
struct waiter {
    LIST_ENTRY(waiter) link;
    pthread_cond_t cond;
    const struct client_request *r; /* NULL: any completion */
};

struct attn_client {
    struct client_transport *t;
    uint64_t default_timeout_us;
    uint32_t max_retries;
    uint32_t fork_generation;
    atomic_bool is_hasty; /* no connection yet is no connection at all */
    atomic_uint session_number; /* counts sessions: pools of an earlier one are gone */
    atomic_bool is_streaming; /* a device reads messages where they are built: see copy.h */
    char *url, *name;

    pthread_mutex_t lock;
    struct attn_client_info info; /* the session's */
    bool is_session_gone;
    struct client_request *slots[ATTN_MAX_IN_FLIGHT];
    uint32_t free_slots[ATTN_MAX_IN_FLIGHT], n_free_slots;
    uint32_t id_high; /* counts starts; the bits of ids above the slot */
    TAILQ_HEAD(request_list, client_request) in_flight;
    uint32_t n_queued;
    uint64_t next_wake_ns; /* when the leader must look at deadlines again */
    uint64_t n_completed;
    bool is_led;
    pthread_t leader;
    LIST_HEAD(, waiter) waiters;
    struct attn_client_counters counters;

    /* keep.c */
    bool has_keeper, is_closing;
    pthread_t keeper;
    pthread_cond_t keeper_cond; /* is_closing */
    bool is_kept; /* the leader is the keeper */
    bool is_renewed; /* the latest renewal is answered */
    struct client_message held; /* read by the keeper, for the next leader; base NULL: none */
};

struct attn_pool {
    struct attn_client *client;
    uint32_t session_number; /* of the session it was made in */
    uint32_t id, n_free_blocks;
    struct attn_pool_spec spec;
    void *memory; /* what spec points to */
};

/* error.c */

/* Leaves the sentence for attn_last_error and returns st. */
attn_status error_set(attn_status st, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The same, of something that is gone. */
attn_status error_set_gone(attn_gone gone, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The same from a request's result. Returns its status; ATTN_OK leaves nothing. */
attn_status error_from_request(const struct client_request *r);

/* client.c */

/* ATTN_EINVAL after fork. */
attn_status client_check(const struct attn_client *c);
/* What the daemon said of the session and its limits. */
struct attn_client_info client_info(struct attn_client *c);
/* Sends header (session and timeout are filled in), waits, and lets take have the reply. Returns the
 * status, with its sentence left in attn_last_error. */
attn_status client_call(struct attn_client *c, Attnd__Request *header, uint64_t timeout_us,
                        attn_status (*take)(struct client_request *, const struct wire_reply *),
                        void *take_arg);

/* pool.c */

/* ATTN_ENOTFOUND: the pool is of an earlier session. */
attn_status pool_check(const struct attn_pool *p);

/* request.c */

/* A zeroed request with a slot, its id and its deadline. ATTN_EOVERLOAD: no slot; ATTN_ENOMEM. */
attn_status request_new(struct attn_client *c, uint64_t timeout_us, struct client_request **out_r);
/* Frees a request that is in no list, and its slot. Not locked. */
void request_free(struct client_request *r);
/* True if the daemon takes a message of this size; else the sentence is left in attn_last_error. */
bool request_fits(const struct client_request *r, size_t head_bytes, uint64_t payload_bytes);
/* Builds and sends. On failure the request is still the caller's. */
attn_status request_start(struct client_request *r);
/* The step of a ticket, to be waited for by the caller alone; NULL: none, or it is waited for. */
struct client_request *request_claim(struct attn_client *c, attn_ticket ticket);
/* False on the thread that runs a callback: it must not wait. */
bool request_may_wait(struct attn_client *c);
/* Waits until r, started and without a callback, is done. */
void request_wait(struct client_request *r);
/* Reads and completes until something completed or until_ns. */
void request_poll(struct attn_client *c, uint64_t until_ns, uint32_t *out_n);
/* A message that was read, by a leader: its request is completed, or asked again, or probed. */
void request_take_message(struct attn_client *c, struct client_message *m);
/* A renewal was answered: requests that are probed can be completed. The leader, without the lock. */
void request_probed(struct attn_client *c);
/* The leader leaves; one of those who wait goes on. Under the lock. */
void request_leave_locked(struct attn_client *c);
/* r has its result and is in no list: tells the callback, or who waits. Without the lock. */
void request_finish(struct client_request *r);
/* Completes all in flight with ATTN_ECONN. */
void request_fail_all(struct attn_client *c);

/* keep.c */

/* Starts the thread that renews the session while no call does. ATTN_ENOMEM */
attn_status keeper_start(struct attn_client *c);
/* Ends it; the first call of closing. */
void keeper_stop(struct attn_client *c);
/* Sends a renewal: hello with the session. False: not now. */
bool keeper_renew(struct attn_client *c);
/* Takes the answer to a renewal, which it frees: is_session_gone may be known, is_renewed is set. */
void keeper_take(struct attn_client *c, struct client_message *m);

/* step.c */

/* Encodes a step. ATTN_ENOMEM; ATTN_EINVAL too large, the sentence is left. */
attn_status step_build(struct client_request *r, uint64_t timeout_us, void **out_message);
/* Tells item_status that the step failed as a whole. */
void step_fail(struct client_request *r);
/* Starts a piece of the parent's step, within its deadline. */
attn_status step_start_piece(struct attn_pool *p, const struct attn_step *s,
                             const struct client_request *parent, attn_step_cb cb, void *user);

/* split.c */

/* Starts the parent's step as pieces of at most max_tokens; is_whole: items must not be cut. From
 * success on it completes the parent, which is in no list, by request_finish. */
attn_status split_start(struct client_request *parent, uint32_t max_tokens, bool is_whole);

#endif
