/* model_apply.c: applies an operation to the model and predicts its status.
 *
 * A refused operation leaves the model as it was. Only the cache knows which blocks a move takes:
 * model_learn (model_check.c) adds that afterwards.
 */
#include "tests/cache/model_internal.h"

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

/* The first entry that a query at pos sees, but for the kept ones. */
static uint32_t first_seen(uint32_t pos)
{
    uint32_t window = M_WINDOW;
    return window == 0 || pos + 1 < window ? 0 : (pos + 1 - window) / M_BLOCK_TOKENS;
}

/* Cut to n tokens it ends within the kept ones, before any hole. */
static bool ends_in_kept(uint32_t n)
{
    return n <= M_KEPT_BLOCKS * M_BLOCK_TOKENS;
}

/* Cut to n tokens, its next query would see what is gone. */
static bool would_see_hole(const struct model_seq *s, uint32_t n)
{
    return !ends_in_kept(n) && first_seen(n) < s->hole;
}

/* Blocks that outstanding reserves of the sequence copy. */
static uint32_t n_copies_outstanding(const struct model *m, uint32_t slot)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < M_LAYERS; l++)
        n += m->pending[slot][l].is_outstanding ? m->pending[slot][l].n_copies : 0;
    return n;
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
    return model_n_open(m) == M_SEQUENCES ? ATTN_EOVERLOAD : ATTN_OK;
}

/* Entry i names idle memory no more: if it is on its way in, it does not come. */
static void entry_leaves_idle(struct model *m, uint32_t slot, uint32_t i)
{
    struct model_move *v = &m->move;
    m->seq[slot].is_paged_out[i] = false;
    for (uint32_t k = 0; v->is_under_way && k < v->n; k++)
        v->is_gone[k] |= v->is_in && v->slot == slot && !v->is_closed && v->index[k] == i;
}

/* The sequence's table ends before entry i from now on. */
static void entry_goes(struct model *m, uint32_t slot, uint32_t i)
{
    struct model_seq *s = &m->seq[slot];
    bool was_held = model_has_block(s, i);
    s->n_blocks = i;
    if (s->is_paged_out[i])
        entry_leaves_idle(m, slot, i);
    if (was_held)
        model_release(m, s->block[i]);
}

static void trim(struct model *m, uint32_t slot)
{
    struct model_seq *s = &m->seq[slot];
    if (!model_is_quiet(m, slot))
        return;
    if (longest(s) <= model_below_tree(s))
        s->n_nodes = 0; /* no layer got any */
    while (s->n_blocks > blocks_of(longest(s)))
        entry_goes(m, slot, s->n_blocks - 1);
}

