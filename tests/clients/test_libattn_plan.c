/* test_libattn_plan.c: plans of steps at the real daemon, over the transport that the environment
 * names (shm://, if none): steps that name a plan against steps that name their items, of sequences
 * with the same tokens; and what the library does by itself where the daemon has no such plan. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clients/libattn/attn.h"
#include "tests/daemon/certs.h"
#include "tests/daemon/e2e.h"

enum {
    LAYERS = 3,
    HEADS = 4,
    KV_HEADS = 2,
    DIM = 32,
    SEQS = 5,
    MAX_TOKENS = 64,
    ROW = HEADS * DIM,
    KV_ROW = KV_HEADS * DIM,
    LONG_US = 300000000,
};

static struct e2e d;
static uint32_t random_state = 11;

static uint32_t random_to(uint32_t n)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

static void well(attn_status st)
{
    if (st != ATTN_OK)
        fail_msg("%s: %s", attn_status_name(st), attn_last_error()->message);
}

static void says(attn_status st, attn_status want, const char *part)
{
    assert_int_equal(st, want);
    if (strstr(attn_last_error()->message, part) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", attn_last_error()->message, part);
}

static int start(void **state)
{
    e2e_start(&d, *state);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    e2e_stop(&d);
    return 0;
}

/* One layer's tensors, and what came of them. */
struct layer {
    float q[MAX_TOKENS * ROW], k[MAX_TOKENS * KV_ROW], v[MAX_TOKENS * KV_ROW];
    float out[2][MAX_TOKENS * ROW], lse[2][MAX_TOKENS * HEADS];
    int32_t item_status[SEQS];
    uint32_t n_tokens, n_takes;
    struct attn_in_place in_place;
    struct attn_step step;
    struct attn_result result;
    attn_ticket ticket;
};

struct worker {
    attn_client *client;
    attn_pool *pool;
    struct attn_seq by_plans[SEQS], by_steps[SEQS];
    uint32_t len[SEQS];
    struct attn_item items[2][SEQS]; /* by plans, by steps */
    uint32_t n_items, n_tokens;
    attn_step_plan *plan;
    struct layer layers[LAYERS];
};

static attn_client *client_open(void)
{
    const char *transport = getenv("E2E_TRANSPORT");
    char url[128], *ca = certs_file(CERTS_GOOD, "ca.crt");
    const struct attn_client_options o = {.struct_size = sizeof o, .ca_file = ca};
    attn_client *c;
    if (transport == NULL)
        snprintf(url, sizeof url, "shm://%s", d.shm_path);
    else
        snprintf(url, sizeof url, "%s",
                 strcmp(transport, "tls") == 0   ? d.tls_url
                 : strcmp(transport, "tcp") == 0 ? d.tcp_url
                                                 : d.url);
    well(attn_client_open(url, &o, LONG_US, &c));
    free(ca);
    return c;
}

static struct worker *open_worker(void)
{
    struct worker *w = calloc(1, sizeof *w);
    const struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                        .layer_struct_size = sizeof(struct attn_layer),
                                        .name = "plans",
                                        .num_layers = LAYERS,
                                        .num_q_heads = HEADS,
                                        .num_kv_heads = KV_HEADS,
                                        .head_dim_k = DIM,
                                        .n_blocks = 400,
                                        .is_batch_invariant = 1,
                                        .q_dtype = ATTN_F32};
    w->client = client_open();
    well(attn_pool_create(w->client, &spec, LONG_US, &w->pool));
    for (uint32_t i = 0; i < SEQS; i++) {
        well(attn_seq_open(w->pool, 100 + i, LONG_US, &w->by_plans[i]));
        well(attn_seq_open(w->pool, 200 + i, LONG_US, &w->by_steps[i]));
    }
    return w;
}

static void close_worker(struct worker *w)
{
    attn_step_plan_close(w->plan);
    attn_pool_close(w->pool);
    attn_client_close(w->client);
    free(w);
}

static uint64_t n_planned(attn_client *c)
{
    char *json = NULL;
    well(attn_client_stats(c, LONG_US, &json));
    const char *at = strstr(json, "\"steps_planned_total\"");
    assert_non_null(at);
    uint64_t n = strtoull(strchr(at, ':') + 1, NULL, 10);
    attn_free(json);
    return n;
}

