/* rig_backend.c: the backend of engine_rig.h: no memory, times of its own clock, a log of what
 * it was given. */
#include "tests/daemon/engine/engine_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/layer_visible.h"
#include "kernels/moves.h"
#include "tests/daemon/engine/fake_host.h"

uint64_t rig_now_ns, rig_look_ns;

struct backend_pool {
    LIST_ENTRY(backend_pool) link;
    struct backend *backend;
    uint64_t place;
    struct backend_pool_config config;
};

static const char *fake_last_error(const struct backend *b)
{
    (void)b;
    return "the fake backend was told to fail";
}

static void fake_info(const struct backend *b, struct backend_info *out)
{
    *out = (struct backend_info){.name = "fake",
                                 .device = "none",
                                 .kv_bytes = b->kv_bytes,
                                 .max_in_flight = b->max_in_flight,
                                 .n_processors = 1,
                                 .features = b->features | BACKEND_HAS_TREES};
    out->features |= b->lacks_lists ? 0 : BACKEND_HAS_LISTS;
    out->features |= b->lacks_choice ? 0 : BACKEND_HAS_CHOICE | BACKEND_HAS_EXTREMES;
    out->features |= b->lacks_parts ? 0 : BACKEND_HAS_PARTS;
}

static attn_status fake_pool_check(struct backend *b, const struct backend_pool_config *c)
{
    (void)b;
    assert_true(c->n_blocks > 0);
    return c->head_dim_k % 8 == 0 ? ATTN_OK : ATTN_ENOTSUP;
}

static uint64_t fake_pool_bytes(const struct backend *b, const struct backend_pool_config *c)
{
    (void)b;
    return kv_layout_of(c).block_bytes * c->n_blocks;
}

static bool fake_memory_ready(struct backend *b, struct backend_pool *p,
                              const struct backend_pool_config *c)
{
    (void)p, (void)c;
    b->n_asked++;
    return !b->is_clearing;
}

static attn_status fake_pool_open(struct backend *b, const struct backend_pool_config *c,
                                  struct backend_pool **out_pool)
{
    if (b->max_pools != 0 && b->n_pools == b->max_pools)
        return b->over_max_pools;
    b->n_pools++;
    struct backend_pool *p = test_malloc(sizeof *p);
    p->config = *c;
    p->backend = b;
    LIST_INSERT_HEAD(&b->pools, p, link);
    p->place = c->kv_place != 0 ? c->kv_place : ++b->last_place;
    b->used_bytes += fake_pool_bytes(b, c);
    assert_true(b->used_bytes <= b->kv_bytes);
    *out_pool = p;
    return ATTN_OK;
}

/* All zeros: the cache has no bytes. */
static attn_status read_zeros(struct backend_pool *p, uint32_t block, void *out_bytes)
{
    assert_true(block < p->config.n_blocks);
    memset(out_bytes, 0, kv_layout_of(&p->config).block_bytes);
    return p->backend->fail_read;
}

static attn_status fake_block_read(struct backend_pool *p, uint32_t block, void *out_bytes)
{
    p->backend->n_read_now++;
    rig_now_ns += p->backend->block_ns;
    return read_zeros(p, block, out_bytes);
}

/* What block_read has given. */
static attn_status fake_block_write(struct backend_pool *p, uint32_t block, const void *bytes)
{
    uint64_t n = kv_layout_of(&p->config).block_bytes;
    assert_true(block < p->config.n_blocks);
    for (uint64_t i = 0; i < n; i++)
        assert_int_equal(((const uint8_t *)bytes)[i], 0);
    if (block < RIG_MAX_GIVEN)
        memset(p->backend->given[block], 0, sizeof p->backend->given[0]);
    p->backend->n_written++;
    rig_now_ns += p->backend->block_ns;
    return p->backend->fail_write;
}

static attn_status fake_tokens_copy(struct backend_pool *p, const struct backend_token_copy *list,
                                    uint32_t n)
{
    struct backend *b = p->backend;
    attn_status st = b->fail_token_copy;
    b->fail_token_copy = ATTN_OK;
    for (uint32_t i = 0; i < n && st == ATTN_OK; i++) {
        assert_true(list[i].from_block < p->config.n_blocks &&
                    list[i].to_block < p->config.n_blocks);
        assert_true(list[i].from_block != list[i].to_block);
        if (list[i].to_block < RIG_MAX_GIVEN)
            memset(b->given[list[i].to_block], 0, sizeof b->given[0]);
        if (b->n_token_copies < RIG_MAX_LOGGED)
            b->token_copies[b->n_token_copies++] = list[i];
    }
    return st;
}

