/* certs.h: the certificates and tokens of a test, made when they are first asked for and removed at
 * exit. Tenants are alpha and beta. */
#ifndef TESTS_DAEMON_CERTS_H
#define TESTS_DAEMON_CERTS_H

#include <stdbool.h>

#include "daemon/config/config.h"

/* Good ones; ones of the same CA that have expired; those of another CA; a server's for another
 * host. */
enum certs { CERTS_GOOD, CERTS_EXPIRED, CERTS_FOREIGN, CERTS_OTHER_HOST, N_CERTS };
/* The file of one of them, "ca.crt" for example; the caller frees it. */
char *certs_file(enum certs c, const char *name);
/* The daemon's side: its certificate of `server`; client_ca: workers show theirs. */
void certs_configure(struct config *cfg, enum certs server, bool has_client_ca);

#endif
