/* test_engine_plans.c: plans without a lane: steps that name one against steps that name items;
 * what of a plan is refused, and when a step's plan is there no more. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/cards/names.h"
#include "daemon/request/step_plans.h"
#include "engine_rig.h"

enum { MAX_ITEMS = 12, BOTH = WIRE_STEP_APPEND | WIRE_STEP_ATTEND };

static struct rig r;
static uint32_t random_state = 3;

static uint32_t random_to(uint32_t n)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

/* What a plan says. */
struct said {
    Attnd__Plan plan;
    Attnd__Step step;
    uint32_t layers[RIG_LAYERS], epoch[MAX_ITEMS], pos[MAX_ITEMS], n_tokens[MAX_ITEMS];
    uint64_t seq[MAX_ITEMS];
    uint64_t payload_bytes;
};

static void open_rig(void)
{
    rig_open(&r, NULL);
    r.keeps_sent = true;
}

static void begin(struct said *s, uint32_t flags)
{
    memset(s, 0, sizeof *s);
    attnd__plan__init(&s->plan);
    attnd__step__init(&s->step);
    s->step.pool = r.pool;
    s->step.flags = flags;
    s->step.dtype = ATTND__DTYPE__F32;
    s->step.seq = s->seq;
    s->step.epoch = s->epoch;
    s->step.pos = s->pos;
    s->step.n_tokens = s->n_tokens;
    s->plan.step = &s->step;
    s->plan.layers = s->layers;
    s->plan.n_layers = RIG_LAYERS;
    for (uint32_t i = 0; i < RIG_LAYERS; i++)
        s->layers[i] = i;
}

static void add(struct said *s, uint64_t seq, uint32_t pos, uint32_t n_tokens)
{
    size_t i = s->step.n_seq++;
    s->step.n_epoch = s->step.n_pos = s->step.n_n_tokens = i + 1;
    s->seq[i] = seq;
    s->epoch[i] = rig_epoch(&r, seq);
    s->pos[i] = pos;
    s->n_tokens[i] = n_tokens;
}

static uint64_t send_plan(struct said *s)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_PLAN;
    h.plan = &s->plan;
    return rig_send(&r, &h, NULL, 0);
}

static uint64_t plan_well(struct said *s)
{
    uint64_t id = send_plan(s);
    rig_run(&r);
    const Attnd__Reply *reply = rig_answer(&r, id);
    if (reply->status != ATTN_OK)
        fail_msg("no plan: %s", reply->message);
    return id;
}

/* A step with the tensors that s needs. */
static uint64_t send_step(const struct said *s, Attnd__Step *b)
{
    struct wire_step_layout l;
    char why[256];
    Attnd__Request h = ATTND__REQUEST__INIT;
    assert_int_equal(wire_step_layout_of(&s->step, RIG_Q_HEADS, RIG_KV_HEADS, RIG_DIM, RIG_DIM,
                                         ATTN_F32, &l, why, sizeof why),
                     ATTN_OK);
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = b;
    void *payload = calloc(1, l.request_bytes);
    uint64_t id = rig_send(&r, &h, payload, l.request_bytes);
    free(payload);
    return id;
}

static uint64_t send_planned(const struct said *s, uint64_t plan, uint32_t layer)
{
    Attnd__Step b = ATTND__STEP__INIT;
    b.plan = plan;
    b.layer = layer;
    return send_step(s, &b);
}

static uint64_t send_whole(const struct said *s, uint32_t layer)
{
    Attnd__Step b = s->step;
    b.layer = layer;
    return send_step(s, &b);
}

static attn_status planned(const struct said *s, uint64_t plan, uint32_t layer)
{
    uint64_t id = send_planned(s, plan, layer);
    rig_run(&r);
    return (attn_status)rig_answer(&r, id)->status;
}

/* Both replies are the same, but for their times. */
static void assert_same(uint64_t a, uint64_t b)
{
    const struct wire_reply *x = rig_wire_reply(&r, a), *y = rig_wire_reply(&r, b);
    assert_non_null(x);
    assert_non_null(y);
    assert_int_equal(x->header->status, y->header->status);
    assert_string_equal(x->header->message, y->header->message);
    assert_int_equal(x->header->body_case, y->header->body_case);
    assert_int_equal(x->payload_bytes, y->payload_bytes);
    assert_memory_equal(x->payload, y->payload, x->payload_bytes);
    if (x->header->body_case != ATTND__REPLY__BODY_STEP)
        return;
    size_t n = x->header->step->n_item_status;
    assert_int_equal(n, y->header->step->n_item_status);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(x->header->step->item_status[i], y->header->step->item_status[i]);
}

static void shuffle(uint32_t layers[RIG_LAYERS])
{
    for (uint32_t i = 0; i < RIG_LAYERS; i++) {
        uint32_t k = random_to(i + 1);
        layers[i] = layers[k];
        layers[k] = i;
    }
}

