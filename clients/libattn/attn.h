/* attn.h: the C client library of attnd: attention over KV caches that a daemon keeps.
 *
 * Two nouns: attn_client, a connection and its session; attn_pool, one KV geometry in the daemon.
 * Sequences belong to a pool and are named by ids that the caller chooses.
 *
 * Concurrency
 *   1 Every function may be called from any thread, several at once, on one client or many; only
 *     attn_client_close must be the last call on its client and attn_pool_close the last on its
 *     pool.
 *   2 Replies are read, deadlines kept and lost requests sent again by whichever thread is inside
 *     a call that waits (a blocking call, attn_step_wait, attn_client_poll). One waiting thread
 *     reads for all of them, and writes the rest of a request larger than the socket's buffer.
 *     Each client also has a thread of its own, with all signals blocked, which only renews the
 *     session's lease while no call does; it runs no callback.
 *     Over sockets, steps of 256 KiB and more that a thread waits for (attn_step) go over a second
 *     connection once they have met other requests in flight, so that those need not wait. A step
 *     never overtakes an earlier one of the same sequence.
 *   3 Completion callbacks run on such a thread, with no lock held. They may start steps; a call
 *     that waits, made inside a callback, is refused with ATTN_EINVAL.
 *   4 After fork the child may only call attn_client_close and attn_pool_close on what it inherited
 *     (they free memory and leave the connection to the parent); other calls give ATTN_EINVAL. It
 *     may open clients of its own.
 *
 * Life      A client keeps its session until attn_client_close, however long it is idle. When the
 *           daemon's process ends, calls reconnect by themselves. Where the cache is kept (systemd,
 *           attnd --supervise) they continue in the same session and only take longer. Where it is
 *           not kept, or the daemon could not be reached for a whole lease, the session and its
 *           sequences are gone: calls return ATTN_ENOTFOUND with ATTN_GONE_SESSION. Then
 *           attn_client_reopen makes a new session on the same client; create pools and sequences
 *           again.
 *
 * Time      Every call ends by its timeout (0: the client's default). Timeouts are in microseconds.
 *           Calls that carry whole sequences are many requests, each with that timeout.
 * Delivery  A request whose connection was lost is sent again under the same id until its deadline.
 *           That is harmless: appends name their position.
 * Errors    Calls return a status; attn_last_error has the sentence. If a call that takes a
 *           callback returns an error, the callback never runs; if it returned ATTN_OK, it runs
 *           exactly once. Outputs are written only on success, unless a comment says otherwise.
 * ABI       Structs that may grow begin with struct_size: set it to sizeof the struct and zero the
 *           rest. A size the library does not know is refused with ATTN_EINVAL.
 */
#ifndef ATTN_H
#define ATTN_H

#include "attn_types.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ATTN_API __attribute__((visibility("default")))
#else
#define ATTN_API
#endif

typedef struct attn_client attn_client;
typedef struct attn_pool attn_pool;

/* Names a step that was started and not yet waited for. Never 0. */
typedef uint64_t attn_ticket;

#define ATTN_MESSAGE_BYTES 256
#define ATTN_MAX_IN_FLIGHT 1024 /* requests of one client without an answer yet */
#define ATTN_ALL_TOKENS UINT32_MAX /* attn_seq_fork: what every layer has */

/* Why the calling thread's latest failed call failed. */
struct attn_error {
    attn_status status;
    uint32_t reserved;
    uint64_t retry_after_us; /* the daemon's advice, 0: none */
    char message[ATTN_MESSAGE_BYTES]; /* names field and value */
};
/* Never NULL. Belongs to the calling thread, valid until its next failing call. */
ATTN_API const struct attn_error *attn_last_error(void);

/* What no longer exists, where ATTN_ENOTFOUND alone does not say. */
typedef enum attn_gone {
    ATTN_GONE_NOTHING, /* another error, or the daemon could not say in time */
    ATTN_GONE_SESSION, /* attn_client_reopen, then create pools and sequences again */
    ATTN_GONE_POOL, /* create it again: attn_pool_create */
    ATTN_GONE_SEQ, /* open it again and append its tokens again */
} attn_gone;
/* Refers to the calling thread's latest failed call; inside a completion callback, to the failed
 * step. */
ATTN_API attn_gone attn_last_error_gone(void);

/* The library's version, as "1.2.3". */
ATTN_API const char *attn_version(void);

/* ---- client ---- */

/* The default endpoint: $ATTND_ENDPOINT; else, if not root, ipc://$XDG_RUNTIME_DIR/attnd.sock where
 * that exists; else ipc:///run/attnd/attnd.sock. These are also attnd's defaults.
 * Owner    the library: valid until this thread's next call */
ATTN_API const char *attn_default_url(void);

struct attn_client_options {
    uint32_t struct_size;
    uint32_t max_retries; /* of a request answered with a retryable status; 0: none */
    uint64_t timeout_us; /* of calls that give 0; 0: 10 seconds */
    uint64_t resume_session; /* a session to continue, 0: a new one */
    const char *client_name; /* for the daemon's logs, NULL: the process's name */
    /* may be left out of struct_size */
    uint32_t fail_fast; /* 1: attn_client_open fails at the first failed attempt to connect */
    uint32_t has_no_keeper; /* 1: no thread of its own; only calls renew the session's lease */
    /* names of files; NULL: the named environment variable, if set */
    const char *token_file; /* the tenant's token in its first line; $ATTND_KEY_FILE */
    const char *ca_file; /* for tls+tcp://: CAs of the daemon's certificate; $ATTND_CA_FILE; else
                            the system's */
    /* the client's certificate, where the daemon wants one; $ATTND_TLS_CERT_FILE,
     * $ATTND_TLS_CERT_KEY_FILE */
    const char *cert_file, *cert_key_file;
};

/* The session and the daemon's limits. Fixed until attn_client_reopen, except boot_id. */
struct attn_client_info {
    uint32_t struct_size;
    uint32_t protocol_version;
    uint64_t session; /* for resume_session in another process */
    uint64_t lease_us; /* silence after which the session's sequences are freed */
    uint64_t max_message_bytes;
    uint32_t max_step_items, max_step_tokens, max_seq_tokens;
    uint32_t max_sequences; /* of all clients together; 0: the daemon does not say */
    char server_version[64], backend[64];
    /* may be left out of struct_size */
    uint64_t boot_id; /* of the daemon's process: changes when it restarts */
};

/* Totals of a client since it was opened. */
struct attn_client_counters {
    uint32_t struct_size;
    uint32_t n_in_flight;
    uint64_t n_sent; /* requests, repeats included */
    uint64_t n_resent; /* after a lost connection */
    uint64_t n_retried; /* after a retryable status */
    uint64_t n_timed_out;
    uint64_t n_stray; /* replies to requests that no longer wait */
};

