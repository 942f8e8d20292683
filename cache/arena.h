/* arena.h: the layout of the arena: its sections and the records in them.
 *
 * A section is a fixed-size table that starts on a page; the two maps below list them in order,
 * truth first. References between records are indices. In derived state an index is stored plus
 * one, so that a page of zeros is an empty list, an empty slot, a free record: a new arena needs no
 * initialisation, and recovery starts by giving the derived pages back.
 *
 * Nothing read from an arena that another process wrote is used before recover.c has checked it.
 */
#ifndef ATTND_CACHE_ARENA_H
#define ATTND_CACHE_ARENA_H

#include <assert.h>

#include "cache/kv_append.h"
#include "cache/kv_move.h"
#include "cache/kv_owner.h"
#include "cache/kv_pool.h"
#include "cache/kv_seq.h"

#define KV_ARENA_MAGIC UINT64_C(0x6b76616e7461) /* "atnavk" */
#define KV_ARENA_VERSION 16
#define KV_ARENA_PAGE_BYTES 4096
#define KV_LIVE 0x4556494cu /* "LIVE": the state of a record in use; 0 is free, all else damage */
#define KV_MAX_BLOCK_TOKENS 65536
#define KV_MAX_OUTSTANDING 8191 /* reserves of a sequence; fits in 13 bits */

#define KV_N_PRIORITIES (KV_MAX_PRIORITY - KV_MIN_PRIORITY + 1)
#define KV_N_LIVES 22 /* no limit, and powers of two up to KV_MAX_LIFE_S */
#define KV_N_LISTS (2 * KV_N_LIVES) /* per priority and life: blocks never found, blocks found */

/* X(name, record type, number of records); c is the config */
#define KV_TRUTH_MAP(X)                                                                            \
    X(HEADER, struct kv_header, 1)                                                                 \
    X(POOLS, struct kv_pool_rec, c->max_pools)                                                     \
    X(SPECS, uint8_t[KV_SPEC_BYTES], c->max_pools)                                                 \
    X(SEQS, struct kv_seq_rec, c->max_sequences)                                                   \
    X(LENS, uint32_t, (uint64_t)c->max_sequences * c->max_layers)                                  \
    X(HOLES, uint32_t, c->max_sequences)                                                           \
    X(TREES, struct kv_tree_rec, c->max_sequences)                                                 \
    X(GIVEN, struct kv_given_rec, c->max_sequences)                                                \
    X(GIVEN_IDS, uint32_t, c->max_sequences *kv_row_words(c->max_seq_tokens))                      \
    X(NOTES, uint32_t, c->max_sequences *kv_row_words(KV_NOTE_ROW_BYTES / 4))                      \
    X(PUBLISHED, struct kv_published_rec, c->max_blocks)                                           \
    X(RETAINED, struct kv_retained_rec, c->max_blocks)                                             \
    X(PUBLISHED_IDS, uint32_t, (uint64_t)c->max_blocks * c->max_block_tokens)                      \
    X(OWNERS, struct kv_owner_rec, c->max_owners)                                                  \
    X(SEEN, struct kv_seen_rec, c->max_owners)                                                     \
    X(RESERVED, uint64_t, (uint64_t)c->max_owners * c->max_pools)                                  \
    X(LAST_SET, uint64_t[KV_N_SETTINGS], (uint64_t)c->max_owners * c->max_pools)                   \
    X(EPOCHS, struct kv_epochs, 1)                                                                 \
    X(MOVED, struct kv_moved_rec, KV_MAX_MOVED)                                                    \
    X(JOURNAL, struct kv_journal_rec, kv_journal_capacity(c))                                      \
    X(EARLY_BATCHES, struct kv_early_slot, KV_EARLY_SLOTS)                                         \
    X(EARLY, struct kv_early_rec, KV_EARLY_SLOTS *kv_early_capacity(c))                            \
    X(EARLY_WORDS, struct kv_early_words, 1)                                                       \
    X(TABLES, uint32_t, c->max_sequences *kv_row_words(c->max_seq_blocks))
