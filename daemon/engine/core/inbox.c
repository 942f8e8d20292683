/* inbox.c: see inbox.h.
 *
 * The inbox is a stack that any thread pushes to; the engine takes all of it at once. An awake
 * engine costs its producers no system call, a sleeping one (engine/core/sleep.c) one.
 */
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
    session_touch(e->parts.sessions, session, clock_now_ns());
}

/* Why the queue, or what one holder may have of it, is full; NULL: the request is counted there. */
static const char *queue_fault(struct engine *e, struct request *req, uint32_t n, uint64_t total,
                               char why[SHARE_TEXT_BYTES])
{
    uint32_t max_requests = atomic_load_explicit(&e->max_queue_requests, memory_order_relaxed);
    uint64_t max_bytes = atomic_load_explicit(&e->max_queue_bytes, memory_order_relaxed);
    uint64_t bytes = req->msg->n_bytes;
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
    if (req->wire.header->body_case == ATTND__REQUEST__BODY_STEP && e->parts.tenants == NULL &&
        !pace_is_in_time(n - 1, task_ns, left_ns)) {
        snprintf(why, SHARE_TEXT_BYTES,
                 "%" PRIu32 " requests are ahead, about %" PRIu64 " ms; the deadline is in %" PRIu64
                 " ms",
                 n - 1, (n - 1) * task_ns / 1000000, left_ns / 1000000);
        return why;
    }
    uint64_t n_free = max_requests - (n - 1), bytes_free = max_bytes - (total - bytes);
    const struct share *full = share_take(req->share, SHARE_REQUESTS, 1, n_free, max_requests);
    if (full != NULL)
        return share_say(full, SHARE_REQUESTS, n_free, why);
    full = share_take(req->share, SHARE_QUEUE_BYTES, bytes, bytes_free, max_bytes);
    if (full == NULL)
        return NULL;
    share_give(req->share, SHARE_REQUESTS, 1);
    return share_say(full, SHARE_QUEUE_BYTES, bytes_free, why);
}

bool engine_admit(struct engine *e, struct request *req)
{
    uint64_t bytes = req->msg->n_bytes, total;
    char why[SHARE_TEXT_BYTES];
    uint32_t n;
    engine_hold(e, bytes, &n, &total);
    const char *fault = queue_fault(e, req, n, total, why);
    if (fault == NULL)
        return true;
    stats_add(requests_refused_overload, 1);
    engine_renew(e, request_session(req));
    peers_settle(e, req);
    request_reply_error(req, ATTN_EOVERLOAD, engine_retry_after_us(e), "%s", fault);
    engine_let_go(e, bytes);
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

void engine_count_over(struct engine *from, struct engine *to, const struct request *req)
{
    uint64_t bytes = req->msg->n_bytes;
    atomic_fetch_add(&to->held_bytes, bytes);
    atomic_fetch_add(&to->n_held, 1);
    atomic_fetch_sub(&from->held_bytes, bytes);
    atomic_fetch_sub(&from->n_held, 1);
}

void engine_hand_over(struct engine *from, struct engine *to, struct request *req)
{
    if (from != to)
        engine_count_over(from, to, req);
    stack_push(&to->inbox, req);
    engine_wake(to);
}
