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

/* A test between opening and closing: what the rig keeps would count as the test's leak. */
static void run(void **state)
{
    void (*const *test)(void **) = *state;
    for (second_in_flight = 1; second_in_flight <= 2; second_in_flight++) {
        rig_open(&r, tweak);
        r.pool = rig_pool_of_split(&r, "split", 64, ATTND__SPLIT__SPLIT_HEADS);
        (*test)(NULL);
        rig_close(&r);
    }
}

static attn_status status_of(uint64_t id)
{
    return (attn_status)rig_answer(&r, id)->status;
}

/* A batch of its own, whose part is on its way to the second card. */
static uint64_t launch(uint64_t seq, uint32_t pos, uint32_t n)
{
    uint32_t n_in_flight = r.engine->n_in_flight;
    uint64_t id = rig_send_item(&r, seq, 0, pos, n);
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

int main(void)
{
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
