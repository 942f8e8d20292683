/* export.c: exports and imports blocks of sequences, a message's worth at a time; other work goes
 * on between messages, and within one between blocks. The device is asked for blocks after all
 * batches in flight: a request waits for these, but they wait for nothing.
 *
 * An import is an append of all layers at once, or of those that a message has: blocks are reserved
 * for each layer, written, and committed, while nothing else of the sequence is in work. Bytes that
 * do not match their checksums are refused before anything is reserved. Instead of blocks, an
 * import may say which blocks are freed, in all layers.
 *
 * Blocks travel in messages, not in files that the daemon opens for a client: this works for
 * workers on other hosts, and the daemon needs no right to any path. A block larger than a message
 * is sent by layers: clients know no layout, and each layer has a length of its own, so nothing
 * half-written is left.
 */
#include "daemon/engine/seq/export.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cache/kv_append.h"
#include "cache/kv_move.h"
#include "daemon/engine/core/effects.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/core/turns.h"
#include "daemon/engine/step/batch.h"
#include "daemon/engine/tier/idle.h"
#include "daemon/engine/tier/mover.h"
#include "kernels/kv_layout.h"
#include "proto/seq_file.h"

/* The layers that a request names, and their bytes in a block. */
struct part {
    struct pool_layers layers;
    uint64_t bytes;
};

/* An export or import whose blocks are being copied. */
struct transfer {
    struct part part;
    uint32_t n_blocks, at; /* the next one */
    /* an export's */
    struct answer reply;
    Attnd__Content content;
    uint8_t *payload;
    uint64_t *sums;
    /* an import's */
    bool is_repeat; /* the layers have these lengths already: its sums are checked, no more */
    bool is_checked, is_reserved; /* all sums are right; the blocks are there to be written */
};

static attn_status part_find(const struct pool *p, const char *of, uint32_t first, uint32_t n,
                             struct part *out, char *why)
{
    uint32_t num_layers = p->config.num_layers;
    if ((uint64_t)first + n > num_layers || (n == 0 && first > 0)) {
        snprintf(why, WHY_BYTES,
                 "%s.first_layer %" PRIu32 " and n_layers %" PRIu32 ": the pool has %" PRIu32, of,
                 first, n, num_layers);
        return ATTN_EINVAL;
    }
    out->layers = (struct pool_layers){first, n == 0 ? num_layers : n};
    out->bytes = out->layers.n * kv_layout_of(&p->config).layer_bytes;
    return ATTN_OK;
}

/* --- export ----------------------------------------------------------------------------------- */

/* Zeroes [from, block_tokens) of a part's rows. */
static void zero_rows(uint8_t *part, uint32_t n_heads, uint32_t block_tokens, uint64_t row_bytes,
                      uint32_t from)
{
    for (uint32_t h = 0; h < n_heads; h++)
        memset(part + (h * (uint64_t)block_tokens + from) * row_bytes, 0,
               (block_tokens - from) * row_bytes);
}

/* Zeroes what follows the last token of each layer: it may be from another sequence. */
static void zero_behind(const struct backend_pool_config *c, struct pool_layers layers,
                        const uint32_t *layer_len, uint32_t block, uint8_t *bytes)
{
    struct kv_layout l = kv_layout_of(c);
    uint64_t first = (uint64_t)block * c->block_tokens;
    layer_len += layers.first;
    for (uint32_t i = 0; i < layers.n; i++) {
        uint64_t n = layer_len[i] > first ? layer_len[i] - first : 0;
        if (n >= c->block_tokens)
            continue;
        uint8_t *k = bytes + i * l.layer_bytes, *v = k + l.v_offset;
        zero_rows(k, c->num_kv_heads, c->block_tokens, l.k_row_bytes, (uint32_t)n);
        zero_rows(v, c->num_kv_heads, c->block_tokens, l.v_row_bytes, (uint32_t)n);
        if (!l.is_quantised)
            continue;
        zero_rows(k + l.k_scales, c->num_kv_heads, c->block_tokens, l.k_scale_bytes, (uint32_t)n);
        zero_rows(k + l.v_scales, c->num_kv_heads, c->block_tokens, l.v_scale_bytes, (uint32_t)n);
    }
}

