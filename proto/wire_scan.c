/* wire_scan.c: walks a header's wire format before protobuf-c sees it.
 *
 * protobuf-c 1.4.1 recurses as deep as the bytes ask for, spends dozens of bytes of memory for each
 * byte of empty submessages, cuts wide varints to the field's width and merges repeated singular
 * messages. All of that is refused here, with the field's name. Reads the bytes once, allocates
 * nothing.
 */
#include "proto/wire_scan.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/wire_limits.h"

enum wire_type { WIRE_VARINT = 0, WIRE_64BIT = 1, WIRE_BYTES = 2, WIRE_32BIT = 5 };

enum {
    MAX_MESSAGE_FIELDS = 64, /* most fields of one message kind; a test holds the schema to it */
    MAX_VARINT_BYTES = 10,
    MAX_VARINT32_BYTES = 5,
};

struct reader {
    const uint8_t *at, *end;
};

/* A message that is being walked. */
struct frame {
    const ProtobufCMessageDescriptor *desc;
    const struct frame *parent; /* NULL at the top */
    const ProtobufCFieldDescriptor *in_field; /* of parent */
    uint32_t in_index; /* which element of in_field */
    uint32_t depth; /* the top is 1 */
    uint32_t n_elements[MAX_MESSAGE_FIELDS]; /* how often desc->fields[i] occurred */
};

struct scan {
    uint32_t n_fields, n_submessages;
    char *why;
    size_t why_bytes;
};

/* The most elements that repeated fields of a message kind may have. */
static const struct {
    const ProtobufCMessageDescriptor *desc;
    const char *field; /* NULL: all of the kind's together */
    uint32_t max_elements;
} element_limits[] = {
    {&attnd__step__descriptor, "parent", WIRE_MAX_PARENTS},
    {&attnd__step__descriptor, NULL, WIRE_MAX_STEP_ITEMS},
    {&attnd__commit__descriptor, NULL, WIRE_MAX_TREE_NODES},
    {&attnd__step_reply__descriptor, NULL, WIRE_MAX_STEP_ITEMS},
    {&attnd__open__descriptor, NULL, WIRE_MAX_TOKENS},
    {&attnd__tokens__descriptor, "retention", WIRE_MAX_RETENTIONS},
    {&attnd__tokens__descriptor, NULL, WIRE_MAX_TOKENS},
    {&attnd__layer_spec__descriptor, NULL, WIRE_MAX_HEADS},
    {&attnd__pool_spec__descriptor, "layers", WIRE_MAX_LAYERS},
    {&attnd__seq_reply__descriptor, NULL, WIRE_MAX_LAYERS},
    {&attnd__export_reply__descriptor, "tokens", WIRE_MAX_TOKENS},
    {&attnd__export_reply__descriptor, "layer_len", WIRE_MAX_LAYERS},
    {&attnd__export_reply__descriptor, "sums", 2 * WIRE_MAX_CHUNK_BLOCKS},
    {&attnd__import__descriptor, "layer_len", WIRE_MAX_LAYERS},
    {&attnd__import__descriptor, "sums", 2 * WIRE_MAX_CHUNK_BLOCKS},
    {&attnd__plan__descriptor, NULL, WIRE_MAX_LAYERS},
    {&attnd__probe__descriptor, NULL, WIRE_MAX_TOKENS},
    {&attnd__calls__descriptor, NULL, WIRE_MAX_CALLS},
    {&attnd__calls_reply__descriptor, NULL, WIRE_MAX_CALLS},
};

static uint32_t max_elements_of(const struct frame *f, const ProtobufCFieldDescriptor *field)
{
    for (size_t i = 0; i < sizeof element_limits / sizeof element_limits[0]; i++)
        if (element_limits[i].desc == f->desc &&
            (element_limits[i].field == NULL || strcmp(element_limits[i].field, field->name) == 0))
            return element_limits[i].max_elements;
    return WIRE_MAX_FEATURES;
}

