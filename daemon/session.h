/* session.h: the table of workers' sessions and their leases.
 *
 * A session is a random 64-bit id and a slot; sequences name the slot as their owner. Any traffic
 * renews the lease. An expired session's id is forgotten at once; its slot stays taken until the
 * engine has freed or handed over its sequences. Every operation is O(1). Engine thread only.
 */
#ifndef ATTND_DAEMON_SESSION_H
#define ATTND_DAEMON_SESSION_H

#include <sys/queue.h>

#include "proto/attn_types.h"

#define SESSION_NONE UINT32_MAX
#define SESSION_NAME_BYTES 64

struct session {
    uint64_t id; /* 0: free or expired */
    uint64_t seen_ns; /* last traffic */
    uint32_t
        n_held; /* requests of it inside the engine: it does not expire while it waits for us */
    TAILQ_ENTRY(session) link; /* of the live list, by age, or of the expired or free list */
    struct session *hash_next;
    char client_name[SESSION_NAME_BYTES];
};

struct session_table;

attn_status session_table_open(uint32_t max_sessions, struct session_table **out_table);
void session_table_close(struct session_table *t); /* NULL is fine */

/* A new session. ATTN_EOVERLOAD: the table is full; ATTN_EINTERNAL: no random bytes. */
attn_status session_open(struct session_table *t, const char *client_name, uint64_t now_ns,
                         uint32_t *out_slot);
/* ATTN_ENOTFOUND: never made, or expired. */
attn_status session_find(const struct session_table *t, uint64_t id, uint32_t *out_slot);
void session_renew(struct session_table *t, uint32_t slot, uint64_t now_ns);
struct session *session_at(struct session_table *t, uint32_t slot);
uint32_t session_count(const struct session_table *t); /* live ones */

/* Takes one session silent for lease_ns out of the live ones; SESSION_NONE: there is none. */
uint32_t session_expire(struct session_table *t, uint64_t now_ns, uint64_t lease_ns);
/* When the next session may expire; UINT64_MAX without one. */
uint64_t session_next_expiry_ns(const struct session_table *t, uint64_t lease_ns);
/* An expired session whose slot is not released; SESSION_NONE. */
uint32_t session_expired_first(const struct session_table *t);
/* The slot may be used again. */
void session_release(struct session_table *t, uint32_t slot);

#endif
