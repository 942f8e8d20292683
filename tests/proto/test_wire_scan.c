/* test_wire_scan.c: what a header may cost and hold: every limit, from the bytes' side. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>

#include "bytes.h"
#include "tests/random.h"

enum { POOL_CREATE = 11, POOL_DESCRIBE = 12, STEP = 18, PROBE = 29 }; /* fields of Request */

static size_t peak_arena_bytes;

/* Decodes a request around header (freed); why gets the sentence. */
static attn_status decode(struct bytes header, char why[256])
{
    struct wire_arena a;
    struct wire_request q;
    uint8_t base[512];
    struct bytes msg = request_of(header, NULL, 0);
    memset(base, 0xa5, sizeof base);
    memset(why, 0, 256);
    wire_arena_init(&a, base, sizeof base, WIRE_ARENA_LIMIT_BYTES);
    attn_status st = wire_request_decode(msg.at, msg.n, &a, &q, why, 256);
    assert_int_equal(q.request_id, 42);
    assert_int_equal(st == ATTN_OK, q.header != NULL);
    assert_int_equal(st == ATTN_OK, why[0] == 0);
    peak_arena_bytes = a.chunk_bytes + sizeof base;
    assert_in_range(peak_arena_bytes, 0, WIRE_ARENA_LIMIT_BYTES);
    wire_arena_reset(&a);
    free(msg.at);
    return st;
}

static void expect_refused(struct bytes header, const char *sentence)
{
    char why[256];
    assert_int_equal(decode(header, why), ATTN_EPROTO);
    assert_string_equal(why, sentence);
}

static void expect_ok(struct bytes header)
{
    char why[256];
    if (decode(header, why) != ATTN_OK)
        fail_msg("%s", why);
}

/* Request{pool_create{spec{spec}}} */
static struct bytes pool_create(struct bytes spec)
{
    struct bytes create = {0}, request = {0};
    put_body(&create, 1, spec);
    put_body(&request, POOL_CREATE, create);
    return request;
}

static struct bytes layer_of(struct bytes layer)
{
    struct bytes spec = {0};
    put_body(&spec, 12, layer);
    return pool_create(spec);
}

static struct bytes pool_named(const void *name, size_t n)
{
    struct bytes spec = {0};
    put_string(&spec, 1, name, n);
    return pool_create(spec);
}

static void messages_nested_ten_thousand_deep_are_refused_or_skipped(void **state)
{
    (void)state;
    for (uint32_t field = 1; field <= 20; field++) {
        struct bytes b = {0};
        for (int i = 0; i < 10000; i++) {
            struct bytes outer = {0};
            put_body(&outer, field, b);
            b = outer;
        }
        char why[256];
        /* as unknown bytes of a body it is skipped whole, else it is refused */
        if (decode(b, why) == ATTN_OK)
            assert_in_range(peak_arena_bytes, 0, 256 << 10);
    }
}

static void a_mebibyte_of_empty_submessages_is_refused(void **state)
{
    (void)state;
    struct bytes layers = {malloc(1 << 20), 0};
    while (layers.n < (1 << 20) - 64) {
        layers.at[layers.n++] = 12 << 3 | 2;
        layers.at[layers.n++] = 0;
    }
    expect_refused(pool_create(layers), "header field pool_create.spec.layers has more than 512 "
                                        "elements");
    struct bytes bodies = {0};
    put_body(&bodies, POOL_DESCRIBE, (struct bytes){0});
    put_body(&bodies, POOL_DESCRIBE, (struct bytes){0});
    expect_refused(bodies, "header field pool_describe occurs twice");
}

static void two_bodies_are_refused(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_body(&b, 21, (struct bytes){0});
    put_body(&b, 22, (struct bytes){0});
    expect_refused(b, "header field drain occurs together with stats, only one of them may be set");
}

static void a_scalar_given_twice_is_refused(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uint(&b, 2, 1);
    put_uint(&b, 2, 1);
    expect_refused(b, "header field timeout_us occurs twice");
}

static void a_missing_body_and_an_unknown_body_are_told_apart(void **state)
{
    (void)state;
    char why[256];
    struct bytes none = {0}, newer = {0}, beyond = {0};
    put_fixed64(&none, 1, 7);
    expect_refused(none, "body is missing");
    expect_refused((struct bytes){0}, "body is missing");
    put_body(&newer, 63, (struct bytes){0});
    assert_int_equal(decode(newer, why), ATTN_ENOTSUP);
    assert_string_equal(why, "body is field 63, which this version does not know");
    put_body(&beyond, 64, (struct bytes){0});
    expect_refused(beyond, "body is missing");
}