/* attn_client_open: connects to url (ipc://PATH, tcp://HOST:PORT, shm://PATH; NULL:
 * attn_default_url) and opens or resumes a session.
 *
 * Waits for a daemon that is not up yet, or whose HOST is not known yet, unless fail_fast. Of
 * several addresses of HOST, one after the other is tried. timeout_us bounds this call only.
 * Errors   ATTN_EINVAL url or options; ATTN_ECONN no connection within the timeout; ATTN_ETIMEDOUT
 *          connected but no answer; ATTN_ENOTSUP one side lacks a protocol or feature;
 *          ATTN_ENOMEM; what the daemon refuses
 * Owner    the caller owns *out_client until attn_client_close; o may be NULL */
ATTN_API attn_status attn_client_open(const char *url, const struct attn_client_options *o,
                                      uint64_t timeout_us, attn_client **out_client);

/* Ends steps in flight with ATTN_ECONN (their callbacks run inside this call), gives the session up
 * and disconnects. A session without sequences ends, with its hold on pools; sequences that are
 * open wait in the daemon, for who adopts them or resumes the session, until the lease ends. So
 * does a session that was resumed, or whose daemon does not answer within a second. NULL is
 * fine. */
ATTN_API void attn_client_close(attn_client *c);
/* For who knows that the daemon will not answer any more: calls, steps and layers of lanes that
 * wait for it, on any thread, end at once with ATTN_ECONN, and so do all that come later. From any
 * thread, before attn_client_close; cannot be taken back. */
ATTN_API void attn_client_give_up(attn_client *c);

/* Opens a new session on the same client. The old one, if it still exists, is given up as by
 * attn_client_close. Requests in flight remain the old session's. Handles of its pools return
 * ATTN_GONE_POOL from then on, and so do its sequences; closing these always returns ATTN_OK.
 * Errors as attn_client_open. */
ATTN_API attn_status attn_client_reopen(attn_client *c, uint64_t timeout_us);

/* out->struct_size is set by the caller. */
ATTN_API attn_status attn_client_info(const attn_client *c, struct attn_client_info *out);
ATTN_API attn_status attn_client_counters(attn_client *c, struct attn_client_counters *out);

/* One round trip, which also renews the session's lease. out_ns gets its time; may be NULL. */
ATTN_API attn_status attn_client_ping(attn_client *c, uint64_t timeout_us, uint64_t *out_ns);

/* The daemon's counters as a JSON object; free with attn_free. */
ATTN_API attn_status attn_client_stats(attn_client *c, uint64_t timeout_us, char **out_json);

/* Asks the daemon to accept no new sessions and sequences and to exit when its work is done. For
 * hold_us, a day at most, open sequences keep it up, so that they can move to other daemons; asked
 * again, the time begins anew. 0: they do not.
 * Errors   ATTN_EAUTH; ATTN_EINVAL hold_us */
ATTN_API attn_status attn_client_drain(attn_client *c, uint64_t hold_us, uint64_t timeout_us);

/* For operators: except for pools, the daemon answers only its own user and root (ATTN_EAUTH).
 * Gives a list as a JSON object: topic is pools, sessions, sequences, tenants, cache, requests,
 * open_requests, slow, events, config, blocks or block_events. A list begins behind `after`; its
 * `next` says where to continue. ATTN_ENOTSUP: no such topic. Free with attn_free. */
ATTN_API attn_status attn_client_inspect(attn_client *c, const char *topic, uint64_t after,
                                         uint64_t timeout_us, char **out_json);
/* attn_client_inspect for events. Where there is none behind `after` yet it waits for one, for
 * wait_us or what the daemon allows (5 s), and then gives an empty list. timeout_us comes on top of
 * that wait. */
ATTN_API attn_status attn_client_watch(attn_client *c, uint64_t after, uint64_t wait_us,
                                       uint64_t timeout_us, char **out_json);
/* Ends a session, named as in the list of sessions, with all its sequences; or frees one sequence
 * of a tenant (NULL: the operator's own, or any where there are no tenants). ATTN_ENOTFOUND. */
ATTN_API attn_status attn_client_kill_session(attn_client *c, const char *session,
                                              uint64_t timeout_us);
ATTN_API attn_status attn_client_kill_seq(attn_client *c, const char *tenant, uint64_t seq,
                                          uint64_t timeout_us);
/* Raises the epoch of a sequence, named as above, so that all handles of it are stale. Its session
 * still has it, and gets a handle by adopting it. Asked again, the epoch is raised again.
 * ATTN_ENOTFOUND. */
ATTN_API attn_status attn_client_retire_seq(attn_client *c, const char *tenant, uint64_t seq,
                                            uint64_t timeout_us);
/* Lets a daemon with engine.fence serve appends for that long from since_ns on, by CLOCK_MONOTONIC
 * of this host; 0: from now on. Who decides by a clock whether it may is to say when it looked: it
 * may have waited since. ATTN_EINVAL: it has no fence. */
ATTN_API attn_status attn_client_fence(attn_client *c, uint64_t since_ns, uint64_t timeout_us);
/* Moves a sequence, named as above, to another of the daemon's cards while it is used; it may be
 * there already. Returns when it has arrived.
 * Errors   ATTN_EOVERLOAD another sequence is being moved, or this one is never idle;
 *          ATTN_ENOBLOCKS no room on that card; ATTN_ENOTSUP its pool is split; ATTN_EINVAL no such
 *          card */
ATTN_API attn_status attn_client_move_seq(attn_client *c, const char *tenant, uint64_t seq,
                                          uint32_t card, uint64_t timeout_us);
/* Changes a setting ("log.level") until the daemon reads its settings again. ATTN_ENOTFOUND;
 * ATTN_ENOTSUP: it needs a restart; ATTN_EINVAL: the value. */
ATTN_API attn_status attn_client_configure(attn_client *c, const char *name, const char *value,
                                           uint64_t timeout_us);
/* Removes a tenant's pool (NULL: the operator's). ATTN_ENOTFOUND; ATTN_EINVAL: it has sequences;
 * ATTN_EOVERLOAD: steps of it are running. */
ATTN_API attn_status attn_client_pool_drop(attn_client *c, const char *tenant, const char *name,
                                           uint64_t timeout_us);
/* attn_pool_resize by name, for a tenant's pool (NULL: the session's own). Only the tenant itself
 * and operators may. out_free_blocks gets the blocks on all cards that are free then, or cached and
 * can be evicted. */
ATTN_API attn_status attn_client_pool_resize(attn_client *c, const char *tenant, const char *name,
                                             uint32_t n_blocks, uint64_t timeout_us,
                                             uint32_t *out_free_blocks);
