/* target.c: where a file that is written as a whole appears: checked before, renamed to after. */
#include "clients/libattn/sequence/target.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clients/libattn/core/core.h"

attn_status io_failed(const char *what, const char *path)
{
    return error_set(ATTN_EIO, "%s %.180s: %s", what, path, strerror(errno));
}

attn_status target_find(const char *path, char out_target[PATH_MAX])
{
    struct stat info;
    char real[PATH_MAX];
    bool is_there = lstat(path, &info) == 0;
    if (is_there && S_ISLNK(info.st_mode)) {
        /* stat first: the kernel refuses to follow another user's link in a folder as /tmp */
        if (stat(path, &info) != 0 || realpath(path, real) == NULL)
            return io_failed("follow the link", path);
        path = real;
    }
    if (is_there && !S_ISREG(info.st_mode))
        return error_set(ATTN_EIO, "%.180s is no regular file; name one, or a name not yet taken",
                         path);
    size_t n = strlen(path);
    if (n >= PATH_MAX)
        return error_set(ATTN_EINVAL, "path has %zu bytes, at most %d are allowed", n,
                         PATH_MAX - 1);
    memcpy(out_target, path, n + 1);
    return ATTN_OK;
}

/* The names of a folder's files are on the disk, too. */
static attn_status sync_folder(const char *path)
{
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", path);
    char *slash = strrchr(folder, '/');
    if (slash == NULL)
        strcpy(folder, ".");
    else
        slash[slash == folder] = '\0';
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return io_failed("open", folder);
    attn_status st = fsync(fd) == 0 ? ATTN_OK : io_failed("sync", folder);
    close(fd);
    return st;
}

attn_status target_replace(const char *tmp, const char *target)
{
    char same[PATH_MAX];
    attn_status st = target_find(target, same);
    if (st != ATTN_OK)
        return st;
    if (rename(tmp, target) != 0)
        return io_failed("rename to", target);
    return sync_folder(target);
}
