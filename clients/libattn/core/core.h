/* core.h: what libattn's files share: the client, errors, and calls that wait for an answer. attn.h
 * says how the library behaves, in_flight.h has the requests that are under way.
 *
 * The library's folders, from the bottom; each knows only those before it:
 *
 *   memory/     memory of lanes' regions: the host's or a GPU's
 *   transport/  messages to a daemon and back, over sockets or shared memory
 *   core/       the client: requests, who reads answers, the session and its keeper
 *   pool/       pools
 *   sequence/   sequences, in files and between daemons, too
 *   step/       steps
 *   lane/       lanes
 *
 * The files of core/, from the bottom in the same way: error.c and copy.c; request.c (slots,
 * sending, completion); renew.c (a renewal of the session); reply.c (what an answer means); lead.c
 * (which thread reads); call.c (calls that wait for an answer); session.c (hello and goodbye);
 * keep.c (the keeper's thread); client.c; operator.c. What request.c needs of a step it calls
 * through struct client_request.
 */
#ifndef ATTN_CORE_H
#define ATTN_CORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

#include "clients/libattn/attn.h"
#include "clients/libattn/core/in_flight.h"
#include "clients/libattn/transport/transport.h"
#include "proto/attn_time.h"
#include "proto/wire.h"

#define CLIENT_DEFAULT_TIMEOUT_US 10000000u
#define CLIENT_TICK_NS 20000000u /* how often a waiting thread looks for a new connection */
#define CLIENT_MIN_RETRY_NS 1000000u
#define CLIENT_PROTOCOL_VERSION 1u
/* room for the reply of anything but a step: stats as JSON, or the spec of a pool */
#define CLIENT_CONTROL_REPLY_BYTES (320u << 10)
#define CLIENT_HELLO_REPLY_BYTES (1u << 20)
#define CLIENT_STEP_REPLY_HEAD_BYTES 1024u /* of a step's reply, beside tensors and item statuses */

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
    atomic_bool fail_fast; /* fail at the first connect error */
    atomic_uint session_number; /* counts sessions: pools of an earlier one are gone */
    atomic_bool is_streaming; /* a device reads messages where they are built: see copy.h */
    char *url, *name;
    char *token; /* names the tenant; NULL: none */

    pthread_mutex_t lock;
    struct attn_client_info info; /* the session's */
    char lane_url[128]; /* where lanes are opened; "": nowhere */
    bool is_session_gone;
    bool is_given_up; /* nothing is waited for any more */
    bool has_made_session; /* it was not resumed */
    bool is_kept_daemon; /* a successor will know the session */
    uint64_t known_generation; /* the connection that the daemon's latest hello came over */
    struct client_request *slots[ATTN_MAX_IN_FLIGHT];
    uint32_t free_slots[ATTN_MAX_IN_FLIGHT], n_free_slots;
    uint64_t id_high; /* counts starts; the bits of ids above the slot: ids of a session rise */
    uint64_t n_known; /* sum of all requests' */
    struct request_list in_flight;
    uint32_t n_queued, n_large; /* of those in flight */
    bool has_company; /* large steps and other requests have been in flight together */
    uint64_t next_wake_ns; /* when the leader must look at deadlines again */
    uint64_t n_completed;
    bool is_led;
    pthread_t leader;
    LIST_HEAD(, waiter) waiters;
    struct attn_client_counters counters;
    LIST_HEAD(, client_hold) holds; /* pools that handles of this client hold */
    LIST_HEAD(, client_socket) sockets; /* under a lock of their own, see client.c */

    _Atomic(struct split_memory *) spare; /* split.c: of the latest step that was cut, or NULL */

    /* keep.c */
    bool has_keeper, is_closing;
    pthread_t keeper;
    pthread_cond_t keeper_cond; /* is_closing */
    bool is_kept; /* the leader is the keeper */
    bool is_renewed; /* the latest renewal is answered */
    struct client_message held; /* read by the keeper, for the next leader; base NULL: none */
};

/* client.c: a connection to the client's daemon beside its transport, a lane's: it is shut down
 * when the client is given up, and goes on after the client's end. */
struct client_socket {
    LIST_ENTRY(client_socket) link;
    struct attn_client *client; /* NULL: in no list */
    int fd;
};

/* ATTN_ECONN where the client is given up: s is in no list then. */
attn_status client_socket_add(struct attn_client *c, struct client_socket *s);
/* Before fd is closed. Nothing, for one that is in no list. */
void client_socket_remove(struct client_socket *s);

/* pool.c: a pool that the session holds, for the handles of it that were not released. */
struct client_hold {
    LIST_ENTRY(client_hold) link;
    uint32_t session_number, pool;
    uint32_t n_handles;
    uint64_t request; /* the latest that found it */
};

/* error.c */

/* Leaves the sentence for attn_last_error and returns st. */
attn_status error_set(attn_status st, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The same, of something that is gone. */
attn_status error_set_gone(attn_gone gone, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The thread's last error, for a call that has to clean up before it returns it. */
struct error_kept {
    struct attn_error error;
    attn_gone gone;
};
struct error_kept error_keep(void);
attn_status error_restore(const struct error_kept *kept); /* its status */
/* The same from a request's result. Returns its status; ATTN_OK leaves nothing. */
attn_status error_from_request(const struct client_request *r);

/* call.c */

/* Counts the forks that made this process; a client opened before the latest is the parent's. */
uint32_t client_fork_generation(void);
bool client_is_ours(const struct attn_client *c);
/* ATTN_EINVAL after fork. */
attn_status client_check(const struct attn_client *c);
/* What the daemon said of the session and its limits. */
struct attn_client_info client_info(struct attn_client *c);
/* Sends header (session and timeout are filled in), waits, and lets take have the reply. Returns
 * the status, with its sentence left in attn_last_error. */
attn_status client_call(struct attn_client *c, Attnd__Request *header, uint64_t timeout_us,
                        attn_status (*take)(struct client_request *, const struct wire_reply *),
                        void *take_arg);

/* The same with a payload, and room for one in the answer. A daemon that is overloaded is asked
 * again until the deadline. bulk NULL: client_call. */
struct client_bulk {
    const void *payload; /* borrowed until the call returns */
    size_t payload_bytes, reply_bytes;
};
attn_status client_call_bulk(struct attn_client *c, Attnd__Request *header,
                             const struct client_bulk *bulk, uint64_t timeout_us,
                             attn_status (*take)(struct client_request *,
                                                 const struct wire_reply *),
                             void *take_arg);

/* session.c */

/* A session, new (0) or to go on with, and its limits. */
attn_status session_begin(struct attn_client *c, uint64_t session, uint64_t timeout_us);
/* Says goodbye, if the client has made the session; the last call of closing. The thread's last
 * error stays. */
void session_end(struct attn_client *c);

/* keep.c */

/* Starts the thread that renews the session while no call does. ATTN_ENOMEM */
attn_status keeper_start(struct attn_client *c);
/* Ends it; the first call of closing. */
void keeper_stop(struct attn_client *c);
/* renew.c */

/* Sends a renewal: hello with the session. False: not now. */
bool renewal_send(struct attn_client *c);
/* Takes the answer to a renewal, which it frees, into is_session_gone, boot_id and is_renewed. */
void renewal_take(struct attn_client *c, struct client_message *m);

#endif