/* Has the daemon read its settings again; out_json says how many changed. Free with attn_free. */
ATTN_API attn_status attn_client_reload(attn_client *c, uint64_t timeout_us, char **out_json);

/* Frees what attn_client_stats, _inspect, _watch and _reload gave; NULL is fine. */
ATTN_API void attn_free(void *p);

/* For event loops: readable when attn_client_poll has something to do. While steps are in flight
 * call attn_client_poll at least every 20 ms besides, for deadlines and reconnects. -1: after fork.
 * */
ATTN_API int attn_client_fd(attn_client *c);

/* attn_client_poll: completes what can be completed; waits up to timeout_us for the first.
 *
 * timeout_us 0 looks only. out_n_completed may be NULL.
 * Errors   ATTN_EINVAL inside a callback or after fork; nothing to complete is ATTN_OK and 0 */
ATTN_API attn_status attn_client_poll(attn_client *c, uint64_t timeout_us,
                                      uint32_t *out_n_completed);

/* attn_client_copy: memcpy for a fill of attn_in_place, into what it was given, on its thread.
 *
 * A device that reads q, k and v where they are (shm://, a backend other than cpu) reads lines that
 * are dirty in a core's cache at six tenths of the speed of lines in memory. So for such a client,
 * on x86-64 and where dst and bytes are multiples of 16, the stores bypass the cache; the copy
 * takes half as long again, but the device's time is shared by all workers. Steps that are not in
 * place are copied in the same way. c may be NULL: plain memcpy. */
ATTN_API void attn_client_copy(const attn_client *c, void *dst, const void *src, size_t bytes);

/* attn_client_pin: page-locks the memory of messages, so that a CUDA device copies q, k and v to
 * where fill puts them, and out and lse from where take finds them, at the bus's speed and beside
 * its kernels (cudaMemcpyAsync; both wait for it before they return).
 *
 * Over shm:// that is the memory shared with the daemon, now and after each new connection. Over
 * sockets each message of 256 KiB and more, and each answer, has a buffer that is page-locked when
 * it is first needed and kept for later ones, 128 MiB in all; what goes beyond that is ordinary
 * memory. Takes a third of a millisecond a MiB; what can't be page-locked any more works as before.
 * For all devices, on the calling thread's current one, whose primary context is made if there is
 * none. Ends with the client; calling again does nothing. Any thread.
 *
 * Errors   ATTN_ENOTSUP libattn-cuda.so, a driver or a device is missing, or it refuses;
 *          ATTN_ENOMEM */
ATTN_API attn_status attn_client_pin(attn_client *c);

/* ---- pool ---- */

/* How one layer attends; all zero is plain causal attention. With branches (dilated attention, as
 * in LongNet): kv head h of a branch has the tokens that are h mod rate modulo rate, as queries and
 * as keys; a query sees those of its own segment, up to itself unless is_full. The branches'
 * results are weighed by their softmax denominators. One branch must have rate 1; no window. */
struct attn_layer {
    float scale; /* multiplies q.k; at most 1e4; 0: 1 / sqrt(head_dim_k) */
    uint32_t window_tokens; /* 0: unlimited; else query p sees keys (p - window, p] */
    uint32_t sink_tokens; /* with a window: first tokens that stay visible */
    float soft_cap; /* 0: none; else, 1e-6 to 1000, s -> cap * tanh(s / cap) */
    uint32_t is_full; /* 1: not causal */
    uint32_t n_branches; /* 0: not dilated; at most ATTN_MAX_BRANCHES */
    const float *sink_logits; /* [num_q_heads] or NULL; -1e20 to 1e20 */
    const float *alibi_slopes; /* [num_q_heads] or NULL; -1e20 to 1e20 */
    const struct attn_branch *branches; /* [n_branches], NULL if there are none */
};

struct attn_pool_spec {
    uint32_t struct_size;
    uint32_t layer_struct_size; /* sizeof(struct attn_layer) */
    const char *name;
    uint32_t num_layers;
    uint32_t num_q_heads, num_kv_heads;
    uint32_t head_dim_k;
    uint32_t head_dim_v; /* 0: head_dim_k */
    uint32_t block_tokens; /* 0: 16 */
    uint32_t n_blocks; /* 0: what is left of the daemon's KV memory */
    attn_dtype q_dtype; /* of q, k, v and out */
    attn_dtype kv_dtype; /* as stored; NONE: q_dtype */
    uint32_t is_batch_invariant;
    uint32_t n_layers; /* entries of layers: 0 all plain, 1 all alike, else num_layers */
    attn_split split; /* over the daemon's cards; AUTO: whole, if n_blocks fit a card */
    const struct attn_layer *layers;
    const char *model, *rope; /* what the cached bytes mean; NULL: "" */
    /* may be left out of struct_size */
    uint32_t is_v_in_k; /* 1: V is the first head_dim_v elements of K, as in latent attention (MLA):
                           steps have no v, the cache stores K alone */
    /* With is_v_in_k: steps carry heads before and after their projections, which the daemon
     * computes with weights from attn_pool_weights. A head's q is q_nope_dim elements and then the
     * head_dim_k - head_dim_v with positions, its out is out_dim. 0: none */
    uint32_t q_nope_dim, out_dim;
};

/* attn_pool_create: makes a pool, or finds the one of this name if its spec is the same. A pool
 * that differs only in n_blocks, and that no session holds and no sequence uses, is made again.
 *
 * Errors   ATTN_EEXIST the name is taken by another spec; ATTN_ENOTSUP the backend cannot compute
 *          this geometry (the message names what); ATTN_ENOMEM KV memory; ATTN_EINVAL
 * Owner    the handle is the caller's until attn_pool_close; the pool is the daemon's, and held by
 *          the session until attn_pool_release */
ATTN_API attn_status attn_pool_create(attn_client *c, const struct attn_pool_spec *spec,
                                      uint64_t timeout_us, attn_pool **out_pool);
/* Finds a pool by name; the handle holds it as attn_pool_create's does. ATTN_ENOTFOUND. */
ATTN_API attn_status attn_pool_describe(attn_client *c, const char *name, uint64_t timeout_us,
                                        attn_pool **out_pool);
/* attn_pool_release: the handle no longer holds its pool. When no handle of this client does, the
 * session releases it: its memory can go to other pools once no sequence uses it and no other
 * session holds it. Until then the handle works as before. A pool that is never released is held
 * until attn_client_close or its session's end, even after attn_pool_close.
 *
 * Errors   those of a call without an answer: it is not known whether the session still holds the
 *          pool, call again. ATTN_OK if the pool or the session is gone, or the handle was released
 *          before */