/* Random items; each layer by a plan, of which nobody has awaited the answer, and then again as a
 * step that names its items: it is a repeated one, so the answer must be the same. Between the
 * layers some sequences are truncated or closed, so that items fail. */
static void random_plans(uint32_t n_seqs, uint32_t n_rounds)
{
    uint32_t len[MAX_ITEMS] = {0};
    rig_open_many(&r, 1, n_seqs);
    for (uint32_t round = 0; round < n_rounds; round++) {
        struct said s;
        bool has_broken = false;
        begin(&s, BOTH | (random_to(2) ? WIRE_STEP_LSE : 0));
        for (uint32_t i = 0; i < n_seqs; i++)
            if (random_to(3) || (s.step.n_seq == 0 && i + 1 == n_seqs))
                add(&s, 1 + i, len[i], random_to(4) ? 1 : 1 + random_to(5));
        shuffle(s.layers);
        uint64_t plan = send_plan(&s);
        for (uint32_t k = 0; k < RIG_LAYERS; k++) {
            uint64_t a = send_planned(&s, plan, s.layers[k]);
            rig_run(&r);
            uint64_t b = send_whole(&s, s.layers[k]);
            rig_run(&r);
            assert_int_equal(rig_answer(&r, plan)->status, ATTN_OK);
            assert_same(a, b);
            if (!has_broken)
                assert_int_equal(rig_answer(&r, a)->status, ATTN_OK);
            if (random_to(8) == 0) {
                uint32_t i = random_to((uint32_t)s.step.n_seq);
                assert_int_equal(rig_truncate(&r, s.seq[i], s.pos[i]), ATTN_OK);
                has_broken = true;
            }
        }
        for (uint32_t i = 0; i < s.step.n_seq; i++) {
            uint32_t at = (uint32_t)s.seq[i] - 1;
            if (has_broken || s.pos[i] > 30) {
                len[at] = s.pos[i] > 30 ? 0 : s.pos[i];
                assert_int_equal(rig_truncate(&r, s.seq[i], len[at]), ATTN_OK);
            } else {
                len[at] += s.n_tokens[i];
            }
        }
        rig_forget(&r);
    }
}

static void steps_of_plans_are_as_those_that_name_their_items(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    random_plans(MAX_ITEMS, 300);
    rig_close(&r);
}

static void so_they_are_where_there_are_many_sequences(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 2);
    r.engine->gauges.sequences = 1u << 20; /* as the engine believes: it warms its caches */
    for (uint32_t pos = 0; pos < 20; pos++) {
        struct said s;
        begin(&s, BOTH);
        add(&s, 2, pos, 1);
        add(&s, 1, pos, 1);
        uint64_t plan = send_plan(&s), ids[RIG_LAYERS];
        for (uint32_t k = 0; k < RIG_LAYERS; k++)
            ids[k] = send_planned(&s, plan, k);
        r.engine->gauges.sequences = 1u << 20;
        rig_run(&r);
        for (uint32_t k = 0; k < RIG_LAYERS; k++) {
            assert_int_equal(rig_answer(&r, ids[k])->status, ATTN_OK);
            assert_int_equal(rig_len(&r, 1, k), pos + 1);
        }
    }
    rig_close(&r);
}

static void tweak_cards(struct rig *rig)
{
    rig->has_second = true;
}

static void so_they_are_over_two_cards(void **state)
{
    (void)state;
    rig_open(&r, tweak_cards);
    r.keeps_sent = false;
    rig_open_many(&r, 1, MAX_ITEMS);
    uint32_t epochs = 0;
    struct said s;
    begin(&s, BOTH);
    /* epochs are of the sequences' cards: the second card's cache is not the rig's */
    for (uint32_t i = 0; i < MAX_ITEMS; i++) {
        const Attnd__Reply *a = rig_adopt(&r, 1 + i);
        assert_int_equal(a->status, ATTN_OK);
        add(&s, 1 + i, 0, 1 + random_to(3));
        s.epoch[i] = a->seq->epoch;
        epochs |= 1u << (s.epoch[i] & 1);
    }
    assert_int_equal(epochs, 3); /* both have some */
    for (int is_awaited = 0; is_awaited < 2; is_awaited++) {
        uint64_t plan = send_plan(&s);
        if (is_awaited)
            rig_run(&r);
        for (uint32_t k = 0; k < RIG_LAYERS; k++) {
            uint64_t a = send_planned(&s, plan, k);
            rig_run(&r);
            assert_int_equal(rig_answer(&r, a)->status, ATTN_OK);
            uint64_t b = send_whole(&s, k);
            rig_run(&r);
            assert_same(a, b);
        }
        for (uint32_t i = 0; i < MAX_ITEMS; i++)
            s.pos[i] += s.n_tokens[i];
    }
    struct said lone; /* all of it on one card, whichever that is */
    for (uint32_t i = 0; i < MAX_ITEMS; i++) {
        begin(&lone, BOTH);
        add(&lone, s.seq[i], s.pos[i], 1);
        lone.epoch[0] = s.epoch[i];
        uint64_t plan = send_plan(&lone);
        assert_int_equal(planned(&lone, plan, 0), ATTN_OK);
        assert_int_equal(planned(&lone, plan, 1), ATTN_OK);
    }
    rig_close(&r);
}

