/* create.c: creates, finds, drops and restores pools.
 *
 * A pool that is asked for again by name must have the same spec. If there is no room, pools
 * without sequences that no session holds make way; so does one of the same name that has another
 * size.
 */
#include "daemon/engine/pool/create.h"
#include "daemon/engine/tier/idle.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/kv_owner.h"
#include "daemon/base/log.h"
#include "daemon/engine/core/message.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/published.h"
#include "daemon/engine/core/ready.h"
#include "daemon/engine/core/turns.h"
#include "daemon/engine/pool/size.h"
#include "daemon/engine/tier/summaries.h"
#include "daemon/engine/tier/tier.h"

#define FAIL(status, ...) (snprintf(why, why_bytes, __VA_ARGS__), (status))

static void effects_fini(struct pool *p)
{
    free(p->fx.patches);
    free(p->fx.copies);
}

void pools_fini(struct engine *e)
{
    for (uint32_t i = 0; i < e->n_pools; i++) {
        pool_spec_fini(&e->pools[i].spec);
        effects_fini(&e->pools[i]);
        summaries_forget(&e->pools[i]);
    }
    free(e->pools);
    free(e->published);
    free(e->pool_keys);
    free(e->holds);
}

static attn_status pool_forget(struct engine *e, struct pool *p, char *why, size_t why_bytes);

/* --- making ----------------------------------------------------------------------------------- */

static attn_status effects_init(struct engine *e, struct pool *p)
{
    p->fx = (struct kv_effects){
        .patches = calloc(e->patches_capacity + e->patches_margin, sizeof *p->fx.patches),
        .copies = calloc(e->copies_capacity, sizeof *p->fx.copies),
        .patches_capacity = e->patches_capacity,
        .copies_capacity = e->copies_capacity,
    };
    return p->fx.patches == NULL || p->fx.copies == NULL ? ATTN_ENOMEM : ATTN_OK;
}

static void pool_undo(struct engine *e, struct pool *p)
{
    if (p->device != NULL) {
        p->ops->pool_close(p->device);
        e->device_bytes -= p->device_bytes;
    }
    effects_fini(p);
    summaries_forget(p);
    pool_spec_fini(&p->spec);
    *p = (struct pool){0};
    e->pool_keys[p - e->pools] = 0;
}

/* Makes *p of spec, taking ownership of it: checked, sized, open on the device, but not counted
 * yet. place: where its device memory is; 0: anywhere. */
static attn_status pool_make(struct engine *e, const struct tenant *who, struct pool *p,
                             struct pool_spec *spec, uint64_t place, char *why, size_t why_bytes)
{
    *p = (struct pool){.spec = *spec, .tenant = tenant_id(who)};
    ready_init(&p->ready);
    attn_status st = pool_size(e, who, p, why, why_bytes);
    if (st != ATTN_OK)
        goto fail;
    if (place == 0 && turns_await_memory(e, p, true)) {
        snprintf(why, why_bytes, "the memory of pool \"%s\" is being cleared", p->spec.wire->name);
        st = ATTN_EOVERLOAD;
        goto fail;
    }
    st = effects_init(e, p);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "no memory for a pool's tables");
        goto fail;
    }
    p->config.kv_place = place;
    st = p->ops->pool_open(p->backend, &p->config, &p->device);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "%s", p->ops->last_error(p->backend));
        goto fail;
    }
    e->device_bytes += p->device_bytes;
    p->n_made = p->spec.wire->n_blocks;
    return ATTN_OK;
fail:
    pool_undo(e, p);
    return st;
}

/* Sets the pool's window: how far back its layers see. None if a layer sees everything. */
static void note_windows(const struct backend_pool_config *c, struct kv_pool_spec *ks)
{
    uint32_t window = 0, kept = 0;
    for (uint32_t i = 0; i < c->num_layers; i++) {
        const struct attn_layer_spec *l = &c->layers[i];
        if (l->window_tokens == 0 || l->n_branches > 0)
            return;
        window = l->window_tokens > window ? l->window_tokens : window;
        kept = l->sink_tokens > kept ? l->sink_tokens : kept;
    }
    ks->window_tokens = window;
    ks->kept_tokens = kept;
}