/* Appends to why, cutting what does not fit. */
static void say(struct scan *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(struct scan *s, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(s->why, s->why_bytes, format, args);
    va_end(args);
    size_t room = s->why_bytes ? s->why_bytes - 1 : 0;
    size_t used = n < 0 ? 0 : (size_t)n < room ? (size_t)n : room;
    s->why += used;
    s->why_bytes -= used;
}

/* Appends the path to f, like "pool_create.spec.layers[3]."; nothing at the top. */
static void say_path(struct scan *s, const struct frame *f)
{
    if (f->parent == NULL)
        return;
    say_path(s, f->parent);
    say(s, "%s", f->in_field->name);
    if (f->in_field->label == PROTOBUF_C_LABEL_REPEATED)
        say(s, "[%u]", f->in_index);
    say(s, ".");
}

static void say_field(struct scan *s, const struct frame *f, const ProtobufCFieldDescriptor *field)
{
    say(s, "header field ");
    say_path(s, f);
    say(s, "%s", field->name);
}

/* Returns ATTN_EPROTO; why gets "header field PATH.NAME" and what is wrong with it. */
#define refuse(s, f, field, ...) (say_field(s, f, field), say(s, __VA_ARGS__), ATTN_EPROTO)

static bool read_varint(struct reader *r, uint32_t max_bytes, uint64_t *out)
{
    uint64_t value = 0;
    for (uint32_t i = 0; i < max_bytes && r->at < r->end; i++) {
        uint8_t byte = *r->at++;
        if (i == MAX_VARINT_BYTES - 1 && byte > 1)
            return false; /* past 64 bits */
        value |= (uint64_t)(byte & 0x7f) << (7 * i);
        if (byte < 0x80) {
            *out = value;
            return true;
        }
    }
    return false;
}

static bool read_bytes(struct reader *r, uint64_t n, struct reader *out)
{
    if (n > (uint64_t)(r->end - r->at))
        return false;
    *out = (struct reader){r->at, r->at + n};
    r->at += n;
    return true;
}

/* Checks for UTF-8 without control characters (json may hold line ends and tabs). Returns the
 * offset of the first bad byte, or -1. */
static int64_t text_check(struct reader r, bool is_json)
{
    const uint8_t *start = r.at;
    while (r.at < r.end) {
        const uint8_t *at = r.at;
        uint32_t c = *r.at++;
        uint32_t n_more = c < 0x80 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
        static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
        if ((c >= 0x80 && c < 0xc2) || c > 0xf4 || n_more > (size_t)(r.end - r.at))
            return at - start;
        if (n_more > 0)
            c &= 0x3fu >> n_more;
        for (uint32_t i = 0; i < n_more; i++, r.at++) {
            if ((*r.at & 0xc0) != 0x80)
                return at - start;
            c = c << 6 | (*r.at & 0x3f);
        }
        bool is_space = c == '\n' || c == '\r' || c == '\t';
        if (c < least[n_more] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000) ||
            (c < 0x20 && !(is_json && is_space)) || (c >= 0x7f && c < 0xa0))
            return at - start;
    }
    return -1;
}

static enum wire_type wire_type_of(ProtobufCType type)
{
    switch (type) {
    case PROTOBUF_C_TYPE_FIXED64:
        return WIRE_64BIT;
    case PROTOBUF_C_TYPE_FLOAT:
        return WIRE_32BIT;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_MESSAGE:
        return WIRE_BYTES;
    default: /* uint32, uint64, sint32, bool, enum: all others that attnd.proto uses */
        return WIRE_VARINT;
    }
}

/* Reads one scalar of the field's type and checks its range. */
static attn_status scan_scalar(struct scan *s, const struct frame *f,
                               const ProtobufCFieldDescriptor *field, struct reader *r)
{
    uint64_t value;
    struct reader bytes;
    float number;
    switch (field->type) {
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_FLOAT:
        if (!read_bytes(r, field->type == PROTOBUF_C_TYPE_FLOAT ? 4 : 8, &bytes)) {
            return refuse(s, f, field, " is cut off by the end of its message");
        }
        if (field->type != PROTOBUF_C_TYPE_FLOAT)
            return ATTN_OK;
        memcpy(&number, bytes.at, sizeof number);
        if (isfinite(number))
            return ATTN_OK;
        return refuse(s, f, field, " is %s, it must be finite", isnan(number) ? "NaN" : "infinite");
    default:
        break;
    }
    if (!read_varint(r, MAX_VARINT_BYTES, &value)) {
        return refuse(s, f, field, " is a varint without an end or past 64 bits");
    }
    uint64_t max = field->type == PROTOBUF_C_TYPE_UINT64 || field->type == PROTOBUF_C_TYPE_BOOL
                       ? UINT64_MAX
                   : field->type == PROTOBUF_C_TYPE_ENUM ? INT32_MAX
                                                         : UINT32_MAX;
    if (value > max) {
        return refuse(s, f, field, " is encoded as %llu, the most is %llu",
                      (unsigned long long)value, (unsigned long long)max);
    }
    return ATTN_OK;
}

