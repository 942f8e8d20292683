/* e2e_resize.c: a pool is given fewer blocks and more while steps of its sequences go on: every
 * output is compared with the reference, before and after blocks have moved, before and after a
 * kill; and what is refused, which changes nothing. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"
#include "tests/random.h"

enum { N = 6, BLOCKS = 64, ROUNDS = 60, MOST_TOKENS = 100, MOST_NEW = 5 };

static struct e2e d;
static struct e2e_client c;
static struct e2e_seq seq[N + 1];
static uint32_t len[N + 1];
static uint64_t next_name, random_state = 20260211;

static uint32_t below(uint32_t n)
{
    return random_below(&random_state, n);
}

static uint64_t send_resize(const char *name, uint32_t n_blocks)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolResize b = ATTND__POOL_RESIZE__INIT;
    b.name = (char *)(uintptr_t)name;
    b.n_blocks = n_blocks;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_RESIZE;
    h.pool_resize = &b;
    return e2e_send(&c, &h, NULL, 0);
}

/* Cards move sequences between them by themselves, and then it is refused for a moment. */
static const Attnd__Reply *await_resize(uint64_t id, const char *name, uint32_t n_blocks)
{
    const Attnd__Reply *r = e2e_await(&c, id)->header;
    while (r->status == ATTN_EOVERLOAD && e2e_is_spread())
        r = e2e_await(&c, send_resize(name, n_blocks))->header;
    return r;
}

static const Attnd__Reply *resize(const char *name, uint32_t n_blocks)
{
    return await_resize(send_resize(name, n_blocks), name, n_blocks);
}

static void must_resize(uint32_t n_blocks)
{
    const Attnd__Reply *r = resize("e2e", n_blocks);
    if (r->status != ATTN_OK)
        fail_msg("%u blocks: %s: %s", n_blocks, attn_status_name((attn_status)r->status),
                 r->message);
    assert_int_equal(r->pool->pool, c.pool);
    assert_int_equal(r->pool->spec->n_blocks, n_blocks);
}

static const Attnd__PoolReply *describe(void)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolDescribe b = ATTND__POOL_DESCRIBE__INIT;
    b.name = "e2e";
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_DESCRIBE;
    h.pool_describe = &b;
    const Attnd__Reply *r = e2e_call(&c, &h);
    assert_int_equal(r->status, ATTN_OK);
    return r->pool;
}

static uint32_t blocks_of(uint32_t tokens)
{
    return (tokens + E2E_BLOCK_TOKENS - 1) / E2E_BLOCK_TOKENS;
}

/* Blocks that all sequences have after a round, at most; of one card, if all are on one. */
static uint32_t n_wanted(void)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < N; i++)
        n += blocks_of(len[i] + MOST_NEW) + 1; /* one that is shared is copied */
    return n;
}

static void begin(bool is_kept)
{
    const char *const kept[] = {"--supervise", "--device.kv_memory", "4M", NULL};
    e2e_start(&d, is_kept ? kept : kept + 1);
    if (is_kept)
        e2e_connect_badly(&c, &d, 100);
    else
        e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_F32, BLOCKS);
    next_name = 0;
}

