/* moves.c: the copy that makes a checksum as it goes, and for each direction a queue with its
 * threads, of which each calls the device for what it takes.
 */
#define _GNU_SOURCE
#include "kernels/moves.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#define XXH_INLINE_ALL
#include <xxhash.h>

enum {
    CHUNK_BYTES = 64 << 10, /* stays in a core's own cache between checksum and copy */
    LOW_PRIORITY = 15, /* as nice(1) counts */
};

/* One direction: what waits, and the threads for it. */
struct way {
    struct moves *moves;
    struct backend_moves *first, **end; /* with moves that no thread has taken */
    pthread_cond_t has_work;
    pthread_t threads[MOVES_MAX_THREADS];
    uint32_t n_threads;
};

struct moves {
    struct moves_device device;
    uint32_t n_threads, n_begun;
    pthread_mutex_t lock;
    struct way ways[2]; /* out; in */
    bool is_closing;
};

/* --- one pass --------------------------------------------------------------------------------- */

/* The bytes written are not read again soon: past the caches, where the processor can. */
static void copy_past(uint8_t *dst, const uint8_t *src, size_t n)
{
#ifdef __SSE2__
    size_t i = 0;
    for (; (uintptr_t)dst % 16 == 0 && i + 64 <= n; i += 64)
        for (size_t k = i; k < i + 64; k += 16)
            _mm_stream_si128((__m128i *)(void *)(dst + k),
                             _mm_loadu_si128((const __m128i *)(const void *)(src + k)));
    memcpy(dst + i, src + i, n - i);
#else
    memcpy(dst, src, n);
#endif
}

static void give(XXH128_hash_t h, uint64_t out_sum[2])
{
    out_sum[0] = h.low64;
    out_sum[1] = h.high64;
}

