/* gpu_bench.c: what the gpu backends measure of themselves (backend_bench.h).
 *
 * Inside the timed window: what a batch does on the device (append if it appends, attention,
 * merge), as one graph, from event to event. Outside: the upload of descriptors, q on its way in,
 * out on its way back; q and out are in device memory. Before every run twice the L2 cache is read,
 * so that caches are cold and hold nothing that has to be written back.
 */
#include "kernels/backend_bench.h"
#include "kernels/bench/project.h"
#include "kernels/gpu/gpu_host.h"

#include <stdlib.h>
#include <string.h>

static const char *const variants[] = {"naive", "online", "shared", "warp",
                                       "mma",   "splitk", "apart",  NULL};

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

/* Enqueues n_runs timed launches of graphs[r % n_graphs] and waits for them. What the host submits
 * while a window is open makes it about a microsecond longer; not so if every run is waited for. */
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

static bool variant_choice(const char *variant, bool has_matrix, struct gpu_choice *out)
{
    static const struct {
        enum gpu_kernel kernel;
        bool is_split;
    } steps[] = {
        {GPU_NAIVE, false},  {GPU_ONLINE, false},    {GPU_SHARED, false},
        {GPU_VECTOR, false}, {GPU_MATRIX_16, false}, {GPU_MATRIX_16, true},
    };
    *out = (struct gpu_choice){.is_split = true, .n_shards = backend_bench_shards(variant)};
    if (!variant || strcmp(variant, "apart") == 0)
        return true;
    if (out->n_shards > 0) {
        out->is_forced = true;
        out->forced = has_matrix ? GPU_MATRIX_16 : GPU_VECTOR;
        return true;
    }
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        if (strcmp(variant, variants[i]) == 0) {
            *out = (struct gpu_choice){true, steps[i].is_split, steps[i].kernel, 0};
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

/* A layer around attention, in device memory. */
struct device_layer {
    char *memory; /* x, its norm, q, k, v, y: rows_bytes each; four weights */
    uint64_t rows_bytes, weight_bytes;
    struct gpu_project product; /* what all of them have in common */
    struct backend_item *items; /* the batch's, with q, k, v there */
};

enum { LAYER_X, LAYER_NORM, LAYER_Q, LAYER_K, LAYER_V, LAYER_Y, LAYER_WEIGHTS };

static char *layer_at(const struct device_layer *l, uint32_t part)
{
    return l->memory + part * l->rows_bytes;
}

static void layer_close(struct device_layer *l)
{
    runtime_free(l->memory);
    free(l->items);
}

static attn_status layer_open(struct backend *b, const struct backend_batch *batch,
                              const struct backend_bench_layer *layer, struct device_layer *l)
{
    const struct backend_pool_config *c = &batch->pool->config;
    const uint64_t size = attn_dtype_bytes(c->q_dtype), dim = layer->dim;
    const uint64_t token = (uint64_t)c->num_q_heads * c->head_dim_k * size;
    uint64_t at = 0;
    l->items = malloc(batch->n_items * sizeof *l->items);
    for (uint32_t i = 0; i < batch->n_items; i++)
        l->rows_bytes += batch->items[i].n_tokens * token;
    l->weight_bytes = dim * dim * size;
    if (l->items == NULL || runtime_alloc((void **)&l->memory,
                                          LAYER_WEIGHTS * l->rows_bytes + 4 * l->weight_bytes) != 0)
        return gpu_fail(b, ATTN_ENOMEM, "a layer of dim %u: %s", layer->dim, runtime_last_error());
    for (uint32_t i = 0; i < batch->n_items; i++) {
        struct backend_item *it = &l->items[i];
        *it = batch->items[i];
        it->q = layer_at(l, LAYER_Q) + at;
        it->k = layer_at(l, LAYER_K) + at;
        it->v = layer_at(l, LAYER_V) + at;
        at += it->n_tokens * token;
    }
    l->product = (struct gpu_project){
        .n = (uint32_t)(l->rows_bytes / size / dim), .dim = layer->dim, .dtype = c->q_dtype};
    int code = runtime_copy(l->memory, layer->x, l->rows_bytes, b->stream);
    for (uint32_t i = 0; i < 4 && !code; i++)
        code = runtime_copy(layer_at(l, LAYER_WEIGHTS) + i * l->weight_bytes, layer->weights[i],
                            l->weight_bytes, b->stream);
    return code || runtime_stream_wait(b->stream) ? gpu_lost(b) : ATTN_OK;
}

static int layer_product(const struct device_layer *l, struct backend *b, uint32_t weight,
                         const void *x, const void *added, void *y)
{
    struct gpu_project p = l->product;
    p.x = x;
    p.w = layer_at(l, LAYER_WEIGHTS) + weight * l->weight_bytes;
    p.added = added;
    p.y = y;
    return runtime_check("product kernel", gpu_project_launch(&p, b->stream));
}

/* Norm, q, k, v. */
static int layer_before(const struct device_layer *l, struct backend *b)
{
    struct gpu_project norm = l->product;
    norm.x = layer_at(l, LAYER_X);
    norm.y = layer_at(l, LAYER_NORM);
    int code = runtime_check("norm kernel", gpu_norm_launch(&norm, b->stream));
    for (uint32_t i = 0; i < 3 && !code; i++)
        code = layer_product(l, b, i, norm.y, NULL, layer_at(l, LAYER_Q + i));
    return code;
}

/* What a run launches. layer NULL: attention alone. */
static int launch_run(struct backend *b, const struct bench_batch *x, const struct device_layer *l)
{
    int code = l ? layer_before(l, b) : 0;
    if (!code && x->job.has_append)
        code = gpu_job_prep(&x->job, x->batch, b->stream);
    if (!code)
        code = gpu_job_attend(&x->job, NULL, b->stream, x->job.has_append);
    if (!code && l)
        code = layer_product(l, b, 3, x->out, layer_at(l, LAYER_X), layer_at(l, LAYER_Y));
    return code;
}

/* Makes the batch's job with memory of its own, runs it once, and captures it. Results go to memory
 * of its own, too, if they have a place: not where the items want them. layer NULL: none. */
static attn_status batch_open(struct backend *b, const struct gpu_choice *choice,
                              struct backend_batch *batch, const struct device_layer *layer,
                              bool has_place, struct bench_batch *x)
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
    if (p->config.q_nope_dim > 0)
        return gpu_fail(b, ATTN_ENOTSUP, "no measurements of pools with projections");
    s->scratch = b->slots[0].job.staging.scratch; /* nothing is in flight */
    s->bytes = gpu_staging_bytes(b, p);
    uint64_t size = attn_dtype_bytes(p->config.q_dtype);
    s->q_bytes = used * heads * p->config.head_dim_k * size;
    uint64_t out_bytes = used * heads * p->config.head_dim_v * size;
    uint64_t lse_bytes = used * heads * sizeof(float);
    if (runtime_host_alloc((void **)&s->host, s->bytes) != 0 ||
        runtime_alloc((void **)&s->device, s->bytes) != 0 ||
        runtime_alloc((void **)&s->q, s->q_bytes) != 0 ||
        (has_place && (runtime_alloc((void **)&x->out, out_bytes) != 0 ||
                       runtime_alloc((void **)&x->lse, lse_bytes) != 0)))
        return gpu_fail(b, ATTN_ENOMEM, "%s", runtime_last_error());
    st = gpu_job_make(b, &x->job, batch, choice, x->out, x->lse);
    if (st != ATTN_OK)
        return st;
    /* q, patches and descriptors once; poison what the runs must write */
    if (gpu_job_upload(&x->job, b->stream) || (layer && layer_before(layer, b)) ||
        gpu_job_prep(&x->job, batch, b->stream) ||
        (has_place && (runtime_fill(x->out, 0xff, out_bytes, b->stream) ||
                       runtime_fill(x->lse, 0xff, lse_bytes, b->stream))) ||
        gpu_job_attend(&x->job, NULL, b->stream, false) || runtime_stream_wait(b->stream))
        return gpu_lost(b);
    if (runtime_graph_begin(b->stream) != 0)
        return gpu_lost(b);
    int code = launch_run(b, x, layer);
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
        const uint64_t lse_row = p->config.num_q_heads * sizeof(float), token = items[i].token0;
        if (runtime_copy(it->out, x->out + token * row, it->n_tokens * row, b->stream) != 0)
            return gpu_lost(b);
        if (it->lse && runtime_copy(it->lse, (char *)x->lse + token * lse_row,
                                    it->n_tokens * lse_row, b->stream) != 0)
            return gpu_lost(b);
    }
    x->batch->status = ATTN_OK;
    x->batch->kv_bytes = x->job.kv_bytes;
    x->batch->n_splits = x->job.n_splits;
    return runtime_stream_wait(b->stream) == 0 ? ATTN_OK : gpu_lost(b);
}

