/* backend_split.h: batches of split pools, of which each card computes a part. */
#ifndef ATTND_DAEMON_CARDS_SPLIT_BACKEND_SPLIT_H
#define ATTND_DAEMON_CARDS_SPLIT_BACKEND_SPLIT_H

#include "daemon/engine/core/state.h"

/* The lead's batches get parts. ATTN_ENOMEM. */
attn_status parts_init(struct engine *e);
void parts_fini(struct engine *e); /* of a half-opened engine, too */
/* The lead: a batch of n parts goes to the cards, then to each its part; the lead's own may be
 * computed inside. What the device is to be told of the batch as a whole stands in b->device. */
void parts_begin(struct engine *e, struct batch *b, uint32_t n);
void part_give(struct engine *e, struct batch *b, uint32_t card);
/* The lead: a batch whose parts are all back, its outcome in b->device and b->why; NULL: none. */
struct batch *parts_take_back(struct engine *e);
/* Puts the next part that was sent to this engine on its device. false: there is none, or no
 * place. */
bool parts_launch(struct engine *e);
/* What this engine's device gave back was a part. */
void part_leave(struct engine *e, struct backend_batch *d);

#endif
