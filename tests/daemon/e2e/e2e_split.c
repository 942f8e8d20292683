/* e2e_split.c: sequences that are split over the cards (cpu engines) of one daemon: what they
 * compute, what happens when a card fails, is lost, or the process is killed. E2E_SPLIT says how
 * they are split; the other e2e tests run on split pools, too (e2e.h).
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"

enum { N_BLOCKS = 64, N_SEQS = 5, LEN = 70 };

static struct e2e d;
static struct e2e_client c;
static struct e2e_seq s[8];

static attn_split kind(void)
{
    attn_split how = ATTN_SPLIT_HEADS;
    if (getenv("E2E_SPLIT") != NULL)
        assert_true(attn_split_parse(getenv("E2E_SPLIT"), &how));
    return how;
}

static void start(const char *index, const char *const *more)
{
    const char *flags[16] = {"--device.index", index, "--stats.canary", "1"};
    int n = 4;
    for (; more != NULL && *more != NULL; more++)
        flags[n++] = *more;
    flags[n] = NULL;
    setenv("E2E_SPLIT", attn_split_name(kind()), 1);
    e2e_start(&d, flags);
    e2e_connect(&c, &d);
}

static void begin(const char *index, const char *const *more)
{
    start(index, more);
    e2e_make_pool(&c, ATTN_BF16, N_BLOCKS);
}

static void end(void)
{
    e2e_disconnect(&c);
    e2e_stop(&d);
}

/* The statuses of a step of all sequences from pos on. */
static const struct wire_reply *step_all(uint32_t layer, uint32_t pos, uint32_t n_tokens)
{
    struct e2e_item it[N_SEQS];
    for (uint32_t i = 0; i < N_SEQS; i++)
        it[i] = (struct e2e_item){&s[i], pos, n_tokens};
    const struct wire_reply *r =
        e2e_await(&c, e2e_send_step(&c, layer, E2E_BOTH | WIRE_STEP_LSE, it, N_SEQS, 0));
    if (r->header->status == ATTN_OK)
        e2e_check_step(r, layer, E2E_BOTH | WIRE_STEP_LSE, it, N_SEQS);
    return r;
}

/* Bytes of the replies to a prompt, in pieces, and some tokens behind it. */
static uint8_t *fill(size_t *out_bytes)
{
    static const uint32_t pieces[] = {33, 1, 5, 25, 1, 2, 3}; /* LEN together */
    uint8_t *all = NULL;
    *out_bytes = 0;
    for (uint32_t i = 0; i < N_SEQS; i++)
        assert_int_equal(e2e_open_seq(&c, &s[i], 1 + i, 7 * i), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        for (uint32_t i = 0, pos = 0; pos < LEN; pos += pieces[i++]) {
            const struct wire_reply *r = step_all(layer, pos, pieces[i]);
            assert_int_equal(r->header->status, ATTN_OK);
            all = realloc(all, *out_bytes + r->payload_bytes);
            memcpy(all + *out_bytes, r->payload, r->payload_bytes);
            *out_bytes += r->payload_bytes;
        }
    }
    return all;
}

static void fill_only(void)
{
    size_t n;
    free(fill(&n));
}

static uint64_t counter(const char *name)
{
    Attnd__Stats b = ATTND__STATS__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    char key[64];
    unsigned long long n = 0;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &b;
    const Attnd__Reply *r = e2e_call(&c, &h);
    assert_int_equal(r->status, ATTN_OK);
    snprintf(key, sizeof key, "\"%s\": ", name);
    const char *at = strstr(r->stats->json, key);
    if (at == NULL) {
        snprintf(key, sizeof key, "\"%s\":", name);
        at = strstr(r->stats->json, key);
    }
    if (at == NULL)
        fail_msg("no %s in %s", name, r->stats->json);
    assert_int_equal(sscanf(at + strlen(key), "%llu", &n), 1);
    return n;
}

static void a_split_pool_computes_what_one_card_does(void **state)
{
    (void)state;
    static const char *const indices[] = {"0", "0,1"};
    uint8_t *bytes[2];
    size_t n[2];
    for (uint32_t i = 0; i < 2; i++) {
        begin(indices[i], NULL);
        bytes[i] = fill(&n[i]);
        assert_int_equal(e2e_log_has(&d, "MiB, split "), i);
        /* every part has been computed by its card, and outputs are right to a second look, too */
        while (counter("canary_items_total") == 0)
            assert_int_equal(step_all(0, 0, LEN)->header->status, ATTN_OK);
        assert_int_equal(counter("canary_wrong_total"), 0);
        end();
    }
    assert_int_equal(n[0], n[1]);
    if (kind() == ATTN_SPLIT_HEADS)
        assert_memory_equal(bytes[0], bytes[1], n[0]); /* it is batch invariant */
    free(bytes[0]);
    free(bytes[1]);
}