ATTN_API attn_status attn_pool_release(attn_pool *p, uint64_t timeout_us);
/* attn_pool_resize: gives the pool n_blocks blocks on each of the daemon's cards, while its
 * sequences are used and its steps are in flight. Shrinking evicts cached blocks as far as needed
 * and moves blocks in use. Growing takes memory that lies behind the pool, left there by pools that
 * shrank or were dropped. Either all cards do it or none.
 *
 * Thread   updates what attn_pool_spec_of and attn_pool_free_blocks give for this handle: no other
 *          thread may call these meanwhile
 *
 * Errors   nothing changed: ATTN_ENOBLOCKS more are in use, or pinned; ATTN_ENOMEM there is no
 *          room; ATTN_EQUOTA; ATTN_EOVERLOAD blocks of it are on their way to another card;
 *          ATTN_EDEVICE it is split, and a card lost; ATTN_EINVAL. The message names the numbers,
 *          and of several cards which one can't; ATTN_ENOTSUP by an older daemon: it is split */
ATTN_API attn_status attn_pool_resize(attn_pool *p, uint32_t n_blocks, uint64_t timeout_us);
/* attn_pool_reserve: n_blocks of the pool are the session's from then on, on each of the daemon's
 * cards (of a split pool in all), instead of what it had reserved; 0: none. The session's sequences
 * can then have that many, whatever others do; they may have more, of blocks that are neither
 * reserved nor used. A block that several sequences share counts once for each. What is reserved is
 * given back with the session, also when it ends by its lease; a daemon's restart with its cache
 * keeps it. out_free_blocks (may be NULL): those that the session can have now besides those that
 * it has.
 *
 * Errors   nothing changed: ATTN_ENOBLOCKS others have reserved or use them, the message has the
 *          numbers; ATTN_ENOTFOUND the pool is gone; ATTN_ENOTSUP by an older daemon */
ATTN_API attn_status attn_pool_reserve(attn_pool *p, uint32_t n_blocks, uint64_t timeout_us,
                                       uint32_t *out_free_blocks);
/* attn_pool_set_wire_dtype: how q, k and v of this handle's steps travel; outputs come as ever.
 * ATTN_DTYPE_NONE, or the pool's q_dtype: as they are. ATTN_FP8_E4M3, for a q_dtype of bf16: as
 * codes with a scale for each 128 elements, in 0.52 of the bytes; an element is off by 2^-4 of
 * itself at most, and what a pool of head_dim 128 caches in fp8 is the same as without. NaN stays
 * NaN, infinities become NaN, a group below 2^-100 becomes zeros. It pays on links that give this
 * worker less than some 2 Gbit/s (docs/networked.md). Steps with indices are refused,
 * and lanes; shared memory has no wire. No step of the handle may be in flight.
 *
 * Errors   ATTN_EINVAL another dtype, or another q_dtype; ATTN_ENOTSUP over shm://. A daemon that
 *          does not know it refuses the steps (step.dtype) */
ATTN_API attn_status attn_pool_set_wire_dtype(attn_pool *p, attn_dtype dtype);
/* attn_pool_weights: gives the weights of a layer of a pool with q_nope_dim, as models of latent
 * attention have them (kv_b_proj). They are sent, a piece at a time, when a step finds that the
 * daemon has none: by the calls that wait for steps, attn_step and attn_step_wait, which then send
 * the step again, and by attn_lane_plan, those of all its layers. Whoever gets ATTN_ENOWEIGHTS by a
 * callback calls attn_pool_send_weights and starts the step again. All clients of a pool give the
 * same weights.
 *
 * Shapes   weights [num_q_heads][q_nope_dim + out_dim][head_dim_v] of the pool's q_dtype: of each
 *          head what makes latents to its K, then to its V. n_bytes: of all of it
 * Owner    weights stay the caller's, and as they are until attn_pool_close
 * Thread   any, also beside steps
 *
 * Errors   ATTN_EINVAL the pool has no projections, there is no such layer, n_bytes is another
 *          number; ATTN_ENOMEM */
ATTN_API attn_status attn_pool_weights(attn_pool *p, uint32_t layer, const void *weights,
                                       uint64_t n_bytes);
/* attn_pool_send_weights: sends them now, to whatever daemon the client is connected to.
 *
 * Errors   ATTN_EINVAL none were given; ATTN_EEXIST the layer has others already; those of a call
 *          without an answer: call again */
ATTN_API attn_status attn_pool_send_weights(attn_pool *p, uint32_t layer, uint64_t timeout_us);
/* Frees the handle; no step of it may be in flight. NULL is fine. */
ATTN_API void attn_pool_close(attn_pool *p);
/* The spec as the daemon has it, defaults filled in; the handle's. */
ATTN_API const struct attn_pool_spec *attn_pool_spec_of(const attn_pool *p);
/* Blocks that were free when the handle was made, or last resized its pool. */
ATTN_API uint32_t attn_pool_free_blocks(const attn_pool *p);

/* ---- sequences ---- */

/* A sequence as its holder knows it. The daemon sets the epoch: truncating or adopting a sequence
 * raises it, and a request with an older epoch is refused with ATTN_ESTALE, however late it
 * arrives. */
struct attn_seq {
    uint64_t id;
    uint32_t epoch;
    uint32_t reserved;
};

/* A new, empty sequence. ATTN_EEXIST, ATTN_EOVERLOAD: the daemon holds as many as it can,
 * ATTN_EDRAINING. */
ATTN_API attn_status attn_seq_open(attn_pool *p, uint64_t id, uint64_t timeout_us,
                                   struct attn_seq *out_seq);
/* What is known of a sequence's tokens. */
struct attn_tokens {
    const uint32_t *ids; /* [n] of the first tokens; equal ones have equal K and V in this pool */
    uint32_t n;
    uint32_t reserved;
    uint64_t adapter; /* whatever else K and V depend on, such as a LoRA's digest; 0: nothing */
};
/* A new sequence of these tokens. It begins with the prefix that the cache has: every layer has
 * *out_cached tokens, less than t->n; append from there on. Only the first 131072 tokens are looked
 * up. Full blocks of a sequence with known ids are shared with the tenant's other sequences, even
 * after it is closed. ATTN_EINVAL: more than max_seq_tokens; else as attn_seq_open. */
ATTN_API attn_status attn_seq_open_with(attn_pool *p, uint64_t id, const struct attn_tokens *t,
                                        uint64_t timeout_us, struct attn_seq *out_seq,
                                        uint32_t *out_cached);
/* Gives the ids of tokens [pos, pos + n), whether they are appended already or not. Known ids may
 * be given again. ATTN_EINVAL: ids before pos are not known, or one differs: truncate first. */
