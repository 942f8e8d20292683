/* gpu_moves.c: whole blocks to and from page-locked host memory beside batches (kernels/moves.h).
 *
 * What comes from another device's pool goes over the link between them, where there is one
 * (gpu_peers.c); else the vendor's runtime brings it through host memory. Each thread has a stream
 * of its own and moves one block at a time, or some of a peer's: while one makes a checksum, which
 * is slower than the bus, the copies of others are on their way.
 */
#include "kernels/gpu/gpu_host.h"

static attn_status begin(void *arg, uint32_t thread)
{
    struct backend *b = arg;
    bool is_good = runtime_device_use(b->config.device_index) == 0 &&
                   runtime_stream_open(&b->move_streams[thread]) == 0;
    return is_good ? ATTN_OK : ATTN_EDEVICE;
}

/* How many of the first moves are one: of blocks that follow each other in both pools. */
static uint32_t run_of(const struct backend_move *m, uint32_t n)
{
    uint32_t i = 1;
    while (i < n && m[i].block == m->block + i && m[i].peer_block == m->peer_block + i)
        i++;
    return i;
}

/* All are of the same two pools. */
static attn_status move_peers(struct backend *b, runtime_stream *s, const struct backend_move *m,
                              uint32_t n)
{
    const struct gpu_kv *kv = &m->pool->kv, *from = &m->peer->kv;
    int device = b->config.device_index, other = m->peer->b->config.device_index;
    bool is_good = true;
    for (uint32_t i = 0, n_run; i < n && is_good; i += n_run) {
        n_run = run_of(m + i, n - i);
        char *dst = kv->base + m[i].block * kv->block_bytes;
        const char *src = from->base + m[i].peer_block * from->block_bytes;
        size_t bytes = n_run * kv->block_bytes;
        is_good =
            (gpu_reaches(b, other) ? runtime_copy(dst, src, bytes, s)
                                   : runtime_copy_peer(dst, device, src, other, bytes, s)) == 0;
    }
    return runtime_stream_wait(s) == 0 && is_good ? ATTN_OK : ATTN_EDEVICE;
}

static attn_status move(void *arg, uint32_t thread, struct backend_move *m, uint32_t n)
{
    struct backend *b = arg;
    runtime_stream *s = b->move_streams[thread];
    const struct gpu_kv *kv = &m->pool->kv;
    char *block = (char *)kv->base + m->block * kv->block_bytes;
    if (m->peer != NULL)
        return move_peers(b, s, m, n);
    if (m->is_in) {
        if (runtime_copy(block, m->bytes, kv->block_bytes, s) != 0)
            return ATTN_EDEVICE;
        moves_sum(m->bytes, kv->block_bytes, m->sum);
        return runtime_stream_wait(s) == 0 ? ATTN_OK : ATTN_EDEVICE;
    }
    if (runtime_copy(m->bytes, block, kv->block_bytes, s) != 0 || runtime_stream_wait(s) != 0)
        return ATTN_EDEVICE;
    moves_sum(m->bytes, kv->block_bytes, m->sum);
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
    const struct moves_device device = {begin, move, b};
    attn_status st = gpu_enter(b);
    for (uint32_t i = 0; st == ATTN_OK && i < m->n; i++)
        if (!is_possible(&m->list[i]))
            st = gpu_fail(b, ATTN_EINVAL, "block %u of %u, of %zu bytes", m->list[i].block,
                          m->list[i].pool->config.n_blocks, m->list[i].n_bytes);
    if (st != ATTN_OK)
        return st;
    if (b->moves == NULL)
        st = moves_open(&device, GPU_MOVE_THREADS, &b->moves);
    if (st == ATTN_OK)
        st = moves_submit(b->moves, m);
    return st == ATTN_OK ? st : gpu_fail(b, st, "no thread to move %u blocks", m->n);
}

void gpu_moves_end(struct backend *b)
{
    moves_close(b->moves);
    for (int i = 0; i < 2 * GPU_MOVE_THREADS; i++)
        if (b->move_streams[i])
            runtime_stream_close(b->move_streams[i]);
}
