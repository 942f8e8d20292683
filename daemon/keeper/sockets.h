/* sockets.h: opens listening sockets: one that a keeper (keep.h) has held, with the connections in
 * its backlog, or a new one, which is given to the keeper. */
#ifndef ATTND_DAEMON_KEEPER_SOCKETS_H
#define ATTND_DAEMON_KEEPER_SOCKETS_H

#include "daemon/base/address.h"

/* Listens at the address; *out_fd is non-blocking, closed on exec, and the caller's. what: the
 * socket's unique name at the keeper, such as its url. A Unix socket's stale file is replaced, a
 * live one is an error; the file's mode is 0660, of the admin socket 0600. ATTN_EINVAL: why says
 * what is wrong. */
attn_status socket_listen(const char *what, const struct address *a, int backlog, int *out_fd,
                          char *why, size_t why_bytes);
/* Closes the socket (fd -1: that is done already) and removes a Unix socket's file, unless a keeper
 * has the socket. */
void socket_unlisten(int fd, const struct address *a);

#endif