/* At once, or when the rig lets them come. */
static attn_status fake_moves_submit(struct backend *b, struct backend_moves *m)
{
    for (uint32_t i = 0; i < m->n; i++) {
        struct backend_move *x = &m->list[i];
        assert_true(x->block < x->pool->config.n_blocks);
        if (x->is_in) /* whatever the bytes are: the checksum tells */
            b->n_written++;
        x->status = x->is_in ? b->fail_write : read_zeros(x->pool, x->block, x->bytes);
        moves_sum(x->bytes, x->n_bytes, x->sum);
    }
    b->n_move_groups++;
    if (b->holds_moves) {
        assert_true(b->n_held_moves < RIG_MAX_HELD_MOVES);
        b->held_moves[b->n_held_moves++] = m;
    } else {
        m->done(m);
    }
    return ATTN_OK;
}

void rig_moves_come(struct rig *r)
{
    struct backend *b = &r->backend;
    for (uint32_t i = 0; i < b->n_held_moves; i++)
        b->held_moves[i]->done(b->held_moves[i]);
    b->n_held_moves = 0;
}

static uint64_t fake_pool_place(const struct backend_pool *p)
{
    return p->place;
}

static uint32_t fake_pool_room(const struct backend_pool *p)
{
    const struct backend *b = p->backend;
    uint64_t others = b->used_bytes - fake_pool_bytes(b, &p->config);
    return (uint32_t)((b->kv_bytes - others) / kv_layout_of(&p->config).block_bytes);
}

static attn_status fake_pool_resize(struct backend_pool *p, uint32_t n_blocks,
                                    uint32_t max_row_blocks)
{
    struct backend *b = p->backend;
    for (uint32_t i = 0; i < b->n_in_flight; i++)
        assert_ptr_not_equal(b->in_flight[i]->pool, p);
    assert_true(n_blocks <= fake_pool_room(p) || b->fail_resize != ATTN_OK);
    if (b->fail_resize != ATTN_OK)
        return b->fail_resize;
    memset(b->given, 0, sizeof b->given);
    b->used_bytes -= fake_pool_bytes(b, &p->config);
    p->config.n_blocks = n_blocks;
    p->config.max_row_blocks = max_row_blocks;
    b->used_bytes += fake_pool_bytes(b, &p->config);
    return ATTN_OK;
}

static void fake_pool_close(struct backend_pool *p)
{
    p->backend->n_pools--;
    p->backend->used_bytes -= fake_pool_bytes(p->backend, &p->config);
    LIST_REMOVE(p, link);
    test_free(p);
}

void rig_backend_free_pools(struct backend *b)
{
    while (!LIST_EMPTY(&b->pools))
        fake_pool_close(LIST_FIRST(&b->pools));
}

static void note_conflicts(struct backend *b, const struct backend_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *x = &batch->items[i];
        if (batch->pool->config.n_stripes > 0 && !(x->flags & BACKEND_APPEND))
            continue; /* behind its own append */
        for (uint32_t k = 0; k < i; k++)
            b->has_conflict |=
                x->table_row == batch->items[k].table_row && x->layer == batch->items[k].layer;
        for (uint32_t f = 0; f < b->n_in_flight; f++)
            for (uint32_t k = 0; k < b->in_flight[f]->n_items; k++)
                b->has_conflict |= x->table_row == b->in_flight[f]->items[k].table_row &&
                                   x->layer == b->in_flight[f]->items[k].layer;
    }
}

/* They are applied in any order: all that name an entry which is read agree with the cache. */
static void note_patch_conflicts(struct backend *b, const struct backend_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_patches; i++) {
        const struct backend_patch *x = &batch->patches[i];
        struct kv_seq_info info;
        kv_seq_info(b->rig->kv, (kv_seq_id){x->row}, &info);
        bool is_read = x->index < info.n_blocks && info.pool.index == b->rig->pool - 1;
        b->has_patch_conflict |= is_read && info.block_table[x->index] != x->block;
    }
}