/* Room for the partial results of shards, in the place of what batches have; give_parts_back ends
 * it. */
struct parts {
    float *o, *ml;
    uint64_t slots;
};

static void swap_parts(struct backend *b, struct parts *x)
{
    const struct parts own = {b->part_o, b->part_ml, b->part_slots};
    b->part_o = x->o;
    b->part_ml = x->ml;
    b->part_slots = x->slots;
    *x = own;
}

static attn_status take_parts(struct backend *b, const struct backend_batch *batch,
                              uint32_t n_shards, struct parts *out)
{
    struct parts x = {0};
    for (uint32_t i = 0; i < batch->n_items; i++)
        x.slots += (uint64_t)batch->items[i].n_tokens * batch->pool->config.num_q_heads * n_shards;
    if (x.slots > UINT32_MAX)
        return gpu_fail(b, ATTN_ENOMEM, "%u shards: too many partial results", n_shards);
    if (runtime_alloc((void **)&x.o, x.slots * b->part_dv * sizeof(float)) != 0 ||
        runtime_alloc((void **)&x.ml, x.slots * 2 * sizeof(float)) != 0) {
        runtime_free(x.o);
        return gpu_fail(b, ATTN_ENOMEM, "%u shards: %s", n_shards, runtime_last_error());
    }
    swap_parts(b, &x);
    *out = x;
    return ATTN_OK;
}

