/* model.c: see model.h. */
#include "tests/cache/model.h"

#include "cache/kv_internal.h"

const struct kv_config model_config = {.max_pools = 1,
                                       .max_blocks = M_BLOCKS,
                                       .max_sequences = M_SEQUENCES,
                                       .max_seq_blocks = M_ROW,
                                       .max_seq_tokens = M_TOKENS,
                                       .max_block_tokens = M_BLOCK_TOKENS,
                                       .max_layers = M_LAYERS,
                                       .max_owners = M_OWNERS,
                                       .block_layout = 1,
                                       .idle_pages = M_PAGES};
struct device *model_device;
static struct kv_idle_move *moving; /* this process's */

struct kv *model_kv_open(void)
{
    struct kv *kv = test_kv_open(&model_config, -1);
    struct kv_pool_spec spec = {.name = "model",
                                .n_layers = M_LAYERS,
                                .n_blocks = M_BLOCKS,
                                .block_tokens = M_BLOCK_TOKENS,
                                .window_tokens = M_WINDOW,
                                .kept_tokens = M_KEPT,
                                .spec = (const uint8_t *)"model",
                                .spec_bytes = 5,
                                .idle_pages = M_PAGES > 0};
    kv_pool_id pool;
    assert_status(kv, ATTN_OK, kv_pool_create(kv, &spec, &pool));
    moving = NULL;
    return kv;
}

static uint32_t blocks_of(uint32_t tokens)
{
    return (tokens + M_BLOCK_TOKENS - 1) / M_BLOCK_TOKENS;
}

static uint32_t longest(const struct model_seq *s)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < M_LAYERS; i++)
        n = s->len[i] > n ? s->len[i] : n;
    return n;
}

static bool holds_entry(const struct model_seq *s, uint32_t i)
{
    uint32_t n_kept = M_KEPT_BLOCKS;
    return s->is_open && i < s->n_blocks && (i >= s->hole || i < n_kept);
}

static uint32_t first_seen(uint32_t pos)
{
    uint32_t window = M_WINDOW;
    return window == 0 || pos + 1 < window ? 0 : (pos + 1 - window) / M_BLOCK_TOKENS;
}

static bool has_block(const struct model_seq *s, uint32_t i)
{
    return holds_entry(s, i) && !s->is_away[i];
}

/* References to a block: tables, old blocks of pending copies, and what moves. */
static uint32_t references(const struct model *m, uint64_t block)
{
    uint32_t n = 0;
    for (uint32_t s = 0; s < M_SLOTS; s++) {
        for (uint32_t i = 0; i < M_ROW; i++)
            n += has_block(&m->seq[s], i) && m->seq[s].block[i] == block;
        for (uint32_t l = 0; l < M_LAYERS; l++)
            for (uint32_t i = 0; m->pending[s][l].is_outstanding && i < m->pending[s][l].n_copies;
                 i++)
                n += m->pending[s][l].old_block[i] == block;
    }
    for (uint32_t i = 0; m->move.is_under_way && i < m->move.n; i++)
        n += m->move.block[i] == block;
    return n;
}

static struct model_published *published_block(struct model *m, uint64_t block)
{
    for (uint32_t i = 0; i < M_BLOCKS; i++)
        if (m->published[i].serial != 0 && m->published[i].block == block)
            return &m->published[i];
    return NULL;
}

/* A reference is gone: a published block that nobody has any more was used now. */
static void let_go(struct model *m, uint64_t block)
{
    struct model_published *e = published_block(m, block);
    if (e != NULL && references(m, block) == 0)
        e->used = ++m->clock;
}

static uint32_t add_distinct(uint64_t *seen, uint32_t n, uint64_t block)
{
    for (uint32_t i = 0; i < n; i++)
        if (seen[i] == block)
            return n;
    seen[n] = block;
    return n + 1;
}

/* Distinct blocks with a reference. */
static uint32_t n_used(const struct model *m)
{
    uint64_t seen[M_SLOTS * (M_ROW + M_LAYERS * M_ROW) + M_ROW];
    uint32_t n = 0;
    for (uint32_t i = 0; m->move.is_under_way && i < m->move.n; i++)
        n = add_distinct(seen, n, m->move.block[i]);
    for (uint32_t s = 0; s < M_SLOTS; s++) {
        for (uint32_t i = 0; i < M_ROW; i++)
            if (has_block(&m->seq[s], i))
                n = add_distinct(seen, n, m->seq[s].block[i]);
        for (uint32_t l = 0; l < M_LAYERS; l++)
            for (uint32_t i = 0; m->pending[s][l].is_outstanding && i < m->pending[s][l].n_copies;
                 i++)
                n = add_distinct(seen, n, m->pending[s][l].old_block[i]);
    }
    return n;
}

static uint32_t n_published(const struct model *m)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < M_BLOCKS; i++)
        n += m->published[i].serial != 0;
    return n;
}

static uint32_t n_blocks(const struct model *m)
{
    return M_BLOCKS - m->n_less;
}

static uint64_t goes_at(const struct model *m, const struct model_published *e)
{
    return e->used + (e->was_found ? 2 * n_blocks(m) : 0);
}

/* Of n_full blocks that are used or published, the published one that was let go of first goes, if
 * those that were found count as used later. */
