/* target.h: where a file that is written as a whole appears. What is there and is no regular file
 * stays: a device, a pipe or a socket is never replaced, and a link goes on naming its file. */
#ifndef LIBATTN_SEQUENCE_TARGET_H
#define LIBATTN_SEQUENCE_TARGET_H

#include <limits.h>

#include "clients/libattn/attn.h"

/* ATTN_EIO with what the system says. */
attn_status io_failed(const char *what, const char *path);
/* The name that a file written to path takes: path, or behind links the file that they lead to.
 * ATTN_EIO: it is a link to nothing, or no regular file. */
attn_status target_find(const char *path, char out_target[PATH_MAX]);
/* Renames a file beside the target to it, on the disk, too. ATTN_EIO, also where a target that is
 * no regular file has appeared meanwhile; tmp is gone if only the sync of the folder failed. */
attn_status target_replace(const char *tmp, const char *target);

#endif
