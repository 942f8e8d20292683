/* idle.c: moves blocks of sequences out to host memory and back, and keeps the map of its pages.
 *
 * Pages are taken in runs, from a map with one bit per page. A search starts where the last one
 * ended, skips 64 taken pages at a time, and is not tried again for a length that was not found
 * until pages are released.
 */
#include "cache/kv_internal.h"

#include <stdlib.h>
#include <string.h>

/* --- pages ------------------------------------------------------------------------------------ */

static bool is_taken(const struct kv_pages *g, uint32_t page)
{
    return g->map[page / 64] >> page % 64 & 1;
}

static void mark(struct kv_pages *g, uint32_t page, uint32_t n, bool is_used)
{
    for (uint32_t i = page; i < page + n; i++) {
        uint64_t bit = UINT64_C(1) << i % 64;
        g->map[i / 64] = is_used ? g->map[i / 64] | bit : g->map[i / 64] & ~bit;
    }
    g->n_used = is_used ? g->n_used + n : g->n_used - n;
}

/* The start of the first run of n free pages in [from, to); to: there is none. */
static uint32_t find_run(const struct kv_pages *g, uint32_t from, uint32_t to, uint32_t n)
{
    uint32_t run = 0;
    for (uint32_t i = from; i < to;) {
        if (i % 64 == 0 && g->map[i / 64] == UINT64_MAX) {
            run = 0;
            i += 64;
            continue;
        }
        run = is_taken(g, i++) ? 0 : run + 1;
        if (run == n)
            return i - n;
    }
    return to;
}

static bool take_pages(struct kv_pages *g, uint32_t n, uint32_t *out_page)
{
    if (n == 0 || n > g->n - g->n_used || n >= g->too_long)
        return false;
    uint32_t page = find_run(g, g->next, g->n, n);
    if (page == g->n)
        page = find_run(g, 0, g->n, n);
    if (page == g->n) {
        g->too_long = n;
        return false;
    }
    mark(g, page, n, true);
    g->next = page + n;
    *out_page = page;
    return true;
}

static void release_pages(struct kv_pages *g, uint32_t page, uint32_t n)
{
    mark(g, page, n, false);
    g->too_long = UINT32_MAX;
}

static size_t map_bytes(const struct kv_pages *g)
{
    return ((size_t)g->n + 63) / 64 * sizeof *g->map;
}

bool kv_pages_init(struct kv *kv)
{
    kv->pages = (struct kv_pages){
        .n = kv->config.idle_pages, .too_long = UINT32_MAX, .are_new = kv->config.idle_is_new != 0};
    if (kv->pages.n > 0)
        kv->pages.map = calloc(1, map_bytes(&kv->pages));
    return kv->pages.n == 0 || kv->pages.map != NULL;
}

void kv_pages_reset(struct kv *kv)
{
    if (kv->pages.n > 0)
        memset(kv->pages.map, 0, map_bytes(&kv->pages));
    kv->pages.n_used = kv->pages.next = 0;
    kv->pages.too_long = UINT32_MAX;
}

bool kv_place_is_possible(const struct kv *kv, const struct kv_pool_rec *p, uint32_t entry)
{
    uint32_t page = entry & ~KV_PLACE;
    return kv_is_place(entry) && !kv->pages.are_new && p->idle_pages > 0 &&
           (uint64_t)page + p->idle_pages <= kv->pages.n;
}

bool kv_place_claim(struct kv *kv, const struct kv_pool_rec *p, uint32_t entry)
{
    uint32_t page = entry & ~KV_PLACE;
    for (uint32_t i = page; i < page + p->idle_pages; i++)
        if (is_taken(&kv->pages, i))
            return false;
    mark(&kv->pages, page, p->idle_pages, true);
    return true;
}

/* --- what is under way ------------------------------------------------------------------------ */

static struct kv_idle_move *move_of(const struct kv *kv, uint32_t seq)
{
    struct kv_idle_move *m;
    LIST_FOREACH(m, &kv->idle_moves, link)
        if (m->seq == seq)
            return m;
    return NULL;
}

