/* test_tier_store.c: tests the store of evicted blocks against a model: found blocks have the bytes
 * that were stored, the limit holds, the block used longest ago is evicted first, and damage is
 * found. Memory fails at each place where it is taken.
 */
#include "cache/tier_store.h"
#include "tests/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <xxhash.h>

enum { N_POOLS = 3, N_CONTENTS = 24, N_IDS = 4, LIMIT_BYTES = 24 << 20, N_ROUNDS = 500 };
static const size_t block_bytes[N_POOLS] = {1 << 20, 3 << 20, 9 << 20};

static int calls_left = -1; /* until the one that fails; -1: none does */
static uint64_t n_bytes_taken;

static bool fails_now(void)
{
    return calls_left >= 0 && calls_left-- == 0;
}

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size)
{
    return fails_now() ? NULL : __real_calloc(n, size);
}

static bool take(void *arg, uint64_t bytes, uint64_t *out_place)
{
    (void)arg;
    if (fails_now())
        return false;
    n_bytes_taken += bytes;
    *out_place = (uintptr_t)malloc(bytes);
    return true;
}

static void give(void *arg, uint64_t place, uint64_t bytes)
{
    (void)arg;
    n_bytes_taken -= bytes;
    free((void *)(uintptr_t)place);
}

static int64_t tenant_bytes[2];
static uint64_t most_of_tenant = UINT64_MAX;

static bool charge(void *arg, uint32_t tenant, uint64_t bytes)
{
    (void)arg;
    if ((uint64_t)tenant_bytes[tenant] + bytes > most_of_tenant)
        return false;
    tenant_bytes[tenant] += (int64_t)bytes;
    return true;
}

static void discharge(void *arg, uint32_t tenant, uint64_t bytes)
{
    (void)arg;
    tenant_bytes[tenant] -= (int64_t)bytes;
    assert_true(tenant_bytes[tenant] >= 0);
}

static const struct tier_memory memory = {take, give, charge, discharge, NULL, 0};

static uint8_t *bytes_of(const struct tier_block *b)
{
    return (uint8_t *)(uintptr_t)tier_block_place(b);
}

struct sum {
    uint64_t word[2];
};
static struct sum sum_of(const struct tier_block *b)
{
    XXH128_hash_t h = XXH3_128bits(bytes_of(b), tier_block_bytes(b));
    return (struct sum){{h.low64, h.high64}};
}

static uint64_t seed = 1;

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

static uint32_t ids[2 * N_CONTENTS][N_IDS];

/* Unlike contents of few keys, so that ids, parent and pool decide. */
static struct kv_content content(uint32_t i)
{
    for (uint32_t k = 0; k < N_IDS; k++)
        ids[i][k] = i / 4 + k;
    return (struct kv_content){
        .pool = i % N_POOLS,
        .tenant = i % 2,
        .index = i % 7,
        .n_ids = N_IDS,
        .adapter = i % 5,
        .key = {i % 3, 0},
        .serial = 1000 + i,
        .parent = i % 4,
        .ids = ids[i],
    };
}

/* What block i holds: words of its number and its version at some places. */
static void fill(uint8_t *bytes, uint32_t i, uint32_t version)
{
    size_t n = block_bytes[i % N_POOLS];
    for (size_t at = 0; at < n; at += 4096)
        memcpy(bytes + at, &(uint32_t[2]){i, version}, 8);
}

static void assert_filled(const uint8_t *bytes, uint32_t i, uint32_t version)
{
    uint32_t expected[2] = {i, version};
    size_t n = block_bytes[i % N_POOLS];
    for (size_t at = 0; at < n; at += 4096)
        assert_memory_equal(bytes + at, expected, 8);
}

static struct tier_store *open_tier(uint64_t limit)
{
    struct tier_store *t = NULL;
    assert_int_equal(tier_store_open(limit, &memory, &t), ATTN_OK);
    return t;
}

static bool put(struct tier_store *t, uint32_t i, uint32_t version)
{
    struct kv_content c = content(i);
    c.serial += version * 1000;
    struct tier_block *b = tier_store_place(t, &c, block_bytes[c.pool]);
    if (b == NULL)
        return false;
    memset(bytes_of(b), 0, block_bytes[c.pool]);
    fill(bytes_of(b), i, version);
    tier_store_filled(t, b, sum_of(b).word);
    return true;
}

static struct tier_block *find(struct tier_store *t, uint32_t i)
{
    struct kv_content c = content(i);
    return tier_store_find(t, &c);
}

