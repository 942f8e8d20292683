/* test_sp_clients.c: real libnanomsg and libnng REQ clients, and a raw one, against
 * transport/sp.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <nanomsg/nn.h>
#include <nanomsg/reqrep.h>
#include <nanomsg/tcp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/address.h"
#include "tests/daemon/transport/sp_server.h"
#include "tests/random.h"

static const char *const kinds[] = {"ipc", "tcp"};

static void fill_random(uint8_t *p, size_t n, uint64_t *seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)random_mixed(seed);
}

/* ---- libnanomsg ---- */

static int nn_client(int domain, const char *url)
{
    int s = nn_socket(domain, NN_REQ);
    int one = 1, buffer = 8 << 20, timeout_ms = 20000, max = 64 << 20;
    assert_true(s >= 0);
    nn_setsockopt(s, NN_TCP, NN_TCP_NODELAY, &one, sizeof(one));
    nn_setsockopt(s, NN_SOL_SOCKET, NN_SNDBUF, &buffer, sizeof(buffer));
    nn_setsockopt(s, NN_SOL_SOCKET, NN_RCVBUF, &buffer, sizeof(buffer));
    nn_setsockopt(s, NN_SOL_SOCKET, NN_RCVMAXSIZE, &max, sizeof(max));
    nn_setsockopt(s, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout_ms, sizeof(timeout_ms));
    nn_setsockopt(s, NN_SOL_SOCKET, NN_SNDTIMEO, &timeout_ms, sizeof(timeout_ms));
    assert_true(nn_connect(s, url) >= 0);
    return s;
}

static void cooked_libnanomsg_req_gets_its_bytes_back(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {0, 1, 64, 4000, 20480, 65536, 100001, 3 << 20};
    uint64_t seed = seed_from_clock();
    uint8_t *payload = malloc(3 << 20);
    fill_random(payload, 3 << 20, &seed);
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        server_start(&s, kinds[kind]);
        int c = nn_client(AF_SP, s.url);
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            size_t n;
            uint8_t *msg = step_message(100 + i, 0, payload, sizes[i], &n);
            assert_int_equal(nn_send(c, msg, n, 0), (int)n);
            void *reply = NULL;
            int k = nn_recv(c, &reply, NN_MSG, 0);
            if (k < 0)
                fail_msg("%s, %u bytes: %s", s.url, sizes[i], nn_strerror(nn_errno()));
            check_step_reply(reply, (size_t)k, 100 + i, 0, payload, sizes[i]);
            nn_freemsg(reply);
            free(msg);
        }
        nn_close(c);
        server_stop(&s);
    }
    free(payload);
}

/* With AF_SP_RAW the id stack travels in the control data; many requests may be outstanding. */
static void raw_nn_send(int c, uint32_t id, const uint8_t *msg, size_t n)
{
    uint8_t be[4] = {(uint8_t)(0x80 | id >> 24), (uint8_t)(id >> 16), (uint8_t)(id >> 8),
                     (uint8_t)id};
    uint8_t control[NN_CMSG_SPACE(sizeof(size_t) + 4)];
    struct nn_iovec iov = {.iov_base = (void *)(uintptr_t)msg, .iov_len = n};
    struct nn_msghdr h = {.msg_iov = &iov,
                          .msg_iovlen = 1,
                          .msg_control = control,
                          .msg_controllen = sizeof(control)};
    memset(control, 0, sizeof(control));
    struct nn_cmsghdr *cmsg = NN_CMSG_FIRSTHDR(&h);
    cmsg->cmsg_len = NN_CMSG_LEN(sizeof(size_t) + 4);
    cmsg->cmsg_level = PROTO_SP;
    cmsg->cmsg_type = SP_HDR;
    size_t four = 4;
    memcpy(NN_CMSG_DATA(cmsg), &four, sizeof(four));
    memcpy(NN_CMSG_DATA(cmsg) + sizeof(four), be, 4);
    assert_int_equal(nn_sendmsg(c, &h, 0), (int)n);
}

