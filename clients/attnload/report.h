/* report.h: the results of a run, as text, JSON or CSV. */
#ifndef ATTNLOAD_REPORT_H
#define ATTNLOAD_REPORT_H

#include <jansson.h>

#include "clients/attnload/worker.h"

struct report {
    const struct options *o;
    struct attn_client_info info;
    struct tally tally; /* of all workers; samples sorted */
    struct verify_result verified;
    double prompt_s, run_s;
    double n_batches, n_batch_items; /* the daemon's, during the run; negative: not known */
    const char *failure; /* why a worker failed, NULL */
    const json_t *old; /* results to compare with, NULL */
};

/* True: the run did all it should and no output was wrong. */
bool report_is_good(const struct report *r);
/* Of the sends of an open loop or a trace, how many were 1 ms late or more: 0 to 1. */
double report_late_share(const struct report *r);
void report_print(const struct report *r);
/* Everything printed so far has arrived; else said on stderr why not. */
bool report_is_written(void);

#endif
