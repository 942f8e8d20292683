/* test_protocol_doc.c: docs/protocol.md and the pages of docs/protocol/ tell the truth: their
 * tables against the headers, the worked example against the codec. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kv_layout.h"
#include "kernels/reference.h"
#include "samples.h"

static char *doc; /* the front page, then the others */

static int doc_load(void **state)
{
    (void)state;
    glob_t pages;
    if (glob(PROTOCOL_DOC ".md", 0, NULL, &pages) != 0 ||
        glob(PROTOCOL_DOC "/*.md", GLOB_APPEND, NULL, &pages) != 0)
        return -1;
    const size_t room = 1 << 20;
    size_t used = 0;
    doc = calloc(1, room);
    for (size_t i = 0; i < pages.gl_pathc; i++) {
        FILE *f = fopen(pages.gl_pathv[i], "r");
        if (f == NULL)
            return -1;
        used += fread(doc + used, 1, room - 1 - used, f);
        fclose(f);
    }
    globfree(&pages);
    return used > 0 && used < room - 1 ? 0 : -1;
}

static int doc_free(void **state)
{
    (void)state;
    free(doc);
    return 0;
}

static void expect_line(const char *line)
{
    const char *at = strstr(doc, line);
    if (at == NULL)
        fail_msg("the pages have no \"%s\"", line);
}

static size_t count(const char *text)
{
    size_t n = 0;
    for (const char *at = doc; (at = strstr(at, text)) != NULL; at++)
        n++;
    return n;
}

static void every_status_is_documented_with_its_value(void **state)
{
    (void)state;
    size_t n = 0;
    char line[256];
#define X(name, value, message, is_retryable)                                                      \
    snprintf(line, sizeof line, "\n| %d | `%s` | %s | %s |", value, #name, message,                \
             is_retryable ? "yes" : "no");                                                         \
    expect_line(line);                                                                             \
    n++;
    ATTN_STATUS_MAP(X)
#undef X
    assert_int_equal(count(" | `ATTN_"), n); /* and no other */
}

static void every_limit_is_documented_with_its_value(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        uint32_t value;
    } limits[] = {
#define LIMIT(name) {#name, name}
        LIMIT(WIRE_MAX_HEADER_BYTES), LIMIT(WIRE_MAX_DEPTH),         LIMIT(WIRE_MAX_SUBMESSAGES),
        LIMIT(WIRE_MAX_FIELDS),       LIMIT(WIRE_MAX_STEP_ITEMS),    LIMIT(WIRE_MAX_STRING_BYTES),
        LIMIT(WIRE_MAX_JSON_BYTES),   LIMIT(WIRE_MAX_LAYERS),        LIMIT(WIRE_MAX_HEADS),
        LIMIT(WIRE_MAX_FEATURES),     LIMIT(WIRE_MAX_TOKENS),        LIMIT(WIRE_MAX_CHUNK_BLOCKS),
        LIMIT(WIRE_MAX_CALLS),        LIMIT(WIRE_MAX_PARENTS),       LIMIT(WIRE_MAX_TREE_NODES),
        LIMIT(WIRE_MAX_INDICES),      LIMIT(WIRE_MAX_WEIGHTS_BYTES),
    };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        char line[256];
        snprintf(line, sizeof line, " | %u | `%s` |\n", limits[i].value, limits[i].name);
        expect_line(line);
    }
    assert_int_equal(count("`WIRE_MAX_"), sizeof limits / sizeof limits[0]);
}

/* Every member of body has its row in the table of requests, or shares one. */
static void every_request_is_documented(void **state)
{
    (void)state;
    const ProtobufCMessageDescriptor *d = &attnd__request__descriptor;
    size_t n_bodies = 0;
    for (unsigned i = 0; i < d->n_fields; i++) {
        if (!(d->fields[i].flags & PROTOBUF_C_FIELD_FLAG_ONEOF))
            continue;
        char name[64];
        n_bodies++;
        snprintf(name, sizeof name, "`%s`", d->fields[i].name);
        const char *table = strstr(doc, "| request | body of the reply |");
        assert_non_null(table);
        const char *end = strstr(table, "\n\n"), *at = strstr(table, name);
        if (at == NULL || at > end)
            fail_msg("%s has no row in the table of requests", name);
    }
    assert_int_equal(n_bodies, 33);
}

