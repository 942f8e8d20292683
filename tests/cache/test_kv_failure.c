/* test_kv_failure.c: makes every call that takes memory or a descriptor fail once, at each place
 * where it is made.
 *
 * The linker redirects those calls here (--wrap). A failed kv_open must leave no descriptor, no
 * mapping and no output; a failed kv_check must change nothing.
 */
#define _GNU_SOURCE
#include "tests/cache/kv_test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

static int calls_left = -1; /* until the one that fails; -1: none does */

static bool fails_now(int error)
{
    if (calls_left < 0 || calls_left-- > 0)
        return false;
    errno = error;
    return true;
}

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size)
{
    return fails_now(ENOMEM) ? NULL : __real_calloc(n, size);
}

int __real_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags)
{
    return fails_now(EMFILE) ? -1 : __real_memfd_create(name, flags);
}

int __real_ftruncate(int fd, off_t n_bytes);
int __wrap_ftruncate(int fd, off_t n_bytes);
int __wrap_ftruncate(int fd, off_t n_bytes)
{
    return fails_now(ENOSPC) ? -1 : __real_ftruncate(fd, n_bytes);
}

void *__real_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    return fails_now(ENOMEM) ? MAP_FAILED : __real_mmap(at, n, prot, flags, fd, offset);
}

int __real_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...)
{
    va_list ap;
    va_start(ap, command);
    int arg = va_arg(ap, int);
    va_end(ap);
    return fails_now(EMFILE) ? -1 : __real_fcntl(fd, command, arg);
}

ssize_t __real_getrandom(void *bytes, size_t n, unsigned flags);
ssize_t __wrap_getrandom(void *bytes, size_t n, unsigned flags);
ssize_t __wrap_getrandom(void *bytes, size_t n, unsigned flags)
{
    return fails_now(ENOSYS) ? -1 : __real_getrandom(bytes, n, flags);
}

int __real_madvise(void *at, size_t n, int advice);
int __wrap_madvise(void *at, size_t n, int advice);
int __wrap_madvise(void *at, size_t n, int advice)
{
    return fails_now(EINVAL) ? -1 : __real_madvise(at, n, advice);
}

static const struct kv_config config = {.max_pools = 1,
                                        .max_blocks = 8,
                                        .max_sequences = 4,
                                        .max_seq_blocks = 4,
                                        .max_seq_tokens = 16,
                                        .max_block_tokens = 4,
                                        .max_layers = 1,
                                        .max_owners = 1,
                                        .block_layout = 1,
                                        .events_kept = 8};

static uint32_t n_descriptors(void)
{
    uint32_t n = 0;
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n;
}

/* Opens with each call failing in turn; gives how many opens failed. */
static uint32_t open_with_failures(int fd)
{
    uint32_t before = n_descriptors(), n_failed = 0;
    for (int i = 0;; i++) {
        struct kv *kv = (void *)&config;
        char why[256] = "";
        calls_left = i;
        attn_status st = kv_open(&config, fd, &kv, why, sizeof why);
        bool has_failed_one = calls_left == -1;
        calls_left = -1;
        if (st == ATTN_OK) { /* also where a failure has a way around */
            test_check(kv);
            kv_close(kv);
        } else {
            assert_ptr_equal(kv, &config);
            assert_true(strlen(why) > 0);
            n_failed++;
        }
        assert_int_equal(n_descriptors(), before);
        if (!has_failed_one)
            return n_failed;
    }
}

static void a_new_arena_fails_cleanly_at_every_call(void **state)
{
    (void)state;
    /* calloc three times, memfd_create, ftruncate, fcntl, mmap, getrandom; madvise has a way
     * around */
    assert_int_equal(open_with_failures(-1), 8);
}

static void a_predecessors_arena_survives_a_failure_at_every_call(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    kv_pool_id pool = test_pool(kv, "p", 1, 4, 8);
    kv_seq_id seq;
    struct test_fx t;
    assert_status(kv, ATTN_OK, kv_seq_open(kv, 1, 1, pool, 0, KV_NO_REQUEST, &seq));
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, seq, 0, 0, 9, test_fx_reset(&t)));
    kv_append_commit(kv, seq, 0, 0, 9);
    /* calloc three times, fcntl twice, mmap */
    assert_int_equal(open_with_failures(kv_fd(kv)), 6);
    struct kv_seq_info info;
    kv_seq_info(kv, seq, &info);
    assert_int_equal(info.layer_len[0], 9);
    test_check(kv);
    kv_close(kv);
}

static void a_check_without_memory_says_so(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    for (int i = 0; i < 2; i++) {
        calls_left = i;
        attn_status st = kv_check(kv);
        calls_left = -1;
        assert_int_equal(st, ATTN_ENOMEM);
        assert_says(kv, "no memory for 8 blocks");
    }
    test_check(kv);
    kv_close(kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_new_arena_fails_cleanly_at_every_call),
        cmocka_unit_test(a_predecessors_arena_survives_a_failure_at_every_call),
        cmocka_unit_test(a_check_without_memory_says_so),
    };
    return cmocka_run_group_tests_name("kv_failure", tests, NULL, NULL);
}
