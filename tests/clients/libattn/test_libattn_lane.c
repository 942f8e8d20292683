/* test_libattn_lane.c: libattn's lanes at the real daemon on the cpu backend, in host memory: what
 * comes out is what steps give, and whatever waits ends. All that is not a bell goes over shm, or
 * over what E2E_TRANSPORT names: ipc, tcp, or tls, which is over TCP. E2E_CARDS and E2E_SPLIT: on
 * several cards (e2e.h). */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clients/libattn/attn.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/certs.h"
#include "tests/random.h"

#define NEVER_US 3600000000u /* longer than any test */

enum { LAYERS = 4, HEADS = 4, KV_HEADS = 2, DIM = 16, MAX_TOKENS = 40, SEQS = 3, MOST_GAP = 16 };

static struct e2e d;
static uint64_t random_state = 3;

static float number(void)
{
    return (float)random_below(&random_state, 1 << 24) / (1 << 23) - 1;
}

static uint32_t random_to(uint32_t n)
{
    return random_below(&random_state, n);
}

struct worker {
    attn_client *client;
    attn_pool *pool;
    attn_lane *lane;
    struct attn_seq by_lane[SEQS], by_steps[SEQS];
    uint32_t len[SEQS];
    float q[MAX_TOKENS * HEADS * DIM], k[MAX_TOKENS * KV_HEADS * DIM],
        v[MAX_TOKENS * KV_HEADS * DIM];
    float out[2][MAX_TOKENS * HEADS * DIM], lse[2][MAX_TOKENS * HEADS];
    float apart[3][MAX_TOKENS * (HEADS * DIM + MOST_GAP)];
};

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

static void open_lane(struct worker *w, uint64_t wait_us)
{
    const struct attn_lane_options o = {.struct_size = sizeof o, .wait_us = wait_us};
    struct attn_lane_info info = {.struct_size = sizeof info};
    well(attn_lane_open(w->client, NULL, &o, &w->lane));
    well(attn_lane_info(w->lane, &info));
    assert_int_equal(info.is_host, 1);
    assert_true(info.in_bytes >= 16 << 20 && info.out_bytes >= 15 << 20);
}

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
    well(attn_client_open(url, &o, 0, &c));
    free(ca);
    return c;
}

static attn_split split(void)
{
    attn_split how = ATTN_SPLIT_WHOLE;
    if (getenv("E2E_SPLIT") != NULL)
        assert_true(attn_split_parse(getenv("E2E_SPLIT"), &how));
    return how;
}

static struct worker *open_worker(uint64_t first_seq, uint64_t wait_us)
{
    struct worker *w = calloc(1, sizeof *w);
    const struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                        .layer_struct_size = sizeof(struct attn_layer),
                                        .name = "lanes",
                                        .num_layers = LAYERS,
                                        .num_q_heads = HEADS,
                                        .num_kv_heads = KV_HEADS,
                                        .head_dim_k = DIM,
                                        .n_blocks = 400,
                                        .is_batch_invariant = 1,
                                        .split = split(),
                                        .q_dtype = ATTN_F32};
    w->client = client_open();
    well(attn_pool_create(w->client, &spec, 0, &w->pool));
    for (uint32_t i = 0; i < SEQS; i++) {
        well(attn_seq_open(w->pool, first_seq + 2 * i, 0, &w->by_lane[i]));
        well(attn_seq_open(w->pool, first_seq + 2 * i + 1, 0, &w->by_steps[i]));
    }
    open_lane(w, wait_us);
    return w;
}

static void close_worker(struct worker *w)
{
    attn_lane_close(w->lane);
    attn_pool_close(w->pool);
    attn_client_close(w->client);
    free(w);
}

static void fill(struct worker *w)
{
    for (size_t i = 0; i < sizeof w->q / 4; i++)
        w->q[i] = number();
    for (size_t i = 0; i < sizeof w->k / 4; i++) {
        w->k[i] = number();
        w->v[i] = number();
    }
    memset(w->out, 0xff, sizeof w->out);
    memset(w->lse, 0xff, sizeof w->lse);
}

static struct attn_plan plan_of(const struct attn_item *items, uint32_t n_items)
{
    return (struct attn_plan){.struct_size = sizeof(struct attn_plan),
                              .n_items = n_items,
                              .items = items,
                              .n_layers = LAYERS,
                              .is_append = 1,
                              .is_attend = 1};
}

