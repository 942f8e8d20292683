/* test_libattn_beside.c: threads with one client at the real daemon, of which one makes large
 * steps: they go over a connection of their own, beside the others, and change neither what is
 * computed nor the order of one sequence's steps. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clients/libattn/attn.h"
#include "proto/attn_time.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/certs.h"
#include "tests/random.h"

enum {
    HEADS = 8,
    DIM = 64,
    ROW = HEADS * DIM,
    LARGE = 64, /* tokens of a large step: half a MiB there and back */
    LARGER = 8 * LARGE,
    ROUNDS = 12,
    LONG_US = 300000000,
};

static struct e2e d;
static attn_client *shared;

#define MUST_OK(call)                                                                              \
    do {                                                                                           \
        if ((call) != ATTN_OK)                                                                     \
            fail_msg("%s: %s", #call, attn_last_error()->message);                                 \
    } while (0)

/* A sequence that grows, and what its steps were answered. */
struct grown {
    attn_pool *pool;
    struct attn_seq seq;
    uint32_t len;
    uint64_t rng;
    float q[LARGER * ROW], k[LARGER * ROW], v[LARGER * ROW], out[LARGER * ROW];
};

static const char *url(void)
{
    return d.tls_url[0] != '\0' ? d.tls_url : d.tcp_url[0] != '\0' ? d.tcp_url : d.url;
}

static attn_client *open_client(void)
{
    char *ca = certs_file(CERTS_GOOD, "ca.crt");
    attn_client *c;
    struct attn_client_options o = {.struct_size = sizeof o, .ca_file = ca};
    MUST_OK(attn_client_open(url(), &o, LONG_US, &c));
    free(ca);
    return c;
}

static int start(void **state)
{
    (void)state;
    e2e_start(&d, (const char *const[]){"--device.kv_memory", "64M", NULL});
    shared = open_client();
    return 0;
}

static int stop(void **state)
{
    (void)state;
    attn_client_close(shared);
    e2e_stop(&d);
    return 0;
}

static struct grown *make(attn_client *c, uint64_t id, uint64_t seed)
{
    struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                  .layer_struct_size = sizeof(struct attn_layer),
                                  .name = "beside",
                                  .num_layers = 1,
                                  .num_q_heads = HEADS,
                                  .num_kv_heads = HEADS,
                                  .head_dim_k = DIM,
                                  .n_blocks = 400,
                                  .q_dtype = ATTN_F32,
                                  .is_batch_invariant = 1};
    struct grown *g = calloc(1, sizeof *g);
    assert_non_null(g);
    g->rng = seed;
    MUST_OK(attn_pool_create(c, &spec, LONG_US, &g->pool));
    MUST_OK(attn_seq_open(g->pool, id, LONG_US, &g->seq));
    return g;
}

static void end(struct grown *g)
{
    MUST_OK(attn_seq_close(g->pool, &g->seq, LONG_US));
    attn_pool_close(g->pool);
    free(g);
}

/* The next n tokens' step; outputs are poisoned. */
static struct attn_step next(struct grown *g, struct attn_item *item, uint32_t n)
{
    float *const in[] = {g->q, g->k, g->v};
    for (int i = 0; i < 3; i++)
        for (uint32_t k = 0; k < n * ROW; k++)
            in[i][k] = (float)random_next(&g->rng) / 0x1p30f - 1.0f;
    memset(g->out, 0xff, sizeof g->out);
    *item = (struct attn_item){.seq = g->seq, .pos = g->len, .n_tokens = n};
    g->len += n;
    return (struct attn_step){.struct_size = sizeof(struct attn_step),
                              .n_items = 1,
                              .items = item,
                              .q = g->q,
                              .k = g->k,
                              .v = g->v,
                              .out = g->out,
                              .timeout_us = LONG_US};
}

static void grow(struct grown *g, uint32_t n)
{
    struct attn_item item;
    struct attn_step s = next(g, &item, n);
    MUST_OK(attn_step(g->pool, &s, NULL));
}

/* Its last large step again, with the same answer. */
static void repeat(struct grown *g, const float *want)
{
    struct attn_item item = {.seq = g->seq, .pos = g->len - LARGE, .n_tokens = LARGE};
    struct attn_step s = {.struct_size = sizeof s,
                          .n_items = 1,
                          .items = &item,
                          .q = g->q,
                          .k = g->k,
                          .v = g->v,
                          .out = g->out,
                          .timeout_us = LONG_US};
    memset(g->out, 0xff, sizeof g->out);
    MUST_OK(attn_step(g->pool, &s, NULL));
    assert_memory_equal(g->out, want, sizeof(float) * LARGE * ROW);
}

