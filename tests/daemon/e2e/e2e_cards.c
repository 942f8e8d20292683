/* e2e_cards.c: one daemon with several cards (cpu engines): where sequences are placed, what a step
 * over all cards computes, what a lost card takes with it, late duplicates, and a successor. The
 * other e2e tests run on several cards, too: E2E_CARDS (e2e.h).
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"

enum { N_BLOCKS = 32, N_SEQS = 6, LEN = 40, MOST_CARDS = 8, MOST_SEQS = 3 * MOST_CARDS };

static struct e2e d;
static struct e2e_client c;
static struct e2e_seq s[MOST_SEQS];
static uint32_t card_mask = 1;

/* The lowest bits of an epoch name the card (docs/design.md). */
static uint32_t card_of(const struct e2e_seq *seq)
{
    return seq->epoch & card_mask;
}

static void begin(const char *index, const char *const *more)
{
    const char *flags[16] = {"--device.index", index, "--cache.max_sequences", "12"};
    int n = 4;
    uint32_t n_cards = 1;
    for (const char *at = index; *at != '\0'; at++)
        n_cards += *at == ',';
    for (card_mask = 1; card_mask + 1 < n_cards;)
        card_mask = 2 * card_mask + 1;
    for (; more != NULL && *more != NULL; more++)
        flags[n++] = *more;
    flags[n] = NULL;
    e2e_start(&d, flags);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, N_BLOCKS);
}

static void end(void)
{
    e2e_disconnect(&c);
    e2e_stop(&d);
}

/* Sequences 1 to n with LEN tokens, two of which are in one message with all the others. */
static void fill_many(uint32_t n)
{
    struct e2e_item it[MOST_SEQS];
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(e2e_open_seq(&c, &s[i], 1 + i, 7 * i), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        for (uint32_t i = 0; i < n; i++)
            it[i] = (struct e2e_item){&s[i], 0, LEN - 2};
        e2e_step(&c, layer, it, n);
        for (uint32_t i = 0; i < n; i++)
            it[i] = (struct e2e_item){&s[i], LEN - 2, 2};
        e2e_step(&c, layer, it, n);
    }
}

static void fill(void)
{
    fill_many(N_SEQS);
}

static void sequences_are_spread_by_free_blocks(void **state)
{
    (void)state;
    uint32_t n[2] = {0, 0};
    begin("0,1", NULL);
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_equal(e2e_open_seq(&c, &s[i], 1 + i, 1), ATTN_OK);
        n[card_of(&s[i])]++;
    }
    assert_int_equal(n[0], 3);
    assert_int_equal(n[1], 3);
    /* one card has 4 of its 32 blocks left: new ones go to the other */
    uint32_t full = card_of(&s[0]);
    assert_int_equal(e2e_item(&c, &s[0], 0, 0, 28 * E2E_BLOCK_TOKENS), ATTN_OK);
    do { /* a card says what it has left soon after its answer, not before */
        assert_int_equal(e2e_open_seq(&c, &s[6], 7, 1), ATTN_OK);
    } while (card_of(&s[6]) == full && e2e_close_seq(&c, &s[6]) == ATTN_OK);
    assert_int_not_equal(card_of(&s[6]), full);
    for (uint32_t i = 7; i < 12; i++) {
        assert_int_equal(e2e_open_seq(&c, &s[i], 1 + i, 1), ATTN_OK);
        assert_int_not_equal(card_of(&s[i]), full);
    }
    /* each card has its own blocks */
    assert_int_equal(e2e_item(&c, &s[0], 0, 28 * E2E_BLOCK_TOKENS, 5 * E2E_BLOCK_TOKENS),
                     ATTN_ENOBLOCKS);
    assert_int_equal(e2e_item(&c, &s[6], 0, 0, 32 * E2E_BLOCK_TOKENS), ATTN_OK);
    /* a fork is where its source is, and a name is one sequence's, whatever the card */
    assert_int_equal(e2e_fork(&c, &s[0], &s[12], 100, 0, 1), ATTN_OK);
    assert_int_equal(card_of(&s[12]), full);
    assert_int_equal(e2e_fork(&c, &s[0], &s[13], s[6].name, 0, 1), ATTN_EEXIST);
    assert_int_equal(e2e_open_seq(&c, &s[13], s[6].name, 1), ATTN_EEXIST);
    end();
}

