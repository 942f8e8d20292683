/* backend.c: makes a split pool look to the engine like a pool of any backend; submit, resize and
 * block copies reach all devices. On the primary it stands for the whole pool; on every other
 * device it is that device's shard, which has memory and no sequences.
 */
#include "daemon/cards/split/backend.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/cards/split/shard.h"
#include "daemon/engine/core/message.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/pool/resize.h"
#include "kernels/kv_layout.h"

#define FAIL(b, status, ...) (snprintf((b)->why, sizeof(b)->why, __VA_ARGS__), (status))

static struct engine *engine_of(const struct backend *b)
{
    return split_engine(b->split);
}

/* Passes on a failure of the device's own backend: its status and its sentence. */
static attn_status fail_of_device(struct backend *b, attn_status st)
{
    const struct engine *e = engine_of(b);
    if (st != ATTN_OK)
        snprintf(b->why, sizeof b->why, "%s", e->env.ops->last_error(e->env.backend));
    return st;
}

static const char *last_error(const struct backend *b)
{
    return b->why;
}

/* Devices of one backend choose the same blocks from the same extremes. */
static bool all_choose_alike(const struct engine *e)
{
    const uint32_t needs = BACKEND_HAS_CHOICE | BACKEND_HAS_EXTREMES;
    bool do_all = true;
    for (uint32_t i = 0; i < e->peers->n; i++) {
        const struct engine *other = peers_at(e, i);
        do_all &= peers_are_alike(e, other) && (other->info.features & needs) == needs;
    }
    return do_all;
}

static void info(const struct backend *b, struct backend_info *out)
{
    const struct engine *e = engine_of(b);
    *out = (struct backend_info){.kv_bytes = e->info.kv_bytes, .max_in_flight = e->max_in_flight};
    out->features = e->info.features & BACKEND_HAS_LISTS;
    if (b->how == ATTN_SPLIT_HEADS)
        out->features |= e->info.features & (BACKEND_HAS_TREES | BACKEND_HAS_CHOICE);
    else if (all_choose_alike(e))
        out->features |= BACKEND_HAS_CHOICE;
}

/* --- pools ------------------------------------------------------------------------------------ */

static attn_status shard_of(struct backend *b, const struct backend_pool_config *c,
                            struct pool_split *out)
{
    const struct engine *e = engine_of(b);
    return pool_split_init(out, c, b->how, e->peers->n, e->env.card, b->why, sizeof b->why);
}

static attn_status pool_check(struct backend *b, const struct backend_pool_config *c)
{
    const struct engine *e = engine_of(b);
    struct pool_split shard = {0};
    attn_status st = shard_of(b, c, &shard);
    if (st == ATTN_OK)
        st = fail_of_device(b, e->env.ops->pool_check(e->env.backend, &shard.config));
    pool_split_fini(&shard);
    return st;
}

/* Bytes of this device's memory for its shard of the pool. */
static uint64_t pool_bytes(const struct backend *b, const struct backend_pool_config *c)
{
    const struct engine *e = engine_of(b);
    struct pool_split shard = {0};
    struct backend scratch = *b;
    uint64_t n = UINT64_MAX; /* for a pool that pool_check refuses */
    if (shard_of(&scratch, c, &shard) == ATTN_OK)
        n = e->env.ops->pool_bytes(e->env.backend, &shard.config);
    pool_split_fini(&shard);
    return n;
}

static void pool_close(struct backend_pool *p)
{
    const struct engine *e = engine_of(p->backend);
    if (p->device != NULL)
        e->env.ops->pool_close(p->device);
    split_pool_free(p);
}

static attn_status pool_open(struct backend *b, const struct backend_pool_config *c,
                             struct backend_pool **out_pool)
{
    const struct engine *e = engine_of(b);
    struct backend_pool *p = calloc(1, sizeof *p);
    if (p == NULL)
        return FAIL(b, ATTN_ENOMEM, "no memory for a pool's tables");
    p->backend = b;
    p->config = *c;
    split_pool_add(b->split, p);
    attn_status st = shard_of(b, c, &p->shard);
    if (st == ATTN_OK)
        st = fail_of_device(b, e->env.ops->pool_open(e->env.backend, &p->shard.config, &p->device));
    if (st == ATTN_OK)
        *out_pool = p;
    else
        pool_close(p);
    return st;
}

