/* test_attnload_closed.c: which tokens attnload's closed loop sends, as a fake daemon sees it.
 *
 * The fake's thread keeps a model of the sequences' lengths; the test looks at it when both are
 * done.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "clients/attnload/worker.h"
#include "tests/clients/fake_daemon.h"

enum { CONTEXT = 10, CHUNK = 4, MAX_SEQUENCES = 8, MAX_LAYERS = 4 };

struct run {
    struct options o;
    struct load load;
    struct worker worker;
    uint32_t stop_after; /* steps of all sequences; 0: --steps end the run */
    uint32_t n_steps; /* seen, of all sequences */
    uint32_t len[MAX_LAYERS][MAX_SEQUENCES];
    char wrong[128]; /* the first thing that was */
};

#define EXPECT(x)                                                                                  \
    do {                                                                                           \
        if (!(x) && r->wrong[0] == '\0')                                                           \
            snprintf(r->wrong, sizeof r->wrong, "step %u: not %s", r->n_steps, #x);                \
    } while (0)

/* Where sequence i is at the run's t-th token. */
static uint32_t expected_pos(const struct run *r, uint32_t i, uint32_t t)
{
    return CONTEXT + (i * r->o.steps / r->o.n_sequences + t) % r->o.steps;
}

static void see_step(struct run *r, const Attnd__Step *s)
{
    bool is_run = (s->flags & WIRE_STEP_ATTEND) != 0;
    uint32_t t = r->n_steps / r->o.n_layers;
    EXPECT(!is_run || s->n_seq == r->o.n_sequences);
    EXPECT(!is_run || s->layer == r->n_steps % r->o.n_layers);
    for (size_t j = 0; j < s->n_seq; j++) {
        uint32_t i = (uint32_t)(s->seq[j] - r->load.id_base);
        uint32_t *len = &r->len[s->layer][i];
        if (is_run) {
            EXPECT(s->n_tokens[j] == 1 && s->pos[j] == expected_pos(r, i, t));
            EXPECT(s->pos[j] <= *len); /* no gap */
        } else {
            EXPECT(s->pos[j] == *len);
        }
        *len = s->pos[j] + s->n_tokens[j] > *len ? s->pos[j] + s->n_tokens[j] : *len;
    }
    r->n_steps += is_run;
    if (is_run && r->n_steps == r->stop_after)
        atomic_store(&r->load.is_stopping, true);
}

static void see(void *user, const Attnd__Request *q)
{
    struct run *r = user;
    if (q->body_case == ATTND__REQUEST__BODY_STEP)
        see_step(r, q->step);
    EXPECT(q->body_case != ATTND__REQUEST__BODY_TRUNCATE);
}

/* One worker's closed run; stop_after 0: without --duration. */
static void run_closed(uint32_t n_sequences, uint32_t n_layers, uint32_t steps, uint32_t stop_after)
{
    struct fake_daemon daemon = {0};
    char url[96];
    snprintf(url, sizeof url, "ipc:///tmp/attnload_closed_%d.sock", (int)getpid());
    struct run *r = calloc(1, sizeof *r);
    assert_non_null(r);
    r->o = (struct options){.endpoint = url,
                            .preset = preset_find("bytelm"),
                            .n_layers = n_layers,
                            .n_workers = 1,
                            .n_sequences = n_sequences,
                            .context = CONTEXT,
                            .steps = steps,
                            .chunk = CHUNK,
                            .block_tokens = 16,
                            .duration_s = stop_after > 0 ? 1e6 : 0,
                            .dtype = ATTN_F32,
                            .kv_dtype = ATTN_F32,
                            .timeout_us = 300000000};
    r->load.o = &r->o;
    r->load.n_blocks = 100;
    r->load.id_base = 1ull << 32;
    r->worker.load = &r->load;
    r->stop_after = stop_after;
    daemon.see = see;
    daemon.user = r;
    fake_daemon_start(&daemon, url);
    pthread_barrier_init(&r->load.barrier, NULL, 2);
    assert_int_equal(pthread_create(&r->worker.thread, NULL, worker_main, &r->worker), 0);
    pthread_barrier_wait(&r->load.barrier);
    pthread_barrier_wait(&r->load.barrier);
    pthread_join(r->worker.thread, NULL);
    pthread_barrier_destroy(&r->load.barrier);
    worker_fini(&r->worker);
    fake_daemon_stop(&daemon);

    assert_string_equal(r->worker.why, "");
    assert_string_equal(r->wrong, "");
    assert_int_equal(r->n_steps, stop_after > 0 ? stop_after : steps * n_layers);
    free(r);
}

static void sequences_are_spread_over_their_steps(void **state)
{
    (void)state;
    run_closed(3, 2, 7, 0);
    run_closed(4, 1, 8, 0);
    run_closed(1, 2, 5, 0);
}

static void a_sequence_begins_again_when_it_is_at_its_end(void **state)
{
    (void)state;
    run_closed(3, 2, 7, 2 * 40);
    run_closed(4, 4, 4, 4 * 13);
    run_closed(1, 1, 5, 12);
}

static void more_sequences_than_steps_share_positions(void **state)
{
    (void)state;
    run_closed(8, 2, 3, 2 * 10);
    run_closed(5, 1, 2, 0);
    run_closed(5, 2, 1, 2 * 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sequences_are_spread_over_their_steps),
        cmocka_unit_test(a_sequence_begins_again_when_it_is_at_its_end),
        cmocka_unit_test(more_sequences_than_steps_share_positions),
    };
    return cmocka_run_group_tests_name("attnload's closed loop", tests, NULL, NULL);
}
