/* fuzz_tls.c: fuzz target: the TLS listener, transport/sp.c with its sockets and threads and a fake
 * engine behind it. An input is a connection:
 *
 *   byte 0   bit 0: no TLS at all, the rest is sent as it is; bit 1: TLS 1.2 at most; bit 2: ends
 *            with close_notify
 *   byte 1   how many changes there are, modulo 5
 *   byte 2   plaintext of a record, less one, in pieces of 64
 *   changes  four bytes each: 16-bit place in all that the client sends, handshake included, what
 *            (turn bits, cut the stream there, leave bytes out, send bytes twice), and how much
 *   the rest is what is sent inside: SP's handshake, lengths, ids, messages
 *
 * The client then ends its side. The daemon must end the other within 20 s, leave nothing behind
 * and serve a client that does everything right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <openssl/ssl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/stats.h"
#include "tests/daemon/transport/sp_server.h"
#include "tests/daemon/transport/tls_client.h"
#include "tests/proto/fuzz.h"

enum { MAX_CHANGES = 4, GOOD_EVERY = 64 };

static const uint8_t hello_req[8] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
static const uint8_t hello_rep[8] = {0, 'S', 'P', 0, 0, 0x31, 0, 0};
static struct server server;

static void stop(void)
{
    server_stop(&server);
}

/* The server stops before OpenSSL, which the certificates have begun, cleans up at the exit. */
static void serve(void)
{
    server_init(&server);
    certs_configure(&server.cfg, CERTS_GOOD, false);
    snprintf(server.cfg.tls_min_version, sizeof server.cfg.tls_min_version, "1.2");
    server_start(&server, "tls");
    atexit(stop);
}

/* What the client sends goes through here. */
struct mangler {
    const uint8_t *changes; /* [n][4] */
    uint32_t n;
    uint64_t at; /* of all that is sent */
    bool has_changed, is_cut;
};

static void mangle_byte(struct mangler *m, uint8_t byte, uint8_t *out, size_t *n)
{
    out[(*n)++] = byte;
    for (uint32_t i = 0; i < m->n; i++) {
        const uint8_t *c = m->changes + 4 * (size_t)i;
        if ((c[0] | (uint64_t)c[1] << 8) != m->at)
            continue;
        m->has_changed = true;
        if (c[2] % 4 == 0) {
            out[*n - 1] ^= c[3];
        } else if (c[2] % 4 == 1) {
            m->is_cut = true;
        } else if (c[2] % 4 == 2) {
            (*n)--;
        } else {
            for (int k = c[3] % 8; k > 0; k--, (*n)++)
                out[*n] = byte;
        }
        break;
    }
    m->at++;
}

/* false: the stream ends here. */
static bool send_mangled(struct tls_client *c, struct mangler *m)
{
    size_t n_in, n = 0;
    uint8_t *in = tls_stream_take(c->tls, &n_in);
    uint8_t *out = malloc(8 * n_in + 1);
    for (size_t i = 0; i < n_in && !m->is_cut; i++)
        mangle_byte(m, in[i], out, &n);
    for (size_t at = 0; at < n && !c->is_over;) {
        ssize_t k = send(c->fd, out + at, n - at, MSG_NOSIGNAL);
        c->is_over = k <= 0;
        at += k > 0 ? (size_t)k : 0;
    }
    free(in);
    free(out);
    return !c->is_over && !m->is_cut;
}

/* A flight that was changed may not be answered: nothing is waited for after it. */
static bool shake_hands(struct tls_client *c, struct mangler *m)
{
    for (;;) {
        enum tls_stream_result r = tls_stream_handshake(c->tls);
        if (!send_mangled(c, m) || m->has_changed)
            return false;
        if (r != TLS_STREAM_MORE)
            return r == TLS_STREAM_DONE;
        ssize_t n = recv(c->fd, c->in, sizeof c->in, 0);
        if (n <= 0)
            return false;
        tls_stream_feed(c->tls, c->in, (size_t)n);
    }
}

