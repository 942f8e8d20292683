/* test_prefill_plan: the order of a batch's prompt work, without a device. Random batches: every
 * tile of rows of every item is there once, the long ones first, and the lists stay where they have
 * room; of dilated layers every row of every head is in one run. The seed is printed when one
 * fails. */
#include "kernels/gpu/sm90/prefill_params.h"
#include "kernels/visible.h"
#include "tests/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#define MAX_ITEMS 40

static uint64_t rng_state;

static uint32_t rng(uint32_t below)
{
    return random_below(&rng_state, below);
}

struct batch {
    struct prefill_pool pool;
    struct attn_layer_spec specs[3];
    struct gpu_item items[MAX_ITEMS];
    uint32_t n, n_tokens;
};

static void random_batch(struct batch *b)
{
    static const uint32_t dims[] = {64, 128, 192, 256}, groups[] = {1, 2, 3, 4, 8, 64, 160};
    memset(b, 0, sizeof *b);
    struct gpu_kv *kv = &b->pool.kv;
    b->pool.dim = dims[rng(4)];
    b->pool.specs = b->specs;
    kv->num_kv_heads = 1 + rng(8);
    kv->group = groups[rng(7)];
    kv->num_q_heads = kv->num_kv_heads * kv->group;
    kv->dk = kv->dv = b->pool.dim;
    kv->block_tokens = 16;
    kv->k_head_bytes = kv->v_head_bytes = kv->block_tokens * kv->dk * 2;
    b->specs[1].window_tokens = 1 + rng(2000);
    b->specs[1].sink_tokens = rng(300);
    b->specs[2].is_full = true;
    b->n = 1 + rng(MAX_ITEMS);
    const uint32_t longest = rng(4) == 0 ? 20000 : 300;
    for (uint32_t i = 0; i < b->n; i++) {
        b->items[i].n_tokens = 17 + rng(longest);
        b->items[i].pos = rng(2) ? rng(40000) : 0;
        b->items[i].layer = rng(3);
        b->n_tokens += b->items[i].n_tokens;
    }
}

static uint32_t rows_of(const struct batch *b, uint32_t item)
{
    return b->items[item].n_tokens * b->pool.kv.group;
}

/* Keys that some row of a tile of r rows sees, counted one by one from its first and its last
 * token. */
static uint32_t keys_of(const struct batch *b, uint32_t r, struct prefill_entry e)
{
    const struct gpu_item *it = &b->items[e.item];
    const struct attn_layer_spec *s = &b->specs[it->layer];
    const uint32_t n = rows_of(b, e.item), n_keys = it->pos + it->n_tokens;
    const uint32_t last = (e.tile + 1) * r < n ? (e.tile + 1) * r : n, group = b->pool.kv.group;
    const uint32_t low = it->pos + e.tile * r / group, high = it->pos + (last - 1) / group;
    uint32_t count = 0;
    for (uint32_t key = 0; key < n_keys; key++)
        for (uint32_t k = 0; k < 2; k++) { /* windows of neighbours overlap: the ends say all */
            struct visible v =
                visible_to(s->window_tokens, s->sink_tokens, s->is_full, k ? high : low, n_keys);
            bool is_between = key >= low && key <= high;
            if (visible_has(&v, key) || (is_between && !s->is_full)) {
                count++;
                break;
            }
        }
    return count;
}

