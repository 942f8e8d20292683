/* trace.c: reads a trace of requests, scales its times and lengths, and checks what a line must
 * have. */
#include "clients/attnload/trace.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TOKENS (1u << 30)
#define MAX_BLOCKS (1u << 30) /* of a trace */
#define BLOCK_TOKENS 512

static bool get_number(json_t *object, const char *name, double max, double *out)
{
    json_t *x = json_object_get(object, name);
    if (!json_is_number(x))
        return false;
    *out = json_number_value(x);
    return *out >= 0 && *out <= max;
}

static uint32_t scaled(double tokens, double scale)
{
    double n = round(tokens * scale);
    return n < 1 ? 1 : n > MAX_TOKENS ? MAX_TOKENS : (uint32_t)n;
}

/* Room for one more element, which doubles whenever n is 0 or a power of two. */
static bool grow(void **array, uint32_t n, size_t element)
{
    if ((n & (n - 1)) != 0)
        return true;
    void *grown = realloc(*array, (n == 0 ? 1 : 2 * (size_t)n) * element);
    if (grown != NULL)
        *array = grown;
    return grown != NULL;
}

/* "hash_ids", which may be missing. */
static bool get_blocks(json_t *object, struct trace *t, struct trace_request *out)
{
    json_t *list = json_object_get(object, "hash_ids");
    out->first_block = t->n_blocks;
    out->n_blocks = (uint32_t)json_array_size(list);
    if (list != NULL && !json_is_array(list))
        return false;
    for (uint32_t i = 0; i < out->n_blocks; i++) {
        json_t *x = json_array_get(list, i);
        if (!json_is_integer(x) || json_integer_value(x) < 0 || t->n_blocks == MAX_BLOCKS ||
            !grow((void **)&t->blocks, t->n_blocks, sizeof *t->blocks))
            return false;
        t->blocks[t->n_blocks++] = (uint64_t)json_integer_value(x);
    }
    return true;
}

/* Names the member that is missing or out of range, NULL if all is well. */
static const char *parse_line(const char *line, size_t bytes, const struct trace_scaling *s,
                              struct trace *t, struct trace_request *out)
{
    json_t *root = json_loadb(line, bytes, 0, NULL);
    double timestamp_ms, input, output;
    const char *bad = NULL;
    if (!json_is_object(root))
        bad = "JSON object";
    else if (!get_number(root, "timestamp", 1e15, &timestamp_ms))
        bad = "timestamp";
    else if (!get_number(root, "input_length", MAX_TOKENS, &input))
        bad = "input_length";
    else if (!get_number(root, "output_length", MAX_TOKENS, &output))
        bad = "output_length";
    else if (!get_blocks(root, t, out))
        bad = "hash_ids";
    json_decref(root);
    if (bad != NULL)
        return bad;
    out->arrival_us = s->speed > 0 ? (uint64_t)(timestamp_ms * 1000.0 / s->speed) : 0;
    out->n_input = scaled(input, s->length);
    out->n_output = scaled(output, s->length);
    return NULL;
}

static int by_arrival(const void *a, const void *b)
{
    const struct trace_request *x = a, *y = b;
    return (x->arrival_us > y->arrival_us) - (x->arrival_us < y->arrival_us);
}

static bool append(struct trace *t, const struct trace_request *r)
{
    if (!grow((void **)&t->requests, t->n, sizeof *t->requests))
        return false;
    t->requests[t->n++] = *r;
    return true;
}

attn_status trace_load(const char *path, const struct trace_scaling *s, struct trace *out,
                       char *why, size_t why_bytes)
{
    struct trace t = {.block_tokens = scaled(BLOCK_TOKENS, s->length)};
    char *line = NULL;
    size_t capacity = 0;
    uint32_t n_lines = 0;
    attn_status st = ATTN_OK;
    FILE *f = fopen(path, "r");
    if (f == NULL) {
        snprintf(why, why_bytes, "%s: %s", path, strerror(errno));
        return ATTN_ENOTFOUND;
    }
    for (ssize_t n; st == ATTN_OK && (s->max_requests == 0 || t.n < s->max_requests) &&
                    (n = getline(&line, &capacity, f)) >= 0;) {
        struct trace_request r;
        n_lines++;
        if (strspn(line, " \t\r\n") == (size_t)n)
            continue;
        const char *bad = parse_line(line, (size_t)n, s, &t, &r);
        if (bad != NULL) {
            snprintf(why, why_bytes, "%s, line %u: no usable %s", path, n_lines, bad);
            st = ATTN_EINVAL;
        } else if (!append(&t, &r)) {
            snprintf(why, why_bytes, "%s: no memory for %u requests", path, t.n);
            st = ATTN_ENOMEM;
        }
    }
    if (st == ATTN_OK && ferror(f)) {
        snprintf(why, why_bytes, "%s, behind line %u: %s", path, n_lines, strerror(errno));
        st = ATTN_EIO;
    }
    if (st == ATTN_OK && t.n == 0) {
        snprintf(why, why_bytes, "%s: no requests", path);
        st = ATTN_EINVAL;
    }
    free(line);
    fclose(f);
    if (st != ATTN_OK) {
        trace_fini(&t);
        return st;
    }
    qsort(t.requests, t.n, sizeof *t.requests, by_arrival);
    uint64_t first_us = t.requests[0].arrival_us;
    for (uint32_t i = 0; i < t.n; i++)
        t.requests[i].arrival_us -= first_us;
    *out = t;
    return ATTN_OK;
}

void trace_fini(struct trace *t)
{
    free(t->requests);
    free(t->blocks);
    *t = (struct trace){0};
}