static void release_copied(struct model *m, struct model_pending *p)
{
    while (p->n_copies > 0) {
        p->n_copies--;
        model_release(m, p->old_block[p->n_copies]);
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

static attn_status apply_open(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    bool is_again;
    attn_status st = birth(m, op, op->slot, &is_again);
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
        s->id[i] = model_id(op->prompt, i);
    model_begin_with(m, op->slot);
    see(m, op->owner, op->request);
    return ATTN_OK;
}

static attn_status apply_fork(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot], *to = &m->seq[op->to_slot];
    bool is_again;
    attn_status st = birth(m, op, op->to_slot, &is_again);
    if (st != ATTN_OK || is_again)
        return st;
    for (uint32_t l = 0; l < M_LAYERS; l++)
        if (s->len[l] < op->n)
            return ATTN_EINVAL;
    if (op->n > model_below_tree(s))
        return ATTN_EINVAL;
    if (would_see_hole(s, op->n))
        return ATTN_EINVAL;
    if (n_copies_outstanding(m, op->slot) > 0 || model_n_paged_out(s) > 0)
        return ATTN_EOVERLOAD;
    if (blocks_of(op->n) > model_n_shareable(m, op->owner))
        return ATTN_ENOBLOCKS;
    *to = *s;
    to->owner = op->owner;
    to->epoch = m->ended + 1;
    to->request = op->request;
    to->n_nodes = 0;
    to->note_bytes = to->note_epoch = 0;
    to->note_request = 0;
    see(m, op->owner, op->request);
    to->n_blocks = blocks_of(op->n);
    to->hole = ends_in_kept(op->n) ? 0 : s->hole;
    memset(to->latest, 0, sizeof to->latest);
    for (uint32_t l = 0; l < M_LAYERS; l++)
        to->len[l] = op->n;
    to->n_ids = to->n_ids < op->n ? to->n_ids : op->n;
    model_look_from(m, to, op->n / M_BLOCK_TOKENS);
    return ATTN_OK;
}

static attn_status apply_truncate(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    if (op->n > longest(s))
        return ATTN_EINVAL;
    if (!model_is_quiet(m, op->slot))
        return ATTN_EOVERLOAD;
    if (op->n > model_below_tree(s) || would_see_hole(s, op->n))
        return ATTN_EINVAL;
    s->n_nodes = 0;
    for (uint32_t l = 0; l < M_LAYERS; l++) {
        s->latest[l] = s->latest[l] > op->n ? op->n : s->latest[l];
        s->len[l] = s->len[l] > op->n ? op->n : s->len[l];
    }
    s->epoch++;
    s->request = op->request;
    s->n_ids = s->n_ids < op->n ? s->n_ids : op->n;
    model_look_from(m, s, op->n / M_BLOCK_TOKENS);
    trim(m, op->slot);
    if (ends_in_kept(op->n))
        s->hole = 0;
    return ATTN_OK;
}

static attn_status apply_close(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    m->ended = s->epoch > m->ended ? s->epoch : m->ended;
    for (uint32_t l = 0; l < M_LAYERS; l++)
        release_copied(m, &m->pending[op->slot][l]);
    memset(m->pending[op->slot], 0, sizeof m->pending[op->slot]);
    while (s->n_blocks > 0)
        entry_goes(m, op->slot, s->n_blocks - 1);
    m->move.is_closed |= m->move.slot == op->slot;
    s->is_open = false;
    return ATTN_OK;
}

static attn_status apply_adopt(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    if (is_repeat(s, op))
        return ATTN_OK;
    if (is_seen(m, op->owner, op->request))
        return ATTN_ESTALE;
    if (model_has_reservations(m) && s->owner != op->owner) {
        struct model then = *m;
        then.seq[op->slot].owner = op->owner;
        if (model_owes(&then) > model_n_blocks(m) && model_owes(&then) > model_owes(m))
            return ATTN_ENOBLOCKS;
    }
    s->epoch++;
    s->owner = op->owner;
    s->request = op->request;
    see(m, op->owner, op->request);
    return ATTN_OK;
}

static attn_status apply_note(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    if (op->n > KV_MAX_NOTE_BYTES)
        return ATTN_EINVAL;
    if (s->note_epoch == s->epoch && op->request <= s->note_request)
        return op->request == s->note_request ? ATTN_OK : ATTN_ESTALE;
    s->note_request = op->request;
    s->note_epoch = s->epoch;
    s->note_bytes = op->n;
    s->note_seed = op->value_seed + op->n;
    return ATTN_OK;
}

static attn_status apply_tokens(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    if (op->n == 0 || op->pos > s->n_ids || op->pos + op->n > M_TOKENS)
        return ATTN_EINVAL;
    for (uint32_t i = op->pos; i < op->pos + op->n && i < s->n_ids; i++)
        if (s->id[i] != model_id(op->prompt, i))
            return ATTN_EINVAL;
    if (op->pos + op->n <= s->n_ids)
        return ATTN_OK;
    for (uint32_t i = s->n_ids; i < op->pos + op->n; i++)
        s->id[i] = model_id(op->prompt, i);
    s->n_ids = op->pos + op->n;
    if (model_is_quiet(m, op->slot))
        model_publish(m, op->slot);
    return ATTN_OK;
}

static attn_status reserve(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    struct model_pending *p = &m->pending[op->slot][op->layer];
    if (op->pos > s->len[op->layer] || op->n == 0 || op->pos + op->n > M_TOKENS ||
        (op->is_copied && op->pos >= s->hole * M_BLOCK_TOKENS ? 0 : first_seen(op->pos) < s->hole))
        return ATTN_EINVAL;
    uint32_t past = blocks_of(op->pos + op->n), n_copies = 0;
    for (uint32_t i = op->pos / M_BLOCK_TOKENS; i < past; i++)
        if (model_holds_entry(s, i) && s->is_paged_out[i])
            return ATTN_EOVERLOAD; /* it would write it */
    uint32_t n_new = past > s->n_blocks ? past - s->n_blocks : 0;
    bool is_shared[M_ROW] = {0};
    for (uint32_t i = op->pos / M_BLOCK_TOKENS; i < past && i < s->n_blocks; i++) {
        is_shared[i] = model_references(m, s->block[i]) > 1;
        n_copies += is_shared[i];
    }
    if (n_copies_outstanding(m, op->slot) > 0 || (n_copies > 0 && !model_is_quiet(m, op->slot)))
        return ATTN_EOVERLOAD;
    if (!model_has_room(m, s->owner, n_new + n_copies))
        return ATTN_ENOBLOCKS;

    struct model_pending q = {.is_outstanding = true,
                              .will_commit = op->will_commit,
                              .pos = op->pos,
                              .n = op->n,
                              .value_seed = op->value_seed};
    for (uint32_t i = op->pos / M_BLOCK_TOKENS; i < past && i < s->n_blocks; i++) {
        struct model_published *e = model_published_block(m, s->block[i]);
        if (e == NULL || is_shared[i])
            continue;
        model_look_from(m, s, i);
        *e = (struct model_published){0};
        m->n_taken_back++;
    }
    for (uint32_t i = 0; i < M_ROW; i++) {
        if (!is_shared[i])
            continue;
        q.index[q.n_copies] = i;
        q.old_block[q.n_copies++] = s->block[i];
        *p = q; /* it holds the old block */
        s->block[i] = model_block_new(m);
    }
    while (s->n_blocks < past) {
        s->block[s->n_blocks] = model_block_new(m);
        s->n_blocks++;
    }
    *p = q;
    return ATTN_OK;
}

static attn_status apply_reserve(struct model *m, const struct op *op)
{
    if (op->pos + op->n > model_below_tree(&m->seq[op->slot]))
        return ATTN_EINVAL;
    return reserve(m, op);
}

static attn_status apply_tree(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    if (op->n == 0)
        return ATTN_EINVAL;
    if (s->n_nodes == 0 && !model_is_quiet(m, op->slot))
        return ATTN_EOVERLOAD;
    if (s->n_nodes == 0 && (longest(s) > op->pos || op->pos != s->len[op->layer]))
        return ATTN_EINVAL;
    if (s->n_nodes > 0 && (s->n_nodes != op->n || s->tree_pos != op->pos))
        return ATTN_EINVAL;
    for (uint32_t i = 0; i < s->n_nodes; i++)
        if (model_parent(s->tree_seed, i) != model_parent(op->tree_seed, i))
            return ATTN_EINVAL;
    attn_status st = reserve(m, op);
    if (st == ATTN_OK) {
        s->n_nodes = op->n;
        s->tree_pos = op->pos;
        s->tree_seed = op->tree_seed;
    }
    return st;
}

/* The blocks of what moves, those of the path's end and before, are replaced. */
static attn_status apply_path(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    struct model_pending *p = &m->pending[op->slot][0]; /* holds old blocks */
    uint32_t path[M_TOKENS], n = op->pos > 0 ? model_path(op->tree_seed, op->pos - 1, path) : 0;
    uint32_t end = s->tree_pos + n, n_stay = 0;
    if (s->n_nodes == 0)
        return ATTN_EINVAL;
    if (!model_is_quiet(m, op->slot) || model_n_paged_out(s) > 0)
        return ATTN_EOVERLOAD;
    for (uint32_t l = 0; l < M_LAYERS && n > 0; l++)
        if (s->len[l] != s->tree_pos + s->n_nodes)
            return ATTN_EINVAL;
    for (uint32_t i = 0; i < n; i++)
        if (path[i] >= s->n_nodes ||
            model_parent(s->tree_seed, path[i]) != (i == 0 ? -1 : (int32_t)path[i - 1]))
            return ATTN_EINVAL;
    while (n_stay < n && path[n_stay] == n_stay)
        n_stay++;
    if (n_stay < n) {
        uint32_t first = (s->tree_pos + n_stay) / M_BLOCK_TOKENS, past = blocks_of(end);
        if (!model_has_room(m, s->owner, past - first))
            return ATTN_ENOBLOCKS;
        p->is_outstanding = true;
        for (uint32_t i = first; i < past; i++) {
            p->index[p->n_copies] = i;
            p->old_block[p->n_copies++] = s->block[i];
            s->block[i] = model_block_new(m);
        }
    }
    for (uint32_t l = 0; l < M_LAYERS; l++) {
        for (uint32_t i = n_stay; i < n; i++)
            s->token[l][s->tree_pos + i] = s->token[l][s->tree_pos + path[i]];
        s->len[l] = s->len[l] > end ? end : s->len[l];
        s->latest[l] = s->latest[l] > end ? end : s->latest[l];
    }
    release_copied(m, p);
    *p = (struct model_pending){0};
    s->n_nodes = 0;
    s->epoch++;
    s->request = op->request;
    s->n_ids = s->n_ids < end ? s->n_ids : end;
    model_look_from(m, s, end / M_BLOCK_TOKENS);
    trim(m, op->slot);
    if (ends_in_kept(end))
        s->hole = 0;
    model_publish(m, op->slot);
    return ATTN_OK;
}

static attn_status apply_commit(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    struct model_pending *p = &m->pending[op->slot][op->layer];
    for (uint32_t i = p->pos; i < p->pos + p->n; i++)
        if (i >= s->len[op->layer])
            s->token[op->layer][i] = model_value(p->value_seed, op->layer, i);
    if (p->pos + p->n > s->len[op->layer])
        s->len[op->layer] = p->pos + p->n;
    s->latest[op->layer] = p->pos;
    release_copied(m, p);
    *p = (struct model_pending){0};
    trim(m, op->slot);
    if (model_is_quiet(m, op->slot))
        model_publish(m, op->slot);
    return ATTN_OK;
}

static attn_status apply_cancel(struct model *m, const struct op *op)
{
    cancel(m, op->slot, op->layer);
    if (model_is_quiet(m, op->slot))
        model_publish(m, op->slot);
    return ATTN_OK;
}

/* Blocks that no query at a layer's latest append or behind it sees. */
static attn_status apply_unseen(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    uint32_t past = M_ROW, first = s->hole > M_KEPT_BLOCKS ? s->hole : M_KEPT_BLOCKS;
    if (!model_is_quiet(m, op->slot))
        return ATTN_OK;
    for (uint32_t l = 0; l < M_LAYERS; l++)
        past = first_seen(s->latest[l]) < past ? first_seen(s->latest[l]) : past;
    if (past <= first)
        return ATTN_OK;
    s->hole = past;
    for (uint32_t i = past; i-- > first; m->n_unseen++)
        if (s->is_paged_out[i])
            entry_leaves_idle(m, op->slot, i);
        else
            model_release(m, s->block[i]);
    return ATTN_OK;
}

static attn_status apply_free_to(struct model *m, const struct op *op)
{
    struct model_seq *s = &m->seq[op->slot];
    uint32_t first = M_KEPT_BLOCKS, past = op->n;
    if (M_WINDOW == 0 || op->pos != first || past <= first || past > M_ROW)
        return ATTN_EINVAL;
    if (!model_is_quiet(m, op->slot) || model_n_paged_out(s) > 0)
        return ATTN_EOVERLOAD;
    if (s->n_nodes > 0)
        return ATTN_EINVAL;
    for (uint32_t l = 0; l < M_LAYERS; l++)
        if (s->len[l] < past * M_BLOCK_TOKENS && s->len[l] != first * M_BLOCK_TOKENS)
            return ATTN_EINVAL;
    uint32_t from = s->hole > first ? s->hole : first;
    s->hole = past > s->hole ? past : s->hole;
    for (uint32_t i = past < s->n_blocks ? past : s->n_blocks; i-- > from;)
        model_release(m, s->block[i]);
    for (uint32_t l = 0; l < M_LAYERS; l++)
        if (s->len[l] < s->hole * M_BLOCK_TOKENS)
            s->len[l] = s->hole * M_BLOCK_TOKENS;
    s->n_blocks = blocks_of(longest(s));
    return ATTN_OK;
}

static attn_status apply_resize(struct model *m, const struct op *op)
{
    bool is_smaller = op->n < model_n_blocks(m);
    if (op->n > M_BLOCKS)
        return ATTN_ENOMEM;
    if (op->n == 0)
        return ATTN_EINVAL;
    if (is_smaller && m->move.is_under_way)
        return ATTN_EOVERLOAD;
    if (is_smaller && !model_has_room(m, KV_NO_OWNER, model_n_blocks(m) - op->n))
        return ATTN_ENOBLOCKS;
    if (is_smaller && !model_are_all_quiet(m))
        return ATTN_EOVERLOAD;
    while (model_make_room(m, op->n + 1))
        ;
    m->n_less = M_BLOCKS - op->n;
    return ATTN_OK;
}

static attn_status apply_retain(struct model *m, const struct op *op)
{
    m->seq[op->slot].said = op->n > 0 ? SAID_PINNED : SAID_UNPINNED;
    model_retain(m, op->slot);
    return ATTN_OK;
}

static attn_status apply_set_aside(struct model *m, const struct op *op)
{
    if (op->owner >= M_OWNERS)
        return ATTN_ENOTFOUND;
    struct model then = *m;
    then.reserved[op->owner] = op->n;
    uint32_t more = model_owes(&then) - model_owes(m);
    bool is_more = op->n > m->reserved[op->owner];
    if (is_more && more > 0 && model_owes(&then) > model_n_blocks(m)) {
        model_drop_lost(m);
        then = *m;
        then.reserved[op->owner] = op->n;
    }
    if (is_more && model_owes(&then) > model_n_blocks(m))
        return ATTN_ENOBLOCKS;
    m->reserved[op->owner] = op->n;
    return ATTN_OK;
}

static attn_status apply(struct model *m, const struct op *op)
{
    switch (op->kind) {
    case OP_OPEN:
        return apply_open(m, op);
    case OP_FORK:
        return apply_fork(m, op);
    case OP_TRUNCATE:
        return apply_truncate(m, op);
    case OP_CLOSE:
        return apply_close(m, op);
    case OP_ADOPT:
        return apply_adopt(m, op);
    case OP_TOKENS:
        return apply_tokens(m, op);
    case OP_RESERVE:
        return apply_reserve(m, op);
    case OP_TREE:
        return apply_tree(m, op);
    case OP_PATH:
        return apply_path(m, op);
    case OP_COMMIT:
        return apply_commit(m, op);
    case OP_CANCEL:
        return apply_cancel(m, op);
    case OP_RECOVER:
        for (uint32_t i = 0; i < m->move.n; i++) { /* it ends, and did nothing */
            uint64_t block = m->move.block[i];
            m->move.block[i] = 0;
            model_release(m, block);
        }
        model_recover(m);
        return ATTN_OK;
    case OP_UNSEEN:
        return apply_unseen(m, op);
    case OP_FREE_TO:
        return apply_free_to(m, op);
    case OP_RESIZE:
        return apply_resize(m, op);
    case OP_NOTE:
        return apply_note(m, op);
    case OP_RETAIN:
        return apply_retain(m, op);
    case OP_SET_ASIDE:
        return apply_set_aside(m, op);
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
