/* moves.c: see moves.h. */
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

struct moves {
    struct moves_device device;
    uint32_t n_threads, n_begun;
    pthread_t threads[MOVES_MAX_THREADS];
    pthread_mutex_t lock;
    pthread_cond_t has_work;
    struct backend_moves *first, **end; /* with moves that no thread has taken */
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

/* --- threads ---------------------------------------------------------------------------------- */

/* The next move of the oldest that has any; NULL: they are to end. Waits. */
static struct backend_move *take(struct moves *t, struct backend_moves **out_of)
{
    while (t->first == NULL && !t->is_closing)
        pthread_cond_wait(&t->has_work, &t->lock);
    struct backend_moves *m = t->first;
    if (m == NULL)
        return NULL;
    struct backend_move *one = &m->list[m->n_taken++];
    if (m->n_taken == m->n) {
        t->first = m->next;
        if (t->first == NULL)
            t->end = &t->first;
    }
    *out_of = m;
    return one;
}

static void *thread_main(void *arg)
{
    struct moves *t = arg;
    struct backend_moves *of;
    pthread_mutex_lock(&t->lock);
    uint32_t thread = t->n_begun++;
    pthread_mutex_unlock(&t->lock);
    setpriority(PRIO_PROCESS, (id_t)gettid(), LOW_PRIORITY); /* where it can't be, it is as it is */
    attn_status begun = t->device.begin == NULL ? ATTN_OK : t->device.begin(t->device.arg, thread);
    pthread_mutex_lock(&t->lock);
    for (struct backend_move *m; (m = take(t, &of)) != NULL;) {
        pthread_mutex_unlock(&t->lock);
        attn_status st = begun == ATTN_OK ? t->device.move(t->device.arg, thread, m) : begun;
        pthread_mutex_lock(&t->lock);
        m->status = st;
        if (++of->n_done < of->n)
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
    t->n_threads = n_threads < MOVES_MAX_THREADS ? n_threads : MOVES_MAX_THREADS;
    t->end = &t->first;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->has_work, NULL);
    *out = t;
    return ATTN_OK;
}

/* One at least; those that can't be had are done without. */
static bool begin_threads(struct moves *t)
{
    uint32_t n = 0;
    if (t->threads[0] != 0)
        return true;
    while (n < t->n_threads && pthread_create(&t->threads[n], NULL, thread_main, t) == 0)
        n++;
    t->n_threads = n == 0 ? t->n_threads : n;
    if (n == 0)
        t->threads[0] = 0;
    return n > 0;
}

attn_status moves_submit(struct moves *t, struct backend_moves *m)
{
    if (!begin_threads(t))
        return ATTN_ENOMEM;
    m->n_taken = m->n_done = 0;
    m->next = NULL;
    pthread_mutex_lock(&t->lock);
    *t->end = m;
    t->end = &m->next;
    pthread_cond_broadcast(&t->has_work);
    pthread_mutex_unlock(&t->lock);
    return ATTN_OK;
}

void moves_close(struct moves *t)
{
    if (t == NULL)
        return;
    pthread_mutex_lock(&t->lock);
    t->is_closing = true;
    pthread_cond_broadcast(&t->has_work);
    pthread_mutex_unlock(&t->lock);
    for (uint32_t i = 0; t->threads[0] != 0 && i < t->n_threads; i++)
        pthread_join(t->threads[i], NULL);
    pthread_cond_destroy(&t->has_work);
    pthread_mutex_destroy(&t->lock);
    free(t);
}