static attn_status export_check(const struct engine *e, const Attnd__Export *x,
                                const struct kv_seq_info *info, uint64_t part_bytes, char *why)
{
    uint64_t most = config_now(e->env.cfg, max_message_bytes);
    if (x->epoch != 0 && x->epoch != info->epoch) {
        snprintf(why, WHY_BYTES, "sequence %" PRIu64 ": epoch is %" PRIu32 ", it is at %" PRIu32,
                 x->seq, x->epoch, info->epoch);
        return ATTN_ESTALE;
    }
    if ((uint64_t)x->first_block + x->n_blocks > info->n_blocks ||
        x->n_blocks > WIRE_MAX_CHUNK_BLOCKS) {
        snprintf(why, WHY_BYTES,
                 "export.first_block %" PRIu32 " and n_blocks %" PRIu32
                 ": the sequence has %" PRIu32 ", a message at most %u",
                 x->first_block, x->n_blocks, info->n_blocks, WIRE_MAX_CHUNK_BLOCKS);
        return ATTN_EINVAL;
    }
    if (x->first_block < info->hole_past &&
        (uint64_t)x->first_block + x->n_blocks > info->hole_first) {
        snprintf(why, WHY_BYTES,
                 "export.first_block %" PRIu32 " and n_blocks %" PRIu32 ": blocks %" PRIu32
                 " to %" PRIu32 " are freed, no layer's window reaches them",
                 x->first_block, x->n_blocks, info->hole_first, info->hole_past - 1);
        return ATTN_EINVAL;
    }
    if (x->n_blocks * part_bytes <= most)
        return ATTN_OK;
    snprintf(why, WHY_BYTES,
             "export.n_blocks is %" PRIu32 ", of %" PRIu64 " bytes: a message has %" PRIu64
             " (listen.max_message)",
             x->n_blocks, part_bytes, most);
    return ATTN_EINVAL;
}

/* Copies the transfer's next block into the reply. */
static attn_status block_out(struct engine *e, kv_seq_id seq, struct transfer *x, uint32_t first,
                             char *why)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    struct pool *p = pool_of_kv(e, info.pool);
    uint32_t i = x->at++, at = first + i;
    uint8_t *dst = x->payload + i * x->part.bytes;
    attn_status st =
        kv_is_place(info.block_table[at])
            ? idle_layers_read(e, p, seq, at, x->part.layers, dst, why, WHY_BYTES)
            : pool_layers_read(p, info.block_table[at], x->part.layers, dst, why, WHY_BYTES);
    if (st != ATTN_OK)
        return st;
    zero_behind(&p->config, x->part.layers, info.layer_len, at, dst);
    struct checksum sum = checksum_of(dst, x->part.bytes);
    x->sums[2 * i] = sum.low;
    x->sums[2 * i + 1] = sum.high;
    return ATTN_OK;
}

/* Fills in the reply except for the checksums and the blocks. */
static void reply_export(struct engine *e, const struct pool *p, const Attnd__Export *x,
                         kv_seq_id seq, const struct kv_seq_info *info, Attnd__Content *content,
                         Attnd__ExportReply *body)
{
    uint32_t known = info->n_ids > x->first_token ? info->n_ids - x->first_token : 0;
    known = known < x->n_tokens ? known : x->n_tokens;
    body->epoch = info->epoch;
    body->pool = pool_handle(e, p);
    body->layout = kv_layout_number(&p->config);
    body->block_bytes = pool_block_bytes(p);
    body->n_layer_len = p->config.num_layers;
    body->layer_len = (uint32_t *)(uintptr_t)info->layer_len; /* packing only reads these */
    body->n_ids = info->n_ids;
    body->adapter = info->adapter;
    body->n_tokens = known < WIRE_MAX_TOKENS ? known : WIRE_MAX_TOKENS;
    body->tokens =
        (uint32_t *)(uintptr_t)(kv_seq_ids(e->env.kv, seq) + (known > 0 ? x->first_token : 0));
    pool_spec_content(&p->spec, content);
    body->content = content;
    body->pool_name = p->spec.wire->name;
    body->freed_first = info->hole_first;
    body->freed_past = info->hole_past;
}

