/* model_draw.c: draws random operations, and prints an operation in words.
 *
 * Operations are drawn until one makes sense for the model's state, including some that the cache
 * has to refuse. A seed gives the same operations with every compiler: no two draws are in an
 * expression whose order of evaluation the compiler chooses.
 */
#include "tests/cache/model_internal.h"
#include "tests/random.h"

static enum op_kind draw_kind(uint64_t *random)
{
    static const uint8_t weight[OP_N_KINDS] = {[OP_OPEN] = 12,
                                               [OP_FORK] = 12,
                                               [OP_TRUNCATE] = 2,
                                               [OP_CLOSE] = 5,
                                               [OP_ADOPT] = 2,
                                               [OP_TOKENS] = 9,
                                               [OP_RESERVE] = 34,
                                               [OP_TREE] = M_TREES,
                                               [OP_PATH] = M_TREES,
                                               [OP_COMMIT] = 67,
                                               [OP_CANCEL] = 21,
                                               [OP_RECOVER] = 1,
                                               [OP_UNSEEN] = M_WINDOW > 0 ? 8 : 0,
                                               [OP_FREE_TO] = M_WINDOW > 0 ? 3 : 0,
                                               [OP_RESIZE] = 4,
                                               [OP_RETAIN] = M_RETAINS,
                                               [OP_SET_ASIDE] = M_RESERVES,
                                               [OP_MOVE_OUT] = M_PAGES > 0 ? 24 : 0,
                                               [OP_MOVE_IN] = M_PAGES > 0 ? 30 : 0,
                                               [OP_MOVE_END] = M_PAGES > 0 ? 24 : 0,
                                               [OP_NOTE] = M_PAGES > 0 && M_WINDOW > 0 ? 2 : 5};
    uint32_t total = 0;
    for (uint32_t i = 0; i < OP_N_KINDS; i++)
        total += weight[i];
    uint32_t r = random_below(random, total);
    enum op_kind kind = 0;
    while (r >= weight[kind])
        r -= weight[kind++];
    return kind;
}

/* What operations of all kinds have. */
static struct op draw_any(const struct model *m, uint64_t *random)
{
    struct op op = {.request = m->last_request + 1};
    op.slot = random_below(random, M_SLOTS);
    op.layer = random_below(random, M_LAYERS);
    op.owner = random_below(random, M_OWNERS + 1);
    op.value_seed = random_below(random, 1u << 31);
    op.will_commit = random_below(random, 4) > 0;
    if (op.owner == M_OWNERS)
        op.owner = KV_NO_OWNER;
    if (random_below(random, 8) == 0) /* a repeat, or an old one of another owner */
        op.request -=
            random_below(random, (uint32_t)(m->last_request < 20 ? m->last_request + 1 : 20));
    op.kind = draw_kind(random);
    op.prompt = random_below(random, 3);
    op.adapter = random_below(random, 8) == 0;
    return op;
}

static bool draw_size(const struct model *m, struct op *op, uint64_t *random)
{
    if (m->n_less > 0 && random_below(random, 4) > 0)
        op->n = M_BLOCKS + (random_below(random, 8) == 0);
    else if (random_below(random, 8) == 0)
        op->n = random_below(random, M_BLOCKS);
    else
        op->n = M_BLOCKS - random_below(random, 6);
    return op->n >= model_n_blocks(m) || model_are_all_quiet(m) || random_below(random, 8) == 0;
}

static bool draw_reserve(const struct model *m, struct op *op, uint64_t *random)
{
    const struct model_seq *s = &m->seq[op->slot];
    uint32_t len = s->len[op->layer];
    if (m->pending[op->slot][op->layer].is_outstanding)
        return false;
    if (M_WINDOW > 0 && random_below(random, 4) > 0 && len > s->len[(op->layer + 1) % M_LAYERS])
        return false; /* mostly the layer that is behind: windows move with the last one */
    op->pos = random_below(random, 3) > 0 ? len : random_below(random, len + 2);
    op->n = random_below(random, 12) > 0 ? 1 + random_below(random, 6)
                                         : random_below(random, M_TOKENS + 4);
    op->is_copied = M_WINDOW > 0 && random_below(random, 3) == 0;
    return true;
}

static bool draw_tree(const struct model *m, struct op *op, uint64_t *random)
{
    const struct model_seq *s = &m->seq[op->slot];
    if (m->pending[op->slot][op->layer].is_outstanding)
        return false;
    bool is_there = s->n_nodes > 0 && random_below(random, 10) > 0;
    op->pos = is_there ? s->tree_pos : s->len[op->layer] + (random_below(random, 12) == 0);
    op->tree_seed = random_below(random, 1u << 16);
    if (is_there)
        op->tree_seed = s->tree_seed;
    op->n = is_there ? s->n_nodes : 1 + random_below(random, 7);
    return s->n_nodes > 0 || s->len[0] == s->len[1] || random_below(random, 8) == 0;
}

