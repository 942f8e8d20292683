/* test_seq_file.c: the head of an exported sequence: what is written is read; every truncation,
 * every flipped bit and every other geometry is refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/seq_file.h"

enum { N_LAYERS = 3, N_IDS = 21, N_BLOCKS = 3 };
static const uint32_t lens[N_LAYERS] = {40, 33, 40};
static uint32_t ids[N_IDS];
static uint8_t sums[N_BLOCKS * SEQ_FILE_SUM_BYTES];
static bool is_freed; /* of the file of the test, its second block */
static bool has_note;

static struct seq_file file_of_test(void)
{
    for (uint32_t i = 0; i < N_IDS; i++)
        ids[i] = 1000 + i;
    for (size_t i = 0; i < sizeof sums; i++)
        sums[i] = (uint8_t)(i * 7 + 1);
    return (struct seq_file){
        .geometry = {.layout = 1,
                     .num_layers = N_LAYERS,
                     .num_kv_heads = 2,
                     .head_dim_k = 8,
                     .head_dim_v = 16,
                     .block_tokens = 16,
                     .kv_dtype = ATTN_F32,
                     .block_bytes = 9216,
                     .model = "bytelm",
                     .rope = ""},
        .pool = "p",
        .name = 77,
        .adapter = 5,
        .n_blocks = N_BLOCKS,
        .n_ids = N_IDS,
        .layer_len = lens,
        .ids = ids,
        .sums = sums,
        .freed_first = is_freed ? 1 : 0,
        .freed_past = is_freed ? 2 : 0,
        .note = (const uint8_t *)"n\0te",
        .note_bytes = has_note ? 4 : 0,
    };
}

/* An 8-byte aligned head; the caller's. */
static uint8_t *head_of_test(uint64_t *out_head, uint64_t *out_file)
{
    struct seq_file f = file_of_test();
    *out_head = seq_file_head_bytes(&f);
    *out_file = *out_head + (N_BLOCKS - is_freed) * f.geometry.block_bytes;
    uint8_t *head = malloc(*out_head);
    assert_non_null(head);
    memset(head, 0xa5, *out_head);
    seq_file_encode(&f, head);
    return head;
}

