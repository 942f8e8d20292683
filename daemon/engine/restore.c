/* restore.c: restores what a predecessor left in the cache: opens its pools on the device again,
 * uploads the block tables, and restarts the sessions' leases. Runs once, before the engine has a
 * thread.
 */
#include <inttypes.h>

#include "cache/kv_owner.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/pool/create.h"
#include "daemon/engine/step/batch.h"
#include "daemon/engine/step/batch_end.h"
#include "daemon/engine/tenants.h"

static const uint64_t WAIT_NS = 1000 * 1000;

/* Restores pools up to the first that can't be made again; that one and all after it are dropped
 * with their sequences. If memory is short or the device fails, nothing is dropped: the next start
 * may do better. */
static attn_status restore_pools(struct engine *e, struct engine_kept *kept)
{
    char why[WHY_BYTES] = "";
    struct kv_stats s;
    uint32_t n_dropped, i = 0;
    kv_stats_read(e->env.kv, &s);
    for (; i < e->env.cfg->max_pools && kept->n_pools < s.pools; i++) {
        attn_status st = pool_restore(e, (kv_pool_id){i}, why, sizeof why);
        if (st == ATTN_ENOMEM || st == ATTN_EDEVICE) {
            log_error("the kept pool %" PRIu32 " can't be made now: %s", i, why);
            return st;
        }
        if (st != ATTN_OK && st != ATTN_ENOTFOUND)
            break;
        kept->n_pools += st == ATTN_OK;
    }
    if (s.pools == kept->n_pools)
        return ATTN_OK;
    log_warn("of %" PRIu64 " pools the first %" PRIu32 " are kept: %s", s.pools, kept->n_pools,
             why);
    kv_pools_drop(e->env.kv, (kv_pool_id){i}, &n_dropped);
    return ATTN_OK;
}

/* Sends the pool's patches, to make room for more. */
static attn_status flush(struct engine *e, struct pool *p)
{
    while (!batch_flush_patches(e, p)) {
        if (engine_health(e) != ATTN_OK)
            return engine_health(e);
        batch_finish_one(e, WAIT_NS);
    }
    return ATTN_OK;
}

static attn_status restore_tables(struct engine *e, struct engine_kept *kept)
{
    for (uint32_t seq = 0; seq < e->env.cfg->max_sequences; seq++) {
        struct kv_seq_info info;
        kv_seq_info(e->env.kv, (kv_seq_id){seq}, &info);
        if (info.layer_len == NULL)
            continue;
        struct pool *p = pool_of_kv(e, info.pool);
        uint32_t longest = 0;
        for (uint32_t l = 0; l < p->config.num_layers; l++)
            longest = info.layer_len[l] > longest ? info.layer_len[l] : longest;
        tenant_count(tenants_of_id(e->env.tenants, info.tenant), TENANT_SEQUENCES, 1);
        kept->n_sequences++;
        kept->n_tokens += longest;
        seq_note_use(e, seq, info.pool.index);
        for (uint32_t i = 0; i < info.n_blocks && info.is_notified; i++) {
            if (kv_is_place(info.block_table[i]))
                continue;
            if (p->fx.n_patches == p->fx.patches_capacity) {
                attn_status st = flush(e, p);
                if (st != ATTN_OK)
                    return st;
            }
            p->fx.patches[p->fx.n_patches++] = (struct kv_patch){seq, i, info.block_table[i]};
        }
    }
    return ATTN_OK; /* the remaining patches go with each pool's first batch */
}

static void restore_sessions(struct engine *e, struct engine_kept *kept)
{
    uint64_t now_ns = clock_now_ns();
    struct kv *kv = e->env.kv;
    for (uint32_t slot = 0; slot < session_slots(e->env.cfg->max_sessions); slot++) {
        uint64_t id = kv_owner_id(kv, slot);
        uint32_t tenant = kv_owner_tenant(kv, slot);
        struct tenant *who = tenants_of_id(e->env.tenants, tenant);
        kv_seq_id any;
        if (who == NULL && tenant != TENANT_OPERATOR)
            id = 0; /* its tenant was removed */
        if (id != 0 && session_restore(e->env.sessions, slot, id, kv_owner_label(kv, slot),
                                       now_ns) == ATTN_OK) {
            session_at(e->env.sessions, slot)->tenant = who;
            tenant_count(who, TENANT_SESSIONS, e->env.card == 0);
            kept->n_sessions++;
            continue;
        }
        kv_owner_end(kv, slot);
        if (kv_owner_any(kv, slot, &any) == ATTN_OK)
            session_restore(e->env.sessions, slot, 0, "", now_ns);
    }
}

attn_status engine_restore_pools(struct engine *e, struct engine_kept *out_kept)
{
    struct engine_kept kept = {0};
    tenants_count_tables(e, false); /* until it is known what stays */
    attn_status st = restore_pools(e, &kept);
    if (st == ATTN_OK)
        *out_kept = kept;
    return st;
}

attn_status engine_restore(struct engine *e, struct engine_kept *kept)
{
    struct kv_stats s;
    attn_status st = restore_tables(e, kept);
    if (st != ATTN_OK)
        return st;
    restore_sessions(e, kept);
    tenants_count_tables(e, true);
    kv_stats_read(e->env.kv, &s);
    kept->n_dropped = s.damaged;
    return ATTN_OK;
}
