/* tls_server.h: what tls+tcp:// addresses show and ask of workers: certificate, versions, CAs. */
#ifndef ATTND_DAEMON_TLS_SERVER_H
#define ATTND_DAEMON_TLS_SERVER_H

#include "daemon/config.h"

struct ssl_ctx_st;

/* Reads the files of listen.tls_*. The caller frees it with SSL_CTX_free. ATTN_EINVAL: why names
 * setting, file and reason; ATTN_ENOMEM. */
attn_status tls_server_open(const struct config *cfg, struct ssl_ctx_st **out_context, char *why,
                            size_t why_bytes);

#endif
