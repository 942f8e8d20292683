/* test_sp_tls_floods.c: peers that use TLS itself as a weapon against transport/sp.c: they
 * renegotiate, ask for new keys without end, begin handshakes and leave, and mangle them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/stats.h"
#include "tests/daemon/transport/sp_server.h"
#include "tests/daemon/transport/tls_client.h"
#include "tests/random.h"

static const uint8_t hello_req[8] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
static const uint8_t hello_rep[8] = {0, 'S', 'P', 0, 0, 0x31, 0, 0};

static const uint8_t step_id[4] = {0x80, 0, 0, 7};

static void start(struct server *s, const char *version)
{
    server_init(s);
    certs_configure(&s->cfg, CERTS_GOOD, false);
    snprintf(s->cfg.tls_min_version, 4, "%s", version);
    server_start(s, "tls");
}

/* OpenSSL on a blocking socket, with both handshakes done. */
struct direct {
    int fd;
    SSL_CTX *context;
    SSL *ssl;
};

/* A call on a socket with a time limit may also be interrupted where no signal comes: by what a
 * ring of libuv's has to do on the thread that made it. */
#define UNINTERRUPTED(call)                                                                        \
    ({                                                                                             \
        int k_;                                                                                    \
        do                                                                                         \
            errno = 0, k_ = (call);                                                                \
        while (k_ <= 0 && errno == EINTR);                                                         \
        k_;                                                                                        \
    })

static void open_with(struct direct *c, const char *url, int version, SSL_SESSION *earlier)
{
    uint8_t got[8];
    c->context = SSL_CTX_new(TLS_client_method());
    assert_non_null(c->context);
    SSL_CTX_set_max_proto_version(c->context, version);
    c->fd = raw_connect(url);
    c->ssl = SSL_new(c->context);
    assert_int_equal(SSL_set_fd(c->ssl, c->fd), 1);
    if (earlier != NULL)
        assert_int_equal(SSL_set_session(c->ssl, earlier), 1);
    assert_int_equal(UNINTERRUPTED(SSL_connect(c->ssl)), 1);
    assert_int_equal(UNINTERRUPTED(SSL_write(c->ssl, hello_req, 8)), 8);
    assert_int_equal(UNINTERRUPTED(SSL_read(c->ssl, got, 8)), 8);
    assert_memory_equal(got, hello_rep, 8);
}

static void open_direct(struct direct *c, const char *url, int version)
{
    open_with(c, url, version, NULL);
}

static void close_direct(struct direct *c)
{
    SSL_free(c->ssl);
    SSL_CTX_free(c->context);
    close(c->fd);
    ERR_clear_error();
}

/* false: the connection has ended. */
static bool direct_send_step(struct direct *c, uint64_t id)
{
    static const uint8_t payload[100];
    size_t n;
    uint8_t *msg = step_message(id, 0, payload, sizeof payload, &n), framed[4096];
    assert_true(n + 12 < sizeof framed);
    memset(framed, 0, 12);
    framed[6] = (uint8_t)((n + 4) >> 8);
    framed[7] = (uint8_t)(n + 4);
    memcpy(framed + 8, step_id, sizeof step_id);
    memcpy(framed + 12, msg, n);
    free(msg);
    return UNINTERRUPTED(SSL_write(c->ssl, framed, (int)n + 12)) > 0;
}

static bool direct_receive_step(struct direct *c)
{
    uint8_t reply[4096];
    size_t at = 0;
    for (size_t want = 12; at < want;) {
        int k = UNINTERRUPTED(SSL_read(c->ssl, reply + at, (int)(want - at)));
        if (k <= 0)
            return false;
        at += (size_t)k;
        if (at == 12 && want == 12)
            want = 8 + (size_t)reply[6] * 256 + reply[7];
    }
    assert_memory_equal(reply + 8, step_id, 4);
    return true;
}

static bool direct_step(struct direct *c, uint64_t id)
{
    return direct_send_step(c, id) && direct_receive_step(c);
}

static void expect_service(struct server *s)
{
    struct direct c;
    open_direct(&c, s->url, TLS1_3_VERSION);
    assert_true(direct_step(&c, 1));
    close_direct(&c);
}

static void renegotiations_are_refused(void **state)
{
    (void)state;
    struct server s;
    struct direct c;
    start(&s, "1.2");
    for (int i = 0; i < 20; i++) {
        open_direct(&c, s.url, TLS1_2_VERSION);
        assert_true(direct_step(&c, 1));
        int n_done = 0;
        for (int k = 0; k < 20 && SSL_renegotiate(c.ssl) == 1; k++) {
            n_done += SSL_do_handshake(c.ssl) == 1 && SSL_renegotiate_pending(c.ssl) == 0;
            if (!direct_step(&c, 2)) /* refused with an alert, or cut */
                break;
            assert_int_equal(SSL_total_renegotiations(c.ssl), 0);
        }
        assert_int_equal(n_done, 0);
        close_direct(&c);
    }
    expect_service(&s);
    server_stop(&s);
}