/* As workers open them: all at once, by turns. */
static void sequences_of_one_session_stay_together_where_sessions_are_many(void **state)
{
    (void)state;
    enum { SESSIONS = 4, EACH = 3 };
    struct e2e_client others[SESSIONS];
    uint32_t n[2] = {0, 0}, card[SESSIONS];
    begin("0,1", NULL);
    for (uint32_t i = 0; i < SESSIONS; i++) {
        e2e_connect(&others[i], &d);
        others[i].pool = c.pool;
    }
    for (uint32_t k = 0; k < EACH; k++) {
        for (uint32_t i = 0; i < SESSIONS; i++) {
            struct e2e_seq *seq = &s[k * SESSIONS + i];
            assert_int_equal(e2e_open_seq(&others[i], seq, 1 + k * SESSIONS + i, 1), ATTN_OK);
            card[i] = k == 0 ? card_of(seq) : card[i];
            assert_int_equal(card_of(seq), card[i]);
            n[card_of(seq)]++;
        }
    }
    assert_int_equal(n[0], n[1]);
    /* what has ended counts no more: one that is left alone has both cards */
    for (uint32_t i = 1; i < SESSIONS; i++)
        for (uint32_t k = 0; k < EACH; k++)
            assert_int_equal(e2e_close_seq(&others[i], &s[k * SESSIONS + i]), ATTN_OK);
    n[0] = n[1] = 0;
    n[card[0]] = EACH;
    for (uint32_t i = 1; i < 4; i++) {
        assert_int_equal(e2e_open_seq(&others[0], &s[i], 100 + i, 1), ATTN_OK);
        n[card_of(&s[i])]++;
    }
    assert_int_equal(n[0], n[1]);
    for (uint32_t i = 0; i < SESSIONS; i++)
        e2e_disconnect(&others[i]);
    end();
}

/* Bytes of one more token of all sequences, in one step, at each layer. */
static uint8_t *token_bytes(size_t *out_bytes)
{
    struct e2e_item it[N_SEQS];
    uint8_t *all = NULL;
    *out_bytes = 0;
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        for (uint32_t i = 0; i < N_SEQS; i++)
            it[i] = (struct e2e_item){&s[i], LEN, 1};
        const struct wire_reply *r =
            e2e_await(&c, e2e_send_step(&c, layer, E2E_BOTH | WIRE_STEP_LSE, it, N_SEQS, 0));
        e2e_check_step(r, layer, E2E_BOTH | WIRE_STEP_LSE, it, N_SEQS);
        all = realloc(all, *out_bytes + r->payload_bytes);
        memcpy(all + *out_bytes, r->payload, r->payload_bytes);
        *out_bytes += r->payload_bytes;
    }
    return all;
}

static void a_step_over_several_cards_has_the_bytes_of_one(void **state)
{
    (void)state;
    const char *const indices[] = {"0", "0,1", e2e_most_cards() < 3 ? "1,0" : "2,0,1"};
    uint8_t *bytes[3];
    size_t n[3];
    for (uint32_t i = 0; i < 3; i++) {
        begin(indices[i], NULL);
        fill();
        bytes[i] = token_bytes(&n[i]);
        end();
    }
    for (uint32_t i = 1; i < 3; i++) {
        assert_int_equal(n[i], n[0]);
        assert_memory_equal(bytes[i], bytes[0], n[0]);
    }
    for (uint32_t i = 0; i < 3; i++)
        free(bytes[i]);
}

static void a_sequence_twice_in_a_step_is_an_error_over_cards_too(void **state)
{
    (void)state;
    begin("0,1", NULL);
    fill();
    assert_int_not_equal(card_of(&s[0]), card_of(&s[1]));
    struct e2e_seq twin = s[0];
    twin.epoch = s[1].epoch; /* of the other card */
    struct e2e_item it[] = {{&s[0], LEN, 1}, {&twin, LEN, 1}};
    const struct wire_reply *r = e2e_await(&c, e2e_send_step(&c, 0, E2E_BOTH, it, 2, 0));
    assert_int_equal(r->header->status, ATTN_EINVAL);
    assert_non_null(strstr(r->header->message, "step.seq[1] 1 is in this step twice"));
    /* alone it is stale, and the other item goes on */
    struct e2e_item two[] = {{&twin, LEN, 1}, {&s[2], LEN, 1}};
    r = e2e_await(&c, e2e_send_step(&c, 0, E2E_BOTH, two, 2, 0));
    assert_int_equal(r->header->status, ATTN_ESTALE);
    assert_int_equal(r->header->step->n_item_status, 2);
    assert_int_equal(r->header->step->item_status[0], ATTN_ESTALE);
    assert_int_equal(r->header->step->item_status[1], ATTN_OK);
    end();
}

