/* model.c: the state of the model: tables, references to their blocks, and what is published.
 *
 * The model keeps no counters: who refers to a block, how many are used and which one is evicted
 * next are found by searching everything each time.
 */
#include "tests/cache/model_internal.h"

#define M_REFERENCES (M_SLOTS * (M_ROW + M_LAYERS * M_ROW) + M_ROW) /* at most */

bool model_holds_entry(const struct model_seq *s, uint32_t i)
{
    uint32_t n_kept = M_KEPT_BLOCKS;
    return s->is_open && i < s->n_blocks && (i >= s->hole || i < n_kept);
}

bool model_has_block(const struct model_seq *s, uint32_t i)
{
    return model_holds_entry(s, i) && !s->is_paged_out[i];
}

uint32_t model_n_paged_out(const struct model_seq *s)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < M_ROW; i++)
        n += model_holds_entry(s, i) && s->is_paged_out[i];
    return n;
}

bool model_is_quiet(const struct model *m, uint32_t slot)
{
    for (uint32_t l = 0; l < M_LAYERS; l++)
        if (m->pending[slot][l].is_outstanding)
            return false;
    return true;
}

bool model_are_all_quiet(const struct model *m)
{
    for (uint32_t slot = 0; slot < M_SLOTS; slot++)
        if (!model_is_quiet(m, slot))
            return false;
    return true;
}

uint32_t model_n_open(const struct model *m)
{
    uint32_t n = 0;
    for (uint32_t s = 0; s < M_SLOTS; s++)
        n += m->seq[s].is_open;
    return n;
}

uint32_t model_n_blocks(const struct model *m)
{
    return M_BLOCKS - m->n_less;
}

/* The blocks that something refers to, one as often as that. */
static uint32_t list_references(const struct model *m, uint64_t out[M_REFERENCES])
{
    uint32_t n = 0;
    for (uint32_t s = 0; s < M_SLOTS; s++) {
        for (uint32_t i = 0; i < M_ROW; i++)
            if (model_has_block(&m->seq[s], i))
                out[n++] = m->seq[s].block[i];
        for (uint32_t l = 0; l < M_LAYERS; l++)
            for (uint32_t i = 0; m->pending[s][l].is_outstanding && i < m->pending[s][l].n_copies;
                 i++)
                out[n++] = m->pending[s][l].old_block[i];
    }
    for (uint32_t i = 0; m->move.is_under_way && i < m->move.n; i++)
        out[n++] = m->move.block[i];
    return n;
}

uint32_t model_references(const struct model *m, uint64_t block)
{
    uint64_t all[M_REFERENCES];
    uint32_t n = 0, n_all = list_references(m, all);
    for (uint32_t i = 0; i < n_all; i++)
        n += all[i] == block;
    return n;
}

uint32_t model_n_used(const struct model *m)
{
    uint64_t all[M_REFERENCES];
    uint32_t n = 0, n_all = list_references(m, all);
    for (uint32_t i = 0; i < n_all; i++) {
        uint32_t k = 0;
        while (all[k] != all[i])
            k++;
        n += k == i;
    }
    return n;
}

struct model_published *model_published_block(struct model *m, uint64_t block)
{
    for (uint32_t i = 0; i < M_BLOCKS; i++)
        if (m->published[i].serial != 0 && m->published[i].block == block)
            return &m->published[i];
    return NULL;
}

static uint32_t reserved_by(const struct model *m, uint32_t owner)
{
    return owner < M_OWNERS ? m->reserved[owner] : 0;
}

bool model_has_reservations(const struct model *m)
{
    for (uint32_t i = 0; i < M_OWNERS; i++)
        if (m->reserved[i] > 0)
            return true;
    return false;
}

uint32_t model_charged(const struct model *m, uint32_t owner)
{
    uint32_t n = 0;
    for (uint32_t s = 0; s < M_SLOTS; s++)
        for (uint32_t i = 0; i < M_ROW; i++)
            n += m->seq[s].owner == owner && model_has_block(&m->seq[s], i);
    return n;
}

uint32_t model_owes(const struct model *m)
{
    uint64_t all[M_REFERENCES];
    uint32_t n = list_references(m, all);
    for (uint32_t i = 0; i <= M_OWNERS; i++) {
        uint32_t owner = i < M_OWNERS ? i : KV_NO_OWNER, charged = model_charged(m, owner);
        n += reserved_by(m, owner) > charged ? reserved_by(m, owner) - charged : 0;
    }
    for (uint32_t i = 0; i < M_BLOCKS; i++) {
        const struct model_published *e = &m->published[i];
        n += e->serial != 0 && e->is_pinned && model_references(m, e->block) == 0;
    }
    return n;
}

