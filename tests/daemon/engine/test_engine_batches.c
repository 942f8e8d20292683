/* test_engine_batches.c: what shares a batch, what waits, and what happens when a batch fails, with
 * a backend the test holds, fails and lets finish when it wants. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/daemon/engine/engine_rig.h"

#define BOTH (WIRE_STEP_APPEND | WIRE_STEP_ATTEND)

static struct rig r;

/* --- batching --------------------------------------------------------------------------------- */

static void a_busy_device_collects_what_arrives(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 10);
    r.backend.is_held = true;
    for (uint64_t i = 1; i <= 10; i++) {
        rig_send_item(&r, i, (uint32_t)i % RIG_LAYERS, 0, 1);
        rig_run(&r);
    }
    assert_int_equal(r.backend.n_batches, 2); /* both slots taken, eight steps wait */
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 3);
    assert_int_equal(r.backend.batches[2].n_items, 8); /* of different layers and sequences */
    rig_close(&r);
}

static void a_batch_behind_another_waits_until_that_is_nearly_done(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 30);
    r.backend.item_ns = 20000;
    rig_send_wide(&r, 1, 10, 0);
    rig_run(&r);
    rig_now_ns += 200000;
    rig_run(&r); /* 200 us for 10 tokens, says the device */
    r.backend.is_held = true;
    rig_send_wide(&r, 1, 10, 1);
    rig_run(&r); /* 20 tokens: 400 us, sixty per cent are 240, 120 before the end is 280 */
    rig_send_wide(&r, 11, 10, 0);
    rig_now_ns += 230000;
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 2); /* collected */
    rig_send_wide(&r, 21, 5, 0);
    rig_now_ns += 20000;
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 3); /* queued */
    assert_int_equal(r.backend.batches[2].n_items, 15);
    r.backend.is_held = false;
    rig_now_ns += 10000000;
    rig_run(&r);
    rig_close(&r);
}

/* Workers of `each` sequences send their next step `away_ns` after the answer, which takes the
 * engine `answer_ns`. Gives the share of time that the device worked and the mean batch. */
struct closed_loop {
    uint32_t n_workers, each;
    uint64_t item_ns, away_ns, answer_ns;
};

static void room_for_answers(struct rig *rig)
{
    rig->cfg.io_memory_bytes = 256 << 20;
}

static void run_closed_loop(const struct closed_loop *c, double *out_busy, double *out_items)
{
    enum { MAX_WORKERS = 64, TICK_NS = 500 };
    uint64_t id[MAX_WORKERS] = {0}, back_ns[MAX_WORKERS] = {0}, warm_idle_ns = 0;
    uint32_t warm_batches = 0, warm_items = 0;
    rig_open(&r, room_for_answers);
    rig_open_many(&r, 1, c->n_workers * c->each);
    r.backend.launch_ns = 15000;
    r.backend.batch_ns = 5000;
    r.backend.item_ns = c->item_ns;
    r.backend.last_end_ns = rig_now_ns;
    for (uint32_t w = 0; w < c->n_workers; w++)
        back_ns[w] = rig_now_ns + 1 + w * 3000; /* they don't start together */
    const uint64_t warm_ns = rig_now_ns + 4000000, end_ns = rig_now_ns + 24000000;
    for (; rig_now_ns < end_ns; rig_now_ns += TICK_NS) {
        struct rig_answer *before = r.answers;
        for (uint32_t w = 0; w < c->n_workers; w++) {
            if (back_ns[w] == 0 || back_ns[w] > rig_now_ns)
                continue;
            back_ns[w] = 0;
            id[w] = rig_send_wide(&r, 1 + w * c->each, c->each, 0); /* the same position again */
        }
        engine_turn(r.engine, 0);
        for (uint32_t w = 0; w < c->n_workers && r.answers != before; w++)
            if (back_ns[w] == 0 && rig_reply(&r, id[w]) != NULL) {
                rig_now_ns += c->answer_ns;
                back_ns[w] = rig_now_ns + c->away_ns;
            }
        if (warm_batches == 0 && rig_now_ns > warm_ns) {
            warm_idle_ns = r.backend.idle_ns;
            warm_batches = r.backend.n_batches;
            warm_items = r.backend.n_items;
        }
    }
    *out_busy = 1 - (double)(r.backend.idle_ns - warm_idle_ns) / (double)(end_ns - warm_ns);
    *out_items = (double)(r.backend.n_items - warm_items) / (r.backend.n_batches - warm_batches);
    for (; atomic_load(&r.engine->queue.n_requests) > 0; rig_now_ns += 1000 * 1000)
        engine_turn(r.engine, 0);
    rig_close(&r);
}

