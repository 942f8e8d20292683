/* kv_internal.h: what the files of cache/ share; only they and their tests include it.
 *
 * Who calls whom: a file calls only files of lines below its own, so there is no circle.
 *
 *   open     makes or maps the arena      check        proves derived state against truth
 *   pools    create, find, drop           resize       pools grow and shrink
 *   recover  derived state from truth     import       moves between caches; holds
 *   tree     trees that wait for a commit
 *   seq      open, fork, truncate, close  early_commit answered before the commit
 *   append   reserve, commit, journal     damage       what truth alone tells of a record
 *   idle     blocks in host memory        reserve      blocks that owners have set aside
 *   prefix   publishing, promotions       fork         lazy forks            window freed blocks
 *   blocks   references, free lists       retention    how long blocks stay
 *   room     memory of tables that fill
 *   lru      which block is evicted       published    records, events       dedup repeats, epochs
 *   charge   what owners may take
 *   records  in use, seals, failures      index        (tenant, name) -> sequence
 *   siphash  the keyed hash               tier_store   (by itself) a store for evicted blocks
 *
 * Order of writes: a truth that recovery must find is published with kv_publish32/64, one aligned
 * store with a compiler barrier on both sides. A process dies between two instructions and its
 * stores up to there are in the memfd, so program order is all that is needed.
 */
#ifndef ATTND_CACHE_KV_INTERNAL_H
#define ATTND_CACHE_KV_INTERNAL_H

#include <stdatomic.h>
#include <sys/queue.h>

#include "cache/arena.h"
#include "cache/kv_idle.h"
#include "cache/kv_move.h"
#include "cache/kv_tier.h"
#include "cache/siphash.h"

/* Which pages of idle memory are taken. Derived; lives in this process, not in the arena. */
struct kv_pages {
    uint64_t *map; /* one bit per page; NULL: no idle memory */
    uint32_t n, n_used;
    uint32_t next; /* where the next search starts */
    uint32_t too_long; /* no run of this many pages is free */
    bool are_new; /* until the arena has been recovered */
};

struct kv {
    int fd;
    uint8_t *base;
    uint64_t bytes;
    struct kv_config config; /* ours: the arena's copy is only compared with it */
    uint64_t key[2];
    uint64_t root_secret[2], block_secret[2];
    uint32_t journal_capacity, index_mask, prefix_mask;
    struct kv_pool_rec *pools;
    uint8_t *specs; /* [max_pools][KV_SPEC_BYTES] */
    struct kv_seq_rec *seqs;
    uint32_t *lens; /* [max_sequences][max_layers] */
    uint32_t *holes; /* [max_sequences] past the kept entries, those below this one name no block */
    uint32_t *latest; /* [max_sequences][max_layers] position of the latest append, for windows */
    struct kv_tree_rec *trees; /* [max_sequences] */
    struct kv_given_rec *given; /* [max_sequences] */
    uint32_t *given_ids; /* [max_sequences][kv_row_words(max_seq_tokens)] */
    uint32_t *notes; /* [max_sequences][kv_row_words(KV_NOTE_ROW_BYTES / 4)] */
    struct kv_published_rec *published; /* [max_blocks] */
    struct kv_retained_rec *retained; /* [max_blocks] */
    uint32_t *published_ids; /* each pool's from first_block * max_block_tokens on */
    struct kv_owner_rec *owners; /* [max_owners] */
    struct kv_seen_rec *seen; /* [max_owners] */
    struct kv_epochs *epochs;
    struct kv_moved_rec *moved; /* [KV_MAX_MOVED] */
    struct kv_journal_rec *journal;
    struct kv_early_slot *early_slots; /* [KV_EARLY_SLOTS] */
    struct kv_early_rec *early; /* [KV_EARLY_SLOTS][kv_early_max] */
    struct kv_early_words *early_words;
    uint32_t *tables; /* [max_sequences][kv_row_words(max_seq_blocks)] */
    struct kv_block_rec *blocks; /* [max_blocks] */
    struct kv_seq_links *links;
    struct kv_index_slot *slots;
    uint32_t *prefixes; /* [prefix_mask + 1] first block of a slot, plus one */
    uint32_t *owned; /* [max_owners] first sequence, plus one */
    uint64_t *reserved; /* [max_owners][max_pools] */
    uint64_t (*last_set)[KV_N_SETTINGS]; /* [max_owners][max_pools] requests */
    uint32_t *charged; /* [max_owners + 1][max_pools] */
    struct kv_heads *heads;
    struct kv_event *events; /* [config.events_kept] of this process; NULL: none */
    uint64_t first_event; /* the number of the first one that this process has */
    uint32_t n_early[KV_EARLY_SLOTS]; /* records of each slot so far */
    uint32_t now_s;
    uint32_t epoch_bits, epoch_maker; /* kv_set_epochs */
    struct kv_tier_ops tier; /* all NULL: no tier */
    uint32_t *n_parted; /* [max_pools] since lost blocks were looked for (kv_block_make_room) */
    LIST_HEAD(, kv_promote) promotions; /* of this process, as are the next two lists */
    LIST_HEAD(, kv_seq_import) imports;
    LIST_HEAD(, kv_idle_move) idle_moves;
    struct kv_pages pages;
    struct kv_room_ops room;
    char error[256];
};