/* One token of the first sequence. */
static struct attn_item token(const struct worker *w)
{
    return (struct attn_item){.seq = w->by_lane[0], .pos = w->len[0], .n_tokens = 1};
}

static struct attn_lane_step step_of(struct worker *w, uint32_t n_tokens, bool has_lse)
{
    return (struct attn_lane_step){.struct_size = sizeof(struct attn_lane_step),
                                   .n_tokens = n_tokens,
                                   .q = w->q,
                                   .k = w->k,
                                   .v = w->v,
                                   .out = w->out[0],
                                   .lse = has_lse ? w->lse[0] : NULL};
}

/* Has tokens of q, k and v with room between them, which is NaN, or as they were. */
static void spread(struct worker *w, struct attn_lane_step *s)
{
    const void **parts[] = {&s->q, &s->k, &s->v};
    uint64_t *strides[] = {&s->q_stride, &s->k_stride, &s->v_stride};
    memset(w->apart, 0xff, sizeof w->apart);
    for (int i = 0; i < 3; i++) {
        const size_t row = (i == 0 ? HEADS : KV_HEADS) * DIM, stride = row + 4 * random_to(5);
        if (random_to(3) == 0)
            continue;
        for (uint32_t t = 0; t < s->n_tokens; t++)
            memcpy(w->apart[i] + t * stride, (const float *)*parts[i] + t * row,
                   row * sizeof(float));
        *parts[i] = w->apart[i];
        *strides[i] = stride * sizeof(float);
    }
}

/* The same layer of the twins by a step. */
static void check_layer(struct worker *w, uint32_t layer, const struct attn_item *items,
                        uint32_t n_items, uint32_t n_tokens, bool has_lse)
{
    struct attn_item twins[SEQS];
    for (uint32_t i = 0; i < n_items; i++) {
        twins[i] = items[i];
        for (uint32_t k = 0; k < SEQS; k++)
            if (w->by_lane[k].id == items[i].seq.id)
                twins[i].seq = w->by_steps[k];
    }
    const struct attn_step s = {.struct_size = sizeof s,
                                .layer = layer,
                                .n_items = n_items,
                                .items = twins,
                                .q = w->q,
                                .k = w->k,
                                .v = w->v,
                                .out = w->out[1],
                                .lse = has_lse ? w->lse[1] : NULL};
    well(attn_step(w->pool, &s, NULL));
    assert_memory_equal(w->out[0], w->out[1], sizeof(float) * n_tokens * HEADS * DIM);
    assert_memory_equal(w->lse[0], w->lse[1], sizeof(float) * n_tokens * HEADS);
    assert_false(isnan(w->out[0][0]));
}

static void layers_of_a_lane_are_those_of_steps(void **state)
{
    (void)state;
    struct worker *w = open_worker(100, 0);
    for (int round = 0; round < 80; round++) {
        struct attn_item items[SEQS];
        uint32_t n = 0, n_tokens = 0, layers[LAYERS] = {3, 1, 0, 2};
        bool has_lse = random_to(2), is_in_place = random_to(2);
        for (uint32_t i = 0; i < SEQS; i++) {
            uint32_t more = random_to(3) ? 1 : 1 + random_to(12);
            if (random_to(3) == 0 && (n > 0 || i < SEQS - 1))
                continue;
            items[n++] =
                (struct attn_item){.seq = w->by_lane[i], .pos = w->len[i], .n_tokens = more};
            w->len[i] += more;
            n_tokens += more;
        }
        struct attn_plan p = plan_of(items, n);
        struct attn_lane_info info = {.struct_size = sizeof info};
        p.layers = random_to(2) ? layers : NULL;
        p.has_lse = has_lse;
        well(attn_lane_info(w->lane, &info));
        well(attn_lane_plan(w->lane, w->pool, &p));
        for (uint32_t k = 0; k < LAYERS; k++) {
            fill(w);
            struct attn_lane_step s = step_of(w, n_tokens, has_lse);
            if (is_in_place) { /* q where it will be read, out where it is written */
                memcpy(info.in, w->q, sizeof(float) * n_tokens * HEADS * DIM);
                s.q = info.in;
                s.out = NULL;
            } else {
                spread(w, &s);
            }
            well(attn_lane_enqueue(w->lane, w->pool, NULL, &s));
            if (is_in_place)
                memcpy(w->out[0], info.out, sizeof(float) * n_tokens * HEADS * DIM);
            check_layer(w, p.layers ? layers[k] : k, items, n, n_tokens, has_lse);
        }
        well(attn_lane_check(w->lane));
    }
    close_worker(w);
}

