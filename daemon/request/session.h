/* session.h: the table of workers' sessions and their leases.
 *
 * A session is a random 64-bit id and a slot; sequences name the slot as their owner. Any traffic
 * renews the lease. An expired session's id is forgotten at once; its slot stays taken until the
 * engine has freed or handed over its sequences. Every operation is O(1). Engine thread only, but
 * for session_touch.
 */
#ifndef ATTND_DAEMON_REQUEST_SESSION_H
#define ATTND_DAEMON_REQUEST_SESSION_H

#include <stdatomic.h>
#include <sys/queue.h>

#include "daemon/base/share.h"
#include "proto/attn_types.h"

#define SESSION_NONE UINT32_MAX
#define SESSION_NAME_BYTES 64

struct session {
    uint64_t id; /* 0: free or expired */
    uint64_t ended_id; /* of an expired one: what it was */
    uint64_t seen_ns; /* last traffic */
    _Atomic uint64_t touched_ns; /* the same, of what never came to the engine */
    uint32_t
        n_held; /* requests of it inside the engine: it does not expire while it waits for us */
    TAILQ_ENTRY(session) link; /* of the live list, by age, or of the expired or free list */
    struct session *hash_next;
    struct tenant *tenant; /* set by the engine; NULL: none asks */
    uint64_t hello_key; /* of the hello that made it */
    struct session *hello_next;
    struct share *share; /* of the connection that made it; NULL: none is counted */
    char client_name[SESSION_NAME_BYTES];
};

struct session_table;
struct tenant;

/* What a session is called where people see it: its whole id would let them go on with it. */
static inline uint32_t session_label(uint64_t id)
{
    return (uint32_t)(id >> 32);
}

attn_status session_table_open(uint32_t max_sessions, struct session_table **out_table);
void session_table_close(struct session_table *t); /* NULL is fine */

/* A hello that asks for a new session. */
struct session_hello {
    const char *client_name;
    uint64_t key; /* no other hello has it, but a repeated one has the same */
    struct share *share; /* of the connection, which the session is counted with; may be NULL */
};

/* The session of this hello: made now, or when the same hello came before. ATTN_EOVERLOAD: the
 * table is full, or the connection or its principal has its share; ATTN_EINTERNAL: no random bytes.
 * why gets the sentence. */
attn_status session_open(struct session_table *t, const struct session_hello *hello,
                         uint64_t now_ns, uint32_t *out_slot, char *why, size_t why_bytes);
/* Whether the session of this hello lives. */
bool session_is_known(const struct session_table *t, const struct session_hello *hello);
/* Restores a predecessor's session in its old slot, with a new lease. id 0: an expired one that
 * left sequences. ATTN_EEXIST: the id is another slot's. */
attn_status session_restore(struct session_table *t, uint32_t slot, uint64_t id,
                            const char *client_name, uint64_t now_ns);
/* ATTN_ENOTFOUND: never made, or expired. */
attn_status session_find(const struct session_table *t, uint64_t id, uint32_t *out_slot);
void session_renew(struct session_table *t, uint32_t slot, uint64_t now_ns);
/* Renews the session of a request that is refused before the engine sees it; an unknown id is fine.
 * A session whose last traffic was of this kind may outlive its lease, by as much again at most.
 * Any thread. */
void session_touch(struct session_table *t, uint64_t id, uint64_t now_ns);
struct session *session_at(struct session_table *t, uint32_t slot);
uint32_t session_count(const struct session_table *t); /* live ones */

/* Takes a live session out of the live ones: it counts as expired. */
void session_end(struct session_table *t, uint32_t slot);
/* Takes one session silent for lease_ns out of the live ones; SESSION_NONE: there is none. held:
 * requests of each slot's that are inside other engines; NULL: there are none. */
uint32_t session_expire(struct session_table *t, uint64_t now_ns, uint64_t lease_ns,
                        const _Atomic uint32_t *held);
/* When the next session may expire; UINT64_MAX without one. */
uint64_t session_next_expiry_ns(const struct session_table *t, uint64_t lease_ns);
/* An expired session with its slot still taken; SESSION_NONE: none. */
uint32_t session_expired_first(const struct session_table *t);
/* The slot may be used again. */
void session_release(struct session_table *t, uint32_t slot);

#endif
