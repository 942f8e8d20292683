/* effects.h: reads and writes blocks of pools, and collects the table updates that a device
 * needs. */
#ifndef ATTND_DAEMON_ENGINE_CORE_EFFECTS_H
#define ATTND_DAEMON_ENGINE_CORE_EFFECTS_H

#include "cache/kv_append.h"
#include "daemon/engine/core/state.h"

/* Reads or writes a block as [layer][K|V][kv_head][block_tokens][head_dim] (kv_layout.h), after all
 * batches that use sequences with this block. In a split pool, on all cards.
 * Errors   ATTN_EDEVICE and what the backend gives; in a split pool also ATTN_EOVERLOAD */
attn_status pool_block_read(const struct pool *p, uint32_t block, uint8_t *out, char *why,
                            size_t why_bytes);
attn_status pool_block_write(const struct pool *p, uint32_t block, const uint8_t *bytes, char *why,
                             size_t why_bytes);
/* Consecutive layers of a block. The device reads and writes whole blocks; writing keeps the other
 * layers. Also ATTN_ENOMEM. */
struct pool_layers {
    uint32_t first, n;
};
attn_status pool_layers_read(const struct pool *p, uint32_t block, struct pool_layers layers,
                             uint8_t *out, char *why, size_t why_bytes);
attn_status pool_layers_write(const struct pool *p, uint32_t block, struct pool_layers layers,
                              const uint8_t *bytes, char *why, size_t why_bytes);

/* Copies tokens between blocks of the pool, as kv_tree_commit asks for. user: the struct pool. */
attn_status pool_tokens_copy(void *user, const struct kv_token_copy *list, uint32_t n);

/* Writes the pool's effects in the backend's form, without those that no longer matter. patches
 * must have room for patches_capacity + patches_margin. */
void pool_effects_export(struct engine *e, struct pool *p, struct backend_patch *patches,
                         struct backend_copy *copies);
/* Adds a failed batch's patches again, as the tables are now: the device may not have seen them. */
void pool_patch_again(struct engine *e, struct pool *p, const struct backend_patch *patches,
                      uint32_t n_patches);
/* Cancels the item's reserved append; the patches that this takes are added to the effects. */
void pool_cancel_append(struct engine *e, struct pool *p, const struct item *it);

/* The summary that a block in these pages of idle memory has the number of, if it has one: runs of
 * as many pages that do not overlap never begin in the same multiple of that. */
static inline uint32_t pool_nth_summary(const struct pool *p, uint32_t page)
{
    return page / p->idle_pages;
}
/* What names the block of a table's entry for the device: itself, or its summary if it is away.
 * UINT32_MAX: it is away without one. */
uint32_t pool_block_name(const struct pool *p, uint32_t entry);

#endif
