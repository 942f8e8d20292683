/* test_client_pin.c: memory of messages is page-locked: over shm as often as there is new memory,
 * over sockets as large messages need buffers; and released before it is unmapped or freed, not in
 * a forked child. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "clients/libattn/core/core.h"
#include "clients/libattn/lane/lane.h"
#include "tests/daemon/e2e/e2e.h"

enum { LONG_US = 300000000, DEVICE = 3, MAX_PINNED = 256 };

static struct e2e d;

/* A driver that counts. */
static struct {
    bool is_refusing;
    int n_pinned, n_unpinned, n_refused;
    uint64_t bytes; /* of the latest */
    struct {
        volatile uint8_t *p; /* NULL: none */
        uint64_t bytes;
    } at[MAX_PINNED];
} driver;

static uint64_t pinned_bytes(void)
{
    uint64_t sum = 0;
    for (int i = 0; i < MAX_PINNED; i++)
        sum += driver.at[i].bytes;
    return sum;
}

static bool is_pinned(const void *p)
{
    for (int i = 0; i < MAX_PINNED; i++)
        if ((uintptr_t)p - (uintptr_t)driver.at[i].p < driver.at[i].bytes)
            return true;
    return false;
}

static attn_status pin(void *p, uint64_t bytes, int *device, char *why, size_t why_bytes)
{
    assert_true(*device == -1 || *device == DEVICE);
    if (driver.is_refusing) {
        driver.n_refused++;
        snprintf(why, why_bytes, "a driver without pages");
        return ATTN_ENOTSUP;
    }
    *device = DEVICE;
    assert_true((uintptr_t)p % 4096 == 0 && bytes % 4096 == 0);
    for (uint64_t i = 0; i < bytes; i += 4096)
        assert_false(is_pinned((uint8_t *)p + i));
    assert_true(driver.n_pinned < MAX_PINNED);
    driver.at[driver.n_pinned].p = p;
    driver.at[driver.n_pinned].bytes = driver.bytes = bytes;
    driver.n_pinned++;
    return ATTN_OK;
}

static void unpin(void *p)
{
    int at = 0;
    while (at < MAX_PINNED && driver.at[at].p != p)
        at++;
    assert_true(at < MAX_PINNED);
    for (uint64_t i = 0; i < driver.at[at].bytes; i += 4096)
        (void)driver.at[at].p[i]; /* mapped still */
    driver.at[at].p = NULL;
    driver.at[at].bytes = 0;
    driver.n_unpinned++;
}

static const struct lane_memory_ops ops = {.abi = LANE_CUDA_ABI, .pin = pin, .unpin = unpin};

static int begin(void **state)
{
    (void)state;
    static const char *const flags[] = {"--device.kv_memory",
                                        "64M",
                                        "--cache.io_memory",
                                        "512M",
                                        "--cache.max_seq_tokens",
                                        "8192",
                                        NULL};
    memset(&driver, 0, sizeof driver);
    e2e_start(&d, flags);
    return 0;
}

static int end(void **state)
{
    (void)state;
    e2e_stop(&d);
    return 0;
}

static attn_client *open_client(const char *scheme, const char *where)
{
    char url[256];
    attn_client *c = NULL;
    snprintf(url, sizeof url, "%s%s", scheme, where);
    if (attn_client_open(url, NULL, LONG_US, &c) != ATTN_OK)
        fail_msg("%s", attn_last_error()->message);
    assert_int_equal(attn_client_ping(c, LONG_US, NULL), ATTN_OK);
    return c;
}

static attn_status pin_by(attn_client *c)
{
    char why[256] = "";
    attn_status st = c->t->ops->pin(c->t, &ops, why, sizeof why);
    assert_true((st == ATTN_OK) == (why[0] == '\0'));
    return st;
}

static void start_again(attn_client *c)
{
    e2e_signal(&d, SIGKILL);
    assert_int_equal(e2e_wait(&d), -SIGKILL);
    e2e_restart(&d, NULL);
    assert_int_equal(attn_client_ping(c, LONG_US, NULL), ATTN_ENOTFOUND); /* it is connected */
}

static void each_connections_memory_is_pinned_once(void **state)
{
    (void)state;
    attn_client *c = open_client("shm://", d.shm_path);
    assert_int_equal(pin_by(c), ATTN_OK);
    assert_int_equal(pin_by(c), ATTN_OK);
    assert_int_equal(driver.n_pinned, 1);
    assert_true(driver.bytes > 0 && driver.bytes % 4096 == 0);
    start_again(c);
    assert_int_equal(driver.n_pinned, 2);
    assert_int_equal(driver.n_unpinned, 1);
    attn_client_close(c);
    assert_int_equal(driver.n_unpinned, 2);
}

