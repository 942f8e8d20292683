/* listener.h: connections of the stats endpoint: libmicrohttpd on a thread of our own, which
 * accepts for it.
 *
 * No client can keep others out: where all places are taken, the connection that has waited longest
 * for its next request to be complete goes. Descriptors are held in reserve for the moment when the
 * process has no others left.
 */
#ifndef ATTND_DAEMON_HTTP_LISTENER_H
#define ATTND_DAEMON_HTTP_LISTENER_H

#include <microhttpd.h>
#include <stdint.h>

#include "proto/attn_types.h"

enum {
    HTTP_MAX_CONNECTIONS = 64,
    HTTP_TIMEOUT_S = 5, /* from accept, or an answer, to a complete request */
    HTTP_RESERVE = 16, /* descriptors */
};

struct http_listener;

/* Serves what comes to the listening socket fd, which it closes in the end, also when it fails;
 * answer is called on the listener's thread. ATTN_ENOMEM, ATTN_EINTERNAL. */
attn_status http_listener_open(int fd, MHD_AccessHandlerCallback answer, void *user,
                               struct http_listener **out_listener);
void http_listener_close(struct http_listener *d); /* NULL is fine */

#endif