/* Items of both kinds, with the same tokens. */
static void draw_items(struct worker *w)
{
    w->n_items = w->n_tokens = 0;
    for (uint32_t i = 0; i < SEQS; i++) {
        uint32_t n = random_to(4) ? 1 : 1 + random_to(MAX_TOKENS / SEQS - 1);
        if (random_to(4) == 0 && (w->n_items > 0 || i + 1 < SEQS))
            continue;
        w->items[0][w->n_items] = (struct attn_item){w->by_plans[i], w->len[i], n};
        w->items[1][w->n_items++] = (struct attn_item){w->by_steps[i], w->len[i], n};
        w->n_tokens += n;
        w->len[i] += n;
    }
}

static attn_status make_plan(struct worker *w)
{
    const struct attn_plan a = {.struct_size = sizeof a,
                                .n_items = w->n_items,
                                .items = w->items[0],
                                .n_layers = LAYERS,
                                .is_append = 1,
                                .is_attend = 1,
                                .has_lse = 1,
                                .timeout_us = LONG_US};
    attn_step_plan_close(w->plan);
    w->plan = NULL;
    return attn_step_plan_open(w->pool, &a, &w->plan);
}

static void fill(void *user, void *q, void *k, void *v)
{
    const struct layer *x = user;
    memcpy(q, x->q, x->n_tokens * ROW * sizeof(float));
    memcpy(k, x->k, x->n_tokens * KV_ROW * sizeof(float));
    memcpy(v, x->v, x->n_tokens * KV_ROW * sizeof(float));
}

static void take(void *user, const void *out, const float *lse, uint32_t n_failed)
{
    struct layer *x = user;
    (void)n_failed;
    x->n_takes++;
    memcpy(x->out[0], out, x->n_tokens * ROW * sizeof(float));
    memcpy(x->lse[0], lse, x->n_tokens * HEADS * sizeof(float));
}

/* A step of the plan. */
static struct layer *make_layer(struct worker *w, uint32_t layer, bool is_in_place)
{
    struct layer *x = &w->layers[layer];
    x->n_tokens = w->n_tokens;
    x->n_takes = 0;
    for (uint32_t i = 0; i < w->n_tokens * ROW; i++)
        x->q[i] = (float)random_to(2001) / 1000 - 1;
    for (uint32_t i = 0; i < w->n_tokens * KV_ROW; i++) {
        x->k[i] = (float)random_to(2001) / 1000 - 1;
        x->v[i] = (float)random_to(2001) / 1000 - 1;
    }
    memset(x->out, 0xff, sizeof x->out);
    memset(x->lse, 0xff, sizeof x->lse);
    memset(x->item_status, 0x55, sizeof x->item_status);
    x->result = (struct attn_result){.struct_size = sizeof x->result};
    x->in_place = (struct attn_in_place){.is_append = true,
                                         .is_attend = true,
                                         .has_lse = true,
                                         .fill = fill,
                                         .take = take,
                                         .user = x};
    x->step = (struct attn_step){.struct_size = sizeof x->step,
                                 .layer = layer,
                                 .item_status = x->item_status,
                                 .timeout_us = LONG_US,
                                 .plan = w->plan};
    if (is_in_place) {
        x->step.in_place = &x->in_place;
    } else {
        x->step.q = x->q;
        x->step.k = x->k;
        x->step.v = x->v;
        x->step.out = x->out[0];
        x->step.lse = x->lse[0];
    }
    return x;
}

/* The layer has given what a step of the other sequences gives. */
static void check_layer(struct worker *w, struct layer *x)
{
    struct attn_step s = {.struct_size = offsetof(struct attn_step, plan), /* as an older one has */
                          .layer = x->step.layer,
                          .n_items = w->n_items,
                          .items = w->items[1],
                          .q = x->q,
                          .k = x->k,
                          .v = x->v,
                          .out = x->out[1],
                          .lse = x->lse[1],
                          .timeout_us = LONG_US};
    if (x->result.status != ATTN_OK)
        fail_msg("layer %u: %s", x->step.layer, x->result.message);
    well(attn_step(w->pool, &s, NULL));
    assert_memory_equal(x->out[0], x->out[1], sizeof x->out[0]);
    assert_memory_equal(x->lse[0], x->lse[1], sizeof x->lse[0]);
    for (uint32_t i = 0; i < w->n_items; i++)
        assert_int_equal(x->item_status[i], ATTN_OK);
    assert_int_equal(x->result.n_failed, 0);
    assert_int_equal(x->n_takes, x->step.in_place != NULL);
}

