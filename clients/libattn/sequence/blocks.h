/* blocks.h: blocks of a sequence out of a daemon and into one, a message's worth at a time. What
 * files (file.c) and moves (move.c) are made of.
 */
#ifndef ATTN_SEQ_BLOCKS_H
#define ATTN_SEQ_BLOCKS_H

#include "clients/libattn/pool/pool.h"
#include "proto/seq_file.h"

/* A sequence at one moment, as its daemon reports it. */
struct seq_look {
    uint64_t id, adapter;
    uint32_t epoch, n_ids;
    /* Since this epoch no truncation has left fewer tokens; 0: the daemon does not know. */
    uint32_t kept_epoch, n_kept;
    uint32_t freed_first, freed_past; /* blocks that it has none of; equal: it has all */
    struct seq_geometry geometry; /* its texts are those below */
    uint32_t layer_len[SEQ_FILE_MAX_LAYERS]; /* [geometry.num_layers] */
    char model[SEQ_FILE_MAX_TEXT_BYTES], rope[SEQ_FILE_MAX_TEXT_BYTES];
    char pool[SEQ_FILE_MAX_TEXT_BYTES];
};

/* Unless said otherwise each of these is one request of timeout_us, with its errors. */
attn_status seq_look_at(struct attn_client *c, uint64_t id, uint64_t timeout_us,
                        struct seq_look *out);
/* Looks again. *out_kept: how many of its first tokens have stayed what they were at any time since
 * the look before. ATTN_ESTALE, of which *l is the new look: the daemon does not know. */
attn_status seq_look_again(struct attn_client *c, uint64_t timeout_us, struct seq_look *l,
                           uint32_t *out_kept);
/* The same after a copy that came to st: if no truncation explains a failure, and no blocks that
 * were freed since, that is the answer. */
attn_status seq_look_after(struct attn_client *c, attn_status st, uint64_t timeout_us,
                           struct seq_look *l, uint32_t *out_kept);
/* Tokens of the shortest and of the longest layer. */
void seq_look_lengths(const struct seq_look *l, uint32_t *out_least, uint32_t *out_most);

/* What a message takes: whole blocks, or of one block some layers at a time. */
struct seq_piece {
    uint32_t n_blocks, n_layers; /* n_blocks 1, or all layers */
};
/* ATTN_EINVAL names the limit that a layer of a block is over. */
attn_status seq_piece_of(struct attn_client *c, const struct seq_geometry *g,
                         struct seq_piece *out);
/* Blocks [first, first + n) to dst, n at most piece.n_blocks, and their checksums, which equal
 * those the daemon sent, or ATTN_EPROTO. One request, or of a block that is larger as many as it
 * takes. At another epoch than this one ATTN_ESTALE; 0: at any, and ATTN_EINVAL if it has no such
 * blocks. */
attn_status seq_blocks_get(struct attn_client *c, const struct seq_look *l, uint32_t epoch,
                           struct seq_piece piece, uint32_t first, uint32_t n, uint64_t timeout_us,
                           uint8_t *dst, struct checksum *sums);
/* Appends n blocks to a sequence of the client's, of layers that then have layer_len tokens, but
 * none behind the last of these blocks. As many requests as seq_blocks_get; where one fails, some
 * layers may have got theirs. */
attn_status seq_blocks_put(struct attn_client *c, const struct attn_seq *seq,
                           const struct seq_geometry *g, struct seq_piece piece,
                           const uint32_t *layer_len, uint32_t first, uint32_t n,
                           const uint8_t *src, const struct checksum *sums, uint64_t timeout_us);
/* Of a sequence that has what comes before first in full: blocks [first, past) are freed, and those
 * that it has of them. Layers that are shorter have past blocks of tokens then, of which lens is
 * told. One request; ATTN_EINVAL also of a daemon that does not know of it. */
attn_status seq_blocks_free(struct attn_client *c, const struct attn_seq *seq,
                            const struct seq_geometry *g, const uint32_t *lens, uint32_t first,
                            uint32_t past, uint64_t timeout_us);
/* Ids [first, first + n), in as many requests as that takes; epoch as of blocks, and ATTN_EPROTO if
 * it has no such ids. */
attn_status seq_ids_get(struct attn_client *c, const struct seq_look *l, uint32_t epoch,
                        uint32_t first, uint32_t n, uint64_t timeout_us, uint32_t *dst);

/* note.c. seq_note_read: none where the daemon has no notes. seq_note_write: does nothing if there
 * is none. */
struct seq_note {
    uint32_t n_bytes;
    uint8_t bytes[ATTN_NOTE_BYTES];
};
attn_status seq_note_read(struct attn_client *c, uint64_t id, uint64_t timeout_us,
                          struct seq_note *out);
attn_status seq_note_write(attn_pool *p, const struct attn_seq *seq, const struct seq_note *note,
                           uint64_t timeout_us);

/* leftover.c: at the target of a move there is a sequence of its name. True: it was in another
 * daemon's pool `to`, a copy of the first tokens of the source and nothing else, and is forgotten.
 * False: it is not, or that is not known; the last error stays. */
bool seq_leftover_forget(struct attn_client *from, const struct seq_look *source, attn_pool *to,
                         uint64_t timeout_us);

#endif
