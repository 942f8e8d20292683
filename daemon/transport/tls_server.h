/* tls_server.h: what tls+tcp:// addresses show and ask of workers: certificate, versions,
 * CAs. */
#ifndef ATTND_DAEMON_TRANSPORT_TLS_SERVER_H
#define ATTND_DAEMON_TRANSPORT_TLS_SERVER_H

#include "daemon/config/config.h"

struct ssl_ctx_st;
struct tls_server;

/* Reads the files of listen.tls_*. ATTN_EINVAL: why names setting, file and reason; ATTN_ENOMEM. */
attn_status tls_server_open(const struct config *cfg, struct tls_server **out_s, char *why,
                            size_t why_bytes);
void tls_server_close(struct tls_server *s); /* NULL is fine */
/* Reads them again, for connections that come from now on; on failure, as of tls_server_open, all
 * stays as it is. Any thread. */
attn_status tls_server_reload(struct tls_server *s, const struct config *cfg, char *why,
                              size_t why_bytes);
/* For a new connection; to be freed with SSL_CTX_free. */
struct ssl_ctx_st *tls_server_take(struct tls_server *s);

#endif
