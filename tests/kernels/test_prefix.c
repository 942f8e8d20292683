/* test_prefix: what items of a batch begin alike, without a device. Random tables against every
 * pair compared block by block. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/prefix.h"
#include "tests/random.h"

#define MAX_ITEMS 40
#define MAX_BLOCKS 200

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
static uint32_t tables[MAX_ITEMS][MAX_BLOCKS];
static struct prefix_item items[MAX_ITEMS];

static uint32_t rng(uint32_t below)
{
    return (uint32_t)(random_mixed(&rng_state) % below);
}

/* Each item begins as one before it does, to a random depth, and goes on alone. */
static uint32_t make_items(void)
{
    const uint32_t n = 1 + rng(MAX_ITEMS), n_kinds = 1 + rng(3), most = 1 + rng(MAX_BLOCKS);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t from = i > 0 && rng(4) > 0 ? rng(i) : i;
        const uint32_t n_blocks = rng(most + 1);
        uint32_t depth = rng(n_blocks + 1);
        if (from < i && depth > items[from].n_blocks)
            depth = items[from].n_blocks;
        for (uint32_t j = 0; j < n_blocks; j++)
            tables[i][j] = from < i && j < depth ? tables[from][j] : rng(1000000);
        items[i] = (struct prefix_item){.table = tables[i],
                                        .n_blocks = n_blocks,
                                        .n_queries = 1 + (rng(4) == 0) * rng(40),
                                        .layer = rng(n_kinds)};
    }
    return n;
}

static uint32_t passes(uint64_t n_queries, const struct prefix_cost *c)
{
    return (uint32_t)((n_queries + c->queries_at_once - 1) / c->queries_at_once);
}

static uint32_t own_passes(const struct prefix_item *item, const struct prefix_cost *c)
{
    return item->n_passes > 0 ? item->n_passes : passes(item->n_queries, c);
}

/* Every rule of prefix.h. Returns the blocks that passes read. */
static uint64_t check(const struct prefixes *p, const struct prefix_cost *c, uint32_t n)
{
    uint64_t read = 0;
    uint32_t seen[MAX_ITEMS] = {0}, ends[MAX_ITEMS] = {0}, last[MAX_ITEMS];
    memset(last, 0xff, sizeof last);
    for (uint32_t i = 0; i < p->n_ordered; i++)
        assert_int_equal(seen[p->order[i]]++, 0);
    for (uint32_t g = 0; g < p->n_groups; g++) {
        const struct prefix_group *k = &p->groups[g];
        uint64_t n_queries = 0, alone = 0;
        assert_true(k->n >= 1 && k->first + k->n <= p->n_ordered);
        assert_true(k->end_block > k->first_block);
        assert_int_equal(k->end_block % c->align_blocks, 0);
        if (k->parent == PREFIX_NONE) {
            assert_int_equal(k->first_block, 0);
        } else {
            const struct prefix_group *up = &p->groups[k->parent];
            assert_true(k->parent < g);
            assert_int_equal(k->first_block, up->end_block);
            assert_true(k->first >= up->first && k->first + k->n <= up->first + up->n);
        }
        const struct prefix_item *one = &items[p->order[k->first]];
        for (uint32_t i = k->first; i < k->first + k->n; i++) {
            const struct prefix_item *item = &items[p->order[i]];
            assert_int_equal(item->layer, one->layer);
            assert_true(item->n_blocks >= k->end_block);
            assert_memory_equal(item->table, one->table, k->end_block * sizeof(uint32_t));
            assert_int_equal(last[p->order[i]], k->parent);
            last[p->order[i]] = g;
            ends[p->order[i]] = k->end_block;
            n_queries += item->n_queries;
            alone += own_passes(item, c);
        }
        assert_int_equal(k->n_queries, n_queries);
        const uint64_t blocks = k->end_block - k->first_block;
        assert_true(alone > passes(n_queries, c));
        assert_int_equal(k->saved_bytes, (alone - passes(n_queries, c)) * blocks * c->block_bytes);
        assert_true(k->saved_bytes > n_queries * c->query_bytes + c->group_bytes);
        read += passes(n_queries, c) * blocks;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (p->n_groups > 0)
            assert_int_equal(p->group_of[i], last[i]);
        read += (uint64_t)(items[i].n_blocks - ends[i]) * own_passes(&items[i], c);
    }
    return read;
}

