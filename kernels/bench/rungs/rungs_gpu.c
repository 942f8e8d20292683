/* rungs_gpu.c: the table of rungs.h for the GPU backends, over vendor/runtime.h. Matrix products
 * are cuBLAS's where the process finds it (LD_LIBRARY_PATH), else the vectorised rung's.
 */
#include "kernels/bench/rungs/rungs_gpu.h"
#include "kernels/gpu/gpu_host.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SCORES_BYTES ((uint64_t)512 << 20) /* of the rungs that hold scores */

struct rungs {
    struct runtime_device device;
    runtime_stream *streams[RUNG_STREAMS];
    runtime_event *marks[RUNG_MARKS], *met;
    char *evict;
    uint64_t evict_bytes;
    uint32_t *sink;
    char error[512];
    void *cublas, *handle; /* NULL: not there */
    int (*set_stream)(void *, void *);
    /* handle, op a, op b, m, n, k, alpha, a, type, ld, b, type, ld, beta, c, type, ld, compute,
     * algorithm */
    int (*gemm)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *,
                int, int, const void *, void *, int, int, int, int);
};

static attn_status fail(struct rungs *r, attn_status st, const char *words)
{
    snprintf(r->error, sizeof r->error, "%s", words);
    return st;
}

/* What the runtime's code means. */
static attn_status checked(struct rungs *r, int code)
{
    return code == 0 ? ATTN_OK : fail(r, ATTN_EDEVICE, runtime_last_error());
}

static attn_status launched(struct rungs *r, const char *kernel, int code)
{
    return checked(r, runtime_check(kernel, code));
}

static void find_cublas(struct rungs *r)
{
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
    int (*create)(void **);
    void *create_symbol, *set_stream, *gemm;
    for (size_t i = 0; i < sizeof names / sizeof *names && r->cublas == NULL; i++)
        r->cublas = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (r->cublas == NULL)
        return;
    create_symbol = dlsym(r->cublas, "cublasCreate_v2");
    set_stream = dlsym(r->cublas, "cublasSetStream_v2");
    gemm = dlsym(r->cublas, "cublasGemmEx");
    if (create_symbol == NULL || set_stream == NULL || gemm == NULL)
        return;
    memcpy(&create, &create_symbol, sizeof create);
    memcpy(&r->set_stream, &set_stream, sizeof r->set_stream);
    memcpy(&r->gemm, &gemm, sizeof r->gemm);
    if (create(&r->handle) != 0)
        r->handle = NULL;
}

static attn_status gpu_rungs_open(uint32_t n_threads, struct rungs **out_r)
{
    (void)n_threads;
    struct rungs *r = calloc(1, sizeof *r);
    *out_r = r;
    if (r == NULL)
        return ATTN_ENOMEM;
    if (runtime_device_open(0, &r->device) != 0)
        return fail(r, ATTN_EDEVICE, runtime_last_error());
    int code = runtime_event_open(&r->met);
    for (int i = 0; i < RUNG_STREAMS && code == 0; i++)
        code = runtime_stream_open(&r->streams[i]);
    for (int i = 0; i < RUNG_MARKS && code == 0; i++)
        code = runtime_event_open(&r->marks[i]);
    r->evict_bytes = 2 * (r->device.l2_bytes ? r->device.l2_bytes : (uint64_t)64 << 20);
    if (code == 0)
        code = runtime_alloc((void **)&r->evict, r->evict_bytes);
    if (code == 0)
        code = runtime_alloc((void **)&r->sink, 16);
    if (code == 0)
        code = runtime_fill(r->evict, 0x5a, r->evict_bytes, r->streams[0]);
    if (code == 0 && r->device.has_matrix_units)
        code = runtime_check("rung_matrix_init", rung_matrix_init(r->device.shared_bytes));
    if (code == 0)
        find_cublas(r);
    return checked(r, code);
}

static void gpu_rungs_close(struct rungs *r)
{
    if (r == NULL)
        return;
    for (int i = 0; i < RUNG_MARKS; i++)
        runtime_event_close(r->marks[i]);
    for (int i = 0; i < RUNG_STREAMS; i++)
        runtime_stream_close(r->streams[i]);
    runtime_event_close(r->met);
    runtime_free(r->evict);
    runtime_free(r->sink);
    free(r); /* the library of products stays, as the driver does */
}

static const char *gpu_last_error(const struct rungs *r)
{
    return r == NULL ? "no memory" : r->error;
}

static const char *gpu_matmul_name(const struct rungs *r)
{
    return r->handle ? "cuBLAS" : "ours";
}

static uint32_t gpu_matmul_size(const struct rungs *r)
{
    return r->device.n_processors < 16 ? 64 : 8192; /* so few: the tests' executor */
}

