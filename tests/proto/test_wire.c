/* test_wire.c: whole messages: vectors, every kind there and back, preamble and framing errors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "samples.h"
#include "tests/random.h"

static uint8_t *hex_load(const char *name, size_t *out_bytes)
{
    char path[4096];
    snprintf(path, sizeof path, VECTORS_DIR "/%s.hex", name);
    FILE *f = fopen(path, "r");
    if (f == NULL)
        fail_msg("%s is missing", path);
    uint8_t *bytes = aligned_alloc(WIRE_ALIGN, 1 << 16);
    size_t n = 0;
    char line[4096];
    while (fgets(line, sizeof line, f) != NULL) {
        line[strcspn(line, "#")] = 0;
        unsigned byte;
        int used;
        for (char *at = line; sscanf(at, "%2x%n", &byte, &used) == 1; at += used)
            bytes[n++] = (uint8_t)byte;
        assert_true(n < (1 << 16) - sizeof line);
    }
    fclose(f);
    *out_bytes = n;
    return bytes;
}

static void every_vector_decodes_and_encodes_to_the_same_bytes(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_samples; i++) {
        const struct sample *s = &samples[i];
        char why[256] = "";
        size_t n, again_n = 0, built_n;
        uint8_t *vector = hex_load(s->name, &n);
        uint8_t *built = sample_build(s, &built_n);
        uint8_t *again = sample_recode(vector, n, s->is_reply, &again_n, why, sizeof why);
        if (again == NULL)
            fail_msg("%s: %s", s->name, why);
        assert_int_equal(again_n, n);
        assert_memory_equal(again, vector, n);
        assert_int_equal(built_n, n);
        assert_memory_equal(built, vector, n);
        free(again);
        free(built);
        free(vector);
    }
}

/* Written by hand from docs/protocol.md, not by any encoder. */
static void a_step_written_by_hand_decodes_to_its_fields(void **state)
{
    (void)state;
    _Alignas(WIRE_ALIGN) uint8_t msg[80] = {
        'A',  'T',  'N',  'D',  1,    0, 0,    0, 37, 0,
        0,    0, /* magic, version, flags, header bytes */
        16,   0,    0,    0, /* payload bytes */
        7,    0,    0,    0,    0,    0, 0,    0, /* request id */
        0x09, 9,    0,    0,    0,    0, 0,    0, 0, /* session */
        0x92, 0x01, 25, /* step */
        0x08, 1,    0x18, 2,    0x20, 1, /* pool, flags, dtype */
        0x2a, 8,    5,    0,    0,    0, 0,    0, 0,  0, /* seq */
        0x32, 1,    1,    0x3a, 1,    3, 0x42, 1, 1, /* epoch, pos, n_tokens */
    };
    struct wire_arena a;
    struct wire_request q;
    char why[256] = "";
    wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    if (wire_request_decode(msg, sizeof msg, &a, &q, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    assert_int_equal(q.request_id, 7);
    assert_int_equal(q.header->session, 9);
    assert_int_equal(q.header->timeout_us, 0);
    assert_int_equal(q.header->body_case, ATTND__REQUEST__BODY_STEP);
    const Attnd__Step *s = q.header->step;
    assert_int_equal(s->pool, 1);
    assert_int_equal(s->layer, 0);
    assert_int_equal(s->flags, WIRE_STEP_ATTEND);
    assert_int_equal(s->dtype, ATTND__DTYPE__F32);
    assert_int_equal(s->n_seq, 1);
    assert_int_equal(s->seq[0], 5);
    assert_int_equal(s->epoch[0], 1);
    assert_int_equal(s->pos[0], 3);
    assert_int_equal(s->n_tokens[0], 1);
    assert_ptr_equal(q.payload, msg + 64);
    assert_int_equal(q.payload_bytes, 16);
    wire_arena_reset(&a);
}

/* Field 9 of Step was once a plan that stood in place of items. */
static void a_step_that_names_a_plan_is_refused_by_name(void **state)
{
    (void)state;
    static const uint8_t steps[][15] = {
        {0x10, 0x03, 0x49, 9, 0, 0, 0, 0, 0, 0, 0}, /* layer 3 of plan 9 */
        {0x49, 0, 0, 0, 0, 0, 0, 0, 0}, /* plan 0 */
        {0x08, 0x01, 0x10, 0x03, 0x48, 0x09}, /* beside a pool, and as a varint */
    };
    static const uint8_t n_bytes[] = {11, 9, 6};
    for (uint32_t i = 0; i < 6; i++) {
        const uint32_t n_step = n_bytes[i / 2];
        const bool is_plan = i % 2;
        _Alignas(WIRE_ALIGN) uint8_t msg[64] = {'A', 'T', 'N', 'D', WIRE_VERSION};
        struct wire_arena a;
        struct wire_request q;
        char why[256] = "";
        uint8_t *h = msg + WIRE_PREAMBLE_BYTES;
        msg[16] = 7; /* the request id */
        *h++ = is_plan ? 0xba : 0x92; /* Request.plan or .step */
        *h++ = 0x01;
        if (is_plan) {
            *h++ = (uint8_t)(n_step + 2);
            *h++ = 0x22; /* Plan.step */
        }
        *h++ = (uint8_t)n_step;
        memcpy(h, steps[i / 2], n_step);
        msg[8] = (uint8_t)(h + n_step - msg - WIRE_PREAMBLE_BYTES);
        wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
        attn_status st = wire_request_decode(msg, sizeof msg, &a, &q, why, sizeof why);
        assert_int_equal(st, ATTN_ENOTSUP);
        assert_int_equal(q.request_id, 7);
        assert_string_equal(why, is_plan ? "plan.step.plan is not supported: a step names its items"
                                         : "step.plan is not supported: a step names its items");
        wire_arena_reset(&a);
    }
}

/* Decodes exactly n bytes in a buffer of its own, as both kinds; a message that decodes must
 * survive being encoded and decoded again. Returns how many of the two decoded. */
static int decode_and_recode(const uint8_t *bytes, size_t n)
{
    int n_decoded = 0;
    for (int is_reply = 0; is_reply < 2; is_reply++) {
        char why[256] = "";
        size_t again_n = 0, third_n = 0;
        uint8_t *msg = malloc(n + (n == 0));
        memcpy(msg, bytes, n);
        uint8_t *again = sample_recode(msg, n, is_reply, &again_n, why, sizeof why);
        if (again != NULL) {
            uint8_t *third = sample_recode(again, again_n, is_reply, &third_n, why, sizeof why);
            if (third == NULL)
                fail_msg("encoded message does not decode: %s", why);
            assert_int_equal(third_n, again_n);
            assert_memory_equal(third, again, third_n);
            free(third);
            n_decoded++;
        } else {
            assert_true(why[0] != 0);
        }
        free(again);
        free(msg);
    }
    return n_decoded;
}

static void a_message_cut_at_any_byte_is_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_samples; i++) {
        size_t n;
        uint8_t *msg = sample_build(&samples[i], &n);
        for (size_t cut = 0; cut < n; cut++)
            assert_int_equal(decode_and_recode(msg, cut), 0);
        assert_int_equal(decode_and_recode(msg, n), 1);
        free(msg);
    }
}

