/* gpu_queue.c: batches in flight, and whole blocks to and from the host.
 *
 * A batch is, on one stream: block copies, its upload if it has one, prep, attention, and a kernel that
 * writes the time and a flag to host memory, which poll watches. Behind another batch the upload, q, k and
 * v come over the bus on a second stream, while that one is computed. No call waits for the device but
 * poll, for as long as it is told to, and the block transfers.
 */
#include "kernels/gpu/gpu_host.h"

#include <string.h>
#include <time.h>

#define LOOKS_BEFORE_CHECK 4096 /* at the flag, before the stream is asked for an error */
#define SPIN_NS 500000 /* poll looks without pause for so long, then sleeps between looks */
#define NAP_NS 20000

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int launch_copies(struct backend *b, const struct backend_batch *batch)
{
    const uint32_t most = GPU_LIST / 2;
    int code = 0;
    for (uint32_t i = 0; i < batch->n_copies && !code; i += most) {
        struct gpu_copy a = {.base = batch->pool->kv.base,
                             .block_bytes = batch->pool->kv.block_bytes};
        a.n = batch->n_copies - i < most ? batch->n_copies - i : most;
        for (uint32_t k = 0; k < a.n; k++) {
            a.list[2 * k] = batch->copies[i + k].src;
            a.list[2 * k + 1] = batch->copies[i + k].dst;
        }
        code = runtime_check("block copy kernel", gpu_copy_launch(&a, b->stream));
    }
    return code;
}

attn_status gpu_submit(struct backend *b, struct backend_batch *batch)
{
    static const struct gpu_choice choice = {.is_split = true};
    attn_status st = gpu_enter(b);
    if (st != ATTN_OK)
        return st;
    if (b->n_in_flight == BACKEND_MAX_IN_FLIGHT)
        return gpu_fail(b, ATTN_EOVERLOAD, "%d batches are in flight", BACKEND_MAX_IN_FLIGHT);
    struct gpu_slot *s = &b->slots[(b->oldest + b->n_in_flight) % BACKEND_MAX_IN_FLIGHT];
    struct gpu_job *j = &s->job;
    st = gpu_job_make(b, j, batch, &choice, NULL, NULL);
    if (st != ATTN_OK)
        return st;

    s->batch = batch;
    s->value = ++b->next_value;
    j->prep.out_start_ns = &s->signal->start_ns;
    struct gpu_finish done = {
        .out_end_ns = &s->signal->end_ns, .out_flag = &s->signal->flag, .value = s->value};
    bool is_brought = b->n_in_flight > 0 && gpu_job_is_brought(j);
    if (launch_copies(b, batch) ||
        (is_brought ? gpu_job_bring(b, j, s->brought) : gpu_job_upload(j, b->stream)) ||
        gpu_job_prep(b, j, batch) || gpu_job_attend(b, j, true) ||
        runtime_check("finish kernel", gpu_finish_launch(&done, b->stream, 1)))
        return gpu_lost(b);
    b->n_in_flight++;
    return ATTN_OK;
}

static bool is_done(const struct gpu_slot *s)
{
    return __atomic_load_n(&s->signal->flag, __ATOMIC_ACQUIRE) == s->value;
}

static bool is_broken(struct backend *b)
{
    return runtime_stream_check(b->stream) != 0 || runtime_stream_check(b->way_in) != 0;
}

static struct backend_batch *take_oldest(struct backend *b, attn_status st)
{
    struct gpu_slot *s = &b->slots[b->oldest];
    struct backend_batch *batch = s->batch;
    batch->status = st;
    batch->device_ns = st == ATTN_OK ? s->signal->end_ns - s->signal->start_ns : 0;
    batch->kv_bytes = s->job.kv_bytes;
    batch->n_splits = s->job.n_splits;
    s->batch = NULL;
    b->oldest = (b->oldest + 1) % BACKEND_MAX_IN_FLIGHT;
    b->n_in_flight--;
    return batch;
}

struct backend_batch *gpu_poll(struct backend *b, uint64_t wait_ns)
{
    if (b->n_in_flight == 0)
        return NULL;
    const struct gpu_slot *s = &b->slots[b->oldest];
    if (is_done(s))
        return take_oldest(b, ATTN_OK);
    uint64_t start = now_ns(), waited = 0;
    for (uint32_t look = 1;; look++) {
        if (!b->is_lost && (look % LOOKS_BEFORE_CHECK == 0 || waited > SPIN_NS) && is_broken(b))
            gpu_lost(b);
        if (is_done(s))
            return take_oldest(b, ATTN_OK);
        if (b->is_lost)
            return take_oldest(b, ATTN_EDEVICE);
        waited = now_ns() - start;
        if (waited >= wait_ns)
            break;
        if (waited > SPIN_NS)
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    }
    /* a look only: ask for errors now and then, so that a lost device shows */
    if (wait_ns == 0 && (++b->n_looks % LOOKS_BEFORE_CHECK) == 0 && is_broken(b)) {
        gpu_lost(b);
        return take_oldest(b, ATTN_EDEVICE);
    }
    return NULL;
}

/* ---- whole blocks */

static attn_status transfer(struct backend_pool *p, uint32_t block, void *dst, const void *src)
{
    struct backend *b = p->b;
    attn_status st = gpu_enter(b);
    if (st != ATTN_OK)
        return st;
    if (block >= p->config.n_blocks)
        return gpu_fail(b, ATTN_EINVAL, "block %u of %u", block, p->config.n_blocks);
    char *device = p->kv.base + block * p->kv.block_bytes;
    if (runtime_copy(dst ? dst : device, src ? src : device, p->kv.block_bytes, b->stream) != 0 ||
        runtime_stream_wait(b->stream) != 0)
        return gpu_lost(b);
    return ATTN_OK;
}

attn_status gpu_block_read(struct backend_pool *p, uint32_t block, void *out_bytes)
{
    return transfer(p, block, out_bytes, NULL);
}

attn_status gpu_block_write(struct backend_pool *p, uint32_t block, const void *bytes)
{
    return transfer(p, block, NULL, bytes);
}

attn_status gpu_blocks_scrub(struct backend_pool *p, const uint32_t *blocks, uint32_t n)
{
    struct backend *b = p->b;
    attn_status st = gpu_enter(b);
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 0; i < n; i++)
        if (blocks[i] >= p->config.n_blocks)
            return gpu_fail(b, ATTN_EINVAL, "block %u of %u", blocks[i], p->config.n_blocks);
    for (uint32_t i = 0; i < n; i += GPU_LIST) {
        struct gpu_copy a = {.base = p->kv.base, .block_bytes = p->kv.block_bytes};
        a.n = n - i < GPU_LIST ? n - i : GPU_LIST;
        memcpy(a.list, blocks + i, a.n * sizeof *blocks);
        if (runtime_check("scrub kernel", gpu_scrub_launch(&a, b->stream)) != 0)
            return gpu_lost(b);
    }
    return ATTN_OK;
}
