/* test_engine_turns.c: requests other than steps, on a clock of which they take as much as the test
 * says: who floods the engine with them holds nobody up, and order and answers stay. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "daemon/base/stats.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/core/turns.h"
#include "tests/daemon/engine/engine_rig.h"
#include "tests/random.h"

enum { GOOD, BAD, N, BLOCKS = 16, FLOOD = 60, T = RIG_BLOCK_TOKENS };
static const uint64_t LOOK_NS = 30 * 1000, BLOCK_NS = 70 * 1000;

static struct rig r;
static uint32_t shares[N];
static uint64_t sessions[N];
static uint32_t pools[N];

static void tweak(struct rig *rig)
{
    rig_tenants(rig, N, shares);
    rig->cfg.max_queue_bytes = 64 << 20;
    rig->cfg.io_memory_bytes = 64 << 20;
    rig->cfg.default_timeout_us = 10000000;
    rig->cfg.max_pools = 16;
    rig->cfg.lease_us = 1000000;
}

static void become(int who)
{
    r.principal.uid = RIG_UID + (uint32_t)who;
    r.session = sessions[who];
    r.pool = pools[who];
}

/* Tenants with a pool each, and in it sequence 1 of BLOCKS blocks. */
static void begin(uint32_t good, uint32_t bad)
{
    shares[GOOD] = good;
    shares[BAD] = bad;
    rig_open(&r, tweak);
    for (int i = 0; i < N; i++) {
        r.principal.uid = RIG_UID + (uint32_t)i;
        sessions[i] = r.session = rig_hello(&r, "worker");
        pools[i] = r.pool = rig_pool(&r, i == GOOD ? "good" : "bad", 64);
        assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
        assert_int_equal(rig_item(&r, 1, 0, 0, BLOCKS * T), ATTN_OK);
    }
}

static void end(void)
{
    struct tenants *t = r.fixture.tenants;
    rig_look_ns = r.backend.block_ns = 0;
    r.backend.is_clearing = false;
    for (rig_run(&r); !engine_is_idle(r.engine); rig_run(&r))
        rig_now_ns += 1000000; /* memory is asked for now and then */
    rig_close(&r);
    tenants_close(t);
}

static uint64_t send_export(uint64_t seq, uint32_t n_blocks)
{
    Attnd__Export x = ATTND__EXPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    x.seq = seq;
    x.n_blocks = n_blocks;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_EXPORT;
    h.export = &x;
    return rig_send(&r, &h, NULL, 0);
}

static uint64_t send_describe(void)
{
    Attnd__PoolDescribe x = ATTND__POOL_DESCRIBE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    x.name = r.pool == pools[GOOD] ? "good" : "bad";
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_DESCRIBE;
    h.pool_describe = &x;
    return rig_send(&r, &h, NULL, 0);
}

static uint64_t send_create(const char *name, uint64_t timeout_us)
{
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate x = ATTND__POOL_CREATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    spec.name = (char *)(uintptr_t)name;
    spec.num_layers = 1;
    spec.num_q_heads = spec.num_kv_heads = 1;
    spec.head_dim_k = RIG_DIM;
    spec.block_tokens = T;
    spec.n_blocks = 4;
    spec.q_dtype = ATTND__DTYPE__F32;
    x.spec = &spec;
    h.session = r.session;
    h.timeout_us = timeout_us;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &x;
    return rig_send(&r, &h, NULL, 0);
}

static uint64_t send_resize(uint32_t n_blocks)
{
    Attnd__PoolResize x = ATTND__POOL_RESIZE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    x.name = r.pool == pools[GOOD] ? "good" : "bad";
    x.n_blocks = n_blocks;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_RESIZE;
    h.pool_resize = &x;
    return rig_send(&r, &h, NULL, 0);
}

