/* test_engine_calls.c: several requests in one message are what they would be one by one, and a
 * probe says what an open finds.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/cards/cards.h"
#include "tests/daemon/engine/engine_rig.h"
#include "tests/random.h"

enum { MAX_CALLS = WIRE_MAX_CALLS, N_IDS = 5 * RIG_BLOCK_TOKENS };

static struct rig r;

/* A message of calls that is being made. */
static struct {
    uint32_t n;
    Attnd__Call call[MAX_CALLS], *list[MAX_CALLS];
    union {
        Attnd__Open open;
        Attnd__Fork fork;
        Attnd__Truncate truncate;
        Attnd__Close close;
        Attnd__Adopt adopt;
        Attnd__Tokens tokens;
        Attnd__Probe probe;
    } body[MAX_CALLS];
} m;

static Attnd__Call *add(Attnd__Call__BodyCase body)
{
    Attnd__Call *c = &m.call[m.n];
    m.list[m.n++] = c;
    attnd__call__init(c);
    c->body_case = body;
    c->open = &m.body[m.n - 1].open; /* whichever it is */
    return c;
}

static void add_open(uint64_t seq)
{
    Attnd__Open *b = add(ATTND__CALL__BODY_OPEN)->open;
    attnd__open__init(b);
    b->seq = seq;
    b->pool = r.pool;
}
static void add_fork(uint64_t seq, uint32_t epoch, uint64_t new_seq)
{
    Attnd__Fork *b = add(ATTND__CALL__BODY_FORK)->fork;
    attnd__fork__init(b);
    b->seq = seq;
    b->epoch = epoch;
    b->new_seq = new_seq;
}
static void add_truncate(uint64_t seq, uint32_t epoch, uint32_t len)
{
    Attnd__Truncate *b = add(ATTND__CALL__BODY_TRUNCATE)->truncate;
    attnd__truncate__init(b);
    b->seq = seq;
    b->epoch = epoch;
    b->len = len;
}
static void add_close(uint64_t seq, uint32_t epoch)
{
    Attnd__Close *b = add(ATTND__CALL__BODY_CLOSE)->close;
    attnd__close__init(b);
    b->seq = seq;
    b->epoch = epoch;
}
static void add_adopt(uint64_t seq)
{
    Attnd__Adopt *b = add(ATTND__CALL__BODY_ADOPT)->adopt;
    attnd__adopt__init(b);
    b->seq = seq;
}
static void add_tokens(uint64_t seq, uint32_t epoch, uint32_t *ids, uint32_t n)
{
    Attnd__Tokens *b = add(ATTND__CALL__BODY_TOKENS)->tokens;
    attnd__tokens__init(b);
    b->seq = seq;
    b->epoch = epoch;
    b->tokens = ids;
    b->n_tokens = n;
}
static void add_probe(uint32_t *ids, uint32_t n)
{
    Attnd__Probe *b = add(ATTND__CALL__BODY_PROBE)->probe;
    attnd__probe__init(b);
    b->pool = r.pool;
    b->tokens = ids;
    b->n_tokens = n;
}

/* Sends what was added; the ids of all calls are used up. */
static uint64_t send_calls(void)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Calls b = ATTND__CALLS__INIT;
    b.n_calls = m.n;
    b.calls = m.list;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_CALLS;
    h.calls = &b;
    uint64_t id = rig_send(&r, &h, NULL, 0);
    r.next_id = id + (m.n > 0 ? m.n : 1);
    m.n = 0;
    return id;
}

static const Attnd__CallReply *call_of(uint64_t id, uint32_t i)
{
    const Attnd__Reply *reply = rig_answer(&r, id);
    if (reply->status != ATTN_OK)
        fail_msg("calls: %s", reply->message);
    assert_int_equal(reply->body_case, ATTND__REPLY__BODY_CALLS);
    assert_true(i < reply->calls->n_calls);
    return reply->calls->calls[i];
}

static void assert_call(uint64_t id, uint32_t i, attn_status st, const char *part)
{
    const Attnd__CallReply *c = call_of(id, i);
    if (c->status != st || (part != NULL && strstr(c->message, part) == NULL))
        fail_msg("call %u: status %d, \"%s\", expected %d, \"%s\"", i, c->status, c->message, st,
                 part == NULL ? "" : part);
    assert_int_equal(c->body_case == ATTND__CALL_REPLY__BODY_SEQ, st == ATTN_OK && part == NULL);
}

