/* error.c: the thread's last error, and errors of connections in words. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "clients/libattn/client.h"

static _Thread_local struct attn_error last_error = {.message = ""};

const struct attn_error *attn_last_error(void)
{
    return &last_error;
}

attn_status error_set(attn_status st, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error.message, sizeof last_error.message, format, args);
    va_end(args);
    last_error.status = st;
    last_error.retry_after_us = 0;
    return st;
}

attn_status error_from_result(const struct attn_result *r)
{
    if (r->status == ATTN_OK)
        return ATTN_OK;
    error_set(r->status, "%s", r->message);
    last_error.retry_after_us = r->retry_after_us;
    return r->status;
}

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
