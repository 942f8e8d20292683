/* e2e_host_memory.c: a daemon whose pool is far too small, with cache.host_memory, or with little
 * of it and a file behind, answers the same bytes as one whose pool holds everything, whatever is
 * opened and in which order. The small one has a random mix of sequences open at once and steps
 * them in one message, the large one computes each alone: pools are batch invariant.
 *
 *   e2e_host_memory [ROUNDS]     120 by itself, fewer with sanitizers
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"
#include "tests/random.h"

enum { SMALL_BLOCKS = 24, LARGE_BLOCKS = 2000, N_PROMPTS = 16, MAX_BLOCKS = 6, MAX_MIX = 3 };

#ifndef ROUNDS
#define ROUNDS 120
#endif
static uint32_t n_rounds = ROUNDS;
static uint64_t seed = 3;

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

/* Some prompts have their first block in common. */
static uint32_t stream_of(uint32_t prompt, uint32_t token)
{
    return token < E2E_BLOCK_TOKENS ? prompt % 4 : 100 + prompt;
}

/* Opens a sequence of the prompt; how many tokens it begins with. */
static uint32_t open_prompt(struct e2e_client *c, struct e2e_seq *s, uint64_t name, uint32_t prompt,
                            uint32_t n)
{
    Attnd__Open o = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint32_t ids[MAX_BLOCKS * E2E_BLOCK_TOKENS];
    s->name = name;
    for (uint32_t i = 0; i < E2E_MAX_TOKENS; i++)
        s->stream[i] = stream_of(prompt, i);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = s->stream[i] * 1000 + i;
    o.pool = c->pool;
    o.seq = name;
    o.n_tokens = n;
    o.tokens = ids;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &o;
    const Attnd__Reply *r = e2e_call(c, &h);
    if (r->status != ATTN_OK)
        fail_msg("open: %s", r->message);
    s->epoch = r->seq->epoch;
    return r->seq->cached_tokens;
}

/* Sequences that are open at once. */
struct mix {
    uint32_t n_seqs, prompt[MAX_MIX], n_tokens[MAX_MIX];
    struct e2e_seq seq[MAX_MIX];
    uint8_t *bytes[MAX_MIX]; /* of all their outputs */
    size_t n_bytes[MAX_MIX];
};

/* Opens those of [first, past), computes what is missing of their prompts in one message per layer,
 * attends all of them, closes them; how many tokens they began with. */
static uint32_t run(struct e2e_client *c, struct mix *m, uint64_t name, uint32_t first,
                    uint32_t past)
{
    struct e2e_item items[MAX_MIX];
    uint32_t n_cached = 0;
    for (uint32_t i = first; i < past; i++) {
        uint32_t from = open_prompt(c, &m->seq[i], name + i, m->prompt[i], m->n_tokens[i]);
        items[i] = (struct e2e_item){&m->seq[i], from, m->n_tokens[i] - from};
        n_cached += from;
        m->bytes[i] = NULL;
        m->n_bytes[i] = 0;
    }
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        e2e_step(c, layer, items + first, past - first);
        for (uint32_t i = first; i < past; i++) {
            size_t bytes;
            void *part = e2e_read_back(c, &m->seq[i], layer, m->n_tokens[i], &bytes);
            m->bytes[i] = realloc(m->bytes[i], m->n_bytes[i] + bytes);
            assert_non_null(m->bytes[i]);
            memcpy(m->bytes[i] + m->n_bytes[i], part, bytes);
            m->n_bytes[i] += bytes;
            free(part);
        }
    }
    for (uint32_t i = first; i < past; i++)
        assert_int_equal(e2e_close_seq(c, &m->seq[i]), ATTN_OK);
    e2e_forget(c);
    return n_cached;
}

/* How many tokens each begins with, from its cache. */
static void same_bytes(const char *const *with_tiers, uint64_t *out_small, uint64_t *out_large)
{
    static const char *const plain[] = {"--device.kv_memory", "64M", NULL};
    static struct e2e small, large;
    static struct mix in_small, in_large;
    struct e2e_client a, b;
    uint64_t n_from_small = 0, n_from_large = 0;
    e2e_start(&small, with_tiers);
    e2e_start(&large, plain);
    e2e_connect(&a, &small);
    e2e_connect(&b, &large);
    e2e_make_pool(&a, ATTN_F32, SMALL_BLOCKS);
    e2e_make_pool(&b, ATTN_F32, LARGE_BLOCKS);
    for (uint32_t round = 1; round <= n_rounds; round++) {
        in_large.n_seqs = 1 + below(MAX_MIX);
        for (uint32_t i = 0; i < in_large.n_seqs; i++) {
            in_large.prompt[i] = below(N_PROMPTS);
            in_large.n_tokens[i] = 1 + below(MAX_BLOCKS * E2E_BLOCK_TOKENS);
        }
        in_small = in_large;
        uint64_t name = (uint64_t)round * MAX_MIX;
        n_from_small += run(&a, &in_small, name, 0, in_small.n_seqs);
        for (uint32_t i = 0; i < in_large.n_seqs; i++) {
            n_from_large += run(&b, &in_large, name, i, i + 1);
            assert_int_equal(in_small.n_bytes[i], in_large.n_bytes[i]);
            assert_memory_equal(in_small.bytes[i], in_large.bytes[i], in_large.n_bytes[i]);
            free(in_small.bytes[i]);
            free(in_large.bytes[i]);
        }
    }
    print_message("%u mixes: %llu tokens from the cache of the small pool, %llu of the large\n",
                  n_rounds, (unsigned long long)n_from_small, (unsigned long long)n_from_large);
    assert_true(n_from_small > 0);
    *out_small = n_from_small;
    *out_large = n_from_large;
    e2e_disconnect(&a);
    e2e_disconnect(&b);
    e2e_stop(&small);
    e2e_stop(&large);
}

static void same_bytes_as_a_large_pool(void **state)
{
    static const char *const with_host[] = {"--cache.host_memory", "8M", NULL};
    uint64_t n_small, n_large;
    (void)state;
    same_bytes(with_host, &n_small, &n_large);
    assert_true(n_small >
                n_large / 2); /* those of a mix are opened before any of them is computed */
}

/* The file may be behind, and then fewer come back. */
static void same_bytes_with_a_file(void **state)
{
    static const char *const with_file[] = {"--cache.host_memory",
                                            "256K",
                                            "--cache.disk_path",
                                            "/tmp",
                                            "--cache.disk_size",
                                            "16M",
                                            NULL};
    uint64_t n_small, n_large;
    (void)state;
    same_bytes(with_file, &n_small, &n_large);
    assert_true(n_small <= n_large);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_bytes_as_a_large_pool),
                                       cmocka_unit_test(same_bytes_with_a_file)};
    if (argc > 1)
        n_rounds = (uint32_t)strtoul(argv[1], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