static inline void kv_publish32(uint32_t *word, uint32_t value)
{
    atomic_signal_fence(memory_order_seq_cst);
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
    atomic_signal_fence(memory_order_seq_cst);
}

static inline void kv_publish64(uint64_t *word, uint64_t value)
{
    atomic_signal_fence(memory_order_seq_cst);
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
    atomic_signal_fence(memory_order_seq_cst);
}

/* Adds n, which may be negative, to a counter. There is one writer, so no atomic addition is
 * needed. */
static inline void kv_count(uint64_t *counter, int64_t n)
{
    __atomic_store_n(counter, *counter + (uint64_t)n, __ATOMIC_RELAXED);
}

/* The sequence's own table, to be written; kv_row is the one that it reads, maybe its source's. */
static inline uint32_t *kv_own_row(const struct kv *kv, uint32_t seq)
{
    return kv->tables + seq * kv_row_words(kv->config.max_seq_blocks);
}
static inline uint32_t *kv_row(const struct kv *kv, uint32_t seq)
{
    return kv_own_row(kv, kv->seqs[seq].is_lazy ? kv->given[seq].row_of - 1 : seq);
}

static inline uint32_t *kv_lens(const struct kv *kv, uint32_t seq)
{
    return kv->lens + (size_t)seq * kv->config.max_layers;
}

static inline uint32_t *kv_latest(const struct kv *kv, uint32_t seq)
{
    return kv->latest + (size_t)seq * kv->config.max_layers;
}

static inline uint32_t kv_epoch_of(const struct kv_seq_rec *s)
{
    return (uint32_t)(s->epoch_owner >> 32);
}

static inline uint32_t kv_owner_of(const struct kv_seq_rec *s)
{
    return (uint32_t)s->epoch_owner;
}

static inline uint64_t kv_epoch_owner(uint32_t epoch, uint32_t owner)
{
    return (uint64_t)epoch << 32 | owner;
}

/* The tokens that no tree has, at most: what may be shared. */
static inline uint32_t kv_below_tree(const struct kv *kv, uint32_t seq)
{
    const struct kv_tree_rec *t = &kv->trees[seq];
    return kv_tree_n(t) > 0 ? kv_tree_pos(t) : UINT32_MAX;
}

/* The number of blocks that n_tokens take. */
static inline uint32_t kv_blocks_of(const struct kv_pool_rec *p, uint32_t n_tokens)
{
    return (uint32_t)(((uint64_t)n_tokens + p->block_tokens - 1) >> p->block_shift);
}

/* True if an entry of the sequence's table lies in its hole and names no block. */
static inline bool kv_in_hole(const struct kv *kv, const struct kv_pool_rec *p, uint32_t seq,
                              uint32_t index)
{
    return index < kv->holes[seq] && index >= kv_blocks_of(p, p->kept_tokens);
}

/* The most tokens that a sequence of the pool can have: positions are 32-bit. */
static inline uint64_t kv_max_tokens(const struct kv *kv, const struct kv_pool_rec *p)
{
    uint64_t n = (uint64_t)kv->config.max_seq_blocks << p->block_shift;
    return n < UINT32_MAX ? n : UINT32_MAX;
}

