/* idle.c: pages idle sequences out to host memory when a request needs blocks, and in again when
 * they are used. One sequence goes out at a time and one comes in, in one group each. Engine
 * thread. */
#include "daemon/engine/tier/idle.h"

#include <inttypes.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/kv_owner.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/tier/demote.h"
#include "daemon/engine/tier/group.h"
#include "daemon/engine/tier/summaries.h"
#include "daemon/keeper/idle_memory.h"
#include "kernels/kv_layout.h"
#include "kernels/moves.h"

static const uint64_t NOW_NS = UINT64_C(5000000000);
enum { AT_LEAST = 8 /* blocks that go together, if there are as many */ };

/* Follows a block's bytes in idle memory. */
struct trailer {
    uint64_t sum[2];
    uint64_t name;
    uint32_t tenant, index, pool, generation;
    uint64_t zero[3];
};
static_assert(sizeof(struct trailer) == 64, "a trailer is a cache line");

uint32_t idle_block_pages(uint64_t block_bytes)
{
    return (uint32_t)((block_bytes + sizeof(struct trailer) + KV_PAGE_BYTES - 1) / KV_PAGE_BYTES);
}

static uint8_t *bytes_at(const struct engine *e, uint32_t page)
{
    return e->env.idle->base + (uint64_t)page * KV_PAGE_BYTES;
}

static struct trailer trailer_of(const struct engine *e, const struct pool *p, uint32_t seq,
                                 uint32_t index, const uint64_t sum[2])
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){seq}, &info);
    return (struct trailer){.sum = {sum[0], sum[1]},
                            .name = info.name,
                            .tenant = info.tenant,
                            .index = index,
                            .pool = p->id.index,
                            .generation = p->generation};
}

static bool is_right(const struct engine *e, const struct pool *p, uint32_t seq, uint32_t index,
                     uint32_t page, const uint64_t sum[2])
{
    struct trailer want = trailer_of(e, p, seq, index, sum);
    return memcmp(bytes_at(e, page) + pool_block_bytes(p), &want, sizeof want) == 0;
}

/* The session of the sequence that asks for room. */
static uint32_t owner_of(const struct engine *e, uint32_t seq)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){seq}, &info);
    return info.layer_len == NULL ? KV_NO_OWNER : info.owner;
}

/* Blocks that its session can have. */
static uint32_t n_free(const struct engine *e, const struct pool *p, uint32_t seq)
{
    return kv_pool_free_for(e->env.kv, p->id, owner_of(e, seq));
}

/* --- which sequence goes ---------------------------------------------------------------------- */

enum pass { WHOLE, IN_A_TOKEN, OWN, LATER, N_PASSES };

static bool may_go(const struct engine *e, uint32_t seq, const struct idle_ask *a, enum pass pass)
{
    const struct seq_state *s = &e->seqs[seq];
    const struct item *it = TAILQ_FIRST(&s->waiting);
    if (s->n_active > 0 || s->is_moving || peers_move_seq(e, seq) ||
        (seq == a->seq) != (pass == OWN))
        return false;
    if (pass == OWN)
        return true;
    if (it != NULL || s->n_claims > 0) /* a ready item: items are tried in order, so it is later */
        return pass == LATER && (it == NULL || it->task->stamp > a->stamp);
    return pass == IN_A_TOKEN || (pass == WHOLE && kv_idle_is_even(e->env.kv, (kv_seq_id){seq}));
}

/* Whether who asks has more room once the sequence has gone: not where its blocks are reserved for
 * another session. */
static bool gains(const struct engine *e, uint32_t seq, const struct idle_ask *a)
{
    return !kv_seq_is_covered(e->env.kv, (kv_seq_id){seq}) ||
           owner_of(e, seq) == owner_of(e, a->seq);
}

/* Lists entries, n at most, of a sequence whose steps choose blocks: those that are to go. Of other
 * sequences none is listed, and the last ones go: UINT32_MAX. */
static uint32_t list_of(const struct engine *e, const struct pool *p, uint32_t seq,
                        const struct idle_ask *a, uint32_t n, uint32_t *list)
{
    if (!p->has_summaries_open || !e->seqs[seq].chooses)
        return UINT32_MAX;
    const uint8_t *needs = seq == a->seq ? a->needs : NULL;
    return summaries_coldest(e, p, seq, needs, needs != NULL ? a->n_needs : 0, n, list);
}

