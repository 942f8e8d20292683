/* gpu_queue.c: batches in flight, and whole blocks to and from the host.
 *
 * A batch is, on its slot's stream: its upload if it has one, block copies, prep, and attention,
 * whose last thread block, or else a kernel behind it, writes a word to host memory, which poll
 * watches. A short one is attention alone, which reads q and appends by itself (direct). Batches
 * that have nothing in common run beside each other. One that has follows the stream of the batch
 * in front, after its upload and, where that pays, its q, k and v have come over the bus. A wait
 * for a word is the first on the slot's stream; signals are written with the word to poll, just
 * before it. No call waits for the device but poll, for as long as it is told to, and the block
 * transfers.
 *
 * Why q, k and v are read from mapped host memory and a word is polled: 20 KB in and out take 12 us
 * so on an H200, 16.5 us with two copies and a wait for the stream; a bare launch and wait takes
 * 9.6 us.
 */
#include "kernels/gpu/gpu_host.h"
#include "proto/attn_time.h"

#include <string.h>
#include <time.h>

#define LOOKS_BEFORE_CHECK 4096 /* at the flag, before the stream is asked for an error */
#define SPIN_NS 500000 /* poll looks without pause for so long, then sleeps between looks */
#define NAP_NS 20000
#define GPU_EARLY_ITEMS 8 /* of a batch whose next layer is expected */

/* Summaries, then whole blocks. */
static int launch_copies(const struct backend_batch *batch, runtime_stream *s)
{
    const uint32_t most = GPU_LIST / 2;
    struct gpu_copy a = {.base = batch->pool->kv.base, .block_bytes = batch->pool->kv.block_bytes};
    if (batch->n_copies == 0)
        return 0;
    int code = gpu_summaries_make(batch, s);
    for (uint32_t i = 0; i < batch->n_copies && !code; i++) {
        const bool is_last = i + 1 == batch->n_copies;
        if (batch->copies[i].dst < batch->pool->config.n_blocks) {
            a.list[2 * a.n] = batch->copies[i].src;
            a.list[2 * a.n++ + 1] = batch->copies[i].dst;
        }
        if (a.n < most && !(is_last && a.n > 0))
            continue;
        code = runtime_check("block copy kernel", gpu_copy_launch(&a, s));
        a.n = 0;
    }
    return code;
}

static bool is_done(const struct gpu_slot *s)
{
    return __atomic_load_n(&s->signal->done, __ATOMIC_ACQUIRE) >> 32 == s->value;
}

/* Notes the table rows that the slot's batch names. Does the batch in front name one of them? */
static bool touch_rows(const struct gpu_slot *s, const struct gpu_slot *front)
{
    const struct backend_batch *batch = s->batch;
    uint32_t *touched = batch->pool->touched;
    bool has_shared = false;
    for (uint32_t i = 0; i < batch->n_items + batch->n_patches; i++) {
        uint32_t row =
            i < batch->n_items ? batch->items[i].table_row : batch->patches[i - batch->n_items].row;
        has_shared |= front && touched[row] == front->value;
        touched[row] = s->value;
    }
    return has_shared;
}

/* So many items a launch. */
static int launch_merges(const struct backend_batch *batch, runtime_stream *s)
{
    const struct backend_merges *m = batch->merges;
    const struct backend_pool_config *c = &batch->pool->config;
    struct gpu_merge_parts a = {.n_parts = m->n_parts,
                                .stripe = m->stripe,
                                .num_q_heads = c->num_q_heads,
                                .dv = backend_out_dim(c),
                                .q_dtype = (uint32_t)c->q_dtype};
    int code = 0;
    for (uint32_t k = 0; k < m->n_parts; k++)
        a.parts[k] = m->parts[k];
    for (uint32_t i = 0; i < m->n && !code; i++) {
        const struct backend_merge *x = &m->list[i];
        a.items[a.n_items++] = (struct gpu_merge_item){.out_at = x->out_at,
                                                       .lse_at = x->lse_at,
                                                       .out = x->out,
                                                       .lse = x->lse,
                                                       .pos = x->pos,
                                                       .n_tokens = x->n_tokens,
                                                       .is_full = x->is_full,
                                                       .row0 = a.n_rows};
        a.n_rows += x->n_tokens * c->num_q_heads;
        if (a.n_items < GPU_MERGE_ITEMS && i + 1 < m->n)
            continue;
        code = runtime_check("merge kernel", gpu_merge_parts_launch(&a, s));
        a.n_items = a.n_rows = 0;
    }
    return code;
}

