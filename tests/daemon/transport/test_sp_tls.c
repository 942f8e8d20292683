/* test_sp_tls.c: tls+tcp:// of transport/sp.c: real libnng, our own TLS, and peers that break
 * every rule of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>
#include <nng/supplemental/tls/tls.h>
#include <nng/transport/tls/tls.h>
#include <openssl/ssl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/daemon/transport/sp_server.h"
#include "tests/daemon/transport/tls_client.h"
#include "tests/random.h"

static const uint8_t hello_req[8] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
static const uint8_t hello_rep[8] = {0, 'S', 'P', 0, 0, 0x31, 0, 0};
enum { LARGE_BYTES = 3 << 20 };

static uint8_t *random_bytes(size_t n, uint64_t *seed)
{
    uint8_t *p = malloc(n > 0 ? n : 1);
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)random_mixed(seed);
    return p;
}

static void start(struct server *s, bool has_client_ca)
{
    server_init(s);
    certs_configure(&s->cfg, CERTS_GOOD, has_client_ca);
    server_start(s, "tls");
}

/* TLS and SP handshakes, of a client that has connected. */
static void shake_hands(struct tls_client *c)
{
    uint8_t got[8];
    if (!tls_client_handshake(c))
        fail_msg("%s", tls_stream_why(c->tls));
    tls_client_send(c, hello_req, 8);
    assert_true(tls_client_receive(c, got, 8));
    assert_memory_equal(got, hello_rep, 8);
}

static void open_client(struct tls_client *c, const char *url, enum certs own)
{
    tls_client_connect(c, url, own, false);
    shake_hands(c);
}

/* A step's message with length and id in front; the caller's to free. */
static uint8_t *framed_step(uint64_t id, uint32_t reply_bytes, const uint8_t *payload,
                            uint32_t payload_bytes, size_t *out_n)
{
    size_t n;
    uint8_t *msg = step_message(id, reply_bytes, payload, payload_bytes, &n);
    uint8_t *framed = malloc(12 + n);
    for (int i = 0; i < 8; i++)
        framed[i] = (uint8_t)((uint64_t)(n + 4) >> (56 - 8 * i));
    memcpy(framed + 8, "\x80\0\0\7", 4);
    memcpy(framed + 12, msg, n);
    free(msg);
    *out_n = 12 + n;
    return framed;
}

static void expect_step_reply(struct tls_client *c, uint64_t id, uint32_t reply_bytes,
                              const uint8_t *payload, uint32_t payload_bytes)
{
    uint8_t head[12];
    uint64_t n = 0;
    if (!tls_client_receive(c, head, 12))
        fail_msg("no reply: %s", tls_stream_why(c->tls));
    for (int i = 0; i < 8; i++)
        n = n << 8 | head[i];
    assert_memory_equal(head + 8, "\x80\0\0\7", 4);
    uint8_t *msg = malloc(n - 4);
    memset(msg, 0xee, n - 4);
    assert_true(tls_client_receive(c, msg, n - 4));
    check_step_reply(msg, n - 4, id, reply_bytes, payload, payload_bytes);
    free(msg);
}

static void round_trip(struct tls_client *c, uint64_t id, uint32_t bytes, uint64_t *seed)
{
    size_t n;
    uint8_t *payload = random_bytes(bytes, seed);
    uint8_t *framed = framed_step(id, 0, payload, bytes, &n);
    tls_client_send(c, framed, n);
    expect_step_reply(c, id, 0, payload, bytes);
    free(framed);
    free(payload);
}

/* The server is unhurt. */
static void expect_service(struct server *s)
{
    struct tls_client c;
    uint64_t seed = 1;
    open_client(&c, s->url, s->cfg.tls_ca[0] != '\0' ? CERTS_GOOD : N_CERTS);
    round_trip(&c, 99, 20480, &seed);
    tls_client_close(&c);
}

/* ---- who speaks it ---- */