static void *raw_nn_receive(int c, size_t *out_n, uint32_t *out_id)
{
    void *body = NULL;
    uint8_t control[256];
    struct nn_iovec iov = {.iov_base = &body, .iov_len = NN_MSG};
    struct nn_msghdr h = {.msg_iov = &iov,
                          .msg_iovlen = 1,
                          .msg_control = control,
                          .msg_controllen = sizeof(control)};
    int n = nn_recvmsg(c, &h, 0);
    if (n < 0)
        fail_msg("nn_recvmsg: %s", nn_strerror(nn_errno()));
    struct nn_cmsghdr *cmsg = NN_CMSG_FIRSTHDR(&h);
    while (cmsg != NULL && !(cmsg->cmsg_level == PROTO_SP && cmsg->cmsg_type == SP_HDR))
        cmsg = NN_CMSG_NXTHDR(&h, cmsg);
    assert_non_null(cmsg);
    uint8_t *d = NN_CMSG_DATA(cmsg) + sizeof(size_t);
    *out_id = (uint32_t)(d[0] & 0x7f) << 24 | (uint32_t)d[1] << 16 | (uint32_t)d[2] << 8 | d[3];
    *out_n = (size_t)n;
    return body;
}

static void raw_libnanomsg_req_gets_128_replies_of_64_kib_in_any_order(void **state)
{
    (void)state;
    enum { N = 128, REPLY_BYTES = 64 << 10 };
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        server_start(&s, kinds[kind]);
        engine_hold(&s.engine);
        int c = nn_client(AF_SP_RAW, s.url);
        for (uint32_t i = 0; i < N; i++) {
            size_t n;
            uint8_t *msg = step_message(1000 + i, REPLY_BYTES, NULL, 0, &n);
            raw_nn_send(c, i, msg, n);
            free(msg);
        }
        engine_wait_queued(&s.engine, N);
        engine_release(&s.engine, true); /* the last request is answered first, all at once */
        bool seen[N] = {false};
        for (uint32_t i = 0; i < N; i++) {
            size_t n;
            uint32_t id;
            uint8_t *reply = raw_nn_receive(c, &n, &id);
            assert_true(id < N && !seen[id]);
            seen[id] = true;
            check_step_reply(reply, n, 1000 + id, REPLY_BYTES, NULL, 0);
            nn_freemsg(reply);
        }
        nn_close(c);
        server_stop(&s);
    }
}

/* ---- libnng ---- */

static void libnng_req_gets_its_bytes_back(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {0, 5, 20480, 65536, 1 << 20};
    uint64_t seed = seed_from_clock();
    uint8_t *payload = malloc(1 << 20);
    fill_random(payload, 1 << 20, &seed);
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        server_start(&s, kinds[kind]);
        nng_socket c;
        assert_int_equal(nng_req0_open(&c), 0);
        nng_socket_set_size(c, NNG_OPT_RECVMAXSZ, 64 << 20);
        nng_socket_set_ms(c, NNG_OPT_RECVTIMEO, 20000);
        assert_int_equal(nng_dial(c, s.url, NULL, 0), 0);
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            size_t n, reply_n = 0;
            void *reply = NULL;
            uint8_t *msg = step_message(7 + i, 0, payload, sizes[i], &n);
            assert_int_equal(nng_send(c, msg, n, 0), 0);
            int rc = nng_recv(c, &reply, &reply_n, NNG_FLAG_ALLOC);
            if (rc != 0)
                fail_msg("%s: %s", s.url, nng_strerror(rc));
            check_step_reply(reply, reply_n, 7 + i, 0, payload, sizes[i]);
            nng_free(reply, reply_n);
            free(msg);
        }
        nng_close(c);
        server_stop(&s);
    }
    free(payload);
}

/* Contexts of one nng socket: many requests outstanding over one connection. */
static void libnng_contexts_share_one_connection(void **state)
{
    (void)state;
    enum { N = 32 };
    struct server s;
    server_init(&s);
    server_start(&s, "tcp");
    uint64_t n_accepted = stats_get(peers_accepted);
    nng_socket c;
    nng_ctx ctx[N];
    nng_aio *aio[N];
    assert_int_equal(nng_req0_open(&c), 0);
    nng_socket_set_size(c, NNG_OPT_RECVMAXSZ, 64 << 20);
    assert_int_equal(nng_dial(c, s.url, NULL, 0), 0);
    engine_hold(&s.engine);
    for (uint32_t i = 0; i < N; i++) {
        size_t n;
        nng_msg *m;
        assert_int_equal(nng_ctx_open(&ctx[i], c), 0);
        assert_int_equal(nng_aio_alloc(&aio[i], NULL, NULL), 0);
        nng_aio_set_timeout(aio[i], 20000);
        uint8_t *msg = step_message(i + 1, 1000 * (i + 1), NULL, 0, &n);
        assert_int_equal(nng_msg_alloc(&m, 0), 0);
        nng_msg_append(m, msg, n);
        free(msg);
        nng_aio_set_msg(aio[i], m);
        nng_ctx_send(ctx[i], aio[i]);
        nng_aio_wait(aio[i]);
        assert_int_equal(nng_aio_result(aio[i]), 0);
        nng_ctx_recv(ctx[i], aio[i]);
    }
    engine_wait_queued(&s.engine, N);
    engine_release(&s.engine, true);
    for (uint32_t i = 0; i < N; i++) {
        nng_aio_wait(aio[i]);
        assert_int_equal(nng_aio_result(aio[i]), 0);
        nng_msg *m = nng_aio_get_msg(aio[i]);
        check_step_reply(nng_msg_body(m), nng_msg_len(m), i + 1, 1000 * (i + 1), NULL, 0);
        nng_msg_free(m);
        nng_ctx_close(ctx[i]);
        nng_aio_free(aio[i]);
    }
    nng_close(c);
    assert_int_equal(stats_get(peers_accepted), n_accepted + 1);
    server_stop(&s);
}

