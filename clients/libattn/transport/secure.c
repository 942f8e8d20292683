/* secure.c: TLS over a socket that never blocks: what certificates must be, the handshake, and
 * bytes in and out through proto/tls_stream.h. */
#include "clients/libattn/transport/secure.h"

#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "proto/tls_stream.h"

enum {
    IN_BYTES = 64 << 10,
    PIECE_BYTES = 64 << 10, /* encrypted and sent at a time, which the daemon decrypts meanwhile */
};

struct secure {
    SSL_CTX *context;
    char *host;
    pthread_mutex_t lock;
    struct tls_stream *tls; /* NULL: no connection */
    SSL_SESSION *session; /* to be resumed by the next connection; NULL: none. Used once */
    bool has_more; /* what is in `in` is not used up */
    char why[256];
    uint8_t in[IN_BYTES]; /* the receiving thread's */
};

#define FAIL(...) (snprintf(why, why_bytes, __VA_ARGS__), ATTN_EINVAL)

/* Why a file can't be used: what the system said of it, which comes first, or what OpenSSL did. */
static const char *last_error(void)
{
    unsigned long first = ERR_peek_error();
    const char *text = ERR_SYSTEM_ERROR(first) ? strerrordesc_np(ERR_GET_REASON(first))
                                               : ERR_reason_error_string(ERR_peek_last_error());
    return text != NULL ? text : "nothing in it can be used";
}

static attn_status use_files(SSL_CTX *context, const struct client_credentials *f, char *why,
                             size_t why_bytes)
{
    if (f->ca_file == NULL) {
        SSL_CTX_set_default_verify_paths(context);
    } else if (SSL_CTX_load_verify_file(context, f->ca_file) != 1) {
        return FAIL("ca_file %.150s (ATTND_CA_FILE): %s", f->ca_file, last_error());
    }
    if (f->cert_file == NULL && f->cert_key_file == NULL)
        return ATTN_OK;
    if (f->cert_file == NULL || f->cert_key_file == NULL)
        return FAIL("cert_file and cert_key_file (ATTND_TLS_CERT_FILE, ATTND_TLS_CERT_KEY_FILE) "
                    "need each other");
    if (SSL_CTX_use_certificate_chain_file(context, f->cert_file) != 1)
        return FAIL("cert_file %.150s (ATTND_TLS_CERT_FILE): %s", f->cert_file, last_error());
    if (SSL_CTX_use_PrivateKey_file(context, f->cert_key_file, SSL_FILETYPE_PEM) != 1 ||
        SSL_CTX_check_private_key(context) != 1)
        return FAIL("cert_key_file %.150s (ATTND_TLS_CERT_KEY_FILE): %s", f->cert_key_file,
                    last_error());
    return ATTN_OK;
}

/* A pass phrase can't be asked for. */
static int no_pass_phrase(char *out, int n, int is_write, void *user)
{
    (void)out, (void)n, (void)is_write, (void)user;
    return 0;
}

/* The daemon has sent a ticket: called while the connection reads, under the lock. */
static int on_session(SSL *ssl, SSL_SESSION *session)
{
    struct secure *s = SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl));
    SSL_SESSION_free(s->session);
    s->session = session;
    return 1; /* the reference is ours */
}

