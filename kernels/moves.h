/* moves.h: threads of a backend that move whole blocks beside its batches, each with the checksum
 * of its bytes: what the backends have in common of moves_submit.
 *
 * Threads begin with the first move of their direction, so a daemon without tiers has none. They
 * take the moves of what was submitted one by one, or as many together as the device wants, the
 * oldest first. Those for what goes out run at low priority: nobody waits for it as long as it is
 * ahead, and what computes goes first.
 *
 * Checksums are made here, in the pass over the bytes that a move needs anyway, and not when a
 * block is sealed: that would cost half of what a copy does (measured on a CPU: checksum 19 GB/s,
 * memcpy 10 GB/s), for every block computed and not only for those that leave; and a GPU's blocks
 * would have to cross the bus for it.
 */
#ifndef ATTND_KERNELS_MOVES_H
#define ATTND_KERNELS_MOVES_H

#include "kernels/backend.h"

enum {
    MOVES_MAX_THREADS = 8, /* for each direction */
    MOVES_TOGETHER = 64, /* at most */
    MOVES_PEERS_TOGETHER = 16, /* where the device does not say */
};
#define MOVES_BYTES_TOGETHER ((size_t)32 << 20)

struct moves_device {
    /* A thread of this number begins; NULL: nothing to do. Its failure is that of its moves. */
    attn_status (*begin)(void *arg, uint32_t thread);
    /* Moves n blocks, all of one pool and one peer or none, and makes the checksums of those that
     * come from no peer; returns when all is done. */
    attn_status (*move)(void *arg, uint32_t thread, struct backend_move *m, uint32_t n);
    void *arg;
    /* Most that a call of move is given, but for MOVES_BYTES_TOGETHER; 0: blocks of a peer
     * MOVES_PEERS_TOGETHER at a time, others one by one. */
    uint32_t n_together;
};

struct moves;

/* So many threads for each direction; their numbers go on from one to the other. */
attn_status moves_open(const struct moves_device *d, uint32_t n_threads, struct moves **out);
/* As backend moves_submit. ATTN_ENOMEM: no thread can be had. */
attn_status moves_submit(struct moves *t, struct backend_moves *m);
void moves_close(struct moves *t); /* when all is done; NULL is fine */

/* Copies memory and makes the checksum of its bytes in one pass over them. */
void moves_copy(void *dst, const void *src, size_t bytes, uint64_t out_sum[2]);
/* The checksum alone. */
void moves_sum(const void *bytes, size_t n, uint64_t out_sum[2]);

/* The same in parts, for a device that makes the checksums of more than 240 bytes itself: XXH3's
 * eight sums as they begin and its secret, and the checksum of n bytes from the sums at the end. */
enum { MOVES_SUM_LANES = 8, MOVES_SECRET_WORDS = 24 };
void moves_sum_begin(uint64_t out_lanes[MOVES_SUM_LANES], uint64_t out_secret[MOVES_SECRET_WORDS]);
void moves_sum_end(const uint64_t lanes[MOVES_SUM_LANES], size_t n, uint64_t out_sum[2]);

#endif