static void workers_that_wait_for_answers_keep_the_device_busy(void **state)
{
    (void)state;
    for (uint64_t away_ns = 20 * 1000; away_ns <= 260 * 1000; away_ns += 40 * 1000) {
        const struct closed_loop c = {8, 8, 10000, away_ns, 1000};
        double busy, items;
        run_closed_loop(&c, &busy, &items);
        if (!(busy > 0.98 && items > 15))
            fail_msg("away for %lu us: %.3f of the time, %.1f items a batch",
                     (unsigned long)away_ns / 1000, busy, items);
    }
}

/* To answer 64 takes so long that the device would have nothing to do if all were in one batch. */
static void workers_who_are_answered_together_do_not_stay_together(void **state)
{
    (void)state;
    for (uint64_t away_ns = 5 * 1000; away_ns <= 65 * 1000; away_ns += 15 * 1000) {
        const struct closed_loop c = {64, 1, 4000, away_ns, 2500};
        double busy, items;
        run_closed_loop(&c, &busy, &items);
        if (!(busy > 0.98 && items > 20))
            fail_msg("away for %lu us: %.3f of the time, %.1f items a batch",
                     (unsigned long)away_ns / 1000, busy, items);
    }
}

static void items_of_one_sequence_and_layer_go_one_after_another(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 2);
    r.backend.is_held = true;
    uint64_t id[6];
    for (uint32_t i = 0; i < 5; i++)
        id[i] = rig_send_item(&r, 1, 0, i, 1);
    id[5] = rig_send_item(&r, 1, 1, 0, 1); /* behind the others: order of arrival */
    rig_run(&r);
    assert_int_equal(r.backend.n_items, 1);
    r.backend.is_held = false;
    rig_run(&r);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(rig_answer(&r, id[i])->status, ATTN_OK);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(r.backend.items[i].pos, i);
    assert_int_equal(rig_len(&r, 1, 0), 5);
    assert_int_equal(rig_len(&r, 1, 1), 1);
    rig_close(&r);
}

static void layers_of_one_sequence_share_a_batch(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 1);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        rig_send_item(&r, 1, l, 0, 9);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 1);
    assert_int_equal(r.backend.batches[0].n_items, RIG_LAYERS);
    assert_int_equal(r.backend.batches[0].n_patches, 2); /* two blocks, for all layers at once */
    rig_close(&r);
}

static void batches_of_fifty(struct rig *rig)
{
    rig->cfg.max_batch_items = 50;
}

static void a_step_stays_whole_if_a_batch_can_hold_it(void **state)
{
    (void)state;
    rig_open(&r, batches_of_fifty);
    rig_open_many(&r, 1, 60);
    rig_send_wide(&r, 1, 20, 0);
    rig_send_wide(&r, 21, 20, 0);
    rig_send_wide(&r, 41, 20, 0);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 2);
    assert_int_equal(r.backend.batches[0].n_items, 40);
    assert_int_equal(r.backend.batches[1].n_items, 20);
    rig_close(&r);
}

static void small_batches(struct rig *rig)
{
    rig->cfg.max_batch_items = 4;
}