/* ---- the small steps of another thread ---- */

static atomic_bool has_ended;

/* What fails in this thread ends the program: cmocka's checks are for its own thread. At the
 * sequence's end the last step is made again and again. */
static void *small_steps(void *arg)
{
    struct grown *g = arg;
    struct attn_item item;
    struct attn_step s = {0};
    float *outs = malloc(sizeof(float) * ROW * E2E_MAX_TOKENS);
    while (outs != NULL && !atomic_load(&has_ended)) {
        if (g->len < E2E_MAX_TOKENS)
            s = next(g, &item, 1);
        if (attn_step(g->pool, &s, NULL) != ATTN_OK) {
            fprintf(stderr, "small step: %s\n", attn_last_error()->message);
            abort();
        }
        memcpy(outs + (size_t)item.pos * ROW, g->out, sizeof(float) * ROW);
    }
    return outs;
}

static pthread_t begin_small(struct grown *g)
{
    pthread_t t;
    atomic_store(&has_ended, false);
    assert_int_equal(pthread_create(&t, NULL, small_steps, g), 0);
    return t;
}

static float *end_small(pthread_t t)
{
    void *outs;
    atomic_store(&has_ended, true);
    pthread_join(t, &outs);
    assert_non_null(outs);
    return outs;
}

static int64_t n_peers(void)
{
    char *json;
    MUST_OK(attn_client_stats(shared, LONG_US, &json));
    const char *at = strstr(json, "\"peers\":");
    assert_non_null(at);
    int64_t n = strtoll(at + strlen("\"peers\":"), NULL, 10);
    attn_free(json);
    return n;
}

static void threads_get_what_one_alone_would(void **state)
{
    (void)state;
    static float outs[ROUNDS][LARGE * ROW];
    struct grown *small = make(shared, 1, 11), *large = make(shared, 2, 22);
    pthread_t t = begin_small(small);
    for (int r = 0; r < ROUNDS; r++) {
        grow(large, LARGE);
        memcpy(outs[r], large->out, sizeof outs[r]);
    }
    /* sooner or later the two are in flight together, and a second connection is made */
    for (uint64_t until_ns = attn_now_ns() + LONG_US * UINT64_C(1000); n_peers() < 2;) {
        assert_true(attn_now_ns() < until_ns);
        repeat(large, outs[ROUNDS - 1]);
    }
    float *small_outs = end_small(t);

    attn_client *alone = open_client();
    struct grown *again = make(alone, 3, 22), *small_again = make(alone, 4, 11);
    for (int r = 0; r < ROUNDS; r++) {
        grow(again, LARGE);
        assert_memory_equal(again->out, outs[r], sizeof outs[r]);
    }
    while (small_again->len < small->len) {
        float *want = small_outs + (size_t)small_again->len * ROW;
        grow(small_again, 1);
        assert_memory_equal(small_again->out, want, sizeof(float) * ROW);
    }
    free(small_outs);
    end(again);
    end(small_again);
    attn_client_close(alone);
    end(small);
    end(large);
}

/* A step that is not waited for, and a smaller one right behind it. */
static void steps_of_a_sequence_keep_their_order(void **state)
{
    (void)state;
    struct grown *small = make(shared, 5, 55), *large = make(shared, 6, 66);
    struct grown *first = make(shared, 7, 77); /* arrays; its sequence stays empty */
    struct attn_seq own = first->seq;
    pthread_t t = begin_small(small);
    for (int r = 0; r < ROUNDS; r++) {
        struct attn_item item;
        attn_ticket ticket;
        first->seq = large->seq;
        first->len = large->len;
        struct attn_step s = next(first, &item, LARGER);
        large->len = first->len;
        MUST_OK(attn_step_start(first->pool, &s, NULL, NULL, &ticket));
        grow(large, LARGE); /* alone, it would begin beyond the sequence's end */
        MUST_OK(attn_step_wait(shared, ticket, NULL));
        if (large->len + LARGER + LARGE > E2E_MAX_TOKENS) {
            MUST_OK(attn_seq_truncate(large->pool, &large->seq, 0, LONG_US));
            large->len = 0;
        }
    }
    free(end_small(t));
    first->seq = own;
    end(first);
    end(small);
    end(large);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_get_what_one_alone_would),
        cmocka_unit_test(steps_of_a_sequence_keep_their_order),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
