/* tls_stream.c: TLS between buffers. OpenSSL reads and writes through a BIO of our own, which reads
 * the caller's bytes in place and writes into one growing buffer. */
#include "proto/tls_stream.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

enum {
    MIN_OUT_BYTES = 4096,
    MAX_OUT_BYTES = 4 << 20, /* callers write far less before they send */
    MAX_RECORD_HEAD_BYTES = 128, /* what a record has beside its text, and more */
};

struct tls_stream {
    SSL *ssl;
    const uint8_t *in;
    size_t n_in;
    uint8_t *out;
    size_t n_out, out_capacity;
    char why[160];
};

/* ---- the BIO ---- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static BIO_METHOD *method;

static int bio_read(BIO *bio, char *dst, int n)
{
    struct tls_stream *s = BIO_get_data(bio);
    BIO_clear_retry_flags(bio);
    if (s->n_in == 0) {
        BIO_set_retry_read(bio);
        return -1;
    }
    size_t k = (size_t)n < s->n_in ? (size_t)n : s->n_in;
    memcpy(dst, s->in, k);
    s->in += k;
    s->n_in -= k;
    return (int)k;
}

static bool out_grow(struct tls_stream *s, size_t n)
{
    size_t capacity = s->out_capacity != 0 ? s->out_capacity : MIN_OUT_BYTES;
    while (capacity < n)
        capacity *= 2;
    uint8_t *out = capacity <= MAX_OUT_BYTES ? realloc(s->out, capacity) : NULL;
    if (out == NULL)
        return false;
    s->out = out;
    s->out_capacity = capacity;
    return true;
}

static int bio_write(BIO *bio, const char *src, int n)
{
    struct tls_stream *s = BIO_get_data(bio);
    BIO_clear_retry_flags(bio);
    if (s->n_out + (size_t)n > s->out_capacity && !out_grow(s, s->n_out + (size_t)n))
        return -1;
    memcpy(s->out + s->n_out, src, (size_t)n);
    s->n_out += (size_t)n;
    return n;
}

static long bio_ctrl(BIO *bio, int what, long n, void *p)
{
    (void)bio, (void)n, (void)p;
    return what == BIO_CTRL_FLUSH;
}

static void make_method(void)
{
    method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "attnd");
    if (method == NULL)
        return;
    BIO_meth_set_read(method, bio_read);
    BIO_meth_set_write(method, bio_write);
    BIO_meth_set_ctrl(method, bio_ctrl);
}

/* ---- life ---- */

static bool has_aes(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
    const unsigned long wanted = HWCAP_AES | HWCAP_PMULL;
    return (getauxval(AT_HWCAP) & wanted) == wanted;
#else
    return false;
#endif
}

const char *tls_stream_suites(void)
{
    return has_aes() ? "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
                     : "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384";
}

/* Sets the name or address that the server's certificate must be for. */
static bool expect_host(SSL *ssl, const char *host)
{
    unsigned char address[16];
    SSL_set_connect_state(ssl);
    SSL_set_hostflags(ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    if (inet_pton(AF_INET, host, address) == 1 || inet_pton(AF_INET6, host, address) == 1)
        return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host) == 1;
    return SSL_set1_host(ssl, host) == 1 && SSL_set_tlsext_host_name(ssl, host) == 1;
}

struct tls_stream *tls_stream_new(SSL_CTX *context, const char *host)
{
    pthread_once(&once, make_method);
    struct tls_stream *s = calloc(1, sizeof *s);
    BIO *bio = method != NULL ? BIO_new(method) : NULL;
    if (s != NULL)
        s->ssl = SSL_new(context);
    if (s == NULL || bio == NULL || s->ssl == NULL) {
        BIO_free(bio);
        tls_stream_free(s);
        return NULL;
    }
    BIO_set_data(bio, s);
    BIO_set_init(bio, 1);
    SSL_set_bio(s->ssl, bio, bio);
    SSL_set_mode(s->ssl, SSL_MODE_RELEASE_BUFFERS);
    if (host == NULL) {
        SSL_set_accept_state(s->ssl);
    } else if (!expect_host(s->ssl, host)) {
        tls_stream_free(s);
        return NULL;
    }
    return s;
}

