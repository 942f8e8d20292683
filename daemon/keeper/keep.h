/* keep.h: descriptors that outlive this process: listening sockets, the arena, the KV memory.
 *
 * A keeper holds them and hands them to the next process: systemd's descriptor store, or attnd
 * --supervise (supervise.h), which speaks the same protocol: FDSTORE=1 and FDNAME= to
 * $NOTIFY_SOCKET on the way out (sd_pid_notify_with_fds(3)), $LISTEN_FDS and $LISTEN_FDNAMES on the
 * way in (sd_listen_fds_with_names(3)). $FDSTORE, the number of descriptors it takes, says that it
 * is there: systemd sets it since version 254, attnd.service does for older ones.
 *
 * Main thread only.
 */
#ifndef ATTND_DAEMON_KEEPER_KEEP_H
#define ATTND_DAEMON_KEEPER_KEEP_H

#include "proto/attn_types.h"

#define KEEP_NAME_BYTES 192
#define KEEP_MAX_FDS 64

/* Takes note of the descriptors that were handed in. Once, before all else. */
void keep_begin(void);
/* Somebody keeps what is put. */
bool keep_is_there(void);

/* The descriptor handed in under this name, which becomes the caller's; -1: none. The keeper goes
 * on holding it, too. */
int keep_take(const char *name);
/* The first name handed in and not taken that begins so; false: none. */
bool keep_find(const char *prefix, char out_name[KEEP_NAME_BYTES]);
/* Gives the keeper a copy. Does nothing without one; false: it does not have it. */
bool keep_put(const char *name, int fd);
/* The keeper releases the name, and so does this process where it was not taken. Returns when
 * that is done. */
void keep_drop(const char *name);
/* The same for all descriptors that were handed in and not taken. */
void keep_drop_rest(void);

#endif
