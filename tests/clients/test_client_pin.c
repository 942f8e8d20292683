/* test_client_pin.c: memory shared with the daemon is page-locked as often as there is new memory,
 * and released before it is unmapped; not in a forked child. */
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

enum { LONG_US = 300000000, DEVICE = 3 };

static struct e2e d;

/* A driver that counts. */
static struct {
    bool is_refusing;
    int n_pinned, n_unpinned, n_refused;
    volatile uint8_t *p;
    uint64_t bytes;
} driver;

static attn_status pin(void *p, uint64_t bytes, int *device, char *why, size_t why_bytes)
{
    assert_true(*device == -1 || *device == DEVICE);
    if (driver.is_refusing) {
        driver.n_refused++;
        snprintf(why, why_bytes, "a driver without pages");
        return ATTN_ENOTSUP;
    }
    *device = DEVICE;
    driver.p = p;
    driver.bytes = bytes;
    driver.n_pinned++;
    return ATTN_OK;
}

static void unpin(void *p)
{
    assert_ptr_equal(p, driver.p);
    for (uint64_t i = 0; i < driver.bytes; i += 4096)
        (void)driver.p[i]; /* mapped still */
    driver.n_unpinned++;
}

static const struct lane_memory_ops ops = {.abi = LANE_CUDA_ABI, .pin = pin, .unpin = unpin};

static int begin(void **state)
{
    (void)state;
    memset(&driver, 0, sizeof driver);
    e2e_start(&d, NULL);
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

static void other_memory_is_refused_by_name(void **state)
{
    (void)state;
    attn_client *c = open_client("", d.url);
    assert_int_equal(attn_client_pin(c), ATTN_ENOTSUP);
    assert_non_null(strstr(attn_last_error()->message, d.url));
    assert_non_null(strstr(attn_last_error()->message, "only shm://"));
    attn_client_close(c);
    c = open_client("shm://", d.shm_path);
    if (attn_client_pin(c) != ATTN_OK) { /* no GPU here, or no driver */
        assert_int_equal(attn_last_error()->status, ATTN_ENOTSUP);
        assert_true(strlen(attn_last_error()->message) > 0);
    }
    assert_int_equal(attn_client_ping(c, LONG_US, NULL), ATTN_OK);
    attn_client_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(each_connections_memory_is_pinned_once, begin, end),
        cmocka_unit_test_setup_teardown(without_pages_it_works_as_before, begin, end),
        cmocka_unit_test_setup_teardown(a_forked_child_unpins_nothing, begin, end),
        cmocka_unit_test_setup_teardown(other_memory_is_refused_by_name, begin, end),
    };
    return cmocka_run_group_tests_name("client_pin", tests, NULL, NULL);
}
