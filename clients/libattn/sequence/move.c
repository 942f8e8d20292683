/* move.c: a sequence from one daemon to another while it goes on.
 *
 * Full blocks are copied as they become full. Truncations may come in between (rejected drafts of a
 * worker that speculates): after each round the source says how many tokens have stayed all the
 * time, and the target releases the blocks behind them. It hears of token ids after that, so it
 * never publishes a block that is not what they say. When there is no full block left, the sequence
 * is adopted: from then on its users are refused, so no token can be appended at the source
 * that the target has not. The rest follows, and only when the target has all of it is the source
 * closed; if another client adopts it before that, the target closes its copy instead. A source
 * that does not know what has stayed is begun with again, and at last adopted first and copied
 * then.
 *
 * What its windows have released at the source is freed at the target, too, as soon as that has
 * all before it; where the source has released more than the target has, that begins behind it.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/sequence/blocks.h"

enum {
    MAX_TRIES = 3,
    MAX_CUTS = 8, /* rounds that a truncation takes blocks from before the sequence is adopted */
    MAX_FENCES = 3, /* of adopting it as it was looked at, before it is adopted as it is */
};

struct move {
    struct attn_client *from;
    attn_pool *to;
    uint64_t timeout_us;
    struct seq_look look;
    struct attn_seq seq; /* at the target */
    bool is_open, is_fenced, is_refused; /* by the target: blocks */
    uint32_t n_blocks, n_ids; /* that the target has */
    uint32_t freed_past, n_kept; /* of these, freed are [n_kept, freed_past) */
    uint32_t n_sent, n_at_once;
    struct seq_piece out, in; /* of a message of the source's, the target's */
    uint8_t *blocks; /* [n_at_once] */
    struct checksum *sums; /* [n_at_once] */
    uint64_t stop_ns; /* when it began */
    struct attn_moved moved;
    struct seq_note note;
};

/* The target has the first n_blocks blocks and ids of their tokens at most from now on. */
static attn_status target_cut(struct move *m, uint32_t n_blocks)
{
    uint32_t len = n_blocks * m->look.geometry.block_tokens;
    attn_status st = attn_seq_truncate(m->to, &m->seq, len, m->timeout_us);
    if (st != ATTN_OK)
        return st;
    m->n_blocks = n_blocks;
    m->n_ids = m->n_ids < len ? m->n_ids : len;
    m->freed_past = n_blocks > m->n_kept ? m->freed_past : 0;
    return ATTN_OK;
}

/* Are blocks freed at the source, by the look, that are not at the target, which has all before? */
static bool has_freed(const struct move *m)
{
    return m->look.freed_past > m->freed_past && m->n_blocks >= m->look.freed_first;
}

static attn_status freed_move(struct move *m)
{
    const struct seq_look *l = &m->look;
    uint32_t lens[SEQ_FILE_MAX_LAYERS];
    attn_status st = ATTN_OK;
    if (m->n_blocks < l->freed_past && m->n_blocks > l->freed_first)
        st = target_cut(m, l->freed_first);
    if (st != ATTN_OK)
        return st;
    uint32_t n_blocks = m->n_blocks > l->freed_past ? m->n_blocks : l->freed_past;
    for (uint32_t i = 0; i < l->geometry.num_layers; i++)
        lens[i] = n_blocks * l->geometry.block_tokens;
    st = seq_blocks_free(m->to->client, &m->seq, &l->geometry, lens, l->freed_first, l->freed_past,
                         m->timeout_us);
    if (st != ATTN_OK)
        return st;
    m->n_blocks = n_blocks;
    m->n_kept = l->freed_first;
    m->freed_past = l->freed_past;
    return ATTN_OK;
}

/* The next blocks below end. */
static attn_status piece_move(struct move *m, uint32_t epoch, uint32_t end)
{
    const struct seq_geometry *g = &m->look.geometry;
    uint32_t n =
        seq_blocks_next(m->look.freed_first, m->look.freed_past, &m->n_blocks, end, m->n_at_once);
    attn_status st = seq_blocks_get(m->from, &m->look, epoch, m->out, m->n_blocks, n, m->timeout_us,
                                    m->blocks, m->sums);
    if (st != ATTN_OK)
        return st;
    st = seq_blocks_put(m->to->client, &m->seq, g, m->in, m->look.layer_len, m->n_blocks, n,
                        m->blocks, m->sums, m->timeout_us);
    m->is_refused = st != ATTN_OK;
    if (st == ATTN_OK) {
        m->n_blocks += n;
        m->n_sent += n;
    }
    return st;
}

