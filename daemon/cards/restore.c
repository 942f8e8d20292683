/* restore.c: makes the arenas that a predecessor left on several cards agree: it may have been
 * killed after it changed one and before it changed another. Engines have taken up their arenas and
 * have no thread yet.
 */
#include "daemon/cards/restore.h"

#include <inttypes.h>
#include <stdio.h>

#include "cache/kv_owner.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/cards/cards.h"
#include "daemon/cards/internal.h"
#include "daemon/cards/names.h"
#include "daemon/cards/session.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/published.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/pool/create.h"
#include "daemon/engine/pool/resize.h"

/* Whether two pools have the same spec, apart from the number of blocks, which may differ. */
static bool is_same(const struct pool *a, const struct pool *b, char *why, size_t why_bytes)
{
    uint32_t n_blocks = b->spec.wire->n_blocks;
    b->spec.wire->n_blocks = 0;
    attn_status st = pool_spec_compare(&a->spec, &b->spec, why, why_bytes);
    b->spec.wire->n_blocks = n_blocks;
    return st == ATTN_OK;
}

/* Gives a card the primary's pools. A pool that only some cards have was being made or dropped, so
 * it is empty, unless a card's cache could not be used. */
static attn_status restore_pools(struct engine *primary, struct engine *e, char *why,
                                 size_t why_bytes)
{
    for (uint32_t i = 0; i < e->env.cfg->max_pools; i++) {
        const struct pool *is = pool_of_kv(primary, (kv_pool_id){i});
        struct pool *p = pool_of_kv(e, (kv_pool_id){i});
        if (p != NULL && (is == NULL || !is_same(is, p, why, why_bytes))) {
            attn_status st = pool_drop(e, p, why, why_bytes);
            if (st != ATTN_OK)
                return st;
            p = NULL;
        }
        if (is == NULL)
            continue;
        if (p == NULL && pool_spans(primary, is)) {
            if (kv_pool_sequences(primary->env.kv, is->id) > 0)
                log_warn("pool \"%s\" is cleared: card %" PRIu32 " has lost its part of it",
                         is->spec.wire->name, e->env.card);
            kv_pool_clear(primary->env.kv, is->id);
        }
        if (p == NULL) {
            const struct tenant *who = tenants_of_id(e->env.tenants, is->tenant);
            attn_status st = pool_create(e, who, is->spec.wire, &p, why, why_bytes);
            if (st != ATTN_OK)
                return st;
        }
        if (p->id.index != i) {
            snprintf(why, why_bytes, "pool \"%s\" has another place on card %" PRIu32,
                     is->spec.wire->name, e->env.card);
            return ATTN_EINTERNAL;
        }
        pool_rename(e, p, is->generation);
    }
    return ATTN_OK;
}

/* Makes a slot's session agree: one that the primary does not have has ended; a card that lacks it
 * has nothing of it. */
static attn_status restore_session(struct cards *c, uint32_t slot)
{
    struct engine *primary = c->peers.at[0];
    uint64_t id = session_at(primary->env.sessions, slot)->id, now_ns = clock_now_ns();
    const char *client = kv_owner_label(primary->env.kv, slot);
    uint32_t n_cards = 1;
    attn_status st =
        id == 0 ? ATTN_OK : cards_tenant_set(c, id, kv_owner_tenant(primary->env.kv, slot));
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 1; i < c->peers.n; i++) {
        struct engine *e = c->peers.at[i];
        uint64_t had = session_at(e->env.sessions, slot)->id;
        kv_seq_id any;
        if (had != id && had != 0)
            session_kill(e, slot, "the session has ended");
        bool has_slot = had == id && id != 0;
        bool has_left = had != id || id == 0;
        has_left = has_left && kv_owner_any(e->env.kv, slot, &any) == ATTN_OK;
        has_left |= had != id && had != 0;
        if (id != 0 && !has_slot && !has_left) {
            session_restore(e->env.sessions, slot, id, client, now_ns);
            uint32_t tenant = kv_owner_tenant(primary->env.kv, slot);
            kv_owner_begin(e->env.kv, slot, id, tenant, client);
            session_at(e->env.sessions, slot)->tenant = tenants_of_id(e->env.tenants, tenant);
            has_slot = true;
        }
        n_cards += has_slot || has_left;
    }
    kv_seq_id any;
    if (id == 0 && n_cards > 1 && kv_owner_any(primary->env.kv, slot, &any) != ATTN_OK)
        /* the slot stays taken until no card has anything of it */
        session_restore(primary->env.sessions, slot, 0, "", now_ns);
    cards_session_kept(c, slot, n_cards);
    return ATTN_OK;
}

