/* seq_file.c: encoding, decoding and checking the head of an exported sequence. */
#include "proto/seq_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const uint8_t magic[8] = {'A', 'T', 'T', 'N', 'S', 'E', 'Q', '\n'};

/* The first SEQ_FILE_FIXED_BYTES of a head, as they lie in the file. */
struct fixed {
    uint8_t magic[8];
    uint32_t version, layout;
    uint32_t num_layers, num_kv_heads, head_dim_k, head_dim_v, block_tokens, kv_dtype;
    uint32_t n_blocks, n_ids, model_bytes, rope_bytes;
    uint64_t block_bytes, name, adapter, head_bytes, file_bytes, attention;
    uint32_t pool_bytes;
    uint32_t freed_first, freed_past, note_bytes;
    uint8_t zeros[8];
};
_Static_assert(sizeof(struct fixed) == SEQ_FILE_FIXED_BYTES, "no holes, nothing more");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian");

static uint32_t n_stored(const struct fixed *x)
{
    return x->n_blocks - (x->freed_past - x->freed_first);
}

/* The size of the head; 0: it passes 64 bits, which fields within their limits never do. */
static uint64_t head_bytes_of(const struct fixed *x)
{
    uint64_t n = SEQ_FILE_FIXED_BYTES + (uint64_t)n_stored(x) * SEQ_FILE_SUM_BYTES +
                 (uint64_t)x->num_layers * 4 + (uint64_t)x->n_ids * 4 + x->model_bytes +
                 x->rope_bytes + x->pool_bytes + x->note_bytes + SEQ_FILE_SUM_BYTES;
    return (n + SEQ_FILE_ALIGN - 1) / SEQ_FILE_ALIGN * SEQ_FILE_ALIGN;
}

static struct fixed fixed_of(const struct seq_file *f)
{
    const struct seq_geometry *g = &f->geometry;
    struct fixed x = {
        .version = f->note_bytes > 0                ? SEQ_FILE_VERSION_NOTE
                   : f->freed_past > f->freed_first ? SEQ_FILE_VERSION_FREED
                                                    : SEQ_FILE_VERSION,
        .layout = g->layout,
        .num_layers = g->num_layers,
        .num_kv_heads = g->num_kv_heads,
        .head_dim_k = g->head_dim_k,
        .head_dim_v = g->head_dim_v,
        .block_tokens = g->block_tokens,
        .kv_dtype = (uint32_t)g->kv_dtype,
        .n_blocks = f->n_blocks,
        .n_ids = f->n_ids,
        .model_bytes = (uint32_t)strlen(g->model) + 1,
        .rope_bytes = (uint32_t)strlen(g->rope) + 1,
        .block_bytes = g->block_bytes,
        .name = f->name,
        .adapter = f->adapter,
        .attention = g->attention,
        .pool_bytes = (uint32_t)strlen(f->pool) + 1,
        .freed_first = f->freed_first,
        .freed_past = f->freed_past,
        .note_bytes = f->note_bytes,
    };
    if (f->freed_past == f->freed_first)
        x.freed_first = x.freed_past = 0;
    memcpy(x.magic, magic, sizeof magic);
    x.head_bytes = head_bytes_of(&x);
    x.file_bytes = x.head_bytes + n_stored(&x) * g->block_bytes;
    return x;
}

uint64_t seq_file_head_bytes(const struct seq_file *f)
{
    return fixed_of(f).head_bytes;
}

static uint8_t *put(uint8_t *dst, const void *src, size_t n)
{
    if (n > 0)
        memcpy(dst, src, n);
    return dst + n;
}

