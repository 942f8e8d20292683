/* loop_memory.c: libuv's allocator. The reserve is cut into pieces, which are reused when they are
 * freed; that is enough, since the loop's tables are few and freed late. */
#include "daemon/process/loop_memory.h"

#include <malloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <uv.h>

enum { RESERVE_BYTES = 1 << 20 }; /* in .bss: takes no memory until it is used */

struct piece {
    size_t n_bytes; /* behind this head */
    SLIST_ENTRY(piece) link; /* in the list of free pieces */
};

static _Alignas(16) uint8_t reserve[RESERVE_BYTES];
static size_t n_cut;
static SLIST_HEAD(, piece) free_pieces = SLIST_HEAD_INITIALIZER(free_pieces);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_ours(const void *p)
{
    return (const uint8_t *)p >= reserve && (const uint8_t *)p < reserve + RESERVE_BYTES;
}

static void *piece_take(size_t n)
{
    size_t bytes = (n + 15) / 16 * 16;
    struct piece *p;
    pthread_mutex_lock(&lock);
    SLIST_FOREACH(p, &free_pieces, link)
        if (p->n_bytes >= bytes)
            break;
    if (p != NULL) {
        SLIST_REMOVE(&free_pieces, p, piece, link);
    } else if (bytes < RESERVE_BYTES && n_cut + sizeof *p + bytes <= RESERVE_BYTES) {
        p = (struct piece *)(void *)(reserve + n_cut);
        p->n_bytes = bytes;
        n_cut += sizeof *p + bytes;
    }
    pthread_mutex_unlock(&lock);
    return p == NULL ? NULL : p + 1;
}

static void *take(size_t n)
{
    void *p = malloc(n);
    return p != NULL ? p : piece_take(n);
}

static void *take_zeros(size_t n, size_t bytes)
{
    void *p = calloc(n, bytes);
    if (p == NULL && (bytes == 0 || n <= RESERVE_BYTES / bytes) &&
        (p = piece_take(n * bytes)) != NULL)
        memset(p, 0, n * bytes);
    return p;
}

static void give(void *p)
{
    if (!is_ours(p)) {
        free(p);
        return;
    }
    struct piece *piece = (struct piece *)p - 1;
    pthread_mutex_lock(&lock);
    SLIST_INSERT_HEAD(&free_pieces, piece, link);
    pthread_mutex_unlock(&lock);
}

static void *take_again(void *p, size_t n)
{
    void *q = take(n);
    if (q == NULL || p == NULL)
        return q;
    size_t had = is_ours(p) ? ((struct piece *)p - 1)->n_bytes : malloc_usable_size(p);
    memcpy(q, p, had < n ? had : n);
    give(p);
    return q;
}

void loop_memory_use(void)
{
    uv_replace_allocator(take, take_again, take_zeros, give);
}
