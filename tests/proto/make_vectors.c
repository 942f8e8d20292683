/* make_vectors.c: writes tests/proto/vectors/NAME.hex for every sample, each field explained.
 *
 * Run after a deliberate change of the protocol: make_vectors tests/proto/vectors. The comments are
 * printed by a walk of its own over the bytes, not by the code under test.
 */
#include "samples.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void hex(FILE *out, const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        fprintf(out, "%s%02x", i ? " " : "", p[i]);
}

/* lines of 16 bytes; the first gets the comment */
static void hex_lines(FILE *out, const uint8_t *p, size_t n, const char *comment)
{
    for (size_t i = 0; i < n; i += 16) {
        hex(out, p + i, n - i < 16 ? n - i : 16);
        fprintf(out, i == 0 ? "  # %s\n" : "\n", comment);
    }
}

static uint64_t varint(const uint8_t **at)
{
    uint64_t v = 0;
    unsigned shift = 0;
    do {
        v |= (uint64_t)(**at & 0x7f) << shift;
        shift += 7;
    } while (*(*at)++ & 0x80);
    return v;
}

static void scalar_print(FILE *out, ProtobufCType type, const uint8_t **at)
{
    uint64_t v = 0;
    float number;
    switch (type) {
    case PROTOBUF_C_TYPE_FLOAT:
        memcpy(&number, *at, 4);
        *at += 4;
        fprintf(out, "%g", (double)number);
        break;
    case PROTOBUF_C_TYPE_FIXED64:
        memcpy(&v, *at, 8);
        *at += 8;
        fprintf(out, "0x%llx", (unsigned long long)v);
        break;
    case PROTOBUF_C_TYPE_SINT32:
        v = varint(at);
        fprintf(out, "%lld", (long long)(v >> 1) ^ -(long long)(v & 1));
        break;
    default:
        fprintf(out, "%llu", (unsigned long long)varint(at));
    }
}

static void text_print(FILE *out, const uint8_t *p, const uint8_t *end)
{
    fputc('"', out);
    for (; p < end; p++) {
        if (*p == '\n' || *p == '\t')
            fprintf(out, "\\%c", *p == '\n' ? 'n' : 't');
        else
            fputc(*p, out);
    }
    fputc('"', out);
}

static void message_print(FILE *out, const ProtobufCMessageDescriptor *desc, const uint8_t *at,
                          const uint8_t *end, const char *path)
{
    while (at < end) {
        const uint8_t *start = at;
        uint64_t tag = varint(&at);
        const ProtobufCFieldDescriptor *f =
            protobuf_c_message_descriptor_get_field(desc, (unsigned)(tag >> 3));
        char name[256];
        snprintf(name, sizeof name, "%s%s%s", path, *path ? "." : "", f->name);
        if ((tag & 7) != 2) {
            const uint8_t *value = at;
            if ((tag & 7) == 0)
                varint(&at);
            else
                at += (tag & 7) == 1 ? 8 : 4;
            hex(out, start, (size_t)(at - start));
            fprintf(out, "  # %s (field %u) = ", name, f->id);
            scalar_print(out, f->type, &value);
            fputc('\n', out);
            continue;
        }
        uint64_t n = varint(&at);
        const uint8_t *body = at;
        at += n;
        if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
            hex(out, start, (size_t)(body - start));
            fprintf(out, "  # %s (field %u), %llu bytes\n", name, f->id, (unsigned long long)n);
            message_print(out, f->descriptor, body, at, name);
            continue;
        }
        hex(out, start, (size_t)(at - start));
        fprintf(out, "  # %s (field %u) = ", name, f->id);
        if (f->type == PROTOBUF_C_TYPE_STRING)
            text_print(out, body, at);
        else if (f->type == PROTOBUF_C_TYPE_BYTES)
            fprintf(out, "%llu bytes", (unsigned long long)n);
        else
            for (const uint8_t *p = body; p < at; fputs(p < at ? " " : "", out))
                scalar_print(out, f->type, &p);
        fputc('\n', out);
    }
}

static int vector_write(const struct sample *s, const char *folder)
{
    char path[4096];
    size_t n;
    uint8_t *msg = sample_build(s, &n);
    snprintf(path, sizeof path, "%s/%s.hex", folder, s->name);
    FILE *out = fopen(path, "w");
    if (msg == NULL || out == NULL) {
        perror(path);
        free(msg);
        return 1;
    }
    uint32_t header_bytes, payload_bytes;
    memcpy(&header_bytes, msg + 8, 4);
    memcpy(&payload_bytes, msg + 12, 4);
    fprintf(out, "# %s: %s\n# %zu bytes. Everything from # to the end of a line is a comment.\n",
            s->name, s->about, n);
    hex_lines(out, msg, 4, "magic \"ATND\"");
    hex_lines(out, msg + 4, 2, "version 1");
    hex_lines(out, msg + 6, 2, s->is_reply ? "flags: reply" : "flags: none");
    hex(out, msg + 8, 4);
    fprintf(out, "  # header bytes %u\n", header_bytes);
    hex(out, msg + 12, 4);
    fprintf(out, "  # payload bytes %u\n", payload_bytes);
    hex(out, msg + 16, 8);
    fprintf(out, "  # request id 0x%llx\n", (unsigned long long)SAMPLE_REQUEST_ID);
    const uint8_t *header_end = msg + WIRE_PREAMBLE_BYTES + header_bytes;
    message_print(out, s->is_reply ? &attnd__reply__descriptor : &attnd__request__descriptor,
                  msg + WIRE_PREAMBLE_BYTES, header_end, "");
    const uint8_t *payload = msg + n - payload_bytes;
    hex_lines(out, header_end, (size_t)(payload - header_end), "padding to a multiple of 64");
    hex_lines(out, payload, payload_bytes, "payload");
    free(msg);
    if (fclose(out) != 0) {
        perror(path);
        return 1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: make_vectors FOLDER\n");
        return 2;
    }
    int failed = 0;
    for (size_t i = 0; i < n_samples; i++)
        failed |= vector_write(&samples[i], argv[1]);
    return failed;
}
