/* test_engine_holds.c: sessions that hold pools and release them: what makes way then, and what
 * copies of these requests change, however late they come: nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/pool/create.h"
#include "tests/daemon/engine/engine_rig.h"

static struct rig r;

static void open_rig(void)
{
    rig_open(&r, NULL);
    r.keeps_sent = true;
}

static struct pool *find(const char *name)
{
    return pool_find(r.engine, NULL, name);
}

static uint32_t n_holders(const char *name)
{
    assert_non_null(find(name));
    return find(name)->n_holders;
}

/* The request's id; its answer is there. */
static uint64_t describe(const char *name)
{
    Attnd__PoolDescribe b = ATTND__POOL_DESCRIBE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.name = (char *)(uintptr_t)name;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_DESCRIBE;
    h.pool_describe = &b;
    uint64_t id = rig_send(&r, &h, NULL, 0);
    rig_run(&r);
    return id;
}

/* The same; the pool has 16 blocks and is there now. */
static uint64_t create(const char *name)
{
    uint64_t id = r.next_id;
    rig_pool(&r, name, 16);
    return id;
}

static uint64_t send_release(uint32_t pool, uint64_t request)
{
    Attnd__PoolRelease b = ATTND__POOL_RELEASE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.pool = pool;
    b.request = request;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_RELEASE;
    h.pool_release = &b;
    uint64_t id = rig_send(&r, &h, NULL, 0);
    rig_run(&r);
    return id;
}

static uint64_t release(const char *name, uint64_t request)
{
    uint64_t id = send_release(pool_handle(r.engine, find(name)), request);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    return id;
}

static attn_status again(uint64_t id)
{
    rig_resend(&r, id);
    rig_run(&r);
    return (attn_status)rig_answer(&r, id)->status;
}

/* --- what makes way --------------------------------------------------------------------------- */

/* max_pools is 4: p is there, held by the rig's session. */
static void a_pool_that_is_released_makes_way(void **state)
{
    (void)state;
    open_rig();
    uint64_t a = create("a");
    create("b");
    create("c");
    assert_int_equal(rig_make_pool(&r, "d")->status, ATTN_EQUOTA);
    release("a", a);
    assert_int_equal(n_holders("a"), 0); /* it stays until its place is wanted */
    rig_pool(&r, "d", 16);
    assert_null(find("a"));
    assert_non_null(find("b"));
    assert_non_null(find("c"));
    assert_int_equal(rig_make_pool(&r, "e")->status, ATTN_EQUOTA);
    rig_close(&r);
}

/* 256 blocks, 64 of them p's. */
static void its_blocks_can_be_had_by_a_larger_one(void **state)
{
    (void)state;
    open_rig();
    uint64_t a = r.next_id;
    rig_pool(&r, "small", 128);
    assert_int_equal(rig_make_pool(&r, "large")->status, ATTN_OK); /* of 64 */
    assert_int_equal(rig_make_pool(&r, "more")->status, ATTN_ENOMEM);
    release("small", a);
    rig_pool(&r, "more", 100);
    assert_null(find("small"));
    rig_close(&r);
}

static void a_pool_with_sequences_stays_after_its_release(void **state)
{
    (void)state;
    open_rig();
    uint64_t a = create("a");
    create("b");
    create("c");
    r.pool = pool_handle(r.engine, find("a"));
    assert_int_equal(rig_open_seq(&r, 7), ATTN_OK);
    release("a", a);
    assert_int_equal(rig_make_pool(&r, "d")->status, ATTN_EQUOTA);
    assert_int_equal(rig_item(&r, 7, 0, 0, 3), ATTN_OK); /* it goes on */
    assert_int_equal(rig_open_seq(&r, 8), ATTN_OK); /* and so does the handle, while it is there */
    assert_int_equal(rig_close_seq(&r, 7, rig_epoch(&r, 7)), ATTN_OK);
    assert_int_equal(rig_close_seq(&r, 8, rig_epoch(&r, 8)), ATTN_OK);
    rig_pool(&r, "d", 16);
    assert_null(find("a"));
    rig_close(&r);
}

