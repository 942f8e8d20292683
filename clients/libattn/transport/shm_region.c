/* shm_region.c: a region's rings and the extents of its data area. What the daemon writes into the
 * rings is checked before it is used. */
#include "clients/libattn/transport/shm_region.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static uint64_t align_up(uint64_t n)
{
    return (n + SHM_ALIGN - 1) & ~(uint64_t)(SHM_ALIGN - 1);
}

/* Rings behind the control words, the data area behind the rings, all inside; nothing overflows. */
static bool is_sane(const struct shm_welcome *w)
{
    uint64_t n = w->n_slots;
    if (n == 0 || n > SHM_MAX_SLOTS || (n & (n - 1)) != 0 || w->region_bytes > (uint64_t)1 << 40)
        return false;
    return w->submit_offset % SHM_ALIGN == 0 && w->complete_offset % SHM_ALIGN == 0 &&
           w->data_offset % SHM_ALIGN == 0 && w->submit_offset >= sizeof(struct shm_control) &&
           w->submit_offset < w->region_bytes && w->complete_offset < w->region_bytes &&
           w->complete_offset >= w->submit_offset + n * sizeof(struct shm_submit) &&
           w->data_offset >= w->complete_offset + n * sizeof(struct shm_complete) &&
           w->data_offset < w->region_bytes;
}

attn_status region_open(const struct shm_welcome *w, int memfd, int wake_fd,
                        struct shm_region **out_r)
{
    struct stat sb;
    int seals = fcntl(memfd, F_GET_SEALS);
    if (!is_sane(w) || fstat(memfd, &sb) != 0 || (uint64_t)sb.st_size < w->region_bytes ||
        seals < 0 || !(seals & F_SEAL_SHRINK))
        return ATTN_EPROTO;
    struct shm_region *r = calloc(1, sizeof *r + w->n_slots * sizeof r->extents[0]);
    if (r == NULL)
        return ATTN_ENOMEM;
    void *p = mmap(NULL, w->region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    if (p == MAP_FAILED) {
        free(r);
        return ATTN_ENOMEM;
    }
    r->base = p;
    r->bytes = w->region_bytes;
    r->data_offset = w->data_offset;
    r->control = p;
    r->submits = (volatile struct shm_submit *)(void *)(r->base + w->submit_offset);
    r->completes = (const volatile struct shm_complete *)(void *)(r->base + w->complete_offset);
    r->wake_fd = wake_fd;
    r->n_slots = w->n_slots;
    r->first_used = SHM_NO_SLOT;
    for (uint32_t i = 0; i < r->n_slots; i++)
        r->extents[i].next = i + 1 < r->n_slots ? i + 1 : SHM_NO_SLOT;
    *out_r = r;
    return ATTN_OK;
}

void region_close(struct shm_region *r)
{
    if (r->unpin != NULL)
        r->unpin(r->base);
    munmap(r->base, r->bytes);
    close(r->wake_fd);
    free(r);
}

void *region_alloc(struct shm_region *r, uint64_t request_bytes, uint64_t room_bytes)
{
    uint32_t slot = r->first_free, *link = &r->first_used;
    uint64_t begin = r->data_offset, head = align_up(request_bytes);
    uint64_t bytes =
        head + align_up(room_bytes > SHM_MIN_ROOM_BYTES ? room_bytes : SHM_MIN_ROOM_BYTES);
    if (slot == SHM_NO_SLOT || request_bytes > UINT32_MAX || room_bytes > UINT32_MAX)
        return NULL;
    for (; *link != SHM_NO_SLOT; link = &r->extents[*link].next) {
        const struct shm_extent *x = &r->extents[*link];
        if (x->begin - begin >= bytes)
            break;
        begin = x->end;
    }
    if (*link == SHM_NO_SLOT && r->bytes - begin < bytes)
        return NULL;
    struct shm_extent *x = &r->extents[slot];
    r->first_free = x->next;
    *x = (struct shm_extent){.state = EXTENT_HELD,
                             .begin = begin,
                             .end = begin + bytes,
                             .room = begin + head,
                             .request_bytes = (uint32_t)request_bytes,
                             .next = *link};
    *link = slot;
    r->n_used++;
    return r->base + begin;
}

struct shm_extent *region_find(struct shm_region *r, const void *p)
{
    uintptr_t at = (uintptr_t)p - (uintptr_t)r->base;
    if ((uintptr_t)p < (uintptr_t)r->base || at >= r->bytes)
        return NULL;
    for (uint32_t i = r->first_used; i != SHM_NO_SLOT; i = r->extents[i].next)
        if (at >= r->extents[i].begin && at < r->extents[i].end)
            return &r->extents[i];
    return NULL;
}

void region_free(struct shm_region *r, struct shm_extent *x)
{
    uint32_t slot = (uint32_t)(x - r->extents), *link = &r->first_used;
    while (*link != slot)
        link = &r->extents[*link].next;
    *link = x->next;
    x->state = EXTENT_FREE;
    x->next = r->first_free;
    r->first_free = slot;
    r->n_used--;
}

void region_forget(struct shm_region *r)
{
    for (uint32_t i = 0; i < r->n_slots; i++)
        if (r->extents[i].state == EXTENT_SUBMITTED)
            region_free(r, &r->extents[i]);
}

void region_submit(struct shm_region *r, struct shm_extent *x, uint32_t id)
{
    volatile struct shm_submit *e = &r->submits[r->submitted % r->n_slots];
    x->state = EXTENT_SUBMITTED;
    x->id = id;
    e->request_offset = x->begin;
    e->room_offset = x->room;
    e->request_bytes = x->request_bytes;
    e->room_bytes = (uint32_t)(x->end - x->room);
    e->slot = (uint32_t)(x - r->extents);
    e->reserved = 0;
    r->submitted++;
    /* in one order with the look at daemon_sleeps: the daemon looks at `submitted` after it said so
     * */
    atomic_store(&r->control->submitted, r->submitted);
    uint64_t one = 1;
    if (atomic_load(&r->control->daemon_sleeps) != 0 &&
        atomic_exchange(&r->control->daemon_sleeps, 0) != 0 &&
        write(r->wake_fd, &one, sizeof one) < 0)
        return; /* the daemon looks again by itself, in a while */
}

bool region_has_completed(const struct shm_region *r)
{
    return atomic_load_explicit(&r->control->completed, memory_order_acquire) != r->completed;
}

attn_status region_take(struct shm_region *r, struct shm_extent **out_x, void **out_reply,
                        uint32_t *out_bytes)
{
    if (!region_has_completed(r))
        return ATTN_ENOTFOUND;
    const volatile struct shm_complete *e = &r->completes[r->completed % r->n_slots];
    uint64_t offset = e->reply_offset;
    uint32_t bytes = e->reply_bytes, slot = e->slot;
    if (slot >= r->n_slots || r->extents[slot].state != EXTENT_SUBMITTED)
        return ATTN_EPROTO;
    struct shm_extent *x = &r->extents[slot];
    if (offset % SHM_ALIGN != 0 || offset < x->room || offset >= x->end || bytes == 0 ||
        bytes > x->end - offset)
        return ATTN_EPROTO;
    r->completed++;
    x->state = EXTENT_HELD;
    *out_x = x;
    *out_reply = r->base + offset;
    *out_bytes = bytes;
    return ATTN_OK;
}