/* Reports what truncations have kept since the last watched export, and starts to count anew. */
static void reply_kept(struct seq_state *s, uint32_t epoch, Attnd__ExportReply *body)
{
    body->kept_epoch = s->kept_epoch;
    body->n_kept = s->kept_epoch != 0 ? s->n_kept : 0;
    s->kept_epoch = epoch;
    s->n_kept = UINT32_MAX;
}

static attn_status has_tree(const char *what, uint64_t name, const struct kv_seq_info *info,
                            struct answer *a)
{
    return answer_no(a, ATTN_EINVAL,
                     "%s: sequence %" PRIu64 " has a tree of %" PRIu32 " nodes at %" PRIu32
                     ": commit a path of it or truncate first",
                     what, name, info->n_nodes, info->tree_pos);
}

attn_status export_begin(struct engine *e, struct request *req, kv_seq_id seq,
                         struct transfer **begun, struct answer *a)
{
    const Attnd__Export *x = req->wire.header->export;
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    struct pool *p = pool_of_kv(e, info.pool);
    struct part part;
    if (info.n_nodes > 0)
        return has_tree("export", x->seq, &info, a);
    attn_status st = part_find(p, "export", x->first_layer, x->n_layers, &part, a->why);
    if (st == ATTN_OK)
        st = export_check(e, x, &info, part.bytes, a->why);
    if (st != ATTN_OK)
        return st;
    size_t sums_bytes = 2 * (size_t)x->n_blocks * sizeof(uint64_t);
    struct transfer *t = wire_arena_alloc(&req->arena, sizeof *t + sums_bytes);
    if (t == NULL)
        return answer_no(a, ATTN_ENOMEM, "no memory for the checksums of an export");
    *t = (struct transfer){.part = part, .n_blocks = x->n_blocks, .sums = (uint64_t *)(t + 1)};
    memset(t->sums, 0, sums_bytes);
    answer_init(&t->reply);
    Attnd__ExportReply *body = answer_export(&t->reply);
    reply_export(e, p, x, seq, &info, &t->content, body);
    body->n_sums = 2 * (size_t)x->n_blocks;
    body->sums = t->sums;
    if (x->watch)
        reply_kept(&e->seqs[seq.index], info.epoch, body);
    size_t bytes = (size_t)(x->n_blocks * part.bytes);
    st = request_reply_begin(req, &t->reply.header, bytes, &t->payload);
    if (st != ATTN_OK)
        return answer_no(a, st, "no room for a reply with %zu bytes of blocks", bytes);
    if (x->n_blocks > 0)
        *begun = t;
    else
        a->is_built = true;
    return ATTN_OK;
}

static attn_status export_more(struct engine *e, struct request *req, kv_seq_id seq,
                               struct transfer *x, struct answer *a)
{
    attn_status st = ATTN_OK;
    while (x->at < x->n_blocks && st == ATTN_OK) {
        st = block_out(e, seq, x, req->wire.header->export->first_block, a->why);
        a->is_later = st == ATTN_OK && x->at < x->n_blocks && turn_is_over(e);
        if (a->is_later)
            return ATTN_OK;
    }
    if (st != ATTN_OK)
        return st;
    /* encode again, now with the checksums; the length is the same */
    const Attnd__Reply *h = &x->reply.header;
    wire_reply_head_encode(h, req->wire.request_id, (size_t)(x->n_blocks * x->part.bytes),
                           x->payload - wire_reply_head_bytes(h));
    a->is_built = true;
    return ATTN_OK;
}

/* --- import ----------------------------------------------------------------------------------- */

/* Whether the layers already have the lengths that the request gives them. */
static bool is_done(const struct part *part, const Attnd__Import *m, const struct kv_seq_info *info)
{
    for (uint32_t l = part->layers.first; l < part->layers.first + part->layers.n; l++)
        if (info->layer_len[l] != m->layer_len[l])
            return false;
    return true;
}