static bool make_room(struct model *m, uint32_t n_full)
{
    struct model_published *oldest = NULL;
    uint32_t n = n_used(m);
    for (uint32_t i = 0; i < M_BLOCKS; i++) {
        struct model_published *e = &m->published[i];
        if (e->serial == 0 || references(m, e->block) > 0)
            continue;
        n++;
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

static uint64_t block_new(struct model *m)
{
    make_room(m, n_blocks(m));
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

static uint32_t n_away(const struct model_seq *s)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < M_ROW; i++)
        n += holds_entry(s, i) && s->is_away[i];
    return n;
}

/* The sequence's table ends before entry i from now on. */
static void entry_goes(struct model *m, uint32_t slot, uint32_t i)
{
    struct model_seq *s = &m->seq[slot];
    bool was_held = has_block(s, i), was_away = s->is_away[i];
    struct model_move *v = &m->move;
    s->n_blocks = i;
    s->is_away[i] = false;
    if (was_held)
        let_go(m, s->block[i]);
    for (uint32_t k = 0; was_away && v->is_under_way && k < v->n; k++)
        v->is_gone[k] |= v->is_in && v->slot == slot && !v->is_closed && v->index[k] == i;
}

static void look_from(struct model *m, struct model_seq *s, uint32_t n_blocks)
{
    if (n_blocks >= s->n_looked_at)
        return;
    const struct model_published *e = n_blocks == 0 || !has_block(s, n_blocks - 1)
                                          ? NULL
                                          : published_block(m, s->block[n_blocks - 1]);
    s->n_looked_at = e == NULL ? 0 : n_blocks;
    s->parent = e == NULL ? 0 : e->serial;
}

static void publish(struct model *m, uint32_t slot)
{
    struct model_seq *s = &m->seq[slot];
    uint32_t n = s->n_ids;
    for (uint32_t l = 0; l < M_LAYERS; l++)
        n = s->len[l] < n ? s->len[l] : n;
    if (n_away(s) > 0)
        return;
    if (n / M_BLOCK_TOKENS > s->n_looked_at && !holds_entry(s, s->n_looked_at))
        return;
    bool has_parent = s->parent == 0;
    for (uint32_t i = 0; i < M_BLOCKS; i++)
        has_parent |= m->published[i].serial != 0 && m->published[i].serial == s->parent;
    if (n / M_BLOCK_TOKENS > s->n_looked_at && !has_parent)
        s->n_looked_at = 0, s->parent = 0;
    for (uint32_t i = s->n_looked_at; i < n / M_BLOCK_TOKENS; i++) {
        const uint32_t *id = s->id + i * M_BLOCK_TOKENS;
        struct model_published *e = published_find(m, slot / M_NAMES, s->adapter, i, s->parent, id);
        if (e == NULL && !holds_entry(s, i))
            return;
        if (e == NULL)
            e = published_block(m, s->block[i]); /* behind another one that is gone, or another of
                                                    those that share it said otherwise */
        for (uint32_t k = 0; e == NULL; k++)
            e = m->published[k].serial == 0 ? &m->published[k] : NULL;
        if (e->serial == 0 || e->parent != s->parent || memcmp(e->id, id, sizeof e->id) != 0) {
            *e = (struct model_published){.serial = ++m->clock,
                                          .parent = s->parent,
                                          .block = s->block[i],
                                          .adapter = s->adapter,
                                          .tenant = slot / M_NAMES,
                                          .index = i};
            memcpy(e->id, id, sizeof e->id);
            for (uint32_t l = 0; l < M_LAYERS; l++)
                memcpy(e->token[l], s->token[l] + i * M_BLOCK_TOKENS, sizeof e->token[l]);
        }
        s->parent = e->serial;
        s->n_looked_at = i + 1;
    }
}

/* Begins with what is published of its ids. */
static void begin_with(struct model *m, uint32_t slot)
{
    struct model_seq *s = &m->seq[slot];
    for (uint32_t i = 0; s->n_ids > 0 && i < (s->n_ids - 1) / M_BLOCK_TOKENS; i++) {
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

/* Three prompts that part after 4 and after 8 tokens. */
static uint32_t id_of(uint32_t prompt, uint32_t pos)
{
    return pos * 3 + (prompt > 0 && pos >= prompt * M_BLOCK_TOKENS ? prompt : 0);
}

static uint32_t n_open(const struct model *m)
{
    uint32_t n = 0;
    for (uint32_t s = 0; s < M_SLOTS; s++)
        n += m->seq[s].is_open;
    return n;
}

static uint32_t n_outstanding(const struct model *m, uint32_t slot, uint32_t *out_copies)
{
    uint32_t n = 0;
    *out_copies = 0;
    for (uint32_t l = 0; l < M_LAYERS; l++) {
        n += m->pending[slot][l].is_outstanding;
        if (m->pending[slot][l].is_outstanding)
            *out_copies += m->pending[slot][l].n_copies;
    }
    return n;
}

static void trim(struct model *m, uint32_t slot)
{
    struct model_seq *s = &m->seq[slot];
    uint32_t copies;
    if (n_outstanding(m, slot, &copies) > 0)
        return;
    while (s->n_blocks > blocks_of(longest(s)))
        entry_goes(m, slot, s->n_blocks - 1);
}

/* Blocks that no query at a layer's latest append or behind it sees. */
static void free_unseen(struct model *m, uint32_t slot)
{
    struct model_seq *s = &m->seq[slot];
    uint32_t past = M_ROW, first = s->hole > M_KEPT_BLOCKS ? s->hole : M_KEPT_BLOCKS;
    for (uint32_t l = 0; l < M_LAYERS; l++)
        past = first_seen(s->latest[l]) < past ? first_seen(s->latest[l]) : past;
    if (past <= first)
        return;
    s->hole = past;
    for (uint32_t i = past; i-- > first; m->n_unseen++)
        let_go(m, s->block[i]);
}

static bool is_quiet(const struct model *m, uint32_t slot);

static attn_status apply_free_to(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    uint32_t first = M_KEPT_BLOCKS, past = op->n;
    if (M_WINDOW == 0 || op->pos != first || past <= first || past > M_ROW)
        return ATTN_EINVAL;
    if (!is_quiet(m, op->slot) || n_away(s) > 0)
        return ATTN_EOVERLOAD;
    for (uint32_t l = 0; l < M_LAYERS; l++)
        if (s->len[l] < past * M_BLOCK_TOKENS && s->len[l] != first * M_BLOCK_TOKENS)
            return ATTN_EINVAL;
    uint32_t from = s->hole > first ? s->hole : first;
    s->hole = past > s->hole ? past : s->hole;
    for (uint32_t i = past < s->n_blocks ? past : s->n_blocks; i-- > from;)
        let_go(m, s->block[i]);
    for (uint32_t l = 0; l < M_LAYERS; l++)
        if (s->len[l] < s->hole * M_BLOCK_TOKENS)
            s->len[l] = s->hole * M_BLOCK_TOKENS;
    s->n_blocks = blocks_of(longest(s));
    return ATTN_OK;
}

static bool is_quiet(const struct model *m, uint32_t slot)
{
    uint32_t copies;
    return n_outstanding(m, slot, &copies) == 0;
}

static bool is_seen(const struct model *m, uint32_t owner, uint64_t request)
{
    if (owner == KV_NO_OWNER || request == KV_NO_REQUEST)
        return false;
    const struct model_seen *x = &m->seen[owner];
    for (uint32_t i = 0; i < x->n; i++)
        if (x->id[i] == request)
            return true;
    return request <= x->floor;
}

static void see(struct model *m, uint32_t owner, uint64_t request)
{
    if (owner == KV_NO_OWNER || request == KV_NO_REQUEST || is_seen(m, owner, request))
        return;
    struct model_seen *x = &m->seen[owner];
    uint64_t out = request; /* of the ids and this one, the one there is no room for */
    for (uint32_t i = 0; i < x->n; i++) {
        if (x->id[i] < out) {
            uint64_t swap = x->id[i];
            x->id[i] = out;
            out = swap;
        }
    }
    if (x->n < KV_MAX_SEEN)
        x->id[x->n++] = out;
    else if (out > x->floor)
        x->floor = out;
}

static bool is_repeat(const struct model_seq *s, const struct op *op)
{
    return s->is_open && op->request != KV_NO_REQUEST && s->owner == op->owner &&
           s->request == op->request;
}

static attn_status birth(const struct model *m, const struct op *op, uint32_t slot,
                         bool *out_repeat)
{
    const struct model_seq *s = &m->seq[slot];
    *out_repeat = is_repeat(s, op);
    if (*out_repeat)
        return ATTN_OK;
    if (is_seen(m, op->owner, op->request))
        return ATTN_ESTALE;
    if (s->is_open)
        return ATTN_EEXIST;
    return n_open(m) == M_SEQUENCES ? ATTN_EOVERLOAD : ATTN_OK;
}

static uint32_t value_of(uint32_t seed, uint32_t layer, uint32_t pos)
{
    return (seed * 31 + layer) * 2654435761u + pos * 40503u;
}

static attn_status apply_reserve(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    struct model_pending *p = &m->pending[op->slot][op->layer];
    if (op->pos > s->len[op->layer] || op->n == 0 || op->pos + op->n > M_TOKENS ||
        (op->is_copied && op->pos >= s->hole * M_BLOCK_TOKENS ? 0 : first_seen(op->pos) < s->hole))
        return ATTN_EINVAL;
    if (n_away(s) > 0)
        return ATTN_EOVERLOAD;
    uint32_t past = blocks_of(op->pos + op->n), n_copies = 0, pending_copies;
    uint32_t n_new = past > s->n_blocks ? past - s->n_blocks : 0;
    for (uint32_t i = op->pos / M_BLOCK_TOKENS; i < past && i < s->n_blocks; i++)
        n_copies += references(m, s->block[i]) > 1;
    uint32_t outstanding = n_outstanding(m, op->slot, &pending_copies);
    if (pending_copies > 0 || (n_copies > 0 && outstanding > 0))
        return ATTN_EOVERLOAD;
    if (n_new + n_copies > n_blocks(m) - n_used(m))
        return ATTN_ENOBLOCKS;

    struct model_pending q = {.is_outstanding = true,
                              .will_commit = op->will_commit,
                              .pos = op->pos,
                              .n = op->n,
                              .value_seed = op->value_seed};
    bool is_shared[M_ROW] = {0};
    for (uint32_t i = op->pos / M_BLOCK_TOKENS; i < past && i < s->n_blocks; i++)
        is_shared[i] = references(m, s->block[i]) > 1;
    for (uint32_t i = op->pos / M_BLOCK_TOKENS; i < past && i < s->n_blocks; i++) {
        struct model_published *e = published_block(m, s->block[i]);
        if (e == NULL || is_shared[i])
            continue;
        look_from(m, s, i);
        *e = (struct model_published){0};
        m->n_taken_back++;
    }
    for (uint32_t i = 0; i < M_ROW; i++) {
        if (!is_shared[i])
            continue;
        q.index[q.n_copies] = i;
        q.old_block[q.n_copies++] = s->block[i];
        *p = q; /* it holds the old block */
        s->block[i] = block_new(m);
    }
    while (s->n_blocks < past) {
        s->block[s->n_blocks] = block_new(m);
        s->n_blocks++;
    }
    *p = q;
    return ATTN_OK;
}

static void let_go_of_copied(struct model *m, struct model_pending *p)
{
    while (p->n_copies > 0) {
        p->n_copies--;
        let_go(m, p->old_block[p->n_copies]);
    }
}

static void cancel(struct model *m, uint32_t slot, uint32_t layer)
{
    struct model_pending *p = &m->pending[slot][layer];
    for (uint32_t i = 0; i < p->n_copies; i++)
        m->seq[slot].block[p->index[i]] = p->old_block[i];
    *p = (struct model_pending){0};
    trim(m, slot);
}

static attn_status apply_resize(struct model *m, uint32_t n)
{
    uint32_t copies;
    if (n > M_BLOCKS)
        return ATTN_ENOMEM;
    if (n == 0)
        return ATTN_EINVAL;
    if (n < n_blocks(m) && m->move.is_under_way)
        return ATTN_EOVERLOAD;
    if (n < n_used(m))
        return ATTN_ENOBLOCKS;
    for (uint32_t slot = 0; slot < M_SLOTS && n < n_blocks(m); slot++)
        if (n_outstanding(m, slot, &copies) > 0)
            return ATTN_EOVERLOAD;
    while (make_room(m, n + 1))
        ;
    m->n_less = M_BLOCKS - n;
    return ATTN_OK;
}

static attn_status apply(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot], *to = &m->seq[op->to_slot];
    struct model_pending *p = &m->pending[op->slot][op->layer];
    uint32_t copies;
    bool is_again;
    attn_status st;
    switch (op->kind) {
    case OP_OPEN:
        st = birth(m, op, op->slot, &is_again);
        if (st != ATTN_OK || is_again)
            return st;
        if (op->n > M_TOKENS)
            return ATTN_EINVAL;
        *s = (struct model_seq){.is_open = true,
                                .owner = op->owner,
                                .epoch = m->ended + 1,
                                .request = op->request,
                                .adapter = op->adapter,
                                .prompt = op->prompt,
                                .n_ids = op->n};
        for (uint32_t i = 0; i < op->n; i++)
            s->id[i] = id_of(op->prompt, i);
        begin_with(m, op->slot);
        see(m, op->owner, op->request);
        return ATTN_OK;
    case OP_FORK:
        st = birth(m, op, op->to_slot, &is_again);
        if (st != ATTN_OK || is_again)
            return st;
        for (uint32_t l = 0; l < M_LAYERS; l++)
            if (s->len[l] < op->n)
                return ATTN_EINVAL;
        if (op->n > M_KEPT_BLOCKS * M_BLOCK_TOKENS && first_seen(op->n) < s->hole)
            return ATTN_EINVAL;
        n_outstanding(m, op->slot, &copies);
        if (copies > 0 || n_away(s) > 0)
            return ATTN_EOVERLOAD;
        *to = *s;
        to->owner = op->owner;
        to->epoch = m->ended + 1;
        to->request = op->request;
        see(m, op->owner, op->request);
        to->n_blocks = blocks_of(op->n);
        to->hole = op->n <= M_KEPT_BLOCKS * M_BLOCK_TOKENS ? 0 : s->hole;
        memset(to->latest, 0, sizeof to->latest);
        for (uint32_t l = 0; l < M_LAYERS; l++)
            to->len[l] = op->n;
        to->n_ids = to->n_ids < op->n ? to->n_ids : op->n;
        look_from(m, to, op->n / M_BLOCK_TOKENS);
        return ATTN_OK;
    case OP_TRUNCATE:
        if (op->n > longest(s))
            return ATTN_EINVAL;
        if (n_outstanding(m, op->slot, &copies) > 0)
            return ATTN_EOVERLOAD;
        if (op->n > M_KEPT_BLOCKS * M_BLOCK_TOKENS && first_seen(op->n) < s->hole)
            return ATTN_EINVAL;
        for (uint32_t l = 0; l < M_LAYERS; l++)
            s->latest[l] = s->latest[l] > op->n ? op->n : s->latest[l];
        for (uint32_t l = 0; l < M_LAYERS; l++)
            s->len[l] = s->len[l] > op->n ? op->n : s->len[l];
        s->epoch++;
        s->request = op->request;
        s->n_ids = s->n_ids < op->n ? s->n_ids : op->n;
        look_from(m, s, op->n / M_BLOCK_TOKENS);
        trim(m, op->slot);
        if (op->n <= M_KEPT_BLOCKS * M_BLOCK_TOKENS)
            s->hole = 0;
        return ATTN_OK;
    case OP_TOKENS:
        if (op->n == 0 || op->pos > s->n_ids || op->pos + op->n > M_TOKENS)
            return ATTN_EINVAL;
        for (uint32_t i = op->pos; i < op->pos + op->n && i < s->n_ids; i++)
            if (s->id[i] != id_of(op->prompt, i))
                return ATTN_EINVAL;
        if (op->pos + op->n <= s->n_ids)
            return ATTN_OK;
        for (uint32_t i = s->n_ids; i < op->pos + op->n; i++)
            s->id[i] = id_of(op->prompt, i);
        s->n_ids = op->pos + op->n;
        if (is_quiet(m, op->slot))
            publish(m, op->slot);
        return ATTN_OK;
    case OP_CLOSE:
        m->ended = s->epoch > m->ended ? s->epoch : m->ended;
        for (uint32_t l = 0; l < M_LAYERS; l++)
            let_go_of_copied(m, &m->pending[op->slot][l]);
        memset(m->pending[op->slot], 0, sizeof m->pending[op->slot]);
        while (s->n_blocks > 0)
            entry_goes(m, op->slot, s->n_blocks - 1);
        m->move.is_closed |= m->move.slot == op->slot;
        s->is_open = false;
        return ATTN_OK;
    case OP_ADOPT:
        if (is_repeat(s, op))
            return ATTN_OK;
        if (is_seen(m, op->owner, op->request))
            return ATTN_ESTALE;
        s->epoch++;
        s->owner = op->owner;
        s->request = op->request;
        see(m, op->owner, op->request);
        return ATTN_OK;
    case OP_RESERVE:
        return apply_reserve(m, op);
    case OP_COMMIT:
        for (uint32_t i = p->pos; i < p->pos + p->n; i++)
            if (i >= s->len[op->layer])
                s->token[op->layer][i] = value_of(p->value_seed, op->layer, i);
        if (p->pos + p->n > s->len[op->layer])
            s->len[op->layer] = p->pos + p->n;
        s->latest[op->layer] = p->pos;
        let_go_of_copied(m, p);
        *p = (struct model_pending){0};
        trim(m, op->slot);
        if (is_quiet(m, op->slot))
            publish(m, op->slot);
        return ATTN_OK;
    case OP_CANCEL:
        cancel(m, op->slot, op->layer);
        if (is_quiet(m, op->slot))
            publish(m, op->slot);
        return ATTN_OK;
    case OP_RECOVER:
        model_recover(m);
        return ATTN_OK;
    case OP_UNSEEN:
        if (is_quiet(m, op->slot) && n_away(s) == 0)
            free_unseen(m, op->slot);
        return ATTN_OK;
    case OP_FREE_TO:
        return apply_free_to(m, op);
    case OP_RESIZE:
        return apply_resize(m, op->n);
    case OP_MOVE_OUT:
    case OP_MOVE_IN:
    case OP_MOVE_END: /* model_learn says what came of it */
        return ATTN_OK;
    case OP_N_KINDS:
        break;
    }
    return ATTN_EINTERNAL;
}

attn_status model_apply(struct model *m, const struct op *op)
{
    attn_status st = apply(m, op);
    if (st == ATTN_OK && op->request > m->last_request)
        m->last_request = op->request;
    return st;
}

static bool is_as_it_was(struct model *m, uint32_t i)
{
    const struct model_move *v = &m->move;
    const struct model_seq *s = &m->seq[v->slot];
    uint32_t k = v->index[i];
    return !v->is_closed && !v->is_gone[i] && has_block(s, k) && s->block[k] == v->block[i] &&
           references(m, v->block[i]) == 2 && is_quiet(m, v->slot);
}

static const char *learn_begin(struct model *m, const struct op *op)
{
    struct model_move *v = &m->move;
    struct model_seq *s = &m->seq[op->slot];
    if (moving == NULL)
        return "";
    *v = (struct model_move){.is_in = moving->is_in, .slot = op->slot};
    for (uint32_t i = 0; i < moving->n; i++) {
        uint32_t k = moving->entries[i].index;
        if (!holds_entry(s, k) || s->is_away[k] != v->is_in ||
            (!v->is_in && (references(m, s->block[k]) != 1 || !is_quiet(m, op->slot))))
            return "an entry moves that may not";
        v->index[i] = k;
        v->block[i] = v->is_in ? block_new(m) : s->block[k];
        v->is_under_way = true; /* it holds it */
        v->n = i + 1;
    }
    return "";
}

static const char *learn_end(struct model *m, struct kv *kv)
{
    struct model_move *v = &m->move;
    struct model_seq *s = &m->seq[v->slot];
    struct kv_seq_info info = {0};
    kv_seq_id id;
    if (!v->is_closed && kv_seq_find(kv, v->slot / M_NAMES, v->slot % M_NAMES, &id) == ATTN_OK)
        kv_seq_info(kv, id, &info);
    for (uint32_t i = 0; i < v->n; i++) {
        uint32_t k = v->index[i];
        bool is_there = k < info.n_blocks && holds_entry(s, k) && !v->is_gone[i];
        bool is_away = is_there && kv_is_place(info.block_table[k]);
        if (v->is_in && is_there && s->is_away[k] && !is_away) {
            s->is_away[k] = false;
            s->block[k] = v->block[i];
            m->n_in++;
        } else if (!v->is_in && is_away && !s->is_away[k]) {
            if (!is_as_it_was(m, i))
                return "an entry went that may not";
            struct model_published *e = published_block(m, s->block[k]);
            look_from(m, s, k);
            if (e != NULL)
                *e = (struct model_published){0};
            s->is_away[k] = true;
            m->n_out++;
        }
        uint64_t block = v->block[i];
        v->block[i] = 0;
        let_go(m, block);
    }
    *v = (struct model_move){0};
    return "";
}

const char *model_learn(struct model *m, struct kv *kv, const struct op *op)
{
    if (op->kind == OP_MOVE_OUT || op->kind == OP_MOVE_IN)
        return learn_begin(m, op);
    return op->kind == OP_MOVE_END ? learn_end(m, kv) : "";
}

void model_recover(struct model *m)
{
    m->move = (struct model_move){0};
    for (uint32_t s = 0; s < M_SLOTS; s++) /* whatever made its epoch */
        if (m->seq[s].is_open)
            see(m, m->seq[s].owner, m->seq[s].request);
    for (uint32_t s = 0; s < M_SLOTS; s++)
        for (uint32_t l = 0; l < M_LAYERS; l++)
            if (m->pending[s][l].is_outstanding)
                cancel(m, s, l);
    for (uint32_t s = 0; s < M_SLOTS; s++) {
        m->seq[s].n_looked_at = 0, m->seq[s].parent = 0;
        memset(m->seq[s].latest, 0, sizeof m->seq[s].latest);
    }
}

static kv_seq_id seq_of(struct kv *kv, uint32_t slot)
{
    kv_seq_id id = {UINT32_MAX};
    kv_seq_find(kv, slot / M_NAMES, slot % M_NAMES, &id);
    return id;
}

/* The bytes go at once; what else happens until the end may not change them. */
static void move_bytes(void)
{
    for (uint32_t i = 0; moving != NULL && i < moving->n; i++) {
        uint32_t block = moving->entries[i].block, page = moving->entries[i].page;
        if (moving->is_in)
            memcpy(model_device->cell[block], model_device->page[page],
                   sizeof model_device->cell[0]);
        else
            memcpy(model_device->page[page], model_device->cell[block],
                   sizeof model_device->cell[0]);
    }
}

/* Some of it has failed, where good has no bit for it. */
static void move_end(struct kv *kv, uint32_t good, struct kv_effects *fx)
{
    for (uint32_t i = 0; moving != NULL && i < moving->n; i++)
        moving->entries[i].is_good = good >> i & 1;
    if (moving != NULL && moving->is_in)
        kv_idle_in_end(kv, moving, fx);
    else if (moving != NULL)
        kv_idle_out_end(kv, moving);
    moving = NULL;
}

struct device *model_resized;
uint32_t model_n_moved;

static attn_status kv_resize(struct kv *kv, kv_pool_id pool, uint32_t n, struct kv_effects *fx)
{
    struct kv_pool_spec spec;
    uint32_t n_free;
    struct kv_shrink s;
    kv_pool_info(kv, pool, &spec, &n_free);
    if (n >= spec.n_blocks)
        return n == spec.n_blocks ? ATTN_OK : kv_pool_grow(kv, pool, n);
    attn_status st = kv_pool_shrink_begin(kv, pool, n, &s);
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 0; model_resized != NULL && i < s.n_copies; i++)
        memcpy(model_resized->cell[s.copies[i].dst], model_resized->cell[s.copies[i].src],
               sizeof model_resized->cell[0]);
    kv_pool_shrink_end(kv, &s);
    model_n_moved += s.n_copies;
    for (uint32_t i = 0; i < s.n_patches; i++)
        fx->patches[fx->n_patches++] = s.patches[i];
    kv_shrink_fini(&s);
    return ATTN_OK;
}

attn_status model_kv_apply(struct kv *kv, const struct op *op, struct test_fx *t,
                           uint32_t mirror[M_SEQUENCES][M_ROW])
{
    kv_seq_id id = seq_of(kv, op->slot), made;
    kv_pool_id pool;
    uint32_t epoch, n_dropped;
    attn_status st = kv_pool_find(kv, 0, "model", &pool);
    struct kv_effects *fx = &t->fx;
    uint32_t ids[M_TOKENS + 8];
    for (uint32_t i = 0; i < M_TOKENS + 8; i++)
        ids[i] = id_of(op->prompt, i);
    struct kv_tokens tokens = {.ids = ids, .n = op->n, .adapter = op->adapter};
    switch (op->kind) {
    case OP_OPEN:
        st = kv_seq_open_with(kv, op->slot / M_NAMES, op->slot % M_NAMES, pool, op->owner,
                              op->request, &tokens, fx, &made);
        break;
    case OP_TOKENS:
        st = kv_seq_tokens(kv, id, op->pos, ids + (op->pos < M_TOKENS ? op->pos : 0), op->n);
        break;
    case OP_FORK:
        st = kv_seq_fork(kv, id, op->to_slot % M_NAMES, op->n, op->owner, op->request, &made);
        break;
    case OP_TRUNCATE:
        st = kv_seq_truncate(kv, id, op->n, op->request, &epoch);
        break;
    case OP_CLOSE:
        kv_seq_close(kv, id);
        break;
    case OP_ADOPT:
        st = kv_seq_adopt(kv, id, op->owner, op->request, &epoch);
        break;
    case OP_RESERVE:
        st = op->is_copied ? kv_copy_reserve(kv, id, op->layer, op->pos, op->n, fx)
                           : kv_append_reserve(kv, id, op->layer, op->pos, op->n, fx);
        break;
    case OP_FREE_TO:
        st = kv_seq_free_to(kv, id, op->pos, op->n, fx);
        break;
    case OP_COMMIT:
        kv_append_commit(kv, id, op->layer, op->pos, op->n);
        break;
    case OP_CANCEL:
        st = kv_append_cancel(kv, id, op->layer, op->pos, op->n, fx);
        break;
    case OP_MOVE_OUT:
        moving = kv_idle_out_begin(kv, id, op->n);
        move_bytes();
        st = ATTN_OK;
        break;
    case OP_MOVE_IN:
        moving = kv_idle_in_begin(kv, id, op->n);
        move_bytes();
        st = ATTN_OK;
        break;
    case OP_MOVE_END:
        move_end(kv, op->will_commit ? UINT32_MAX : op->value_seed, fx);
        st = ATTN_OK;
        break;
    case OP_RECOVER:
        move_end(kv, 0, fx);
        st = kv_recover(kv, &n_dropped);
        if (st == ATTN_OK && n_dropped > 0)
            st = ATTN_EINTERNAL;
        break;
    case OP_UNSEEN:
        kv_seq_free_unseen(kv, id);
        st = ATTN_OK;
        break;
    case OP_RESIZE:
        st = kv_resize(kv, pool, op->n, fx);
        break;
    case OP_N_KINDS:
        break;
    }
    for (uint32_t i = 0; mirror != NULL && i < fx->n_patches; i++)
        mirror[fx->patches[i].row][fx->patches[i].index] = fx->patches[i].block;
    return st;
}

void model_kv_settle(struct kv *kv, kv_seq_id seq, uint32_t mirror[M_SEQUENCES][M_ROW])
{
    struct test_fx t;
    test_fx_reset(&t);
    assert_status(kv, ATTN_OK, kv_seq_settle(kv, seq, &t.fx));
    for (uint32_t i = 0; i < t.fx.n_patches; i++)
        mirror[t.patches[i].row][t.patches[i].index] = t.patches[i].block;
}

void model_device_run(struct device *d, struct kv *kv, const struct model *m, const struct op *op,
                      const struct test_fx *t)
{
    const struct model_seq *s = &m->seq[op->slot];
    struct kv_seq_info info;
    kv_seq_info(kv, seq_of(kv, op->slot), &info);
    /* A batch that will fail stops somewhere. */
    uint32_t n_copies = t->fx.n_copies, n = op->n;
    if (!op->will_commit) {
        n_copies = op->value_seed % (n_copies + 1);
        n = n_copies == t->fx.n_copies ? op->value_seed % (n + 1) : 0;
    }
    for (uint32_t i = 0; i < n_copies; i++)
        memcpy(d->cell[t->copies[i].dst], d->cell[t->copies[i].src], sizeof d->cell[0]);
    for (uint32_t i = op->pos; i < op->pos + n; i++)
        d->cell[info.block_table[i / M_BLOCK_TOKENS]][op->layer][i % M_BLOCK_TOKENS] =
            i < s->len[op->layer] ? s->token[op->layer][i] : value_of(op->value_seed, op->layer, i);
}

static uint32_t below(uint64_t *random, uint32_t n)
{
    *random = *random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((*random >> 33) % n);
}

struct op model_op(const struct model *m, uint64_t *random)
{
    /* By kind, of 169, and of windows and idle memory; a draw that makes no sense is drawn
     * again. */
    static const uint8_t weight[OP_N_KINDS] = {12,
                                               12,
                                               2,
                                               5,
                                               2,
                                               9,
                                               34,
                                               67,
                                               21,
                                               1,
                                               M_WINDOW > 0 ? 8 : 0,
                                               M_WINDOW > 0 ? 3 : 0,
                                               4,
                                               M_PAGES > 0 ? 24 : 0,
                                               M_PAGES > 0 ? 24 : 0,
                                               M_PAGES > 0 ? 24 : 0};
    for (;;) {
        struct op op = {.owner = below(random, M_OWNERS + 1),
                        .request = m->last_request + 1,
                        .slot = below(random, M_SLOTS),
                        .layer = below(random, M_LAYERS),
                        .value_seed = below(random, 1u << 31),
                        .will_commit = below(random, 4) > 0};
        if (op.owner == M_OWNERS)
            op.owner = KV_NO_OWNER;
        if (below(random, 8) == 0) /* a repeat, or an old one of another owner */
            op.request -=
                below(random, (uint32_t)(m->last_request < 20 ? m->last_request + 1 : 20));
        uint32_t r =
            below(random, 169u + weight[OP_UNSEEN] + weight[OP_FREE_TO] + 3u * weight[OP_MOVE_END]);
        op.prompt = below(random, 3);
        op.adapter = below(random, 8) == 0;
        while (r >= weight[op.kind])
            r -= weight[op.kind++];
        bool shortens = op.kind == OP_CLOSE || op.kind == OP_TRUNCATE || op.kind == OP_RECOVER;
        if (M_WINDOW > 0 && shortens && below(random, 6) > 0)
            continue; /* so that sequences outgrow their window */
        const struct model_seq *s = &m->seq[op.slot];
        const struct model_pending *p = &m->pending[op.slot][op.layer];
        op.to_slot = op.slot / M_NAMES * M_NAMES + below(random, M_NAMES);
        if (op.kind == OP_FORK && m->seq[op.to_slot].is_open && below(random, 4) > 0)
            continue; /* mostly a free name */
        if (op.kind == OP_OPEN && m->seq[op.slot].is_open && below(random, 4) > 0)
            continue;
        if (op.kind == OP_OPEN)
            op.n = below(random, 8) > 0 ? below(random, M_TOKENS + 2) : 0;
        if (op.kind == OP_RESIZE) {
            op.n = m->n_less > 0 && below(random, 4) > 0 ? M_BLOCKS + (below(random, 8) == 0)
                   : below(random, 8) == 0               ? below(random, M_BLOCKS)
                                                         : M_BLOCKS - below(random, 6);
            bool is_quiet_now = true;
            for (uint32_t slot = 0; slot < M_SLOTS; slot++)
                is_quiet_now &= is_quiet(m, slot);
            if (op.n < n_blocks(m) && !is_quiet_now && below(random, 8) > 0)
                continue;
        }
        if (op.kind == OP_OPEN || op.kind == OP_RECOVER || op.kind == OP_RESIZE)
            return op;
        if (op.kind >= OP_MOVE_OUT && (op.kind == OP_MOVE_END) != m->move.is_under_way)
            continue;
        if (op.kind == OP_MOVE_END)
            return op;
        if (!s->is_open)
            continue;
        uint32_t len = s->len[op.layer];
        switch (op.kind) {
        case OP_TOKENS:
            op.prompt = below(random, 6) > 0 ? s->prompt : op.prompt;
            op.pos = below(random, 3) > 0 ? s->n_ids : below(random, s->n_ids + 2);
            op.n = below(random, 12);
            return op;
        case OP_RESERVE:
            if (p->is_outstanding)
                continue;
            if (M_WINDOW > 0 && below(random, 4) > 0 && len > s->len[(op.layer + 1) % M_LAYERS])
                continue; /* mostly the layer that is behind: windows move with the last one */
            op.pos = below(random, 3) > 0 ? len : below(random, len + 2);
            op.n = below(random, 12) > 0 ? 1 + below(random, 6) : below(random, M_TOKENS + 4);
            op.is_copied = M_WINDOW > 0 && below(random, 3) == 0;
            return op;
        case OP_COMMIT:
        case OP_CANCEL:
            if (!p->is_outstanding || p->will_commit != (op.kind == OP_COMMIT))
                continue;
            op.pos = p->pos;
            op.n = p->n;
            return op;
        case OP_UNSEEN:
            return op;
        case OP_FREE_TO:
            op.pos = below(random, 12) > 0 ? M_KEPT_BLOCKS : below(random, 3);
            op.n = below(random, M_ROW + 2);
            return op;
        case OP_MOVE_OUT:
        case OP_MOVE_IN:
            op.n = 1 + below(random, M_ROW);
            if (!s->is_open || (op.kind == OP_MOVE_IN && n_away(s) == 0))
                continue;
            return op;
        default:
            op.n = below(random, len + 2);
            for (uint32_t l = 0; op.kind == OP_FORK && l < M_LAYERS; l++)
                if (s->len[l] < op.n && below(random, 8) > 0)
                    op.n = s->len[l]; /* mostly one that every layer has */
            return op;
        }
    }
}

const char *op_text(const struct op *op)
{
    static const char *const name[] = {
        "open",   "fork",    "truncate", "close",   "adopt",  "tokens", "reserve", "commit",
        "cancel", "recover", "unseen",   "free to", "resize", "out",    "in",      "end"};
    static char text[160];
    snprintf(text, sizeof text,
             "%s slot %u to %u layer %u pos %u n %u prompt %u owner %u request %u", name[op->kind],
             op->slot, op->to_slot, op->layer, op->pos, op->n, op->prompt, op->owner,
             (unsigned)op->request);
    return text;
}

static char difference[256];

#define DIFFER(...) (snprintf(difference, sizeof difference, __VA_ARGS__), difference)

/* Two tables name the same block exactly where the model's do. */
static const char *sharing_difference(struct kv *kv, const struct model *m)
{
    uint32_t block[M_SLOTS * M_ROW], n = 0;
    uint64_t expected[M_SLOTS * M_ROW];
    for (uint32_t slot = 0; slot < M_SLOTS; slot++) {
        struct kv_seq_info info;
        kv_seq_info(kv, seq_of(kv, slot), &info);
        for (uint32_t i = 0; i < info.n_blocks; i++) {
            if (!has_block(&m->seq[slot], i))
                continue;
            block[n] = info.block_table[i];
            expected[n] = m->seq[slot].block[i];
            for (uint32_t k = 0; k < n; k++)
                if ((block[k] == block[n]) != (expected[k] == expected[n]))
                    return DIFFER("slot %u entry %u: block %u, shared otherwise than the model's",
                                  slot, i, block[n]);
            n++;
        }
    }
    return "";
}

typedef const uint32_t (*cells)[M_BLOCK_TOKENS];
static cells cell_of(const struct device *d, uint32_t entry)
{
    return kv_is_place(entry) ? d->page[entry & ~KV_PLACE] : d->cell[entry];
}

static const char *content_difference(const struct kv_seq_info *info, const struct model *m,
                                      uint32_t slot, const struct device *d)
{
    const struct model_seq *s = &m->seq[slot];
    for (uint32_t l = 0; l < M_LAYERS; l++)
        if (m->pending[slot][l].n_copies > 0 && !m->pending[slot][l].will_commit)
            return ""; /* its copies may be missing until it is cancelled */
    for (uint32_t l = 0; l < M_LAYERS; l++)
        for (uint32_t i = 0; i < s->len[l]; i++)
            if (holds_entry(s, i / M_BLOCK_TOKENS) &&
                cell_of(d, info->block_table[i / M_BLOCK_TOKENS])[l][i % M_BLOCK_TOKENS] !=
                    s->token[l][i])
                return DIFFER("slot %u layer %u: token %u is not what was committed", slot, l, i);
    return "";
}

const char *model_visible_difference(struct kv *kv, const struct model *m, const struct device *d)
{
    struct kv_stats stats;
    kv_stats_read(kv, &stats);
    if (stats.blocks_total != n_blocks(m))
        return DIFFER("the pool has %u blocks, not %u", (unsigned)stats.blocks_total, n_blocks(m));
    for (uint32_t slot = 0; slot < M_SLOTS; slot++) {
        const struct model_seq *s = &m->seq[slot];
        kv_seq_id id = seq_of(kv, slot);
        if ((id.index != UINT32_MAX) != s->is_open)
            return DIFFER("slot %u: %s", slot, s->is_open ? "missing" : "open");
        if (!s->is_open)
            continue;
        struct kv_seq_info i;
        kv_seq_info(kv, id, &i);
        if (i.epoch != s->epoch || i.owner != s->owner || i.name != slot % M_NAMES ||
            i.tenant != slot / M_NAMES)
            return DIFFER("slot %u: epoch %u owner %u, not %u and %u", slot, i.epoch, i.owner,
                          s->epoch, s->owner);
        for (uint32_t l = 0; l < M_LAYERS; l++)
            if (i.layer_len[l] != s->len[l])
                return DIFFER("slot %u layer %u: %u tokens, not %u", slot, l, i.layer_len[l],
                              s->len[l]);
        if (i.n_ids != s->n_ids || i.adapter != s->adapter)
            return DIFFER("slot %u: %u ids, adapter %u, not %u and %u", slot, i.n_ids,
                          (unsigned)i.adapter, s->n_ids, (unsigned)s->adapter);
        if (i.n_blocks != s->n_blocks)
            return DIFFER("slot %u: %u blocks, not %u", slot, i.n_blocks, s->n_blocks);
        if (i.hole_past != s->hole)
            return DIFFER("slot %u: the hole ends at %u, not %u", slot, i.hole_past, s->hole);
        const char *diff = content_difference(&i, m, slot, d);
        if (diff[0] != '\0')
            return diff;
    }
    return "";
}

const char *model_difference(struct kv *kv, const struct model *m, const struct device *d)
{
    const char *diff = model_visible_difference(kv, m, d);
    if (diff[0] != '\0')
        return diff;
    struct kv_stats stats;
    kv_stats_read(kv, &stats);
    uint32_t n_tiered = 0;
    for (uint32_t slot = 0; slot < M_SLOTS; slot++)
        n_tiered += n_away(&m->seq[slot]);
    if (stats.blocks_tiered != n_tiered)
        return DIFFER("stats: %u blocks tiered, not %u", (unsigned)stats.blocks_tiered, n_tiered);
    if (stats.blocks_used != n_used(m) || stats.sequences != n_open(m))
        return DIFFER("stats: %u blocks used, %u sequences, not %u and %u",
                      (unsigned)stats.blocks_used, (unsigned)stats.sequences, n_used(m), n_open(m));
    return sharing_difference(kv, m);
}

static bool is_of(const struct model *m, const struct model_published *e)
{
    for (uint32_t i = 0; i < M_BLOCKS; i++)
        if (m->published[i].serial == e->serial)
            return true;
    return false;
}

/* Whether m has this published block, and its cells are those it was published with. */
static bool holds(const struct model *m, const struct kv_published_rec *r, const uint32_t *id,
                  const uint32_t cell[M_LAYERS][M_BLOCK_TOKENS])
{
    for (uint32_t i = 0; i < M_BLOCKS; i++) {
        const struct model_published *e = &m->published[i];
        if (e->serial != 0 && e->tenant == r->tenant && e->adapter == r->adapter &&
            e->index == r->index && memcmp(e->id, id, sizeof e->id) == 0 &&
            memcmp(e->token, cell, sizeof e->token) == 0)
            return true;
    }
    return false;
}

const char *model_published_difference(struct kv *kv, const struct model *a, const struct model *b,
                                       const struct device *d)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, 0);
    uint32_t n = 0, n_both = 0, n_a = n_published(a), n_b = n_published(b);
    for (uint32_t block = 0; block < M_BLOCKS; block++) {
        if (!kv_is_published(kv, p, block))
            continue;
        const struct kv_published_rec *r = kv_published(kv, p, block);
        const uint32_t *id = kv_published_ids(kv, p, block);
        bool is_again = false; /* a kill has left it in two blocks, of which one was to be it */
        for (uint32_t i = 0; i < block; i++)
            is_again |= kv_is_published(kv, p, i) && kv_published(kv, p, i)->serial == r->serial;
        n += !is_again;
        if (!holds(a, r, id, d->cell[block]) && !holds(b, r, id, d->cell[block]))
            return DIFFER("block %u is published as entry %u of tenant %u, or is not what was",
                          block, r->index, r->tenant);
    }
    for (uint32_t i = 0; i < M_BLOCKS; i++)
        n_both += a->published[i].serial != 0 && is_of(b, &a->published[i]);
    if (n < n_both || n > (n_a > n_b ? n_a : n_b))
        return DIFFER("%u blocks are published, not %u to %u", n, n_both, n_a > n_b ? n_a : n_b);
    return "";
}
