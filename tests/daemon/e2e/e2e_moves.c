/* e2e_moves.c: sequences move between the cards of one daemon (cpu engines) while they are used: by
 * an operator's request, and because cards are uneven. Whatever comes before, meanwhile and behind
 * is answered as if nothing had moved: outputs are compared with the reference, and bytes with
 * those of a daemon with one card.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "tests/daemon/e2e/e2e.h"
#include "tests/random.h"

enum { N_SEQS = 6, N_BLOCKS = 96 };

static struct e2e d;
static struct e2e_client c;
static struct e2e_seq s[16];
static uint32_t len[16]; /* of all layers */
static uint64_t seed;

static void begin(const char *index, uint32_t n_blocks, const char *const *more)
{
    const char *flags[20] = {"--device.index", index, "--cache.max_sequences", "16"};
    int n = 4;
    for (; more != NULL && *more != NULL; more++)
        flags[n++] = *more;
    flags[n] = NULL;
    e2e_start(&d, flags);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, n_blocks);
    seed = 7;
}

static void end(void)
{
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static const char *const quiet[] = {"--device.balance", "0", NULL};

static uint64_t send_move(uint64_t name, uint32_t card)
{
    Attnd__Move m = ATTND__MOVE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    m.seq = name;
    m.card = card;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_MOVE;
    h.move = &m;
    return e2e_send(&c, &h, NULL, 0);
}

static attn_status move(const struct e2e_seq *seq, uint32_t card)
{
    return (attn_status)e2e_await(&c, send_move(seq->name, card))->header->status;
}

/* Three, where there are as many. */
static uint32_t n_cards;
static const char *cards(void)
{
    n_cards = e2e_most_cards() < 3 ? 2 : 3;
    return n_cards == 2 ? "0,1" : "0,1,2";
}

/* A counter of /stats. */
static uint64_t counter(uint32_t card, const char *name)
{
    Attnd__Stats b = ATTND__STATS__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &b;
    json_t *root = json_loads(e2e_call(&c, &h)->stats->json, 0, NULL);
    json_t *at = card == UINT32_MAX ? root : json_array_get(json_object_get(root, "cards"), card);
    json_t *value = json_object_get(at, name);
    assert_non_null(value);
    uint64_t n = (uint64_t)json_integer_value(value);
    json_decref(root);
    return n;
}

/* A prompt of n tokens, in two pieces. */
static void fill(uint32_t i, uint64_t name, uint32_t n)
{
    assert_int_equal(e2e_open_seq(&c, &s[i], name, 3 + 5 * i), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        e2e_step(&c, layer, &(struct e2e_item){&s[i], 0, n / 2}, 1);
        e2e_step(&c, layer, &(struct e2e_item){&s[i], n / 2, n - n / 2}, 1);
    }
    len[i] = n;
}

/* One more token of sequences [0, n), in one step for each layer. */
static void decode(uint32_t n)
{
    struct e2e_item it[16];
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        for (uint32_t i = 0; i < n; i++)
            it[i] = (struct e2e_item){&s[i], len[i], 1};
        e2e_step(&c, layer, it, n);
    }
    for (uint32_t i = 0; i < n; i++)
        len[i]++;
}

static void a_sequence_has_the_same_bytes_before_during_and_after_a_move(void **state)
{
    (void)state;
    uint8_t *bytes[2][E2E_LAYERS];
    size_t n[2][E2E_LAYERS];
    for (uint32_t run = 0; run < 2; run++) {
        begin(run == 0 ? "0" : "0,1", N_BLOCKS, quiet);
        fill(0, 1, 700);
        fill(1, 2, 30);
        if (run == 1) /* it is opened where the fewest requests are */
            assert_int_equal(move(&s[0], 0), ATTN_OK);
        for (uint32_t round = 0; round < 6; round++) {
            uint64_t id = run == 0 ? 0 : send_move(1, (round + 1) % 2);
            for (uint32_t k = 0; k < 4; k++)
                decode(2);
            if (run == 1)
                assert_int_equal(e2e_await(&c, id)->header->status, ATTN_OK);
            decode(2);
        }
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            bytes[run][layer] = e2e_read_back(&c, &s[0], layer, len[0], &n[run][layer]);
        if (run == 1)
            assert_int_equal(counter(0, "card_moves_out_total"), 3);
        end();
    }
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        assert_int_equal(n[0][layer], n[1][layer]);
        assert_memory_equal(bytes[0][layer], bytes[1][layer], n[0][layer]);
        free(bytes[0][layer]);
        free(bytes[1][layer]);
    }
}