/* What follows the batch's attention and is no part of its last kernel. */
static int launch_rest(const struct gpu_slot *s, const struct gpu_finish *finish)
{
    const struct backend_batch *batch = s->batch;
    int code = 0;
    for (uint32_t i = 0; i < batch->n_merge_waits && !code; i++)
        code = runtime_stream_wait_word(s->stream, batch->merge_waits[i].word,
                                        batch->merge_waits[i].value);
    if (!code && batch->merges)
        code = launch_merges(batch, s->stream);
    for (uint32_t i = 0; i + finish->n_signals < batch->n_signals && !code; i++)
        code =
            runtime_stream_write_word(s->stream, batch->signals[i].word, batch->signals[i].value);
    return code ? code : runtime_check("finish kernel", gpu_finish_launch(finish, s->stream, 0));
}

/* Attention, merges, the batch's signals, and the word that poll watches. The first signals, for
 * which the last kernel has no room, are the stream's to write. */
static int launch_attention(const struct gpu_slot *s, const struct gpu_finish *finish)
{
    const struct backend_batch *batch = s->batch;
    if (batch->n_signals <= GPU_FINISH_SIGNALS && batch->n_merge_waits == 0 && !batch->merges)
        return gpu_job_attend(&s->job, finish, s->stream, true);
    /* a direct kernel says when it began, and something of it has to say so */
    const struct gpu_finish began = {.out_done = &s->signal->attended,
                                     .out_start_ns = &s->signal->start_ns};
    int code = gpu_job_attend(&s->job, s->job.is_direct ? &began : NULL, s->stream, true);
    return code ? code : launch_rest(s, finish);
}

/* What the slot's last kernel tells when the batch is done. */
static struct gpu_finish finish_of(const struct gpu_slot *s)
{
    const struct backend_batch *batch = s->batch;
    struct gpu_finish f = {
        .out_done = &s->signal->done, .out_start_ns = &s->signal->start_ns, .value = s->value};
    uint32_t first =
        batch->n_signals > GPU_FINISH_SIGNALS ? batch->n_signals - GPU_FINISH_SIGNALS : 0;
    for (uint32_t i = first; i < batch->n_signals; i++, f.n_signals++) {
        f.signals[f.n_signals] = batch->signals[i].word;
        f.signal_values[f.n_signals] = batch->signals[i].value;
    }
    return f;
}

static const struct gpu_choice choice = {.is_split = true};

/* Does the batch go on with the next layer of what the latest was? Then another one is expected. */
static void note_course(struct backend *b, const struct backend_batch *batch, bool is_direct)
{
    const struct gpu_course was = b->course;
    struct gpu_course *c = &b->course;
    *c = (struct gpu_course){.pool = batch->pool};
    if (!is_direct || batch->n_items > GPU_EARLY_ITEMS)
        return;
    c->n_items = batch->n_items;
    c->row = batch->items->table_row;
    c->layer = batch->items->layer;
    c->is_next_due = b->n_in_flight == 1 && was.pool == c->pool && was.n_items == c->n_items &&
                     was.row == c->row && was.layer + 1 == c->layer;
}

/* The parameters of the next layer's launch are set while this one's is computed. If what comes is
 * something else they are set again. */