/* --- how a pool lies -------------------------------------------------------------------------- */

struct shape {
    uint32_t q_heads, kv_heads, block_tokens, n_blocks;
    attn_split split;
    uint32_t window, branch_rate;
};

static const Attnd__Reply *make(const char *name, struct shape shape)
{
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate b = ATTND__POOL_CREATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__LayerSpec layer = ATTND__LAYER_SPEC__INIT, *layers = &layer;
    uint32_t segments[] = {64, 64}, rates[] = {1, shape.branch_rate};
    layer.window_tokens = shape.window;
    layer.n_branch_segment_tokens = layer.n_branch_rates = shape.branch_rate > 0 ? 2 : 0;
    layer.branch_segment_tokens = segments;
    layer.branch_rates = rates;
    spec.name = (char *)(uintptr_t)name;
    spec.num_layers = 1;
    spec.num_q_heads = shape.q_heads;
    spec.num_kv_heads = shape.kv_heads;
    spec.head_dim_k = 128;
    spec.block_tokens = shape.block_tokens;
    spec.n_blocks = shape.n_blocks;
    spec.q_dtype = ATTND__DTYPE__BF16;
    spec.split = (Attnd__Split)shape.split;
    spec.n_layers = 1;
    spec.layers = &layers;
    b.spec = &spec;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &b;
    return e2e_call(&c, &h);
}

static void assert_made(const char *name, struct shape shape, attn_split how)
{
    const Attnd__Reply *r = make(name, shape);
    if (r->status != ATTN_OK)
        fail_msg("%s: %s", name, r->message);
    assert_int_equal(r->pool->spec->split, how);
}

static void assert_refused(struct shape shape, attn_status st, const char *says)
{
    const Attnd__Reply *r = make("refused", shape);
    assert_int_equal(r->status, st);
    if (strstr(r->message, says) == NULL)
        fail_msg("\"%s\" is not in \"%s\"", says, r->message);
}

static void a_pool_that_does_not_fit_a_card_is_split_by_itself(void **state)
{
    (void)state;
    start("0,1", NULL); /* of 64 MiB each */
    /* 4 heads: 32 KiB for a block of 16 tokens, 48 MiB for 1536 */
    assert_made("fits", (struct shape){8, 4, 16, 250, ATTN_SPLIT_AUTO, 0, 0}, ATTN_SPLIT_WHOLE);
    assert_made("heads", (struct shape){8, 4, 16, 384, ATTN_SPLIT_AUTO, 0, 0}, ATTN_SPLIT_HEADS);
    /* the same again is the same pool, whether it says how or not; another is another */
    assert_made("heads", (struct shape){8, 4, 16, 384, ATTN_SPLIT_AUTO, 0, 0}, ATTN_SPLIT_HEADS);
    assert_made("heads", (struct shape){8, 4, 16, 0, ATTN_SPLIT_HEADS, 0, 0}, ATTN_SPLIT_HEADS);
    const Attnd__Reply *r = make("heads", (struct shape){8, 4, 16, 0, ATTN_SPLIT_WHOLE, 0, 0});
    assert_int_equal(r->status, ATTN_EEXIST);
    assert_non_null(strstr(r->message, "exists with split heads, asked for whole"));
    end();
}

static void a_window_split_by_tokens_is_of_whole_blocks(void **state)
{
    (void)state;
    start("0,1", NULL);
    assert_refused(
        (struct shape){4, 4, 32, 8, ATTN_SPLIT_TOKENS, 48, 0}, ATTN_ENOTSUP,
        "split tokens: layers[0].window_tokens is 48, must be a multiple of block_tokens, 32");
    assert_made("window", (struct shape){4, 4, 32, 8, ATTN_SPLIT_TOKENS, 64, 0}, ATTN_SPLIT_TOKENS);
    end();
}