/* Steps are sent without a wait for those before: each must find its sequence with what they have
 * appended, wherever it is by then. */
static void requests_before_and_behind_a_move_stay_in_order(void **state)
{
    (void)state;
    enum { ROUNDS = 12, STEPS = 14 };
    begin(cards(), N_BLOCKS, quiet);
    for (uint32_t i = 0; i < 3; i++)
        fill(i, 1 + i, 40 + 100 * i);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint64_t id[STEPS * E2E_LAYERS], moves[4];
        struct e2e_item it[STEPS * E2E_LAYERS][3];
        uint32_t n_moves = 0;
        for (uint32_t k = 0; k < STEPS; k++) {
            if (k % 4 == 1)
                moves[n_moves++] =
                    send_move(1 + random_below(&seed, 3), random_below(&seed, n_cards));
            for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
                uint32_t at = k * E2E_LAYERS + layer;
                for (uint32_t i = 0; i < 3; i++)
                    it[at][i] = (struct e2e_item){&s[i], len[i] + k, 1};
                id[at] = e2e_send_step(&c, layer, E2E_BOTH, it[at], 3, 0);
            }
        }
        for (uint32_t at = 0; at < STEPS * E2E_LAYERS; at++) {
            const struct wire_reply *r = e2e_await(&c, id[at]);
            if (r->header->status != ATTN_OK)
                fail_msg("round %u, step %u: %s", round, at, r->header->message);
            e2e_check_step(r, at % E2E_LAYERS, E2E_BOTH, it[at], 3);
        }
        for (uint32_t i = 0; i < n_moves; i++) {
            attn_status st = (attn_status)e2e_await(&c, moves[i])->header->status;
            assert_true(st == ATTN_OK || st == ATTN_EOVERLOAD);
        }
        for (uint32_t i = 0; i < 3; i++)
            len[i] += STEPS;
        e2e_forget(&c);
    }
    uint64_t n_moved = 0;
    for (uint32_t card = 0; card < n_cards; card++)
        n_moved += counter(card, "card_moves_in_total");
    assert_true(n_moved > 0);
    end();
}

static attn_status truncate_as(uint64_t id, const struct e2e_seq *seq, uint32_t epoch, uint32_t n,
                               uint32_t *out_epoch)
{
    Attnd__Truncate b = ATTND__TRUNCATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint64_t next = c.next_id;
    b.seq = seq->name;
    b.epoch = epoch;
    b.len = n;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_TRUNCATE;
    h.truncate = &b;
    e2e_forget(&c);
    c.next_id = id;
    const Attnd__Reply *r = e2e_call(&c, &h);
    c.next_id = next > id ? next : id + 1;
    if (r->status == ATTN_OK)
        *out_epoch = r->seq->epoch;
    return (attn_status)r->status;
}