static void any_batch_has_every_tile_once_and_long_ones_first(void **state)
{
    (void)state;
    static struct batch b;
    struct prefill_call *c = malloc(sizeof *c), *again = malloc(sizeof *again);
    uint32_t n_uploads = 0;
    for (uint64_t seed = 1; seed <= 400; seed++) {
        rng_state = seed;
        random_batch(&b);
        const uint64_t capacity = prefill_upload_bytes(&b.pool, b.n, b.n_tokens);
        struct prefill_entry *upload = malloc(capacity), *other = malloc(capacity);
        struct gpu_item *device = (struct gpu_item *)0x1000;
        prefill_prepare(&b.pool, b.items, b.n, device, NULL, upload, c);
        prefill_prepare(&b.pool, b.items, b.n, device, NULL, other, again);
        if (c->n_entries != again->n_entries || c->upload_bytes > capacity)
            print_error("seed %llu\n", (unsigned long long)seed);
        assert_ptr_equal(c->items, device);
        assert_true(c->upload_bytes <= capacity);
        assert_int_equal(c->upload_bytes,
                         c->n_entries > PREFILL_INLINE_ENTRIES ? c->n_entries * sizeof *upload : 0);
        n_uploads += c->upload_bytes > 0;
        const struct prefill_entry *list = c->upload_bytes ? upload : c->inline_list.entries;
        assert_memory_equal(list, again->upload_bytes ? other : again->inline_list.entries,
                            c->n_entries * sizeof *list);
        assert_in_range(c->section_heads, 1, b.pool.kv.num_kv_heads);

        uint32_t n_tiles = 0, *seen[MAX_ITEMS];
        for (uint32_t i = 0; i < b.n; i++) {
            const uint32_t n = (rows_of(&b, i) + c->rows - 1) / c->rows;
            seen[i] = calloc(n, sizeof **seen);
            n_tiles += n;
        }
        assert_int_equal(c->n_entries, n_tiles);
        for (uint32_t i = 0; i < c->n_entries; i++) {
            assert_true(list[i].item < b.n);
            assert_true(list[i].tile * c->rows < rows_of(&b, list[i].item));
            assert_int_equal(seen[list[i].item][list[i].tile]++, 0);
        }
        /* by whole tiles of keys, of which each end and the sinks may add one */
        const uint32_t first = keys_of(&b, c->rows, list[0]);
        const uint32_t last = keys_of(&b, c->rows, list[c->n_entries - 1]);
        const uint32_t middle = keys_of(&b, c->rows, list[c->n_entries / 2]);
        assert_true(first + 3 * prefill_keys(b.pool.dim) >= middle);
        assert_true(middle + 3 * prefill_keys(b.pool.dim) >= last);
        for (uint32_t i = 0; i < b.n; i++)
            free(seen[i]);
        free(upload);
        free(other);
    }
    assert_true(n_uploads > 20);
    free(c);
    free(again);
}

/* Tiles of the longest item that engine.max_batch_tokens allows have numbers of their own. */
static void the_longest_item_has_every_tile_once(void **state)
{
    static const uint32_t dims[] = {128, PREFILL_LATENT_DIM};
    static struct batch b;
    (void)state;
    for (uint32_t d = 0; d < 2; d++) {
        rng_state = 7 + d;
        random_batch(&b);
        b.n = 1;
        b.pool.dim = dims[d];
        b.pool.kv.num_kv_heads = 1;
        b.pool.kv.group = b.pool.kv.num_q_heads = 128;
        b.items[0] = (struct gpu_item){.n_tokens = 1 << 20};
        struct prefill_call *c = malloc(sizeof *c);
        struct prefill_entry *list = malloc(prefill_upload_bytes(&b.pool, 1, 1 << 20));
        prefill_prepare(&b.pool, b.items, 1, NULL, NULL, list, c);
        const uint32_t n = rows_of(&b, 0) / c->rows;
        uint8_t *seen = calloc(n, 1);
        assert_int_equal(c->n_entries, n);
        for (uint32_t i = 0; i < n; i++) {
            assert_in_range(list[i].tile, 0, n - 1);
            assert_int_equal(seen[list[i].tile]++, 0);
        }
        free(seen);
        free(list);
        free(c);
    }
}

/* Of few long units the keys are cut, parts of a tile behind one another; all tiles and parts are
 * there, none is longer than a processor's share and few are short. */
static void few_long_units_are_cut(void **state)
{
    (void)state;
    static struct batch b;
    struct prefill_call *c = malloc(sizeof *c);
    uint32_t n_cut = 0;
    for (uint64_t seed = 1; seed <= 400; seed++) {
        rng_state = seed;
        random_batch(&b);
        b.n = 1 + rng(3);
        b.pool.n_processors = 132;
        b.pool.most_parts = rng(4) ? PREFILL_MAX_CUT : 0;
        void *upload = malloc(prefill_upload_bytes(&b.pool, b.n, b.n_tokens));
        prefill_prepare(&b.pool, b.items, b.n, NULL, NULL, upload, c);
        free(upload);
        const uint32_t n_units = c->n_entries * b.pool.kv.num_kv_heads;
        n_cut += c->is_cut;
        if (!c->is_cut)
            continue;
        assert_int_equal(c->upload_bytes, 0);
        assert_in_range(n_units, 2, b.pool.most_parts);
        uint32_t n_tiles = 0, n_whole = 0;
        for (uint32_t i = 0; i < b.n; i++)
            n_whole += (rows_of(&b, i) + c->rows - 1) / c->rows;
        for (uint32_t i = 0; i < c->n_entries; i++) {
            const struct prefill_entry *e = &c->inline_list.entries[i];
            n_tiles += e->part == 0;
            assert_in_range(e->part, 0, e->last_part);
            for (uint32_t k = 1; e->part == 0 && k <= e->last_part; k++) {
                assert_int_equal(e[k].part, k);
                assert_int_equal(e[k].item, e->item);
                assert_int_equal(e[k].tile, e->tile);
                assert_int_equal(e[k].last_part, e->last_part);
            }
            if (e->part == 0 && e->last_part > 0) /* parts of about the least or more */
                assert_true(keys_of(&b, c->rows, *e) > e->last_part * 7 * prefill_keys(b.pool.dim));
        }
        assert_int_equal(n_tiles, n_whole);
    }
    assert_in_range(n_cut, 20, 399);
    free(c);
}

