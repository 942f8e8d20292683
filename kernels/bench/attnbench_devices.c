/* attnbench_devices.c: a decode step on one card, and split over several: each card's part as a
 * cell of its own, on its own device. The slowest part counts. What brings the parts together is
 * not in it: the daemon's hand-over, and the merge of a split by tokens (scripts/bench-cards).
 */
#include "kernels/bench/bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

bool bench_devices_parse(const char *text, struct bench_devices *out)
{
    out->n = 0;
    for (char *end;; text = end + 1) {
        unsigned long index = strtoul(text, &end, 10);
        if (end == text || index > BENCH_MAX_DEVICE || out->n == BENCH_MAX_DEVICES)
            return false;
        out->index[out->n++] = (uint32_t)index;
        if (*end == '\0')
            return out->n >= 2;
        if (*end != ',')
            return false;
    }
}

/* 0: failed, and said so. */
static double time_cell(const struct bench_options *o, uint32_t device, const struct bench_cell *c)
{
    struct bench_options own = *o;
    struct bench x;
    struct bench_setup s;
    struct bench_error error;
    struct bench_times times = {0};
    bool is_supported = false;
    own.device_index = device;
    bool ok = bench_open(&x, &own, bench_setup_bytes(c));
    if (ok && bench_setup_open(&x, c, &s)) {
        ok = bench_check(&x, &s, NULL, &error) &&
             bench_time(&x, &s, NULL, o->runs, &times, &is_supported);
        if (ok && !error.is_allclose) {
            snprintf(x.error, sizeof x.error, "an output is wrong by %g", error.max_abs);
            ok = false;
        }
        bench_setup_close(&x, &s);
    } else {
        ok = false;
    }
    if (!ok)
        fprintf(stderr, "attnbench: device %" PRIu32 ": %s\n", device, x.error);
    bench_close(&x);
    return ok && is_supported ? times.median_us : 0;
}

/* kv heads of card k: the first ones have one more where they are not even */
static uint32_t heads_of(uint32_t n_heads, uint32_t n_cards, uint32_t k)
{
    return n_heads / n_cards + (k < n_heads % n_cards);
}

static double time_split(const struct bench_options *o, const struct bench_devices *devices,
                         const struct bench_cell *c, bool is_heads)
{
    double slowest = 0;
    for (uint32_t k = 0; k < devices->n; k++) {
        struct case_geometry g = *c->g;
        struct bench_cell part = *c;
        part.g = &g;
        if (is_heads) {
            g.num_kv_heads = heads_of(c->g->num_kv_heads, devices->n, k);
            g.num_q_heads = c->g->num_q_heads / c->g->num_kv_heads * g.num_kv_heads;
        } else {
            part.context = (c->context + devices->n - 1) / devices->n;
            part.max_context = (c->max_context + devices->n - 1) / devices->n;
            part.first_context = (c->first_context + devices->n - 1) / devices->n;
        }
        double us = time_cell(o, devices->index[k], &part);
        if (us == 0)
            return 0;
        slowest = us > slowest ? us : slowest;
    }
    return slowest;
}

static void print_time(double us, double one)
{
    if (us > 0)
        printf(" %10.1f %6.2f", us, us / one);
    else
        printf(" %10s %6s", "n/a", "n/a");
}

int bench_devices(const struct bench_options *o, const struct bench_devices *devices,
                  const struct bench_cell *c, uint32_t n_cells)
{
    int rc = 0;
    printf("%s, %" PRIu32 " cards; us of a step on one, and of the slowest part of a split step\n\n"
           "%-32s %10s %10s %6s %10s %6s\n",
           o->backend, devices->n, "cell", "one card", "heads", "x", "tokens", "x");
    for (uint32_t i = 0; i < n_cells; i++) {
        char name[64];
        bool has_heads = c[i].g->num_kv_heads >= devices->n,
             has_tokens = c[i].context >= devices->n;
        bench_cell_name(&c[i], name, sizeof name);
        double one = time_cell(o, devices->index[0], &c[i]);
        double heads = one > 0 && has_heads ? time_split(o, devices, &c[i], true) : 0;
        double tokens = one > 0 && has_tokens ? time_split(o, devices, &c[i], false) : 0;
        printf("%-32s %10.1f", name, one);
        print_time(heads, one);
        print_time(tokens, one);
        printf("\n");
        fflush(stdout);
        if (one == 0 || (has_heads && heads == 0) || (has_tokens && tokens == 0))
            rc = 1;
    }
    return rc;
}
