/* sp_address.h: the address in an ipc://, tcp:// or tls+tcp:// url, and a socket for it that does
 * not block. */
#ifndef ATTN_SP_ADDRESS_H
#define ATTN_SP_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>

struct sp_address {
    struct sockaddr_storage any;
    socklen_t bytes;
    bool is_ipc, is_tls;
    char host[256]; /* of a tls+tcp:// url: the name in the certificate that is expected */
};

/* Asks the name service where the host is a name. False: why says what is wrong. */
bool sp_address_parse(const char *url, struct sp_address *out, char *why, size_t why_bytes);
/* A socket for it that does not block; -1 with errno. */
int sp_address_socket(const struct sp_address *a);
/* Of the socket's file; NULL: it has none. */
const char *sp_address_path(const struct sp_address *a);

#endif