/* The least recently used sequence that may go in this pass; SEQ_NONE: none. */
static uint32_t oldest(struct engine *e, const struct pool *p, const struct idle_ask *a,
                       enum pass pass)
{
    struct seq_list *list = &e->idle.by_use[p->id.index];
    for (struct seq_state *s = TAILQ_FIRST(list), *next; s != NULL; s = next) {
        struct kv_seq_info info;
        uint32_t seq = (uint32_t)(s - e->seqs);
        next = TAILQ_NEXT(s, by_use);
        kv_seq_info(e->env.kv, (kv_seq_id){seq}, &info);
        if (info.layer_len == NULL || info.pool.index != p->id.index ||
            info.n_paged_out == info.n_blocks)
            seq_unlist(e, s); /* until it is used again */
        else if (may_go(e, seq, a, pass) && gains(e, seq, a) &&
                 kv_idle_movable(e->env.kv, (kv_seq_id){seq}) > 0)
            return seq;
    }
    return SEQ_NONE;
}

/* The sequence of who asks, if it has blocks that the item can do without; SEQ_NONE: it has not. */
static uint32_t own(const struct engine *e, const struct pool *p, const struct idle_ask *a)
{
    uint32_t first;
    bool may = a->needs != NULL && may_go(e, a->seq, a, OWN);
    return may && list_of(e, p, a->seq, a, 1, &first) == 1 ? a->seq : SEQ_NONE;
}

/* The sequence whose blocks go; SEQ_NONE: none. */
static uint32_t choose(struct engine *e, const struct pool *p, const struct idle_ask *a)
{
    uint32_t seq = SEQ_NONE;
    for (enum pass pass = WHOLE; pass < N_PASSES && seq == SEQ_NONE; pass++)
        seq = pass == OWN ? own(e, p, a) : oldest(e, p, a, pass);
    return seq;
}

/* How many more blocks the tenant may have in idle memory. */
static uint64_t n_allowed(struct engine *e, const struct pool *of)
{
    const struct tenant *who = tenants_of_id(e->env.tenants, of->tenant);
    uint64_t most = who == NULL ? 0 : who->most[TENANT_HOST_BYTES], used = 0;
    if (most == 0)
        return UINT64_MAX;
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;)
        used += p->tenant != of->tenant
                    ? 0
                    : kv_idle_pool_paged_out(e->env.kv, p->id) * pool_block_bytes(p);
    return used >= most ? 0 : (most - used) / pool_block_bytes(of);
}

/* --- out -------------------------------------------------------------------------------------- */

/* Ends the move when its bytes are there and its copies settled. */
static void out_goes_on(struct engine *e)
{
    struct engine_idle *x = &e->idle;
    struct mover_group *g = &x->out;
    struct kv_idle_move *m = x->out_move;
    if (m == NULL || !x->is_out_there || !summaries_are_settled(e))
        return;
    for (uint32_t i = 0; i < m->n; i++) {
        struct kv_idle_entry *entry = &m->entries[i];
        entry->is_good =
            mover_is_moved(e, &x->out_list[i]) && !x->is_out_void && m->seq != SEQ_NONE;
        if (!entry->is_good)
            continue;
        summaries_went(e, g->pool, i, entry->page);
        struct trailer t = trailer_of(e, g->pool, m->seq, entry->index, x->out_list[i].sum);
        memcpy(bytes_at(e, entry->page) + pool_block_bytes(g->pool), &t, sizeof t);
    }
    x->out_bytes += kv_idle_out_end(e->env.kv, m) * pool_block_bytes(g->pool);
    x->out_move = NULL;
    x->copies = SUMMARIES_NONE;
    seqs_have_room(e);
}

static void out_came(struct engine *e, struct mover_group *g)
{
    (void)g;
    e->idle.is_out_there = true;
    out_goes_on(e);
}

void idle_copies_sent(struct engine *e, const struct batch *b)
{
    summaries_sent(e, b);
}