void kv_idle_moves_forget(struct kv *kv)
{
    struct kv_idle_move *m;
    while ((m = LIST_FIRST(&kv->idle_moves)) != NULL) {
        LIST_REMOVE(m, link);
        free(m);
    }
}

bool kv_idle_is_of(const struct kv *kv, uint32_t pool)
{
    const struct kv_idle_move *m;
    LIST_FOREACH(m, &kv->idle_moves, link)
        if (m->pool == pool)
            return true;
    return false;
}

void kv_idle_count_refs(const struct kv *kv, uint32_t *n_refs)
{
    const struct kv_idle_move *m;
    LIST_FOREACH(m, &kv->idle_moves, link)
        for (uint32_t i = 0; i < m->n; i++)
            n_refs[kv->pools[m->pool].first_block + m->entries[i].block]++;
}

bool kv_idle_count_pages(const struct kv *kv, struct kv_pages *scratch)
{
    const struct kv_idle_move *m;
    LIST_FOREACH(m, &kv->idle_moves, link)
        for (uint32_t i = 0; i < m->n; i++) {
            const struct kv_idle_entry *x = &m->entries[i];
            if (!m->is_in || x->is_gone)
                mark(scratch, x->page, kv->pools[m->pool].idle_pages, true);
        }
    return scratch->n_used == kv->pages.n_used &&
           (kv->pages.n == 0 || memcmp(scratch->map, kv->pages.map, map_bytes(&kv->pages)) == 0);
}

static void count_paged_out(struct kv *kv, uint32_t seq, int n)
{
    kv->links[seq].n_paged_out += (uint32_t)n;
    kv->pools[kv->seqs[seq].pool].n_paged_out += (uint32_t)n;
    kv_count(&kv->heads->stats.blocks_tiered, n);
}

void kv_idle_found_paged_out(struct kv *kv, uint32_t seq)
{
    count_paged_out(kv, seq, 1);
}

void kv_idle_drop(struct kv *kv, uint32_t seq, uint32_t index)
{
    struct kv_pool_rec *p = &kv->pools[kv->seqs[seq].pool];
    struct kv_idle_move *m = move_of(kv, seq);
    uint32_t page = kv_own_row(kv, seq)[index] & ~KV_PLACE;
    count_paged_out(kv, seq, -1);
    for (uint32_t i = 0; m != NULL && i < m->n; i++)
        if (m->is_in && m->entries[i].index == index && !m->entries[i].is_gone) {
            m->entries[i].is_gone = true; /* its pages are being read: freed when the move ends */
            return;
        }
    release_pages(&kv->pages, page, p->idle_pages);
}

void kv_idle_closed(struct kv *kv, uint32_t seq)
{
    struct kv_idle_move *m = move_of(kv, seq);
    if (m != NULL)
        m->seq = UINT32_MAX;
}

/* --- what may go ------------------------------------------------------------------------------ */

static bool may_go(const struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq);
    return s != NULL && kv->pools[s->pool].idle_pages > 0 && s->n_outstanding == 0 && !s->is_lazy &&
           !s->is_dirty && move_of(kv, seq) == NULL;
}

/* The number of leading entries that lazy forks read. */
static uint32_t n_read(const struct kv *kv, uint32_t seq)
{
    return kv_blocks_of(&kv->pools[kv->seqs[seq].pool], kv->links[seq].n_fork_tokens);
}

/* True if the entry names a block that only this sequence refers to. */
static bool is_alone(const struct kv *kv, uint32_t seq, uint32_t index)
{
    const struct kv_pool_rec *p = &kv->pools[kv->seqs[seq].pool];
    uint32_t entry = kv_own_row(kv, seq)[index];
    return index >= n_read(kv, seq) && !kv_in_hole(kv, p, seq, index) && !kv_is_place(entry) &&
           kv_block(kv, p, entry)->n_refs == 1;
}

