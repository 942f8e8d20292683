/* shard.h: batches of split pools, of which each device computes its shard on its own engine's
 * thread. Sequences and block tables are the primary's alone, so a batch is made, committed and
 * answered there as any other. Blocks have the same numbers on every device.
 *
 * The shards of a batch go to the devices in the order of the primary's batches, and it is done
 * when all are back. One that fails fails the batch: nothing is committed, the step may be
 * repeated. A failed shard may not have applied its table updates and copies; so on that device the
 * batches that the primary sent before it knew fail, too: what was not applied is in later ones.
 */
#ifndef ATTND_DAEMON_CARDS_SPLIT_SHARD_H
#define ATTND_DAEMON_CARDS_SPLIT_SHARD_H

#include "daemon/cards/split/geometry.h"
#include "daemon/engine/core/state.h"

/* What one engine has of the batches of split pools. */
struct split;

/* The backend of one engine for pools that are split one way. */
struct backend {
    struct split *split;
    attn_split how;
    char why[WHY_BYTES];
};

/* A split pool as one device has it; the primary's stands for the whole. */
struct backend_pool {
    LIST_ENTRY(backend_pool) link; /* of the engine's */
    struct backend *backend;
    struct backend_pool_config config; /* of the pool as a whole */
    struct pool_split shard; /* what of it is on this device */
    struct backend_pool *device; /* that, as the device's backend knows it */
};

struct split *split_open(struct engine *e); /* NULL: no memory */
void split_close(struct split *s); /* with its pools, which stay on the device; NULL is fine */
struct engine *split_engine(const struct split *s);
void split_pool_add(struct split *s, struct backend_pool *p);
void split_pool_free(struct backend_pool *p); /* which the device does not have any more */
struct backend *split_backend(struct split *s, attn_split how); /* heads or tokens */

/* The primary's thread. A batch goes to all devices; its user is the engine's struct batch. Comes
 * back exactly once from split_poll. */
void split_submit(struct split *s, struct backend_batch *whole);
/* A batch whose shards are all back, its outcome in it, and what failed in its backend's why; NULL:
 * none. */
struct backend_batch *split_poll(struct split *s);

/* Any engine's thread. Something has come from another engine. */
bool split_has_work(const struct split *s);
/* Puts the next shard that was sent to this engine on its device. false: there is none, or no
 * place. */
bool shard_launch(struct split *s);
/* What this engine's device gave back was a shard. */
void shard_done(struct split *s, struct backend_batch *d);

#endif
