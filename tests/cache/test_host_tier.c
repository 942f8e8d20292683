/* test_host_tier.c: the store of evicted blocks against a model: what is found has the bytes that
 * were put there, the limit holds, what was used longest ago goes first; damage is found; memory
 * fails at each of its turns.
 */
#include "cache/host_tier.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

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

static void *take(void *arg, size_t bytes)
{
    (void)arg;
    if (fails_now())
        return NULL;
    n_bytes_taken += bytes;
    return malloc(bytes);
}

static void give(void *arg, void *p, size_t bytes)
{
    (void)arg;
    n_bytes_taken -= bytes;
    free(p);
}

static const struct host_tier_memory memory = {take, give, NULL};

static uint64_t seed = 1;

static uint32_t below(uint32_t n)
{
    seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
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

static struct host_tier *open_tier(uint64_t limit)
{
    struct host_tier *t = NULL;
    assert_int_equal(host_tier_open(limit, &memory, &t), ATTN_OK);
    return t;
}

static bool put(struct host_tier *t, uint32_t i, uint32_t version)
{
    struct kv_content c = content(i);
    c.serial += version * 1000;
    struct host_block *b = host_tier_place(t, &c, block_bytes[c.pool]);
    if (b == NULL)
        return false;
    memset(host_block_bytes(b), 0, block_bytes[c.pool]);
    fill(host_block_bytes(b), i, version);
    host_tier_filled(t, b);
    return true;
}

static struct host_block *find(struct host_tier *t, uint32_t i)
{
    struct kv_content c = content(i);
    return host_tier_find(t, &c);
}

static void what_is_found_is_what_was_put(void **state)
{
    (void)state;
    uint32_t version[N_CONTENTS] = {0};
    uint64_t n_found = 0;
    struct host_tier *t = open_tier(LIMIT_BYTES);
    struct host_tier_stats s;
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        uint32_t i = below(N_CONTENTS);
        if (below(2) == 0) {
            assert_true(put(t, i, ++version[i])); /* a newer publication of the same */
        } else {
            struct host_block *b = find(t, i);
            n_found += b != NULL;
            if (b != NULL) {
                assert_int_equal(host_block_serial(b), 1000 + i + version[i] * 1000);
                assert_true(host_tier_verify(t, b));
                assert_filled(host_block_bytes(b), i, version[i]);
            }
        }
        if (below(100) == 0) {
            uint32_t pool = below(N_POOLS);
            host_tier_drop_pool(t, pool);
            assert_null(find(t, pool));
        }
        assert_null(host_tier_check(t));
        host_tier_stats_read(t, &s);
        assert_int_equal(s.bytes, n_bytes_taken);
        assert_true(s.bytes <= LIMIT_BYTES);
    }
    host_tier_stats_read(t, &s);
    assert_int_equal(s.hits, n_found);
    assert_true(n_found > 10 && s.evictions > 10);
    host_tier_close(t);
    assert_int_equal(n_bytes_taken, 0);
}

/* Contents of pool 0. */
static void the_one_used_longest_ago_goes(void **state)
{
    (void)state;
    struct host_tier *t = open_tier(4 << 20);
    for (uint32_t i = 0; i < 4; i++)
        assert_true(put(t, 3 * i, 0));
    struct kv_content again = content(3); /* there already: it counts as used */
    assert_null(host_tier_place(t, &again, block_bytes[0]));
    assert_non_null(find(t, 0));
    assert_true(put(t, 12, 0));
    assert_null(find(t, 6));
    assert_non_null(find(t, 0));
    assert_non_null(find(t, 3));

    struct host_block *held = find(t, 9);
    host_tier_hold(t, held);
    for (uint32_t i = 5; i < 10; i++)
        assert_true(put(t, 3 * i, 0));
    assert_ptr_equal(find(t, 9), held);
    assert_filled(host_block_bytes(held), 9, 0);
    host_tier_let_go(t, held);
    assert_null(host_tier_check(t));
    host_tier_close(t);
}

static void held_blocks_are_not_for_others(void **state)
{
    (void)state;
    struct host_tier *t = open_tier(3 << 20);
    struct host_tier_stats s;
    struct host_block *held[3];
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(put(t, 3 * i, 0));
        held[i] = find(t, 3 * i);
        host_tier_hold(t, held[i]);
    }
    assert_false(put(t, 9, 0));
    assert_false(put(t, 1, 0)); /* another pool's */
    host_tier_stats_read(t, &s);
    assert_int_equal(s.no_room, 2);
    for (uint32_t i = 0; i < 3; i++) {
        assert_filled(host_block_bytes(held[i]), 3 * i, 0);
        host_tier_let_go(t, held[i]);
    }
    assert_true(put(t, 1, 0)); /* the piece goes to the other pool */
    assert_null(find(t, 0));
    assert_null(host_tier_check(t));
    host_tier_close(t);
    assert_int_equal(n_bytes_taken, 0);
}

static void a_flipped_bit_is_found(void **state)
{
    (void)state;
    struct host_tier *t = open_tier(LIMIT_BYTES);
    struct host_tier_stats s;
    for (uint32_t n = 0; n < 50; n++) {
        assert_true(put(t, 0, n));
        struct host_block *b = find(t, 0);
        uint8_t *bytes = host_block_bytes(b);
        uint32_t at = below(1 << 20);
        bool is_held = n % 2 == 0;
        if (is_held)
            host_tier_hold(t, b);
        bytes[at] ^= (uint8_t)(1u << below(8));
        assert_false(host_tier_verify(t, b));
        assert_null(find(t, 0));
        if (is_held)
            host_tier_let_go(t, b);
        assert_null(host_tier_check(t));
    }
    host_tier_stats_read(t, &s);
    assert_int_equal(s.damaged, 50);
    assert_int_equal(s.blocks, 0);
    host_tier_close(t);
}

static void memory_fails_at_each_turn(void **state)
{
    (void)state;
    int n = 0;
    for (bool has_failed = true; has_failed; n++) {
        struct host_tier *t = NULL;
        calls_left = n;
        if (host_tier_open(LIMIT_BYTES, &memory, &t) == ATTN_OK) {
            uint32_t n_put = 0;
            for (uint32_t i = 0; i < 9; i++)
                n_put += put(t, i, 0);
            has_failed = calls_left < 0;
            calls_left = -1;
            struct host_tier_stats s;
            host_tier_stats_read(t, &s);
            assert_int_equal(n_put + s.no_room, 9);
            assert_null(host_tier_check(t));
            for (uint32_t i = 0; i < 9; i++) {
                struct host_block *b = find(t, i);
                if (b != NULL)
                    assert_filled(host_block_bytes(b), i, 0);
            }
        }
        calls_left = -1;
        host_tier_close(t);
        assert_int_equal(n_bytes_taken, 0);
    }
    assert_true(n > 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_found_is_what_was_put),
        cmocka_unit_test(the_one_used_longest_ago_goes),
        cmocka_unit_test(held_blocks_are_not_for_others),
        cmocka_unit_test(a_flipped_bit_is_found),
        cmocka_unit_test(memory_fails_at_each_turn),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