static void talk(struct tls_client *c, const uint8_t *data, size_t n)
{
    size_t n_changes = data[1] % (MAX_CHANGES + 1), record = 64 * ((size_t)data[2] + 1);
    struct mangler m = {.changes = data + 3};
    while (m.n < n_changes && 3 + 4 * ((size_t)m.n + 1) <= n)
        m.n++;
    if (!shake_hands(c, &m))
        return;
    for (size_t at = 3 + 4 * (size_t)m.n; at < n; at += record) {
        struct iovec piece = {(void *)(uintptr_t)(data + at), n - at < record ? n - at : record};
        if (tls_stream_write(c->tls, &piece, 1, piece.iov_len) < 0 || !send_mangled(c, &m))
            return;
    }
    if (data[0] & 4) {
        tls_stream_end(c->tls);
        send_mangled(c, &m);
    }
}

static void wait_for_end(int fd)
{
    uint8_t got[4096];
    ssize_t n;
    shutdown(fd, SHUT_WR);
    while ((n = recv(fd, got, sizeof got, 0)) > 0)
        ;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        abort(); /* the daemon has not hung up */
}

static void expect_service(void)
{
    struct tls_client c;
    uint8_t got[8];
    tls_client_connect(&c, server.url, N_CERTS, false);
    if (!tls_client_handshake(&c))
        abort();
    tls_client_send(&c, hello_req, 8);
    if (!tls_client_receive(&c, got, 8) || memcmp(got, hello_rep, 8) != 0)
        abort();
    tls_client_close(&c);
    wait_equal(&stats.peers, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static uint32_t n_inputs;
    struct tls_client c;
    if (n < 3)
        return 0;
    if (n_inputs++ == 0)
        serve();
    tls_client_connect(&c, server.url, N_CERTS, data[0] & 2);
    if (data[0] & 1)
        (void)!send(c.fd, data + 3, n - 3, MSG_NOSIGNAL);
    else
        talk(&c, data, n);
    wait_for_end(c.fd);
    tls_client_close(&c);
    if (n_inputs % GOOD_EVERY == 1)
        expect_service();
    return 0;
}

/* SP's handshake and a step, as they stand inside TLS. */
static size_t put_step(uint8_t *out)
{
    static const uint8_t payload[300] = {1, 2, 3};
    size_t n;
    uint8_t *msg = step_message(5, 0, payload, sizeof payload, &n);
    memcpy(out, hello_req, 8);
    memset(out + 8, 0, 12);
    out[14] = (uint8_t)((n + 4) >> 8);
    out[15] = (uint8_t)(n + 4);
    out[16] = 0x80;
    out[19] = 7;
    memcpy(out + 20, msg, n);
    free(msg);
    return 20 + n;
}

size_t fuzz_seed(size_t i, uint8_t *out, size_t out_bytes)
{
    static const uint8_t heads[][3 + 4 * MAX_CHANGES] = {
        {4, 0, 255},
        {4, 0, 0},
        {0, 0, 3},
        {6, 0, 255},
        {2, 0, 1},
        /* a bit of the first record, of its length, in the client's last flight, in a record */
        {0, 1, 9, 12, 0, 0, 4},
        {2, 1, 9, 4, 0, 0, 1},
        {4, 1, 9, 0x20, 2, 0, 0x80},
        {4, 2, 2, 0x80, 2, 2, 1, 0x90, 2, 3, 7},
        /* cut inside the hello, inside the last flight, inside a record */
        {0, 1, 9, 100, 0, 1, 0},
        {0, 1, 9, 0x10, 2, 1, 0},
        {4, 1, 9, 0xa0, 3, 1, 0},
    };
    static const char raw[] = "\1\0\0GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    static const uint8_t begun[] = {1, 0, 0, 0x16, 3, 1, 0, 5, 1, 0, 0, 1, 3};
    const size_t n_heads = sizeof heads / sizeof heads[0];
    size_t head = i < n_heads ? 3 + 4 * (size_t)heads[i][1] : 0;
    if (out_bytes < 4096 || i >= n_heads + 2)
        return 0;
    if (i < n_heads) {
        memcpy(out, heads[i], head);
        return head + put_step(out + head);
    }
    const void *from = i == n_heads ? (const void *)raw : begun;
    size_t n = i == n_heads ? sizeof raw - 1 : sizeof begun;
    memcpy(out, from, n);
    return n;
}
