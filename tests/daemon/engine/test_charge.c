/* test_charge.c: whatever a request has taken, and in whatever order, its end gives back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "daemon/base/stats.h"
#include "daemon/request/charge.h"
#include "tests/random.h"

enum { N = 16, MOST_BYTES = 1000 };

static struct queue_count queues[2];
static struct share_table *table;
static struct share *shares[2];
static _Atomic uint64_t used[TENANT_N_QUOTAS];
static struct tenant tenant = {.name = "t", .id = 7, .stats = 1, .used = used};
static uint32_t n_placed;

static void unplace(void *user, struct seq_name name)
{
    assert_ptr_equal(user, &n_placed);
    assert_int_equal(name.name, 5);
    n_placed--;
}

static int setup(void **state)
{
    (void)state;
    struct principal who = {.kind = PRINCIPAL_USER, .uid = 1};
    memset(queues, 0, sizeof queues);
    tenant.most[TENANT_BYTES] = MOST_BYTES;
    table = share_table_open(50, 75);
    for (int i = 0; i < 2; i++)
        assert_non_null(shares[i] = share_open(table, &who));
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++)
        share_unref(shares[i]);
    share_table_close(table);
    return 0;
}

static void expect_nothing_held(void)
{
    for (int i = 0; i < 2; i++) {
        assert_int_equal(queues[i].n_requests, 0);
        assert_int_equal(queues[i].bytes, 0);
        assert_int_equal(share_held(shares[i], SHARE_REQUESTS), 0);
        assert_int_equal(share_held(shares[i], SHARE_QUEUE_BYTES), 0);
        assert_int_equal(share_held(shares[i]->principal, SHARE_REQUESTS), 0);
    }
    assert_int_equal(used[TENANT_BYTES], 0);
    assert_int_equal(tenant.n_steps, 0);
    assert_int_equal(n_placed, 0);
    assert_int_equal(stats_get(queue_requests), 0);
    assert_int_equal(stats_get(queue_bytes), 0);
}

/* One more piece of what a request may hold, or one of them given back early. */
static void take_some(struct charge *c, uint64_t *seed)
{
    const struct queue_room room = {.n_free = random_below(seed, 3) == 0 ? 0 : 100,
                                    .n_all = 100,
                                    .bytes_free = random_below(seed, 3) == 0 ? 0 : 10000,
                                    .bytes_all = 10000};
    char why[SHARE_TEXT_BYTES];
    uint64_t bytes;
    uint32_t n;
    switch (random_below(seed, 6)) {
    case 0:
        if (c->place.queue == NULL)
            charge_queue(c, &queues[random_below(seed, 2)], random_below(seed, 500), &n, &bytes);
        break;
    case 1:
        if (c->place.queue != NULL)
            charge_queue_move(c, &queues[random_below(seed, 2)]);
        break;
    case 2:
        if (c->place.queue != NULL && c->share == NULL)
            charge_share(c, shares[random_below(seed, 2)], &room, why);
        break;
    case 3:
        if (c->tenant == NULL)
            charge_tenant(c, &tenant, random_below(seed, 500), why, sizeof why);
        break;
    case 4:
        if (!c->is_tenants_step)
            charge_step(c);
        break;
    default:
        if (c->unplace == NULL) {
            n_placed++;
            charge_place(c, (struct seq_name){7, 5}, unplace, &n_placed);
        } else {
            charge_unplace(c);
        }
    }
}

static void whatever_was_taken_is_given_back(void **state)
{
    (void)state;
    uint64_t seed = 46;
    for (int round = 0; round < 500; round++) {
        struct charge all[N] = {0};
        for (int i = 0; i < 20 * N; i++)
            take_some(&all[random_below(&seed, N)], &seed);
        uint64_t bytes = 0, tenants_bytes = 0;
        uint32_t n = 0, n_steps = 0;
        for (int i = 0; i < N; i++) {
            n += all[i].place.queue != NULL;
            bytes += all[i].place.bytes;
            tenants_bytes += all[i].tenant_bytes;
            n_steps += all[i].is_tenants_step;
        }
        assert_int_equal(queues[0].n_requests + queues[1].n_requests, n);
        assert_int_equal(queues[0].bytes + queues[1].bytes, bytes);
        assert_int_equal(stats_get(queue_requests), n);
        assert_int_equal(stats_get(queue_bytes), bytes);
        assert_int_equal(used[TENANT_BYTES], tenants_bytes);
        assert_in_range(tenants_bytes, 0, MOST_BYTES);
        assert_int_equal(tenant.n_steps, n_steps);
        for (int i = 0; i < N; i++)
            queue_leave(charge_release(&all[i], i % 2 == 0 ? ATTN_OK : ATTN_EINVAL));
        expect_nothing_held();
    }
}

static void the_place_in_the_queue_is_left_last_and_once(void **state)
{
    (void)state;
    struct charge c = {0};
    uint64_t bytes;
    uint32_t n;
    charge_queue(&c, &queues[0], 10, &n, &bytes);
    assert_int_equal(n, 1);
    assert_int_equal(bytes, 10);
    struct queue_place place = charge_release(&c, ATTN_OK);
    assert_int_equal(queues[0].n_requests, 1);
    queue_leave(charge_release(&c, ATTN_OK)); /* it holds nothing any more */
    assert_int_equal(queues[0].n_requests, 1);
    queue_leave(place);
    expect_nothing_held();
}

static void what_is_refused_takes_nothing(void **state)
{
    (void)state;
    const struct queue_room no_bytes = {.n_free = 100, .n_all = 100, .bytes_all = 100};
    char why[SHARE_TEXT_BYTES] = "";
    struct charge c = {0}, other = {0};
    uint64_t bytes;
    uint32_t n;
    charge_queue(&other, &queues[0], 80, &n, &bytes);
    assert_null(charge_share(&other, shares[0],
                             &(struct queue_room){100, 100, .bytes_free = 100, .bytes_all = 100},
                             why));
    charge_queue(&c, &queues[0], 90, &n, &bytes);
    assert_non_null(charge_share(&c, shares[0], &no_bytes, why));
    assert_true(strlen(why) > 0);
    assert_int_equal(share_held(shares[0], SHARE_REQUESTS), 1);
    assert_int_equal(share_held(shares[0], SHARE_QUEUE_BYTES), 80);
    assert_int_equal(charge_tenant(&c, &tenant, MOST_BYTES + 1, why, sizeof why), ATTN_EQUOTA);
    assert_null(c.tenant);
    assert_false(charge_step(&c)); /* of nobody's */
    queue_leave(charge_release(&c, ATTN_EOVERLOAD));
    queue_leave(charge_release(&other, ATTN_OK));
    expect_nothing_held();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(whatever_was_taken_is_given_back, setup, teardown),
        cmocka_unit_test_setup_teardown(the_place_in_the_queue_is_left_last_and_once, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(what_is_refused_takes_nothing, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
