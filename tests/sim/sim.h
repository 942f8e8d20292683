/* sim.h: the daemon in a world that one number decides. What attnd asks the outside for is virtual:
 * time, sockets and their loop (uv.c), the network (net.c), the device (device.c), the keeper and
 * the kernel's services (outside.c), memory (memory.c). daemon_run itself runs in it, unchanged,
 * from its settings to its exit code (process.c), for clients that each keep a naive model of what
 * they were told (peer.c). README.md has the whole picture.
 *
 * One thread, one queue of events. The daemon's threads take turns: the first loop's callbacks are
 * events; engines and further loops are coroutines (thread.c), and where one waits others go on.
 */
#ifndef TESTS_SIM_SIM_H
#define TESTS_SIM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define SIM_US UINT64_C(1000)
#define SIM_MS UINT64_C(1000000)
#define SIM_S UINT64_C(1000000000)

/* --- chance ----------------------------------------------------------------------------------- */

uint64_t sim_random(void);
uint32_t sim_below(uint32_t n); /* 0 to n - 1 */
bool sim_chance(uint32_t per_mille);
uint64_t sim_between(uint64_t least, uint64_t most);
uint64_t sim_mix(uint64_t x); /* a hash */

/* --- what one seed decides before anything runs ----------------------------------------------- */

struct sim_plan {
    uint32_t n_peers, n_ops; /* operations that all peers begin, together */
    bool has_keeper;
    uint32_t drop, twice, hold, late, cut; /* per mille of messages */
    uint32_t fail_batch, lose_device, slow_batch; /* per mille of launches */
    uint32_t fail_move; /* per mille of moves of blocks, and of reads and writes of the file */
    uint32_t stop; /* per 10,000 of places where an engine's thread may have to wait for a core */
    uint32_t fail_alloc; /* per mille of allocations while memory is short */
    uint32_t n_kills, n_upgrades;
    uint32_t n_aimed; /* kills shortly after launches that copy blocks or answer bells */
    uint32_t slow_readers; /* per mille of peers */
    uint32_t max_in_flight; /* batches */
    uint32_t n_blocks, block_tokens; /* of the pool */
    uint32_t pins; /* per mille of what is said of retention */
    uint32_t n_seqs; /* that a client opens */
    uint32_t n_prompts, prompts; /* per mille of opens that are of one */
    uint32_t long_appends; /* per mille of steps */
    uint32_t closes, forks; /* per mille of operations, beside the usual ones */
    uint32_t reserves; /* the same, of blocks of the pool */
    uint32_t names_again; /* per mille of opens that take a name which has ended */
    const char *host_memory, *disk_size; /* cache.host_memory, cache.disk_size */
    const char *idle_memory; /* cache.idle_memory */
    bool has_lanes;
    uint32_t n_cards, n_loops;
    int split; /* of the pool, as on the wire */
    bool is_sum; /* SIM_SCALE_SUM */
};
extern struct sim_plan sim_plan;
extern bool sim_has_faults; /* false: the quiet end of a run */

extern int sim_bug; /* which of plant.cmake's is in sim_planted */

/* --- time and events -------------------------------------------------------------------------- */

extern uint64_t sim_now_ns;

/* Of whom an event is: the world's happen whatever the process does; the process's are gone with
 * it. */
enum sim_owner { SIM_WORLD, SIM_PROCESS };
typedef void (*sim_fn)(void *arg, uint64_t word);
void sim_at(uint64_t delay_ns, enum sim_owner owner, sim_fn fn, void *arg, uint64_t word);
/* The next event, if it is due by until_ns; false: time is until_ns now. */
bool sim_step(uint64_t until_ns);
/* The process's events so far are gone. */
void sim_forget_process(void);
extern bool sim_is_daemon; /* the code that runs is the daemon's */

/* --- a run ------------------------------------------------------------------------------------ */

/* Memory until the run ends, zeroed. */
void *sim_alloc(size_t bytes);
void sim_begin(uint64_t seed, bool is_verbose);
void sim_end(void);
extern bool sim_is_verbose; /* the history is printed */
/* A line of the history. */
void sim_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* An invariant does not hold: says which and with which seed, and ends. */
_Noreturn void sim_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* What a run has seen; sums over runs are printed. */
#define SIM_COUNTS(X)                                                                              \
    X(events)                                                                                      \
    X(requests)                                                                                    \
    X(copies)                                                                                      \
    X(late)                                                                                        \
    X(dropped)                                                                                     \
    X(held)                                                                                        \
    X(cuts)                                                                                        \
    X(kills)                                                                                       \
    X(upgrades)                                                                                    \
    X(starts)                                                                                      \
    X(failed_starts)                                                                               \
    X(failed_allocs)                                                                               \
    X(batches)                                                                                     \
    X(failed_batches)                                                                              \
    X(lost_devices)                                                                                \
    X(moves)                                                                                       \
    X(failed_moves)                                                                                \
    X(block_reads)                                                                                 \
    X(blocks_back)                                                                                 \
    X(file_reads)                                                                                  \
    X(steps)                                                                                       \
    X(rows)                                                                                        \
    X(answers_checked)                                                                             \
    X(refusals)                                                                                    \
    X(adoptions)                                                                                   \
    X(truncates)                                                                                   \
    X(forks)                                                                                       \
    X(cached_tokens)                                                                               \
    X(closes)                                                                                      \
    X(exports)                                                                                     \
    X(exports_kept)                                                                                \
    X(imports)                                                                                     \
    X(killed)                                                                                      \
    X(resizes)                                                                                     \
    X(reserves)                                                                                    \
    X(names_again)                                                                                 \
    X(killed_sessions)                                                                             \
    X(bells)                                                                                       \
    X(pins)                                                                                        \
    X(sessions_lost)                                                                               \
    X(cache_checks)
