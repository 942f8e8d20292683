/* sp_server.h: transport/sp.c on loops of its own, with a fake engine behind it, and a raw
 * SP client that can do what no library would. For the tests of the transport.
 *
 * The fake engine answers a step with a payload: its own payload back if seq[0] is 0, else seq[0]
 * bytes, byte i being (request id + i) mod 251. While it is held, requests gather.
 */
#ifndef TESTS_DAEMON_SP_SERVER_H
#define TESTS_DAEMON_SP_SERVER_H

#include <pthread.h>
#include <uv.h>

#include "daemon/config/config.h"
#include "daemon/engine/engine.h"
#include "daemon/transport/loops.h"
#include "daemon/transport/transport.h"

struct engine {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct request *head, **tail;
    uint32_t n_queued;
    struct principal last; /* of the request submitted last */
    uint64_t renewed; /* the session renewed last */
    bool is_held, is_reversed, is_stopped;
    const char *tenant; /* whose steps are; NULL: none */
    void (*on_submit)(void); /* on a loop's thread, as a request comes; NULL: nothing is called */
};

struct server {
    struct config cfg;
    struct iobuf_pool *bufs;
    struct share_table *shares;
    struct engine engine;
    uv_loop_t loop;
    struct loops *loops; /* with it as the first, as many as ATTND_LISTEN_THREADS says, else one */
    uv_async_t stop, drain;
    uv_prepare_t turn[LOOPS_MAX];
    _Atomic uint64_t n_looks[LOOPS_MAX]; /* at the clock, by each loop; NO_LOOKS: it has no timer */
    _Atomic uint64_t n_turns; /* of all loops */
    pthread_t thread;
    struct transport_env env;
    struct transport *t;
    char url[256];
};

/* Settings may be changed between the two; url: "ipc" takes a fresh path, "tcp" and "tls" a free
 * port.
 */
void server_init(struct server *s);
void server_start(struct server *s, const char *url);
/* How many loops the environment asks for. */
uint32_t server_loops(void);
/* For the clock that a test brings: the thread has looked at it. */
void server_look(void);
/* Until every loop whose timers run has looked at the clock several times. */
void server_wait_for_looks(struct server *s);
/* Ends everything; asserts that no buffer, request or handle is left. */
void server_stop(struct server *s);
/* Stops the transport on the loop's thread; done when the listener refuses. */
void server_drain(struct server *s);
void engine_hold(struct engine *e);
void engine_release(struct engine *e, bool is_reversed);
/* Waits until n requests are held. */
void engine_wait_queued(struct engine *e, uint32_t n);

/* Waits until *counter is at least value, up to 20 s; fails the test after. */
void wait_at_least(const _Atomic uint64_t *counter, uint64_t value);
void wait_equal(const _Atomic uint64_t *counter, uint64_t value);

#define STEP_SESSION UINT64_C(0x1122334455667788) /* of every step below */
/* A step message whose reply has reply_bytes (0: the payload itself); malloc'ed. */
uint8_t *step_message(uint64_t request_id, uint32_t reply_bytes, const void *payload,
                      uint32_t payload_bytes, size_t *out_bytes);
/* Asserts that msg is an ok reply to a step made above. */
void check_step_reply(uint8_t *msg, size_t n, uint64_t request_id, uint32_t reply_bytes,
                      const void *payload, uint32_t payload_bytes);
/* Asserts a reply of this status; a sentence that has this part in it. */
void check_error_reply(uint8_t *msg, size_t n, uint64_t request_id, attn_status st,
                       const char *sentence_part);

/* A connection with a 20 s receive timeout. */
int raw_connect(const char *url);
void raw_connect_with(int fd, const char *url); /* the same with a socket that exists */
void raw_send(int fd, const void *bytes, size_t n);
/* Receives exactly n bytes. False: end of file or error. */
bool raw_receive(int fd, void *bytes, size_t n);
void raw_handshake(int fd);
/* One message with n_ids ids, the last being id | top bit, the ones before 1, 2, ... */
void raw_send_message(int fd, bool is_ipc, uint32_t n_ids, uint32_t id, const void *body, size_t n);
/* A whole message, ids checked; its body is malloc'ed. NULL: the connection ended. */
uint8_t *raw_receive_message(int fd, bool is_ipc, uint32_t n_ids, uint32_t *out_id, size_t *out_n);
/* Waits for the end of file (or a reset) whatever comes before it. */
void raw_expect_end(int fd);

uint64_t seed_from_clock(void); /* and prints it */

#endif
