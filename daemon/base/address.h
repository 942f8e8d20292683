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
    bool is_shm; /* a Unix socket that hands out shared memory */
    bool is_tls;
    bool is_admin; /* a Unix socket for the daemon's own user alone */
};

/* "ipc:///run/attnd/attnd.sock" (an absolute path), "shm:///run/attnd/attnd.shm", the same,
 * "tcp://127.0.0.1:5555", "tcp://[::1]:5555",
 * "tcp://localhost:5555", "tls+tcp://...", the same; "admin:///run/attnd/attnd.sock.admin" for
 * listen.admin; a host of * is all IPv4 addresses. ATTN_EINVAL: why names the part. */
attn_status address_parse_url(const char *url, struct address *out, char *why, size_t why_bytes);
/* "127.0.0.1:9470" and the other host:port forms above. */
attn_status address_parse_host_port(const char *text, struct address *out, char *why,
                                    size_t why_bytes);
/* Makes the directory of a Unix socket's path, and takes a socket file without a listener behind it
 * out of the way. ATTN_EINVAL: why says what is there. */
attn_status address_claim_path(const struct address *a, char *why, size_t why_bytes);
/* host:port of an IPv4 or IPv6 address. */
void address_format(const struct sockaddr *sa, char *out, size_t out_bytes);

#endif