/* Tiles of keys in the time of which the processors have done all units, each taking the next one
 * when it has done its own: two for a unit, four for a part to be joined; seven eighths of that for
 * units of few rows, of which a processor computes two at once. */
static double time_of(const struct batch *b, const struct prefill_call *c)
{
    double ends[264] = {0}, last = 0;
    const uint32_t at_once = prefill_blocks_at_once(b->pool.dim, c->rows);
    assert_int_equal(c->upload_bytes, 0);
    for (uint32_t i = 0; i < c->n_entries; i++) {
        const struct prefill_entry e = c->inline_list.entries[i];
        const double tiles = (double)keys_of(b, c->rows, e) / prefill_keys(b->pool.dim);
        for (uint32_t head = 0; head < b->pool.kv.num_kv_heads; head++) {
            uint32_t at = 0;
            for (uint32_t k = 1; k < 132 * at_once; k++)
                at = ends[k] < ends[at] ? k : at;
            ends[at] += tiles / (e.last_part + 1) + 2 + (e.last_part > 0 ? 4 : 0);
            last = ends[at] > last ? ends[at] : last;
        }
    }
    return at_once == 2 ? last * 7 / 8 : last;
}

static void a_cut_launch_is_done_before_a_whole_one(void **state)
{
    (void)state;
    static struct batch b;
    struct prefill_call *c = malloc(sizeof *c);
    static const struct {
        uint32_t kv_heads, n_tokens, cached, parts;
    } cases[] = {
        {8, 512, 8192, 1}, /* 128 units: a second turn would take as long as it saves */
        {1, 512, 32768, 8}, /* 16 units */
        {2, 512, 32768, 4}, /* 32 */
        {8, 64, 32768, 8}, /* 16 */
        {8, 600, 32768, 3}, /* 152, which two turns compute: five turns of a third each */
        {8, 2048, 32768, 1},
    };
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        b = (struct batch){.n = 1,
                           .pool = {.dim = 128,
                                    .n_processors = 132,
                                    .most_parts = PREFILL_MAX_CUT,
                                    .specs = b.specs,
                                    .kv = {.num_kv_heads = cases[i].kv_heads,
                                           .group = 4,
                                           .block_tokens = 16,
                                           .k_head_bytes = 4096,
                                           .v_head_bytes = 4096}}};
        b.items[0] = (struct gpu_item){.n_tokens = cases[i].n_tokens, .pos = cases[i].cached};
        prefill_prepare(&b.pool, b.items, 1, NULL, NULL, NULL, c);
        assert_int_equal(c->inline_list.entries[0].last_part + 1, cases[i].parts);
        const double cut = time_of(&b, c);
        b.pool.most_parts = 0;
        prefill_prepare(&b.pool, b.items, 1, NULL, NULL, NULL, c);
        if (cases[i].parts > 1)
            assert_true(cut < time_of(&b, c));
    }
    for (uint64_t seed = 1; seed <= 200; seed++) {
        rng_state = seed;
        random_batch(&b);
        b.n = 1 + rng(3);
        b.pool.n_processors = 132;
        b.pool.most_parts = PREFILL_MAX_CUT;
        void *upload = malloc(prefill_upload_bytes(&b.pool, b.n, b.n_tokens));
        prefill_prepare(&b.pool, b.items, b.n, NULL, NULL, upload, c);
        if (c->is_cut) {
            const double cut = time_of(&b, c);
            b.pool.most_parts = 0;
            prefill_prepare(&b.pool, b.items, b.n, NULL, NULL, upload, c);
            if (cut > 1.02 * time_of(&b, c) + 2) /* a plan goes by whole tiles */
                fail_msg("seed %llu: %.0f tiles, whole %.0f", (unsigned long long)seed, cut,
                         time_of(&b, c));
        }
        free(upload);
    }
    free(c);
}

