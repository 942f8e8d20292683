/* e2e_refusals.c: each bad input gets its status and a message that names field and value, and
 * changes nothing: afterwards the sequences read back byte for byte as before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"
#include "tests/random.h"

enum { LEN = 50, N_BLOCKS = 24 };

static struct e2e d;
static struct e2e_client c;
static struct e2e_seq good, other;
static void *before[E2E_LAYERS];
static size_t before_bytes[E2E_LAYERS];

static int start(void **state)
{
    (void)state;
    static const char *const flags[] = {"--engine.max_step_items",
                                        "8",
                                        "--listen.max_message",
                                        "1M",
                                        "--cache.max_sequences",
                                        "6",
                                        NULL};
    e2e_start(&d, flags);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, N_BLOCKS);
    assert_int_equal(e2e_open_seq(&c, &good, 1, 1), ATTN_OK);
    assert_int_equal(e2e_open_seq(&c, &other, 2, 2), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        struct e2e_item it[] = {{&good, 0, LEN}, {&other, 0, 20}};
        e2e_step(&c, layer, it, 2);
        before[layer] = e2e_read_back(&c, &good, layer, LEN, &before_bytes[layer]);
    }
    return 0;
}

static int stop(void **state)
{
    (void)state;
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        free(before[layer]);
    e2e_disconnect(&c);
    e2e_stop(&d);
    return 0;
}

/* Lengths and bytes of the good sequence are as they were. */
static void assert_nothing_changed(void)
{
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        size_t n;
        void *now = e2e_read_back(&c, &good, layer, LEN, &n);
        assert_int_equal(n, before_bytes[layer]);
        assert_memory_equal(now, before[layer], n);
        free(now);
        struct e2e_item past = {&good, LEN, 1};
        uint64_t id = e2e_send_step(&c, layer, WIRE_STEP_ATTEND, &past, 1, 0);
        assert_int_equal(e2e_await(&c, id)->header->status, ATTN_EINVAL); /* not one token more */
    }
}

static void assert_says(const struct wire_reply *r, attn_status st, const char *part)
{
    if (r->header->status != st || strstr(r->header->message, part) == NULL)
        fail_msg("%s \"%s\", expected %s \"%s\"", attn_status_name((attn_status)r->header->status),
                 r->header->message, attn_status_name(st), part);
}

/* A step written by hand, so that it can be wrong in one place. */
struct by_hand {
    Attnd__Step step;
    uint64_t seq[16];
    uint32_t epoch[16], pos[16], n_tokens[16];
    size_t payload_bytes; /* of bf16 */
};

static void by_hand_init(struct by_hand *b, uint32_t n_items)
{
    *b = (struct by_hand){.step = ATTND__STEP__INIT};
    for (uint32_t i = 0; i < 16; i++) {
        b->seq[i] = i == 0 ? good.name : 1000 + i;
        b->epoch[i] = b->n_tokens[i] = 1;
        b->pos[i] = LEN;
    }
    b->epoch[0] = good.epoch;
    b->step.pool = c.pool;
    b->step.flags = E2E_BOTH;
    b->step.dtype = ATTND__DTYPE__BF16;
    b->step.n_seq = b->step.n_epoch = b->step.n_pos = b->step.n_n_tokens = n_items;
    b->payload_bytes = (size_t)n_items * (E2E_Q_HEADS + 2 * E2E_KV_HEADS) * E2E_DIM * 2;
}

static const struct wire_reply *send_by_hand(struct by_hand *b)
{
    static uint8_t payload[1 << 16];
    Attnd__Request h = ATTND__REQUEST__INIT;
    b->step.seq = b->seq;
    b->step.epoch = b->epoch;
    b->step.pos = b->pos;
    b->step.n_tokens = b->n_tokens;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &b->step;
    return e2e_await(&c, e2e_send(&c, &h, payload, b->payload_bytes));
}

static void an_unknown_sequence(void **state)
{
    (void)state;
    struct by_hand b;
    by_hand_init(&b, 1);
    b.seq[0] = 77;
    assert_says(send_by_hand(&b), ATTN_ENOTFOUND, "item 0 (sequence 77): no such sequence");
    assert_nothing_changed();
}