/* No tickets, no early data, no compression, and a session that is offered again is a new one. */
static void sessions_are_not_resumed_where_1_2_is_let_in(void **state)
{
    (void)state;
    static const int versions[] = {TLS1_2_VERSION, TLS1_3_VERSION};
    struct server s;
    start(&s, "1.2");
    for (int i = 0; i < 2; i++) {
        struct direct c;
        SSL_SESSION *earlier = NULL;
        for (uint64_t k = 0; k < 3; k++) {
            open_with(&c, s.url, versions[i], earlier);
            assert_true(direct_step(&c, 1 + k)); /* what the daemon has to say has come */
            assert_int_equal(SSL_session_reused(c.ssl), 0);
            assert_null(SSL_get_current_compression(c.ssl));
            SSL_SESSION_free(earlier);
            earlier = SSL_get1_session(c.ssl);
            assert_non_null(earlier);
            assert_int_equal(SSL_SESSION_has_ticket(earlier), 0);
            assert_int_equal(SSL_SESSION_get_max_early_data(earlier), 0);
            close_direct(&c);
        }
        SSL_SESSION_free(earlier);
    }
    server_stop(&s);
}

/* Each asks the daemon for a new key of its own, too; the answers are not read. */
static void new_keys_without_end_hurt_nobody(void **state)
{
    (void)state;
    enum { UPDATES = 8000 };
    struct server s;
    struct direct c;
    uint8_t byte = 0;
    start(&s, "1.3");
    open_direct(&c, s.url, TLS1_3_VERSION);
    for (int i = 0; i < UPDATES; i++) {
        if (SSL_key_update(c.ssl, SSL_KEY_UPDATE_REQUESTED) != 1 || SSL_do_handshake(c.ssl) != 1)
            break; /* cut */
        if (i % 2000 == 0)
            expect_service(&s);
    }
    expect_service(&s);
    (void)!recv(c.fd, &byte, 1, MSG_DONTWAIT);
    close_direct(&c);
    wait_equal(&stats.peers, 0);
    server_stop(&s);
}

static void handshakes_that_leave_leave_nothing(void **state)
{
    (void)state;
    struct server s;
    start(&s, "1.3");
    for (int i = 0; i < 80; i++) {
        struct tls_client c[4];
        for (int k = 0; k < 4; k++) {
            size_t n;
            tls_client_connect(&c[k], s.url, N_CERTS, false);
            tls_stream_handshake(c[k].tls);
            uint8_t *bytes = tls_stream_take(c[k].tls, &n);
            raw_send(c[k].fd, bytes, n);
            free(bytes);
        }
        for (int k = 0; k < 4; k++)
            tls_client_close(&c[k]);
    }
    wait_equal(&stats.peers, 0);
    expect_service(&s);
    server_stop(&s);
}

static void handshakes_that_are_cut_short_leave_nothing(void **state)
{
    (void)state;
    uint64_t seed = seed_from_clock();
    struct server s;
    start(&s, "1.3");
    for (int i = 0; i < 40; i++) {
        struct tls_client c;
        size_t n;
        tls_client_connect(&c, s.url, N_CERTS, false);
        tls_stream_handshake(c.tls);
        uint8_t *bytes = tls_stream_take(c.tls, &n);
        raw_send(c.fd, bytes, random_mixed(&seed) % n);
        free(bytes);
        tls_client_close(&c);
    }
    wait_equal(&stats.peers, 0);
    expect_service(&s);
    server_stop(&s);
}

/* A ClientHello with bits turned, bytes cut out and lengths changed. */
static void mangled_hellos_are_cut_and_others_are_served(void **state)
{
    (void)state;
    uint64_t seed = seed_from_clock();
    struct server s;
    start(&s, "1.2");
    for (int i = 0; i < 400; i++) {
        struct tls_client c;
        size_t n;
        tls_client_connect(&c, s.url, N_CERTS, false);
        tls_stream_handshake(c.tls);
        uint8_t *bytes = tls_stream_take(c.tls, &n);
        for (uint64_t k = random_mixed(&seed) % 4; k-- > 0;)
            bytes[random_mixed(&seed) % n] ^= (uint8_t)(1u << random_mixed(&seed) % 8);
        if (random_mixed(&seed) % 4 == 0) {
            size_t at = random_mixed(&seed) % n, k = random_mixed(&seed) % (n - at);
            memmove(bytes + at, bytes + at + k, n - at - k);
            n -= k;
        }
        if (n > 4 && random_mixed(&seed) % 4 == 0)
            bytes[3 + random_mixed(&seed) % 2] = (uint8_t)random_mixed(&seed);
        for (size_t at = 0; at < n;) { /* the daemon may hang up meanwhile */
            ssize_t k = send(c.fd, bytes + at, n - at, MSG_NOSIGNAL);
            if (k <= 0)
                break;
            at += (size_t)k;
        }
        free(bytes);
        tls_client_close(&c);
        if (i % 100 == 0)
            expect_service(&s);
    }
    wait_equal(&stats.peers, 0);
    expect_service(&s);
    server_stop(&s);
}

/* ---- whose turn it is ---- */

