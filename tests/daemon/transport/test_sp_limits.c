/* test_sp_limits.c: deadlines, caps and bounds of queues; who passes one is cut or refused, and
 * counted, while a well-behaved peer beside it is served. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "tests/daemon/transport/sp_good.h"
#include "tests/daemon/transport/sp_server.h"

static const char *const kinds[] = {"ipc", "tcp"};

static void a_thousand_stalled_peers_are_cut_while_a_good_one_works(void **state)
{
    (void)state;
    enum { N = 1000 };
    static int fds[N];
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < 2 * N + 100) {
        print_message("skipped: %lu descriptors are too few\n", (unsigned long)limit.rlim_cur);
        skip();
    }
    for (int kind = 0; kind < 2; kind++) {
        bool is_ipc = kind == 0;
        struct server s;
        struct sp_good g;
        server_init(&s);
        s.cfg.handshake_timeout_us = 400000;
        s.cfg.body_timeout_us = 400000;
        server_start(&s, kinds[kind]);
        uint64_t cut_handshake = stats_get(peers_cut_handshake);
        uint64_t cut_body = stats_get(peers_cut_body_timeout);
        sp_good_open(&g, &s);
        static const uint8_t hello[8] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
        size_t n;
        uint8_t *msg = step_message(1, 0, hello, 8, &n);
        uint64_t n_hand = 0, n_body = 0;
        for (int i = 0; i < N; i++) {
            fds[i] = raw_connect(s.url);
            uint8_t head[13] = {1, 0, 0, 0, 0, 0, 0, 0, (uint8_t)(n + 4), 0x80, 0, 0, 1};
            const uint8_t *h = is_ipc ? head : head + 1;
            size_t n_head = is_ipc ? 13 : 12;
            /* nothing; part of the handshake; then the handshake and part of the length, all but
             * one byte of the head, part of the body */
            size_t n_hello = i % 5 == 0 ? 0 : i % 5 == 1 ? 7 : 8;
            raw_send(fds[i], hello, n_hello);
            if (i % 5 == 2)
                raw_send(fds[i], h, 1);
            else if (i % 5 == 3)
                raw_send(fds[i], h, n_head - 1);
            else if (i % 5 == 4) {
                raw_send(fds[i], h, n_head);
                raw_send(fds[i], msg, n - 1);
            }
            n_hand += i % 5 < 2;
            n_body += i % 5 >= 2;
            if (i % 50 == 0)
                sp_good_round_trip(&g);
        }
        free(msg);
        while (stats_get(peers_cut_handshake) - cut_handshake < n_hand ||
               stats_get(peers_cut_body_timeout) - cut_body < n_body)
            sp_good_round_trip(&g); /* the test's own timeout ends this */
        assert_int_equal(stats_get(peers_cut_handshake) - cut_handshake, n_hand);
        assert_int_equal(stats_get(peers_cut_body_timeout) - cut_body, n_body);
        for (int i = 0; i < N; i++) {
            raw_expect_end(fds[i]);
            close(fds[i]);
        }
        sp_good_round_trip(&g);
        close(g.fd);
        server_stop(&s);
    }
}

static void deadlines_pass_with_the_daemons_clock_alone(void **state)
{
    (void)state;
    static const uint64_t timeout_ns = 8000000; /* looked at every 2 ms of real time */
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        s.cfg.handshake_timeout_us = s.cfg.body_timeout_us = 4 * timeout_ns / 1000;
        sp_time_use();
        server_start(&s, kinds[kind]);
        uint64_t cut_handshake = stats_get(peers_cut_handshake);
        uint64_t cut_body = stats_get(peers_cut_body_timeout);
        uint64_t received = stats_get(received_bytes);
        int silent = raw_connect(s.url), halting = raw_connect(s.url);
        uint8_t greeting[8];
        assert_true(raw_receive(silent, greeting, 8)); /* its loop has it */
        raw_handshake(halting);
        raw_send(halting, kind == 0 ? "\1" : "\0", 1); /* of a length */
        wait_equal(&stats.peers, 2);
        wait_at_least(&stats.received_bytes, received + 9);
        server_wait_for_looks(&s);
        /* the settings change; those that wait already are meant, too */
        __atomic_store_n(&s.cfg.handshake_timeout_us, timeout_ns / 1000, __ATOMIC_RELAXED);
        __atomic_store_n(&s.cfg.body_timeout_us, timeout_ns / 1000, __ATOMIC_RELAXED);
        server_wait_for_looks(&s);

        sp_time_pass(timeout_ns - 1);
        server_wait_for_looks(&s);
        assert_int_equal(stats_get(peers), 2);
        sp_time_pass(1);
        wait_equal(&stats.peers, 0);
        assert_int_equal(stats_get(peers_cut_handshake), cut_handshake + 1);
        assert_int_equal(stats_get(peers_cut_body_timeout), cut_body + 1);
        raw_expect_end(silent);
        raw_expect_end(halting);
        close(silent);
        close(halting);
        server_stop(&s);
        clock_use(NULL);
    }
}