static void pool_kernels(const struct backend_pool *p, char *out, size_t bytes)
{
    const struct backend_ops *ops = engine_of(p->backend)->env.ops;
    out[0] = '\0';
    if (ops->pool_kernels != NULL)
        ops->pool_kernels(p->device, out, bytes);
}

static uint64_t pool_place(const struct backend_pool *p)
{
    return engine_of(p->backend)->env.ops->pool_place(p->device);
}

static uint32_t pool_room(const struct backend_pool *p)
{
    return engine_of(p->backend)->env.ops->pool_room(p->device);
}

/* --- more blocks, or fewer -------------------------------------------------------------------- */

struct resize_ask {
    struct peer_ask all; /* first */
    uint32_t pool, n_blocks, row_blocks;
    uint32_t had[CONFIG_MAX_DEVICES]; /* number of blocks before, of each device that resized */
};

/* The pool's index, which is the same in all engines. */
static uint32_t index_of(struct engine *e, const struct backend_pool *p)
{
    struct pool *k = pool_next(e, NULL);
    while (k->device != p)
        k = pool_next(e, k);
    return k->id.index;
}

static attn_status resize_device(struct backend_pool *p, uint32_t n_blocks, uint32_t row_blocks)
{
    struct backend *b = p->backend;
    const struct engine *e = engine_of(b);
    attn_status st = e->env.ops->pool_resize(p->device, n_blocks, row_blocks);
    if (st != ATTN_OK)
        return FAIL(b, st, "card %" PRIu32 ": %s", e->env.card,
                    e->env.ops->last_error(e->env.backend));
    p->config.n_blocks = p->shard.config.n_blocks = n_blocks;
    p->config.max_row_blocks = p->shard.config.max_row_blocks = row_blocks;
    return ATTN_OK;
}

static attn_status resize_shard(struct engine *e, struct pool *p, uint32_t n_blocks,
                                uint32_t row_blocks, char *why, size_t why_bytes)
{
    uint32_t room = pool_room(p->device);
    if (n_blocks == p->config.n_blocks)
        return ATTN_OK;
    if (n_blocks > p->config.n_blocks && n_blocks > room) {
        snprintf(why, why_bytes,
                 "card %" PRIu32 ": n_blocks is %" PRIu32 ", pool \"%s\" has room for %" PRIu32
                 " where it is",
                 e->env.card, n_blocks, p->spec.wire->name, room);
        return ATTN_ENOMEM;
    }
    attn_status st = resize_device(p->device, n_blocks, row_blocks);
    if (st == ATTN_OK)
        pool_note_size(e, p, n_blocks, row_blocks, 0);
    else
        snprintf(why, why_bytes, "%s", p->backend->why);
    return st;
}

/* Resizes a device's shard, on the thread of its engine. */
static void resize_there(struct engine *e, void *arg)
{
    struct resize_ask *r = arg;
    struct pool *p = pool_of_kv(e, (kv_pool_id){r->pool});
    r->had[e->env.card] = p == NULL ? 0 : p->config.n_blocks;
    if (p != NULL)
        r->all.status =
            resize_shard(e, p, r->n_blocks, r->row_blocks, r->all.why, r->all.why_bytes);
}

static void resize_back(struct engine *e, void *arg)
{
    const struct resize_ask *r = arg;
    struct pool *p = pool_of_kv(e, (kv_pool_id){r->pool});
    uint32_t had = r->had[e->env.card];
    char why[WHY_BYTES];
    if (p != NULL && resize_shard(e, p, had, r->row_blocks, why, sizeof why) != ATTN_OK)
        log_warn("pool \"%s\" has memory for %" PRIu32 " blocks on card %" PRIu32
                 ", not for %" PRIu32,
                 p->spec.wire->name, p->config.n_blocks, e->env.card, had);
}

