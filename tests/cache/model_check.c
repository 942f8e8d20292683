/* model_check.c: applies an operation to the cache and the simulated device, and compares both with
 * the model.
 *
 * The model cannot know which blocks a move takes: model_learn asks the cache, and checks that
 * these blocks may move.
 */
#include "tests/cache/model_internal.h"

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
                                       .idle_pages = M_PAGES,
                                       .events_kept = 24};
struct device *model_device;
uint32_t model_n_moved;
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
    for (uint32_t i = 0; i < M_OWNERS; i++)
        kv_owner_begin(kv, i, i + 1, 0, "an owner");
    moving = NULL;
    return kv;
}

static kv_seq_id seq_of(struct kv *kv, uint32_t slot)
{
    kv_seq_id id = {UINT32_MAX};
    kv_seq_find(kv, slot / M_NAMES, slot % M_NAMES, &id);
    return id;
}

/* The bytes go at once; what else happens until the end may not change them. */
static void move_begin(struct kv *kv, kv_seq_id id, const struct op *op)
{
    struct device *d = model_device;
    const bool is_in = op->kind == OP_MOVE_IN;
    uint32_t list[M_ROW];
    for (uint32_t i = 0; i < op->n; i++) /* entries may come twice, or not be there */
        list[i] = model_listed(op, i);
    const uint32_t *indices = op->listed != 0 ? list : NULL;
    moving = is_in ? kv_idle_in_begin(kv, id, indices, op->n)
                   : kv_idle_out_begin(kv, id, indices, op->n);
    for (uint32_t i = 0; moving != NULL && i < moving->n; i++) {
        uint32_t block = moving->entries[i].block, page = moving->entries[i].page;
        if (is_in)
            memcpy(d->cell[block], d->page[page], sizeof d->cell[0]);
        else
            memcpy(d->page[page], d->cell[block], sizeof d->cell[0]);
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

static attn_status kv_resize(struct kv *kv, kv_pool_id pool, uint32_t n, struct kv_effects *fx)
{
    struct kv_pool_spec spec;
    uint32_t n_free;
    struct kv_shrink s;
    attn_status st = kv_pool_info(kv, pool, &spec, &n_free);
    if (st != ATTN_OK)
        return st;
    if (n >= spec.n_blocks)
        return n == spec.n_blocks ? ATTN_OK : kv_pool_grow(kv, pool, n);
    st = kv_pool_shrink_begin(kv, pool, n, &s);
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 0; i < s.n_copies; i++)
        memcpy(model_device->cell[s.copies[i].dst], model_device->cell[s.copies[i].src],
               sizeof model_device->cell[0]);
    kv_pool_shrink_end(kv, &s);
    model_n_moved += s.n_copies;
    for (uint32_t i = 0; i < s.n_patches; i++)
        fx->patches[fx->n_patches++] = s.patches[i];
    kv_shrink_fini(&s);
    return ATTN_OK;
}

static attn_status recover(struct kv *kv, struct kv_effects *fx)
{
    uint32_t n_dropped;
    move_end(kv, 0, fx);
    attn_status st = kv_recover(kv, &n_dropped);
    return st == ATTN_OK && n_dropped > 0 ? ATTN_EINTERNAL : st;
}

/* On the simulated device. */
static attn_status tokens_copy(void *user, const struct kv_token_copy *list, uint32_t n)
{
    struct device *d = user;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t l = 0; l < M_LAYERS; l++)
            d->cell[list[i].to_block][l][list[i].to_slot] =
                d->cell[list[i].from_block][l][list[i].from_slot];
    return ATTN_OK;
}

static attn_status tree_reserve(struct kv *kv, kv_seq_id id, const struct op *op,
                                struct kv_effects *fx)
{
    int32_t parents[M_TOKENS];
    for (uint32_t i = 0; i < op->n; i++)
        parents[i] = model_parent(op->tree_seed, i);
    return kv_tree_reserve(kv, id, op->layer, op->pos, parents, op->n, fx);
}

