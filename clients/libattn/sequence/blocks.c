/* blocks.c: requests that read blocks and token ids of a sequence from a daemon, and that write
 * them to one, cut to what a message may hold. */
#include "clients/libattn/sequence/blocks.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum {
    CHUNK_BYTES = 4 << 20, /* of a message: what other requests wait for at most */
    CHUNK_IDS = 32768,
    REPLY_HEAD_BYTES = 32 << 10, /* lengths, texts and sums beside the blocks, and a margin */
};

struct taking {
    struct seq_look *look; /* of a look; else NULL */
    uint8_t *dst;
    uint64_t bytes;
    struct checksum *sums; /* [n_pieces]: of blocks, or of layers of one */
    uint32_t n_pieces, *ids, n_ids;
};

static attn_status fail(struct client_request *r, attn_status st, const char *what)
{
    snprintf(r->result.message, sizeof r->result.message, "answer to export: %s", what);
    return st;
}

static attn_status take_look(struct client_request *r, const Attnd__ExportReply *x,
                             struct seq_look *l)
{
    const Attnd__Content *content = x->content;
    if (content == NULL)
        return fail(r, ATTN_ENOTSUP, "the daemon does not say what its blocks mean");
    const char *model = content->identity != NULL ? content->identity->model : "";
    const char *rope = content->identity != NULL ? content->identity->rope : "";
    uint64_t n_freed = (uint64_t)x->freed_past * content->block_tokens;
    for (size_t i = 0; i < x->n_layer_len; i++)
        if (x->layer_len[i] < n_freed || x->freed_first > x->freed_past)
            return fail(r, ATTN_EPROTO, "freed blocks are behind a layer's end");
    if (x->n_layer_len == 0 || x->n_layer_len > SEQ_FILE_MAX_LAYERS || x->block_bytes == 0 ||
        content->block_tokens == 0)
        return fail(r, ATTN_EPROTO, "layer_len, block_bytes or block_tokens is none");
    if (strlen(model) >= sizeof l->model || strlen(rope) >= sizeof l->rope ||
        strlen(x->pool_name) >= sizeof l->pool)
        return fail(r, ATTN_ENOTSUP, "model, rope or pool_name is longer than 4095 bytes");
    l->epoch = x->epoch;
    l->n_ids = x->n_ids;
    l->adapter = x->adapter;
    l->kept_epoch = x->kept_epoch;
    l->n_kept = x->n_kept;
    l->freed_first = x->freed_first;
    l->freed_past = x->freed_past;
    memcpy(l->layer_len, x->layer_len, x->n_layer_len * sizeof *l->layer_len);
    strcpy(l->model, model);
    strcpy(l->rope, rope);
    strcpy(l->pool, x->pool_name);
    l->geometry = (struct seq_geometry){.layout = x->layout,
                                        .num_layers = (uint32_t)x->n_layer_len,
                                        .num_kv_heads = content->num_kv_heads,
                                        .head_dim_k = content->head_dim_k,
                                        .head_dim_v = content->head_dim_v,
                                        .block_tokens = content->block_tokens,
                                        .kv_dtype = (attn_dtype)content->kv_dtype,
                                        .block_bytes = x->block_bytes,
                                        .attention = content->attention,
                                        .model = l->model,
                                        .rope = l->rope};
    return ATTN_OK;
}

static attn_status take_blocks(struct client_request *r, const struct wire_reply *reply,
                               const struct taking *t)
{
    const Attnd__ExportReply *x = reply->header->export;
    size_t n = t->n_pieces, piece_bytes = t->bytes / n;
    if (reply->payload_bytes != t->bytes || x->n_sums != 2 * n)
        return fail(r, ATTN_EPROTO, "blocks or sums are not as many as were asked for");
    memcpy(t->dst, reply->payload, t->bytes);
    for (size_t i = 0; i < n; i++) {
        struct checksum told = {.low = x->sums[2 * i], .high = x->sums[2 * i + 1]};
        t->sums[i] = checksum_of(t->dst + i * piece_bytes, piece_bytes);
        if (!checksum_is_equal(t->sums[i], told))
            return fail(r, ATTN_EPROTO, "a block's bytes do not make its checksum");
    }
    return ATTN_OK;
}

