/* seq_file.h: encodes and decodes the head of a file that holds an exported sequence. The format is
 * in docs/sequence-file.md. Works on bytes in memory; the client library reads and writes the
 * files.
 *
 * A file is a head, then the blocks that are not freed, each of block_bytes. The head ends with its
 * own checksum and holds those of the blocks, so the head's checksum covers the whole file.
 */
#ifndef ATTND_PROTO_SEQ_FILE_H
#define ATTND_PROTO_SEQ_FILE_H

#include "proto/attn_types.h"
#include "proto/checksum.h"

enum {
    SEQ_FILE_VERSION = 1, /* if the sequence has all its blocks */
    SEQ_FILE_VERSION_FREED = 2, /* if some were freed */
    SEQ_FILE_VERSION_NOTE = 3, /* if it has a note, too */
    SEQ_FILE_FIXED_BYTES = 128, /* the fixed part at the start of the head */
    SEQ_FILE_ALIGN = 64, /* the size of a head is a multiple of it */
    SEQ_FILE_SUM_BYTES = 16,
    SEQ_FILE_MAX_TEXT_BYTES = 4096, /* of model, rope and pool, each with its zero byte */
    SEQ_FILE_MAX_NOTE_BYTES = 4096,
    SEQ_FILE_MAX_LAYERS = 512,
};

/* What a block's bytes mean. Blocks can be exchanged where it is equal. */
struct seq_geometry {
    uint32_t layout; /* layout of a block: a number that the daemon assigns */
    uint32_t num_layers, num_kv_heads, head_dim_k, head_dim_v, block_tokens;
    attn_dtype kv_dtype;
    uint64_t block_bytes;
    uint64_t attention; /* the daemon's digest of how the layers attend */
    const char *model, *rope;
};

struct seq_file {
    struct seq_geometry geometry;
    uint64_t name; /* the sequence's name */
    const char *pool; /* name of its pool */
    uint64_t adapter;
    uint32_t n_blocks, n_ids; /* n_blocks: for the longest layer; n_ids: known token ids */
    uint32_t freed_first, freed_past; /* blocks [freed_first, freed_past) are not in the file;
                                         equal: all are */
    const uint32_t *layer_len; /* [num_layers] */
    const uint32_t *ids; /* [n_ids] ids of the first tokens */
    const uint8_t *sums; /* [seq_file_n_stored][SEQ_FILE_SUM_BYTES] */
    const uint8_t *note; /* [note_bytes] */
    uint32_t note_bytes;
};

/* True if the two differ; why then names the first field that does, with both values. */
bool seq_geometry_differs(const struct seq_geometry *a, const char *a_name,
                          const struct seq_geometry *b, const char *b_name, char *why,
                          size_t why_bytes);

uint64_t seq_file_head_bytes(const struct seq_file *f);
/* Writes the head to dst, which has seq_file_head_bytes. */
void seq_file_encode(const struct seq_file *f, uint8_t *dst);

/* Tells how long the head is, from the first n_bytes of the file, of which it needs
 * SEQ_FILE_FIXED_BYTES, and the length of the whole file.
 * Errors   ATTN_EPROTO not such a file, cut short or longer than it says; ATTN_ENOTSUP another
 *          version. why names field and value */
attn_status seq_file_head_find(const uint8_t *bytes, size_t n_bytes, uint64_t file_bytes,
                               uint64_t *out_head_bytes, char *why, size_t why_bytes);
/* Decodes a head of the length that seq_file_head_find gave; head is 8-byte aligned. *out points
 * into it. Errors as there. */
attn_status seq_file_decode(const uint8_t *head, uint64_t head_bytes, struct seq_file *out,
                            char *why, size_t why_bytes);

/* The number of blocks that are in the file. */
static inline uint32_t seq_file_n_stored(const struct seq_file *f)
{
    return f->n_blocks - (f->freed_past - f->freed_first);
}

/* The position in the file of the block, or of the first stored block behind it. */
static inline uint32_t seq_file_place(const struct seq_file *f, uint32_t block)
{
    if (block < f->freed_first)
        return block;
    return block < f->freed_past ? f->freed_first : block - (f->freed_past - f->freed_first);
}

/* Finds a run of stored blocks in [*block, end): moves *block to its first block and returns its
 * length, `most` at most; 0: there is none. */
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

/* The checksum of a block that is in the file. */
static inline struct checksum seq_file_sum(const struct seq_file *f, uint32_t block)
{
    struct checksum s;
    __builtin_memcpy(&s, f->sums + (size_t)seq_file_place(f, block) * SEQ_FILE_SUM_BYTES, sizeof s);
    return s;
}

#endif