static void without_pages_it_works_as_before(void **state)
{
    (void)state;
    attn_client *c = open_client("shm://", d.shm_path);
    driver.is_refusing = true;
    assert_int_equal(pin_by(c), ATTN_ENOTSUP);
    driver.is_refusing = false;
    assert_int_equal(pin_by(c), ATTN_OK);
    driver.is_refusing = true;
    start_again(c);
    assert_int_equal(driver.n_refused, 2);
    assert_int_equal(driver.n_unpinned, 1);
    attn_client_close(c);
    assert_int_equal(driver.n_unpinned, 1);
}

static void a_forked_child_unpins_nothing(void **state)
{
    (void)state;
    attn_client *c = open_client("shm://", d.shm_path);
    assert_int_equal(pin_by(c), ATTN_OK);
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        attn_client_close(c);
        _exit(driver.n_unpinned == 0 ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    attn_client_close(c);
    assert_int_equal(driver.n_unpinned, 1);
}

/* ---- over sockets ---- */

enum {
    HEADS = 8,
    KV_HEADS = 2,
    DIM = 64,
    TOKENS = 512, /* of 3 KiB there and 2 KiB back */
    LARGEST = 4096, /* tokens of a sequence */
    N_AT_ONCE = 6,
};

/* A step in place of n tokens of a sequence of its own; each of them says 0.5 of all. */
struct large {
    attn_pool *pool;
    struct attn_item item;
    struct attn_in_place in_place;
    struct attn_step step;
    uint32_t n;
    bool is_pinned, was_pinned; /* the message's and the answer's memory */
    bool is_right;
};

static void fill(void *user, void *q, void *k, void *v)
{
    struct large *l = user;
    l->is_pinned = is_pinned(q) && is_pinned(k) && is_pinned((uint8_t *)v + 1);
    for (size_t i = 0; i < (size_t)l->n * HEADS * DIM; i++)
        ((float *)q)[i] = 0.25f;
    for (size_t i = 0; i < (size_t)l->n * KV_HEADS * DIM; i++)
        ((float *)k)[i] = ((float *)v)[i] = 0.5f;
}

static void take(void *user, const void *out, const float *lse, uint32_t n_failed)
{
    struct large *l = user;
    (void)lse;
    l->was_pinned = is_pinned(out);
    l->is_right = n_failed == 0;
    for (size_t i = 0; i < (size_t)l->n * HEADS * DIM; i++)
        l->is_right &= ((const float *)out)[i] > 0.4999f && ((const float *)out)[i] < 0.5001f;
}

static void open_large(struct large *l, attn_pool *pool, uint64_t id, uint32_t n)
{
    *l = (struct large){.pool = pool, .n = n, .item = {.n_tokens = n}};
    assert_int_equal(attn_seq_open(pool, id, LONG_US, &l->item.seq), ATTN_OK);
    l->in_place =
        (struct attn_in_place){.is_append = true, .is_attend = true, .fill = fill, .take = take};
    l->in_place.user = l;
    l->step = (struct attn_step){.struct_size = sizeof l->step,
                                 .n_items = 1,
                                 .items = &l->item,
                                 .timeout_us = LONG_US,
                                 .in_place = &l->in_place};
}

static attn_pool *open_pool(attn_client *c)
{
    attn_pool *pool = NULL;
    const struct attn_layer near = {.window_tokens = 16}; /* soon done */
    const struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                        .layer_struct_size = sizeof(struct attn_layer),
                                        .name = "pinned",
                                        .num_layers = 1,
                                        .num_q_heads = HEADS,
                                        .num_kv_heads = KV_HEADS,
                                        .head_dim_k = DIM,
                                        .n_blocks = (N_AT_ONCE + 1) * LARGEST / 16,
                                        .n_layers = 1,
                                        .layers = &near,
                                        .q_dtype = ATTN_F32};
    if (attn_pool_create(c, &spec, LONG_US, &pool) != ATTN_OK)
        fail_msg("%s", attn_last_error()->message);
    return pool;
}

/* Both at once, twice over the same tokens. */
static void make_steps(attn_client *c, struct large *l, int n)
{
    attn_ticket tickets[N_AT_ONCE];
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < n; i++) {
            l[i].is_right = false;
            if (attn_step_start(l[i].pool, &l[i].step, NULL, NULL, &tickets[i]) != ATTN_OK)
                fail_msg("%s", attn_last_error()->message);
        }
        for (int i = 0; i < n; i++) {
            struct attn_result r = {.struct_size = sizeof r};
            if (attn_step_wait(c, tickets[i], &r) != ATTN_OK)
                fail_msg("%s", attn_last_error()->message);
            assert_true(l[i].is_right);
        }
    }
}

