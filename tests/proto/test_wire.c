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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_vector_decodes_and_encodes_to_the_same_bytes),
        cmocka_unit_test(a_step_written_by_hand_decodes_to_its_fields),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
