/* iobuf.h: message buffers, from one region that the backend reads and writes in place.
 *
 * A buddy allocator over host_alloc memory that is taken at start: power-of-two sizes, and no
 * further allocation while serving. An eighth is reserved for small buffers, so that hellos,
 * renewals and short steps find room however much large messages hold. Any thread; one mutex, held
 * for a few dozen instructions.
 */
#ifndef ATTND_DAEMON_BASE_IOBUF_H
#define ATTND_DAEMON_BASE_IOBUF_H

#include "daemon/base/share.h"
#include "kernels/backend.h"

enum { IOBUF_SMALL_BYTES = 256 << 10 }; /* the largest small buffer */

struct iobuf_pool;

struct iobuf {
    uint8_t *data; /* 4096-byte aligned (64 from the heap) */
    size_t capacity_bytes;
    size_t offset; /* where the message starts in data: a multiple of 64, 0 but for step replies */
    size_t n_bytes; /* of the message */
    struct iobuf_pool *pool; /* NULL: from the heap */
    struct share *holder; /* the buffer counts in it; NULL: in none */
};

/* Takes total_bytes (rounded up to a power of two) from the backend. ATTN_ENOMEM. */
attn_status iobuf_pool_open(const struct backend_ops *ops, struct backend *b, size_t total_bytes,
                            struct iobuf_pool **out_pool);
void iobuf_pool_close(struct iobuf_pool *pool); /* NULL is fine; no buffer may be out */
/* A buffer of n_bytes or more; its n_bytes is set. It counts in holder (NULL: in none) until it is
 * released. NULL: no memory of this size is left, a large buffer would use what is reserved for
 * small ones (unless no other buffer is out), or the holder has used up its share. */
struct iobuf *iobuf_acquire(struct iobuf_pool *pool, struct share *holder, size_t n_bytes);
/* The same for a reply. What was accepted should be answered, so the share is no bound while an
 * eighth of the memory is free, unless the holder is behind with reading its replies. */
struct iobuf *iobuf_acquire_owed(struct iobuf_pool *pool, struct share *holder, size_t n_bytes);
/* A small buffer from the heap, for an answer when the pool is empty. Its address must not be given
 * to a backend. NULL: out of memory. */
struct iobuf *iobuf_heap_new(size_t n_bytes);
void iobuf_release(struct iobuf *buf); /* NULL is fine */
size_t iobuf_pool_bytes(const struct iobuf_pool *pool); /* size of the region */

#endif
