/* sp_address.h: the addresses that an ipc://, tcp:// or tls+tcp:// url stands for, and sockets for
 * them that do not block. */
#ifndef ATTN_SP_ADDRESS_H
#define ATTN_SP_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#define SP_MAX_ADDRESSES 8u

struct addrinfo;

struct sp_address {
    struct {
        struct sockaddr_storage any;
        socklen_t bytes;
    } of[SP_MAX_ADDRESSES]; /* to be tried in this order */
    uint32_t n, at; /* at: the one to be tried next, or in use */
    bool is_ipc, is_tls;
    bool is_name; /* n is 0 until sp_lookup_take has found some */
    char host[256]; /* "": is_ipc. With is_tls also the name that a certificate must have */
    char port[6];
};

/* False: why says what is wrong. */
bool sp_address_parse(const char *url, struct sp_address *out, char *why, size_t why_bytes);
/* Takes the first SP_MAX_ADDRESSES of a list over, to be tried from the first on. */
void sp_address_set(struct sp_address *a, const struct addrinfo *list);
/* A socket for of[at] that does not block; -1 with errno. */
int sp_address_socket(const struct sp_address *a);
/* Of the socket's file; NULL: it has none. */
const char *sp_address_path(const struct sp_address *a);

/* sp_lookup.c */

struct sp_lookup;
/* Begins to look the host up. NULL: no memory or thread. */
struct sp_lookup *sp_lookup_start(const struct sp_address *a);
/* False: not yet. True: the lookup is over and freed; out has the addresses (*out_why NULL), or is
 * as it was, and *out_why is the reason. */
bool sp_lookup_take(struct sp_lookup *l, struct sp_address *out, const char **out_why);
void sp_lookup_end(struct sp_lookup *l); /* nobody wants to know any more; NULL is fine */

#endif