static void a_late_duplicate_of_an_open_is_refused_by_every_card(void **state)
{
    (void)state;
    begin("0,1", NULL);
    uint64_t id = c.next_id;
    assert_int_equal(e2e_open_seq(&c, &s[0], 1, 1), ATTN_OK);
    uint32_t card = card_of(&s[0]);
    assert_int_equal(e2e_close_seq(&c, &s[0]), ATTN_OK);
    /* a new one would be placed on the other card */
    assert_int_equal(e2e_open_seq(&c, &s[1], 2, 1), ATTN_OK);
    if (card_of(&s[1]) != card)
        assert_int_equal(e2e_open_seq(&c, &s[1], 3, 1), ATTN_OK);
    assert_int_equal(e2e_item(&c, &s[1], 0, 0, 16 * E2E_BLOCK_TOKENS), ATTN_OK);
    uint64_t next = c.next_id;
    e2e_forget(&c);
    c.next_id = id;
    assert_int_equal(e2e_open_seq(&c, &s[0], 1, 1), ATTN_ESTALE);
    c.next_id = next;
    assert_int_equal(e2e_open_seq(&c, &s[0], 1, 1), ATTN_OK);
    assert_int_not_equal(card_of(&s[0]), card);
    end();
}

static void check_that_the_last_card_takes_its_own_only(uint32_t n_cards)
{
    static const char *const faults[] = {"--danger-inject-faults",
                                         "--backend",
                                         "cpu+faults:lose@7",
                                         "--device.threads",
                                         "1",
                                         "--cache.max_sequences",
                                         "32",
                                         NULL};
    const uint32_t lost = n_cards - 1, n = 3 * n_cards;
    uint32_t n_of[MOST_CARDS] = {0};
    char index[] = "0,1,2,3,4,5,6,7", says[64];
    index[2 * n_cards - 1] = '\0';
    /* a lost device is not closed: its threads are there when the process ends */
    char sanitizer[256], *given = getenv("TSAN_OPTIONS");
    given = strdup(given == NULL ? "" : given);
    snprintf(sanitizer, sizeof sanitizer, "%s report_thread_leaks=0", given);
    setenv("TSAN_OPTIONS", sanitizer, 1);
    begin(index, faults);
    setenv("TSAN_OPTIONS", given, 1);
    free(given);
    fill_many(n); /* six batches a card, with faults on the last card */
    for (uint32_t i = 0; i < n; i++)
        n_of[card_of(&s[i])]++;
    for (uint32_t i = 0; i < n_cards; i++)
        assert_int_equal(n_of[i], 3);
    struct e2e_item it[MOST_SEQS];
    for (uint32_t i = 0; i < n; i++)
        it[i] = (struct e2e_item){&s[i], LEN, 1};
    const struct wire_reply *r = e2e_await(&c, e2e_send_step(&c, 0, E2E_BOTH, it, n, 0));
    assert_int_equal(r->header->status, ATTN_EDEVICE);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(r->header->step->item_status[i],
                         card_of(&s[i]) == lost ? ATTN_EDEVICE : ATTN_OK);
    snprintf(says, sizeof says, "card %u is lost; the others go on", lost);
    e2e_await_log(&d, says);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(e2e_item(&c, &s[i], 1, LEN, 1),
                         card_of(&s[i]) == lost ? ATTN_ENOTFOUND : ATTN_OK);
    r = e2e_await(&c, e2e_send_step(&c, 2, E2E_BOTH, it, n, 0));
    assert_int_equal(r->header->status, ATTN_ENOTFOUND);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(r->header->step->item_status[i],
                         card_of(&s[i]) == lost ? ATTN_ENOTFOUND : ATTN_OK);
    /* its names are free, and are opened elsewhere */
    for (uint32_t i = 0; i < n; i++) {
        if (card_of(&s[i]) != lost)
            continue;
        assert_int_equal(e2e_open_seq(&c, &s[i], 1 + i, 3), ATTN_OK);
        assert_int_not_equal(card_of(&s[i]), lost);
        struct e2e_item one = {&s[i], 0, 20};
        e2e_step(&c, 0, &one, 1);
    }
    end();
}