static void units_have_few_rows_where_that_ends_sooner(void **state)
{
    (void)state;
    static struct batch b;
    struct prefill_call *c = malloc(sizeof *c);
    static const struct {
        uint32_t kv_heads, group, n_tokens, cached, rows;
    } cases[] = {
        {12, 1, 512, 0, 64}, /* 36 units of 192 rows, 96 of 64 */
        {12, 1, 2048, 0, 64}, /* 132, which leave no processor idle, but the longest are longer */
        {12, 1, 4096, 0, 192}, /* 264, 768 */
        {8, 4, 512, 0, 64}, /* 88, 256 */
        {8, 4, 2048, 0, 192}, /* 344, 1024 */
        {8, 4, 512, 8192, 192}, /* 88, each cut in three; one turn of 256 */
        {8, 4, 256, 8192, 64}, /* 48, 128 */
        {1, 8, 24, 32768, 64}, /* 1, 3; both are cut */
    };
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        b = (struct batch){.n = 1,
                           .pool = {.dim = 64,
                                    .n_processors = 132,
                                    .decoded_blocks = 1024,
                                    .most_parts = PREFILL_MAX_CUT,
                                    .specs = b.specs,
                                    .kv = {.num_kv_heads = cases[i].kv_heads,
                                           .group = cases[i].group,
                                           .dk = 64,
                                           .dv = 64,
                                           .block_tokens = 16,
                                           .k_head_bytes = 2048,
                                           .v_head_bytes = 2048}}};
        b.items[0] = (struct gpu_item){.n_tokens = cases[i].n_tokens, .pos = cases[i].cached};
        prefill_prepare(&b.pool, b.items, 1, NULL, NULL, NULL, c);
        if (c->rows != cases[i].rows)
            print_error("case %u\n", i);
        assert_int_equal(c->rows, cases[i].rows);
        const double time = time_of(&b, c);
        b.pool.dim = 128;
        prefill_prepare(&b.pool, b.items, 1, NULL, NULL, NULL, c);
        assert_int_equal(c->rows, 128);
        b.pool.dim = 64;
        b.pool.kv.is_quantised = true; /* its kernels have no others */
        prefill_prepare(&b.pool, b.items, 1, NULL, NULL, NULL, c);
        assert_int_equal(c->rows, 192);
        assert_true(time <= time_of(&b, c));
    }
    uint32_t n_few = 0;
    for (uint64_t seed = 1; seed <= 400; seed++) {
        rng_state = seed;
        random_batch(&b);
        b.n = 1 + rng(4);
        b.pool.dim = b.pool.kv.dk = b.pool.kv.dv = 64;
        b.pool.n_processors = 132;
        b.pool.decoded_blocks = UINT32_MAX;
        b.pool.most_parts = rng(4) ? PREFILL_MAX_CUT : 0;
        void *upload = malloc(prefill_upload_bytes(&b.pool, b.n, b.n_tokens));
        prefill_prepare(&b.pool, b.items, b.n, NULL, NULL, upload, c);
        if (c->rows == PREFILL_FEW_ROWS) {
            const double time = time_of(&b, c);
            n_few++;
            b.pool.kv.is_quantised = true;
            prefill_prepare(&b.pool, b.items, b.n, NULL, NULL, upload, c);
            if (time > 1.05 * time_of(&b, c) + 2) /* a plan goes by whole tiles */
                fail_msg("seed %llu: %.0f tiles, of many rows %.0f", (unsigned long long)seed, time,
                         time_of(&b, c));
        }
        free(upload);
    }
    assert_in_range(n_few, 40, 360);
    free(c);
}

/* A random layer's branches, with rates up to 16, and the pool as prefill_pool_init leaves it. */
static void make_dilated(struct batch *b)
{
    struct attn_layer_spec *s = &b->specs[0];
    const uint32_t most = 1 + rng(5);
    b->pool.kv.block_tokens = 16;
    b->pool.dim = rng(2) ? 64 : 128;
    b->pool.num_layers = 1;
    s->n_branches = 1 + rng(4);
    for (uint32_t i = 0; i < s->n_branches; i++) {
        s->branches[i].rate = i == 0 ? 1 : 1u << rng(most);
        s->branches[i].segment_tokens = s->branches[i].rate * (1 + rng(rng(2) ? 20 : 3000));
    }
    for (uint32_t i = 0; i < b->n; i++) {
        b->items[i].n_tokens = 17 + b->items[i].n_tokens % 1500;
        b->items[i].layer = 0;
    }
    b->pool.has_dilated = prefill_has_dilated(&b->pool);
}