static void make_next_ready(struct backend *b)
{
    const struct backend_batch *now = b->slots[b->oldest].batch;
    struct gpu_slot *s = &b->slots[(b->oldest + 1) % BACKEND_MAX_IN_FLIGHT];
    struct backend_item items[GPU_EARLY_ITEMS];
    struct backend_word signals[GPU_FINISH_SIGNALS];
    struct backend_batch next = {
        .pool = now->pool, .items = items, .n_items = now->n_items, .signals = signals};
    b->course.is_next_due = false;
    for (uint32_t i = 0; i < now->n_items; i++) {
        items[i] = now->items[i];
        if (++items[i].layer == now->pool->config.num_layers)
            return;
    }
    for (; next.n_signals < now->n_signals; next.n_signals++) {
        signals[next.n_signals] = now->signals[next.n_signals];
        signals[next.n_signals].value++;
    }
    if (gpu_job_make(b, &s->job, &next, &choice, NULL, NULL) != ATTN_OK ||
        !gpu_job_can_be_direct(&s->job))
        return;
    s->batch = &next;
    s->value = b->last_value + 1;
    const struct gpu_finish finish = finish_of(s);
    s->batch = NULL;
    gpu_job_attend_early(&s->job, &finish, s->stream);
}

attn_status gpu_submit(struct backend *b, struct backend_batch *batch)
{
    attn_status st = gpu_enter(b);
    if (st != ATTN_OK)
        return st;
    if (b->n_in_flight == BACKEND_MAX_IN_FLIGHT)
        return gpu_fail(b, ATTN_EOVERLOAD, "%d batches are in flight", BACKEND_MAX_IN_FLIGHT);
    const struct gpu_slot *front = b->n_in_flight > 0 ? &b->slots[b->oldest] : NULL;
    struct gpu_slot *s = &b->slots[(b->oldest + b->n_in_flight) % BACKEND_MAX_IN_FLIGHT];
    struct gpu_job *j = &s->job;
    st = backend_words_check(batch, GPU_BACKEND_NAME, gpu_features(b), b->error, sizeof b->error);
    if (st == ATTN_OK)
        st = backend_extremes_check(&batch->pool->config, batch->extremes, b->error,
                                    sizeof b->error);
    if (st == ATTN_OK)
        st = gpu_job_make(b, j, batch, &choice, NULL, NULL);
    if (st == ATTN_OK)
        st = gpu_choice_note(j, batch);
    if (st != ATTN_OK)
        return st;

    s->batch = batch;
    s->value = ++b->last_value;
    /* blocks, partial results or extremes of others */
    s->is_alone = batch->n_copies > 0 || gpu_job_has_parts(j) || batch->extremes != NULL;
    j->prep.out_start_ns = &s->signal->start_ns;
    const struct gpu_finish finish = finish_of(s);
    bool has_shared = touch_rows(s, front);
    bool is_following = front && (has_shared || front->is_alone || s->is_alone);
    bool is_brought = is_following && gpu_job_is_brought(j);
    j->is_direct = !is_brought && batch->extremes == NULL &&
                   batch->n_signals <= GPU_FINISH_SIGNALS && gpu_job_can_be_direct(j);
    const struct backend_word *wait = batch->wait;
    int code = wait ? runtime_stream_wait_word(s->stream, wait->word, wait->value) : 0;
    if (!code && !j->is_direct)
        code = gpu_job_upload(j, s->stream);
    if (!code && is_brought)
        code = gpu_job_bring(j, s->stream);
    if (!code && is_following)
        code = gpu_stream_follow(b, s->stream, front->stream);
    if (code || launch_copies(batch, s->stream) ||
        (!j->is_direct && gpu_job_prep(j, batch, s->stream)) || launch_attention(s, &finish))
        return gpu_lost(b);
    b->n_in_flight++;
    note_course(b, batch, j->is_direct);
    return ATTN_OK;
}

static bool is_broken(struct backend *b)
{
    for (int i = 0; i < BACKEND_MAX_IN_FLIGHT; i++)
        if (runtime_stream_check(b->slots[i].stream) != 0)
            return true;
    return false;
}