ATTN_API attn_status attn_seq_tokens(attn_pool *p, const struct attn_seq *seq, uint32_t pos,
                                     const uint32_t *ids, uint32_t n, uint64_t timeout_us);
/* How long shared blocks stay once no sequence has them. A range goes from first_token to where the
 * next one begins; tokens before the first range are as if all fields were 0. */
struct attn_retention {
    uint32_t first_token; /* a block belongs to the range of its first token */
    int32_t priority; /* -3 to 3: the lowest are evicted first */
    uint32_t time_to_live_s; /* since the last use, at most 2^20, rounded up to a power of two: then
                                it goes before others of its priority; 0: no end */
    uint32_t is_pinned; /* 1: it is never evicted, and its pool has that much less; until somebody
                           with the same tokens says otherwise, or the pool is dropped. What comes
                           after tokens that were evicted is lost all the same. */
};
/* Sets the ranges r [n], at most 8, in order of first_token. They replace earlier ones from
 * r[0].first_token on and also apply to blocks that are shared already. ATTN_EINVAL: the message
 * names the range. */
ATTN_API attn_status attn_seq_retain(attn_pool *p, const struct attn_seq *seq,
                                     const struct attn_retention *r, uint32_t n,
                                     uint64_t timeout_us);
/* A new sequence that shares the first len tokens (ATTN_ALL_TOKENS: all that every layer has).
 * out_layer_len [num_layers] gets the new sequence's tokens per layer, may be NULL. */
ATTN_API attn_status attn_seq_fork(attn_pool *p, const struct attn_seq *seq, uint64_t new_id,
                                   uint32_t len, uint64_t timeout_us, struct attn_seq *out_seq,
                                   uint32_t *out_layer_len);
/* Removes tokens from len on, in every layer; seq gets the new epoch. Truncate before writing other
 * tokens to positions that any earlier request has named, whether it was answered or not. */
ATTN_API attn_status attn_seq_truncate(attn_pool *p, struct attn_seq *seq, uint32_t len,
                                       uint64_t timeout_us);
/* Of the tree that every layer has at the sequence's end (attn_step.parents), keeps the path of
 * these nodes as its next tokens: indices of nodes, from one whose parent is -1 downwards. Drops
 * the others; n 0: all of them, also where some layers have none yet. seq gets the new epoch. Nodes
 * numbered as a path that is committed, 0, 1, 2.., need not be moved, which costs least.
 * Errors   ATTN_EINVAL no tree, or no path of it; ATTN_ENOBLOCKS none for what moves, nothing
 *          changed */
ATTN_API attn_status attn_seq_commit(attn_pool *p, struct attn_seq *seq, const uint32_t *nodes,
                                     uint32_t n, uint64_t timeout_us);
/* Closes and frees the sequence. ATTN_OK also when its session is gone. ATTN_EMOVED: it is another
 * daemon's now, and goes on there. */
ATTN_API attn_status attn_seq_close(attn_pool *p, const struct attn_seq *seq, uint64_t timeout_us);
/* Takes over a sequence, of any session of the same tenant, under a new epoch. out_layer_len
 * [num_layers] gets its committed tokens per layer, may be NULL. ATTN_ENOTFOUND. */
ATTN_API attn_status attn_seq_adopt(attn_pool *p, uint64_t id, uint64_t timeout_us,
                                    struct attn_seq *out_seq, uint32_t *out_layer_len);

/* What whoever adopts a sequence is to know: of the application, the daemon does not look at it. */
#define ATTN_NOTE_BYTES 4096 /* at most */
/* Sets the note of an own sequence in place of the one before; n_bytes 0: it has none. It is kept
 * as long as the sequence is, by a daemon that follows, by moves and in files, and takes memory of
 * cache.table_memory. A fork begins without one.
 * Errors   ATTN_EQUOTA the one before stays; ATTN_ENOTSUP an older daemon */
ATTN_API attn_status attn_seq_note(attn_pool *p, const struct attn_seq *seq, const void *note,
                                   uint32_t n_bytes, uint64_t timeout_us);
/* The note of a sequence, of any session of the same tenant. */
ATTN_API attn_status attn_seq_note_get(attn_client *c, uint64_t id, uint64_t timeout_us,
                                       uint8_t out_note[ATTN_NOTE_BYTES], uint32_t *out_n_bytes);

/* Where a sequence is. */
struct attn_place {
    char url[128]; /* of its daemon, as the one who moved it connected to that; "": it is here */
    uint64_t id; /* there */
    uint32_t epoch; /* there: of an open sequence now, else at the end of the move */
};
/* Says where a sequence is, or where it went from here: after ATTN_EMOVED. epoch: of the handle; 0:
 * whichever had the id last. Connect to a url only if you know it: a session of the tenant has said
 * it. ATTN_ENOTFOUND: it is not known. */
ATTN_API attn_status attn_seq_locate(attn_client *c, uint64_t id, uint32_t epoch,
                                     uint64_t timeout_us, struct attn_place *out);

/* What an open with some tokens would find at this moment, and how much room its pool has. */
struct attn_probe {
    uint32_t cached_tokens; /* of the tokens, that every layer has: as *out_cached of an open */
    uint32_t tier_tokens; /* those behind them that would come from host memory or disk first */
    uint32_t n_blocks; /* of the pool, on all cards */
    uint32_t n_free_blocks; /* of them free, or cached and evictable; where blocks are reserved
                               (attn_pool_reserve), those that the session can have, of several
                               cards on the one that answers */
    uint32_t n_reserved_blocks; /* that the session has reserved */
};
/* Makes nothing. ATTN_ENOTFOUND: the pool is gone. */
ATTN_API attn_status attn_seq_probe(attn_pool *p, const struct attn_tokens *t, uint64_t timeout_us,
                                    struct attn_probe *out);

/* One of several requests that go in one message. */
typedef enum attn_call_kind {
    ATTN_CALL_OPEN = 1, /* seq.id, tokens; gives seq.epoch, n_cached */
    ATTN_CALL_ADOPT, /* seq.id; gives seq.epoch, layer_len */
    ATTN_CALL_FORK, /* seq, new_id, len; gives seq of the new sequence, layer_len */
    ATTN_CALL_TOKENS, /* seq, pos, tokens (adapter is not looked at) */
    ATTN_CALL_TRUNCATE, /* seq, len; gives seq.epoch */
    ATTN_CALL_CLOSE, /* seq */
    ATTN_CALL_PROBE, /* tokens; gives probe */
    ATTN_CALL_COMMIT, /* seq; tokens.ids are the nodes of the path; gives seq.epoch */
} attn_call_kind;
struct attn_seq_call {
    uint32_t struct_size;
    attn_call_kind kind;
    struct attn_seq seq;
    uint64_t new_id;
    uint32_t pos, len; /* len ATTN_ALL_TOKENS: of a fork, what every layer has */
    struct attn_tokens tokens; /* the whole call must fit a message of max_message_bytes */
    uint32_t *layer_len; /* [num_layers] or NULL */
    /* the answer; all that a call gives is written only where error.status is ATTN_OK */
    uint32_t n_cached;
    struct attn_probe probe;
    struct attn_error error;
};
/* attn_seq_calls: carries out n calls in their order, 128 to a message or as many as fit. Each
 * stands alone: a failed one does not stop those behind it. As every request, each is carried out
 * once however often it is sent.
 *
 * Returns  ATTN_OK if every call has its answer, also if it failed; else the first n_done (may be
 *          NULL) have theirs, and of the others it is not known whether they were carried out
 * Errors   those of a call without an answer; ATTN_EINVAL a kind, or a call too large: nothing of
 *          its message was carried out */
