/* report.h: the results of a run, and printing them as text, JSON or CSV. Results of several
 * workers are joined before. */
#ifndef ATTNLOAD_REPORT_H
#define ATTNLOAD_REPORT_H

#include <jansson.h>

#include "clients/attnload/worker.h"

struct report {
    const struct options *o;
    struct attn_client_info info;
    struct tally tally; /* of all workers */
    struct verify_result verified;
    double prompt_s, run_s;
    double n_batches, n_batch_items; /* the daemon's, during the run; negative: not known */
    double n_chosen_here, n_chosen_away; /* the same, of a daemon that counts them; 0, 0: none */
    char failure[WORKER_WHY_BYTES]; /* why a worker failed, "" */
    double good_rate, bad_rate; /* of --slo; 0: none found */
    const json_t *old; /* results to compare with, NULL */
};

/* True: the run did all it should and no output was wrong. */
bool report_is_good(const struct report *r);
/* Of the sends of an open loop or a trace, how many were 1 ms late or more: 0 to 1. */
double report_late_share(const struct report *r);
/* True: too many sends were late for a percentile (0 to 1) of what counts from the plan to be told.
 * */
bool report_is_late(const struct report *r, double share);
void report_print(const struct report *r);

#endif
