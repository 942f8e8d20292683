/* test_sp_memory.c: message buffers: what announces much, stops halfway or is never read takes its
 * share, and others have room. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "tests/daemon/transport/sp_good.h"
#include "tests/daemon/transport/sp_server.h"

static const char *const kinds[] = {"ipc", "tcp"};

static uint8_t *large_step(uint64_t request_id, uint32_t payload_bytes, size_t *out_n)
{
    uint8_t *payload = calloc(1, payload_bytes);
    uint8_t *msg = step_message(request_id, 0, payload, payload_bytes, out_n);
    free(payload);
    return msg;
}

static void an_empty_buffer_pool_is_an_answer(void **state)
{
    (void)state;
    enum { LARGE = 6 }; /* the next would hold 512 KiB beside its first 64 while it moves */
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        bool is_ipc = kind == 0;
        server_init(&s);
        s.cfg.io_memory_bytes = 4 << 20; /* an eighth of it is for small messages */
        s.cfg.peer_share = s.cfg.principal_share = 100;
        server_start(&s, kinds[kind]);
        uint64_t refused = stats_get(requests_refused_overload);
        engine_hold(&s.engine);
        int fd = raw_connect(s.url);
        raw_handshake(fd);
        size_t n;
        uint8_t *msg = large_step(31, 300 << 10, &n); /* takes 512 KiB */
        for (int i = 0; i < LARGE; i++)
            raw_send_message(fd, is_ipc, 1, 1, msg, n);
        engine_wait_queued(&s.engine, LARGE);
        /* no room: the bodies are dropped, each is answered while the engine stands still */
        for (int i = 0; i < 5; i++) {
            raw_send_message(fd, is_ipc, 1, 1, msg, n);
            sp_receive_error(fd, is_ipc, 31, ATTN_EOVERLOAD, "cache.io_memory");
            pthread_mutex_lock(&s.engine.lock);
            assert_int_equal(s.engine.renewed, STEP_SESSION); /* though nothing of it was kept */
            s.engine.renewed = 0;
            pthread_mutex_unlock(&s.engine.lock);
        }
        assert_int_equal(stats_get(requests_refused_overload), refused + 5);
        for (int i = 0; i < 16; i++) /* small ones have theirs */
            sp_send_step(fd, is_ipc, 32, 1000);
        engine_wait_queued(&s.engine, LARGE + 16);
        engine_release(&s.engine, false);
        sp_receive_error(fd, is_ipc, 31, ATTN_EOVERLOAD, "no buffer for the reply");
        for (uint32_t i = 1, id; i < LARGE + 16; i++) {
            size_t n_reply;
            uint8_t *reply = raw_receive_message(fd, is_ipc, 1, &id, &n_reply);
            assert_non_null(reply);
            if (i >= LARGE)
                check_step_reply(reply, n_reply, 32, 1000, NULL, 0);
            free(reply);
        }
        free(msg);
        close(fd);
        server_stop(&s);
    }
}

static void peers_that_never_read_leave_room_for_large_messages(void **state)
{
    (void)state;
    /* replies leave an eighth free, of which each peer but one may take three buffers more */
    enum { PEERS = 4, REQUESTS = 80, LARGE = 300 << 10 };
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g;
        int fds[PEERS];
        size_t n, n_reply;
        server_init(&s);
        s.cfg.write_timeout_us = UINT64_C(3600000000);
        s.cfg.principal_share = 100; /* all have this user's */
        server_start(&s, kinds[kind]);
        uint64_t received = stats_get(requests_received);
        for (int i = 0; i < PEERS; i++) {
            fds[i] = raw_connect(s.url);
            raw_handshake(fds[i]);
            for (int k = 0; k < REQUESTS; k++)
                sp_send_step(fds[i], kind == 0, 1, 300 << 10); /* 512 KiB, of 56 MiB */
            received += REQUESTS;
            wait_at_least(&stats.requests_received, received);
        }
        sp_good_open(&g, &s);
        sp_good_round_trip(&g);
        uint8_t *msg = large_step(1, LARGE, &n), *nothing = calloc(1, LARGE);
        for (int k = 0; k < 20; k++) {
            uint32_t id;
            raw_send_message(g.fd, g.is_ipc, 1, 5, msg, n);
            uint8_t *reply = raw_receive_message(g.fd, g.is_ipc, 1, &id, &n_reply);
            assert_non_null(reply);
            check_step_reply(reply, n_reply, 1, 0, nothing, LARGE);
            free(reply);
        }
        free(nothing);
        free(msg);
        for (int i = 0; i < PEERS; i++)
            close(fds[i]);
        close(g.fd);
        server_stop(&s);
    }
}

/* What is refused unread takes no buffer of the pool, but it takes memory: so messages count, too,
 * until their replies are read. */
static void a_peer_of_small_messages_that_reads_nothing_is_cut(void **state)
{
    (void)state;
    enum { BODY = 20, MOST = 1000000 };
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g;
        uint8_t msg[1 + 8 + 4 + BODY] = {kind == 0}, *at = msg + (kind == 0);
        size_t n = (size_t)(kind == 0) + 8 + 4 + BODY;
        at[7] = 4 + BODY;
        at[8] = 0x80;
        server_init(&s);
        s.cfg.write_timeout_us = UINT64_C(3600000000);
        s.cfg.max_queue_requests = 64;
        s.cfg.max_peers = 16;
        server_start(&s, kinds[kind]);
        uint64_t cut = stats_get(peers_cut_slow_reader);
        int fd = raw_connect(s.url), n_sent = 0;
        raw_handshake(fd);
        while (n_sent < MOST && send(fd, msg, n, MSG_NOSIGNAL) == (ssize_t)n)
            n_sent++;
        assert_in_range(n_sent, 64, MOST - 1);
        wait_at_least(&stats.peers_cut_slow_reader, cut + 1);
        sp_good_open(&g, &s);
        for (int i = 0; i < 200; i++) /* those that are read count no more */
            sp_good_round_trip(&g);
        close(fd);
        close(g.fd);
        server_stop(&s);
        assert_int_equal(s.env.n_messages, 0);
    }
}