static attn_status scan_string(struct scan *s, const struct frame *f,
                               const ProtobufCFieldDescriptor *field, struct reader text)
{
    bool is_json = f->desc == &attnd__stats_reply__descriptor;
    uint32_t max_bytes = is_json ? WIRE_MAX_JSON_BYTES : WIRE_MAX_STRING_BYTES;
    size_t n_bytes = (size_t)(text.end - text.at);
    if (n_bytes > max_bytes) {
        return refuse(s, f, field, " has %zu bytes, the most is %u", n_bytes, max_bytes);
    }
    int64_t bad = field->type == PROTOBUF_C_TYPE_BYTES ? -1 : text_check(text, is_json);
    if (bad >= 0) {
        return refuse(
            s, f, field,
            " has byte 0x%02x at offset %lld, it must be UTF-8 without control characters",
            text.at[bad], (long long)bad);
    }
    return ATTN_OK;
}

static attn_status scan_message(struct scan *s, struct frame *f, struct reader r);

static attn_status scan_submessage(struct scan *s, const struct frame *f,
                                   const ProtobufCFieldDescriptor *field, uint32_t index,
                                   struct reader body)
{
    struct frame sub = {.desc = field->descriptor,
                        .parent = f,
                        .in_field = field,
                        .in_index = index,
                        .depth = f->depth + 1};
    if (sub.depth > WIRE_MAX_DEPTH || ++s->n_submessages > WIRE_MAX_SUBMESSAGES) {
        say_field(s, f, field);
        if (sub.depth > WIRE_MAX_DEPTH)
            say(s, " is nested %u deep, the most is %u", sub.depth, WIRE_MAX_DEPTH);
        else
            say(s, " is submessage %u, the most is %u", s->n_submessages, WIRE_MAX_SUBMESSAGES);
        return ATTN_EPROTO;
    }
    return scan_message(s, &sub, body);
}

/* Counts one more occurrence of a field; a second one is refused unless it is repeated. */
static attn_status count_element(struct scan *s, struct frame *f,
                                 const ProtobufCFieldDescriptor *field, uint32_t *out_index)
{
    uint32_t *n = &f->n_elements[field - f->desc->fields];
    if (field->label == PROTOBUF_C_LABEL_REPEATED) {
        uint32_t max = max_elements_of(f, field);
        if (*n >= max) {
            return refuse(s, f, field, " has more than %u elements", max);
        }
    } else if (*n > 0) {
        return refuse(s, f, field, " occurs twice");
    } else if (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) {
        for (unsigned i = 0; i < f->desc->n_fields; i++) {
            const ProtobufCFieldDescriptor *other = &f->desc->fields[i];
            if (f->n_elements[i] == 0 || !(other->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) ||
                other->quantifier_offset != field->quantifier_offset)
                continue;
            return refuse(s, f, field, " occurs together with %s, only one of them may be set",
                          other->name);
        }
    }
    *out_index = (*n)++;
    return ATTN_OK;
}

/* Whether these bytes are varints of 28 bits at most, each with its end, and how many. The loops
 * are such that compilers make vectors of them. */
static bool count_short_varints(struct reader r, size_t *out_n)
{
    const uint8_t *at = r.at;
    size_t n_bytes = (size_t)(r.end - r.at);
    uint8_t in_a_row = 0;
    uint32_t n_continued = 0;
    if (n_bytes == 0 || at[n_bytes - 1] >= 0x80)
        return false;
    for (size_t i = 0; i + 4 <= n_bytes; i++)
        in_a_row |= at[i] & at[i + 1] & at[i + 2] & at[i + 3];
    for (size_t i = 0; i < n_bytes; i++)
        n_continued += at[i] >> 7;
    *out_n = n_bytes - n_continued;
    return in_a_row < 0x80;
}