static void all_layers(struct worker *w)
{
    bool is_in_place = random_to(2), is_async = random_to(2);
    for (uint32_t k = 0; k < LAYERS; k++) {
        struct layer *x = make_layer(w, k, is_in_place);
        if (is_async)
            well(attn_step_start(w->pool, &x->step, NULL, NULL, &x->ticket));
        else
            well(attn_step(w->pool, &x->step, &x->result));
    }
    for (uint32_t k = 0; k < LAYERS; k++) {
        struct layer *x = &w->layers[k];
        if (is_async)
            well(attn_step_wait(w->client, x->ticket, &x->result));
        check_layer(w, x);
    }
}

static void steps_of_plans_give_what_steps_give(void **state)
{
    (void)state;
    struct worker *w = open_worker();
    uint64_t n_before = n_planned(w->client);
    enum { ROUNDS = 60 };
    for (int round = 0; round < ROUNDS; round++) {
        draw_items(w);
        well(make_plan(w));
        all_layers(w);
        for (uint32_t k = 0; k < LAYERS; k++)
            assert_int_equal(w->layers[k].result.n_sends, 1);
    }
    assert_int_equal(n_planned(w->client), n_before + ROUNDS * LAYERS);
    close_worker(w);
}

/* The daemon has four: steps of an older one go whole. */
static void a_plan_that_was_replaced_is_done_without(void **state)
{
    (void)state;
    struct worker *w = open_worker();
    attn_step_plan *others[4];
    for (int round = 0; round < 5; round++) {
        draw_items(w);
        well(make_plan(w));
        attn_step_plan *first = w->plan;
        for (int i = 0; i < 4; i++) {
            w->plan = NULL;
            well(make_plan(w));
            others[i] = w->plan;
        }
        w->plan = first;
        uint64_t n_before = n_planned(w->client);
        all_layers(w);
        assert_int_equal(w->layers[0].result.n_sends, 2);
        assert_int_equal(n_planned(w->client), n_before);
        for (int i = 0; i < 4; i++)
            attn_step_plan_close(others[i]);
    }
    close_worker(w);
}

/* Killed between two layers of a plan, or before the first, under a supervisor that has its cache.
 * A plan whose answer was not read yet is itself sent again. */
static void a_daemon_that_was_killed_is_told_whole_steps(void **state)
{
    (void)state;
    struct worker *w = open_worker();
    for (uint32_t round = 0; round < 2 * LAYERS; round++) {
        draw_items(w);
        well(make_plan(w));
        for (uint32_t k = 0; k < LAYERS; k++) {
            if (k == round % LAYERS) {
                e2e_kill_child(&d);
                well(attn_client_ping(w->client, LONG_US, NULL)); /* the next one serves */
            }
            struct layer *x = make_layer(w, k, random_to(2));
            well(attn_step(w->pool, &x->step, &x->result));
            if (k > 0)
                assert_int_equal(x->result.n_sends, k == round % LAYERS ? 2 : 1);
            check_layer(w, x);
        }
        uint64_t n_told = n_planned(w->client); /* by this process */
        if (round % LAYERS > 0 || n_told > 0)
            assert_int_equal(n_told, round % LAYERS > 0 ? 0 : LAYERS);
        draw_items(w);
        well(make_plan(w));
        all_layers(w);
        assert_int_equal(n_planned(w->client), n_told + LAYERS);
    }
    close_worker(w);
}

/* Killed at any moment of a token's layers, which are all in flight. */
static void a_kill_while_layers_are_in_flight_loses_none(void **state)
{
    (void)state;
    struct worker *w = open_worker();
    for (uint32_t round = 0; round < 6; round++) {
        draw_items(w);
        well(make_plan(w));
        for (uint32_t k = 0; k < LAYERS; k++) {
            struct layer *x = make_layer(w, k, false);
            well(attn_step_start(w->pool, &x->step, NULL, NULL, &x->ticket));
            if (k == round % LAYERS)
                e2e_kill_child(&d);
        }
        for (uint32_t k = 0; k < LAYERS; k++) {
            struct layer *x = &w->layers[k];
            well(attn_step_wait(w->client, x->ticket, &x->result));
            check_layer(w, x);
        }
    }
    close_worker(w);
}

