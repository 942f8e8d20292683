/* test_shards.c: two cards' engines without threads and a pool that is split over them: what
 * becomes of batches when one of their shards fails. The second card's device learns block tables
 * by patches alone, as a GPU does. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/daemon/engine/engine_rig.h"

static struct rig r;
static uint32_t second_in_flight; /* batches on the second card's device */

static void tweak(struct rig *rig)
{
    rig->has_second = true;
    rig->second_backend.fails_unpatched = true;
    rig->second_backend.max_in_flight = second_in_flight;
}

static Attnd__Split split = ATTND__SPLIT__SPLIT_HEADS;

/* A test between opening and closing: what the rig keeps would count as the test's leak. */
static void run(void **state)
{
    void (*const *test)(void **) = *state;
    for (second_in_flight = 1; second_in_flight <= 2; second_in_flight++) {
        rig_open(&r, tweak);
        r.pool = rig_pool_of_split(&r, "split", 64, split);
        (*test)(NULL);
        rig_close(&r);
    }
}

static attn_status status_of(uint64_t id)
{
    return (attn_status)rig_answer(&r, id)->status;
}

/* Appends to layer 0 and attends, choosing 3 blocks. */
static uint64_t send_choosing(uint64_t seq, uint32_t pos, uint32_t n)
{
    const struct rig_step s = {.flags = WIRE_STEP_ATTEND | WIRE_STEP_APPEND | WIRE_STEP_CHOOSE,
                               .n_items = 1,
                               .seq = &seq,
                               .pos = &pos,
                               .n_tokens = &n,
                               .choose_blocks = 3};
    return rig_send_step(&r, &s);
}

/* A batch of its own, whose part is on its way to the second card. */
static uint64_t launch_as(bool is_choosing, uint64_t seq, uint32_t pos, uint32_t n)
{
    uint32_t n_in_flight = r.engine->n_in_flight;
    uint64_t id = is_choosing ? send_choosing(seq, pos, n) : rig_send_item(&r, seq, 0, pos, n);
    r.second->has_thread = true; /* so that it isn't computed on the way */
    for (int i = 0; i < 1000 && r.engine->n_in_flight == n_in_flight; i++) {
        engine_turn(r.engine, 0);
        rig_now_ns += 10000; /* so that the one behind another is due */
    }
    r.second->has_thread = false;
    assert_int_equal(r.engine->n_in_flight, n_in_flight + 1);
    assert_null(rig_reply(&r, id));
    return id;
}

static uint64_t launch(uint64_t seq, uint32_t pos, uint32_t n)
{
    return launch_as(false, seq, pos, n);
}

static void a_split_batch_is_computed_on_both_cards(void **state)
{
    (void)state;
    rig_open_many(&r, 1, 2);
    uint32_t n = r.second_backend.n_batches;
    assert_int_equal(rig_item(&r, 1, 0, 0, 20), ATTN_OK);
    assert_int_equal(rig_item(&r, 2, 0, 0, 9), ATTN_OK);
    assert_int_equal(r.second_backend.n_batches, n + 2);
    assert_int_equal(rig_len(&r, 1, 0), 20);
}

static void what_is_behind_a_shard_that_failed_is_not_computed_by_an_old_table(void **state)
{
    (void)state;
    rig_open_many(&r, 1, 3);
    assert_int_equal(rig_item(&r, 1, 0, 0, 20), ATTN_OK);
    uint32_t n = r.second_backend.n_batches;
    uint64_t first = launch(1, 20, 12); /* takes a block, which its patch tells */
    uint64_t second = launch(2, 0, 20); /* was made before anybody knew */
    r.second_backend.fail_batch = ATTN_EINTERNAL;
    rig_run(&r);
    assert_int_equal(status_of(first), ATTN_EINTERNAL);
    assert_int_equal(status_of(second), ATTN_EINTERNAL);
    /* unless it was on the device by then, the second was not even begun */
    assert_int_equal(r.second_backend.n_batches, n + second_in_flight);
    assert_int_equal(rig_len(&r, 1, 0), 20);
    assert_int_equal(rig_len(&r, 2, 0), 0);
}

