/* gpu_moves.c: whole blocks to and from page-locked host memory beside batches (kernels/moves.h).
 *
 * What comes from another device's pool goes over the link between them, where there is one
 * (gpu_peers.c); else the vendor's runtime brings it through host memory. Each thread has streams
 * of its own, and enqueues what it is given as few copies: blocks of a peer that follow each other
 * on both sides are one, those of host memory may be of pieces that a copy can't cross. The device
 * makes the checksums, of what goes while it is copied and of what has come: the host's processors
 * would read it too slowly (docs/kernels-tried.md). While one thread waits, the copies of the other
 * are on their way.
 */
#include "kernels/gpu/gpu_host.h"
#include "kernels/gpu/sums.h"

static attn_status begin(void *arg, uint32_t thread)
{
    struct backend *b = arg;
    struct gpu_mover *v = &b->movers[thread];
    bool is_good =
        runtime_device_use(b->config.device_index) == 0 && runtime_stream_open(&v->copies) == 0 &&
        runtime_stream_open(&v->sums) == 0 && runtime_event_open(&v->came) == 0 &&
        runtime_alloc((void **)&v->deltas, (size_t)GPU_SUM_KIB * 8 * sizeof *v->deltas) == 0 &&
        runtime_host_alloc((void **)&v->lanes, (size_t)MOVES_TOGETHER * 8 * sizeof *v->lanes) == 0;
    return is_good ? ATTN_OK : ATTN_EDEVICE;
}

static char *block_of(const struct backend_pool *p, uint32_t block)
{
    return p->kv.base + block * p->kv.block_bytes;
}

/* The other side: host memory, or a peer's. */
static char *other_of(const struct backend_move *m)
{
    return m->peer != NULL ? block_of(m->peer, m->peer_block) : m->bytes;
}

/* All are of the same two pools, or of one and host memory. */
static int copy(const struct backend *b, runtime_stream *s, const struct backend_move *m,
                uint32_t n)
{
    const size_t bytes = m->n_bytes;
    const int device = b->config.device_index;
    const int other = m->peer != NULL ? m->peer->b->config.device_index : device;
    void *dst[MOVES_TOGETHER];
    const void *src[MOVES_TOGETHER];
    size_t sizes[MOVES_TOGETHER];
    uint32_t n_runs = 0;
    int code = 0;
    for (uint32_t i = 0, k; i < n; i += k) {
        char *block = block_of(m->pool, m[i].block), *outside = other_of(&m[i]);
        for (k = 1; m->peer != NULL && i + k < n && m[i + k].block == m[i].block + k &&
                    other_of(&m[i + k]) == outside + k * bytes;
             k++)
            ;
        dst[n_runs] = m->is_in ? block : outside;
        src[n_runs] = m->is_in ? outside : block;
        sizes[n_runs++] = k * bytes;
    }
    if (gpu_reaches(b, other))
        return runtime_copies(dst, src, sizes, n_runs, s);
    for (uint32_t i = 0; i < n_runs && code == 0; i++)
        code = runtime_copy_peer(dst[i], device, src[i], other, sizes[i], s);
    return code;
}

static uint32_t kib_of(const struct backend_move *m)
{
    return (uint32_t)((m->n_bytes - 1) / 1024 + 1);
}

/* Of one block in pieces, of more together: see n_together. */
static int sum(const struct gpu_mover *v, uint64_t *lanes, const struct backend_move *m, uint32_t n)
{
    int code = m->is_in ? runtime_event_record(v->came, v->copies) : 0;
    if (m->is_in && code == 0)
        code = runtime_stream_follow(v->sums, v->came);
    const uint32_t n_kib = kib_of(m);
    struct gpu_sums a = {.base = m->pool->kv.base,
                         .block_bytes = m->n_bytes,
                         .deltas = v->deltas,
                         .lanes = lanes,
                         .n = n};
    moves_sum_begin(a.begin, a.secret);
    for (uint32_t i = 0; i < n; i++)
        a.list[i] = m[i].block;
    for (; a.from_kib < n_kib && code == 0; a.from_kib += a.n_kib) {
        a.n_kib = n_kib - a.from_kib < GPU_SUM_KIB ? n_kib - a.from_kib : GPU_SUM_KIB;
        code = runtime_check("checksum kernels", gpu_sums_launch(&a, v->sums));
    }
    return code;
}

/* How many of n blocks have room for their checksums together. */
static uint32_t n_together(const struct backend_move *m, uint32_t n)
{
    uint32_t most = GPU_SUM_KIB / kib_of(m);
    most = most < 1 ? 1 : most > GPU_SUM_BLOCKS ? GPU_SUM_BLOCKS : most;
    return m->peer != NULL || n < most ? n : most;
}

static attn_status move(void *arg, uint32_t thread, struct backend_move *m, uint32_t n)
{
    const struct backend *b = arg;
    const struct gpu_mover *v = &b->movers[thread];
    int code = 0;
    for (uint32_t i = 0, k; i < n && code == 0; i += k) {
        k = n_together(m, n - i);
        code = copy(b, v->copies, m + i, k);
        if (code == 0 && m->peer == NULL)
            code = sum(v, v->lanes + (size_t)i * 8, m + i, k);
    }
    const int waited = runtime_stream_wait(v->copies), summed = runtime_stream_wait(v->sums);
    if (code != 0 || waited != 0 || summed != 0)
        return ATTN_EDEVICE;
    for (uint32_t i = 0; i < n && m->peer == NULL; i++)
        moves_sum_end(v->lanes + (size_t)i * 8, m[i].n_bytes, m[i].sum);
    return ATTN_OK;
}

static bool is_possible(const struct backend_move *m)
{
    const struct backend_pool *p = m->pool, *peer = m->peer;
    bool is_good = m->block < p->config.n_blocks && m->n_bytes == p->kv.block_bytes;
    if (peer == NULL)
        return is_good;
    return is_good && m->is_in && m->peer_block < peer->config.n_blocks &&
           m->n_bytes == peer->kv.block_bytes;
}

attn_status gpu_moves_submit(struct backend *b, struct backend_moves *m)
{
    const struct moves_device device = {begin, move, b, .n_together = MOVES_TOGETHER};
    attn_status st = gpu_enter(b);
    for (uint32_t i = 0; st == ATTN_OK && i < m->n; i++)
        if (!is_possible(&m->list[i]))
            st = gpu_fail(b, ATTN_EINVAL, "block %u of %u, of %zu bytes", m->list[i].block,
                          m->list[i].pool->config.n_blocks, m->list[i].n_bytes);
    if (st != ATTN_OK)
        return st;
    if (b->moves == NULL)
        st = moves_open(&device, GPU_MOVE_THREADS, &b->moves);
    for (uint32_t i = 0; st == ATTN_OK && i < m->n; i++)
        if (m->list[i].is_in)
            gpu_extremes_forget(m->list[i].pool, m->list[i].block);
    if (st == ATTN_OK)
        st = moves_submit(b->moves, m);
    return st == ATTN_OK ? st : gpu_fail(b, st, "no thread to move %u blocks", m->n);
}

void gpu_moves_end(struct backend *b)
{
    moves_close(b->moves);
    for (int i = 0; i < 2 * GPU_MOVE_THREADS; i++) {
        struct gpu_mover *v = &b->movers[i];
        if (v->copies)
            runtime_stream_close(v->copies);
        if (v->sums)
            runtime_stream_close(v->sums);
        runtime_event_close(v->came);
        runtime_free(v->deltas);
        runtime_host_free(v->lanes);
    }
}
