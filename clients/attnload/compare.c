/* compare.c: reads the JSON of an earlier run, prints two runs beside each other with the change of
 * each figure, and writes a run as a row of CSV. */
#include "clients/attnload/compare.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Figures worth a comparison, as paths into the object. */
static const char *const figures[] = {"tokens_per_second", "steps_per_second", "times.total.p50",
                                      "times.total.p99",   "times.added.p50",  "times.added.p99",
                                      "times.token.p50",   "times.token.p99",  "times.ttft.p50",
                                      "times.ttft.p99"};
/* What makes runs alike. */
static const char *const settings[] = {"mode",          "backend", "preset",    "layers",  "dtype",
                                       "kv_dtype",      "workers", "sequences", "context", "top_k",
                                       "choose_blocks", "rate",    "arrivals",  "seed"};

json_t *compare_load(const char *path, char *why, size_t why_bytes)
{
    json_error_t error;
    json_t *root = json_load_file(path, 0, &error);
    if (root == NULL)
        snprintf(why, why_bytes, "%s: %s", path, error.text);
    else if (!json_is_object(json_object_get(root, "times")))
        snprintf(why, why_bytes, "%s: no result of attnload --json", path);
    else
        return root;
    json_decref(root);
    return NULL;
}

static const json_t *at(const json_t *root, const char *path)
{
    char name[64];
    for (;;) {
        size_t n = strcspn(path, ".");
        snprintf(name, sizeof name, "%.*s", (int)n, path);
        root = json_object_get(root, name);
        if (path[n] == '\0')
            return root;
        path += n + 1;
    }
}

/* False: one of them lacks it. */
static bool figure(const json_t *old, const json_t *now, const char *path, double *out_old,
                   double *out_now)
{
    const json_t *x = at(old, path), *y = at(now, path);
    if (!json_is_number(x) || !json_is_number(y) || json_number_value(x) <= 0)
        return false;
    *out_old = json_number_value(x);
    *out_now = json_number_value(y);
    return true;
}

json_t *compare_change(const json_t *old, const json_t *now)
{
    json_t *change = json_object();
    double x, y;
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++)
        if (figure(old, now, figures[i], &x, &y))
            json_object_set_new(change, figures[i], json_real(y / x - 1));
    return change;
}

void compare_print(const json_t *old, const json_t *now)
{
    double x, y;
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        json_t *a = json_object_get(old, settings[i]), *b = json_object_get(now, settings[i]);
        if (json_equal(a, b) || (a == NULL && json_is_null(b)) || /* older than the setting */
            (json_is_number(a) && json_is_number(b) &&
             json_number_value(a) == json_number_value(b)))
            continue;
        char *was = json_dumps(a, JSON_ENCODE_ANY), *is = json_dumps(b, JSON_ENCODE_ANY);
        printf("differs   %s: %s, before %s\n", settings[i], is != NULL ? is : "none",
               was != NULL ? was : "none");
        free(was);
        free(is);
    }
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++)
        if (figure(old, now, figures[i], &x, &y))
            printf("compare   %-18s %12.6g, before %12.6g: %+.1f %%\n", figures[i], y, x,
                   100 * (y / x - 1));
}

static void print_cell(const json_t *value, bool *is_first)
{
    fputs(*is_first ? "" : ",", stdout);
    *is_first = false;
    if (json_is_string(value)) { /* quotes are doubled */
        putchar('"');
        for (const char *c = json_string_value(value); *c != '\0'; c++)
            fputs(*c == '"' ? "\"\"" : (char[]){*c, '\0'}, stdout);
        putchar('"');
    } else if (!json_is_null(value)) {
        json_dumpf(value, stdout, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    }
}

static void print_cells(const char *prefix, json_t *object, bool is_header, bool *is_first)
{
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        char name[128];
        snprintf(name, sizeof name, "%s%s%s", prefix, prefix[0] != '\0' ? "." : "", key);
        if (strcmp(key, "refused") == 0)
            continue; /* its members change with the run; refused_total is their sum */
        if (json_is_object(value)) {
            print_cells(name, value, is_header, is_first);
        } else if (is_header) {
            printf("%s%s", *is_first ? "" : ",", name);
            *is_first = false;
        } else {
            print_cell(value, is_first);
        }
    }
}

void compare_print_csv(const json_t *now)
{
    for (int is_header = 1; is_header >= 0; is_header--) {
        bool is_first = true;
        print_cells("", (json_t *)(uintptr_t)now, is_header, &is_first);
        putchar('\n');
    }
}