static void a_header_cut_at_any_byte_does_no_harm(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_samples; i++) {
        size_t n;
        uint8_t *msg = sample_build(&samples[i], &n);
        uint32_t header_bytes;
        memcpy(&header_bytes, msg + 8, 4);
        for (uint32_t cut = 0; cut < header_bytes; cut++) {
            uint8_t shorter[4096] = {0};
            uint32_t no_payload = 0;
            memcpy(shorter, msg, WIRE_PREAMBLE_BYTES + cut);
            memcpy(shorter + 8, &cut, 4);
            memcpy(shorter + 12, &no_payload, 4);
            decode_and_recode(shorter, (WIRE_PREAMBLE_BYTES + cut + 63) / 64 * 64);
        }
        free(msg);
    }
}

static void any_flipped_bit_does_no_harm(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_samples; i++) {
        size_t n;
        uint8_t *msg = sample_build(&samples[i], &n);
        size_t head_bytes = n - samples[i].payload_bytes;
        for (size_t bit = 0; bit < head_bytes * 8; bit++) {
            msg[bit / 8] ^= (uint8_t)(1u << bit % 8);
            int n_decoded = decode_and_recode(msg, n);
            if (bit / 8 < 16) /* magic, version, flags, sizes; a request may turn into a reply */
                assert_in_range(n_decoded, 0, bit == 48 ? 1 : 0);
            msg[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
        free(msg);
    }
}

static void random_headers_do_no_harm(void **state)
{
    (void)state;
    const uint64_t seed0 = 20240607;
    uint64_t seed = seed0;
    print_message("seed %llu\n", (unsigned long long)seed0);
    for (int round = 0; round < 20000; round++) {
        uint8_t msg[320] = "ATND\1";
        uint32_t header_bytes = (uint32_t)(random_next(&seed) % 200);
        size_t n = (WIRE_PREAMBLE_BYTES + header_bytes + 63) / 64 * 64;
        msg[6] = round & 1;
        msg[16] = 1;
        memcpy(msg + 8, &header_bytes, 4);
        for (uint32_t i = 0; i < header_bytes; i++)
            msg[WIRE_PREAMBLE_BYTES + i] =
                (uint8_t)(random_next(&seed) >> (random_next(&seed) % 3 * 2));
        decode_and_recode(msg, n);
    }
}

/* Takes a sample's step, writes bytes at offset, and expects the status and sentence. */
static void expect_step(size_t offset, const void *bytes, size_t n, attn_status expected,
                        uint64_t expected_id, const char *sentence)
{
    struct wire_arena a;
    struct wire_request q;
    char why[256] = "";
    size_t msg_bytes;
    uint8_t *msg = hex_load("request_step", &msg_bytes);
    memcpy(msg + offset, bytes, n);
    memset(&q, 0xee, sizeof q);
    wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    assert_int_equal(wire_request_decode(msg, msg_bytes, &a, &q, why, sizeof why), expected);
    assert_string_equal(why, sentence);
    assert_int_equal(q.request_id, expected_id);
    assert_null(q.header);
    wire_arena_reset(&a);
    free(msg);
}

static void preamble_errors_name_the_field_and_keep_the_request_id(void **state)
{
    (void)state;
    const uint64_t id = SAMPLE_REQUEST_ID;
    expect_step(0, "XTND", 4, ATTN_EPROTO, 0, "magic is 58 54 4e 44, it must be \"ATND\"");
    expect_step(4, "\2\0", 2, ATTN_ENOTSUP, id, "version is 2, this side speaks 1");
    expect_step(6, "\4\0", 2, ATTN_ENOTSUP, id, "flags are 0x4, only 0x1 is known");
    expect_step(6, "\1\0", 2, ATTN_EPROTO, id, "flags are 0x1, this is not a request");
    expect_step(8, "\1\0\x10\0", 4, ATTN_EPROTO, id,
                "header bytes are 1048577, the most is 1048576");
    expect_step(8, "\0\0\0\0", 4, ATTN_EPROTO, id,
                "message has 2816 bytes, header bytes 0 and payload bytes 2688 make 2752");
    expect_step(12, "\xff\xff\xff\xff", 4, ATTN_EPROTO, id,
                "message has 2816 bytes, header bytes 55 and payload bytes 4294967295 make "
                "4294967423");
    expect_step(16, "\0\0\0\0\0\0\0\0", 8, ATTN_EPROTO, 0,
                "request id is 0, it must be another number");
    expect_step(127, "\x80", 1, ATTN_EPROTO, id,
                "padding byte at offset 127 is 0x80, it must be 0");
}

static void a_preamble_is_checked_against_the_message_limit(void **state)
{
    (void)state;
    struct wire_preamble p;
    char why[256] = "";
    size_t n;
    uint8_t *msg = hex_load("request_step", &n);
    assert_int_equal(wire_preamble_decode(msg, n, &p, why, sizeof why), ATTN_OK);
    assert_int_equal(wire_message_bytes(&p), n);
    assert_int_equal(p.payload_bytes, 2688);
    assert_int_equal(wire_preamble_decode(msg, n - 1, &p, why, sizeof why), ATTN_EPROTO);
    assert_string_equal(why, "message has 2816 bytes, the most is 2815");
    assert_int_equal(p.request_id, SAMPLE_REQUEST_ID);
    free(msg);
}

static void a_why_of_any_size_is_enough(void **state)
{
    (void)state;
    size_t n;
    uint8_t *msg = hex_load("request_step", &n);
    msg[WIRE_PREAMBLE_BYTES] = 0x0b; /* session as a group */
    for (size_t why_bytes = 0; why_bytes < 128; why_bytes++) {
        struct wire_arena a;
        struct wire_request q;
        char *why = malloc(why_bytes + 1);
        why[why_bytes] = 0x55;
        wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
        assert_int_equal(wire_request_decode(msg, n, &a, &q, why, why_bytes), ATTN_EPROTO);
        assert_int_equal(why[why_bytes], 0x55);
        if (why_bytes > 0)
            assert_int_equal(strlen(why), why_bytes - 1 < 73 ? why_bytes - 1 : 73);
        wire_arena_reset(&a);
        free(why);
    }
    free(msg);
}

static void a_reply_with_a_positive_status_is_refused(void **state)
{
    (void)state;
    struct wire_arena a;
    struct wire_reply r;
    char why[256] = "";
    size_t n;
    uint8_t *msg = hex_load("reply_error", &n);
    assert_int_equal(msg[WIRE_PREAMBLE_BYTES], 0x08); /* status, zigzag */
    msg[WIRE_PREAMBLE_BYTES + 1] = 6;
    wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    assert_int_equal(wire_reply_decode(msg, n, &a, &r, why, sizeof why), ATTN_EPROTO);
    assert_string_equal(why, "status is 3, it must be 0 or negative");
    assert_int_equal(r.request_id, SAMPLE_REQUEST_ID);
    assert_null(r.header);
    wire_arena_reset(&a);
    free(msg);
}

static void a_payload_that_the_body_has_no_place_for_is_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_samples; i++) {
        size_t n;
        uint8_t *msg = hex_load(samples[i].name, &n); /* with room behind */
        char why[256] = "";
        struct wire_arena a;
        struct wire_request q;
        struct wire_reply r;
        if (samples[i].payload_bytes != 0) {
            free(msg);
            continue;
        }
        msg[12] = 64;
        memset(msg + n, 0, 64);
        wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
        attn_status st = samples[i].is_reply
                             ? wire_reply_decode(msg, n + 64, &a, &r, why, sizeof why)
                             : wire_request_decode(msg, n + 64, &a, &q, why, sizeof why);
        assert_int_equal(st, ATTN_EPROTO);
        assert_string_equal(why, "payload bytes are 64, this body has no payload");
        assert_null(samples[i].is_reply ? (const void *)r.header : (const void *)q.header);
        wire_arena_reset(&a);
        free(msg);
    }
}