void tls_stream_free(struct tls_stream *s)
{
    if (s == NULL)
        return;
    if (s->ssl != NULL) /* of TLS 1.3 a session outlives a connection that is cut */
        SSL_set_shutdown(s->ssl, SSL_SENT_SHUTDOWN | SSL_RECEIVED_SHUTDOWN);
    SSL_free(s->ssl);
    free(s->out);
    free(s);
}

/* ---- sessions ---- */

bool tls_stream_may_resume(const SSL_SESSION *session)
{
    X509 *cert = SSL_SESSION_get0_peer((SSL_SESSION *)(uintptr_t)session);
    return cert == NULL || X509_cmp_current_time(X509_get0_notAfter(cert)) > 0;
}

void tls_stream_resume(struct tls_stream *s, SSL_SESSION *session)
{
    (void)SSL_set_session(s->ssl, session); /* else a whole handshake */
}

bool tls_stream_is_resumed(const struct tls_stream *s)
{
    return SSL_session_reused(s->ssl) == 1;
}

/* ---- what went wrong ---- */

/* Plain messages for some of OpenSSL's reasons; for others its own words are used. */
static const struct {
    int reason;
    const char *text;
} reasons[] = {
    {SSL_R_WRONG_VERSION_NUMBER, "what came is not TLS"},
    {SSL_R_HTTP_REQUEST, "what came is HTTP, not TLS"},
    {SSL_R_UNSUPPORTED_PROTOCOL, "the peer offers no TLS version that is allowed here"},
    {SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE, "the peer has shown no certificate"},
    {SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED, "the peer wants a certificate from us"},
    {SSL_R_TLSV1_ALERT_UNKNOWN_CA, "the peer does not know the CA of our certificate"},
    {SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED, "the peer says that our certificate has expired"},
    {SSL_R_SSLV3_ALERT_BAD_CERTIFICATE, "the peer refuses our certificate"},
    {SSL_R_TLSV1_ALERT_PROTOCOL_VERSION, "the peer allows no TLS version that we offer"},
};

static void explain(struct tls_stream *s)
{
    unsigned long error = ERR_peek_error();
    long verified = SSL_get_verify_result(s->ssl);
    const char *text = ERR_reason_error_string(error);
    if (s->why[0] != '\0')
        return; /* the first reason counts */
    if (ERR_GET_REASON(error) == SSL_R_CERTIFICATE_VERIFY_FAILED && verified != X509_V_OK) {
        bool is_unknown = verified == X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY ||
                          verified == X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE ||
                          verified == X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT ||
                          verified == X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN;
        snprintf(s->why, sizeof s->why, "the peer's certificate is refused: %s%s",
                 is_unknown ? "unknown CA: " : "", X509_verify_cert_error_string(verified));
        return;
    }
    if (ERR_GET_LIB(error) == ERR_LIB_SSL)
        for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++)
            if (reasons[i].reason == ERR_GET_REASON(error))
                text = reasons[i].text;
    snprintf(s->why, sizeof s->why, "%s", text != NULL ? text : "the TLS stream is broken");
}

/* Clears errors of earlier calls, since SSL_get_error looks at the whole queue of the thread. Looks
 * first, as clearing an empty queue takes longer. */
static void forget_errors(void)
{
    if (ERR_peek_error() != 0)
        ERR_clear_error();
}

static enum tls_stream_result result_of(struct tls_stream *s, int rc)
{
    switch (SSL_get_error(s->ssl, rc)) {
    case SSL_ERROR_NONE:
        return TLS_STREAM_DONE;
    case SSL_ERROR_WANT_READ:
        return TLS_STREAM_MORE;
    case SSL_ERROR_ZERO_RETURN:
        return TLS_STREAM_CLOSED;
    default:
        explain(s);
        return TLS_STREAM_BROKEN;
    }
}

const char *tls_stream_why(const struct tls_stream *s)
{
    return s->why;
}

/* ---- reading ---- */

void tls_stream_feed(struct tls_stream *s, const uint8_t *bytes, size_t n)
{
    s->in = bytes;
    s->n_in = n;
}

enum tls_stream_result tls_stream_handshake(struct tls_stream *s)
{
    forget_errors();
    return result_of(s, SSL_do_handshake(s->ssl));
}

