/* test_share.c: how much one connection and one principal may hold. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>

#include "daemon/base/share.h"

enum { TOTAL = 10000 };

/* Takes one by one what it may have of TOTAL, of which *n_free are left. */
static uint64_t take_all(struct share *s, uint64_t *n_free)
{
    uint64_t n = 0;
    for (; *n_free > 0 && share_take(s, SHARE_REQUESTS, 1, *n_free, TOTAL) == NULL; n++)
        --*n_free;
    return n;
}

static struct principal user(uid_t uid)
{
    return (struct principal){.kind = PRINCIPAL_USER, .uid = uid, .pid = 1};
}

static void one_alone_leaves_what_its_percentage_says(void **state)
{
    (void)state;
    for (uint32_t percent = 1; percent <= 100; percent += 9) {
        struct share_table *t = share_table_open(percent, 100);
        struct principal who = user(7);
        struct share *s = share_open(t, &who);
        uint64_t n_free = TOTAL;
        uint64_t most = percent == 100 ? TOTAL
                        : percent > 75 ? TOTAL / 4 * 3
                                       : percent * (TOTAL / 100);
        assert_int_equal(take_all(s, &n_free), most > TOTAL / 32 ? most : TOTAL / 32);
        share_give(s, SHARE_REQUESTS, TOTAL - n_free);
        assert_int_equal(share_held(s, SHARE_REQUESTS), 0);
        assert_int_equal(share_held(s->principal, SHARE_REQUESTS), 0);
        share_unref(s);
        share_table_close(t);
    }
}

static void who_comes_last_has_a_32nd_of_everything(void **state)
{
    (void)state;
    enum { PEERS = 6 };
    struct share_table *t = share_table_open(60, 95);
    struct share *s[PEERS];
    uint64_t n_free = TOTAL;
    for (unsigned i = 0; i < PEERS; i++) { /* of three users, each as greedy as it may be */
        struct principal who = user(i / 2);
        s[i] = share_open(t, &who);
        take_all(s[i], &n_free);
        assert_true(n_free > 0);
    }
    struct principal newcomer = user(99);
    struct share *last = share_open(t, &newcomer);
    assert_int_equal(take_all(last, &n_free), TOTAL / 32);
    assert_null(share_take(last, SHARE_SESSIONS, 1, 1, 100)); /* each kind is counted by itself */
    share_unref(last);
    for (unsigned i = 0; i < PEERS; i++)
        share_unref(s[i]);
    share_table_close(t);
}

static struct principal host(const char *text)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    if (inet_pton(AF_INET, text, &v4.sin_addr) == 1)
        return principal_of_address((struct sockaddr *)&v4);
    assert_int_equal(inet_pton(AF_INET6, text, &v6.sin6_addr), 1);
    return principal_of_address((struct sockaddr *)&v6);
}

static void network_peers_are_counted_by_certificate_and_address(void **state)
{
    (void)state;
    static const struct {
        const char *host, *certificate;
        int group;
    } peers[] = {
        {"10.0.0.1", "", 0},
        {"10.0.0.1", "", 0},
        {"::ffff:10.0.0.1", "", 0},
        {"10.0.0.2", "", 1},
        {"::1", "", 2},
        {"2001:db8::1", "", 3},
        {"2001:db8::2:1", "", 3},
        {"2001:db8:0:1::1", "", 4},
        {"10.0.0.1", "alpha", 5},
        {"10.0.0.2", "alpha", 5},
        {"10.0.0.1", "beta", 6},
    };
    enum { N_PEERS = sizeof peers / sizeof peers[0] };
    struct share_table *t = share_table_open(50, 50);
    struct share *s[N_PEERS];
    for (int i = 0; i < N_PEERS; i++) {
        struct principal who = host(peers[i].host);
        principal_set_certificate(&who, peers[i].certificate);
        s[i] = share_open(t, &who);
        for (int k = 0; k < i; k++)
            assert_int_equal(s[i]->principal == s[k]->principal, peers[i].group == peers[k].group);
    }
    /* what one host takes, the others do not feel */
    uint64_t n_free = TOTAL;
    for (int i = 0; i < 3; i++)
        take_all(s[i], &n_free);
    assert_in_range(n_free, TOTAL / 2, TOTAL / 2 + 1);
    assert_true(take_all(s[3], &n_free) >= TOTAL / 4);
    for (int i = 0; i < N_PEERS; i++)
        share_unref(s[i]);
    share_table_close(t);
}

static void a_refusal_changes_nothing_and_names_holder_and_setting(void **state)
{
    (void)state;
    char text[SHARE_TEXT_BYTES];
    struct share_table *t = share_table_open(50, 80);
    struct principal who = user(1234), nobody = {.kind = PRINCIPAL_ANONYMOUS};
    struct share *a = share_open(t, &who), *b = share_open(t, &who), *c = share_open(t, &nobody);
    struct share *d = share_open(t, &who);
    assert_ptr_equal(a->principal, b->principal);
    assert_ptr_not_equal(a->principal, c->principal);
    assert_null(share_take(a, SHARE_SESSIONS, 50, 100, 100));
    assert_ptr_equal(share_take(a, SHARE_SESSIONS, 1, 50, 100), a);
    assert_int_equal(share_held(a, SHARE_SESSIONS), 50);
    assert_int_equal(share_held(a->principal, SHARE_SESSIONS), 50);
    assert_string_equal(share_say(a, SHARE_SESSIONS, 50, text),
                        "this connection has 50 sessions; the 50 that engine.max_sessions leaves "
                        "are for others (listen.peer_share)");
    /* its first may be as large as it likes */
    assert_null(share_take(b, SHARE_SESSIONS, 30, 50, 100));
    assert_null(share_take(b, SHARE_SESSIONS, 1, 1000, 1000));
    assert_ptr_equal(share_take(d, SHARE_SESSIONS, 1, 10, 100), a->principal);
    assert_int_equal(share_held(d, SHARE_SESSIONS), 0);
    assert_int_equal(share_held(b->principal, SHARE_SESSIONS), 81);
    assert_string_equal(share_say(a->principal, SHARE_SESSIONS, 10, text),
                        "uid 1234 has 81 sessions; the 10 that engine.max_sessions leaves are for "
                        "others (listen.principal_share)");
    share_unref(a);
    share_unref(b);
    share_unref(c);
    share_unref(d);
    share_table_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_alone_leaves_what_its_percentage_says),
        cmocka_unit_test(who_comes_last_has_a_32nd_of_everything),
        cmocka_unit_test(network_peers_are_counted_by_certificate_and_address),
        cmocka_unit_test(a_refusal_changes_nothing_and_names_holder_and_setting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