static void a_header_over_the_limit_has_no_encoding(void **state)
{
    (void)state;
    static float slopes[WIRE_MAX_HEADS];
    Attnd__LayerSpec layer = ATTND__LAYER_SPEC__INIT;
    Attnd__LayerSpec *layers[WIRE_MAX_LAYERS];
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate create = ATTND__POOL_CREATE__INIT;
    Attnd__Request q = ATTND__REQUEST__INIT;
    for (size_t i = 0; i < WIRE_MAX_LAYERS; i++)
        layers[i] = &layer;
    layer.alibi_slopes = slopes;
    layer.n_alibi_slopes = WIRE_MAX_HEADS;
    spec.layers = layers;
    create.spec = &spec;
    q.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    q.pool_create = &create;
    spec.n_layers = 255;
    assert_in_range(wire_request_head_bytes(&q), 255 * 4096, WIRE_MAX_HEADER_BYTES);
    spec.n_layers = WIRE_MAX_LAYERS;
    assert_int_equal(wire_request_head_bytes(&q), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_vector_decodes_and_encodes_to_the_same_bytes),
        cmocka_unit_test(a_step_written_by_hand_decodes_to_its_fields),
        cmocka_unit_test(a_step_that_names_a_plan_is_refused_by_name),
        cmocka_unit_test(a_message_cut_at_any_byte_is_refused),
        cmocka_unit_test(a_header_cut_at_any_byte_does_no_harm),
        cmocka_unit_test(any_flipped_bit_does_no_harm),
        cmocka_unit_test(random_headers_do_no_harm),
        cmocka_unit_test(preamble_errors_name_the_field_and_keep_the_request_id),
        cmocka_unit_test(a_preamble_is_checked_against_the_message_limit),
        cmocka_unit_test(a_why_of_any_size_is_enough),
        cmocka_unit_test(a_reply_with_a_positive_status_is_refused),
        cmocka_unit_test(a_payload_that_the_body_has_no_place_for_is_refused),
        cmocka_unit_test(a_header_over_the_limit_has_no_encoding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