enum tls_stream_result tls_stream_read(struct tls_stream *s, void *dst, size_t n, size_t *out_n)
{
    *out_n = 0;
    if (s->n_in == 0 && SSL_has_pending(s->ssl) == 0 && SSL_get_shutdown(s->ssl) == 0)
        return TLS_STREAM_MORE;
    forget_errors();
    return result_of(s, SSL_read_ex(s->ssl, dst, n, out_n));
}

bool tls_stream_is_inside(struct tls_stream *s)
{
    return SSL_has_pending(s->ssl) == 1;
}

bool tls_stream_peer_name(struct tls_stream *s, char out[TLS_STREAM_NAME_BYTES])
{
    X509 *cert = SSL_get0_peer_certificate(s->ssl);
    unsigned char *name = NULL;
    if (cert == NULL || SSL_get_verify_result(s->ssl) != X509_V_OK)
        return false;
    X509_NAME *subject = X509_get_subject_name(cert);
    int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
    int n = at < 0 ? -1
                   : ASN1_STRING_to_UTF8(
                         &name, X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at)));
    /* never cut short: it might be another's name then */
    bool is_plain = n > 0 && n < TLS_STREAM_NAME_BYTES && memchr(name, '\0', (size_t)n) == NULL;
    if (is_plain)
        snprintf(out, TLS_STREAM_NAME_BYTES, "%.*s", n, (const char *)name);
    OPENSSL_free(name);
    return is_plain;
}

/* ---- writing ---- */

/* Makes room for the records of the first bytes of the pieces at once, instead of growing with each
 * of them. */
static void reserve(struct tls_stream *s, const struct iovec *pieces, size_t n_pieces, size_t max)
{
    size_t n = 0;
    for (size_t i = 0; i < n_pieces; i++)
        n += pieces[i].iov_len;
    n = n < max ? n : max;
    n += s->n_out + (n / TLS_STREAM_RECORD_BYTES + 1) * MAX_RECORD_HEAD_BYTES;
    if (n > s->out_capacity)
        (void)out_grow(s, n); /* else writing fails where it has to grow */
}

static bool put(struct tls_stream *s, const void *bytes, size_t n)
{
    size_t written;
    forget_errors();
    if (n == 0 || SSL_write_ex(s->ssl, bytes, n, &written) == 1)
        return true;
    explain(s);
    return false;
}

ssize_t tls_stream_write(struct tls_stream *s, const struct iovec *pieces, size_t n_pieces,
                         size_t max)
{
    uint8_t record[TLS_STREAM_RECORD_BYTES]; /* pieces smaller than a record are gathered here */
    size_t n = 0, done = 0;
    reserve(s, pieces, n_pieces, max);
    for (size_t i = 0; i < n_pieces && done < max; i++) {
        const uint8_t *p = pieces[i].iov_base;
        size_t left = pieces[i].iov_len < max - done ? pieces[i].iov_len : max - done;
        done += left;
        while (left > 0) {
            size_t k = left;
            if (n == 0 && left >= sizeof record) {
                k = left - left % sizeof record;
                if (!put(s, p, k))
                    return -1;
            } else {
                k = left < sizeof record - n ? left : sizeof record - n;
                memcpy(record + n, p, k);
                n += k;
            }
            if (n == sizeof record) {
                if (!put(s, record, n))
                    return -1;
                n = 0;
            }
            p += k;
            left -= k;
        }
    }
    return put(s, record, n) ? (ssize_t)done : -1;
}

void tls_stream_end(struct tls_stream *s)
{
    forget_errors();
    if (SSL_is_init_finished(s->ssl) && s->why[0] == '\0')
        SSL_shutdown(s->ssl);
}

/* ---- what goes out ---- */

const uint8_t *tls_stream_pending(const struct tls_stream *s, size_t *out_n)
{
    *out_n = s->n_out;
    return s->out;
}

void tls_stream_sent(struct tls_stream *s, size_t n)
{
    s->n_out -= n;
    if (s->n_out > 0) {
        memmove(s->out, s->out + n, s->n_out);
    } else { /* most connections are idle most of the time */
        free(s->out);
        s->out = NULL;
        s->out_capacity = 0;
    }
}

uint8_t *tls_stream_take(struct tls_stream *s, size_t *out_n)
{
    uint8_t *out = s->n_out > 0 ? s->out : NULL;
    *out_n = s->n_out;
    if (out != NULL) {
        s->out = NULL;
        s->n_out = s->out_capacity = 0;
    }
    return out;
}
