/* notify.h: reports the daemon's state to systemd: one datagram to $NOTIFY_SOCKET, which is a path,
 * an abstract name behind an @ or, from attnd --supervise, fd: and the number of an open socket.
 * Without that variable nothing happens. Main thread only. */
#ifndef ATTND_DAEMON_KEEPER_NOTIFY_H
#define ATTND_DAEMON_KEEPER_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

/* Sends a state: "READY=1", "STOPPING=1" or "WATCHDOG=1", with "\nSTATUS=..." if wanted. Errors are
 * ignored. Blocks only for READY=1, for some seconds at most. */
void notify_send(const char *state);
/* The same with a descriptor (-1: none), of which the reader gets a copy. false: it could not be
 * sent within some seconds. */
bool notify_send_fd(const char *state, int fd);
/* Waits until everything sent so far has been read, for some seconds at most. */
void notify_wait_until_read(void);
/* How often systemd wants WATCHDOG=1, in microseconds; 0: never. */
uint64_t notify_watchdog_us(void);

#endif
