/* test_sp_answers.c: replies that the thread which brings them writes itself
 * (transport/sp_write.c): all at once, in part, or not at all, as sendmsg and send of this file
 * say, while the connection's loop is at work. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/daemon/transport/sp_server.h"
#include "tests/daemon/transport/tls_client.h"
#include "tests/random.h"

enum { REPLY_BYTES = 30000, IN_FLIGHT = 3 };

static const char *const kinds[] = {"ipc", "tcp"};
static _Atomic uint64_t n_whole, n_part, n_none; /* what was done with such replies */
static _Atomic uint64_t cuts; /* seed of what is done next; 0: all of them are sent whole */

/* How many of n bytes are to be sent; 0: none. */
static size_t cut(size_t n)
{
    uint64_t seed = atomic_fetch_add(&cuts, atomic_load(&cuts) != 0);
    uint64_t draw = seed != 0 ? random_mixed(&seed) : 0;
    if (draw % 4 == 1) {
        atomic_fetch_add(&n_none, 1);
        errno = EAGAIN;
        return 0;
    }
    if (draw % 4 >= 2 && n > 1) {
        atomic_fetch_add(&n_part, 1);
        return 1 + (size_t)(draw / 4 % (draw % 4 == 2 && n > 16 ? 16 : n - 1));
    }
    atomic_fetch_add(&n_whole, 1);
    return n;
}

/* In place of libc's, like send. No other code of the daemon or of the test uses both flags. */
ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    if (flags != (MSG_DONTWAIT | MSG_NOSIGNAL))
        return syscall(SYS_sendmsg, fd, message, flags);
    struct iovec part[2] = {message->msg_iov[0], message->msg_iov[1]};
    struct msghdr shorter = {.msg_iov = part, .msg_iovlen = 2};
    size_t n = cut(part[0].iov_len + part[1].iov_len);
    part[0].iov_len = part[0].iov_len < n ? part[0].iov_len : n;
    part[1].iov_len = n - part[0].iov_len;
    return n == 0 ? -1 : syscall(SYS_sendmsg, fd, &shorter, flags);
}

ssize_t send(int fd, const void *bytes, size_t n, int flags)
{
    if (flags == (MSG_DONTWAIT | MSG_NOSIGNAL) && (n = cut(n)) == 0)
        return -1;
    return syscall(SYS_sendto, fd, bytes, n, flags, NULL, 0);
}

static void send_step(int fd, bool is_ipc, uint32_t i, uint32_t reply_bytes)
{
    size_t n;
    uint8_t *msg = step_message(i + 1, reply_bytes, NULL, 0, &n);
    raw_send_message(fd, is_ipc, 1, i, msg, n);
    free(msg);
}

static void forget(uint64_t seed)
{
    atomic_store(&cuts, seed);
    atomic_store(&n_whole, 0);
    atomic_store(&n_part, 0);
    atomic_store(&n_none, 0);
}

static void receive_step(int fd, bool is_ipc, const uint32_t *reply_bytes)
{
    size_t n;
    uint32_t id;
    uint8_t *reply = raw_receive_message(fd, is_ipc, 1, &id, &n);
    assert_non_null(reply);
    check_step_reply(reply, n, id + 1, reply_bytes[id], NULL, 0);
    free(reply);
}

static void single_replies_wake_no_loop(void **state)
{
    (void)state;
    enum { N = 50 };
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        uint32_t sizes[N];
        server_init(&s);
        server_start(&s, kinds[kind]);
        forget(0);
        int fd = raw_connect(s.url);
        raw_handshake(fd);
        for (uint32_t i = 0; i < N; i++) {
            sizes[i] =
                i == N - 1 ? 2 * REPLY_BYTES : 1 + i * (REPLY_BYTES / N); /* the last: long */
            send_step(fd, kind == 0, i, sizes[i]);
            receive_step(fd, kind == 0, sizes);
        }
        /* one may have met the loop at work; the last is too long */
        assert_in_range(atomic_load(&n_whole), 1, N - 1);
        assert_int_equal(atomic_load(&n_part) + atomic_load(&n_none), 0);
        close(fd);
        server_stop(&s);
    }
}

/* Up to three are in flight, so the loop often writes others meanwhile. */
static void replies_written_in_part_come_whole(void **state)
{
    (void)state;
    enum { N = 600 };
    uint64_t seed = seed_from_clock();
    uint32_t sizes[N];
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        server_start(&s, kinds[kind]);
        forget(random_mixed(&seed) | 1);
        int fd = raw_connect(s.url);
        raw_handshake(fd);
        for (uint32_t sent = 0, received = 0; received < N;) {
            uint32_t most = 1 + (uint32_t)(random_mixed(&seed) % IN_FLIGHT);
            for (; sent < N && sent - received < most; sent++) {
                sizes[sent] = 1 + (uint32_t)(random_mixed(&seed) % REPLY_BYTES);
                send_step(fd, kind == 0, sent, sizes[sent]);
            }
            receive_step(fd, kind == 0, sizes);
            received++;
        }
        assert_true(atomic_load(&n_whole) > 0 && atomic_load(&n_part) > 0 &&
                    atomic_load(&n_none) > 0);
        close(fd);
        server_stop(&s);
    }
}

