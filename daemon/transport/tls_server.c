/* tls_server.c: makes the OpenSSL context of new connections, and replaces it on reload.
 *
 * Sessions are resumed by tickets, which save both sides the certificates' cryptography; keys are
 * still exchanged anew, so only where nothing older than TLS 1.3 is let in. A ticket's key is the
 * context's, so tickets end with a reload or a restart: whoever shows one then makes a whole
 * handshake. There is no early data, and no renegotiation: 1.3 has none, and in 1.2 it is refused.
 */
#include "daemon/transport/tls_server.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/credential.h"
#include "daemon/base/log.h"
#include "proto/tls_stream.h"

enum { TICKET_SECONDS = 2 * 60 * 60 };

struct tls_server {
    pthread_mutex_t lock;
    SSL_CTX *context; /* under the lock; connections hold references of their own */
};

#define FAIL(...) (snprintf(why, why_bytes, __VA_ARGS__), ATTN_EINVAL)

static const char *last_error(void)
{
    const char *text = ERR_reason_error_string(ERR_peek_last_error());
    return text != NULL ? text : "nothing in it can be used";
}

/* Refuses keys with a pass phrase, instead of asking for it on the terminal. */
static int no_pass_phrase(char *out, int n, int is_write, void *user)
{
    (void)out, (void)n, (void)is_write, (void)user;
    return 0;
}

static attn_status use_key(SSL_CTX *context, const char *name, char *why, size_t why_bytes)
{
    char reason[256];
    FILE *f = credential_open(name, true, reason, sizeof reason);
    if (f == NULL)
        return FAIL("listen.tls_key: %s", reason);
    EVP_PKEY *key = PEM_read_PrivateKey(f, NULL, no_pass_phrase, NULL);
    fclose(f);
    attn_status st = ATTN_OK;
    if (key == NULL)
        st = FAIL("listen.tls_key: %s holds no private key that can be read without a pass "
                  "phrase: %s",
                  name, last_error());
    else if (SSL_CTX_use_PrivateKey(context, key) != 1 || SSL_CTX_check_private_key(context) != 1)
        st = FAIL("listen.tls_key: %s is not the key of listen.tls_cert: %s", name, last_error());
    EVP_PKEY_free(key);
    return st;
}

/* Uses every certificate of a file: as the daemon's own and its chain, or (is_ca) as CAs. */
static attn_status use_certs(SSL_CTX *context, const char *setting, const char *name, bool is_ca,
                             char *why, size_t why_bytes)
{
    char reason[256];
    FILE *f = credential_open(name, false, reason, sizeof reason);
    if (f == NULL)
        return FAIL("%s: %s", setting, reason);
    uint32_t n = 0;
    X509 *cert;
    attn_status st = ATTN_OK;
    while (st == ATTN_OK && (cert = PEM_read_X509(f, NULL, no_pass_phrase, NULL)) != NULL) {
        bool is_taken;
        if (is_ca)
            is_taken = X509_STORE_add_cert(SSL_CTX_get_cert_store(context), cert) == 1 &&
                       SSL_CTX_add_client_CA(context, cert) == 1;
        else
            is_taken = (n == 0 ? SSL_CTX_use_certificate(context, cert)
                               : SSL_CTX_add1_chain_cert(context, cert)) == 1;
        if (!is_taken)
            st = FAIL("%s: certificate %u of %s cannot be used: %s", setting, n + 1, name,
                      last_error());
        else if (X509_cmp_current_time(X509_get0_notAfter(cert)) < 0)
            log_warn("%s: certificate %u of %s has expired; peers will refuse it", setting, n + 1,
                     name);
        X509_free(cert);
        n++;
    }
    fclose(f);
    ERR_clear_error(); /* reaching the end of the file counts as an error */
    return st == ATTN_OK && n == 0 ? FAIL("%s: %s holds no certificate (PEM)", setting, name) : st;
}

/* A ticket carries the worker's certificate as it was checked then; here is checked what may have
 * changed since. What is not used is ignored: a whole handshake follows, and a new ticket. */