static void a_lost_card_takes_its_own_sequences_only(void **state)
{
    (void)state;
    check_that_the_last_card_takes_its_own_only(2);
}

static void a_lost_card_of_eight_takes_its_own_sequences_only(void **state)
{
    (void)state;
    uint32_t most = e2e_most_cards();
    if (most < 3)
        skip();
    check_that_the_last_card_takes_its_own_only(most < MOST_CARDS ? most : MOST_CARDS);
}

static void a_successor_goes_on_with_all_cards(void **state)
{
    (void)state;
    static const char *const supervise[] = {"--supervise", NULL};
    uint32_t len[E2E_LAYERS];
    begin("0,1", supervise);
    fill();
    uint64_t session = c.session, opened = c.next_id;
    uint32_t pool = c.pool;
    assert_int_equal(e2e_open_seq(&c, &s[N_SEQS], 50, 1), ATTN_OK);
    assert_int_equal(e2e_close_seq(&c, &s[N_SEQS]), ATTN_OK);
    size_t n[N_SEQS], now_bytes;
    void *before[N_SEQS], *now;
    for (uint32_t i = 0; i < N_SEQS; i++)
        before[i] = e2e_read_back(&c, &s[i], 1, LEN, &n[i]);
    e2e_disconnect(&c);
    e2e_kill_child(&d);
    e2e_await_log(&d, "kept: 6 sequences of 240 tokens, 1 pools, 1 sessions; dropped: 0");

    e2e_connect(&c, &d);
    uint64_t fresh = c.session;
    c.pool = pool;
    c.session = session; /* goes on; what it has done is known to all cards */
    uint64_t next = c.next_id;
    c.next_id = opened;
    assert_int_equal(e2e_open_seq(&c, &s[N_SEQS], 50, 1), ATTN_ESTALE);
    c.next_id = opened + 1000;
    assert_int_equal(e2e_open_seq(&c, &s[N_SEQS], 50, 1), ATTN_OK);
    assert_int_equal(e2e_open_seq(&c, &s[N_SEQS + 1], 2, 1), ATTN_EEXIST);
    struct e2e_item it[N_SEQS];
    for (uint32_t i = 0; i < N_SEQS; i++)
        it[i] = (struct e2e_item){&s[i], LEN, 1};
    e2e_step(&c, 0, it, N_SEQS);
    c.session = fresh; /* and another worker takes all over */
    c.next_id = next;
    for (uint32_t i = 0; i < N_SEQS; i++) {
        uint32_t epoch = s[i].epoch, card = card_of(&s[i]);
        assert_int_equal(e2e_adopt(&c, &s[i], len), ATTN_OK);
        assert_true(s[i].epoch > epoch);
        assert_int_equal(card_of(&s[i]), card);
        now = e2e_read_back(&c, &s[i], 1, LEN, &now_bytes);
        assert_int_equal(now_bytes, n[i]);
        assert_memory_equal(now, before[i], now_bytes);
        free(now);
        free(before[i]);
    }
    end();
}

static void devices_that_are_none_are_refused_by_name(void **state)
{
    (void)state;
    static const char *const bad[] = {"0,0", "0,128", "", "0,", "x", "0,1,2,3,4,5,6,7,8"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const char *const flags[] = {"--check-config", "--device.index", bad[i], NULL};
        assert_int_not_equal(e2e_run(&d, flags), 0);
        assert_true(e2e_log_has(&d, "device.index"));
        e2e_stop(&d);
    }
}

/* The ids of a sequence's tokens. */
static const uint32_t *ids_of(const struct e2e_seq *seq)
{
    static uint32_t ids[E2E_MAX_TOKENS];
    for (uint32_t i = 0; i < E2E_MAX_TOKENS; i++)
        ids[i] = seq->stream[i] * 1000 + i;
    return ids;
}