ATTN_API attn_status attn_seq_calls(attn_pool *p, struct attn_seq_call *calls, uint32_t n,
                                    uint64_t timeout_us, uint32_t *n_done);

/* ---- sequences in files and between daemons ---- */

/* What a file holds. docs/sequence-file.md has the format. */
struct attn_seq_file {
    uint32_t struct_size;
    uint32_t num_layers;
    uint64_t id; /* that the sequence had */
    uint64_t adapter;
    uint64_t bytes; /* of the file */
    uint32_t n_tokens; /* of the longest layer */
    uint32_t n_ids; /* of the first tokens, ids are known */
    uint32_t n_blocks;
    attn_dtype kv_dtype;
    char pool[64]; /* the name of the pool that it was in */
    /* may be left out of struct_size */
    uint32_t freed_first, freed_past; /* of its blocks these are none: no layer's window reaches
                                         them; equal: all are there */
};

/* The name of the pool that a sequence of the tenant's is in. ATTN_ENOTFOUND. */
ATTN_API attn_status attn_seq_pool(attn_client *c, uint64_t id, uint64_t timeout_us,
                                   char out_name[64]);
/* attn_seq_export: writes a sequence's K and V, what they mean, and its token ids to a file.
 *
 * The sequence may be any session's of the same tenant, and goes on meanwhile: the file has it as
 * it was when the call began, without what a truncation has taken away since (the drafts of a
 * worker that speculates; of more than a block it is begun anew), and without the blocks that its
 * windows have released; where they release faster than it is copied, ATTN_ESTALE. Another file of
 * that name is replaced as a whole, once the new one is on the disk, or not at all; of a link, the
 * file that it leads to. The file is its owner's alone (mode 0600). out_file may be NULL.
 * Errors   ATTN_EIO names the file and what the system says, or what is there is no regular file:
 *          a device, a pipe, a socket and a folder stay; ATTN_ENOTFOUND; ATTN_ESTALE it is
 *          truncated to nothing, or others export it, too, all the while; ATTN_EINVAL a layer of a
 *          block is larger than a message may be: the message names the settings; what requests
 *          give */
ATTN_API attn_status attn_seq_export(attn_client *c, uint64_t id, const char *path,
                                     uint64_t timeout_us, struct attn_seq_file *out_file);
/* attn_seq_import: a new sequence of this session with what a file holds: attention over it is as
 * before, to the bit, on the same backend. out_layer_len [num_layers] may be NULL.
 *
 * The file is read and verified to its end before anything else; a failure leaves no sequence.
 * Errors   ATTN_EPROTO it is no such file, cut short, or altered; ATTN_ENOTSUP of another version;
 *          ATTN_EINVAL its blocks mean something else than the pool's: the message names the field;
 *          ATTN_EIO; ATTN_ENOBLOCKS; as attn_seq_open */
ATTN_API attn_status attn_seq_import(attn_pool *p, const char *path, uint64_t id,
                                     uint64_t timeout_us, struct attn_seq *out_seq,
                                     uint32_t *out_layer_len);
/* What a file holds, of which the head is verified, not the blocks. Errors as attn_seq_import. */
ATTN_API attn_status attn_seq_file_info(const char *path, struct attn_seq_file *out_file);

/* What a move has done. */
struct attn_moved {
    uint32_t struct_size;
    uint32_t is_left; /* 1: the source did not answer the close; it frees the sequence with the
                         session of `from` */
    uint32_t n_tokens; /* of the longest layer */
    uint32_t n_blocks, n_blocks_stopped; /* copied in all; copied while appends were refused */
    uint32_t reserved;
    uint64_t bytes;
    uint64_t stop_ns; /* from the adoption at the source until the target had all of it */
};

/* attn_seq_move: moves a sequence of any session of the tenant to a pool of another daemon. There
 * it belongs to the session of `to`'s client, under the same id. out_moved may be NULL.
 *
 * A worker may keep decoding while full blocks are copied. Then the sequence is adopted at the
 * source and its last blocks follow: from there on steps at the source are refused with ATTN_ESTALE
 * or ATTN_ENOTFOUND, and the worker continues at the target with *out_seq, or adopts it there. Each
 * token is appended once: what the source has acknowledged is at the target. The worker may
 * truncate meanwhile; blocks behind the cut are copied again. Drafts not yet truncated when it is
 * refused are at the target, too.
 * Errors   those of attn_seq_export and attn_seq_import. The sequence is at its source then, as it
 *          was; only if the message says so, it has to be adopted there. ATTN_EEXIST: the target
 *          has one of this id, which is no copy that an earlier move of this one has left */
ATTN_API attn_status attn_seq_move(attn_client *from, uint64_t id, attn_pool *to,
                                   uint64_t timeout_us, struct attn_seq *out_seq,
                                   struct attn_moved *out_moved);

/* ---- steps ---- */

/* One sequence's part of a step. */
struct attn_item {
    struct attn_seq seq;
    uint32_t pos; /* of the first of n_tokens; at most the layer's length, less rewrites the same */
    uint32_t n_tokens; /* >= 1 */
};

/* Tensors where the daemon reads and writes them, instead of in arrays of the caller: over shm://
 * nothing is copied on this host, over sockets one copy less each way. Shapes as in attn_step;
 * pointers are aligned for their dtype.
 *
 * fill     writes q, k and v (NULL: not part of the step, or in k). Called inside the call that
 *          starts the step or, where that finds no room in shared memory and when it must be sent
 *          again, on any thread that waits or polls. Plain stores leave lines dirty in the core's
 *          cache, which a device reads more slowly; attn_client_copy leaves none.
 * take     reads out and lse, which are gone when it returns; rows of n_failed items are NaN.
 *          Called for every answer that has them (a partly failed step may be tried again), before
 *          the step counts as complete, on a thread that waits or polls.
 *
 * Neither may call the library for the same client, but for attn_client_copy. */