static void tls_step(struct tls_client *c, uint32_t i, uint32_t reply_bytes)
{
    size_t n;
    uint8_t head[12] = {0}, *msg = step_message(i + 1, reply_bytes, NULL, 0, &n);
    for (int k = 0; k < 8; k++)
        head[k] = (uint8_t)((uint64_t)(n + 4) >> (56 - 8 * k));
    for (int k = 0; k < 4; k++)
        head[8 + k] = (uint8_t)((i | UINT32_C(0x80000000)) >> (24 - 8 * k));
    tls_client_send(c, head, 12);
    tls_client_send(c, msg, n);
    free(msg);
}

static void tls_receive(struct tls_client *c, const uint32_t *reply_bytes)
{
    uint8_t head[12];
    uint64_t n = 0;
    uint32_t id = 0;
    assert_true(tls_client_receive(c, head, 12));
    for (int k = 0; k < 8; k++)
        n = n << 8 | head[k];
    for (int k = 0; k < 4; k++)
        id = id << 8 | head[8 + k];
    id &= UINT32_C(0x7fffffff);
    uint8_t *msg = malloc(n - 4);
    assert_true(tls_client_receive(c, msg, n - 4));
    check_step_reply(msg, n - 4, id + 1, reply_bytes[id], NULL, 0);
    free(msg);
}

/* The engine's thread encrypts while the loop has other records to decrypt. */
static void encrypted_replies_come_whole(void **state)
{
    (void)state;
    enum { N = 600 };
    static const uint8_t hello[8] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
    uint64_t seed = seed_from_clock();
    uint32_t sizes[N];
    uint8_t got[8];
    struct server s;
    struct tls_client c;
    server_init(&s);
    certs_configure(&s.cfg, CERTS_GOOD, false);
    server_start(&s, "tls");
    forget(random_mixed(&seed) | 1);
    tls_client_connect(&c, s.url, N_CERTS, false);
    assert_true(tls_client_handshake(&c));
    tls_client_send(&c, hello, 8);
    assert_true(tls_client_receive(&c, got, 8));
    for (uint32_t sent = 0, received = 0; received < N;) {
        uint32_t most = 1 + (uint32_t)(random_mixed(&seed) % IN_FLIGHT);
        for (; sent < N && sent - received < most; sent++) {
            sizes[sent] = 1 + (uint32_t)(random_mixed(&seed) % REPLY_BYTES);
            tls_step(&c, sent, sizes[sent]);
        }
        tls_receive(&c, sizes);
        received++;
    }
    assert_true(atomic_load(&n_whole) > 0 && atomic_load(&n_part) > 0 && atomic_load(&n_none) > 0);
    tls_client_close(&c);
    server_stop(&s);
}

/* A peer that leaves, or is cut, while another thread writes to it: nothing is left behind, and its
 * descriptor is not written to when it is another's. */
static void peers_leave_while_their_replies_are_written(void **state)
{
    (void)state;
    enum { N = 200 };
    uint64_t seed = seed_from_clock();
    for (int kind = 0; kind < 2; kind++) {
        struct server s;
        server_init(&s);
        s.cfg.max_message_bytes = 1 << 20;
        server_start(&s, kinds[kind]);
        forget(random_mixed(&seed) | 1);
        for (int i = 0; i < N; i++) {
            uint32_t size = 1 + (uint32_t)(random_mixed(&seed) % REPLY_BYTES), n_steps = 3;
            int fd = raw_connect(s.url);
            raw_handshake(fd);
            for (uint32_t k = 0; k < n_steps - 1; k++) {
                send_step(fd, kind == 0, 0, size);
                receive_step(fd, kind == 0, &size);
            }
            send_step(fd, kind == 0, 0, size);
            if (i % 3 == 0)
                shutdown(fd, SHUT_WR); /* which still reads its answer */
            if (i % 3 == 1)
                raw_send(fd, "\2\2\2\2\2\2\2\2\2", 9); /* on ipc no message; on tcp one too large */
            if (i % 3 == 0) {
                receive_step(fd, kind == 0, &size);
                raw_expect_end(fd);
            }
            close(fd);
        }
        server_stop(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(single_replies_wake_no_loop),
        cmocka_unit_test(replies_written_in_part_come_whole),
        cmocka_unit_test(encrypted_replies_come_whole),
        cmocka_unit_test(peers_leave_while_their_replies_are_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
