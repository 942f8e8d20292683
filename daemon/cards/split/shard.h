/* shard.h: batches of split pools: each device computes its shard on its own engine's thread. Only
 * the primary has sequences and block tables, so it makes, commits and answers such a batch like
 * any other. Blocks have the same numbers on every device.
 *
 * The shards of a batch go to the devices in the order of the primary's batches, and the batch is
 * done when all are back. If one fails, the batch fails: nothing is committed, and the step may be
 * repeated. A failed shard may not have applied its table updates and copies, so batches of its
 * pool that were already on their way to that device fail, too; later ones repeat what was not
 * applied.
 *
 * A batch whose queries choose blocks of a pool that is split by tokens goes in stages where some
 * blocks' extremes are to be joined first (extremes.h): its appends, behind which each device makes
 * the extremes of its keys; then, given those of all, the rest. Many blocks are joined slice by
 * slice, so that they take little staging, and the primary does work of pools that are not split in
 * between. Batches of split pools behind it wait meanwhile.
 */
#ifndef ATTND_DAEMON_CARDS_SPLIT_SHARD_H
#define ATTND_DAEMON_CARDS_SPLIT_SHARD_H

#include "daemon/cards/split/extremes.h"
#include "daemon/cards/split/geometry.h"
#include "daemon/engine/core/state.h"

/* One engine's state of the batches of split pools. */
struct split;

/* One engine's backend for pools that are split one way: by heads or by tokens. */
struct backend {
    struct split *split;
    attn_split how;
    char why[WHY_BYTES];
};

/* A split pool as one device has it; the primary's stands for the whole. */
struct backend_pool {
    LIST_ENTRY(backend_pool) link; /* in the engine's list */
    struct backend *backend;
    struct backend_pool_config config; /* of the whole pool */
    struct pool_split shard; /* this device's shard */
    struct backend_pool *device; /* the shard as a pool of the device's own backend */
    struct split_extremes extremes; /* the primary's: which all devices have */
    uint64_t failed; /* order of the last of its shards that failed on this device */
};

struct split *split_open(struct engine *e); /* NULL: no memory */
/* Frees s and its pools, but not the device's own pools. NULL is fine. */
void split_close(struct split *s);
struct engine *split_engine(const struct split *s);
void split_pool_add(struct split *s, struct backend_pool *p);
void split_pool_free(struct backend_pool *p); /* after the device's own pool is gone */
struct backend *split_backend(struct split *s, attn_split how); /* heads or tokens */

/* Sends a batch to all devices; it comes back exactly once from split_poll. Its user is the
 * engine's struct batch. The primary's thread. */
void split_submit(struct split *s, struct backend_batch *whole);
/* A batch of which all shards are back, with its status; its backend's why says what failed. NULL:
 * there is none. The primary's thread. */
struct backend_batch *split_poll(struct split *s);

/* Whether shards have come from another engine. This engine's thread, as the next two. */
bool split_has_work(const struct split *s);
/* Puts the next shard that was sent to this engine on its device. false: there is none, or the
 * device has no room for it. */
bool shard_launch(struct split *s);
/* Takes a batch that came back from this engine's device and that belongs to a shard. */
void shard_done(struct split *s, struct backend_batch *d);

#endif
