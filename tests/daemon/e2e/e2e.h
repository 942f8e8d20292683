/* e2e.h: the real attnd binary on the cpu backend, spoken to with real libnanomsg sockets (raw REQ)
 * or through shared memory (shm_link.h), and the codec; and a model of what it should compute.
 * E2E_TRANSPORT=shm, tls or tcp in the environment runs any test through shared memory, TLS or TCP,
 * E2E_CARDS=0,1 on two engines, E2E_SPLIT=heads or tokens with sequences split over them;
 * E2E_MOST_CARDS=2 says that there are no more, where engines need cards. E2E_V_IN_K=1 makes the
 * model's pool one of latents, whose V is K; E2E_KV_DTYPE=nvfp4 keeps its K and V in that dtype.
 *
 * Tokens' q, k and v are a function of (stream, layer, position), so that a repeated step carries
 * the same bytes, and the reference can be computed for any sequence from the streams of its
 * tokens.
 */
#ifndef TESTS_DAEMON_E2E_H
#define TESTS_DAEMON_E2E_H

#include <sys/types.h>

#include "kernels/reference.h"
#include "proto/wire.h"

/* --- the daemon ------------------------------------------------------------------------------- */

struct e2e {
    pid_t pid; /* 0: has ended */
    char gpu_path[96], tcp_url[96], dir[64], url[96], shm_path[96], tls_url[96], log[96];
};

/* Sequences are on several cards, each on one. */
bool e2e_is_spread(void);
/* How many of a whole pool's blocks count for one that was asked for: there are as many cards. */
uint32_t e2e_blocks_each(void);
/* How many cards a test may have. */
uint32_t e2e_most_cards(void);
/* Runs in the process that becomes attnd, if a test sets it. */
extern void (*e2e_before_exec)(void);
/* Starts attnd with a socket in a directory of its own and waits until it serves. flags:
 * NULL-terminated, after those that make it small. */
void e2e_start(struct e2e *d, const char *const *flags);
/* The same at the same addresses, after the daemon ended. */
void e2e_restart(struct e2e *d, const char *const *flags);
/* Runs attnd with these flags alone until it ends: its exit code; what it wrote is in d->log. */
int e2e_run(struct e2e *d, const char *const *flags);
void e2e_signal(struct e2e *d, int number);
pid_t e2e_child(const struct e2e *d); /* the one process of a supervisor; 0: it is between two */
void e2e_kill_child(const struct e2e *d);
/* Stops it until SIGCONT: all its threads stand still when this returns. */
void e2e_pause(struct e2e *d);
/* Waits for the end: exit code, or -signal. Fails the test after five minutes. */
int e2e_wait(struct e2e *d);
void e2e_await_log(const struct e2e *d, const char *text); /* fails the test after five minutes */
bool e2e_log_has(const struct e2e *d, const char *text);
/* SIGTERM, wait, expect 0, remove the directory; kills what is left if a test failed before. */
void e2e_stop(struct e2e *d);

/* --- a client --------------------------------------------------------------------------------- */

struct e2e_reply {
    struct e2e_reply *next;
    void *message; /* libnanomsg's; NULL: it came another way */
    uint8_t *aligned;
    struct wire_arena arena;
    struct wire_reply wire;
};

struct e2e_client {
    pid_t pid; /* the daemon's that it connected to */
    int socket;
    struct shm_link *shm; /* NULL: not through shared memory */
    struct client_transport *tls; /* NULL: not through TLS */
    uint64_t session, next_id;
    uint32_t pool;
    struct e2e_reply *replies; /* received and not freed */
    /* over a bad network (not shared memory): what is not answered in time is sent again */
    char url[96];
    int retry_ms; /* 0: nothing is */
    uint8_t *last; /* the message sent last */
    size_t last_bytes;
    uint64_t n_retries;
    /* over nanomsg: the daemon may be gone when something is sent */
    bool may_fail, has_failed;
};

void e2e_connect(struct e2e_client *c, const struct e2e *d); /* and hello */
void e2e_connect_shm(struct e2e_client *c, const struct e2e *d); /* whatever the environment says */
/* The same through TLS, which d listens at, and without hello. */
void e2e_connect_tls(struct e2e_client *c, const struct e2e *d);
/* Says hello with a token, "" none; the session is the client's. */
const Attnd__Reply *e2e_hello(struct e2e_client *c, const char *token);
void e2e_connect_badly(struct e2e_client *c, const struct e2e *d, int retry_ms); /* and hello */
void e2e_disconnect(struct e2e_client *c);
void e2e_forget(struct e2e_client *c); /* the replies received so far */
uint64_t e2e_send(struct e2e_client *c, Attnd__Request *h, const void *payload,
                  size_t payload_bytes);