uint32_t model_n_shareable(const struct model *m, uint32_t owner)
{
    uint32_t owes = model_owes(m), n = model_n_blocks(m), charged = model_charged(m, owner);
    if (!model_has_reservations(m))
        return UINT32_MAX;
    return (owes < n ? n - owes : 0) +
           (reserved_by(m, owner) > charged ? reserved_by(m, owner) - charged : 0);
}

uint32_t model_n_free_for(const struct model *m, uint32_t owner)
{
    uint32_t n = model_n_available(m), most = model_n_shareable(m, owner);
    return n < most ? n : most;
}

/* A pin goes where what is reserved needs the block. */
static void keep_pin(struct model *m, struct model_published *e)
{
    if (!e->is_pinned || !model_has_reservations(m) || model_owes(m) <= model_n_blocks(m))
        return;
    e->is_pinned = false;
    m->n_unpinned++;
}

void model_release(struct model *m, uint64_t block)
{
    struct model_published *e = model_published_block(m, block);
    if (e == NULL || model_references(m, block) > 0)
        return;
    e->used = ++m->clock;
    keep_pin(m, e);
}

static uint64_t goes_at(const struct model *m, const struct model_published *e)
{
    return e->used + (e->was_found ? 2 * model_n_blocks(m) : 0);
}

/* The one that was released first, if those that were found count as used later. */
bool model_make_room(struct model *m, uint32_t n_full)
{
    struct model_published *oldest = NULL;
    uint32_t n = model_n_used(m);
    for (uint32_t i = 0; i < M_BLOCKS; i++) {
        struct model_published *e = &m->published[i];
        if (e->serial == 0 || model_references(m, e->block) > 0)
            continue;
        n++;
        if (e->is_pinned)
            continue;
        bool is_first = oldest == NULL || goes_at(m, e) < goes_at(m, oldest) ||
                        (goes_at(m, e) == goes_at(m, oldest) && !e->was_found);
        oldest = is_first ? e : oldest;
    }
    if (n < n_full)
        return false;
    *oldest = (struct model_published){0};
    m->n_evicted++;
    return true;
}

uint32_t model_n_available(const struct model *m)
{
    uint32_t n = model_n_blocks(m) - model_n_used(m);
    for (uint32_t i = 0; i < M_BLOCKS; i++) {
        const struct model_published *e = &m->published[i];
        n -= e->serial != 0 && e->is_pinned && model_references(m, e->block) == 0;
    }
    return n;
}

/* Does a walk from the first block find it? */
static bool is_found(const struct model *m, const struct model_published *e)
{
    for (uint32_t i = 0; e->parent != 0 && i < M_BLOCKS; i++)
        if (m->published[i].serial == e->parent)
            return is_found(m, &m->published[i]);
    return e->parent == 0;
}

void model_drop_lost(struct model *m)
{
    bool is_lost[M_BLOCKS];
    for (uint32_t i = 0; i < M_BLOCKS; i++) {
        const struct model_published *e = &m->published[i];
        is_lost[i] =
            e->serial != 0 && e->is_pinned && model_references(m, e->block) == 0 && !is_found(m, e);
    }
    for (uint32_t i = 0; i < M_BLOCKS; i++)
        if (is_lost[i]) {
            m->published[i] = (struct model_published){0};
            m->n_lost++;
        }
}

bool model_has_room(struct model *m, uint32_t owner, uint32_t n)
{
    if (n > model_n_free_for(m, owner))
        model_drop_lost(m);
    m->n_short += n > model_n_free_for(m, owner) && n <= model_n_available(m);
    return n <= model_n_free_for(m, owner);
}

uint64_t model_block_new(struct model *m)
{
    model_make_room(m, model_n_blocks(m));
    return ++m->next_block;
}

static struct model_published *published_find(struct model *m, uint32_t tenant, uint64_t adapter,
                                              uint32_t index, uint64_t parent, const uint32_t *id)
{
    for (uint32_t i = 0; i < M_BLOCKS; i++) {
        struct model_published *e = &m->published[i];
        if (e->serial != 0 && e->tenant == tenant && e->adapter == adapter && e->index == index &&
            e->parent == parent && memcmp(e->id, id, sizeof e->id) == 0)
            return e;
    }
    return NULL;
}

static void retain(struct model *m, const struct model_seq *s, struct model_published *e)
{
    if (s->said == SAID_NOTHING)
        return;
    e->is_pinned = s->said == SAID_PINNED;
    if (model_references(m, e->block) == 0) {
        e->used = ++m->clock;
        keep_pin(m, e);
    }
}

