/* credential.c: finds a credential's file and checks its owner and mode. */
#include "daemon/base/credential.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Whether owner or mode let others read or change the file; why says how. */
static bool is_exposed(FILE *f, const char *path, char *why, size_t why_bytes)
{
    struct stat sb;
    if (fstat(fileno(f), &sb) != 0) {
        snprintf(why, why_bytes, "%s: %s", path, strerror(errno));
        return true;
    }
    if (sb.st_uid != 0 && sb.st_uid != geteuid()) {
        snprintf(why, why_bytes, "%s belongs to uid %lu; it must be root's or the daemon's own",
                 path, (unsigned long)sb.st_uid);
        return true;
    }
    mode_t allowed = sb.st_uid == 0 ? 0750 : 0700;
    if ((sb.st_mode & 0777 & ~allowed) == 0)
        return false;
    snprintf(why, why_bytes, "%s has mode %04o: others may read or change it; chmod %04o", path,
             (unsigned)(sb.st_mode & 0777), sb.st_uid == 0 ? 0640u : 0600u);
    return true;
}

FILE *credential_open(const char *name, bool is_secret, char *why, size_t why_bytes)
{
    char path[PATH_MAX];
    const char *dir = getenv("CREDENTIALS_DIRECTORY");
    if (name[0] == '/') {
        snprintf(path, sizeof path, "%s", name);
    } else if (dir != NULL && dir[0] == '/') {
        snprintf(path, sizeof path, "%s/%s", dir, name);
    } else {
        snprintf(why, why_bytes,
                 "%s is the name of a credential, and $CREDENTIALS_DIRECTORY is not set "
                 "(LoadCredential= of the unit)",
                 name);
        return NULL;
    }
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        snprintf(why, why_bytes, "%s: %s", path, strerror(errno));
    } else if (is_secret && is_exposed(f, path, why, why_bytes)) {
        fclose(f);
        f = NULL;
    }
    return f;
}