static void what_cannot_be_split_is_refused_by_name(void **state)
{
    (void)state;
    if (e2e_most_cards() < 3)
        skip();
    start("0,1,2", NULL);
    assert_refused((struct shape){2, 2, 16, 8, ATTN_SPLIT_HEADS, 0, 0}, ATTN_ENOTSUP,
                   "split heads: num_kv_heads is 2, of 3 cards");
    assert_refused((struct shape){6, 6, 16, 8, (attn_split)4, 0, 0}, ATTN_EINVAL, "split is 4");
    assert_refused((struct shape){4, 4, 64, 8, ATTN_SPLIT_TOKENS, 0, 0}, ATTN_ENOTSUP,
                   "split tokens: of 2, 4 or 8 cards, the daemon has 3");
    assert_made("uneven", (struct shape){8, 4, 16, 8, ATTN_SPLIT_HEADS, 0, 0}, ATTN_SPLIT_HEADS);
    assert_made("dilated", (struct shape){6, 6, 16, 8, ATTN_SPLIT_HEADS, 0, 4}, ATTN_SPLIT_HEADS);
    end();
}

/* --- failures --------------------------------------------------------------------------------- */

/* What the cards have of a batch is not at once on all: one fails, the step fails, and repeats. */
static void a_shard_that_fails_fails_the_step_which_may_be_repeated(void **state)
{
    (void)state;
    static const char *const faults[] = {"--danger-inject-faults", "--backend",
                                         "cpu+faults:fail@2,fail@5,fail@6", NULL};
    uint32_t n_failed = 0;
    begin("0,1", faults);
    for (uint32_t i = 0; i < N_SEQS; i++)
        assert_int_equal(e2e_open_seq(&c, &s[i], 1 + i, 7 * i), ATTN_OK);
    for (uint32_t t = 0; t < 4; t++) {
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
            const struct wire_reply *r;
            while ((r = step_all(layer, 20 * t, 20))->header->status != ATTN_OK) {
                assert_int_equal(r->header->status, ATTN_EINTERNAL);
                assert_non_null(strstr(r->header->message, "injected fault"));
                n_failed++;
            }
        }
    }
    assert_int_equal(n_failed, 3);
    /* all of it is there, on all cards */
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        assert_int_equal(step_all(layer, 0, 80)->header->status, ATTN_OK);
    end();
}

/* Begins on two cards, of which the second one misbehaves. A lost device is not closed: its threads
 * are there when the process ends. */
static void begin_faulty(const char *const *faults)
{
    char sanitizer[256], *given = getenv("TSAN_OPTIONS");
    given = strdup(given == NULL ? "" : given);
    snprintf(sanitizer, sizeof sanitizer, "%s report_thread_leaks=0", given);
    setenv("TSAN_OPTIONS", sanitizer, 1);
    begin("0,1", faults);
    setenv("TSAN_OPTIONS", given, 1);
    free(given);
}