uint32_t kv_idle_movable(const struct kv *kv, kv_seq_id seq)
{
    uint32_t n = 0;
    if (!may_go(kv, seq.index))
        return 0;
    for (uint32_t i = 0; i < kv->seqs[seq.index].n_blocks; i++)
        n += is_alone(kv, seq.index, i);
    return n;
}

bool kv_idle_may_go(const struct kv *kv, kv_seq_id seq, uint32_t index)
{
    return may_go(kv, seq.index) && index < kv->seqs[seq.index].n_blocks &&
           is_alone(kv, seq.index, index);
}

uint32_t kv_idle_n_paged_out(const struct kv *kv, kv_seq_id seq)
{
    return kv_seq_live(kv, seq.index) == NULL ? 0 : kv->links[seq.index].n_paged_out;
}

uint32_t kv_idle_pool_paged_out(const struct kv *kv, kv_pool_id pool)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    return p == NULL ? 0 : p->n_paged_out;
}

bool kv_idle_is_even(const struct kv *kv, kv_seq_id seq)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    for (uint32_t l = 0; s != NULL && l < kv->pools[s->pool].n_layers; l++)
        if (kv_lens(kv, seq.index)[l] != s->longest)
            return false;
    return true;
}

static struct kv_idle_move *move_new(uint32_t pool, uint32_t seq, bool is_in, uint32_t n_most)
{
    struct kv_idle_move *m = calloc(1, sizeof *m + n_most * sizeof m->entries[0]);
    if (m != NULL)
        *m = (struct kv_idle_move){.pool = pool, .seq = seq, .is_in = is_in};
    return m;
}

/* Lists the move; frees one without entries and returns NULL. */
static struct kv_idle_move *move_begin(struct kv *kv, struct kv_idle_move *m)
{
    if (m->n > 0) {
        LIST_INSERT_HEAD(&kv->idle_moves, m, link);
        return m;
    }
    free(m);
    return NULL;
}

/* --- out -------------------------------------------------------------------------------------- */

struct kv_idle_move *kv_idle_out_begin(struct kv *kv, kv_seq_id seq, const uint32_t *indices,
                                       uint32_t n_most)
{
    if (!may_go(kv, seq.index))
        return NULL;
    struct kv_seq_rec *s = &kv->seqs[seq.index];
    struct kv_pool_rec *p = &kv->pools[s->pool];
    struct kv_idle_move *m =
        move_new(s->pool, seq.index, false, n_most < s->n_blocks ? n_most : s->n_blocks);
    if (m == NULL)
        return NULL;
    const uint32_t n_listed = indices != NULL ? n_most : s->n_blocks;
    for (uint32_t k = 0; k < n_listed && m->n < n_most; k++) {
        uint32_t page, i = indices != NULL ? indices[k] : s->n_blocks - 1 - k;
        if (i >= s->n_blocks || !is_alone(kv, seq.index, i)) /* not twice: a move refers to it */
            continue;
        if (!take_pages(&kv->pages, p->idle_pages, &page))
            break;
        uint32_t block = kv_own_row(kv, seq.index)[i];
        kv_block_ref(kv, p, block);
        if (s->n_maybe_shared < i + 1)
            s->n_maybe_shared = i + 1;
        m->entries[m->n++] = (struct kv_idle_entry){.index = i, .block = block, .page = page};
    }
    return move_begin(kv, m);
}

/* True if nothing has changed or shared the block since the copy began. */
static bool is_as_it_was(const struct kv *kv, const struct kv_idle_move *m,
                         const struct kv_idle_entry *x)
{
    const struct kv_seq_rec *s = m->seq == UINT32_MAX ? NULL : &kv->seqs[m->seq];
    return s != NULL && x->index >= n_read(kv, m->seq) && x->index < s->n_blocks &&
           kv_own_row(kv, m->seq)[x->index] == x->block &&
           !kv_in_hole(kv, &kv->pools[m->pool], m->seq, x->index) &&
           kv_block(kv, &kv->pools[m->pool], x->block)->n_refs == 2;
}

