/* listener.h: connections of the stats endpoint: a thread that accepts them and runs libmicrohttpd.
 *
 * No client can keep others out: when all places are taken, the connection that has been idle
 * longest is ended. Some descriptors are held in reserve for when the process has no others left. A
 * connection has one answer, so that requests sent ahead cost nothing.
 */
#ifndef ATTND_DAEMON_HTTP_LISTENER_H
#define ATTND_DAEMON_HTTP_LISTENER_H

#include <microhttpd.h>
#include <stdint.h>

#include "proto/attn_types.h"

enum {
    HTTP_MAX_CONNECTIONS = 64,
    HTTP_TIMEOUT_S = 5, /* from accept to a complete request */
    HTTP_RESERVE = 16, /* descriptors */
};

struct http_listener;

/* Starts a thread that serves the listening socket fd. fd is the listener's, which closes it, also
 * when this fails. On the listener's thread, answer is called for each request, and begin_turn
 * before it answers what has come: who is answered in a turn had connected before it began.
 * ATTN_ENOMEM, ATTN_EINTERNAL. */
attn_status http_listener_open(int fd, MHD_AccessHandlerCallback answer,
                               void (*begin_turn)(void *user), void *user,
                               struct http_listener **out_listener);
void http_listener_close(struct http_listener *d); /* NULL is fine */

#endif