void seq_file_encode(const struct seq_file *f, uint8_t *dst)
{
    struct fixed x = fixed_of(f);
    size_t summed = x.head_bytes - SEQ_FILE_SUM_BYTES;
    uint8_t *p = put(dst, &x, sizeof x);
    p = put(p, f->sums, (size_t)n_stored(&x) * SEQ_FILE_SUM_BYTES);
    p = put(p, f->layer_len, (size_t)x.num_layers * 4);
    p = put(p, f->ids, (size_t)f->n_ids * 4);
    p = put(p, f->geometry.model, x.model_bytes);
    p = put(p, f->geometry.rope, x.rope_bytes);
    p = put(p, f->pool, x.pool_bytes);
    p = put(p, f->note, x.note_bytes);
    memset(p, 0, (size_t)(dst + summed - p));
    struct checksum sum = checksum_of(dst, summed);
    memcpy(dst + summed, &sum, sizeof sum);
}

/* --- reading ---------------------------------------------------------------------------------- */

/* True if a field is outside its limits; why names it. */
static bool is_out_of_range(const struct fixed *x, char *why, size_t why_bytes)
{
    const struct {
        const char *name;
        uint32_t value, least, most;
    } fields[] = {
        {"num_layers", x->num_layers, 1, SEQ_FILE_MAX_LAYERS},
        {"num_kv_heads", x->num_kv_heads, 1, 65536},
        {"head_dim_k", x->head_dim_k, 1, 65536},
        {"head_dim_v", x->head_dim_v, 1, 65536},
        {"block_tokens", x->block_tokens, 1, 65536},
        {"model_bytes", x->model_bytes, 1, SEQ_FILE_MAX_TEXT_BYTES},
        {"rope_bytes", x->rope_bytes, 1, SEQ_FILE_MAX_TEXT_BYTES},
        {"pool_bytes", x->pool_bytes, 1, SEQ_FILE_MAX_TEXT_BYTES},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (fields[i].value >= fields[i].least && fields[i].value <= fields[i].most)
            continue;
        snprintf(why, why_bytes, "%s is %" PRIu32 ", it must be %" PRIu32 " to %" PRIu32,
                 fields[i].name, fields[i].value, fields[i].least, fields[i].most);
        return true;
    }
    return false;
}

/* Only files of the second version and later ones have freed blocks, or a note. */
static attn_status version_check(const struct fixed *x, char *why, size_t why_bytes)
{
    bool has_note = x->version == SEQ_FILE_VERSION_NOTE,
         has_all = x->freed_first == 0 && x->freed_past == 0;
    bool is_right = x->freed_first < x->freed_past && x->freed_past <= x->n_blocks
                        ? x->version != SEQ_FILE_VERSION
                        : has_all && x->version != SEQ_FILE_VERSION_FREED;
    if (x->note_bytes > SEQ_FILE_MAX_NOTE_BYTES || (x->note_bytes > 0) != has_note) {
        snprintf(why, why_bytes,
                 "note_bytes is %" PRIu32 " in a file of version %" PRIu32 ", at most %d, and 0 "
                 "below version %d",
                 x->note_bytes, x->version, SEQ_FILE_MAX_NOTE_BYTES, SEQ_FILE_VERSION_NOTE);
        return ATTN_EPROTO;
    }
    if (is_right)
        return ATTN_OK;
    snprintf(why, why_bytes,
             "freed_first is %" PRIu32 ", freed_past %" PRIu32 ", of %" PRIu32
             " blocks in a file of version %" PRIu32,
             x->freed_first, x->freed_past, x->n_blocks, x->version);
    return ATTN_EPROTO;
}

