/* test_wire_schema.c: the schema against what the scan can walk, and the scan against schemas that
 * attnd.proto is not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "bytes.h"
#include "proto/wire_scan.h"

/* attnd.proto reaches neither limit, so a schema that could: message Tree { repeated Tree sub = 1;
 * } */
static const ProtobufCMessageDescriptor tree;
static const ProtobufCFieldDescriptor tree_fields[] = {
    {.name = "sub",
     .id = 1,
     .label = PROTOBUF_C_LABEL_REPEATED,
     .type = PROTOBUF_C_TYPE_MESSAGE,
     .descriptor = &tree},
};
static const ProtobufCIntRange tree_ranges[] = {{1, 0}, {0, 1}};
static const ProtobufCMessageDescriptor tree = {
    .magic = PROTOBUF_C__MESSAGE_DESCRIPTOR_MAGIC,
    .short_name = "Tree",
    .n_fields = 1,
    .fields = tree_fields,
    .n_field_ranges = 1,
    .field_ranges = tree_ranges,
};

/* depth 1: a leaf */
static struct bytes tree_of(uint32_t depth, uint32_t n_subs)
{
    struct bytes b = {0};
    for (uint32_t i = 0; depth > 1 && i < n_subs; i++)
        put_body(&b, 1, tree_of(depth - 1, n_subs));
    return b;
}

static void depth_and_submessages_are_bounded_whatever_the_schema(void **state)
{
    (void)state;
    static const struct {
        uint32_t depth, n_subs;
        const char *sentence; /* NULL: fine */
    } cases[] = {
        {WIRE_MAX_DEPTH, 1, NULL},
        {WIRE_MAX_DEPTH + 1, 1,
         "header field sub[0].sub[0].sub[0].sub[0].sub is nested 6 deep, the most is 5"},
        {10000, 1, "header field sub[0].sub[0].sub[0].sub[0].sub is nested 6 deep, the most is 5"},
        {3, 32, NULL}, /* 32 + 32 * 32 = 1056 */
        {3, 33, "header field sub[32].sub is submessage 1101, the most is 1100"}, /* 1122 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char why[256] = "";
        struct bytes b = tree_of(cases[i].depth, cases[i].n_subs);
        attn_status st = wire_scan(&tree, b.at, b.n, why, sizeof why);
        assert_int_equal(st, cases[i].sentence ? ATTN_EPROTO : ATTN_OK);
        assert_string_equal(why, cases[i].sentence ? cases[i].sentence : "");
        free(b.at);
    }
}

static void schema_walk(const ProtobufCMessageDescriptor *d, unsigned depth)
{
    assert_in_range(depth, 1, WIRE_MAX_DEPTH); /* also: no message contains itself */
    assert_in_range(d->n_fields, 0, 64);
    for (unsigned i = 0; i < d->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &d->fields[i];
        switch (f->type) {
        case PROTOBUF_C_TYPE_MESSAGE:
            schema_walk(f->descriptor, depth + 1);
            break;
        case PROTOBUF_C_TYPE_UINT32:
        case PROTOBUF_C_TYPE_UINT64:
        case PROTOBUF_C_TYPE_SINT32:
        case PROTOBUF_C_TYPE_FIXED64:
        case PROTOBUF_C_TYPE_FLOAT:
        case PROTOBUF_C_TYPE_BOOL:
        case PROTOBUF_C_TYPE_ENUM:
        case PROTOBUF_C_TYPE_STRING:
        case PROTOBUF_C_TYPE_BYTES:
            break;
        default:
            fail_msg("%s.%s is of a type that the scan does not know", d->name, f->name);
        }
    }
}

static void the_schema_stays_inside_what_the_scan_knows(void **state)
{
    (void)state;
    schema_walk(&attnd__request__descriptor, 1);
    schema_walk(&attnd__reply__descriptor, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(depth_and_submessages_are_bounded_whatever_the_schema),
        cmocka_unit_test(the_schema_stays_inside_what_the_scan_knows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
