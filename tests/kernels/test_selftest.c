/* test_selftest.c: the self test says "ok" of a backend that computes right, and names what a
 * broken one does wrong.
 *
 *     test_selftest [NAME [TESTS]]
 */
#include "kernels/load.h"
#include "kernels/selftest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static const char *backend_name = "cpu";
static const struct backend_ops *ops;
static char *text;
static size_t text_bytes;

static attn_status run(const struct backend_ops *o)
{
    free(text);
    FILE *out = open_memstream(&text, &text_bytes);
    assert_non_null(out);
    attn_status st = selftest_run(o, 0, 2, out);
    fclose(out);
    return st;
}

/* "NAME: VERDICT, ... END" */
static void assert_last_line(const char *verdict, const char *end)
{
    char begin[64];
    snprintf(begin, sizeof begin, "%s: %s, ", backend_name, verdict);
    const char *line = text + strlen(text) - 1; /* its newline */
    while (line > text && line[-1] != '\n')
        line--;
    assert_memory_equal(line, begin, strlen(begin));
    assert_true(strlen(line) > strlen(end));
    assert_string_equal(line + strlen(line) - strlen(end), end);
}

static void a_good_backend_passes_and_the_report_names_the_device(void **state)
{
    (void)state;
    attn_status st = run(ops);
    if (st != ATTN_OK)
        fail_msg("%s", text);
    assert_null(strstr(text, "FAILED"));
    assert_non_null(strstr(text, backend_name));
    assert_non_null(strstr(text, "device "));
    assert_non_null(strstr(text, "host   Linux "));
    assert_non_null(strstr(text, "grouped queries: largest error "));
    assert_non_null(strstr(text, "a latent of 256, projected heads: largest error "));
    assert_non_null(strstr(text, " % of the bound\n"));
    assert_non_null(strstr(text, "ok               variant none: largest error"));
    assert_non_null(strstr(text, "found again by an import"));
    assert_last_line("passed", " 0 failed\n");
}

/* The report has a line "computed by    WORDS...". */
static void assert_computed_by(const char *words)
{
    char begin[160];
    snprintf(begin, sizeof begin, "\ncomputed by    %s", words);
    if (strstr(text, begin) == NULL)
        fail_msg("no line \"%s\" in:\n%s", begin + 1, text);
}

/* Of the report of the test before. */
static void a_good_backends_report_says_which_kernels_it_checked(void **state)
{
    (void)state;
    if (strcmp(backend_name, "cpu") == 0)
        assert_computed_by("all work: tiles in ");
    if (strcmp(backend_name, "simt32") != 0)
        return;
    assert_computed_by("steps, prompts, lists, chosen blocks: attend_rows (forms of 99 KiB of "
                       "shared memory); trees: attend_vector; none tuned: ");
    assert_computed_by("steps: attend_codes; prompts, chosen blocks: attend_matrix; ");
    assert_computed_by("steps: attend_vector (f32); prompts: attend_f32; ");
    assert_computed_by("steps, prompts: attend_vector (V is in K); ");
    assert_computed_by("steps, prompts: attend_vector (a head dim is above 256); ");
}

/* A backend that is right but for one thing. */
static struct backend_ops broken;

static struct backend_batch *poll_and_spoil(struct backend *b, uint64_t wait_ns)
{
    struct backend_batch *batch = ops->poll(b, wait_ns);
    if (batch != NULL && batch->items[0].out != NULL)
        ((uint8_t *)batch->items[0].out)[1] ^= 0x40; /* an exponent's high bit, or NaN */
    return batch;
}

static attn_status write_nothing(struct backend_pool *p, uint32_t block, const void *bytes)
{
    (void)p, (void)block, (void)bytes;
    return ATTN_OK;
}

/* Of each head but the first its neighbour's weights, as a kernel that has the wrong ones. */
static attn_status write_shifted(struct backend_pool *p, uint32_t layer, uint64_t offset,
                                 const void *bytes, uint64_t n)
{
    const uint64_t head = n / 16; /* of the first case of heads; parts of one in the others */
    uint8_t *other = malloc(n);
    assert_non_null(other);
    memcpy(other, bytes, head);
    memcpy(other + head, bytes, n - head);
    attn_status st = ops->weights_write(p, layer, offset, other, n);
    free(other);
    return st;
}

static attn_status cannot_open(const struct backend_config *c, struct backend **out_b)
{
    struct backend_config none = *c;
    none.kv_bytes = UINT64_MAX / 2;
    return ops->open(&none, out_b);
}

static void a_wrong_output_is_named_with_its_place(void **state)
{
    (void)state;
    broken = *ops;
    broken.poll = poll_and_spoil;
    assert_int_equal(run(&broken), ATTN_EINTERNAL);
    assert_non_null(strstr(text, "FAILED         bf16/bf16, 8/2 heads"));
    assert_non_null(strstr(text, "out of sequence 0 at 0+1, row 0, element 0: "));
    assert_last_line("failed", " failed\n");
    assert_null(strstr(text, " 0 failed\n"));
}

static void another_heads_weights_are_named(void **state)
{
    (void)state;
    broken = *ops;
    broken.weights_write = write_shifted;
    assert_int_equal(run(&broken), ATTN_EINTERNAL);
    assert_non_null(
        strstr(text, "a latent of 512, projected heads: out of sequence 0 at 0+1, row "));
    assert_last_line("failed", " 3 failed\n"); /* one of each dtype, and nothing else */
}

static void a_lost_block_is_named(void **state)
{
    (void)state;
    broken = *ops;
    broken.block_write = write_nothing;
    assert_int_equal(run(&broken), ATTN_EINTERNAL);
    assert_non_null(strstr(text, "FAILED         a block written and read back"));
}

static void a_backend_that_cannot_be_opened_says_why(void **state)
{
    (void)state;
    broken = *ops;
    broken.open = cannot_open;
    assert_int_not_equal(run(&broken), ATTN_OK);
    assert_non_null(strstr(text, "FAILED         open: "));
    assert_true(strlen(strstr(text, "open: ")) > 10);
    assert_last_line("failed", "it cannot be opened\n");
}

int main(int argc, char **argv)
{
    char why[512];
    if (argc > 1)
        backend_name = argv[1];
    if (backend_load(backend_name, &ops, why, sizeof why) != ATTN_OK) {
        printf("%s: %s\n", backend_name, why);
        return 1;
    }
    if (argc > 2)
        cmocka_set_test_filter(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_backend_passes_and_the_report_names_the_device),
        cmocka_unit_test(a_good_backends_report_says_which_kernels_it_checked),
        cmocka_unit_test(a_wrong_output_is_named_with_its_place),
        cmocka_unit_test(another_heads_weights_are_named),
        cmocka_unit_test(a_lost_block_is_named),
        cmocka_unit_test(a_backend_that_cannot_be_opened_says_why),
    };
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(text);
    return n_failed;
}