/* More tokens than a step of the daemon's may have: it refuses the plan, the library cuts. */
static void a_step_of_a_plan_may_be_cut(void **state)
{
    (void)state;
    struct worker *w = open_worker();
    for (int round = 0; round < 20; round++) {
        draw_items(w);
        well(make_plan(w));
        all_layers(w);
    }
    close_worker(w);
}

static void what_is_wrong_is_told_by_the_steps(void **state)
{
    (void)state;
    struct worker *w = open_worker();
    draw_items(w);
    w->items[0][0].seq.id = 12345; /* there is none */
    well(make_plan(w));
    struct layer *x = make_layer(w, 0, false);
    attn_status st = attn_step(w->pool, &x->step, &x->result);
    assert_int_equal(st, ATTN_ENOTFOUND);
    assert_int_equal(attn_last_error_gone(), ATTN_GONE_SEQ);
    assert_int_equal(x->result.n_failed, 1);
    assert_int_equal(x->item_status[0], ATTN_ENOTFOUND);
    for (uint32_t i = 1; i < w->n_items; i++)
        assert_int_equal(x->item_status[i], ATTN_OK);
    close_worker(w);
}

static void what_cannot_be_is_refused_by_name(void **state)
{
    (void)state;
    struct worker *w = open_worker(), *other = calloc(1, sizeof *other);
    const uint32_t layers[] = {0, 2}, beyond[] = {0, LAYERS};
    struct attn_plan a = {.struct_size = sizeof a,
                          .n_items = 1,
                          .items = w->items[0],
                          .n_layers = 2,
                          .layers = layers,
                          .is_append = 1,
                          .is_attend = 1,
                          .has_lse = 1};
    draw_items(w);
    w->n_tokens = w->items[0][0].n_tokens;
    struct attn_plan bad = a;
    bad.n_items = 0;
    says(attn_step_plan_open(w->pool, &bad, &w->plan), ATTN_EINVAL, "n_items 0");
    bad = a;
    bad.n_layers = 0;
    says(attn_step_plan_open(w->pool, &bad, &w->plan), ATTN_EINVAL, "n_layers 0");
    bad = a;
    bad.layers = beyond;
    says(attn_step_plan_open(w->pool, &bad, &w->plan), ATTN_EINVAL, "layers[1] is 3");
    bad = a;
    bad.is_restart = 1;
    says(attn_step_plan_open(w->pool, &bad, &w->plan), ATTN_EINVAL, "is_restart");
    bad = a;
    bad.struct_size--;
    says(attn_step_plan_open(w->pool, &bad, &w->plan), ATTN_EINVAL, "struct_size");
    assert_null(w->plan);
    well(attn_step_plan_open(w->pool, &a, &w->plan));
    struct layer *x = make_layer(w, 1, false);
    says(attn_step(w->pool, &x->step, NULL), ATTN_EINVAL, "does not have layer 1");
    x = make_layer(w, 2, false);
    x->step.items = w->items[0];
    says(attn_step(w->pool, &x->step, NULL), ATTN_EINVAL, "items beside plan");
    x = make_layer(w, 2, false);
    x->step.lse = NULL;
    says(attn_step(w->pool, &x->step, NULL), ATTN_EINVAL, "not those that the plan says");
    well(attn_pool_describe(w->client, "plans", LONG_US, &other->pool));
    x = make_layer(w, 2, false);
    says(attn_step(other->pool, &x->step, NULL), ATTN_EINVAL, "another pool");
    well(attn_step(w->pool, &x->step, &x->result));
    attn_pool_close(other->pool);
    free(other);
    attn_step_plan_close(NULL);
    close_worker(w);
}

int main(void)
{
    static const char *const small[] = {"--engine.max_step_tokens", "7", NULL};
    static const char *const kept[] = {"--supervise", NULL};
#define T(name, flags)                                                                             \
    {                                                                                              \
#name, name, start, stop, (void *)(uintptr_t)(flags)                                       \
    }
    const struct CMUnitTest tests[] = {
        T(steps_of_plans_give_what_steps_give, NULL),
        T(a_plan_that_was_replaced_is_done_without, NULL),
        T(a_daemon_that_was_killed_is_told_whole_steps, kept),
        T(a_kill_while_layers_are_in_flight_loses_none, kept),
        T(a_step_of_a_plan_may_be_cut, small),
        T(what_is_wrong_is_told_by_the_steps, NULL),
        T(what_cannot_be_is_refused_by_name, NULL),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
