/* attn_types.h: statuses and element types, shared by every part of attnd.
 *
 * The only header that cache/, kernels/, proto/, clients/ and daemon/ all include. It is installed
 * with libattn. Values are stable: they travel on the wire and are stored in the arena.
 */
#ifndef ATTN_TYPES_H
#define ATTN_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, value, message, is_retryable). Retryable: the same request may succeed later,
 * unchanged. */
#define ATTN_STATUS_MAP(X)                                                                         \
    X(ATTN_OK, 0, "ok", false)                                                                     \
    X(ATTN_EINVAL, -1, "invalid argument", false)                                                  \
    X(ATTN_ENOTFOUND, -2, "not found", false)                                                      \
    X(ATTN_EEXIST, -3, "already exists", false)                                                    \
    X(ATTN_ENOBLOCKS, -4, "out of blocks", true)                                                   \
    X(ATTN_EQUOTA, -5, "over quota", false)                                                        \
    X(ATTN_EOVERLOAD, -6, "overloaded", true)                                                      \
    X(ATTN_EDEADLINE, -7, "deadline exceeded", true)                                               \
    X(ATTN_ESTALE, -8, "stale epoch", false)                                                       \
    X(ATTN_EAUTH, -9, "unauthenticated", false)                                                    \
    X(ATTN_ENOTSUP, -10, "unsupported", false)                                                     \
    X(ATTN_EDRAINING, -11, "draining", true)                                                       \
    X(ATTN_EDEVICE, -12, "device lost", false)                                                     \
    X(ATTN_EINTERNAL, -13, "internal error", false)                                                \
    X(ATTN_ENOMEM, -14, "out of memory", true)                                                     \
    X(ATTN_EPROTO, -15, "malformed message", false)                                                \
    X(ATTN_ETIMEDOUT, -16, "timed out waiting for the daemon", true)                               \
    X(ATTN_ECONN, -17, "connection lost or refused", true)                                         \
    X(ATTN_EIO, -18, "a file could not be read or written", false)                                 \
    X(ATTN_EFENCED, -19, "fenced", true)                                                           \
    X(ATTN_EMOVED, -20, "moved to another daemon", false)                                          \
    X(ATTN_ENOWEIGHTS, -21, "the layer has no weights yet", false)

typedef enum attn_status {
#define X(name, value, message, is_retryable) name = value,
    ATTN_STATUS_MAP(X)
#undef X
} attn_status;

/* The status's name ("ATTN_EINVAL") and message ("invalid argument"); never NULL. */
const char *attn_status_name(attn_status st);
const char *attn_status_message(attn_status st);
bool attn_status_is_retryable(attn_status st);

/* X(name, value, text, bits). The last two are E2M1 codes, two to a byte, in groups of 16 and 32
 * that have a scale each: how they lie in a cache is kv_layout.h's. */
#define ATTN_DTYPE_MAP(X)                                                                          \
    X(ATTN_F32, 1, "f32", 32)                                                                      \
    X(ATTN_F16, 2, "f16", 16)                                                                      \
    X(ATTN_BF16, 3, "bf16", 16)                                                                    \
    X(ATTN_FP8_E4M3, 4, "fp8_e4m3", 8)                                                             \
    X(ATTN_INT8, 5, "int8", 8)                                                                     \
    X(ATTN_NVFP4, 6, "nvfp4", 4)                                                                   \
    X(ATTN_MXFP4, 7, "mxfp4", 4)

typedef enum attn_dtype {
    ATTN_DTYPE_NONE = 0,
#define X(name, value, text, bits) name = value,
    ATTN_DTYPE_MAP(X)
#undef X
} attn_dtype;

/* Bits of one element, 0 if d is not a dtype. */
size_t attn_dtype_bits(attn_dtype d);
/* Bytes of one element, 0 if d is not a dtype or two elements share a byte. */
size_t attn_dtype_bytes(attn_dtype d);
/* "f32", "f16", ...; "?" if d is not a dtype. */
const char *attn_dtype_name(attn_dtype d);
/* The dtype of that name; ATTN_DTYPE_NONE if there is none. */
attn_dtype attn_dtype_parse(const char *text);

/* How a pool is placed on the cards of a daemon that has several. X(name, value, text) */
#define ATTN_SPLIT_MAP(X)                                                                          \
    X(ATTN_SPLIT_AUTO, 0, "auto")                                                                  \
    X(ATTN_SPLIT_WHOLE, 1, "whole")                                                                \
    X(ATTN_SPLIT_HEADS, 2, "heads")                                                                \
    X(ATTN_SPLIT_TOKENS, 3, "tokens")

typedef enum attn_split {
#define X(name, value, text) name = value,
    ATTN_SPLIT_MAP(X)
#undef X
} attn_split;

/* "auto", "whole", ...; "?" if s is not a split. */
const char *attn_split_name(attn_split s);
/* false: the text names no split. */
bool attn_split_parse(const char *text, attn_split *out_split);

#define ATTN_MAX_BRANCHES 8

/* A branch of a dilated attention layer: it attends to every rate-th token of each segment. */
struct attn_branch {
    uint32_t segment_tokens; /* a multiple of rate, at most INT32_MAX */
    uint32_t rate;
};

#ifdef __cplusplus
}
#endif
#endif
