/* lane.h: an open lane, and what its files share. Each may call those below it:
 *
 *   open.c   the handshake, the watcher thread, closing
 *   plan.c   the public calls on an open lane
 *   cut.c    layers that are larger than the regions, in pieces
 *   layer.c  one plan sent, one layer enqueued, how layers ended
 *
 * The regions' memory, and the kernels that ring, are behind the table of memory/memory.h.
 */
#ifndef ATTN_LANE_H
#define ATTN_LANE_H

#include <pthread.h>
#include <stdatomic.h>

#include "clients/libattn/attn.h"
#include "clients/libattn/core/core.h"
#include "clients/libattn/memory/memory.h"

struct attn_lane {
    attn_client *client;
    const struct lane_memory_ops *ops;
    struct lane_memory *memory;
    uint64_t id, in_bytes, out_bytes, wait_us;
    struct lane_page *page, *memory_page; /* mapped here; as the memory sees it */
    uint8_t *in, *out; /* regions, as the memory has them */
    bool is_host;
    uint32_t next_bell; /* behind what is planned */
    struct lane_cut *cut; /* a plan in pieces with layers that are not enqueued yet; or NULL */
    struct client_socket socket; /* of the handshake: the daemon hangs up */
    int wake_fd;
    pthread_t watcher;
    bool has_watcher;
    _Atomic bool is_hung_up;
};

/* layer.c */

/* Sends a plan as it is. is_patient: where four are not finished, when one is. */
attn_status lane_plan_send(struct attn_lane *l, attn_pool *p, const struct attn_plan *a,
                           bool is_patient);
/* A layer that fits the regions. */
attn_status lane_enqueue_whole(struct attn_lane *l, const attn_pool *p, void *stream,
                               const struct attn_lane_step *s);

/* cut.c */

/* Sets l->cut, and sends the plan of the first piece, if the plan's layers don't fit; p is used
 * until the last of them is enqueued. */
attn_status lane_cut_begin(struct attn_lane *l, attn_pool *p, const struct attn_plan *a);
/* The next layer of l->cut; the last one ends it. */
attn_status lane_cut_enqueue(struct attn_lane *l, const attn_pool *p, void *stream,
                             const struct attn_lane_step *s);
/* Forgets l->cut; NULL is fine. */
void lane_cut_end(struct attn_lane *l);

#endif