/* Registers the pool, which is open on the device, in the cache. */
static attn_status pool_note(struct engine *e, struct pool *p, char *why, size_t why_bytes)
{
    size_t packed_bytes = pool_spec_packed_bytes(&p->spec);
    uint8_t *packed = malloc(packed_bytes + 1);
    if (packed == NULL) {
        snprintf(why, why_bytes, "no memory for a pool's tables");
        return ATTN_ENOMEM;
    }
    pool_spec_pack(&p->spec, packed);
    struct kv_pool_spec ks = {.tenant = p->tenant,
                              .n_layers = p->config.num_layers,
                              .block_tokens = p->config.block_tokens,
                              .n_blocks = pool_records(e, p),
                              .spec_bytes = (uint32_t)packed_bytes,
                              .spec = packed,
                              .place = p->ops->pool_place(p->device)};
    if (!pool_spans(e, p))
        ks.idle_pages = idle_block_pages(pool_block_bytes(p));
    note_windows(&p->config, &ks);
    snprintf(ks.name, sizeof ks.name, "%s", p->spec.wire->name);
    attn_status st = kv_pool_create(e->env.kv, &ks, &p->id);
    free(packed);
    if (st != ATTN_OK)
        snprintf(why, why_bytes, "%s", kv_last_error(e->env.kv));
    return st;
}

/* Blocks that its tenant is charged for on this card, its weights as so many; those of a split pool
 * count once. */
static uint32_t blocks_charged(const struct engine *e, const struct pool *p)
{
    return pool_is_shard(e, p) ? 0 : p->config.n_blocks + pool_weight_blocks(p);
}

/* Says what computes the pool's work on this card. */
static void say_kernels(const struct pool *p)
{
    char kernels[512];
    if (p->ops->pool_kernels == NULL)
        return;
    p->ops->pool_kernels(p->device, kernels, sizeof kernels);
    log_limited("pools' kernels", LOG_LEVEL_INFO, log_write, "pool \"%s\": %s", p->spec.wire->name,
                kernels);
}

static void pool_count(struct engine *e, struct pool *p)
{
    struct kv_pool_spec ks;
    uint32_t n_free, i = (uint32_t)(p - e->pools);
    assert(p->id.index == i);
    kv_pool_info(e->env.kv, p->id, &ks, &n_free);
    pool_rename(e, p, ks.generation);
    e->n_pools = i < e->n_pools ? e->n_pools : i + 1;
    e->is_dirty = true;
    struct tenant *who = tenants_of_id(e->env.tenants, p->tenant);
    tenant_count(who, TENANT_BLOCKS, blocks_charged(e, p));
    tenant_count(who, TENANT_POOLS, is_primary(e));
    log_limited("pools made", LOG_LEVEL_INFO, log_write,
                "pool \"%s\": %" PRIu32 " layers, (%" PRIu32 ", %" PRIu32 ", %" PRIu32 "/%" PRIu32
                ") %s/%s, %" PRIu32 " blocks of %" PRIu32 " tokens, %" PRIu64 " MiB%s%s%s",
                p->spec.wire->name, p->config.num_layers, p->config.num_q_heads,
                p->config.num_kv_heads, p->config.head_dim_k, p->config.head_dim_v,
                attn_dtype_name(p->config.q_dtype), attn_dtype_name(p->config.kv_dtype),
                p->config.n_blocks, p->config.block_tokens, p->device_bytes >> 20,
                p->config.is_v_in_k ? ", v in k" : "", pool_spans(e, p) ? ", split " : "",
                pool_spans(e, p) ? attn_split_name((attn_split)p->spec.wire->split) : "");
    say_kernels(p);
}

/* --- the pools of other cards ----------------------------------------------------------------- */

struct pool_ask {
    struct peer_ask all; /* first */
    const Attnd__PoolSpec *spec;
    uint32_t index, generation, tenant;
};

static void pool_create_here(struct engine *e, void *arg)
{
    struct pool_ask *ask = arg;
    struct peer_ask *a = &ask->all;
    struct pool *p;
    const struct tenant *who = tenants_of_id(e->env.tenants, ask->tenant);
    a->status = pool_create(e, who, ask->spec, &p, a->why, a->why_bytes);
    if (a->status == ATTN_OK && (uint32_t)(p - e->pools) != ask->index) {
        snprintf(a->why, a->why_bytes, "pool \"%s\" has another place on card %" PRIu32,
                 ask->spec->name, e->env.card);
        a->status = ATTN_EINTERNAL;
    }
    if (a->status == ATTN_OK)
        pool_rename(e, p, ask->generation);
    pools_publish(e);
}

