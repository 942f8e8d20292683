/* keys.h: certificates and tokens for a first set-up: a CA of one's own, a certificate for the
 * daemon, and for each tenant a certificate and a token. */
#ifndef ATTNCTL_KEYS_H
#define ATTNCTL_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

struct keys_wanted {
    const char *dir; /* made if it is missing */
    const char *const *hosts; /* names and addresses of the daemon */
    size_t n_hosts;
    const char *const *tenants; /* 1 to 63 letters, digits, '.', '_' and '-', no leading '.' */
    size_t n_tenants;
    int days; /* that certificates are good for, but the CA's, which has 10 years */
};

/* Writes into dir, each file 0600: ca.crt, ca.key; server.crt, server.key; for each tenant
 * TENANT.crt, TENANT.key, TENANT.token, and a section of tenants.conf. What is there stays: a later
 * call adds tenants to the same CA. false: why has the sentence. */
bool keys_make(const struct keys_wanted *w, char *why, size_t why_bytes);
/* What to do with them: lines of attnd.conf, and of a client's environment. */
void keys_explain(const struct keys_wanted *w, FILE *f);

/* keys_command.c: attnctl keys ARGUMENTS; argv[0] is "keys". is_json: --json came before. The exit
 * code. */
int keys_command(int argc, char **argv, bool is_json);

#endif
