/* iobuf.h: buffers for messages, from one region the backend can read and write in place.
 *
 * A buddy allocator over host_alloc memory taken at start: power-of-two sizes, bounded, no
 * allocation after ready. An eighth is kept for small buffers, so that hellos, renewals and short
 * steps find room beside whatever large messages hold. Any thread; one mutex, held for a few dozen
 * instructions.
 */
#ifndef ATTND_DAEMON_BASE_IOBUF_H
#define ATTND_DAEMON_BASE_IOBUF_H

#include "daemon/base/share.h"
#include "kernels/backend.h"

enum { IOBUF_SMALL_BYTES = 256 << 10 };

struct iobuf_pool;

struct iobuf {
    uint8_t *data; /* 4096-byte aligned (64 from the heap) */
    size_t capacity_bytes;
    size_t offset; /* where the message starts in data: a multiple of 64, 0 but for step replies */
    size_t n_bytes; /* of the message */
    struct iobuf_pool *pool; /* NULL: from the heap */
    struct share *holder; /* NULL: none is counted */
};

/* Takes total_bytes (rounded up to a power of two) from the backend. ATTN_ENOMEM. */
attn_status iobuf_pool_open(const struct backend_ops *ops, struct backend *b, size_t total_bytes,
                            struct iobuf_pool **out_pool);
void iobuf_pool_close(struct iobuf_pool *pool); /* NULL is fine; no buffer may be out */
/* NULL: none left of this size, a large one would take from what is kept for small ones (the only
 * buffer out may have all), or the holder has its share. n_bytes is set. holder, which may be NULL,
 * is counted until the buffer is released. */
struct iobuf *iobuf_acquire(struct iobuf_pool *pool, struct share *holder, size_t n_bytes);
/* The same for a reply: what was taken on shall be answered, so the share is no bound while an
 * eighth is free, unless the holder is behind with reading its replies. */
struct iobuf *iobuf_acquire_owed(struct iobuf_pool *pool, struct share *holder, size_t n_bytes);
/* A small buffer from the heap, for what must be said when the pool is empty. No backend may be
 * given its address. NULL: out of memory. */
struct iobuf *iobuf_heap_new(size_t n_bytes);
void iobuf_release(struct iobuf *buf); /* NULL is fine */
size_t iobuf_pool_bytes(const struct iobuf_pool *pool); /* in all */

#endif
