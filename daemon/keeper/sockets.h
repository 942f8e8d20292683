/* sockets.h: a listening socket: either one that a keeper (keep.h) has held, with the connections
 * in its backlog, or a new one, which is given to the keeper. */
#ifndef ATTND_DAEMON_KEEPER_SOCKETS_H
#define ATTND_DAEMON_KEEPER_SOCKETS_H

#include "daemon/base/address.h"

/* Listens at the address; neither blocking nor inherited by programs. what names it to the keeper:
 * the url, or another unique word about it. A Unix socket's stale file is replaced, a live one is
 * an error; its mode is 0660, of the admin socket 0600. ATTN_EINVAL: why says what is wrong. */
attn_status socket_listen(const char *what, const struct address *a, int backlog, int *out_fd,
                          char *why, size_t why_bytes);
/* Removes the address's file, too, unless a keeper has the socket. fd -1: already closed. */
void socket_unlisten(int fd, const struct address *a);

#endif