attn_status seq_file_head_find(const uint8_t *bytes, size_t n_bytes, uint64_t file_bytes,
                               uint64_t *out_head_bytes, char *why, size_t why_bytes)
{
    struct fixed x;
    if (n_bytes < sizeof x) {
        snprintf(why, why_bytes, "file has %zu bytes, the head of an exported sequence %d", n_bytes,
                 SEQ_FILE_FIXED_BYTES);
        return ATTN_EPROTO;
    }
    memcpy(&x, bytes, sizeof x);
    if (memcmp(x.magic, magic, sizeof magic) != 0) {
        snprintf(why, why_bytes, "magic is %02x %02x %02x %02x ..., no exported sequence's",
                 x.magic[0], x.magic[1], x.magic[2], x.magic[3]);
        return ATTN_EPROTO;
    }
    if (x.version < SEQ_FILE_VERSION || x.version > SEQ_FILE_VERSION_NOTE) {
        snprintf(why, why_bytes, "version is %" PRIu32 ", this side reads %d to %d", x.version,
                 SEQ_FILE_VERSION, SEQ_FILE_VERSION_NOTE);
        return ATTN_ENOTSUP;
    }
    if (is_out_of_range(&x, why, why_bytes) || version_check(&x, why, why_bytes) != ATTN_OK)
        return ATTN_EPROTO;
    uint64_t blocks, whole;
    if (x.head_bytes != head_bytes_of(&x)) {
        snprintf(why, why_bytes, "head_bytes is %" PRIu64 ", its fields make %" PRIu64,
                 x.head_bytes, head_bytes_of(&x));
        return ATTN_EPROTO;
    }
    if (__builtin_mul_overflow(x.block_bytes, (uint64_t)n_stored(&x), &blocks) ||
        __builtin_add_overflow(blocks, x.head_bytes, &whole) || whole != x.file_bytes) {
        snprintf(why, why_bytes, "file_bytes is %" PRIu64 ", not what %" PRIu32 " blocks make",
                 x.file_bytes, n_stored(&x));
        return ATTN_EPROTO;
    }
    if (file_bytes != whole) {
        snprintf(why, why_bytes, "file has %" PRIu64 " bytes, it must have %" PRIu64, file_bytes,
                 whole);
        return ATTN_EPROTO;
    }
    *out_head_bytes = x.head_bytes;
    return ATTN_OK;
}

/* The blocks must cover all lengths, and some length must reach into the last block. Every layer
 * must be at least as long as what is freed. */
static attn_status lengths_check(const struct seq_file *f, char *why, size_t why_bytes)
{
    uint64_t longest = 0, freed = (uint64_t)f->freed_past * f->geometry.block_tokens;
    for (uint32_t i = 0; i < f->geometry.num_layers; i++) {
        longest = f->layer_len[i] > longest ? f->layer_len[i] : longest;
        if (f->layer_len[i] >= freed)
            continue;
        snprintf(why, why_bytes, "layer_len[%" PRIu32 "] is %" PRIu32 ", freed_past %" PRIu32, i,
                 f->layer_len[i], f->freed_past);
        return ATTN_EPROTO;
    }
    uint64_t n = (longest + f->geometry.block_tokens - 1) / f->geometry.block_tokens;
    if (n == f->n_blocks)
        return ATTN_OK;
    snprintf(why, why_bytes, "n_blocks is %" PRIu32 ", %" PRIu64 " tokens take %" PRIu64,
             f->n_blocks, longest, n);
    return ATTN_EPROTO;
}

static bool is_zero(const uint8_t *bytes, size_t n)
{
    while (n > 0 && bytes[n - 1] == 0)
        n--;
    return n == 0;
}

static attn_status text_check(const char *name, const char *text, uint32_t n, char *why,
                              size_t why_bytes)
{
    if (memchr(text, 0, n) == text + n - 1)
        return ATTN_OK;
    snprintf(why, why_bytes, "%s does not end where its %" PRIu32 " bytes do", name, n);
    return ATTN_EPROTO;
}

