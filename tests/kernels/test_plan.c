/* test_plan: the split planner, without a device. Random segments of every shape against the rules
 * of plan.h; the seed is printed when one fails. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/plan.h"
#include "tests/random.h"

static int allocations_left = -1; /* -1: never fail */

void *__real_realloc(void *p, size_t n);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_realloc(void *p, size_t n)
{
    if (allocations_left == 0)
        return NULL;
    if (allocations_left > 0)
        allocations_left--;
    return __real_realloc(p, n);
}

static uint64_t rng_state;

static uint32_t rng(uint32_t below)
{
    return (uint32_t)(random_mixed(&rng_state) % below);
}

static uint64_t load_of(const struct plan *p, uint32_t proc)
{
    uint64_t load = 0;
    for (uint32_t i = p->first[proc]; i < p->first[proc + 1]; i++)
        load += p->runs[i].n_tiles;
    return load;
}

static uint64_t longest_load(const struct plan *p)
{
    uint64_t longest = 0;
    for (uint32_t i = 0; i < p->n_processors; i++) {
        uint64_t load = load_of(p, i);
        longest = load > longest ? load : longest;
    }
    return longest;
}

/* Every rule that holds for all kinds: each tile in exactly one run, splits contiguous and in
 * order, slots disjoint, processors' ranges a partition of the runs. */
static void check(const struct plan *p, const struct plan_config *c, const uint32_t *tiles,
                  uint32_t n)
{
    assert_int_equal(p->n_processors, c->n_processors);
    assert_int_equal(p->first[0], 0);
    assert_int_equal(p->first[p->n_processors], p->n_runs);
    for (uint32_t i = 0; i < p->n_processors; i++)
        assert_true(p->first[i] <= p->first[i + 1]);

    uint32_t *next = calloc(n + 1, sizeof *next), *split = calloc(n + 1, sizeof *split);
    uint32_t *slot = calloc(n + 1, sizeof *slot);
    uint8_t *used = calloc(p->n_slots + 1, 1);
    for (uint32_t i = 0; i < p->n_runs; i++) {
        const struct plan_run *r = &p->runs[i];
        assert_true(r->segment < n);
        assert_int_equal(r->tile0, next[r->segment]);
        assert_int_equal(r->split, split[r->segment]);
        assert_true(r->split < r->n_splits);
        assert_true(r->n_tiles > 0 || tiles[r->segment] == 0);
        next[r->segment] += r->n_tiles;
        split[r->segment]++;
        if (r->n_splits == 1)
            continue;
        assert_true((uint64_t)r->slot + r->n_splits <= p->n_slots);
        assert_int_equal(used[r->slot + r->split], 0);
        used[r->slot + r->split] = 1;
        if (r->split == 0)
            slot[r->segment] = r->slot;
        assert_int_equal(r->slot, slot[r->segment]);
    }
    for (uint32_t s = 0; s < n; s++) {
        assert_int_equal(next[s], tiles[s]);
        assert_true(split[s] > 0);
    }
    for (uint32_t i = 0; i < p->n_runs; i++)
        assert_int_equal(p->runs[i].n_splits, split[p->runs[i].segment]);
    for (uint32_t i = 0; i < p->n_slots; i++)
        assert_int_equal(used[i], 1);
    free(next);
    free(split);
    free(slot);
    free(used);
}

static uint32_t random_tiles(uint32_t *tiles, uint32_t capacity, uint64_t *out_total)
{
    uint32_t n = rng(capacity), shape = rng(4), base = 1 + rng(200);
    *out_total = 0;
    for (uint32_t s = 0; s < n; s++) {
        tiles[s] = shape == 0 ? base : shape == 1 ? rng(base) : rng(10) == 0 ? rng(9000) : rng(40);
        if (shape == 3 && rng(3) == 0)
            tiles[s] = 0;
        *out_total += tiles[s];
    }
    return n;
}

static void every_tile_is_in_exactly_one_run(void **state)
{
    (void)state;
    struct plan p = {0};
    uint32_t tiles[700];
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        rng_state = seed;
        uint64_t total;
        uint32_t n = random_tiles(tiles, 700, &total);
        struct plan_config c = {.kind = rng(5),
                                .n_processors = 1 + rng(rng(2) ? 8 : 300),
                                .max_splits = 1 + rng(16),
                                .min_run_tiles = rng(8),
                                .snap_percent = rng(51),
                                .fixed_run_tiles = 1 + rng(100)};
        attn_status st = plan_make(&p, &c, tiles, n);
        if (st != ATTN_OK)
            print_error("seed %llu\n", (unsigned long long)seed);
        assert_int_equal(st, ATTN_OK);
        check(&p, &c, tiles, n);
        if (p.kind == PLAN_STREAM)
            assert_true(p.n_slots <= 2 * c.n_processors);
    }
    plan_fini(&p);
}

