/* histogram.h: the times of one kind, counted in buckets that are at most 1/1024 of the time wide,
 * so that a run may be as long as it likes: the layout of HDR histograms (Tene), with three digits.
 * What is read of it is at most that much above the sample; below 2048 ns it is exact. */
#ifndef ATTNLOAD_HISTOGRAM_H
#define ATTNLOAD_HISTOGRAM_H

#include <stdint.h>

struct histogram {
    uint64_t n, max; /* samples, and the largest */
    uint64_t n_lost; /* that found no memory */
    uint64_t *counts; /* NULL: no sample yet */
};

void histogram_add(struct histogram *h, uint64_t x);
void histogram_join(struct histogram *h, const struct histogram *other);
/* The smallest time that a share (0 to 1) of all samples are not above; 0 without samples. */
uint64_t histogram_percentile(const struct histogram *h, double share);
/* How many of all samples, 0 to 1, are in the bucket of x or above; 0 without samples. */
double histogram_share_from(const struct histogram *h, uint64_t x);
void histogram_fini(struct histogram *h);

#endif