struct attn_in_place {
    bool is_append, is_attend, has_lse; /* has_lse: with is_attend */
    void (*fill)(void *user, void *q, void *k, void *v);
    void (*take)(void *user, const void *out, const float *lse, uint32_t n_failed);
    void *user;
};

/* Of an item whose sequence is a part of a longer one, as where one daemon has no room for it. */
struct attn_part {
    /* position in the longer sequence of the part's first token; an item's pos counts from there:
     * sink tokens are the longer one's, and sink logits count where it is 0. A multiple of the
     * segments of a dilated layer's branches */
    uint32_t key_base;
    /* of a step of is_full, else not looked at: its queries, which stand at pos and on, see at most
     * the part's first n_keys tokens, all of them behind: n_tokens <= n_keys <= pos */
    uint32_t n_keys;
};

/* One layer's new tokens of n_items sequences; T is the sum of their n_tokens, in items' order. k
 * and v: they are appended. q: it attends, over what is cached then. The arrays are borrowed until
 * the step completes; nothing touches them after that.
 *
 * With array_dtype ATTN_F32 a worker that computes in f32 uses a pool of bf16: half the bytes
 * travel and are cached. Elements are rounded to the nearest bf16 as the message is built, by 2^-8
 * of themselves at most (docs/networked.md has the bound for out), and out is widened. */
struct attn_step {
    uint32_t struct_size;
    uint32_t layer;
    uint32_t n_items;
    attn_dtype array_dtype; /* of q, k, v and out; NONE: the pool's q_dtype */
    const struct attn_item *items; /* [n_items] */
    const void *q; /* [T][num_q_heads][head_dim_k, or as q_nope_dim says]; NULL: append only */
    const void *k; /* [T][num_kv_heads][head_dim_k]; NULL with v: attend only */
    const void *v; /* [T][num_kv_heads][head_dim_v]; NULL in a pool of is_v_in_k */
    void *out; /* [T][num_q_heads][head_dim_v, or out_dim]; with q */
    float *lse; /* [T][num_q_heads] natural log; NULL: not wanted */
    int32_t *item_status; /* [n_items] statuses, written however the step ends; may be NULL */
    uint64_t timeout_us;
    const struct attn_in_place *in_place; /* instead of q, k, v, out and lse; NULL: those */
    /* [T] of a step that appends and attends: the items' tokens are trees (of drafts, of beams), up
     * to 64 nodes each, at the end of their sequences. Each is the index, in its item, of an
     * earlier token, or -1. A token sees the cached ones, those that its parents lead to, and
     * itself; it is at the position behind its parent's. Until attn_seq_commit keeps a path of
     * them, every layer may have the same tree and nothing else is appended behind it. NULL: tokens
     * follow each other. */
    const int32_t *parents;
    /* 1, of a step that only attends: every query sees all of [0, pos + n_tokens), whatever its own
     * position is, as where these are the first tokens of a sequence whose rest is elsewhere, in
     * another pool or daemon. out and lse are merged with those of the rest by the caller. Layers
     * with windows, ALiBi, sink logits or branches refuse it (ATTN_ENOTSUP) unless `parts` says
     * where the queries are. */
    uint32_t is_full;
    uint32_t n_indices; /* with indices, 1 or more */
    /* Of a sparse step, which attends: [T][n_indices] what each query visits of the tokens that it
     * sees, as by an indexer's top k; NULL: all of them. Index i names the tokens of its sequence
     * from i * index_tokens on, as many: positions, or blocks. -1 names none. Their order does not
     * matter, and a token that is named twice counts once. A query that names none has zeros, and
     * an lse of -inf, sink logits aside. An index of nothing that the query sees (behind it, before
     * its window) is refused; of an index that names some tokens that it sees, it visits those. Not
     * with parents; dilated layers and lanes refuse it (ATTN_ENOTSUP). */
    const int32_t *indices;
    uint32_t index_tokens; /* 0: 1 */
    /* Blocks that each query visits for each kv head, which attnd chooses: the newest that it sees,
     * its sequence's first, and of the others those whose keys could have the largest product
     * with a q of the kv head, by the largest and the smallest value that its keys have in each
     * dimension. With as many as a query sees, or more, it visits all, with the same bytes. 0: all.
     * Of steps that attend, without parents and indices; layers with windows, branches or ALiBi,
     * lanes, and pools split by tokens over unlike cards refuse it (ATTN_ENOTSUP). */
    uint32_t choose_blocks;
    /* [n_items] where the items' sequences are in longer ones; NULL: they are whole. Lanes refuse
     * it, and split pools and GPUs where a window, ALiBi, sink logits or branches need it
     * (ATTN_ENOTSUP). */
    const struct attn_part *parts;
};

/* How a step ended. With 0 < n_failed < n_items the step partly failed: out and lse are written,
 * the rows of failed items are NaN, and status is that of the first failed item. */
struct attn_result {
    uint32_t struct_size;
    attn_status status;
    uint32_t n_failed; /* items */
    uint32_t n_sends; /* 1 unless retried or sent again */
    uint64_t retry_after_us;
    uint64_t queue_ns, device_ns; /* in the daemon; device: of the batch this was in */
    uint64_t total_ns; /* from the call to completion, as seen here */
    char message[ATTN_MESSAGE_BYTES];
};

/* attn_step: a step from start to end.
 *
 * Returns its status; out_result may be NULL and, with struct_size set, is written however the step
 * ended, unless the call itself was wrong.
 *
 * A step larger than one message (max_message_bytes, max_step_tokens) is sent as several, one after
 * another, items cut in the order of their positions; the times of its result are sums. Where such
 * a step fails, the rows of failed items are NaN, and of what they append the first tokens may be
 * cached. A layer with is_full does not let items be cut.
 *
 * Errors   ATTN_EINVAL shapes, pointers, limits, or a position gap; ATTN_ENOTFOUND, ATTN_ESTALE a
 *          sequence; ATTN_ENOBLOCKS, ATTN_EOVERLOAD with retry-after; ATTN_EDEADLINE the daemon
 *          gave up in time; ATTN_ETIMEDOUT it did not answer; ATTN_ECONN no connection at the
 *          deadline */
ATTN_API attn_status attn_step(attn_pool *p, const struct attn_step *s,
                               struct attn_result *out_result);

/* result is valid during the call. */
typedef void (*attn_step_cb)(void *user, attn_ticket ticket, const struct attn_result *result);

/* attn_step_start: sends a step and returns. *s itself is copied, what it points to is borrowed.
 *
 * With a callback, completion calls it (out_ticket may be NULL). Without one, attn_step_wait must
 * be called once for the ticket. ATTN_EOVERLOAD: ATTN_MAX_IN_FLIGHT are in flight already. */