static void a_stream_plan_gives_every_processor_its_share(void **state)
{
    (void)state;
    struct plan p = {0};
    uint32_t tiles[700];
    for (uint64_t seed = 1; seed <= 2000; seed++) {
        rng_state = seed;
        uint64_t total;
        uint32_t n = random_tiles(tiles, 700, &total);
        struct plan_config c = {.kind = PLAN_STREAM,
                                .n_processors = 1 + rng(300),
                                .min_run_tiles = 1 + rng(4),
                                .snap_percent = rng(6)};
        assert_int_equal(plan_make(&p, &c, tiles, n), ATTN_OK);
        uint64_t share = total / c.n_processors + 1;
        uint64_t slack = share * c.snap_percent / 100 * 2 + 2 * c.min_run_tiles + 2;
        if (longest_load(&p) > share + slack)
            print_error("seed %llu: %llu of %llu\n", (unsigned long long)seed,
                        (unsigned long long)longest_load(&p), (unsigned long long)share);
        assert_true(longest_load(&p) <= share + slack);
    }
    plan_fini(&p);
}

static void a_skewed_batch_keeps_short_segments_whole_and_cuts_first(void **state)
{
    (void)state;
    struct plan p = {0};
    uint32_t tiles[512];
    uint64_t total = 0;
    for (uint32_t s = 0; s < 512; s++) {
        tiles[s] = s < 8 ? 8192 : 32;
        total += tiles[s];
    }
    struct plan_config c = {.kind = PLAN_AUTO, .n_processors = 132, .max_splits = 8};
    assert_int_equal(plan_make(&p, &c, tiles, 512), ATTN_OK);
    check(&p, &c, tiles, 512);
    assert_int_equal(p.kind, PLAN_STREAM);
    assert_true(longest_load(&p) <= total / 132 + 1);
    for (uint32_t proc = 0; proc < 132; proc++) {
        bool seen_whole = false;
        for (uint32_t i = p.first[proc]; i < p.first[proc + 1]; i++) {
            assert_true(p.runs[i].segment < 8 || p.runs[i].n_splits == 1);
            if (p.runs[i].n_splits == 1)
                seen_whole = true;
            else
                assert_false(seen_whole);
        }
        assert_true(seen_whole); /* the short ones are spread */
    }
    plan_fini(&p);
}

static void auto_is_direct_where_segments_fill_the_processors(void **state)
{
    (void)state;
    struct plan p = {0};
    uint32_t tiles[264];
    for (uint32_t s = 0; s < 264; s++)
        tiles[s] = 64;
    struct plan_config c = {.kind = PLAN_AUTO, .n_processors = 132, .max_splits = 8};
    assert_int_equal(plan_make(&p, &c, tiles, 264), ATTN_OK);
    assert_int_equal(p.kind, PLAN_DIRECT);
    assert_int_equal(p.n_slots, 0);
    assert_int_equal(longest_load(&p), 128);
    assert_int_equal(plan_make(&p, &c, tiles, 33), ATTN_OK);
    assert_int_equal(p.kind, PLAN_EQUAL);
    assert_int_equal(p.n_slots, 132);
    assert_int_equal(longest_load(&p), 16);
    plan_fini(&p);
}

static void a_fixed_plan_does_not_know_the_crowd(void **state)
{
    (void)state;
    struct plan alone = {0}, crowd = {0};
    uint32_t tiles[64];
    for (uint64_t seed = 1; seed <= 300; seed++) {
        rng_state = seed;
        uint32_t n = 1 + rng(64), at = rng(n), run = 0;
        for (uint32_t s = 0; s < n; s++)
            tiles[s] = rng(2000);
        struct plan_config c = {.kind = PLAN_FIXED,
                                .n_processors = 1 + rng(200),
                                .max_splits = 1 + rng(16),
                                .fixed_run_tiles = 1 + rng(300)};
        assert_int_equal(plan_make(&crowd, &c, tiles, n), ATTN_OK);
        check(&crowd, &c, tiles, n);
        c.n_processors = 1 + rng(200);
        assert_int_equal(plan_make(&alone, &c, &tiles[at], 1), ATTN_OK);
        for (uint32_t i = 0; i < crowd.n_runs; i++) {
            if (crowd.runs[i].segment != at)
                continue;
            assert_int_equal(crowd.runs[i].tile0, alone.runs[run].tile0);
            assert_int_equal(crowd.runs[i].n_tiles, alone.runs[run].n_tiles);
            assert_int_equal(crowd.runs[i].n_splits, alone.runs[run].n_splits);
            run++;
        }
        assert_int_equal(run, alone.n_runs);
    }
    plan_fini(&alone);
    plan_fini(&crowd);
}