/* Blocks that have to be read if each place in the tree of tables is read once, naively: a block
 * is counted by the first item that has it with all that is in front of it. */
static uint64_t least_blocks(uint32_t n)
{
    uint64_t read = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t most = 0;
        for (uint32_t k = 0; k < i; k++) {
            uint32_t j = 0;
            while (items[k].layer == items[i].layer && j < items[i].n_blocks &&
                   j < items[k].n_blocks && tables[i][j] == tables[k][j])
                j++;
            most = j > most ? j : most;
        }
        read += items[i].n_blocks - most;
    }
    return read;
}

static void groups_follow_the_rules_and_read_what_a_naive_grouping_does(void **state)
{
    (void)state;
    struct prefixes p = {0};
    uint32_t n_least = 0, n_runs = 0;
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        rng_state = seed;
        const struct prefix_cost paid = {.align_blocks = 1 << rng(3),
                                         .queries_at_once = 1 + rng(64),
                                         .block_bytes = 1 + rng(10000),
                                         .query_bytes = rng(10000),
                                         .group_bytes = rng(100000)};
        /* nothing costs anything, and one pass takes all queries */
        const struct prefix_cost free_cost = {
            .align_blocks = 1, .queries_at_once = 100000, .block_bytes = 1};
        const uint32_t n = make_items();
        assert_int_equal(prefixes_find(&p, &paid, items, n), ATTN_OK);
        check(&p, &paid, n);
        assert_int_equal(prefixes_find(&p, &free_cost, items, n), ATTN_OK);
        const uint64_t read = check(&p, &free_cost, n), least = least_blocks(n);
        assert_true(read >= least);
        n_least += read == least;
        n_runs++;
        uint64_t apart = 0;
        for (uint32_t i = 0; i < n; i++) {
            items[i].n_passes = rng(3) * rng(100);
            apart += (uint64_t)items[i].n_blocks * own_passes(&items[i], &paid);
        }
        assert_int_equal(prefixes_find(&p, &paid, items, n), ATTN_OK);
        assert_true(check(&p, &paid, n) <= apart);
    }
    /* trees that part more often than spans are divided read more */
    if (n_least * 10 < n_runs * 9)
        fail_msg("only %u of %u read each block once", n_least, n_runs);
    prefixes_fini(&p);
}

static const struct prefix_cost cheap = {
    .align_blocks = 2, .queries_at_once = 32, .block_bytes = 100, .query_bytes = 10};

static void forks_of_a_fork_are_two_levels(void **state)
{
    (void)state;
    struct prefixes p = {0};
    for (uint32_t i = 0; i < 6; i++) {
        for (uint32_t j = 0; j < 50; j++)
            tables[i][j] = j < 21 ? j : j < 40 && i >= 3 ? 1000 + j : 100 * (i + 20) + j;
        items[i] = (struct prefix_item){.table = tables[i], .n_blocks = 50, .n_queries = 1};
    }
    assert_int_equal(prefixes_find(&p, &cheap, items, 6), ATTN_OK);
    check(&p, &cheap, 6);
    assert_int_equal(p.n_groups, 2);
    assert_int_equal(p.groups[0].n, 6);
    assert_int_equal(p.groups[0].end_block, 20); /* 21 are alike, two together are a tile */
    assert_int_equal(p.groups[1].n, 3);
    assert_int_equal(p.groups[1].end_block, 40);
    prefixes_fini(&p);
}

