/* test_engine_pools.c: pools that are dropped, by an operator or to make room, and what a handle of
 * one is good for afterwards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/pool/create.h"
#include "tests/daemon/engine/engine_rig.h"

static struct rig r;

static const Attnd__Reply *describe(const char *name)
{
    Attnd__PoolDescribe b = ATTND__POOL_DESCRIBE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.name = (char *)name;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_DESCRIBE;
    h.pool_describe = &b;
    return rig_call(&r, &h);
}

static attn_status drop(const char *name, const char *says)
{
    char why[256] = "";
    attn_status st = pool_drop(r.engine, pool_find(r.engine, NULL, name), why, sizeof why);
    assert_non_null(strstr(why, says));
    return st;
}

static void a_dropped_pools_handle_never_names_another(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint32_t q = rig_pool(&r, "q", 16);
    assert_int_equal(r.pool, 1);
    assert_int_equal(q, 2);
    uint64_t used = r.backend.used_bytes;
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(drop("q", ""), ATTN_OK);
        assert_int_equal(describe("q")->status, ATTN_ENOTFOUND);
        uint32_t next = rig_pool(&r, "q", 16); /* in the same place */
        assert_int_not_equal(next, q);
        assert_int_equal(r.backend.used_bytes, used);
        uint32_t own = r.pool;
        r.pool = q;
        assert_int_equal(rig_open_seq(&r, 100 + i), ATTN_ENOTFOUND);
        r.pool = next;
        assert_int_equal(rig_open_seq(&r, 200 + i), ATTN_OK);
        assert_int_equal(rig_close_seq(&r, 200 + i, rig_epoch(&r, 200 + i)), ATTN_OK);
        r.pool = own;
        q = next;
    }
    rig_close(&r);
}

static void pools_that_come_and_go_do_not_fill_the_log(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_log_begin();
    for (uint32_t i = 0; i < 20 * LOG_LIMIT; i++) {
        rig_pool(&r, "q", 16);
        assert_int_equal(drop("q", ""), ATTN_OK);
    }
    assert_int_equal(rig_log_end(), 2 * LOG_LIMIT);
    rig_close(&r);
}

static void a_pool_with_sequences_stays(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    assert_int_equal(rig_open_seq(&r, 5), ATTN_OK);
    assert_int_equal(drop("p", "pool p: 1 sequences are open in it"), ATTN_EINVAL);
    assert_int_equal(describe("p")->status, ATTN_OK);
    rig_close(&r);
}

/* max_pools is 4: p is there, held by the rig's session. */
static void pools_make_room_that_nobody_holds_and_no_sequence_lives_in(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t own = r.session;
    r.session = rig_hello(&r, "another");
    rig_pool(&r, "a", 16);
    rig_pool(&r, "b", 16);
    rig_pool(&r, "c", 16);
    uint32_t handle = pool_handle(r.engine, pool_find(r.engine, NULL, "b"));
    r.pool = handle;
    assert_int_equal(rig_open_seq(&r, 7), ATTN_OK);
    assert_int_equal(rig_make_pool(&r, "d")->status, ATTN_EQUOTA); /* all are held */
    assert_false(attn_status_is_retryable(ATTN_EQUOTA));

    rig_now_ns += 29000000000; /* the other session ends; the rig's lives */
    r.session = own;
    assert_int_equal(describe("p")->status, ATTN_OK);
    assert_int_equal(describe("c")->status, ATTN_OK);
    Attnd__Adopt adopt = ATTND__ADOPT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    adopt.seq = 7;
    h.session = own;
    h.body_case = ATTND__REQUEST__BODY_ADOPT;
    h.adopt = &adopt;
    assert_int_equal(rig_call(&r, &h)->status, ATTN_OK);
    rig_now_ns += 2000000000;
    rig_run(&r);
    rig_pool(&r, "d", 16); /* in the place of a: p and c are held, b has a sequence */
    assert_null(pool_find(r.engine, NULL, "a"));
    assert_non_null(pool_find(r.engine, NULL, "b"));
    assert_non_null(pool_find(r.engine, NULL, "c"));
    assert_int_equal(rig_make_pool(&r, "e")->status, ATTN_EQUOTA);
    rig_close(&r);
}

static void memory_is_made_room_in_too(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t own = r.session;
    r.session = rig_hello(&r, "another");
    rig_pool(&r, "large", 150); /* of 256 blocks, 64 of them p's */
    r.session = own;
    assert_int_equal(rig_make_pool(&r, "next")->status, ATTN_ENOMEM);
    rig_now_ns += 29000000000;
    assert_int_equal(describe("p")->status, ATTN_OK);
    rig_now_ns += 2000000000;
    rig_run(&r);
    rig_pool(&r, "next", 64);
    assert_null(pool_find(r.engine, NULL, "large"));
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_dropped_pools_handle_never_names_another),
        cmocka_unit_test(pools_that_come_and_go_do_not_fill_the_log),
        cmocka_unit_test(a_pool_with_sequences_stays),
        cmocka_unit_test(pools_make_room_that_nobody_holds_and_no_sequence_lives_in),
        cmocka_unit_test(memory_is_made_room_in_too),
    };
    return cmocka_run_group_tests_name("engine pools", tests, NULL, NULL);
}