static attn_status tree_commit(struct kv *kv, kv_seq_id id, const struct op *op,
                               struct kv_effects *fx)
{
    const struct kv_token_ops ops = {.user = model_device, .copy = tokens_copy};
    uint32_t path[M_TOKENS], n = op->pos > 0 ? model_path(op->tree_seed, op->pos - 1, path) : 0;
    uint32_t epoch;
    return kv_tree_commit(kv, id, path, n, op->request, &ops, fx, &epoch);
}

static attn_status note_set(struct kv *kv, kv_seq_id id, const struct op *op)
{
    static uint8_t bytes[KV_MAX_NOTE_BYTES + 2];
    for (uint32_t i = 0; i < op->n; i++)
        bytes[i] = model_note_byte(op->value_seed + op->n, i);
    return kv_seq_note(kv, id, op->request, bytes, op->n);
}

static attn_status carry_out(struct kv *kv, const struct op *op, struct kv_effects *fx)
{
    kv_seq_id id = seq_of(kv, op->slot), made;
    kv_pool_id pool = {UINT32_MAX}; /* damage may have taken it */
    uint32_t epoch, ids[M_TOKENS + 8];
    for (uint32_t i = 0; i < M_TOKENS + 8; i++)
        ids[i] = model_id(op->prompt, i);
    struct kv_tokens tokens = {.ids = ids, .n = op->n, .adapter = op->adapter};
    kv_pool_find(kv, 0, "model", &pool);
    switch (op->kind) {
    case OP_OPEN:
        return kv_seq_open_with(kv, op->slot / M_NAMES, op->slot % M_NAMES, pool, op->owner,
                                op->request, &tokens, fx, &made);
    case OP_FORK:
        return kv_seq_fork(kv, id, op->to_slot % M_NAMES, op->n, op->owner, op->request, &made);
    case OP_TRUNCATE:
        return kv_seq_truncate(kv, id, op->n, op->request, &epoch);
    case OP_CLOSE:
        if (op->request % 2 == 0) /* it is said to have moved */
            kv_moved_note(kv, op->slot / M_NAMES, op->slot % M_NAMES, op->slot + 1,
                          &(struct kv_moved){.id = op->slot, .epoch = 1, .url = "tcp://b:1"}, 60);
        kv_seq_close(kv, id);
        return ATTN_OK;
    case OP_ADOPT:
        return kv_seq_adopt(kv, id, op->owner, op->request, &epoch);
    case OP_TOKENS:
        return kv_seq_tokens(kv, id, op->pos, ids + (op->pos < M_TOKENS ? op->pos : 0), op->n);
    case OP_RESERVE:
        return op->is_copied ? kv_copy_reserve(kv, id, op->layer, op->pos, op->n, fx)
                             : kv_append_reserve(kv, id, op->layer, op->pos, op->n, fx);
    case OP_TREE:
        return tree_reserve(kv, id, op, fx);
    case OP_PATH:
        return tree_commit(kv, id, op, fx);
    case OP_COMMIT:
        kv_append_commit(kv, id, op->layer, op->pos, op->n);
        return ATTN_OK;
    case OP_CANCEL:
        return kv_append_cancel(kv, id, op->layer, op->pos, op->n, fx);
    case OP_RECOVER:
        return recover(kv, fx);
    case OP_UNSEEN:
        kv_seq_free_unseen(kv, id);
        return ATTN_OK;
    case OP_FREE_TO:
        return kv_seq_free_to(kv, id, op->pos, op->n, fx);
    case OP_RESIZE:
        return kv_resize(kv, pool, op->n, fx);
    case OP_RETAIN:
        return kv_seq_retain(kv, id, &(struct kv_retention){.is_pinned = op->n}, 1);
    case OP_SET_ASIDE:
        return kv_reserve(kv, op->owner, pool, op->n);
    case OP_MOVE_OUT:
    case OP_MOVE_IN:
        move_begin(kv, id, op);
        return ATTN_OK;
    case OP_MOVE_END:
        move_end(kv, op->will_commit ? UINT32_MAX : op->value_seed, fx);
        return ATTN_OK;
    case OP_NOTE:
        return note_set(kv, id, op);
    case OP_N_KINDS:
        break;
    }
    return ATTN_EINTERNAL;
}