/* The loop stands still in the first request from stop_loop on, until let_go; of the next one is
 * noted how many handshakes were over before it. */
static sem_t has_stopped, may_go;
static uint32_t n_submitted;
static uint64_t n_before;

static void on_submit(void)
{
    if (n_submitted++ == 0) {
        sem_post(&has_stopped);
        while (sem_wait(&may_go) != 0)
            continue;
    } else {
        n_before = atomic_load(&stats.tls_handshakes);
    }
}

static void stop_loop(struct server *s, struct direct *by)
{
    n_submitted = 0;
    sem_init(&has_stopped, 0, 0);
    sem_init(&may_go, 0, 0);
    s->engine.on_submit = on_submit;
    assert_true(direct_send_step(by, 1));
    while (sem_wait(&has_stopped) != 0)
        continue;
}

/* All but the last bytes of a handshake, which are the caller's to free. */
static uint8_t *shake_almost(struct tls_client *c, const char *url, size_t *out_n)
{
    tls_client_connect(c, url, N_CERTS, false);
    assert_int_equal(tls_stream_handshake(c->tls), TLS_STREAM_MORE);
    uint8_t *hello = tls_stream_take(c->tls, out_n);
    raw_send(c->fd, hello, *out_n);
    free(hello);
    enum tls_stream_result r = TLS_STREAM_MORE;
    while (r == TLS_STREAM_MORE) {
        ssize_t n = UNINTERRUPTED((int)recv(c->fd, c->in, sizeof c->in, 0));
        assert_true(n > 0);
        tls_stream_feed(c->tls, c->in, (size_t)n);
        r = tls_stream_handshake(c->tls);
    }
    assert_int_equal(r, TLS_STREAM_DONE);
    return tls_stream_take(c->tls, out_n);
}

/* Many handshakes and then a step are there when the loop goes on. */
static void a_step_waits_for_one_handshake(void **state)
{
    (void)state;
    enum { MANY = 40 };
    static struct tls_client c[MANY];
    uint8_t *rest[MANY];
    size_t n_rest[MANY];
    struct server s;
    struct direct good, other;
    if (server_loops() > 1)
        skip(); /* others go on with theirs meanwhile */
    start(&s, "1.3");
    open_direct(&good, s.url, TLS1_3_VERSION);
    open_direct(&other, s.url, TLS1_3_VERSION);
    for (int i = 0; i < MANY; i++)
        rest[i] = shake_almost(&c[i], s.url, &n_rest[i]);
    uint64_t n = atomic_load(&stats.tls_handshakes);
    stop_loop(&s, &other);
    for (int i = 0; i < MANY; i++) {
        raw_send(c[i].fd, rest[i], n_rest[i]);
        free(rest[i]);
    }
    assert_true(direct_send_step(&good, 2));
    sem_post(&may_go);
    assert_true(direct_receive_step(&good));
    assert_true(direct_receive_step(&other));
    assert_in_range(n_before, n, n + 1);
    wait_at_least(&stats.tls_handshakes, n + MANY); /* and nobody is forgotten */
    for (int i = 0; i < MANY; i++)
        tls_client_close(&c[i]);
    close_direct(&good);
    close_direct(&other);
    wait_equal(&stats.peers, 0);
    server_stop(&s);
}

/* Those whose turn has not come leave, or the daemon ends. */
static void who_waits_for_a_turn_may_leave(void **state)
{
    (void)state;
    enum { MANY = 40 };
    static struct tls_client c[MANY];
    for (int is_end = 0; is_end < 2; is_end++) {
        struct server s;
        struct direct other;
        start(&s, "1.3");
        open_direct(&other, s.url, TLS1_3_VERSION);
        stop_loop(&s, &other);
        for (int i = 0; i < MANY; i++) {
            size_t n;
            tls_client_connect(&c[i], s.url, N_CERTS, false);
            tls_stream_handshake(c[i].tls);
            uint8_t *bytes = tls_stream_take(c[i].tls, &n);
            raw_send(c[i].fd, bytes, n);
            free(bytes);
        }
        sem_post(&may_go);
        assert_true(direct_receive_step(&other));
        s.engine.on_submit = NULL;
        for (int i = 0; !is_end && i < MANY; i++)
            tls_client_close(&c[i]);
        close_direct(&other);
        if (!is_end) {
            wait_equal(&stats.peers, 0);
            expect_service(&s);
        }
        server_stop(&s);
        for (int i = 0; is_end && i < MANY; i++)
            tls_client_close(&c[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(renegotiations_are_refused),
        cmocka_unit_test(sessions_are_not_resumed_where_1_2_is_let_in),
        cmocka_unit_test(new_keys_without_end_hurt_nobody),
        cmocka_unit_test(handshakes_that_leave_leave_nothing),
        cmocka_unit_test(handshakes_that_are_cut_short_leave_nothing),
        cmocka_unit_test(mangled_hellos_are_cut_and_others_are_served),
        cmocka_unit_test(a_step_waits_for_one_handshake),
        cmocka_unit_test(who_waits_for_a_turn_may_leave),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