static void a_wrong_shape(void **state)
{
    (void)state;
    struct by_hand b;
    by_hand_init(&b, 1);
    b.payload_bytes += 64;
    assert_says(send_by_hand(&b), ATTN_EINVAL, "payload has 576 bytes");
    by_hand_init(&b, 1);
    b.payload_bytes -= 2;
    assert_says(send_by_hand(&b), ATTN_EINVAL, "payload has 510 bytes");
    by_hand_init(&b, 1);
    b.payload_bytes = 0;
    assert_says(send_by_hand(&b), ATTN_EINVAL, "payload has 0 bytes");
    by_hand_init(&b, 1);
    b.step.layer = E2E_LAYERS;
    assert_says(send_by_hand(&b), ATTN_EINVAL, "step.layer is 3, the pool has 3 layers");
    by_hand_init(&b, 1);
    b.step.pool = c.pool + 1;
    assert_says(send_by_hand(&b), ATTN_ENOTFOUND, "step.pool is 2");
    assert_nothing_changed();
}

static void a_wrong_dtype(void **state)
{
    (void)state;
    struct by_hand b;
    by_hand_init(&b, 1);
    b.step.dtype = ATTND__DTYPE__F16;
    assert_says(send_by_hand(&b), ATTN_EINVAL, "dtype is f16");
    assert_nothing_changed();
}

static void a_position_gap(void **state)
{
    (void)state;
    struct by_hand b;
    by_hand_init(&b, 1);
    b.pos[0] = LEN + 1;
    assert_says(send_by_hand(&b), ATTN_EINVAL,
                "item 0 (sequence 1): pos is 51, layer 0 has 50 tokens");
    by_hand_init(&b, 1);
    b.pos[0] = UINT32_MAX - 1;
    assert_says(send_by_hand(&b), ATTN_EINVAL, "4294967294");
    b.pos[0] = UINT32_MAX;
    assert_says(send_by_hand(&b), ATTN_EINVAL, "4294967295");
    assert_nothing_changed();
}

static void too_many_items(void **state)
{
    (void)state;
    struct by_hand b;
    by_hand_init(&b, 9);
    assert_says(send_by_hand(&b), ATTN_EINVAL, "9 items, 8 are allowed");
    assert_nothing_changed();
}

static void a_duplicate_sequence(void **state)
{
    (void)state;
    struct by_hand b;
    by_hand_init(&b, 3);
    b.seq[1] = other.name;
    b.pos[1] = 20;
    b.seq[2] = good.name;
    b.pos[2] = LEN + 1;
    assert_says(send_by_hand(&b), ATTN_EINVAL, "step.seq[2] 1 is in this step twice");
    assert_nothing_changed();
    struct e2e_item past = {&other, 20, 1}; /* nor did the innocent item run */
    uint64_t id = e2e_send_step(&c, 0, WIRE_STEP_ATTEND, &past, 1, 0);
    assert_int_equal(e2e_await(&c, id)->header->status, ATTN_EINVAL);
}

static void a_duplicate_name(void **state)
{
    (void)state;
    struct e2e_seq again;
    assert_int_equal(e2e_open_seq(&c, &again, good.name, 3), ATTN_EEXIST);
    assert_int_equal(e2e_fork(&c, &other, &again, good.name, 5, 3), ATTN_EEXIST);
    assert_nothing_changed();
}

static void a_stale_epoch(void **state)
{
    (void)state;
    struct by_hand b;
    by_hand_init(&b, 1);
    char says[96];
    b.epoch[0]++;
    snprintf(says, sizeof says, "item 0 (sequence 1): epoch is %u, the sequence is ", b.epoch[0]);
    assert_says(send_by_hand(&b), ATTN_ESTALE, says);
    struct e2e_seq stale = good;
    stale.epoch = 0;
    assert_int_equal(e2e_truncate(&c, &stale, 0), ATTN_ESTALE);
    assert_int_equal(e2e_close_seq(&c, &stale), ATTN_ESTALE);
    assert_nothing_changed();
}

