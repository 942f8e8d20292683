/* tls_client.c: carries the bytes of one tls_stream over a socket. The daemon's certificate is
 * verified against the good CA.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/daemon/transport/tls_client.h"

#include <errno.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/daemon/transport/sp_server.h"

static int on_session(SSL *ssl, SSL_SESSION *session)
{
    struct tls_client *c = SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl));
    SSL_SESSION_free(c->session);
    c->session = session;
    return 1;
}

void tls_client_connect(struct tls_client *c, const char *url, enum certs own, bool is_1_2)
{
    char *ca = certs_file(CERTS_GOOD, "ca.crt");
    memset(c, 0, sizeof *c);
    c->context = SSL_CTX_new(TLS_client_method());
    assert_non_null(c->context);
    SSL_CTX_set_verify(c->context, SSL_VERIFY_PEER, NULL);
    SSL_CTX_set_app_data(c->context, c);
    SSL_CTX_set_session_cache_mode(c->context,
                                   SSL_SESS_CACHE_CLIENT | SSL_SESS_CACHE_NO_INTERNAL_STORE);
    SSL_CTX_sess_set_new_cb(c->context, on_session);
    if (is_1_2)
        SSL_CTX_set_max_proto_version(c->context, TLS1_2_VERSION);
    assert_int_equal(SSL_CTX_load_verify_file(c->context, ca), 1);
    free(ca);
    if (own != N_CERTS) {
        char *cert = certs_file(own, "alpha.crt"), *key = certs_file(own, "alpha.key");
        assert_int_equal(SSL_CTX_use_certificate_chain_file(c->context, cert), 1);
        assert_int_equal(SSL_CTX_use_PrivateKey_file(c->context, key, SSL_FILETYPE_PEM), 1);
        free(cert);
        free(key);
    }
    c->tls = tls_stream_new(c->context, "localhost");
    assert_non_null(c->tls);
    c->fd = raw_connect(url);
}

void tls_client_connect_again(struct tls_client *c, const char *url)
{
    close(c->fd);
    tls_stream_free(c->tls);
    c->tls = tls_stream_new(c->context, "localhost");
    assert_non_null(c->tls);
    c->is_over = false;
    if (c->session != NULL)
        tls_stream_resume(c->tls, c->session);
    c->fd = raw_connect(url);
}

static void flush(struct tls_client *c)
{
    size_t n;
    uint8_t *bytes = tls_stream_take(c->tls, &n);
    for (size_t at = 0; at < n && !c->is_over;) {
        ssize_t k = send(c->fd, bytes + at, n - at, MSG_NOSIGNAL);
        if (k <= 0)
            c->is_over = true;
        else
            at += (size_t)k;
    }
    free(bytes);
}

static bool feed(struct tls_client *c)
{
    ssize_t n;
    do
        n = recv(c->fd, c->in, sizeof c->in, 0);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        fail_msg("nothing came from the daemon");
    if (n <= 0) {
        c->is_over = true;
        return false;
    }
    tls_stream_feed(c->tls, c->in, (size_t)n);
    return true;
}

bool tls_client_handshake(struct tls_client *c)
{
    for (;;) {
        enum tls_stream_result r = tls_stream_handshake(c->tls);
        flush(c);
        if (r != TLS_STREAM_MORE)
            return r == TLS_STREAM_DONE;
        if (!feed(c))
            return false;
    }
}

uint8_t *tls_client_seal(struct tls_client *c, const void *bytes, size_t n, size_t *out_n)
{
    struct iovec piece = {(void *)(uintptr_t)bytes, n};
    assert_int_equal(tls_stream_write(c->tls, &piece, 1, n), n);
    return tls_stream_take(c->tls, out_n);
}

void tls_client_send(struct tls_client *c, const void *bytes, size_t n)
{
    for (size_t at = 0; at < n;) {
        struct iovec piece = {(uint8_t *)(uintptr_t)bytes + at, n - at};
        ssize_t k = tls_stream_write(c->tls, &piece, 1, 1 << 20);
        assert_true(k > 0);
        flush(c);
        at += (size_t)k;
    }
}

bool tls_client_receive(struct tls_client *c, void *bytes, size_t n)
{
    for (size_t at = 0; at < n;) {
        size_t got;
        enum tls_stream_result r = tls_stream_read(c->tls, (uint8_t *)bytes + at, n - at, &got);
        at += got;
        if (r == TLS_STREAM_MORE && !feed(c))
            return false;
        if (r == TLS_STREAM_CLOSED || r == TLS_STREAM_BROKEN)
            return false;
    }
    return true;
}

bool tls_client_wait_end(struct tls_client *c)
{
    for (;;) {
        uint8_t byte[4096];
        size_t got;
        enum tls_stream_result r = tls_stream_read(c->tls, byte, sizeof byte, &got);
        if (r == TLS_STREAM_CLOSED)
            return true;
        if (r == TLS_STREAM_BROKEN || (r == TLS_STREAM_MORE && !feed(c)))
            return false;
    }
}

void tls_client_close(struct tls_client *c)
{
    close(c->fd);
    tls_stream_free(c->tls);
    SSL_SESSION_free(c->session);
    SSL_CTX_free(c->context);
}
