/* tls_client.h: a client that can do over TLS what no library would, on a blocking socket. */
#ifndef TESTS_DAEMON_TLS_CLIENT_H
#define TESTS_DAEMON_TLS_CLIENT_H

#include "proto/tls_stream.h"
#include "tests/daemon/transport/certs.h"

struct tls_client {
    int fd;
    struct ssl_ctx_st *context;
    struct tls_stream *tls;
    struct ssl_session_st *session; /* of the last ticket that came; NULL: none */
    uint8_t in[65536];
    bool is_over; /* the connection has ended */
};

/* Connects and does nothing else; own: whose tenant.crt is shown, N_CERTS none. The client trusts
 * the good CA. */
void tls_client_connect(struct tls_client *c, const char *url, enum certs own, bool is_1_2);
/* Ends the connection and makes another, which offers the session; likewise to another server. */
void tls_client_connect_again(struct tls_client *c, const char *url);
/* true: the handshake is over; false: refused, tls_stream_why says why. */
bool tls_client_handshake(struct tls_client *c);
void tls_client_send(struct tls_client *c, const void *bytes, size_t n);
/* Encrypts without sending: the caller's to free. */
uint8_t *tls_client_seal(struct tls_client *c, const void *bytes, size_t n, size_t *out_n);
/* Exactly n bytes; false: the stream ended before. */
bool tls_client_receive(struct tls_client *c, void *bytes, size_t n);
/* Waits for the end; true: in order, with close_notify. */
bool tls_client_wait_end(struct tls_client *c);
void tls_client_close(struct tls_client *c); /* without close_notify */

#endif