static void a_split_pool_has_plans(void **state)
{
    (void)state;
    rig_open(&r, tweak_cards);
    r.pool = rig_pool_of_split(&r, "split", 64, ATTND__SPLIT__SPLIT_HEADS);
    random_plans(6, 60);
    rig_close(&r);
}

/* --- what is not there any more --------------------------------------------------------------- */

static void a_step_whose_plan_is_gone_says_so_and_changes_nothing(void **state)
{
    (void)state;
    struct said s;
    open_rig();
    rig_open_many(&r, 1, 1);
    begin(&s, BOTH);
    add(&s, 1, 0, 2);
    assert_int_equal(planned(&s, 77, 0), ATTN_ENOPLAN); /* never made */
    uint64_t plans[STEP_PLANS_OF_SESSION + 1];
    for (uint32_t i = 0; i <= STEP_PLANS_OF_SESSION; i++)
        plans[i] = plan_well(&s);
    uint64_t gone = send_planned(&s, plans[0], 0);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, gone), ATTN_ENOPLAN, "send the whole step");
    assert_int_equal(rig_answer(&r, gone)->body_case, ATTND__REPLY__BODY__NOT_SET);
    assert_int_equal(rig_len(&r, 1, 0), 0);
    for (uint32_t i = 1; i <= STEP_PLANS_OF_SESSION; i++)
        assert_int_equal(planned(&s, plans[i], i % RIG_LAYERS), ATTN_OK);
    rig_resend(&r, plans[0]); /* late: the place is not taken from a newer one */
    rig_run(&r);
    rig_assert_says(rig_answer(&r, plans[0]), ATTN_EINVAL, "is over");
    rig_resend(&r, plans[1]);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, plans[1])->status, ATTN_OK);
    assert_int_equal(planned(&s, plans[1], 0), ATTN_OK);
    rig_close(&r);
}

static void plans_are_their_sessions_and_end_with_it(void **state)
{
    (void)state;
    struct said s;
    open_rig();
    rig_open_many(&r, 1, 1);
    begin(&s, BOTH);
    add(&s, 1, 0, 2);
    uint64_t plan = plan_well(&s), own = r.session;
    r.session = rig_hello(&r, "another");
    assert_int_equal(planned(&s, plan, 0), ATTN_ENOPLAN);
    r.session = own;
    assert_int_equal(planned(&s, plan, 0), ATTN_OK);
    const Attnd__Reply *again = rig_hello_with(&r, own, NULL);
    assert_int_equal(again->hello->last_request_id, plan);
    assert_int_equal(again->hello->max_plans, STEP_PLANS_OF_SESSION);
    rig_now_ns += r.cfg.lease_us * 3000;
    rig_run(&r);
    assert_int_equal(step_plans_latest(r.engine->plans, own), 0);
    uint64_t id = send_planned(&s, plan, 1);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_ENOTFOUND); /* the session */
    rig_close(&r);
}

/* Each layer is checked when it comes, item by item. */
static void a_plan_holds_nothing(void **state)
{
    (void)state;
    struct said s;
    open_rig();
    rig_open_many(&r, 1, 3);
    begin(&s, BOTH);
    for (uint64_t i = 1; i <= 3; i++)
        add(&s, i, 0, 2);
    uint64_t plan = plan_well(&s);
    assert_int_equal(planned(&s, plan, 0), ATTN_OK);
    assert_int_equal(planned(&s, plan, 0), ATTN_OK); /* a layer again: as a repeated step */
    assert_int_equal(rig_len(&r, 1, 0), 2);
    assert_int_equal(rig_truncate(&r, 2, 0), ATTN_OK);
    assert_int_equal(rig_close_seq(&r, 3, rig_epoch(&r, 3)), ATTN_OK);
    uint64_t id = send_planned(&s, plan, 1);
    rig_run(&r);
    const Attnd__StepReply *b = rig_answer(&r, id)->step;
    assert_non_null(b);
    assert_int_equal(b->n_item_status, 3);
    assert_int_equal(b->item_status[0], ATTN_OK);
    assert_int_equal(b->item_status[1], ATTN_ESTALE);
    assert_int_equal(b->item_status[2], ATTN_ENOTFOUND);
    assert_int_equal(rig_len(&r, 1, 1), 2);
    assert_int_equal(rig_len(&r, 2, 1), 0);
    rig_close(&r);
}