static void an_item_that_reads_more_often_than_a_group_is_one_alone(void **state)
{
    (void)state;
    struct prefixes p = {0};
    for (uint32_t i = 0; i < 3; i++) {
        for (uint32_t j = 0; j < 50; j++)
            tables[i][j] = i < 2 && j < 20 ? j : 100 * (i + 20) + j;
        items[i] = (struct prefix_item){
            .table = tables[i], .n_blocks = 41, .n_queries = 1, .n_passes = i > 0 ? 5 : 0};
    }
    assert_int_equal(prefixes_find(&p, &cheap, items, 3), ATTN_OK);
    check(&p, &cheap, 3);
    assert_int_equal(p.n_groups, 3);
    assert_int_equal(p.groups[p.groups[p.group_of[1]].parent].n, 2);
    assert_int_equal(p.groups[p.group_of[1]].n, 1);
    assert_int_equal(p.groups[p.group_of[1]].end_block, 40);
    assert_int_equal(p.groups[p.group_of[0]].end_block, 20);
    assert_int_equal(p.groups[p.group_of[2]].n, 1);
    assert_int_equal(prefixes_find(&p, &cheap, items + 2, 1), ATTN_OK);
    assert_int_equal(p.n_groups, 1);
    assert_int_equal(p.groups[0].n_queries, 1);
    assert_int_equal(p.group_of[0], 0);
    prefixes_fini(&p);
}

static void what_does_not_pay_is_left_apart(void **state)
{
    (void)state;
    struct prefixes p = {0};
    struct prefix_cost c = cheap;
    for (uint32_t i = 0; i < 4; i++) {
        for (uint32_t j = 0; j < 10; j++)
            tables[i][j] = j;
        items[i] = (struct prefix_item){.table = tables[i], .n_blocks = 10, .n_queries = 2};
    }
    /* three passes of 10 blocks are saved: 3000 bytes, and 8 queries cost 8 times 10 */
    c.group_bytes = 3000 - 80 - 1;
    assert_int_equal(prefixes_find(&p, &c, items, 4), ATTN_OK);
    assert_int_equal(p.n_groups, 1);
    c.group_bytes++;
    assert_int_equal(prefixes_find(&p, &c, items, 4), ATTN_OK);
    assert_int_equal(p.n_groups, 0);
    /* as many passes with and without */
    c = cheap;
    c.queries_at_once = 2;
    assert_int_equal(prefixes_find(&p, &c, items, 4), ATTN_OK);
    assert_int_equal(p.n_groups, 0);
    /* nobody may share, layers differ, one alone */
    for (uint32_t i = 0; i < 4; i++)
        items[i].layer = i;
    assert_int_equal(prefixes_find(&p, &cheap, items, 4), ATTN_OK);
    assert_int_equal(p.n_groups, 0);
    for (uint32_t i = 0; i < 4; i++)
        items[i].layer = items[i].n_blocks = 0;
    assert_int_equal(prefixes_find(&p, &cheap, items, 4), ATTN_OK);
    assert_int_equal(p.n_groups, 0);
    assert_int_equal(prefixes_find(&p, &cheap, items, 1), ATTN_OK);
    assert_int_equal(prefixes_find(&p, &cheap, items, 0), ATTN_OK);
    assert_int_equal(p.n_groups, 0);
    prefixes_fini(&p);
}

static void bad_costs_and_no_memory_leave_no_groups(void **state)
{
    (void)state;
    struct prefixes p = {0};
    struct prefix_cost c = cheap;
    rng_state = 7;
    const uint32_t n = make_items();
    c.align_blocks = 0;
    assert_int_equal(prefixes_find(&p, &c, items, n), ATTN_EINVAL);
    c = cheap;
    c.queries_at_once = 0;
    assert_int_equal(prefixes_find(&p, &c, items, n), ATTN_EINVAL);
    for (int k = 0; k < 6; k++) {
        prefixes_fini(&p);
        allocations_left = k;
        assert_int_equal(prefixes_find(&p, &cheap, items, n), ATTN_ENOMEM);
        assert_int_equal(p.n_groups, 0);
    }
    allocations_left = -1;
    assert_int_equal(prefixes_find(&p, &cheap, items, n), ATTN_OK);
    check(&p, &cheap, n);
    prefixes_fini(&p);
    prefixes_fini(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_follow_the_rules_and_read_what_a_naive_grouping_does),
        cmocka_unit_test(forks_of_a_fork_are_two_levels),
        cmocka_unit_test(an_item_that_reads_more_often_than_a_group_is_one_alone),
        cmocka_unit_test(what_does_not_pay_is_left_apart),
        cmocka_unit_test(bad_costs_and_no_memory_leave_no_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