static void end(void)
{
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void open_at(uint32_t i)
{
    next_name++;
    assert_int_equal(e2e_open_seq(&c, &seq[i], next_name, (uint32_t)next_name), ATTN_OK);
    len[i] = 0;
}

/* One sequence ends and another begins, as a fork or empty. */
static void replace_one(void)
{
    uint32_t i = below(N), src = (i + 1 + below(N - 1)) % N;
    assert_int_equal(e2e_close_seq(&c, &seq[i]), ATTN_OK);
    if (below(2) == 0) {
        open_at(i);
        return;
    }
    uint32_t n = len[src] == 0 ? 0 : below(len[src] + 1);
    ++next_name;
    assert_int_equal(e2e_fork(&c, &seq[src], &seq[i], next_name, n, (uint32_t)next_name), ATTN_OK);
    len[i] = n;
}

/* The daemon dies before it, in the middle of it, or behind it; without an answer it is asked
 * again: the same request. What is tested is an instant that nothing tells: this sleep stays. */
static void resize_and_die(uint32_t n_blocks)
{
    struct timespec t = {.tv_nsec = (long)below(4) * below(300) * 1000};
    uint64_t id = send_resize("e2e", n_blocks);
    nanosleep(&t, NULL);
    e2e_kill_child(&d);
    const Attnd__Reply *r = await_resize(id, "e2e", n_blocks);
    if (r->status != ATTN_OK)
        fail_msg("%u blocks: %s: %s", n_blocks, attn_status_name((attn_status)r->status),
                 r->message);
    assert_int_equal(describe()->spec->n_blocks, n_blocks);
}

/* A step of every sequence and layer, one request behind the other, and among them the pool's
 * resize. */
static void round_with(uint32_t n_blocks)
{
    uint64_t id[E2E_LAYERS][N], resized = 0;
    struct e2e_item it[N];
    uint32_t at = below(E2E_LAYERS * N);
    for (uint32_t i = 0; i < N; i++)
        it[i] = (struct e2e_item){&seq[i], len[i], 1 + below(MOST_NEW)};
    for (uint32_t k = 0; k < E2E_LAYERS * N; k++) {
        if (k == at)
            resized = send_resize("e2e", n_blocks);
        id[k / N][k % N] = e2e_send_step(&c, k / N, E2E_BOTH, &it[k % N], 1, 0);
    }
    const Attnd__Reply *r = await_resize(resized, "e2e", n_blocks);
    if (r->status != ATTN_OK)
        fail_msg("%u blocks, %u wanted: %s: %s", n_blocks, n_wanted(),
                 attn_status_name((attn_status)r->status), r->message);
    for (uint32_t k = 0; k < E2E_LAYERS * N; k++)
        e2e_check_step(e2e_await(&c, id[k / N][k % N]), k / N, E2E_BOTH, &it[k % N], 1);
    for (uint32_t i = 0; i < N; i++)
        len[i] += it[i].n_tokens;
    e2e_forget(&c);
}

/* Sequences get blocks at the pool's end, while another has those before it. */
static void go_to_the_end(void)
{
    must_resize(BLOCKS);
    next_name++;
    assert_int_equal(e2e_open_seq(&c, &seq[N], next_name, 0), ATTN_OK);
    struct e2e_item it = {&seq[N], 0, (BLOCKS - n_wanted()) * E2E_BLOCK_TOKENS};
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        assert_int_equal(e2e_await(&c, e2e_send_zeros(&c, layer, &it, 0))->header->status, ATTN_OK);
    round_with(BLOCKS);
    assert_int_equal(e2e_close_seq(&c, &seq[N]), ATTN_OK);
}

static void run_rounds(bool has_kills)
{
    for (uint32_t i = 0; i < N; i++)
        open_at(i);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < N; i++)
            if (len[i] > MOST_TOKENS) {
                len[i] = below(len[i]);
                assert_int_equal(e2e_truncate(&c, &seq[i], len[i]), ATTN_OK);
            }
        if (below(3) == 0)
            replace_one();
        if (below(3) == 0)
            go_to_the_end();
        uint32_t least = n_wanted();
        assert_true(least < BLOCKS);
        if (has_kills && round % 3 == 1)
            resize_and_die(below(2) == 0 ? BLOCKS : least + below(BLOCKS - least));
        round_with(below(3) == 0 ? BLOCKS : least + below(BLOCKS - least));
        if (has_kills && round % 10 == 9) {
            uint32_t n_blocks = describe()->spec->n_blocks;
            e2e_kill_child(&d);
            assert_int_equal(describe()->spec->n_blocks, n_blocks);
        }
    }
}

/* Blocks, as the log says. */
static uint32_t n_moved(void)
{
    char line[1024];
    uint32_t n, sum = 0;
    FILE *f = fopen(d.log, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f) != NULL) {
        const char *at = strstr(line, ", and ");
        if (at != NULL && sscanf(at, ", and %" SCNu32 " were moved", &n) == 1)
            sum += n;
    }
    fclose(f);
    return sum;
}

static void outputs_are_right_while_the_pool_shrinks_and_grows(void **state)
{
    (void)state;
    begin(false);
    run_rounds(false);
    assert_true(n_moved() > (e2e_is_spread() ? 0 : ROUNDS / 4));
    end();
}

static void and_so_they_are_for_its_successors(void **state)
{
    (void)state;
    begin(true);
    run_rounds(true);
    assert_true(e2e_log_has(&d, "kept: "));
    assert_true(n_moved() > 0); /* one that is killed has moved blocks without a word */
    end();
}