static void a_step_larger_than_a_batch_is_split_and_answered_once(void **state)
{
    (void)state;
    rig_open(&r, small_batches);
    rig_open_many(&r, 1, 10);
    uint64_t id = rig_send_wide(&r, 1, 10, 0);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 3);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    const float *out = (const float *)(void *)rig_wire_reply(&r, id)->payload;
    for (uint32_t i = 0; i < 10 * RIG_Q_HEADS * RIG_DIM; i++)
        assert_true(out[i] == 1.0f);
    rig_close(&r);
}

static void an_item_that_waits_holds_only_its_own_step(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 3);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    uint64_t b = rig_send_wide(&r, 1, 2, 1); /* sequence 1 waits; sequence 2 has a gap and fails */
    uint64_t c = rig_send_item(&r, 3, 0, 0, 1);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, 2);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, a)->status, ATTN_OK);
    rig_assert_says(rig_answer(&r, b), ATTN_EINVAL,
                    "item 1 (sequence 2): pos is 1, layer 0 has 0 tokens");
    assert_int_equal(rig_answer(&r, b)->step->item_status[0], ATTN_OK);
    assert_int_equal(rig_answer(&r, c)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 2);
    rig_close(&r);
}

/* --- control requests and work in flight ------------------------------------------------------ */

static void control_waits_for_work_and_work_for_control(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 1);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 5);
    uint64_t b = rig_send_truncate(&r, 1, 3);
    uint64_t stale = rig_send_item(&r, 1, 0, 3, 4);
    r.epoch = 2; /* as the truncation will make it */
    uint64_t c = rig_send_item(&r, 1, 0, 3, 4);
    r.epoch = 0;
    rig_run(&r);
    assert_null(rig_reply(&r, b));
    assert_int_equal(r.backend.n_items, 1);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, a)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, b)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, stale)->status, ATTN_ESTALE);
    assert_int_equal(rig_answer(&r, c)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 7);
    rig_close(&r);
}

static void a_closed_name_may_be_opened_again_at_once(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 1);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 5);
    rig_run(&r);
    uint64_t b = rig_send_close(&r, 1), c = rig_send_item(&r, 1, 0, 5, 1), d = rig_send_open(&r, 1);
    r.epoch = 2; /* of the second life */
    uint64_t f = rig_send_item(&r, 1, 0, 0, 2), g = rig_send_close(&r, 1),
             h = rig_send_close(&r, 1);
    r.epoch = 0;
    uint64_t i = rig_send_open(&r, 1);
    rig_run(&r);
    assert_null(rig_reply(&r, b));
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, a)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, b)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, c)->status, ATTN_ENOTFOUND);
    assert_int_equal(rig_answer(&r, d)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, f)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, g)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, h)->status, ATTN_ENOTFOUND);
    assert_int_equal(rig_answer(&r, i)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 0);
    rig_close(&r);
}

static void a_repeated_open_is_the_same_sequence(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t a = rig_send_open(&r, 1);
    r.next_id = a;
    rig_send_open(&r, 1); /* the same request id: a repeated message */
    rig_run(&r);
    for (struct rig_answer *x = r.answers; x != NULL; x = x->next)
        assert_int_equal(x->reply.header->status, ATTN_OK);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_EEXIST);
    rig_close(&r);
}

static void a_write_into_a_shared_block_runs_alone(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 1);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, 0, 12), ATTN_OK);
    assert_int_equal(rig_fork(&r, 1, 2, 12), ATTN_OK);
    r.backend.is_held = true;
    uint32_t first = r.backend.n_batches;
    uint64_t id[RIG_LAYERS];
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        id[l] = rig_send_item(&r, 2, l, 12, 1);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, first + 1);
    assert_int_equal(r.backend.batches[first].n_items, 1);
    assert_int_equal(r.backend.batches[first].n_copies, 1);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(r.backend.n_batches,
                     first + 2); /* the other layers together, without copies */
    assert_int_equal(r.backend.batches[first + 1].n_items, RIG_LAYERS - 1);
    assert_int_equal(r.backend.batches[first + 1].n_copies, 0);
    for (uint32_t l = 0; l < RIG_LAYERS; l++) {
        assert_int_equal(rig_answer(&r, id[l])->status, ATTN_OK);
        assert_int_equal(rig_len(&r, 2, l), 13);
        assert_int_equal(rig_len(&r, 1, l), 12);
    }
    rig_close(&r);
}

