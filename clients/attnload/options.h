/* options.h: what attnload was asked to do, from its command line: the load, how long, what to
 * check, and how to report. */
#ifndef ATTNLOAD_OPTIONS_H
#define ATTNLOAD_OPTIONS_H

#include "clients/attnload/arrivals.h"
#include "clients/attnload/preset.h"

enum options_format { FORMAT_TEXT, FORMAT_JSON, FORMAT_CSV };

/* A percentile of the tokens' times and its bound. */
struct slo {
    char name[8]; /* "p99" */
    double share; /* 0.99; 0: none asked for */
    double seconds;
};

struct options {
    const char *endpoint;
    const struct preset *preset;
    uint32_t n_layers; /* of the pool, the first of the model */
    uint32_t n_workers, n_sequences; /* sequences a worker has */
    uint32_t context, steps, chunk, block_tokens; /* tokens */
    double duration_s; /* 0: steps alone end the run */
    double rate; /* open loop: tokens a second of all workers, 0: closed loop */
    struct arrivals_spec arrivals; /* of the open loop */
    struct slo slo; /* search the rate that keeps it */
    attn_dtype dtype, kv_dtype;
    attn_split split;
    bool is_prompt_attended;
    bool has_heads; /* of the model; attnd projects them to latents and back */
    uint32_t top_k; /* tokens that a query visits; 0: all that it sees */
    uint32_t choose_blocks; /* that a query visits; 0: all */
    uint32_t pool_blocks; /* of the pool; 0: all that the sequences can take */
    uint32_t seed;
    double timeout_s, wait_s;
    uint64_t timeout_us; /* the same */
    uint32_t n_verify; /* outputs to recompute, 0: none */
    enum options_format format;
    const char *compare; /* the JSON of an earlier run; NULL: none */
    const char *trace; /* NULL: no trace */
    double speed, length_scale;
    uint32_t n_requests; /* 0: all */
};

enum options_action { OPTIONS_RUN, OPTIONS_EXIT_OK, OPTIONS_EXIT_FAILED, OPTIONS_EXIT_USAGE };

/* Fills *o; prints help or what is wrong. */
enum options_action options_parse(int argc, char **argv, struct options *o);
/* True: everything printed to stdout so far has arrived; else stderr says why not. */
bool output_is_written(void);

#endif
