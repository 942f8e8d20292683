/* share.h: how much of the resources that all peers share may be held by one connection, and by one
 * principal over all of its connections.
 *
 * The rule is the same for every resource. A connection may hold a 32nd of the total while any is
 * left, and one piece in any case. Beyond that it may hold peer_percent of what the others leave
 * (at 50 percent, one that is alone gets a half, two get a third each), as long as a quarter of the
 * total stays free for connections that hold little. A principal may hold principal_percent of what
 * other principals leave.
 *
 * A connection's share lives as long as the connection and the sessions that it has made. Counting
 * is atomic; any thread.
 */
#ifndef ATTND_DAEMON_BASE_SHARE_H
#define ATTND_DAEMON_BASE_SHARE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/base/principal.h"

enum share_kind {
    SHARE_PEERS, /* of listen.max_peers */
    SHARE_SESSIONS, /* of engine.max_sessions */
    SHARE_REQUESTS, /* of engine.max_queue_requests */
    SHARE_QUEUE_BYTES, /* of engine.max_queue */
    SHARE_LARGE_BYTES, /* of cache.io_memory, in large buffers */
    SHARE_SMALL_BYTES, /* the same in small buffers, which large ones can't use up */
    SHARE_MESSAGES, /* of engine.max_queue_requests and listen.max_peers, over sockets */
    SHARE_SHM_BYTES, /* of listen.shm_memory */
    SHARE_N_KINDS
};

struct share {
    struct share *principal; /* of a connection: its principal's share; NULL: it is such a one */
    struct share_table *table;
    struct principal who;
    uint64_t serial; /* unique in its table */
    uint32_t n_refs; /* under the table's lock */
    LIST_ENTRY(share) entry; /* of all principals */
    _Atomic bool is_behind; /* a connection's: replies wait for its reader */
    _Atomic uint64_t held[SHARE_N_KINDS];
};

struct share_table;

/* NULL: no memory. */
struct share_table *share_table_open(uint32_t peer_percent, uint32_t principal_percent);
/* Changes the percentages for what is asked from now on. */
void share_table_set(struct share_table *t, uint32_t peer_percent, uint32_t principal_percent);
void share_table_close(struct share_table *t); /* NULL is fine; after the last share_unref */

/* A new connection's share, with one reference. NULL: no memory. */
struct share *share_open(struct share_table *t, const struct principal *who);
void share_ref(struct share *s);
void share_unref(struct share *s); /* NULL is fine */

/* Counts n more for the connection and its principal; n_free of n_total were left before. Returns
 * NULL when done (also for s NULL, where nothing is counted); else the holder that may have no
 * more, and nothing has changed. */
const struct share *share_take(struct share *s, enum share_kind kind, uint64_t n, uint64_t n_free,
                               uint64_t n_total);
/* Counts n more without a bound. */
void share_add(struct share *s, enum share_kind kind, uint64_t n);
void share_give(struct share *s, enum share_kind kind, uint64_t n); /* NULL is fine */
uint64_t share_held(const struct share *s, enum share_kind kind); /* 0 of NULL */

enum { SHARE_TEXT_BYTES = 320 };
/* The sentence that refuses a holder which share_take has returned. Returns out. */
const char *share_say(const struct share *holder, enum share_kind kind, uint64_t n_free,
                      char out[SHARE_TEXT_BYTES]);

#endif
