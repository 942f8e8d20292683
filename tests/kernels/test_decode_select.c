/* test_decode_select: the host side of the tuned decode kernels, without a device: whatever the
 * batch, the call it prepares stays within what the kernels and the device have, and its runs cover
 * every visible tile once. The seed is printed when a batch fails. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/gpu/sm90/decode_host.h"
#include "tests/random.h"

#define MAX_SHARED 232448 /* bytes a thread block can have on sm_90 */
#define MAX_ITEMS 300
#define MAX_PROCESSORS 140

static uint64_t rng_state;

static uint32_t rng(uint32_t below)
{
    return (uint32_t)(random_mixed(&rng_state) % below);
}

static uint32_t blocks[1 << 14];

struct batch {
    struct decode_pool pool;
    struct attn_layer_spec specs[2];
    struct decode_item items[MAX_ITEMS];
    uint32_t n_items, n_tokens;
};

static void random_batch(struct batch *b)
{
    static const uint32_t dims[] = {64, 128, 256};
    memset(b, 0, sizeof *b);
    struct gpu_kv *kv = &b->pool.kv;
    kv->dk = kv->dv = dims[rng(3)];
    kv->num_kv_heads = 1u << rng(4);
    kv->group = rng(2) ? 1u << rng(7) : 1 + rng(64);
    kv->num_q_heads = kv->num_kv_heads * kv->group;
    kv->block_shift = 4 + rng(4);
    kv->block_tokens = 1u << kv->block_shift;
    kv->q_dtype = kv->kv_dtype = ATTN_BF16;
    kv->row_blocks = 1 << 14;
    for (int i = 0; i < 2; i++) {
        b->specs[i].scale = 0.1f;
        if (rng(3) == 0) {
            b->specs[i].window_tokens = 1 + rng(3000);
            b->specs[i].sink_tokens = rng(2) ? rng(200) : 0;
        }
    }
    b->pool.specs = b->specs;
    b->pool.num_layers = 2;
    b->pool.n_processors = rng(2) ? 132 : 20 + rng(120);
    b->pool.is_batch_invariant = rng(8) == 0;
    b->pool.has_extras = rng(8) == 0;
    uint32_t shape = rng(3), length = 1 + rng(rng(2) ? 300 : 40000), tokens = 1 + rng(16);
    b->n_items = 1 + rng(rng(2) ? 8 : MAX_ITEMS);
    for (uint32_t i = 0; i < b->n_items; i++) {
        struct decode_item *it = &b->items[i];
        it->n_tokens = shape == 2 ? 1 + rng(16) : rng(2) ? tokens : 1;
        it->pos = shape == 0 ? length : shape == 1 ? rng(length) : rng(9) ? rng(500) : rng(200000);
        it->layer = rng(2);
        it->blocks = blocks;
        b->n_tokens += it->n_tokens;
    }
}

static bool has_kernel(const struct decode_call *c)
{
    uint32_t d = c->pool->kv.dk;
    switch (c->kernel) {
    case DECODE_CLUSTER:
        return c->rows == 8 || c->rows == 16;
    case DECODE_WARP:
        return c->rows == 8 && !c->pool->has_extras;
    case DECODE_LIST:
        return c->rows == 8 || (c->rows == 16 && d <= 128);
    case DECODE_SHORT:
        return (c->rows == 8 || c->rows == 16) && d >= 128 && !c->pool->has_extras &&
               c->ids_at != 0;
    case DECODE_WIDE:
        return (c->rows == 32 || c->rows == 64) && d >= 128;
    }
    return false;
}

/* Whose partial results a slot holds, by number of slot: item, unit and kv head, and 1. */
static uint64_t owners[MAX_PROCESSORS * DECODE_SLOTS * DECODE_MAX_CLUSTER];

static uint32_t n_by_head, n_cut_by_head; /* runs of several heads; those of cut items */

