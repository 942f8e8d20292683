/* credential.h: files with secrets: where they are looked for, and whether their mode lets others
 * read them. */
#ifndef ATTND_DAEMON_BASE_CREDENTIAL_H
#define ATTND_DAEMON_BASE_CREDENTIAL_H

#include <stdio.h>

#include "proto/attn_types.h"

/* Opens a file: an absolute path, or the name of a systemd credential (a file of
 * $CREDENTIALS_DIRECTORY). is_secret: refuses one that others than its owner may read, the daemon's
 * user; of root's, others than root and its group. NULL: why names the file. */
FILE *credential_open(const char *name, bool is_secret, char *why, size_t why_bytes);

#endif
