/* engine_blocks.c: the blocks of pools: their bytes, and what a device must be told of them.
 *
 * Effects: what the cache changes in block tables, patches of table entries and copies of blocks,
 * gathers in the pool until its next batch takes it to the device.
 */
#include <assert.h>
#include <stdio.h>

#include "daemon/cards.h"
#include "daemon/engine_pool.h"

/* --- blocks ----------------------------------------------------------------------------------- */

static attn_status block_move(struct engine *e, const struct pool *p, uint32_t block,
                              uint8_t *bytes, bool is_write, char *why, size_t why_bytes)
{
    const struct backend_ops *ops = e->parts.ops;
    if (pool_is_split(&p->split))
        return cards_block_move(e, p, block, bytes, is_write, why, why_bytes);
    attn_status st = is_write ? ops->block_write(p->device, block, bytes)
                              : ops->block_read(p->device, block, bytes);
    if (st != ATTN_OK)
        snprintf(why, why_bytes, "%s", ops->last_error(e->parts.backend));
    return st;
}

attn_status pool_block_read(struct engine *e, const struct pool *p, uint32_t block, uint8_t *out,
                            char *why, size_t why_bytes)
{
    return block_move(e, p, block, out, false, why, why_bytes);
}

attn_status pool_block_write(struct engine *e, const struct pool *p, uint32_t block,
                             const uint8_t *bytes, char *why, size_t why_bytes)
{
    return block_move(e, p, block, (uint8_t *)(uintptr_t)bytes, true, why, why_bytes);
}

/* --- effects ---------------------------------------------------------------------------------- */

/* A device applies patches in any order, so those of one entry must agree: with what the entry is
 * now. Entries past the sequence's end are read by nobody. */
void pool_effects_export(struct engine *e, const struct pool *p, struct backend_patch *patches,
                         struct backend_copy *copies)
{
    const struct kv_effects *fx = &p->fx;
    for (uint32_t i = 0; i < fx->n_patches; i++) {
        const struct kv_patch *patch = &fx->patches[i];
        struct kv_seq_info info;
        kv_seq_info(e->parts.kv, (kv_seq_id){patch->row}, &info);
        bool is_live = patch->index < info.n_blocks && info.pool.index == p->id.index;
        patches[i] = (struct backend_patch){
            patch->row, patch->index, is_live ? info.block_table[patch->index] : patch->block};
    }
    for (uint32_t i = 0; i < fx->n_copies; i++)
        copies[i] = (struct backend_copy){fx->copies[i].src, fx->copies[i].dst};
}

void pool_patch_again(struct engine *e, struct pool *p, const struct backend_patch *patches,
                      uint32_t n_patches)
{
    struct kv_effects *fx = &p->fx;
    uint32_t room = e->patches_capacity + e->patches_margin;
    for (uint32_t i = 0; i < n_patches && fx->n_patches < room; i++) {
        const struct backend_patch *patch = &patches[i];
        struct kv_seq_info info;
        kv_seq_info(e->parts.kv, (kv_seq_id){patch->row}, &info);
        if (patch->index < info.n_blocks && info.pool.index == p->id.index)
            fx->patches[fx->n_patches++] =
                (struct kv_patch){patch->row, patch->index, info.block_table[patch->index]};
    }
}

void pool_cancel_append(struct engine *e, struct pool *p, const struct item *it)
{
    struct kv_effects *fx = &p->fx;
    fx->patches_capacity = e->patches_capacity + e->patches_margin;
    attn_status st = kv_append_cancel(e->parts.kv, (kv_seq_id){it->seq}, it->task->layer, it->pos,
                                      it->n_tokens, fx);
    assert(st == ATTN_OK); /* the margin has room for every copy in flight */
    (void)st;
    fx->patches_capacity = e->patches_capacity;
}