static attn_status lengths_check(const struct pool *p, const struct part *part,
                                 const Attnd__Import *m, const struct kv_seq_info *info, char *why)
{
    uint64_t first = (uint64_t)m->first_block * p->config.block_tokens, longest = 0;
    uint64_t n = m->n_sums / 2;
    for (uint32_t l = part->layers.first; l < part->layers.first + part->layers.n; l++) {
        uint32_t have = info->layer_len[l], len = m->layer_len[l];
        longest = len > longest ? len : longest;
        if (len >= have && have <= first && (len == have || have == first))
            continue;
        snprintf(why, WHY_BYTES,
                 "import.first_block is %" PRIu32 ", layer_len[%" PRIu32 "] %" PRIu32
                 ": the layer has %" PRIu32 " tokens",
                 m->first_block, l, len, have);
        return ATTN_EINVAL;
    }
    uint64_t past = (longest + p->config.block_tokens - 1) / p->config.block_tokens;
    if (past == m->first_block + n && n > 0)
        return ATTN_OK;
    snprintf(why, WHY_BYTES,
             "import has %" PRIu64 " blocks from %" PRIu32 " on, its longest layer_len is %" PRIu64,
             n, m->first_block, longest);
    return ATTN_EINVAL;
}

/* Checks field by field that the blocks' content is described as the pool's. */
static attn_status content_check(const struct pool *p, const Attnd__Import *m, uint64_t block_bytes,
                                 char *why)
{
    const Attnd__Content *c = m->content;
    if (c == NULL) {
        snprintf(why, WHY_BYTES, "import.content is missing: what the blocks mean");
        return ATTN_EINVAL;
    }
    struct seq_geometry pools =
        pool_spec_geometry(&p->spec, kv_layout_number(&p->config), block_bytes);
    struct seq_geometry stated = {
        .layout = m->layout,
        .num_layers = (uint32_t)m->n_layer_len,
        .num_kv_heads = c->num_kv_heads,
        .head_dim_k = c->head_dim_k,
        .head_dim_v = c->head_dim_v,
        .block_tokens = c->block_tokens,
        .kv_dtype = pool_dtype(c->kv_dtype),
        .block_bytes = block_bytes,
        .attention = c->attention,
        .model = c->identity != NULL ? c->identity->model : "",
        .rope = c->identity != NULL ? c->identity->rope : "",
    };
    char pool_name[KV_NAME_BYTES + 16];
    snprintf(pool_name, sizeof pool_name, "pool \"%s\"", p->spec.wire->name);
    return seq_geometry_differs(&stated, "import", &pools, pool_name, why, WHY_BYTES) ? ATTN_EINVAL
                                                                                      : ATTN_OK;
}

static attn_status import_check(const struct request *req, const struct pool *p,
                                const struct kv_seq_info *info, struct part *out_part, char *why)
{
    const Attnd__Import *m = req->wire.header->import;
    uint64_t n = m->n_sums / 2;
    attn_status st = content_check(p, m, pool_block_bytes(p), why);
    if (st == ATTN_OK)
        st = part_find(p, "import", m->first_layer, m->n_layers, out_part, why);
    if (st != ATTN_OK)
        return st;
    if (m->n_sums % 2 == 0 && req->wire.payload_bytes == n * out_part->bytes)
        return is_done(out_part, m, info) ? ATTN_OK : lengths_check(p, out_part, m, info, why);
    snprintf(why, WHY_BYTES,
             "import has %zu bytes of payload and %zu sums; a block of this pool has %" PRIu64
             " bytes and 2",
             req->wire.payload_bytes, m->n_sums, out_part->bytes);
    return ATTN_EINVAL;
}