static void each_is_carried_out_in_order_whatever_became_of_the_others(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint32_t ids[] = {1, 2, 3};
    add_open(1);
    add_open(2);
    add_open(1); /* another request than the first */
    uint64_t id = send_calls();
    rig_run(&r);
    assert_call(id, 0, ATTN_OK, NULL);
    assert_call(id, 1, ATTN_OK, NULL);
    assert_call(id, 2, ATTN_EEXIST, "sequence 1");
    uint32_t epoch = call_of(id, 0)->seq->epoch;
    assert_int_equal(epoch, rig_epoch(&r, 1));
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, 0, 9), ATTN_OK);

    add_fork(1, epoch, 3);
    add_tokens(1, epoch, ids, 3);
    add_truncate(1, epoch, 4);
    add_truncate(1, epoch, 2); /* the epoch has gone by */
    add_close(2, rig_epoch(&r, 2));
    add_close(77, 1);
    add_adopt(3);
    id = send_calls();
    rig_run(&r);
    assert_call(id, 0, ATTN_OK, NULL);
    assert_int_equal(call_of(id, 0)->seq->n_layer_len, RIG_LAYERS);
    assert_int_equal(call_of(id, 0)->seq->layer_len[0], 9);
    assert_call(id, 1, ATTN_OK, NULL);
    assert_call(id, 2, ATTN_OK, NULL);
    assert_int_equal(call_of(id, 2)->seq->epoch, rig_epoch(&r, 1));
    assert_call(id, 3, ATTN_ESTALE, "sequence 1");
    assert_call(id, 4, ATTN_OK, "");
    assert_call(id, 5, ATTN_ENOTFOUND, "sequence 77 is not open");
    assert_call(id, 6, ATTN_OK, NULL);
    assert_int_equal(call_of(id, 6)->seq->epoch, rig_epoch(&r, 3));
    assert_int_equal(rig_len(&r, 1, 0), 4);
    assert_int_equal(rig_len(&r, 3, 0), 9);
    rig_close(&r);
}

static void a_repeated_message_repeats_its_calls(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint32_t epochs[MAX_CALLS];
    r.keeps_sent = true;
    for (uint64_t s = 1; s <= MAX_CALLS; s++)
        add_open(s);
    uint64_t opens = send_calls();
    rig_run(&r);
    for (uint32_t i = 0; i < MAX_CALLS; i++) {
        assert_call(opens, i, ATTN_OK, NULL);
        epochs[i] = call_of(opens, i)->seq->epoch;
    }
    for (uint64_t s = 1; s <= 3; s++)
        add_adopt(s);
    uint64_t adopts = send_calls();
    add_truncate(4, epochs[3], 0);
    add_close(5, epochs[4]);
    uint64_t others = send_calls();
    rig_run(&r);
    uint32_t adopted = call_of(adopts, 2)->seq->epoch, cut = call_of(others, 0)->seq->epoch;
    rig_forget(&r);
    rig_resend(&r, others);
    rig_resend(&r, adopts);
    rig_run(&r);
    assert_int_equal(call_of(adopts, 2)->seq->epoch, adopted);
    assert_int_equal(call_of(others, 0)->seq->epoch, cut);
    assert_call(others, 1, ATTN_ENOTFOUND, "sequence 5");
    rig_resend(&r, opens);
    rig_run(&r);
    assert_int_equal(call_of(opens, MAX_CALLS - 1)->seq->epoch, epochs[MAX_CALLS - 1]);
    assert_call(opens, 4, ATTN_ESTALE, ""); /* carried out, closed since */
    assert_int_equal(rig_epoch(&r, 3), adopted);
    rig_close(&r);
}

static void a_call_that_waits_holds_up_the_next_ones_and_nothing_else(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 3);
    uint32_t epoch = rig_epoch(&r, 1);
    r.backend.is_held = true;
    uint64_t step = rig_send_item(&r, 1, 0, 0, 4);
    rig_run(&r);
    add_truncate(1, epoch, 2);
    add_open(10);
    uint64_t calls = send_calls(), alone = rig_send_open(&r, 11);
    rig_run(&r);
    assert_null(rig_reply(&r, step));
    assert_null(rig_reply(&r, calls));
    assert_int_equal(rig_answer(&r, alone)->status, ATTN_OK);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, step)->status, ATTN_OK);
    assert_call(calls, 0, ATTN_OK, NULL);
    assert_call(calls, 1, ATTN_OK, NULL);
    assert_int_equal(rig_len(&r, 1, 0), 2);
    rig_close(&r);
}

static void what_waits_when_the_engine_ends_is_answered(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 1);
    uint32_t epoch = rig_epoch(&r, 1);
    r.backend.is_held = true;
    rig_send_item(&r, 1, 0, 0, 4);
    rig_run(&r);
    add_truncate(1, epoch, 2);
    for (uint64_t s = 10; s < 10 + MAX_CALLS - 1; s++)
        add_open(s);
    uint64_t id = send_calls();
    rig_run(&r);
    assert_null(rig_reply(&r, id));
    r.backend.is_held = false;
    assert_int_equal(engine_stop(r.engine), ATTN_OK);
    for (uint32_t i = 0; i < MAX_CALLS; i++)
        assert_call(id, i, ATTN_EDRAINING, "stopping");
    rig_close(&r);
}

