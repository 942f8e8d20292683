/* print.c: what a command has to say: its result as lines, as a table or as JSON on stdout, and on
 * stderr why it failed.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/attnctl/attnctl.h"

enum { MAX_COLUMNS = 32, MAX_CELL_BYTES = 128 };

static void text_of(const json_t *value, char *out, size_t out_bytes)
{
    if (json_is_string(value)) {
        snprintf(out, out_bytes, "%s", json_string_value(value));
    } else if (json_is_real(value)) { /* a count as it is, of a time since 1970 milliseconds */
        double x = json_real_value(value);
        bool is_whole = x >= 1e6 && x < 1e15 && x == (double)(int64_t)x;
        snprintf(out, out_bytes, x < 1e6 ? "%.9g" : is_whole ? "%.0f" : "%.3f", x);
    } else {
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
        snprintf(out, out_bytes, "%s", text != NULL ? text : "?");
        free(text);
    }
}

/* Names of nested objects are joined by dots. */
static void print_lines(const char *prefix, const json_t *object)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        char name[256], text[4096];
        snprintf(name, sizeof name, "%s%s%s", prefix, prefix[0] != '\0' ? "." : "", key);
        for (char *c = name; *c != '\0'; c++)
            *c = *c == ' ' ? '_' : *c; /* a status, "out of blocks" */
        if (json_is_object(value)) {
            print_lines(name, value);
        } else {
            text_of(value, text, sizeof text);
            printf("%s %s\n", name, text);
        }
    }
}

void print_flat(const json_t *object)
{
    print_lines("", object);
}

void print_json(const json_t *object)
{
    json_dumpf(object, stdout, JSON_REAL_PRECISION(15)); /* of a time since 1970, microseconds */
    putchar('\n');
}

/* The cells of a row, or with is_head their names; nested objects give a column per member. */
static size_t cells_of(const json_t *row, bool is_head, char out[MAX_COLUMNS][MAX_CELL_BYTES],
                       size_t n)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)row, key, value)
    {
        if (json_is_object(value))
            n = cells_of(value, is_head, out, n);
        else if (n < MAX_COLUMNS && is_head)
            snprintf(out[n++], MAX_CELL_BYTES, "%s", key);
        else if (n < MAX_COLUMNS)
            text_of(value, out[n++], MAX_CELL_BYTES);
    }
    return n;
}

static void print_row(char cells[MAX_COLUMNS][MAX_CELL_BYTES], size_t n, const size_t *widths)
{
    for (size_t i = 0; i < n; i++)
        printf("%s%-*s", i > 0 ? "  " : "", i + 1 < n ? (int)widths[i] : 0, cells[i]);
    putchar('\n');
}

void print_table(const json_t *object)
{
    static char cells[MAX_COLUMNS][MAX_CELL_BYTES];
    const json_t *list = NULL;
    const char *key, *name = "entries";
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        if (json_is_array(value)) {
            list = value;
            name = key;
        }
    }
    if (json_array_size(list) == 0) { /* stdout stays empty for a program that counts lines */
        fprintf(stderr, "attnctl: no %s\n", strcmp(name, "slow") == 0 ? "slow steps" : name);
        return;
    }
    size_t widths[MAX_COLUMNS] = {0}, n = 0;
    for (size_t i = 0; i <= json_array_size(list); i++) {
        n = cells_of(json_array_get(list, i > 0 ? i - 1 : 0), i == 0, cells, 0);
        for (size_t k = 0; k < n; k++)
            widths[k] = strlen(cells[k]) > widths[k] ? strlen(cells[k]) : widths[k];
    }
    for (size_t i = 0; i <= json_array_size(list); i++) {
        n = cells_of(json_array_get(list, i > 0 ? i - 1 : 0), i == 0, cells, 0);
        print_row(cells, n, widths);
    }
}

int failed(attn_status st)
{
    fprintf(stderr, "attnctl: %s: %s\n", attn_status_message(st), attn_last_error()->message);
    return EXIT_FAILED;
}

int printed(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return EXIT_DONE;
    fprintf(stderr, "attnctl: write to stdout: %s\n", strerror(errno));
    return EXIT_FAILED;
}
