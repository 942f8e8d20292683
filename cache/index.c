/* index.c: (tenant, name) -> sequence: open addressing with linear probing, at most half full.
 *
 * A slot's home is its tag under the mask, so removal can shift later slots back and no tombstones
 * pile up. The hash is keyed with the arena's random key: clients choose names, not slots. Derived.
 */
#include "cache/kv_internal.h"

static uint32_t tag_of(const struct kv *kv, uint32_t tenant, uint64_t name)
{
    uint64_t words[2] = {tenant, name};
    return (uint32_t)siphash(kv->key, words, sizeof words);
}

uint32_t kv_index_find(const struct kv *kv, uint32_t tenant, uint64_t name)
{
    uint32_t tag = tag_of(kv, tenant, name);
    for (uint32_t i = tag & kv->index_mask;; i = (i + 1) & kv->index_mask) {
        struct kv_index_slot slot = kv->slots[i];
        if (slot.seq == 0)
            return 0;
        if (slot.tag != tag)
            continue;
        const struct kv_seq_rec *s = &kv->seqs[slot.seq - 1];
        if (s->name == name && s->tenant == tenant)
            return slot.seq;
    }
}

void kv_index_put(struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    uint32_t tag = tag_of(kv, s->tenant, s->name);
    uint32_t i = tag & kv->index_mask;
    while (kv->slots[i].seq != 0)
        i = (i + 1) & kv->index_mask;
    kv->slots[i] = (struct kv_index_slot){.tag = tag, .seq = seq + 1};
}

void kv_index_remove(struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    uint32_t mask = kv->index_mask;
    uint32_t hole = tag_of(kv, s->tenant, s->name) & mask;
    while (kv->slots[hole].seq != seq + 1)
        hole = (hole + 1) & mask;
    /* A later slot of the run moves into the hole unless its home lies between the two. */
    for (uint32_t i = (hole + 1) & mask; kv->slots[i].seq != 0; i = (i + 1) & mask) {
        uint32_t home = kv->slots[i].tag & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            kv->slots[hole] = kv->slots[i];
            hole = i;
        }
    }
    kv->slots[hole] = (struct kv_index_slot){0};
}
