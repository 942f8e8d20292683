/* arrivals.c: draws the times between tokens. Gamma as in Marsaglia and Tsang's method (2000), from
 * normals of the polar method; all from one stream of numbers, so that a seed gives the same
 * schedule everywhere. */
#include "clients/attnload/arrivals.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/attnload/data.h"

bool arrivals_parse(const char *text, struct arrivals_spec *out)
{
    static const struct {
        const char *name;
        enum arrivals_kind kind;
        double min, max; /* of the value; both 0: none */
    } kinds[] = {{"constant", ARRIVALS_CONSTANT, 0, 0},
                 {"poisson", ARRIVALS_POISSON, 0, 0},
                 {"gamma=", ARRIVALS_GAMMA, 0.01, 100},
                 {"burst=", ARRIVALS_BURST, 1, 1e6}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        size_t n = strlen(kinds[i].name);
        if (strncmp(text, kinds[i].name, n) != 0)
            continue;
        char *end = NULL;
        double x = kinds[i].max > 0 ? strtod(text + n, &end) : 0;
        bool is_good = kinds[i].max > 0 ? end != text + n && *end == '\0' && x >= kinds[i].min &&
                                              x <= kinds[i].max
                                        : text[n] == '\0';
        if (kinds[i].kind == ARRIVALS_BURST && x != floor(x))
            is_good = false;
        if (is_good)
            *out = (struct arrivals_spec){kinds[i].kind, x};
        return is_good;
    }
    return false;
}

void arrivals_format(const struct arrivals_spec *spec, char out[ARRIVALS_BYTES])
{
    static const char *const names[] = {"poisson", "constant", "gamma=", "burst="};
    int n = snprintf(out, ARRIVALS_BYTES, "%s", names[spec->kind]);
    if (spec->kind == ARRIVALS_GAMMA || spec->kind == ARRIVALS_BURST)
        snprintf(out + n, ARRIVALS_BYTES - (size_t)n, "%.10g", spec->value);
}

/* In (0, 1). */
static double uniform(struct arrivals *a)
{
    a->random = data_mix(a->random);
    return ((double)(a->random >> 11) + 0.5) / 9007199254740992.0;
}

static double normal(struct arrivals *a)
{
    for (;;) {
        double x = 2 * uniform(a) - 1, y = 2 * uniform(a) - 1, r2 = x * x + y * y;
        if (r2 < 1 && r2 > 0)
            return x * sqrt(-2 * log(r2) / r2);
    }
}

/* Of mean 1. */
static double gamma_gap(struct arrivals *a, double cv)
{
    double shape = 1 / (cv * cv), boost = 1, k = shape;
    if (k < 1) {
        boost = pow(uniform(a), 1 / k);
        k += 1;
    }
    double d = k - 1.0 / 3, c = 1 / sqrt(9 * d);
    for (;;) {
        double x = normal(a), v = 1 + c * x;
        if (v <= 0)
            continue;
        v = v * v * v;
        if (log(uniform(a)) < x * x / 2 + d - d * v + d * log(v))
            return d * v * boost / shape;
    }
}

void arrivals_init(struct arrivals *a, const struct arrivals_spec *spec, double rate, uint64_t seed,
                   uint32_t index, uint32_t stride)
{
    *a = (struct arrivals){.spec = *spec,
                           .rate = rate,
                           .random = data_mix(seed * 1000003 + 1),
                           .stride = stride,
                           .skip = index};
}

static void step(struct arrivals *a)
{
    switch (a->spec.kind) {
    case ARRIVALS_CONSTANT: /* from the count: no error adds up */
        a->at_s = (double)(a->n + 1) / a->rate;
        break;
    case ARRIVALS_BURST:
        a->at_s = (floor((double)a->n / a->spec.value) + 1) * a->spec.value / a->rate;
        break;
    case ARRIVALS_GAMMA:
        a->at_s += gamma_gap(a, a->spec.value) / a->rate;
        break;
    default:
        a->at_s -= log(uniform(a)) / a->rate;
        break;
    }
    a->n++;
}

uint64_t arrivals_next(struct arrivals *a)
{
    for (uint32_t i = 0; i <= a->skip; i++)
        step(a);
    a->skip = a->stride - 1;
    return (uint64_t)(a->at_s * 1e9);
}