/* Requests that one card has carried out must not be carried out again by another. */
static void merge_seen(struct cards *c, uint32_t slot)
{
    for (uint32_t i = 0; i < c->peers.n; i++)
        for (uint32_t k = 0; k < c->peers.n; k++)
            if (i != k && kv_owner_id(c->peers.at[i]->env.kv, slot) != 0 &&
                kv_owner_id(c->peers.at[i]->env.kv, slot) ==
                    kv_owner_id(c->peers.at[k]->env.kv, slot))
                kv_owner_saw_all(c->peers.at[i]->env.kv, c->peers.at[k]->env.kv, slot);
}

static attn_status learn_names(struct cards *c)
{
    for (uint32_t i = 0; i < c->peers.n; i++) {
        struct kv *kv = c->peers.at[i]->env.kv;
        for (kv_seq_id id = {0}; kv_seq_next(kv, UINT32_MAX, &id) == ATTN_OK; id.index++) {
            struct kv_seq_info info;
            kv_seq_info(kv, id, &info);
            attn_status st = cards_opened(c, i, (struct seq_name){info.tenant, info.name},
                                          info.pool.index, info.epoch);
            if (st == ATTN_OK)
                continue;
            if (st != ATTN_EEXIST)
                return st;
            log_warn("sequence %" PRIu64 " is on two cards: that of card %" PRIu32 " is dropped",
                     info.name, i);
            seq_close(c->peers.at[i], id);
        }
    }
    return ATTN_OK;
}

/* The first size on another card that differs from n_blocks; 0: all are the same. */
static uint32_t another_size(const struct cards *c, kv_pool_id id, uint32_t n_blocks)
{
    for (uint32_t i = 1; i < c->peers.n; i++) {
        const struct pool *p = pool_of_kv(c->peers.at[i], id);
        if (p->config.n_blocks != n_blocks)
            return p->config.n_blocks;
    }
    return 0;
}

/* A pool that was resized on only some cards gets the primary's size on all; if a card can't have
 * that, the others' size; if that fails too, each keeps its own. */
static void sizes_agree(struct cards *c)
{
    struct engine *primary = c->peers.at[0];
    char why[WHY_BYTES];
    for (struct pool *p = NULL; (p = pool_next(primary, p)) != NULL;) {
        uint32_t had = p->config.n_blocks, other = another_size(c, p->id, had);
        if (other == 0)
            continue;
        log_warn("pool \"%s\" has %" PRIu32 " blocks on card 0, and %" PRIu32 " on another",
                 p->spec.wire->name, had, other);
        if (pool_resize(primary, p, had, why, sizeof why) != ATTN_OK &&
            pool_resize(primary, p, other, why, sizeof why) != ATTN_OK)
            log_warn("pool \"%s\" stays so: %s", p->spec.wire->name, why);
    }
}

attn_status cards_restore_pools(struct cards *c, char *why, size_t why_bytes)
{
    for (uint32_t i = 1; i < c->peers.n; i++) {
        attn_status st = restore_pools(c->peers.at[0], c->peers.at[i], why, why_bytes);
        if (st != ATTN_OK)
            return st;
    }
    return ATTN_OK;
}

attn_status cards_restore(struct cards *c)
{
    attn_status st = ATTN_OK;
    for (uint32_t slot = 0; slot < c->n_slots && st == ATTN_OK; slot++) {
        st = restore_session(c, slot);
        merge_seen(c, slot);
    }
    if (st == ATTN_OK)
        st = learn_names(c);
    if (st != ATTN_OK)
        return st;
    sizes_agree(c);
    for (uint32_t i = 0; i < c->peers.n; i++)
        pools_publish(c->peers.at[i]);
    return ATTN_OK;
}
