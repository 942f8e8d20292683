/* test_lanes_cards.c: lanes of a daemon with two cards (cpu engines): one worker's bells for
 * sequences of both, while sequences move, a card is lost, and workers go away with bells on their
 * way. test_lanes.c runs on two cards, too, with whole and split pools. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/lane_link.h"
#include "tests/daemon/transport/lane_steps.h"
#include "tests/random.h"

enum { SEQS = 6, BLOCKS = 64, MIB = 1 << 20 };

static const uint32_t all[E2E_LAYERS] = {0, 1, 2};
static const struct lane_places at = {128, LANE_OUT_OFFSET + 64};

static struct e2e d;
static struct e2e_client c;
static struct lane_link l;
static struct e2e_seq s[SEQS];
static uint32_t len[SEQS];
static uint64_t random_state = 5;

static uint32_t random_to(uint32_t n)
{
    return random_below(&random_state, n);
}

/* The lowest bit of an epoch names the card that made it (docs/design.md). */
static uint32_t card_of(const struct e2e_seq *seq)
{
    return seq->epoch & 1;
}

static void open_lane(void)
{
    if (!lane_link_open(&l, d.gpu_path, 2 * MIB, 2 * MIB))
        fail_msg("no lane: %s", l.welcome.message);
}

/* Sequences on both cards, with some tokens. */
static void begin(const char *const *more)
{
    const char *flags[16] = {"--device.index", "0,1", "--device.balance", "0"};
    uint32_t n = 4, n_of[2] = {0};
    for (; more != NULL && *more != NULL; more++)
        flags[n++] = *more;
    flags[n] = NULL;
    e2e_start(&d, flags);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, BLOCKS);
    for (uint32_t i = 0; i < SEQS; i++) {
        assert_int_equal(e2e_open_seq(&c, &s[i], 10 + i, 5 * i + 1), ATTN_OK);
        n_of[card_of(&s[i])]++;
        len[i] = 0;
    }
    assert_true(n_of[0] > 0 && n_of[1] > 0);
    open_lane();
}

static void end(void)
{
    lane_link_close(&l);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

/* One token each of these sequences; a bit for each. */
static uint32_t items_of(uint32_t set, struct e2e_item *items)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < SEQS; i++)
        if (set >> i & 1)
            items[n++] = (struct e2e_item){&s[i], len[i], 1};
    return n;
}

static void advance(uint32_t set)
{
    for (uint32_t i = 0; i < SEQS; i++)
        len[i] += set >> i & 1;
}

/* The sequences that were opened on this card. */
static uint32_t set_of(uint32_t card)
{
    uint32_t set = 0;
    for (uint32_t i = 0; i < SEQS; i++)
        set |= (uint32_t)(card_of(&s[i]) == card) << i;
    return set;
}

static void move(const struct e2e_seq *seq, uint32_t card)
{
    Attnd__Move m = ATTND__MOVE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    m.seq = seq->name;
    m.card = card;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_MOVE;
    h.move = &m;
    const Attnd__Reply *r = e2e_call(&c, &h);
    if (r->status != ATTN_OK)
        fail_msg("sequence %u does not move: %s", (unsigned)seq->name, r->message);
}

static void decode_by_lane(uint32_t set)
{
    struct e2e_item items[SEQS];
    struct e2e_step step;
    uint32_t n = items_of(set, items);
    e2e_build_step(&step, &c, 0, E2E_BOTH | WIRE_STEP_LSE, items, n);
    lane_plan_well(&c, &l, all, E2E_LAYERS, &step, at);
    for (uint32_t k = 0; k < E2E_LAYERS; k++)
        lane_layer(&l, &step, items, k, at);
    advance(set);
}

static void decode_by_steps(uint32_t set)
{
    struct e2e_item items[SEQS];
    uint32_t n = items_of(set, items);
    for (uint32_t k = 0; k < E2E_LAYERS; k++)
        e2e_step(&c, k, items, n);
    advance(set);
}

static void one_lane_is_for_sequences_of_every_card(void **state)
{
    (void)state;
    const uint32_t everything = (1 << SEQS) - 1;
    begin(NULL);
    for (uint32_t round = 0; round < 40; round++) {
        decode_by_lane(set_of(0));
        decode_by_lane(set_of(1));
        decode_by_lane(1 + random_to(everything));
        decode_by_steps(everything);
    }
    end();
}

/* To and fro: a worker whose plan is open sees nothing of it. */
static void sequences_move_between_the_bells_of_a_plan(void **state)
{
    (void)state;
    const uint32_t everything = (1 << SEQS) - 1;
    uint32_t where[SEQS];
    begin(NULL);
    for (uint32_t i = 0; i < SEQS; i++)
        where[i] = card_of(&s[i]);
    for (uint32_t round = 0; round < 30; round++) {
        struct e2e_item items[SEQS];
        struct e2e_step step;
        uint32_t set = round % 3 == 0 ? everything : 1 + random_to(everything);
        uint32_t n = items_of(set, items);
        e2e_build_step(&step, &c, 0, E2E_BOTH, items, n);
        lane_plan_well(&c, &l, all, E2E_LAYERS, &step, at);
        for (uint32_t k = 0; k < E2E_LAYERS; k++) {
            uint32_t i = random_to(SEQS);
            lane_layer(&l, &step, items, k, at);
            where[i] ^= 1;
            move(&s[i], where[i]);
        }
        advance(set);
    }
    end();
}