static void assert_refused(const Attnd__Reply *r, attn_status st, const char *says)
{
    if (r->status != st || strstr(r->message, says) == NULL)
        fail_msg("%s: \"%s\", not %s: \"%s\"", attn_status_name((attn_status)r->status), r->message,
                 attn_status_name(st), says);
    uint32_t n_blocks = describe()->spec->n_blocks;
    assert_int_equal(n_blocks, BLOCKS);
}

static void what_cannot_be_is_refused_and_changes_nothing(void **state)
{
    char says[128];
    (void)state;
    begin(false);
    open_at(0);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        assert_int_equal(e2e_item(&c, &seq[0], layer, 0, 80), ATTN_OK);
    uint32_t n_free = describe()->n_free_blocks;
    assert_refused(resize("e2e", 0), ATTN_EINVAL, "n_blocks is 0");
    assert_refused(resize("no such", 8), ATTN_ENOTFOUND, "no pool is named \"no such\"");
    assert_refused(resize("e2e", 4), ATTN_ENOBLOCKS,
                   "n_blocks is 4, 5 blocks are in use and 0 pinned");
    snprintf(says, sizeof says, "n_blocks is %u, pool \"e2e\" has room for ", 1u << 30);
    assert_refused(resize("e2e", 1u << 30), ATTN_ENOMEM, says);
    assert_int_equal(describe()->n_free_blocks, n_free);
    must_resize(5);
    must_resize(5); /* by another request: it has as many */
    assert_int_equal(e2e_item(&c, &seq[0], 0, 80, 1), ATTN_ENOBLOCKS);
    must_resize(BLOCKS);
    struct e2e_item it = {&seq[0], 80, 40};
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        e2e_step(&c, layer, &it, 1);
    end();
}

/* Some cards could do it and one can't, whichever it is: those that have, undo it, although the
 * memory that they gave back is not clear. */
static void what_one_card_refuses_changes_no_other(void **state)
{
    enum { LONGEST = 80 };
    (void)state;
    begin(false);
    open_at(0);
    open_at(1); /* on the other card, if there is one */
    for (uint32_t i = 0; i < 2; i++) {
        struct e2e_item whole = {&seq[i], 0, LONGEST}, next = {&seq[i], LONGEST, 1};
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            e2e_step(&c, layer, &whole, 1);
        assert_refused(resize("e2e", 4), ATTN_ENOBLOCKS, "n_blocks is 4, ");
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            e2e_step(&c, layer, &next, 1);
        assert_int_equal(e2e_truncate(&c, &seq[i], 1), ATTN_OK);
    }
    end();
}

/* A sequence may be longer than the pool was when it was made. */
static void a_small_pool_grows_for_long_sequences(void **state)
{
    (void)state;
    const char *const kept[] = {"--supervise", NULL};
    e2e_start(&d, kept);
    e2e_connect_badly(&c, &d, 1000);
    e2e_make_pool(&c, ATTN_F32, 2);
    next_name = 0;
    open_at(0);
    struct e2e_item it = {&seq[0], 0, 32};
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        e2e_step(&c, layer, &it, 1);
    must_resize(40);
    it = (struct e2e_item){&seq[0], 32, 600};
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        e2e_step(&c, layer, &it, 1);
    e2e_kill_child(&d);
    it = (struct e2e_item){&seq[0], 632, 7};
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        e2e_step(&c, layer, &it, 1);
    uint32_t was = c.pool;
    e2e_make_pool(&c, ATTN_F32, 2); /* what it was made with, and what it has: the same pool */
    assert_int_equal(c.pool, was);
    e2e_make_pool(&c, ATTN_F32, 40);
    assert_int_equal(c.pool, was);
    assert_int_equal(describe()->spec->n_blocks, 40);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(outputs_are_right_while_the_pool_shrinks_and_grows),
        cmocka_unit_test(and_so_they_are_for_its_successors),
        cmocka_unit_test(what_cannot_be_is_refused_and_changes_nothing),
        cmocka_unit_test(what_one_card_refuses_changes_no_other),
        cmocka_unit_test(a_small_pool_grows_for_long_sequences),
    };
    return cmocka_run_group_tests_name("resize", tests, NULL, NULL);
}