static void libnng_req_gets_its_bytes_back_over_tls(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {0, 1, 64, 16384, 20480, 65536, 100001, LARGE_BYTES};
    uint64_t seed = seed_from_clock();
    char *ca = certs_file(CERTS_GOOD, "ca.crt");
    struct server s;
    server_init(&s);
    certs_configure(&s.cfg, CERTS_GOOD, false);
    strcpy(s.cfg.tls_min_version, "1.2"); /* Debian's libnng has mbedTLS 2, which ends there */
    server_start(&s, "tls");
    nng_socket c;
    nng_dialer d;
    nng_tls_config *tls = NULL;
    if (nng_tls_register() != 0 || nng_tls_config_alloc(&tls, NNG_TLS_MODE_CLIENT) != 0) {
        server_stop(&s);
        free(ca);
        skip(); /* a libnng without TLS */
    }
    assert_int_equal(nng_tls_config_auth_mode(tls, NNG_TLS_AUTH_MODE_REQUIRED), 0);
    assert_int_equal(nng_tls_config_ca_file(tls, ca), 0);
    assert_int_equal(nng_tls_config_server_name(tls, "localhost"), 0);
    assert_int_equal(nng_req0_open(&c), 0);
    nng_socket_set_size(c, NNG_OPT_RECVMAXSZ, 64 << 20);
    nng_socket_set_ms(c, NNG_OPT_RECVTIMEO, 20000);
    assert_int_equal(nng_dialer_create(&d, c, s.url), 0);
    assert_int_equal(nng_dialer_set_ptr(d, NNG_OPT_TLS_CONFIG, tls), 0);
    int rc = nng_dialer_start(d, 0);
    if (rc != 0)
        fail_msg("%s: %s", s.url, nng_strerror(rc));
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        size_t n, reply_n;
        void *reply;
        uint8_t *payload = random_bytes(sizes[i], &seed);
        uint8_t *msg = step_message(i + 1, 0, payload, sizes[i], &n);
        assert_int_equal(nng_send(c, msg, n, 0), 0);
        rc = nng_recv(c, &reply, &reply_n, NNG_FLAG_ALLOC);
        if (rc != 0)
            fail_msg("%u bytes: %s", sizes[i], nng_strerror(rc));
        check_step_reply(reply, reply_n, i + 1, 0, payload, sizes[i]);
        nng_free(reply, reply_n);
        free(msg);
        free(payload);
    }
    nng_close(c);
    nng_tls_config_free(tls);
    server_stop(&s);
    free(ca);
}

static void messages_of_any_size_cross_records(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {0, 1, 16383 - 128, 16384, 16385, 40000, 700001, LARGE_BYTES};
    uint64_t seed = seed_from_clock();
    struct server s;
    struct tls_client c;
    start(&s, false);
    open_client(&c, s.url, N_CERTS);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        round_trip(&c, i + 1, sizes[i], &seed);
    tls_client_close(&c);
    server_stop(&s);
}

static void records_may_arrive_byte_by_byte(void **state)
{
    (void)state;
    uint64_t seed = seed_from_clock();
    struct server s;
    struct tls_client c;
    start(&s, false);
    open_client(&c, s.url, N_CERTS);
    uint8_t *payload = random_bytes(300, &seed);
    size_t n, sealed_n;
    uint8_t *framed = framed_step(1, 0, payload, 300, &n);
    uint8_t *sealed = tls_client_seal(&c, framed, n, &sealed_n);
    for (size_t i = 0; i < sealed_n; i++)
        raw_send(c.fd, sealed + i, 1);
    expect_step_reply(&c, 1, 0, payload, 300);
    free(sealed);
    free(framed);
    free(payload);
    tls_client_close(&c);
    server_stop(&s);
}

static void replies_wait_for_a_reader_and_arrive_whole(void **state)
{
    (void)state;
    enum { N = 6 };
    struct server s;
    struct tls_client c;
    start(&s, false);
    open_client(&c, s.url, N_CERTS);
    for (uint64_t id = 1; id <= N; id++) {
        size_t n;
        uint8_t *framed = framed_step(id, LARGE_BYTES, NULL, 0, &n);
        tls_client_send(&c, framed, n);
        free(framed);
    }
    for (uint64_t id = 1; id <= N; id++)
        expect_step_reply(&c, id, LARGE_BYTES, NULL, 0);
    tls_client_close(&c);
    server_stop(&s);
}

