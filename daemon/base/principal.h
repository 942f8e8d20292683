/* principal.h: the sender of a request, as far as its transport knows it. The transport fills it in
 * before it submits the request, and it is copied with the request. */
#ifndef ATTND_DAEMON_BASE_PRINCIPAL_H
#define ATTND_DAEMON_BASE_PRINCIPAL_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>

#define TENANT_NAME_BYTES 64 /* with the final zero; a longer common name matches no tenant */

enum principal_kind {
    PRINCIPAL_UNKNOWN, /* the transport could not find out */
    PRINCIPAL_ANONYMOUS, /* over TCP, which has no credentials: known by its address */
    PRINCIPAL_USER, /* uid, gid and pid at the moment of connecting, from the kernel */
};

struct principal {
    enum principal_kind kind;
    int family; /* of its socket: AF_UNIX, AF_INET, AF_INET6 */
    uid_t uid; /* these three only of PRINCIPAL_USER */
    gid_t gid;
    pid_t pid;
    unsigned char host[16]; /* of PRINCIPAL_ANONYMOUS: its address; IPv4 is mapped into IPv6 */
    char certificate[TENANT_NAME_BYTES]; /* common name of its TLS certificate; "" none */
    char tenant[TENANT_NAME_BYTES]; /* set by hello; "": not yet, or there are no tenants */
};

enum { PRINCIPAL_TEXT_BYTES = 192 };

/* The peer of a connected Unix socket. PRINCIPAL_UNKNOWN: the kernel does not say. */
struct principal principal_of_socket(int fd);
/* The peer of a TCP connection, by its address. */
struct principal principal_of_address(const struct sockaddr *address);
/* Sets the common name of its certificate, which has been verified. */
void principal_set_certificate(struct principal *p, const char *name);
/* Whether two connections are of the same user, certificate or address. All addresses of one IPv6
 * /64 count as the same, since a host can give itself any of them. */
bool principal_is_same(const struct principal *a, const struct principal *b);
/* Text for logs: "uid 0, gid 0, pid 12", "anonymous over IPv4 from 10.0.0.1" or "unknown", then
 * tenant and certificate if there are any. Returns out. */
const char *principal_format(const struct principal *p, char out[PRINCIPAL_TEXT_BYTES]);

#endif
