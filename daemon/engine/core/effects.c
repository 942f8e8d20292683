/* effects.c: reads and writes blocks of pools, and collects the table updates that a device needs.
 *
 * Effects are what the cache changes in block tables: patches of table entries and copies of
 * blocks. They gather in the pool until its next batch carries them to the device.
 */
#include "daemon/engine/core/effects.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/engine/core/pool_table.h"
#include "kernels/kv_layout.h"

/* --- blocks ----------------------------------------------------------------------------------- */

static attn_status block_move(const struct pool *p, uint32_t block, uint8_t *bytes, bool is_write,
                              char *why, size_t why_bytes)
{
    attn_status st = is_write ? p->ops->block_write(p->device, block, bytes)
                              : p->ops->block_read(p->device, block, bytes);
    if (st != ATTN_OK)
        snprintf(why, why_bytes, "%s", p->ops->last_error(p->backend));
    return st;
}

attn_status pool_block_read(const struct pool *p, uint32_t block, uint8_t *out, char *why,
                            size_t why_bytes)
{
    return block_move(p, block, out, false, why, why_bytes);
}

attn_status pool_block_write(const struct pool *p, uint32_t block, const uint8_t *bytes, char *why,
                             size_t why_bytes)
{
    return block_move(p, block, (uint8_t *)(uintptr_t)bytes, true, why, why_bytes);
}

/* Layers of a block, by way of a copy of the whole block. */
static attn_status layers_move(const struct pool *p, uint32_t block, struct pool_layers layers,
                               uint8_t *bytes, bool is_write, char *why, size_t why_bytes)
{
    if (layers.n == p->config.num_layers)
        return block_move(p, block, bytes, is_write, why, why_bytes);
    uint64_t layer_bytes = kv_layout_of(&p->config).layer_bytes, n = layers.n * layer_bytes;
    uint8_t *whole = malloc(pool_block_bytes(p));
    if (whole == NULL) {
        snprintf(why, why_bytes, "no memory for a block");
        return ATTN_ENOMEM;
    }
    attn_status st = block_move(p, block, whole, false, why, why_bytes);
    if (st == ATTN_OK && is_write) {
        memcpy(whole + layers.first * layer_bytes, bytes, n);
        st = block_move(p, block, whole, true, why, why_bytes);
    } else if (st == ATTN_OK) {
        memcpy(bytes, whole + layers.first * layer_bytes, n);
    }
    free(whole);
    return st;
}

attn_status pool_layers_read(const struct pool *p, uint32_t block, struct pool_layers layers,
                             uint8_t *out, char *why, size_t why_bytes)
{
    return layers_move(p, block, layers, out, false, why, why_bytes);
}

attn_status pool_layers_write(const struct pool *p, uint32_t block, struct pool_layers layers,
                              const uint8_t *bytes, char *why, size_t why_bytes)
{
    return layers_move(p, block, layers, (uint8_t *)(uintptr_t)bytes, true, why, why_bytes);
}

attn_status pool_tokens_copy(void *user, const struct kv_token_copy *list, uint32_t n)
{
    const struct pool *p = user;
    struct backend_token_copy copies[KV_MAX_TREE_NODES];
    attn_status st = ATTN_OK;
    for (uint32_t i = 0, n_now; i < n && st == ATTN_OK; i += n_now) {
        n_now = n - i < KV_MAX_TREE_NODES ? n - i : KV_MAX_TREE_NODES;
        for (uint32_t k = 0; k < n_now; k++)
            copies[k] = (struct backend_token_copy){list[i + k].from_block, list[i + k].from_slot,
                                                    list[i + k].to_block, list[i + k].to_slot};
        st = p->ops->tokens_copy(p->device, copies, n_now);
    }
    return st;
}

/* --- effects ---------------------------------------------------------------------------------- */

uint32_t pool_block_name(const struct pool *p, uint32_t entry)
{
    if (!kv_is_place(entry))
        return entry;
    if (p->has_summary == NULL)
        return UINT32_MAX;
    const uint32_t nth = pool_nth_summary(p, entry & ~KV_PLACE);
    return nth < p->config.n_summaries && p->has_summary[nth] ? p->config.n_blocks + nth
                                                              : UINT32_MAX;
}

/* A device applies patches in any order, so all patches of one entry are given its present value.
 * Entries past the sequence's end are never read. */
void pool_effects_export(struct engine *e, struct pool *p, struct backend_patch *patches,
                         struct backend_copy *copies)
{
    struct kv_effects *fx = &p->fx;
    uint32_t n = 0;
    struct kv_seq_info info;
    for (uint32_t i = 0; i < fx->n_patches; i++) {
        const struct kv_patch patch = fx->patches[i];
        if (i == 0 || patch.row != fx->patches[i - 1].row)
            kv_seq_info(e->env.kv, (kv_seq_id){patch.row}, &info);
        bool is_live = patch.index < info.n_blocks && info.pool.index == p->id.index;
        uint32_t block = pool_block_name(p, is_live ? info.block_table[patch.index] : patch.block);
        if (block == UINT32_MAX)
            continue; /* paged out: it is patched when it comes back */
        fx->patches[n] = patch;
        patches[n++] = (struct backend_patch){patch.row, patch.index, block};
    }
    fx->n_patches = n;
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
        kv_seq_info(e->env.kv, (kv_seq_id){patch->row}, &info);
        if (patch->index < info.n_blocks && info.pool.index == p->id.index &&
            pool_block_name(p, info.block_table[patch->index]) != UINT32_MAX)
            fx->patches[fx->n_patches++] =
                (struct kv_patch){patch->row, patch->index, info.block_table[patch->index]};
    }
}

void pool_cancel_append(struct engine *e, struct pool *p, const struct item *it)
{
    struct kv_effects *fx = &p->fx;
    fx->patches_capacity = e->patches_capacity + e->patches_margin;
    attn_status st = kv_append_cancel(e->env.kv, (kv_seq_id){it->seq}, it->task->layer, it->pos,
                                      it->n_tokens, fx);
    assert(st == ATTN_OK); /* the margin has room for every copy in flight */
    (void)st;
    fx->patches_capacity = e->patches_capacity;
}