/* --- what is refused -------------------------------------------------------------------------- */

static void refuse(struct said *s, attn_status st, const char *part)
{
    uint64_t id = send_plan(s);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), st, part);
    assert_int_equal(planned(s, id, 0), ATTN_ENOPLAN); /* it is not kept */
}

static struct said good(void)
{
    static struct said s;
    begin(&s, BOTH);
    add(&s, 1, 5, 1);
    add(&s, 2, 0, 3);
    return s;
}

/* The arrays of a copy are its own. */
#define WITH(change)                                                                               \
    s = good();                                                                                    \
    s.step.seq = s.seq, s.step.epoch = s.epoch, s.step.pos = s.pos, s.step.n_tokens = s.n_tokens;  \
    s.plan.step = &s.step;                                                                         \
    s.plan.layers = s.layers;                                                                      \
    change

static void what_is_wrong_with_a_plan_is_a_sentence(void **state)
{
    (void)state;
    struct said s;
    open_rig();
    rig_open_many(&r, 1, 2);
    for (uint32_t k = 0; k < RIG_LAYERS; k++)
        assert_int_equal(rig_item(&r, 1, k, 0, 5), ATTN_OK);
    WITH(s.pos[0] = 6);
    refuse(&s, ATTN_EINVAL, "item 0 (sequence 1): pos is 6, layer 0 has 5 tokens");
    WITH(s.seq[1] = 9);
    refuse(&s, ATTN_ENOTFOUND, "item 1 (sequence 9): no such sequence");
    WITH(s.seq[1] = 1);
    refuse(&s, ATTN_EINVAL, "it is in this plan twice");
    WITH(s.epoch[1]++);
    refuse(&s, ATTN_ESTALE, "epoch is");
    WITH(s.n_tokens[1] = 1000);
    refuse(&s, ATTN_EINVAL, "engine.max_step_tokens");
    WITH(s.layers[2] = RIG_LAYERS);
    refuse(&s, ATTN_EINVAL, "plan.layers[2] is 4, the pool has 4 layers");
    WITH(s.step.layer = 1);
    refuse(&s, ATTN_EINVAL, "plan.step.layer is 1");
    WITH(s.step.pool = 12345);
    refuse(&s, ATTN_ENOTFOUND, "plan.step.pool is 12345");
    WITH(s.plan.n_layers = 0);
    refuse(&s, ATTN_EINVAL, "plan.layers is empty");
    WITH(s.plan.first_bell = 1);
    refuse(&s, ATTN_EINVAL, "plan.first_bell 1");
    WITH(s.plan.out_offset = 128);
    refuse(&s, ATTN_EINVAL, "out_offset 128");
    WITH(s.plan.step = NULL);
    refuse(&s, ATTN_EINVAL, "plan.step is missing");
    WITH(s.step.dtype = ATTND__DTYPE__BF16);
    uint64_t id = send_plan(&s);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_EINVAL, "step.dtype is bf16");
    WITH((void)0);
    id = plan_well(&s);
    assert_int_equal(planned(&s, id, 0), ATTN_OK);
    rig_close(&r);
}

static void what_is_wrong_with_a_step_of_a_plan_is_a_sentence(void **state)
{
    (void)state;
    struct said s;
    open_rig();
    rig_open_many(&r, 1, 2);
    begin(&s, BOTH);
    add(&s, 1, 0, 2);
    s.plan.n_layers = 1;
    s.layers[0] = 2;
    uint64_t plan = plan_well(&s);
    uint64_t id = send_planned(&s, plan, 0);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_EINVAL, "step.layer is 0, plan");
    struct said larger = s;
    larger.step.n_tokens = larger.n_tokens;
    larger.n_tokens[0] = 3;
    id = send_planned(&larger, plan, 2);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_EINVAL, "payload has");
    assert_int_equal(rig_len(&r, 1, 2), 0);
    assert_int_equal(planned(&s, plan, 2), ATTN_OK);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_of_plans_are_as_those_that_name_their_items),
        cmocka_unit_test(so_they_are_where_there_are_many_sequences),
        cmocka_unit_test(so_they_are_over_two_cards),
        cmocka_unit_test(a_split_pool_has_plans),
        cmocka_unit_test(a_step_whose_plan_is_gone_says_so_and_changes_nothing),
        cmocka_unit_test(plans_are_their_sessions_and_end_with_it),
        cmocka_unit_test(a_plan_holds_nothing),
        cmocka_unit_test(what_is_wrong_with_a_plan_is_a_sentence),
        cmocka_unit_test(what_is_wrong_with_a_step_of_a_plan_is_a_sentence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
