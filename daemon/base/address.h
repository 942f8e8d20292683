/* address.h: the addresses attnd can listen on, parsed once for the configuration and the sockets.
 * No name service is asked: hosts are numeric, or localhost. */
#ifndef ATTND_DAEMON_BASE_ADDRESS_H
#define ATTND_DAEMON_BASE_ADDRESS_H

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "proto/attn_types.h"

struct address {
    union {
        struct sockaddr any;
        struct sockaddr_in in;
        struct sockaddr_in6 in6;
        struct sockaddr_un un;
    } sa;
    bool is_loopback; /* reachable from this host only; true for Unix sockets */
    bool is_every; /* all of both families: sa is IPv6's, which takes IPv4, too */
    bool is_shm; /* a Unix socket that hands out shared memory */
    bool is_tls;
    bool is_admin; /* a Unix socket for the daemon's own user alone */
};

/* Parses a listener's url. ATTN_EINVAL: why names the part that is wrong.
 *
 *   ipc:///run/attnd/attnd.sock            an absolute path; likewise shm:// and admin:// (the
 *                                          form of listen.admin)
 *   tcp://127.0.0.1:5555, tcp://[::1]:5555, tcp://localhost:5555; likewise tls+tcp://
 *                                          a host of * is all addresses, IPv4 and IPv6 */
attn_status address_parse_url(const char *url, struct address *out, char *why, size_t why_bytes);
/* Parses "127.0.0.1:9470" and the other host:port forms above. ATTN_EINVAL as above. */
attn_status address_parse_host_port(const char *text, struct address *out, char *why,
                                    size_t why_bytes);
/* Whether attnd may listen at an address, apart from who does so now: the path may be made, the
 * host is this machine's. Changes nothing. ATTN_EINVAL: why names what is in the way. */
attn_status address_check(const struct address *a, char *why, size_t why_bytes);
/* Makes the directory of a Unix socket's path and removes a stale socket file (one with no
 * listener). ATTN_EINVAL: the path is taken; why says by what. */
attn_status address_claim_path(const struct address *a, char *why, size_t why_bytes);
/* Writes an IPv4 or IPv6 address as host:port; one of IPv4 that came over IPv6 as what it is. */
void address_format(const struct sockaddr *sa, char *out, size_t out_bytes);

#endif
