/* gpu_bench.c: what the gpu backends measure of themselves (backend_bench.h).
 *
 * Inside the timed window: what a batch does on the device (append if it appends, attention, merge), as one
 * graph, from event to event. Outside: the upload of descriptors, q on its way in, out on its way
 * back; q and out are in device memory. Before every run twice the L2 cache is read, so that caches are
 * cold and hold nothing that has to be written back.
 */
#include "kernels/backend_bench.h"
#include "kernels/gpu/gpu_host.h"

#include <stdlib.h>
#include <string.h>

static const char *const variants[] = {"naive", "online", "shared", "warp", "mma", "splitk", NULL};

/* What only measurements need; made for a call and freed at its end. */
struct bench {
    struct backend *b;
    char *evict;
    uint64_t evict_bytes;
    uint32_t *sink;
    runtime_event **from, **to; /* [n_runs] */
    uint32_t n_runs;
    bool is_alone;
};

struct bench_batch {
    struct gpu_job job;
    struct backend_batch *batch;
    char *out;
    float *lse;
    runtime_graph *graph;
};

static attn_status bench_open(struct backend *b, uint32_t n_runs, bool is_alone, struct bench *m)
{
    memset(m, 0, sizeof *m);
    m->b = b;
    m->n_runs = n_runs;
    m->is_alone = is_alone;
    attn_status st = gpu_enter(b);
    if (st != ATTN_OK)
        return st;
    if (b->n_in_flight)
        return gpu_fail(b, ATTN_EINVAL, "a batch is in flight");
    m->evict_bytes = 2 * (b->device.l2_bytes ? b->device.l2_bytes : (uint64_t)64 << 20);
    m->from = calloc(n_runs, sizeof *m->from);
    m->to = calloc(n_runs, sizeof *m->to);
    if (!m->from || !m->to)
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    if (runtime_alloc((void **)&m->evict, m->evict_bytes) != 0 ||
        runtime_alloc((void **)&m->sink, 16) != 0)
        return gpu_fail(b, ATTN_ENOMEM, "%s", runtime_last_error());
    for (uint32_t i = 0; i < n_runs; i++)
        if (runtime_event_open(&m->from[i]) != 0 || runtime_event_open(&m->to[i]) != 0)
            return gpu_fail(b, ATTN_ENOMEM, "%s", runtime_last_error());
    return runtime_fill(m->evict, 0x5a, m->evict_bytes, b->stream) == 0 ? ATTN_OK : gpu_lost(b);
}

static void bench_close(struct bench *m)
{
    for (uint32_t i = 0; i < m->n_runs; i++) {
        if (m->from)
            runtime_event_close(m->from[i]);
        if (m->to)
            runtime_event_close(m->to[i]);
    }
    free(m->from);
    free(m->to);
    runtime_free(m->evict);
    runtime_free(m->sink);
}

/* The first launch of a graph brings it to the device, which takes a microsecond of the window. */
static attn_status launch_first(struct backend *b, runtime_graph *graph)
{
    return runtime_graph_launch(graph, b->stream) == 0 ? ATTN_OK : gpu_lost(b);
}

/* Enqueues n_runs timed launches of graphs[r % n_graphs] and waits for them. What the host submits while a
 * window is open makes it about a microsecond longer; not so if every run is waited for. */
static attn_status bench_run(struct bench *m, runtime_graph *const *graphs, uint32_t n_graphs,
                             uint32_t n_runs, uint64_t *out_ns)
{
    struct backend *b = m->b;
    for (uint32_t r = 0; r < n_runs; r++)
        if (runtime_check("evicting read", gpu_read_launch(m->evict, m->evict_bytes, m->sink, 0,
                                                           b->device.n_processors, b->stream)) ||
            runtime_event_record(m->from[r], b->stream) ||
            runtime_graph_launch(graphs[r % n_graphs], b->stream) ||
            runtime_event_record(m->to[r], b->stream) ||
            (m->is_alone && runtime_stream_wait(b->stream)))
            return gpu_lost(b);
    if (runtime_stream_wait(b->stream) != 0)
        return gpu_lost(b);
    for (uint32_t r = 0; r < n_runs; r++)
        if (runtime_event_ns(m->from[r], m->to[r], &out_ns[r]) != 0)
            return gpu_lost(b);
    return ATTN_OK;
}

/* ---- batches */

static bool variant_choice(const char *variant, struct gpu_choice *out)
{
    static const struct {
        enum gpu_kernel kernel;
        bool is_split;
    } steps[] = {
        {GPU_NAIVE, false},  {GPU_ONLINE, false},    {GPU_SHARED, false},
        {GPU_VECTOR, false}, {GPU_MATRIX_16, false}, {GPU_MATRIX_16, true},
    };
    *out = (struct gpu_choice){.is_split = true};
    if (!variant)
        return true;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        if (strcmp(variant, variants[i]) == 0) {
            *out = (struct gpu_choice){true, steps[i].is_split, steps[i].kernel};
            return true;
        }
    return false;
}