/* Sets kv_last_error; returns st. */
attn_status kv_fail(struct kv *kv, attn_status st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* The record of an open sequence or a made pool; NULL if the id names none. */
struct kv_seq_rec *kv_seq_live(const struct kv *kv, uint32_t seq);
struct kv_pool_rec *kv_pool_live(const struct kv *kv, uint32_t pool);
uint32_t kv_seq_seal(const struct kv *kv, uint32_t seq);
uint64_t kv_pool_seal(const struct kv *kv, uint32_t pool);
/* Makes the word that records the size of a sealed pool; kv_pool_size reads the size from it. */
uint64_t kv_pool_sized(const struct kv *kv, uint32_t pool, uint32_t n_blocks);
static inline uint32_t kv_pool_size(const struct kv_pool_rec *p)
{
    return (uint32_t)p->sized;
}

/* blocks.c. Ids are pool-local. The caller of kv_block_alloc has checked that kv_n_available > 0;
 * the new block has one reference. */
uint32_t kv_block_alloc(struct kv *kv, struct kv_pool_rec *p);
/* Are n blocks available to the owner? Pinned ones that no walk finds any more, because one before
 * them was evicted, are dropped before the answer is no: nobody could take the pin back. */
bool kv_block_make_room(struct kv *kv, struct kv_pool_rec *p, uint32_t owner, uint64_t n);
void kv_block_drop_lost(struct kv *kv, struct kv_pool_rec *p);
/* A block of the pool was unpublished, or a pinned one released: there may be lost ones. */
static inline void kv_note_parted(struct kv *kv, const struct kv_pool_rec *p)
{
    kv->n_parted[p - kv->pools]++;
}
/* Evicts the block that is first in the order of eviction; there must be one. */
void kv_block_evict_first(struct kv *kv, struct kv_pool_rec *p);
void kv_block_ref(struct kv *kv, struct kv_pool_rec *p, uint32_t block);
void kv_block_unref(struct kv *kv, struct kv_pool_rec *p, uint32_t block);
/* Drops a hold: the block keeps its place in the order of eviction. */
void kv_block_unref_unused(struct kv *kv, struct kv_pool_rec *p, uint32_t block);
/* Frees a cached block and forgets what was published of it. */
void kv_block_drop_published(struct kv *kv, struct kv_pool_rec *p, uint32_t block);
static inline struct kv_block_rec *kv_block(const struct kv *kv, const struct kv_pool_rec *p,
                                            uint32_t block)
{
    return &kv->blocks[(size_t)p->first_block + block];
}

/* The number of blocks that can be allocated: free ones, and cached ones that can be evicted. */
static inline uint32_t kv_n_available(const struct kv_pool_rec *p)
{
    return p->n_free + p->n_cached - p->n_pinned;
}

static inline uint32_t kv_pool_index(const struct kv *kv, const struct kv_pool_rec *p)
{
    return (uint32_t)(p - kv->pools);
}

static inline uint32_t kv_above(uint32_t n, uint32_t other)
{
    return n > other ? n - other : 0;
}

/* charge.c. kv_n_free_for: the blocks that the owner can take now. kv_n_shareable: the entries with
 * blocks of others that it can take. kv_may_pin: whether one more cached block may be pinned. */
uint32_t kv_n_free_for(const struct kv *kv, const struct kv_pool_rec *p, uint32_t owner);
uint32_t kv_n_shareable(const struct kv *kv, const struct kv_pool_rec *p, uint32_t owner);
bool kv_may_pin(const struct kv_pool_rec *p);
/* The sequence has n entries with blocks more; n may be negative. kv_charge_of: how many it has. */
void kv_charge(struct kv *kv, uint32_t seq, int64_t n);
uint32_t kv_charge_of(const struct kv *kv, uint32_t seq);
/* Whether a block that is held for the sequence may be its own from now on. */
bool kv_charge_may_stay(const struct kv *kv, uint32_t seq);
/* Whether the sequence can become the owner's; kv_charge_moves: it is about to. */
bool kv_charge_fits(const struct kv *kv, uint32_t seq, uint32_t owner);
void kv_charge_moves(struct kv *kv, uint32_t seq, uint32_t owner);
uint64_t *kv_reserved_word(const struct kv *kv, uint32_t owner, uint32_t pool);
uint32_t kv_reserved_by(const struct kv *kv, uint32_t owner, const struct kv_pool_rec *p);
uint32_t *kv_charged_to(const struct kv *kv, uint32_t owner, const struct kv_pool_rec *p);
uint32_t kv_n_held(const struct kv_pool_rec *p); /* references that no table entry has */
uint64_t kv_owes(const struct kv_pool_rec *p);
uint32_t kv_unowed(const struct kv_pool_rec *p); /* blocks that it does not owe */

/* dedup.c: where sequences went */
void kv_moved_recover(struct kv *kv);
bool kv_moved_is_damaged(const struct kv *kv, uint32_t i);

/* reserve.c. kv_reservations_end: the owner's end. kv_reservations_recover: also counts all charges
 * anew. */
void kv_reservations_end(struct kv *kv, uint32_t owner);
void kv_reservations_recover(struct kv *kv);
attn_status kv_reservations_check(struct kv *kv, uint32_t pool);

/* The note's place in memory that is its sequence's, and how far its row is in use; NULL and 0: it
 * has none. kv_note_bytes: what a note takes. */
static inline uint8_t *kv_note_row(const struct kv *kv, uint32_t seq)
{
    return (uint8_t *)(kv->notes + seq * kv_row_words(KV_NOTE_ROW_BYTES / sizeof(uint32_t)));
}
static inline const struct kv_note_head *kv_note_head(const struct kv *kv, uint32_t seq)
{
    uint32_t at = kv->given[seq].note;
    return at == 0 ? NULL : (const struct kv_note_head *)(kv_note_row(kv, seq) + at - 1);
}
static inline uint32_t kv_note_bytes(uint32_t n_bytes)
{
    return ((uint32_t)sizeof(struct kv_note_head) + n_bytes + 7) / 8 * 8;
}
static inline uint32_t kv_note_end(const struct kv *kv, uint32_t seq)
{
    const struct kv_note_head *h = kv_note_head(kv, seq);
    return h == NULL ? 0 : kv->given[seq].note - 1 + kv_note_bytes(h->n_bytes);
}

/* room.c. kv_room_take: takes what ids, table entries and note need beyond *n_pages, and sets
 * that.
 * Called before they are written, and last before anything changes. ATTN_EQUOTA: nothing is taken.
 * kv_room_give: gives back what was taken for record seq, which was not made. kv_room_trim: gives
 * back what a sequence has no need of any more; of one that is not open, all. */
attn_status kv_room_take(struct kv *kv, uint32_t tenant, uint64_t name, uint32_t n_ids,
                         uint32_t n_blocks, uint32_t note_bytes, uint32_t *n_pages);
void kv_room_give(struct kv *kv, uint32_t tenant, uint32_t seq, uint32_t n_pages);
void kv_room_trim(struct kv *kv, uint32_t seq);
/* The same for n records of blocks more, ATTN_ENOMEM; and for those of blocks [first, past), which
 * hold nothing any more. */
attn_status kv_room_take_blocks(struct kv *kv, const struct kv_pool_rec *p, uint32_t n);
void kv_room_give_blocks(struct kv *kv, const struct kv_pool_rec *p, uint32_t first, uint32_t past);
uint64_t kv_room_of_blocks(const struct kv_pool_rec *p, uint32_t n_blocks); /* bytes */
/* Counts anew what sequences and pools have, and gives back all else. kv_room_count: only
 * counts. */
void kv_room_recover(struct kv *kv);
uint64_t kv_room_count(const struct kv *kv);

/* lru.c. kv_lru_put makes an unreferenced published block a cached one, as the one used last;
 * kv_lru_put_back at the place of its last use. kv_lru_take takes it out. */
void kv_lru_put(struct kv *kv, struct kv_pool_rec *p, uint32_t block);
void kv_lru_put_back(struct kv *kv, struct kv_pool_rec *p, uint32_t block);
void kv_lru_take(struct kv *kv, struct kv_pool_rec *p, uint32_t block);
/* The first block in the order of eviction; at least one cached block must not be pinned. */
uint32_t kv_lru_first(const struct kv *kv, const struct kv_pool_rec *p);
void kv_lru_count_eviction(struct kv *kv, const struct kv_pool_rec *p, uint32_t block);
/* The list, among those of its priority, that the block belongs in. */
static inline uint32_t kv_list_of(const struct kv_retained_rec *t)
{
    return t->life + (t->was_found ? KV_N_LIVES : 0);
}
/* Builds the pool's lists from its cached blocks, which are linked by next; blocks is the first,
 * plus one. */
void kv_lru_build(struct kv *kv, struct kv_pool_rec *p, uint32_t blocks);

/* given.c. */
static inline struct kv_retained_rec *kv_retained(const struct kv *kv, const struct kv_pool_rec *p,
                                                  uint32_t block)
{
    return &kv->retained[(size_t)p->first_block + block];
}
attn_status kv_retention_check(struct kv *kv, uint64_t name, const struct kv_retention *r,
                               uint32_t n);
/* kv_retain_default: the retention of a new publication. kv_retain: what the sequence says of this
 * entry of its table, if anything. */
void kv_retain_default(struct kv *kv, const struct kv_pool_rec *p, uint32_t block);
void kv_retain(struct kv *kv, uint32_t seq, uint32_t index, uint32_t block);
bool kv_note_is_damaged(const struct kv *kv, uint32_t seq);
/* Writes the note, if it is one, of a record that was just taken, whose room is there. */
void kv_note_put(struct kv *kv, uint32_t seq, const struct kv_note *note);
/* Resets damaged retention to none. */
void kv_retention_recover(struct kv *kv, uint32_t seq);
void kv_retained_recover(struct kv *kv, const struct kv_pool_rec *p, uint32_t block);

/* prefix.c. */
struct kv_prefix { /* the end of a chain of published blocks */
    uint32_t n_blocks;
    uint32_t block; /* the last one, plus one; 0: none */
    uint64_t serial; /* the last one's */
};
static inline struct kv_published_rec *kv_published(const struct kv *kv,
                                                    const struct kv_pool_rec *p, uint32_t block)
{
    return &kv->published[(size_t)p->first_block + block];
}
/* Orders the unexpired blocks of one priority, by the clock: the lower value is evicted first. */
static inline uint64_t kv_goes_at(const struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    uint64_t later = kv_retained(kv, p, block)->was_found ? 2 * (uint64_t)p->n_blocks : 0;
    return kv_published(kv, p, block)->used + later;
}
static inline bool kv_is_published(const struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    return block < p->n_ever_published && kv_published(kv, p, block)->state == KV_LIVE;
}
static inline uint32_t *kv_published_ids(const struct kv *kv, const struct kv_pool_rec *p,
                                         uint32_t block)
{
    return kv->published_ids + (size_t)p->first_block * kv->config.max_block_tokens +
           (size_t)block * p->block_tokens;
}
static inline uint32_t *kv_own_ids(const struct kv *kv, uint32_t seq)
{
    return kv->given_ids + seq * kv_row_words(kv->config.max_seq_tokens);
}
static inline uint32_t *kv_given_ids(const struct kv *kv, uint32_t seq)
{
    bool are_own = !kv->seqs[seq].is_lazy || kv->given[seq].has_own_ids;
    return kv_own_ids(kv, are_own ? seq : kv->given[seq].row_of - 1);
}
/* The slot of the index where the list of published blocks with such a key begins. */
static inline uint32_t *kv_published_slot(const struct kv *kv, const uint64_t key[2])
{
    return &kv->prefixes[key[0] & kv->prefix_mask];
}
uint32_t kv_published_seal(const struct kv *kv, const struct kv_pool_rec *p, uint32_t block);
/* Finds the leading published blocks of these tokens and writes them to row. */
struct kv_prefix kv_prefix_match(struct kv *kv, const struct kv_pool_rec *p, uint32_t tenant,
                                 const struct kv_tokens *t, uint32_t *row);
/* Frees all promotions and leaves their blocks to recovery, as a kill would. */
void kv_promotions_forget(struct kv *kv);
/* Adds the references that promotions hold to n_refs. */
void kv_promote_count_refs(const struct kv *kv, uint32_t *n_refs);
/* True if there is a promotion into the pool. */
bool kv_promote_is_of(const struct kv *kv, uint32_t pool);
/* Publishes the blocks that are full in every layer and whose ids are known. No append may be
 * outstanding. */
void kv_prefix_publish(struct kv *kv, uint32_t seq);
void kv_unpublish(struct kv *kv, const struct kv_pool_rec *p, uint32_t block);
/* Moves a publication to a lower, free block, which holds the same bytes already. */
void kv_published_move(struct kv *kv, const struct kv_pool_rec *p, uint32_t from, uint32_t to);
/* Puts a published block into the index. */
void kv_published_link(struct kv *kv, const struct kv_pool_rec *p, uint32_t block);
void kv_prefix_rewind(struct kv *kv, uint32_t seq, uint32_t n_blocks);

/* published.c. kv_event_put: block and serial are 0 for a pool. kv_events_begin: the truth may have
 * changed without events; no reader of earlier ones can go on. */
void kv_event_put(struct kv *kv, enum kv_event_kind kind, const struct kv_pool_rec *p,
                  uint32_t block, uint64_t serial);
void kv_events_begin(struct kv *kv);

/* index.c. kv_index_put: the name must be absent. */
uint32_t kv_index_find(const struct kv *kv, uint32_t tenant, uint64_t name); /* plus one; 0: none */
void kv_index_put(struct kv *kv, uint32_t seq);
void kv_index_remove(struct kv *kv, uint32_t seq);

/* import.c. The blocks of a sequence being imported, or blocks that are held. */
#define KV_NO_BLOCK UINT32_MAX
struct kv_seq_import {
    LIST_ENTRY(kv_seq_import) link;
    uint32_t pool;
    uint32_t n_blocks, capacity;
    uint32_t *blocks; /* [capacity]; KV_NO_BLOCK: not taken */
    bool *is_used; /* for cached blocks that are held: was it used meanwhile? Else NULL */
};
/* kv_seq_imports_forget frees all imports and leaves their blocks to recovery;
 * kv_seq_import_count_refs adds the references that they hold. */
void kv_seq_imports_forget(struct kv *kv);
void kv_seq_import_count_refs(const struct kv *kv, uint32_t *n_refs);
/* True if an import or a hold has blocks of the pool. */
bool kv_seq_import_is_of(const struct kv *kv, uint32_t pool);

/* idle.c. The map of pages; no page is taken after init or reset. false: no memory. */
bool kv_pages_init(struct kv *kv);
void kv_pages_reset(struct kv *kv);
/* kv_place_is_possible: whether truth alone allows an entry with KV_PLACE. kv_place_claim takes its
 * pages; false: they are taken already. */
bool kv_place_is_possible(const struct kv *kv, const struct kv_pool_rec *p, uint32_t entry);
bool kv_place_claim(struct kv *kv, const struct kv_pool_rec *p, uint32_t entry);
/* Counts such an entry that recovery found in the sequence. */
void kv_idle_found_paged_out(struct kv *kv, uint32_t seq);
/* kv_idle_drop: the sequence releases such an entry. kv_idle_closed: the sequence is closed. */
void kv_idle_drop(struct kv *kv, uint32_t seq, uint32_t index);
void kv_idle_closed(struct kv *kv, uint32_t seq);
/* kv_idle_moves_forget frees all moves, as a kill would. kv_idle_count_refs adds the references
 * that moves hold. kv_idle_count_pages adds their pages to scratch; true: it now equals the map. */
void kv_idle_moves_forget(struct kv *kv);
void kv_idle_count_refs(const struct kv *kv, uint32_t *n_refs);
bool kv_idle_count_pages(const struct kv *kv, struct kv_pages *scratch);
/* The failure of a call that needs all blocks in the pool: ATTN_EOVERLOAD, with the sentence. */
attn_status kv_paged_out(struct kv *kv, uint32_t seq);
bool kv_idle_is_of(const struct kv *kv, uint32_t pool); /* is there a move of the pool? */

/* seq.c. What a new record is made of. kv_record_next: the record that will be taken next, so that
 * its row can be filled before. kv_record_take writes all but the row, the blocks and the state;
 * kv_record_publish makes the sequence visible. */
struct kv_birth {
    uint32_t tenant, pool, owner, len; /* len: the tokens it begins with */
    uint64_t name, request;
    struct kv_tokens tokens; /* the tokens with known ids */
    uint32_t n_cached; /* how many of len came from published blocks */
    uint32_t hole; /* as in its source */
    uint32_t row_of; /* the sequence whose table it reads, plus one; 0: its own */
    uint32_t n_pages; /* taken for it (kv_room_take) */
};
uint32_t kv_record_next(const struct kv *kv);
uint32_t kv_record_take(struct kv *kv, const struct kv_birth *b);
void kv_record_publish(struct kv *kv, uint32_t seq);
void kv_owner_link(struct kv *kv, uint32_t seq);
/* Shortens the layers that are longer to len and publishes the epoch, which has been announced;
 * blocks that were replaced are the new ones from here on. Ends the sequence's tree. */
void kv_seq_cut(struct kv *kv, uint32_t seq, uint32_t len, uint32_t epoch);

/* fork.c. Links the sequence, derived state, to that of row_of, whose table it reads. */
void kv_fork_link(struct kv *kv, uint32_t seq);
/* Undoes kv_fork_link: the sequence reads its own table, or is closed. */
void kv_fork_unlink(struct kv *kv, uint32_t seq);
/* Gives the fork a table, ids and references of its own. */
void kv_fork_materialize(struct kv *kv, uint32_t seq);
void kv_fork_own_ids(struct kv *kv, uint32_t seq);
/* Called before the sequence's tokens from len on change or go: afterwards no fork longer than len
 * reads its table. */
void kv_forks_part(struct kv *kv, uint32_t seq, uint32_t len);
/* Adds a reference to each of the first n_blocks of the row. */
void kv_row_ref(struct kv *kv, uint32_t seq, uint32_t n_blocks);

/* window.c. True if a sequence of len tokens ends before the place of a hole, and so has none. */
bool kv_hole_is_past(const struct kv_pool_rec *p, uint32_t len);
/* True if the hole cannot be right. Not to be called while a truncation is under way. */
bool kv_hole_is_damaged(const struct kv *kv, uint32_t seq);
/* For a sequence with a hole: finishes or undoes a kv_seq_free_to or a truncation that was under
 * way. */
void kv_hole_recover(struct kv *kv, uint32_t seq, uint32_t longest);

/* dedup.c. */
void kv_request_see(struct kv *kv, uint32_t owner, uint64_t request);
/* kv_epoch_first: the epoch for a new sequence. kv_epoch_next: the one after `epoch` for an open
 * one. 0: no epoch is left. */
uint32_t kv_epoch_first(const struct kv *kv);
uint32_t kv_epoch_next(const struct kv *kv, uint32_t epoch);
/* A sequence of this epoch is about to be closed. */
void kv_epoch_end(struct kv *kv, uint32_t epoch);
/* The next epoch of a sequence is about to be published, made by this request. */
void kv_epoch_announce(struct kv_seq_rec *s, uint32_t epoch, uint64_t request);

/* append.c. kv_append_reserve for a tree's nodes. */
attn_status kv_append_reserve_nodes(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                                    uint32_t n_tokens, struct kv_effects *fx);
/* Checks that n_new blocks and n_copies in place of others can be had, so that nothing fails after
 * it. */
attn_status kv_append_room(struct kv *kv, uint32_t seq, uint32_t n_new, uint32_t n_copies,
                           const struct kv_effects *fx);
/* Until its entry is dropped, recovery puts old_block back. */
void kv_journal_put(struct kv *kv, uint32_t seq, uint32_t index, uint32_t old_block,
                    uint32_t new_block);
/* Takes the first entry of the sequence's journal list out of truth and frees its record. */
void kv_journal_drop(struct kv *kv, struct kv_seq_rec *s);
/* Drops all of them and releases the blocks that were replaced. */
void kv_journal_end(struct kv *kv, uint32_t seq);
/* Releases the blocks past the first n_blocks. */
void kv_seq_trim(struct kv *kv, uint32_t seq, uint32_t n_blocks);

/* early_commit.c. Commits what was answered. Needs recovered owners, pools and published blocks. */
void kv_early_recover(struct kv *kv);

/* damage.c. Judge a record by truth alone: the name of the damaged field, or NULL. */
const char *kv_pool_damage(const struct kv *kv, uint32_t pool);
const char *kv_seq_damage(const struct kv *kv, uint32_t seq);
const char *kv_published_damage(const struct kv *kv, const struct kv_pool_rec *p, uint32_t block);
uint32_t kv_longest_layer(const struct kv *kv, uint32_t seq); /* tokens */
/* True if a fork of this many tokens can read src's table and ids. */
bool kv_may_read(const struct kv *kv, uint32_t seq, uint32_t src, uint32_t longest);

#endif
