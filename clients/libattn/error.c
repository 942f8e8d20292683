/* error.c: the thread's last error. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

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
