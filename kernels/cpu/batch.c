/* batch.c: the cpu backend's batch: checked and computed inside submit, by the engine thread and
 * the workers, and handed back by the next poll. One that waits for a word is computed by whatever
 * call first finds it written.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/merge.h"
#include "proto/attn_time.h"

#include <inttypes.h>
#include <time.h>

#define LOOKS_BEFORE_NAP 1000
#define NAP_NS 20000

static attn_status check_item(struct backend *b, const struct backend_pool *p,
                              const struct backend_item *item, uint32_t i)
{
    const struct backend_pool_config *c = &p->config;
    bool is_layer = item->layer < c->num_layers;
    uint64_t end = is_layer ? backend_item_end(c, item) : 0;
    uint64_t n_blocks = (end + c->block_tokens - 1) / c->block_tokens;
    const char *missing = NULL, *fault = is_layer ? backend_item_fault(c, item) : NULL;
    if ((item->flags & BACKEND_ATTEND) && (item->q == NULL || item->out == NULL))
        missing = "q or out";
    if ((item->flags & BACKEND_APPEND) && (item->k == NULL || (item->v == NULL && !c->is_v_in_k)))
        missing = "k or v";
    if (item->block_table == NULL)
        missing = "block_table";
    if ((item->flags & BACKEND_ATTEND) && is_layer &&
        cpu_weights_have(p, item->layer) < backend_weights_bytes(c))
        missing = "weights of its layer";
    if (!is_layer)
        cpu_fail(b, "item %" PRIu32 ": layer is %" PRIu32 " of %" PRIu32, i, item->layer,
                 c->num_layers);
    else if (item->n_tokens == 0)
        cpu_fail(b, "item %" PRIu32 ": n_tokens is 0", i);
    else if (n_blocks > c->max_row_blocks)
        cpu_fail(b, "item %" PRIu32 ": pos + n_tokens is %" PRIu64 ", a row holds %" PRIu64, i, end,
                 (uint64_t)c->max_row_blocks * c->block_tokens);
    else if (missing != NULL)
        cpu_fail(b, "item %" PRIu32 ": %s is missing", i, missing);
    else if (fault != NULL)
        cpu_fail(b, "item %" PRIu32 ": %s", i, fault);
    else {
        const uint32_t n_whole = item->chosen != NULL ? backend_n_names(c) : c->n_blocks;
        for (uint64_t j = 0; j < n_blocks; j++) {
            const bool is_written =
                (item->flags & BACKEND_APPEND) && j >= item->pos / c->block_tokens;
            const uint32_t n = is_written ? c->n_blocks : n_whole;
            if (item->block_table[j] < n)
                continue;
            cpu_fail(b, "item %" PRIu32 ": block_table[%" PRIu64 "] is %" PRIu32 " of %" PRIu32, i,
                     j, item->block_table[j], n);
            return ATTN_EINVAL;
        }
        return ATTN_OK;
    }
    return ATTN_EINVAL;
}

static attn_status check_batch(struct backend *b, const struct backend_batch *batch)
{
    const struct backend_pool_config *c = &batch->pool->config;
    uint64_t n_tokens = 0, n_listed = 0;
    for (uint32_t i = 0; i < batch->n_items; i++) {
        attn_status st = check_item(b, batch->pool, &batch->items[i], i);
        if (st != ATTN_OK)
            return st;
        n_tokens += batch->items[i].n_tokens;
        n_listed += backend_item_listed(c, &batch->items[i]);
    }
    if (n_listed > BACKEND_MAX_LISTED) {
        cpu_fail(b, "lists of %" PRIu64 " tokens or blocks, the limit is %u", n_listed,
                 BACKEND_MAX_LISTED);
        return ATTN_EINVAL;
    }
    if (batch->n_items > b->config.max_batch_items || n_tokens > b->config.max_batch_tokens) {
        cpu_fail(b,
                 "batch of %" PRIu32 " items and %" PRIu64 " tokens, the limits are %" PRIu32
                 " and %" PRIu32,
                 batch->n_items, n_tokens, b->config.max_batch_items, b->config.max_batch_tokens);
        return ATTN_EINVAL;
    }
    for (uint32_t i = 0; i < batch->n_copies; i++) {
        if (batch->copies[i].src < c->n_blocks && batch->copies[i].dst < backend_n_names(c))
            continue;
        cpu_fail(b,
                 "copy %" PRIu32 " is of block %" PRIu32 " to %" PRIu32 " of %" PRIu32
                 " and %" PRIu32 " summaries",
                 i, batch->copies[i].src, batch->copies[i].dst, c->n_blocks, c->n_summaries);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

static bool are_reached(const struct backend_word *words, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (!backend_word_is_reached(&words[i]))
            return false;
    return true;
}

/* The batch's appends and attention. */
static void compute(struct backend *b, struct backend_batch *batch)
{
    uint64_t start = attn_now_ns();
    /* the block tables are read from the items, so there is no mirror to patch */
    batch->status = cpu_summaries_make(b, b->isa, batch);
    if (batch->status == ATTN_OK)
        cpu_append(b, batch);
    if (batch->status == ATTN_OK)
        batch->status = cpu_extremes_exchange(b, b->isa, batch);
    if (batch->status == ATTN_OK)
        batch->status = batch->pool->weights != NULL ? cpu_project_attend(b, b->isa, batch)
                                                     : cpu_attend(b, b->isa, batch, 0);
    batch->device_ns = attn_now_ns() - start;
    b->is_attended = true;
}

