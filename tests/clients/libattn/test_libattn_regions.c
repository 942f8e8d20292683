/* test_libattn_regions.c: steps of any size, any number of them in flight, on several threads of
 * one client, get through a region of shared memory of any size, and to the right outputs.
 *
 * A flow is a sequence with one step in flight: chunks from one token to more than a message holds,
 * in place or in arrays. Regions are so small that a few chunks fill one.
 */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clients/libattn/attn.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/random.h"

enum {
    HEADS = 32,
    KV_HEADS = 2,
    DIM = 32,
    ROW = HEADS * DIM, /* 4 KiB of q, and of out */
    KV_ROW = KV_HEADS * DIM,
    MAX_TOKENS = 300, /* of a sequence: a region of 1 MiB takes some 100 in a message */
    MAX_FLOWS = 12, /* of a thread */
    THREADS = 3,
    ROUNDS = 12,
    LONG_US = 120000000,
    TURN_US = 10000, /* of waiting: the flow may have been answered just before */
};

static struct e2e d;
/* [MAX_TOKENS] rows, each flow's */
static float q[MAX_TOKENS * ROW], k[MAX_TOKENS * KV_ROW], v[MAX_TOKENS * KV_ROW];

struct flow {
    attn_pool *pool;
    struct attn_seq seq;
    uint32_t n_done, n; /* tokens cached, and of the step in flight */
    float out[MAX_TOKENS * ROW];
    struct attn_item item;
    struct attn_in_place in_place;
    atomic_bool is_answered;
    struct attn_result result;
};

static void fill(void *user, void *out_q, void *out_k, void *out_v)
{
    const struct flow *f = user;
    memcpy(out_q, q + f->n_done * ROW, f->n * ROW * sizeof(float));
    memcpy(out_k, k + f->n_done * KV_ROW, f->n * KV_ROW * sizeof(float));
    memcpy(out_v, v + f->n_done * KV_ROW, f->n * KV_ROW * sizeof(float));
}

static void take(void *user, const void *out, const float *lse, uint32_t n_failed)
{
    struct flow *f = user;
    (void)lse;
    if (n_failed == 0)
        memcpy(f->out + f->n_done * ROW, out, f->n * ROW * sizeof(float));
}

static void on_done(void *user, attn_ticket ticket, const struct attn_result *r)
{
    struct flow *f = user;
    (void)ticket;
    f->result = *r;
    atomic_store(&f->is_answered, true);
}

static attn_status flow_start(struct flow *f, uint64_t *seed)
{
    uint32_t left = MAX_TOKENS - f->n_done, most = 1u << random_below(seed, 10);
    f->n = 1 + random_below(seed, most < left ? most : left);
    f->item = (struct attn_item){.seq = f->seq, .pos = f->n_done, .n_tokens = f->n};
    f->in_place = (struct attn_in_place){
        .is_append = true, .is_attend = true, .fill = fill, .take = take, .user = f};
    struct attn_step s = {
        .struct_size = sizeof s, .n_items = 1, .items = &f->item, .timeout_us = LONG_US};
    float *out = f->out + f->n_done * ROW;
    for (uint32_t i = 0; i < f->n * ROW; i++)
        out[i] = NAN;
    if (random_below(seed, 2) == 0) {
        s.in_place = &f->in_place;
    } else {
        s.q = q + f->n_done * ROW;
        s.k = k + f->n_done * KV_ROW;
        s.v = v + f->n_done * KV_ROW;
        s.out = out;
    }
    return attn_step_start(f->pool, &s, on_done, f, NULL);
}

/* One row of one head. */
static bool is_right(const struct flow *f, uint32_t t, uint32_t head)
{
    const float *row = q + t * ROW + head * DIM, *out = f->out + t * ROW + head * DIM;
    const uint32_t kv = head / (HEADS / KV_HEADS) * DIM;
    double sum = 0, acc[DIM] = {0};
    for (uint32_t i = 0; i <= t; i++) {
        double s = 0;
        for (uint32_t e = 0; e < DIM; e++)
            s += (double)row[e] * (double)k[i * KV_ROW + kv + e];
        double p = exp(s / sqrt(DIM));
        sum += p;
        for (uint32_t e = 0; e < DIM; e++)
            acc[e] += p * (double)v[i * KV_ROW + kv + e];
    }
    for (uint32_t e = 0; e < DIM; e++)
        if (!(fabs(acc[e] / sum - (double)out[e]) < 1e-4))
            return false;
    return true;
}

struct thread {
    attn_client *client;
    attn_pool *pool;
    uint64_t seed;
    uint32_t n_flows;
    char why[ATTN_MESSAGE_BYTES + 64]; /* "": all is well */
};

/* What was answered is checked. True: there are tokens to come. */
static bool flow_take(struct thread *t, struct flow *f)
{
    atomic_store(&f->is_answered, false);
    if (f->result.status != ATTN_OK) {
        snprintf(t->why, sizeof t->why, "%u tokens at %u: %s", f->n, f->n_done, f->result.message);
        return false;
    }
    for (int i = 0; i < 3; i++) {
        uint32_t row = f->n_done + random_below(&t->seed, f->n);
        if (!is_right(f, row, random_below(&t->seed, HEADS)))
            snprintf(t->why, sizeof t->why, "a wrong output of token %u", row);
    }
    f->n_done += f->n;
    return f->n_done < MAX_TOKENS;
}