static void a_copy_waits_for_readers_of_the_table(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 1);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, 0, 12), ATTN_OK);
    assert_int_equal(rig_fork(&r, 1, 2, 12), ATTN_OK);
    r.backend.is_held = true;
    uint64_t seq = 2;
    uint32_t pos = 11, n = 1, first = r.backend.n_batches;
    struct rig_step s = {.layer = 3,
                         .flags = WIRE_STEP_ATTEND,
                         .n_items = 1,
                         .seq = &seq,
                         .pos = &pos,
                         .n_tokens = &n};
    uint64_t a = rig_send_step(&r, &s);
    rig_run(&r);
    uint64_t b = rig_send_item(&r, 2, 0, 12, 1);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, first + 1);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, a)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, b)->status, ATTN_OK);
    assert_int_equal(r.backend.batches[first + 1].n_copies, 1);
    rig_close(&r);
}

/* --- failures --------------------------------------------------------------------------------- */

static void a_failed_batch_fails_its_items_only(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 3);
    assert_int_equal(rig_item(&r, 1, 0, 0, 12), ATTN_OK);
    assert_int_equal(rig_fork(&r, 1, 9, 0), ATTN_OK);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 12, 30);
    rig_run(&r);
    uint64_t b = rig_send_item(&r, 2, 0, 0, 3);
    rig_run(&r);
    uint64_t c =
        rig_send_item(&r, 1, 0, 12, 1); /* waits for a, and is right whether a fails or not */
    r.backend.fail_batch = ATTN_EINTERNAL;
    r.backend.is_held = false;
    rig_run(&r);
    rig_assert_says(rig_answer(&r, a), ATTN_EINTERNAL, "item 0 (sequence 1): the fake backend");
    assert_int_equal(rig_answer(&r, b)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, c)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 13);
    assert_int_equal(rig_len(&r, 2, 0), 3);
    rig_close(&r);
}

static void a_failed_copy_is_undone(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 1);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, 0, 12), ATTN_OK);
    assert_int_equal(rig_fork(&r, 1, 2, 12), ATTN_OK);
    kv_seq_id one, two;
    struct kv_seq_info x, y;
    assert_int_equal(kv_seq_find(r.kv, TENANT_OPERATOR, 1, &one), ATTN_OK);
    assert_int_equal(kv_seq_find(r.kv, TENANT_OPERATOR, 2, &two), ATTN_OK);
    for (int i = 0; i < 2; i++) {
        if (i == 0)
            r.backend.fail_submit = ATTN_EINTERNAL;
        else
            r.backend.fail_batch = ATTN_EINTERNAL;
        assert_int_equal(rig_item(&r, 2, 0, 12, 1), ATTN_EINTERNAL);
        kv_seq_info(r.kv, one, &x);
        kv_seq_info(r.kv, two, &y);
        assert_int_equal(x.block_table[1], y.block_table[1]);
        assert_int_equal(y.layer_len[0], 12);
        assert_int_equal(kv_check(r.kv), ATTN_OK);
        assert_int_equal(r.engine->pools[0].fx.n_copies, 0);
    }
    assert_int_equal(rig_item(&r, 2, 0, 12, 1), ATTN_OK);
    rig_close(&r);
}