static void a_pool_whose_steps_travel_as_codes_has_no_lane(void **state)
{
    (void)state;
    struct worker *w = open_worker(2300, 0);
    const struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                        .layer_struct_size = sizeof(struct attn_layer),
                                        .name = "codes",
                                        .num_layers = LAYERS,
                                        .num_q_heads = HEADS,
                                        .num_kv_heads = KV_HEADS,
                                        .head_dim_k = DIM,
                                        .n_blocks = 40,
                                        .q_dtype = ATTN_BF16};
    attn_pool *pool;
    well(attn_pool_create(w->client, &spec, 0, &pool));
    says(attn_pool_set_wire_dtype(w->pool, ATTN_FP8_E4M3), ATTN_EINVAL, "a pool of f32");
    says(attn_pool_set_wire_dtype(pool, ATTN_INT8), ATTN_EINVAL, "wire dtype int8");
    well(attn_pool_set_wire_dtype(pool, ATTN_BF16));
    struct attn_item it = {.pos = 0, .n_tokens = 1};
    struct attn_plan p = plan_of(&it, 1);
    well(attn_seq_open(pool, 2399, 0, &it.seq));
    if (attn_pool_set_wire_dtype(pool, ATTN_FP8_E4M3) == ATTN_OK)
        says(attn_lane_plan(w->lane, pool, &p), ATTN_ENOTSUP, "wire dtype is fp8_e4m3");
    else
        says(attn_pool_set_wire_dtype(pool, ATTN_FP8_E4M3), ATTN_ENOTSUP, "shared memory");
    well(attn_pool_set_wire_dtype(pool, ATTN_DTYPE_NONE));
    well(attn_lane_plan(w->lane, pool, &p));
    attn_pool_close(pool);
    close_worker(w);
}

static void what_cannot_be_is_refused_by_name(void **state)
{
    (void)state;
    struct worker *w = open_worker(200, 0);
    attn_lane *other = NULL;
    struct attn_item it = token(w);
    struct attn_plan p = plan_of(&it, 1);
    says(attn_lane_open(w->client, "shm:///tmp/x", NULL, &other), ATTN_EINVAL, "gpu://PATH");
    says(attn_lane_open(w->client, "gpu:///nobody/there", NULL, &other), ATTN_ECONN,
         "/nobody/there");
    const struct attn_lane_options large = {.struct_size = sizeof large, .out_bytes = 1ull << 33};
    says(attn_lane_open(w->client, NULL, &large, &other), ATTN_EINVAL, "listen.shm_client");
    it.pos = 1;
    says(attn_lane_plan(w->lane, w->pool, &p), ATTN_EINVAL, "pos is 1, layer 0 has 0 tokens");
    it = token(w);
    p.n_layers = LAYERS + 1;
    says(attn_lane_plan(w->lane, w->pool, &p), ATTN_EINVAL, "plan.layers[4] is 4");
    p.n_layers = LAYERS;
    struct attn_lane_step s = step_of(w, 1u << 20, false);
    says(attn_lane_enqueue(w->lane, w->pool, NULL, &s), ATTN_EINVAL, "1048576 tokens");
    s = step_of(w, 1, false);
    s.k_stride = 24;
    says(attn_lane_enqueue(w->lane, w->pool, NULL, &s), ATTN_EINVAL, "k_stride is 24 bytes");
    s.k_stride = 0;
    says(attn_lane_enqueue(w->lane, w->pool, NULL, &s), ATTN_EPROTO, "is of no plan");
    assert_true(isnan(w->out[0][0]));
    says(attn_lane_plan(w->lane, w->pool, &p), ATTN_EPROTO, "is of no plan");
    p.is_restart = 1;
    well(attn_lane_plan(w->lane, w->pool, &p));
    fill(w);
    well(attn_lane_enqueue(w->lane, w->pool, NULL, &s));
    check_layer(w, 0, &it, 1, 1, false);
    close_worker(w);
}

/* ---- plans that are larger than a step or a region ---- */