static void a_sequence_opened_behind_a_failed_shard_has_its_table_sent(void **state)
{
    (void)state;
    rig_open_many(&r, 1, 2);
    assert_int_equal(rig_item(&r, 1, 0, 0, 30), ATTN_OK);
    uint64_t failed = launch(2, 0, 30);
    r.second_backend.fail_batch = ATTN_EINTERNAL;
    rig_run(&r);
    assert_int_equal(status_of(failed), ATTN_EINTERNAL);
    rig_open_many(&r, 3, 2); /* they get the blocks that the failed one had */
    for (uint64_t seq = 3; seq <= 4; seq++)
        assert_int_equal(rig_item(&r, seq, 0, 0, 30), ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 0, 30, 10), ATTN_OK);
    assert_int_equal(rig_item(&r, 2, 0, 0, 30), ATTN_OK);
    for (uint64_t seq = 1; seq <= 4; seq++)
        assert_int_equal(rig_item(&r, seq, 1, 0, 30), ATTN_OK);
}

static attn_status attend(uint64_t seq, uint32_t layer, uint32_t pos)
{
    uint32_t n = 1;
    struct rig_step s = {.layer = layer,
                         .flags = WIRE_STEP_ATTEND,
                         .n_items = 1,
                         .seq = &seq,
                         .pos = &pos,
                         .n_tokens = &n};
    uint64_t id = rig_send_step(&r, &s);
    rig_run(&r);
    return status_of(id);
}

/* An open that finds its beginning, and a fork that is read, tell tables by the next batch, whose
 * ever it is. */
static void tables_that_a_failed_shard_was_to_send_are_sent_again(void **state)
{
    (void)state;
    uint32_t ids[40];
    for (uint32_t i = 0; i < 40; i++)
        ids[i] = i * 2654435761u;
    const struct kv_tokens tokens = {.ids = ids, .n = 40};
    uint64_t opened = rig_send_open_with(&r, 1, &tokens);
    rig_run(&r);
    assert_int_equal(status_of(opened), ATTN_OK);
    rig_open_many(&r, 2, 1);
    for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
        assert_int_equal(rig_item(&r, 1, layer, 0, 40), ATTN_OK);
    opened = rig_send_open_with(&r, 3, &tokens);
    rig_run(&r);
    assert_true(rig_answer(&r, opened)->seq->cached_tokens >= 2 * RIG_BLOCK_TOKENS);
    r.second_backend.fail_batch = ATTN_EINTERNAL;
    assert_int_equal(rig_item(&r, 2, 0, 0, 1), ATTN_EINTERNAL);
    assert_int_equal(attend(3, 1, RIG_BLOCK_TOKENS + 3), ATTN_OK);

    assert_int_equal(rig_fork(&r, 1, 4, 20), ATTN_OK);
    r.second_backend.fail_batch = ATTN_EINTERNAL;
    assert_int_equal(attend(4, 0, 17), ATTN_EINTERNAL);
    assert_int_equal(attend(4, 0, 17), ATTN_OK);
}

/* Any of the first batches fails, wherever others are: what succeeds has been computed by the
 * tables of the cache (rig_close looks). */
static void whichever_shard_fails_tables_agree_afterwards(void **state)
{
    (void)state;
    rig_open_many(&r, 1, 8);
    uint32_t len[9] = {0};
    for (uint32_t round = 0; round < 40; round++) {
        uint64_t ids[2], seqs[2];
        uint32_t n[2];
        for (uint32_t i = 0; i < 2; i++) {
            seqs[i] = 1 + (round * 3 + i * 5) % 8;
            n[i] = 1 + (round * 7 + i * 11) % 20;
            ids[i] = launch(seqs[i], len[seqs[i]], n[i]);
        }
        if (round % 3 == 0)
            r.second_backend.fail_batch = ATTN_EINTERNAL;
        else if (round % 3 == 1)
            r.second_backend.fail_submit = ATTN_EINTERNAL;
        rig_run(&r);
        for (uint32_t i = 0; i < 2; i++) {
            assert_int_equal(status_of(ids[i]), round % 3 < 2 ? ATTN_EINTERNAL : ATTN_OK);
            len[seqs[i]] += round % 3 < 2 ? 0 : n[i];
            assert_int_equal(rig_len(&r, seqs[i], 0), len[seqs[i]]);
        }
        if (round % 8 == 7) { /* blocks go to others */
            assert_int_equal(rig_truncate(&r, seqs[0], 3 < len[seqs[0]] ? 3 : 0), ATTN_OK);
            len[seqs[0]] = 3 < len[seqs[0]] ? 3 : 0;
        }
    }
}

