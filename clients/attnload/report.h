/* report.h: the results of a run, as text or JSON. */
#ifndef ATTNLOAD_REPORT_H
#define ATTNLOAD_REPORT_H

#include "clients/attnload/worker.h"

struct report {
    const struct options *o;
    struct attn_client_info info;
    struct tally tally; /* of all workers; samples sorted */
    struct verify_result verified;
    double prompt_s, run_s;
    double n_batches, n_batch_items; /* the daemon's, during the run; negative: not known */
    const char *failure; /* why a worker failed, NULL */
};

/* True: the run did all it should and no output was wrong. */
bool report_is_good(const struct report *r);
void report_print(const struct report *r);
/* Everything printed so far has arrived; else said on stderr why not. */
bool report_is_written(void);

#endif
