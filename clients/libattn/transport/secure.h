/* secure.h: TLS on a socket that never blocks, for sp.c. One thread receives, any thread
 * sends; a lock of its own keeps them apart. */
#ifndef ATTN_SECURE_H
#define ATTN_SECURE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "clients/libattn/transport/transport.h"

struct secure;

/* Certificates that connections to host show and accept. ATTN_EINVAL: a file; ATTN_ENOMEM. */
attn_status secure_open(const char *host, const struct client_credentials *files,
                        struct secure **out_s, char *why, size_t why_bytes);
void secure_close(struct secure *s); /* NULL is fine. No lock: right in a forked child, too */

/* A new connection, which offers to resume the session of the last; false: no memory. */
bool secure_begin(struct secure *s);
/* Sends close_notify to the daemon, if the socket takes it at once. */
void secure_goodbye(struct secure *s, int fd);
/* The connection is gone. */
void secure_end(struct secure *s);

enum secure_result { SECURE_YES, SECURE_NOT_YET, SECURE_NO };
/* Goes on with the handshake. SECURE_NO: secure_why says why. */
enum secure_result secure_handshake(struct secure *s, int fd);
/* As recv(2): bytes; 0 the peer has ended its side; -1 with errno, EAGAIN, or EPROTO where
 * secure_why says why. */
ssize_t secure_recv(struct secure *s, int fd, void *dst, size_t n);
/* As sendmsg(2), but what it takes may wait here until the next secure_send or secure_flush. */
ssize_t secure_send(struct secure *s, int fd, const struct iovec *pieces, size_t n_pieces);
/* True: nothing waits. */
bool secure_flush(struct secure *s, int fd);
/* The receiving thread's; valid until its next call. */
const char *secure_why(const struct secure *s);

#endif
