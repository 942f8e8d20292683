/* supervise_store.h: the descriptors that a supervisor holds, and the socket over which the
 * child gives them: the receiving side of keep.h's protocol. */
#ifndef ATTND_DAEMON_KEEPER_SUPERVISE_STORE_H
#define ATTND_DAEMON_KEEPER_SUPERVISE_STORE_H

#include <sys/types.h>

#include "daemon/keeper/keep.h"

struct store {
    int notify_fd;
    char notify_path[64]; /* for $NOTIFY_SOCKET */
    struct kept_fd {
        int fd;
        char name[KEEP_NAME_BYTES];
    } fds[KEEP_MAX_FDS];
    uint32_t n_fds;
    bool is_ready; /* READY=1 has been said since the last start */
    uint64_t n_beats; /* times WATCHDOG=1 has been said */
    uint64_t watchdog_us; /* how often the child is to say so, at least */
};

attn_status store_open(struct store *s); /* ATTN_EINTERNAL with errno */
/* Files of kept Unix sockets go, too. */
void store_close(struct store *s);
/* Takes one message of the child's (0: there is none), drops one of anybody else's; false: none is
 * there. States are passed on to $NOTIFY_SOCKET. */
bool store_read(struct store *s, pid_t child);
/* Closes all descriptors whose name has this prefix. */
void store_drop(struct store *s, const char *prefix);
/* In the child, before exec: descriptors to their places, variables. false: the system refuses. */
bool store_hand_over(const struct store *s);

#endif