/* Blocks below end that the target has not; epoch as of seq_blocks_get. */
static attn_status blocks_move(struct move *m, uint32_t epoch, uint32_t end)
{
    attn_status st = ATTN_OK;
    while (st == ATTN_OK && (m->n_blocks < end || has_freed(m))) {
        if (!has_freed(m)) {
            st = piece_move(m, epoch, end);
            continue;
        }
        st = freed_move(m);
        m->is_refused = st != ATTN_OK;
    }
    return st;
}

/* Ids below end, as of the look, that the target has not. */
static attn_status ids_move(struct move *m, uint32_t end)
{
    if (end <= m->n_ids)
        return ATTN_OK;
    uint32_t n = end - m->n_ids;
    uint32_t *ids = malloc(n * sizeof *ids);
    if (ids == NULL)
        return error_set(ATTN_ENOMEM, "no memory for %" PRIu32 " token ids", n);
    attn_status st = seq_ids_get(m->from, &m->look, m->look.epoch, m->n_ids, n, m->timeout_us, ids);
    if (st == ATTN_OK)
        st = attn_seq_tokens(m->to, &m->seq, m->n_ids, ids, n, m->timeout_us);
    if (st == ATTN_OK)
        m->n_ids += n;
    free(ids);
    return st;
}

/* The target's sequence, empty, and memory for blocks on their way. */
static attn_status target_open(struct move *m)
{
    const struct attn_tokens none = {.adapter = m->look.adapter};
    uint64_t bytes = m->look.geometry.block_bytes;
    uint32_t n_cached;
    attn_status st = seq_piece_of(m->from, &m->look.geometry, &m->out);
    if (st == ATTN_OK)
        st = seq_piece_of(m->to->client, &m->look.geometry, &m->in);
    if (st != ATTN_OK)
        return st;
    if (m->blocks == NULL) {
        m->n_at_once = m->out.n_blocks < m->in.n_blocks ? m->out.n_blocks : m->in.n_blocks;
        m->blocks = malloc(m->n_at_once * bytes);
        m->sums = malloc(m->n_at_once * sizeof *m->sums);
        if (m->blocks == NULL || m->sums == NULL)
            return error_set(ATTN_ENOMEM, "no memory for a move");
    }
    m->n_blocks = m->n_ids = m->freed_past = m->n_sent = 0;
    st = attn_seq_open_with(m->to, m->look.id, &none, m->timeout_us, &m->seq, &n_cached);
    if (st == ATTN_EEXIST && seq_leftover_forget(m->from, &m->look, m->to, m->timeout_us))
        st = attn_seq_open_with(m->to, m->look.id, &none, m->timeout_us, &m->seq, &n_cached);
    m->is_open = st == ATTN_OK;
    return st;
}

/* What is begun at the target is forgotten; the error stays. */
static void target_forget(struct move *m)
{
    if (!m->is_open)
        return;
    struct error_kept kept = error_keep();
    attn_seq_close(m->to, &m->seq, m->timeout_us);
    m->is_open = false;
    error_restore(&kept);
}

/* The target releases what has not stayed at the source. */
static attn_status cut(struct move *m, uint32_t n_kept)
{
    uint32_t n_blocks = n_kept / m->look.geometry.block_tokens;
    if (n_blocks >= m->n_blocks && n_kept >= m->n_ids)
        return ATTN_OK;
    n_blocks = n_blocks < m->n_blocks ? n_blocks : m->n_blocks;
    attn_status st = target_cut(m, n_blocks);
    if (st == ATTN_EINVAL && m->freed_past > 0 && n_blocks > m->n_kept)
        st = target_cut(m, m->n_kept); /* a query there would see what is freed */
    return st;
}

/* One look after blocks were copied; st is what came of that. *out_is_cut: some have not stayed. */
static attn_status look_after(struct move *m, attn_status st, bool *out_is_cut)
{
    if (m->is_refused)
        return st;
    uint32_t n_blocks = m->n_blocks, n_kept;
    attn_status looked = seq_look_after(m->from, st, m->timeout_us, &m->look, &n_kept);
    if (looked == ATTN_OK)
        looked = cut(m, n_kept);
    *out_is_cut = st != ATTN_OK || m->n_blocks < n_blocks;
    return looked;
}