static void each_session_holds_for_itself(void **state)
{
    (void)state;
    open_rig();
    uint64_t a = create("a"), own = r.session;
    r.session = rig_hello(&r, "another");
    uint64_t others = describe("a");
    assert_int_equal(n_holders("a"), 2);
    release("a", others);
    release("a", others);
    assert_int_equal(n_holders("a"), 1);
    release("p", 1); /* which it does not hold */
    assert_int_equal(n_holders("p"), 1);
    r.session = own;
    release("a", a);
    assert_int_equal(n_holders("a"), 0);
    rig_close(&r);
}

static void what_names_no_hold_is_refused(void **state)
{
    (void)state;
    open_rig();
    uint64_t a = create("a");
    uint32_t pool = pool_handle(r.engine, find("a"));
    rig_assert_says(rig_answer(&r, send_release(pool, 0)), ATTN_EINVAL,
                    "pool_release.request is 0");
    rig_assert_says(rig_answer(&r, send_release(pool, r.next_id)), ATTN_EINVAL,
                    "not one before this");
    rig_assert_says(rig_answer(&r, send_release(4711, a)), ATTN_ENOTFOUND,
                    "pool_release.pool is 4711, no such pool");
    assert_int_equal(n_holders("a"), 1);
    rig_close(&r);
}

static uint32_t n_blocks(const char *name)
{
    return find(name)->spec.wire->n_blocks;
}

/* Of the status; the pool's blocks are n. */
static attn_status resize(const char *name, uint32_t n)
{
    Attnd__PoolSpec spec = *find(name)->spec.wire;
    Attnd__PoolCreate b = ATTND__POOL_CREATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    spec.n_blocks = n;
    b.spec = &spec;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &b;
    return (attn_status)rig_call(&r, &h)->status;
}

static void a_pool_that_nobody_misses_is_made_anew_of_another_size(void **state)
{
    (void)state;
    open_rig();
    uint64_t a = create("a"), kept = r.backend.used_bytes;
    assert_int_equal(resize("a", 32), ATTN_EEXIST); /* it is held */
    r.pool = pool_handle(r.engine, find("a"));
    assert_int_equal(rig_open_seq(&r, 7), ATTN_OK);
    release("a", a);
    assert_int_equal(resize("a", 32), ATTN_EEXIST); /* a sequence lives in it */
    assert_int_equal(n_blocks("a"), 16);
    assert_int_equal(rig_close_seq(&r, 7, rig_epoch(&r, 7)), ATTN_OK);
    a = r.next_id;
    assert_int_equal(resize("a", 100), ATTN_OK); /* larger than what is beside it was */
    assert_int_equal(n_blocks("a"), 100);
    assert_int_equal(rig_open_seq(&r, 7), ATTN_ENOTFOUND); /* by the old handle */
    assert_int_equal(n_holders("a"), 1);
    release("a", a);
    a = r.next_id;
    assert_int_equal(resize("a", 16), ATTN_OK);
    assert_int_equal(n_blocks("a"), 16);
    assert_int_equal(r.backend.used_bytes, kept);
    release("a", a);
    assert_int_equal(resize("a", 10000), ATTN_EEXIST); /* which can't be, whatever makes way */
    assert_int_equal(n_blocks("a"), 16);
    rig_close(&r);
}

/* Another spec is another pool's, which a worker of the same name must not lose by mistake. */
static void a_pool_of_another_spec_is_not_made_anew(void **state)
{
    (void)state;
    open_rig();
    uint64_t a = create("a");
    release("a", a);
    Attnd__PoolSpec spec = *find("a")->spec.wire;
    Attnd__Identity other = ATTND__IDENTITY__INIT;
    struct pool *p;
    char why[256];
    other.model = (char *)(uintptr_t) "another";
    spec.identity = &other;
    spec.n_blocks = 32;
    assert_int_equal(pool_create(r.engine, NULL, &spec, &p, why, sizeof why), ATTN_EEXIST);
    assert_int_equal(n_blocks("a"), 16);
    rig_close(&r);
}

