/* group.h: groups of blocks that are moved together, for all parts of the mover. Each group comes
 * back once, on a stack that the backend's threads push to. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_TIER_GROUP_H
#define ATTND_DAEMON_ENGINE_TIER_GROUP_H

#include "daemon/engine/core/state.h"

/* Bytes of a block in the stores: rounded up if there is a disk. */
uint64_t mover_tier_bytes(const struct engine *e, const struct pool *p);
/* How many blocks of this size move together, at most `most`. */
uint32_t mover_group_size(uint64_t bytes, uint32_t most);
void mover_group_init(struct engine *e, struct mover_group *g, struct backend_move *list,
                      void (*came)(struct engine *e, struct mover_group *g));
/* Begins to move between pool and host memory or, disk not NULL, between host memory and the file.
 * false: nothing was begun. */
bool mover_group_begin(struct engine *e, struct mover_group *g, struct pool *p, uint32_t n,
                       struct tier_disk *disk);
/* Handles the groups that have come back. true: there were some. */
bool mover_take_back(struct engine *e);
/* Whether the move succeeded. Marks the device as lost if that is why it failed. */
bool mover_is_moved(struct engine *e, const struct backend_move *m);
void mover_disk_failed(struct engine *e, const char *what);

/* Makes the sequence's items wait until blocks have been moved, and counts the wait. */
void mover_wait_for_room(struct engine *e, uint32_t seq);

#endif