/* The primary grows last, since the pool can't grow if another device can't. */
static attn_status grow(struct backend_pool *p, uint32_t n_blocks, uint32_t row_blocks)
{
    struct backend *b = p->backend;
    struct engine *e = engine_of(b);
    char ignored[WHY_BYTES];
    uint32_t n_done, n_undone;
    struct resize_ask r = {
        {ATTN_OK, b->why, sizeof b->why}, index_of(e, p), n_blocks, row_blocks, {0}};
    attn_status st = engine_call_others(e, peers_n(e), resize_there, &r.all, &n_done);
    if (st == ATTN_OK)
        st = resize_device(p, n_blocks, row_blocks);
    if (st == ATTN_OK)
        return ATTN_OK;
    r.all.why = ignored;
    engine_call_others(e, n_done, resize_back, &r.all, &n_undone);
    return st;
}

/* The cache uses fewer blocks already, so a device that fails to shrink only keeps memory that
 * others could use. */
static attn_status shrink(struct backend_pool *p, uint32_t n_blocks, uint32_t row_blocks)
{
    struct engine *e = engine_of(p->backend);
    uint32_t n_done;
    char why[WHY_BYTES];
    struct resize_ask r = {{ATTN_OK, why, sizeof why}, index_of(e, p), n_blocks, row_blocks, {0}};
    attn_status st = resize_device(p, n_blocks, row_blocks);
    if (st == ATTN_OK &&
        engine_call_others(e, peers_n(e), resize_there, &r.all, &n_done) != ATTN_OK)
        log_warn("a split pool has %" PRIu32 " blocks, and memory for more: %s", n_blocks, why);
    return st;
}

static attn_status resize(struct backend_pool *p, uint32_t n_blocks, uint32_t row_blocks)
{
    extremes_forget_all(&p->extremes);
    if (!is_primary(engine_of(p->backend)))
        return resize_device(p, n_blocks, row_blocks);
    return n_blocks > p->config.n_blocks ? grow(p, n_blocks, row_blocks)
                                         : shrink(p, n_blocks, row_blocks);
}

/* --- blocks ----------------------------------------------------------------------------------- */

/* Copies a whole block from or to all devices. */
struct block_copy {
    struct peer_ask all; /* first */
    uint32_t pool, block;
    uint8_t *bytes; /* the whole block */
    bool is_write;
};

static void copy_shard(struct engine *e, void *arg)
{
    struct block_copy *c = arg;
    const struct pool *pool = pool_of_kv(e, (kv_pool_id){c->pool});
    c->all.status = ATTN_EDEVICE;
    snprintf(c->all.why, c->all.why_bytes, "a card with a part of the pool is lost");
    if (pool == NULL || engine_health(e) != ATTN_OK)
        return;
    const struct backend_pool *p = pool->device;
    uint8_t *shard = malloc(kv_layout_of(&p->shard.config).block_bytes);
    if (shard == NULL) {
        c->all.status = ATTN_ENOMEM;
        return;
    }
    if (c->is_write) {
        pool_split_block_out(&p->shard, &p->config, c->bytes, shard);
        c->all.status = e->env.ops->block_write(p->device, c->block, shard);
    } else {
        c->all.status = e->env.ops->block_read(p->device, c->block, shard);
        if (c->all.status == ATTN_OK)
            pool_split_block_in(&p->shard, &p->config, shard, c->bytes);
    }
    if (c->all.status != ATTN_OK)
        snprintf(c->all.why, c->all.why_bytes, "%s", e->env.ops->last_error(e->env.backend));
    free(shard);
}

static attn_status block_copy(struct backend_pool *p, uint32_t block, uint8_t *bytes, bool is_write)
{
    struct backend *b = p->backend;
    struct engine *e = engine_of(b);
    uint32_t n_done;
    if (is_write)
        extremes_forget(&p->extremes, &p->config, block);
    struct block_copy c = {
        {ATTN_OK, b->why, sizeof b->why}, index_of(e, p), block, bytes, is_write};
    if (!peers_all_live(e))
        return FAIL(b, ATTN_EDEVICE, "a card with a part of the pool is lost");
    copy_shard(e, &c);
    if (c.all.status != ATTN_OK)
        return c.all.status;
    return engine_call_others(e, peers_n(e), copy_shard, &c.all, &n_done);
}