static void check_runs(const struct batch *b, const struct decode_call *c, const void *upload)
{
    const struct decode_dev_item *items = c->upload_bytes ? upload : (const void *)c->inline_words;
    const struct decode_dev_run *runs = c->upload_bytes
                                            ? (const void *)(items + b->n_items)
                                            : (const void *)&c->inline_words[c->runs_at];
    const uint32_t warps = c->block / 32;
    uint64_t want = 0, got = 0;
    uint32_t n = 0;
    memset(owners, 0, sizeof owners);
    for (uint32_t i = 0; i < b->n_items; i++)
        want += (uint64_t)items[i].n_tiles * b->pool.kv.num_kv_heads *
                ((b->items[i].n_tokens * b->pool.kv.group + c->rows - 1) / c->rows);
    for (uint32_t p = 0; p < c->n_processors; p++)
        for (uint32_t r = p; r != DECODE_NO_RUN; r = runs[r].next, n++) {
            assert_true(r < c->n_runs && n < c->n_runs);
            const struct decode_dev_run *run = &runs[r];
            assert_true(run->item < b->n_items);
            const uint32_t heads = warps >> run->lg_team, n_splits = run->split_of >> 16;
            assert_true(heads == 1 || run->lg_team == 0);
            assert_true((run->head_unit & 0xffff) + heads <= b->pool.kv.num_kv_heads);
            assert_true((run->head_unit >> 16) * c->rows <
                        b->items[run->item].n_tokens * b->pool.kv.group);
            assert_true(run->tile0 + run->n_tiles <= items[run->item].n_tiles);
            assert_true((run->split_of & 0xffff) < n_splits);
            n_by_head += heads > 1;
            n_cut_by_head += heads > 1 && n_splits > 1;
            for (uint32_t k = 0; k < heads * n_splits && n_splits > 1; k++) {
                const uint32_t slot = run->slot + k;
                const uint64_t owner =
                    ((uint64_t)run->item << 32 | (run->head_unit + k / n_splits)) << 1 | 1;
                assert_true(slot < DECODE_SLOTS * DECODE_MAX_CLUSTER * b->pool.n_processors);
                assert_true((slot + 1) * c->rows <= 2 * b->pool.n_processors * DECODE_WIDE_ROWS);
                assert_true(owners[slot] == 0 || owners[slot] == owner);
                owners[slot] = owner;
            }
            got += (uint64_t)run->n_tiles * heads;
        }
    assert_int_equal(n, c->n_runs); /* every run belongs to a processor */
    assert_true(got == want);
}

/* Block ids in the parameters are those of the tiles with which blocks, warps or items begin. */
static void check_ids(const struct batch *b, const struct decode_call *c)
{
    const struct decode_dev_item *items = (const void *)c->inline_words;
    const struct decode_dev_run *runs = (const void *)&c->inline_words[c->runs_at];
    const uint32_t parts =
        c->kernel == DECODE_CLUSTER || c->kernel == DECODE_WIDE ? c->cluster * c->n_groups : 1;
    const uint32_t n_places = c->kernel == DECODE_LIST ? c->n_processors : b->n_items * parts;
    assert_true(c->ids_at + n_places * c->ids_stride <= c->n_words);
    for (uint32_t place = 0; place < n_places; place++) {
        const uint32_t i = c->kernel == DECODE_LIST ? runs[place].item : place / parts;
        const uint32_t n = items[i].n_tiles, k = place % parts;
        const uint32_t first = c->kernel == DECODE_LIST   ? runs[place].tile0
                               : c->kernel == DECODE_WIDE ? (n + 3) / 4 * k / parts * 4
                                                          : n * k / parts;
        for (uint32_t t = first; t < first + c->ids_stride && t < n; t++) {
            uint32_t tile = t + (t >= items[i].sink_tiles ? items[i].skip_tiles : 0);
            if (c->kernel == DECODE_SHORT) /* all ids, whatever the tiles are */
                tile = (t - first) * b->pool.kv.block_tokens / 16;
            if (tile * 16 < items[i].pos + items[i].n_tokens)
                assert_int_equal(c->inline_words[c->ids_at + place * c->ids_stride + t - first],
                                 blocks[tile * 16 / b->pool.kv.block_tokens]);
        }
    }
}