static SSL_TICKET_RETURN on_ticket(SSL *ssl, SSL_SESSION *session, const unsigned char *name,
                                   size_t name_bytes, SSL_TICKET_STATUS status, void *arg)
{
    (void)ssl, (void)name, (void)name_bytes, (void)arg;
    bool is_ours = status == SSL_TICKET_SUCCESS || status == SSL_TICKET_SUCCESS_RENEW;
    return is_ours && tls_stream_may_resume(session) ? SSL_TICKET_RETURN_USE_RENEW
                                                     : SSL_TICKET_RETURN_IGNORE_RENEW;
}

static bool set_tickets(SSL_CTX *context)
{
    static const unsigned char name[] = "attnd";
    SSL_CTX_set_timeout(context, TICKET_SECONDS);
    return SSL_CTX_set_session_id_context(context, name, sizeof name - 1) == 1 &&
           SSL_CTX_set_session_ticket_cb(context, NULL, on_ticket, NULL) == 1;
}

static bool set_versions(SSL_CTX *context, const struct config *cfg)
{
    bool has_1_2 = strcmp(cfg->tls_min_version, "1.2") == 0;
    SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION |
                                     SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_PRIORITIZE_CHACHA |
                                     (has_1_2 ? SSL_OP_NO_TICKET : 0));
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    return SSL_CTX_set_num_tickets(context, has_1_2 ? 0 : 1) == 1 && set_tickets(context) &&
           /* our order, but for a worker that wants ChaCha20 most, for want of AES instructions */
           SSL_CTX_set_ciphersuites(context, tls_stream_suites()) == 1 &&
           SSL_CTX_set_min_proto_version(context, has_1_2 ? TLS1_2_VERSION : TLS1_3_VERSION) == 1 &&
           (!has_1_2 || SSL_CTX_set_cipher_list(context, "ECDHE+AESGCM:ECDHE+CHACHA20") == 1);
}

static attn_status context_open(const struct config *cfg, SSL_CTX **out_context, char *why,
                                size_t why_bytes)
{
    SSL_CTX *context = SSL_CTX_new(TLS_server_method());
    if (context == NULL || !set_versions(context, cfg)) {
        snprintf(why, why_bytes, "TLS cannot be set up: %s", last_error());
        SSL_CTX_free(context);
        return ATTN_ENOMEM;
    }
    attn_status st = use_certs(context, "listen.tls_cert", cfg->tls_cert, false, why, why_bytes);
    if (st == ATTN_OK)
        st = use_key(context, cfg->tls_key, why, why_bytes);
    if (st == ATTN_OK && cfg->tls_ca[0] != '\0') {
        bool is_required = strcmp(cfg->tls_client_cert, "required") == 0;
        SSL_CTX_set_verify(
            context, SSL_VERIFY_PEER | (is_required ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT : 0), NULL);
        st = use_certs(context, "listen.tls_ca", cfg->tls_ca, true, why, why_bytes);
    }
    if (st != ATTN_OK) {
        SSL_CTX_free(context);
        return st;
    }
    *out_context = context;
    return ATTN_OK;
}

attn_status tls_server_open(const struct config *cfg, struct tls_server **out_s, char *why,
                            size_t why_bytes)
{
    struct tls_server *s = calloc(1, sizeof *s);
    if (s == NULL) {
        snprintf(why, why_bytes, "no memory for TLS");
        return ATTN_ENOMEM;
    }
    attn_status st = context_open(cfg, &s->context, why, why_bytes);
    if (st != ATTN_OK) {
        free(s);
        return st;
    }
    pthread_mutex_init(&s->lock, NULL);
    *out_s = s;
    return ATTN_OK;
}

void tls_server_close(struct tls_server *s)
{
    if (s == NULL)
        return;
    SSL_CTX_free(s->context);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

attn_status tls_server_reload(struct tls_server *s, const struct config *cfg, char *why,
                              size_t why_bytes)
{
    SSL_CTX *now;
    attn_status st = context_open(cfg, &now, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    pthread_mutex_lock(&s->lock);
    SSL_CTX *old = s->context;
    s->context = now;
    pthread_mutex_unlock(&s->lock);
    SSL_CTX_free(old);
    return ATTN_OK;
}

SSL_CTX *tls_server_take(struct tls_server *s)
{
    pthread_mutex_lock(&s->lock);
    SSL_CTX *context = s->context;
    SSL_CTX_up_ref(context);
    pthread_mutex_unlock(&s->lock);
    return context;
}