void moves_copy(void *dst, const void *src, size_t bytes, uint64_t out_sum[2])
{
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    for (size_t at = 0; at < bytes; at += CHUNK_BYTES) {
        size_t n = bytes - at < CHUNK_BYTES ? bytes - at : CHUNK_BYTES;
        XXH3_128bits_update(&state, (const uint8_t *)src + at, n);
        copy_past((uint8_t *)dst + at, (const uint8_t *)src + at, n);
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
    give(XXH3_128bits_digest(&state), out_sum);
}

void moves_sum(const void *bytes, size_t n, uint64_t out_sum[2])
{
    give(XXH3_128bits(bytes, n), out_sum);
}

void moves_sum_begin(uint64_t out_lanes[MOVES_SUM_LANES], uint64_t out_secret[MOVES_SECRET_WORDS])
{
    static const uint64_t begin[MOVES_SUM_LANES] = XXH3_INIT_ACC;
    memcpy(out_lanes, begin, sizeof begin);
    memcpy(out_secret, XXH3_kSecret, MOVES_SECRET_WORDS * sizeof *out_secret);
}

void moves_sum_end(const uint64_t lanes[MOVES_SUM_LANES], size_t n, uint64_t out_sum[2])
{
    const uint8_t *low = XXH3_kSecret + XXH_SECRET_MERGEACCS_START;
    const uint8_t *high = XXH3_kSecret + XXH_SECRET_DEFAULT_SIZE - XXH_SECRET_MERGEACCS_START -
                          MOVES_SUM_LANES * sizeof *lanes;
    out_sum[0] = XXH3_mergeAccs(lanes, low, n * XXH_PRIME64_1);
    out_sum[1] = XXH3_mergeAccs(lanes, high, ~(n * XXH_PRIME64_2));
}

/* --- threads ---------------------------------------------------------------------------------- */

/* How many of the next moves go together. */
static uint32_t together(const struct moves_device *d, const struct backend_moves *m)
{
    const struct backend_move *x = &m->list[m->n_taken];
    uint32_t n = 1, most = d->n_together > 0 ? d->n_together
                           : x->peer == NULL ? 1
                                             : MOVES_PEERS_TOGETHER;
    size_t bytes = x->n_bytes;
    while (n < most && m->n_taken + n < m->n && x[n].pool == x->pool && x[n].peer == x->peer &&
           bytes + x[n].n_bytes <= MOVES_BYTES_TOGETHER)
        bytes += x[n++].n_bytes;
    return n;
}

/* The next moves of the oldest that has any; NULL: they are to end. Waits. */
static struct backend_move *take(struct way *w, struct backend_moves **out_of, uint32_t *out_n)
{
    while (w->first == NULL && !w->moves->is_closing)
        pthread_cond_wait(&w->has_work, &w->moves->lock);
    struct backend_moves *m = w->first;
    if (m == NULL)
        return NULL;
    struct backend_move *first = &m->list[m->n_taken];
    uint32_t n = together(&w->moves->device, m);
    m->n_taken += n;
    if (m->n_taken == m->n) {
        w->first = m->next;
        if (w->first == NULL)
            w->end = &w->first;
    }
    *out_of = m;
    *out_n = n;
    return first;
}

static void *thread_main(void *arg)
{
    struct way *w = arg;
    struct moves *t = w->moves;
    struct backend_moves *of;
    uint32_t n;
    pthread_setname_np(pthread_self(), "attnd-moves");
    pthread_mutex_lock(&t->lock);
    uint32_t thread = t->n_begun++;
    pthread_mutex_unlock(&t->lock);
    if (w == &t->ways[0]) /* where it can't be, it is as it is */
        setpriority(PRIO_PROCESS, (id_t)gettid(), LOW_PRIORITY);
    attn_status begun = t->device.begin == NULL ? ATTN_OK : t->device.begin(t->device.arg, thread);
    pthread_mutex_lock(&t->lock);
    for (struct backend_move *m; (m = take(w, &of, &n)) != NULL;) {
        pthread_mutex_unlock(&t->lock);
        attn_status st = begun == ATTN_OK ? t->device.move(t->device.arg, thread, m, n) : begun;
        pthread_mutex_lock(&t->lock);
        for (uint32_t i = 0; i < n; i++)
            m[i].status = st;
        of->n_done += n;
        if (of->n_done < of->n)
            continue;
        pthread_mutex_unlock(&t->lock);
        of->done(of);
        pthread_mutex_lock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

attn_status moves_open(const struct moves_device *d, uint32_t n_threads, struct moves **out)
{
    struct moves *t = calloc(1, sizeof *t);
    if (t == NULL)
        return ATTN_ENOMEM;
    t->device = *d;
    if (t->device.n_together > MOVES_TOGETHER)
        t->device.n_together = MOVES_TOGETHER;
    t->n_threads = n_threads < MOVES_MAX_THREADS ? n_threads : MOVES_MAX_THREADS;
    pthread_mutex_init(&t->lock, NULL);
    for (int i = 0; i < 2; i++) {
        struct way *w = &t->ways[i];
        w->moves = t;
        w->end = &w->first;
        pthread_cond_init(&w->has_work, NULL);
    }
    *out = t;
    return ATTN_OK;
}

/* One at least; those that can't be had are done without. */
static bool begin_threads(struct way *w)
{
    uint32_t n = 0;
    if (w->n_threads > 0)
        return true;
    while (n < w->moves->n_threads && pthread_create(&w->threads[n], NULL, thread_main, w) == 0)
        n++;
    w->n_threads = n;
    return n > 0;
}

attn_status moves_submit(struct moves *t, struct backend_moves *m)
{
    struct way *w = &t->ways[m->list[0].is_in];
    if (!begin_threads(w))
        return ATTN_ENOMEM;
    m->n_taken = m->n_done = 0;
    m->next = NULL;
    pthread_mutex_lock(&t->lock);
    *w->end = m;
    w->end = &m->next;
    pthread_cond_broadcast(&w->has_work);
    pthread_mutex_unlock(&t->lock);
    return ATTN_OK;
}

void moves_close(struct moves *t)
{
    if (t == NULL)
        return;
    pthread_mutex_lock(&t->lock);
    t->is_closing = true;
    for (int i = 0; i < 2; i++)
        pthread_cond_broadcast(&t->ways[i].has_work);
    pthread_mutex_unlock(&t->lock);
    for (int i = 0; i < 2; i++) {
        for (uint32_t k = 0; k < t->ways[i].n_threads; k++)
            pthread_join(t->ways[i].threads[k], NULL);
        pthread_cond_destroy(&t->ways[i].has_work);
    }
    pthread_mutex_destroy(&t->lock);
    free(t);
}
