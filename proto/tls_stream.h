/* tls_stream.h: one TLS connection between two buffers: the caller feeds in what came from the wire
 * and sends what must go out. Over OpenSSL; knows no socket and never blocks.
 *
 * Versions, certificates and what is required of the other side are set in the context (SSL_CTX),
 * which the daemon and libattn make. A stream is used by one thread at a time.
 *
 * The kernel's TLS is not used: OpenSSL 3.0 has it only for sockets of its own. libattn links
 * libssl instead of loading it when needed, which would hide the dependency from packages and their
 * updates and rule out static linking.
 */
#ifndef ATTND_PROTO_TLS_STREAM_H
#define ATTND_PROTO_TLS_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

struct ssl_ctx_st;
struct ssl_session_st;
struct tls_stream;

#define TLS_STREAM_NAME_BYTES 64
#define TLS_STREAM_RECORD_BYTES 16384u /* most plaintext in a record */

enum tls_stream_result {
    TLS_STREAM_DONE, /* the handshake is over, or bytes were read */
    TLS_STREAM_MORE, /* all input is used up: feed more */
    TLS_STREAM_CLOSED, /* the other side has closed in order (close_notify) */
    TLS_STREAM_BROKEN, /* tls_stream_why says how; pending bytes may be sent, nothing else */
};

/* The cipher suites of TLS 1.3, the one that this processor computes fastest first: AES where it
 * has instructions for it, else ChaCha20. For SSL_CTX_set_ciphersuites. */
const char *tls_stream_suites(void);
/* Makes a stream: the server's side if host is NULL, else a client's, which checks that the
 * certificate is for host (a name or an address). NULL: out of memory, or host is neither. */
struct tls_stream *tls_stream_new(struct ssl_ctx_st *context, const char *host);
void tls_stream_free(struct tls_stream *s); /* NULL is allowed */
/* Whether a session may be resumed: the other side's certificate, which was checked when it began,
 * has not expired since. */
bool tls_stream_may_resume(const struct ssl_session_st *session);
/* Before a client's handshake: offers to resume a session, of which it takes a reference. The
 * server decides. */
void tls_stream_resume(struct tls_stream *s, struct ssl_session_st *session);
/* After the handshake: whether it has resumed a session. */
bool tls_stream_is_resumed(const struct tls_stream *s);

/* Feeds bytes from the wire, which are borrowed until handshake or read returns MORE, CLOSED or
 * BROKEN. What was fed before must be used up. */
void tls_stream_feed(struct tls_stream *s, const uint8_t *bytes, size_t n);
/* Begins or continues the handshake. */
enum tls_stream_result tls_stream_handshake(struct tls_stream *s);
/* Reads at most n bytes of plaintext into dst: DONE with *out_n. */
enum tls_stream_result tls_stream_read(struct tls_stream *s, void *dst, size_t n, size_t *out_n);
/* True if part of a record has come and the rest is missing. */
bool tls_stream_is_inside(struct tls_stream *s);

/* Encrypts the first bytes of the pieces, at most max, in records as large as possible. Returns the
 * number of bytes taken; -1: broken, or out of memory. Only after the handshake. */
ssize_t tls_stream_write(struct tls_stream *s, const struct iovec *pieces, size_t n_pieces,
                         size_t max);
/* Tells the other side that nothing more will be written (close_notify). */
void tls_stream_end(struct tls_stream *s);

/* The bytes that must go out, *out_n of them; borrowed until the next call. */
const uint8_t *tls_stream_pending(const struct tls_stream *s, size_t *out_n);
/* Removes the first n of them, which were sent. */
void tls_stream_sent(struct tls_stream *s, size_t n);
/* Gives all of them to the caller, who frees the memory; NULL: there are none. */
uint8_t *tls_stream_take(struct tls_stream *s, size_t *out_n);

/* The first common name in the other side's certificate, which was checked. false: it has shown no
 * certificate, or the name is longer. */
bool tls_stream_peer_name(struct tls_stream *s, char out[TLS_STREAM_NAME_BYTES]);
/* Why the stream is broken: part of a sentence. */
const char *tls_stream_why(const struct tls_stream *s);

#endif