static void a_copy_makes_no_pool_of_its_former_size(void **state)
{
    (void)state;
    open_rig();
    uint64_t small = create("a");
    release("a", small);
    uint64_t large = r.next_id;
    assert_int_equal(resize("a", 32), ATTN_OK);
    assert_int_equal(again(small), ATTN_ESTALE);
    release("a", large);
    assert_int_equal(again(small), ATTN_ESTALE);
    assert_int_equal(n_blocks("a"), 32);
    assert_int_equal(again(large), ATTN_OK);
    assert_int_equal(n_holders("a"), 0);
    rig_close(&r);
}

/* --- late and doubled requests ---------------------------------------------------------------- */

/* Every earlier request arrives again after each one, oldest first and newest first. */
static void no_copy_changes_who_holds_the_pool(void **state)
{
    (void)state;
    uint64_t ids[16];
    uint32_t n = 0;
    open_rig();
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 4; i++) {
            bool is_held = i < 2;
            ids[n] = i == 0   ? create("a")
                     : i == 1 ? describe("a")
                              : release("a", ids[n - 1 - (i == 3)]);
            n++;
            for (uint32_t k = 0; k < 2 * n; k++) {
                assert_int_equal(again(ids[k < n ? k : 2 * n - 1 - k]), ATTN_OK);
                assert_int_equal(n_holders("a"), is_held);
            }
        }
    }
    rig_close(&r);
}

/* Found, released, found again, released again: what is left does not depend on which of the n
 * comes first. */
static void assert_any_order_leaves(uint32_t n, bool is_held)
{
    uint32_t n_orders = n == 3 ? 6 : 24;
    for (uint32_t order = 0; order < n_orders; order++) {
        uint32_t place[4] = {0, 1, 2, 3}, left = order;
        for (uint32_t i = n; i > 1; left /= i--) {
            uint32_t chosen = place[left % i];
            place[left % i] = place[i - 1];
            place[i - 1] = chosen;
        }
        open_rig();
        uint64_t own = r.session, first = r.next_id + 10;
        r.session = rig_hello(&r, "who makes it");
        create("a");
        r.session = own;
        for (uint32_t i = 0; i < n; i++) {
            r.next_id = first + place[i];
            if (place[i] % 2 == 0)
                describe("a");
            else
                release("a", first + place[i] - 1);
        }
        assert_int_equal(n_holders("a"), 1 + is_held);
        rig_close(&r);
    }
}

static void the_order_of_arrival_does_not_matter(void **state)
{
    (void)state;
    assert_any_order_leaves(3, true);
    assert_any_order_leaves(4, false);
}

/* It was sent before the pool was found again, and comes behind that. */
static void a_late_release_leaves_the_hold_that_came_after_it(void **state)
{
    (void)state;
    open_rig();
    uint64_t a = create("a"), late = r.next_id++;
    describe("a");
    uint64_t next = r.next_id;
    r.next_id = late;
    release("a", a);
    r.next_id = next;
    assert_int_equal(n_holders("a"), 1);
    rig_close(&r);
}

static void a_pool_that_has_gone_is_not_made_by_a_copy(void **state)
{
    (void)state;
    char why[256];
    open_rig();
    uint64_t a = create("a");
    uint32_t handle = pool_handle(r.engine, find("a"));
    uint64_t gone = release("a", a);
    assert_int_equal(pool_drop(r.engine, find("a"), why, sizeof why), ATTN_OK);
    assert_int_equal(again(a), ATTN_ESTALE);
    rig_assert_says(rig_answer(&r, a), ATTN_ESTALE, "pool \"a\" is gone since");
    assert_null(find("a"));
    assert_int_equal(again(gone), ATTN_ENOTFOUND);

    create("a"); /* in its place, with another handle */
    assert_int_not_equal(pool_handle(r.engine, find("a")), handle);
    assert_int_equal(again(gone), ATTN_ENOTFOUND);
    assert_int_equal(again(a), ATTN_OK);
    assert_int_equal(n_holders("a"), 1);
    release("a", r.next_id - 1);
    assert_int_equal(again(a), ATTN_OK);
    assert_int_equal(n_holders("a"), 0);
    rig_close(&r);
}