static void large_messages_of_sockets_are_pinned_and_kept(void **state)
{
    (void)state;
    attn_client *c = open_client("", d.url);
    attn_pool *pool = open_pool(c);
    struct large l[3];
    open_large(&l[0], pool, 1, TOKENS);
    open_large(&l[1], pool, 2, TOKENS - 1);
    open_large(&l[2], pool, 3, 1);
    make_steps(c, l, 2);
    assert_false(l[0].is_pinned || l[0].was_pinned);
    assert_int_equal(pin_by(c), ATTN_OK);
    assert_int_equal(pin_by(c), ATTN_OK);
    assert_int_equal(driver.n_pinned, 1); /* it shows that it can */
    make_steps(c, l, 3);
    assert_true(l[0].is_pinned && l[0].was_pinned && l[1].is_pinned && l[1].was_pinned);
    assert_false(l[2].is_pinned || l[2].was_pinned); /* a small one */
    const int n = driver.n_pinned;
    assert_in_range(n, 2, 4);
    for (int i = 0; i < 10; i++)
        make_steps(c, l, 2);
    assert_int_equal(driver.n_pinned, n); /* the same again and again */
    assert_int_equal(driver.n_unpinned, 0);
    /* a new connection has them, too */
    e2e_signal(&d, SIGKILL);
    assert_int_equal(e2e_wait(&d), -SIGKILL);
    e2e_restart(&d, NULL);
    assert_int_equal(attn_client_ping(c, LONG_US, NULL), ATTN_ENOTFOUND);
    attn_pool_close(pool);
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        attn_client_close(c);
        _exit(driver.n_unpinned == 0 ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    attn_client_close(c);
    assert_int_equal(driver.n_unpinned, driver.n_pinned);
}

static void what_is_pinned_of_sockets_has_an_end(void **state)
{
    (void)state;
    attn_client *c = open_client("", d.url);
    attn_pool *pool = open_pool(c);
    struct large l[N_AT_ONCE];
    assert_int_equal(pin_by(c), ATTN_OK);
    for (uint32_t n = LARGEST / 16; n < LARGEST; n += LARGEST / 16) { /* none fits those before */
        open_large(&l[0], pool, n, n);
        make_steps(c, l, 1);
        assert_true(l[0].is_pinned && l[0].was_pinned);
        assert_int_equal(attn_seq_close(pool, &l[0].item.seq, LONG_US), ATTN_OK);
    }
    assert_int_equal(driver.n_unpinned, 0);
    for (uint32_t i = 0; i < N_AT_ONCE; i++)
        open_large(&l[i], pool, LARGEST + i, LARGEST);
    make_steps(c, l, N_AT_ONCE);
    assert_true(pinned_bytes() > 64u << 20 && pinned_bytes() <= 128u << 20);
    for (int i = 0; i < N_AT_ONCE; i++) {
        assert_true(l[i].is_pinned && l[i].was_pinned);
        assert_int_equal(attn_seq_close(pool, &l[i].item.seq, LONG_US), ATTN_OK);
    }
    for (uint32_t n = LARGEST + LARGEST / 4; n < 2 * LARGEST; n += LARGEST / 4) {
        open_large(&l[0], pool, n, n);
        make_steps(c, l, 1);
        assert_true(l[0].is_pinned && l[0].was_pinned);
        assert_int_equal(attn_seq_close(pool, &l[0].item.seq, LONG_US), ATTN_OK);
    }
    assert_true(driver.n_unpinned > 0); /* the smaller ones made room */
    assert_true(pinned_bytes() <= 128u << 20);
    for (uint32_t i = 0; i < N_AT_ONCE; i++)
        open_large(&l[i], pool, LARGEST + i, LARGEST);
    driver.is_refusing = true;
    make_steps(c, l, N_AT_ONCE);
    attn_pool_close(pool);
    attn_client_close(c);
    assert_int_equal(driver.n_unpinned, driver.n_pinned);
}

static void a_driver_that_is_missing_is_named(void **state)
{
    (void)state;
    const char *const urls[][2] = {{"", d.url}, {"shm://", d.shm_path}};
    for (int i = 0; i < 2; i++) {
        attn_client *c = open_client(urls[i][0], urls[i][1]);
        driver.is_refusing = true;
        assert_int_equal(pin_by(c), ATTN_ENOTSUP);
        driver.is_refusing = false;
        if (attn_client_pin(c) != ATTN_OK) { /* no GPU here, or no driver */
            assert_int_equal(attn_last_error()->status, ATTN_ENOTSUP);
            assert_true(strlen(attn_last_error()->message) > 0);
        }
        assert_int_equal(attn_client_ping(c, LONG_US, NULL), ATTN_OK);
        attn_client_close(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(each_connections_memory_is_pinned_once, begin, end),
        cmocka_unit_test_setup_teardown(without_pages_it_works_as_before, begin, end),
        cmocka_unit_test_setup_teardown(a_forked_child_unpins_nothing, begin, end),
        cmocka_unit_test_setup_teardown(large_messages_of_sockets_are_pinned_and_kept, begin, end),
        cmocka_unit_test_setup_teardown(what_is_pinned_of_sockets_has_an_end, begin, end),
        cmocka_unit_test_setup_teardown(a_driver_that_is_missing_is_named, begin, end),
    };
    return cmocka_run_group_tests_name("client_pin", tests, NULL, NULL);
}