/* Prompts of all sequences, longer than a step may be (engine.max_step_tokens). */
static void prompts_larger_than_a_step_are_those_of_steps(void **state)
{
    (void)state;
    struct worker *w = open_worker(600, 0);
    for (int round = 0; round < 20; round++) {
        struct attn_item items[SEQS];
        uint32_t n_tokens = 0, layers[LAYERS] = {2, 0, 3, 1};
        bool has_lse = random_to(2);
        for (uint32_t i = 0; i < SEQS; i++) {
            uint32_t more = 1 + random_to(MAX_TOKENS / SEQS);
            items[i] = (struct attn_item){.seq = w->by_lane[i], .pos = w->len[i], .n_tokens = more};
            w->len[i] += more;
            n_tokens += more;
        }
        struct attn_plan p = plan_of(items, SEQS);
        p.layers = layers;
        p.has_lse = has_lse;
        well(attn_lane_plan(w->lane, w->pool, &p));
        for (uint32_t k = 0; k < LAYERS; k++) {
            fill(w);
            struct attn_lane_step s = step_of(w, n_tokens, has_lse);
            spread(w, &s);
            well(attn_lane_enqueue(w->lane, w->pool, NULL, &s));
            check_layer(w, layers[k], items, SEQS, n_tokens, has_lse);
        }
        well(attn_lane_check(w->lane));
    }
    close_worker(w);
}

/* One layer of rows so wide that few fit a region of 2 MiB. */
static void a_prompt_larger_than_a_region_is_that_of_steps(void **state)
{
    (void)state;
    enum { TOKENS = 150, WIDE_HEADS = 32, WIDE_DIM = 256 };
    struct worker *w = open_worker(700, 0);
    const struct attn_lane_options o = {.struct_size = sizeof o, .in_bytes = 1, .out_bytes = 1};
    const struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                        .layer_struct_size = sizeof(struct attn_layer),
                                        .name = "wide",
                                        .num_layers = 1,
                                        .num_q_heads = WIDE_HEADS,
                                        .num_kv_heads = 1,
                                        .head_dim_k = WIDE_DIM,
                                        .n_blocks = 40,
                                        .is_batch_invariant = 1,
                                        .q_dtype = ATTN_F32};
    const size_t n_q = (size_t)TOKENS * WIDE_HEADS * WIDE_DIM, n_k = (size_t)TOKENS * WIDE_DIM;
    float *q = malloc(3 * n_q * sizeof *q), *k = malloc(2 * n_k * sizeof *k);
    assert_true(q != NULL && k != NULL);
    float *out = q + n_q, *want = out + n_q, *v = k + n_k;
    attn_pool *pool;
    struct attn_seq seqs[2];
    attn_lane_close(w->lane);
    well(attn_lane_open(w->client, NULL, &o, &w->lane));
    well(attn_pool_create(w->client, &spec, 0, &pool));
    for (int i = 0; i < 2; i++)
        well(attn_seq_open(pool, 710 + i, 0, &seqs[i]));
    for (size_t i = 0; i < n_q; i++)
        q[i] = number();
    for (size_t i = 0; i < 2 * n_k; i++)
        k[i] = number();
    memset(out, 0xff, 2 * n_q * sizeof *out);

    struct attn_item it = {.seq = seqs[0], .n_tokens = TOKENS};
    struct attn_plan p = plan_of(&it, 1);
    p.n_layers = 1;
    struct attn_lane_step l = {.struct_size = sizeof l, .n_tokens = TOKENS, .q = q, .k = k, .v = v};
    well(attn_lane_plan(w->lane, pool, &p));
    says(attn_lane_enqueue(w->lane, pool, NULL, &l), ATTN_EINVAL, "out is NULL: 150 tokens");
    l.out = out;
    well(attn_lane_enqueue(w->lane, pool, NULL, &l));
    it.seq = seqs[1];
    const struct attn_step s = {
        .struct_size = sizeof s, .n_items = 1, .items = &it, .q = q, .k = k, .v = v, .out = want};
    well(attn_step(pool, &s, NULL));
    assert_memory_equal(out, want, n_q * sizeof *out);
    assert_false(isnan(want[n_q - 1]));
    well(attn_lane_check(w->lane));
    attn_pool_close(pool);
    free(q);
    free(k);
    close_worker(w);
}

