/* inbox.c: takes requests from any thread into one engine and applies its queue bounds. The inbox
 * is a stack that the engine takes whole. Submitting to an engine that is awake takes no system
 * call; one that sleeps is woken once. */
#include "daemon/engine/core/inbox.h"

#include <inttypes.h>
#include <stdio.h>

#include "daemon/base/clock.h"
#include "daemon/base/stack.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/answer.h"
#include "daemon/engine/core/pace.h"
#include "daemon/engine/core/peers.h"

void engine_renew(struct engine *e, uint64_t session)
{
    session_touch(e->env.sessions, session, clock_now_ns());
}

/* Returns why the queue, or one holder's share of it, is full; NULL: the request is counted in its
 * share. */
static const char *queue_fault(struct engine *e, struct request *req, uint32_t n, uint64_t total,
                               char why[SHARE_TEXT_BYTES])
{
    uint32_t max_requests = atomic_load_explicit(&e->max_queue_requests, memory_order_relaxed);
    uint64_t max_bytes = atomic_load_explicit(&e->max_queue_bytes, memory_order_relaxed);
    if (n > max_requests) {
        snprintf(why, SHARE_TEXT_BYTES,
                 "%" PRIu32 " requests are queued (engine.max_queue_requests)", max_requests);
        return why;
    }
    if (total > max_bytes) {
        snprintf(why, SHARE_TEXT_BYTES,
                 "%" PRIu64 " bytes would be queued, %" PRIu64 " are allowed (engine.max_queue)",
                 total, max_bytes);
        return why;
    }
    uint64_t task_ns = atomic_load_explicit(&e->task_ns, memory_order_relaxed);
    uint64_t left_ns = req->deadline_ns - req->received_ns;
    if (req->wire.header->body_case == ATTND__REQUEST__BODY_STEP && e->env.tenants == NULL &&
        !pace_is_in_time(n - 1, task_ns, left_ns)) {
        snprintf(why, SHARE_TEXT_BYTES,
                 "%" PRIu32 " requests are ahead, about %" PRIu64 " ms; the deadline is in %" PRIu64
                 " ms",
                 n - 1, (n - 1) * task_ns / 1000000, left_ns / 1000000);
        return why;
    }
    struct queue_room room = {.n_free = max_requests - (n - 1),
                              .n_all = max_requests,
                              .bytes_free = max_bytes - (total - req->msg->n_bytes),
                              .bytes_all = max_bytes};
    return charge_share(&req->charge, req->share, &room, why);
}

bool engine_admit(struct engine *e, struct request *req)
{
    char why[SHARE_TEXT_BYTES];
    uint64_t total;
    uint32_t n;
    charge_queue(&req->charge, &e->queue, req->msg->n_bytes, &n, &total);
    const char *fault = queue_fault(e, req, n, total, why);
    if (fault == NULL)
        return true;
    stats_add(requests_refused_overload, 1);
    engine_renew(e, request_session(req));
    request_reply_error(req, ATTN_EOVERLOAD, engine_retry_after_us(e), "%s", fault);
    return false;
}

void engine_submit(struct engine *e, struct request *req)
{
    if (is_alone(e))
        engine_take(e, req);
    else
        e->peers->ops->submit(e, req);
}

void engine_take(struct engine *e, struct request *req)
{
    if (!engine_admit(e, req))
        return;
    stack_push(&e->inbox, req);
    engine_wake(e);
}

void engine_hand_over(struct engine *to, struct request *req)
{
    if (req->charge.place.queue != &to->queue)
        charge_queue_move(&req->charge, &to->queue);
    stack_push(&to->inbox, req);
    engine_wake(to);
}