/* The sentence comes from the other card's engine. */
static void what_is_wrong_on_any_card_is_told_by_name(void **state)
{
    (void)state;
    begin(NULL);
    for (uint32_t card = 0; card < 2; card++) {
        uint32_t i = (uint32_t)__builtin_ctz(set_of(card));
        struct e2e_item items[SEQS];
        struct e2e_step step;
        for (uint32_t is_alone = 0; is_alone < 2; is_alone++) {
            uint32_t set = is_alone ? 1u << i : (1 << SEQS) - 1;
            e2e_build_step(&step, &c, 0, E2E_BOTH, items, items_of(set, items));
            lane_plan_well(&c, &l, all, E2E_LAYERS, &step, at);
            assert_int_equal(e2e_truncate(&c, &s[i], len[i]), ATTN_OK); /* another epoch */
            for (uint32_t k = 0; k < E2E_LAYERS; k++) {
                char want[64];
                snprintf(want, sizeof want, "(sequence %u): epoch is", 10 + i);
                assert_int_equal(lane_try(&l, &step, items, k, at), ATTN_ESTALE);
                if (strstr(l.page->why, want) == NULL)
                    fail_msg("\"%s\" does not say \"%s\"", l.page->why, want);
            }
            decode_by_lane(set);
        }
    }
    end();
}

/* The primary sees to what is its own at once, and asks about the rest. */
static void plans_are_checked_where_their_sequences_are(void **state)
{
    (void)state;
    begin(NULL);
    for (uint32_t card = 0; card < 2; card++) {
        uint32_t i = (uint32_t)__builtin_ctz(set_of(card));
        struct e2e_item items[SEQS];
        struct e2e_step step;
        uint32_t n = items_of((1 << SEQS) - 1, items);
        items[i].pos += 3;
        e2e_build_step(&step, &c, 0, E2E_BOTH, items, n);
        const Attnd__Reply *r = lane_plan(&c, &l, all, E2E_LAYERS, &step, at);
        assert_int_equal(r->status, ATTN_EINVAL);
        assert_non_null(strstr(r->message, "pos is 3, layer 0 has 0 tokens"));
        items[i] = (struct e2e_item){&s[i], 0, (BLOCKS + 1) * E2E_BLOCK_TOKENS};
        e2e_build_step(&step, &c, 0, E2E_BOTH, items, n);
        r = lane_plan(&c, &l, all, E2E_LAYERS, &step, at);
        if (r->status != ATTN_ENOBLOCKS || strstr(r->message, "the plan needs") == NULL)
            fail_msg("card %u: %d: %s", card, r->status, r->message);
        assert_int_equal(lane_link_ring(&l, LANE_LONG_MS), ATTN_EPROTO); /* nothing is planned */
    }
    decode_by_lane((1 << SEQS) - 1);
    end();
}

/* Nobody waits for the answers: three tokens of sequences of one card, the other, and both. */
static void plans_that_are_sent_together_keep_their_order(void **state)
{
    (void)state;
    enum { PLANS = 3 };
    begin(NULL);
    for (uint32_t round = 0; round < 30; round++) {
        struct e2e_item items[PLANS][SEQS];
        struct e2e_step step[PLANS];
        uint64_t id[PLANS];
        uint32_t set[PLANS] = {set_of(1), set_of(0), (1 << SEQS) - 1}, first = round % PLANS;
        for (uint32_t k = 0, bell = l.count + 1; k < PLANS; k++, bell += E2E_LAYERS) {
            uint32_t i = (first + k) % PLANS, n = items_of(set[i], items[i]);
            e2e_build_step(&step[i], &c, 0, E2E_BOTH, items[i], n);
            id[i] = lane_send_plan(&c, &l, bell, all, E2E_LAYERS, &step[i], at);
            advance(set[i]);
        }
        for (uint32_t k = 0; k < PLANS; k++) {
            uint32_t i = (first + k) % PLANS;
            const Attnd__Reply *r = e2e_await(&c, id[i])->header;
            if (r->status != ATTN_OK)
                fail_msg("round %u, plan %u: %s", round, k, r->message);
            for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
                lane_layer(&l, &step[i], items[i], layer, at);
        }
    }
    end();
}

static void a_plan_of_a_lane_that_goes_away_is_answered(void **state)
{
    (void)state;
    begin(NULL);
    for (uint32_t round = 0; round < 30; round++) {
        struct e2e_item items[SEQS];
        struct e2e_step step;
        uint64_t id[3];
        e2e_build_step(&step, &c, 0, E2E_BOTH, items, items_of((1 << SEQS) - 1, items));
        for (uint32_t k = 0; k < 3; k++)
            id[k] = lane_send_plan(&c, &l, l.count + 1, all, E2E_LAYERS, &step, at);
        lane_link_close(&l);
        for (uint32_t k = 0; k < 3; k++) {
            attn_status st = (attn_status)e2e_await(&c, id[k])->header->status;
            assert_true(st == ATTN_OK || st == ATTN_ENOTFOUND);
        }
        open_lane();
        decode_by_lane((1 << SEQS) - 1);
    }
    end();
}

