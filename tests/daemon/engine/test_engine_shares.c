/* test_engine_shares.c: device time between tenants, on the rig's device, whose batches take as
 * long as their items: who floods the engine gets his share of it, and nobody waits for him. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "tests/daemon/engine/engine_rig.h"
#include "tests/random.h"

enum { N = 3, SEQS = 12, ITEM_NS = 1000, DEEP = SEQS * RIG_LAYERS };

static struct rig r;
static uint32_t seed, max_in_flight = 2, max_items = 8;
static const uint32_t *shares_of_all;

/* A tenant's worker: it keeps up to `depth` steps under way. */
static struct worker {
    uint32_t uid, depth;
    uint64_t session;
    uint32_t pool, n_ids, next;
    uint64_t ids[DEEP];
    uint64_t n_ok, n_failed;
} workers[N];

static void tweak(struct rig *rig)
{
    rig_tenants(rig, N, shares_of_all);
    rig->cfg.max_batch_items = max_items;
    rig->backend.batch_ns = rig->backend.item_ns = ITEM_NS;
    rig->backend.max_in_flight = max_in_flight;
    rig->epoch = 1;
}

static void become(const struct worker *w)
{
    r.principal.uid = w->uid;
    r.session = w->session;
    r.pool = w->pool;
}

static void begin(const uint32_t shares[N], const uint32_t depths[N])
{
    for (uint32_t i = 0; i < N; i++)
        workers[i] = (struct worker){.uid = RIG_UID + i, .depth = depths[i]};
    shares_of_all = shares;
    rig_open(&r, tweak);
    for (uint32_t i = 0; i < N; i++) {
        struct worker *w = &workers[i];
        char name[16];
        r.principal.uid = w->uid;
        w->session = r.session = rig_hello(&r, "worker");
        snprintf(name, sizeof name, "pool %u", i);
        w->pool = r.pool = rig_pool(&r, name, 48);
        rig_open_many(&r, 1, SEQS);
    }
}

/* The clock of the rig goes on only while the engine waits. */
static void drain(void)
{
    while (!engine_is_idle(r.engine))
        engine_turn(r.engine, 1000);
}

static void end(void)
{
    struct tenants *t = r.fixture.tenants;
    for (int i = 0; i < N; i++)
        workers[i].depth = 0;
    drain();
    rig_close(&r);
    tenants_close(t);
}

static uint64_t device_ns(uint32_t i)
{
    return atomic_load(&stats.tenants[i].used[STATS_TENANT_DEVICE]);
}

/* Takes what was answered, and sends as much. */
static void work(struct worker *w)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n_ids; i++) {
        const Attnd__Reply *reply = rig_reply(&r, w->ids[i]);
        if (reply == NULL)
            w->ids[n++] = w->ids[i];
        else if (reply->status == ATTN_OK)
            w->n_ok++;
        else
            w->n_failed++;
    }
    w->n_ids = n;
    become(w);
    while (w->n_ids < w->depth) {
        uint32_t k = w->next++ % DEEP;
        w->ids[w->n_ids++] = rig_send_item(&r, 1 + k % SEQS, k / SEQS, 0, 1);
    }
}

/* The rig keeps all answers and looks them up one by one; those that were taken are not needed. */
static void forget_answers(void)
{
    while (r.answers != NULL) {
        struct rig_answer *a = r.answers;
        r.answers = a->next;
        wire_arena_reset(&a->arena);
        request_free(a->req);
        test_free(a);
    }
}

static void run_for(uint64_t ns)
{
    uint64_t end_ns = rig_now_ns + ns;
    while (rig_now_ns < end_ns) {
        for (int i = 0; i < N; i++)
            work(&workers[i]);
        forget_answers();
        engine_turn(r.engine, 1000);
    }
}

static void assert_near(double value, double expected, double part)
{
    if (value < expected * (1 - part) || value > expected * (1 + part))
        fail_msg("%.3f is not %.3f", value, expected);
}

/* ---- tests ---- */

