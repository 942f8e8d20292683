/* histogram.c: counts times in buckets and reads percentiles off them. Buckets of one power of two
 * are equally wide; the first 2048 hold one value each. Pages that nothing was counted in are never
 * touched.
 */
#include "clients/attnload/histogram.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#define SUB_BITS 10
#define N_SUB (1u << SUB_BITS) /* of a power of two */
#define N_BUCKETS ((64 - SUB_BITS + 1) * N_SUB)

/* How far x is shifted for its bucket: 0 below 2 * N_SUB. */
static uint32_t shift_of(uint64_t x)
{
    return x < 2 * N_SUB ? 0 : 63u - SUB_BITS - (uint32_t)__builtin_clzll(x);
}

static size_t bucket_of(uint64_t x)
{
    uint32_t shift = shift_of(x);
    return (size_t)shift * N_SUB + (size_t)(x >> shift);
}

/* The largest value of a bucket. */
static uint64_t top_of(size_t bucket)
{
    if (bucket < 2 * N_SUB)
        return bucket;
    size_t shift = bucket / N_SUB - 1;
    uint64_t sub = bucket % N_SUB + N_SUB;
    return (sub << shift) + ((1ull << shift) - 1);
}

static bool make_counts(struct histogram *h)
{
    if (h->counts == NULL)
        h->counts = calloc(N_BUCKETS, sizeof *h->counts);
    return h->counts != NULL;
}

void histogram_add(struct histogram *h, uint64_t x)
{
    if (!make_counts(h)) {
        h->n_lost++;
        return;
    }
    h->counts[bucket_of(x)]++;
    h->n++;
    if (x > h->max)
        h->max = x;
}

void histogram_join(struct histogram *h, const struct histogram *other)
{
    h->n_lost += other->n_lost;
    if (other->n == 0)
        return;
    if (!make_counts(h)) {
        h->n_lost += other->n;
        return;
    }
    for (size_t i = 0; i < N_BUCKETS; i++)
        if (other->counts[i] != 0) /* a page without any stays untouched */
            h->counts[i] += other->counts[i];
    h->n += other->n;
    if (other->max > h->max)
        h->max = other->max;
}

uint64_t histogram_percentile(const struct histogram *h, double share)
{
    double rank = ceil(share * (double)h->n - 1e-9);
    uint64_t n = 0, wanted = rank < 1 ? 1 : (uint64_t)rank;
    if (wanted >= h->n) /* the last one, which is known exactly; 0 of none */
        return h->max;
    size_t i = 0;
    while ((n += h->counts[i]) < wanted)
        i++;
    return top_of(i) < h->max ? top_of(i) : h->max;
}

double histogram_share_from(const struct histogram *h, uint64_t x)
{
    uint64_t n = 0;
    for (size_t i = bucket_of(x); h->n > 0 && i <= bucket_of(h->max); i++)
        n += h->counts[i];
    return h->n > 0 ? (double)n / (double)h->n : 0;
}

void histogram_fini(struct histogram *h)
{
    free(h->counts);
    *h = (struct histogram){0};
}