attn_status secure_open(const char *host, const struct client_credentials *files,
                        struct secure **out_s, char *why, size_t why_bytes)
{
    struct secure *s = calloc(1, sizeof *s);
    if (s != NULL) {
        pthread_mutex_init(&s->lock, NULL);
        s->host = strdup(host);
        s->context = SSL_CTX_new(TLS_client_method());
    }
    if (s == NULL || s->host == NULL || s->context == NULL ||
        SSL_CTX_set_min_proto_version(s->context, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_ciphersuites(s->context, tls_stream_suites()) != 1 ||
        SSL_CTX_set_app_data(s->context, s) != 1) {
        snprintf(why, why_bytes, "no memory for TLS");
        secure_close(s);
        return ATTN_ENOMEM;
    }
    SSL_CTX_set_verify(s->context, SSL_VERIFY_PEER, NULL);
    SSL_CTX_set_default_passwd_cb(s->context, no_pass_phrase);
    SSL_CTX_set_session_cache_mode(s->context,
                                   SSL_SESS_CACHE_CLIENT | SSL_SESS_CACHE_NO_INTERNAL_STORE);
    SSL_CTX_sess_set_new_cb(s->context, on_session);
    ERR_clear_error();
    attn_status st = use_files(s->context, files, why, why_bytes);
    ERR_clear_error();
    if (st != ATTN_OK)
        secure_close(s);
    else
        *out_s = s;
    return st;
}

void secure_close(struct secure *s)
{
    if (s == NULL)
        return;
    tls_stream_free(s->tls);
    SSL_SESSION_free(s->session);
    SSL_CTX_free(s->context);
    free(s->host);
    free(s);
}

bool secure_begin(struct secure *s)
{
    pthread_mutex_lock(&s->lock);
    s->tls = tls_stream_new(s->context, s->host);
    if (s->tls != NULL && s->session != NULL && tls_stream_may_resume(s->session))
        tls_stream_resume(s->tls, s->session);
    SSL_SESSION_free(s->session);
    s->session = NULL;
    s->has_more = false;
    pthread_mutex_unlock(&s->lock);
    return s->tls != NULL;
}

void secure_end(struct secure *s)
{
    pthread_mutex_lock(&s->lock);
    tls_stream_free(s->tls);
    s->tls = NULL;
    pthread_mutex_unlock(&s->lock);
}

const char *secure_why(const struct secure *s)
{
    return s->why;
}

/* ---- under the lock ---- */

static bool flush_locked(struct secure *s, int fd)
{
    size_t n;
    const uint8_t *bytes;
    while (bytes = tls_stream_pending(s->tls, &n), n > 0) {
        ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL);
        if (sent <= 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return false;
        tls_stream_sent(s->tls, (size_t)sent);
    }
    return true;
}

static void set_why(struct secure *s)
{
    snprintf(s->why, sizeof s->why, "TLS with %.60s: %s", s->host, tls_stream_why(s->tls));
}

/* Feeds what the socket has: > 0; 0: the peer is gone; -1 with errno. */
static ssize_t feed_locked(struct secure *s, int fd)
{
    ssize_t n = recv(fd, s->in, sizeof s->in, 0);
    if (n > 0)
        tls_stream_feed(s->tls, s->in, (size_t)n);
    s->has_more = n > 0;
    return n;
}

static enum secure_result handshake_locked(struct secure *s, int fd)
{
    for (;;) {
        enum tls_stream_result r = tls_stream_handshake(s->tls);
        flush_locked(s, fd); /* what stays is small, and follows the next time */
        if (r == TLS_STREAM_DONE)
            return SECURE_YES;
        if (r != TLS_STREAM_MORE) {
            set_why(s);
            return SECURE_NO;
        }
        ssize_t n = feed_locked(s, fd);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return SECURE_NOT_YET;
        if (n <= 0) {
            snprintf(s->why, sizeof s->why, "TLS with %.60s: %s", s->host,
                     n == 0 ? "the peer hung up in the handshake; does it speak TLS?"
                            : strerror(errno));
            return SECURE_NO;
        }
    }
}

static ssize_t recv_locked(struct secure *s, int fd, void *dst, size_t n)
{
    size_t got;
    ssize_t fed = 1;
    for (;;) {
        enum tls_stream_result r = TLS_STREAM_MORE;
        if (s->has_more || fed > 0)
            r = tls_stream_read(s->tls, dst, n, &got);
        if (r == TLS_STREAM_DONE)
            return (ssize_t)got;
        if (r == TLS_STREAM_CLOSED)
            return 0;
        if (r == TLS_STREAM_BROKEN) {
            set_why(s);
            errno = EPROTO;
            return -1;
        }
        fed = feed_locked(s, fd);
        if (fed < 0)
            return -1;
        if (fed == 0) {
            snprintf(s->why, sizeof s->why, "TLS with %.60s: the connection was cut", s->host);
            errno = EPROTO;
            return -1;
        }
    }
}

/* ---- the calls ---- */

enum secure_result secure_handshake(struct secure *s, int fd)
{
    pthread_mutex_lock(&s->lock);
    enum secure_result r = handshake_locked(s, fd);
    pthread_mutex_unlock(&s->lock);
    return r;
}

ssize_t secure_recv(struct secure *s, int fd, void *dst, size_t n)
{
    pthread_mutex_lock(&s->lock);
    ssize_t got = recv_locked(s, fd, dst, n);
    pthread_mutex_unlock(&s->lock);
    return got;
}

ssize_t secure_send(struct secure *s, int fd, const struct iovec *pieces, size_t n_pieces)
{
    ssize_t n = -1;
    pthread_mutex_lock(&s->lock);
    if (!flush_locked(s, fd))
        errno = EAGAIN; /* if it is broken, the receiving thread will see */
    else if ((n = tls_stream_write(s->tls, pieces, n_pieces, PIECE_BYTES)) < 0)
        errno = EPROTO;
    else
        flush_locked(s, fd);
    pthread_mutex_unlock(&s->lock);
    return n;
}

void secure_goodbye(struct secure *s, int fd)
{
    pthread_mutex_lock(&s->lock);
    if (s->tls != NULL && flush_locked(s, fd)) {
        tls_stream_end(s->tls);
        flush_locked(s, fd);
    }
    pthread_mutex_unlock(&s->lock);
}

bool secure_flush(struct secure *s, int fd)
{
    pthread_mutex_lock(&s->lock);
    bool is_empty = flush_locked(s, fd);
    pthread_mutex_unlock(&s->lock);
    return is_empty;
}