static void what_is_found_is_what_was_put(void **state)
{
    (void)state;
    uint32_t version[N_CONTENTS] = {0};
    uint64_t n_found = 0;
    struct tier_store *t = open_tier(LIMIT_BYTES);
    struct tier_store_stats s;
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        uint32_t i = below(N_CONTENTS);
        if (below(2) == 0) {
            assert_true(put(t, i, ++version[i])); /* a newer publication of the same */
        } else {
            struct tier_block *b = find(t, i);
            n_found += b != NULL;
            if (b != NULL) {
                assert_int_equal(tier_block_content(b)->serial, 1000 + i + version[i] * 1000);
                assert_true(tier_store_verify(t, b, sum_of(b).word));
                assert_filled(bytes_of(b), i, version[i]);
            }
        }
        if (below(100) == 0) {
            uint32_t pool = below(N_POOLS);
            tier_store_drop_pool(t, pool);
            assert_null(find(t, pool));
        }
        assert_null(tier_store_check(t));
        tier_store_stats_read(t, &s);
        assert_int_equal(s.bytes, n_bytes_taken);
        assert_true(s.bytes <= LIMIT_BYTES);
        assert_int_equal(tenant_bytes[0] + tenant_bytes[1], s.used_bytes);
    }
    tier_store_stats_read(t, &s);
    assert_int_equal(s.hits, n_found);
    assert_true(n_found > 10 && s.evictions > 10);
    tier_store_close(t);
    assert_int_equal(n_bytes_taken, 0);
}

/* Contents of pool 0. */
static void the_one_used_longest_ago_goes(void **state)
{
    (void)state;
    struct tier_store *t = open_tier(4 << 20);
    for (uint32_t i = 0; i < 4; i++)
        assert_true(put(t, 3 * i, 0));
    struct kv_content again = content(3); /* there already: it counts as used */
    assert_null(tier_store_place(t, &again, block_bytes[0]));
    assert_non_null(find(t, 0));
    assert_true(put(t, 12, 0));
    assert_null(find(t, 6));
    assert_non_null(find(t, 0));
    assert_non_null(find(t, 3));

    struct tier_block *held = find(t, 9);
    tier_store_hold(t, held);
    for (uint32_t i = 5; i < 10; i++)
        assert_true(put(t, 3 * i, 0));
    assert_ptr_equal(find(t, 9), held);
    assert_filled(bytes_of(held), 9, 0);
    tier_store_release(t, held);
    assert_null(tier_store_check(t));
    tier_store_close(t);
}

static void held_blocks_are_not_for_others(void **state)
{
    (void)state;
    struct tier_store *t = open_tier(3 << 20);
    struct tier_store_stats s;
    struct tier_block *held[3];
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(put(t, 3 * i, 0));
        held[i] = find(t, 3 * i);
        tier_store_hold(t, held[i]);
    }
    assert_false(put(t, 9, 0));
    assert_false(put(t, 1, 0)); /* another pool's */
    tier_store_stats_read(t, &s);
    assert_int_equal(s.no_room, 2);
    for (uint32_t i = 0; i < 3; i++) {
        assert_filled(bytes_of(held[i]), 3 * i, 0);
        tier_store_release(t, held[i]);
    }
    assert_true(put(t, 1, 0)); /* the piece goes to the other pool */
    assert_null(find(t, 0));
    assert_null(tier_store_check(t));
    tier_store_close(t);
    assert_int_equal(n_bytes_taken, 0);
}

static void a_flipped_bit_is_found(void **state)
{
    (void)state;
    struct tier_store *t = open_tier(LIMIT_BYTES);
    struct tier_store_stats s;
    for (uint32_t n = 0; n < 50; n++) {
        assert_true(put(t, 0, n));
        struct tier_block *b = find(t, 0);
        uint8_t *bytes = bytes_of(b);
        uint32_t at = below(1 << 20);
        bool is_held = n % 2 == 0;
        if (is_held)
            tier_store_hold(t, b);
        bytes[at] ^= (uint8_t)(1u << below(8));
        assert_false(tier_store_verify(t, b, sum_of(b).word));
        assert_null(find(t, 0));
        if (is_held)
            tier_store_release(t, b);
        assert_null(tier_store_check(t));
    }
    tier_store_stats_read(t, &s);
    assert_int_equal(s.damaged, 50);
    assert_int_equal(s.blocks, 0);
    tier_store_close(t);
}