ATTN_API attn_status attn_step_start(attn_pool *p, const struct attn_step *s, attn_step_cb cb,
                                     void *user, attn_ticket *out_ticket);

/* Waits until a step without a callback completes (its own deadline bounds this) and forgets the
 * ticket. Returns the step's status; out_result as in attn_step. ATTN_ENOTFOUND: no such ticket. */
ATTN_API attn_status attn_step_wait(attn_client *c, attn_ticket ticket,
                                    struct attn_result *out_result);

/* attn_merge: outputs of the same queries over some of the keys each, as one over all: what a
 * worker does with steps of attn_part, and of is_full. Sums in double.
 *
 * Shapes   outs [n_parts][n_rows][dim] and out [n_rows][dim] of dtype f32, f16 or bf16; lses
 *          [n_parts][n_rows] and out_lse [n_rows], natural logarithms; out_lse may be NULL. A row
 *          is a head of a token. out is none of outs
 * Result   a row that sees nothing in any part has zeros, and -inf; parts in which it sees nothing
 *          are not read
 * Errors   ATTN_EINVAL */
ATTN_API attn_status attn_merge(attn_dtype dtype, uint32_t n_parts, uint64_t n_rows, uint32_t dim,
                                const void *outs, const float *lses, void *out, float *out_lse);

/* ---- lanes: layers without messages ---- */

/* A lane carries one stream of layers to the daemon. A plan says once per decode step what its
 * layers will be; then each layer is a kernel on the caller's stream, which puts q, k and v where
 * the daemon reads them, rings, and waits for the output. Nothing is copied to the host, no
 * call but attn_lane_plan waits, and what is enqueued may be captured in a CUDA graph and replayed,
 * because a layer's number is counted in the GPU's memory.
 *
 * Needs libattn-cuda.so beside this library, and a daemon on the same host that listens at gpu://
 * and computes on the GPU that is current on the calling thread, both under MPS. With a daemon that
 * computes on the CPU a lane is the same in host memory, and attn_lane_enqueue does the layer.
 *
 * Failures  A layer that fails, or whose wait ends (timeout, the daemon hung up), leaves NaN in its
 *           output; the layers behind it do nothing and leave NaN, too. attn_lane_check and
 *           attn_lane_plan tell. After ATTN_ECONN the lane is over: close it, open another.
 * Sizes     A plan of more tokens than the regions or one step hold is cut: attn_lane_enqueue sends
 *           the plan of each piece as it comes to it, and waits where the daemon has four that are
 *           not finished. Items are cut in the order of their positions, but for layers with
 *           is_full. Such a layer needs `out` and can't be captured; its arrays are borrowed until
 *           it is finished; it is planned when the layers before it are enqueued.
 * Threads   one thread at a time per lane; other threads may use the client meanwhile. */
typedef struct attn_lane attn_lane;

struct attn_lane_options {
    uint32_t struct_size;
    uint32_t reserved;
    /* of q, k and v of one layer or piece, and of its output; 0: 16 MiB. Rounded up to 2 MiB */
    uint64_t in_bytes, out_bytes;
    uint64_t wait_us; /* a layer waits so long for the daemon; 0: the client's timeout */
};

struct attn_lane_info {
    uint32_t struct_size;
    uint32_t is_host; /* 1: regions are host memory */
    uint64_t in_bytes, out_bytes;
    /* A layer's q, then k, then v may be written here, each at the next multiple of 64 bytes, and
     * its out, then lse, be read here until the next layer is enqueued. */
    void *in;
    const void *out;
};

/* The steps of n_layers layers to come. */
struct attn_plan {
    uint32_t struct_size;
    uint32_t n_items;
    const struct attn_item *items; /* [n_items], of each layer */
    uint32_t n_layers;
    uint32_t is_append, is_attend, has_lse; /* as q, k, v and lse of attn_step */
    const uint32_t *layers; /* [n_layers]; NULL: 0, 1, ... */
    /* 1: layers that were planned and not enqueued are forgotten, and so is a layer that failed. No
     * enqueued layer may be unfinished: synchronise the stream first */
    uint32_t is_restart;
    uint32_t reserved;
    uint64_t timeout_us; /* of this call, and of each layer in the daemon */
};

/* One layer's tensors, [T][heads][head_dim] of the pool's q_dtype, in memory of the lane's GPU (or
 * of the host), at multiples of 16. What lies at its place in attn_lane_info.in already is not
 * copied. Tokens follow each other, but for those of q, k and v where a stride says otherwise. */
struct attn_lane_step {
    uint32_t struct_size;
    uint32_t n_tokens; /* T, the plan's */
    const void *q, *k, *v;
    void *out; /* NULL: it is read in attn_lane_info.out */
    float *lse;
    /* bytes from a token to the next, multiples of 16; 0: they follow each other */
    uint64_t q_stride, k_stride, v_stride;
};

/* attn_lane_open: url gpu://PATH, NULL: where the daemon says.
 * Errors   ATTN_ENOTSUP this pair cannot have a lane; the message says what is missing; ATTN_ECONN;
 *          ATTN_EQUOTA; ATTN_ENOMEM. o may be NULL */
ATTN_API attn_status attn_lane_open(attn_client *c, const char *url,
                                    const struct attn_lane_options *o, attn_lane **out_lane);
/* Enqueued layers are finished. As attn_lane_check, also behind attn_client_close, when plans and
 * layers are no longer to come. NULL is fine. */
ATTN_API void attn_lane_close(attn_lane *l);
/* out->struct_size is set by the caller. */
ATTN_API attn_status attn_lane_info(const attn_lane *l, struct attn_lane_info *out);
/* attn_lane_plan: the layers behind those that are planned already. Waits for the daemon's answer,
 * not for layers.
 * Errors   as attn_step, told before anything is computed; those of attn_lane_check;
 *          ATTN_EOVERLOAD four plans are not finished */
ATTN_API attn_status attn_lane_plan(attn_lane *l, attn_pool *p, const struct attn_plan *plan);
/* attn_lane_enqueue: the next layer of the plan, on stream (a CUstream; ignored in host memory,
 * where the layer is done when this returns, with its status). A layer that was captured is one
 * layer at each replay. Errors  ATTN_EINVAL shapes, sizes; ATTN_EDEVICE the launch */
ATTN_API attn_status attn_lane_enqueue(attn_lane *l, const attn_pool *p, void *stream,
                                       const struct attn_lane_step *s);
/* How layers that are finished have ended: ATTN_OK, or the first failure since the last restart.
 * Never waits. */
ATTN_API attn_status attn_lane_check(attn_lane *l);

#ifdef __cplusplus
}
#endif
#endif