static uint64_t send_empty(Attnd__Request__BodyCase body)
{
    Attnd__Hello hello = ATTND__HELLO__INIT;
    Attnd__Stats stats_of = ATTND__STATS__INIT;
    Attnd__Inspect inspect = ATTND__INSPECT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = body == ATTND__REQUEST__BODY_HELLO ? 0 : r.session;
    h.body_case = body;
    if (body == ATTND__REQUEST__BODY_HELLO) {
        hello.protocol_version = 1;
        hello.resume_session = r.session;
        h.hello = &hello;
    } else if (body == ATTND__REQUEST__BODY_STATS) {
        h.stats = &stats_of;
    } else {
        inspect.topic = "requests";
        h.inspect = &inspect;
    }
    return rig_send(&r, &h, NULL, 0);
}

/* ---- one turn ---- */

static uint32_t n_answered(const uint64_t *ids, uint32_t n)
{
    uint32_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += rig_reply(&r, ids[i]) != NULL;
    return sum;
}

/* Sends a step of GOOD's and turns the engine until it is answered: returns how many of ids were
 * answered, and how many blocks read, meanwhile. */
static uint32_t answered_beside_a_step(const uint64_t *ids, uint32_t n, uint32_t *out_read)
{
    uint32_t before = n_answered(ids, n), read_before = r.backend.n_read_now;
    become(GOOD);
    uint64_t step = rig_send_item(&r, 1, 0, 0, 1);
    for (int i = 0; i < 100 && rig_reply(&r, step) == NULL; i++)
        engine_turn(r.engine, 0);
    assert_int_equal(rig_answer(&r, step)->status, ATTN_OK);
    *out_read = r.backend.n_read_now - read_before;
    return n_answered(ids, n) - before;
}

static void a_step_waits_for_a_few_blocks_of_a_flood_of_exports(void **state)
{
    (void)state;
    uint64_t ids[FLOOD], x = 7;
    uint32_t n_read, most = (uint32_t)(TURN_NS / BLOCK_NS) + 1;
    begin(1, 1);
    r.backend.block_ns = BLOCK_NS;
    become(BAD);
    for (int i = 0; i < FLOOD; i++)
        ids[i] = send_export(1, BLOCKS);
    for (int i = 0; i < 50; i++) {
        /* the step comes at any time between two turns, and while one turn's requests are taken */
        for (uint64_t k = random_below(&x, 3); k > 0; k--)
            engine_turn(r.engine, 0);
        answered_beside_a_step(ids, FLOOD, &n_read);
        assert_true(n_read <= most);
    }
    rig_run(&r);
    for (int i = 0; i < FLOOD; i++) {
        const struct wire_reply *reply = rig_wire_reply(&r, ids[i]);
        assert_int_equal(reply->header->status, ATTN_OK);
        assert_int_equal(reply->header->export->n_sums, 2 * BLOCKS);
        assert_int_equal(reply->payload_bytes, BLOCKS * reply->header->export->block_bytes);
    }
    assert_int_equal(r.backend.n_read_now, FLOOD * BLOCKS);
    end();
}

/* Kinds of requests that a tenant may send without end. */
static uint64_t send_kind(uint32_t kind, uint32_t i)
{
    switch (kind) {
    case 0:
        return send_empty(ATTND__REQUEST__BODY_HELLO);
    case 1:
        return send_empty(ATTND__REQUEST__BODY_STATS);
    case 2:
        return send_empty(ATTND__REQUEST__BODY_INSPECT); /* refused, but not for nothing */
    case 3:
        return send_describe();
    case 4:
        return send_resize(64 + i % 2);
    case 5:
        return send_create("new", 0);
    case 6:
        return rig_send_open(&r, 100 + i);
    case 7:
        return rig_send_close(&r, 100 + i); /* of none */
    case 8:
        return send_export(1, 0);
    case 9:
        return rig_send_adopt(&r, 1);
    case 10:
        return rig_send_truncate(&r, 1, BLOCKS * T);
    default:
        return rig_send_fork(&r, 1, 1000 + i);
    }
}
enum { KINDS = 12 };

