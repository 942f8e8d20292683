/* run.c: starts the workers, waits for their phases and joins their results. Shows progress on
 * stderr. The daemon's counters are taken when all contexts are filled and again when all workers
 * are done, so that they cover the measured run alone.
 */
#include "clients/attnload/run.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PROGRESS_NS 2000000000u
#define LOOK_NS 20000000u
#define STATS_US 2000000u

/* Negative: not known. */
struct counts {
    double n_batches, n_items, n_here, n_away;
};

static struct counts counts_of(attn_client *c)
{
    struct counts b = {-1, -1, -1, -1};
    char *text = NULL;
    if (attn_client_stats(c, STATS_US, &text) != ATTN_OK)
        return b;
    json_t *root = json_loads(text, 0, NULL);
    json_t *batches = json_object_get(root, "batches_total");
    json_t *items = json_object_get(root, "batch_items_total");
    json_t *here = json_object_get(root, "chosen_here_total");
    json_t *away = json_object_get(root, "chosen_away_total");
    if (json_is_number(batches) && json_is_number(items)) {
        b.n_batches = json_number_value(batches);
        b.n_items = json_number_value(items);
    }
    if (json_is_number(here) && json_is_number(away)) {
        b.n_here = json_number_value(here);
        b.n_away = json_number_value(away);
    }
    json_decref(root);
    attn_free(text);
    return b;
}

/* Waits until *n_done is n, telling on stderr how far it is. */
static void watch(struct load *l, const char *phase, atomic_uint *n_done, uint32_t n)
{
    uint64_t next_ns = attn_now_ns() + PROGRESS_NS;
    bool is_announced = false;
    while (atomic_load(n_done) < n) {
        worker_sleep(LOOK_NS);
        if (attn_now_ns() < next_ns)
            continue;
        next_ns += PROGRESS_NS;
        is_announced = true;
        fprintf(stderr, "%s: %" PRIu64 " prompt tokens, %" PRIu64 " steps", phase,
                (uint64_t)atomic_load(&l->n_prompt_tokens), (uint64_t)atomic_load(&l->n_steps));
        if (l->trace.n > 0)
            fprintf(stderr, ", %" PRIu64 " of %u requests", (uint64_t)atomic_load(&l->n_requests),
                    l->trace.n);
        fputs(isatty(STDERR_FILENO) ? "   \r" : "\n", stderr);
    }
    if (is_announced && isatty(STDERR_FILENO))
        fputc('\n', stderr);
}

static void join_tally(struct tally *dst, struct tally *src)
{
    for (size_t i = 0; i < TALLY_N_TIMES; i++)
        histogram_join(&dst->times[i], &src->times[i]);
    for (int i = 0; i < TALLY_N_STATUS; i++)
        dst->refused[i] += src->refused[i];
    dst->n_steps += src->n_steps;
    dst->n_items += src->n_items;
    dst->kv_bytes += src->kv_bytes;
    dst->n_prompt_steps += src->n_prompt_steps;
    dst->n_prompt_tokens += src->n_prompt_tokens;
    dst->n_cached_tokens += src->n_cached_tokens;
    dst->n_requests += src->n_requests;
    dst->n_unfinished += src->n_unfinished;
    dst->n_unsent += src->n_unsent;
    if (src->filled_ns > dst->filled_ns)
        dst->filled_ns = src->filled_ns;
    if (src->end_ns > dst->end_ns)
        dst->end_ns = src->end_ns;
}

static bool all_were_answered(const struct worker *workers, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (workers[i].failure != ATTN_OK || workers[i].tally.n_unfinished > 0)
            return false;
    }
    return true;
}

/* Warns of what was not counted. */
static void find_lost_times(struct report *r)
{
    uint64_t n_lost = 0;
    for (size_t i = 0; i < TALLY_N_TIMES; i++)
        n_lost += r->tally.times[i].n_lost;
    if (n_lost > 0 && r->failure[0] == '\0')
        snprintf(r->failure, sizeof r->failure, "out of memory: %" PRIu64 " times are not counted",
                 n_lost);
}

static void workers_free(struct worker *workers, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        worker_fini(&workers[i]);
    free(workers);
}

bool run_once(struct load *l, const struct options *o, attn_client *c, struct report *r)
{
    uint64_t begin_ns = attn_now_ns();
    uint32_t n = 0;
    struct worker *workers = calloc(o->n_workers, sizeof *workers);
    if (workers == NULL)
        return false;
    l->o = o;
    const struct preset *p = o->preset;
    l->weights = o->has_heads
                     ? data_weights(o->seed, p->num_q_heads, p->qk_nope_head_dim + p->v_head_dim,
                                    p->kv_lora_rank, o->dtype)
                     : NULL;
    if (o->has_heads && l->weights == NULL)
        return false;
    l->id_base = data_mix(begin_ns ^ (uint64_t)getpid() << 40) & ~0xffffffffull;
    l->start_ns = 0;
    atomic_store(&l->n_ready, 0);
    atomic_store(&l->n_finished, 0);
    r->o = o;
    pthread_barrier_init(&l->barrier, NULL, o->n_workers + 1);
    for (; n < o->n_workers; n++) {
        workers[n].load = l;
        workers[n].index = n;
        if (pthread_create(&workers[n].thread, NULL, worker_main, &workers[n]) != 0)
            return false; /* the caller exits: the others wait at the barrier */
    }
    watch(l, "filling", &l->n_ready, n);
    struct counts before = counts_of(c);
    l->start_ns = attn_now_ns();
    pthread_barrier_wait(&l->barrier);
    watch(l, "running", &l->n_finished, n);
    /* a daemon that no longer answers is not waited for: the run ends when it was to */
    struct counts after = {-1, -1, -1, -1};
    if (all_were_answered(workers, n))
        after = counts_of(c);
    pthread_barrier_wait(&l->barrier);

    if (o->n_verify > 0)
        fprintf(stderr, "verifying %u outputs\n", o->n_verify);
    r->n_batches =
        before.n_batches < 0 || after.n_batches < 0 ? -1 : after.n_batches - before.n_batches;
    r->n_batch_items = after.n_items - before.n_items;
    if (before.n_here >= 0 && after.n_here >= 0) {
        r->n_chosen_here = after.n_here - before.n_here;
        r->n_chosen_away = after.n_away - before.n_away;
    }
    for (uint32_t i = 0; i < n; i++) {
        pthread_join(workers[i].thread, NULL);
        join_tally(&r->tally, &workers[i].tally);
        verify_join(&r->verified, &workers[i].verified);
        if (workers[i].failure != ATTN_OK && r->failure[0] == '\0')
            memcpy(r->failure, workers[i].why, sizeof r->failure);
    }
    find_lost_times(r);
    r->prompt_s = (double)(r->tally.filled_ns - begin_ns) * 1e-9;
    r->run_s = (double)(r->tally.end_ns - l->start_ns) * 1e-9;
    pthread_barrier_destroy(&l->barrier);
    workers_free(workers, n);
    free(l->weights);
    return true;
}

void run_forget(struct report *r)
{
    tally_fini(&r->tally);
}