static void who_ends_in_order_is_answered_and_told_goodbye(void **state)
{
    (void)state;
    enum { ANSWER = 8 << 20 }; /* more than the sockets hold */
    struct server s;
    struct tls_client c;
    size_t n, end_n;
    start(&s, false);
    open_client(&c, s.url, N_CERTS);
    uint64_t n_cut = stats_get(peers_cut_tls);
    engine_hold(&s.engine);
    uint8_t *framed = framed_step(1, ANSWER, NULL, 0, &n);
    tls_client_send(&c, framed, n);
    free(framed);
    engine_wait_queued(&s.engine, 1);
    tls_stream_end(c.tls);
    uint8_t *end = tls_stream_take(c.tls, &end_n);
    raw_send(c.fd, end, end_n);
    free(end);
    engine_release(&s.engine, false);
    expect_step_reply(&c, 1, ANSWER, NULL, 0);
    assert_true(tls_client_wait_end(&c));
    assert_int_equal(stats_get(peers_cut_tls), n_cut);
    tls_client_close(&c);
    server_stop(&s);
}

/* ---- certificates ---- */

static void a_worker_is_known_by_its_certificate(void **state)
{
    (void)state;
    uint64_t seed = seed_from_clock();
    struct server s;
    struct tls_client c;
    start(&s, true);
    open_client(&c, s.url, CERTS_GOOD);
    round_trip(&c, 1, 100, &seed);
    assert_string_equal(s.engine.last.certificate, "alpha");
    assert_int_equal(s.engine.last.kind, PRINCIPAL_ANONYMOUS);
    tls_client_close(&c);
    server_stop(&s);
}

/* Once its certificate is known a connection is one of its certificate's, wherever it is from. */
static void workers_are_counted_by_their_certificate(void **state)
{
    (void)state;
    enum { WITH = 4, MOST = 10 };
    struct server s;
    struct tls_client c[MOST + 1];
    uint64_t seed = 1;
    int n = WITH, n_more = 0;
    server_init(&s);
    certs_configure(&s.cfg, CERTS_GOOD, true);
    strcpy(s.cfg.tls_client_cert, "optional");
    s.cfg.max_peers = MOST;
    s.cfg.principal_share = 50;
    server_start(&s, "tls");
    for (int i = 0; i < WITH; i++) {
        open_client(&c[i], s.url, CERTS_GOOD);
        round_trip(&c[i], 1, 100, &seed);
    }
    /* of the six places left an address may have three: none of the four are its */
    for (; n <= MOST; n++, n_more++) {
        tls_client_connect(&c[n], s.url, N_CERTS, false);
        if (!tls_client_handshake(&c[n]))
            break;
    }
    assert_int_equal(n_more, (MOST - WITH) / 2);
    for (int i = 0; i < n; i++)
        tls_client_close(&c[i]);
    if (n <= MOST)
        tls_client_close(&c[n]);
    server_stop(&s);
}

/* In TLS 1.3 the client is through before the server has seen its certificate: the refusal is what
 * it reads first. */
static void certificates_that_are_wrong_or_missing_are_refused(void **state)
{
    (void)state;
    static const struct {
        enum certs own;
        const char *why;
    } cases[] = {
        {N_CERTS, "wants a certificate"}, {CERTS_EXPIRED, "expired"}, {CERTS_FOREIGN, "CA"}};
    struct server s;
    start(&s, true);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct tls_client c;
        uint8_t got[8];
        uint64_t n_cut = stats_get(peers_cut_tls);
        tls_client_connect(&c, s.url, cases[i].own, false);
        assert_false(tls_client_handshake(&c) && tls_client_receive(&c, got, 8));
        if (strstr(tls_stream_why(c.tls), cases[i].why) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", tls_stream_why(c.tls), cases[i].why);
        wait_at_least(&stats.peers_cut_tls, n_cut + 1);
        tls_client_close(&c);
    }
    expect_service(&s);
    server_stop(&s);
}