static void workers_go_away_with_bells_on_their_way(void **state)
{
    (void)state;
    begin(NULL);
    for (uint32_t round = 0; round < 20; round++) {
        struct e2e_item items[SEQS];
        struct e2e_step step;
        uint32_t set = round % 2 ? (1 << SEQS) - 1 : set_of(1), n = items_of(set, items);
        e2e_build_step(&step, &c, 0, E2E_BOTH, items, n);
        lane_plan_well(&c, &l, all, E2E_LAYERS, &step, at);
        e2e_fill_step(&step, 0, items, l.in + at.in);
        atomic_store(&l.page->bell, l.count + 1);
        lane_link_close(&l);
        decode_by_steps(set); /* what was done or not is done again */
        open_lane();
        decode_by_lane(set);
    }
    end();
}

static void a_lost_card_takes_the_bells_of_its_own_sequences_only(void **state)
{
    (void)state;
    static const char *const faults[] = {"--danger-inject-faults", "--backend", "cpu+faults:lose@7",
                                         NULL}; /* the last card's */
    char sanitizer[256], *given = getenv("TSAN_OPTIONS");
    given = strdup(given == NULL ? "" : given);
    snprintf(sanitizer, sizeof sanitizer, "%s report_thread_leaks=0", given);
    setenv("TSAN_OPTIONS", sanitizer, 1); /* a lost device is not closed */
    begin(faults);
    setenv("TSAN_OPTIONS", given, 1);
    free(given);
    decode_by_lane((1 << SEQS) - 1);
    decode_by_lane((1 << SEQS) - 1); /* six batches a card */
    struct e2e_item items[SEQS];
    struct e2e_step step;
    e2e_build_step(&step, &c, 0, E2E_BOTH, items, items_of((1 << SEQS) - 1, items));
    lane_plan_well(&c, &l, all, E2E_LAYERS, &step, at);
    assert_int_equal(lane_try(&l, &step, items, 0, at), ATTN_EDEVICE);
    assert_int_equal(lane_try(&l, &step, items, 1, at), ATTN_EDEVICE); /* of no plan since */
    e2e_await_log(&d, "card 1 is lost; the others go on");
    for (uint32_t i = 0; i < SEQS; i++) {
        if (card_of(&s[i]) == 0) {
            decode_by_lane(1u << i);
            continue;
        }
        e2e_build_step(&step, &c, 0, E2E_BOTH, items, items_of(1u << i, items));
        assert_int_equal(lane_plan(&c, &l, all, E2E_LAYERS, &step, at)->status, ATTN_ENOTFOUND);
        assert_int_equal(e2e_open_seq(&c, &s[i], 10 + i, 3), ATTN_OK);
        assert_int_equal(card_of(&s[i]), 0);
        len[i] = 0;
    }
    lane_link_close(&l);
    open_lane(); /* of the cards that are left */
    decode_by_lane((1 << SEQS) - 1);
    end();
}

static void lanes_are_refused_by_name_where_cards_are_of_two_kinds(void **state)
{
    (void)state;
    const char *twin = getenv("E2E_TWIN"); /* a module of the same code */
    struct lane_link refused;
    const struct lane_hello hello = lane_link_hello(2 * MIB, 2 * MIB);
    if (twin == NULL)
        skip();
    setenv("ATTND_MODULE_DIR", twin, 1);
    e2e_start(&d, (const char *[]){"--device.index", "0,hip:0", NULL});
    unsetenv("ATTND_MODULE_DIR");
    e2e_connect(&c, &d);
    assert_false(
        lane_link_say(&refused, d.gpu_path, &hello, sizeof hello, lane_link_memfd(2 * MIB, true)));
    assert_int_equal(refused.welcome.status, ATTN_ENOTSUP);
    assert_string_equal(refused.welcome.message, "card 1 is of backend hip, card 0 of cpu");
    assert_string_equal(e2e_hello(&c, "")->hello->lane_url, "");
    e2e_disconnect(&c);
    e2e_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_lane_is_for_sequences_of_every_card),
        cmocka_unit_test(sequences_move_between_the_bells_of_a_plan),
        cmocka_unit_test(what_is_wrong_on_any_card_is_told_by_name),
        cmocka_unit_test(plans_are_checked_where_their_sequences_are),
        cmocka_unit_test(plans_that_are_sent_together_keep_their_order),
        cmocka_unit_test(a_plan_of_a_lane_that_goes_away_is_answered),
        cmocka_unit_test(workers_go_away_with_bells_on_their_way),
        cmocka_unit_test(a_lost_card_takes_the_bells_of_its_own_sequences_only),
        cmocka_unit_test(lanes_are_refused_by_name_where_cards_are_of_two_kinds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
