/* gpu_device.c: what all of a gpu backend needs of its device: failures and the sentence they
 * leave, working with the device from the calling thread, what it can do, and streams that follow
 * each other. It knows nothing of pools or batches.
 */
#include "kernels/gpu/gpu_host.h"

#include <stdarg.h>
#include <stdio.h>

attn_status gpu_fail(struct backend *b, attn_status st, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(b->error, sizeof b->error, format, args);
    va_end(args);
    return st;
}

attn_status gpu_lost(struct backend *b)
{
    b->is_lost = true;
    return gpu_fail(b, ATTN_EDEVICE, "%s", runtime_last_error());
}

attn_status gpu_enter(struct backend *b)
{
    if (b->is_lost)
        return ATTN_EDEVICE;
    return runtime_device_use(b->config.device_index) == 0 ? ATTN_OK : gpu_lost(b);
}

uint32_t gpu_features(const struct backend *b)
{
    const uint32_t of_words =
        BACKEND_HAS_WORDS | BACKEND_HAS_DEVICE_ADDRESSES | BACKEND_HAS_REGIONS | BACKEND_HAS_MERGES;
    return BACKEND_HAS_TREES | BACKEND_HAS_LISTS | BACKEND_HAS_CHOICE | BACKEND_HAS_EXTREMES |
           BACKEND_HAS_SUMMARIES | (b->device.has_words ? of_words : 0);
}

int gpu_stream_follow(struct backend *b, runtime_stream *s, runtime_stream *other)
{
    int code = runtime_event_record(b->met, other);
    return code ? code : runtime_stream_follow(s, b->met);
}

int gpu_follow_all(struct backend *b)
{
    int code = 0;
    for (int i = 1; i < BACKEND_MAX_IN_FLIGHT && !code; i++)
        code = gpu_stream_follow(b, b->stream, b->slots[i].stream);
    return code;
}
