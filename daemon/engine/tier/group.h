/* group.h: blocks that are moved together, what every direction of the mover does with them.
 * Every group comes back once, over a stack that the backend's threads push to. */
#ifndef ATTND_DAEMON_ENGINE_TIER_GROUP_H
#define ATTND_DAEMON_ENGINE_TIER_GROUP_H

#include "daemon/engine/core/state.h"

/* Bytes of a block in the stores. */
uint64_t mover_tier_bytes(const struct engine *e, const struct pool *p);
/* How many blocks move together. */
uint32_t mover_group_size(uint64_t bytes, uint32_t most);
void mover_group_init(struct engine *e, struct mover_group *g, struct backend_move *list,
                      void (*came)(struct engine *e, struct mover_group *g));
/* Between pool and host memory; or, disk not NULL, host memory and the file. false: nothing was
 * begun. */
bool mover_group_begin(struct engine *e, struct mover_group *g, struct pool *p, uint32_t n,
                       struct tier_disk *disk);
/* Looks after the groups that have come back. true: some have. */
bool mover_take_back(struct engine *e);
/* What came of a move. One that failed: not the device, or it is lost. */
bool mover_is_moved(struct engine *e, const struct backend_move *m);
void mover_disk_failed(struct engine *e, const char *what);

/* The sequence's items wait for what goes or comes, and are counted. */
void mover_wait_for_room(struct engine *e, uint32_t seq);

#endif
