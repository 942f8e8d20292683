/* test_step_plans.c: the table of plans alone: its bounds, and that it gives back what it took. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/request/step_plans.h"

static uint32_t random_state = 5;

static uint32_t random_to(uint32_t n)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

/* A request of a plan, or of a step of one. */
struct asked {
    struct request req;
    Attnd__Request header;
    Attnd__Plan plan;
    Attnd__Step step;
    uint64_t seq[WIRE_MAX_STEP_ITEMS];
    uint32_t epoch[WIRE_MAX_STEP_ITEMS], pos[WIRE_MAX_STEP_ITEMS], n_tokens[WIRE_MAX_STEP_ITEMS];
    uint32_t layers[WIRE_MAX_LAYERS];
};

static void begin(struct asked *a, uint64_t session, uint64_t id)
{
    request_init(&a->req, NULL, NULL);
    attnd__request__init(&a->header);
    attnd__plan__init(&a->plan);
    attnd__step__init(&a->step);
    a->header.session = session;
    a->req.wire.header = &a->header;
    a->req.wire.request_id = id;
}

static attn_status put(struct step_plans *s, struct asked *a, uint64_t session, uint64_t id,
                       uint32_t n_items, uint32_t n_layers)
{
    char why[256] = "";
    begin(a, session, id);
    for (uint32_t i = 0; i < n_items; i++) {
        a->seq[i] = (uint64_t)random_to(1u << 24) << 30;
        a->epoch[i] = random_to(1u << 24);
        a->pos[i] = random_to(1u << 24);
        a->n_tokens[i] = random_to(1u << 24);
    }
    for (uint32_t i = 0; i < n_layers; i++)
        a->layers[i] = 2 * i;
    a->step.pool = 7;
    a->step.flags = 3;
    a->step.n_seq = a->step.n_epoch = a->step.n_pos = a->step.n_n_tokens = n_items;
    a->step.seq = a->seq;
    a->step.epoch = a->epoch;
    a->step.pos = a->pos;
    a->step.n_tokens = a->n_tokens;
    a->plan.step = &a->step;
    a->plan.n_layers = n_layers;
    a->plan.layers = a->layers;
    a->header.body_case = ATTND__REQUEST__BODY_PLAN;
    a->header.plan = &a->plan;
    attn_status st = step_plans_put(s, &a->req, why, sizeof why);
    assert_true((st == ATTN_OK) == (why[0] == '\0'));
    return st;
}

static attn_status fill(struct step_plans *s, struct asked *a, uint64_t session, uint64_t plan,
                        uint32_t layer)
{
    char why[256] = "";
    begin(a, session, 1);
    a->step.plan = plan;
    a->step.layer = layer;
    a->header.body_case = ATTND__REQUEST__BODY_STEP;
    a->header.step = &a->step;
    assert_true(step_plans_is_bare(&a->header));
    attn_status st = step_plans_fill(s, &a->req, why, sizeof why);
    assert_int_equal(step_plans_is_bare(&a->header), st != ATTN_OK);
    assert_true((st == ATTN_OK) == (why[0] == '\0'));
    return st;
}

