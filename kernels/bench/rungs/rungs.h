/* rungs.h: the rungs that attnbench climbs, from the plainest way to compute attention to tensor
 * cores, with what a measurement and a small encoder need around them. attnbench only; a device's
 * rungs are a module of their own (attnd-cudabench.so, attnd-hipbench.so), the CPU's are linked in.
 *
 * Attention here is full (no mask), one kv head per query head, over contiguous tensors:
 *     q, k, v, out   [batch][n][heads][dim], f32 or bf16
 *
 * Streams   0 to RUNG_STREAMS - 1. A CPU works at once and in order whatever the stream.
 * Errors    Functions return ATTN_OK, ATTN_ENOTSUP (not this shape on this device), ATTN_ENOMEM,
 *           ATTN_EDEVICE; last_error has the words.
 * Thread    one
 */
#ifndef ATTND_KERNELS_RUNGS_H
#define ATTND_KERNELS_RUNGS_H

#include "kernels/backend_bench.h"

#define RUNGS_ABI 1
#define RUNG_STREAMS 3
#define RUNG_MARKS 4096

enum rung {
    RUNG_NAIVE, /* three passes: a thread computes one score, one element of the output */
    RUNG_VECTORISED, /* three passes by tiles that registers and shared memory reuse */
    RUNG_SHARED, /* one pass, online softmax; a thread per row, K and V in shared tiles */
    RUNG_WARP, /* a warp per row, 8 rows a tile, 16-byte loads */
    RUNG_MATRIX, /* the fused one: on tensor cores, f32 as three products of bf16 halves; on a CPU
                    tiles of scores that stay in the L1 cache */
    RUNG_COUNT,
};

struct rung_call {
    enum rung rung;
    bool is_f32; /* else bf16 */
    uint32_t batch, heads, dim, n;
    float scale; /* multiplies q.k */
    const void *q, *k, *v; /* device memory */
    void *out;
    void *scratch; /* device memory; see scratch_bytes() */
    uint64_t scratch_bytes;
};

struct rung_matmul {
    const void *a, *b; /* [m][k], [k][n] */
    void *c; /* [m][n] */
    uint32_t m, n, k; /* multiples of 64 */
    bool is_f32; /* else bf16 with f32 sums */
    bool is_added; /* to c */
};

struct rungs; /* a device with its streams */

struct rungs_ops {
    uint32_t abi; /* RUNGS_ABI */
    const char *name; /* the backend's */
    bool has_streams; /* what is enqueued on two of them runs side by side */
    const char *names[RUNG_COUNT]; /* NULL: not on this device */

    attn_status (*open)(uint32_t n_threads, struct rungs **out_r); /* closed also after a failure */
    void (*close)(struct rungs *r); /* NULL is fine */
    const char *(*last_error)(const struct rungs *r);
    const char *(*matmul_name)(const struct rungs *r); /* "cuBLAS", "ours" */
    uint32_t (*matmul_size)(const struct rungs *r); /* m, n and k that show the device's rate */

    attn_status (*alloc)(struct rungs *r, uint64_t bytes, void **out_p);
    attn_status (*host_alloc)(struct rungs *r, uint64_t bytes, void **out_p); /* copied at once */
    void (*free)(struct rungs *r, void *p); /* NULL is fine */
    void (*host_free)(struct rungs *r, void *p);
    attn_status (*copy)(struct rungs *r, void *dst, const void *src, uint64_t bytes,
                        uint32_t stream);
    attn_status (*fill)(struct rungs *r, void *dst, int byte, uint64_t bytes, uint32_t stream);
    void *(*stream)(struct rungs *r, uint32_t stream); /* as struct bench_work wants it */
    attn_status (*wait)(struct rungs *r, uint32_t stream);
    /* What is enqueued on stream from now on runs after what is on `other` by now. */
    attn_status (*follow)(struct rungs *r, uint32_t stream, uint32_t other);
    /* A place in a stream's work, 0 to RUNG_MARKS - 1, and the time between two that have
     * passed. */
    attn_status (*mark)(struct rungs *r, uint32_t mark, uint32_t stream);
    attn_status (*elapsed)(struct rungs *r, uint32_t from, uint32_t to, uint64_t *out_ns);
    attn_status (*evict)(struct rungs *r, uint32_t stream); /* empties the caches */

    /* What a call wants. Rungs that hold scores on a GPU take less: then their tiles are smaller,
     * 64 rows of one head at least. */
    uint64_t (*scratch_bytes)(const struct rungs *r, const struct rung_call *c);
    /* ENOTSUP: not this shape. The call is copied; its tensors are the caller's. */
    attn_status (*attend_open)(struct rungs *r, const struct rung_call *c,
                               struct bench_work **out_w);

    attn_status (*matmul)(struct rungs *r, const struct rung_matmul *m, uint32_t stream);
    /* Rows of width elements to mean 0 and variance 1. */
    attn_status (*norm)(struct rungs *r, const void *x, void *out, uint32_t rows, uint32_t width,
                        bool is_f32, uint32_t stream);
    /* x -> gelu(x), by tanh, in place; n a multiple of 8 */
    attn_status (*gelu)(struct rungs *r, void *x, uint64_t n, bool is_f32, uint32_t stream);
};

#define RUNGS_SYMBOL "attnd_rungs"
typedef const struct rungs_ops *(*rungs_fn)(void);

const struct rungs_ops *rungs_cpu(void);
/* NAME's: the CPU's, or those of attnd-NAMEbench.so. ATTN_ENOTFOUND: the reason is in why. */
attn_status rungs_load(const char *backend, const struct rungs_ops **out_ops, char *why,
                       size_t why_bytes);

/* Rows of one head, or of several heads, whose scores a three-pass rung holds at once. */
struct rung_tile {
    uint32_t head0, n_heads; /* of batch * heads */
    uint32_t row0, n_rows; /* of n; all of them where n_heads > 1 */
};

/* The tile that follows t (zeroed: the first), of scores [n_heads][n_rows][n] f32 in so many
 * bytes, which hold 64 rows at least. false: t was the last. */
static inline bool rung_tile_next(const struct rung_call *c, uint64_t bytes, struct rung_tile *t)
{
    const uint64_t row = (uint64_t)c->n * sizeof(float), head = row * c->n;
    const uint32_t n_all = c->batch * c->heads;
    t->row0 += t->n_rows;
    if (t->row0 >= c->n) {
        t->row0 = 0;
        t->head0 += t->n_heads;
    }
    if (t->head0 >= n_all)
        return false;
    const uint64_t heads = bytes / head, rows = bytes / row / 64 * 64;
    t->n_heads = heads < 1 ? 1 : heads < n_all - t->head0 ? (uint32_t)heads : n_all - t->head0;
    t->n_rows = rows < c->n - t->row0 && heads < 1 ? (uint32_t)rows : c->n - t->row0;
    return true;
}

#endif