/* ---- memory, streams, marks */

static attn_status gpu_alloc(struct rungs *r, uint64_t bytes, void **out_p)
{
    *out_p = NULL;
    return runtime_alloc(out_p, bytes) == 0 ? ATTN_OK : fail(r, ATTN_ENOMEM, runtime_last_error());
}

static attn_status gpu_host_alloc(struct rungs *r, uint64_t bytes, void **out_p)
{
    *out_p = NULL;
    return runtime_host_alloc(out_p, bytes) == 0 ? ATTN_OK
                                                 : fail(r, ATTN_ENOMEM, runtime_last_error());
}

static void gpu_free(struct rungs *r, void *p)
{
    (void)r;
    runtime_free(p);
}

static void gpu_host_free(struct rungs *r, void *p)
{
    (void)r;
    runtime_host_free(p);
}

static attn_status gpu_copy(struct rungs *r, void *dst, const void *src, uint64_t bytes,
                            uint32_t stream)
{
    return checked(r, runtime_copy(dst, src, bytes, r->streams[stream]));
}

static attn_status gpu_fill(struct rungs *r, void *dst, int byte, uint64_t bytes, uint32_t stream)
{
    return checked(r, runtime_fill(dst, byte, bytes, r->streams[stream]));
}

static void *gpu_stream(struct rungs *r, uint32_t stream)
{
    return r->streams[stream];
}

static attn_status gpu_wait(struct rungs *r, uint32_t stream)
{
    return checked(r, runtime_stream_wait(r->streams[stream]));
}

static attn_status gpu_follow(struct rungs *r, uint32_t stream, uint32_t other)
{
    int code = runtime_event_record(r->met, r->streams[other]);
    return checked(r, code ? code : runtime_stream_follow(r->streams[stream], r->met));
}

static attn_status gpu_mark(struct rungs *r, uint32_t mark, uint32_t stream)
{
    return checked(r, runtime_event_record(r->marks[mark], r->streams[stream]));
}

static attn_status gpu_elapsed(struct rungs *r, uint32_t from, uint32_t to, uint64_t *out_ns)
{
    return checked(r, runtime_event_ns(r->marks[from], r->marks[to], out_ns));
}

static attn_status gpu_evict(struct rungs *r, uint32_t stream)
{
    return launched(r, "evicting read",
                    gpu_read_launch(r->evict, r->evict_bytes, r->sink, 0, r->device.n_processors,
                                    r->streams[stream]));
}

/* ---- attention */

struct rung_work {
    struct bench_work work;
    struct rungs *r;
    runtime_graph *graph;
};

static bool has_scores(const struct rung_call *c)
{
    return c->rung == RUNG_NAIVE || c->rung == RUNG_VECTORISED;
}

static uint64_t gpu_scratch_bytes(const struct rungs *r, const struct rung_call *c)
{
    (void)r;
    const uint64_t all = (uint64_t)c->batch * c->heads * c->n * c->n * sizeof(float);
    if (has_scores(c))
        return all < SCORES_BYTES ? all : SCORES_BYTES;
    return c->rung == RUNG_MATRIX ? rung_matrix_scratch(c) : 0;
}

static attn_status check_call(struct rungs *r, const struct rung_call *c)
{
    const bool is_dim = c->dim == 64 || c->dim == 128 || c->dim == 256;
    if (c->n == 0 || c->n % 64 != 0 || !is_dim)
        return fail(r, ATTN_ENOTSUP, "rungs take multiples of 64 tokens, head_dim 64, 128 and 256");
    if ((c->rung == RUNG_SHARED || c->rung == RUNG_WARP) && c->dim != 64)
        return fail(r, ATTN_ENOTSUP, "this rung takes head_dim 64");
    if (c->rung == RUNG_MATRIX && !r->device.has_matrix_units)
        return fail(r, ATTN_ENOTSUP, "the device has no matrix units");
    if (c->rung == RUNG_MATRIX && !rung_matrix_fits(c, r->device.shared_bytes))
        return fail(r, ATTN_ENOTSUP, "more shared memory than the device has");
    const uint64_t least = has_scores(c) ? 64 * (uint64_t)c->n * sizeof(float) : 0;
    if (c->scratch_bytes < (has_scores(c) ? least : gpu_scratch_bytes(r, c)))
        return fail(r, ATTN_ENOTSUP, "too little scratch memory");
    return ATTN_OK;
}

static int launch_call(const struct rung_call *c, runtime_stream *s)
{
    static int (*const launches[RUNG_COUNT])(const struct rung_call *, void *) = {
        [RUNG_NAIVE] = rung_naive_launch,   [RUNG_VECTORISED] = rung_vectorised_launch,
        [RUNG_SHARED] = rung_shared_launch, [RUNG_WARP] = rung_warp_launch,
        [RUNG_MATRIX] = rung_matrix_launch,
    };
    return runtime_check("rung's kernel", launches[c->rung](c, s));
}

