/* leftover.c: what a move that was cut off has left at its target. Its client's death is noticed
 * there only when the lease ends; but a copy that has nothing but what the source has can go at
 * once, so that the move can be repeated.
 */
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/sequence/blocks.h"

struct leftover {
    struct attn_client *from;
    attn_pool *to;
    uint64_t timeout_us;
    const struct seq_look *source;
    struct seq_look look; /* of the copy */
};

/* Not the source itself, seen by another way. A daemon without a number counts as the same. */
static bool is_another_daemon(const struct leftover *l)
{
    if (attn_client_ping(l->from, l->timeout_us, NULL) != ATTN_OK ||
        attn_client_ping(l->to->client, l->timeout_us, NULL) != ATTN_OK)
        return false;
    uint64_t a = client_info(l->from).boot_id, b = client_info(l->to->client).boot_id;
    return a != 0 && b != 0 && a != b;
}

static bool is_alike(const struct leftover *l)
{
    char why[ATTN_MESSAGE_BYTES];
    const struct seq_look *a = l->source, *b = &l->look;
    if (strcmp(b->pool, l->to->spec.name) != 0 || a->adapter != b->adapter ||
        seq_geometry_differs(&a->geometry, "a", &b->geometry, "b", why, sizeof why))
        return false;
    for (uint32_t i = 0; i < a->geometry.num_layers; i++)
        if (b->layer_len[i] > a->layer_len[i])
            return false;
    return true;
}

static bool is_freed(const struct seq_look *l, uint32_t block)
{
    return block >= l->freed_first && block < l->freed_past;
}

/* Every block that both have is the same. One at a time: most copies that were cut off are
 * short. */
static bool has_same_blocks(const struct leftover *l)
{
    const struct seq_geometry *g = &l->source->geometry;
    struct seq_piece a_piece, b_piece;
    struct checksum a, b;
    uint32_t least, most;
    bool is_same = seq_piece_of(l->from, g, &a_piece) == ATTN_OK &&
                   seq_piece_of(l->to->client, g, &b_piece) == ATTN_OK;
    uint8_t *block = malloc(g->block_bytes);
    seq_look_lengths(&l->look, &least, &most);
    for (uint32_t i = 0; is_same && block != NULL && (uint64_t)i * g->block_tokens < most; i++) {
        if (is_freed(l->source, i) || is_freed(&l->look, i))
            continue;
        is_same = seq_blocks_get(l->from, l->source, 0, a_piece, i, 1, l->timeout_us, block, &a) ==
                      ATTN_OK &&
                  seq_blocks_get(l->to->client, &l->look, l->look.epoch, b_piece, i, 1,
                                 l->timeout_us, block, &b) == ATTN_OK &&
                  memcmp(&a, &b, sizeof a) == 0;
    }
    is_same &= block != NULL;
    free(block);
    return is_same;
}

/* Takes the copy over, from which on nobody appends to it, and forgets it if nobody has. */
static bool forget(const struct leftover *l)
{
    uint32_t lens[SEQ_FILE_MAX_LAYERS];
    struct attn_seq seq;
    return attn_seq_adopt(l->to, l->look.id, l->timeout_us, &seq, lens) == ATTN_OK &&
           memcmp(lens, l->look.layer_len, l->look.geometry.num_layers * sizeof lens[0]) == 0 &&
           attn_seq_close(l->to, &seq, l->timeout_us) == ATTN_OK;
}

bool seq_leftover_forget(struct attn_client *from, const struct seq_look *source, attn_pool *to,
                         uint64_t timeout_us)
{
    struct leftover *l = calloc(1, sizeof *l);
    if (l == NULL)
        return false;
    struct error_kept kept = error_keep();
    l->from = from;
    l->to = to;
    l->timeout_us = timeout_us;
    l->source = source;
    bool is_gone = is_another_daemon(l) &&
                   seq_look_at(to->client, source->id, timeout_us, &l->look) == ATTN_OK &&
                   is_alike(l) && has_same_blocks(l) && forget(l);
    free(l);
    error_restore(&kept);
    return is_gone;
}