static void unknown_fields_are_ignored(void **state)
{
    (void)state;
    struct bytes spec = {0};
    put_uint(&spec, 100, 1);
    put_fixed64(&spec, 101, 2);
    put_float(&spec, 102, NAN); /* not ours to judge */
    put_string(&spec, 103, "\x00\xff", 2);
    put_uint(&spec, (1u << 29) - 1, UINT64_MAX);
    struct bytes b = pool_create(spec);
    put_uint(&b, 9, 1);
    expect_ok(b);
}

static void groups_and_reserved_wire_types_are_refused(void **state)
{
    (void)state;
    static const uint32_t bad[] = {3, 4, 6, 7};
    for (size_t i = 0; i < 4; i++) {
        char sentence[256];
        struct bytes known = {0}, unknown = {0};
        put_tag(&known, 2, bad[i]);
        snprintf(sentence, sizeof sentence,
                 "header field 2 has wire type %u, groups and reserved types are not allowed",
                 bad[i]);
        expect_refused(known, sentence);
        put_tag(&unknown, 99, bad[i]);
        snprintf(sentence, sizeof sentence,
                 "header field 99 has wire type %u, groups and reserved types are not allowed",
                 bad[i]);
        expect_refused(unknown, sentence);
    }
}

static void malformed_tags_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t n;
    } cases[] = {
        {"\x00\x01", 2}, /* field 0 */
        {"\x02\x00", 2}, /* field 0 */
        {"\x80", 1}, /* without an end */
        {"\x90\x80\x80\x80\x80\x00\x01", 7}, /* six bytes */
        {"\xff\xff\xff\xff\x7f\x01", 6}, /* past 32 bits */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct bytes b = {0};
        put(&b, cases[i].bytes, cases[i].n);
        expect_refused(b, "header has a malformed field tag in Request");
    }
}

static void lengths_past_the_end_are_refused(void **state)
{
    (void)state;
    static const uint64_t lengths[] = {
        1, 2, 127, 1u << 20, INT32_MAX, UINT32_MAX, (1ull << 35) - 1};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        struct bytes b = {0}, spec = {0};
        put_tag(&b, STEP, 2);
        put_varint(&b, lengths[i]);
        expect_refused(b, "header field 18 has a length past the end of its message");
        put_tag(&spec, 1, 2); /* inside a submessage: past it, though not past the header */
        put_varint(&spec, lengths[i]);
        struct bytes outer = pool_create(spec);
        put_string(&outer, 9, "0123456789", 10);
        expect_refused(outer,
                       "header field pool_create.spec.1 has a length past the end of its message");
    }
    struct bytes wide = {0};
    put_tag(&wide, STEP, 2);
    put(&wide, "\x80\x80\x80\x80\x80\x00", 6); /* zero, in six bytes */
    expect_refused(wide, "header field 18 has a length past the end of its message");
}

static void values_past_their_type_are_refused(void **state)
{
    (void)state;
    struct bytes step = {0}, b = {0}, packed = {0}, dtype = {0};
    put_uint(&step, 2, UINT32_MAX);
    put_body(&b, STEP, step);
    expect_ok(b);

    b = step = (struct bytes){0};
    put_uint(&step, 2, (uint64_t)UINT32_MAX + 1);
    put_body(&b, STEP, step);
    expect_refused(b, "header field step.layer is encoded as 4294967296, the most is 4294967295");

    b = step = (struct bytes){0};
    put_varint(&packed, 5);
    put_varint(&packed, UINT64_MAX);
    put_body(&step, 7, packed);
    put_body(&b, STEP, step);
    expect_refused(
        b, "header field step.pos is encoded as 18446744073709551615, the most is 4294967295");

    b = (struct bytes){0};
    put_uint(&dtype, 4, (uint64_t)INT32_MAX + 1);
    put_body(&b, STEP, dtype);
    expect_refused(b, "header field step.dtype is encoded as 2147483648, the most is 2147483647");

    b = (struct bytes){0};
    put_tag(&b, 2, 0);
    put(&b, "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", 10);
    expect_refused(b, "header field timeout_us is a varint without an end or past 64 bits");
    b = (struct bytes){0};
    put_tag(&b, 2, 0);
    put(&b, "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00", 11);
    expect_refused(b, "header field timeout_us is a varint without an end or past 64 bits");
}

