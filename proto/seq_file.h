/* seq_file.h: the head of a file that holds an exported sequence. docs/sequence-file.md has the
 * format. Bytes in memory only: who reads and writes files is the client library.
 *
 * A file is a head, then the blocks that are not freed, of block_bytes. The head ends with its own
 * checksum and holds those of the blocks, so it stands for the whole.
 */
#ifndef ATTND_PROTO_SEQ_FILE_H
#define ATTND_PROTO_SEQ_FILE_H

#include "proto/attn_types.h"
#include "proto/checksum.h"

enum {
    SEQ_FILE_VERSION = 1, /* of a sequence that has all its blocks */
    SEQ_FILE_VERSION_FREED = 2, /* of one that has not */
    SEQ_FILE_FIXED_BYTES = 128, /* of the head, from its start */
    SEQ_FILE_ALIGN = 64, /* heads are a multiple */
    SEQ_FILE_SUM_BYTES = 16,
    SEQ_FILE_MAX_TEXT_BYTES = 4096, /* of model, rope and pool, each with its zero byte */
    SEQ_FILE_MAX_LAYERS = 512,
};

/* What a block's bytes mean: equal where blocks can be exchanged. */
struct seq_geometry {
    uint32_t layout; /* how a block is laid out: a daemon's number */
    uint32_t num_layers, num_kv_heads, head_dim_k, head_dim_v, block_tokens;
    attn_dtype kv_dtype;
    uint64_t block_bytes;
    uint64_t attention; /* a daemon's digest of how the layers attend */
    const char *model, *rope;
};

struct seq_file {
    struct seq_geometry geometry;
    uint64_t name; /* that the sequence had */
    const char *pool; /* the name of the pool that it was in */
    uint64_t adapter;
    uint32_t n_blocks, n_ids; /* n_blocks: what the longest layer takes */
    uint32_t freed_first, freed_past; /* of these the file has none; equal: it has all */
    const uint32_t *layer_len; /* [num_layers] */
    const uint32_t *ids; /* [n_ids] of the first tokens */
    const uint8_t *sums; /* [seq_file_n_stored][SEQ_FILE_SUM_BYTES] */
};

/* Which field differs, with both values; false: none. */
bool seq_geometry_differs(const struct seq_geometry *a, const char *a_name,
                          const struct seq_geometry *b, const char *b_name, char *why,
                          size_t why_bytes);

uint64_t seq_file_head_bytes(const struct seq_file *f);
/* dst has seq_file_head_bytes. */
void seq_file_encode(const struct seq_file *f, uint8_t *dst);

/* How long the head is, from its first SEQ_FILE_FIXED_BYTES (n_bytes of them are there) and the
 * length of the whole file.
 * Errors   ATTN_EPROTO not such a file, cut short or longer than it says; ATTN_ENOTSUP of another
 *          version. why names field and value */
attn_status seq_file_head_find(const uint8_t *bytes, size_t n_bytes, uint64_t file_bytes,
                               uint64_t *out_head_bytes, char *why, size_t why_bytes);
/* Reads a head, 8-byte aligned, that head_find has found. *out points into it. */
attn_status seq_file_decode(const uint8_t *head, uint64_t head_bytes, struct seq_file *out,
                            char *why, size_t why_bytes);

/* How many blocks it has. */
static inline uint32_t seq_file_n_stored(const struct seq_file *f)
{
    return f->n_blocks - (f->freed_past - f->freed_first);
}

/* Which of those that it has comes first at block or behind it. */
static inline uint32_t seq_file_place(const struct seq_file *f, uint32_t block)
{
    if (block < f->freed_first)
        return block;
    return block < f->freed_past ? f->freed_first : block - (f->freed_past - f->freed_first);
}

/* Of the blocks [*block, end) those that are not freed: *block is the first one then; how many come
 * one behind another, `most` at most. 0: there are none. */
static inline uint32_t seq_blocks_next(uint32_t freed_first, uint32_t freed_past, uint32_t *block,
                                       uint32_t end, uint32_t most)
{
    if (*block >= freed_first && *block < freed_past)
        *block = freed_past;
    if (*block < freed_first && freed_first < freed_past && end > freed_first)
        end = freed_first;
    uint32_t n = *block < end ? end - *block : 0;
    return n < most ? n : most;
}

/* Of a block that it has. */
static inline struct checksum seq_file_sum(const struct seq_file *f, uint32_t block)
{
    struct checksum s;
    __builtin_memcpy(&s, f->sums + (size_t)seq_file_place(f, block) * SEQ_FILE_SUM_BYTES, sizeof s);
    return s;
}

#endif
