/* e2e_plans.c: plans without a lane at the real daemon, over the transport that the environment
 * names: layers that name a plan against the reference and, byte for byte, against the same steps
 * with their items; and a daemon that is killed between two layers. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "e2e.h"

enum { MAX_SEQS = 8 };

static struct e2e d;
static uint32_t random_state = 1;

static uint32_t random_to(uint32_t n)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

static int start(void **state)
{
    (void)state;
    e2e_start(&d, NULL);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    e2e_stop(&d);
    return 0;
}

static uint64_t send_plan(struct e2e_client *c, const uint32_t *layers, uint32_t n_layers,
                          const struct e2e_step *s)
{
    Attnd__Plan b = ATTND__PLAN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.n_layers = n_layers;
    b.layers = (uint32_t *)(uintptr_t)layers;
    b.step = (Attnd__Step *)(uintptr_t)&s->wire;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_PLAN;
    h.plan = &b;
    return e2e_send(c, &h, NULL, 0);
}

/* A layer of the plan; plan 0: with its items. */
static uint64_t send_layer(struct e2e_client *c, uint64_t plan, uint32_t layer,
                           const struct e2e_step *s, const struct e2e_item *items)
{
    Attnd__Step b = ATTND__STEP__INIT, whole = s->wire;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.plan = plan;
    b.layer = whole.layer = layer;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = plan != 0 ? &b : &whole;
    uint8_t *payload = calloc(1, s->layout.request_bytes);
    e2e_fill_step(s, layer, items, payload);
    uint64_t id = e2e_send(c, &h, payload, s->layout.request_bytes);
    free(payload);
    return id;
}

static void shuffle(uint32_t layers[E2E_LAYERS])
{
    for (uint32_t i = 0; i < E2E_LAYERS; i++) {
        uint32_t k = random_to(i + 1);
        layers[i] = layers[k];
        layers[k] = i;
    }
}

static void layers_of_plans_are_what_steps_compute(void **state)
{
    (void)state;
    static struct e2e_seq seqs[MAX_SEQS];
    struct e2e_client c;
    uint32_t len[MAX_SEQS] = {0};
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, 400);
    for (uint32_t i = 0; i < MAX_SEQS; i++)
        assert_int_equal(e2e_open_seq(&c, &seqs[i], 100 + i, 7 * i + 1), ATTN_OK);
    for (int round = 0; round < 60; round++) {
        struct e2e_item items[MAX_SEQS];
        struct e2e_step s;
        uint32_t n = 0, layers[E2E_LAYERS] = {0};
        for (uint32_t i = 0; i < MAX_SEQS; i++) {
            uint32_t n_tokens = random_to(4) ? 1 : 1 + random_to(20);
            if (random_to(2) || (i == MAX_SEQS - 1 && n == 0))
                items[n++] = (struct e2e_item){&seqs[i], len[i], n_tokens};
        }
        shuffle(layers);
        uint32_t flags = E2E_BOTH | (random_to(2) ? WIRE_STEP_LSE : 0);
        e2e_build_step(&s, &c, 0, flags, items, n);
        uint64_t plan = send_plan(&c, layers, E2E_LAYERS, &s), ids[E2E_LAYERS];
        if (random_to(2))
            assert_int_equal(e2e_await(&c, plan)->header->status, ATTN_OK);
        for (uint32_t k = 0; k < E2E_LAYERS; k++)
            ids[k] = send_layer(&c, plan, layers[k], &s, items);
        for (uint32_t k = 0; k < E2E_LAYERS; k++) {
            const struct wire_reply *r = e2e_await(&c, ids[k]);
            e2e_check_step(r, layers[k], flags, items, n);
            size_t bytes = r->payload_bytes;
            void *of_plan = malloc(bytes);
            memcpy(of_plan, r->payload, bytes);
            r = e2e_await(&c, send_layer(&c, 0, layers[k], &s, items)); /* a repeated step */
            assert_int_equal(r->header->status, ATTN_OK);
            assert_int_equal(r->payload_bytes, bytes);
            assert_memory_equal(r->payload, of_plan, bytes);
            free(of_plan);
        }
        assert_int_equal(e2e_await(&c, plan)->header->status, ATTN_OK);
        for (uint32_t i = 0; i < n; i++)
            len[items[i].seq - seqs] += items[i].n_tokens;
        e2e_forget(&c);
    }
    for (uint32_t i = 0; i < MAX_SEQS; i++)
        assert_int_equal(e2e_close_seq(&c, &seqs[i]), ATTN_OK);
    e2e_disconnect(&c);
}

static void a_plan_that_is_not_there_is_a_status(void **state)
{
    (void)state;
    static struct e2e_seq seq;
    static const uint32_t all[] = {0, 1, 2};
    struct e2e_client c, other;
    struct e2e_step s;
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, 400);
    assert_int_equal(e2e_open_seq(&c, &seq, 1, 5), ATTN_OK);
    struct e2e_item it = {&seq, 0, 3};
    e2e_build_step(&s, &c, 0, E2E_BOTH, &it, 1);
    uint64_t plan = send_plan(&c, all, 2, &s);
    assert_int_equal(e2e_await(&c, plan)->header->status, ATTN_OK);
    const struct wire_reply *r = e2e_await(&c, send_layer(&c, plan + 1000, 0, &s, &it));
    assert_int_equal(r->header->status, ATTN_ENOPLAN);
    assert_int_equal(r->payload_bytes, 0);
    r = e2e_await(&c, send_layer(&c, plan, 2, &s, &it));
    assert_int_equal(r->header->status, ATTN_EINVAL); /* of other layers */
    e2e_connect(&other, &d);
    r = e2e_await(&other, send_layer(&other, plan, 0, &s, &it));
    assert_int_equal(r->header->status, ATTN_ENOPLAN); /* another session's */
    e2e_disconnect(&other);
    assert_int_equal(e2e_truncate(&c, &seq, 0), ATTN_OK); /* the epoch rises */
    r = e2e_await(&c, send_layer(&c, plan, 0, &s, &it));
    assert_int_equal(r->header->status, ATTN_ESTALE);
    assert_int_equal(r->header->step->n_item_status, 1);
    assert_int_equal(e2e_close_seq(&c, &seq), ATTN_OK);
    e2e_disconnect(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(layers_of_plans_are_what_steps_compute, start, stop),
        cmocka_unit_test_setup_teardown(a_plan_that_is_not_there_is_a_status, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
