/* notify.h: tells systemd about the daemon's state: one datagram to $NOTIFY_SOCKET. Without that
 * variable nothing happens. Main thread only. */
#ifndef ATTND_DAEMON_NOTIFY_H
#define ATTND_DAEMON_NOTIFY_H

#include <stdint.h>

/* state: "READY=1", "STOPPING=1", "WATCHDOG=1", with "\nSTATUS=..." if wanted. Never blocks or
 * fails: who does not listen does not want to know. */
void notify_send(const char *state);
/* How often systemd wants WATCHDOG=1; 0: it does not. */
uint64_t notify_watchdog_us(void);

#endif