static void two_floods_share_the_device_by_their_shares(void **state)
{
    (void)state;
    begin((uint32_t[N]){1, 3, 1}, (uint32_t[N]){DEEP, DEEP, 0});
    run_for(20 * 1000 * 1000);
    assert_near((double)device_ns(1) / (double)device_ns(0), 3, 0.03);
    assert_near((double)workers[1].n_ok / (double)workers[0].n_ok, 3, 0.05);
    assert_int_equal(workers[0].n_failed + workers[1].n_failed, 0);
    /* and what one leaves is the other's */
    workers[1].depth = 0;
    run_for(1000 * 1000);
    uint64_t before_ns = device_ns(0), from_ns = rig_now_ns;
    run_for(5 * 1000 * 1000);
    assert_near((double)(device_ns(0) - before_ns), (double)(rig_now_ns - from_ns), 0.03);
    /* who was away has saved nothing */
    workers[1].depth = DEEP;
    uint64_t other_ns = device_ns(1);
    before_ns = device_ns(0);
    run_for(5 * 1000 * 1000);
    assert_near((double)(device_ns(1) - other_ns) / (double)(device_ns(0) - before_ns), 3, 0.05);
    end();
}

/* However few steps a tenant has under way, as long as there are two: one batch never takes all of
 * them. */
static void shares_hold_with_few_workers(void **state)
{
    (void)state;
    static const uint32_t depths[] = {2, 3, 5, 8, 13};
    max_items = 64;
    for (max_in_flight = 1; max_in_flight <= 2; max_in_flight++)
        for (size_t i = 0; i < sizeof depths / sizeof depths[0]; i++) {
            begin((uint32_t[N]){1, 3, 1}, (uint32_t[N]){depths[i], depths[i], 0});
            run_for(2 * 1000 * 1000);
            assert_near((double)device_ns(1) / (double)device_ns(0), 3, 0.05);
            end();
        }
    max_in_flight = 2;
    max_items = 8;
}

/* One step at a time, with a share that it does not use up: it never waits for the queue of him who
 * floods, only for what is on the device. */
static void who_sends_little_does_not_wait_behind_a_flood(void **state)
{
    (void)state;
    begin((uint32_t[N]){1, 1, 1}, (uint32_t[N]){DEEP, 0, 0});
    run_for(1000 * 1000);
    uint64_t longest_ns = 0;
    for (int i = 0; i < 200; i++) {
        become(&workers[1]);
        uint64_t sent_ns = rig_now_ns;
        uint64_t id = rig_send_item(&r, 1, 0, 0, 1);
        while (rig_reply(&r, id) == NULL) {
            engine_turn(r.engine, 1000);
            work(&workers[0]);
        }
        assert_int_equal(rig_reply(&r, id)->status, ATTN_OK);
        longest_ns = rig_now_ns - sent_ns > longest_ns ? rig_now_ns - sent_ns : longest_ns;
        forget_answers();
        workers[0].n_ids = 0; /* what was answered went with the answers */
        run_for(20 * 1000);
    }
    /* two batches in flight, its own, and the looks of the engine in between */
    assert_true(longest_ns <= 3 * 9 * ITEM_NS + 8 * 1000);
    end();
}

/* Most items of a batch in this time. */
static uint32_t largest_batch(uint64_t ns)
{
    uint32_t most = 0;
    r.backend.n_batches = r.backend.n_items = 0;
    run_for(ns);
    for (uint32_t i = 0; i < r.backend.n_batches; i++)
        most = r.backend.batches[i].n_items > most ? r.backend.batches[i].n_items : most;
    return most;
}

/* Batches are long only while nobody else sends steps. */
static void who_sends_little_waits_for_short_batches(void **state)
{
    (void)state;
    enum { LONG_ITEM_NS = 100 * 1000 };
    max_in_flight = 1;
    max_items = 64;
    begin((uint32_t[N]){1, 1, 1}, (uint32_t[N]){DEEP, 0, 0});
    r.backend.item_ns = LONG_ITEM_NS;
    run_for(50 * 1000 * 1000);
    assert_true(largest_batch(50 * 1000 * 1000) >= 40);
    for (int i = 0; i < 10; i++) {
        become(&workers[1]);
        uint64_t id = rig_send_item(&r, 1, 0, 0, 1);
        while (rig_reply(&r, id) == NULL) {
            engine_turn(r.engine, 1000);
            work(&workers[0]);
        }
        assert_int_equal(rig_reply(&r, id)->status, ATTN_OK);
        forget_answers();
        workers[0].n_ids = 0; /* what was answered went with the answers */
        run_for(10 * 1000 * 1000); /* a long one is on its way */
        assert_in_range(largest_batch(20 * 1000 * 1000), 5, 15);
    }
    run_for(1100 * 1000 * 1000);
    assert_true(largest_batch(50 * 1000 * 1000) >= 40);
    end();
    max_in_flight = 2;
    max_items = 8;
}

