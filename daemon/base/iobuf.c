/* iobuf.c: a buddy allocator that keeps its records outside the memory it hands out.
 *
 * Page i of the region has its header, order and list links at index i of plain arrays, so the
 * region itself (pinned, perhaps slow to touch) is never read. Freed small buffers stay unmerged in
 * a short stack per order, so that the next message finds warm memory and splits nothing. When a
 * size runs out, the stacks are merged back and the search is repeated. One mutex; any thread.
 */
#include "daemon/base/iobuf.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

enum {
    PAGE_SHIFT = 12,
    MAX_ORDERS = 32,
    N_STACKS = 10, /* orders with a stack: up to 2 MiB */
    STACK_DEPTH = 16,
    KEPT_SHARE = 8, /* an eighth is reserved for small buffers */
    SPARED_PART = 8, /* replies over their share leave an eighth for others (share.h) */
};
static const uint32_t NONE = UINT32_MAX;

struct page {
    uint32_t prev, next; /* in the free list of its order; valid on a free block's first page */
    uint8_t order; /* of the block that starts here */
    bool is_free; /* in a free list */
};

struct iobuf_pool {
    const struct backend_ops *ops;
    struct backend *backend;
    uint8_t *base;
    size_t total_bytes;
    uint32_t n_orders; /* the highest order is the whole region */
    pthread_mutex_t lock;
    uint64_t used_bytes, large_bytes; /* blocks handed out: all, and the large ones */
    uint32_t free_head[MAX_ORDERS];
    uint32_t stack[N_STACKS][STACK_DEPTH], n_stacked[N_STACKS];
    struct page *pages;
    struct iobuf *bufs; /* one per page, valid on a block's first page */
};

static void list_push(struct iobuf_pool *p, uint32_t i, uint32_t order)
{
    struct page *pg = &p->pages[i];
    pg->order = (uint8_t)order;
    pg->is_free = true;
    pg->prev = NONE;
    pg->next = p->free_head[order];
    if (pg->next != NONE)
        p->pages[pg->next].prev = i;
    p->free_head[order] = i;
}

static void list_remove(struct iobuf_pool *p, uint32_t i)
{
    struct page *pg = &p->pages[i];
    if (pg->prev != NONE)
        p->pages[pg->prev].next = pg->next;
    else
        p->free_head[pg->order] = pg->next;
    if (pg->next != NONE)
        p->pages[pg->next].prev = pg->prev;
    pg->is_free = false;
}

/* Takes a block of this order from the free lists, if need be by splitting a larger one. NONE: none
 * is left. */
static uint32_t block_take(struct iobuf_pool *p, uint32_t order)
{
    uint32_t from = order;
    while (from < p->n_orders && p->free_head[from] == NONE)
        from++;
    if (from >= p->n_orders)
        return NONE;
    uint32_t i = p->free_head[from];
    list_remove(p, i);
    while (from > order) {
        from--;
        list_push(p, i + (1u << from), from);
    }
    p->pages[i].order = (uint8_t)order;
    return i;
}

/* Gives a block back and merges it with its free buddies. */
static void block_give(struct iobuf_pool *p, uint32_t i)
{
    uint32_t order = p->pages[i].order;
    while (order + 1 < p->n_orders) {
        uint32_t buddy = i ^ (1u << order);
        if (!p->pages[buddy].is_free || p->pages[buddy].order != order)
            break;
        list_remove(p, buddy);
        i &= ~(1u << order);
        order++;
    }
    list_push(p, i, order);
}

static void stacks_flush(struct iobuf_pool *p)
{
    for (uint32_t order = 0; order < N_STACKS; order++)
        while (p->n_stacked[order] > 0)
            block_give(p, p->stack[order][--p->n_stacked[order]]);
}

attn_status iobuf_pool_open(const struct backend_ops *ops, struct backend *b, size_t total_bytes,
                            struct iobuf_pool **out_pool)
{
    uint32_t n_orders = 1;
    while (n_orders < MAX_ORDERS && ((size_t)1 << (PAGE_SHIFT + n_orders - 1)) < total_bytes)
        n_orders++;

    struct iobuf_pool *p = calloc(1, sizeof(*p));
    if (p == NULL)
        return ATTN_ENOMEM;
    p->ops = ops;
    p->backend = b;
    p->n_orders = n_orders;
    p->total_bytes = (size_t)1 << (PAGE_SHIFT + n_orders - 1);
    size_t n_pages = p->total_bytes >> PAGE_SHIFT;
    attn_status st = ATTN_ENOMEM;
    if (p->total_bytes < total_bytes)
        goto fail_free;
    p->pages = calloc(n_pages, sizeof(*p->pages));
    p->bufs = calloc(n_pages, sizeof(*p->bufs));
    if (p->pages == NULL || p->bufs == NULL)
        goto fail_free;
    void *base = NULL;
    st = ops->host_alloc(b, p->total_bytes, &base);
    if (st != ATTN_OK)
        goto fail_free;
    p->base = base;
    if (pthread_mutex_init(&p->lock, NULL) != 0) {
        ops->host_free(b, base, p->total_bytes);
        st = ATTN_ENOMEM;
        goto fail_free;
    }
    for (uint32_t order = 0; order < MAX_ORDERS; order++)
        p->free_head[order] = NONE;
    list_push(p, 0, n_orders - 1);
    *out_pool = p;
    return ATTN_OK;
fail_free:
    free(p->pages);
    free(p->bufs);
    free(p);
    return st;
}

