/* supervise_store.h: the descriptors that a supervisor holds, and the socket over which its child
 * sends them: the receiving side of keep.h's protocol. */
#ifndef ATTND_DAEMON_KEEPER_SUPERVISE_STORE_H
#define ATTND_DAEMON_KEEPER_SUPERVISE_STORE_H

#include <sys/types.h>

#include "daemon/keeper/keep.h"

struct store {
    /* A pair without names, so that nobody but the child can send, nor fill the queue that its
     * messages wait in. */
    int notify_fd; /* this process's end */
    int child_fd; /* the child's */
    struct kept_fd {
        int fd;
        char name[KEEP_NAME_BYTES];
    } fds[KEEP_MAX_FDS];
    uint32_t n_fds;
    bool is_ready; /* READY=1 has come since the last start */
    uint64_t n_beats; /* how often WATCHDOG=1 has come */
    uint64_t watchdog_us; /* longest time between two of these */
};

attn_status store_open(struct store *s); /* ATTN_EINTERNAL with errno */
/* Closes all descriptors and removes the files of kept Unix sockets. */
void store_close(struct store *s);
/* Reads one message; one that is not from the child (0: there is no child) is dropped. States are
 * passed on to $NOTIFY_SOCKET. false: there was no message. */
bool store_read(struct store *s, pid_t child);
/* Closes all descriptors whose name has this prefix. */
void store_drop(struct store *s, const char *prefix);
/* In the child, before exec: puts the descriptors at their numbers and sets the variables of the
 * protocol. false: a system call failed. */
bool store_hand_over(const struct store *s);

#endif
