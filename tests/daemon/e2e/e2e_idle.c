/* e2e_idle.c: a daemon whose pool has half of the blocks that its sequences take, with
 * cache.idle_memory: used by turns, alone and several in a message, they answer the same bytes as
 * in one whose pool holds everything; so they do after the daemon was killed. Pools are batch
 * invariant, and each step is compared with the float64 reference, too.
 *
 *   e2e_idle [ROUNDS]     150 by itself, fewer with sanitizers
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"
#include "tests/random.h"

enum {
    SMALL_BLOCKS = 32,
    LARGE_BLOCKS = 2000,
    N_SEQS = 8,
    MAX_BLOCKS = 10, /* of a sequence; 8 on average: twice the small pool */
    MAX_TOKENS = MAX_BLOCKS * E2E_BLOCK_TOKENS,
    MAX_MIX = 3
};

#ifndef ROUNDS
#define ROUNDS 150
#endif
static uint32_t n_rounds = ROUNDS;
static uint64_t seed = 11;
static struct e2e small, large;
static struct e2e_client a, b;
static struct e2e_seq in_small[N_SEQS + 1], in_large[N_SEQS + 1]; /* the last: a fork */
static uint32_t len[N_SEQS];

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

static void begin(const char *const *flags)
{
    static const char *const plain[] = {"--device.kv_memory", "64M", NULL};
    e2e_start(&small, flags);
    e2e_start(&large, plain);
    e2e_connect(&a, &small);
    e2e_connect(&b, &large);
    e2e_make_pool(&a, ATTN_F32, SMALL_BLOCKS);
    e2e_make_pool(&b, ATTN_F32, LARGE_BLOCKS);
    for (uint32_t k = 0; k < N_SEQS; k++) {
        assert_int_equal(e2e_open_seq(&a, &in_small[k], 1 + k, 1 + k), ATTN_OK);
        assert_int_equal(e2e_open_seq(&b, &in_large[k], 1 + k, 1 + k), ATTN_OK);
        len[k] = 0;
    }
}

static void end(void)
{
    e2e_disconnect(&a);
    e2e_disconnect(&b);
    e2e_stop(&small);
    e2e_stop(&large);
}

/* n tokens more of each of these; in the small one in one message per layer. */
static void grow(const uint32_t *which, uint32_t n_which, const uint32_t *n)
{
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        struct e2e_item items[MAX_MIX];
        for (uint32_t i = 0; i < n_which; i++) {
            items[i] = (struct e2e_item){&in_large[which[i]], len[which[i]], n[i]};
            e2e_step(&b, layer, &items[i], 1);
            items[i].seq = &in_small[which[i]];
        }
        e2e_step(&a, layer, items, n_which);
    }
    for (uint32_t i = 0; i < n_which; i++)
        len[which[i]] += n[i];
}

static void same_bytes(struct e2e_seq *x, struct e2e_seq *y, uint32_t n)
{
    for (uint32_t layer = 0; layer < E2E_LAYERS && n > 0; layer++) {
        size_t n_x, n_y;
        void *bytes_x = e2e_read_back(&a, x, layer, n, &n_x);
        void *bytes_y = e2e_read_back(&b, y, layer, n, &n_y);
        assert_int_equal(n_x, n_y);
        assert_memory_equal(bytes_x, bytes_y, n_x);
        free(bytes_x);
        free(bytes_y);
    }
}

/* A fork of all of it, compared and closed. */
static void fork_of(uint32_t k)
{
    struct e2e_seq *x = &in_small[N_SEQS], *y = &in_large[N_SEQS];
    assert_int_equal(e2e_fork(&a, &in_small[k], x, 100, len[k], 100), ATTN_OK);
    assert_int_equal(e2e_fork(&b, &in_large[k], y, 100, len[k], 100), ATTN_OK);
    same_bytes(x, y, len[k]);
    assert_int_equal(e2e_close_seq(&a, x), ATTN_OK);
    assert_int_equal(e2e_close_seq(&b, y), ATTN_OK);
}

static void round_of(void)
{
    uint32_t which[MAX_MIX], n[MAX_MIX], n_which = 1 + below(MAX_MIX), first = below(N_SEQS);
    for (uint32_t i = 0; i < n_which; i++) {
        uint32_t k = which[i] = (first + i * 3) % N_SEQS;
        n[i] = 1 + below(2 * E2E_BLOCK_TOKENS);
        if (len[k] + n[i] <= MAX_TOKENS)
            continue;
        len[k] = 5 * E2E_BLOCK_TOKENS + below(3 * E2E_BLOCK_TOKENS);
        assert_int_equal(e2e_truncate(&a, &in_small[k], len[k]), ATTN_OK);
        assert_int_equal(e2e_truncate(&b, &in_large[k], len[k]), ATTN_OK);
    }
    grow(which, n_which, n);
    uint32_t k = below(N_SEQS);
    if (below(5) == 0 && len[k] > 0)
        fork_of(k);
    else
        same_bytes(&in_small[k], &in_large[k], len[k]);
    e2e_forget(&a);
    e2e_forget(&b);
}

static void same_bytes_as_a_pool_that_holds_all(void **state)
{
    static const char *const flags[] = {"--cache.idle_memory", "4M", NULL};
    (void)state;
    begin(flags);
    for (uint32_t round = 0; round < n_rounds; round++)
        round_of();
    for (uint32_t k = 0; k < N_SEQS; k++)
        same_bytes(&in_small[k], &in_large[k], len[k]);
    end();
}

/* Without it the same rounds run out of blocks: the test above is about something. */
static void without_idle_memory_blocks_run_out(void **state)
{
    static const char *const flags[] = {NULL};
    (void)state;
    begin(flags);
    uint32_t pos = 0;
    attn_status st = ATTN_OK;
    for (; st == ATTN_OK && pos < MAX_TOKENS; pos += E2E_BLOCK_TOKENS)
        for (uint32_t k = 0; k < N_SEQS && st == ATTN_OK; k++)
            st = e2e_item(&a, &in_small[k], 0, pos, E2E_BLOCK_TOKENS);
    assert_int_equal(st, ATTN_ENOBLOCKS);
    end();
}

static void a_successor_serves_what_was_in_idle_memory(void **state)
{
    static const char *const flags[] = {"--supervise", "--cache.idle_memory", "4M", NULL};
    (void)state;
    begin(flags);
    for (uint32_t round = 0; round < n_rounds / 2; round++)
        round_of();
    for (uint32_t kill = 0; kill < 4; kill++) {
        e2e_kill_child(&small);
        e2e_disconnect(&a);
        uint32_t pool = a.pool;
        e2e_connect(&a, &small);
        a.pool = pool;
        for (uint32_t k = 0; k < N_SEQS; k++) {
            uint32_t lens[E2E_LAYERS];
            assert_int_equal(e2e_adopt(&a, &in_small[k], lens), ATTN_OK);
            for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
                assert_int_equal(lens[layer], len[k]);
            same_bytes(&in_small[k], &in_large[k], len[k]);
        }
        for (uint32_t round = 0; round < 10; round++)
            round_of();
    }
    end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bytes_as_a_pool_that_holds_all),
        cmocka_unit_test(without_idle_memory_blocks_run_out),
        cmocka_unit_test(a_successor_serves_what_was_in_idle_memory),
    };
    if (argc > 1)
        n_rounds = (uint32_t)strtoul(argv[1], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
