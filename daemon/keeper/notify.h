/* notify.h: reports the daemon's state to systemd: one datagram to $NOTIFY_SOCKET. Without that
 * variable nothing happens. Main thread only. */
#ifndef ATTND_DAEMON_KEEPER_NOTIFY_H
#define ATTND_DAEMON_KEEPER_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

/* state: "READY=1", "STOPPING=1", "WATCHDOG=1", with "\nSTATUS=..." if wanted. Never fails: a
 * missing reader is no error. Blocks only with READY=1, some seconds at most. */
void notify_send(const char *state);
/* The same with a descriptor, which the other side gets a copy of (-1: none). false: it was not
 * sent, after some seconds at most. */
bool notify_send_fd(const char *state, int fd);
/* Returns when everything sent so far has been read, or after some seconds. */
void notify_wait_until_read(void);
/* How often systemd wants WATCHDOG=1; 0: it does not. */
uint64_t notify_watchdog_us(void);

#endif