static void mirror_patches(uint32_t mirror[M_SEQUENCES][M_ROW], const struct kv_effects *fx)
{
    for (uint32_t i = 0; i < fx->n_patches; i++)
        mirror[fx->patches[i].row][fx->patches[i].index] = fx->patches[i].block;
}

attn_status model_kv_apply(struct kv *kv, const struct op *op, struct test_fx *t,
                           uint32_t mirror[M_SEQUENCES][M_ROW])
{
    attn_status st = carry_out(kv, op, &t->fx);
    if (mirror != NULL)
        mirror_patches(mirror, &t->fx);
    return st;
}

void model_kv_materialize(struct kv *kv, kv_seq_id seq, uint32_t mirror[M_SEQUENCES][M_ROW])
{
    struct test_fx t;
    test_fx_reset(&t);
    assert_status(kv, ATTN_OK, kv_seq_materialize(kv, seq, &t.fx));
    mirror_patches(mirror, &t.fx);
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
            i < s->len[op->layer] ? s->token[op->layer][i]
                                  : model_value(op->value_seed, op->layer, i);
}

static bool is_as_it_was(struct model *m, uint32_t i)
{
    const struct model_move *v = &m->move;
    const struct model_seq *s = &m->seq[v->slot];
    uint32_t k = v->index[i];
    return !v->is_closed && !v->is_gone[i] && model_has_block(s, k) && s->block[k] == v->block[i] &&
           model_references(m, v->block[i]) == 2;
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
        bool is_asked = op->listed == 0;
        for (uint32_t j = 0; j < op->n; j++)
            is_asked |= model_listed(op, j) == k;
        if (!is_asked || !model_holds_entry(s, k) || s->is_paged_out[k] != v->is_in ||
            (!v->is_in && (model_references(m, s->block[k]) != 1 || !model_is_quiet(m, op->slot))))
            return "an entry moves that may not";
        v->index[i] = k;
        v->block[i] = v->is_in ? model_block_new(m) : s->block[k];
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
        bool is_there = k < info.n_blocks && model_holds_entry(s, k) && !v->is_gone[i];
        bool is_paged_out = is_there && kv_is_place(info.block_table[k]);
        if (v->is_in && is_there && s->is_paged_out[k] && !is_paged_out) {
            s->is_paged_out[k] = false;
            s->block[k] = v->block[i];
            m->n_in++;
        } else if (!v->is_in && is_paged_out && !s->is_paged_out[k]) {
            if (!is_as_it_was(m, i))
                return "an entry went that may not";
            struct model_published *e = model_published_block(m, s->block[k]);
            model_look_from(m, s, k);
            if (e != NULL)
                *e = (struct model_published){0};
            s->is_paged_out[k] = true;
            m->n_out++;
        }
        uint64_t block = v->block[i];
        v->block[i] = 0;
        model_release(m, block);
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
            if (!model_has_block(&m->seq[slot], i))
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
            if (model_holds_entry(s, i / M_BLOCK_TOKENS) &&
                cell_of(d, info->block_table[i / M_BLOCK_TOKENS])[l][i % M_BLOCK_TOKENS] !=
                    s->token[l][i])
                return DIFFER("slot %u layer %u: token %u is not what was committed", slot, l, i);
    return "";
}

static const char *note_difference(struct kv *kv, kv_seq_id id, const struct model_seq *s,
                                   uint32_t slot)
{
    const struct kv_note note = kv_seq_note_get(kv, id);
    if (note.request != s->note_request || note.n_bytes != s->note_bytes)
        return DIFFER("slot %u: a note of %u bytes, not %u", slot, note.n_bytes, s->note_bytes);
    for (uint32_t i = 0; i < note.n_bytes; i++)
        if (note.bytes[i] != model_note_byte(s->note_seed, i))
            return DIFFER("slot %u: byte %u of its note of %u differs", slot, i, note.n_bytes);
    return "";
}