static void what_is_repeated_is_answered_as_before_the_move(void **state)
{
    (void)state;
    uint32_t epoch = 0, again = 0, lens[E2E_LAYERS];
    begin("0,1", N_BLOCKS, quiet);
    uint64_t opened = c.next_id;
    fill(0, 1, 100);
    uint32_t card = s[0].epoch & 1, first = s[0].epoch;
    /* an open that is repeated has the same answer there */
    assert_int_equal(move(&s[0], !card), ATTN_OK);
    uint64_t next = c.next_id;
    e2e_forget(&c);
    c.next_id = opened;
    struct e2e_seq twin;
    assert_int_equal(e2e_open_seq(&c, &twin, 1, 3), ATTN_OK);
    assert_int_equal(twin.epoch, first);
    c.next_id = next;
    assert_int_equal(e2e_open_seq(&c, &twin, 1, 3), ATTN_EEXIST);
    /* a truncation before the move is known behind it */
    uint64_t cut = c.next_id++;
    assert_int_equal(truncate_as(cut, &s[0], first, 90, &epoch), ATTN_OK);
    assert_int_equal(epoch & 1, !card);
    assert_int_equal(move(&s[0], card), ATTN_OK);
    assert_int_equal(truncate_as(cut, &s[0], first, 90, &again), ATTN_OK);
    assert_int_equal(again, epoch);
    /* what names the epoch before it is stale, on whatever card */
    assert_int_equal(e2e_item(&c, &s[0], 0, 90, 1), ATTN_ESTALE);
    assert_int_equal(truncate_as(c.next_id++, &s[0], first, 80, &again), ATTN_ESTALE);
    s[0].epoch = epoch;
    len[0] = 90;
    decode(1);
    /* adopted, forked, closed, opened anew: the name never has an epoch twice */
    assert_int_equal(e2e_adopt(&c, &s[0], lens), ATTN_OK);
    assert_int_equal(lens[2], 91);
    assert_true(s[0].epoch > epoch);
    assert_int_equal(move(&s[0], !card), ATTN_OK);
    assert_int_equal(e2e_fork(&c, &s[0], &s[1], 2, 70, 1), ATTN_OK);
    len[1] = 70;
    decode(2);
    uint32_t last = s[0].epoch;
    assert_int_equal(e2e_close_seq(&c, &s[0]), ATTN_OK);
    assert_int_equal(e2e_close_seq(&c, &s[0]), ATTN_ENOTFOUND);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(e2e_open_seq(&c, &s[0], 1, 1), ATTN_OK);
        assert_int_not_equal(s[0].epoch, last);
        assert_int_not_equal(s[0].epoch, epoch);
        assert_int_not_equal(s[0].epoch, first);
        twin = s[0];
        twin.epoch = last;
        assert_int_equal(e2e_item(&c, &twin, 0, 0, 1), ATTN_ESTALE);
        assert_int_equal(move(&s[0], i % 2), ATTN_OK);
        assert_int_equal(e2e_close_seq(&c, &s[0]), ATTN_OK);
    }
    end();
}

static uint64_t send_fork_as(uint64_t id, const struct e2e_seq *src, uint64_t new_name, uint32_t n)
{
    Attnd__Fork b = ATTND__FORK__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint64_t next = c.next_id;
    b.seq = src->name;
    b.epoch = src->epoch;
    b.new_seq = new_name;
    b.has_len = 1;
    b.len = n;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_FORK;
    h.fork = &b;
    c.next_id = id;
    e2e_send(&c, &h, NULL, 0);
    c.next_id = next > id ? next : id + 1;
    return id;
}