#define KV_DERIVED_MAP(X)                                                                          \
    X(BLOCKS, struct kv_block_rec, c->max_blocks)                                                  \
    X(LINKS, struct kv_seq_links, c->max_sequences)                                                \
    X(LATEST, uint32_t, (uint64_t)c->max_sequences * c->max_layers)                                \
    X(INDEX, struct kv_index_slot, kv_index_capacity(c))                                           \
    X(PREFIXES, uint32_t, kv_prefix_capacity(c))                                                   \
    X(OWNED, uint32_t, c->max_owners)                                                              \
    X(CHARGED, uint32_t, ((uint64_t)c->max_owners + 1) * c->max_pools)                             \
    X(HEADS, struct kv_heads, 1)

enum kv_section {
#define X(name, type, count) KV_##name,
    KV_TRUTH_MAP(X) KV_DERIVED_MAP(X)
#undef X
        KV_N_SECTIONS
};

/* Written once, sealed. An inspector finds every table from here. */
struct kv_header {
    uint64_t magic;
    uint32_t version, header_bytes;
    uint64_t arena_bytes;
    uint64_t offset[KV_N_SECTIONS];
    struct kv_config config;
    uint64_t key[2]; /* key of every siphash in this arena; from the kernel's random source */
    uint64_t root_secret[2], block_secret[2]; /* for the keys of published blocks, random too */
    uint64_t seal; /* hash of all fields above, under an all-zero key */
};
_Static_assert(sizeof(struct kv_config) == 12 * sizeof(uint32_t) + 2 * sizeof(uint64_t),
               "a field that is not there, padding, would be sealed, too");

struct kv_pool_rec {
    uint32_t state;
    uint32_t n_layers, block_tokens; /* sealed, as are name and spec */
    uint32_t n_made; /* sealed: the number of blocks it was created with */
    uint32_t first_block; /* sealed: the pool's range of block records */
    uint32_t spec_bytes;
    uint32_t window_tokens, kept_tokens; /* sealed */
    uint32_t tenant; /* sealed */
    uint32_t idle_pages; /* sealed */
    char name[KV_NAME_BYTES];
    uint64_t place; /* sealed */
    uint64_t seal;
    /* n_blocks, and above it a hash of it (kv_pool_sized): one store changes both */
    uint64_t sized;
    uint32_t generation; /* of the record: outlives the pool */
    uint32_t n_ever_published; /* blocks from here on were never published */
    /* derived */
    uint32_t n_blocks; /* its present number of blocks */
    uint32_t block_shift; /* log2(block_tokens) */
    uint32_t free_head; /* plus one; free blocks below n_fresh */
    uint32_t n_fresh; /* blocks from here on were never used */
    uint32_t n_free;
    uint32_t n_cached; /* published and unreferenced */
    uint32_t n_pinned; /* of the cached ones; the others are evicted when blocks run out */
    uint32_t oldest[KV_N_PRIORITIES][KV_N_LISTS]; /* plus one: ends of the lists of unpinned cached
                                                     blocks, by last use */
    uint32_t newest[KV_N_PRIORITIES][KV_N_LISTS];
    uint64_t listed[KV_N_PRIORITIES]; /* a bit for each list that is not empty */
    uint32_t n_seqs; /* sequences open in it */
    uint32_t n_paged_out; /* their blocks in idle memory */
    uint32_t n_refs; /* to its blocks, of all kinds */
    uint32_t n_charged; /* entries of tables that name its blocks, those of lazy forks too */
    uint32_t n_lazy; /* of these, of lazy forks */
    uint32_t n_reserved; /* blocks, over all owners */
    uint32_t n_beyond; /* over all owners: what they are charged for above what they reserved */
};

/* One cache line: all that an append needs of the record. */
struct kv_seq_rec {
    uint32_t state;
    uint32_t tenant; /* sealed */
    uint64_t name; /* sealed */
    uint64_t request; /* the request that made the epoch `made`; ignored if the record's epoch is
                         another */
    uint64_t epoch_owner; /* epoch << 32 | owner: one store changes both */
    uint32_t seal;
    uint32_t made; /* an epoch; written after request, before the epoch itself */
    uint32_t redo_len; /* a truncation to redo_len - 1 is under way; 0: none */
    uint16_t pool; /* sealed */
    /* derived */
    uint16_t n_outstanding : 13; /* reserves neither committed nor cancelled */
    uint16_t has_ids : 1; /* token ids were given */
    uint16_t is_lazy : 1; /* its table is its source's (row_of) */
    uint16_t is_dirty : 1; /* it has its own table, which no effects have announced yet */
    uint32_t n_blocks; /* table entries that hold a reference */
    uint32_t n_maybe_shared; /* entries from here on have the only reference to their block, which
                                is not published */
    uint32_t longest; /* tokens of the longest layer */
    uint32_t journal_head; /* plus one */
};
static_assert(sizeof(struct kv_seq_rec) == 64, "a sequence record is a cache line");

