/* charge.h: what one request holds of limited resources. It is taken piece by piece while the
 * request comes in, and given back at once when the request is answered (request_reply), whatever
 * the answer is. Anything else that a request is to hold is added here.
 *
 *   a place in an engine's queue, and its bytes there    any engine that admits it
 *   its connection's share of both                       the engine that admits it first
 *   its tenant's bytes in flight, and a step             the engine that checks it
 *   the name of a sequence that it may make              daemon/cards, when it is sent to a card
 *
 * The table's right column says who takes it. Message buffers are counted in base/iobuf.h, since
 * they outlive the answer, as do messages (transport/sp_peer.c); sequences' tables in cache/room.c.
 * docs/running.md, "Memory", lists all that clients can make the daemon allocate. A charge
 * belongs to the thread that has the request; zeros: nothing is held.
 */
#ifndef ATTND_DAEMON_REQUEST_CHARGE_H
#define ATTND_DAEMON_REQUEST_CHARGE_H

#include "daemon/base/share.h"
#include "daemon/request/tenant.h"

/* One engine's requests between admission and reply. Any thread. */
struct queue_count {
    _Atomic uint32_t n_requests;
    _Atomic uint64_t bytes; /* of their messages */
};

/* How much room a queue has, before the request itself is counted. */
struct queue_room {
    uint64_t n_free, n_all;
    uint64_t bytes_free, bytes_all;
};

struct queue_place {
    struct queue_count *queue; /* NULL: it has no place */
    uint64_t bytes;
};

struct charge {
    struct queue_place place;
    struct share *share; /* its connection's, where the place counts, too; NULL: it does not */
    struct tenant *tenant; /* of a step or import, once it is checked; NULL: not counted */
    uint64_t tenant_bytes;
    bool is_tenants_step;
    void (*unplace)(void *user, struct seq_name name); /* NULL: it holds no name */
    void *unplace_user;
    struct seq_name name;
};

/* Takes a place in the queue, also beyond its bounds: the caller checks *out_n and *out_bytes, the
 * queue's requests and bytes with this one. */
void charge_queue(struct charge *c, struct queue_count *q, uint64_t bytes, uint32_t *out_n,
                  uint64_t *out_bytes);
/* Moves its place to another queue, also beyond that one's bounds. */
void charge_queue_move(struct charge *c, struct queue_count *to);
/* Counts its place in its connection's share (may be NULL), too. NULL: done; else nothing was
 * counted, and the returned sentence, in why, says which holder would have too much. */
const char *charge_share(struct charge *c, struct share *share, const struct queue_room *room,
                         char why[SHARE_TEXT_BYTES]);
/* Counts bytes in flight for the tenant; who NULL: for none. ATTN_EQUOTA as tenant_take. Engine
 * thread, like charge_step. */
attn_status charge_tenant(struct charge *c, struct tenant *who, uint64_t bytes, char *why,
                          size_t why_bytes);
/* Counts it as a step of that tenant. true: the tenant had no other step in the engine. */
bool charge_step(struct charge *c);
/* Notes that a name is reserved for it; unplace(user, name) is called when it gives the name
 * back. */
void charge_place(struct charge *c, struct seq_name name,
                  void (*unplace)(void *user, struct seq_name name), void *user);
/* Gives only the name back. */
void charge_unplace(struct charge *c);

/* The request ends with st: gives everything back but its place in the queue. The caller leaves
 * that after it has passed on the reply, so that an engine with an empty queue has answered all. */
struct queue_place charge_release(struct charge *c, attn_status st);
void queue_leave(struct queue_place p); /* a place in no queue is fine */

#endif
