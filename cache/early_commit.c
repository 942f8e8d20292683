/* early_commit.c: early commits: appends whose output a worker gets before the host commits them.
 *
 * A device can tell a worker that its step is done (a lane's bell), and the worker continues with
 * the output before this process has looked. If the process dies then, the append must not be lost.
 * So it is recorded before its batch is launched, and the device writes a word of the arena before
 * it answers the worker. Where the word was written, recovery commits what was recorded, as the
 * process would have.
 *
 * A slot is a batch in flight. Its records count once n is stored, for the slot's present serial; a
 * slot never has the same serial twice, so an old word means nothing. If the sequence was truncated
 * or reopened since, its epoch differs.
 *
 * The cost is a few stores per item before a launch and one store by the device; nothing waits for
 * it. Rejected: a commit before the answer, which adds the host's way back to each layer; and the
 * worker's page as the proof, since a bell confirms only the answer before it, and after a token's
 * last layer none follows.
 */
#include "cache/kv_internal.h"

uint32_t kv_early_max(const struct kv *kv)
{
    return kv_early_capacity(&kv->config);
}

static struct kv_early_rec *records_of(const struct kv *kv, uint32_t slot)
{
    return kv->early + (size_t)slot * kv_early_max(kv);
}

uint32_t *kv_early_words(const struct kv *kv, size_t *out_bytes)
{
    *out_bytes = KV_EARLY_WORDS_BYTES;
    return kv->early_words->word;
}

void kv_early_add(struct kv *kv, uint32_t slot, kv_seq_id seq, uint32_t layer, uint32_t pos,
                  uint32_t n_tokens)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL || kv->n_early[slot] == kv_early_max(kv))
        return;
    records_of(kv, slot)[kv->n_early[slot]++] = (struct kv_early_rec){
        .seq = seq.index,
        .epoch = kv_epoch_of(s),
        .layer = layer,
        .pos = pos,
        .end = pos + n_tokens,
    };
}

uint32_t kv_early_begin(struct kv *kv, uint32_t slot)
{
    struct kv_early_slot *a = &kv->early_slots[slot];
    kv_publish32(&a->serial, a->serial + 1);
    kv_publish32(&a->n, kv->n_early[slot]);
    return a->serial;
}

void kv_early_end(struct kv *kv, uint32_t slot)
{
    if (kv->n_early[slot] == 0)
        return;
    kv->n_early[slot] = 0;
    kv_publish32(&kv->early_slots[slot].n, 0);
}

bool kv_early_is_answered(const struct kv *kv, uint32_t slot)
{
    const struct kv_early_slot *a = &kv->early_slots[slot];
    uint32_t word = __atomic_load_n(&kv->early_words->word[slot], __ATOMIC_ACQUIRE);
    return a->n > 0 && a->n <= kv_early_max(kv) && word == a->serial;
}

/* --- recovery --------------------------------------------------------------------------------- */

/* True if committing the record would move a length. The sequence must still have the same epoch,
 * and its table all the blocks. */
static bool is_to_commit(const struct kv *kv, const struct kv_early_rec *r)
{
    const struct kv_seq_rec *s = r->seq < kv->config.max_sequences ? kv_seq_live(kv, r->seq) : NULL;
    if (s == NULL || kv_seq_damage(kv, r->seq) != NULL || kv_epoch_of(s) != r->epoch ||
        s->redo_len != 0 || kv->given[r->seq].row_of != 0)
        return false;
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    if (r->layer >= p->n_layers || r->end > kv_max_tokens(kv, p) ||
        r->pos > kv_lens(kv, r->seq)[r->layer] || r->end <= kv_lens(kv, r->seq)[r->layer])
        return false;
    const uint32_t *row = kv_own_row(kv, r->seq);
    for (uint32_t i = 0; i < kv_blocks_of(p, r->end); i++)
        if (row[i] >= p->n_blocks)
            return false;
    return true;
}

/* True if some append of this sequence is to be committed. */
static bool has_any(const struct kv *kv, uint32_t seq)
{
    for (uint32_t slot = 0; slot < KV_EARLY_SLOTS; slot++)
        for (uint32_t i = 0; kv_early_is_answered(kv, slot) && i < kv->early_slots[slot].n; i++) {
            const struct kv_early_rec *r = &records_of(kv, slot)[i];
            if (r->seq == seq && is_to_commit(kv, r))
                return true;
        }
    return false;
}

/* In the order of a commit: first the copies become final, then the lengths move. */
void kv_early_recover(struct kv *kv)
{
    for (uint32_t i = 0; i < kv->journal_capacity; i++) {
        struct kv_journal_rec *e = &kv->journal[i];
        if (e->state == KV_LIVE && has_any(kv, e->seq))
            kv_publish32(&e->state, 0);
    }
    for (uint32_t slot = 0; slot < KV_EARLY_SLOTS; slot++) {
        for (uint32_t i = 0; kv_early_is_answered(kv, slot) && i < kv->early_slots[slot].n; i++) {
            const struct kv_early_rec *r = &records_of(kv, slot)[i];
            if (is_to_commit(kv, r))
                kv_publish32(&kv_lens(kv, r->seq)[r->layer], r->end);
        }
        kv_publish32(&kv->early_slots[slot].n, 0);
        kv->n_early[slot] = 0;
    }
}
