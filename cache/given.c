/* given.c: what clients say of a sequence beside its tokens: how long published blocks stay when no
 * sequence uses them, and a note for whoever adopts it.
 *
 * A range of retention begins at a token and ends where the next one begins. A block follows the
 * range of its first token. The last sequence that published or found a block, or has a block equal
 * to it, and asked for a retention decides (prefix.c finds them). Retention only orders evictions,
 * so a record half written by a kill does no harm.
 *
 * A new note is written where the old one is not, and one store makes it the sequence's. It lies at
 * the start of its row if there is room before the old one, else behind it, so that small ones
 * share a page. The row's pages are counted as those of ids are (room.c); without a note there are
 * none.
 */
#include "cache/kv_internal.h"

#include <string.h>

attn_status kv_retention_check(struct kv *kv, uint64_t name, const struct kv_retention *r,
                               uint32_t n)
{
    unsigned long long seq = name;
    if (n > KV_MAX_RETENTIONS)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: retention has %u ranges, at most %d", seq,
                       n, KV_MAX_RETENTIONS);
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0 && r[i].from <= r[i - 1].from)
            return kv_fail(kv, ATTN_EINVAL,
                           "sequence %llu: retention[%u] is from token %u, the one before from %u",
                           seq, i, r[i].from, r[i - 1].from);
        if (r[i].priority < KV_MIN_PRIORITY || r[i].priority > KV_MAX_PRIORITY)
            return kv_fail(kv, ATTN_EINVAL,
                           "sequence %llu: retention[%u].priority is %d, not in %d..%d", seq, i,
                           r[i].priority, KV_MIN_PRIORITY, KV_MAX_PRIORITY);
        if (r[i].life_s > KV_MAX_LIFE_S)
            return kv_fail(kv, ATTN_EINVAL,
                           "sequence %llu: retention[%u].time_to_live is %u s, at most %u", seq, i,
                           r[i].life_s, KV_MAX_LIFE_S);
    }
    return ATTN_OK;
}

/* 0: no limit; else log2 of the time to live, rounded up, plus one. */
static uint8_t life_of(uint32_t s)
{
    uint8_t life = 1;
    if (s == 0)
        return 0;
    while (1u << (life - 1) < s)
        life++;
    return life;
}

static void retain(struct kv *kv, struct kv_pool_rec *p, uint32_t block,
                   const struct kv_retention *r)
{
    bool is_cached = kv_block(kv, p, block)->n_refs == 0;
    struct kv_retained_rec *t = kv_retained(kv, p, block);
    if (is_cached)
        kv_lru_take(kv, p, block);
    t->priority = (uint8_t)(r->priority - KV_MIN_PRIORITY);
    t->life = life_of(r->life_s);
    t->is_pinned = r->is_pinned;
    if (is_cached)
        kv_lru_put(kv, p, block);
}

void kv_retain_default(struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    *kv_retained(kv, p, block) =
        (struct kv_retained_rec){.used_s = kv->now_s, .priority = -KV_MIN_PRIORITY};
}

void kv_retain(struct kv *kv, uint32_t seq, uint32_t index, uint32_t block)
{
    const struct kv_given_rec *g = &kv->given[seq];
    struct kv_pool_rec *p = &kv->pools[kv->seqs[seq].pool];
    uint64_t token = (uint64_t)index << p->block_shift;
    uint32_t i = g->n_retentions;
    while (i > 0 && g->retention[i - 1].from > token)
        i--;
    if (i > 0)
        retain(kv, p, block, &g->retention[i - 1]);
}

void kv_retention_recover(struct kv *kv, uint32_t seq)
{
    struct kv_given_rec *g = &kv->given[seq];
    uint64_t name = kv->seqs[seq].name;
    if (kv_retention_check(kv, name, g->retention, g->n_retentions) != ATTN_OK)
        g->n_retentions = 0;
}

