/* arrivals.h: when the open loop's tokens are due: one schedule for the whole run, made from its
 * seed and dealt out to the workers in turn, so that it does not depend on how many there are. */
#ifndef ATTNLOAD_ARRIVALS_H
#define ATTNLOAD_ARRIVALS_H

#include <stdbool.h>
#include <stdint.h>

enum arrivals_kind {
    ARRIVALS_POISSON, /* gaps are exponential */
    ARRIVALS_CONSTANT, /* gaps are equal */
    ARRIVALS_GAMMA, /* gaps have a coefficient of variation: 1 as Poisson, more is burstier */
    ARRIVALS_BURST, /* so many at once, at equal distances */
};

struct arrivals_spec {
    enum arrivals_kind kind;
    double value; /* of gamma and burst */
};

struct arrivals {
    struct arrivals_spec spec;
    double rate; /* a second */
    uint64_t random, n; /* n made so far */
    double at_s; /* of the latest */
    uint32_t stride, skip;
};

/* constant, poisson, gamma=CV (0.01 to 100) or burst=N (1 to 1e6). */
bool arrivals_parse(const char *text, struct arrivals_spec *out);
#define ARRIVALS_BYTES 32
/* What arrivals_parse takes. */
void arrivals_format(const struct arrivals_spec *spec, char out[ARRIVALS_BYTES]);
/* Arrivals number index, index + stride, ... of the schedule. */
void arrivals_init(struct arrivals *a, const struct arrivals_spec *spec, double rate, uint64_t seed,
                   uint32_t index, uint32_t stride);
/* Nanoseconds from the start of the run; never less than the one before. */
uint64_t arrivals_next(struct arrivals *a);

#endif