static struct backend_batch *take_oldest(struct backend *b, attn_status st)
{
    struct gpu_slot *s = &b->slots[b->oldest];
    struct backend_batch *batch = s->batch;
    batch->status = st;
    batch->device_ns = 0;
    if (st == ATTN_OK) { /* what lies before the end of the batch in front was that one's time */
        uint64_t from_ns = s->signal->start_ns;
        uint64_t end_ns = from_ns + (uint32_t)(s->signal->done - from_ns); /* within four seconds */
        from_ns = from_ns > b->last_end_ns ? from_ns : b->last_end_ns;
        batch->device_ns = end_ns > from_ns ? end_ns - from_ns : 0;
        b->last_end_ns = end_ns > b->last_end_ns ? end_ns : b->last_end_ns;
    }
    batch->kv_bytes = s->job.kv_bytes;
    batch->kv_shared_bytes = s->job.kv_shared_bytes;
    batch->n_splits = s->job.n_splits;
    if (st == ATTN_OK)
        gpu_choices_tell(&s->job, batch);
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
    uint64_t start = attn_now_ns(), waited = 0;
    for (uint32_t look = 1;; look++) {
        if (!b->is_lost && (look % LOOKS_BEFORE_CHECK == 0 || waited > SPIN_NS) && is_broken(b))
            gpu_lost(b);
        if (is_done(s))
            return take_oldest(b, ATTN_OK);
        if (b->is_lost)
            return take_oldest(b, ATTN_EDEVICE);
        if (b->course.is_next_due)
            make_next_ready(b);
        waited = attn_now_ns() - start;
        if (waited >= wait_ns)
            break;
        if (waited > SPIN_NS)
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    }
    /* a look only: ask for errors now and then, so that a lost device shows */
    if (wait_ns == 0 && (++b->n_looks % LOOKS_BEFORE_CHECK) == 0 && is_broken(b)) {
        gpu_lost(b);
        return take_oldest(b, is_done(s) ? ATTN_OK : ATTN_EDEVICE);
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
    if (gpu_follow_all(b) != 0 ||
        runtime_copy(dst ? dst : device, src ? src : device, p->kv.block_bytes, b->stream) != 0 ||
        runtime_stream_wait(b->stream) != 0)
        return gpu_lost(b);
    return ATTN_OK;
}

attn_status gpu_tokens_copy(struct backend_pool *p, const struct backend_token_copy *list,
                            uint32_t n)
{
    struct backend *b = p->b;
    attn_status st = gpu_enter(b);
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 0; i < n; i++) {
        const struct backend_token_copy *t = &list[i];
        if (t->from_block >= p->config.n_blocks || t->to_block >= p->config.n_blocks ||
            t->from_slot >= p->config.block_tokens || t->to_slot >= p->config.block_tokens)
            return gpu_fail(b, ATTN_EINVAL, "token copy %u: block %u slot %u to block %u slot %u",
                            i, t->from_block, t->from_slot, t->to_block, t->to_slot);
    }
    for (uint32_t i = 0; i < n; i++)
        gpu_extremes_forget(p, list[i].to_block);
    int code = gpu_follow_all(b);
    struct gpu_tokens_copy a = {.kv = p->kv, .num_layers = p->config.num_layers};
    for (uint32_t i = 0; i < n && code == 0; i += a.n) {
        a.n = n - i < GPU_LIST / 4 ? n - i : GPU_LIST / 4;
        memcpy(a.list, list + i, a.n * sizeof list[0]);
        code = runtime_check("token copy kernel", gpu_tokens_copy_launch(&a, b->stream));
    }
    if (code != 0 || runtime_stream_wait(b->stream) != 0)
        return gpu_lost(b);
    return ATTN_OK;
}

attn_status gpu_block_read(struct backend_pool *p, uint32_t block, void *out_bytes)
{
    return transfer(p, block, out_bytes, NULL);
}

attn_status gpu_block_write(struct backend_pool *p, uint32_t block, const void *bytes)
{
    attn_status st = transfer(p, block, NULL, bytes);
    if (st == ATTN_OK)
        gpu_extremes_forget(p, block);
    return st;
}