uint32_t kv_idle_out_end(struct kv *kv, struct kv_idle_move *m)
{
    struct kv_pool_rec *p = &kv->pools[m->pool];
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n; i++) {
        const struct kv_idle_entry *x = &m->entries[i];
        bool goes = x->is_good && is_as_it_was(kv, m, x);
        if (goes) {
            kv_prefix_rewind(kv, m->seq, x->index);
            if (kv_is_published(kv, p, x->block))
                kv_unpublish(kv, p, x->block);
            kv_publish32(&kv_own_row(kv, m->seq)[x->index], KV_PLACE | x->page);
            kv_charge(kv, m->seq, -1);
            kv_block_unref(kv, p, x->block); /* the table's reference */
            count_paged_out(kv, m->seq, 1);
            n++;
        } else {
            release_pages(&kv->pages, x->page, p->idle_pages);
        }
        kv_block_unref(kv, p, x->block);
    }
    LIST_REMOVE(m, link);
    free(m);
    return n;
}

/* --- in --------------------------------------------------------------------------------------- */

static bool is_listed(const struct kv_idle_move *m, uint32_t index)
{
    for (uint32_t i = 0; i < m->n; i++)
        if (m->entries[i].index == index)
            return true;
    return false;
}

struct kv_idle_move *kv_idle_in_begin(struct kv *kv, kv_seq_id seq, const uint32_t *indices,
                                      uint32_t n_most)
{
    uint32_t n_paged_out = kv_idle_n_paged_out(kv, seq);
    if (n_paged_out == 0 || move_of(kv, seq.index) != NULL)
        return NULL;
    const struct kv_seq_rec *s = &kv->seqs[seq.index];
    struct kv_pool_rec *p = &kv->pools[s->pool];
    uint32_t n_free = kv_n_free_for(kv, p, kv_owner_of(s));
    const uint32_t n_listed = indices != NULL ? n_most : s->n_blocks;
    n_most = n_most < n_paged_out ? n_most : n_paged_out;
    n_most = n_most < n_free ? n_most : n_free;
    struct kv_idle_move *m = move_new(s->pool, seq.index, true, n_most);
    if (m == NULL)
        return NULL;
    for (uint32_t k = 0; k < n_listed && m->n < n_most; k++) {
        uint32_t i = indices != NULL ? indices[k] : k;
        if (i >= s->n_blocks || kv_in_hole(kv, p, seq.index, i) ||
            (indices != NULL && is_listed(m, i)))
            continue;
        uint32_t entry = kv_own_row(kv, seq.index)[i];
        if (!kv_is_place(entry))
            continue;
        m->entries[m->n++] = (struct kv_idle_entry){
            .index = i, .block = kv_block_alloc(kv, p), .page = entry & ~KV_PLACE};
    }
    return move_begin(kv, m);
}

uint32_t kv_idle_in_end(struct kv *kv, struct kv_idle_move *m, struct kv_effects *fx)
{
    struct kv_pool_rec *p = &kv->pools[m->pool];
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n; i++) {
        const struct kv_idle_entry *x = &m->entries[i];
        bool comes = x->is_good && !x->is_gone && m->seq != UINT32_MAX &&
                     kv_charge_may_stay(kv, m->seq); /* else its owner has used the room since */
        if (!comes) {
            kv_block_unref(kv, p, x->block);
        } else {
            kv_publish32(&kv_own_row(kv, m->seq)[x->index], x->block);
            kv_charge(kv, m->seq, 1);
            count_paged_out(kv, m->seq, -1);
            fx->patches[fx->n_patches++] =
                (struct kv_patch){.row = m->seq, .index = x->index, .block = x->block};
            n++;
        }
        if (comes || x->is_gone)
            release_pages(&kv->pages, x->page, p->idle_pages);
    }
    LIST_REMOVE(m, link);
    free(m);
    return n;
}