static void dtype_numbers_agree_between_schema_and_header(void **state)
{
    (void)state;
    char name[64];
    assert_int_equal(ATTND__DTYPE__DTYPE_NONE, ATTN_DTYPE_NONE);
#define X(dtype, number, text, bytes)                                                              \
    {                                                                                              \
        const ProtobufCEnumValue *v =                                                              \
            protobuf_c_enum_descriptor_get_value(&attnd__dtype__descriptor, dtype);                \
        assert_non_null(v);                                                                        \
        snprintf(name, sizeof name, "ATTN_%s", v->name);                                           \
        assert_string_equal(name, #dtype);                                                         \
    }
    ATTN_DTYPE_MAP(X)
#undef X
}

/* The next ```hex block from *at. */
static uint8_t *hex_block(const char **at, size_t *out_bytes)
{
    const char *p = strstr(*at, "```hex\n");
    assert_non_null(p);
    p += strlen("```hex\n");
    const char *end = strstr(p, "```");
    assert_non_null(end);
    uint8_t *bytes = aligned_alloc(WIRE_ALIGN, 4096);
    size_t n = 0;
    while (p < end) {
        unsigned byte;
        int used;
        if (*p == '#')
            p = strchr(p, '\n');
        else if (sscanf(p, "%2x%n", &byte, &used) == 1) {
            bytes[n++] = (uint8_t)byte;
            p += used;
        }
        p += strspn(p, " \n");
    }
    *at = end;
    *out_bytes = n;
    return bytes;
}

static void the_worked_example_is_a_real_exchange(void **state)
{
    (void)state;
    const char *at = doc;
    char why[256] = "";
    struct wire_arena a;
    struct wire_request q;
    struct wire_reply r;
    struct wire_step_layout l;
    size_t n_request, n_reply, n_again;
    uint8_t *request = hex_block(&at, &n_request), *reply = hex_block(&at, &n_reply);
    static const float q_values[] = {1, 2, 3, 4}, out_values[] = {0.5f, 1, 1.5f, 2};

    wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    if (wire_request_decode(request, n_request, &a, &q, why, sizeof why) != ATTN_OK ||
        wire_reply_decode(reply, n_reply, &a, &r, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    assert_int_equal(q.request_id, 7);
    assert_int_equal(r.request_id, 7);
    assert_int_equal(q.header->session, 9);
    assert_int_equal(q.header->body_case, ATTND__REQUEST__BODY_STEP);
    const Attnd__Step *s = q.header->step;
    assert_int_equal(s->n_seq, 1);
    assert_int_equal(s->pool, 1);
    assert_int_equal(s->seq[0], 5);
    assert_int_equal(s->epoch[0], 1);
    assert_int_equal(s->pos[0], 3);
    assert_int_equal(wire_step_layout_of(s, &(struct wire_shape){1, 1, 4, 4, false, ATTN_F32, 0, 0},
                                         &l, why, sizeof why),
                     ATTN_OK);
    assert_int_equal(l.request_bytes, q.payload_bytes);
    assert_memory_equal(q.payload + l.q_offset, q_values, sizeof q_values);
    assert_int_equal(r.header->status, ATTN_OK);
    assert_int_equal(r.header->queue_ns, 1000);
    assert_int_equal(r.header->device_ns, 2000);
    assert_int_equal(r.header->body_case, ATTND__REPLY__BODY_STEP);
    assert_int_equal(r.header->step->n_item_status, 0);
    assert_int_equal(l.reply_bytes, r.payload_bytes);
    assert_memory_equal(r.payload + l.out_offset, out_values, sizeof out_values);
    wire_arena_reset(&a);

    uint8_t *again = sample_recode(request, n_request, false, &n_again, why, sizeof why);
    assert_non_null(again);
    assert_int_equal(n_again, n_request);
    assert_memory_equal(again, request, n_request);
    free(again);
    free(request);
    free(reply);
}

/* Each row of the table of examples: kv_dtype, elements, scale's bits, codes. */
static void the_examples_of_quantised_rows_are_what_is_stored(void **state)
{
    (void)state;
    const char *at =
        strstr(doc, "| kv_dtype | row | scale, as f32 bits | codes |\n|---|---|---|---|\n");
    int n_examples = 0;
    assert_non_null(at);
    at = strstr(at, "---|\n") + strlen("---|\n");
    for (; *at == '|'; at = strchr(at, '\n') + 1, n_examples++) {
        char name[16];
        double row[64];
        uint8_t codes[64];
        float scale;
        uint32_t n = 0, bits, want_bits, code;
        int used;
        assert_int_equal(sscanf(at, "| %15[A-Z0-9_] |%n", name, &used), 1);
        const char *p = at + used;
        for (; n < 64 && sscanf(p, "%lf%n", &row[n], &used) == 1; n++)
            p += used;
        assert_int_equal(sscanf(p, " | %8x |%n", &want_bits, &used), 1);
        p += used;
        const attn_dtype dtype = strcmp(name, "INT8") == 0 ? ATTN_INT8 : ATTN_FP8_E4M3;
        assert_true(dtype == ATTN_INT8 || strcmp(name, "FP8_E4M3") == 0);
        reference_quantise(dtype, row, n, codes, &scale);
        memcpy(&bits, &scale, sizeof bits);
        assert_int_equal(bits, want_bits);
        for (uint32_t i = 0; i < n; i++, p += used) {
            assert_int_equal(sscanf(p, " %2x%n", &code, &used), 1);
            assert_int_equal(codes[i], code);
        }
        assert_int_equal(strncmp(p, " |\n", 3), 0);
        assert_true(n >= 8);
    }
    assert_true(n_examples >= 4);
}

/* n bytes in hex from *p on, which are what is at `want`. */
static void take_bytes(const char **p, const uint8_t *want, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t byte;
        int used;
        assert_int_equal(sscanf(*p, " %2x%n", &byte, &used), 1);
        assert_int_equal(byte, want[i]);
        *p += used;
    }
    assert_int_equal(strncmp(*p, " |", 2), 0);
    *p += 2;
}

/* Each row of the table of FP4's: kv_dtype, elements, scales, codes. */
static void the_examples_of_fp4_rows_are_what_is_stored(void **state)
{
    (void)state;
    const char *at = strstr(doc, "| kv_dtype | row | scales | codes |\n|---|---|---|---|\n");
    int n_examples = 0;
    assert_non_null(at);
    at = strstr(at, "---|\n") + strlen("---|\n");
    for (; *at == '|'; at = strchr(at, '\n') + 1, n_examples++) {
        double row[64];
        uint8_t codes[32], scales[8];
        uint32_t n = 0;
        int used;
        const attn_dtype dtype = strncmp(at, "| NVFP4 |", 9) == 0 ? ATTN_NVFP4 : ATTN_MXFP4;
        assert_true(dtype == ATTN_NVFP4 || strncmp(at, "| MXFP4 |", 9) == 0);
        const char *p = at + 9;
        for (; n < 64 && sscanf(p, "%lf%n", &row[n], &used) == 1; n++)
            p += used;
        assert_int_equal(strncmp(p, " |", 2), 0);
        p += 2;
        assert_int_equal(n % kv_group(dtype), 0);
        reference_quantise(dtype, row, n, codes, scales);
        take_bytes(&p, scales, kv_scale_bytes(dtype, n));
        take_bytes(&p, codes, n / 2);
    }
    assert_int_equal(n_examples, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_examples_of_quantised_rows_are_what_is_stored),
        cmocka_unit_test(the_examples_of_fp4_rows_are_what_is_stored),
        cmocka_unit_test(every_status_is_documented_with_its_value),
        cmocka_unit_test(every_limit_is_documented_with_its_value),
        cmocka_unit_test(every_request_is_documented),
        cmocka_unit_test(dtype_numbers_agree_between_schema_and_header),
        cmocka_unit_test(the_worked_example_is_a_real_exchange),
    };
    return cmocka_run_group_tests(tests, doc_load, doc_free);
}