/* --- split by tokens: what queries choose blocks by (the fake backend looks) ------------------ */

/* The same tests over a pool that is split by tokens. */
static void run_tokens(void **state)
{
    split = ATTND__SPLIT__SPLIT_TOKENS;
    run(state);
    split = ATTND__SPLIT__SPLIT_HEADS;
}

static attn_status choose(uint64_t seq, uint32_t pos, uint32_t n)
{
    const uint64_t id = send_choosing(seq, pos, n);
    rig_run(&r);
    return status_of(id);
}

static const struct rig_batch *second_batch(uint32_t from_end)
{
    return &r.second_backend.batches[r.second_backend.n_batches - 1 - from_end];
}

static void blocks_are_joined_once_and_again_when_they_are_written(void **state)
{
    (void)state;
    rig_open_many(&r, 1, 1);
    assert_int_equal(choose(1, 0, 70), ATTN_OK); /* blocks 1 to 3 of 0 to 4 */
    assert_int_equal(second_batch(1)->n_made, 3);
    assert_int_equal(second_batch(0)->n_given, 3);
    const uint32_t n = r.second_backend.n_batches;
    for (uint32_t pos = 70; pos < 80; pos++)
        assert_int_equal(choose(1, pos, 1), ATTN_OK);
    assert_int_equal(r.second_backend.n_batches, n + 10);
    assert_int_equal(choose(1, 80, 1), ATTN_OK); /* block 4 is full */
    assert_int_equal(second_batch(1)->n_made, 1);
    assert_int_equal(second_batch(0)->n_given, 1);
    assert_int_equal(rig_truncate(&r, 1, 40), ATTN_OK);
    assert_int_equal(choose(1, 40, 50), ATTN_OK); /* blocks 2 to 4 are written anew */
    assert_int_equal(second_batch(1)->n_made, 3);
    for (uint32_t layer = 1; layer < RIG_LAYERS; layer++)
        assert_int_equal(rig_item(&r, 1, layer, 0, 50), ATTN_OK);
    assert_int_equal(rig_fork(&r, 1, 2, 45), ATTN_OK);
    assert_int_equal(choose(2, 45, 50), ATTN_OK); /* a copy of block 2, new ones */
    assert_int_equal(second_batch(1)->n_made, 3);
}

static void blocks_of_a_pool_that_was_resized_are_joined_again(void **state)
{
    (void)state;
    rig_open_many(&r, 1, 1);
    assert_int_equal(choose(1, 0, 70), ATTN_OK);
    Attnd__PoolResize b = ATTND__POOL_RESIZE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.name = (char *)"split";
    b.n_blocks = 48;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_RESIZE;
    h.pool_resize = &b;
    const uint64_t id = rig_send(&r, &h, NULL, 0);
    rig_run(&r);
    assert_int_equal(status_of(id), ATTN_OK);
    assert_int_equal(choose(1, 70, 1), ATTN_OK);
    assert_int_equal(second_batch(1)->n_made, 3);
    assert_int_equal(second_batch(0)->n_given, 3);
}

static void a_batch_behind_one_that_is_joined_waits(void **state)
{
    (void)state;
    rig_open_many(&r, 1, 2);
    assert_int_equal(rig_item(&r, 1, 0, 0, 70), ATTN_OK);
    const uint32_t n = r.second_backend.n_batches;
    const uint64_t first = launch_as(true, 1, 70, 1), second = launch_as(true, 2, 0, 100);
    rig_run(&r);
    assert_int_equal(status_of(first), ATTN_OK);
    assert_int_equal(status_of(second), ATTN_OK);
    assert_int_equal(r.second_backend.n_batches, n + 4);
    assert_int_equal(second_batch(3)->n_made, 3);
    assert_int_equal(second_batch(2)->n_given, 3);
    assert_int_equal(second_batch(1)->n_made, 5);
    assert_int_equal(second_batch(0)->n_given, 5);
}

