/* record.c: trace: what sequences were given and generated, collected from the daemon's ring while
 * the time runs, then written in Mooncake's JSON-lines format. Nothing is written by the daemon.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "clients/attnctl/attnctl.h"
#include "proto/attn_time.h"

enum { MAX_REQUESTS = 1000000 };

struct recording {
    json_t *requests; /* that began after `from` */
    double from; /* ms of the daemon's clock; what began before is left out */
    uint64_t after; /* the last one seen */
    double dropped; /* that the ring lost before we asked */
    size_t most;
};

static double number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

static void take(struct recording *r, const json_t *list)
{
    json_t *t;
    size_t i;
    json_array_foreach(list, i, t)
    {
        if (number(t, "timestamp") >= r->from && json_array_size(r->requests) < r->most)
            json_array_append(r->requests, t);
    }
}

/* What has ended since the last look. */
static attn_status take_ended(attn_client *c, const struct arguments *a, struct recording *r)
{
    uint64_t before;
    do { /* the first look is behind all that can have been: it says where the ring is */
        json_t *page = NULL;
        before = r->after;
        attn_status st = inspect(c, "requests", r->after, a->timeout_us, &page);
        if (st != ATTN_OK || page == NULL)
            return st;
        if (r->from < 0)
            r->from = number(page, "now");
        else
            r->dropped += number(page, "dropped");
        take(r, json_object_get(page, "requests"));
        r->after = (uint64_t)number(page, "next");
        json_decref(page);
    } while (r->after > before && json_array_size(r->requests) < r->most);
    return ATTN_OK;
}

static attn_status take_open(attn_client *c, const struct arguments *a, struct recording *r)
{
    uint64_t after = 0;
    do {
        json_t *page = NULL;
        attn_status st = inspect(c, "open_requests", after, a->timeout_us, &page);
        if (st != ATTN_OK || page == NULL)
            return st;
        take(r, json_object_get(page, "open_requests"));
        after = (uint64_t)number(page, "next");
        json_decref(page);
    } while (after != 0);
    return ATTN_OK;
}

static int by_timestamp(const void *a, const void *b)
{
    double x = number(*(json_t *const *)a, "timestamp"),
           y = number(*(json_t *const *)b, "timestamp");
    return (x > y) - (x < y);
}

/* To the microsecond; what is recorded came at `from` or later. */
static double since(double ms, double from)
{
    return (double)(int64_t)((ms - from) * 1000 + 0.5) / 1000;
}

/* A line of the file; false: errno says why not. */
static bool write_request(FILE *f, const json_t *request, double from)
{
    json_t *line =
        json_pack("{s:f, s:I, s:I}", "timestamp", since(number(request, "timestamp"), from),
                  "input_length", (json_int_t)number(request, "input_length"), "output_length",
                  (json_int_t)number(request, "output_length"));
    bool is_written = json_dumpf(line, f, JSON_REAL_PRECISION(15)) == 0 && fputc('\n', f) != EOF;
    json_decref(line);
    return is_written;
}

/* The file, in order; false: errno says why not. */
static bool write_file(FILE *f, const struct recording *r)
{
    size_t n = json_array_size(r->requests);
    json_t **list = calloc(n + 1, sizeof(json_t *));
    if (list == NULL)
        return false;
    for (size_t i = 0; i < n; i++)
        list[i] = json_array_get(r->requests, i);
    qsort(list, n, sizeof(json_t *), by_timestamp);
    bool is_written = true;
    for (size_t i = 0; i < n && is_written; i++)
        is_written = write_request(f, list[i], r->from);
    free(list);
    return is_written && fflush(f) == 0 && !ferror(f);
}

static attn_status record(attn_client *c, const struct arguments *a, struct recording *r)
{
    uint64_t start_ns = attn_now_ns(), passed_us = 0;
    attn_status st = take_ended(c, a, r);
    while (st == ATTN_OK && passed_us < a->record_us && json_array_size(r->requests) < r->most) {
        uint64_t left_us = a->record_us - passed_us;
        pause_for(left_us < a->interval_us ? left_us : a->interval_us);
        st = take_ended(c, a, r);
        passed_us = (attn_now_ns() - start_ns) / 1000;
    }
    return st == ATTN_OK ? take_open(c, a, r) : st;
}

static int tell(const struct arguments *a, const struct recording *r)
{
    json_t *result = json_pack("{s:s, s:I, s:f}", "file", a->operands[0], "requests",
                               (json_int_t)json_array_size(r->requests), "dropped", r->dropped);
    (a->is_json ? print_json : print_flat)(result);
    json_decref(result);
    return printed();
}

int run_trace(attn_client *c, const struct arguments *a)
{
    struct recording r = {
        .requests = json_array(), .from = -1, .after = UINT64_MAX, .most = MAX_REQUESTS};
    if (a->count > 0 && a->count < r.most)
        r.most = a->count;
    FILE *f = fopen(a->operands[0], "w"); /* now: a name that can't be written is told at once */
    attn_status st = f == NULL ? ATTN_OK : record(c, a, &r);
    bool is_written = f != NULL && st == ATTN_OK && write_file(f, &r);
    int reason = errno, rc = EXIT_FAILED;
    if (f != NULL && fclose(f) != 0 && is_written) {
        is_written = false;
        reason = errno;
    }
    if (st != ATTN_OK)
        failed(st);
    else if (!is_written)
        fprintf(stderr, "attnctl: trace: %s: %s\n", a->operands[0], strerror(reason));
    else
        rc = tell(a, &r);
    json_decref(r.requests);
    return rc;
}