struct sim_counts {
#define X(field) uint64_t field;
    SIM_COUNTS(X)
#undef X
};
extern struct sim_counts sim_counts;

/* --- the process (process.c) ------------------------------------------------------------------ */

enum { SIM_MAX_CARDS = 3 };
struct engine;
extern struct engine *sim_engine; /* that serves, the first card's; NULL: none */
extern struct engine *sim_engines[SIM_MAX_CARDS];
extern uint32_t sim_n_engines;
extern uint64_t sim_life; /* counts processes */

void process_begin(void); /* the first one is started soon */
bool process_is_up(void);
uint64_t process_empty_since_ns(void); /* when a process last began without a predecessor's cache */
/* Every place where the daemon asks the outside for something: a kill may be due here. */
void process_point(void);
/* Something is under way that a kill would do most harm to. */
void process_may_be_killed(uint32_t of_thousand);
void process_stop(void); /* SIGTERM, and no other process after it */
bool process_is_over(void);
_Noreturn void process_exit(int code);
_Noreturn void process_leave(void); /* thread.c: now that its thread is left */
void process_check(struct engine *e); /* the cache's books, between two turns */
void process_check_is_empty(void); /* nothing is held any more */
/* Runs the daemon's signal handler (uv.c); false: it has none yet. */
bool uv_deliver_signal(int number);
enum { SIM_LISTEN_FD = 1 << 19 };
void uv_process_begin(void);
void uv_process_end(void);

/* --- threads (thread.c) ----------------------------------------------------------------------- */

uint32_t thread_start(void *(*fn)(void *arg), void *arg);
void *thread_join(uint32_t thread);
/* Waits, on a thread of the daemon's or the loop's own, until it is ready or so late; events run
 * meanwhile. false: it is that late. */
bool thread_wait(bool (*is_ready)(void *arg), void *arg, uint64_t until_ns);
void thread_sleep(uint64_t ns);
void thread_lose_core(void); /* here it often has to wait for one, where it ever has to */
const void *thread_running(void); /* NULL: the event loop's */
bool thread_is_one(void); /* what runs is one, and not the event loop */
/* The process ends inside of what runs: ends in process_leave if that is a thread, else returns. */
void thread_leave(void);
void threads_run(void); /* those that can go on; after an event */
void threads_forget(void); /* the process is gone */

/* --- lanes (lanes.c) -------------------------------------------------------------------------- */

void lanes_process_begin(struct engine *e);
void lanes_process_end(void); /* its engine has stopped */
void lanes_forget_process(void); /* it is gone, in whatever way */

/* --- memory (memory.c) ------------------------------------------------------------------------ */

void memory_begin(void);
/* What the process had is the kernel's again. */
void memory_reap(void);
uint64_t memory_n_held(void);
bool memory_fails(void); /* something that takes memory is asked for */
void memory_be_short(uint64_t for_ns);

#define SIM_DISK "/sim-disk" /* cache.disk_path */

/* --- outside.c -------------------------------------------------------------------------------- */

void outside_begin(void);
void outside_end(void);
void outside_forget(void); /* the run is over */
bool outside_has_kept(void); /* the keeper has an arena */
int outside_keep_fd(int fd); /* a copy out of the process's reach */

/* --- the device (device.c) -------------------------------------------------------------------- */

struct backend_ops;
extern const struct backend_ops device_ops;
/* What a device makes of rows: stands for attention. A cached token is one number of its k and v
 * per KV head. A query's outputs depend on every token that is seen, and on their order; or they
 * are a sum over them, as those of pools that are split by tokens must be (layers whose scale is
 * SIM_SCALE_SUM). For one KV head, whose queries have n_out floats and n_lse heads. */
#define SIM_SCALE_SUM 2.0f
uint64_t device_token(const void *k, size_t k_bytes, const void *v, size_t v_bytes);
void device_attend(const uint64_t *tokens, uint32_t n, const void *q, size_t q_bytes, bool is_sum,
                   uint32_t n_out, uint32_t n_lse, float *out, float *lse);

/* --- the network (net.c): connections as byte streams ----------------------------------------- */

struct conn;
struct peer;
/* NULL: refused. */
struct conn *net_connect(struct peer *p);
void net_send(struct conn *c, const void *bytes, size_t n);
void net_close(struct conn *c, bool is_cut); /* by the client; it hears nothing more of it */
bool net_may_connect(void);
void net_begin(void);
/* Told by net.c: bytes for a client, and that its connection is over. */
void peer_take(struct peer *p, struct conn *c, const uint8_t *bytes, size_t n);
void peer_gone(struct peer *p, struct conn *c);
bool peer_reads(struct peer *p); /* it takes bytes now */

/* --- clients (peer.c) ------------------------------------------------------------------------- */

void peers_begin(void);
bool peers_are_done(void); /* they have begun all that they were to */
bool peers_are_idle(void); /* everything they asked for is answered */
bool peers_are_answered(void); /* hellos that keep sessions alive, too */
void peers_stop_asking(void);
void peers_unreserve(void);
void peers_read_back(void);
void peers_close_all(void);
void peers_say_unanswered(void);

#endif
