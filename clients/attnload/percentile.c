/* percentile.c: see percentile.h. All samples are kept: eight bytes a step is little. */
#include "clients/attnload/percentile.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool reserve(struct samples *s, size_t n)
{
    if (n <= s->capacity)
        return true;
    size_t capacity = s->capacity < 512 ? 1024 : s->capacity * 2;
    if (capacity < n)
        capacity = n;
    uint64_t *v = realloc(s->v, capacity * sizeof *v);
    if (v == NULL)
        return false;
    s->v = v;
    s->capacity = capacity;
    return true;
}

bool samples_add(struct samples *s, uint64_t x)
{
    if (!reserve(s, s->n + 1))
        return false;
    s->v[s->n++] = x;
    return true;
}

bool samples_join(struct samples *dst, struct samples *src)
{
    if (!reserve(dst, dst->n + src->n))
        return false;
    if (src->n > 0)
        memcpy(dst->v + dst->n, src->v, src->n * sizeof *src->v);
    dst->n += src->n;
    samples_fini(src);
    return true;
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

void samples_sort(struct samples *s)
{
    if (s->n > 0)
        qsort(s->v, s->n, sizeof *s->v, compare);
}

uint64_t samples_percentile(const struct samples *s, double share)
{
    if (s->n == 0)
        return 0;
    double rank = ceil(share * (double)s->n - 1e-9);
    size_t i = rank < 1 ? 0 : (size_t)rank - 1;
    return s->v[i < s->n ? i : s->n - 1];
}

double samples_share_from(const struct samples *s, uint64_t x)
{
    size_t low = 0, high = s->n; /* the first that is x or more is in [low, high] */
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (s->v[middle] < x)
            low = middle + 1;
        else
            high = middle;
    }
    return s->n == 0 ? 0 : (double)(s->n - low) / (double)s->n;
}

void samples_fini(struct samples *s)
{
    free(s->v);
    *s = (struct samples){0};
}