static attn_status work_run(struct bench_work *work, void *stream)
{
    struct rung_work *w = (struct rung_work *)work;
    return checked(w->r, runtime_graph_launch(w->graph, stream));
}

static void work_close(struct bench_work *work)
{
    struct rung_work *w = (struct rung_work *)work;
    runtime_graph_close(w->graph);
    free(w);
}

static attn_status gpu_attend_open(struct rungs *r, const struct rung_call *c,
                                   struct bench_work **out_w)
{
    attn_status st = check_call(r, c);
    if (st != ATTN_OK)
        return st;
    struct rung_work *w = calloc(1, sizeof *w);
    if (w == NULL)
        return fail(r, ATTN_ENOMEM, "out of host memory");
    *w = (struct rung_work){.work = {work_run, work_close}, .r = r};
    int code = runtime_graph_begin(r->streams[0]);
    if (code == 0) {
        int launch = launch_call(c, r->streams[0]);
        code = runtime_graph_end(r->streams[0], &w->graph);
        code = launch ? launch : code;
    }
    if (code != 0) {
        work_close(&w->work);
        return checked(r, code);
    }
    *out_w = &w->work;
    return ATTN_OK;
}

/* ---- an encoder's other parts */

/* The library's matrices lie by columns: C^T = B^T A^T is what we call C = A B. */
static attn_status library_matmul(struct rungs *r, const struct rung_matmul *m, runtime_stream *s)
{
    enum { F32 = 0, BF16 = 14, COMPUTE_F32 = 68, NOT_TURNED = 0, DEFAULT_ALGORITHM = -1 };
    const float one = 1, added = m->is_added ? 1 : 0;
    const int type = m->is_f32 ? F32 : BF16, rows = (int)m->m, columns = (int)m->n, k = (int)m->k;
    int code = r->set_stream(r->handle, runtime_stream_native(s));
    if (code == 0)
        code =
            r->gemm(r->handle, NOT_TURNED, NOT_TURNED, columns, rows, k, &one, m->b, type, columns,
                    m->a, type, k, &added, m->c, type, columns, COMPUTE_F32, DEFAULT_ALGORITHM);
    if (code == 0)
        return ATTN_OK;
    snprintf(r->error, sizeof r->error, "cublasGemmEx: status %d", code);
    return ATTN_EDEVICE;
}

static attn_status gpu_matmul(struct rungs *r, const struct rung_matmul *m, uint32_t stream)
{
    if (m->m % 64 != 0 || m->n % 64 != 0 || m->k % 64 != 0)
        return fail(r, ATTN_ENOTSUP, "matrix products take multiples of 64");
    if (r->handle)
        return library_matmul(r, m, r->streams[stream]);
    return launched(r, "matmul kernel", rung_matmul_launch(m, r->streams[stream]));
}

static attn_status gpu_norm(struct rungs *r, const void *x, void *out, uint32_t rows,
                            uint32_t width, bool is_f32, uint32_t stream)
{
    return launched(r, "norm kernel",
                    rung_norm_launch(x, out, rows, width, is_f32, r->streams[stream]));
}

static attn_status gpu_gelu(struct rungs *r, void *x, uint64_t n, bool is_f32, uint32_t stream)
{
    return launched(r, "gelu kernel", rung_gelu_launch(x, n, is_f32, r->streams[stream]));
}

static const struct rungs_ops ops = {
    .abi = RUNGS_ABI,
    .name = GPU_BACKEND_NAME,
    .has_streams = true,
    .names = {"naive", "vectorised", "shared", "warp", "matrix"},
    .open = gpu_rungs_open,
    .close = gpu_rungs_close,
    .last_error = gpu_last_error,
    .matmul_name = gpu_matmul_name,
    .matmul_size = gpu_matmul_size,
    .alloc = gpu_alloc,
    .host_alloc = gpu_host_alloc,
    .free = gpu_free,
    .host_free = gpu_host_free,
    .copy = gpu_copy,
    .fill = gpu_fill,
    .stream = gpu_stream,
    .wait = gpu_wait,
    .follow = gpu_follow,
    .mark = gpu_mark,
    .elapsed = gpu_elapsed,
    .evict = gpu_evict,
    .scratch_bytes = gpu_scratch_bytes,
    .attend_open = gpu_attend_open,
    .matmul = gpu_matmul,
    .norm = gpu_norm,
    .gelu = gpu_gelu,
};

const struct rungs_ops *attnd_rungs(void);

__attribute__((visibility("default"))) const struct rungs_ops *attnd_rungs(void)
{
    return &ops;
}
