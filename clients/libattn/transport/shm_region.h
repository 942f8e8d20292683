/* shm_region.h: the client's side of a region of shared memory: its rings, and which messages
 * occupy the data area.
 *
 * A message is an extent: the request and, behind it, the room for its reply. Extents are cut from
 * the data area first fit, so that a client with little in flight stays in warm memory. The books
 * are the client's own; nothing in the region is trusted but tensors. The caller holds a
 * lock around each call.
 */
#ifndef ATTN_SHM_REGION_H
#define ATTN_SHM_REGION_H

#include <sys/queue.h>

#include "proto/attn_types.h"
#include "proto/shm_ring.h"

enum extent_state {
    EXTENT_FREE,
    EXTENT_HELD, /* a request that is being written, or a reply that is being read */
    EXTENT_SUBMITTED, /* the daemon's */
};

struct shm_extent {
    enum extent_state state;
    uint32_t id; /* of the request, once submitted */
    uint64_t begin, end; /* in the region */
    uint64_t room; /* [room, end) */
    uint32_t request_bytes;
    uint32_t next; /* in use and behind this one, or free; SHM_NO_SLOT */
};
#define SHM_NO_SLOT UINT32_MAX

struct shm_region {
    SLIST_ENTRY(shm_region) link; /* older ones, of the transport */
    uint8_t *base;
    uint64_t bytes, data_offset;
    void (*unpin)(void *p); /* of base; NULL: it is not page-locked */
    struct shm_control *control;
    volatile struct shm_submit *submits;
    const volatile struct shm_complete *completes;
    int wake_fd; /* wakes the daemon */
    uint32_t n_slots, n_used;
    uint32_t submitted, completed; /* entries of the rings so far */
    uint32_t first_used, first_free;
    struct shm_extent extents[]; /* [n_slots] */
};

/* Maps the memfd. wake_fd is the region's from success on, memfd the caller's. ATTN_EPROTO: the
 * welcome or the memfd's size or seals are not as they must be; ATTN_ENOMEM. */
attn_status region_open(const struct shm_welcome *w, int memfd, int wake_fd,
                        struct shm_region **out_r);
void region_close(struct shm_region *r);

/* NULL: no slot or no room. */
void *region_alloc(struct shm_region *r, uint64_t request_bytes, uint64_t room_bytes);
/* The extent a pointer into the region belongs to; NULL: p is not in the region, or in none. */
struct shm_extent *region_find(struct shm_region *r, const void *p);
void region_free(struct shm_region *r, struct shm_extent *x);
/* Frees the submitted extents after the connection ended: they will not be completed. */
void region_forget(struct shm_region *r);

void region_submit(struct shm_region *r, struct shm_extent *x, uint32_t id);
bool region_has_completed(const struct shm_region *r);
/* Takes the next completed request, whose extent is held again. ATTN_ENOTFOUND: there is none;
 * ATTN_EPROTO: the daemon's entry makes no sense. */
attn_status region_take(struct shm_region *r, struct shm_extent **out_x, void **out_reply,
                        uint32_t *out_bytes);

#endif