static void give_parts_back(struct backend *b, struct parts *own)
{
    if (own->slots == 0)
        return;
    swap_parts(b, own);
    runtime_free(own->o);
    runtime_free(own->ml);
}

static attn_status gpu_time_batch(struct backend *b, const char *variant,
                                  struct backend_batch *const *batches, uint32_t n_batches,
                                  uint32_t n_runs, bool is_alone, uint64_t *out_ns)
{
    struct gpu_choice choice;
    if (n_batches == 0 || n_runs == 0)
        return gpu_fail(b, ATTN_EINVAL, "n_batches %u, n_runs %u: not 0", n_batches, n_runs);
    if (!variant_choice(variant, b->device.has_matrix_units, &choice))
        return gpu_fail(b, ATTN_ENOTSUP, "no variant is called '%s'", variant);
    for (uint32_t i = 0; i < n_batches; i++)
        if (choice.is_forced && choice.forced == GPU_MATRIX_16 && choice.n_shards == 0 &&
            batches[i]->pool->config.q_dtype == ATTN_F32)
            return gpu_fail(b, ATTN_ENOTSUP, "variant %s: for bf16 and f16, not f32", variant);
    for (uint32_t i = 0; i < n_batches; i++)
        if (choice.is_forced && choice.forced != GPU_VECTOR && choice.n_shards == 0 &&
            batches[i]->pool->config.is_v_in_k)
            return gpu_fail(b, ATTN_ENOTSUP, "variant %s: not with V in K", variant);
    const bool is_ladder =
        choice.is_forced && choice.forced >= GPU_NAIVE && choice.forced < GPU_NONE;
    for (uint32_t i = 0; i < n_batches && is_ladder; i++)
        if (kv_group(batches[i]->pool->config.kv_dtype) > 0)
            return gpu_fail(b, ATTN_ENOTSUP, "variant %s: not over nvfp4 and mxfp4", variant);
    if (is_ladder)
        for (uint32_t i = 0; i < n_batches; i++)
            for (uint32_t k = 0; k < batches[i]->n_items; k++)
                if (batches[i]->pool->specs[batches[i]->items[k].layer].n_branches > 0)
                    return gpu_fail(b, ATTN_ENOTSUP, "variant %s: layer %u is dilated", variant,
                                    batches[i]->items[k].layer);

    struct bench m;
    struct parts own = {0};
    struct bench_batch *x = calloc(n_batches, sizeof *x);
    runtime_graph **graphs = calloc(n_batches, sizeof *graphs);
    attn_status st = bench_open(b, n_runs, is_alone, &m);
    if (st == ATTN_OK && (!x || !graphs))
        st = gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    if (st == ATTN_OK && choice.n_shards > 1)
        st = take_parts(b, batches[0], choice.n_shards, &own);
    for (uint32_t i = 0; i < n_batches && st == ATTN_OK; i++) {
        b->shared.is_off = variant && strcmp(variant, "apart") == 0;
        st = batch_open(b, &choice, batches[i], NULL, true, &x[i]);
        b->shared.is_off = false;
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
    give_parts_back(b, &own);
    free(x);
    free(graphs);
    bench_close(&m);
    return st;
}

static attn_status gpu_time_layer(struct backend *b, struct backend_batch *batch,
                                  const struct backend_bench_layer *layer, uint32_t n_runs,
                                  bool is_alone, uint64_t *out_ns)
{
    const struct gpu_choice choice = {.is_split = true};
    struct bench m;
    struct device_layer l = {0};
    struct bench_batch x = {0};
    struct backend_batch own = *batch;
    if (n_runs == 0 || layer->dim == 0 || layer->dim % 64 != 0)
        return gpu_fail(b, ATTN_EINVAL, "n_runs %u, dim %u: not 0, dim a multiple of 64", n_runs,
                        layer->dim);
    attn_status st = bench_open(b, n_runs, is_alone, &m);
    if (st == ATTN_OK)
        st = layer_open(b, batch, layer, &l);
    own.items = l.items;
    if (st == ATTN_OK)
        st = batch_open(b, &choice, &own, &l, true, &x);
    for (int i = 0; i < 2 && st == ATTN_OK; i++) /* the first times are overwritten */
        st = bench_run(&m, &x.graph, 1, n_runs, out_ns);
    if (st == ATTN_OK)
        st = batch_results(b, &x);
    if (st == ATTN_OK && (runtime_copy(layer->y, layer_at(&l, LAYER_Y), l.rows_bytes, b->stream) ||
                          runtime_stream_wait(b->stream)))
        st = gpu_lost(b);
    batch_close(&x);
    layer_close(&l);
    bench_close(&m);
    return st;
}

/* ---- a batch as work */

struct batch_work {
    struct bench_work work;
    struct backend *b;
    struct bench_batch x;
};

static attn_status work_run(struct bench_work *work, void *stream)
{
    struct batch_work *w = (struct batch_work *)work;
    return runtime_graph_launch(w->x.graph, stream) == 0 ? ATTN_OK : gpu_lost(w->b);
}

static void work_close(struct bench_work *work)
{
    struct batch_work *w = (struct batch_work *)work;
    batch_close(&w->x);
    free(w);
}

static attn_status gpu_work_open(struct backend *b, struct backend_batch *batch,
                                 struct bench_work **out_w)
{
    const struct gpu_choice choice = {.is_split = true};
    attn_status st = gpu_enter(b);
    if (st != ATTN_OK)
        return st;
    if (b->n_in_flight)
        return gpu_fail(b, ATTN_EINVAL, "a batch is in flight");
    struct batch_work *w = calloc(1, sizeof *w);
    if (!w)
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    w->work = (struct bench_work){work_run, work_close};
    w->b = b;
    st = batch_open(b, &choice, batch, NULL, false, &w->x);
    if (st == ATTN_OK && runtime_stream_wait(b->stream) != 0)
        st = gpu_lost(b);
    if (st != ATTN_OK) {
        work_close(&w->work);
        return st;
    }
    *out_w = &w->work;
    return ATTN_OK;
}

/* ---- plain reads */

static int compare_ns(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* A plain read of one shape. Its graphs read one place of the KV memory after the other, as batches
 * do. */
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
    .time_layer = gpu_time_layer,
    .time_read = gpu_time_read,
    .work_open = gpu_work_open,
};

const struct backend_bench_ops *attnd_backend_bench(void);

__attribute__((visibility("default"))) const struct backend_bench_ops *attnd_backend_bench(void)
{
    return &ops;
}
