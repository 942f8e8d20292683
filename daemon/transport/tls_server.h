/* tls_server.h: the server side of TLS for tls+tcp:// addresses: certificate, versions, and the CAs
 * of workers' certificates. */
#ifndef ATTND_DAEMON_TRANSPORT_TLS_SERVER_H
#define ATTND_DAEMON_TRANSPORT_TLS_SERVER_H

#include "daemon/config/config.h"

struct ssl_ctx_st;
struct tls_server;

/* Reads the files of listen.tls_*. ATTN_EINVAL: why names setting, file and reason; ATTN_ENOMEM. */
attn_status tls_server_open(const struct config *cfg, struct tls_server **out_s, char *why,
                            size_t why_bytes);
void tls_server_close(struct tls_server *s); /* NULL is fine */
/* Reads the files again, for new connections. Errors as tls_server_open; then nothing changes. Any
 * thread. */
attn_status tls_server_reload(struct tls_server *s, const struct config *cfg, char *why,
                              size_t why_bytes);
/* A reference to the context for a new connection; the caller frees it with SSL_CTX_free. */
struct ssl_ctx_st *tls_server_take(struct tls_server *s);

#endif
