/* effects.c: the blocks of pools: their bytes, and what a device must be told of them.
 *
 * Effects: what the cache changes in block tables, patches of table entries and copies of blocks,
 * gathers in the pool until its next batch takes it to the device.
 */
#include "daemon/engine/core/effects.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/engine/core/message.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "kernels/kv_layout.h"

/* --- blocks ----------------------------------------------------------------------------------- */

/* A block of a split pool, all of it, from or to all cards. The lead's thread. */
struct block_ask {
    uint32_t pool, block;
    uint8_t *bytes; /* of the whole */
    bool is_write;
    attn_status status;
    char why[WHY_BYTES];
};

static void part_move(struct engine *e, void *arg)
{
    struct block_ask *ask = arg;
    struct pool *p = pool_of_kv(e, (kv_pool_id){ask->pool});
    ask->status = ATTN_EDEVICE;
    snprintf(ask->why, sizeof ask->why, "a card with a part of the pool is lost");
    if (p == NULL || engine_health(e) != ATTN_OK)
        return;
    uint8_t *part = malloc(kv_layout_of(&p->split.config).block_bytes);
    if (part == NULL) {
        ask->status = ATTN_ENOMEM;
        return;
    }
    if (ask->is_write) {
        pool_split_block_out(&p->split, &p->config, ask->bytes, part);
        ask->status = e->parts.ops->block_write(p->device, ask->block, part);
    } else {
        ask->status = e->parts.ops->block_read(p->device, ask->block, part);
        if (ask->status == ATTN_OK)
            pool_split_block_in(&p->split, &p->config, part, ask->bytes);
    }
    if (ask->status != ATTN_OK)
        snprintf(ask->why, sizeof ask->why, "%s", e->parts.ops->last_error(e->parts.backend));
    free(part);
}

static attn_status parts_move(struct engine *lead, const struct pool *p, uint32_t block,
                              uint8_t *bytes, bool is_write, char *why, size_t why_bytes)
{
    struct block_ask ask = {
        .pool = p->id.index, .block = block, .bytes = bytes, .is_write = is_write};
    if (!is_write)
        memset(bytes, 0, pool_block_bytes(p)); /* between its parts */
    part_move(lead, &ask);
    for (uint32_t k = 1; k < peers_n(lead) && ask.status == ATTN_OK; k++)
        if (engine_call(peers_at(lead, k), part_move, &ask) != ATTN_OK) {
            snprintf(ask.why, sizeof ask.why, "card %" PRIu32 " does not answer", k);
            ask.status = ATTN_EOVERLOAD;
        }
    if (ask.status != ATTN_OK)
        snprintf(why, why_bytes, "%s", ask.why);
    return ask.status;
}

static attn_status block_move(struct engine *e, const struct pool *p, uint32_t block,
                              uint8_t *bytes, bool is_write, char *why, size_t why_bytes)
{
    const struct backend_ops *ops = e->parts.ops;
    if (pool_is_split(&p->split))
        return parts_move(e, p, block, bytes, is_write, why, why_bytes);
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

/* Through a copy of the whole block. */
static attn_status layers_move(struct engine *e, const struct pool *p, uint32_t block,
                               struct pool_layers layers, uint8_t *bytes, bool is_write, char *why,
                               size_t why_bytes)
{
    if (layers.n == p->config.num_layers)
        return block_move(e, p, block, bytes, is_write, why, why_bytes);
    uint64_t layer_bytes = kv_layout_of(&p->config).layer_bytes, n = layers.n * layer_bytes;
    uint8_t *whole = malloc(pool_block_bytes(p));
    if (whole == NULL) {
        snprintf(why, why_bytes, "no memory for a block");
        return ATTN_ENOMEM;
    }
    attn_status st = block_move(e, p, block, whole, false, why, why_bytes);
    if (st == ATTN_OK && is_write) {
        memcpy(whole + layers.first * layer_bytes, bytes, n);
        st = block_move(e, p, block, whole, true, why, why_bytes);
    } else if (st == ATTN_OK) {
        memcpy(bytes, whole + layers.first * layer_bytes, n);
    }
    free(whole);
    return st;
}

attn_status pool_layers_read(struct engine *e, const struct pool *p, uint32_t block,
                             struct pool_layers layers, uint8_t *out, char *why, size_t why_bytes)
{
    return layers_move(e, p, block, layers, out, false, why, why_bytes);
}

attn_status pool_layers_write(struct engine *e, const struct pool *p, uint32_t block,
                              struct pool_layers layers, const uint8_t *bytes, char *why,
                              size_t why_bytes)
{
    return layers_move(e, p, block, layers, (uint8_t *)(uintptr_t)bytes, true, why, why_bytes);
}

/* --- effects ---------------------------------------------------------------------------------- */

/* A device applies patches in any order, so those of one entry must agree: with what the entry is
 * now. Entries past the sequence's end are read by nobody. */
void pool_effects_export(struct engine *e, struct pool *p, struct backend_patch *patches,
                         struct backend_copy *copies)
{
    struct kv_effects *fx = &p->fx;
    uint32_t n = 0;
    for (uint32_t i = 0; i < fx->n_patches; i++) {
        const struct kv_patch patch = fx->patches[i];
        struct kv_seq_info info;
        kv_seq_info(e->parts.kv, (kv_seq_id){patch.row}, &info);
        bool is_live = patch.index < info.n_blocks && info.pool.index == p->id.index;
        uint32_t block = is_live ? info.block_table[patch.index] : patch.block;
        if (kv_is_place(block))
            continue; /* it gets another when it comes back */
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
        kv_seq_info(e->parts.kv, (kv_seq_id){patch->row}, &info);
        if (patch->index < info.n_blocks && info.pool.index == p->id.index &&
            !kv_is_place(info.block_table[patch->index]))
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