void iobuf_pool_close(struct iobuf_pool *p)
{
    if (p == NULL)
        return;
    assert(p->used_bytes == 0);
    p->ops->host_free(p->backend, p->base, p->total_bytes);
    pthread_mutex_destroy(&p->lock);
    free(p->pages);
    free(p->bufs);
    free(p);
}

static enum share_kind kind_of(size_t bytes)
{
    return bytes > IOBUF_SMALL_BYTES ? SHARE_LARGE_BYTES : SHARE_SMALL_BYTES;
}

/* The first page of a block of this order, or NONE. */
static uint32_t block_find(struct iobuf_pool *p, uint32_t order)
{
    if (order < N_STACKS && p->n_stacked[order] > 0)
        return p->stack[order][--p->n_stacked[order]];
    uint32_t i = block_take(p, order);
    if (i == NONE) {
        stacks_flush(p);
        i = block_take(p, order);
    }
    return i;
}

static struct iobuf *acquire(struct iobuf_pool *p, struct share *holder, bool is_owed,
                             size_t n_bytes)
{
    if (n_bytes > p->total_bytes)
        return NULL;
    uint32_t order = 0, i = NONE;
    if (n_bytes > (size_t)1 << PAGE_SHIFT)
        order = 64 - (uint32_t)__builtin_clzll(n_bytes - 1) - PAGE_SHIFT;

    uint64_t bytes = (uint64_t)1 << (order + PAGE_SHIFT);
    pthread_mutex_lock(&p->lock);
    bool is_large = kind_of(bytes) == SHARE_LARGE_BYTES;
    uint64_t most = p->total_bytes;
    if (is_large && p->used_bytes > 0)
        most -= p->total_bytes / KEPT_SHARE;
    uint64_t shared = is_large ? most : most - p->large_bytes; /* what this kind can have in all */
    bool is_granted = p->used_bytes + bytes <= most;
    if (is_granted && is_owed && p->used_bytes + bytes <= most - most / SPARED_PART)
        share_add(holder, kind_of(bytes), bytes);
    else if (is_granted)
        is_granted =
            share_take(holder, kind_of(bytes), bytes, most - p->used_bytes, shared) == NULL;
    if (is_granted) {
        i = block_find(p, order);
        if (i == NONE)
            share_give(holder, kind_of(bytes), bytes);
        else if (is_large)
            p->large_bytes += bytes;
        p->used_bytes += i == NONE ? 0 : bytes;
    }
    pthread_mutex_unlock(&p->lock);
    if (i == NONE)
        return NULL;

    struct iobuf *buf = &p->bufs[i];
    buf->data = p->base + ((size_t)i << PAGE_SHIFT);
    buf->capacity_bytes = (size_t)1 << (order + PAGE_SHIFT);
    buf->offset = 0;
    buf->n_bytes = n_bytes;
    buf->pool = p;
    buf->holder = holder;
    return buf;
}

struct iobuf *iobuf_acquire(struct iobuf_pool *p, struct share *holder, size_t n_bytes)
{
    return acquire(p, holder, false, n_bytes);
}

struct iobuf *iobuf_acquire_owed(struct iobuf_pool *p, struct share *holder, size_t n_bytes)
{
    bool is_behind =
        holder != NULL && atomic_load_explicit(&holder->is_behind, memory_order_relaxed);
    return acquire(p, holder, !is_behind, n_bytes);
}

size_t iobuf_pool_bytes(const struct iobuf_pool *p)
{
    return p->total_bytes;
}

struct iobuf *iobuf_heap_new(size_t n_bytes)
{
    struct iobuf *buf = malloc(sizeof(*buf));
    if (buf == NULL)
        return NULL;
    /* a multiple of the alignment, at least one */
    size_t capacity = (n_bytes / 64 + 1) * 64;
    buf->data = aligned_alloc(64, capacity);
    if (buf->data == NULL) {
        free(buf);
        return NULL;
    }
    buf->capacity_bytes = capacity;
    buf->offset = 0;
    buf->n_bytes = n_bytes;
    buf->pool = NULL;
    buf->holder = NULL;
    return buf;
}

void iobuf_release(struct iobuf *buf)
{
    if (buf == NULL)
        return;
    struct iobuf_pool *p = buf->pool;
    if (p == NULL) {
        free(buf->data);
        free(buf);
        return;
    }
    uint32_t i = (uint32_t)(buf - p->bufs);
    pthread_mutex_lock(&p->lock);
    uint32_t order = p->pages[i].order;
    share_give(buf->holder, kind_of(buf->capacity_bytes), buf->capacity_bytes);
    p->used_bytes -= buf->capacity_bytes;
    if (kind_of(buf->capacity_bytes) == SHARE_LARGE_BYTES)
        p->large_bytes -= buf->capacity_bytes;
    if (order < N_STACKS && p->n_stacked[order] < STACK_DEPTH)
        p->stack[order][p->n_stacked[order]++] = i;
    else
        block_give(p, i);
    pthread_mutex_unlock(&p->lock);
}