/* The handshake alone keeps no place on a network where there are tenants, nor do messages that
 * have no owner; over a Unix socket its file's mode says who may. */
static void a_peer_without_a_tenant_is_cut_at_the_handshake_timeout(void **state)
{
    (void)state;
    static const uint64_t timeout_ns = 8000000;
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g;
        bool is_ipc = strcmp(kinds[kind], "ipc") == 0;
        server_init(&s);
        s.cfg.handshake_timeout_us = timeout_ns / 1000;
        free(s.cfg.tenants);
        s.cfg.tenants = strdup("/a/file");
        s.engine.tenant = "alpha";
        sp_time_use();
        server_start(&s, kinds[kind]);
        uint64_t cut = stats_get(peers_cut_handshake);
        sp_good_open(&g, &s);
        sp_good_round_trip(&g);
        uint64_t received = stats_get(received_bytes);
        int silent = raw_connect(s.url), talker = raw_connect(s.url);
        uint32_t id;
        size_t n;
        raw_handshake(silent);
        raw_handshake(talker);
        raw_send_message(talker, is_ipc, 1, 7, "nonsense", 8);
        free(raw_receive_message(talker, is_ipc, 1, &id, &n));
        wait_equal(&stats.peers, 3);
        wait_equal(&stats.received_bytes, received + 2 * 8 + (is_ipc ? 1 : 0) + 8 + 4 + 8);
        if (!is_ipc) /* from now on they wait */
            server_wait_for_looks(&s);
        sp_time_pass(timeout_ns - 1);
        if (!is_ipc) /* there nobody looks */
            server_wait_for_looks(&s);
        assert_int_equal(stats_get(peers), 3);
        sp_time_pass(1);
        wait_equal(&stats.peers, is_ipc ? 3 : 1);
        assert_int_equal(stats_get(peers_cut_handshake), cut + (is_ipc ? 0 : 2));
        sp_good_round_trip(&g);
        if (!is_ipc) { /* who waits for an answer has as long again, once */
            int late = raw_connect(s.url);
            raw_handshake(late);
            engine_hold(&s.engine);
            sp_send_step(late, false, 3, 100);
            engine_wait_queued(&s.engine, 1);
            sp_time_pass(timeout_ns);
            server_wait_for_looks(&s);
            assert_int_equal(stats_get(peers), 2);
            sp_time_pass(timeout_ns);
            wait_equal(&stats.peers, 1);
            engine_release(&s.engine, false);
            sp_good_round_trip(&g);
            close(late);
        }
        close(silent);
        close(talker);
        close(g.fd);
        server_stop(&s);
        clock_use(NULL);
    }
}

static void a_reader_that_stops_is_cut_at_the_write_timeout(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g;
        server_init(&s);
        s.cfg.write_timeout_us = 300000;
        server_start(&s, kinds[kind]);
        uint64_t cut = stats_get(peers_cut_slow_reader);
        sp_good_open(&g, &s);
        int fd = raw_connect(s.url);
        raw_handshake(fd);
        for (uint64_t i = 1; i <= 12; i++)
            sp_send_step(fd, kind == 0, i, 2 << 20);
        while (stats_get(peers_cut_slow_reader) == cut)
            sp_good_round_trip(&g);
        assert_int_equal(stats_get(peers_cut_slow_reader), cut + 1);
        raw_expect_end(fd);
        close(fd);
        sp_good_round_trip(&g);
        close(g.fd);
        server_stop(&s);
    }
}