static void what_is_wrong_with_a_plan_in_pieces_is_told_by_name(void **state)
{
    (void)state;
    struct worker *w = open_worker(800, 0);
    struct attn_item it = token(w);
    it.n_tokens = MAX_TOKENS;
    struct attn_plan p = plan_of(&it, 1);
    struct attn_lane_step s = step_of(w, MAX_TOKENS, false);
    it.pos = 3;
    says(attn_lane_plan(w->lane, w->pool, &p), ATTN_EINVAL, "pos is 3, layer 0 has 0 tokens");
    it.pos = 0;
    well(attn_lane_plan(w->lane, w->pool, &p));
    says(attn_lane_plan(w->lane, w->pool, &p), ATTN_EINVAL, "in pieces are not enqueued");
    s.n_tokens--;
    says(attn_lane_enqueue(w->lane, w->pool, NULL, &s), ATTN_EINVAL, "the plan is of 40");
    s.n_tokens++;
    s.q = NULL;
    says(attn_lane_enqueue(w->lane, w->pool, NULL, &s), ATTN_EINVAL, "not those of the plan");
    s.q = w->q;
    p.is_restart = 1; /* forgets it, and the bells are right */
    well(attn_lane_plan(w->lane, w->pool, &p));
    for (uint32_t k = 0; k < LAYERS; k++) {
        fill(w);
        well(attn_lane_enqueue(w->lane, w->pool, NULL, &s));
        check_layer(w, k, &it, 1, MAX_TOKENS, false);
    }
    close_worker(w);
}

/* The sequence is another's from the second piece on. */
static void a_piece_that_fails_leaves_nan_from_there_on(void **state)
{
    (void)state;
    struct worker *w = open_worker(900, 0);
    struct attn_item it = token(w);
    it.n_tokens = MAX_TOKENS;
    struct attn_plan p = plan_of(&it, 1);
    struct attn_lane_step s = step_of(w, MAX_TOKENS, false);
    well(attn_lane_plan(w->lane, w->pool, &p));
    fill(w);
    well(attn_lane_enqueue(w->lane, w->pool, NULL, &s));
    check_layer(w, 0, &it, 1, MAX_TOKENS, false);
    well(attn_seq_truncate(w->pool, &w->by_lane[0], 0, 0)); /* another epoch than planned */
    for (int k = 1; k < LAYERS; k++) {
        memset(w->out, 0, sizeof w->out);
        says(attn_lane_enqueue(w->lane, w->pool, NULL, &s), ATTN_ESTALE, "the sequence is at");
        for (int i = 0; i < MAX_TOKENS * HEADS * DIM; i++)
            assert_true(isnan(w->out[0][i]));
    }
    it.seq = w->by_lane[0];
    p.is_restart = 1;
    well(attn_lane_plan(w->lane, w->pool, &p));
    well(attn_seq_truncate(w->pool, &w->by_steps[0], 0, 0));
    for (uint32_t k = 0; k < LAYERS; k++) {
        fill(w);
        well(attn_lane_enqueue(w->lane, w->pool, NULL, &s));
        check_layer(w, k, &it, 1, MAX_TOKENS, false);
    }
    close_worker(w);
}

static void a_layer_that_fails_leaves_nan_and_so_do_those_behind_it(void **state)
{
    (void)state;
    struct worker *w = open_worker(300, 0);
    struct attn_item it = token(w);
    struct attn_plan p = plan_of(&it, 1);
    struct attn_lane_step s = step_of(w, 1, false);
    well(attn_lane_plan(w->lane, w->pool, &p));
    well(attn_seq_truncate(w->pool, &w->by_lane[0], 0, 0)); /* another epoch than planned */
    for (int k = 0; k < LAYERS; k++) {
        memset(w->out, 0, sizeof w->out);
        says(attn_lane_enqueue(w->lane, w->pool, NULL, &s), ATTN_ESTALE, "the sequence is at");
        for (int i = 0; i < HEADS * DIM; i++)
            assert_true(isnan(w->out[0][i]));
        assert_true(w->out[0][HEADS * DIM] == 0);
    }
    it = token(w);
    p.is_restart = 1;
    well(attn_lane_plan(w->lane, w->pool, &p));
    for (uint32_t k = 0; k < LAYERS; k++) {
        fill(w);
        well(attn_lane_enqueue(w->lane, w->pool, NULL, &s));
        check_layer(w, k, &it, 1, 1, false);
    }
    close_worker(w);
}