/* Opens a sequence with the ids of its first n tokens; how many of them it begins with. */
static uint32_t open_with(struct e2e_seq *seq, uint64_t name, uint32_t stream, uint32_t n)
{
    Attnd__Open o = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    seq->name = name;
    for (uint32_t i = 0; i < E2E_MAX_TOKENS; i++)
        seq->stream[i] = stream;
    o.pool = c.pool;
    o.seq = name;
    o.n_tokens = n;
    o.tokens = (uint32_t *)(uintptr_t)ids_of(seq); /* packing only reads these */
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &o;
    const Attnd__Reply *r = e2e_call(&c, &h);
    assert_int_equal(r->status, ATTN_OK);
    seq->epoch = r->seq->epoch;
    return r->seq->cached_tokens;
}

static attn_status send_ids(const struct e2e_seq *seq, uint32_t n)
{
    Attnd__Tokens t = ATTND__TOKENS__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    t.seq = seq->name;
    t.epoch = seq->epoch;
    t.n_tokens = n;
    t.tokens = (uint32_t *)(uintptr_t)ids_of(seq);
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_TOKENS;
    h.tokens = &t;
    return e2e_call(&c, &h)->status;
}

static void append(struct e2e_seq *seq, uint32_t from, uint32_t n)
{
    struct e2e_item it = {seq, from, n};
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        e2e_step(&c, layer, &it, 1);
}

static void a_prompt_goes_to_the_card_that_has_its_beginning(void **state)
{
    (void)state;
    enum { PROMPT = 5 * E2E_BLOCK_TOKENS };
    begin("0,1", NULL);
    /* the ids of the first are known as it is opened, those of the second are told behind it */
    assert_int_equal(open_with(&s[0], 1, 5, PROMPT), 0);
    assert_int_equal(open_with(&s[1], 2, 6, E2E_BLOCK_TOKENS), 0);
    assert_int_not_equal(card_of(&s[0]), card_of(&s[1]));
    for (uint32_t i = 0; i < 2; i++) {
        append(&s[i], 0, PROMPT);
        assert_int_equal(send_ids(&s[i], PROMPT), ATTN_OK);
    }
    /* free blocks alone would take them by turns to both cards */
    for (uint32_t i = 2; i < 4; i++) {
        assert_int_equal(open_with(&s[i], 1 + i, 5 + i % 2, PROMPT), PROMPT - E2E_BLOCK_TOKENS);
        assert_int_equal(card_of(&s[i]), card_of(&s[i - 2]));
        append(&s[i], PROMPT - E2E_BLOCK_TOKENS, E2E_BLOCK_TOKENS);
    }
    /* a card with little room loses to one with much */
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(e2e_close_seq(&c, &s[i]), ATTN_OK);
    assert_int_equal(open_with(&s[4], 10, 5, PROMPT), PROMPT - E2E_BLOCK_TOKENS);
    uint32_t full = card_of(&s[4]);
    assert_int_equal(e2e_item(&c, &s[4], 0, PROMPT - E2E_BLOCK_TOKENS, 24 * E2E_BLOCK_TOKENS),
                     ATTN_OK);
    uint32_t n_cached;
    do {
        n_cached = open_with(&s[5], 11, 5, PROMPT);
    } while (card_of(&s[5]) == full && e2e_close_seq(&c, &s[5]) == ATTN_OK);
    assert_int_equal(n_cached, 0);
    assert_int_not_equal(card_of(&s[5]), full);
    end();
}

static int kill_what_is_left(void **state)
{
    (void)state;
    if (d.pid != 0)
        kill(d.pid, SIGKILL);
    return 0;
}

int main(void)
{
#define TEST(name) cmocka_unit_test_teardown(name, kill_what_is_left)
    const struct CMUnitTest tests[] = {
        TEST(sequences_are_spread_by_free_blocks),
        TEST(sequences_of_one_session_stay_together_where_sessions_are_many),
        TEST(a_prompt_goes_to_the_card_that_has_its_beginning),
        TEST(a_step_over_several_cards_has_the_bytes_of_one),
        TEST(a_sequence_twice_in_a_step_is_an_error_over_cards_too),
        TEST(a_late_duplicate_of_an_open_is_refused_by_every_card),
        TEST(a_lost_card_takes_its_own_sequences_only),
        TEST(a_lost_card_of_eight_takes_its_own_sequences_only),
        TEST(a_successor_goes_on_with_all_cards),
        TEST(devices_that_are_none_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
