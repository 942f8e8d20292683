/* kv_range.h: which parts of a backend's KV memory its pools have: a list in order of offset, whose
 * members the pools own. Inline: the modules link nothing of the daemon's.
 */
#ifndef ATTND_KERNELS_KV_RANGE_H
#define ATTND_KERNELS_KV_RANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kv_range {
    uint64_t offset, bytes;
    struct kv_range *next;
};

/* Where kv_range_take would put so many bytes of total; UINT64_MAX: there is no room. */
static inline uint64_t kv_range_gap(const struct kv_range *list, uint64_t total, uint64_t bytes)
{
    uint64_t end = 0;
    for (; list != NULL; list = list->next) {
        if (list->offset >= end && bytes <= list->offset - end)
            return end;
        end = list->offset + list->bytes;
    }
    return end <= total && bytes <= total - end ? end : UINT64_MAX;
}

/* Takes r->bytes of total: at r->offset if is_placed, else in the first gap that fits, which sets
 * r->offset. false: there is no room, *out_largest is the largest gap. */
static inline bool kv_range_take(struct kv_range **list, uint64_t total, bool is_placed,
                                 struct kv_range *r, uint64_t *out_largest)
{
    uint64_t end = 0, largest = 0;
    for (struct kv_range **at = list;; at = &(*at)->next) {
        uint64_t limit = *at != NULL ? (*at)->offset : total;
        uint64_t gap = limit > end ? limit - end : 0;
        uint64_t from = is_placed ? r->offset : end;
        if (from >= end && from <= limit && r->bytes <= limit - from) {
            r->offset = from;
            r->next = *at;
            *at = r;
            return true;
        }
        largest = gap > largest ? gap : largest;
        if (*at == NULL)
            break;
        end = (*at)->offset + (*at)->bytes;
    }
    *out_largest = largest;
    return false;
}

/* The most bytes that r, of the list, can have where it is. */
static inline uint64_t kv_range_room(const struct kv_range *r, uint64_t total)
{
    return (r->next != NULL ? r->next->offset : total) - r->offset;
}

static inline void kv_range_give(struct kv_range **list, struct kv_range *r)
{
    while (*list != r)
        list = &(*list)->next;
    *list = r->next;
}

#endif
