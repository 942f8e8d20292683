/* percentile.h: samples of one quantity and their exact percentiles. */
#ifndef ATTNLOAD_PERCENTILE_H
#define ATTNLOAD_PERCENTILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct samples {
    uint64_t *v;
    size_t n, capacity;
};

/* A sample that finds no memory is lost: false. */
bool samples_add(struct samples *s, uint64_t x);
/* Moves all of src behind dst's. */
bool samples_join(struct samples *dst, struct samples *src);
void samples_sort(struct samples *s);
/* The smallest sample that at least share (0 to 1) of all are not above; 0 without samples. Sorted.
 * */
uint64_t samples_percentile(const struct samples *s, double share);
/* How many of all samples, 0 to 1, are x or more; 0 without samples. Sorted. */
double samples_share_from(const struct samples *s, uint64_t x);
void samples_fini(struct samples *s);

#endif