void idle_copies_came(struct engine *e, const struct batch *b, attn_status st)
{
    if (summaries_came(e, b, st))
        out_goes_on(e);
}

struct pool *idle_waits_for_batch(const struct engine *e)
{
    return e->idle.copies == SUMMARIES_WAIT ? e->idle.out.pool : NULL;
}

void idle_hurry(struct engine *e)
{
    summaries_give_up(e);
    out_goes_on(e);
}

/* Begins to page out blocks of one sequence; false: none may go. */
static bool out_begin(struct engine *e, struct pool *p, const struct idle_ask *a, uint64_t n)
{
    struct engine_idle *x = &e->idle;
    uint64_t bytes = pool_block_bytes(p), allowed = n_allowed(e, p);
    uint32_t most = mover_group_size(bytes, MOVER_GROUP);
    if (p->ops->moves_submit == NULL || engine_health(e) != ATTN_OK)
        return false;
    uint32_t seq = choose(e, p, a);
    n = n < AT_LEAST ? AT_LEAST : n;
    n = n < most ? n : most;
    n = n < allowed ? n : allowed;
    if (seq == SEQ_NONE || n == 0)
        return false;
    uint32_t list[MOVER_GROUP], n_listed = list_of(e, p, seq, a, (uint32_t)n, list);
    const bool is_listed = n_listed != UINT32_MAX;
    struct kv_idle_move *m = kv_idle_out_begin(e->env.kv, (kv_seq_id){seq}, is_listed ? list : NULL,
                                               is_listed ? n_listed : (uint32_t)n);
    if (m == NULL)
        return false;
    for (uint32_t i = 0; i < m->n; i++)
        x->out_list[i] = (struct backend_move){.pool = p->device,
                                               .block = m->entries[i].block,
                                               .bytes = bytes_at(e, m->entries[i].page),
                                               .n_bytes = bytes};
    x->is_out_void = x->is_out_there = false;
    x->out.pool = p;
    if (is_listed)
        summaries_copy(e, p, m);
    x->out_for = a->stamp;
    x->out_move = m;
    if (mover_group_begin(e, &x->out, p, m->n, NULL))
        return true;
    summaries_give_up(e);
    x->out_move = NULL;
    kv_idle_out_end(e->env.kv, m);
    return false;
}

/* Whether a batch has items of the pool; their sequences may go when it is back. */
static bool is_in_work(const struct engine *e, const struct pool *p)
{
    for (uint32_t i = 0; i < e->max_in_flight; i++)
        if (e->batches[i].is_in_flight && e->batches[i].pool == p)
            return true;
    return false;
}

bool idle_makes_room(struct engine *e, struct pool *p, const struct idle_ask *a, uint64_t n)
{
    uint64_t n_now = n_free(e, p, a->seq);
    if (e->idle.by_use == NULL || n <= n_now || n > p->config.n_blocks)
        return false;
    bool waits = e->idle.out_move != NULL || (e->idle.in_move != NULL && e->idle.in.pool == p) ||
                 out_begin(e, p, a, n - n_now) || a->is_begun || is_in_work(e, p);
    e->idle.n_waits += waits;
    return waits;
}

void idle_make_room_now(struct engine *e, struct pool *p, const struct idle_ask *a, uint64_t n)
{
    if (e->idle.by_use == NULL || n > p->config.n_blocks)
        return;
    uint64_t begun_ns = clock_now_ns();
    while (n_free(e, p, a->seq) < n && clock_now_ns() - begun_ns < NOW_NS &&
           (e->idle.out_move != NULL || out_begin(e, p, a, n - n_free(e, p, a->seq)))) {
        idle_hurry(e);
        if (!mover_take_back(e))
            sched_yield();
    }
}

/* --- in --------------------------------------------------------------------------------------- */

static void drop_damaged(struct engine *e, uint32_t seq)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){seq}, &info);
    e->idle.n_damaged++;
    log_error("sequence %" PRIu64 ": a block in idle memory is not as it was put there: the "
              "sequence is dropped",
              info.name);
    seq_close(e, (kv_seq_id){seq});
    seq_closed(e, seq);
}

static bool has_patch_room(const struct pool *p, uint32_t n)
{
    return n <= p->fx.patches_capacity - p->fx.n_patches;
}