/* Whatever it meets: its source that stands still, copies of itself, or a source that has gone. */
static void a_fork_that_is_repeated_around_a_move_has_one_answer(void **state)
{
    enum { ROUNDS = 60, COPIES = 4 };
    (void)state;
    begin("0,1", N_BLOCKS, quiet);
    fill(0, 1, 100);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint32_t to = round % 2, epoch = 0;
        uint64_t id = c.next_id + 1, name = 100 + round, moved = send_move(1, to);
        for (uint32_t i = 0; i < COPIES; i++)
            send_fork_as(id, &s[0], name, 40);
        assert_int_equal(e2e_await(&c, moved)->header->status, ATTN_OK);
        while (e2e_reply(&c, id, COPIES - 1) == NULL)
            e2e_await_ms(&c, UINT64_MAX, 10);
        for (uint32_t i = 0; i < COPIES; i++) {
            const Attnd__Reply *r = e2e_reply(&c, id, i)->header;
            if (r->status != ATTN_OK)
                fail_msg("round %u, copy %u: %s", round, i, r->message);
            assert_true(i == 0 || r->seq->epoch == epoch);
            epoch = r->seq->epoch;
        }
        e2e_forget(&c);
        assert_int_equal(move(&s[0], !to), ATTN_OK);
        send_fork_as(id, &s[0], name, 40);
        const Attnd__Reply *r = e2e_await(&c, id)->header;
        assert_int_equal(r->status, ATTN_OK);
        assert_int_equal(r->seq->epoch, epoch);
        send_fork_as(c.next_id, &s[0], name, 40);
        assert_int_equal(e2e_await(&c, c.next_id - 1)->header->status, ATTN_EEXIST);
        struct e2e_seq fork = {.name = name, .epoch = epoch};
        e2e_forget(&c);
        assert_int_equal(e2e_close_seq(&c, &fork), ATTN_OK);
    }
    end();
}

static void a_move_that_cannot_be_is_refused_and_changes_nothing(void **state)
{
    (void)state;
    begin("0,1", 32, quiet);
    fill(0, 1, 20 * E2E_BLOCK_TOKENS);
    uint32_t card = s[0].epoch & 1;
    assert_int_equal(move(&s[0], 2), ATTN_EINVAL);
    assert_int_equal(move(&s[0], card), ATTN_OK); /* it is there */
    fill(1, 2, 20 * E2E_BLOCK_TOKENS);
    assert_int_equal(s[1].epoch & 1, !card);
    assert_int_equal(move(&s[0], !card), ATTN_ENOBLOCKS);
    struct e2e_seq none = {.name = 99};
    assert_int_equal(move(&none, 1), ATTN_ENOTFOUND);
    decode(2);
    assert_int_equal(e2e_close_seq(&c, &s[1]), ATTN_OK);
    assert_int_equal(move(&s[0], !card), ATTN_OK);
    decode(1);
    assert_int_equal(e2e_close_seq(&c, &s[0]), ATTN_OK);
    end();
}

/* A device of another backend beside the first: its blocks come by way of host memory. E2E_KINDS
 * names two that there are. */
static void sequences_move_between_cards_of_two_kinds(void **state)
{
    (void)state;
    const char *twin = getenv("E2E_TWIN"), *kinds = getenv("E2E_KINDS");
    if (twin == NULL && kinds == NULL)
        skip();
    if (kinds == NULL)
        setenv("ATTND_MODULE_DIR", twin, 1);
    begin(kinds == NULL ? "0,hip:0" : kinds, N_BLOCKS, quiet);
    if (kinds == NULL)
        unsetenv("ATTND_MODULE_DIR");
    fill(0, 1, 500);
    fill(1, 2, 30);
    for (uint32_t round = 0; round < 4; round++) {
        uint64_t id = send_move(1, (round + 1) % 2);
        decode(2);
        assert_int_equal(e2e_await(&c, id)->header->status, ATTN_OK);
        decode(2);
    }
    assert_true(counter(0, "card_moves_out_total") > 0);
    assert_true(counter(1, "card_batch_items_total") > 0);
    end();
}

