/* journal.h: lines for systemd's journal with a field per value, by its native protocol:
 * one datagram per line (systemd.journal-fields(7)). Any thread. */
#ifndef ATTND_DAEMON_BASE_JOURNAL_H
#define ATTND_DAEMON_BASE_JOURNAL_H

#include <stdbool.h>

/* The socket is looked for; again is fine. Without one journal_send says false. */
void journal_open(void);
/* Where it is: another place, for tests, before journal_open. */
void journal_set_path(const char *path);
/* priority is syslog's. MESSAGE is the line as people read it; each of the pairs also a field of
 * its own, key "session" as ATTND_SESSION. false: it did not arrive, and goes to stderr. */
bool journal_send(int priority, const char *msg, const char *pairs);

#endif