static void in_came(struct engine *e, struct mover_group *g)
{
    struct engine_idle *x = &e->idle;
    struct kv_idle_move *m = x->in_move;
    struct pool *p = g->pool;
    bool is_damaged = false, has_room = has_patch_room(p, m->n);
    uint32_t seq = m->seq;
    for (uint32_t i = 0; i < m->n && seq != SEQ_NONE; i++) {
        struct kv_idle_entry *entry = &m->entries[i];
        if (!mover_is_moved(e, &x->in_list[i]) || entry->is_gone)
            continue;
        entry->is_good = is_right(e, p, seq, entry->index, entry->page, x->in_list[i].sum);
        is_damaged |= !entry->is_good;
        entry->is_good &= has_room;
        if (p->has_summaries_open && entry->is_good)
            summaries_note(e, p, entry->block);
    }
    x->in_bytes += kv_idle_in_end(e->env.kv, m, &p->fx) * pool_block_bytes(p);
    x->in_move = NULL;
    if (is_damaged && e->seqs[seq].n_active == 0) /* else whoever asks next finds it again */
        drop_damaged(e, seq);
    else if (seq != SEQ_NONE)
        seq_note_use(e, seq, p->id.index);
    seqs_have_room(e);
}

/* Begins to bring n blocks of the sequence back, of these entries or (NULL) the first ones; the
 * pool must have room for them. */
static enum idle_is in_begin(struct engine *e, struct pool *p, uint32_t seq, const uint32_t *list,
                             uint32_t n)
{
    struct engine_idle *x = &e->idle;
    if (!has_patch_room(p, n))
        return IDLE_NEEDS_PATCHES;
    struct kv_idle_move *m = kv_idle_in_begin(e->env.kv, (kv_seq_id){seq}, list, n);
    if (m == NULL)
        return IDLE_NEVER;
    for (uint32_t i = 0; i < m->n; i++)
        x->in_list[i] = (struct backend_move){.pool = p->device,
                                              .block = m->entries[i].block,
                                              .is_in = true,
                                              .bytes = bytes_at(e, m->entries[i].page),
                                              .n_bytes = pool_block_bytes(p)};
    x->in_move = m;
    if (mover_group_begin(e, &x->in, p, m->n, NULL))
        return IDLE_COMES;
    x->in_move = NULL;
    kv_idle_in_end(e->env.kv, m, &p->fx);
    return IDLE_NEVER;
}

/* Lists entries of the table that are to come, `most` of them: those that the item needs; if all of
 * these are there, some of those without a summary. Returns how many. */
static uint32_t list_needed(const struct pool *p, const struct kv_seq_info *info,
                            const struct idle_ask *a, uint32_t most, uint32_t *list)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < a->n_needs && i < info->n_blocks && n < most; i++)
        if (a->needs[i] != 0 && kv_is_place(info->block_table[i]))
            list[n++] = i;
    most = n == 0 && most > AT_LEAST ? AT_LEAST : most;
    for (uint32_t i = 0, is_rest = n == 0; is_rest && i < a->n_needs && i < info->n_blocks; i++)
        if (n < most && pool_block_name(p, info->block_table[i]) == UINT32_MAX)
            list[n++] = i;
    return n;
}

enum idle_is idle_brings(struct engine *e, const struct idle_ask *a, char *why, size_t why_bytes)
{
    struct engine_idle *x = &e->idle;
    struct kv_seq_info info;
    if (x->by_use == NULL)
        return IDLE_HERE;
    if (x->out_move != NULL && x->out_move->seq == a->seq) {
        x->is_out_void |= a->stamp < x->out_for; /* not paged out after all */
        return IDLE_COMES;
    }
    kv_seq_info(e->env.kv, (kv_seq_id){a->seq}, &info);
    if (info.n_paged_out == 0)
        return IDLE_HERE;
    struct pool *p = pool_of_kv(e, info.pool);
    uint32_t n = mover_group_size(pool_block_bytes(p), MOVER_PROMOTE), list[MOVER_PROMOTE];
    n = a->needs != NULL       ? list_needed(p, &info, a, n, list)
        : n < info.n_paged_out ? n
                               : info.n_paged_out;
    if (n == 0)
        return IDLE_HERE;
    if (x->in_move != NULL || mover_makes_room(e, p, n) || idle_makes_room(e, p, a, n))
        return IDLE_COMES;
    const uint32_t has = n_free(e, p, a->seq);
    if (a->needs != NULL && has > 0 && has < n) /* the rest when these are there */
        n = has;
    enum idle_is is =
        has < n ? IDLE_NEVER : in_begin(e, p, a->seq, a->needs != NULL ? list : NULL, n);
    if (is == IDLE_NEVER)
        snprintf(why, why_bytes,
                 "%" PRIu32 " of its blocks %s in idle memory, pool %s has %" PRIu32
                 " free" MORE_BLOCKS,
                 a->needs != NULL ? n : info.n_paged_out,
                 a->needs != NULL ? "that a query visits are" : "are", p->spec.wire->name, has);
    return is;
}

