/* journal.h: sends log lines to systemd's journal with a field per value, by its native protocol:
 * one datagram per line (systemd.journal-fields(7)). Any thread. */
#ifndef ATTND_DAEMON_BASE_JOURNAL_H
#define ATTND_DAEMON_BASE_JOURNAL_H

#include <stdbool.h>

/* Opens a socket for the datagrams; may be repeated. On failure journal_send returns false. */
void journal_open(void);
/* For tests: another path of the journal's socket. Before journal_open. */
void journal_set_path(const char *path);
/* Sends one line. priority is syslog's; MESSAGE is the line as people read it; each key=value pair
 * is also a field of its own ("session" becomes ATTND_SESSION). false: not sent; the caller writes
 * it to stderr. */
bool journal_send(int priority, const char *msg, const char *pairs);

#endif