static void pool_drop_here(struct engine *e, void *arg)
{
    struct pool_ask *ask = arg;
    struct pool *p = pool_of_kv(e, (kv_pool_id){ask->index});
    if (p != NULL)
        ask->all.status = pool_drop(e, p, ask->all.why, ask->all.why_bytes);
    pools_publish(e);
}

/* All other cards do it; if one fails, those that have done it undo it. */
static attn_status others_do(struct engine *primary, const struct pool *p,
                             const Attnd__PoolSpec *spec, void (*here)(struct engine *e, void *ask),
                             void (*undo)(struct engine *e, void *ask), char *why, size_t why_bytes)
{
    char ignored[WHY_BYTES];
    uint32_t n_done, n_undone;
    struct pool_ask ask = {{ATTN_OK, why, why_bytes}, spec, p->id.index, p->generation, p->tenant};
    attn_status st = engine_call_others(primary, peers_n(primary), here, &ask.all, &n_done);
    if (st == ATTN_OK)
        return ATTN_OK;
    ask.all.why = ignored;
    ask.all.why_bytes = sizeof ignored;
    engine_call_others(primary, n_done, undo, &ask.all, &n_undone);
    return st;
}

static attn_status others_create(struct engine *primary, const struct pool *p,
                                 const Attnd__PoolSpec *asked, char *why, size_t why_bytes)
{
    if (pool_spans(primary, p) && !peers_all_live(primary)) {
        snprintf(why, why_bytes, "split %s: a card is lost",
                 attn_split_name((attn_split)p->spec.wire->split));
        return ATTN_EDEVICE;
    }
    return others_do(primary, p, asked, pool_create_here, pool_drop_here, why, why_bytes);
}

/* Whether this is the primary and there are other cards. */
static bool has_others(const struct engine *e)
{
    return is_primary(e) && peers_n(e) > 1;
}

/* Creates a pool in the first free place. Takes ownership of spec, which was made from asked. */
static attn_status pool_add(struct engine *e, const struct tenant *who, struct pool_spec *spec,
                            const Attnd__PoolSpec *asked, struct pool **out_pool, char *why,
                            size_t why_bytes)
{
    struct pool *p = e->pools, *end = e->pools + e->env.cfg->max_pools;
    while (p < end && pool_is_made(p))
        p++;
    if (p == end) {
        pool_spec_fini(spec);
        return FAIL(ATTN_EQUOTA,
                    "%" PRIu32 " pools exist, cache.max_pools is %" PRIu32
                    "; attnctl pool drop makes room",
                    e->env.cfg->max_pools, e->env.cfg->max_pools);
    }
    if (is_primary(e) && tenant_left(who, TENANT_POOLS) == 0) {
        pool_spec_fini(spec);
        return FAIL(ATTN_EQUOTA, "tenant %s has all %" PRIu64 " pools of its quota", who->name,
                    who->most[TENANT_POOLS]);
    }
    attn_status st = pool_make(e, who, p, spec, 0, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    st = pool_note(e, p, why, why_bytes);
    if (st != ATTN_OK) {
        pool_undo(e, p);
        return st;
    }
    pool_count(e, p);
    if (pool_spans(e, p)) /* each shard has as many blocks as here */
        asked = p->spec.wire;
    st = has_others(e) ? others_create(e, p, asked, why, why_bytes) : ATTN_OK;
    if (st != ATTN_OK) {
        char ignored[WHY_BYTES];
        pool_forget(e, p, ignored, sizeof ignored);
        return st;
    }
    pools_publish(e); /* before an answer names it: its first open is routed by this */
    *out_pool = p;
    return ATTN_OK;
}

/* Whether no session holds the pool, or has reserved blocks of it: a successor knows only that. */
static bool is_unused(const struct engine *e, const struct pool *p)
{
    return p->n_holders == 0 && kv_pool_reserved(e->env.kv, p->id) == 0;
}

/* Drops one unused pool of the tenant; false: there is none. */
static bool drop_idle(struct engine *e, const struct tenant *who)
{
    char why[WHY_BYTES];
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;)
        if (p->tenant == tenant_id(who) && is_unused(e, p) &&
            pool_drop(e, p, why, sizeof why) == ATTN_OK)
            return true;
    return false;
}

/* How to split a pool that does not fit one card, if its spec allows: by heads, or by tokens if
 * there are fewer heads than cards. */
static attn_split other_split(const struct engine *e, const Attnd__PoolSpec *asked)
{
    if (asked->split != ATTND__SPLIT__SPLIT_AUTO || asked->n_blocks == 0 || !has_others(e))
        return ATTN_SPLIT_WHOLE;
    return asked->num_kv_heads >= e->peers->n ? ATTN_SPLIT_HEADS : ATTN_SPLIT_TOKENS;
}