static void a_known_field_in_another_encoding_is_refused(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_uint(&b, 1, 7);
    expect_refused(b, "header field session has wire type 0, it must be 1");
    b = (struct bytes){0};
    put_uint(&b, STEP, 7);
    expect_refused(b, "header field step has wire type 0, it must be 2");
    struct bytes spec = {0};
    put_string(&spec, 11, "\x01", 1); /* protobuf-c itself takes any wire type for a bool */
    expect_refused(
        pool_create(spec),
        "header field pool_create.spec.is_batch_invariant has wire type 2, it must be 0");
    spec = (struct bytes){0};
    put_float(&spec, 1, 1.0f);
    expect_refused(pool_create(spec),
                   "header field pool_create.spec.name has wire type 5, it must be 2");
}

static void values_cut_off_are_refused(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_tag(&b, 1, 1);
    put(&b, "1234567", 7);
    expect_refused(b, "header field session is cut off by the end of its message");
    b = (struct bytes){0};
    put_tag(&b, 9, 5);
    put(&b, "123", 3);
    expect_refused(b, "header field 9 (unknown) is cut off by the end of its message");
    struct bytes step = {0};
    b = (struct bytes){0};
    put_string(&step, 5, "123456789", 9); /* packed fixed64 */
    put_body(&b, STEP, step);
    expect_refused(b, "header field step.seq is cut off by the end of its message");
}

static void numbers_that_are_not_finite_are_refused(void **state)
{
    (void)state;
    struct bytes layer = {0}, packed = {0};
    put_float(&layer, 1, NAN);
    expect_refused(layer_of(layer),
                   "header field pool_create.spec.layers[0].scale is NaN, it must be finite");
    layer = (struct bytes){0};
    put_float(&layer, 4, -INFINITY);
    expect_refused(
        layer_of(layer),
        "header field pool_create.spec.layers[0].soft_cap is infinite, it must be finite");
    layer = (struct bytes){0};
    float values[] = {1.0f, -0.0f, INFINITY};
    put(&packed, values, sizeof values);
    put_body(&layer, 6, packed);
    expect_refused(
        layer_of(layer),
        "header field pool_create.spec.layers[0].sink_logits is infinite, it must be finite");
}

static void strings_are_utf8_without_control_characters(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t n;
        int bad; /* offset, -1: fine */
    } cases[] = {
        {"", 0, -1},
        {"plain ~", 7, -1},
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", 9, -1}, /* 2, 3 and 4 bytes */
        {"\xf4\x8f\xbf\xbf", 4, -1}, /* U+10FFFF */
        {"\xed\x9f\xbf\xee\x80\x80", 6, -1}, /* around the surrogates */
        {"a\x00z", 3, 1},
        {"a\x1fz", 3, 1},
        {"a\nz", 3, 1},
        {"a\x7fz", 3, 1},
        {"a\xc2\x9fz", 4, 1}, /* U+009F */
        {"a\x80z", 3, 1}, /* a continuation without a start */
        {"a\xc0\x80z", 4, 1}, /* overlong */
        {"a\xc1\xbfz", 4, 1},
        {"a\xe0\x9f\xbfz", 5, 1},
        {"a\xf0\x8f\xbf\xbfz", 6, 1},
        {"a\xed\xa0\x80z", 5, 1}, /* a surrogate */
        {"a\xf4\x90\x80\x80z", 6, 1}, /* past U+10FFFF */
        {"a\xf8\x88\x80\x80\x80", 6, 1},
        {"a\xff", 2, 1},
        {"a\xe2\x82", 3, 1}, /* cut off */
        {"a\xc3", 2, 1},
        {"a\xe2\x82z", 4, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (cases[i].bad < 0) {
            expect_ok(pool_named(cases[i].text, cases[i].n));
            continue;
        }
        char sentence[256];
        snprintf(
            sentence, sizeof sentence,
            "header field pool_create.spec.name has byte 0x%02x at offset %d, it must be UTF-8 "
            "without control characters",
            (uint8_t)cases[i].text[cases[i].bad], cases[i].bad);
        expect_refused(pool_named(cases[i].text, cases[i].n), sentence);
    }
}