/* Until every full block that was there at the last look is at the target. */
static attn_status move_live(struct move *m)
{
    uint32_t bt = m->look.geometry.block_tokens, least, most;
    for (int n_cuts = 0; n_cuts < MAX_CUTS;) {
        bool is_cut = false;
        seq_look_lengths(&m->look, &least, &most);
        uint32_t n_full = least / bt;
        if (n_full <= m->n_blocks && !has_freed(m))
            break;
        for (uint32_t i = 0; i < m->look.geometry.num_layers; i++)
            m->look.layer_len[i] = n_full * bt; /* what the target has then */
        attn_status st = look_after(m, blocks_move(m, 0, n_full), &is_cut);
        if (st != ATTN_OK)
            return st;
        uint32_t n_ids = m->n_blocks * bt < m->look.n_ids ? m->n_blocks * bt : m->look.n_ids;
        st = ids_move(m, n_ids);
        if (st != ATTN_OK && st != ATTN_ESTALE) /* else they go with the rest */
            return st;
        n_cuts += is_cut;
    }
    return ATTN_OK;
}

static attn_status take_epoch(struct client_request *r, const struct wire_reply *reply)
{
    if (reply->header->body_case == ATTND__REPLY__BODY_SEQ)
        *(uint32_t *)r->take_arg = reply->header->seq->epoch;
    return ATTN_OK;
}

/* Adopts the sequence at the source: no append is accepted there any more. epoch 0: at any
 * epoch. */
static attn_status source_adopt(struct move *m, uint32_t epoch)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Adopt adopt = ATTND__ADOPT__INIT;
    uint32_t new_epoch = 0;
    adopt.seq = m->look.id;
    adopt.epoch = epoch;
    req.body_case = ATTND__REQUEST__BODY_ADOPT;
    req.adopt = &adopt;
    m->stop_ns = attn_now_ns();
    attn_status st = client_call(m->from, &req, m->timeout_us, take_epoch, &new_epoch);
    m->is_fenced = st == ATTN_OK || st == ATTN_ETIMEDOUT || st == ATTN_ECONN; /* it may be */
    if (st == ATTN_OK && epoch != 0)
        m->look.epoch = new_epoch; /* what was looked at is adopted */
    return st;
}

/* As it was looked at, or as it is, and what has not stayed until then goes. */
static attn_status source_fence(struct move *m, bool is_live)
{
    attn_status st = ATTN_ESTALE;
    uint32_t n_kept;
    for (int i = 0; is_live && st == ATTN_ESTALE && i < MAX_FENCES; i++) {
        st = source_adopt(m, m->look.epoch);
        if (st == ATTN_ESTALE) {
            attn_status looked = seq_look_again(m->from, m->timeout_us, &m->look, &n_kept);
            if (looked == ATTN_OK)
                looked = cut(m, n_kept);
            if (looked != ATTN_OK)
                return looked;
        }
    }
    if (st == ATTN_ESTALE)
        st = source_adopt(m, 0);
    if (st != ATTN_OK)
        return st;
    st = seq_look_again(m->from, m->timeout_us, &m->look, &n_kept);
    if (st == ATTN_ESTALE) {
        st = ATTN_OK;
        n_kept = 0;
    }
    return st == ATTN_OK ? cut(m, n_kept) : st;
}

/* What the live part has left. */
static attn_status move_rest(struct move *m)
{
    uint32_t bt = m->look.geometry.block_tokens, least, most, before = m->n_sent;
    seq_look_lengths(&m->look, &least, &most);
    attn_status st = blocks_move(m, m->look.epoch, most / bt + (most % bt != 0));
    if (st == ATTN_OK)
        st = ids_move(m, m->look.n_ids);
    if (st == ATTN_OK)
        st = seq_note_read(m->from, m->look.id, m->timeout_us, &m->note);
    if (st == ATTN_OK)
        st = seq_note_write(m->to, &m->seq, &m->note, m->timeout_us);
    uint32_t n_blocks = m->n_blocks - (m->look.freed_past - m->look.freed_first);
    m->moved = (struct attn_moved){.struct_size = sizeof m->moved,
                                   .n_tokens = most,
                                   .n_blocks = n_blocks,
                                   .n_blocks_stopped = m->n_sent - before,
                                   .bytes = n_blocks * m->look.geometry.block_bytes,
                                   .stop_ns = attn_now_ns() - m->stop_ns};
    return st;
}

static attn_status source_close(struct move *m)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Close close = ATTND__CLOSE__INIT;
    Attnd__Moved moved = ATTND__MOVED__INIT;
    moved.url = m->to->client->url;
    moved.seq = m->seq.id;
    moved.epoch = m->seq.epoch;
    if (strlen(moved.url) < sizeof((struct attn_place){0}).url)
        close.moved = &moved; /* else its users are told that it is not there */
    close.seq = m->look.id;
    close.epoch = m->look.epoch;
    req.body_case = ATTND__REQUEST__BODY_CLOSE;
    req.close = &close;
    return client_call(m->from, &req, m->timeout_us, NULL, NULL);
}

