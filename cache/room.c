/* room.c: how much memory the tables take that take more of it as they fill.
 *
 * A sequence may have ids and table entries for many pages, and a note; a pool records and ids for
 * many blocks. The first page of each row but the note's is the sequence record's own, and so
 * counted before there is any (kv_fixed_bytes); what is beyond is counted here, taken before it is
 * written to, and given back to the system when it is not needed any more, since a page that was
 * written stays taken. Rows of more than a page begin on one (kv_row_words), so pages are of one
 * row. A lazy fork is counted with what it will have.
 */
#define _GNU_SOURCE /* MADV_REMOVE */
#include "cache/kv_internal.h"

#include <sys/mman.h>

static uint64_t pages_of(uint64_t n_words)
{
    return (n_words * sizeof(uint32_t) + KV_ARENA_PAGE_BYTES - 1) / KV_ARENA_PAGE_BYTES;
}

/* Pages beyond a row's first one. */
static uint32_t more_pages(uint32_t n_words)
{
    uint64_t n = pages_of(n_words);
    return n > 1 ? (uint32_t)(n - 1) : 0;
}

/* Pages of a note's row up to its byte n_bytes. */
static uint32_t note_pages(uint32_t n_bytes)
{
    return (n_bytes + KV_ARENA_PAGE_BYTES - 1) / KV_ARENA_PAGE_BYTES;
}

uint64_t kv_room_of_blocks(const struct kv_pool_rec *p, uint32_t n_blocks)
{
    return n_blocks * (sizeof(struct kv_published_rec) + sizeof(struct kv_retained_rec) +
                       sizeof(struct kv_block_rec) + p->block_tokens * sizeof(uint32_t));
}

static uint64_t n_free(const struct kv *kv)
{
    uint64_t all = (uint64_t)kv->config.table_pages * KV_ARENA_PAGE_BYTES;
    uint64_t used = kv->heads->stats.table_bytes;
    return all == 0 ? UINT64_MAX : all > used ? all - used : 0;
}

attn_status kv_room_take(struct kv *kv, uint32_t tenant, uint64_t name, uint32_t n_ids,
                         uint32_t n_blocks, uint32_t note_bytes, uint32_t *n_pages)
{
    uint32_t want = more_pages(n_ids) + more_pages(n_blocks) + note_pages(note_bytes);
    if (want <= *n_pages)
        return ATTN_OK;
    uint64_t bytes = (uint64_t)(want - *n_pages) * KV_ARENA_PAGE_BYTES;
    char why[160];
    if (bytes > n_free(kv))
        return kv_fail(kv, ATTN_EQUOTA,
                       "sequence %llu: %u ids, a table of %u blocks and %u bytes for notes take "
                       "%llu bytes more, %llu of %llu are free (cache.table_memory)",
                       (unsigned long long)name, n_ids, n_blocks, note_bytes,
                       (unsigned long long)bytes, (unsigned long long)n_free(kv),
                       (unsigned long long)kv->config.table_pages * KV_ARENA_PAGE_BYTES);
    if (kv->room.take != NULL &&
        kv->room.take(kv->room.user, tenant, bytes, why, sizeof why) != ATTN_OK)
        return kv_fail(kv, ATTN_EQUOTA, "sequence %llu: %s", (unsigned long long)name, why);
    kv_count(&kv->heads->stats.table_bytes, (int64_t)bytes);
    *n_pages = want;
    return ATTN_OK;
}

attn_status kv_room_take_blocks(struct kv *kv, const struct kv_pool_rec *p, uint32_t n)
{
    uint64_t bytes = kv_room_of_blocks(p, n);
    if (bytes > n_free(kv))
        return kv_fail(kv, ATTN_ENOMEM,
                       "pool %s: records of %u blocks more take %llu bytes, %llu of %llu are free "
                       "(cache.table_memory)",
                       p->name, n, (unsigned long long)bytes, (unsigned long long)n_free(kv),
                       (unsigned long long)kv->config.table_pages * KV_ARENA_PAGE_BYTES);
    kv_count(&kv->heads->stats.table_bytes, (int64_t)bytes);
    return ATTN_OK;
}

/* Gives the pages that lie wholly in [from, to) back; they read as zero. */
static void pages_give(void *from, void *to)
{
    uint64_t mask = KV_ARENA_PAGE_BYTES - 1;
    uintptr_t first = ((uintptr_t)from + mask) & ~mask, past = (uintptr_t)to & ~mask;
    if (first < past)
        madvise((void *)first, past - first, MADV_REMOVE); /* refused: they stay taken */
}

/* Gives back what a row of at most n_most words has beyond its first n_words; its first page
 * stays. */
static void row_give(uint32_t *row, uint32_t n_words, uint32_t n_most)
{
    uint64_t n = pages_of(n_words) > 1 ? pages_of(n_words) : 1;
    if (n < pages_of(n_most))
        pages_give((uint8_t *)row + n * KV_ARENA_PAGE_BYTES, row + kv_row_words(n_most));
}

/* What a sequence has: ids, entries of its table, bytes of its row of notes. */
struct rows {
    uint32_t n_ids, n_blocks, note_bytes;
};

static void rows_give(struct kv *kv, uint32_t seq, const struct rows *r)
{
    row_give(kv_own_ids(kv, seq), r->n_ids, kv->config.max_seq_tokens);
    row_give(kv_own_row(kv, seq), r->n_blocks, kv->config.max_seq_blocks);
    pages_give(kv_note_row(kv, seq) + r->note_bytes, kv_note_row(kv, seq + 1));
}