/* ---- a raw client ---- */

static void sixteen_ids_come_back_in_front_of_the_reply(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        server_start(&s, kinds[kind]);
        int fd = raw_connect(s.url);
        raw_handshake(fd);
        for (uint32_t n_ids = 1; n_ids <= 16; n_ids++) {
            size_t n;
            uint32_t id = 0;
            uint8_t *msg = step_message(n_ids, 0, "payload", 7, &n);
            raw_send_message(fd, kind == 0, n_ids, 77 + n_ids, msg, n);
            free(msg);
            uint8_t *reply = raw_receive_message(fd, kind == 0, n_ids, &id, &n);
            assert_non_null(reply);
            assert_int_equal(id, 77 + n_ids);
            check_step_reply(reply, n, n_ids, 0, "payload", 7);
            free(reply);
        }
        close(fd);
        server_stop(&s);
    }
}

static void a_message_may_come_in_any_pieces(void **state)
{
    (void)state;
    enum { N = 40, MAX = 200000 };
    uint64_t seed = seed_from_clock();
    uint8_t *payload = malloc(MAX), *wire = malloc(MAX + 1024);
    fill_random(payload, MAX, &seed);
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        server_start(&s, kinds[kind]);
        int pipe[2];
        uint64_t arrived = stats_get(received_bytes) + 8; /* the handshake */
        int fd = raw_connect(s.url);
        raw_handshake(fd);
        for (uint32_t i = 0; i < N; i++) {
            uint32_t n_payload = (uint32_t)(random_mixed(&seed) % (i % 4 == 0 ? MAX : 3000));
            size_t n, reply_n;
            uint32_t id;
            uint8_t *msg = step_message(i + 1, 0, payload, n_payload, &n);
            assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pipe), 0);
            int big = 4 << 20;
            setsockopt(pipe[0], SOL_SOCKET, SO_SNDBUF, &big, sizeof(big));
            raw_send_message(pipe[0], kind == 0, 1, i, msg, n);
            size_t n_wire = n + 4 + (kind == 0 ? 9 : 8);
            assert_true(raw_receive(pipe[1], wire, n_wire));
            close(pipe[0]);
            close(pipe[1]);
            for (size_t at = 0; at < n_wire;) {
                size_t piece = 1 + (size_t)(random_mixed(&seed) % (at < 200 ? 20 : 50000));
                piece = piece < n_wire - at ? piece : n_wire - at;
                raw_send(fd, wire + at, piece);
                at += piece;
                if (random_mixed(&seed) % 4 == 0) /* the next piece comes apart from it */
                    wait_at_least(&stats.received_bytes, arrived + at);
            }
            arrived += n_wire;
            uint8_t *reply = raw_receive_message(fd, kind == 0, 1, &id, &reply_n);
            assert_non_null(reply);
            check_step_reply(reply, reply_n, i + 1, 0, payload, n_payload);
            free(reply);
            free(msg);
        }
        close(fd);
        server_stop(&s);
    }
    free(payload);
    free(wire);
}

static void a_half_closed_peer_still_gets_its_answers(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        server_start(&s, kinds[kind]);
        engine_hold(&s.engine);
        int fd = raw_connect(s.url);
        raw_handshake(fd);
        for (uint32_t i = 0; i < 3; i++) {
            size_t n;
            uint8_t *msg = step_message(i + 1, 300000, NULL, 0, &n);
            raw_send_message(fd, kind == 0, 1, i, msg, n);
            free(msg);
        }
        shutdown(fd, SHUT_WR);
        engine_wait_queued(&s.engine, 3);
        engine_release(&s.engine, false);
        for (uint32_t i = 0; i < 3; i++) {
            size_t n;
            uint32_t id;
            uint8_t *reply = raw_receive_message(fd, kind == 0, 1, &id, &n);
            assert_non_null(reply);
            check_step_reply(reply, n, i + 1, 300000, NULL, 0);
            free(reply);
        }
        raw_expect_end(fd);
        close(fd);
        server_stop(&s);
    }
}