static void out_of_blocks(void **state)
{
    (void)state;
    if (e2e_is_spread())
        skip(); /* there is as much on each card: e2e_cards.c */
    struct e2e_seq big;
    assert_int_equal(e2e_open_seq(&c, &big, 3, 3), ATTN_OK);
    /* 4 + 2 blocks are used of 24: 18 are left, 19 are asked for, beside an item that is right */
    struct e2e_item it[] = {{&big, 0, 18 * E2E_BLOCK_TOKENS + 1}, {&other, 19, 1}};
    const struct wire_reply *r = e2e_await(&c, e2e_send_step(&c, 0, E2E_BOTH, it, 2, 0));
    assert_says(r, ATTN_ENOBLOCKS,
                "needs 19 blocks, pool e2e has 18 free; close sequences, or give the "
                "pool more blocks (attnctl pool resize)");
    assert_int_equal(r->header->step->n_item_status, 2);
    assert_int_equal(r->header->step->item_status[1], ATTN_OK);
    assert_int_equal(e2e_item(&c, &big, 0, 0, 18 * E2E_BLOCK_TOKENS), ATTN_OK);
    assert_int_equal(e2e_close_seq(&c, &big), ATTN_OK);
    assert_nothing_changed();
}

static void too_many_sequences(void **state)
{
    (void)state;
    if (e2e_is_spread())
        skip(); /* there is as much on each card: e2e_cards.c */
    struct e2e_seq more[5];
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(e2e_open_seq(&c, &more[i], 50 + i, 1), ATTN_OK);
    assert_int_equal(e2e_open_seq(&c, &more[4], 54, 1), ATTN_EOVERLOAD);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(e2e_close_seq(&c, &more[i]), ATTN_OK);
    assert_nothing_changed();
}

static void an_oversized_message(void **state)
{
    (void)state;
    struct e2e_client loud;
    e2e_connect(&loud, &d);
    Attnd__Step b = ATTND__STEP__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint64_t seq = 1;
    uint32_t one = 1;
    b.pool = c.pool;
    b.n_seq = b.n_epoch = b.n_pos = b.n_n_tokens = 1;
    b.seq = &seq;
    b.epoch = b.pos = b.n_tokens = &one;
    h.session = loud.session;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &b;
    uint8_t *payload = calloc(1, 2 << 20);
    const struct wire_reply *r = e2e_await(&loud, e2e_send(&loud, &h, payload, 2 << 20));
    assert_says(r, ATTN_EINVAL, "over the limit of 1048576 (listen.max_message)");
    free(payload);
    e2e_disconnect(&loud);
    assert_nothing_changed();
}

static void malformed_messages(void **state)
{
    (void)state;
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Stats b = ATTND__STATS__INIT;
    uint8_t msg[256];
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &b;
    size_t n = wire_request_head_bytes(&h);
    uint64_t seed = 3;
    for (uint32_t i = 0; i < 200; i++) {
        struct e2e_client loud;
        e2e_connect(&loud, &d);
        uint64_t id = loud.next_id;
        wire_request_head_encode(&h, id, 0, msg);
        size_t bytes = n;
        if (i % 2 == 0)
            bytes = random_below(&seed, (uint32_t)n); /* cut */
        else
            msg[random_below(&seed, 16)] ^= (uint8_t)(1 << random_below(&seed, 8)); /* flipped */
        e2e_send_bytes(&loud, msg, bytes);
        /* a reply, or the peer is cut; this client is served on if it was not */
        const struct wire_reply *r = e2e_await_ms(&loud, bytes < 24 ? 0 : id, i < 8 ? 50 : 0);
        if (r != NULL)
            assert_int_not_equal(r->header->status, ATTN_OK);
        e2e_disconnect(&loud);
    }
    assert_nothing_changed();
}

static void no_session(void **state)
{
    (void)state;
    uint64_t session = c.session;
    struct e2e_seq x;
    c.session ^= 1;
    assert_int_equal(e2e_open_seq(&c, &x, 90, 1), ATTN_ENOTFOUND);
    struct by_hand b;
    by_hand_init(&b, 1);
    assert_says(send_by_hand(&b), ATTN_ENOTFOUND, "was never made, or its lease ended");
    c.session = session;
    assert_nothing_changed();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_unknown_sequence),  cmocka_unit_test(a_wrong_shape),
        cmocka_unit_test(a_wrong_dtype),        cmocka_unit_test(a_position_gap),
        cmocka_unit_test(too_many_items),       cmocka_unit_test(a_duplicate_sequence),
        cmocka_unit_test(a_duplicate_name),     cmocka_unit_test(a_stale_epoch),
        cmocka_unit_test(out_of_blocks),        cmocka_unit_test(too_many_sequences),
        cmocka_unit_test(an_oversized_message), cmocka_unit_test(malformed_messages),
        cmocka_unit_test(no_session),
    };
    return cmocka_run_group_tests_name("refused", tests, start, stop);
}