/* Many sequences, and whatever may happen to them, while they move at random. */
static void random_requests_and_moves_lose_nothing(void **state)
{
    (void)state;
    enum { ROUNDS = 260 };
    static const char *const often[] = {"--device.balance", "1ms", NULL};
    uint64_t moves[ROUNDS];
    uint32_t n_moves = 0, lens[E2E_LAYERS];
    bool is_open[N_SEQS] = {false};
    begin(cards(), 40, often);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint32_t i = random_below(&seed, N_SEQS), n_open = 0;
        struct e2e_item it[N_SEQS];
        if (!is_open[i]) {
            assert_int_equal(e2e_open_seq(&c, &s[i], 1 + i, round % 50), ATTN_OK);
            is_open[i] = true;
            len[i] = 0;
        }
        if (round % 2 == 0)
            moves[n_moves++] = send_move(1 + i, random_below(&seed, n_cards));
        switch (random_below(&seed, 8)) {
        case 0:
            assert_int_equal(e2e_close_seq(&c, &s[i]), ATTN_OK);
            is_open[i] = false;
            break;
        case 1: {
            uint32_t to = len[i] - random_below(&seed, len[i] / 2 + 1);
            assert_int_equal(e2e_truncate(&c, &s[i], to), ATTN_OK);
            for (uint32_t k = to; k < E2E_MAX_TOKENS; k++)
                s[i].stream[k] = round;
            len[i] = to;
            break;
        }
        case 2:
            assert_int_equal(e2e_adopt(&c, &s[i], lens), ATTN_OK);
            for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
                assert_int_equal(lens[layer], len[i]);
            break;
        case 3: {
            uint32_t k = (i + 1) % N_SEQS;
            if (is_open[k])
                break;
            assert_int_equal(e2e_fork(&c, &s[i], &s[k], 1 + k, len[i], 100 + round), ATTN_OK);
            is_open[k] = true;
            len[k] = len[i];
            break;
        }
        case 4:
        case 5: {
            uint32_t n = 1 + random_below(&seed, 60);
            if (len[i] + n > 150)
                break;
            for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
                e2e_step(&c, layer, &(struct e2e_item){&s[i], len[i], n}, 1);
            len[i] += n;
            break;
        }
        default:
            for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
                n_open = 0;
                for (uint32_t k = 0; k < N_SEQS; k++)
                    if (is_open[k] && len[k] < 160)
                        it[n_open++] = (struct e2e_item){&s[k], len[k], 1};
                if (n_open > 0)
                    e2e_step(&c, layer, it, n_open);
            }
            for (uint32_t k = 0; k < N_SEQS; k++)
                len[k] += is_open[k] && len[k] < 160;
        }
    }
    for (uint32_t i = 0; i < n_moves; i++)
        e2e_await(&c, moves[i]);
    for (uint32_t i = 0; i < N_SEQS; i++)
        if (is_open[i])
            assert_int_equal(e2e_close_seq(&c, &s[i]), ATTN_OK);
    while (counter(UINT32_MAX, "blocks_used") > 0)
        ;
    assert_int_equal(counter(UINT32_MAX, "sequences"), 0);
    assert_int_equal(counter(UINT32_MAX, "blocks_free"), n_cards * 40);
    end();
}

static void sequences_leave_a_card_that_is_full(void **state)
{
    (void)state;
    static const char *const often[] = {"--device.balance", "1ms", NULL};
    begin("0,1", 64, often);
    /* all but two of eight are on one card */
    for (uint32_t i = 0; i < 8; i++)
        fill(i, 1 + i, 20);
    uint32_t card = s[0].epoch & 1;
    for (uint32_t i = 0; i < 8; i++)
        assert_true(move(&s[i], card) == ATTN_OK);
    for (uint32_t k = 0; k < 6; k++)
        for (uint32_t i = 0; i < 8; i++) {
            for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
                e2e_step(&c, layer, &(struct e2e_item){&s[i], len[i], 16}, 1);
            len[i] += 16;
        }
    do
        decode(8);
    while (len[0] < 140);
    e2e_await_log(&d, "sequence moves");
    while (counter(!card, "card_sequences") == 0)
        decode(2);
    decode(8);
    end();
}

