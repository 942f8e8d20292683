/* credential.h: opens files of keys and tokens, and refuses a secret whose mode lets others read
 * it. */
#ifndef ATTND_DAEMON_BASE_CREDENTIAL_H
#define ATTND_DAEMON_BASE_CREDENTIAL_H

#include <stdio.h>

#include "proto/attn_types.h"

/* Opens a file for reading: an absolute path, or the name of a systemd credential (a file in
 * $CREDENTIALS_DIRECTORY). is_secret: the file must belong to the daemon's user and be closed to
 * all others, or belong to root and be closed to all but its group. NULL: why names file and
 * reason. The caller closes it. */
FILE *credential_open(const char *name, bool is_secret, char *why, size_t why_bytes);

#endif
