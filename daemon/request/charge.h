/* charge.h: what one request holds of things that others want, too. It is taken piece by piece on
 * the request's way in, and given back as a whole when it is answered (request_reply), whatever
 * the answer is: what a request shall hold beside this is added here.
 *
 *   a place in an engine's queue, and its bytes there    any engine that admits it
 *   its connection's part of both                        the engine that admits it first
 *   its tenant's bytes in flight, and a step             the engine that checks it
 *   the name that it may give to a sequence              the cards, when it is sent to one
 *
 * Message buffers are counted by the buffers themselves (base/iobuf.h): they outlive the answer.
 * A charge belongs to whoever has the request at the moment; zeros: nothing is held.
 */
#ifndef ATTND_DAEMON_REQUEST_CHARGE_H
#define ATTND_DAEMON_REQUEST_CHARGE_H

#include "daemon/base/share.h"
#include "daemon/request/tenant.h"

/* The requests between their admission and their reply, of one engine. Any thread. */
struct queue_count {
    _Atomic uint32_t n_requests;
    _Atomic uint64_t bytes; /* of their messages */
};

/* How much of a queue there is for a request, without what it asks for itself. */
struct queue_room {
    uint64_t n_free, n_all;
    uint64_t bytes_free, bytes_all;
};

struct queue_place {
    struct queue_count *queue; /* NULL: it has none */
    uint64_t bytes;
};

struct charge {
    struct queue_place place;
    struct share *share; /* of its connection, which holds the same of the queue; NULL: none does */
    struct tenant *tenant; /* of a step or import, from its check on; NULL: none asks */
    uint64_t tenant_bytes;
    bool is_tenants_step;
    void (*unplace)(void *user, struct seq_name name); /* NULL: it is to give no name */
    void *unplace_user;
    struct seq_name name;
};

/* A place in the queue, which counts it though it may be one too many. out_n, out_bytes: with
 * it. */
void charge_queue(struct charge *c, struct queue_count *q, uint64_t bytes, uint32_t *out_n,
                  uint64_t *out_bytes);
/* Its place is in this queue now, whatever room that has. */
void charge_queue_move(struct charge *c, struct queue_count *to);
/* What it has of the queue is its connection's, too. NULL: so it is; else nothing is, and the
 * sentence, in why, says who would have too much. share may be NULL. */
const char *charge_share(struct charge *c, struct share *share, const struct queue_room *room,
                         char why[SHARE_TEXT_BYTES]);
/* Bytes of the tenant's; who NULL: of nobody's. ATTN_EQUOTA as tenant_take. Engine thread, as the
 * next. */
attn_status charge_tenant(struct charge *c, struct tenant *who, uint64_t bytes, char *why,
                          size_t why_bytes);
/* It is a step of that tenant's. true: the only one it has. */
bool charge_step(struct charge *c);
/* A name is reserved for it until unplace is called with both. */
void charge_place(struct charge *c, struct seq_name name,
                  void (*unplace)(void *user, struct seq_name name), void *user);
/* That alone is given back. */
void charge_unplace(struct charge *c);

/* The request ends with st: all is given back but its place in the queue, which is the caller's to
 * leave when the reply is on its way, so that an engine whose queue is empty has answered all. */
struct queue_place charge_release(struct charge *c, attn_status st);
void queue_leave(struct queue_place p); /* of none, too */

#endif