static void long_strings_are_refused(void **state)
{
    (void)state;
    char text[WIRE_MAX_STRING_BYTES + 1];
    memset(text, 'x', sizeof text);
    expect_ok(pool_named(text, WIRE_MAX_STRING_BYTES));
    expect_refused(pool_named(text, sizeof text),
                   "header field pool_create.spec.name has 4097 bytes, the most is 4096");
    struct bytes spec = {0};
    for (unsigned i = 0; i < WIRE_MAX_FEATURES; i++)
        put_string(&spec, 14, text, WIRE_MAX_STRING_BYTES);
    expect_ok(pool_create(spec));
    spec = (struct bytes){0};
    for (unsigned i = 0; i < WIRE_MAX_FEATURES + 1; i++)
        put_string(&spec, 14, "x", 1);
    expect_refused(pool_create(spec),
                   "header field pool_create.spec.required_features has more than 64 elements");
}

/* n items: seq, epoch, pos, n_tokens, packed in runs of `run` elements or, if 0, one by one */
static struct bytes step_of(const uint32_t n[4], uint32_t run)
{
    struct bytes step = {0}, request = {0};
    for (uint32_t field = 5; field <= 8; field++) {
        struct bytes packed = {0};
        for (uint32_t i = 0; i < n[field - 5]; i++) {
            if (run == 0 && field == 5)
                put_fixed64(&step, field, i);
            else if (run == 0)
                put_uint(&step, field, i);
            else if (field == 5)
                put(&packed, &(uint64_t){i}, 8);
            else
                put_varint(&packed, i);
            if (run != 0 && (i + 1 == n[field - 5] || (i + 1) % run == 0)) {
                put_body(&step, field, packed);
                packed = (struct bytes){0};
            }
        }
    }
    put_body(&request, STEP, step);
    return request;
}

static void step_arrays_are_bounded_in_every_encoding(void **state)
{
    (void)state;
    const uint32_t most = WIRE_MAX_STEP_ITEMS;
    static const uint32_t runs[] = {0, 1, 7, UINT32_MAX};
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        expect_ok(step_of((uint32_t[]){most, most, most, most}, runs[i]));
        expect_refused(step_of((uint32_t[]){most + 1, 1, 1, 1}, runs[i]),
                       "header field step.seq has more than 4096 elements");
        expect_refused(step_of((uint32_t[]){1, 1, 1, most + 1}, runs[i]),
                       "header field step.n_tokens has more than 4096 elements");
    }
}

static void step_arrays_that_disagree_are_refused(void **state)
{
    (void)state;
    expect_refused(step_of((uint32_t[]){2, 3, 2, 2}, 7),
                   "step.epoch has 3 elements, step.seq has 2");
    expect_refused(step_of((uint32_t[]){2, 2, 0, 2}, 0), "step.pos has 0 elements, step.seq has 2");
    expect_refused(step_of((uint32_t[]){0, 0, 0, 1}, 7),
                   "step.n_tokens has 1 elements, step.seq has 0");
}