static void merge(struct backend_batch *batch)
{
    uint64_t start = attn_now_ns();
    merges_compute(&batch->pool->config, batch->merges);
    batch->device_ns += attn_now_ns() - start;
}

/* Computes the batch that was submitted, unless a word is not written yet. Is none left to
 * compute? */
static bool try_compute(struct backend *b)
{
    struct backend_batch *batch = b->batch;
    if (batch == NULL || b->is_done)
        return true;
    if (batch->wait != NULL && !backend_word_is_reached(batch->wait))
        return false;
    if (!b->is_attended)
        compute(b, batch);
    if (!are_reached(batch->merge_waits, batch->n_merge_waits))
        return false;
    if (batch->merges != NULL && batch->status == ATTN_OK)
        merge(batch);
    b->is_done = true;
    for (uint32_t i = 0; i < batch->n_signals && batch->status == ATTN_OK; i++)
        __atomic_store_n(batch->signals[i].word, batch->signals[i].value, __ATOMIC_RELEASE);
    return true;
}

/* The same, looking for as long as it may take. */
static bool compute_within(struct backend *b, uint64_t wait_ns)
{
    uint64_t start = attn_now_ns();
    for (uint32_t look = 1; !try_compute(b); look++) {
        if (attn_now_ns() - start >= wait_ns)
            return false;
        if (look < LOOKS_BEFORE_NAP)
            attn_cpu_pause();
        else
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    }
    return true;
}

attn_status cpu_submit(struct backend *b, struct backend_batch *batch)
{
    if (b->batch != NULL) {
        cpu_fail(b, "a batch waits to be polled, max_in_flight is 1");
        return ATTN_EOVERLOAD;
    }
    attn_status st = check_batch(b, batch);
    if (st == ATTN_OK)
        st = backend_words_check(batch, "cpu", CPU_FEATURES, b->error, sizeof b->error);
    if (st == ATTN_OK)
        st = backend_extremes_check(&batch->pool->config, batch->extremes, b->error,
                                    sizeof b->error);
    if (st != ATTN_OK)
        return st;
    b->batch = batch;
    b->is_done = b->is_attended = false;
    try_compute(b);
    return ATTN_OK;
}

struct backend_batch *cpu_poll(struct backend *b, uint64_t wait_ns)
{
    if (!compute_within(b, wait_ns))
        return NULL;
    struct backend_batch *batch = b->batch;
    b->batch = NULL;
    return batch;
}

void cpu_compute_all(struct backend *b)
{
    compute_within(b, UINT64_MAX);
}