/* Scans the elements of a repeated scalar that came in one piece, which may be a prompt's ids. */
static attn_status scan_packed(struct scan *s, struct frame *f,
                               const ProtobufCFieldDescriptor *field, struct reader body)
{
    uint32_t *n = &f->n_elements[field - f->desc->fields], max = max_elements_of(f, field);
    size_t n_more;
    if (wire_type_of(field->type) == WIRE_VARINT && count_short_varints(body, &n_more) &&
        n_more <= max - *n) {
        *n += (uint32_t)n_more;
        return ATTN_OK;
    }
    attn_status st = ATTN_OK;
    while (st == ATTN_OK && body.at < body.end) {
        if ((*n)++ == max)
            return refuse(s, f, field, " has more than %u elements", max);
        st = scan_scalar(s, f, field, &body);
    }
    return st;
}

/* Scans the value of a known field. */
static attn_status scan_value(struct scan *s, struct frame *f,
                              const ProtobufCFieldDescriptor *field, enum wire_type type,
                              struct reader *r, struct reader body)
{
    enum wire_type own = wire_type_of(field->type);
    uint32_t index;
    if (type == WIRE_BYTES && own != WIRE_BYTES && field->label == PROTOBUF_C_LABEL_REPEATED)
        return scan_packed(s, f, field, body);
    if (type != own) {
        return refuse(s, f, field, " has wire type %d, it must be %d", (int)type, (int)own);
    }
    attn_status st = count_element(s, f, field, &index);
    if (st != ATTN_OK)
        return st;
    if (field->type == PROTOBUF_C_TYPE_MESSAGE)
        return scan_submessage(s, f, field, index, body);
    if (field->type == PROTOBUF_C_TYPE_STRING || field->type == PROTOBUF_C_TYPE_BYTES)
        return scan_string(s, f, field, body);
    return scan_scalar(s, f, field, r);
}

static attn_status scan_unknown(struct scan *s, const struct frame *f, uint32_t number,
                                enum wire_type type, struct reader *r)
{
    uint64_t value;
    struct reader bytes;
    bool is_whole = true;
    if (type == WIRE_VARINT)
        is_whole = read_varint(r, MAX_VARINT_BYTES, &value);
    else if (type != WIRE_BYTES)
        is_whole = read_bytes(r, type == WIRE_32BIT ? 4 : 8, &bytes);
    if (is_whole)
        return ATTN_OK;
    say(s, "header field ");
    say_path(s, f);
    say(s, "%u (unknown) is cut off by the end of its message", number);
    return ATTN_EPROTO;
}

static attn_status scan_message(struct scan *s, struct frame *f, struct reader r)
{
    while (r.at < r.end) {
        uint64_t tag;
        bool is_tag = read_varint(&r, MAX_VARINT32_BYTES, &tag);
        if (!is_tag || tag > UINT32_MAX || tag >> 3 == 0) {
            say(s, "header has a malformed field tag in %s", f->desc->short_name);
            return ATTN_EPROTO;
        }
        uint32_t number = (uint32_t)(tag >> 3), type = (uint32_t)(tag & 7);
        if (++s->n_fields > WIRE_MAX_FIELDS) {
            say(s, "header has more than %u fields", WIRE_MAX_FIELDS);
            return ATTN_EPROTO;
        }
        const ProtobufCFieldDescriptor *field =
            protobuf_c_message_descriptor_get_field(f->desc, number);
        if (type != WIRE_VARINT && type != WIRE_64BIT && type != WIRE_BYTES && type != WIRE_32BIT) {
            say(s, "header field ");
            say_path(s, f);
            say(s, "%u has wire type %u, groups and reserved types are not allowed", number, type);
            return ATTN_EPROTO;
        }
        struct reader body = {0};
        uint64_t n_bytes;
        if (type == WIRE_BYTES &&
            (!read_varint(&r, MAX_VARINT32_BYTES, &n_bytes) || !read_bytes(&r, n_bytes, &body))) {
            say(s, "header field ");
            say_path(s, f);
            say(s, "%u has a length past the end of its message", number);
            return ATTN_EPROTO;
        }
        attn_status st =
            field ? scan_value(s, f, field, type, &r, body) : scan_unknown(s, f, number, type, &r);
        if (st != ATTN_OK)
            return st;
    }
    return ATTN_OK;
}

attn_status wire_scan(const ProtobufCMessageDescriptor *desc, const uint8_t *bytes, size_t n_bytes,
                      char *why, size_t why_bytes)
{
    struct scan s = {.why = why, .why_bytes = why_bytes};
    struct frame top = {.desc = desc, .depth = 1};
    return scan_message(&s, &top, (struct reader){bytes, bytes + n_bytes});
}