static void a_step_has_what_its_plan_said(void **state)
{
    (void)state;
    static struct asked plans[STEP_PLANS_OF_SESSION], step;
    struct step_plans *s = step_plans_open();
    for (uint64_t id = 1; id < 200; id++) {
        struct asked *p = &plans[id % STEP_PLANS_OF_SESSION];
        assert_int_equal(put(s, p, 9, id, 1 + random_to(300), 1 + random_to(5)), ATTN_OK);
        assert_int_equal(step_plans_latest(s, 9), id);
        uint64_t oldest = id < STEP_PLANS_OF_SESSION ? 1 : id - STEP_PLANS_OF_SESSION + 1;
        for (uint64_t of = oldest; of <= id; of++) {
            p = &plans[of % STEP_PLANS_OF_SESSION];
            uint32_t layer = random_to((uint32_t)p->plan.n_layers) * 2;
            assert_int_equal(fill(s, &step, 9, of, layer), ATTN_OK);
            size_t n = p->step.n_seq;
            assert_int_equal(step.step.n_seq, n);
            assert_int_equal(step.step.n_epoch, n);
            assert_int_equal(step.step.n_pos, n);
            assert_int_equal(step.step.n_n_tokens, n);
            assert_int_equal(step.step.pool, 7);
            assert_int_equal(step.step.flags, 3);
            assert_int_equal(step.step.layer, layer);
            assert_memory_equal(step.step.seq, p->seq, n * sizeof p->seq[0]);
            assert_memory_equal(step.step.epoch, p->epoch, n * sizeof p->epoch[0]);
            assert_memory_equal(step.step.pos, p->pos, n * sizeof p->pos[0]);
            assert_memory_equal(step.step.n_tokens, p->n_tokens, n * sizeof p->n_tokens[0]);
            wire_arena_reset(&step.req.arena);
            assert_int_equal(fill(s, &step, 9, of, layer + 1), ATTN_EINVAL);
        }
        if (oldest > 1)
            assert_int_equal(fill(s, &step, 9, oldest - 1, 0), ATTN_ENOPLAN);
        assert_int_equal(fill(s, &step, 9, id + 1, 0), ATTN_ENOPLAN);
        assert_int_equal(fill(s, &step, 9 + 4096, id, 0), ATTN_ENOPLAN); /* of the same chain */
    }
    step_plans_end(s, 9);
    step_plans_end(s, 9);
    assert_int_equal(fill(s, &step, 9, 199, 0), ATTN_ENOPLAN);
    assert_int_equal(step_plans_latest(s, 9), 0);
    step_plans_close(s);
}

static void a_copy_changes_nothing_and_a_late_one_is_refused(void **state)
{
    (void)state;
    static struct asked a, step;
    struct step_plans *s = step_plans_open();
    for (uint64_t id = 10; id < 16; id++)
        assert_int_equal(put(s, &a, 1, id, 3, 1), ATTN_OK);
    for (uint64_t id = 12; id < 16; id++) {
        assert_int_equal(put(s, &a, 1, id, 3, 1), ATTN_OK);
        assert_int_equal(fill(s, &step, 1, id, 0), ATTN_OK);
    }
    for (uint64_t id = 1; id < 12; id++)
        assert_int_equal(put(s, &a, 1, id, 3, 1), ATTN_EINVAL);
    for (uint64_t id = 12; id < 16; id++)
        assert_int_equal(fill(s, &step, 1, id, 0), ATTN_OK);
    step_plans_close(s);
}

static void the_memory_of_all_plans_is_bounded(void **state)
{
    (void)state;
    static struct asked a, step;
    struct step_plans *s = step_plans_open();
    uint64_t n = 1;
    while (put(s, &a, n, 1, WIRE_MAX_STEP_ITEMS, 512) == ATTN_OK)
        n++;
    assert_int_equal(put(s, &a, n, 1, WIRE_MAX_STEP_ITEMS, 512), ATTN_EOVERLOAD);
    assert_in_range(n, STEP_PLANS_MAX_BYTES / (WIRE_MAX_STEP_ITEMS * 24),
                    STEP_PLANS_MAX_BYTES / (WIRE_MAX_STEP_ITEMS * 20));
    assert_int_equal(step_plans_latest(s, n), 0); /* nothing is left of what was refused */
    assert_int_equal(fill(s, &step, 1, 1, 0), ATTN_OK);
    wire_arena_reset(&step.req.arena);
    step_plans_end(s, 3);
    assert_int_equal(put(s, &a, n, 1, WIRE_MAX_STEP_ITEMS, 512), ATTN_OK);
    for (uint64_t session = 1; session <= n; session++)
        step_plans_end(s, session);
    for (uint64_t session = 1; session < n; session++) /* all of it was given back */
        assert_int_equal(put(s, &a, session, 1, WIRE_MAX_STEP_ITEMS, 512), ATTN_OK);
    step_plans_close(s);
    step_plans_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_has_what_its_plan_said),
        cmocka_unit_test(a_copy_changes_nothing_and_a_late_one_is_refused),
        cmocka_unit_test(the_memory_of_all_plans_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