static attn_status sum_check(const struct request *req, uint64_t part_bytes, uint32_t i, char *why)
{
    const Attnd__Import *m = req->wire.header->import;
    struct checksum want = {.low = m->sums[2 * i], .high = m->sums[2 * i + 1]};
    struct checksum sum = checksum_of(req->wire.payload + i * part_bytes, part_bytes);
    if (checksum_is_equal(sum, want))
        return ATTN_OK;
    snprintf(why, WHY_BYTES,
             "block %" PRIu32 ": checksum is %016" PRIx64 "%016" PRIx64
             ", its bytes make %016" PRIx64 "%016" PRIx64,
             m->first_block + i, want.high, want.low, sum.high, sum.low);
    return ATTN_EINVAL;
}

/* Ends the reservations of layers [l, past): commits them or cancels them. */
static void layers_end(struct engine *e, struct pool *p, kv_seq_id seq, const Attnd__Import *m,
                       uint32_t l, uint32_t past, bool is_good)
{
    uint32_t first = m->first_block * p->config.block_tokens;
    for (; l < past; l++) {
        if (m->layer_len[l] <= first)
            continue;
        uint32_t n = m->layer_len[l] - first;
        if (is_good)
            kv_append_commit(e->env.kv, seq, l, first, n);
        else /* a block without this layer's tokens is not shared, so there is no copy to undo */
            kv_append_cancel(e->env.kv, seq, l, first, n, &p->fx);
    }
}

/* Takes the blocks that will be written. */
static attn_status blocks_reserve(struct engine *e, struct pool *p, kv_seq_id seq,
                                  const Attnd__Import *m, const struct part *part, char *why)
{
    uint32_t first = m->first_block * p->config.block_tokens;
    uint32_t first_layer = part->layers.first, l, past = first_layer + part->layers.n;
    attn_status st = ATTN_OK;
    if (p->fx.n_patches + m->n_sums / 2 > p->fx.patches_capacity)
        batch_flush_patches(e, p);
    mover_wait(e, p, m->n_sums / 2);
    idle_make_room_now(e, p, &(struct idle_ask){.seq = seq.index}, m->n_sums / 2);
    for (l = first_layer; l < past && st == ATTN_OK; l++)
        if (m->layer_len[l] > first)
            st = kv_copy_reserve(e->env.kv, seq, l, first, m->layer_len[l] - first, &p->fx);
    if (st != ATTN_OK) {
        snprintf(why, WHY_BYTES, "%s%s", kv_last_error(e->env.kv),
                 st == ATTN_ENOBLOCKS ? MORE_BLOCKS : "");
        layers_end(e, p, seq, m, first_layer, l - 1, false);
    }
    return st;
}

static attn_status block_in(struct engine *e, const struct pool *p, kv_seq_id seq,
                            const struct request *req, struct transfer *x, char *why)
{
    struct kv_seq_info info;
    uint32_t i = x->at++;
    kv_seq_info(e->env.kv, seq, &info);
    return pool_layers_write(p, info.block_table[req->wire.header->import->first_block + i],
                             x->part.layers, req->wire.payload + i * x->part.bytes, why, WHY_BYTES);
}

static bool import_is_done(const struct transfer *x)
{
    return x->is_checked && (x->is_repeat || x->at == x->n_blocks);
}

/* All sums are checked before anything is reserved. */
static attn_status import_more(struct engine *e, struct request *req, kv_seq_id seq,
                               struct transfer *x, struct answer *a)
{
    const Attnd__Import *m = req->wire.header->import;
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    struct pool *p = pool_of_kv(e, info.pool);
    attn_status st = ATTN_OK;
    while (st == ATTN_OK && !import_is_done(x)) {
        if (!x->is_checked) {
            st = sum_check(req, x->part.bytes, x->at++, a->why);
            x->is_checked = x->at == x->n_blocks;
            x->at = x->is_checked ? 0 : x->at;
        } else if (!x->is_reserved) {
            st = blocks_reserve(e, p, seq, m, &x->part, a->why);
            x->is_reserved = st == ATTN_OK;
        } else {
            st = block_in(e, p, seq, req, x, a->why);
        }
        a->is_later = st == ATTN_OK && !import_is_done(x) && turn_is_over(e);
        if (a->is_later)
            return ATTN_OK;
    }
    uint32_t first = x->part.layers.first;
    if (x->is_reserved)
        layers_end(e, p, seq, m, first, first + x->part.layers.n, st == ATTN_OK);
    return st;
}