static void borders_near_a_segments_border_snap_to_it(void **state)
{
    (void)state;
    struct plan p = {0};
    uint32_t tiles[4] = {1040, 960, 1010, 990}; /* share 1000 */
    struct plan_config c = {.kind = PLAN_STREAM, .n_processors = 4, .snap_percent = 5};
    assert_int_equal(plan_make(&p, &c, tiles, 4), ATTN_OK);
    check(&p, &c, tiles, 4);
    assert_int_equal(p.n_runs, 4);
    assert_int_equal(p.n_slots, 0);
    c.snap_percent = 0;
    assert_int_equal(plan_make(&p, &c, tiles, 4), ATTN_OK);
    assert_true(p.n_runs > 4);
    plan_fini(&p);
}

static void empty_segments_get_one_empty_run(void **state)
{
    (void)state;
    struct plan p = {0};
    uint32_t tiles[3] = {0, 0, 0};
    for (int kind = PLAN_AUTO; kind <= PLAN_FIXED; kind++) {
        struct plan_config c = {
            .kind = kind, .n_processors = 5, .max_splits = 4, .fixed_run_tiles = 8};
        assert_int_equal(plan_make(&p, &c, tiles, 3), ATTN_OK);
        check(&p, &c, tiles, 3);
        assert_int_equal(p.n_runs, 3);
        assert_int_equal(plan_make(&p, &c, tiles, 0), ATTN_OK);
        assert_int_equal(p.n_runs, 0);
    }
    plan_fini(&p);
    plan_fini(&p);
    plan_fini(NULL);
}

static void a_config_out_of_range_is_refused(void **state)
{
    (void)state;
    struct plan p = {0};
    uint32_t tiles[1] = {5};
    struct plan_config good = {
        .kind = PLAN_FIXED, .n_processors = 2, .max_splits = 4, .fixed_run_tiles = 8};
    struct plan_config c = good;
    c.n_processors = 0;
    assert_int_equal(plan_make(&p, &c, tiles, 1), ATTN_EINVAL);
    c = good;
    c.max_splits = 0;
    assert_int_equal(plan_make(&p, &c, tiles, 1), ATTN_EINVAL);
    c = good;
    c.fixed_run_tiles = 0;
    assert_int_equal(plan_make(&p, &c, tiles, 1), ATTN_EINVAL);
    c = good;
    c.snap_percent = 51;
    assert_int_equal(plan_make(&p, &c, tiles, 1), ATTN_EINVAL);
    c = good;
    c.kind = PLAN_FIXED + 1;
    assert_int_equal(plan_make(&p, &c, tiles, 1), ATTN_EINVAL);
    plan_fini(&p);
}

static void a_failed_allocation_leaves_a_plan_that_works_later(void **state)
{
    (void)state;
    uint32_t tiles[300];
    for (uint32_t s = 0; s < 300; s++)
        tiles[s] = s * 7 % 400;
    for (int kind = PLAN_AUTO; kind <= PLAN_FIXED; kind++) {
        struct plan_config c = {
            .kind = kind, .n_processors = 50, .max_splits = 4, .fixed_run_tiles = 8};
        int failures = 0;
        struct plan p = {0};
        for (int n = 0;; n++) {
            allocations_left = n;
            attn_status st = plan_make(&p, &c, tiles, 300);
            allocations_left = -1;
            if (st == ATTN_OK)
                break;
            assert_int_equal(st, ATTN_ENOMEM);
            assert_int_equal(p.n_runs, 0);
            plan_fini(&p);
            failures++;
        }
        assert_true(failures >= 2);
        check(&p, &c, tiles, 300);
        plan_fini(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tile_is_in_exactly_one_run),
        cmocka_unit_test(a_stream_plan_gives_every_processor_its_share),
        cmocka_unit_test(a_skewed_batch_keeps_short_segments_whole_and_cuts_first),
        cmocka_unit_test(auto_is_direct_where_segments_fill_the_processors),
        cmocka_unit_test(a_fixed_plan_does_not_know_the_crowd),
        cmocka_unit_test(borders_near_a_segments_border_snap_to_it),
        cmocka_unit_test(empty_segments_get_one_empty_run),
        cmocka_unit_test(a_config_out_of_range_is_refused),
        cmocka_unit_test(a_failed_allocation_leaves_a_plan_that_works_later),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