static void any_batch_stays_within_the_kernels_and_the_device(void **state)
{
    (void)state;
    static struct batch b;
    struct decode_planner w = {0};
    struct decode_call *c = malloc(sizeof *c), *again = malloc(sizeof *again);
    uint32_t seen[5] = {0}, with_ids[5] = {0}, n_grouped = 0, n_doubled = 0;
    for (uint32_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        blocks[i] = i * 40503 + 7;
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        rng_state = seed;
        random_batch(&b);
        uint64_t capacity = decode_upload_bytes(&b.pool, b.n_items, b.n_tokens);
        void *upload = malloc(capacity);
        attn_status st = decode_prepare(&b.pool, b.items, b.n_items, &w, upload, capacity, c);
        bool ok = st == ATTN_OK && has_kernel(c) && c->shared_bytes <= MAX_SHARED &&
                  c->upload_bytes <= capacity && c->cluster <= 8;
        if (!ok)
            print_error("seed %llu: status %d kernel %d rows %u dim %u shared %u cluster %u\n",
                        (unsigned long long)seed, st, c->kernel, c->rows, b.pool.kv.dk,
                        c->shared_bytes, c->cluster);
        assert_true(ok);
        seen[c->kernel]++;
        assert_true(c->grid[0] > 0 && c->grid[1] > 0 && c->grid[2] > 0);
        assert_true(c->grid[1] <= 65535 && c->grid[2] <= 65535);
        assert_int_equal(c->grid[0] % c->cluster, 0);
        if (c->kernel == DECODE_WIDE && c->cluster * c->n_groups > 1)
            assert_true((uint64_t)c->grid[0] * c->grid[1] * c->grid[2] <=
                        2 * (uint64_t)b.pool.n_processors);
        assert_true(c->launch_cluster <= 8 && c->launch_cluster % c->cluster == 0);
        assert_int_equal(c->grid[0] % c->launch_cluster, 0);
        if (c->kernel == DECODE_LIST)
            check_runs(&b, c, upload);
        if (c->kernel == DECODE_SHORT) { /* all of it at work at once */
            const uint32_t n = c->grid[0] * c->grid[1] * c->grid[2];
            const bool two_fit = 2 * (c->shared_bytes + 1024) <= MAX_SHARED + 1024;
            assert_true(n <= (two_fit ? 2 : 1) * b.pool.n_processors);
        }
        n_grouped += c->launch_cluster > c->cluster;
        n_doubled += c->kernel == DECODE_LIST && c->n_processors > b.pool.n_processors;
        if (c->ids_stride > 0) {
            check_ids(&b, c);
            with_ids[c->kernel]++;
        }

        void *upload2 = malloc(capacity);
        assert_int_equal(decode_prepare(&b.pool, b.items, b.n_items, &w, upload2, capacity, again),
                         ATTN_OK);
        assert_memory_equal(c, again, offsetof(struct decode_call, inline_words));
        assert_memory_equal(c->inline_words, again->inline_words, c->n_words * 4);
        assert_memory_equal(upload, upload2, c->upload_bytes);
        free(upload);
        free(upload2);
    }
    for (int k = 0; k < 5; k++)
        assert_true(seen[k] > 0 && with_ids[k] > 0);
    /* clusters of several segments, two blocks a processor */
    assert_true(n_grouped > 0 && n_doubled > 0);
    assert_true(n_by_head > 0 && n_cut_by_head > 0);
    free(c);
    free(again);
    decode_planner_fini(&w);
    decode_planner_fini(NULL);
}

/* What measurements say of 132 processors, in decode_select.c */
static void calls_are_cut_as_measured(void **state)
{
    (void)state;
    static struct batch b;
    struct decode_planner w = {0};
    struct decode_call *c = malloc(sizeof *c);
    const struct {
        uint32_t n_items, first, others; /* tokens */
        enum decode_kernel kernel;
        uint32_t n_blocks, launch_cluster;
    } calls[] = {
        {1, 262144, 0, DECODE_CLUSTER, 64, 8},    {2, 131072, 131072, DECODE_CLUSTER, 64, 8},
        {4, 32768, 32768, DECODE_CLUSTER, 64, 8}, {7, 32768, 32768, DECODE_CLUSTER, 112, 8},
        {8, 32768, 32768, DECODE_CLUSTER, 64, 8}, {3, 8192, 8192, DECODE_CLUSTER, 48, 8},
        {5, 8192, 8192, DECODE_CLUSTER, 80, 2},   {5, 32768, 32768, DECODE_LIST, 264, 1},
        {64, 131072, 512, DECODE_LIST, 128, 2},   {256, 1024, 1024, DECODE_WARP, 128, 1},
        {32, 256, 256, DECODE_SHORT, 256, 1},     {17, 256, 17, DECODE_SHORT, 136, 1},
    };
    rng_state = 1;
    random_batch(&b);
    b.pool.kv.dk = b.pool.kv.dv = 128;
    b.pool.kv.num_q_heads = 32;
    b.pool.kv.num_kv_heads = 8;
    b.pool.kv.group = 4;
    b.pool.n_processors = 132;
    b.pool.has_extras = b.pool.is_batch_invariant = false;
    b.specs[0].window_tokens = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        uint64_t capacity = decode_upload_bytes(&b.pool, calls[i].n_items, calls[i].n_items);
        void *upload = malloc(capacity);
        for (uint32_t k = 0; k < calls[i].n_items; k++)
            b.items[k] = (struct decode_item){
                .n_tokens = 1, .pos = (k ? calls[i].others : calls[i].first) - 1, .blocks = blocks};
        assert_int_equal(
            decode_prepare(&b.pool, b.items, calls[i].n_items, &w, upload, capacity, c), ATTN_OK);
        assert_int_equal(c->kernel, calls[i].kernel);
        assert_int_equal(c->grid[0] * c->grid[1] * c->grid[2], calls[i].n_blocks);
        assert_int_equal(c->launch_cluster, calls[i].launch_cluster);
        free(upload);
    }
    free(c);
    decode_planner_fini(&w);
}

