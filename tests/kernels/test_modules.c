/* test_modules.c: the backends that were built load side by side, and one without a device says so.
 */
#include "kernels/load.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static const char *const names[] = {
    "cpu",
#ifdef HAS_CUDA
    "cuda",
#endif
#ifdef HAS_HIP
    "hip",
#endif
};
#define N_NAMES (sizeof names / sizeof *names)

/* Opens ops or fails the test if that fails for another reason than a missing device. */
static struct backend *open_or_none(const struct backend_ops *ops)
{
    const struct backend_config config = {.kv_bytes = 1 << 20,
                                          .max_batch_items = 1,
                                          .max_batch_tokens = 1,
                                          .n_threads = 1,
                                          .import_fd = -1};
    struct backend *b = NULL;
    attn_status st = ops->open(&config, &b);
    if (st == ATTN_OK)
        return b;
    char want[64];
    snprintf(want, sizeof want, "no %s device: ", ops->name);
    assert_int_equal(st, ATTN_ENOTSUP);
    const char *words = ops->last_error(b);
    if (strncmp(words, want, strlen(want)) != 0 || strlen(words) == strlen(want))
        fail_msg("'%s' does not begin with '%s' and a reason", words, want);
    printf("%s: %s\n", ops->name, words);
    ops->close(b);
    return NULL;
}

static void all_modules_load_and_are_open_side_by_side(void **state)
{
    (void)state;
    const struct backend_ops *ops[N_NAMES];
    struct backend *opened[N_NAMES];
    char why[512] = "";
    for (size_t i = 0; i < N_NAMES; i++) {
        if (backend_load(names[i], &ops[i], why, sizeof why) != ATTN_OK)
            fail_msg("%s: %s", names[i], why);
        assert_string_equal(ops[i]->name, names[i]);
        const struct backend_bench_ops *bench = NULL;
        if (backend_bench_load(names[i], &bench, why, sizeof why) != ATTN_OK)
            fail_msg("%s: %s", names[i], why);
        assert_string_equal(bench->name, names[i]);
        assert_string_equal(bench->variants[0], "naive");
    }
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < N_NAMES; i++)
            opened[i] = open_or_none(ops[i]);
        assert_non_null(opened[0]); /* the cpu is always there */
        for (size_t i = 0; i < N_NAMES; i++)
            ops[i]->close(opened[i]);
    }
}

static void a_name_that_is_no_module_is_refused_with_words(void **state)
{
    (void)state;
    const char *const bad[] = {"", "CUDA", "../cpu", "cuda.so", "nosuch"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const struct backend_ops *ops = NULL;
        char why[512] = "";
        const struct backend_bench_ops *bench = NULL;
        assert_int_equal(backend_bench_load(bad[i], &bench, why, sizeof why), ATTN_ENOTFOUND);
        assert_null(bench);
        assert_int_equal(backend_load(bad[i], &ops, why, sizeof why), ATTN_ENOTFOUND);
        assert_null(ops);
        assert_non_null(strstr(why, bad[i]));
        assert_true(strlen(why) > strlen(bad[i]));
    }
}

static char *folder;

static void write_module(const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/attnd-%s.so", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void a_module_that_is_none_is_refused_with_words(void **state)
{
    (void)state;
    static const struct {
        const char *name, *text;
    } bad[] = {{"empty", ""}, {"text", "not a shared object"}, {"elf", "\x7f\x45LF\x02\x01\x01"}};
    char path[] = "/tmp/attnd-modules-XXXXXX";
    folder = mkdtemp(path);
    assert_non_null(folder);
    setenv("ATTND_MODULE_DIR", folder, 1);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const struct backend_ops *ops = NULL;
        char why[512] = "", file[128];
        write_module(bad[i].name, bad[i].text);
        assert_int_equal(backend_load(bad[i].name, &ops, why, sizeof why), ATTN_ENOTFOUND);
        assert_null(ops);
        snprintf(file, sizeof file, "%s/attnd-%s.so", folder, bad[i].name);
        if (strncmp(why, file, strlen(file)) != 0 || strlen(why) < strlen(file) + 5)
            fail_msg("'%s' does not begin with '%s' and a reason", why, file);
        unlink(file);
    }
    unsetenv("ATTND_MODULE_DIR");
    rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_modules_load_and_are_open_side_by_side),
        cmocka_unit_test(a_name_that_is_no_module_is_refused_with_words),
        cmocka_unit_test(a_module_that_is_none_is_refused_with_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