/* The length of a message and its first bytes. */
static int send_begin(const struct server *s, const uint8_t *msg, size_t n, size_t n_sent)
{
    bool is_ipc = strncmp(s->url, "ipc", 3) == 0;
    uint8_t head[32] = {1}, *at = head + is_ipc, *id = at + 8;
    int fd = raw_connect(s->url);
    raw_handshake(fd);
    for (int i = 0; i < 8; i++)
        at[i] = (uint8_t)((n + 4) >> 8 * (7 - i));
    memcpy(id, "\x80\0\0\5", 4);
    raw_send(fd, head, (size_t)(id + 4 - head));
    raw_send(fd, msg, n_sent);
    return fd;
}

static void a_size_alone_takes_no_memory(void **state)
{
    (void)state;
    enum { PEERS = 32 };
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g;
        int fds[PEERS];
        size_t n;
        server_init(&s);
        s.cfg.io_memory_bytes = 8 << 20;
        s.cfg.max_message_bytes = 4 << 20;
        s.cfg.peer_share = s.cfg.principal_share = 100; /* the last takes what is left */
        server_start(&s, kinds[kind]);
        uint64_t received = stats_get(received_bytes);
        uint8_t *msg = large_step(1, 3 << 20, &n);
        for (int i = 0; i < PEERS; i++)
            fds[i] = send_begin(&s, msg, n, 20);
        wait_at_least(&stats.received_bytes, received + PEERS * (8 + 12 + 20));
        sp_good_open(&g, &s);
        for (int i = 0; i < 50; i++)
            sp_good_round_trip(&g);
        uint32_t id;
        size_t n_reply;
        raw_send_message(g.fd, g.is_ipc, 1, 5, msg, n); /* 4 MiB of the 8 */
        uint8_t *reply = raw_receive_message(g.fd, g.is_ipc, 1, &id, &n_reply);
        assert_non_null(reply); /* taken: what is short is room for a reply of that size */
        check_error_reply(reply, n_reply, 1, ATTN_EOVERLOAD, "no buffer for the reply");
        free(reply);
        for (int i = 0; i < PEERS; i++)
            close(fds[i]);
        close(g.fd);
        free(msg);
        server_stop(&s);
    }
}

static void large_messages_that_stop_halfway_are_cut_and_leave_room(void **state)
{
    (void)state;
    enum { PEERS = 8 };
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        struct sp_good g;
        int fds[PEERS];
        size_t n;
        server_init(&s);
        s.cfg.io_memory_bytes = 8 << 20;
        s.cfg.max_message_bytes = 1 << 20;
        s.cfg.handshake_timeout_us = 8000; /* looked at every 2 ms */
        s.cfg.body_timeout_us = UINT64_C(3600000000);
        sp_time_use();
        server_start(&s, kinds[kind]);
        uint64_t received = stats_get(received_bytes), cut = stats_get(peers_cut_body_timeout);
        uint8_t *msg = large_step(1, 900 << 10, &n);
        for (int i = 0; i < PEERS; i++)
            fds[i] = send_begin(&s, msg, n, 600 << 10);
        wait_at_least(&stats.received_bytes, received + PEERS * (8 + 12 + (600 << 10)));
        sp_good_open(&g, &s);
        for (int i = 0; i < 50; i++)
            sp_good_round_trip(&g);
        /* four hold 1 MiB each, half of the memory; the others' bytes are dropped as they come */
        sp_time_pass(UINT64_C(2000000000));
        server_wait_for_looks(&s);
        assert_int_equal(stats_get(peers_cut_body_timeout), cut); /* they have brought enough */
        sp_time_pass(UINT64_C(2000000000));
        wait_at_least(&stats.peers_cut_body_timeout, cut + 4);
        server_wait_for_looks(&s);
        assert_int_equal(stats_get(peers_cut_body_timeout), cut + 4);
        uint32_t id;
        size_t n_reply;
        raw_send_message(g.fd, g.is_ipc, 1, 5, msg, n);
        uint8_t *reply = raw_receive_message(g.fd, g.is_ipc, 1, &id, &n_reply);
        assert_non_null(reply);
        uint8_t *payload = calloc(1, 900 << 10);
        check_step_reply(reply, n_reply, 1, 0, payload, 900 << 10);
        free(payload);
        free(reply);
        for (int i = 0; i < PEERS; i++)
            close(fds[i]);
        close(g.fd);
        free(msg);
        server_stop(&s);
        clock_use(NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_empty_buffer_pool_is_an_answer),
        cmocka_unit_test(peers_that_never_read_leave_room_for_large_messages),
        cmocka_unit_test(a_peer_of_small_messages_that_reads_nothing_is_cut),
        cmocka_unit_test(a_size_alone_takes_no_memory),
        cmocka_unit_test(large_messages_that_stop_halfway_are_cut_and_leave_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
