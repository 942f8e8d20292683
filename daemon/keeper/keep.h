/* keep.h: descriptors that outlive this process: listening sockets, the arena, the KV memory.
 *
 * A keeper holds them and hands them to the next process. It is systemd's descriptor store or attnd
 * --supervise (supervise.h), which speaks the same protocol: FDSTORE=1 and FDNAME= to
 * $NOTIFY_SOCKET on the way out (sd_pid_notify_with_fds(3)), $LISTEN_FDS and $LISTEN_FDNAMES on the
 * way in (sd_listen_fds_with_names(3)). There is a keeper if $FDSTORE, the number of descriptors it
 * takes, is set: systemd sets it since version 254, attnd.service does for older versions.
 *
 * Main thread only.
 */
#ifndef ATTND_DAEMON_KEEPER_KEEP_H
#define ATTND_DAEMON_KEEPER_KEEP_H

#include "proto/attn_types.h"

#define KEEP_NAME_BYTES 192
#define KEEP_MAX_FDS 64

/* Reads which descriptors were handed in. Call it once, before all else. */
void keep_begin(void);
/* Whether there is a keeper. */
bool keep_is_there(void);

/* Takes the descriptor that was handed in under this name; it becomes the caller's, and the keeper
 * still holds a copy. -1: there is none. */
int keep_take(const char *name);
/* Finds the first name with this prefix that was handed in and is not taken. false: none. */
bool keep_find(const char *prefix, char out_name[KEEP_NAME_BYTES]);
/* Gives the keeper a copy of fd under this name. false: there is no keeper, or sending failed. */
bool keep_put(const char *name, int fd);
/* Has the keeper drop the descriptors of this name, and closes this process's if they were not
 * taken. Returns when that is done. */
void keep_drop(const char *name);
/* Drops all descriptors that were handed in and not taken. */
void keep_drop_rest(void);

#endif
