/* latency.c: percentiles of the histograms in /stats. Buckets double in width, so a percentile is
 * read off a straight line inside of its bucket.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/attnctl/attnctl.h"

enum { MAX_BUCKETS = 64 };

struct bucket {
    double to; /* its upper bound; of the last, twice the one before */
    double count;
};

static int by_bound(const void *a, const void *b)
{
    double x = ((const struct bucket *)a)->to, y = ((const struct bucket *)b)->to;
    return (x > y) - (x < y);
}

static double number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

static size_t buckets_of(const json_t *h, const json_t *before, struct bucket out[MAX_BUCKETS])
{
    const json_t *old = json_object_get(before, "buckets");
    const char *bound;
    json_t *value;
    size_t n = 0;
    json_object_foreach(json_object_get(h, "buckets"), bound, value)
    {
        double count = json_number_value(value) - number(old, bound);
        if (n < MAX_BUCKETS && count > 0)
            out[n++] = (struct bucket){strtod(bound, NULL), count};
    }
    qsort(out, n, sizeof *out, by_bound);
    if (n > 0 && out[n - 1].to > 1e9) /* +Inf */
        out[n - 1].to = n > 1 ? 2 * out[n - 2].to : 1;
    return n;
}

static double percentile(const struct bucket *b, size_t n, double total, double share)
{
    double want = share * total, below = 0;
    for (size_t i = 0; i < n; i++) {
        if (below + b[i].count >= want) {
            double from = b[i].to <= 1e-6 ? 0 : b[i].to / 2;
            return from + (b[i].to - from) * (want - below) / b[i].count;
        }
        below += b[i].count;
    }
    return n > 0 ? b[n - 1].to : 0;
}

json_t *latency_of(const json_t *histogram, const json_t *before)
{
    struct bucket b[MAX_BUCKETS];
    size_t n = buckets_of(histogram, before, b);
    double total = 0, sum = number(histogram, "sum") - number(before, "sum");
    for (size_t i = 0; i < n; i++)
        total += b[i].count;
    if (total == 0)
        return json_pack("{s:I, s:n, s:n, s:n, s:n}", "count", (json_int_t)0, "mean", "p50", "p90",
                         "p99");
    return json_pack("{s:I, s:f, s:f, s:f, s:f}", "count", (json_int_t)total, "mean", sum / total,
                     "p50", percentile(b, n, total, 0.5), "p90", percentile(b, n, total, 0.9),
                     "p99", percentile(b, n, total, 0.99));
}

attn_status ask_latency(attn_client *c, const struct arguments *a, json_t **out)
{
    json_t *stats = NULL, *stages = json_object(), *totals = json_object(), *h;
    const char *name;
    attn_status st = ask_stats(c, a, &stats);
    json_object_foreach(json_object_get(stats, "step_stage_seconds"), name, h)
    {
        json_object_set_new(stages, name, latency_of(h, NULL));
    }
    json_object_foreach(json_object_get(stats, "step_total_seconds"), name, h)
    {
        json_object_set_new(totals, name, latency_of(h, NULL));
    }
    if (stats != NULL)
        *out = json_pack("{s:O, s:O}", "stages", stages, "arrival_to_reply", totals);
    json_decref(stats);
    json_decref(stages);
    json_decref(totals);
    return st;
}

/* Microseconds, or a dash for none. */
static void print_time(const json_t *seconds)
{
    if (json_is_number(seconds))
        printf(" %11.1f", json_number_value(seconds) * 1e6);
    else
        printf(" %11s", "-");
}

void print_latency(const json_t *result)
{
    static const char *const columns[] = {"mean", "p50", "p90", "p99"};
    const char *group, *name;
    json_t *rows, *row;
    if (json_object_size(json_object_get(result, "stages")) == 0) {
        fputs("attnctl: no times: with tenants they are the operator's\n", stderr);
        return;
    }
    printf("%-17s %-8s %10s %11s %11s %11s %11s\n", "microseconds", "", "steps", "mean", "p50",
           "p90", "p99");
    json_object_foreach((json_t *)result, group, rows)
    {
        json_object_foreach(rows, name, row)
        {
            printf("%-17s %-8s %10" JSON_INTEGER_FORMAT, group, name,
                   json_integer_value(json_object_get(row, "count")));
            for (size_t i = 0; i < sizeof columns / sizeof columns[0]; i++)
                print_time(json_object_get(row, columns[i]));
            putchar('\n');
        }
    }
}