/* Checks a request that frees blocks, except for what the cache checks. */
static attn_status freed_check(const struct request *req, const struct pool *p,
                               const struct kv_seq_info *info, char *why)
{
    const Attnd__Import *m = req->wire.header->import;
    uint64_t past = (uint64_t)m->freed_past * p->config.block_tokens;
    attn_status st = content_check(p, m, pool_block_bytes(p), why);
    if (st != ATTN_OK)
        return st;
    if (m->n_sums > 0 || req->wire.payload_bytes > 0 || m->first_layer > 0 || m->n_layers > 0) {
        snprintf(why, WHY_BYTES,
                 "import.freed_past is %" PRIu32 " beside %zu sums, %zu bytes of payload, "
                 "first_layer %" PRIu32 " and n_layers %" PRIu32 ": it is of all layers, alone",
                 m->freed_past, m->n_sums, req->wire.payload_bytes, m->first_layer, m->n_layers);
        return ATTN_EINVAL;
    }
    if (m->first_block != m->freed_past) {
        snprintf(why, WHY_BYTES, "import.first_block is %" PRIu32 ", freed_past %" PRIu32,
                 m->first_block, m->freed_past);
        return ATTN_EINVAL;
    }
    for (uint32_t l = 0; l < p->config.num_layers; l++) {
        uint64_t len = info->layer_len[l] < past ? past : info->layer_len[l];
        if (m->layer_len[l] == len)
            continue;
        snprintf(why, WHY_BYTES,
                 "import.layer_len[%" PRIu32 "] is %" PRIu32 ": the layer has %" PRIu32
                 " tokens, and %" PRIu64 " with blocks freed to %" PRIu32,
                 l, m->layer_len[l], info->layer_len[l], len, m->freed_past);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

static attn_status free_run(struct engine *e, struct request *req, kv_seq_id seq, struct pool *p,
                            const struct kv_seq_info *info, char *why)
{
    const Attnd__Import *m = req->wire.header->import;
    attn_status st = freed_check(req, p, info, why);
    if (st != ATTN_OK)
        return st;
    uint32_t n_new = m->freed_past > info->n_blocks ? m->freed_past - info->n_blocks : 0;
    if (n_new > p->fx.patches_capacity - p->fx.n_patches)
        batch_flush_patches(e, p);
    st = kv_seq_free_to(e->env.kv, seq, m->freed_first, m->freed_past, &p->fx);
    if (st != ATTN_OK)
        snprintf(why, WHY_BYTES, "import: %s", kv_last_error(e->env.kv));
    seqs_have_room(e);
    return st;
}

attn_status import_begin(struct engine *e, struct request *req, kv_seq_id seq,
                         struct transfer **begun, struct answer *a)
{
    const Attnd__Import *m = req->wire.header->import;
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, seq, &info);
    struct pool *p = pool_of_kv(e, info.pool);
    struct part part;
    if (info.n_nodes > 0)
        return has_tree("import", m->seq, &info, a);
    if (m->freed_first > 0 || m->freed_past > 0)
        return free_run(e, req, seq, p, &info, a->why);
    attn_status st = import_check(req, p, &info, &part, a->why);
    if (st != ATTN_OK || m->n_sums == 0)
        return st;
    struct transfer *x = wire_arena_alloc(&req->arena, sizeof *x);
    if (x == NULL)
        return answer_no(a, ATTN_ENOMEM, "no memory for an import");
    *x = (struct transfer){
        .part = part, .n_blocks = (uint32_t)(m->n_sums / 2), .is_repeat = is_done(&part, m, &info)};
    *begun = x;
    return ATTN_OK;
}

/* --- both ------------------------------------------------------------------------------------- */

attn_status transfer_more(struct engine *e, struct request *req, kv_seq_id seq, struct transfer *x,
                          struct answer *a)
{
    return req->wire.header->body_case == ATTND__REQUEST__BODY_EXPORT
               ? export_more(e, req, seq, x, a)
               : import_more(e, req, seq, x, a);
}
