/* compare.h: results of runs as JSON objects: beside those of an earlier run, and as a row of a
 * table. */
#ifndef ATTNLOAD_COMPARE_H
#define ATTNLOAD_COMPARE_H

#include <jansson.h>
#include <stddef.h>

/* The object that attnload --json wrote; NULL: why gets the sentence. */
json_t *compare_load(const char *path, char *why, size_t why_bytes);
/* Per figure that both have, how much now's is above old's: 0.1 is ten percent. */
json_t *compare_change(const json_t *old, const json_t *now);
/* The same as lines, and what was different about the runs. */
void compare_print(const json_t *old, const json_t *now);
/* A line of names and a line of values, separated by commas; nested names are joined by dots. */
void compare_print_csv(const json_t *now);

#endif
