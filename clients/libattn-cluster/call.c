/* call.c: what every call has: the thread's last error, an end, a struct of the caller's. */
#include <stdarg.h>
#include <stdio.h>

#include "cluster_internal.h"
#include "proto/attn_time.h"

static _Thread_local struct attn_error last_error;

const struct attn_error *attn_cluster_last_error(void)
{
    return &last_error;
}

attn_status fail(attn_status st, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    last_error = (struct attn_error){.status = st};
    vsnprintf(last_error.message, sizeof last_error.message, format, args);
    va_end(args);
    return st;
}

attn_status fail_at(const struct host *h)
{
    const struct attn_error *e = attn_last_error();
    fail(e->status, "member %.60s: %.180s", h->name, e->message);
    last_error.retry_after_us = e->retry_after_us;
    return e->status;
}

uint64_t until_of(const struct attn_cluster *c, uint64_t timeout_us)
{
    return attn_now_ns() + 1000 * (timeout_us != 0 ? timeout_us : c->timeout_us);
}

uint64_t left_us(uint64_t until_ns)
{
    uint64_t now = attn_now_ns();
    return now + 1000 < until_ns ? (until_ns - now) / 1000 : 1;
}

bool seq_is_known(const struct attn_cluster_seq *s)
{
    if (s->struct_size != sizeof *s)
        fail(ATTN_EINVAL, "attn_cluster_seq.struct_size is %u, must be %zu", s->struct_size,
             sizeof *s);
    return s->struct_size == sizeof *s;
}