static void a_successor_holds_nothing_for_copies(void **state)
{
    (void)state;
    char why[256];
    open_rig();
    uint64_t a = create("a"), b = create("b");
    uint64_t gone = release("a", a);
    rig_succeed(&r, NULL);
    assert_int_equal(n_holders("a") + n_holders("b") + n_holders("p"), 0);
    assert_int_equal(again(a), ATTN_OK);
    assert_int_equal(again(b), ATTN_OK);
    assert_int_equal(n_holders("a") + n_holders("b"), 0);
    uint64_t now = describe("a");
    assert_int_equal(again(gone), ATTN_OK);
    assert_int_equal(n_holders("a"), 1);
    release("a", now);
    assert_int_equal(n_holders("a"), 0);
    assert_int_equal(pool_drop(r.engine, find("b"), why, sizeof why), ATTN_OK);
    assert_int_equal(again(b), ATTN_ESTALE);
    assert_true(rig_hello_with(&r, r.session, NULL)->hello->last_request_id >= now);
    rig_close(&r);
}

/* Who goes on with a session gives higher ids than those that its pools are held by. */
static void a_resumed_session_is_told_the_requests_of_its_pools(void **state)
{
    (void)state;
    open_rig();
    create("a");
    uint64_t last = describe("a");
    assert_int_equal(rig_hello_with(&r, r.session, NULL)->hello->last_request_id, last);
    rig_close(&r);
}

static void have_second(struct rig *rig)
{
    rig->has_second = true;
}

static void with_several_cards_it_goes_from_all_of_them(void **state)
{
    (void)state;
    rig_open(&r, have_second);
    r.keeps_sent = true;
    uint64_t a = create("a");
    create("b");
    create("c");
    uint64_t gone = release("a", a);
    rig_pool(&r, "a", 32);
    assert_int_equal(n_blocks("a"), 32);
    assert_int_equal(pool_find(r.second, NULL, "a")->spec.wire->n_blocks, 32);
    assert_int_equal(again(gone), ATTN_ENOTFOUND);
    assert_int_equal(again(a), ATTN_ESTALE);
    release("a", r.next_id - 1);
    rig_pool(&r, "d", 16);
    assert_null(find("a"));
    assert_null(pool_find(r.second, NULL, "a"));
    assert_non_null(pool_find(r.second, NULL, "d"));
    assert_int_equal(again(a), ATTN_ESTALE);
    assert_int_equal(again(gone), ATTN_ENOTFOUND);
    assert_int_equal(n_holders("d"), 1);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pool_that_is_released_makes_way),
        cmocka_unit_test(its_blocks_can_be_had_by_a_larger_one),
        cmocka_unit_test(a_pool_with_sequences_stays_after_its_release),
        cmocka_unit_test(each_session_holds_for_itself),
        cmocka_unit_test(what_names_no_hold_is_refused),
        cmocka_unit_test(a_pool_that_nobody_misses_is_made_anew_of_another_size),
        cmocka_unit_test(a_pool_of_another_spec_is_not_made_anew),
        cmocka_unit_test(a_copy_makes_no_pool_of_its_former_size),
        cmocka_unit_test(no_copy_changes_who_holds_the_pool),
        cmocka_unit_test(the_order_of_arrival_does_not_matter),
        cmocka_unit_test(a_late_release_leaves_the_hold_that_came_after_it),
        cmocka_unit_test(a_pool_that_has_gone_is_not_made_by_a_copy),
        cmocka_unit_test(a_successor_holds_nothing_for_copies),
        cmocka_unit_test(a_resumed_session_is_told_the_requests_of_its_pools),
        cmocka_unit_test(with_several_cards_it_goes_from_all_of_them),
    };
    return cmocka_run_group_tests_name("engine holds", tests, NULL, NULL);
}