/* What the client said of a sequence's tokens; their ids are in its row of GIVEN_IDS. */
struct kv_given_rec {
    uint64_t adapter; /* sealed by the sequence's record, as is n_cached */
    uint32_t n_cached; /* tokens that it was opened with */
    uint32_t n_ids; /* tokens from the start whose ids are known; written after them */
    uint32_t n_retentions; /* written after them */
    uint32_t row_of; /* of a fork not yet written to, plus one: whose table it reads; 0: its own
                        table, which is written first */
    uint32_t has_own_ids; /* of such a fork: it has its own ids; written after them */
    uint32_t note; /* where in its row of NOTES its note begins, plus one; 0: it has none. Written
                      after the note */
    struct kv_retention retention[KV_MAX_RETENTIONS];
    /* derived */
    uint32_t n_looked_at; /* leading blocks that are published, by this sequence or another */
    uint32_t parent; /* plus one: the published block equal to the last of them */
    uint64_t parent_serial; /* the parent's; if it differs now, the parent was evicted since */
};

/* A note; its bytes follow. A new one is written beside the old one: a row has room for three. */
struct kv_note_head {
    uint64_t seal; /* over the fields below and the bytes */
    uint64_t request; /* that set it */
    uint32_t epoch; /* of the sequence then */
    uint32_t n_bytes;
};
#define KV_NOTE_ROW_BYTES (3 * (sizeof(struct kv_note_head) + KV_MAX_NOTE_BYTES))

/* The tree of a sequence's last tokens, until a path of it is committed. */
struct kv_tree_rec {
    uint64_t at; /* where it begins << 32 | nodes; 0: none. Written after the parents */
    int8_t parents[KV_MAX_TREE_NODES];
};

static inline uint32_t kv_tree_n(const struct kv_tree_rec *t)
{
    return (uint32_t)t->at;
}

static inline uint32_t kv_tree_pos(const struct kv_tree_rec *t)
{
    return (uint32_t)(t->at >> 32);
}

/* A published block: full in every layer, never written to, found by its key. */
struct kv_published_rec {
    uint32_t state;
    uint32_t tenant;
    uint32_t index; /* its entry in every table that has it */
    uint32_t seal; /* over all but state and used, and over its token ids */
    uint64_t adapter;
    uint64_t key[2]; /* chained hash: finds it, proves nothing */
    uint64_t serial; /* no two publications have the same */
    uint64_t parent; /* serial of the block before; 0: it is the first */
    uint64_t used; /* when it was last released, by the clock */
};
static_assert(sizeof(struct kv_published_rec) == 64, "a publication is a cache line");

/* How long a published block stays. */
struct kv_retained_rec {
    uint32_t used_s; /* when it was last released, in seconds */
    uint8_t priority; /* counted from the lowest */
    uint8_t life; /* 0: no limit; else 2^(life - 1) seconds */
    uint8_t is_pinned;
    uint8_t was_found; /* 1: sequences were opened with it since it was published */
};

/* RESERVED has a word for each owner and pool: the pool's generation << 32 | blocks; 0, or of
 * another generation: none. */
struct kv_owner_rec {
    uint64_t id; /* 0: the slot is free; written last */
    uint32_t tenant;
    char label[KV_LABEL_BYTES];
};

/* Requests of an owner whose late duplicates could do harm and are not recognized by an epoch:
 * open, fork, adopt, and those that hold pools. The KV_MAX_SEEN highest are stored by id; all ids
 * up to floor count as seen. */
struct kv_seen_rec {
    uint64_t floor;
    uint64_t id[KV_MAX_SEEN]; /* 0: none */
};

/* The epoch of a new sequence is above that of every sequence closed before, so that no name ever
 * has the same epoch twice. The clock never has the same value twice. */
