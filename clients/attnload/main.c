/* main.c: attnload: starts the workers, shows progress on stderr, reports.
 *
 * The main thread has a client of its own for the daemon's counters; it takes them when all contexts
 * are filled and again when all workers are done, so that they cover the measured run alone.
 */
#include <inttypes.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clients/attnload/compare.h"
#include "clients/attnload/report.h"

#define PROGRESS_NS 2000000000u
#define LOOK_NS 20000000u
#define STATS_US 2000000u

static struct load load;

static void on_signal(int sig)
{
    (void)sig;
    atomic_store(&load.is_stopping, true);
}

struct batch_counts {
    double n_batches, n_items;
};

static struct batch_counts batch_counts_of(attn_client *c)
{
    struct batch_counts b = {-1, -1};
    char *text = NULL;
    if (attn_client_stats(c, STATS_US, &text) != ATTN_OK)
        return b;
    json_t *root = json_loads(text, 0, NULL);
    json_t *batches = json_object_get(root, "batches_total");
    json_t *items = json_object_get(root, "batch_items_total");
    if (json_is_number(batches) && json_is_number(items))
        b = (struct batch_counts){json_number_value(batches), json_number_value(items)};
    json_decref(root);
    attn_free(text);
    return b;
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

/* Waits until *n_done is n, telling on stderr how far it is. */
static void watch(const char *phase, atomic_uint *n_done, uint32_t n)
{
    uint64_t next_ns = attn_now_ns() + PROGRESS_NS;
    bool is_told = false;
    while (atomic_load(n_done) < n) {
        worker_sleep(LOOK_NS);
        if (attn_now_ns() < next_ns)
            continue;
        next_ns += PROGRESS_NS;
        is_told = true;
        fprintf(stderr, "%s: %" PRIu64 " prompt tokens, %" PRIu64 " steps", phase,
                (uint64_t)atomic_load(&load.n_prompt_tokens), (uint64_t)atomic_load(&load.n_steps));
        if (load.trace.n > 0)
            fprintf(stderr, ", %" PRIu64 " of %u requests", (uint64_t)atomic_load(&load.n_requests),
                    load.trace.n);
        fputs(isatty(STDERR_FILENO) ? "   \r" : "\n", stderr);
    }
    if (is_told && isatty(STDERR_FILENO))
        fputc('\n', stderr);
}

static void join_tally(struct tally *dst, struct tally *src)
{
    struct samples *d[] = {&dst->total, &dst->queue, &dst->device, &dst->added,
                           &dst->token, &dst->ttft,  &dst->late};
    struct samples *s[] = {&src->total, &src->queue, &src->device, &src->added,
                           &src->token, &src->ttft,  &src->late};
    for (size_t i = 0; i < sizeof d / sizeof d[0]; i++)
        samples_join(d[i], s[i]);
    for (int i = 0; i < TALLY_N_STATUS; i++)
        dst->refused[i] += src->refused[i];
    dst->n_steps += src->n_steps;
    dst->n_items += src->n_items;
    dst->kv_bytes += src->kv_bytes;
    dst->n_prompt_steps += src->n_prompt_steps;
    dst->n_prompt_tokens += src->n_prompt_tokens;
    dst->n_requests += src->n_requests;
    dst->n_unfinished += src->n_unfinished;
    if (src->filled_ns > dst->filled_ns)
        dst->filled_ns = src->filled_ns;
    if (src->end_ns > dst->end_ns)
        dst->end_ns = src->end_ns;
}

static void sort_tally(struct tally *t)
{
    struct samples *s[] = {&t->total, &t->queue, &t->device, &t->added,
                           &t->token, &t->ttft,  &t->late};
    for (size_t i = 0; i < sizeof s / sizeof s[0]; i++)
        samples_sort(s[i]);
}

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "attnload: %s%s%s\n", what, what[0] != '\0' ? ": " : "", why);
    return 1;
}

/* Runs the workers and fills *r. False: not all could be started. */
static bool run(const struct options *o, attn_client *c, struct worker *workers, struct report *r)
{
    uint64_t begin_ns = attn_now_ns();
    uint32_t n = 0;
    pthread_barrier_init(&load.barrier, NULL, o->n_workers + 1);
    for (; n < o->n_workers; n++) {
        workers[n].load = &load;
        workers[n].index = n;
        if (pthread_create(&workers[n].thread, NULL, worker_main, &workers[n]) != 0)
            return false; /* the caller exits: the others wait at the barrier */
    }
    watch("filling", &load.n_ready, n);
    struct batch_counts before = batch_counts_of(c);
    load.start_ns = attn_now_ns();
    pthread_barrier_wait(&load.barrier);
    watch("running", &load.n_finished, n);
    struct batch_counts after = batch_counts_of(c);
    pthread_barrier_wait(&load.barrier);

    if (o->n_verify > 0)
        fprintf(stderr, "verifying %u outputs\n", o->n_verify);
    r->n_batches = before.n_batches < 0 ? -1 : after.n_batches - before.n_batches;
    r->n_batch_items = after.n_items - before.n_items;
    for (uint32_t i = 0; i < n; i++) {
        pthread_join(workers[i].thread, NULL);
        join_tally(&r->tally, &workers[i].tally);
        verify_join(&r->verified, &workers[i].verified);
        if (workers[i].failure != ATTN_OK && r->failure == NULL)
            r->failure = workers[i].why;
    }
    r->prompt_s = (double)(r->tally.filled_ns - begin_ns) * 1e-9;
    r->run_s = (double)(r->tally.end_ns - load.start_ns) * 1e-9;
    sort_tally(&r->tally);
    pthread_barrier_destroy(&load.barrier);
    return true;
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
    load.o = &o;
    load.n_blocks = count_blocks(&o, &load.trace);
    load.id_base = data_mix(attn_now_ns() ^ (uint64_t)getpid() << 40) & ~0xffffffffull;

    json_t *old = NULL;
    if (o.compare != NULL && (old = compare_load(o.compare, why, sizeof why)) == NULL)
        return fail("compare", why);
    attn_client *c = NULL;
    struct report r = {.old = old, .o = &o, .info = {.struct_size = sizeof r.info}};
    struct worker *workers = calloc(o.n_workers, sizeof *workers);
    struct attn_client_options co = {.struct_size = sizeof co,
                                     .client_name = "attnload",
                                     .timeout_us = o.timeout_us,
                                     .is_hasty = o.wait_s == 0};
    uint64_t open_us = o.wait_s > 0 ? (uint64_t)(o.wait_s * 1e6) : o.timeout_us;
    if (workers == NULL)
        return fail("", "no memory for workers");
    if (attn_client_open(o.endpoint, &co, open_us, &c) != ATTN_OK)
        return fail("connect", attn_last_error()->message);
    attn_client_info(c, &r.info);
    struct sigaction sa = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    if (!run(&o, c, workers, &r))
        return fail("", "cannot start all workers");
    report_print(&r);
    bool is_good = report_is_written() && report_is_good(&r);

    struct worker all = {.tally = r.tally};
    worker_fini(&all);
    for (uint32_t i = 0; i < o.n_workers; i++)
        worker_fini(&workers[i]);
    free(workers);
    trace_fini(&load.trace);
    json_decref(old);
    attn_client_close(c);
    return is_good ? 0 : 1;
}