void kv_retained_recover(struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    const struct kv_retained_rec *t = kv_retained(kv, p, block);
    if (t->priority >= KV_N_PRIORITIES || t->life >= KV_N_LIVES || t->is_pinned > 1 ||
        t->was_found > 1)
        kv_retain_default(kv, p, block);
}

/* --- notes ------------------------------------------------------------------------------------ */

static uint64_t note_seal(const struct kv *kv, const struct kv_note_head *h)
{
    const uint8_t *from = (const uint8_t *)&h->request;
    return siphash(kv->key, from, (size_t)((const uint8_t *)(h + 1) + h->n_bytes - from));
}

bool kv_note_is_damaged(const struct kv *kv, uint32_t seq)
{
    uint64_t at = (uint64_t)kv->given[seq].note - 1;
    const struct kv_note_head *h = kv_note_head(kv, seq);
    if (h == NULL)
        return false;
    if (at % sizeof(uint64_t) != 0 || at + sizeof *h > KV_NOTE_ROW_BYTES)
        return true;
    return h->n_bytes > KV_MAX_NOTE_BYTES || at + sizeof *h + h->n_bytes > KV_NOTE_ROW_BYTES ||
           h->seal != note_seal(kv, h);
}

/* Writes it at this byte of the row and makes it the sequence's. */
static void note_put(struct kv *kv, uint32_t seq, uint32_t at, const struct kv_note *note)
{
    struct kv_note_head *h = (struct kv_note_head *)(kv_note_row(kv, seq) + at);
    *h = (struct kv_note_head){
        .request = note->request, .epoch = note->epoch, .n_bytes = note->n_bytes};
    if (note->n_bytes > 0)
        memcpy(h + 1, note->bytes, note->n_bytes);
    h->seal = note_seal(kv, h);
    kv_publish32(&kv->given[seq].note, at + 1);
}

void kv_note_put(struct kv *kv, uint32_t seq, const struct kv_note *note)
{
    if (note->request != KV_NO_REQUEST)
        note_put(kv, seq, 0, note);
}

struct kv_note kv_seq_note_get(const struct kv *kv, kv_seq_id seq)
{
    const struct kv_note_head *h =
        kv_seq_live(kv, seq.index) == NULL ? NULL : kv_note_head(kv, seq.index);
    if (h == NULL)
        return (struct kv_note){0};
    return (struct kv_note){(const uint8_t *)(h + 1), h->n_bytes, h->request, h->epoch};
}

attn_status kv_seq_note(struct kv *kv, kv_seq_id seq, uint64_t request, const uint8_t *bytes,
                        uint32_t n_bytes)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", seq.index);
    if (n_bytes > KV_MAX_NOTE_BYTES)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: its note has %u bytes, at most %d",
                       (unsigned long long)s->name, n_bytes, KV_MAX_NOTE_BYTES);
    const struct kv_note old = kv_seq_note_get(kv, seq),
                         note = {bytes, n_bytes, request, kv_epoch_of(s)};
    if (old.epoch == note.epoch && old.request == request)
        return ATTN_OK; /* a repeat */
    if (old.epoch == note.epoch && old.request > request)
        return kv_fail(kv, ATTN_ESTALE,
                       "sequence %llu: request %llu is older than %llu, which set its note",
                       (unsigned long long)s->name, (unsigned long long)request,
                       (unsigned long long)old.request);
    uint32_t old_at = kv->given[seq.index].note, old_end = kv_note_end(kv, seq.index);
    uint32_t n = kv_note_bytes(n_bytes), at = old_at > n ? 0 : old_end;
    attn_status st =
        kv_room_take(kv, s->tenant, s->name, kv->given[seq.index].n_ids, s->n_blocks,
                     at + n > old_end ? at + n : old_end, &kv->links[seq.index].n_pages);
    if (st != ATTN_OK)
        return st;
    note_put(kv, seq.index, at, &note);
    kv_room_trim(kv, seq.index);
    return ATTN_OK;
}