static void servers_with_a_wrong_certificate_are_refused_by_clients(void **state)
{
    (void)state;
    static const struct {
        enum certs server;
        const char *why;
    } cases[] = {{CERTS_EXPIRED, "expired"},
                 {CERTS_FOREIGN, "unknown CA"},
                 {CERTS_OTHER_HOST, "hostname mismatch"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct server s;
        struct tls_client c;
        server_init(&s);
        certs_configure(&s.cfg, cases[i].server, false);
        server_start(&s, "tls");
        tls_client_connect(&c, s.url, N_CERTS, false);
        assert_false(tls_client_handshake(&c));
        if (strstr(tls_stream_why(c.tls), cases[i].why) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", tls_stream_why(c.tls), cases[i].why);
        tls_client_close(&c);
        server_stop(&s);
    }
}

static void older_versions_are_refused_unless_asked_for(void **state)
{
    (void)state;
    struct server s;
    struct tls_client c;
    start(&s, false);
    tls_client_connect(&c, s.url, N_CERTS, true);
    assert_false(tls_client_handshake(&c));
    assert_non_null(strstr(tls_stream_why(c.tls), "no TLS version"));
    tls_client_close(&c);
    server_stop(&s);
}

/* ---- tickets ---- */

/* The server's end of the next handshake has this outcome. */
static void connect_again(struct tls_client *c, const struct server *s, bool is_resumed)
{
    uint64_t n = stats_get(tls_handshakes), n_resumed = stats_get(tls_resumed), seed = 1;
    assert_non_null(c->session);
    tls_client_connect_again(c, s->url);
    shake_hands(c);
    assert_int_equal(tls_stream_is_resumed(c->tls), is_resumed);
    round_trip(c, 1, 30000, &seed);
    assert_int_equal(stats_get(tls_handshakes), n + 1);
    assert_int_equal(stats_get(tls_resumed), n_resumed + is_resumed);
}

static void a_ticket_resumes_a_session_and_its_certificate(void **state)
{
    (void)state;
    for (int has_client_ca = 0; has_client_ca < 2; has_client_ca++) {
        struct server s;
        struct tls_client c;
        start(&s, has_client_ca);
        open_client(&c, s.url, has_client_ca ? CERTS_GOOD : N_CERTS);
        for (int i = 0; i < 3; i++) { /* each connection brings a ticket for the next */
            connect_again(&c, &s, true);
            assert_string_equal(s.engine.last.certificate, has_client_ca ? "alpha" : "");
        }
        tls_client_close(&c);
        server_stop(&s);
    }
}

static void reload(struct server *s)
{
    char why[256] = "";
    assert_int_equal(s->t->ops->reload(s->t, &s->cfg, why, sizeof why), ATTN_OK);
}

/* A ticket does not outlive what was checked for it: a reload may have brought another CA. */
static void a_reload_ends_tickets(void **state)
{
    (void)state;
    struct server s;
    struct tls_client c;
    uint8_t got[8];
    start(&s, true);
    open_client(&c, s.url, CERTS_GOOD);
    connect_again(&c, &s, true);
    reload(&s);
    connect_again(&c, &s, false);
    connect_again(&c, &s, true);
    free(s.cfg.tls_ca);
    s.cfg.tls_ca = certs_file(CERTS_FOREIGN, "ca.crt");
    reload(&s);
    uint64_t n_cut = stats_get(peers_cut_tls), n_resumed = stats_get(tls_resumed);
    tls_client_connect_again(&c, s.url);
    assert_false(tls_client_handshake(&c) && tls_client_receive(&c, got, 8));
    wait_at_least(&stats.peers_cut_tls, n_cut + 1);
    assert_int_equal(stats_get(tls_resumed), n_resumed);
    tls_client_close(&c);
    server_stop(&s);
}

static void a_ticket_of_a_daemon_before_is_ignored(void **state)
{
    (void)state;
    struct server s;
    struct tls_client c;
    start(&s, true);
    open_client(&c, s.url, CERTS_GOOD);
    connect_again(&c, &s, true);
    server_stop(&s);
    start(&s, true);
    connect_again(&c, &s, false);
    connect_again(&c, &s, true);
    tls_client_close(&c);
    server_stop(&s);
}

/* The same function looks at the other side's certificate in daemon and worker. */
static void a_session_ends_with_its_certificate(void **state)
{
    (void)state;
    static const enum certs servers[] = {CERTS_GOOD, CERTS_EXPIRED};
    for (size_t i = 0; i < 2; i++) {
        struct server s;
        struct tls_client c;
        server_init(&s);
        certs_configure(&s.cfg, servers[i], false);
        server_start(&s, "tls");
        tls_client_connect(&c, s.url, N_CERTS, false);
        SSL_CTX_set_verify(c.context, SSL_VERIFY_NONE, NULL);
        tls_client_connect_again(&c, s.url); /* not verified */
        shake_hands(&c);
        assert_non_null(c.session);
        assert_int_equal(tls_stream_may_resume(c.session), servers[i] == CERTS_GOOD);
        tls_client_close(&c);
        server_stop(&s);
    }
}

static const char *cipher; /* of the handshake that was completed last */

static void on_info(const SSL *ssl, int where, int ret)
{
    (void)ret;
    if (where & SSL_CB_HANDSHAKE_DONE)
        cipher = SSL_get_cipher_name(ssl);
}

static void the_cipher_is_what_both_sides_compute_fastest(void **state)
{
    (void)state;
    static const char chacha[] = "TLS_CHACHA20_POLY1305_SHA256";
    struct server s;
    start(&s, false);
    for (int has_aes = 0; has_aes < 2; has_aes++) {
        struct tls_client c;
        tls_client_connect(&c, s.url, N_CERTS, false);
        SSL_CTX_set_ciphersuites(c.context,
                                 has_aes ? "TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256"
                                         : "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256");
        SSL_CTX_set_info_callback(c.context, on_info);
        tls_client_connect_again(&c, s.url); /* with these */
        shake_hands(&c);
        assert_string_equal(cipher, has_aes ? "TLS_AES_128_GCM_SHA256" : chacha);
        tls_client_close(&c);
    }
    assert_non_null(strstr(tls_stream_suites(), chacha)); /* both ways both are offered */
    server_stop(&s);
}

/* ---- who speaks something else, or stops ---- */

static void a_plain_client_is_cut_at_the_tls_listener(void **state)
{
    (void)state;
    struct server s;
    start(&s, false);
    uint64_t n_cut = stats_get(peers_cut_tls);
    int fd = raw_connect(s.url);
    raw_send(fd, hello_req, 8);
    raw_expect_end(fd);
    close(fd);
    wait_at_least(&stats.peers_cut_tls, n_cut + 1);
    expect_service(&s);
    server_stop(&s);
}

static void a_tls_client_is_cut_at_the_plain_listener(void **state)
{
    (void)state;
    struct server s;
    struct tls_client c;
    server_init(&s);
    server_start(&s, "tcp");
    uint64_t n_cut = stats_get(peers_cut_handshake);
    tls_client_connect(&c, s.url, N_CERTS, false);
    assert_false(tls_client_handshake(&c));
    wait_at_least(&stats.peers_cut_handshake, n_cut + 1);
    tls_client_close(&c);
    server_stop(&s);
}

static void handshakes_that_stop_are_cut_at_their_deadline(void **state)
{
    (void)state;
    struct server s;
    struct tls_client c;
    server_init(&s);
    certs_configure(&s.cfg, CERTS_GOOD, false);
    s.cfg.handshake_timeout_us = 50000;
    server_start(&s, "tls");
    for (int stage = 0; stage < 3; stage++) {
        uint64_t n_cut = stats_get(peers_cut_handshake);
        size_t n;
        tls_client_connect(&c, s.url, N_CERTS, false);
        if (stage == 1) { /* half of a ClientHello */
            tls_stream_handshake(c.tls);
            uint8_t *bytes = tls_stream_take(c.tls, &n);
            raw_send(c.fd, bytes, n / 2);
            free(bytes);
        } else if (stage == 2) { /* TLS, and then no SP */
            assert_true(tls_client_handshake(&c));
        }
        raw_expect_end(c.fd);
        wait_at_least(&stats.peers_cut_handshake, n_cut + 1);
        tls_client_close(&c);
    }
    server_stop(&s);
}

static void a_record_that_stops_halfway_is_cut(void **state)
{
    (void)state;
    struct server s;
    struct tls_client c;
    server_init(&s);
    certs_configure(&s.cfg, CERTS_GOOD, false);
    s.cfg.body_timeout_us = 50000;
    server_start(&s, "tls");
    static const uint32_t payloads[] = {0, 60000};
    for (size_t i = 0; i < 2; i++) {
        uint64_t n_cut = stats_get(peers_cut_body_timeout), seed = i + 1;
        size_t n, sealed_n;
        open_client(&c, s.url, N_CERTS);
        uint8_t *payload = random_bytes(payloads[i], &seed);
        uint8_t *framed = framed_step(1, 0, payload, payloads[i], &n);
        uint8_t *sealed = tls_client_seal(&c, framed, n, &sealed_n);
        raw_send(c.fd, sealed, i == 0 ? 3 : sealed_n - 1); /* of a head; of the last record */
        raw_expect_end(c.fd);
        wait_at_least(&stats.peers_cut_body_timeout, n_cut + 1);
        free(sealed);
        free(framed);
        free(payload);
        tls_client_close(&c);
    }
    server_stop(&s);
}

static void a_stream_without_its_end_is_cut(void **state)
{
    (void)state;
    struct server s;
    struct tls_client c;
    start(&s, false);
    uint64_t n_cut = stats_get(peers_cut_tls);
    open_client(&c, s.url, N_CERTS);
    shutdown(c.fd, SHUT_WR);
    raw_expect_end(c.fd);
    wait_at_least(&stats.peers_cut_tls, n_cut + 1);
    tls_client_close(&c);
    server_stop(&s);
}

/* A bit of any record: nothing of it becomes a message. */
static void a_changed_bit_ends_the_connection(void **state)
{
    (void)state;
    uint64_t seed = seed_from_clock();
    struct server s;
    start(&s, false);
    for (int i = 0; i < 30; i++) {
        struct tls_client c;
        size_t n, sealed_n;
        uint64_t n_cut = stats_get(peers_cut_tls), n_steps = stats_get(steps_received);
        open_client(&c, s.url, N_CERTS);
        uint8_t *framed = framed_step(1, 64, NULL, 0, &n);
        uint8_t *sealed = tls_client_seal(&c, framed, n, &sealed_n);
        size_t at = 5 + random_mixed(&seed) % (sealed_n - 5); /* behind the record's head */
        sealed[at] ^= (uint8_t)(1u << random_mixed(&seed) % 8);
        raw_send(c.fd, sealed, sealed_n);
        raw_expect_end(c.fd);
        wait_at_least(&stats.peers_cut_tls, n_cut + 1);
        assert_int_equal(stats_get(steps_received), n_steps);
        free(sealed);
        free(framed);
        tls_client_close(&c);
    }
    server_stop(&s);
}

static void random_bytes_are_cut_and_others_are_served(void **state)
{
    (void)state;
    uint64_t seed = seed_from_clock();
    struct server s;
    struct tls_client other;
    start(&s, false);
    open_client(&other, s.url, N_CERTS);
    for (int i = 0; i < 200; i++) {
        static const uint8_t heads[3][3] = {{22, 3, 1}, {23, 3, 3}, {20, 3, 3}};
        size_t n = 1 + random_mixed(&seed) % 3000;
        uint8_t *bytes = random_bytes(n, &seed);
        if (n > 5 && i % 2 == 0) /* looks like a record */
            memcpy(bytes, heads[i / 2 % 3], 3);
        struct tls_client c;
        bool is_late = i % 4 == 3; /* after the handshakes */
        if (is_late)
            open_client(&c, s.url, N_CERTS);
        else
            tls_client_connect(&c, s.url, N_CERTS, false);
        ssize_t sent = send(c.fd, bytes, n, MSG_NOSIGNAL);
        (void)sent;
        free(bytes);
        tls_client_close(&c);
        if (i % 20 == 0)
            round_trip(&other, (uint64_t)i + 1, 5000, &seed);
    }
    tls_client_close(&other);
    wait_equal(&stats.peers, 0);
    server_stop(&s);
}

static void a_reader_that_stops_is_cut(void **state)
{
    (void)state;
    struct server s;
    struct tls_client c;
    server_init(&s);
    certs_configure(&s.cfg, CERTS_GOOD, false);
    s.cfg.write_timeout_us = 100000;
    server_start(&s, "tls");
    uint64_t n_cut = stats_get(peers_cut_slow_reader);
    open_client(&c, s.url, N_CERTS);
    for (uint64_t id = 1; id <= 8; id++) {
        size_t n;
        uint8_t *framed = framed_step(id, 4 << 20, NULL, 0, &n);
        tls_client_send(&c, framed, n);
        free(framed);
    }
    wait_at_least(&stats.peers_cut_slow_reader, n_cut + 1);
    tls_client_close(&c);
    server_stop(&s);
}

static void a_stopping_server_says_goodbye_after_its_replies(void **state)
{
    (void)state;
    struct server s;
    struct tls_client c;
    size_t n;
    start(&s, false);
    open_client(&c, s.url, N_CERTS);
    uint8_t *framed = framed_step(1, 1 << 20, NULL, 0, &n);
    engine_hold(&s.engine);
    tls_client_send(&c, framed, n);
    engine_wait_queued(&s.engine, 1);
    server_drain(&s);
    engine_release(&s.engine, false);
    expect_step_reply(&c, 1, 1 << 20, NULL, 0);
    free(framed);
    tls_client_close(&c);
    server_stop(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(libnng_req_gets_its_bytes_back_over_tls),
        cmocka_unit_test(messages_of_any_size_cross_records),
        cmocka_unit_test(records_may_arrive_byte_by_byte),
        cmocka_unit_test(replies_wait_for_a_reader_and_arrive_whole),
        cmocka_unit_test(who_ends_in_order_is_answered_and_told_goodbye),
        cmocka_unit_test(a_worker_is_known_by_its_certificate),
        cmocka_unit_test(workers_are_counted_by_their_certificate),
        cmocka_unit_test(certificates_that_are_wrong_or_missing_are_refused),
        cmocka_unit_test(servers_with_a_wrong_certificate_are_refused_by_clients),
        cmocka_unit_test(older_versions_are_refused_unless_asked_for),
        cmocka_unit_test(a_ticket_resumes_a_session_and_its_certificate),
        cmocka_unit_test(a_reload_ends_tickets),
        cmocka_unit_test(a_ticket_of_a_daemon_before_is_ignored),
        cmocka_unit_test(a_session_ends_with_its_certificate),
        cmocka_unit_test(the_cipher_is_what_both_sides_compute_fastest),
        cmocka_unit_test(a_plain_client_is_cut_at_the_tls_listener),
        cmocka_unit_test(a_tls_client_is_cut_at_the_plain_listener),
        cmocka_unit_test(handshakes_that_stop_are_cut_at_their_deadline),
        cmocka_unit_test(a_record_that_stops_halfway_is_cut),
        cmocka_unit_test(a_stream_without_its_end_is_cut),
        cmocka_unit_test(a_changed_bit_ends_the_connection),
        cmocka_unit_test(random_bytes_are_cut_and_others_are_served),
        cmocka_unit_test(a_reader_that_stops_is_cut),
        cmocka_unit_test(a_stopping_server_says_goodbye_after_its_replies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
