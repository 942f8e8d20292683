/* blocks.h: the topics of inspect that say which blocks are published: all of them, and what was
 * published and evicted lately. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_OPERATOR_BLOCKS_H
#define ATTND_DAEMON_ENGINE_OPERATOR_BLOCKS_H

#include <jansson.h>

#include "daemon/engine/core/state.h"

/* NULL: no memory. */
json_t *list_blocks(struct engine *e, const Attnd__Inspect *ask);
json_t *list_block_events(struct engine *e, const Attnd__Inspect *ask);
/* The card that `after` of such a topic names. */
uint32_t blocks_device(const struct engine *e, uint64_t after);

#endif