/* Its blocks are read as it leaves, and not written to meanwhile; nor are there others. */
static void a_sequence_that_fills_its_pool_is_written_again_as_it_moves(void **state)
{
    (void)state;
    uint32_t n = E2E_BLOCK_TOKENS * N_BLOCKS, keep = 40;
    struct e2e_item again = {&s[0], keep, n - keep};
    begin("0,1", N_BLOCKS, quiet);
    fill(0, 1, keep);
    for (uint32_t round = 0; round < 20; round++) {
        uint64_t id[E2E_LAYERS], moved = send_move(1, round % 2);
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            id[layer] = e2e_send_step(&c, layer, WIRE_STEP_APPEND, &again, 1, 0);
        assert_int_equal(e2e_await(&c, moved)->header->status, ATTN_OK);
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
            assert_int_equal(e2e_await(&c, id[layer])->header->status, ATTN_OK);
            e2e_step(&c, layer, &(struct e2e_item){&s[0], n - 1, 1}, 1);
        }
    }
    end();
}

/* Sequences that have released blocks, more of which go while they move; drafts are taken back. */
static void windows_release_before_and_while_a_sequence_moves(void **state)
{
    (void)state;
    e2e_all_have_windows = true;
    begin(cards(), N_BLOCKS, quiet);
    fill(0, 1, 300);
    fill(1, 2, 30);
    for (uint32_t round = 0; round < 40; round++) {
        uint64_t id = send_move(1, (round + 1) % n_cards);
        for (uint32_t k = 0; k < 1 + round % 5; k++)
            decode(2);
        if (round % 4 == 3) { /* no further back than the last append */
            assert_int_equal(e2e_truncate(&c, &s[0], len[0] - 1), ATTN_OK);
            s[0].stream[--len[0]] = round;
        }
        if (round % 8 == 5)
            assert_int_equal(e2e_truncate(&c, &s[0], 100), ATTN_EINVAL);
        assert_int_equal(e2e_await(&c, id)->header->status, ATTN_OK);
        decode(2);
        /* a window of 40, what is begun, the block of the sinks, and one; cards tell it later */
        for (uint32_t k = 0; k < 10000 && counter(UINT32_MAX, "blocks_used") > 2 * 6; k++)
            ;
        assert_in_range(counter(UINT32_MAX, "blocks_used"), 4, 2 * 6);
        if (round == 30) { /* into what is kept, and on from there */
            assert_int_equal(e2e_truncate(&c, &s[0], 2), ATTN_OK);
            for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
                e2e_step(&c, layer, &(struct e2e_item){&s[0], 2, 150}, 1);
            len[0] = 152;
        }
    }
    assert_true(counter(1, "card_moves_in_total") >= 10);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(e2e_close_seq(&c, &s[i]), ATTN_OK);
    while (counter(UINT32_MAX, "blocks_used") > 0)
        ;
    end();
    e2e_all_have_windows = false;
}

static void losing_a_card_in_the_middle_takes_what_is_there(uint32_t to, const char *fault)
{
    const char *const faults[] = {"--danger-inject-faults", "--backend", fault,
                                  "--device.balance",       "0",         NULL};
    char sanitizer[256], *given = getenv("TSAN_OPTIONS");
    given = strdup(given == NULL ? "" : given);
    snprintf(sanitizer, sizeof sanitizer, "%s report_thread_leaks=0", given);
    setenv("TSAN_OPTIONS", sanitizer, 1);
    begin("0,1", N_BLOCKS, faults);
    setenv("TSAN_OPTIONS", given, 1);
    free(given);
    uint32_t n_ok = 0, n_lost = 0;
    for (uint32_t i = 0; i < 4; i++)
        fill(i, 1 + i, 60);
    for (uint32_t round = 0; round < 40 && n_lost == 0; round++) {
        uint64_t moves[4], ids[4];
        for (uint32_t i = 0; i < 4; i++) {
            moves[i] = send_move(1 + i, (round + i + to) % 2);
            ids[i] = e2e_send_step(&c, 0, E2E_BOTH, &(struct e2e_item){&s[i], len[i], 1}, 1, 0);
        }
        for (uint32_t i = 0; i < 4; i++) {
            e2e_await(&c, moves[i]);
            attn_status st = (attn_status)e2e_await(&c, ids[i])->header->status;
            assert_true(st == ATTN_OK || st == ATTN_EDEVICE || st == ATTN_ENOTFOUND);
            n_ok += st == ATTN_OK;
            n_lost += st != ATTN_OK;
            len[i] += st == ATTN_OK;
        }
        e2e_forget(&c);
    }
    assert_true(n_lost > 0);
    e2e_await_log(&d, "card 1 is lost; the others go on");
    /* what is left is whole and right, what is not is not found, and its name is free */
    for (uint32_t i = 0; i < 4; i++) {
        attn_status st = e2e_item(&c, &s[i], 0, len[i], 1);
        assert_true(st == ATTN_OK || st == ATTN_ENOTFOUND);
        if (st == ATTN_OK) {
            e2e_step(&c, 0, &(struct e2e_item){&s[i], len[i] + 1, 1}, 1);
            continue;
        }
        assert_int_equal(e2e_open_seq(&c, &s[i], 1 + i, 9), ATTN_OK);
        e2e_step(&c, 0, &(struct e2e_item){&s[i], 0, 20}, 1);
    }
    assert_true(n_ok > 0);
    end();
}

