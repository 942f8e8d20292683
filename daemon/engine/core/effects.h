/* effects.h: the blocks of pools: their bytes, and the updates that a device needs of them. */
#ifndef ATTND_DAEMON_ENGINE_CORE_EFFECTS_H
#define ATTND_DAEMON_ENGINE_CORE_EFFECTS_H

#include "daemon/engine/core/state.h"

/* A block of the pool as [layer][K|V][kv_head][block_tokens][head_dim] (kv_layout.h), behind all
 * batches that the sequences which have it are in; of a split pool from and to all cards.
 * Errors   ATTN_EDEVICE and what the backend gives; of a split pool also ATTN_EOVERLOAD */
attn_status pool_block_read(const struct pool *p, uint32_t block, uint8_t *out, char *why,
                            size_t why_bytes);
attn_status pool_block_write(const struct pool *p, uint32_t block, const uint8_t *bytes, char *why,
                             size_t why_bytes);
/* Layers of it alone, which lie behind one another: the device is asked for all, and writing keeps
 * what the others have. Also ATTN_ENOMEM */
struct pool_layers {
    uint32_t first, n;
};
attn_status pool_layers_read(const struct pool *p, uint32_t block, struct pool_layers layers,
                             uint8_t *out, char *why, size_t why_bytes);
attn_status pool_layers_write(const struct pool *p, uint32_t block, struct pool_layers layers,
                              const uint8_t *bytes, char *why, size_t why_bytes);

/* The pool's effects in the backend's form, without those that no longer matter. Room for the
 * capacity and margin of patches. */
void pool_effects_export(struct engine *e, struct pool *p, struct backend_patch *patches,
                         struct backend_copy *copies);
/* The device may not have seen a failed batch's patches: they go again, as the tables are now. */
void pool_patch_again(struct engine *e, struct pool *p, const struct backend_patch *patches,
                      uint32_t n_patches);
/* The item's append, which is reserved, will not be; its patches are added to the effects. */
void pool_cancel_append(struct engine *e, struct pool *p, const struct item *it);

#endif