static void a_lost_card_takes_what_is_split_over_it(void **state)
{
    (void)state;
    static const char *const faults[] = {"--danger-inject-faults", "--backend", "cpu+faults:lose@4",
                                         NULL};
    begin_faulty(faults);
    for (uint32_t i = 0; i < N_SEQS; i++)
        assert_int_equal(e2e_open_seq(&c, &s[i], 1 + i, 7 * i), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        assert_int_equal(step_all(layer, 0, 20)->header->status, ATTN_OK);
    assert_int_equal(step_all(0, 20, 1)->header->status, ATTN_EDEVICE);
    e2e_await_log(&d, "card 1 is lost; the others go on");
    e2e_await_log(&d, "5 sequences that are split over it");
    assert_int_equal(step_all(1, 20, 1)->header->status, ATTN_ENOTFOUND);
    assert_int_equal(e2e_open_seq(&c, &s[6], 70, 1), ATTN_EDEVICE);
    /* the other card goes on with pools of its own */
    uint32_t split_pool = c.pool;
    assert_refused((struct shape){4, 4, 16, 8, kind(), 0, 0}, ATTN_EDEVICE, "a card is lost");
    const Attnd__Reply *r = make("whole", (struct shape){4, 4, 16, 8, ATTN_SPLIT_WHOLE, 0, 0});
    assert_int_equal(r->status, ATTN_OK);
    c.pool = r->pool->pool;
    assert_int_equal(e2e_open_seq(&c, &s[6], 71, 1), ATTN_OK);
    assert_int_equal(e2e_close_seq(&c, &s[6]), ATTN_OK);
    c.pool = split_pool;
    end();
}

static void a_successor_goes_on_with_all_shards(void **state)
{
    (void)state;
    static const char *const supervise[] = {"--supervise", NULL};
    uint32_t len[E2E_LAYERS];
    begin("0,1", supervise);
    fill_only();
    size_t n[N_SEQS], now_bytes;
    void *before[N_SEQS], *now;
    for (uint32_t i = 0; i < N_SEQS; i++)
        before[i] = e2e_read_back(&c, &s[i], 1, LEN, &n[i]);
    e2e_disconnect(&c);
    e2e_kill_child(&d);
    e2e_await_log(&d, "kept: 5 sequences of 350 tokens, 1 pools, 1 sessions; dropped: 0");
    e2e_connect(&c, &d);
    for (uint32_t i = 0; i < N_SEQS; i++) {
        assert_int_equal(e2e_adopt(&c, &s[i], len), ATTN_OK);
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            assert_int_equal(len[layer], LEN);
        now = e2e_read_back(&c, &s[i], 1, LEN, &now_bytes);
        assert_int_equal(now_bytes, n[i]);
        assert_memory_equal(now, before[i], now_bytes);
        free(now);
        free(before[i]);
    }
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        assert_int_equal(step_all(layer, LEN, 3)->header->status, ATTN_OK);
    end();
}

/* The card's part was not kept: of no use are those of the other card. */
static void a_successor_without_a_cards_shard_begins_without_the_sequences(void **state)
{
    (void)state;
    static const char *const flags[] = {"--supervise", "--danger-inject-faults", "--backend",
                                        "cpu+faults:lose@4", NULL};
    uint32_t len[E2E_LAYERS];
    begin("0,1", flags);
    for (uint32_t i = 0; i < N_SEQS; i++)
        assert_int_equal(e2e_open_seq(&c, &s[i], 1 + i, 7 * i), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        assert_int_equal(step_all(layer, 0, 20)->header->status, ATTN_OK);
    uint32_t pool = c.pool;
    assert_int_equal(step_all(0, 20, 1)->header->status, ATTN_EDEVICE);
    e2e_await_log(&d, "card 1 is lost; the others go on");
    e2e_await_log(&d, "5 sequences that are split over it");
    e2e_disconnect(&c);
    e2e_kill_child(&d);
    e2e_await_log(&d, "kept: 0 sequences of 0 tokens, 1 pools, 1 sessions; dropped: 0");
    e2e_connect(&c, &d);
    c.pool = pool; /* is there, and whole again */
    assert_int_equal(e2e_adopt(&c, &s[0], len), ATTN_ENOTFOUND);
    assert_int_equal(e2e_open_seq(&c, &s[0], 1, 1), ATTN_OK);
    e2e_step(&c, 0, &(struct e2e_item){&s[0], 0, 20}, 1);
    end();
}

/* The batch has parts on both cards, of which one never comes back: the primary can't go on
 * either. */
static void a_card_that_hangs_ends_the_process(void **state)
{
    (void)state;
    static const char *const flags[] = {"--supervise",
                                        "--danger-inject-faults",
                                        "--backend",
                                        "cpu+faults:hang@4",
                                        "--engine.stall_timeout",
                                        "300ms",
                                        NULL};
    begin_faulty(flags);
    for (uint32_t i = 0; i < N_SEQS; i++)
        assert_int_equal(e2e_open_seq(&c, &s[i], 1 + i, 7 * i), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        assert_int_equal(step_all(layer, 0, 20)->header->status, ATTN_OK);
    struct e2e_item it = {&s[0], 20, 1};
    c.may_fail = true; /* its connection ends */
    e2e_send_step(&c, 0, E2E_BOTH, &it, 1, 0);
    e2e_await_log(&d, "kept: 0 sequences of 0 tokens, 1 pools, 1 sessions; dropped: 0");
    assert_true(e2e_log_has(&d, "no batch has come back for"));
    e2e_disconnect(&c);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, N_BLOCKS);
    assert_int_equal(e2e_open_seq(&c, &s[6], 60, 1), ATTN_OK);
    e2e_step(&c, 0, &(struct e2e_item){&s[6], 0, 20}, 1);
    end();
}

static int kill_what_is_left(void **state)
{
    (void)state;
    if (d.pid != 0)
        kill(d.pid, SIGKILL);
    return 0;
}

int main(void)
{
#define TEST(name) cmocka_unit_test_teardown(name, kill_what_is_left)
    const struct CMUnitTest tests[] = {
        TEST(a_split_pool_computes_what_one_card_does),
        TEST(a_pool_that_does_not_fit_a_card_is_split_by_itself),
        TEST(a_window_split_by_tokens_is_of_whole_blocks),
        TEST(what_cannot_be_split_is_refused_by_name),
        TEST(a_shard_that_fails_fails_the_step_which_may_be_repeated),
        TEST(a_lost_card_takes_what_is_split_over_it),
        TEST(a_card_that_hangs_ends_the_process),
        TEST(a_successor_goes_on_with_all_shards),
        TEST(a_successor_without_a_cards_shard_begins_without_the_sequences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
