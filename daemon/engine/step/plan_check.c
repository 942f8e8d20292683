/* plan_check.c: checks a plan's geometry, layers and items before its first bell. Each step is
 * checked again when it comes, since a plan locks nothing; positions are checked only if no earlier
 * step is under way that will move them. Engine thread. */
#include "daemon/engine/step/plan_check.h"

#include <inttypes.h>
#include <stdio.h>

#include "cache/kv_owner.h"
#include "daemon/engine/core/moved.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/step/step.h"
#include "daemon/engine/tier/mover.h"

static bool is_in(uint64_t offset, uint64_t bytes, uint64_t first, uint64_t end)
{
    return offset % LANE_ALIGN == 0 && offset >= first && offset <= end && bytes <= end - offset;
}

static attn_status check_layers(const Attnd__Plan *h, const struct pool *p, char *why,
                                size_t why_bytes)
{
    for (size_t i = 0; i < h->n_layers; i++) {
        if (h->layers[i] < p->config.num_layers)
            continue;
        snprintf(why, why_bytes, "plan.layers[%zu] is %" PRIu32 ", the pool has %" PRIu32 " layers",
                 i, h->layers[i], p->config.num_layers);
        return ATTN_EINVAL;
    }
    for (size_t i = 0; i < h->n_layers; i++) {
        attn_status st = step_check_weights(h->step->flags, h->layers[i], p, why, why_bytes);
        if (st != ATTN_OK)
            return st;
    }
    if (h->step->flags &
        (WIRE_STEP_TREE | WIRE_STEP_FULL | WIRE_STEP_SPARSE | WIRE_STEP_CHOOSE | WIRE_STEP_PART)) {
        snprintf(why, why_bytes,
                 "plan.step.flags is 0x%" PRIx32
                 ": a lane's steps have no trees, are not full, not sparse, "
                 "choose no blocks and are not of parts",
                 h->step->flags);
        return ATTN_ENOTSUP;
    }
    if (h->step->layer != 0) {
        snprintf(why, why_bytes, "plan.step.layer is %" PRIu32 ", plan.layers names the layers",
                 h->step->layer);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

/* Checks that the tensors lie inside the lane's regions. */
static attn_status check_places(const Attnd__Plan *h, const struct lane *l,
                                const struct wire_step_layout *layout, char *why, size_t why_bytes)
{
    if (!is_in(h->in_offset, layout->request_bytes, 0, l->in.bytes)) {
        snprintf(why, why_bytes,
                 "plan.in_offset is %" PRIu64 ": %" PRIu64
                 " bytes of tensors there, at a multiple of %u, are not in the region of %" PRIu64,
                 h->in_offset, layout->request_bytes, LANE_ALIGN, l->in.bytes);
        return ATTN_EINVAL;
    }
    if (!is_in(h->out_offset, layout->reply_bytes, LANE_OUT_OFFSET, l->out.bytes)) {
        snprintf(why, why_bytes,
                 "plan.out_offset is %" PRIu64 ": %" PRIu64
                 " bytes of outputs there, at a multiple of %u from %u on, are not in the region of"
                 " %" PRIu64,
                 h->out_offset, layout->reply_bytes, LANE_ALIGN, LANE_OUT_OFFSET, l->out.bytes);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

/* Checks one item against its sequence; *out_blocks: blocks that it will take from the pool. */
static attn_status check_item(struct engine *e, const Attnd__Plan *h, uint32_t i, uint32_t session,
                              const struct pool *p, bool is_behind, uint64_t stamp,
                              uint32_t *out_blocks, char *why, size_t why_bytes)
{
    const Attnd__Step *s = h->step;
    const struct seq_name name = {tenant_id(session_tenant(e, session)), s->seq[i]};
    struct kv_seq_info info;
    kv_seq_id id;
    if (kv_seq_find(e->env.kv, name.tenant, name.name, &id) != ATTN_OK) {
        if (peers_know(e, name))
            return ATTN_OK; /* on another card, which checks it */
        if (moved_or_gone(e, name.tenant, name.name, s->epoch[i], why, why_bytes) == ATTN_EMOVED)
            return ATTN_EMOVED;
        snprintf(why, why_bytes, "no such sequence");
        return ATTN_ENOTFOUND;
    }
    if (e->seqs[id.index].step_stamp == stamp) {
        snprintf(why, why_bytes, "it is in this plan twice");
        return ATTN_EINVAL;
    }
    e->seqs[id.index].step_stamp = stamp;
    kv_seq_info(e->env.kv, id, &info);
    attn_status st = step_check_seq(e, s, i, &info, p, session, why, why_bytes);
    if (is_behind || seq_is_busy(e, id.index))
        return st;
    for (size_t k = 0; k < h->n_layers && st == ATTN_OK; k++)
        st = step_check_pos(s, i, h->layers[k], info.layer_len[h->layers[k]], why, why_bytes);
    uint32_t past = (s->pos[i] + s->n_tokens[i] - 1) / p->config.block_tokens + 1;
    if ((s->flags & WIRE_STEP_APPEND) && past > info.n_blocks)
        *out_blocks = past - info.n_blocks;
    return st;
}

attn_status plan_check_items(struct engine *e, const Attnd__Plan *h, uint32_t session,
                             const struct pool *p, bool is_behind, char *why, size_t why_bytes)
{
    const Attnd__Step *s = h->step;
    const uint64_t stamp = e->next_stamp++;
    uint64_t n_blocks = 0;
    for (uint32_t i = 0; i < s->n_seq; i++) {
        char reason[WHY_BYTES];
        uint32_t n = 0;
        attn_status st =
            check_item(e, h, i, session, p, is_behind, stamp, &n, reason, sizeof reason);
        if (st != ATTN_OK) {
            snprintf(why, why_bytes, "item %" PRIu32 " (sequence %" PRIu64 "): %s", i, s->seq[i],
                     reason);
            return st;
        }
        n_blocks += n;
    }
    struct kv_pool_spec spec;
    uint32_t n_free;
    mover_wait(e, p, n_blocks); /* bells can't wait */
    kv_pool_info(e->env.kv, p->id, &spec, &n_free);
    n_free = kv_pool_free_for(e->env.kv, p->id, session);
    if (n_blocks > n_free) {
        snprintf(why, why_bytes,
                 "the plan needs %" PRIu64 " blocks, pool %s has %" PRIu32 " free" MORE_BLOCKS,
                 n_blocks, spec.name, n_free);
        return ATTN_ENOBLOCKS;
    }
    return ATTN_OK;
}

attn_status plan_check(struct engine *e, const Attnd__Plan *h, uint32_t session,
                       const struct lane *l, struct wire_step_layout *out, char *why,
                       size_t why_bytes)
{
    const struct pool *p = pool_of_handle(e, session_tenant(e, session), h->step->pool);
    if (p == NULL) {
        snprintf(why, why_bytes, "plan.step.pool is %" PRIu32 ", no such pool", h->step->pool);
        return ATTN_ENOTFOUND;
    }
    attn_status st = step_check_shape(e, h->step, p, out, why, why_bytes);
    if (st == ATTN_OK)
        st = check_layers(h, p, why, why_bytes);
    if (st == ATTN_OK)
        st = check_places(h, l, out, why, why_bytes);
    if (st == ATTN_OK)
        st = plan_check_items(e, h, session, p, plan_is_behind(l), why, why_bytes);
    return st;
}