static void batch_close(struct bench_batch *x)
{
    runtime_graph_close(x->graph);
    runtime_host_free(x->job.staging.host);
    runtime_free(x->job.staging.device);
    runtime_free(x->job.staging.q);
    runtime_free(x->out);
    runtime_free(x->lse);
    gpu_job_fini(&x->job);
}

/* Makes the batch's job with memory of its own, runs it once, and captures it. */
static attn_status batch_open(struct backend *b, const struct gpu_choice *choice,
                              struct backend_batch *batch, struct bench_batch *x)
{
    struct backend_pool *p = batch->pool;
    uint64_t tokens = b->config.max_batch_tokens, heads = p->config.num_q_heads;
    uint64_t used = 0;
    for (uint32_t i = 0; i < batch->n_items; i++)
        used += batch->items[i].n_tokens;
    if (used > tokens)
        return gpu_fail(b, ATTN_EINVAL, "%u tokens exceed max_batch_tokens", (uint32_t)used);
    x->batch = batch;
    attn_status st = gpu_job_init(b, &x->job);
    if (st != ATTN_OK)
        return st;
    struct gpu_staging *s = &x->job.staging;
    s->scratch = b->slots[0].job.staging.scratch; /* nothing is in flight */
    s->bytes = gpu_staging_bytes(b, p);
    uint64_t size = attn_dtype_bytes(p->config.q_dtype);
    s->q_bytes = used * heads * p->config.head_dim_k * size;
    uint64_t out_bytes = used * heads * p->config.head_dim_v * size;
    uint64_t lse_bytes = used * heads * sizeof(float);
    if (runtime_host_alloc((void **)&s->host, s->bytes) != 0 ||
        runtime_alloc((void **)&s->device, s->bytes) != 0 ||
        runtime_alloc((void **)&s->q, s->q_bytes) != 0 ||
        runtime_alloc((void **)&x->out, out_bytes) != 0 ||
        runtime_alloc((void **)&x->lse, lse_bytes) != 0)
        return gpu_fail(b, ATTN_ENOMEM, "%s", runtime_last_error());
    st = gpu_job_make(b, &x->job, batch, choice, x->out, x->lse);
    if (st != ATTN_OK)
        return st;
    /* q, patches and descriptors once; poison what the runs must write */
    if (gpu_job_upload(&x->job, b->stream) || gpu_job_prep(&x->job, batch, b->stream) ||
        runtime_fill(x->out, 0xff, out_bytes, b->stream) ||
        runtime_fill(x->lse, 0xff, lse_bytes, b->stream) ||
        gpu_job_attend(&x->job, NULL, b->stream, false) || runtime_stream_wait(b->stream))
        return gpu_lost(b);
    if (runtime_graph_begin(b->stream) != 0)
        return gpu_lost(b);
    int code = x->job.has_append ? gpu_job_prep(&x->job, batch, b->stream) : 0;
    if (!code)
        code = gpu_job_attend(&x->job, NULL, b->stream, x->job.has_append);
    if (runtime_graph_end(b->stream, &x->graph) != 0 || code)
        return gpu_lost(b);
    return launch_first(b, x->graph);
}

/* Brings the results of the last run to the items' own buffers. */
static attn_status batch_results(struct backend *b, struct bench_batch *x)
{
    const struct backend_pool *p = x->batch->pool;
    uint64_t row = (uint64_t)p->config.num_q_heads * p->config.head_dim_v *
                   attn_dtype_bytes(p->config.q_dtype);
    /* the job orders items by kernel; results lie in that order */
    const struct gpu_item *items =
        x->job.prep.items ? (const struct gpu_item *)x->job.staging.host : x->job.prep.inline_items;
    for (uint32_t i = 0; i < x->batch->n_items; i++) {
        const struct backend_item *it = &x->batch->items[x->job.order[i]];
        if (!(it->flags & BACKEND_ATTEND))
            continue;
        if (runtime_copy(it->out, items[i].out, it->n_tokens * row, b->stream) != 0)
            return gpu_lost(b);
        uint64_t lse = (uint64_t)it->n_tokens * p->config.num_q_heads * sizeof(float);
        if (it->lse && runtime_copy(it->lse, items[i].lse, lse, b->stream) != 0)
            return gpu_lost(b);
    }
    x->batch->status = ATTN_OK;
    x->batch->kv_bytes = x->job.kv_bytes;
    x->batch->n_splits = x->job.n_splits;
    return runtime_stream_wait(b->stream) == 0 ? ATTN_OK : gpu_lost(b);
}