static attn_status fake_submit(struct backend *b, struct backend_batch *batch)
{
    const struct backend_extremes *e = batch->extremes;
    if (b->fail_submit != ATTN_OK && b->n_spared > 0) {
        b->n_spared--;
    } else if (b->fail_submit != ATTN_OK) {
        attn_status st = b->fail_submit;
        b->fail_submit = ATTN_OK;
        return st;
    }
    assert_true(b->n_in_flight < b->max_in_flight);
    note_conflicts(b, batch);
    if (b == &b->rig->backend) /* another card's parts come later than the cache is asked */
        note_patch_conflicts(b, batch);
    if (b->n_batches < RIG_MAX_LOGGED && b->n_items + batch->n_items <= RIG_MAX_LOGGED &&
        b->n_copies + batch->n_copies <= RIG_MAX_LOGGED) {
        b->batches[b->n_batches++] = (struct rig_batch){b->n_items,
                                                        batch->n_items,
                                                        batch->n_patches,
                                                        b->n_copies,
                                                        batch->n_copies,
                                                        e != NULL && !e->is_given ? e->n : 0,
                                                        e != NULL && e->is_given ? e->n : 0};
        for (uint32_t i = 0; i < batch->n_copies; i++)
            b->copies[b->n_copies++] = batch->copies[i];
        for (uint32_t i = 0; i < batch->n_items; i++) {
            const struct backend_item *x = &batch->items[i];
            const uint32_t n = backend_listed(&x->lists, x->n_tokens);
            b->items[b->n_items++] =
                (struct rig_item){x->table_row,
                                  x->layer,
                                  x->pos,
                                  x->n_tokens,
                                  x->flags,
                                  n,
                                  n > 0 ? x->lists.tokens[x->lists.starts[0]] : 0,
                                  x->n_chosen,
                                  x->key_base,
                                  x->ahead};
        }
    }
    uint64_t start_ns = rig_now_ns + b->launch_ns;
    start_ns = start_ns > b->last_end_ns ? start_ns : b->last_end_ns;
    b->idle_ns += start_ns - b->last_end_ns;
    b->last_end_ns = start_ns + b->batch_ns + batch->n_items * b->item_ns;
    b->end_ns[b->n_in_flight] = b->last_end_ns;
    b->in_flight[b->n_in_flight++] = batch;
    return ATTN_OK;
}

/* Does the device know the table of what it reads? */
static void note_table_conflict(struct backend *b, const struct backend_item *x, uint32_t n_blocks)
{
    for (uint32_t k = 0; k < n_blocks && k < RIG_MAX_ROW_BLOCKS && x->table_row < RIG_MAX_ROWS; k++)
        b->has_table_conflict |= b->mirror[x->table_row][k] != x->block_table[k] + 1;
}

static void patch(struct backend *b, const struct backend_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_patches; i++) {
        const struct backend_patch *x = &batch->patches[i];
        if (x->row < RIG_MAX_ROWS && x->index < RIG_MAX_ROW_BLOCKS)
            b->mirror[x->row][x->index] = x->block + 1;
    }
}

/* Makes a block's maxima 1 + the stripe, the minima 0 - the stripe; or is given those of all. */
static void exchange(struct backend *b, const struct backend_batch *batch)
{
    const struct backend_pool_config *c = &batch->pool->config;
    const struct backend_extremes *x = batch->extremes;
    float *row = x != NULL ? x->bytes : NULL;
    for (uint32_t i = 0; x != NULL && i < x->n; i++) {
        assert_true(x->list[i].block < RIG_MAX_GIVEN);
        for (uint32_t k = 0; k < 2 * c->num_kv_heads; k++)
            for (uint32_t d = 0; d < c->head_dim_k; d++, row++) {
                const uint32_t stripe = x->is_given ? c->n_stripes - 1 : c->stripe;
                const float want = k % 2 == 0 ? 1 + (float)stripe : 0 - (float)stripe;
                if (x->is_given)
                    b->has_choice_conflict |= *row != want;
                else
                    *row = want;
            }
        b->given[x->list[i].block][x->list[i].layer] = x->is_given;
    }
}

/* Appends: the block's extremes are those of other keys. */
static void forget(struct backend *b, const struct backend_pool_config *c,
                   const struct backend_item *x)
{
    for (uint32_t k = x->pos / c->block_tokens; k * c->block_tokens < x->pos + x->n_tokens; k++)
        if (x->block_table[k] < RIG_MAX_GIVEN)
            b->given[x->block_table[k]][x->layer] = false;
}

static void note_choice_conflict(struct backend *b, const struct backend_pool_config *c,
                                 const struct backend_item *x)
{
    const uint32_t every = c->block_tokens * c->n_stripes;
    for (uint32_t k = 1; x->n_chosen > 2 && (k + 1) * every < x->pos + x->n_tokens; k++)
        b->has_choice_conflict |= !b->given[x->block_table[k]][x->layer];
}

