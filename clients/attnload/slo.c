/* slo.c: --slo: the highest rate of an open loop at which a percentile of the tokens' times keeps
 * its bound. Rates double or halve until one is good and one is bad, then the gap is halved on a
 * logarithmic scale.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "clients/attnload/run.h"

#define CLOSE_ENOUGH 1.05
#define MAX_TRIALS 40
#define MIN_RATE 1e-3
#define MAX_RATE 1e9

bool knee_next(struct knee *k, bool is_good)
{
    if (is_good)
        k->good = k->rate;
    else
        k->bad = k->rate;
    if (k->bad == 0)
        k->rate = 2 * k->good;
    else if (k->good == 0)
        k->rate = k->bad / 2;
    else
        k->rate = sqrt(k->good * k->bad);
    bool is_found = k->good > 0 && k->bad > 0 && k->bad <= CLOSE_ENOUGH * k->good;
    return !is_found && ++k->n_tried < MAX_TRIALS && k->rate >= MIN_RATE && k->rate <= MAX_RATE;
}

/* What was not answered at all took longer than any bound. */
static bool is_met(const struct report *r, const struct slo *slo)
{
    const struct tally *t = &r->tally;
    double n_cut = (double)(t->n_unfinished + t->n_unsent),
           all = (double)t->times[TIME_TOKEN].n + n_cut;
    if (r->failure[0] != '\0' || t->times[TIME_TOKEN].n == 0 || report_is_late(r, slo->share))
        return false;
    return n_cut <= (1 - slo->share) * all &&
           (double)histogram_percentile(&t->times[TIME_TOKEN], slo->share) <= slo->seconds * 1e9;
}

/* Whether a run at this rate has enough tokens for one to be above the percentile. */
static bool is_measurable(const struct options *o, double rate)
{
    return rate * o->duration_s * (1 - o->slo.share) >= 1;
}

static void tell(const struct options *o, const struct report *r, bool is_good)
{
    double ms = (double)histogram_percentile(&r->tally.times[TIME_TOKEN], o->slo.share) * 1e-6;
    fprintf(stderr,
            "slo: %.6g tokens/s: %s of a token %.3f ms, %.1f %% late, %" PRIu64 " cut: %s\n",
            o->rate, o->slo.name, ms, 100 * report_late_share(r),
            r->tally.n_unfinished + r->tally.n_unsent, is_good ? "good" : "too much");
}

bool slo_search(struct load *l, const struct options *o, attn_client *c, struct options *best_o,
                struct report *r)
{
    struct knee k = {.rate = o->rate};
    bool goes_on = true;
    while (goes_on) {
        struct options trial_o = *o;
        struct report trial = {.info = r->info, .old = r->old};
        trial_o.rate = k.rate;
        if (!run_once(l, &trial_o, c, &trial))
            return false;
        bool is_good = is_met(&trial, &o->slo);
        tell(&trial_o, &trial, is_good);
        goes_on = knee_next(&k, is_good) && trial.failure[0] == '\0' &&
                  !atomic_load(&l->is_stopping) && (is_good || is_measurable(o, k.rate));
        if (is_good || !goes_on) {
            bool is_best = is_good || k.good == 0 || trial.failure[0] != '\0';
            if (is_best) {
                run_forget(r);
                *r = trial;
                *best_o = trial_o;
                r->o = best_o;
                continue;
            }
        }
        run_forget(&trial);
    }
    r->good_rate = k.good;
    r->bad_rate = k.bad;
    if (k.good == 0 && r->failure[0] == '\0')
        snprintf(r->failure, sizeof r->failure, "--slo: no rate tried keeps %s at %g s%s",
                 o->slo.name, o->slo.seconds,
                 is_measurable(o, k.rate) ? "" : "; --duration is too short for lower ones");
    return true;
}
