/* connect_error.c: why there is no connection, in words: what errno means where a daemon's socket
 * should be. */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "clients/libattn/transport/transport.h"

const char *connect_error(int error, const char *path)
{
    struct stat sb;
    bool is_file = path != NULL && stat(path, &sb) == 0 && !S_ISSOCK(sb.st_mode);
    switch (error) {
    case ENOENT:
    case ENOTDIR:
        return "no such path";
    case ECONNREFUSED:
    case ENOTSOCK:
        return is_file ? "not a socket" : "nobody listens there";
    case EACCES:
    case EPERM:
        return "no permission";
    case EPROTOTYPE:
        return "a socket of another type: ipc:// and shm:// have paths of their own";
    case EAGAIN:
        return "too many connections wait there already";
    case ECONNRESET:
    case EPIPE:
        return "the daemon hung up";
    default: {
        const char *text = strerrordesc_np(error);
        return text != NULL ? text : "unknown error";
    }
    }
}