/* The rest of an operation on an open sequence. */
static bool draw_of_sequence(const struct model *m, struct op *op, uint64_t *random)
{
    const struct model_seq *s = &m->seq[op->slot];
    const struct model_pending *p = &m->pending[op->slot][op->layer];
    switch (op->kind) {
    case OP_TOKENS:
        op->prompt = random_below(random, 6) > 0 ? s->prompt : op->prompt;
        op->pos = random_below(random, 3) > 0 ? s->n_ids : random_below(random, s->n_ids + 2);
        op->n = random_below(random, 12);
        return true;
    case OP_RESERVE:
        return draw_reserve(m, op, random);
    case OP_TREE:
        return draw_tree(m, op, random);
    case OP_PATH:
        op->tree_seed = s->tree_seed;
        op->pos = random_below(random, s->n_nodes + 1 + (random_below(random, 6) == 0));
        return s->n_nodes > 0 || random_below(random, 40) == 0;
    case OP_COMMIT:
    case OP_CANCEL:
        op->pos = p->pos;
        op->n = p->n;
        return p->is_outstanding && p->will_commit == (op->kind == OP_COMMIT);
    case OP_UNSEEN:
        return true;
    case OP_FREE_TO:
        op->pos = random_below(random, 12) > 0 ? M_KEPT_BLOCKS : random_below(random, 3);
        op->n = random_below(random, M_ROW + 2);
        return true;
    case OP_RETAIN:
        op->n = random_below(random, 6) == 0;
        return true;
    case OP_NOTE:
        op->n = random_below(random, random_below(random, 16) == 0 ? KV_MAX_NOTE_BYTES + 2 : 80);
        return true;
    case OP_MOVE_OUT:
    case OP_MOVE_IN:
        if (m->move.is_under_way)
            return false;
        op->n = 1 + random_below(random, M_ROW);
        op->listed = random_below(random, 2) == 0 ? M_LISTED | op->value_seed : 0;
        return op->kind == OP_MOVE_OUT || model_n_paged_out(s) > 0;
    default:
        op->n = random_below(random, s->len[op->layer] + 2);
        for (uint32_t l = 0; op->kind == OP_FORK && l < M_LAYERS; l++)
            if (s->len[l] < op->n && random_below(random, 8) > 0)
                op->n = s->len[l]; /* mostly one that every layer has */
        return true;
    }
}

/* The rest of an operation; false: it makes no sense. */
static bool draw_rest(const struct model *m, struct op *op, uint64_t *random)
{
    const struct model_seq *s = &m->seq[op->slot];
    bool shortens = op->kind == OP_CLOSE || op->kind == OP_TRUNCATE || op->kind == OP_RECOVER;
    if (M_WINDOW > 0 && shortens && random_below(random, 6) > 0)
        return false; /* so that sequences outgrow their window */
    op->to_slot = op->slot / M_NAMES * M_NAMES + random_below(random, M_NAMES);
    switch (op->kind) {
    case OP_OPEN:
        if (s->is_open && random_below(random, 4) > 0)
            return false; /* mostly a free name */
        op->n = random_below(random, 8) > 0 ? random_below(random, M_TOKENS + 2) : 0;
        return true;
    case OP_RECOVER:
        return true;
    case OP_RESIZE:
        return draw_size(m, op, random);
    case OP_MOVE_END:
        return m->move.is_under_way;
    case OP_SET_ASIDE:
        op->n = random_below(random, 4) == 0 ? 0 : random_below(random, M_BLOCKS * 2 / 3);
        return true;
    case OP_FORK:
        if (m->seq[op->to_slot].is_open && random_below(random, 4) > 0)
            return false; /* mostly a free name */
        return s->is_open && draw_of_sequence(m, op, random);
    default:
        return s->is_open && draw_of_sequence(m, op, random);
    }
}

struct op model_op(const struct model *m, uint64_t *random)
{
    struct op op;
    do
        op = draw_any(m, random);
    while (!draw_rest(m, &op, random));
    return op;
}

const char *op_text(const struct op *op)
{
    static const char *const name[] = {
        "open",   "fork",   "truncate",  "close",  "adopt",   "tokens", "reserve",
        "tree",   "path",   "commit",    "cancel", "recover", "unseen", "free to",
        "resize", "retain", "set aside", "out",    "in",      "end",    "note"};
    static char text[160];
    snprintf(text, sizeof text,
             "%s slot %u to %u layer %u pos %u n %u prompt %u owner %u request %u", name[op->kind],
             op->slot, op->to_slot, op->layer, op->pos, op->n, op->prompt, op->owner,
             (unsigned)op->request);
    return text;
}