static void what_cannot_be_carried_out_at_all_changes_nothing(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_assert_says(rig_answer(&r, (send_calls(), rig_run(&r), r.next_id - 1)), ATTN_EINVAL,
                    "calls.calls is empty");
    add_open(1);
    add(ATTND__CALL__BODY__NOT_SET);
    uint64_t id = send_calls();
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_ENOTSUP, "calls.calls[1]");
    uint64_t next = r.next_id;
    r.next_id = UINT64_MAX - 1;
    add_open(1);
    add_open(2);
    id = send_calls();
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_EINVAL, "leaves no ids for 2 calls");
    r.next_id = next;
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK); /* none of them had made it */
    uint64_t own = r.session;
    r.session = 12345;
    add_open(5);
    id = send_calls();
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_ENOTFOUND, "session");
    r.session = own;
    rig_close(&r);
}

static void two_cards(struct rig *rig)
{
    rig->has_second = true;
}

static void calls_reach_the_cards_of_their_sequences(void **state)
{
    (void)state;
    rig_open(&r, two_cards);
    uint32_t n_there = 0, of_card[2] = {0}, n = 24;
    uint32_t epochs[24];
    for (uint64_t s = 1; s <= n; s++)
        add_open(s);
    uint64_t id = send_calls();
    rig_run(&r);
    for (uint32_t i = 0; i < n; i++) {
        assert_call(id, i, ATTN_OK, NULL);
        epochs[i] = call_of(id, i)->seq->epoch;
        of_card[epochs[i] & 1]++;
        n_there++;
    }
    assert_int_equal(n_there, n);
    assert_true(of_card[0] > 0 && of_card[1] > 0);
    for (uint32_t i = 0; i < n; i++)
        add_close(i + 1, epochs[i]);
    add_close(1, epochs[0]);
    id = send_calls();
    rig_run(&r);
    for (uint32_t i = 0; i < n; i++)
        assert_call(id, i, ATTN_OK, "");
    assert_call(id, n, ATTN_ENOTFOUND, "sequence 1");
    rig_close(&r);
}

static void a_probe_says_what_an_open_finds_and_makes_nothing(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t rng = 5;
    uint32_t ids[N_IDS];
    for (uint32_t i = 0; i < N_IDS; i++)
        ids[i] = (uint32_t)random_mixed(&rng);
    uint64_t open = rig_send_open_with(&r, 1, &(struct kv_tokens){.ids = ids, .n = N_IDS});
    rig_run(&r);
    assert_int_equal(rig_answer(&r, open)->status, ATTN_OK);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, 0, N_IDS), ATTN_OK);
    struct kv_stats before, after;
    kv_stats_read(r.kv, &before);
    add_probe(ids, N_IDS);
    add_probe(ids, 2 * RIG_BLOCK_TOKENS + 1);
    add_probe(ids + 1, N_IDS - 1);
    add_probe(NULL, 0);
    uint64_t id = send_calls();
    rig_run(&r);
    kv_stats_read(r.kv, &after);
    assert_memory_equal(&before, &after, sizeof before);
    static const uint32_t expected[] = {N_IDS - RIG_BLOCK_TOKENS, 2 * RIG_BLOCK_TOKENS, 0, 0};
    for (uint32_t i = 0; i < 4; i++) {
        const Attnd__CallReply *c = call_of(id, i);
        assert_int_equal(c->status, ATTN_OK);
        assert_int_equal(c->body_case, ATTND__CALL_REPLY__BODY_PROBE);
        assert_int_equal(c->probe->cached_tokens, expected[i]);
        assert_int_equal(c->probe->tier_tokens, 0);
        assert_int_equal(c->probe->n_blocks - c->probe->n_free_blocks, N_IDS / RIG_BLOCK_TOKENS);
    }
    uint32_t own = r.pool;
    r.pool += 1000;
    add_probe(ids, 1);
    id = send_calls();
    r.pool = own;
    rig_run(&r);
    assert_int_equal(call_of(id, 0)->status, ATTN_ENOTFOUND);
    assert_non_null(strstr(call_of(id, 0)->message, "probe.pool"));
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_is_carried_out_in_order_whatever_became_of_the_others),
        cmocka_unit_test(a_repeated_message_repeats_its_calls),
        cmocka_unit_test(a_call_that_waits_holds_up_the_next_ones_and_nothing_else),
        cmocka_unit_test(what_waits_when_the_engine_ends_is_answered),
        cmocka_unit_test(what_cannot_be_carried_out_at_all_changes_nothing),
        cmocka_unit_test(calls_reach_the_cards_of_their_sequences),
        cmocka_unit_test(a_probe_says_what_an_open_finds_and_makes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