static void memory_fails_at_each_turn(void **state)
{
    (void)state;
    int n = 0;
    for (bool has_failed = true; has_failed; n++) {
        struct tier_store *t = NULL;
        calls_left = n;
        if (tier_store_open(LIMIT_BYTES, &memory, &t) == ATTN_OK) {
            uint32_t n_put = 0;
            for (uint32_t i = 0; i < 9; i++)
                n_put += put(t, i, 0);
            has_failed = calls_left < 0;
            calls_left = -1;
            struct tier_store_stats s;
            tier_store_stats_read(t, &s);
            assert_int_equal(n_put + s.no_room, 9);
            assert_null(tier_store_check(t));
            for (uint32_t i = 0; i < 9; i++) {
                struct tier_block *b = find(t, i);
                if (b != NULL)
                    assert_filled(bytes_of(b), i, 0);
            }
        }
        calls_left = -1;
        tier_store_close(t);
        assert_int_equal(n_bytes_taken, 0);
    }
    assert_true(n > 6);
}

static void a_tenant_has_no_more_than_it_may(void **state)
{
    (void)state;
    struct tier_store *t = open_tier(LIMIT_BYTES);
    most_of_tenant = 2 << 20;
    assert_true(put(t, 0, 0) && put(t, 6, 0)); /* tenant 0's, 1 MiB each */
    assert_true(put(t, 12, 0)); /* in place of the one used longest ago */
    assert_null(find(t, 0));
    assert_int_equal(tenant_bytes[0], most_of_tenant);
    assert_true(put(t, 3, 0)); /* the other's */
    struct tier_block *held[] = {find(t, 6), find(t, 12)};
    tier_store_hold(t, held[0]);
    tier_store_hold(t, held[1]);
    assert_false(put(t, 18, 0)); /* nothing can go */
    assert_int_equal(tenant_bytes[0], most_of_tenant);
    tier_store_drop(t, held[0]); /* not found any more, but its place is not free */
    assert_false(put(t, 18, 0));
    tier_store_release(t, held[0]);
    assert_true(put(t, 18, 0));
    tier_store_release(t, held[1]);
    assert_null(tier_store_check(t));
    most_of_tenant = UINT64_MAX;
    tier_store_close(t);
    assert_int_equal(tenant_bytes[0] + tenant_bytes[1], 0);
}

/* The records beside the blocks have a bound of their own: when it is reached others make way. */
static void records_are_bounded(void **state)
{
    (void)state;
    struct tier_memory m = memory;
    struct tier_store_stats s;
    struct tier_store *t;
    enum { MOST = 2500, N = 16, A_PIECE = 8 }; /* a piece of 8 MiB has 8 blocks of the first pool */
    for (uint32_t bounded = 0; bounded < 2; bounded++) {
        m.most_record_bytes = bounded * MOST;
        assert_int_equal(tier_store_open(UINT64_C(1) << 30, &m, &t), ATTN_OK);
        for (uint32_t i = 0; i < N; i++)
            assert_true(put(t, N_POOLS * i, 1));
        tier_store_stats_read(t, &s);
        assert_int_equal(s.blocks, bounded ? A_PIECE : N);
        assert_int_equal(s.evictions, N - s.blocks);
        tier_store_close(t);
    }
}

static void ages_are_counted_and_the_next_to_go_are_told(void **state)
{
    (void)state;
    struct tier_store *t = open_tier(3 << 20);
    struct tier_block *next[4];
    struct tier_store_stats s;
    for (uint32_t i = 0; i < 3; i++) {
        tier_store_set_time(t, 100 + 10 * i);
        assert_true(put(t, 3 * i, 0));
    }
    assert_int_equal(tier_store_room(t, 0), 0);
    find(t, 0); /* at 120 */
    assert_int_equal(tier_store_next_out(t, 4, next), 3);
    assert_int_equal(tier_block_content(next[0])->serial, 1003);
    assert_int_equal(tier_block_content(next[2])->serial, 1000);
    tier_store_set_time(t, 150);
    assert_true(put(t, 9, 0) && put(t, 12, 0));
    tier_store_stats_read(t, &s);
    assert_int_equal(s.evictions, 2);
    assert_int_equal(s.eviction_age_seconds, 40 + 30);
    tier_store_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_found_is_what_was_put),
        cmocka_unit_test(the_one_used_longest_ago_goes),
        cmocka_unit_test(held_blocks_are_not_for_others),
        cmocka_unit_test(a_flipped_bit_is_found),
        cmocka_unit_test(memory_fails_at_each_turn),
        cmocka_unit_test(a_tenant_has_no_more_than_it_may),
        cmocka_unit_test(records_are_bounded),
        cmocka_unit_test(ages_are_counted_and_the_next_to_go_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