static attn_status block_read(struct backend_pool *p, uint32_t block, void *out_bytes)
{
    memset(out_bytes, 0, kv_layout_of(&p->config).block_bytes); /* for the gaps between its parts */
    return block_copy(p, block, out_bytes, false);
}

static attn_status block_write(struct backend_pool *p, uint32_t block, const void *bytes)
{
    return block_copy(p, block, (uint8_t *)(uintptr_t)bytes, true);
}

/* Copies tokens on all devices; all of them have the same blocks. */
struct tokens_ask {
    struct peer_ask all; /* first */
    uint32_t pool, n;
    const struct backend_token_copy *list;
};

static void tokens_copy_here(struct engine *e, void *arg)
{
    struct tokens_ask *c = arg;
    const struct pool *pool = pool_of_kv(e, (kv_pool_id){c->pool});
    c->all.status = ATTN_EDEVICE;
    snprintf(c->all.why, c->all.why_bytes, "a card with a part of the pool is lost");
    if (pool == NULL || engine_health(e) != ATTN_OK)
        return;
    c->all.status = e->env.ops->tokens_copy(pool->device->device, c->list, c->n);
    if (c->all.status != ATTN_OK)
        snprintf(c->all.why, c->all.why_bytes, "%s", e->env.ops->last_error(e->env.backend));
}

static attn_status tokens_copy(struct backend_pool *p, const struct backend_token_copy *list,
                               uint32_t n)
{
    struct backend *b = p->backend;
    struct engine *e = engine_of(b);
    uint32_t n_done;
    struct tokens_ask c = {{ATTN_OK, b->why, sizeof b->why}, index_of(e, p), n, list};
    for (uint32_t i = 0; i < n; i++)
        extremes_forget(&p->extremes, &p->config, list[i].to_block);
    if (!peers_all_live(e))
        return FAIL(b, ATTN_EDEVICE, "a card with a part of the pool is lost");
    tokens_copy_here(e, &c);
    if (c.all.status != ATTN_OK)
        return c.all.status;
    return engine_call_others(e, peers_n(e), tokens_copy_here, &c.all, &n_done);
}

/* --- weights: each device has all of them, and is given them by itself ------------------------ */

static attn_status weights_write(struct backend_pool *p, uint32_t layer, uint64_t offset,
                                 const void *bytes, uint64_t n)
{
    const struct engine *e = engine_of(p->backend);
    return fail_of_device(p->backend,
                          e->env.ops->weights_write(p->device, layer, offset, bytes, n));
}

/* The primary is given them last, so all devices have what it has. */
static uint64_t weights_have(const struct backend_pool *p, uint32_t layer)
{
    return engine_of(p->backend)->env.ops->weights_have(p->device, layer);
}

static attn_status weights_read(struct backend_pool *p, uint32_t layer, uint64_t offset, uint64_t n,
                                void *out_bytes)
{
    const struct engine *e = engine_of(p->backend);
    return fail_of_device(p->backend,
                          e->env.ops->weights_read(p->device, layer, offset, n, out_bytes));
}

/* --- batches ---------------------------------------------------------------------------------- */

static attn_status submit(struct backend *b, struct backend_batch *batch)
{
    split_submit(b->split, batch);
    return ATTN_OK;
}

/* Functions that are missing here: it is opened with its engine, its batches come back through
 * split_poll, and it has no block moves, words or memory of its own. */
static const struct backend_ops ops = {
    .abi = BACKEND_ABI,
    .name = "split",
    .last_error = last_error,
    .info = info,
    .pool_check = pool_check,
    .pool_bytes = pool_bytes,
    .pool_open = pool_open,
    .pool_place = pool_place,
    .pool_room = pool_room,
    .pool_resize = resize,
    .pool_close = pool_close,
    .pool_kernels = pool_kernels,
    .weights_write = weights_write,
    .weights_have = weights_have,
    .weights_read = weights_read,
    .submit = submit,
    .block_read = block_read,
    .block_write = block_write,
    .tokens_copy = tokens_copy,
};

const struct split_ops cards_split_ops = {
    .backend = &ops,
    .open = split_open,
    .close = split_close,
    .backend_of = split_backend,
    .poll = split_poll,
    .has_work = split_has_work,
    .launch = shard_launch,
    .done = shard_done,
};
