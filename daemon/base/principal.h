/* principal.h: the sender of a request, as far as its transport knows. Filled by the transport
 * before the request is submitted; a value, copied with it. */
#ifndef ATTND_DAEMON_BASE_PRINCIPAL_H
#define ATTND_DAEMON_BASE_PRINCIPAL_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>

#define TENANT_NAME_BYTES 64 /* of a name and its end; longer common names are no tenant's */

enum principal_kind {
    PRINCIPAL_UNKNOWN, /* the transport could not find out */
    PRINCIPAL_ANONYMOUS, /* of a transport without credentials: TCP; known by its address */
    PRINCIPAL_USER, /* uid, gid and pid at the moment of connecting, from the kernel */
};

struct principal {
    enum principal_kind kind;
    int family; /* AF_UNIX, AF_INET, AF_INET6: how it came */
    uid_t uid; /* these three of PRINCIPAL_USER alone */
    gid_t gid;
    pid_t pid;
    unsigned char host[16]; /* of PRINCIPAL_ANONYMOUS: its address; of IPv4 mapped into IPv6 */
    char certificate[TENANT_NAME_BYTES]; /* common name of its TLS certificate; "" none */
    char tenant[TENANT_NAME_BYTES]; /* set by hello; "": not yet, or there are no tenants */
};

enum { PRINCIPAL_TEXT_BYTES = 192 };

/* Of the other end of a connected Unix socket. PRINCIPAL_UNKNOWN: the kernel does not say. */
struct principal principal_of_socket(int fd);
/* Of the other end of a TCP connection. */
struct principal principal_of_address(const struct sockaddr *address);
/* Its certificate, which was checked, has this common name. */
void principal_set_certificate(struct principal *p, const char *name);
/* Whether two connections are of the same user, certificate or address; hosts of one /64 of IPv6
 * count as one: they are a host's to give itself. */
bool principal_is_same(const struct principal *a, const struct principal *b);
/* For a log: "uid 0, gid 0, pid 12", "anonymous over IPv4 from 10.0.0.1", "unknown", and then
 * tenant and certificate if there are any. Returns out. */
const char *principal_format(const struct principal *p, char out[PRINCIPAL_TEXT_BYTES]);

#endif
