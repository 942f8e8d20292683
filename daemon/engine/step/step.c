/* step.c: admits steps, and continues items that waited.
 *
 * A step that is wrong as a whole is refused before anything is changed. An item that is wrong
 * fails alone: it gets its status, its rows are NaN, the other items go on.
 */
#include "daemon/engine/step/step.h"

#include <inttypes.h>
#include <stdio.h>

#include "daemon/base/stats.h"
#include "daemon/engine/core/answer.h"
#include "daemon/engine/core/moved.h"
#include "daemon/engine/core/pace.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/core/ready.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/core/status.h"
#include "daemon/engine/step/lists.h"

/* --- items ------------------------------------------------------------------------------------ */

static void item_find(struct engine *e, struct item *it)
{
    uint64_t name = it->task->req->wire.header->step->seq[it - it->task->items];
    kv_seq_id id;
    uint32_t tenant = tenant_id(session_tenant(e, it->task->session));
    it->seq = kv_seq_find(e->env.kv, tenant, name, &id) == ATTN_OK ? id.index : SEQ_NONE;
}

attn_status step_check_seq(const struct engine *e, const Attnd__Step *s, uint32_t i,
                           const struct kv_seq_info *info, const struct pool *p, uint32_t session,
                           char *why, size_t why_bytes)
{
    uint32_t pos = s->pos[i], n_tokens = s->n_tokens[i];
    if (info->epoch != s->epoch[i]) {
        snprintf(why, why_bytes, "epoch is %" PRIu32 ", the sequence is at %" PRIu32, s->epoch[i],
                 info->epoch);
        return ATTN_ESTALE;
    }
    if (info->owner != session) {
        snprintf(why, why_bytes, "epoch %" PRIu32 " belongs to another session; adopt it first",
                 s->epoch[i]);
        return ATTN_ESTALE;
    }
    if (info->pool.index != p->id.index) {
        snprintf(why, why_bytes, "the sequence is in pool %" PRIu32 ", step.pool is %" PRIu32,
                 pool_handle(e, pool_of_kv(e, info->pool)), s->pool);
        return ATTN_EINVAL;
    }
    if (s->n_n_keys == 0 && (uint64_t)pos + n_tokens > e->env.cfg->max_seq_tokens) {
        snprintf(why, why_bytes,
                 "pos %" PRIu32 " + n_tokens %" PRIu32 " passes the limit of %" PRIu32
                 " tokens per sequence (cache.max_seq_tokens)",
                 pos, n_tokens, e->env.cfg->max_seq_tokens);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

attn_status step_check_pos(const Attnd__Step *s, uint32_t i, uint32_t layer, uint32_t len,
                           char *why, size_t why_bytes)
{
    uint32_t pos = s->pos[i], n_tokens = s->n_tokens[i];
    if (s->n_n_keys > 0 && s->n_keys[i] > len) {
        snprintf(why, why_bytes,
                 "n_keys is %" PRIu32 ", layer %" PRIu32 " of the part has %" PRIu32 " tokens",
                 s->n_keys[i], layer, len);
        return ATTN_EINVAL;
    }
    if (s->n_n_keys > 0)
        return ATTN_OK;
    if ((s->flags & WIRE_STEP_APPEND) && pos > len) {
        snprintf(why, why_bytes, "pos is %" PRIu32 ", layer %" PRIu32 " has %" PRIu32 " tokens",
                 pos, layer, len);
        return ATTN_EINVAL;
    }
    if (!(s->flags & WIRE_STEP_APPEND) && pos + n_tokens > len) {
        snprintf(why, why_bytes,
                 "pos %" PRIu32 " + n_tokens %" PRIu32 " is not appended yet: layer %" PRIu32
                 " has %" PRIu32 " tokens",
                 pos, n_tokens, layer, len);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

/* Behind a tree there are only its own nodes; appends of other tokens are refused by the cache. */
static attn_status check_tree(const struct item *it, const struct kv_seq_info *info, char *why,
                              size_t why_bytes)
{
    if (info->n_nodes == 0 || it->nodes != NULL || it->pos + it->n_tokens <= info->tree_pos)
        return ATTN_OK;
    snprintf(why, why_bytes,
             "pos %" PRIu32 " + n_tokens %" PRIu32 ", the sequence has a tree of %" PRIu32
             " nodes at %" PRIu32 ": commit a path of it or truncate first",
             it->pos, it->n_tokens, info->n_nodes, info->tree_pos);
    return ATTN_EINVAL;
}

/* Checks a claimed item against its sequence; it becomes ready, or fails. What is checked here
 * can't change until the claim is released. */
static void item_check(struct engine *e, struct item *it)
{
    struct task *t = it->task;
    const Attnd__Step *s = t->req->wire.header->step;
    uint32_t i = (uint32_t)(it - t->items);
    struct kv_seq_info info;
    char why[WHY_BYTES];
    kv_seq_info(e->env.kv, (kv_seq_id){it->seq}, &info);
    attn_status st = step_check_seq(e, s, i, &info, t->pool, t->session, why, sizeof why);
    if (st == ATTN_OK)
        st = step_check_pos(s, i, t->layer, info.layer_len[t->layer], why, sizeof why);
    if (st == ATTN_OK)
        st = check_tree(it, &info, why, sizeof why);
    if (st == ATTN_OK) {
        item_ready(it);
        return;
    }
    item_fail(it, st, "%s", why);
    item_release(e, it);
}

/* Fails an item without a sequence here. If another card has one of this name, the item's epoch is
 * stale. */
static void item_is_unknown(struct engine *e, struct item *it)
{
    const Attnd__Step *s = it->task->req->wire.header->step;
    size_t i = (size_t)(it - it->task->items);
    uint32_t tenant = tenant_id(session_tenant(e, it->task->session));
    char why[WHY_BYTES];
    if (peers_know(e, (struct seq_name){tenant, s->seq[i]}))
        item_fail(it, ATTN_ESTALE, "epoch is %" PRIu32 ", the sequence is at another", s->epoch[i]);
    else if (moved_or_gone(e, tenant, s->seq[i], s->epoch[i], why, sizeof why) == ATTN_EMOVED)
        item_fail(it, ATTN_EMOVED, "%s", why);
    else
        item_fail(it, ATTN_ENOTFOUND, "no such sequence");
}

/* The item becomes ready, waits, or fails. */
static void item_admit(struct engine *e, struct item *it)
{
    if (it->seq == SEQ_NONE)
        item_is_unknown(e, it);
    else if (item_enter(e, it))
        item_check(e, it);
}

static void step_wake(struct engine *e, struct item *it)
{
    if (it->seq == SEQ_NONE) {
        item_find(e, it);
        item_admit(e, it);
    } else {
        item_check(e, it);
    }
    step_advance(e, it->task);
}

/* If nothing was launched, refuses the step as a whole; else fails its items that are not in a
 * batch. */
static void step_refuse(struct engine *e, struct task *t, attn_status st, const char *why)
{
    for (uint32_t i = 0; i < t->n_items; i++) {
        struct item *it = &t->items[i];
        if (it->state == ITEM_WAITING) {
            item_leave(e, it);
        } else if (it->state == ITEM_READY) {
            item_unready(it);
            item_release(e, it);
        } else {
            continue;
        }
        item_fail(it, st, "%s", why);
    }
    ready_remove(&t->pool->ready, t);
    if (t->was_launched) {
        step_advance(e, t);
    } else {
        task_release(e, t);
        engine_refuse(e, t->req, st, "%s", why);
    }
}

static const struct task_ops step_ops = {.wake = step_wake, .refuse = step_refuse};

/* --- admission -------------------------------------------------------------------------------- */

attn_status step_check_weights(uint32_t flags, uint32_t layer, const struct pool *p, char *why,
                               size_t why_bytes)
{
    const uint64_t all = backend_weights_bytes(&p->config);
    if ((flags & WIRE_STEP_ATTEND) == 0 || all == 0)
        return ATTN_OK;
    const uint64_t have = p->ops->weights_have(p->device, layer);
    if (have == all)
        return ATTN_OK;
    snprintf(why, why_bytes,
             "layer %" PRIu32 " of pool %s has %" PRIu64 " of its %" PRIu64
             " bytes of weights (q_nope_dim): send them first",
             layer, p->spec.wire->name, have, all);
    return ATTN_ENOWEIGHTS;
}

attn_status step_check_shape(const struct engine *e, const Attnd__Step *s, const struct pool *p,
                             struct wire_step_layout *out, char *why, size_t why_bytes)
{
    const struct backend_pool_config *c = &p->config;
    const struct wire_shape shape = {c->num_q_heads, c->num_kv_heads, c->head_dim_k, c->head_dim_v,
                                     c->is_v_in_k,   c->q_dtype,      c->q_nope_dim, c->out_dim};
    attn_status st = wire_step_layout_of(s, &shape, out, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    if (s->layer >= c->num_layers) {
        snprintf(why, why_bytes, "step.layer is %" PRIu32 ", the pool has %" PRIu32 " layers",
                 s->layer, c->num_layers);
        return ATTN_EINVAL;
    }
    if (s->n_seq > config_now(e->env.cfg, max_step_items)) {
        snprintf(why, why_bytes,
                 "step has %zu items, %" PRIu32 " are allowed (engine.max_step_items)", s->n_seq,
                 config_now(e->env.cfg, max_step_items));
        return ATTN_EINVAL;
    }
    if (out->n_tokens > config_now(e->env.cfg, max_step_tokens)) {
        snprintf(why, why_bytes,
                 "step has %" PRIu64 " tokens, %" PRIu32 " are allowed (engine.max_step_tokens)",
                 out->n_tokens, config_now(e->env.cfg, max_step_tokens));
        return ATTN_EINVAL;
    }
    for (uint32_t i = 0; i < s->n_seq; i++) {
        if (s->n_tokens[i] <= e->env.cfg->max_batch_tokens)
            continue;
        snprintf(why, why_bytes,
                 "step.n_tokens[%" PRIu32 "] is %" PRIu32 ", an item may have %" PRIu32
                 " (engine.max_batch_tokens)",
                 i, s->n_tokens[i], e->env.cfg->max_batch_tokens);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

/* Checks the parents of a step's trees, and whether its layer may have any. */
static attn_status check_trees(const Attnd__Step *s, const struct pool *p, uint64_t n_tokens,
                               char *why, size_t why_bytes)
{
    const struct attn_layer_spec *l = &p->config.layers[s->layer];
    if (s->n_parent != n_tokens) {
        snprintf(why, why_bytes, "step.parent has %zu elements, the step has %" PRIu64 " tokens",
                 s->n_parent, n_tokens);
        return ATTN_EINVAL;
    }
    if (l->is_full || l->n_branches > 0) {
        snprintf(why, why_bytes, "step.parent: layer %" PRIu32 " is %s, trees need causal layers",
                 s->layer, l->is_full ? "full (is_full)" : "dilated (branch_rates)");
        return ATTN_ENOTSUP;
    }
    if (!p->has_trees) {
        snprintf(why, why_bytes, "step.parent: pool %s can't have trees: %s", p->spec.wire->name,
                 p->spec.wire->split == ATTND__SPLIT__SPLIT_TOKENS ? "it is split by tokens (split)"
                                                                   : "its backend has none");
        return ATTN_ENOTSUP;
    }
    for (size_t i = 0, row = 0; i < s->n_seq; row += s->n_tokens[i++]) {
        if (s->n_tokens[i] > WIRE_MAX_TREE_NODES) {
            snprintf(why, why_bytes,
                     "step.n_tokens[%zu] is %" PRIu32 ", a tree has %u nodes at most", i,
                     s->n_tokens[i], WIRE_MAX_TREE_NODES);
            return ATTN_EINVAL;
        }
        for (uint32_t t = 0; t < s->n_tokens[i]; t++)
            if (s->parent[row + t] < -1 || s->parent[row + t] >= (int64_t)t) {
                snprintf(why, why_bytes,
                         "step.parent[%zu] is %" PRId32 ", must be -1 or an earlier token of item "
                         "%zu, below %" PRIu32,
                         row + t, s->parent[row + t], i, t);
                return ATTN_EINVAL;
            }
    }
    return ATTN_OK;
}

/* Checks that all queries can see the same keys, whatever their positions are, and that the output
 * can be merged with that of other keys. */
static attn_status check_full(const Attnd__Step *s, const struct pool *p, char *why,
                              size_t why_bytes)
{
    const struct attn_layer_spec *l = &p->config.layers[s->layer];
    const char *has = l->window_tokens > 0      ? "a window (window_tokens)"
                      : l->alibi_slopes != NULL ? "ALiBi (alibi_slopes)"
                      : l->sink_logits != NULL  ? "sink logits (sink_logits)"
                      : l->n_branches > 0       ? "branches (branch_rates)"
                                                : NULL;
    if (has == NULL)
        return ATTN_OK;
    snprintf(why, why_bytes, "step.flags: full 16, but layer %" PRIu32 " has %s", s->layer, has);
    return ATTN_ENOTSUP;
}

/* Whether what the queries of an item see depends on where its part begins, or on how far they are
 * behind it. */
static bool needs_base(const struct attn_layer_spec *l)
{
    return l->sink_logits != NULL || (l->window_tokens > 0 && l->sink_tokens > 0);
}
static bool needs_ahead(const struct attn_layer_spec *l)
{
    return l->window_tokens > 0 || l->alibi_slopes != NULL || l->n_branches > 0;
}

static attn_status check_part(const Attnd__Step *s, uint32_t i, const struct attn_layer_spec *l,
                              char *why, size_t why_bytes)
{
    const uint64_t end = (uint64_t)s->key_base[i] + s->pos[i] + s->n_tokens[i];
    if (end > INT32_MAX) {
        snprintf(why, why_bytes,
                 "step.key_base[%" PRIu32 "] %" PRIu32 " + pos %" PRIu32 " + n_tokens %" PRIu32
                 " pass %d tokens",
                 i, s->key_base[i], s->pos[i], s->n_tokens[i], INT32_MAX);
        return ATTN_EINVAL;
    }
    for (uint32_t k = 0; k < l->n_branches; k++) {
        if (s->key_base[i] % l->branches[k].segment_tokens == 0)
            continue;
        snprintf(why, why_bytes,
                 "step.key_base[%" PRIu32 "] is %" PRIu32 ", layer %" PRIu32
                 " has segments of %" PRIu32 " tokens (branch_segment_tokens): parts are to begin "
                 "with one",
                 i, s->key_base[i], s->layer, l->branches[k].segment_tokens);
        return ATTN_ENOTSUP;
    }
    if (s->n_n_keys > 0 && (s->n_keys[i] < s->n_tokens[i] || s->n_keys[i] > s->pos[i])) {
        snprintf(why, why_bytes,
                 "step.n_keys[%" PRIu32 "] is %" PRIu32 ", must be n_tokens %" PRIu32
                 " at least, and pos %" PRIu32 " at most",
                 i, s->n_keys[i], s->n_tokens[i], s->pos[i]);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

/* Checks the items of a step of parts, and whether its layer may have any. */
static attn_status check_parts(const Attnd__Step *s, const struct pool *p, char *why,
                               size_t why_bytes)
{
    const struct attn_layer_spec *l = &p->config.layers[s->layer];
    bool is_moved = false; /* begins anywhere but at the beginning */
    for (uint32_t i = 0; i < s->n_seq; i++) {
        attn_status st = check_part(s, i, l, why, why_bytes);
        if (st != ATTN_OK)
            return st;
        is_moved |= s->key_base[i] > 0;
    }
    if (p->has_parts || (!(is_moved && needs_base(l)) && !(s->n_n_keys > 0 && needs_ahead(l))))
        return ATTN_OK;
    snprintf(why, why_bytes,
             "step.key_base: layer %" PRIu32 " has %s, and the backend of pool %s has no parts of "
             "sequences",
             s->layer,
             l->window_tokens > 0      ? "a window (window_tokens)"
             : l->alibi_slopes != NULL ? "ALiBi (alibi_slopes)"
             : l->sink_logits != NULL  ? "sink logits (sink_logits)"
                                       : "branches (branch_rates)",
             p->spec.wire->name);
    return ATTN_ENOTSUP;
}

/* Checks everything about a step that does not depend on its sequences. */
static attn_status step_check(struct engine *e, const struct request *req, struct pool *p,
                              struct wire_step_layout *out, char *why, size_t why_bytes)
{
    const Attnd__Step *s = req->wire.header->step;
    if (req->is_widened && p->config.q_dtype != ATTN_BF16) {
        snprintf(why, why_bytes,
                 "step.dtype is fp8_e4m3 (4), the pool's q_dtype is %s: codes stand for bf16",
                 attn_dtype_name(p->config.q_dtype));
        return ATTN_EINVAL;
    }
    attn_status st = step_check_shape(e, s, p, out, why, why_bytes);
    if (st == ATTN_OK)
        st = step_check_weights(s->flags, s->layer, p, why, why_bytes);
    if (st == ATTN_OK && (s->flags & WIRE_STEP_TREE))
        st = check_trees(s, p, out->n_tokens, why, why_bytes);
    if (st == ATTN_OK && (s->flags & WIRE_STEP_PART))
        st = check_parts(s, p, why, why_bytes);
    else if (st == ATTN_OK && (s->flags & WIRE_STEP_FULL))
        st = check_full(s, p, why, why_bytes);
    if (st == ATTN_OK && (s->flags & WIRE_STEP_SPARSE))
        st = lists_check(s, p, out->n_tokens, why, why_bytes);
    if (st == ATTN_OK && (s->flags & WIRE_STEP_CHOOSE))
        st = choice_check(s, p, why, why_bytes);
    if (st != ATTN_OK || req->bell != NULL) /* its plan was checked against the lane's regions */
        return st;
    if (req->wire.payload_bytes != out->request_bytes) {
        snprintf(why, why_bytes,
                 "payload has %zu bytes, %" PRIu64 " tokens with flags %" PRIu32 " need %" PRIu64
                 "%s",
                 req->wire.payload_bytes, out->n_tokens, s->flags, out->request_bytes,
                 p->config.is_v_in_k ? ": without v, which is in k (is_v_in_k)" : "");
        return ATTN_EINVAL;
    }
    uint64_t most = req->room != NULL ? req->room->capacity_bytes
                                      : (uint64_t)config_now(e->env.cfg, max_message_bytes);
    uint64_t reply_bytes = step_reply_bytes(out, (uint32_t)s->n_seq);
    if (reply_bytes > most) {
        snprintf(why, why_bytes,
                 "the reply would have %" PRIu64 " bytes, and up to %" PRIu64
                 " before them; there is room for %" PRIu64,
                 out->reply_bytes, reply_bytes - out->reply_bytes, most);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

/* Fills in the items. A sequence named twice is an error of the step. */
static attn_status step_items(struct engine *e, struct task *t, char *why, size_t why_bytes)
{
    const Attnd__Step *s = t->req->wire.header->step;
    uint64_t stamp = e->next_stamp++; /* no earlier step has it */
    uint32_t row = 0;
    struct tree_node *nodes = NULL;
    const struct attn_layer_spec *l = &t->pool->config.layers[t->layer];
    if (s->n_parent > 0) {
        nodes = wire_arena_alloc(&t->req->arena, s->n_parent * sizeof *nodes);
        if (nodes == NULL) {
            snprintf(why, why_bytes, "no memory for trees of %zu nodes", s->n_parent);
            return ATTN_ENOMEM;
        }
    }
    for (uint32_t i = 0; i < t->n_items; i++) {
        struct item *it = &t->items[i];
        *it = (struct item){.task = t, .pos = s->pos[i], .n_tokens = s->n_tokens[i], .row = row};
        if (s->n_key_base > 0 && needs_base(l))
            it->key_base = s->key_base[i];
        if (s->n_n_keys > 0) {
            it->pos = s->n_keys[i] - it->n_tokens;
            it->ahead = needs_ahead(l) ? s->pos[i] - it->pos : 0;
        }
        if (nodes != NULL) {
            tree_nodes_of(s->parent + row, it->n_tokens, nodes + row);
            it->nodes = nodes + row;
        }
        row += it->n_tokens;
        t->item_status[i] = ATTN_OK;
        if (t->req->shard != NULL && e->peers->ops->item_is_foreign(t->req, i)) {
            it->seq = SEQ_NONE;
            item_done(it);
            continue;
        }
        item_find(e, it);
        if (it->seq == SEQ_NONE)
            continue;
        if (e->seqs[it->seq].step_stamp == stamp) {
            snprintf(why, why_bytes, "step.seq[%" PRIu32 "] %" PRIu64 " is in this step twice", i,
                     s->seq[i]);
            return ATTN_EINVAL;
        }
        e->seqs[it->seq].step_stamp = stamp;
    }
    return ATTN_OK;
}

/* Whether the step begins a token although a drain now only lets tokens be finished. */
static bool is_after_last_token(const struct engine *e, const struct task *t)
{
    if (!(t->flags & WIRE_STEP_APPEND) || !atomic_load(&e->ends_tokens))
        return false;
    for (uint32_t i = 0; i < t->n_items; i++) {
        const struct item *it = &t->items[i];
        if (it->seq != SEQ_NONE && seq_begins_token(e, it->seq, it->pos + it->n_tokens))
            return true;
    }
    return false;
}

static void step_enter(struct engine *e, struct task *t)
{
    task_hold(e, t);
    for (uint32_t i = 0; i < t->n_items; i++)
        if (t->items[i].state != ITEM_DONE) /* done already: on another card */
            item_admit(e, &t->items[i]);
    if (t->n_ready > 0)
        ready_push_fresh(&t->pool->ready, t);
    step_advance(e, t);
}

/* Checks that the tenant's turn comes before the deadline; without tenants the inbox checks
 * this. */
static attn_status step_check_turn(struct engine *e, const struct request *req,
                                   const struct tenant *who, char *why, size_t why_bytes)
{
    if (who == NULL || who->n_steps == 0)
        return ATTN_OK;
    uint32_t n_all = atomic_load_explicit(&e->queue.n_requests, memory_order_relaxed);
    uint32_t n =
        pace_ahead(n_all, who->n_steps, who->flow.share, tenants_busy_shares(e->env.tenants));
    uint64_t left_ns = req->deadline_ns - req->taken_ns;
    uint64_t task_ns = atomic_load_explicit(&e->task_ns, memory_order_relaxed);
    if (pace_is_in_time(n, task_ns, left_ns))
        return ATTN_OK;
    stats_add(requests_refused_overload, 1);
    snprintf(why, why_bytes,
             "%" PRIu32 " requests are ahead, about %" PRIu64 " ms; the deadline is in %" PRIu64
             " ms",
             n, n * task_ns / 1000000, left_ns / 1000000);
    return ATTN_EOVERLOAD;
}

attn_status bytes_charge(struct engine *e, struct request *req, uint32_t session, uint64_t bytes,
                         char *why, size_t why_bytes)
{
    struct tenant *who = session_tenant(e, session);
    attn_status st = charge_tenant(&req->charge, who, bytes, why, why_bytes);
    if (st != ATTN_OK) /* would it fit alone? */
        return bytes <= who->most[TENANT_BYTES] ? ATTN_EOVERLOAD : st;
    return ATTN_OK;
}

/* Notes that steps of several tenants come. */
static void note_sender(struct engine *e, const struct request *req)
{
    if (e->last_sender != req->charge.tenant && e->last_sender != NULL)
        e->others_at_ns = req->taken_ns;
    e->last_sender = req->charge.tenant;
}

/* Whether nothing else of the tenant's waits. */
static bool has_no_turns(const struct request *req)
{
    return req->charge.tenant->n_turns == 0;
}

/* Charges the step's bytes to its tenant, and counts the step as one of the tenant's. */
static attn_status step_charge(struct engine *e, struct request *req, uint32_t session, char *why,
                               size_t why_bytes)
{
    /* of a step's shards only one is counted */
    bool is_counted = req->shard == NULL || e->peers->ops->step_counts(req);
    uint64_t bytes = is_counted ? req->msg->n_bytes : 0;
    attn_status st = bytes_charge(e, req, session, bytes, why, why_bytes);
    if (st == ATTN_OK && charge_step(&req->charge) && has_no_turns(req))
        flow_begin(&req->charge.tenant->flow, e->flow_clock);
    note_sender(e, req);
    return st;
}

/* Allocates a step's task; its items are not filled in. NULL: no memory. */
static struct task *task_new(struct request *req, struct pool *p, uint32_t session,
                             const struct wire_step_layout *layout)
{
    const Attnd__Step *s = req->wire.header->step;
    size_t head_bytes = sizeof(struct task) + s->n_seq * sizeof(struct item);
    struct task *t = wire_arena_alloc(&req->arena, head_bytes + s->n_seq * sizeof(int32_t));
    if (t == NULL)
        return NULL;
    *t = (struct task){
        .ops = &step_ops,
        .req = req,
        .pool = p,
        .session = session,
        .layer = s->layer,
        .flags = s->flags,
        .n_items = (uint32_t)s->n_seq,
        .first_failed = (uint32_t)s->n_seq,
        .layout = *layout,
        .ready_items = TAILQ_HEAD_INITIALIZER(t->ready_items),
        .item_status = (int32_t *)((uint8_t *)t + head_bytes),
    };
    return t;
}

/* Lanes are polled by the primary: another card that gets a bell's request stays awake for the
 * next. */
static void note_bell(struct engine *e, const struct request *req)
{
    if (req->bell != NULL && e->env.card > 0)
        e->bell_ns = e->polled_ns = req->taken_ns;
}

attn_status step_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    const Attnd__Step *s = req->wire.header->step;
    struct tenant *who = session_tenant(e, session);
    struct wire_step_layout layout;
    note_bell(e, req);
    attn_status st = step_check_turn(e, req, who, a->why, sizeof a->why);
    if (st == ATTN_OK && (s->flags & WIRE_STEP_APPEND))
        st = fence_check(e, req, a->why, sizeof a->why);
    if (st == ATTN_OK)
        st = step_charge(e, req, session, a->why, sizeof a->why);
    if (st != ATTN_OK)
        return st;
    struct pool *p = pool_of_handle(e, who, s->pool);
    if (p == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "step.pool is %" PRIu32 ", no such pool", s->pool);
    st = step_check(e, req, p, &layout, a->why, sizeof a->why);
    if (st != ATTN_OK)
        return st;
    struct task *t = task_new(req, p, session, &layout);
    if (t == NULL)
        return answer_no(a, ATTN_ENOMEM, "no memory for a step of %zu items", s->n_seq);
    st = step_items(e, t, a->why, sizeof a->why);
    if (st == ATTN_OK && (t->flags & WIRE_STEP_SPARSE))
        st = lists_make(e, t, a->why, sizeof a->why);
    if (st == ATTN_OK && (t->flags & WIRE_STEP_CHOOSE))
        st = choice_make(e, t, a->why, sizeof a->why);
    if (st != ATTN_OK)
        return st;
    if (is_after_last_token(e, t))
        return answer_no(a, ATTN_EDRAINING, "the daemon is draining: no new tokens");
    a->is_later = true;
    step_enter(e, t);
    return ATTN_OK;
}

/* The tenant of the request's session; without one, the operator. */
static uint32_t tenant_guess(const struct engine *e, const struct request *req)
{
    uint32_t slot;
    if (e->env.tenants == NULL ||
        session_find(e->env.sessions, req->wire.header->session, &slot) != ATTN_OK)
        return TENANT_OPERATOR;
    return tenant_id(session_tenant(e, slot));
}

struct request *steps_warm(struct engine *e, struct request *first)
{
    uint32_t tenant = tenant_guess(e, first);
    uint64_t names[KV_WARM_MAX] = {0};
    uint32_t pos[KV_WARM_MAX] = {0}, n = 0;
    kv_seq_id seqs[KV_WARM_MAX];
    struct request *req = first;
    for (; req != NULL && n < KV_WARM_MAX; req = req->next) {
        if (tenant_guess(e, req) != tenant)
            break;
        if (req->wire.header->body_case != ATTND__REQUEST__BODY_STEP)
            continue;
        const Attnd__Step *s = req->wire.header->step;
        for (size_t i = 0; i < s->n_seq && n < KV_WARM_MAX; i++, n++) {
            names[n] = s->seq[i];
            pos[n] = s->pos[i];
        }
    }
    kv_warm(e->env.kv, tenant, names, pos, n, seqs);
    for (uint32_t i = 0; i < n; i++)
        if (seqs[i].index != UINT32_MAX)
            __builtin_prefetch(&e->seqs[seqs[i].index], 1);
    return req;
}
