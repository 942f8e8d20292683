/* test_sp_abuse.c: peers that flood, lie, vanish or bring gifts; each harms itself alone and is
 * counted, while a well-behaved peer beside it is served. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/daemon/transport/sp_good.h"
#include "tests/daemon/transport/sp_server.h"
#include "tests/random.h"

static const char *const kinds[] = {"ipc", "tcp"};

static void requests_say_who_sent_them(void **state)
{
    (void)state;
    static const struct {
        const char *url;
        struct principal who;
    } cases[] = {{"tcp",
                  {.kind = PRINCIPAL_ANONYMOUS,
                   .family = AF_INET,
                   .host = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1}}},
                 {"ipc", {.kind = PRINCIPAL_USER, .family = AF_UNIX}}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct server s;
        struct sp_good g;
        struct principal who = cases[i].who;
        if (who.kind == PRINCIPAL_USER) {
            who.uid = getuid();
            who.gid = getgid();
            who.pid = getpid();
        }
        server_init(&s);
        server_start(&s, cases[i].url);
        sp_good_open(&g, &s);
        sp_good_round_trip(&g);
        pthread_mutex_lock(&s.engine.lock);
        assert_memory_equal(&s.engine.last, &who, sizeof(who));
        pthread_mutex_unlock(&s.engine.lock);
        close(g.fd);
        server_stop(&s);
    }
}

static void an_oversized_message_is_answered_and_its_peer_cut(void **state)
{
    (void)state;
    enum { LIMIT = 64 << 10, BIG = 8 << 20 };
    uint8_t *big = calloc(1, BIG);
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        s.cfg.max_message_bytes = LIMIT;
        server_start(&s, kinds[kind]);
        uint64_t cut = stats_get(peers_cut_oversize);
        size_t n;
        uint8_t *msg = step_message(4711, 0, big, BIG, &n);
        /* all of it is sent before the answer is looked for: the answer must survive that */
        int fd = raw_connect(s.url);
        raw_handshake(fd);
        raw_send_message(fd, kind == 0, 1, 3, msg, n);
        sp_receive_error(fd, kind == 0, 4711, ATTN_EINVAL,
                         "over the limit of 65536 (listen.max_message)");
        raw_expect_end(fd);
        close(fd);
        /* a length of nearly 2^64, and no more than the preamble of it */
        fd = raw_connect(s.url);
        raw_handshake(fd);
        uint8_t head[13] = {1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x80, 0, 0, 9};
        raw_send(fd, kind == 0 ? head : head + 1, kind == 0 ? 13 : 12);
        raw_send(fd, msg, WIRE_PREAMBLE_BYTES);
        sp_receive_error(fd, kind == 0, 4711, ATTN_EINVAL, "message of 18446744073709551611 bytes");
        raw_expect_end(fd);
        close(fd);
        free(msg);
        assert_int_equal(stats_get(peers_cut_oversize), cut + 2);
        /* exactly the limit is fine */
        msg = step_message(5, 0, big, LIMIT - 128, &n);
        while (n < LIMIT) {
            size_t payload = LIMIT - 128 + (LIMIT - n);
            free(msg);
            msg = step_message(5, 0, big, (uint32_t)payload, &n);
        }
        assert_int_equal(n, LIMIT);
        fd = raw_connect(s.url);
        raw_handshake(fd);
        raw_send_message(fd, kind == 0, 1, 3, msg, n);
        uint32_t id;
        uint8_t *reply = raw_receive_message(fd, kind == 0, 1, &id, &n);
        assert_non_null(reply);
        free(reply);
        free(msg);
        close(fd);
        server_stop(&s);
    }
    free(big);
}