/* The default block size: that of an existing pool split by tokens; else the usual size, for each
 * card's stripe if it is split by tokens. */
static uint32_t default_block_tokens(const struct engine *e, const struct pool *p, attn_split how)
{
    if (p != NULL && p->spec.wire->split == ATTND__SPLIT__SPLIT_TOKENS)
        return p->spec.wire->block_tokens;
    return POOL_BLOCK_TOKENS * (how == ATTN_SPLIT_TOKENS ? e->peers->n : 1);
}

/* The split to try first. */
static attn_split first_split(const Attnd__PoolSpec *asked)
{
    attn_split how = (attn_split)asked->split;
    return how == ATTN_SPLIT_AUTO ? ATTN_SPLIT_WHOLE : how;
}

attn_status pool_find_same(struct engine *e, const struct tenant *who, const Attnd__PoolSpec *asked,
                           struct pool **out_pool, char *why, size_t why_bytes)
{
    struct pool_spec spec;
    attn_status st = pool_spec_init(&spec, asked, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    struct pool *p = pool_find(e, who, spec.wire->name);
    if (p == NULL) {
        st = FAIL(ATTN_ENOTFOUND, "no pool is named \"%.100s\"", asked->name);
    } else {
        if (asked->block_tokens == 0)
            spec.wire->block_tokens = default_block_tokens(e, p, first_split(asked));
        spec.wire->split = asked->split;
        if (asked->n_blocks == p->n_made)
            spec.wire->n_blocks = 0; /* the same pool, whatever it has been resized to */
        st = pool_spec_compare(&p->spec, &spec, why, why_bytes);
    }
    pool_spec_fini(&spec);
    if (st == ATTN_OK)
        *out_pool = p;
    return st;
}

/* Drops the pool of this name if it is unused and has another size, so that it can be created with
 * the size asked for. */
static bool drop_for_size(struct engine *e, const struct tenant *who, const Attnd__PoolSpec *asked)
{
    char why[WHY_BYTES];
    Attnd__PoolSpec any_size = *asked;
    struct pool *p;
    any_size.n_blocks = 0;
    return is_primary(e) && !engine_is_draining(e) && asked->n_blocks <= e->n_blocks &&
           pool_find_same(e, who, &any_size, &p, why, sizeof why) == ATTN_OK && is_unused(e, p) &&
           pool_drop(e, p, why, sizeof why) == ATTN_OK;
}

attn_status pool_create(struct engine *e, const struct tenant *who, const Attnd__PoolSpec *asked,
                        struct pool **out_pool, char *why, size_t why_bytes)
{
    attn_split how = first_split(asked);
    char as_whole[WHY_BYTES] = "";
    for (;;) {
        struct pool_spec spec;
        attn_status st = pool_find_same(e, who, asked, out_pool, why, why_bytes);
        if (st == ATTN_EEXIST && drop_for_size(e, who, asked))
            continue;
        if (st != ATTN_ENOTFOUND)
            return st;
        st = pool_spec_init(&spec, asked, why, why_bytes);
        if (st != ATTN_OK)
            return st;
        if (asked->block_tokens == 0)
            spec.wire->block_tokens = default_block_tokens(e, NULL, how);
        spec.wire->split = (Attnd__Split)how;
        st = pool_add(e, who, &spec, asked, out_pool, why, why_bytes);
        if (st == ATTN_ENOMEM && how == ATTN_SPLIT_WHOLE &&
            other_split(e, asked) != ATTN_SPLIT_WHOLE) {
            snprintf(as_whole, sizeof as_whole, "%s", why);
            how = other_split(e, asked);
            continue;
        }
        if (st == ATTN_ENOTSUP && how != (attn_split)asked->split && as_whole[0] != '\0')
            return FAIL(ATTN_ENOMEM, "%s", as_whole); /* it can't be split either */
        bool may_help = st == ATTN_EQUOTA || (st == ATTN_ENOMEM && asked->n_blocks <= e->n_blocks);
        bool may_drop = is_primary(e); /* the primary decides what makes way */
        if (!may_help || !may_drop || !drop_idle(e, who))
            return st;
    }
}

static bool is_in_work(const struct engine *e, const struct pool *p)
{
    for (uint32_t i = 0; i < e->max_in_flight; i++)
        if (e->batches[i].is_in_flight && e->batches[i].pool == p)
            return true;
    return false;
}

attn_status pool_drop(struct engine *e, struct pool *p, char *why, size_t why_bytes)
{
    if (is_in_work(e, p) || peers_move_pool(e, p->id.index))
        return FAIL(ATTN_EOVERLOAD, "pool \"%s\" is in work", p->spec.wire->name);
    if (kv_pool_sequences(e->env.kv, p->id) == 0 && has_others(e)) {
        attn_status st =
            others_do(e, p, p->spec.wire, pool_drop_here, pool_create_here, why, why_bytes);
        if (st != ATTN_OK)
            return st;
    }
    return pool_forget(e, p, why, why_bytes);
}

static attn_status pool_forget(struct engine *e, struct pool *p, char *why, size_t why_bytes)
{
    tier_leave_pool(e, p->id);
    attn_status st = kv_pool_drop(e->env.kv, p->id);
    if (st != ATTN_OK)
        return FAIL(st, "%s", kv_last_error(e->env.kv));
    assert(p->ready.n_items == 0);
    log_limited("pools dropped", LOG_LEVEL_INFO, log_write,
                "pool \"%s\" is dropped: %" PRIu64 " MiB", p->spec.wire->name,
                p->device_bytes >> 20);
    pool_unhold_all(e, p);
    struct tenant *who = tenants_of_id(e->env.tenants, p->tenant);
    tenant_give(who, TENANT_BLOCKS, blocks_charged(e, p));
    tenant_give(who, TENANT_POOLS, is_primary(e));
    tier_forget_pool(e, p->id);
    pool_undo(e, p);
    while (e->n_pools > 0 && !pool_is_made(&e->pools[e->n_pools - 1]))
        e->n_pools--;
    e->is_dirty = true;
    return ATTN_OK;
}

/* Number of blocks to restore: for a split pool, that of the primary, which is restored first. */
static uint32_t primary_n_blocks(const struct engine *e, kv_pool_id id,
                                 const struct pool_spec *spec)
{
    struct engine *primary = is_primary(e) ? NULL : peers_at(e, 0);
    const struct pool *p = primary == NULL ? NULL : pool_of_kv(primary, id);
    bool is_split = spec->wire->split == ATTND__SPLIT__SPLIT_HEADS ||
                    spec->wire->split == ATTND__SPLIT__SPLIT_TOKENS;
    return is_split && p != NULL && pool_spans(primary, p) ? p->config.n_blocks
                                                           : spec->wire->n_blocks;
}

attn_status pool_restore(struct engine *e, kv_pool_id id, char *why, size_t why_bytes)
{
    struct kv_pool_spec ks;
    uint32_t n_free;
    if (kv_pool_info(e->env.kv, id, &ks, &n_free) != ATTN_OK)
        return FAIL(ATTN_ENOTFOUND, "there is no pool %" PRIu32, id.index);
    struct wire_arena arena;
    wire_arena_init(&arena, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    const ProtobufCMessage *stored;
    struct pool_spec spec;
    struct pool *p = &e->pools[id.index];
    attn_status st = wire_unpack(&attnd__pool_spec__descriptor, ks.spec, ks.spec_bytes, &arena,
                                 &stored, why, why_bytes);
    if (st == ATTN_OK)
        st = pool_spec_init(&spec, (const Attnd__PoolSpec *)stored, why, why_bytes);
    wire_arena_reset(&arena);
    uint32_t n_made = st == ATTN_OK ? spec.wire->n_blocks : 0;
    if (st == ATTN_OK && ks.n_blocks != ks.n_made)
        spec.wire->n_blocks = ks.n_blocks; /* it was resized */
    if (st == ATTN_OK)
        spec.wire->n_blocks = primary_n_blocks(e, id, &spec);
    if (st == ATTN_OK && spec.wire->split == ATTND__SPLIT__SPLIT_AUTO) /* from an older daemon */
        spec.wire->split = ATTND__SPLIT__SPLIT_WHOLE;
    if (st == ATTN_OK)
        st = pool_make(e, NULL, p, &spec, ks.place, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    p->id = id;
    p->tenant = ks.tenant;
    p->n_made = n_made;
    if (p->config.num_layers != ks.n_layers || p->config.block_tokens != ks.block_tokens ||
        pool_records(e, p) != ks.n_blocks) {
        pool_undo(e, p);
        return FAIL(ATTN_EPROTO, "pool \"%s\": its description is of another geometry", ks.name);
    }
    pool_count(e, p);
    return ATTN_OK;
}