/* A block's rows: no more of them empty than there is a kernel for */
static void units_are_as_wide_as_what_an_item_asks(void **state)
{
    (void)state;
    static struct batch b;
    const struct {
        uint32_t dim, group, n_tokens, invariant;
        enum decode_kernel kernel;
        uint32_t rows;
    } calls[] = {
        {128, 8, 1, 0, DECODE_CLUSTER, 8},  {128, 8, 2, 0, DECODE_CLUSTER, 16},
        {128, 17, 1, 0, DECODE_WIDE, 32},   {128, 8, 4, 0, DECODE_WIDE, 32},
        {256, 16, 1, 0, DECODE_WIDE, 32},   {256, 32, 1, 0, DECODE_WIDE, 32},
        {256, 33, 1, 0, DECODE_WIDE, 64},   {128, 8, 16, 0, DECODE_WIDE, 64},
        {64, 32, 1, 0, DECODE_CLUSTER, 16}, {256, 32, 1, 1, DECODE_CLUSTER, 16},
    };
    enum { N_ITEMS = 8 };
    rng_state = 1;
    random_batch(&b);
    b.pool.kv.num_kv_heads = 1;
    b.pool.n_processors = 132;
    b.pool.has_extras = false;
    b.specs[0].window_tokens = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        struct decode_choice c;
        b.pool.kv.dk = b.pool.kv.dv = calls[i].dim;
        b.pool.kv.num_q_heads = b.pool.kv.group = calls[i].group;
        b.pool.is_batch_invariant = calls[i].invariant;
        for (uint32_t k = 0; k < N_ITEMS; k++)
            b.items[k] =
                (struct decode_item){.n_tokens = calls[i].n_tokens, .pos = 3000, .blocks = blocks};
        decode_select(&b.pool, b.items, N_ITEMS, &c);
        assert_int_equal(c.kernel, calls[i].kernel);
        assert_int_equal(c.rows, calls[i].rows);
    }
}

static void too_many_tokens_and_too_little_room_are_refused(void **state)
{
    (void)state;
    static struct batch b;
    struct decode_planner w = {0};
    struct decode_call *c = malloc(sizeof *c);
    char small[16];
    rng_state = 7;
    random_batch(&b);
    b.items[0].n_tokens = DECODE_MAX_TOKENS + 1;
    assert_int_equal(decode_prepare(&b.pool, b.items, 1, &w, small, sizeof small, c), ATTN_ENOTSUP);
    b.items[0].n_tokens = 0;
    assert_int_equal(decode_prepare(&b.pool, b.items, 1, &w, small, sizeof small, c), ATTN_ENOTSUP);
    for (uint32_t i = 0; i < MAX_ITEMS; i++)
        b.items[i] = (struct decode_item){.n_tokens = 1, .pos = i, .blocks = blocks};
    b.pool.is_batch_invariant = true; /* 300 items do not fit in a short call's parameters */
    assert_int_equal(decode_prepare(&b.pool, b.items, MAX_ITEMS, &w, small, sizeof small, c),
                     ATTN_ENOMEM);
    free(c);
    decode_planner_fini(&w);
}

static void an_invariant_pool_cuts_an_item_the_same_way_in_a_crowd(void **state)
{
    (void)state;
    static struct batch b;
    struct decode_planner w = {0};
    struct decode_call *alone = malloc(sizeof *alone), *crowd = malloc(sizeof *crowd);
    for (uint64_t seed = 1; seed <= 300; seed++) {
        rng_state = seed;
        random_batch(&b);
        b.pool.is_batch_invariant = true;
        uint64_t capacity = decode_upload_bytes(&b.pool, b.n_items, b.n_tokens);
        void *upload = malloc(capacity);
        assert_int_equal(decode_prepare(&b.pool, b.items, b.n_items, &w, upload, capacity, crowd),
                         ATTN_OK);
        assert_int_equal(decode_prepare(&b.pool, b.items, 1, &w, upload, capacity, alone), ATTN_OK);
        assert_int_equal(alone->kernel, crowd->kernel);
        assert_int_equal(alone->rows, crowd->rows);
        assert_int_equal(alone->cluster, crowd->cluster);
        assert_int_equal(alone->block, crowd->block);
        free(upload);
    }
    free(alone);
    free(crowd);
    decode_planner_fini(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_batch_stays_within_the_kernels_and_the_device),
        cmocka_unit_test(calls_are_cut_as_measured),
        cmocka_unit_test(units_are_as_wide_as_what_an_item_asks),
        cmocka_unit_test(too_many_tokens_and_too_little_room_are_refused),
        cmocka_unit_test(an_invariant_pool_cuts_an_item_the_same_way_in_a_crowd),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