struct kv_epochs {
    uint32_t ended; /* the highest of a closed sequence */
    uint64_t clock; /* counts publications and uses of published blocks */
    uint64_t events; /* the number of the latest event (kv_tier.h) */
};

/* Where a sequence went. The entry with serial n is number n % KV_MAX_MOVED. */
struct kv_moved_rec {
    uint32_t state;
    uint32_t tenant; /* sealed, as are all others */
    uint64_t name;
    uint32_t at_epoch; /* it was closed here at */
    uint32_t epoch; /* there */
    uint64_t id; /* there */
    uint64_t serial; /* from 1 on */
    uint32_t until_s;
    char url[KV_URL_BYTES];
    uint64_t seal;
};

/* While an entry is live, table[seq][index] goes back to old_block at recovery or cancel. */
struct kv_journal_rec {
    uint32_t state;
    uint32_t seq, index;
    uint32_t old_block, new_block; /* pool-local */
    uint32_t next; /* derived, plus one: of the same sequence, or free */
};

/* A batch in flight whose appends a device answers before they are committed (early_commit.c). */
struct kv_early_slot {
    uint32_t serial; /* of the batch; only ever rises */
    uint32_t n; /* number of its records; written last. 0: no batch */
};

struct kv_early_rec {
    uint32_t seq, epoch, layer, pos, end; /* tokens [pos, end) */
};

/* A page of its own, written by a device: for each slot, the serial of the latest batch that it has
 * answered. */
struct kv_early_words {
    uint32_t word[KV_EARLY_WORDS_BYTES / sizeof(uint32_t)];
};

struct kv_block_rec {
    uint32_t n_refs; /* from table entries and from the old_block of journal entries */
    uint32_t next; /* plus one: the next free one, or the one used after it; during recovery, a
                      sequence that has it */
    uint32_t prev; /* plus one: the block used before it */
    uint32_t chain; /* plus one, counted over all pools: the next published block in the same slot
                       of PREFIXES */
};

struct kv_seq_links {
    uint32_t prev, next; /* plus one: of the same owner; of a free record next is the next free
                            one */
    uint32_t fork; /* plus one: the first fork that reads its table */
    uint32_t fork_prev, fork_next; /* plus one: other forks that read the same table */
    uint32_t n_fork_tokens; /* no fork that reads its table has more tokens */
    uint32_t n_pages; /* counted for its ids and table (room.c) */
    uint32_t n_paged_out; /* entries of its table whose blocks are in idle memory */
};

struct kv_index_slot {
    uint32_t tag; /* low half of the name's hash */
    uint32_t seq; /* plus one; 0: empty */
};

/* Heads of lists, gauges and counters. Written by the engine thread, read by any (relaxed). */
struct kv_heads {
    uint32_t seq_free, seq_n_fresh; /* as in kv_pool_rec */
    uint32_t journal_free, journal_n_fresh, journal_n_free;
    uint64_t moved; /* serial of the latest entry of MOVED; 0: none */
    struct kv_stats stats;
};

/* Words from one sequence's row to the next, of ids or of table entries: rows of more than a page
 * begin on one. */
static inline uint64_t kv_row_words(uint32_t n)
{
    const uint64_t page = KV_ARENA_PAGE_BYTES / sizeof(uint32_t);
    return n <= page ? n : (n + page - 1) / page * page;
}

/* Most copies in flight: one for every sequence, plus one whole row. */
static inline uint32_t kv_journal_capacity(const struct kv_config *c)
{
    return c->max_sequences + c->max_seq_blocks;
}

/* Early-commit records of a batch; a batch with more appends is answered by the host. */
static inline uint32_t kv_early_capacity(const struct kv_config *c)
{
    return c->max_sequences < 1024 ? c->max_sequences : 1024;
}

/* A power of two, at least half of it always empty. */
static inline uint32_t kv_index_capacity(const struct kv_config *c)
{
    uint32_t n = 8;
    while (n < 2 * c->max_sequences)
        n *= 2;
    return n;
}

/* A power of two: as many slots as there can be published blocks. */
static inline uint32_t kv_prefix_capacity(const struct kv_config *c)
{
    uint32_t n = 8;
    while (n < c->max_blocks)
        n *= 2;
    return n;
}

#endif