static void what_does_not_decode_is_answered_and_the_peer_stays(void **state)
{
    (void)state;
    uint64_t seed = seed_from_clock();
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        server_start(&s, kinds[kind]);
        uint64_t malformed = stats_get(messages_malformed);
        struct sp_good g;
        sp_good_open(&g, &s);
        raw_send_message(g.fd, g.is_ipc, 1, 1, NULL, 0);
        sp_receive_error(g.fd, g.is_ipc, 0, ATTN_EPROTO, "");
        size_t n;
        uint8_t *msg = step_message(99, 0, "x", 1, &n);
        raw_send_message(g.fd, g.is_ipc, 1, 1, msg, n - 1); /* cut short: the id is known */
        sp_receive_error(g.fd, g.is_ipc, 99, ATTN_EPROTO, "");
        free(msg);
        for (int i = 0; i < 200; i++) {
            uint8_t bytes[300];
            size_t k = (size_t)(random_mixed(&seed) % sizeof(bytes));
            for (size_t b = 0; b < k; b++)
                bytes[b] = (uint8_t)random_mixed(&seed);
            raw_send_message(g.fd, g.is_ipc, 1, 1, bytes, k);
            sp_receive_error(g.fd, g.is_ipc, 0, ATTN_EPROTO, "");
        }
        sp_good_round_trip(&g);
        assert_int_equal(stats_get(messages_malformed), malformed + 202);
        close(g.fd);
        server_stop(&s);
    }
}

static void random_bytes_cut_their_peer_alone(void **state)
{
    (void)state;
    uint64_t seed = seed_from_clock();
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g;
        server_init(&s);
        s.cfg.handshake_timeout_us = s.cfg.body_timeout_us = 200000;
        server_start(&s, kinds[kind]);
        uint64_t n_cut = stats_get(peers_cut_malformed) + stats_get(peers_cut_handshake) +
                         stats_get(peers_cut_body_timeout) + stats_get(peers_cut_oversize);
        sp_good_open(&g, &s);
        enum { N = 100 };
        int fds[N];
        for (int i = 0; i < N; i++) {
            uint8_t bytes[256];
            fds[i] = raw_connect(s.url);
            if (i % 2 == 0)
                raw_handshake(fds[i]);
            for (size_t b = 0; b < sizeof(bytes); b++)
                bytes[b] = (uint8_t)random_mixed(&seed);
            if (kind == 0 && i % 4 == 0)
                bytes[0] = 1;
            raw_send(fds[i], bytes, sizeof(bytes));
            sp_good_round_trip(&g);
        }
        for (int i = 0; i < N; i++) {
            raw_expect_end(fds[i]);
            close(fds[i]);
        }
        wait_equal(&stats.peers, 1);
        assert_int_equal(stats_get(peers_cut_malformed) + stats_get(peers_cut_handshake) +
                             stats_get(peers_cut_body_timeout) + stats_get(peers_cut_oversize),
                         n_cut + N);
        sp_good_round_trip(&g);
        close(g.fd);
        server_stop(&s);
    }
}

static void seventeen_ids_cut_their_peer(void **state)
{
    (void)state;
    struct server s;
    server_init(&s);
    server_start(&s, "ipc");
    uint64_t cut = stats_get(peers_cut_malformed);
    int fd = raw_connect(s.url);
    raw_handshake(fd);
    raw_send_message(fd, true, 17, 1, "x", 1);
    raw_expect_end(fd);
    close(fd);
    assert_int_equal(stats_get(peers_cut_malformed), cut + 1);
    server_stop(&s);
}

static int n_descriptors(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n;
}

static void send_with_descriptors(int fd, const void *bytes, size_t n, int gift)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(8 * sizeof(int))];
    } control;
    struct iovec iov = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = n};
    struct msghdr h = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof(control.bytes)};
    memset(&control, 0, sizeof(control));
    struct cmsghdr *c = CMSG_FIRSTHDR(&h);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(8 * sizeof(int));
    for (int i = 0; i < 8; i++)
        memcpy(CMSG_DATA(c) + (size_t)i * sizeof(int), &gift, sizeof(int));
    assert_int_equal(sendmsg(fd, &h, MSG_NOSIGNAL), n);
}