bool idle_has(const struct engine *e, uint32_t seq)
{
    const struct kv_idle_move *m = e->idle.out_move;
    return (m != NULL && m->seq == seq) || kv_idle_n_paged_out(e->env.kv, (kv_seq_id){seq}) > 0;
}

attn_status idle_layers_read(struct engine *e, const struct pool *p, kv_seq_id seq, uint32_t index,
                             struct pool_layers layers, uint8_t *out, char *why, size_t why_bytes)
{
    uint64_t sum[2], layer_bytes = kv_layout_of(&p->config).layer_bytes;
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    uint32_t page = info.block_table[index] & ~KV_PLACE;
    moves_sum(bytes_at(e, page), pool_block_bytes(p), sum);
    if (!is_right(e, p, seq.index, index, page, sum)) {
        snprintf(why, why_bytes, "sequence %" PRIu64 ": a block in idle memory was damaged",
                 info.name);
        drop_damaged(e, seq.index);
        return ATTN_ENOTFOUND;
    }
    memcpy(out, bytes_at(e, page) + layers.first * layer_bytes, layers.n * layer_bytes);
    return ATTN_OK;
}

/* --- life ------------------------------------------------------------------------------------- */

bool idle_is_drained(const struct engine *e, const struct pool *p)
{
    const struct engine_idle *x = &e->idle;
    return (x->out_move == NULL || (p != NULL && x->out.pool != p)) &&
           (x->in_move == NULL || (p != NULL && x->in.pool != p));
}

attn_status idle_init(struct engine *e, char *why, size_t why_bytes)
{
    const struct idle_memory *m = e->env.idle;
    struct engine_idle *x = &e->idle;
    if (m == NULL || m->base == NULL)
        return ATTN_OK;
    mover_group_init(e, &x->out, x->out_list, out_came);
    mover_group_init(e, &x->in, x->in_list, in_came);
    x->is_registered = e->env.ops->host_register(e->env.backend, m->base, m->bytes) == ATTN_OK;
    x->by_use = calloc(e->env.cfg->max_pools, sizeof *x->by_use);
    if (!x->is_registered || x->by_use == NULL) {
        snprintf(why, why_bytes, "the device does not take the memory of cache.idle_memory");
        return ATTN_ENOMEM;
    }
    for (uint32_t i = 0; i < e->env.cfg->max_pools; i++)
        TAILQ_INIT(&x->by_use[i]);
    return ATTN_OK;
}

void idle_fini(struct engine *e)
{
    struct engine_idle *x = &e->idle;
    if (x->is_registered)
        e->env.ops->host_unregister(e->env.backend, e->env.idle->base, e->env.idle->bytes);
    free(x->by_use);
}

void idle_publish(struct engine *e)
{
    struct engine_idle *x = &e->idle;
    stats_add(idle_out_bytes, x->out_bytes);
    stats_add(idle_in_bytes, x->in_bytes);
    stats_add(idle_waits, x->n_waits);
    stats_add(idle_damaged, x->n_damaged);
    stats_add(chosen_here, x->n_chosen_here);
    stats_add(chosen_away, x->n_chosen_away);
    x->out_bytes = x->in_bytes = x->n_waits = x->n_damaged = 0;
    x->n_chosen_here = x->n_chosen_away = 0;
}