attn_status seq_file_decode(const uint8_t *head, uint64_t head_bytes, struct seq_file *out,
                            char *why, size_t why_bytes)
{
    struct fixed x;
    struct checksum told;
    size_t summed = head_bytes - SEQ_FILE_SUM_BYTES;
    memcpy(&x, head, sizeof x);
    memcpy(&told, head + summed, sizeof told);
    struct checksum sum = checksum_of(head, summed);
    if (!checksum_is_equal(sum, told)) {
        snprintf(why, why_bytes,
                 "checksum of the head is %016" PRIx64 "%016" PRIx64 ", its bytes make %016" PRIx64
                 "%016" PRIx64,
                 told.high, told.low, sum.high, sum.low);
        return ATTN_EPROTO;
    }
    const uint8_t *sums = head + sizeof x, *lens = sums + (size_t)n_stored(&x) * SEQ_FILE_SUM_BYTES;
    const uint8_t *ids = lens + (size_t)x.num_layers * 4;
    const char *model = (const char *)ids + (size_t)x.n_ids * 4, *rope = model + x.model_bytes,
               *pool = rope + x.rope_bytes;
    *out = (struct seq_file){
        .geometry = {.layout = x.layout,
                     .num_layers = x.num_layers,
                     .num_kv_heads = x.num_kv_heads,
                     .head_dim_k = x.head_dim_k,
                     .head_dim_v = x.head_dim_v,
                     .block_tokens = x.block_tokens,
                     .kv_dtype = (attn_dtype)x.kv_dtype,
                     .block_bytes = x.block_bytes,
                     .attention = x.attention,
                     .model = model,
                     .rope = rope},
        .name = x.name,
        .pool = pool,
        .adapter = x.adapter,
        .n_blocks = x.n_blocks,
        .n_ids = x.n_ids,
        .freed_first = x.freed_first,
        .freed_past = x.freed_past,
        .layer_len = (const uint32_t *)(const void *)lens,
        .ids = (const uint32_t *)(const void *)ids,
        .sums = sums,
        .note = (const uint8_t *)pool + x.pool_bytes,
        .note_bytes = x.note_bytes,
    };
    if (attn_dtype_bits(out->geometry.kv_dtype) == 0) {
        snprintf(why, why_bytes, "kv_dtype is %" PRIu32 ", no dtype's number", x.kv_dtype);
        return ATTN_EPROTO;
    }
    const uint8_t *end = out->note + x.note_bytes;
    if (!is_zero(x.zeros, sizeof x.zeros) || !is_zero(end, (size_t)(head + summed - end))) {
        snprintf(why, why_bytes, "bytes that are kept are not 0");
        return ATTN_EPROTO;
    }
    attn_status st = text_check("model", model, x.model_bytes, why, why_bytes);
    if (st == ATTN_OK)
        st = text_check("rope", rope, x.rope_bytes, why, why_bytes);
    if (st == ATTN_OK)
        st = text_check("pool", pool, x.pool_bytes, why, why_bytes);
    return st == ATTN_OK ? lengths_check(out, why, why_bytes) : st;
}

/* --- geometry --------------------------------------------------------------------------------- */

bool seq_geometry_differs(const struct seq_geometry *a, const char *a_name,
                          const struct seq_geometry *b, const char *b_name, char *why,
                          size_t why_bytes)
{
    const struct {
        const char *name;
        uint64_t a, b;
    } numbers[] = {
        {"layout", a->layout, b->layout},
        {"num_layers", a->num_layers, b->num_layers},
        {"num_kv_heads", a->num_kv_heads, b->num_kv_heads},
        {"head_dim_k", a->head_dim_k, b->head_dim_k},
        {"head_dim_v", a->head_dim_v, b->head_dim_v},
        {"block_tokens", a->block_tokens, b->block_tokens},
        {"block_bytes", a->block_bytes, b->block_bytes},
        {"attention", a->attention, b->attention},
    };
    const struct {
        const char *name, *a, *b;
    } texts[] = {
        {"kv_dtype", attn_dtype_name(a->kv_dtype), attn_dtype_name(b->kv_dtype)},
        {"model", a->model, b->model},
        {"rope", a->rope, b->rope},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (strcmp(texts[i].a, texts[i].b) == 0)
            continue;
        snprintf(why, why_bytes, "%s is \"%.60s\" in %s, \"%.60s\" in %s", texts[i].name,
                 texts[i].a, a_name, texts[i].b, b_name);
        return true;
    }
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (numbers[i].a == numbers[i].b)
            continue;
        snprintf(why, why_bytes, "%s is %" PRIu64 " in %s, %" PRIu64 " in %s", numbers[i].name,
                 numbers[i].a, a_name, numbers[i].b, b_name);
        return true;
    }
    return false;
}