/* How many of the blocks that b made extremes of, or was given, were in one batch at most. */
static uint32_t largest_slice(const struct backend *b)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->n_batches; i++) {
        n = b->batches[i].n_made > n ? b->batches[i].n_made : n;
        n = b->batches[i].n_given > n ? b->batches[i].n_given : n;
    }
    return n;
}

static void tweak_large(struct rig *rig)
{
    tweak(rig);
    rig->backend.kv_bytes = rig->second_backend.kv_bytes = 96 << 20;
    rig->cfg.io_memory_bytes = 96 << 20;
}

/* A block's extremes are 8 KiB of each card's staging, a slice is 32 of them. */
static void many_blocks_are_joined_in_slices_with_other_work_in_between(void **state)
{
    (void)state;
    enum { PIECE = 20, N_TOKENS = 1600, SLICE = 32, N_SLICES = 4 };
    second_in_flight = 1;
    rig_open(&r, tweak_large);
    const uint32_t other = r.pool;
    rig_open_many(&r, 2, 1);
    r.head_dim = 512; /* of elements of 4 bytes */
    r.pool = rig_pool_of_split(&r, "long", 120, ATTND__SPLIT__SPLIT_TOKENS);
    rig_open_many(&r, 1, 1);
    for (uint32_t pos = 0; pos < N_TOKENS; pos += PIECE)
        assert_int_equal(rig_item(&r, 1, 0, pos, PIECE), ATTN_OK);
    for (uint32_t round = 0; round < 8 * N_SLICES; round++) { /* whichever stage fails */
        struct backend *b = round % 2 == 0 ? &r.second_backend : &r.backend;
        b->n_spared = round / 4;
        b->fail_batch = round / 2 % 2 == 0 ? ATTN_EINTERNAL : ATTN_OK;
        b->fail_submit = round / 2 % 2 == 1 ? ATTN_EINTERNAL : ATTN_OK;
        assert_int_equal(choose(1, N_TOKENS, 1), ATTN_EINTERNAL);
        assert_int_equal(b->n_spared, 0);
        assert_int_equal(rig_len(&r, 1, 0), N_TOKENS);
    }
    const uint64_t id = launch_as(true, 1, N_TOKENS, 1);
    const uint32_t n = r.second_backend.n_batches, n_own = r.backend.n_batches;
    r.head_dim = RIG_DIM;
    r.pool = other;
    const uint64_t beside = rig_send_item(&r, 2, 0, 0, 5);
    rig_run(&r);
    assert_int_equal(status_of(id), ATTN_OK);
    assert_int_equal(status_of(beside), ATTN_OK);
    assert_int_equal(largest_slice(&r.second_backend), SLICE);
    assert_int_equal(r.second_backend.n_batches, n + 2 * N_SLICES); /* each is made and given */
    uint32_t n_made = 0, n_given = 0, at = n_own;
    for (uint32_t i = n; i < n + 2 * N_SLICES; i++) {
        n_made += r.second_backend.batches[i].n_made;
        n_given += r.second_backend.batches[i].n_given;
    }
    assert_int_equal(n_made, N_TOKENS / RIG_SPLIT_TOKENS - 1);
    assert_int_equal(n_given, n_made);
    while (at < r.backend.n_batches && r.backend.batches[at].n_items != 1)
        at++;
    assert_true(at + 2 < r.backend.n_batches); /* the other pool's batch, long before the end */
    assert_int_equal(r.backend.items[r.backend.batches[at].first_item].n_tokens, 5);
    rig_close(&r);
}

/* In any stage on either card, while another batch is in flight: nothing is committed, and the next
 * steps are right. */
