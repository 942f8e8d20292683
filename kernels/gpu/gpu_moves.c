/* gpu_moves.c: whole blocks to and from page-locked host memory beside batches (kernels/moves.h).
 *
 * Each thread has a stream of its own and moves one block at a time: while one makes a checksum,
 * which is slower than the bus, the copies of others are on their way. What comes in follows the
 * latest scrub, which may be of the same blocks.
 */
#include "kernels/gpu/gpu_host.h"

static attn_status begin(void *arg, uint32_t thread)
{
    struct backend *b = arg;
    bool is_good = runtime_device_use(b->config.device_index) == 0 &&
                   runtime_stream_open(&b->move_streams[thread]) == 0;
    return is_good ? ATTN_OK : ATTN_EDEVICE;
}

static attn_status move(void *arg, uint32_t thread, struct backend_move *m)
{
    struct backend *b = arg;
    runtime_stream *s = b->move_streams[thread];
    const struct gpu_kv *kv = &m->pool->kv;
    char *block = (char *)kv->base + m->block * kv->block_bytes;
    if (m->is_in) {
        if (runtime_stream_follow(s, b->scrubbed) != 0 ||
            runtime_copy(block, m->bytes, kv->block_bytes, s) != 0)
            return ATTN_EDEVICE;
        moves_sum(m->bytes, kv->block_bytes, m->sum);
        return runtime_stream_wait(s) == 0 ? ATTN_OK : ATTN_EDEVICE;
    }
    if (runtime_copy(m->bytes, block, kv->block_bytes, s) != 0 || runtime_stream_wait(s) != 0)
        return ATTN_EDEVICE;
    moves_sum(m->bytes, kv->block_bytes, m->sum);
    return ATTN_OK;
}

attn_status gpu_moves_submit(struct backend *b, struct backend_moves *m)
{
    const struct moves_device device = {begin, move, b};
    attn_status st = gpu_enter(b);
    for (uint32_t i = 0; st == ATTN_OK && i < m->n; i++)
        if (m->list[i].block >= m->list[i].pool->config.n_blocks ||
            m->list[i].n_bytes != m->list[i].pool->kv.block_bytes)
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