static void a_step_waits_for_one_turn_of_a_flood_of_any_kind(void **state)
{
    (void)state;
    /* each request takes two looks at the clock at least */
    uint32_t most = (uint32_t)(TURN_NS / LOOK_NS) + 1, n_read;
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        uint64_t ids[FLOOD];
        begin(1, 1);
        rig_look_ns = LOOK_NS;
        become(BAD);
        for (uint32_t i = 0; i < FLOOD; i++)
            ids[i] = send_kind(kind, i);
        for (int i = 0; i < 5; i++) {
            uint32_t n = answered_beside_a_step(ids, FLOOD, &n_read);
            if (n > most)
                fail_msg("kind %u: %u requests were served before a step", kind, n);
        }
        assert_true(n_answered(ids, FLOOD) < FLOOD);
        rig_run(&r);
        assert_int_equal(n_answered(ids, FLOOD), FLOOD);
        end();
    }
}

static void two_floods_share_the_engine_by_their_shares(void **state)
{
    (void)state;
    enum { EACH = 100 };
    uint64_t ids[N][EACH];
    begin(3, 1);
    r.backend.block_ns = BLOCK_NS;
    for (int who = 0; who < N; who++) {
        become(who);
        for (int i = 0; i < EACH; i++)
            ids[who][i] = send_export(1, BLOCKS);
    }
    while (n_answered(ids[GOOD], EACH) < EACH - 10)
        engine_turn(r.engine, 0);
    assert_in_range(n_answered(ids[BAD], EACH), (EACH - 10) / 3 - 2, (EACH - 10) / 3 + 2);
    end();
}

/* ---- order ---- */

static uint64_t to_close(uint64_t seq, uint32_t epoch)
{
    r.epoch = epoch;
    uint64_t id = rig_send_close(&r, seq);
    r.epoch = 0;
    return id;
}

/* Behind a flood, requests on one sequence take effect as they were sent, whether it is open or
 * not, and steps among them. */
static void requests_on_a_sequence_keep_their_order(void **state)
{
    (void)state;
    begin(1, 1);
    become(BAD);
    assert_int_equal(rig_open_seq(&r, 7), ATTN_OK);
    assert_int_equal(rig_item(&r, 7, 0, 0, T), ATTN_OK);
    uint32_t epoch = rig_epoch(&r, 7);
    rig_look_ns = LOOK_NS;
    for (int i = 0; i < FLOOD; i++)
        send_describe();
    uint64_t step = rig_send_item(&r, 7, 0, T, 1);
    uint64_t export = send_export(7, 2), cut = rig_send_truncate(&r, 7, 3);
    uint64_t stale = rig_send_item(&r, 7, 0, T + 1, 1), later = send_export(7, 1);
    uint64_t closed = to_close(7, epoch + 1), gone = send_export(7, 0);
    uint64_t opened = rig_send_open(&r, 7), there = send_export(7, 0);
    uint64_t other = send_export(8, 0), open_8 = rig_send_open(&r, 8), now = send_export(8, 0);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, step)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, export)->export->layer_len[0], T + 1);
    assert_int_equal(rig_answer(&r, cut)->seq->epoch, epoch + 1);
    assert_int_equal(rig_answer(&r, stale)->status, ATTN_ESTALE);
    assert_int_equal(rig_answer(&r, later)->export->layer_len[0], 3);
    assert_int_equal(rig_answer(&r, closed)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, gone)->status, ATTN_ENOTFOUND);
    assert_int_equal(rig_answer(&r, opened)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, there)->export->epoch, rig_answer(&r, opened)->seq->epoch);
    assert_int_equal(rig_answer(&r, other)->status, ATTN_ENOTFOUND);
    assert_int_equal(rig_answer(&r, open_8)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, now)->status, ATTN_OK);
    end();
}