/* Any bytes as one message. */
void e2e_send_bytes(struct e2e_client *c, const void *bytes, size_t n);
/* The reply; fails the test after five minutes, or when the daemon has ended. Belongs to the
 * client. */
const struct wire_reply *e2e_await(struct e2e_client *c, uint64_t id);
/* NULL: nothing came within timeout_ms. */
const struct wire_reply *e2e_await_ms(struct e2e_client *c, uint64_t id, int timeout_ms);
/* The i-th of the replies to id that are received, newest first; NULL: there are no more. */
const struct wire_reply *e2e_reply(const struct e2e_client *c, uint64_t id, uint32_t i);
const Attnd__Reply *e2e_call(struct e2e_client *c, Attnd__Request *h);

/* --- the model -------------------------------------------------------------------------------- */

enum {
    E2E_LAYERS = 3,
    E2E_Q_HEADS = 4,
    E2E_KV_HEADS = 2,
    E2E_DIM = 32,
    E2E_BLOCK_TOKENS = 16,
    E2E_MAX_TOKENS = 2048,
};

struct e2e_seq {
    uint64_t name;
    uint32_t epoch;
    uint32_t stream[E2E_MAX_TOKENS]; /* of each token */
};

/* Layer 0 is plain, layer 1 has a window and sink tokens, layer 2 a soft cap. Sets c->pool. Where
 * all have windows, that is one of 24 to 40. */
extern bool e2e_all_have_windows;
/* Of pools that are made from now on: an item's bytes may depend on the batch it is in. */
extern bool e2e_is_batch_variant;
void e2e_make_pool(struct e2e_client *c, attn_dtype dtype, uint32_t n_blocks);
attn_dtype e2e_dtype(void); /* of the pool made last */
attn_dtype e2e_kv_dtype(void); /* of its cache */
/* status of the reply; *s is set up */
attn_status e2e_open_seq(struct e2e_client *c, struct e2e_seq *s, uint64_t name, uint32_t stream);
attn_status e2e_fork(struct e2e_client *c, const struct e2e_seq *src, struct e2e_seq *s,
                     uint64_t name, uint32_t len, uint32_t stream);
attn_status e2e_truncate(struct e2e_client *c, struct e2e_seq *s, uint32_t len);
/* Not found is success for one that was sent again. */
attn_status e2e_close_seq(struct e2e_client *c, const struct e2e_seq *s);
attn_status e2e_adopt(struct e2e_client *c, struct e2e_seq *s, uint32_t layer_len[E2E_LAYERS]);

struct e2e_item {
    struct e2e_seq *seq;
    uint32_t pos, n_tokens;
};
/* A step's header, and where its tensors are. */
enum { E2E_MAX_ITEMS = 64 };
struct e2e_step {
    Attnd__Step wire;
    struct wire_step_layout layout;
    uint64_t seq[E2E_MAX_ITEMS];
    uint32_t epoch[E2E_MAX_ITEMS], pos[E2E_MAX_ITEMS], n_tokens[E2E_MAX_ITEMS];
};
void e2e_build_step(struct e2e_step *s, const struct e2e_client *c, uint32_t layer, uint32_t flags,
                    const struct e2e_item *items, uint32_t n_items);
/* Its q, k and v, as of this layer. */
void e2e_fill_step(const struct e2e_step *s, uint32_t layer, const struct e2e_item *items,
                   uint8_t *payload);
#define E2E_BOTH (WIRE_STEP_APPEND | WIRE_STEP_ATTEND)
uint64_t e2e_send_step(struct e2e_client *c, uint32_t layer, uint32_t flags,
                       const struct e2e_item *items, uint32_t n_items, uint64_t timeout_us);
/* The same with zeros for tensors: costs the client next to nothing. */
uint64_t e2e_send_zeros(struct e2e_client *c, uint32_t layer, const struct e2e_item *item,
                        uint64_t timeout_us);
/* The outputs of an answered step against the reference; fails the test where they differ. */
void e2e_check_step(const struct wire_reply *r, uint32_t layer, uint32_t flags,
                    const struct e2e_item *items, uint32_t n_items);
/* Sends, waits, checks that it is ok and right. */
void e2e_step(struct e2e_client *c, uint32_t layer, const struct e2e_item *items, uint32_t n_items);
/* One item; its status only. */
attn_status e2e_item(struct e2e_client *c, struct e2e_seq *s, uint32_t layer, uint32_t pos,
                     uint32_t n_tokens);
/* Attends all tokens of a layer again: bytes (malloc) of what comes back. */
void *e2e_read_back(struct e2e_client *c, struct e2e_seq *s, uint32_t layer, uint32_t len,
                    size_t *out_bytes);

#endif