static attn_status take_export(struct client_request *r, const struct wire_reply *reply)
{
    const struct taking *t = r->take_arg;
    const Attnd__ExportReply *x = reply->header->export;
    if (reply->header->body_case != ATTND__REPLY__BODY_EXPORT)
        return fail(r, ATTN_EPROTO, "it has no body");
    if (t->look != NULL)
        return take_look(r, x, t->look);
    if (t->bytes > 0)
        return take_blocks(r, reply, t);
    if (x->n_tokens != t->n_ids)
        return fail(r, ATTN_EPROTO, "ids are not as many as were known");
    memcpy(t->ids, x->tokens, t->n_ids * sizeof *t->ids);
    return ATTN_OK;
}

static attn_status export_call(struct attn_client *c, Attnd__Export *x, uint64_t timeout_us,
                               struct taking *t)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    struct client_bulk bulk = {.reply_bytes = t->bytes + REPLY_HEAD_BYTES};
    req.body_case = ATTND__REQUEST__BODY_EXPORT;
    req.export = x;
    return client_call_bulk(c, &req, t->bytes > 0 ? &bulk : NULL, timeout_us, take_export, t);
}

attn_status seq_look_at(struct attn_client *c, uint64_t id, uint64_t timeout_us,
                        struct seq_look *out)
{
    Attnd__Export x = ATTND__EXPORT__INIT;
    struct taking t = {.look = out};
    x.seq = out->id = id;
    x.watch = true;
    return export_call(c, &x, timeout_us, &t);
}

attn_status seq_look_again(struct attn_client *c, uint64_t timeout_us, struct seq_look *l,
                           uint32_t *out_kept)
{
    uint32_t before = l->epoch;
    attn_status st = seq_look_at(c, l->id, timeout_us, l);
    if (st != ATTN_OK)
        return st;
    bool is_known = l->kept_epoch != 0 && l->kept_epoch <= before;
    if (l->epoch != before && !is_known)
        return error_set(ATTN_ESTALE, "sequence %" PRIu64 " is truncated or adopted meanwhile",
                         l->id);
    *out_kept = l->epoch == before ? UINT32_MAX : l->n_kept;
    return ATTN_OK;
}

attn_status seq_look_after(struct attn_client *c, attn_status st, uint64_t timeout_us,
                           struct seq_look *l, uint32_t *out_kept)
{
    struct error_kept kept = error_keep();
    uint32_t before = l->epoch, freed = l->freed_past;
    attn_status looked = seq_look_again(c, timeout_us, l, out_kept);
    bool is_other = looked == ATTN_OK && (l->epoch != before || l->freed_past > freed);
    bool explains = looked == ATTN_ESTALE || is_other;
    return st == ATTN_OK || explains ? looked : error_restore(&kept);
}

void seq_look_lengths(const struct seq_look *l, uint32_t *out_least, uint32_t *out_most)
{
    *out_least = *out_most = l->layer_len[0];
    for (uint32_t i = 1; i < l->geometry.num_layers; i++) {
        *out_least = l->layer_len[i] < *out_least ? l->layer_len[i] : *out_least;
        *out_most = l->layer_len[i] > *out_most ? l->layer_len[i] : *out_most;
    }
}