/* Each owner can have what it reserved, unless blocks are on their way. */
static const char *reserved_difference(struct kv *kv, const struct model *m)
{
    uint32_t n_promised = 0, n_entries = model_charged(m, KV_NO_OWNER), n_pinned = 0;
    for (uint32_t i = 0; i < M_OWNERS; i++) {
        uint32_t n = kv_reserved(kv, i, (kv_pool_id){0}), charged = model_charged(m, i);
        if (n != m->reserved[i] || kv_charged(kv, i, (kv_pool_id){0}) != charged)
            return DIFFER("owner %u: has reserved %u, is charged %u, not %u and %u", i, n,
                          kv_charged(kv, i, (kv_pool_id){0}), m->reserved[i], charged);
        if (kv_pool_free_for(kv, (kv_pool_id){0}, i) != model_n_free_for(m, i))
            return DIFFER("owner %u: can have %u, not %u", i,
                          kv_pool_free_for(kv, (kv_pool_id){0}, i), model_n_free_for(m, i));
        n_promised += n > charged ? n - charged : 0;
        n_entries += charged;
    }
    for (uint32_t i = 0; i < M_BLOCKS; i++)
        n_pinned += m->published[i].serial != 0 && m->published[i].is_pinned &&
                    model_references(m, m->published[i].block) == 0;
    bool is_held = model_owes(m) > n_entries + n_promised + n_pinned;
    if (!is_held && n_promised > model_n_available(m))
        return DIFFER("%u blocks are promised, %u can be had", n_promised, model_n_available(m));
    return "";
}

const char *model_visible_difference(struct kv *kv, const struct model *m, const struct device *d)
{
    struct kv_stats stats;
    kv_stats_read(kv, &stats);
    if (stats.blocks_total != model_n_blocks(m))
        return DIFFER("the pool has %u blocks, not %u", (unsigned)stats.blocks_total,
                      model_n_blocks(m));
    for (uint32_t i = 0; i < M_OWNERS; i++)
        if (kv_reserved(kv, i, (kv_pool_id){0}) != m->reserved[i])
            return DIFFER("owner %u: has reserved %u, not %u", i,
                          kv_reserved(kv, i, (kv_pool_id){0}), m->reserved[i]);
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
        if (i.n_nodes != s->n_nodes || (s->n_nodes > 0 && i.tree_pos != s->tree_pos))
            return DIFFER("slot %u: a tree of %u nodes at %u, not %u at %u", slot, i.n_nodes,
                          i.tree_pos, s->n_nodes, s->tree_pos);
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
        if (diff[0] == '\0')
            diff = note_difference(kv, id, s, slot);
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
    uint32_t n_tiered = 0, n_pinned = 0;
    for (uint32_t i = 0; i < M_BLOCKS; i++)
        n_pinned += m->published[i].serial != 0 && m->published[i].is_pinned &&
                    model_references(m, m->published[i].block) == 0;
    if (stats.blocks_pinned != n_pinned)
        return DIFFER("stats: %u blocks pinned, not %u", (unsigned)stats.blocks_pinned, n_pinned);
    for (uint32_t slot = 0; slot < M_SLOTS; slot++)
        n_tiered += model_n_paged_out(&m->seq[slot]);
    if (stats.blocks_tiered != n_tiered)
        return DIFFER("stats: %u blocks tiered, not %u", (unsigned)stats.blocks_tiered, n_tiered);
    if (stats.blocks_used != model_n_used(m) || stats.sequences != model_n_open(m))
        return DIFFER("stats: %u blocks used, %u sequences, not %u and %u",
                      (unsigned)stats.blocks_used, (unsigned)stats.sequences, model_n_used(m),
                      model_n_open(m));
    diff = reserved_difference(kv, m);
    return diff[0] != '\0' ? diff : sharing_difference(kv, m);
}

static uint32_t n_published(const struct model *m)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < M_BLOCKS; i++)
        n += m->published[i].serial != 0;
    return n;
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