/* Marks the rows of a run's tile as a kernel finds them for kv head `head`. */
static void mark_rows(const struct batch *b, struct prefill_run e, uint32_t head, uint8_t *seen)
{
    const struct gpu_item *it = &b->items[e.item];
    const uint32_t group = b->pool.kv.group, r = prefill_rows(b->pool.dim, true);
    uint32_t row = 0;
    assert_true((uint64_t)e.from + e.n_tokens <= it->n_tokens);
    for (uint32_t t = e.from; t < e.from + e.n_tokens; t++)
        for (uint32_t g = 0; (it->pos + t - head - e.residue) % (1u << e.shift) == 0 && g < group;
             g++, row++)
            if (row / r == e.tile)
                assert_int_equal(seen[(uint64_t)t * group + g]++, 0);
}

static void any_dilated_batch_has_every_row_once(void **state)
{
    (void)state;
    static struct batch b;
    struct prefill_call *c = malloc(sizeof *c);
    uint32_t n_uploads = 0, n_taken = 0;
    for (uint64_t seed = 1; seed <= 150; seed++) {
        rng_state = seed * 77;
        random_batch(&b);
        b.n = b.n < 3 ? b.n : 3;
        make_dilated(&b);
        uint32_t n = 0, n_tokens = 0;
        for (uint32_t i = 0; i < b.n; i++) /* the backend leaves the others to other kernels */
            if (prefill_takes(&b.pool, 0, b.items[i].n_tokens, UINT32_MAX))
                b.items[n++] = b.items[i];
        if (n == 0)
            continue;
        for (uint32_t i = 0; i < n; i++)
            n_tokens += b.items[i].n_tokens;
        n_taken += n;
        const uint64_t capacity = prefill_upload_bytes(&b.pool, n, n_tokens);
        struct prefill_run *upload = malloc(capacity);
        prefill_prepare(&b.pool, b.items, n, NULL, NULL, upload, c);
        if (c->upload_bytes > capacity)
            print_error("seed %llu\n", (unsigned long long)seed);
        assert_true(c->is_dilated && c->upload_bytes <= capacity);
        assert_int_equal(c->upload_bytes,
                         c->n_entries > PREFILL_INLINE_RUNS ? c->n_entries * sizeof *upload : 0);
        n_uploads += c->upload_bytes > 0;
        const struct prefill_run *list = c->upload_bytes ? upload : c->inline_list.runs;
        const uint32_t head = rng(b.pool.kv.num_kv_heads);
        uint8_t *seen[MAX_ITEMS];
        for (uint32_t i = 0; i < n; i++)
            seen[i] = calloc(rows_of(&b, i), 1);
        for (uint32_t i = 0; i < c->n_entries; i++) {
            assert_true(list[i].item < n);
            mark_rows(&b, list[i], head, seen[list[i].item]);
        }
        for (uint32_t i = 0; i < n; i++) {
            assert_null(memchr(seen[i], 0, rows_of(&b, i)));
            free(seen[i]);
        }
        free(upload);
    }
    assert_true(n_uploads > 20 && n_taken > 150);
    free(c);
}

static void heads_share_a_section_as_far_as_the_cache_holds_them(void **state)
{
    (void)state;
    struct batch b = {.n = 1};
    struct prefill_call *c = malloc(sizeof *c);
    b.pool.dim = 128;
    b.pool.specs = b.specs;
    b.pool.kv = (struct gpu_kv){.num_kv_heads = 8,
                                .group = 4,
                                .block_tokens = 16,
                                .k_head_bytes = 4096,
                                .v_head_bytes = 4096};
    b.items[0].n_tokens = 2048;
    prefill_prepare(&b.pool, b.items, 1, NULL, NULL, NULL, c);
    assert_int_equal(c->section_heads, 8); /* 1 MiB each */
    b.items[0].pos = 32768 - 2048;
    prefill_prepare(&b.pool, b.items, 1, NULL, NULL, NULL, c);
    assert_int_equal(c->section_heads, 2); /* 16 MiB each */
    b.items[0].pos = 1 << 20;
    prefill_prepare(&b.pool, b.items, 1, NULL, NULL, NULL, c);
    assert_int_equal(c->section_heads, 1);
    free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_batch_has_every_tile_once_and_long_ones_first),
        cmocka_unit_test(the_longest_item_has_every_tile_once),
        cmocka_unit_test(few_long_units_are_cut),
        cmocka_unit_test(a_cut_launch_is_done_before_a_whole_one),
        cmocka_unit_test(units_have_few_rows_where_that_ends_sooner),
        cmocka_unit_test(any_dilated_batch_has_every_row_once),
        cmocka_unit_test(heads_share_a_section_as_far_as_the_cache_holds_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