static void zeros_in_packed_arrays_are_kept(void **state)
{
    (void)state;
    struct wire_arena a;
    struct wire_request q;
    char why[256];
    struct bytes step = {0}, header = {0};
    put_string(&step, 5, "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 16);
    for (uint32_t field = 6; field <= 8; field++)
        put_string(&step, field, "\0\0", 2);
    put_body(&header, STEP, step);
    struct bytes msg = request_of(header, NULL, 0);
    wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    assert_int_equal(wire_request_decode(msg.at, msg.n, &a, &q, why, sizeof why), ATTN_OK);
    assert_int_equal(q.header->step->n_seq, 2);
    assert_int_equal(q.header->step->n_pos, 2);
    assert_int_equal(q.header->step->seq[1], 0);
    assert_int_equal(q.header->step->pos[1], 0);
    wire_arena_reset(&a);
    free(msg.at);
}

/* Ids of every width, from one to ten bytes each: what fits 32 bits is kept, else refused by name.
 */
static void packed_ids_are_kept_or_refused_whatever_their_width(void **state)
{
    (void)state;
    uint64_t draw = 47;
    for (int round = 0; round < 2000; round++) {
        uint32_t n = random_below(&draw, 40), ids[40], kept = 28 + random_below(&draw, 8);
        struct bytes probe = {0}, header = {0}, packed = {0};
        bool fits = true, is_cut = round % 16 == 0 && n > 0;
        for (uint32_t i = 0; i < n; i++) {
            uint64_t bits = random_below(&draw, kept), id = random_mixed(&draw) >> (63 - bits);
            fits = fits && id <= UINT32_MAX;
            ids[i] = (uint32_t)id;
            put_varint(&packed, id);
        }
        if (is_cut)
            packed.at[packed.n - 1] |= 0x80;
        put_body(&probe, 2, packed);
        put_body(&header, PROBE, probe);
        struct wire_arena a;
        struct wire_request q;
        char why[256];
        struct bytes msg = request_of(header, NULL, 0);
        wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
        attn_status st = wire_request_decode(msg.at, msg.n, &a, &q, why, sizeof why);
        assert_int_equal(st, fits && !is_cut ? ATTN_OK : ATTN_EPROTO);
        if (st == ATTN_OK) {
            assert_int_equal(q.header->probe->n_tokens, n);
            assert_memory_equal(n == 0 ? ids : q.header->probe->tokens, ids, n * sizeof ids[0]);
        } else {
            assert_non_null(strstr(why, "header field probe.tokens is "));
        }
        wire_arena_reset(&a);
        free(msg.at);
    }
}

static void the_number_of_fields_is_bounded(void **state)
{
    (void)state;
    struct bytes b = {0};
    put_body(&b, 22, (struct bytes){0});
    for (unsigned i = 1; i < WIRE_MAX_FIELDS; i++)
        put_string(&b, 100, "", 0);
    struct bytes one_more = {0};
    put(&one_more, b.at, b.n);
    put_string(&one_more, 100, "", 0);
    expect_ok(b);
    expect_refused(one_more, "header has more than 32768 fields");
}

/* The largest pools: the header limit binds before anything else, and the arena's limit never
 * does. */
static void the_largest_pool_unpacks_inside_the_arena_limit(void **state)
{
    (void)state;
    for (int is_packed = 0; is_packed < 2; is_packed++) {
        struct bytes spec = {0};
        const uint32_t heads = is_packed ? 200 : 24;
        for (unsigned l = 0; l < WIRE_MAX_LAYERS; l++) {
            struct bytes layer = {0};
            put_float(&layer, 1, 1.0f);
            for (uint32_t field = 6; field <= 7; field++) {
                struct bytes packed = {0};
                for (uint32_t h = 0; h < heads; h++)
                    if (is_packed)
                        put(&packed, &(float){(float)h}, 4);
                    else
                        put_float(&layer, field, (float)h);
                if (is_packed)
                    put_body(&layer, field, packed);
            }
            put_body(&spec, 12, layer);
        }
        struct bytes header = pool_create(spec);
        assert_in_range(header.n, 100000, WIRE_MAX_HEADER_BYTES);
        expect_ok(header);
    }
    struct bytes layer = {0}, packed = {0};
    for (uint32_t h = 0; h < WIRE_MAX_HEADS + 1; h++)
        put(&packed, &(float){0}, 4);
    put_body(&layer, 7, packed);
    expect_refused(layer_of(layer), "header field pool_create.spec.layers[0].alibi_slopes has more "
                                    "than 1024 elements");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_nested_ten_thousand_deep_are_refused_or_skipped),
        cmocka_unit_test(a_mebibyte_of_empty_submessages_is_refused),
        cmocka_unit_test(two_bodies_are_refused),
        cmocka_unit_test(a_scalar_given_twice_is_refused),
        cmocka_unit_test(a_missing_body_and_an_unknown_body_are_told_apart),
        cmocka_unit_test(unknown_fields_are_ignored),
        cmocka_unit_test(groups_and_reserved_wire_types_are_refused),
        cmocka_unit_test(malformed_tags_are_refused),
        cmocka_unit_test(lengths_past_the_end_are_refused),
        cmocka_unit_test(values_past_their_type_are_refused),
        cmocka_unit_test(a_known_field_in_another_encoding_is_refused),
        cmocka_unit_test(values_cut_off_are_refused),
        cmocka_unit_test(numbers_that_are_not_finite_are_refused),
        cmocka_unit_test(strings_are_utf8_without_control_characters),
        cmocka_unit_test(long_strings_are_refused),
        cmocka_unit_test(step_arrays_are_bounded_in_every_encoding),
        cmocka_unit_test(step_arrays_that_disagree_are_refused),
        cmocka_unit_test(zeros_in_packed_arrays_are_kept),
        cmocka_unit_test(packed_ids_are_kept_or_refused_whatever_their_width),
        cmocka_unit_test(the_number_of_fields_is_bounded),
        cmocka_unit_test(the_largest_pool_unpacks_inside_the_arena_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
