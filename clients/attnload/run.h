/* run.h: one run of all workers, and the search for the highest rate that meets an objective, which
 * is many runs. */
#ifndef ATTNLOAD_RUN_H
#define ATTNLOAD_RUN_H

#include "clients/attnload/report.h"

/* Runs the workers and fills *r, which is zeroed but for info and old. c: for the daemon's
 * counters. False: not all workers could be started; exit, those that were wait for the others. */
bool run_once(struct load *l, const struct options *o, attn_client *c, struct report *r);
/* Frees the histograms of a run. */
void run_forget(struct report *r);

/* Runs at rates from o->rate on until the highest that meets o->slo is known within 5 %. *r and
 * *best_o are the best run's; r->slo is set. False: as run_once. Without any good rate r->failure
 * says so. */
bool slo_search(struct load *l, const struct options *o, attn_client *c, struct options *best_o,
                struct report *r);

/* ---- the search, on its own ---- */

struct knee {
    double good, bad; /* rates: the highest good one, the lowest bad one; 0: none yet */
    double rate; /* to be tried next */
    uint32_t n_tried;
};
/* Takes what the trial at k->rate gave. False: the search is over. */
bool knee_next(struct knee *k, bool is_good);

#endif