void model_retain(struct model *m, uint32_t slot)
{
    const struct model_seq *s = &m->seq[slot];
    uint64_t parent = 0;
    for (uint32_t i = 0; i < s->n_ids / M_BLOCK_TOKENS; i++) {
        struct model_published *own =
            model_has_block(s, i) ? model_published_block(m, s->block[i]) : NULL;
        struct model_published *e =
            published_find(m, slot / M_NAMES, s->adapter, i, parent, s->id + i * M_BLOCK_TOKENS);
        if (e != NULL)
            retain(m, s, e);
        if (own != NULL && own != e)
            retain(m, s, own);
        if (e == NULL && own == NULL)
            return;
        parent = e != NULL ? e->serial : own->serial;
    }
}

void model_publish(struct model *m, uint32_t slot)
{
    struct model_seq *s = &m->seq[slot];
    uint32_t n = s->n_ids;
    for (uint32_t l = 0; l < M_LAYERS; l++)
        n = s->len[l] < n ? s->len[l] : n;
    n = model_below_tree(s) < n ? model_below_tree(s) : n;
    if (n / M_BLOCK_TOKENS > s->n_looked_at && !model_holds_entry(s, s->n_looked_at))
        return;
    bool has_parent = s->parent == 0;
    for (uint32_t i = 0; i < M_BLOCKS; i++)
        has_parent |= m->published[i].serial != 0 && m->published[i].serial == s->parent;
    if (n / M_BLOCK_TOKENS > s->n_looked_at && !has_parent)
        s->n_looked_at = 0, s->parent = 0;
    for (uint32_t i = s->n_looked_at; i < n / M_BLOCK_TOKENS; i++) {
        const uint32_t *id = s->id + i * M_BLOCK_TOKENS;
        struct model_published *e = published_find(m, slot / M_NAMES, s->adapter, i, s->parent, id);
        if (model_holds_entry(s, i) && s->is_paged_out[i])
            return;
        if (e == NULL && !model_holds_entry(s, i))
            return;
        if (e == NULL) /* behind another one that is gone, or another of those that share it said
                          otherwise */
            e = model_published_block(m, s->block[i]);
        for (uint32_t k = 0; e == NULL; k++)
            e = m->published[k].serial == 0 ? &m->published[k] : NULL;
        if (e->serial == 0 || e->parent != s->parent || memcmp(e->id, id, sizeof e->id) != 0) {
            *e = (struct model_published){.serial = ++m->clock,
                                          .parent = s->parent,
                                          .block = s->block[i],
                                          .adapter = s->adapter,
                                          .tenant = slot / M_NAMES,
                                          .index = i,
                                          .was_found = e->was_found,
                                          .is_pinned = e->is_pinned};
            memcpy(e->id, id, sizeof e->id);
            for (uint32_t l = 0; l < M_LAYERS; l++)
                memcpy(e->token[l], s->token[l] + i * M_BLOCK_TOKENS, sizeof e->token[l]);
        }
        retain(m, s, e);
        s->parent = e->serial;
        s->n_looked_at = i + 1;
    }
}

void model_look_from(struct model *m, struct model_seq *s, uint32_t n_blocks)
{
    if (n_blocks >= s->n_looked_at)
        return;
    const struct model_published *e = n_blocks == 0 || !model_has_block(s, n_blocks - 1)
                                          ? NULL
                                          : model_published_block(m, s->block[n_blocks - 1]);
    s->n_looked_at = e == NULL ? 0 : n_blocks;
    s->parent = e == NULL ? 0 : e->serial;
}

void model_begin_with(struct model *m, uint32_t slot)
{
    struct model_seq *s = &m->seq[slot];
    uint32_t most = model_n_shareable(m, s->owner);
    for (uint32_t i = 0; s->n_ids > 0 && i < most && i < (s->n_ids - 1) / M_BLOCK_TOKENS; i++) {
        struct model_published *e =
            published_find(m, slot / M_NAMES, s->adapter, i, s->parent, s->id + i * M_BLOCK_TOKENS);
        if (e == NULL)
            return;
        e->was_found = true;
        s->block[i] = e->block;
        for (uint32_t l = 0; l < M_LAYERS; l++) {
            memcpy(s->token[l] + i * M_BLOCK_TOKENS, e->token[l], sizeof e->token[l]);
            s->len[l] += M_BLOCK_TOKENS;
        }
        s->parent = e->serial;
        s->n_blocks = s->n_looked_at = i + 1;
        m->n_hits++;
    }
}
