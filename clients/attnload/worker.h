/* worker.h: one worker thread of attnload: a client, sequences, what it measured.
 *
 * Phases, in step with the main thread by a barrier: connect and fill; measured run; then close and
 * verify. A worker that fails stops the others and still takes part in every barrier.
 *
 * The files of attnload, from the top; each calls only those below it:
 *
 *   main.c, slo.c            the program; the search for the highest good rate
 *   options.c                what was asked for
 *   run.c                    one run of all workers
 *   report.c, compare.c      results as text, JSON or CSV; beside those of another run
 *   thread.c                 a worker from start to end
 *   closed.c, flow.c         the closed loop; the open loop and traces
 *   worker.c                 steps, sequences and counters of a worker
 *   verify.c, arrivals.c     outputs recomputed; when tokens are due
 *   data.c, preset.c, trace.c, histogram.c
 */
#ifndef ATTNLOAD_WORKER_H
#define ATTNLOAD_WORKER_H

#include <pthread.h>
#include <stdatomic.h>

#include "clients/attnload/data.h"
#include "clients/attnload/histogram.h"
#include "clients/attnload/options.h"
#include "clients/attnload/trace.h"
#include "clients/attnload/verify.h"
#include "proto/attn_time.h"

#define TALLY_N_STATUS 32
#define WORKER_WHY_BYTES (ATTN_MESSAGE_BYTES + 64)

/* What all workers of a run share. */
struct load {
    const struct options *o;
    struct trace trace; /* empty without --trace */
    uint32_t n_blocks; /* of the pool */
    void *weights; /* with --heads: of each of its layers */
    uint64_t id_base; /* of sequence ids: runs do not meet */
    pthread_barrier_t barrier;
    atomic_bool is_stopping; /* a worker failed, or a signal came */
    uint64_t start_ns; /* of the measured phase; set between barriers */
    atomic_uint n_ready, n_finished; /* workers through with filling, with the measured run */
    atomic_uint_fast64_t n_prompt_tokens, n_steps, n_requests; /* progress */
};

enum tally_time {
    TIME_TOTAL, /* these four of decode steps */
    TIME_QUEUE,
    TIME_DEVICE,
    TIME_ADDED, /* total without device */
    TIME_TOKEN, /* from due to done, all layers; open loop and traces */
    TIME_TTFT, /* of a trace's requests: arrival to prompt done */
    TIME_LATE, /* from planned to sent; open loop and traces */
    TALLY_N_TIMES
};

/* Of the measured phase, but prompt_*. Times in ns. */
struct tally {
    struct histogram times[TALLY_N_TIMES];
    uint64_t n_unsent, n_unfinished; /* planned tokens not sent, steps not answered in --duration */
    uint64_t n_steps, n_items, kv_bytes; /* decode */
    uint64_t n_prompt_steps, n_prompt_tokens, n_cached_tokens; /* cached: not sent */
    uint64_t n_requests;
    uint64_t refused[TALLY_N_STATUS]; /* by -status */
    uint64_t filled_ns, end_ns; /* when contexts were full, when the run was over */
};

struct worker {
    struct load *load;
    uint32_t index;
    pthread_t thread;
    attn_client *client;
    attn_pool *pool;
    struct tally tally;
    struct verify verify;
    struct verify_result verified;
    attn_status failure;
    char why[WORKER_WHY_BYTES];
};

struct stream {
    struct data_stream data;
    struct attn_seq seq;
    uint32_t pos; /* of its next token; its loop moves it on when every layer has been answered */
};

/* A step of the next n_tokens of each of streams[0 .. n), in one layer. Its q, k and v are made
 * where the daemon reads them, its outputs looked at where the daemon wrote them. */
struct work {
    struct worker *w;
    const struct stream *streams;
    uint32_t n, layer, n_tokens;
    struct attn_in_place in_place;
    int32_t *indices; /* [n][n_tokens][--top-k], the work's own; NULL: the step is not sparse */
};

void worker_sleep(uint64_t ns);
/* A worker failed or a signal came: loops end. */
static inline bool worker_is_stopping(const struct worker *w)
{
    return atomic_load_explicit(&w->load->is_stopping, memory_order_relaxed);
}
/* Sequences, again while the daemon asks for patience. t: what is known of its tokens, NULL:
 * nothing; *out_cached of them it begins with. False: worker_fail was called. */
bool worker_open(struct worker *w, const struct attn_tokens *t, struct attn_seq *seq,
                 uint32_t *out_cached);
bool worker_close(struct worker *w, const struct attn_seq *seq);
/* When --duration ends the measured run; UINT64_MAX: never, or it has not begun. */
uint64_t worker_end_ns(const struct worker *w);
/* True: that is over, so this failure of a step only means that there was no time left. Counts it.
 * */
bool worker_is_cut(struct worker *w, attn_status st);
/* Records the failure of a call, stops the run and returns false. */
bool worker_fail(struct worker *w, attn_status st, const char *what);

/* The step of a work; items is [n] and, as the work, borrowed until the step is done. */
struct attn_step work_step(struct work *x, struct attn_item *items, bool is_attended);
/* Frees what work_step made, once the step is done. */
void work_close(struct work *x);
/* KV bytes that attention of the query at pos reads. */
uint64_t worker_kv_bytes(const struct options *o, uint32_t layer, uint32_t pos);

void tally_fini(struct tally *t);
/* Counts a completed decode step of n_items. */
void tally_step(struct tally *t, const struct attn_result *r, uint64_t total_ns, uint32_t n_items);
/* Counts a refusal; true: it may be tried again, after *out_wait_ns. */
bool tally_refusal(struct tally *t, attn_status st, uint64_t retry_after_us, uint64_t *out_wait_ns);

/* closed.c: fill is also the open loop's: stream i gets --context tokens and i / n of spread more.
 * False: worker_fail was called. */
bool closed_fill(struct worker *w, struct stream *s, uint32_t n, uint32_t spread);
bool closed_run(struct worker *w, struct stream *s, uint32_t n);
/* flow.c: the open loop, and a trace's requests. */
bool open_run(struct worker *w, struct stream *s, uint32_t n);
bool replay_run(struct worker *w);

/* thread.c: pthread_create's function; worker_fini comes after the join. */
void *worker_main(void *worker);
void worker_fini(struct worker *w);

#endif