static void whichever_stage_fails_choices_are_right_afterwards(void **state)
{
    (void)state;
    rig_open_many(&r, 1, 4);
    uint32_t len[5] = {0};
    for (uint32_t round = 0; round < 96; round++) {
        struct backend *b = round / 2 % 2 == 0 ? &r.second_backend : &r.backend;
        uint64_t ids[2], seqs[2];
        uint32_t n[2];
        for (uint32_t i = 0; i < 2; i++) {
            seqs[i] = 1 + (round + i) % 4;
            n[i] = 1 + (round * 7 + i * 11) % 20;
            ids[i] = launch_as(true, seqs[i], len[seqs[i]], n[i]);
        }
        b->n_spared = round / 8 % 4;
        b->fail_batch = round % 4 == 0 ? ATTN_EINTERNAL : ATTN_OK;
        b->fail_submit = round % 4 == 1 ? ATTN_EINTERNAL : ATTN_OK;
        rig_run(&r);
        b->fail_batch = b->fail_submit = ATTN_OK;
        for (uint32_t i = 0; i < 2; i++) {
            const attn_status st = status_of(ids[i]);
            assert_true(st == ATTN_OK || st == ATTN_EINTERNAL);
            len[seqs[i]] += st == ATTN_OK ? n[i] : 0;
            assert_int_equal(rig_len(&r, seqs[i], 0), len[seqs[i]]);
        }
        if (len[seqs[0]] > 120) {
            assert_int_equal(rig_truncate(&r, seqs[0], 20), ATTN_OK);
            len[seqs[0]] = 20;
        }
    }
}

/* In either stage, while a step of another pool waits for it: that one is carried out. */
static void a_batch_that_fails_leaves_other_pools_alone(void **state)
{
    (void)state;
    rig_open_many(&r, 1, 1);
    const uint32_t own = r.pool,
                   other = rig_pool_of_split(&r, "other", 64, ATTND__SPLIT__SPLIT_HEADS);
    r.pool = other;
    rig_open_many(&r, 2, 1);
    for (uint32_t stage = 0; stage < 2; stage++) {
        r.pool = own;
        const uint64_t first = launch_as(true, 1, 0, 70);
        r.pool = other;
        const uint64_t second = launch(2, stage * 20, 20);
        r.second_backend.n_spared = stage;
        r.second_backend.fail_batch = ATTN_ENOMEM;
        rig_run(&r);
        assert_int_equal(status_of(first), ATTN_ENOMEM);
        assert_int_equal(status_of(second), ATTN_OK);
        assert_int_equal(rig_len(&r, 1, 0), 0);
        assert_int_equal(rig_len(&r, 2, 0), stage * 20 + 20);
    }
}

static void lack_choice_there(struct rig *rig)
{
    tweak(rig);
    rig->second_backend.lacks_choice = true;
}

static void cards_that_do_not_choose_alike_refuse_it_by_name(void **state)
{
    (void)state;
    second_in_flight = 1;
    rig_open(&r, lack_choice_there);
    r.pool = rig_pool_of_split(&r, "split", 64, ATTND__SPLIT__SPLIT_TOKENS);
    rig_open_many(&r, 1, 1);
    const uint64_t id = send_choosing(1, 0, 5);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_ENOTSUP, "is split by tokens (pool.split) over cards");
    rig_close(&r);
}

int main(void)
{
#define TOKENS(name)                                                                               \
    {                                                                                              \
#name, run_tokens, NULL, NULL, &(void (*)(void **))                                        \
        {                                                                                          \
            name                                                                                   \
        }                                                                                          \
    }
#define T(name)                                                                                    \
    {                                                                                              \
#name, run, NULL, NULL, &(void (*)(void **))                                               \
        {                                                                                          \
            name                                                                                   \
        }                                                                                          \
    }
    const struct CMUnitTest tests[] = {
        T(a_split_batch_is_computed_on_both_cards),
        T(what_is_behind_a_shard_that_failed_is_not_computed_by_an_old_table),
        T(a_sequence_opened_behind_a_failed_shard_has_its_table_sent),
        T(tables_that_a_failed_shard_was_to_send_are_sent_again),
        T(whichever_shard_fails_tables_agree_afterwards),
        TOKENS(blocks_are_joined_once_and_again_when_they_are_written),
        TOKENS(blocks_of_a_pool_that_was_resized_are_joined_again),
        TOKENS(a_batch_behind_one_that_is_joined_waits),
        TOKENS(whichever_stage_fails_choices_are_right_afterwards),
        TOKENS(a_batch_that_fails_leaves_other_pools_alone),
        cmocka_unit_test(many_blocks_are_joined_in_slices_with_other_work_in_between),
        cmocka_unit_test(cards_that_do_not_choose_alike_refuse_it_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