static void compute(struct backend *b, const struct backend_batch *batch)
{
    const struct backend_pool_config *c = &batch->pool->config;
    for (uint32_t i = 0; c->n_stripes > 0 && i < batch->n_items; i++)
        if (batch->items[i].flags & BACKEND_APPEND)
            forget(b, c, &batch->items[i]);
    for (uint32_t i = 0; c->n_stripes > 0 && i < batch->n_copies; i++)
        memset(b->given[batch->copies[i].dst % RIG_MAX_GIVEN], 0, sizeof b->given[0]);
    exchange(b, batch);
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *x = &batch->items[i];
        const uint32_t end = (uint32_t)backend_item_end(c, x);
        uint32_t n_blocks = (end + c->block_tokens - 1) / c->block_tokens;
        if (c->n_stripes > 0 && x->n_chosen > 0)
            note_choice_conflict(b, c, x);
        assert_true(n_blocks <= c->max_row_blocks);
        for (uint32_t k = 0; k < n_blocks; k++)
            assert_true(x->block_table[k] < c->n_blocks);
        if (c->layers[x->layer].window_tokens == 0) /* else it reads some of them */
            note_table_conflict(b, x, n_blocks);
        if (!(x->flags & BACKEND_ATTEND))
            continue;
        float *out = x->out;
        size_t row = (size_t)c->num_q_heads * c->head_dim_v;
        for (uint32_t t = 0; t < x->n_tokens; t++) {
            for (size_t k = 0; k < row; k++)
                out[t * row + k] = b->is_right ? 0 : (float)(x->pos + t + 1);
            for (uint32_t h = 0; x->lse != NULL && h < c->num_q_heads; h++)
                x->lse[t * c->num_q_heads + h] = -(float)(x->pos + t);
        }
    }
}

static struct backend_batch *fake_poll(struct backend *b, uint64_t wait_ns)
{
    if (b->is_held || b->n_in_flight == 0 || b->end_ns[0] > rig_now_ns) {
        rig_now_ns += wait_ns; /* to wait is what lets this clock go on */
        return NULL;
    }
    struct backend_batch *batch = b->in_flight[0];
    b->n_in_flight--;
    for (uint32_t i = 0; i < b->n_in_flight; i++) {
        b->in_flight[i] = b->in_flight[i + 1];
        b->end_ns[i] = b->end_ns[i + 1];
    }
    const attn_status fails = b->n_spared == 0 ? b->fail_batch : ATTN_OK;
    b->n_spared -= b->fail_batch != ATTN_OK && b->n_spared > 0;
    batch->status = b->n_unpatched > 0 ? ATTN_EINTERNAL : fails;
    if (b->fails_unpatched && fails != ATTN_OK)
        b->n_unpatched = 1 + b->n_in_flight;
    b->n_unpatched -= b->n_unpatched > 0;
    if (fails != ATTN_OK && !b->fails_unpatched)
        patch(b, batch);
    b->fail_batch = fails != ATTN_OK ? ATTN_OK : b->fail_batch;
    batch->device_ns = b->item_ns ? b->batch_ns + batch->n_items * b->item_ns : 1000;
    if (batch->status == ATTN_OK) {
        patch(b, batch);
        compute(b, batch);
    }
    for (uint32_t i = 0; i < batch->n_signals && batch->status == ATTN_OK; i++)
        *batch->signals[i].word = batch->signals[i].value;
    return batch;
}

void rig_device_signals(struct rig *r, uint32_t n)
{
    for (uint32_t f = 0; f < r->backend.n_in_flight; f++) {
        const struct backend_batch *batch = r->backend.in_flight[f];
        patch(&r->backend, batch);
        compute(&r->backend, batch);
        for (uint32_t i = 0; i < batch->n_signals && i < n; i++)
            *batch->signals[i].word = batch->signals[i].value;
    }
}

static attn_status fake_host_register(struct backend *b, void *p, size_t bytes)
{
    assert_true((uintptr_t)p % 4096 == 0 && bytes % 4096 == 0);
    b->n_registered += b->fail_register == ATTN_OK;
    return b->fail_register;
}

static void fake_host_unregister(struct backend *b, void *p, size_t bytes)
{
    (void)p, (void)bytes;
    b->n_registered--;
}

const struct backend_ops rig_backend_ops = {
    .abi = BACKEND_ABI,
    .name = "fake",
    .last_error = fake_last_error,
    .info = fake_info,
    .pool_check = fake_pool_check,
    .pool_bytes = fake_pool_bytes,
    .memory_ready = fake_memory_ready,
    .pool_open = fake_pool_open,
    .block_read = fake_block_read,
    .block_write = fake_block_write,
    .tokens_copy = fake_tokens_copy,
    .moves_submit = fake_moves_submit,
    .pool_place = fake_pool_place,
    .pool_room = fake_pool_room,
    .pool_resize = fake_pool_resize,
    .pool_close = fake_pool_close,
    .submit = fake_submit,
    .poll = fake_poll,
    .host_alloc = fake_host_alloc,
    .host_free = fake_host_free,
    .host_register = fake_host_register,
    .host_unregister = fake_host_unregister,
};