attn_status seq_piece_of(struct attn_client *c, const struct seq_geometry *g, struct seq_piece *out)
{
    uint64_t most = client_max_message(c);
    uint64_t room = most > REPLY_HEAD_BYTES ? most - REPLY_HEAD_BYTES : 0;
    uint64_t layer_bytes = g->block_bytes / g->num_layers;
    if (g->block_bytes <= room) {
        uint64_t n = (room < CHUNK_BYTES ? room : CHUNK_BYTES) / g->block_bytes;
        n = n < 1 ? 1 : n < WIRE_MAX_CHUNK_BLOCKS ? n : WIRE_MAX_CHUNK_BLOCKS;
        *out = (struct seq_piece){.n_blocks = (uint32_t)n, .n_layers = g->num_layers};
        return ATTN_OK;
    }
    if (layer_bytes > room)
        return error_set(ATTN_EINVAL,
                         "a layer of a block has %" PRIu64 " bytes, a message of %" PRIu64
                         " room for %" PRIu64
                         " (listen.max_message; of shared memory, listen.shm_client)",
                         layer_bytes, most, room);
    *out = (struct seq_piece){.n_blocks = 1, .n_layers = (uint32_t)(room / layer_bytes)};
    return ATTN_OK;
}

/* Layers [layer, layer + n) of block first. */
static attn_status layers_get(struct attn_client *c, const struct seq_look *l, uint32_t epoch,
                              uint32_t first, uint32_t layer, uint32_t n, uint64_t timeout_us,
                              uint8_t *dst)
{
    Attnd__Export x = ATTND__EXPORT__INIT;
    struct checksum sum;
    uint64_t layer_bytes = l->geometry.block_bytes / l->geometry.num_layers;
    struct taking t = {
        .dst = dst + layer * layer_bytes, .sums = &sum, .bytes = n * layer_bytes, .n_pieces = 1};
    x.seq = l->id;
    x.epoch = epoch;
    x.first_block = first;
    x.n_blocks = 1;
    x.first_layer = layer;
    x.n_layers = n;
    return export_call(c, &x, timeout_us, &t);
}

attn_status seq_blocks_get(struct attn_client *c, const struct seq_look *l, uint32_t epoch,
                           struct seq_piece piece, uint32_t first, uint32_t n, uint64_t timeout_us,
                           uint8_t *dst, struct checksum *sums)
{
    const struct seq_geometry *g = &l->geometry;
    attn_status st = ATTN_OK;
    if (piece.n_layers < g->num_layers) {
        for (uint32_t i = 0, n_part; st == ATTN_OK && i < g->num_layers; i += n_part) {
            n_part = g->num_layers - i < piece.n_layers ? g->num_layers - i : piece.n_layers;
            st = layers_get(c, l, epoch, first, i, n_part, timeout_us, dst);
        }
        if (st == ATTN_OK)
            *sums = checksum_of(dst, g->block_bytes);
        return st;
    }
    Attnd__Export x = ATTND__EXPORT__INIT;
    struct taking t = {.dst = dst, .sums = sums, .bytes = n * g->block_bytes, .n_pieces = n};
    x.seq = l->id;
    x.epoch = epoch;
    x.first_block = first;
    x.n_blocks = n;
    return export_call(c, &x, timeout_us, &t);
}

attn_status seq_ids_get(struct attn_client *c, const struct seq_look *l, uint32_t epoch,
                        uint32_t first, uint32_t n, uint64_t timeout_us, uint32_t *dst)
{
    attn_status st = ATTN_OK;
    for (uint32_t n_part; st == ATTN_OK && n > 0; first += n_part, dst += n_part, n -= n_part) {
        n_part = n < CHUNK_IDS ? n : CHUNK_IDS;
        Attnd__Export x = ATTND__EXPORT__INIT;
        struct taking t = {.ids = dst, .n_ids = n_part};
        x.seq = l->id;
        x.epoch = epoch;
        x.first_token = first;
        x.n_tokens = n_part;
        st = export_call(c, &x, timeout_us, &t);
    }
    return st;
}

