/* test_idle_memory.c: a successor has the bytes that were there if it is given memory of its size,
 * and new memory else. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fcntl.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "daemon/keeper/idle_memory.h"

enum { BYTES = 1 << 20 };

static struct idle_memory memory_of(uint64_t bytes, int fd)
{
    struct idle_memory m;
    char why[256] = "";
    memset(&m, 0xa5, sizeof m);
    assert_int_equal(idle_memory_open(bytes, fd, &m, why, sizeof why), ATTN_OK);
    assert_string_equal(why, "");
    return m;
}

static bool is_open(int fd)
{
    return fcntl(fd, F_GETFD) >= 0;
}

static void memory_of_the_same_size_is_taken_over(void **state)
{
    (void)state;
    struct idle_memory a = memory_of(BYTES, -1);
    assert_true(a.is_new && a.bytes == BYTES);
    memset(a.base + BYTES - 99, 0x5a, 99);
    int fd = dup(a.fd);
    idle_memory_close(&a);
    struct idle_memory b = memory_of(BYTES, fd);
    assert_false(b.is_new);
    for (uint32_t i = BYTES - 99; i < BYTES; i++)
        assert_int_equal(b.base[i], 0x5a);
    assert_int_not_equal(ftruncate(b.fd, BYTES / 2), 0); /* nobody can pull it away */
    idle_memory_close(&b);
    assert_false(is_open(fd));
    idle_memory_close(&b);
}

static void other_memory_is_not_used(void **state)
{
    (void)state;
    struct idle_memory a = memory_of(BYTES, -1);
    int fd = dup(a.fd), unsealed = memfd_create("unsealed", MFD_ALLOW_SEALING);
    memset(a.base, 0x5a, BYTES);
    struct idle_memory b = memory_of(2 * BYTES, fd);
    assert_true(b.is_new && b.bytes == 2 * BYTES && b.base[0] == 0);
    assert_true(!is_open(fd) || fd == b.fd);
    idle_memory_close(&b);
    fd = dup(a.fd);
    b = memory_of(0, fd); /* none is wanted any more */
    assert_true(b.base == NULL && !b.is_new && b.fd < 0);
    assert_false(is_open(fd));
    idle_memory_close(&b);
    assert_int_equal(ftruncate(unsealed, BYTES), 0);
    b = memory_of(BYTES, unsealed);
    assert_true(b.is_new);
    idle_memory_close(&b);
    idle_memory_close(&a);
}

static void what_can_not_be_had_is_refused_by_name(void **state)
{
    (void)state;
    struct idle_memory m = {.fd = -7};
    char why[256] = "";
    assert_int_equal(idle_memory_open(UINT64_C(1) << 62, -1, &m, why, sizeof why), ATTN_ENOMEM);
    assert_non_null(strstr(why, "cache.idle_memory"));
    assert_int_equal(m.fd, -7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_of_the_same_size_is_taken_over),
        cmocka_unit_test(other_memory_is_not_used),
        cmocka_unit_test(what_can_not_be_had_is_refused_by_name),
    };
    log_init(LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    return cmocka_run_group_tests_name("idle_memory", tests, NULL, NULL);
}