static void a_reader_with_too_many_replies_waiting_is_cut_at_once(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g;
        server_init(&s);
        s.cfg.max_peer_write_bytes = 1 << 20;
        server_start(&s, kinds[kind]);
        uint64_t cut = stats_get(peers_cut_slow_reader);
        sp_good_open(&g, &s);
        int fd = raw_connect(s.url);
        raw_handshake(fd);
        engine_hold(&s.engine);
        for (uint64_t i = 1; i <= 60; i++)
            sp_send_step(fd, kind == 0, i, 256 << 10);
        engine_wait_queued(&s.engine, 60);
        engine_release(&s.engine, false);
        wait_at_least(&stats.peers_cut_slow_reader, cut + 1);
        sp_good_round_trip(&g);
        close(fd);
        /* one reply that alone is over the bound may wait */
        fd = raw_connect(s.url);
        raw_handshake(fd);
        sp_send_step(fd, kind == 0, 77, 9 << 20);
        uint32_t id;
        size_t n;
        uint8_t *reply = raw_receive_message(fd, kind == 0, 1, &id, &n);
        assert_non_null(reply);
        check_step_reply(reply, n, 77, 9 << 20, NULL, 0);
        free(reply);
        close(fd);
        assert_int_equal(stats_get(peers_cut_slow_reader), cut + 1);
        close(g.fd);
        server_stop(&s);
    }
}

/* A peer has hundreds of messages in its socket when another one sends its first. The engine's lock
 * stops the loop meanwhile. */
static void who_sends_many_messages_at_once_lets_others_be_read(void **state)
{
    (void)state;
    enum { N = 1200, ITS_ID = 999999 };
    if (server_loops() > 1)
        skip(); /* they are not read by one */
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g;
        bool is_ipc = kind == 0;
        server_init(&s);
        server_start(&s, kinds[kind]);
        sp_good_open(&g, &s);
        sp_good_round_trip(&g);
        int fd = raw_connect(s.url);
        raw_handshake(fd);
        uint8_t *all = NULL, id[4] = {0x80, 0, 0, 9};
        size_t n_all = 0;
        for (uint64_t i = 1; i <= N; i++) {
            size_t n;
            uint8_t *msg = step_message(i, 0, "8 bytes", 8, &n);
            uint8_t head[9] = {1, 0, 0, 0, 0, 0, 0, (uint8_t)((n + 4) >> 8), (uint8_t)(n + 4)};
            size_t n_head = is_ipc ? sizeof head : sizeof head - 1;
            all = realloc(all, n_all + n_head + sizeof id + n);
            memcpy(all + n_all, head + sizeof head - n_head, n_head);
            memcpy(all + n_all + n_head, id, sizeof id);
            memcpy(all + n_all + n_head + sizeof id, msg, n);
            n_all += n_head + sizeof id + n;
            free(msg);
        }
        pthread_mutex_lock(&s.engine.lock);
        s.engine.is_held = true;
        raw_send(fd, all, n_all);
        sp_send_step(g.fd, is_ipc, ITS_ID, 64);
        pthread_mutex_unlock(&s.engine.lock);
        engine_wait_queued(&s.engine, N + 1);
        uint32_t n_before = 0;
        pthread_mutex_lock(&s.engine.lock);
        for (struct request *r = s.engine.head; r->wire.request_id != ITS_ID; r = r->next)
            n_before++;
        pthread_mutex_unlock(&s.engine.lock);
        if (n_before > N / 2)
            fail_msg("%u messages were read before it", n_before);
        engine_release(&s.engine, false);
        free(all);
        close(fd);
        close(g.fd);
        server_stop(&s);
    }
}

/* As a client does that repeats all it has in flight once it is connected again. */
static void who_sends_more_than_its_share_is_answered_overloaded(void **state)
{
    (void)state;
    enum { N = 100 };
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        bool is_ipc = kind == 0;
        server_init(&s);
        s.cfg.max_queue_requests = 64;
        s.cfg.max_peers = 64;
        server_start(&s, kinds[kind]);
        uint64_t cut = stats_get(peers_cut_slow_reader);
        int fd = raw_connect(s.url), n_of[2] = {0, 0};
        raw_handshake(fd);
        engine_hold(&s.engine);
        for (uint64_t i = 1; i <= N; i++)
            sp_send_step(fd, is_ipc, i, 64);
        for (int i = 0; i < N; i++) {
            struct wire_arena a;
            struct wire_reply r;
            uint32_t id;
            size_t n;
            char why[256];
            uint8_t *reply = raw_receive_message(fd, is_ipc, 1, &id, &n);
            assert_non_null(reply);
            wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
            assert_int_equal(wire_reply_decode(reply, n, &a, &r, why, sizeof why), ATTN_OK);
            bool is_refused = r.header->status != ATTN_OK;
            n_of[is_refused]++;
            if (is_refused) {
                assert_int_equal(r.header->status, ATTN_EOVERLOAD);
                assert_non_null(strstr(r.header->message, "messages and unread replies"));
            }
            wire_arena_reset(&a);
            free(reply);
            engine_release(&s.engine, false); /* the first answers are refusals */
        }
        assert_in_range(n_of[0], 1, N - 1);
        assert_int_equal(n_of[0] + n_of[1], N);
        assert_int_equal(stats_get(peers_cut_slow_reader), cut);
        close(fd);
        server_stop(&s);
    }
}