static void losing_either_card_in_the_middle_takes_what_is_there(void **state)
{
    (void)state;
    losing_a_card_in_the_middle_takes_what_is_there(0, "cpu+faults:lose@20");
    losing_a_card_in_the_middle_takes_what_is_there(1, "cpu+faults:lose@25");
}

static void a_kill_in_the_middle_leaves_each_sequence_once(void **state)
{
    (void)state;
    enum { KILLS = 8 };
    static const char *const supervise[] = {"--supervise", "--device.balance", "0", NULL};
    begin("0,1", N_BLOCKS, supervise);
    uint64_t session = c.session, next;
    uint32_t pool = c.pool;
    for (uint32_t i = 0; i < 4; i++)
        fill(i, 1 + i, 40 + 120 * i);
    for (uint32_t round = 0; round < KILLS; round++) {
        pid_t victim = e2e_child(&d);
        for (uint32_t i = 0; i < 4; i++)
            send_move(1 + i, (round + i / 2) % 2);
        for (uint32_t k = random_below(&seed, 4); k > 0; k--)
            decode(4);
        next = c.next_id;
        kill(victim, SIGKILL);
        e2e_disconnect(&c);
        e2e_connect(&c, &d);
        c.session = session;
        c.pool = pool;
        c.next_id = next + 100;
        decode(4);
    }
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(e2e_close_seq(&c, &s[i]), ATTN_OK);
    while (counter(UINT32_MAX, "blocks_used") > 0)
        ;
    assert_int_equal(counter(UINT32_MAX, "blocks_free"), 2 * N_BLOCKS);
    end();
}

static int kill_what_is_left(void **state)
{
    (void)state;
    if (d.pid != 0)
        kill(d.pid, SIGKILL);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
#define TEST(name) cmocka_unit_test_teardown(name, kill_what_is_left)
    const struct CMUnitTest tests[] = {
        TEST(a_sequence_has_the_same_bytes_before_during_and_after_a_move),
        TEST(requests_before_and_behind_a_move_stay_in_order),
        TEST(what_is_repeated_is_answered_as_before_the_move),
        TEST(a_fork_that_is_repeated_around_a_move_has_one_answer),
        TEST(a_move_that_cannot_be_is_refused_and_changes_nothing),
        TEST(sequences_move_between_cards_of_two_kinds),
        TEST(random_requests_and_moves_lose_nothing),
        TEST(sequences_leave_a_card_that_is_full),
        TEST(a_sequence_that_fills_its_pool_is_written_again_as_it_moves),
        TEST(windows_release_before_and_while_a_sequence_moves),
        TEST(losing_either_card_in_the_middle_takes_what_is_there),
        TEST(a_kill_in_the_middle_leaves_each_sequence_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