static void a_stale_socket_is_replaced_and_a_live_one_is_not(void **state)
{
    (void)state;
    struct server s;
    char why[512] = "";
    server_init(&s);
    server_start(&s, "ipc");
    struct transport *second = NULL;
    uv_loop_t loop;
    uv_loop_init(&loop);
    struct loops *loops;
    assert_int_equal(loops_open(&loop, server_loops(), &loops), ATTN_OK);
    struct transport_env env = {.loop = &loop,
                                .loops = loops,
                                .cfg = &s.cfg,
                                .engine = &s.engine,
                                .bufs = s.bufs,
                                .shares = s.shares};
    assert_int_equal(transport_ipc_ops.open(&env, s.url, &second, why, sizeof(why)), ATTN_EINVAL);
    assert_null(second);
    assert_non_null(strstr(why, "in use by another process"));
    assert_non_null(strstr(why, s.url));
    uv_run(&loop, UV_RUN_DEFAULT);
    loops_close(loops);
    assert_int_equal(uv_loop_close(&loop), 0);
    char url[256];
    snprintf(url, sizeof(url), "%s", s.url);
    server_stop(&s);

    /* a socket file whose owner is gone */
    struct address a;
    assert_int_equal(address_parse_url(url, &a, why, sizeof(why)), ATTN_OK);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, &a.sa.any, sizeof(a.sa.un)), 0);
    close(fd);
    server_init(&s);
    server_start(&s, url);
    fd = raw_connect(url);
    raw_handshake(fd);
    close(fd);
    server_stop(&s);
    assert_int_not_equal(access(url + 6, F_OK), 0); /* and is gone after a clean end */
}

/* The daemon's end of a connection, which is a descriptor of this process, too. */
static int other_end(int fd)
{
    struct sockaddr_in own, theirs;
    socklen_t n = sizeof own;
    assert_int_equal(getsockname(fd, (struct sockaddr *)&own, &n), 0);
    for (int other = 3; other < 1024; other++) {
        n = sizeof theirs;
        if (other != fd && getpeername(other, (struct sockaddr *)&theirs, &n) == 0 &&
            theirs.sin_family == AF_INET && theirs.sin_port == own.sin_port)
            return other;
    }
    fail_msg("the connection has no other end");
    return -1;
}

static void tcp_peers_that_are_gone_are_noticed(void **state)
{
    (void)state;
    struct server s;
    server_init(&s);
    server_start(&s, "tcp");
    int fd = raw_connect(s.url);
    raw_handshake(fd); /* it is accepted, and set up */
    int other = other_end(fd), alive = 0, no_delay = 0, idle_s = 0;
    unsigned timeout_ms = 0;
    socklen_t n = sizeof alive;
    assert_int_equal(getsockopt(other, SOL_SOCKET, SO_KEEPALIVE, &alive, &n), 0);
    assert_int_equal(getsockopt(other, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, &n), 0);
    assert_int_equal(getsockopt(other, IPPROTO_TCP, TCP_NODELAY, &no_delay, &n), 0);
    n = sizeof timeout_ms;
    assert_int_equal(getsockopt(other, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, &n), 0);
    assert_true(alive && no_delay);
    assert_in_range(idle_s, 1, 120);
    assert_in_range(timeout_ms, 1000, 120000);
    close(fd);
    server_stop(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cooked_libnanomsg_req_gets_its_bytes_back),
        cmocka_unit_test(raw_libnanomsg_req_gets_128_replies_of_64_kib_in_any_order),
        cmocka_unit_test(libnng_req_gets_its_bytes_back),
        cmocka_unit_test(libnng_contexts_share_one_connection),
        cmocka_unit_test(sixteen_ids_come_back_in_front_of_the_reply),
        cmocka_unit_test(a_message_may_come_in_any_pieces),
        cmocka_unit_test(a_half_closed_peer_still_gets_its_answers),
        cmocka_unit_test(a_stale_socket_is_replaced_and_a_live_one_is_not),
        cmocka_unit_test(tcp_peers_that_are_gone_are_noticed),
    };
    return cmocka_run_group_tests_name("sp_clients", tests, NULL, NULL);
}