static attn_status gpu_time_batch(struct backend *b, const char *variant,
                                  struct backend_batch *const *batches, uint32_t n_batches,
                                  uint32_t n_runs, bool is_alone, uint64_t *out_ns)
{
    struct gpu_choice choice;
    if (n_batches == 0 || n_runs == 0)
        return gpu_fail(b, ATTN_EINVAL, "n_batches %u, n_runs %u: not 0", n_batches, n_runs);
    if (!variant_choice(variant, &choice))
        return gpu_fail(b, ATTN_ENOTSUP, "no variant is called '%s'", variant);
    for (uint32_t i = 0; i < n_batches; i++)
        if (choice.is_forced && choice.forced == GPU_MATRIX_16 &&
            batches[i]->pool->config.q_dtype == ATTN_F32)
            return gpu_fail(b, ATTN_ENOTSUP, "variant %s: tensor cores take bf16 and f16, not f32",
                            variant);

    struct bench m;
    struct bench_batch *x = calloc(n_batches, sizeof *x);
    runtime_graph **graphs = calloc(n_batches, sizeof *graphs);
    attn_status st = bench_open(b, n_runs, is_alone, &m);
    if (st == ATTN_OK && (!x || !graphs))
        st = gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    for (uint32_t i = 0; i < n_batches && st == ATTN_OK; i++) {
        st = batch_open(b, &choice, batches[i], &x[i]);
        graphs[i] = x[i].graph;
    }
    uint32_t n_warm = n_runs < 10 ? n_runs : 10; /* their times are overwritten */
    if (st == ATTN_OK)
        st = bench_run(&m, graphs, n_batches, n_warm, out_ns);
    if (st == ATTN_OK)
        st = bench_run(&m, graphs, n_batches, n_runs, out_ns);
    for (uint32_t i = 0; i < n_batches && st == ATTN_OK; i++)
        st = batch_results(b, &x[i]);
    for (uint32_t i = 0; i < n_batches && x; i++)
        batch_close(&x[i]);
    free(x);
    free(graphs);
    bench_close(&m);
    return st;
}

/* ---- plain reads */

static int compare_ns(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* A plain read of one shape. Its graphs read one place of the KV memory after the other, as batches do. */
enum { READ_PLACES = 8 };
struct plain_read {
    runtime_graph *graphs[READ_PLACES];
    uint32_t n;
};

static void plain_read_close(struct plain_read *x)
{
    for (uint32_t i = 0; i < x->n; i++)
        runtime_graph_close(x->graphs[i]);
    x->n = 0;
}

static attn_status plain_read_open(struct bench *m, uint64_t bytes, int shape, struct plain_read *x)
{
    struct backend *b = m->b;
    const uint64_t room = bytes ? b->kv.bytes / bytes : 1;
    while (x->n < READ_PLACES && x->n < room) {
        if (runtime_graph_begin(b->stream) != 0)
            return gpu_lost(b);
        int code = runtime_check(
            "read kernel", gpu_read_launch((const char *)b->kv.p + x->n * bytes, bytes, m->sink,
                                           shape, b->device.n_processors, b->stream));
        if (runtime_graph_end(b->stream, &x->graphs[x->n]) != 0 || code)
            return gpu_lost(b);
        attn_status st = launch_first(b, x->graphs[x->n++]);
        if (st != ATTN_OK)
            return st;
    }
    return ATTN_OK;
}

static attn_status gpu_time_read(struct backend *b, uint64_t bytes, uint32_t n_runs, bool is_alone,
                                 uint64_t *out_ns)
{
    enum { n_tries = 9 };
    if (n_runs == 0)
        return gpu_fail(b, ATTN_EINVAL, "n_runs is 0");
    if (bytes > b->kv.bytes)
        return gpu_fail(b, ATTN_ENOTSUP, "cannot read %llu bytes of %llu",
                        (unsigned long long)bytes, (unsigned long long)b->kv.bytes);
    struct bench m;
    struct plain_read best = {0}, x = {0};
    attn_status st = bench_open(b, n_runs > n_tries ? n_runs : n_tries, is_alone, &m);
    uint64_t best_ns = UINT64_MAX, tries[n_tries];
    for (int i = 0; i < GPU_READ_SHAPES && st == ATTN_OK; i++) {
        st = plain_read_open(&m, bytes, i, &x);
        if (st == ATTN_OK)
            st = bench_run(&m, x.graphs, x.n, n_tries, tries);
        if (st == ATTN_OK) {
            qsort(tries, n_tries, sizeof *tries, compare_ns);
            if (tries[n_tries / 2] < best_ns) {
                best_ns = tries[n_tries / 2];
                struct plain_read other = best;
                best = x;
                x = other;
            }
        }
        plain_read_close(&x);
    }
    if (st == ATTN_OK)
        st = bench_run(&m, best.graphs, best.n, n_runs, out_ns);
    plain_read_close(&best);
    bench_close(&m);
    return st;
}

static const struct backend_bench_ops ops = {
    .abi = BACKEND_ABI,
    .name = GPU_BACKEND_NAME,
    .variants = variants,
    .time_batch = gpu_time_batch,
    .time_read = gpu_time_read,
};

const struct backend_bench_ops *attnd_backend_bench(void);

__attribute__((visibility("default"))) const struct backend_bench_ops *attnd_backend_bench(void)
{
    return &ops;
}