static uint32_t rows_pages(const struct rows *r)
{
    return more_pages(r->n_ids) + more_pages(r->n_blocks) + note_pages(r->note_bytes);
}

static void count_less(struct kv *kv, uint32_t tenant, uint32_t n_pages)
{
    uint64_t bytes = (uint64_t)n_pages * KV_ARENA_PAGE_BYTES;
    kv_count(&kv->heads->stats.table_bytes, -(int64_t)bytes);
    if (kv->room.give != NULL)
        kv->room.give(kv->room.user, tenant, bytes);
}

void kv_room_give(struct kv *kv, uint32_t tenant, uint32_t seq, uint32_t n_pages)
{
    if (n_pages == 0)
        return;
    rows_give(kv, seq, &(struct rows){0});
    count_less(kv, tenant, n_pages);
}

static struct rows rows_of(const struct kv *kv, uint32_t seq)
{
    if (kv->seqs[seq].state != KV_LIVE)
        return (struct rows){0};
    return (struct rows){kv->given[seq].n_ids, kv->seqs[seq].n_blocks, kv_note_end(kv, seq)};
}

void kv_room_trim(struct kv *kv, uint32_t seq)
{
    uint32_t had = kv->links[seq].n_pages;
    const struct rows r = rows_of(kv, seq);
    uint32_t n_pages = rows_pages(&r);
    if (n_pages >= had)
        return;
    rows_give(kv, seq, &r);
    kv->links[seq].n_pages = n_pages;
    count_less(kv, kv->seqs[seq].tenant, had - n_pages);
}

void kv_room_give_blocks(struct kv *kv, const struct kv_pool_rec *p, uint32_t first, uint32_t past)
{
    size_t at = (size_t)p->first_block + first, end = (size_t)p->first_block + past;
    pages_give(kv->published + at, kv->published + end);
    pages_give(kv->retained + at, kv->retained + end);
    pages_give(kv->blocks + at, kv->blocks + end);
    pages_give(kv_published_ids(kv, p, first), kv_published_ids(kv, p, past));
    kv_count(&kv->heads->stats.table_bytes, -(int64_t)kv_room_of_blocks(p, past - first));
}

/* --- recovery --------------------------------------------------------------------------------- */

/* Gives back what records from first_block on have, up to the next pool. */
static void gap_give(struct kv *kv, uint32_t first_block)
{
    size_t at = first_block, end = kv->config.max_blocks;
    uint32_t *ids = kv->published_ids;
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        const struct kv_pool_rec *p = kv_pool_live(kv, i);
        if (p != NULL && p->first_block >= at && p->first_block < end)
            end = p->first_block;
    }
    pages_give(kv->published + at, kv->published + end);
    pages_give(kv->retained + at, kv->retained + end);
    pages_give(ids + at * kv->config.max_block_tokens, ids + end * kv->config.max_block_tokens);
}

void kv_room_recover(struct kv *kv)
{
    uint32_t n = kv->heads->seq_n_fresh, n_all = kv->config.max_sequences;
    uint64_t bytes = 0;
    gap_give(kv, 0);
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        const struct kv_pool_rec *p = kv_pool_live(kv, i);
        if (p == NULL)
            continue;
        bytes += kv_room_of_blocks(p, p->n_blocks);
        gap_give(kv, p->first_block + p->n_blocks);
    }
    for (uint32_t seq = 0; seq < n; seq++) {
        const struct rows r = rows_of(kv, seq);
        rows_give(kv, seq, &r);
        kv->links[seq].n_pages = rows_pages(&r);
        bytes += (uint64_t)kv->links[seq].n_pages * KV_ARENA_PAGE_BYTES;
    }
    pages_give(kv_own_ids(kv, n), kv_own_ids(kv, n_all));
    pages_give(kv_own_row(kv, n), kv_own_row(kv, n_all));
    pages_give(kv_note_row(kv, n), kv_note_row(kv, n_all));
    kv_count(&kv->heads->stats.table_bytes, (int64_t)(bytes - kv->heads->stats.table_bytes));
}

uint64_t kv_room_count(const struct kv *kv)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        const struct kv_pool_rec *p = kv_pool_live(kv, i);
        bytes += p == NULL ? 0 : kv_room_of_blocks(p, p->n_blocks);
    }
    for (uint32_t seq = 0; seq < kv->heads->seq_n_fresh; seq++) {
        const struct rows r = rows_of(kv, seq);
        bytes += (uint64_t)rows_pages(&r) * KV_ARENA_PAGE_BYTES;
    }
    return bytes;
}

void kv_set_room_ops(struct kv *kv, const struct kv_room_ops *ops)
{
    for (kv_seq_id id = {0}; id.index < kv->heads->seq_n_fresh; id.index++) {
        uint64_t bytes = (uint64_t)kv->links[id.index].n_pages * KV_ARENA_PAGE_BYTES;
        if (kv->seqs[id.index].state != KV_LIVE || bytes == 0)
            continue;
        if (kv->room.give != NULL)
            kv->room.give(kv->room.user, kv->seqs[id.index].tenant, bytes);
        if (ops != NULL)
            ops->count(ops->user, kv->seqs[id.index].tenant, bytes);
    }
    kv->room = ops == NULL ? (struct kv_room_ops){0} : *ops;
}
