/* session.h: the table of workers' sessions and their leases.
 *
 * A session is a random 64-bit id and a slot; sequences name the slot as their owner. Any traffic
 * renews the lease. An expired session's id is forgotten at once; its slot stays taken until the
 * engine has freed or handed over its sequences. Every operation is O(1). Engine thread only,
 * except for session_touch.
 */
#ifndef ATTND_DAEMON_REQUEST_SESSION_H
#define ATTND_DAEMON_REQUEST_SESSION_H

#include <stdatomic.h>
#include <sys/queue.h>

#include "daemon/base/share.h"
#include "proto/attn_types.h"

#define SESSION_NONE UINT32_MAX
#define SESSION_NAME_BYTES 64
#define SESSION_N_ASIDE 8 /* beside engine.max_sessions, for clients of the admin socket */

struct session {
    uint64_t id; /* 0: free or expired */
    uint64_t ended_id; /* the former id of an expired session */
    uint64_t seen_ns; /* last traffic */
    _Atomic uint64_t touched_ns; /* last traffic that did not reach the engine */
    uint32_t n_held; /* its requests inside the engine: it does not expire while there are any */
    TAILQ_ENTRY(session) link; /* in the live list, by age, or in the expired or free list */
    struct session *hash_next;
    struct tenant *tenant; /* set by the engine; NULL: there are no tenants */
    uint64_t hello_key; /* of the hello that made it */
    struct session *hello_next;
    struct share *share; /* of the connection that made it; NULL: not counted */
    bool is_aside; /* it has one of the slots set aside */
    char client_name[SESSION_NAME_BYTES];
};

struct session_table;
struct tenant;

/* A session's name in logs and lists. The whole id is a secret, with which anyone could use the
 * session. */
static inline uint32_t session_label(uint64_t id)
{
    return (uint32_t)(id >> 32);
}

/* How many slots there are: max_sessions, and those set aside. */
static inline uint32_t session_slots(uint32_t max_sessions)
{
    return max_sessions + SESSION_N_ASIDE;
}

attn_status session_table_open(uint32_t max_sessions, struct session_table **out_table);
void session_table_close(struct session_table *t); /* NULL is fine */

/* A hello that asks for a new session. */
struct session_hello {
    const char *client_name;
    uint64_t key; /* unique, but the same when a hello is repeated */
    struct share *share; /* of the connection, where the session is counted; may be NULL */
    bool is_admin; /* over the admin socket: it may have a slot set aside, which is not counted */
};

/* Makes a session for this hello, or finds the one that the same hello has made before.
 * ATTN_EOVERLOAD: the table is full, or the connection or its principal has used up its share;
 * ATTN_EINTERNAL: no random bytes. why gets the sentence. */
attn_status session_open(struct session_table *t, const struct session_hello *hello,
                         uint64_t now_ns, uint32_t *out_slot, char *why, size_t why_bytes);
/* Whether this hello has made a session that is still live. */
bool session_is_known(const struct session_table *t, const struct session_hello *hello);
/* Restores a predecessor's session in its old slot, with a new lease. id 0: an expired one that
 * left sequences. ATTN_EEXIST: the id is another slot's. */
attn_status session_restore(struct session_table *t, uint32_t slot, uint64_t id,
                            const char *client_name, uint64_t now_ns);
/* Finds the slot of a live session. ATTN_ENOTFOUND: it was never made, or has expired. */
attn_status session_find(const struct session_table *t, uint64_t id, uint32_t *out_slot);
void session_renew(struct session_table *t, uint32_t slot, uint64_t now_ns);
/* Renews the session of a request that is refused before the engine sees it; an unknown id is
 * ignored. A session whose last traffic was of this kind may live up to twice its lease. Any
 * thread. */
void session_touch(struct session_table *t, uint64_t id, uint64_t now_ns);
struct session *session_at(struct session_table *t, uint32_t slot);
uint32_t session_count(const struct session_table *t); /* live ones */

/* Ends a live session: it counts as expired. */
void session_end(struct session_table *t, uint32_t slot);
/* Ends one session that was silent for lease_ns and returns its slot; SESSION_NONE: there is none.
 * held: number of each slot's requests in other engines; NULL: there are no other engines. */
uint32_t session_expire(struct session_table *t, uint64_t now_ns, uint64_t lease_ns,
                        const _Atomic uint32_t *held);
/* When the next session may expire; UINT64_MAX: there is no session. */
uint64_t session_next_expiry_ns(const struct session_table *t, uint64_t lease_ns);
/* The slot of an expired session that is still taken; SESSION_NONE: there is none. */
uint32_t session_expired_first(const struct session_table *t);
/* Frees the slot of an expired session. */
void session_release(struct session_table *t, uint32_t slot);

#endif