static void a_lost_device_is_reported_to_everyone(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 4);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    uint64_t b = rig_send_item(&r, 2, 0, 0, 1);
    rig_run(&r);
    uint64_t c = rig_send_item(&r, 3, 0, 0, 1), d = rig_send_item(&r, 1, 0, 1, 1);
    rig_run(&r);
    assert_int_equal(engine_health(r.engine), ATTN_OK);
    r.backend.fail_batch = ATTN_EDEVICE;
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(engine_health(r.engine), ATTN_EDEVICE);
    assert_int_equal(rig_answer(&r, a)->status, ATTN_EDEVICE);
    assert_int_equal(rig_answer(&r, b)->status, ATTN_OK); /* the backend said so */
    assert_int_equal(rig_answer(&r, c)->status, ATTN_EDEVICE);
    assert_int_equal(rig_answer(&r, d)->status, ATTN_EDEVICE);
    assert_int_equal(rig_item(&r, 4, 0, 0, 1), ATTN_EDEVICE);
    rig_close(&r);
}

static void out_of_blocks_fails_that_item_alone(void **state)
{
    (void)state;
    rig_open(&r, NULL); /* 64 blocks of 8 tokens */
    rig_open_many(&r, 1, 5);
    for (uint64_t i = 1; i <= 4; i++)
        assert_int_equal(rig_item(&r, i, 0, 0, 120), ATTN_OK); /* 15 blocks each */
    uint64_t seq[] = {5, 1};
    uint32_t pos[] = {0, 119}, n[] = {40, 1};
    struct rig_step s = {.flags = BOTH, .n_items = 2, .seq = seq, .pos = pos, .n_tokens = n};
    uint64_t id = rig_send_step(&r, &s);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_ENOBLOCKS, "needs 5 blocks");
    assert_int_equal(rig_answer(&r, id)->step->item_status[1], ATTN_OK);
    assert_int_equal(rig_len(&r, 5, 0), 0);
    assert_int_equal(rig_close_seq(&r, 1, 1), ATTN_OK);
    assert_int_equal(rig_item(&r, 5, 0, 0, 40), ATTN_OK);
    rig_close(&r);
}

static void no_room_for_replies_is_an_overload(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 1);
    struct iobuf *all[4096];
    uint32_t n = 0;
    uint64_t id = rig_send_item(&r, 1, 0, 0, 100);
    while (n < 4096 && (all[n] = iobuf_acquire(r.bufs, NULL, 4096)) != NULL)
        n++;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_EOVERLOAD);
    assert_true(rig_answer(&r, id)->retry_after_us > 0);
    assert_int_equal(rig_len(&r, 1, 0), 0);
    while (n > 0)
        iobuf_release(all[--n]);
    assert_int_equal(rig_item(&r, 1, 0, 0, 100), ATTN_OK);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_busy_device_collects_what_arrives),
        cmocka_unit_test(a_batch_behind_another_waits_until_that_is_nearly_done),
        cmocka_unit_test(workers_that_wait_for_answers_keep_the_device_busy),
        cmocka_unit_test(workers_who_are_answered_together_do_not_stay_together),
        cmocka_unit_test(items_of_one_sequence_and_layer_go_one_after_another),
        cmocka_unit_test(layers_of_one_sequence_share_a_batch),
        cmocka_unit_test(a_step_stays_whole_if_a_batch_can_hold_it),
        cmocka_unit_test(a_step_larger_than_a_batch_is_split_and_answered_once),
        cmocka_unit_test(an_item_that_waits_holds_only_its_own_step),
        cmocka_unit_test(control_waits_for_work_and_work_for_control),
        cmocka_unit_test(a_closed_name_may_be_opened_again_at_once),
        cmocka_unit_test(a_repeated_open_is_the_same_sequence),
        cmocka_unit_test(a_write_into_a_shared_block_runs_alone),
        cmocka_unit_test(a_copy_waits_for_readers_of_the_table),
        cmocka_unit_test(a_failed_batch_fails_its_items_only),
        cmocka_unit_test(a_failed_copy_is_undone),
        cmocka_unit_test(a_lost_device_is_reported_to_everyone),
        cmocka_unit_test(out_of_blocks_fails_that_item_alone),
        cmocka_unit_test(no_room_for_replies_is_an_overload),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