static void a_daemon_that_does_not_answer_is_not_waited_for_for_ever(void **state)
{
    (void)state;
    struct worker *w = open_worker(400, 50000);
    struct attn_item it = token(w);
    struct attn_plan p = plan_of(&it, 1);
    struct attn_lane_step s = step_of(w, 1, false);
    well(attn_lane_plan(w->lane, w->pool, &p));
    e2e_pause(&d);
    says(attn_lane_enqueue(w->lane, w->pool, NULL, &s), ATTN_ETIMEDOUT, "within 50000 us");
    assert_true(isnan(w->out[0][0]));
    e2e_signal(&d, SIGCONT);
    attn_lane_close(w->lane);
    open_lane(w, 0);
    well(attn_lane_plan(w->lane, w->pool, &p)); /* what was done or not is done again */
    for (uint32_t k = 0; k < LAYERS; k++) {
        fill(w);
        well(attn_lane_enqueue(w->lane, w->pool, NULL, &s));
    }
    close_worker(w);
}

static void *enqueue(void *arg)
{
    struct worker *w = arg;
    struct attn_lane_step s = step_of(w, 1, false);
    return (void *)(intptr_t)attn_lane_enqueue(w->lane, w->pool, NULL, &s);
}

static void a_layer_that_waits_is_released_when_the_daemon_dies(void **state)
{
    (void)state;
    struct worker *w = open_worker(500, 0);
    struct attn_item it = token(w);
    struct attn_plan p = plan_of(&it, 1);
    pthread_t thread;
    void *status;
    well(attn_lane_plan(w->lane, w->pool, &p));
    e2e_pause(&d);
    assert_int_equal(pthread_create(&thread, NULL, enqueue, w), 0);
    e2e_signal(&d, SIGKILL);
    pthread_join(thread, &status);
    assert_int_equal((intptr_t)status, ATTN_ECONN);
    assert_true(isnan(w->out[0][0]));
    says(attn_lane_plan(w->lane, w->pool, &p), ATTN_ECONN, "open another");
    assert_int_equal(e2e_wait(&d), -SIGKILL);
    e2e_restart(&d, NULL);
    close_worker(w);
    w = open_worker(500, 0);
    close_worker(w);
}

static void what_waits_on_a_lane_ends_when_its_client_is_given_up(void **state)
{
    (void)state;
    struct worker *w = open_worker(600, NEVER_US);
    struct attn_item it = token(w);
    struct attn_plan p = plan_of(&it, 1);
    attn_lane *other;
    pthread_t thread;
    void *status;
    well(attn_lane_plan(w->lane, w->pool, &p));
    e2e_pause(&d);
    assert_int_equal(pthread_create(&thread, NULL, enqueue, w), 0);
    attn_client_give_up(w->client);
    pthread_join(thread, &status);
    assert_int_equal((intptr_t)status, ATTN_ECONN);
    assert_true(isnan(w->out[0][0]));
    says(attn_lane_plan(w->lane, w->pool, &p), ATTN_ECONN, "open another");
    says(attn_lane_open(w->client, NULL, NULL, &other), ATTN_ECONN, "was given up");
    attn_pool_close(w->pool);
    attn_client_close(w->client); /* a lane may end behind its client */
    attn_lane_close(w->lane);
    free(w);
    e2e_signal(&d, SIGCONT);
}

static int start(void **state)
{
    (void)state;
    e2e_start(&d, NULL);
    return 0;
}

static int start_with_small_steps(void **state)
{
    (void)state;
    e2e_start(&d, (const char *[]){"--engine.max_step_tokens", "7", NULL});
    return 0;
}

static int stop(void **state)
{
    (void)state;
    e2e_stop(&d);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_of_a_lane_are_those_of_steps),
        cmocka_unit_test(a_pool_whose_steps_travel_as_codes_has_no_lane),
        cmocka_unit_test(what_cannot_be_is_refused_by_name),
        cmocka_unit_test(a_layer_that_fails_leaves_nan_and_so_do_those_behind_it),
        cmocka_unit_test(a_daemon_that_does_not_answer_is_not_waited_for_for_ever),
        cmocka_unit_test(a_prompt_larger_than_a_region_is_that_of_steps),
        cmocka_unit_test(a_layer_that_waits_is_released_when_the_daemon_dies),
        cmocka_unit_test(what_waits_on_a_lane_ends_when_its_client_is_given_up),
    };
    const struct CMUnitTest small[] = {
        cmocka_unit_test(prompts_larger_than_a_step_are_those_of_steps),
        cmocka_unit_test(what_is_wrong_with_a_plan_in_pieces_is_told_by_name),
        cmocka_unit_test(a_piece_that_fails_leaves_nan_from_there_on),
    };
    int n_failed = cmocka_run_group_tests(tests, start, stop);
    return n_failed + cmocka_run_group_tests(small, start_with_small_steps, stop);
}