static attn_status read_head(const uint8_t *head, uint64_t n, uint64_t file_bytes,
                             struct seq_file *out, char *why, size_t why_bytes)
{
    uint64_t found = 0;
    size_t n_fixed = n < SEQ_FILE_FIXED_BYTES ? (size_t)n : SEQ_FILE_FIXED_BYTES;
    attn_status st = seq_file_head_find(head, n_fixed, file_bytes, &found, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    assert_true(found <= n);
    return seq_file_decode(head, found, out, why, why_bytes);
}

static void what_is_written_is_read(void **state)
{
    (void)state;
    uint64_t n, file_bytes;
    char why[256] = "";
    struct seq_file want = file_of_test(), got;
    uint8_t *head = head_of_test(&n, &file_bytes);
    assert_int_equal(n % SEQ_FILE_ALIGN, 0);
    assert_int_equal(read_head(head, n, file_bytes, &got, why, sizeof why), ATTN_OK);
    assert_false(seq_geometry_differs(&want.geometry, "a", &got.geometry, "b", why, sizeof why));
    assert_int_equal(got.name, 77);
    assert_int_equal(got.adapter, 5);
    assert_int_equal(got.n_blocks, N_BLOCKS);
    assert_int_equal(got.n_ids, N_IDS);
    assert_memory_equal(got.layer_len, lens, sizeof lens);
    assert_memory_equal(got.ids, ids, sizeof ids);
    assert_int_equal(got.freed_first, want.freed_first);
    assert_int_equal(got.freed_past, want.freed_past);
    assert_memory_equal(got.sums, sums, sizeof sums - is_freed * SEQ_FILE_SUM_BYTES);
    assert_int_equal(got.note_bytes, want.note_bytes);
    assert_memory_equal(got.note, want.note, want.note_bytes);
    struct checksum last = seq_file_sum(&got, N_BLOCKS - 1), sum;
    memcpy(&sum, sums + (N_BLOCKS - 1 - is_freed) * SEQ_FILE_SUM_BYTES, sizeof sum);
    assert_true(checksum_is_equal(last, sum));
    free(head);
}

static void a_file_without_freed_blocks_is_of_the_first_version(void **state)
{
    (void)state;
    uint64_t n, file_bytes;
    uint8_t *head = head_of_test(&n, &file_bytes);
    assert_int_equal(head[8], has_note   ? SEQ_FILE_VERSION_NOTE
                              : is_freed ? SEQ_FILE_VERSION_FREED
                                         : SEQ_FILE_VERSION);
    assert_int_equal(head[112], is_freed ? 2 : 0);
    free(head);
}

/* What encodes well, with a right checksum, and is no such file. */
static void refused_of(struct seq_file f, const char *says)
{
    char why[256] = "";
    struct seq_file got;
    uint64_t n = seq_file_head_bytes(&f), stored = seq_file_n_stored(&f);
    uint8_t *head = malloc(n);
    assert_non_null(head);
    seq_file_encode(&f, head);
    assert_int_equal(read_head(head, n, n + stored * f.geometry.block_bytes, &got, why, sizeof why),
                     ATTN_EPROTO);
    if (strstr(why, says) == NULL)
        fail_msg("no \"%s\": %s", says, why);
    free(head);
}

static void freed_blocks_that_cannot_be_are_refused(void **state)
{
    (void)state;
    struct seq_file f = file_of_test();
    uint32_t equal[N_LAYERS] = {40, 40, 40};
    f.freed_first = 2;
    f.freed_past = 3; /* 48 tokens, of 40 */
    f.layer_len = equal;
    refused_of(f, "layer_len[0] is 40, freed_past 3");
    f = file_of_test();
    f.freed_first = 0;
    f.freed_past = 2;
    refused_of((f.layer_len = (const uint32_t[]){40, 31, 40}, f),
               "layer_len[1] is 31, freed_past 2");
    /* the words of the head itself */
    static const struct {
        uint32_t version, first, past;
    } bad[] = {{1, 0, 1}, {1, 1, 1}, {2, 0, 0}, {2, 2, 1}, {2, 1, 4}, {2, UINT32_MAX, 1}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint64_t n, file_bytes;
        char why[256] = "";
        uint8_t *head = head_of_test(&n, &file_bytes);
        struct seq_file got;
        memcpy(head + 8, &bad[i].version, 4);
        memcpy(head + 108, &bad[i].first, 4);
        memcpy(head + 112, &bad[i].past, 4);
        assert_int_equal(read_head(head, n, file_bytes, &got, why, sizeof why), ATTN_EPROTO);
        assert_non_null(strstr(why, "freed_first is "));
        free(head);
    }
}

static void notes_that_cannot_be_are_refused(void **state)
{
    (void)state;
    static const uint32_t bad[][2] = {{1, 4}, {2, 4}, {3, 0}, {3, 4097}, {3, UINT32_MAX}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint64_t n, file_bytes;
        char why[256] = "";
        uint8_t *head = head_of_test(&n, &file_bytes);
        struct seq_file got;
        memcpy(head + 8, &bad[i][0], 4);
        memcpy(head + 116, &bad[i][1], 4);
        assert_int_equal(read_head(head, n, file_bytes, &got, why, sizeof why), ATTN_EPROTO);
        assert_non_null(strstr(why, "note_bytes is "));
        free(head);
    }
}

static int with_note(void **state)
{
    (void)state;
    has_note = true;
    return 0;
}

static int with_note_and_freed(void **state)
{
    (void)state;
    return is_freed = has_note = true, 0;
}

static int without_note(void **state)
{
    (void)state;
    return is_freed = has_note = false, 0;
}

static int with_freed(void **state)
{
    (void)state;
    is_freed = true;
    return 0;
}

static int without_freed(void **state)
{
    (void)state;
    is_freed = false;
    return 0;
}

static void every_flipped_bit_is_refused(void **state)
{
    (void)state;
    uint64_t n, file_bytes;
    uint8_t *head = head_of_test(&n, &file_bytes);
    for (uint64_t bit = 0; bit < n * 8; bit++) {
        struct seq_file got;
        char why[256] = "";
        head[bit / 8] ^= (uint8_t)(1u << bit % 8);
        attn_status st = read_head(head, n, file_bytes, &got, why, sizeof why);
        assert_true(st == ATTN_EPROTO || st == ATTN_ENOTSUP);
        assert_true(why[0] != '\0');
        head[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    free(head);
}

static void every_other_length_is_refused(void **state)
{
    (void)state;
    uint64_t n, file_bytes;
    uint8_t *head = head_of_test(&n, &file_bytes);
    for (uint64_t len = 0; len < file_bytes + 100; len++) {
        struct seq_file got;
        char why[256] = "";
        if (len == file_bytes)
            continue;
        attn_status st = read_head(head, len < n ? len : n, len, &got, why, sizeof why);
        assert_int_equal(st, ATTN_EPROTO);
        assert_non_null(strstr(why, "file has"));
    }
    free(head);
}

static void refusals_name_field_and_value(void **state)
{
    (void)state;
    uint64_t n, file_bytes;
    char why[256];
    struct seq_file got;
    uint8_t *head = head_of_test(&n, &file_bytes);
    head[8] = 9;
    assert_int_equal(read_head(head, n, file_bytes, &got, why, sizeof why), ATTN_ENOTSUP);
    assert_string_equal(why, "version is 9, this side reads 1 to 3");
    head[0] = 'B';
    assert_int_equal(read_head(head, n, file_bytes, &got, why, sizeof why), ATTN_EPROTO);
    assert_non_null(strstr(why, "magic is 42"));
    free(head);

    struct seq_file f = file_of_test(); /* whose checksum is right, but not its lengths */
    f.n_blocks = 2;
    n = seq_file_head_bytes(&f);
    head = malloc(n);
    assert_non_null(head);
    seq_file_encode(&f, head);
    assert_int_equal(read_head(head, n, n + 2 * 9216, &got, why, sizeof why), ATTN_EPROTO);
    assert_string_equal(why, "n_blocks is 2, 40 tokens take 3");
    free(head);
}

static void another_geometry_is_named(void **state)
{
    (void)state;
    char why[256];
    struct seq_geometry a = file_of_test().geometry, b = a;
#define DIFFERS(field, value)                                                                      \
    do {                                                                                           \
        b = a;                                                                                     \
        b.field = value;                                                                           \
        assert_true(seq_geometry_differs(&a, "the file", &b, "the pool", why, sizeof why));        \
        assert_non_null(strstr(why, #field " is "));                                               \
    } while (0)
    DIFFERS(layout, 2);
    DIFFERS(num_layers, 4);
    DIFFERS(num_kv_heads, 4);
    DIFFERS(head_dim_k, 16);
    DIFFERS(head_dim_v, 8);
    DIFFERS(block_tokens, 32);
    DIFFERS(block_bytes, 1);
    DIFFERS(attention, 7);
    DIFFERS(kv_dtype, ATTN_F16);
    DIFFERS(model, "other");
    DIFFERS(rope, "theta=10000");
#undef DIFFERS
    assert_string_equal(why, "rope is \"\" in the file, \"theta=10000\" in the pool");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_is_read),
        cmocka_unit_test_setup_teardown(what_is_written_is_read, with_freed, without_freed),
        cmocka_unit_test(every_flipped_bit_is_refused),
        cmocka_unit_test_setup_teardown(every_flipped_bit_is_refused, with_freed, without_freed),
        cmocka_unit_test(every_other_length_is_refused),
        cmocka_unit_test_setup_teardown(every_other_length_is_refused, with_freed, without_freed),
        cmocka_unit_test(a_file_without_freed_blocks_is_of_the_first_version),
        cmocka_unit_test_setup_teardown(a_file_without_freed_blocks_is_of_the_first_version,
                                        with_freed, without_freed),
        cmocka_unit_test(freed_blocks_that_cannot_be_are_refused),
        cmocka_unit_test(notes_that_cannot_be_are_refused),
        cmocka_unit_test_setup_teardown(what_is_written_is_read, with_note, without_note),
        cmocka_unit_test_setup_teardown(what_is_written_is_read, with_note_and_freed, without_note),
        cmocka_unit_test_setup_teardown(every_flipped_bit_is_refused, with_note, without_note),
        cmocka_unit_test(refusals_name_field_and_value),
        cmocka_unit_test(another_geometry_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
