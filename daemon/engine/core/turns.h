/* turns.h: what requests other than steps cost, and who is next. Engine thread.
 *
 * Such requests run on the engine's thread: as they come, while they are few. Once they have taken
 * TURN_NS since the engine last looked for steps, the others wait, in order, one line for each
 * tenant. Whoever has had the least of the engine, by start-time fair queueing with the tenant's
 * share, is next: the time of these requests and the device time of steps are one account
 * (tenant.flow). Where steps could be launched instead, they go first if their tenant's account
 * says so; within a tenant, both get as much time. So a step waits for one turn of other work at
 * most, TURN_NS and what can't be divided.
 *
 * Requests on one sequence keep their order: such a request waits in the sequence's queue first,
 * and holds its claim (task.h) while it waits here.
 *
 * Requests that need memory cleared wait in a line of their own, while another thread clears it
 * for one of them at a time; whose turn that is goes by bytes.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_TURNS_H
#define ATTND_DAEMON_ENGINE_CORE_TURNS_H

#include "daemon/engine/core/state.h"

/* How long requests other than steps may keep the engine from looking for steps. */
static const uint64_t TURN_NS = 200 * 1000;

void turns_init(struct engine *e);
/* A turn of the engine begins. */
static inline void turns_renew(struct engine *e)
{
    e->turns.spent_ns = 0;
}

/* Whether a request that comes now must wait for its turn. */
bool turns_must_wait(const struct engine *e);
/* The request waits for its turn behind those of its tenant, or before them. task: what has its
 * turn then, by task_ops.run; NULL: the request is served anew. */
void turns_add(struct engine *e, struct request *req, struct task *task);
void turns_add_first(struct engine *e, struct request *req, struct task *task);
void turns_remove(struct engine *e, struct request *req);

/* Takes out the request whose turn it is. steps_wait: a batch could be launched now, and payer is
 * charged for it (NULL: no tenant). NULL: nobody waits, steps go first, or this turn of the engine
 * is over. */
struct request *turns_next(struct engine *e, bool steps_wait, const struct tenant *payer);
/* Refuses those that would be served anew and whose deadline has passed; returns the earliest
 * deadline of the others, UINT64_MAX: there is none. */
uint64_t turns_expire(struct engine *e, uint64_t now_ns);

/* Refuses those of the session that would be served anew. */
void turns_refuse_of(struct engine *e, uint32_t session, attn_status st, const char *why);

/* The session lives on until session_unhold, from which on its lease runs. */
void session_hold(struct engine *e, uint32_t session);
void session_unhold(struct engine *e, uint32_t session);

/* What runs between these two has its turn; its time is charged to the request's tenant. begin:
 * returns the time, for end. */
uint64_t turn_begin(struct engine *e);
void turn_end(struct engine *e, uint32_t of, uint64_t began_ns, bool steps_wait);
/* Whether what has its turn should go on in another. */
bool turn_is_over(const struct engine *e);
/* The account that the request is charged to, for turn_end. */
uint32_t turns_of(const struct engine *e, const struct request *req);
/* A batch of this tenant's took so long. */
void turns_note_batch(struct engine *e, const struct tenant *who, uint64_t took_ns);

/* Whether a pool that is to be opened, or resized, as its config says must wait until its memory is
 * cleared: the handler is to fail with ATTN_EOVERLOAD then. */
bool turns_await_memory(struct engine *e, const struct pool *p, bool is_new);
/* Whether a handler failed for that: the request waits, and is served anew. */
bool turns_park(struct engine *e, struct request *req);
/* Takes out the request that should see whether its memory is ready. NULL: none yet. */
struct request *turns_next_of_memory(struct engine *e, uint64_t now_ns);
/* How long the engine may sleep for requests that wait for memory. */
uint64_t turns_nap_ns(const struct engine *e, uint64_t ns);

#endif