static void peers_over_the_cap_are_refused_and_counted(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g[3];
        server_init(&s);
        s.cfg.max_peers = 3;
        s.cfg.principal_share = 100;
        server_start(&s, kinds[kind]);
        uint64_t refused = stats_get(peers_refused), accepted = stats_get(peers_accepted);
        for (int i = 0; i < 3; i++)
            sp_good_open(&g[i], &s);
        for (int i = 0; i < 20; i++) {
            int fd = raw_connect(s.url);
            raw_expect_end(fd);
            close(fd);
        }
        assert_int_equal(stats_get(peers_refused), refused + 20);
        assert_int_equal(stats_get(peers_accepted), accepted + 3);
        for (int i = 0; i < 3; i++)
            sp_good_round_trip(&g[i]);
        close(g[0].fd);
        wait_equal(&stats.peers, 2);
        sp_good_open(&g[0], &s);
        for (int i = 0; i < 3; i++) {
            sp_good_round_trip(&g[i]);
            close(g[i].fd);
        }
        server_stop(&s);
    }
}

static void running_out_of_descriptors_refuses_peers_without_spinning(void **state)
{
    (void)state;
    enum { N = 20, ROUND_TRIPS = 200 };
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g;
        struct rlimit before, tight;
        int fds[N];
        server_init(&s);
        server_start(&s, kinds[kind]);
        sp_good_open(&g, &s);
        sp_good_round_trip(&g);
        getrlimit(RLIMIT_NOFILE, &before);
        /* the lowest free descriptor becomes the limit: connecting needs none, accepting does */
        for (int i = 0; i < N; i++)
            fds[i] = socket(kind == 0 ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
        for (int i = 0; i < N; i++)
            assert_true(fds[i] >= 0);
        int top = dup(0);
        tight = before;
        tight.rlim_cur = (rlim_t)top;
        close(top);
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &tight), 0);
        for (int i = 0; i < N; i++)
            raw_connect_with(fds[i], s.url);
        for (int i = 0; i < N; i++)
            raw_expect_end(fds[i]);
        /* a loop that were called again and again for peers it can't accept would turn without
         * end */
        uint64_t turns = atomic_load(&s.n_turns);
        for (int i = 0; i < ROUND_TRIPS; i++)
            sp_good_round_trip(&g);
        turns = atomic_load(&s.n_turns) - turns;
        if (turns > 20 * ROUND_TRIPS)
            fail_msg("%llu turns of the loop for %d requests", (unsigned long long)turns,
                     ROUND_TRIPS);
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
        struct sp_good late;
        sp_good_open(&late, &s);
        sp_good_round_trip(&late);
        close(late.fd);
        for (int i = 0; i < N; i++)
            close(fds[i]);
        close(g.fd);
        server_stop(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_thousand_stalled_peers_are_cut_while_a_good_one_works),
        cmocka_unit_test(deadlines_pass_with_the_daemons_clock_alone),
        cmocka_unit_test(a_peer_without_a_tenant_is_cut_at_the_handshake_timeout),
        cmocka_unit_test(a_reader_that_stops_is_cut_at_the_write_timeout),
        cmocka_unit_test(a_reader_with_too_many_replies_waiting_is_cut_at_once),
        cmocka_unit_test(who_sends_many_messages_at_once_lets_others_be_read),
        cmocka_unit_test(who_sends_more_than_its_share_is_answered_overloaded),
        cmocka_unit_test(peers_over_the_cap_are_refused_and_counted),
        cmocka_unit_test(running_out_of_descriptors_refuses_peers_without_spinning),
    };
    return cmocka_run_group_tests_name("sp_limits", tests, NULL, NULL);
}