/* Fills in which sequence it is of and what its blocks mean, and sends it. */
static attn_status import_call(struct attn_client *c, const struct attn_seq *seq,
                               const struct seq_geometry *g, const uint32_t *lens, Attnd__Import *m,
                               const struct client_bulk *bulk, uint64_t timeout_us)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Content content = ATTND__CONTENT__INIT;
    Attnd__Identity identity = ATTND__IDENTITY__INIT;
    identity.model = (char *)(uintptr_t)g->model; /* packing only reads these */
    identity.rope = (char *)(uintptr_t)g->rope;
    content.identity = &identity;
    content.num_kv_heads = g->num_kv_heads;
    content.head_dim_k = g->head_dim_k;
    content.head_dim_v = g->head_dim_v;
    content.block_tokens = g->block_tokens;
    content.kv_dtype = (Attnd__Dtype)g->kv_dtype;
    content.attention = g->attention;
    m->seq = seq->id;
    m->epoch = seq->epoch;
    m->layout = g->layout;
    m->n_layer_len = g->num_layers;
    m->layer_len = (uint32_t *)(uintptr_t)lens;
    m->content = &content;
    req.body_case = ATTND__REQUEST__BODY_IMPORT;
    req.import = m;
    return client_call_bulk(c, &req, bulk, timeout_us, NULL, NULL);
}

/* Layers [layer, layer + n_layers) of n blocks; what these have of them is at src. */
static attn_status layers_put(struct attn_client *c, const struct attn_seq *seq,
                              const struct seq_geometry *g, uint32_t layer, uint32_t n_layers,
                              const uint32_t *lens, uint32_t first, uint32_t n, const uint8_t *src,
                              const struct checksum *sums, uint64_t timeout_us)
{
    Attnd__Import m = ATTND__IMPORT__INIT;
    struct client_bulk bulk = {.payload = src,
                               .payload_bytes = n * (g->block_bytes / g->num_layers) * n_layers};
    m.first_block = first;
    m.n_sums = 2 * (size_t)n;
    m.sums = (uint64_t *)(uintptr_t)sums;
    if (n_layers < g->num_layers) {
        m.first_layer = layer;
        m.n_layers = n_layers;
    }
    return import_call(c, seq, g, lens, &m, &bulk, timeout_us);
}

attn_status seq_blocks_free(struct attn_client *c, const struct attn_seq *seq,
                            const struct seq_geometry *g, const uint32_t *lens, uint32_t first,
                            uint32_t past, uint64_t timeout_us)
{
    Attnd__Import m = ATTND__IMPORT__INIT;
    m.first_block = m.freed_past = past;
    m.freed_first = first;
    return import_call(c, seq, g, lens, &m, NULL, timeout_us);
}

static bool has_tokens(const uint32_t *lens, uint32_t n, uint64_t from)
{
    for (uint32_t i = 0; i < n; i++)
        if (lens[i] > from)
            return true;
    return false;
}

attn_status seq_blocks_put(struct attn_client *c, const struct attn_seq *seq,
                           const struct seq_geometry *g, struct seq_piece piece,
                           const uint32_t *layer_len, uint32_t first, uint32_t n,
                           const uint8_t *src, const struct checksum *sums, uint64_t timeout_us)
{
    attn_status st = ATTN_OK;
    uint32_t lens[SEQ_FILE_MAX_LAYERS];
    uint64_t begin = (uint64_t)first * g->block_tokens, end = begin + (uint64_t)n * g->block_tokens;
    uint64_t layer_bytes = g->block_bytes / g->num_layers;
    for (uint32_t i = 0; i < g->num_layers; i++)
        lens[i] = layer_len[i] < end ? layer_len[i] : (uint32_t)end;
    if (piece.n_layers >= g->num_layers)
        return layers_put(c, seq, g, 0, g->num_layers, lens, first, n, src, sums, timeout_us);
    for (uint32_t i = 0, n_part; st == ATTN_OK && i < g->num_layers; i += n_part) {
        n_part = g->num_layers - i < piece.n_layers ? g->num_layers - i : piece.n_layers;
        const uint8_t *part = src + i * layer_bytes;
        if (!has_tokens(lens + i, n_part, begin))
            continue;
        struct checksum sum = checksum_of(part, n_part * layer_bytes);
        st = layers_put(c, seq, g, i, n_part, lens, first, 1, part, &sum, timeout_us);
    }
    return st;
}
