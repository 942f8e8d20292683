/* net.h: what net.c (the clients' ends) and uv.c (the daemon's) share of a connection. */
#ifndef TESTS_SIM_NET_H
#define TESTS_SIM_NET_H

#include "sim.h"

struct bytes {
    uint8_t *p;
    size_t first, n, room; /* p[first] to p[first + n - 1] */
};
void bytes_add(struct bytes *b, const void *p, size_t n);
void bytes_take(struct bytes *b, size_t n); /* the first n are gone */

struct handle; /* uv.c's */

struct conn {
    struct conn *next; /* of those that wait to be accepted */
    struct peer *peer; /* NULL: it has left */
    uint64_t number;
    struct bytes in, out; /* to the daemon, to the client */
    size_t window; /* bytes that out takes */
    struct handle *stream; /* the daemon's end; NULL: not accepted, or closed */
    bool is_accepted; /* the daemon has it, or had */
    bool is_over; /* no byte moves any more */
    bool client_ended, daemon_ended; /* sends no more */
    bool is_cut;
    bool in_is_due, out_is_due; /* an event will look at it */
};

/* Of connections that wait for the daemon to accept them: the oldest; NULL: none. */
struct conn *net_accept(void);
struct conn *net_conn(uint64_t number);
void net_listen(bool is_listening);
bool net_has_waiting(void);
/* The daemon has put bytes in, or ended. */
void net_flush(struct conn *c);
/* The daemon has closed its end; lost: what the client has not read yet is. */
void net_daemon_closed(struct conn *c);
/* The process is gone: so are its connections, but those that nobody has accepted. */
void net_process_gone(bool listener_is_kept);

/* uv.c, told by net.c */
void uv_conn_waits(void);
void uv_conn_has_input(struct handle *stream);
void uv_conn_has_room(struct handle *stream);

#endif