/* A transfer has its sequence until it has ended, whatever ends meanwhile. */
static void what_waits_for_its_turn_may_end_otherwise(void **state)
{
    (void)state;
    begin(1, 1);
    r.backend.block_ns = BLOCK_NS;
    become(BAD);
    assert_int_equal(rig_open_seq(&r, 2), ATTN_OK);
    assert_int_equal(rig_item(&r, 2, 0, 0, T), ATTN_OK);
    uint64_t begun = send_export(1, BLOCKS), waits = send_export(1, BLOCKS);
    uint64_t fork = rig_send_fork(&r, 2, 3);
    engine_turn(r.engine, 0);
    assert_null(rig_reply(&r, begun));
    uint64_t describe = send_describe(); /* nobody's deadline: it is served anew */
    engine_turn(r.engine, 0);
    rig_now_ns += UINT64_C(11000000000); /* all deadlines */
    engine_turn(r.engine, 0);
    rig_assert_says(rig_answer(&r, waits), ATTN_EDEADLINE, "passed");
    rig_assert_says(rig_answer(&r, fork), ATTN_EDEADLINE, "passed");
    rig_assert_says(rig_answer(&r, describe), ATTN_EDEADLINE, "before its turn");
    assert_null(rig_reply(&r, begun));
    rig_run(&r);
    assert_int_equal(rig_answer(&r, begun)->status, ATTN_OK);
    /* the device fails in the middle of one */
    begun = send_export(1, BLOCKS);
    engine_turn(r.engine, 0);
    r.backend.fail_read = ATTN_EINTERNAL;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, begun)->status, ATTN_EINTERNAL);
    r.backend.fail_read = ATTN_OK;
    end();
}

/* The sequences of a session that has ended go a few at a time. */
static void what_a_session_leaves_goes_between_steps(void **state)
{
    (void)state;
    begin(1, 1);
    become(BAD);
    uint64_t own = r.session;
    r.session = rig_hello(&r, "another");
    for (uint64_t i = 0; i < 40; i++)
        assert_int_equal(rig_open_seq(&r, 100 + i), ATTN_OK);
    uint32_t slot;
    assert_int_equal(session_find(r.sessions, r.session, &slot), ATTN_OK);
    r.session = own;
    rig_look_ns = LOOK_NS;
    session_kill(r.engine, slot, "the test says so");
    uint64_t before = stats_get(sequences_expired);
    uint32_t n_read;
    answered_beside_a_step(NULL, 0, &n_read);
    assert_in_range(stats_get(sequences_expired) - before, 1, 25);
    rig_run(&r);
    assert_int_equal(stats_get(sequences_expired) - before, 40);
    end();
}

/* ---- memory ---- */

static void a_pool_waits_for_its_memory_and_nobody_for_the_pool(void **state)
{
    (void)state;
    begin(1, 1);
    uint32_t n_read, n_pools = r.backend.n_pools;
    r.backend.is_clearing = true;
    become(BAD);
    uint64_t ids[] = {send_resize(80), send_create("x", 0), send_create("late", 1000)};
    for (int i = 0; i < 5; i++) {
        assert_int_equal(answered_beside_a_step(ids, 2, &n_read), 0);
        become(BAD);
        assert_int_equal(rig_open_seq(&r, 10 + (uint64_t)i), ATTN_OK);
        rig_now_ns += 1000000;
    }
    rig_assert_says(rig_answer(&r, ids[2]), ATTN_EDEADLINE, "passed");
    become(GOOD);
    uint64_t good = send_create("y", 0);
    rig_run(&r);
    assert_null(rig_reply(&r, good));
    assert_int_equal(r.backend.n_pools, n_pools);
    assert_true(r.backend.n_asked > 1 && r.backend.n_asked < 20); /* now and then */
    r.backend.is_clearing = false;
    for (int i = 0; i < 10; i++) {
        rig_now_ns += 1000000;
        rig_run(&r);
    }
    assert_int_equal(rig_answer(&r, ids[0])->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, ids[0])->pool->spec->n_blocks, 80);
    assert_int_equal(rig_answer(&r, ids[1])->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, good)->status, ATTN_OK);
    assert_int_equal(r.backend.n_pools, n_pools + 2);
    end();
}