static attn_status run_flows(struct thread *t, struct flow *flows)
{
    uint32_t n_busy = t->n_flows;
    attn_status st = ATTN_OK;
    for (uint32_t i = 0; i < t->n_flows && st == ATTN_OK; i++) {
        flows[i].pool = t->pool;
        flows[i].seq.id = random_mixed(&t->seed);
        st = attn_seq_open(t->pool, flows[i].seq.id, LONG_US, &flows[i].seq);
    }
    for (uint32_t i = 0; i < t->n_flows && st == ATTN_OK; i++)
        st = flow_start(&flows[i], &t->seed);
    while (n_busy > 0 && st == ATTN_OK) {
        st = attn_client_poll(t->client, TURN_US, NULL);
        for (uint32_t i = 0; i < t->n_flows && st == ATTN_OK; i++) {
            if (!atomic_load(&flows[i].is_answered))
                continue;
            if (flow_take(t, &flows[i]))
                st = flow_start(&flows[i], &t->seed);
            else
                n_busy--;
        }
    }
    for (uint32_t i = 0; i < t->n_flows && st == ATTN_OK; i++)
        st = attn_seq_close(t->pool, &flows[i].seq, LONG_US);
    return st;
}

static void *run_thread(void *arg)
{
    struct thread *t = arg;
    struct flow *flows = calloc(t->n_flows, sizeof *flows);
    if (run_flows(t, flows) != ATTN_OK)
        snprintf(t->why, sizeof t->why, "%s", attn_last_error()->message);
    free(flows);
    return NULL;
}

static attn_pool *open_pool(attn_client *c)
{
    attn_pool *p = NULL;
    struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                  .layer_struct_size = sizeof(struct attn_layer),
                                  .name = "regions",
                                  .num_layers = 1,
                                  .num_q_heads = HEADS,
                                  .num_kv_heads = KV_HEADS,
                                  .head_dim_k = DIM,
                                  .n_blocks = 1024,
                                  .q_dtype = ATTN_F32};
    if (attn_pool_create(c, &spec, LONG_US, &p) != ATTN_OK)
        fail_msg("%s", attn_last_error()->message);
    return p;
}

/* A region of `kib`, and threads that share it. */
static void run_round(uint32_t kib, uint64_t *seed)
{
    char url[128], size[16];
    attn_client *c = NULL;
    struct thread threads[THREADS];
    pthread_t ids[THREADS];
    uint32_t n_threads = 1 + random_below(seed, THREADS);
    snprintf(url, sizeof url, "shm://%s", d.shm_path);
    snprintf(size, sizeof size, "%uK", kib);
    for (int i = 0; i < 2; i++) { /* the first one sets the size of the second one's region */
        if (attn_client_open(url, NULL, LONG_US, &c) != ATTN_OK)
            fail_msg("%s", attn_last_error()->message);
        assert_int_equal(attn_client_configure(c, "listen.shm_client", size, LONG_US), ATTN_OK);
        if (i == 0)
            attn_client_close(c);
    }
    attn_pool *p = open_pool(c);
    for (uint32_t i = 0; i < n_threads; i++) {
        threads[i] = (struct thread){.client = c,
                                     .pool = p,
                                     .seed = random_mixed(seed),
                                     .n_flows = 1 + random_below(seed, MAX_FLOWS)};
        assert_int_equal(pthread_create(&ids[i], NULL, run_thread, &threads[i]), 0);
    }
    for (uint32_t i = 0; i < n_threads; i++)
        pthread_join(ids[i], NULL);
    for (uint32_t i = 0; i < n_threads; i++)
        if (threads[i].why[0] != '\0')
            fail_msg("a region of %u KiB: %s", kib, threads[i].why);
    attn_pool_close(p);
    attn_client_close(c);
}

static void every_step_gets_through(void **state)
{
    static const char *const flags[] = {"--listen.shm_slots", "16", NULL};
    uint64_t seed = 20261127;
    (void)state;
    for (uint32_t i = 0; i < MAX_TOKENS * ROW; i++)
        q[i] = (float)random_below(&seed, 2001) / 1000 - 1.0005f;
    for (uint32_t i = 0; i < MAX_TOKENS * KV_ROW; i++) {
        k[i] = (float)random_below(&seed, 2001) / 1000 - 1.0005f;
        v[i] = (float)random_below(&seed, 2001) / 1000 - 1.0005f;
    }
    e2e_start(&d, flags);
    for (int i = 0; i < ROUNDS; i++)
        run_round(1024 + random_below(&seed, 1 << random_below(&seed, 13)), &seed);
    e2e_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_step_gets_through)};
    return cmocka_run_group_tests_name("libattn regions", tests, NULL, NULL);
}
