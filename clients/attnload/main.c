/* main.c: attnload, the load generator: reads the options, does one run or a search for the highest
 * rate, and prints a report. */
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "clients/attnload/compare.h"
#include "clients/attnload/run.h"

static struct load load;

static void on_signal(int sig)
{
    (void)sig;
    atomic_store(&load.is_stopping, true);
}

/* Blocks that all sequences together can need. */
static uint32_t count_blocks(const struct options *o, const struct trace *t)
{
    uint64_t tokens = (uint64_t)o->context + o->steps;
    uint64_t n_sequences = (uint64_t)o->n_workers * o->n_sequences;
    for (uint32_t i = 0; i < t->n; i++) {
        uint64_t n = (uint64_t)t->requests[i].n_input + t->requests[i].n_output;
        tokens = i == 0 || n > tokens ? n : tokens;
    }
    if (t->n > 0 && t->n < n_sequences)
        n_sequences = t->n;
    uint64_t n = n_sequences * ((tokens + o->block_tokens - 1) / o->block_tokens);
    return n > UINT32_MAX ? UINT32_MAX : (uint32_t)n;
}

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "attnload: %s%s%s\n", what, what[0] != '\0' ? ": " : "", why);
    return 1;
}

int main(int argc, char **argv)
{
    struct options o;
    char why[256] = "";
    switch (options_parse(argc, argv, &o)) {
    case OPTIONS_EXIT_OK:
        return 0;
    case OPTIONS_EXIT_FAILED:
        return 1;
    case OPTIONS_EXIT_USAGE:
        return 2;
    case OPTIONS_RUN:
        break;
    }
    struct trace_scaling scaling = {
        .speed = o.speed, .length = o.length_scale, .max_requests = o.n_requests};
    if (o.trace != NULL && trace_load(o.trace, &scaling, &load.trace, why, sizeof why) != ATTN_OK)
        return fail("trace", why);
    load.n_blocks = o.pool_blocks > 0 ? o.pool_blocks : count_blocks(&o, &load.trace);

    json_t *old = NULL;
    if (o.compare != NULL && (old = compare_load(o.compare, why, sizeof why)) == NULL)
        return fail("compare", why);
    attn_client *c = NULL;
    struct options best_o;
    struct report r = {.old = old, .info = {.struct_size = sizeof r.info}};
    struct attn_client_options co = {.struct_size = sizeof co,
                                     .client_name = "attnload",
                                     .timeout_us = o.timeout_us,
                                     .fail_fast = o.wait_s == 0};
    uint64_t open_us = o.wait_s > 0 ? (uint64_t)(o.wait_s * 1e6) : o.timeout_us;
    if (attn_client_open(o.endpoint, &co, open_us, &c) != ATTN_OK)
        return fail("connect", attn_last_error()->message);
    attn_client_info(c, &r.info);
    struct sigaction sa = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    prctl(PR_SET_TIMERSLACK, 1UL); /* sends are due to the microsecond; threads inherit it */
    bool has_run =
        o.slo.share > 0 ? slo_search(&load, &o, c, &best_o, &r) : run_once(&load, &o, c, &r);
    if (!has_run)
        return fail("", "cannot start all workers");
    report_print(&r);
    bool is_good = output_is_written() && report_is_good(&r);

    run_forget(&r);
    trace_fini(&load.trace);
    json_decref(old);
    attn_client_close(c);
    return is_good ? 0 : 1;
}