/* A request that waits keeps its session, and ends with it. */
static void what_waits_keeps_its_session(void **state)
{
    (void)state;
    begin(1, 1);
    r.backend.is_clearing = true;
    become(BAD);
    uint64_t first = send_create("x", 10000000), second = send_create("y", 10000000);
    rig_run(&r);
    for (int i = 0; i < 5; i++) {
        rig_now_ns += UINT64_C(900000000);
        rig_run(&r);
    }
    r.backend.is_clearing = false;
    for (int i = 0; i < 5; i++) {
        rig_now_ns += 1000000;
        rig_run(&r);
    }
    assert_int_equal(rig_answer(&r, first)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, second)->status, ATTN_OK);
    r.backend.is_clearing = true;
    become(BAD);
    first = send_create("z", 10000000);
    rig_run(&r);
    uint32_t slot;
    assert_int_equal(session_find(r.sessions, r.session, &slot), ATTN_OK);
    session_kill(r.engine, slot, "the test says so");
    rig_assert_says(rig_answer(&r, first), ATTN_ENOTFOUND, "the test says so");
    end();
}

/* Whose memory is next goes by turns of tenants. */
static void one_pool_is_not_behind_all_of_a_flood(void **state)
{
    (void)state;
    begin(1, 1);
    r.backend.is_clearing = true;
    become(BAD);
    uint64_t ids[8];
    for (uint32_t i = 0; i < 8; i++)
        ids[i] = send_create((char[]){'x', (char)('0' + i), '\0'}, 0);
    rig_run(&r);
    become(GOOD);
    uint64_t good = send_create("y", 0);
    rig_run(&r);
    r.backend.is_clearing = false;
    for (int i = 0; i < 20 && rig_reply(&r, good) == NULL; i++) {
        rig_now_ns += 1000000;
        rig_run(&r);
    }
    assert_int_equal(rig_answer(&r, good)->status, ATTN_OK);
    assert_in_range(n_answered(ids, 8), 1, 2);
    end();
}

static void what_waits_is_refused_when_the_engine_stops(void **state)
{
    (void)state;
    begin(1, 1);
    become(BAD);
    r.backend.is_clearing = true;
    r.backend.block_ns = BLOCK_NS;
    uint64_t ids[] = {send_create("x", 0), send_export(1, BLOCKS), send_export(1, BLOCKS),
                      send_describe(), rig_send_open(&r, 50)};
    engine_turn(r.engine, 0);
    assert_int_equal(engine_stop(r.engine), ATTN_OK);
    for (int i = 0; i < 5; i++)
        assert_int_equal(rig_answer(&r, ids[i])->status == ATTN_OK, i == 1); /* it had begun */
    assert_int_equal(r.engine->turns.n, 0);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_waits_for_a_few_blocks_of_a_flood_of_exports),
        cmocka_unit_test(a_step_waits_for_one_turn_of_a_flood_of_any_kind),
        cmocka_unit_test(two_floods_share_the_engine_by_their_shares),
        cmocka_unit_test(requests_on_a_sequence_keep_their_order),
        cmocka_unit_test(what_waits_for_its_turn_may_end_otherwise),
        cmocka_unit_test(what_a_session_leaves_goes_between_steps),
        cmocka_unit_test(a_pool_waits_for_its_memory_and_nobody_for_the_pool),
        cmocka_unit_test(what_waits_keeps_its_session),
        cmocka_unit_test(one_pool_is_not_behind_all_of_a_flood),
        cmocka_unit_test(what_waits_is_refused_when_the_engine_stops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
