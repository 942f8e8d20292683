/* bench_engine.c: host cost of the engine a step's item, with a backend that does nothing. Not a
 * test: it prints figures and asserts none.
 *
 * Timed: engine_submit, one turn that admits, claims, reserves, batches, submits, commits and
 * encodes replies, and the fake transport taking them. Not timed: making and decoding requests.
 * Items take their sequences in a random order, one token each; their positions cross block borders
 * as they come.
 *
 *   bench_engine [items a step]
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/engine/core/state.h"
#include "kernels/kv_layout.h"
#include "tests/daemon/config_defaults.h"
#include "tests/daemon/engine/engine_fixture.h"
#include "tests/daemon/engine/fake_host.h"

enum { BATCH = 1000, N_BATCHES = 300, WARM_UP = 20, MAX_ITEMS = 64 };

struct backend_pool {
    int unused;
};
struct backend {
    struct backend_pool pool;
    struct backend_batch *in_flight;
};

static const char *null_error(const struct backend *b)
{
    (void)b;
    return "";
}
static void null_info(const struct backend *b, struct backend_info *out)
{
    (void)b;
    *out = (struct backend_info){.name = "null", .kv_bytes = 1ull << 40, .max_in_flight = 1};
}
static attn_status null_check(struct backend *b, const struct backend_pool_config *c)
{
    (void)b, (void)c;
    return ATTN_OK;
}
static uint64_t null_bytes(const struct backend *b, const struct backend_pool_config *c)
{
    (void)b;
    return kv_layout_of(c).block_bytes * c->n_blocks;
}
static uint64_t null_place(const struct backend_pool *p)
{
    (void)p;
    return 1;
}

static attn_status null_pool(struct backend *b, const struct backend_pool_config *c,
                             struct backend_pool **out)
{
    (void)c;
    *out = &b->pool;
    return ATTN_OK;
}
static attn_status null_submit(struct backend *b, struct backend_batch *batch)
{
    b->in_flight = batch;
    return ATTN_OK;
}
static struct backend_batch *null_poll(struct backend *b, uint64_t wait_ns)
{
    (void)wait_ns;
    struct backend_batch *batch = b->in_flight;
    b->in_flight = NULL;
    return batch;
}

static const struct backend_ops null_ops = {
    .abi = BACKEND_ABI,
    .name = "null",
    .last_error = null_error,
    .info = null_info,
    .pool_check = null_check,
    .pool_bytes = null_bytes,
    .pool_open = null_pool,
    .pool_place = null_place,
    .submit = null_submit,
    .poll = null_poll,
    .host_alloc = fake_host_alloc,
    .host_free = fake_host_free,
};

static struct request *answered; /* newest first */
static uint64_t n_failed;

static void keep(struct request *req)
{
    req->next = answered;
    answered = req;
}
static const struct transport_ops transport = {.label = STATS_IPC, .reply = keep};

static struct engine *engine;
static struct iobuf_pool *bufs;
static uint64_t session;
static uint32_t pool;

static struct request *make(Attnd__Request *h, size_t payload_bytes)
{
    static uint64_t id;
    char why[256];
    size_t head = wire_request_head_bytes(h);
    struct request *req = request_new(&transport, NULL, NULL, bufs, head + payload_bytes);
    h->session = session;
    wire_request_head_encode(h, ++id, payload_bytes, req->msg->data);
    if (request_decode(req, clock_now_ns(), 100000000, 100000000, UINT64_MAX, why, sizeof why) !=
        ATTN_OK) {
        fprintf(stderr, "%s\n", why);
        exit(1);
    }
    return req;
}