static attn_status move_once(struct move *m, bool is_live)
{
    attn_status st = seq_look_at(m->from, m->look.id, m->timeout_us, &m->look);
    if (st == ATTN_OK)
        st = target_open(m);
    if (st == ATTN_OK && is_live)
        st = move_live(m);
    if (st == ATTN_OK)
        st = source_fence(m, is_live);
    return st == ATTN_OK ? move_rest(m) : st;
}

static attn_status move_run(struct move *m)
{
    attn_status st = ATTN_ESTALE;
    for (int i = 0; i < MAX_TRIES && st == ATTN_ESTALE && !m->is_fenced; i++) {
        st = move_once(m, i + 1 < MAX_TRIES);
        if (st != ATTN_OK)
            target_forget(m);
    }
    if (st != ATTN_OK && m->is_fenced) {
        struct error_kept kept = error_keep();
        kept.error.message[120] = '\0';
        return error_set(st, "%s; sequence %" PRIu64 " is at its source as it was: adopt it there",
                         kept.error.message, m->look.id);
    }
    if (st != ATTN_OK)
        return st;
    st = source_close(m);
    /* adopted there by another client, which may append: it is that client's */
    if (st == ATTN_ESTALE) {
        target_forget(m);
        return st;
    }
    m->moved.is_left = st != ATTN_OK && st != ATTN_ENOTFOUND && st != ATTN_EMOVED;
    return ATTN_OK;
}

static attn_status take_place(struct client_request *r, const struct wire_reply *reply)
{
    struct attn_place *out = r->take_arg;
    if (reply->header->body_case != ATTND__REPLY__BODY_MOVED ||
        strlen(reply->header->moved->url) >= sizeof out->url) {
        snprintf(r->result.message, sizeof r->result.message,
                 "malformed reply: no place, or a url of "
                 "128 bytes and more");
        return ATTN_EPROTO;
    }
    const Attnd__Moved *at = reply->header->moved;
    *out = (struct attn_place){.id = at->seq, .epoch = at->epoch};
    snprintf(out->url, sizeof out->url, "%s", at->url);
    return ATTN_OK;
}

attn_status attn_seq_locate(attn_client *c, uint64_t id, uint32_t epoch, uint64_t timeout_us,
                            struct attn_place *out)
{
    attn_status st = out == NULL ? error_set(ATTN_EINVAL, "out is NULL") : client_check(c);
    if (st != ATTN_OK)
        return st;
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Locate locate = ATTND__LOCATE__INIT;
    struct attn_place taken;
    locate.seq = id;
    locate.epoch = epoch;
    req.body_case = ATTND__REQUEST__BODY_LOCATE;
    req.locate = &locate;
    st = client_call(c, &req, timeout_us, take_place, &taken);
    if (st == ATTN_OK)
        *out = taken;
    return st;
}

attn_status attn_seq_pool(attn_client *c, uint64_t id, uint64_t timeout_us, char out_name[64])
{
    attn_status st =
        out_name == NULL ? error_set(ATTN_EINVAL, "out_name is NULL") : client_check(c);
    if (st != ATTN_OK)
        return st;
    struct seq_look *look = calloc(1, sizeof *look);
    if (look == NULL)
        return error_set(ATTN_ENOMEM, "no memory for a look at a sequence");
    st = seq_look_at(c, id, timeout_us, look);
    if (st == ATTN_OK)
        snprintf(out_name, 64, "%.63s", look->pool);
    free(look);
    return st;
}

attn_status attn_seq_move(attn_client *from, uint64_t id, attn_pool *to, uint64_t timeout_us,
                          struct attn_seq *out_seq, struct attn_moved *out_moved)
{
    if (to == NULL || out_seq == NULL)
        return error_set(ATTN_EINVAL, "to or out_seq is NULL");
    if (out_moved != NULL && out_moved->struct_size != sizeof *out_moved)
        return error_set(ATTN_EINVAL, "attn_moved.struct_size %u: this library knows %zu",
                         out_moved->struct_size, sizeof *out_moved);
    attn_status st = client_check(from);
    if (st == ATTN_OK)
        st = client_check(to->client);
    if (st == ATTN_OK)
        st = pool_check(to);
    if (st != ATTN_OK)
        return st;
    struct move *m = calloc(1, sizeof *m);
    if (m == NULL)
        return error_set(ATTN_ENOMEM, "no memory for a move");
    m->from = from;
    m->to = to;
    m->timeout_us = timeout_us;
    m->look.id = id;
    st = move_run(m);
    if (st == ATTN_OK) {
        *out_seq = m->seq;
        if (out_moved != NULL)
            *out_moved = m->moved;
    }
    free(m->blocks);
    free(m->sums);
    free(m);
    return st;
}
