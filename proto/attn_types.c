/* attn_types.c: names, messages and sizes of statuses, element types and splits. No state. */
#include "proto/attn_types.h"

#include <string.h>

const char *attn_status_name(attn_status st)
{
    switch (st) {
#define X(name, value, message, is_retryable)                                                      \
    case name:                                                                                     \
        return #name;
        ATTN_STATUS_MAP(X)
#undef X
    }
    return "ATTN_E?";
}

const char *attn_status_message(attn_status st)
{
    switch (st) {
#define X(name, value, message, is_retryable)                                                      \
    case name:                                                                                     \
        return message;
        ATTN_STATUS_MAP(X)
#undef X
    }
    return "unknown status";
}

bool attn_status_is_retryable(attn_status st)
{
    switch (st) {
#define X(name, value, message, is_retryable)                                                      \
    case name:                                                                                     \
        return is_retryable;
        ATTN_STATUS_MAP(X)
#undef X
    }
    return false;
}

size_t attn_dtype_bits(attn_dtype d)
{
    switch (d) {
#define X(name, value, text, bits)                                                                 \
    case name:                                                                                     \
        return bits;
        ATTN_DTYPE_MAP(X)
#undef X
    case ATTN_DTYPE_NONE:
        break;
    }
    return 0;
}

size_t attn_dtype_bytes(attn_dtype d)
{
    return attn_dtype_bits(d) / 8;
}

const char *attn_dtype_name(attn_dtype d)
{
    switch (d) {
#define X(name, value, text, bits)                                                                 \
    case name:                                                                                     \
        return text;
        ATTN_DTYPE_MAP(X)
#undef X
    case ATTN_DTYPE_NONE:
        break;
    }
    return "?";
}

attn_dtype attn_dtype_parse(const char *text)
{
#define X(name, value, str, bits)                                                                  \
    if (strcmp(text, str) == 0)                                                                    \
        return name;
    ATTN_DTYPE_MAP(X)
#undef X
    return ATTN_DTYPE_NONE;
}

const char *attn_split_name(attn_split s)
{
    switch (s) {
#define X(name, value, text)                                                                       \
    case name:                                                                                     \
        return text;
        ATTN_SPLIT_MAP(X)
#undef X
    }
    return "?";
}

bool attn_split_parse(const char *text, attn_split *out_split)
{
#define X(name, value, str)                                                                        \
    if (strcmp(text, str) == 0) {                                                                  \
        *out_split = name;                                                                         \
        return true;                                                                               \
    }
    ATTN_SPLIT_MAP(X)
#undef X
    return false;
}
