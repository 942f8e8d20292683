/* error.c: the calling thread's last error: its status, its sentence and what is gone. It is kept
 * per thread, so that calls of several threads do not overwrite each other's. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "clients/libattn/core/core.h"

static _Thread_local struct attn_error last_error = {.message = ""};
static _Thread_local attn_gone last_gone;

const struct attn_error *attn_last_error(void)
{
    return &last_error;
}

attn_gone attn_last_error_gone(void)
{
    return last_gone;
}

static void set_last(attn_status st, attn_gone gone, const char *format, va_list args)
{
    vsnprintf(last_error.message, sizeof last_error.message, format, args);
    last_error.status = st;
    last_error.retry_after_us = 0;
    last_gone = gone;
}

attn_status error_set(attn_status st, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set_last(st, ATTN_GONE_NOTHING, format, args);
    va_end(args);
    return st;
}

attn_status error_set_gone(attn_gone gone, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set_last(ATTN_ENOTFOUND, gone, format, args);
    va_end(args);
    return ATTN_ENOTFOUND;
}

struct error_kept error_keep(void)
{
    return (struct error_kept){.error = last_error, .gone = last_gone};
}

attn_status error_restore(const struct error_kept *kept)
{
    last_error = kept->error;
    last_gone = kept->gone;
    return last_error.status;
}

attn_status error_from_request(const struct client_request *r)
{
    if (r->result.status == ATTN_OK)
        return ATTN_OK;
    error_set(r->result.status, "%s", r->result.message);
    last_error.retry_after_us = r->result.retry_after_us;
    last_gone = r->gone;
    return r->result.status;
}
