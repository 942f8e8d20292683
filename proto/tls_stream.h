/* tls_stream.h: one TLS connection between two buffers: what came from the wire is fed in, what
 * must go out is taken out. Over OpenSSL; knows no socket and never blocks.
 *
 * Versions, certificates and what is asked of the other side are the context's (SSL_CTX), which the
 * daemon and libattn make. One thread at a time.
 *
 * The kernel's TLS is not used: OpenSSL 3.0 has it only for sockets of its own. libattn links
 * libssl rather than loading it when it is needed, which would hide the dependency from packages
 * and their updates and rule out static linking.
 */
#ifndef ATTND_PROTO_TLS_STREAM_H
#define ATTND_PROTO_TLS_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

struct ssl_ctx_st;
struct tls_stream;

#define TLS_STREAM_NAME_BYTES 64
#define TLS_STREAM_RECORD_BYTES 16384u /* of plaintext, at most */

enum tls_stream_result {
    TLS_STREAM_DONE, /* handshake: over. read: bytes */
    TLS_STREAM_MORE, /* all that was fed is used up */
    TLS_STREAM_CLOSED, /* the other side has ended its side in order (close_notify) */
    TLS_STREAM_BROKEN, /* tls_stream_why says how; what is pending may be sent, nothing else */
};

/* The server's side, host NULL; or a client's, which checks that the certificate is host's (a name
 * or an address). NULL: out of memory, or host is neither. */
struct tls_stream *tls_stream_new(struct ssl_ctx_st *context, const char *host);
void tls_stream_free(struct tls_stream *s); /* NULL is fine */

/* Bytes from the wire; borrowed until handshake or read has said MORE, CLOSED or BROKEN. What was
 * fed before must be used up. */
void tls_stream_feed(struct tls_stream *s, const uint8_t *bytes, size_t n);
/* Begins or goes on. */
enum tls_stream_result tls_stream_handshake(struct tls_stream *s);
/* Plaintext, at most n bytes of it, into dst: DONE with *out_n. */
enum tls_stream_result tls_stream_read(struct tls_stream *s, void *dst, size_t n, size_t *out_n);
/* Part of a record has come and part is missing. */
bool tls_stream_is_inside(struct tls_stream *s);

/* Encrypts the first bytes of the pieces, at most max of them, in records as large as they can be.
 * -1: broken, or out of memory. After the handshake. */
ssize_t tls_stream_write(struct tls_stream *s, const struct iovec *pieces, size_t n_pieces,
                         size_t max);
/* Says that nothing more will be written. */
void tls_stream_end(struct tls_stream *s);

/* What must go out: its bytes, and how many. */
const uint8_t *tls_stream_pending(const struct tls_stream *s, size_t *out_n);
/* The first n of them are gone. */
void tls_stream_sent(struct tls_stream *s, size_t n);
/* All of them leave in memory of the caller's, to be freed; NULL: none. */
uint8_t *tls_stream_take(struct tls_stream *s, size_t *out_n);

/* The first common name of the other side's certificate, which was checked. False: it has shown
 * none, or the name is longer. */
bool tls_stream_peer_name(struct tls_stream *s, char out[TLS_STREAM_NAME_BYTES]);
/* Why it is broken, a part of a sentence. */
const char *tls_stream_why(const struct tls_stream *s);

#endif
