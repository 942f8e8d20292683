/* attnbench_options.h: what attnbench is asked for. */
#ifndef ATTND_ATTNBENCH_OPTIONS_H
#define ATTND_ATTNBENCH_OPTIONS_H

#include "kernels/bench/bench.h"

enum { BENCH_MAX_GIVEN = 64 }; /* cells by --cell */

struct bench_request {
    struct bench_options o;
    const char *grid, *match, *csv, *type, *rung; /* NULL: not given; grid never */
    const char *extra; /* the first argument that is no option, or NULL */
    attn_dtype kv_dtype;
    uint32_t gib, new_tokens, n_prompts, shared_tokens, max_tokens;
    bool is_tables; /* grid is sweep or ladder */
    struct bench_devices devices;
    struct bench_cell given[BENCH_MAX_GIVEN];
    struct case_geometry geometries[BENCH_MAX_GIVEN]; /* of given */
    uint32_t n_given;
};

/* -1: go on; else the exit code: --help was asked for, or a wrong option was told. Strings are
 * argv's. q must stay where it is: its cells point into it. */
int bench_request_parse(struct bench_request *q, int argc, char **argv);

#endif