static void no_deadline_is_refused_for_the_queue_of_another(void **state)
{
    (void)state;
    begin((uint32_t[N]){1, 1, 1}, (uint32_t[N]){DEEP, 0, 0});
    run_for(1000 * 1000);
    r.backend.is_held = true;
    for (int i = 0; i < 4; i++) {
        workers[0].n_ids = 0;
        work(&workers[0]); /* nearly two hundred requests, more than 100 us of them */
    }
    engine_turn(r.engine, 0);
    uint64_t seq = 1;
    uint32_t pos = 0, n = 1, epoch = 1;
    struct rig_step s = {.flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND,
                         .n_items = 1,
                         .seq = &seq,
                         .pos = &pos,
                         .n_tokens = &n,
                         .epoch = &epoch,
                         .timeout_us = 100};
    become(&workers[0]);
    uint64_t own = rig_send_step(&r, &s);
    become(&workers[1]);
    uint64_t other = rig_send_step(&r, &s);
    engine_turn(r.engine, 0);
    assert_non_null(rig_reply(&r, own));
    rig_assert_says(rig_reply(&r, own), ATTN_EOVERLOAD, "requests are ahead");
    assert_null(rig_reply(&r, other));
    r.backend.is_held = false;
    drain();
    end();
}

/* The device is not paid for by a batch that it has refused. */
static void what_the_device_refuses_is_given_back(void **state)
{
    (void)state;
    begin((uint32_t[N]){1, 1, 1}, (uint32_t[N]){8, 0, 0});
    run_for(1000 * 1000);
    workers[0].depth = 0;
    drain();
    struct tenant *who = session_at(r.sessions, 1)->tenant;
    for (uint32_t i = 0; who == NULL || strcmp(who->name, "t0") != 0; i++)
        who = session_at(r.sessions, i)->tenant;
    uint64_t was_end = who->flow.end, was_ns = device_ns(0), clock = r.engine->flow_clock;
    for (int i = 0; i < 50; i++) {
        r.backend.fail_submit = ATTN_ENOMEM;
        become(&workers[0]);
        uint64_t id = rig_send_item(&r, 1, 0, 0, 1);
        drain();
        assert_int_equal(rig_answer(&r, id)->status, ATTN_ENOMEM);
    }
    assert_int_equal(device_ns(0), was_ns);
    assert_in_range(who->flow.end, clock < was_end ? clock : was_end, was_end);
    assert_int_equal(who->n_steps, 0);
    assert_int_equal(who->used[TENANT_BYTES], 0);
    end();
}

/* Whatever shares, loads and failures: all get what is theirs, and all that was taken comes
 * back. */
static void random_loads_starve_nobody(void **state)
{
    (void)state;
    for (seed = 1; seed <= 12; seed++) {
        uint64_t x = seed;
        max_in_flight = 1 + seed % 2;
        uint32_t shares[N], depths[N], sum = 0;
        for (int i = 0; i < N; i++) {
            shares[i] = 1 + random_below(&x, 9);
            depths[i] = DEEP;
            sum += shares[i];
        }
        begin(shares, depths);
        r.backend.launch_ns = random_below(&x, 3000);
        for (int k = 0; k < 40; k++) {
            run_for(200 * 1000);
            if (random_below(&x, 3) == 0)
                r.backend.fail_batch = ATTN_EINTERNAL;
            if (random_below(&x, 3) == 0)
                r.backend.fail_submit = ATTN_EINTERNAL;
        }
        double all = 0;
        for (uint32_t i = 0; i < N; i++)
            all += (double)device_ns(i);
        for (uint32_t i = 0; i < N; i++)
            assert_near((double)device_ns(i) / all, (double)shares[i] / sum, 0.06);
        for (int i = 0; i < N; i++)
            workers[i].depth = 0;
        drain();
        for (uint32_t i = 0; i < N; i++) {
            assert_int_equal(atomic_load(&stats.tenants[i].used[TENANT_BYTES]), 0);
            assert_int_equal(atomic_load(&stats.tenants[i].used[TENANT_POOLS]), 1);
        }
        end();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_floods_share_the_device_by_their_shares),
        cmocka_unit_test(shares_hold_with_few_workers),
        cmocka_unit_test(who_sends_little_does_not_wait_behind_a_flood),
        cmocka_unit_test(who_sends_little_waits_for_short_batches),
        cmocka_unit_test(no_deadline_is_refused_for_the_queue_of_another),
        cmocka_unit_test(what_the_device_refuses_is_given_back),
        cmocka_unit_test(random_loads_starve_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