/* Runs a control request; the reply's header is valid until the next call. */
static const Attnd__Reply *call(Attnd__Request *h)
{
    static struct wire_arena arena;
    static struct request *last;
    static struct wire_reply reply;
    char why[256] = "";
    wire_arena_reset(&arena);
    request_free(last);
    wire_arena_init(&arena, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    engine_submit(engine, make(h, 0));
    while (answered == NULL)
        engine_turn(engine, 0);
    last = answered;
    answered = NULL;
    if (wire_reply_decode(last->reply->data, last->reply->n_bytes, &arena, &reply, why,
                          sizeof why) != ATTN_OK ||
        reply.header->status != ATTN_OK) {
        fprintf(stderr, "set-up failed: %s%s\n", why, reply.header->message);
        exit(1);
    }
    return reply.header;
}

static void set_up(uint32_t n_sequences)
{
    Attnd__Hello hello = ATTND__HELLO__INIT;
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate create = ATTND__POOL_CREATE__INIT;
    Attnd__Open open = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    hello.protocol_version = 1;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &hello;
    session = call(&h)->hello->session;
    spec.name = "bench";
    spec.num_layers = 1;
    spec.num_q_heads = spec.num_kv_heads = 1;
    spec.head_dim_k = 8;
    spec.n_blocks = n_sequences * 24 + 100000;
    spec.q_dtype = ATTND__DTYPE__BF16;
    create.spec = &spec;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &create;
    pool = call(&h)->pool->pool;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &open;
    open.pool = pool;
    for (uint32_t i = 0; i < n_sequences; i++) {
        open.seq = i + 1;
        call(&h);
    }
}

/* Steps of n_items items over a random run of sequences, BATCH items in all if there are as
 * many. */
static uint32_t make_steps(struct request **out, uint32_t n_items, uint32_t *order, uint32_t *len,
                           uint32_t n_sequences)
{
    uint32_t n_steps = 0, n = n_sequences < BATCH ? n_sequences : BATCH;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = i + (uint32_t)rand() % (n_sequences - i), swap = order[i];
        order[i] = order[k];
        order[k] = swap;
    }
    for (uint32_t first = 0; first < n; first += n_items) {
        uint64_t seq[MAX_ITEMS];
        uint32_t pos[MAX_ITEMS], ones[MAX_ITEMS];
        uint32_t m = n - first < n_items ? n - first : n_items;
        for (uint32_t i = 0; i < m; i++) {
            seq[i] = order[first + i] + 1;
            pos[i] = len[order[first + i]]++;
            ones[i] = 1;
        }
        Attnd__Step s = ATTND__STEP__INIT;
        Attnd__Request h = ATTND__REQUEST__INIT;
        s.pool = pool;
        s.flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND;
        s.dtype = ATTND__DTYPE__BF16;
        s.n_seq = s.n_epoch = s.n_pos = s.n_n_tokens = m;
        s.seq = seq;
        s.epoch = s.n_tokens = ones;
        s.pos = pos;
        h.body_case = ATTND__REQUEST__BODY_STEP;
        h.step = &s;
        struct wire_step_layout l;
        char why[256];
        wire_step_layout_of(&s, &(struct wire_shape){1, 1, 8, 8, false, ATTN_BF16, 0, 0}, &l, why,
                            sizeof why);
        out[n_steps++] = make(&h, l.request_bytes);
    }
    return n_steps;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bench(uint32_t n_sequences, uint32_t n_items)
{
    static struct request *steps[BATCH];
    static double ns[N_BATCHES];
    struct backend backend = {0};
    char why[512];
    struct config cfg;
    config_defaults(&cfg);
    cfg.max_sequences = n_sequences + 1;
    cfg.max_seq_tokens = 8192;
    cfg.max_layers = 1;
    cfg.max_queue_requests = 1 << 20;
    iobuf_pool_open(&null_ops, &backend, 64 << 20, &bufs);
    struct engine_fixture fixture = {0};
    if (engine_fixture_open(&fixture, &cfg, &null_ops, &backend, bufs, &engine, why, sizeof why) !=
        ATTN_OK) {
        fprintf(stderr, "%s\n", why);
        exit(1);
    }
    session = 0;
    set_up(n_sequences);
    uint32_t *order = calloc(n_sequences, sizeof *order), *len = calloc(n_sequences, sizeof *len);
    for (uint32_t i = 0; i < n_sequences; i++)
        order[i] = i;
    uint32_t n = n_sequences < BATCH ? n_sequences : BATCH, n_warm = n_sequences / n + WARM_UP;
    for (uint32_t b = 0; b < n_warm + N_BATCHES; b++) {
        /* at first all in turn, so that every sequence's table has its memory */
        bool is_in_turn = (b + 1) * n <= n_sequences;
        uint32_t n_steps = make_steps(steps, n_items, is_in_turn ? order + b * n : order, len,
                                      is_in_turn ? n : n_sequences);
        uint64_t start = clock_now_ns();
        for (uint32_t i = 0; i < n_steps; i++)
            engine_submit(engine, steps[i]);
        while (atomic_load(&engine->queue.n_requests) > 0)
            engine_turn(engine, 0);
        uint64_t end = clock_now_ns();
        if (b >= n_warm)
            ns[b - n_warm] = (double)(end - start) / n;
        while (answered != NULL) {
            struct request *req = answered;
            answered = req->next;
            request_free(req);
        }
    }
    for (uint32_t i = 1; i < STATS_N_STATUS; i++)
        n_failed += atomic_load(&stats.steps_answered[i]);
    qsort(ns, N_BATCHES, sizeof ns[0], by_value);
    printf("%10u %10u %12u %10.0f %10.0f %10.0f\n", n_sequences, n_items, n, ns[0],
           ns[N_BATCHES / 2], ns[N_BATCHES * 9 / 10]);
    fflush(stdout);
    free(order);
    free(len);
    engine_close(engine);
    exit(n_failed > 0);
}

int main(int argc, char **argv)
{
    static const uint32_t sequences[] = {10, 1000, 100000};
    uint32_t n_items = argc > 1 ? (uint32_t)atoi(argv[1]) : 16;
    if (n_items < 1 || n_items > MAX_ITEMS) {
        fprintf(stderr, "usage: bench_engine [items a step, 1 to %d]\n", MAX_ITEMS);
        return 64;
    }
    log_init(LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    printf("%10s %10s %12s %10s %10s %10s\n", "sequences", "items/step", "items/batch", "min ns",
           "median ns", "p90 ns");
    fflush(stdout);
    for (size_t i = 0; i < 3;
         i++) { /* a process each, so that none finds the other's memory warm */
        pid_t pid = fork();
        int status = 1;
        if (pid == 0)
            bench(sequences[i], n_items);
        if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
            return 1;
    }
    return 0;
}