static void descriptors_that_a_peer_passes_are_not_kept(void **state)
{
    (void)state;
    struct server s;
    server_init(&s);
    server_start(&s, "ipc");
    int pipe_fds[2];
    assert_int_equal(pipe(pipe_fds), 0);
    int fd = raw_connect(s.url);
    uint8_t got[8];
    int n_before = 0;
    size_t n;
    uint8_t *msg = step_message(8, 0, "gift", 4, &n);
    uint8_t *framed = malloc(13 + n);
    const uint8_t head[13] = {1, 0, 0, 0, 0, 0, 0, 0, (uint8_t)(n + 4), 0x80, 0, 0, 1};
    memcpy(framed, head, 13);
    memcpy(framed + 13, msg, n);
    send_with_descriptors(fd, (const uint8_t[8]){0, 'S', 'P', 0, 0, 0x30, 0, 0}, 8, pipe_fds[1]);
    assert_true(raw_receive(fd, got, 8));
    for (int i = 0; i < 100; i++) {
        uint32_t id;
        size_t reply_n;
        send_with_descriptors(fd, framed, 13 + n, pipe_fds[1]);
        uint8_t *reply = raw_receive_message(fd, true, 1, &id, &reply_n);
        assert_non_null(reply);
        check_step_reply(reply, reply_n, 8, 0, "gift", 4);
        free(reply);
        if (i == 0)
            n_before = n_descriptors();
    }
    assert_int_equal(n_descriptors(), n_before);
    /* no other copy of the pipe's end is open anywhere: reading sees its end */
    close(pipe_fds[1]);
    fcntl(pipe_fds[0], F_SETFL, O_NONBLOCK);
    assert_int_equal(read(pipe_fds[0], got, 1), 0);
    close(pipe_fds[0]);
    close(fd);
    free(framed);
    free(msg);
    server_stop(&s);
}

static void a_peer_may_vanish_with_requests_in_flight(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g;
        server_init(&s);
        server_start(&s, kinds[kind]);
        sp_good_open(&g, &s);
        sp_good_round_trip(&g);
        for (int round = 0; round < 20; round++) {
            engine_hold(&s.engine);
            int fd = raw_connect(s.url);
            raw_handshake(fd);
            for (uint64_t i = 1; i <= 10; i++)
                sp_send_step(fd, kind == 0, i, 100000);
            engine_wait_queued(&s.engine, 10);
            if (round % 2 == 0) { /* a reset, where the transport has one */
                struct linger now = {.l_onoff = 1, .l_linger = 0};
                setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
            }
            close(fd);
            engine_release(&s.engine, round % 3 == 0);
            wait_equal(&stats.peers, 1);
            sp_good_round_trip(&g);
        }
        close(g.fd);
        server_stop(&s);
    }
}

static void a_stopped_transport_still_writes_what_it_owes(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        server_start(&s, kinds[kind]);
        engine_hold(&s.engine);
        int fd = raw_connect(s.url);
        raw_handshake(fd);
        for (uint64_t i = 1; i <= 4; i++)
            sp_send_step(fd, kind == 0, i, 1 << 20);
        engine_wait_queued(&s.engine, 4);
        server_drain(&s);
        assert_false(s.t->ops->is_idle(s.t));
        engine_release(&s.engine, false);
        for (uint64_t i = 1; i <= 4; i++) {
            uint32_t id;
            size_t n;
            uint8_t *reply = raw_receive_message(fd, kind == 0, 1, &id, &n);
            assert_non_null(reply);
            check_step_reply(reply, n, i, 1 << 20, NULL, 0);
            free(reply);
        }
        close(fd);
        server_stop(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_say_who_sent_them),
        cmocka_unit_test(an_oversized_message_is_answered_and_its_peer_cut),
        cmocka_unit_test(what_does_not_decode_is_answered_and_the_peer_stays),
        cmocka_unit_test(random_bytes_cut_their_peer_alone),
        cmocka_unit_test(seventeen_ids_cut_their_peer),
        cmocka_unit_test(descriptors_that_a_peer_passes_are_not_kept),
        cmocka_unit_test(a_peer_may_vanish_with_requests_in_flight),
        cmocka_unit_test(a_stopped_transport_still_writes_what_it_owes),
    };
    return cmocka_run_group_tests_name("sp_abuse", tests, NULL, NULL);
}
