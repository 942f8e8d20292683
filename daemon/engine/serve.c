/* serve.c: serves a request that has come to the engine: checks it, finds its session, runs the
 * handler of its kind, and answers. If a handler makes the request wait, the answer comes from what
 * ends the wait: for a step, its last batch. What is no step is charged for its time, and may have
 * to wait for its turn.
 */
#include "daemon/engine/serve.h"

#include <inttypes.h>

#include "daemon/engine/core/answer.h"
#include "daemon/engine/core/inbox.h"
#include "daemon/engine/core/moved.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/core/status.h"
#include "daemon/engine/core/turns.h"
#include "daemon/engine/hello.h"
#include "daemon/engine/operator/operator.h"
#include "daemon/engine/pool/handlers.h"
#include "daemon/engine/seq/calls.h"
#include "daemon/engine/seq/sequence.h"
#include "daemon/engine/step/batch.h"
#include "daemon/engine/step/plan.h"
#include "daemon/engine/step/step.h"

/* A kind of request. */
struct kind {
    /* Carries out the request. session: its slot, renewed; 0 for a kind that has none. */
    attn_status (*run)(struct engine *e, struct request *req, uint32_t session, struct answer *a);
    bool has_no_session; /* hello: it asks for one */
    bool is_operators; /* operator_check decides who may ask */
    bool has_line; /* its handler makes it wait for its turn */
};

static const struct kind kinds[] = {
    [ATTND__REQUEST__BODY_HELLO] = {.run = hello_run, .has_no_session = true},
    [ATTND__REQUEST__BODY_GOODBYE] = {.run = goodbye_run},
    [ATTND__REQUEST__BODY_STEP] = {.run = step_run, .has_line = true},
    [ATTND__REQUEST__BODY_PLAN] = {.run = plan_run},
    [ATTND__REQUEST__BODY_POOL_CREATE] = {.run = pool_create_run},
    [ATTND__REQUEST__BODY_POOL_DESCRIBE] = {.run = pool_describe_run},
    [ATTND__REQUEST__BODY_POOL_RELEASE] = {.run = pool_release_run},
    [ATTND__REQUEST__BODY_POOL_RESERVE] = {.run = pool_reserve_run},
    [ATTND__REQUEST__BODY_POOL_RESIZE] = {.run = pool_resize_run},
    [ATTND__REQUEST__BODY_WEIGHTS] = {.run = weights_run},
    [ATTND__REQUEST__BODY_STATS] = {.run = stats_run},
    [ATTND__REQUEST__BODY_DRAIN] = {.run = drain_run},
    [ATTND__REQUEST__BODY_OPEN] = {.run = control_on_seq, .has_line = true},
    [ATTND__REQUEST__BODY_FORK] = {.run = control_on_seq, .has_line = true},
    [ATTND__REQUEST__BODY_TRUNCATE] = {.run = control_on_seq, .has_line = true},
    [ATTND__REQUEST__BODY_COMMIT] = {.run = control_on_seq, .has_line = true},
    [ATTND__REQUEST__BODY_TOKENS] = {.run = control_on_seq, .has_line = true},
    [ATTND__REQUEST__BODY_NOTE] = {.run = control_on_seq, .has_line = true},
    [ATTND__REQUEST__BODY_CLOSE] = {.run = control_on_seq, .has_line = true},
    [ATTND__REQUEST__BODY_ADOPT] = {.run = control_on_seq, .has_line = true},
    [ATTND__REQUEST__BODY_EXPORT] = {.run = control_on_seq, .has_line = true},
    [ATTND__REQUEST__BODY_IMPORT] = {.run = control_import, .has_line = true},
    [ATTND__REQUEST__BODY_CALLS] = {.run = calls_run},
    [ATTND__REQUEST__BODY_PROBE] = {.run = probe_run},
    [ATTND__REQUEST__BODY_LOCATE] = {.run = locate_run},
    [ATTND__REQUEST__BODY_INSPECT] = {.run = inspect_run, .is_operators = true},
    [ATTND__REQUEST__BODY_CONFIGURE] = {.run = configure_run, .is_operators = true},
    [ATTND__REQUEST__BODY_RELOAD] = {.run = reload_run, .is_operators = true},
    [ATTND__REQUEST__BODY_POOL_DROP] = {.run = pool_drop_run, .is_operators = true},
    [ATTND__REQUEST__BODY_KILL] = {.run = kill_run, .is_operators = true, .has_line = true},
    [ATTND__REQUEST__BODY_RETIRE] = {.run = control_on_seq, .is_operators = true, .has_line = true},
    [ATTND__REQUEST__BODY_FENCE] = {.run = fence_run, .is_operators = true},
    [ATTND__REQUEST__BODY_MOVE] = {.run = control_on_seq, .is_operators = true, .has_line = true},
};
enum { N_KINDS = sizeof kinds / sizeof kinds[0] };

/* Refuses a step after the device was lost. If other cards go on, its sequences are not found,
 * since they were on this card. */
static attn_status no_device(struct engine *e, struct answer *a)
{
    if (peers_any_live(e))
        return answer_no(a, ATTN_ENOTFOUND, "no such sequence: its card is lost");
    return answer_no(a, engine_health(e), "the device is lost");
}

/* Checks that apply to all kinds. */
static attn_status check_unread(struct engine *e, const struct request *req, struct answer *a)
{
    if (atomic_load_explicit(&e->is_stopping, memory_order_relaxed))
        return answer_no(a, engine_stop_status(e), "the daemon is stopping");
    if (req->deadline_ns <= req->taken_ns)
        return answer_no(a, ATTN_EDEADLINE, "%" PRIu64 " us passed before the engine saw it",
                         (req->taken_ns - req->received_ns) / 1000);
    if (req->wire.header->body_case == ATTND__REQUEST__BODY_STEP && engine_health(e) != ATTN_OK)
        return no_device(e, a);
    return ATTN_OK;
}

static attn_status serve(struct engine *e, struct request *req, struct answer *a)
{
    uint32_t body = req->wire.header->body_case;
    const struct kind *k = &kinds[body < N_KINDS ? body : 0];
    uint32_t session = 0;
    attn_status st = check_unread(e, req, a);
    if (st != ATTN_OK) {
        engine_renew(e, request_session(req)); /* a refused request renews its session, too */
        return st;
    }
    if (k->run == NULL)
        return answer_no(a, ATTN_ENOTSUP, "this daemon has no request %" PRIu32, body);
    if (!k->has_no_session)
        st = session_of_request(e, req, &session, a);
    if (st == ATTN_OK && k->is_operators)
        st = operator_check(e, req, a);
    return st != ATTN_OK ? st : k->run(e, req, session, a);
}

static void serve_and_end(struct engine *e, struct request *req, uint64_t now_ns)
{
    struct answer a;
    answer_init(&a);
    req->taken_ns = now_ns;
    attn_status st = serve(e, req, &a);
    if (!a.is_later && (st != ATTN_EOVERLOAD || !turns_park(e, req)))
        engine_end(e, req, st, &a);
}

/* --- turns ------------------------------------------------------------------------------------ */

/* What a task that waited goes on with, or the whole request. */
static void run_turn(struct engine *e, struct request *req, bool steps_wait)
{
    uint32_t of = req->turn_of;
    struct task *t = req->task;
    uint64_t began_ns = turn_begin(e);
    if (t != NULL && !t->ops->run(e, t))
        turns_add_first(e, req, t);
    else if (t == NULL && !peers_hold(e, req))
        serve_and_end(e, req, began_ns);
    turn_end(e, of, began_ns, steps_wait);
}

void engine_serve(struct engine *e, struct request *req, uint64_t now_ns)
{
    uint32_t body = req->wire.header->body_case;
    bool must_wait = turns_must_wait(e);
    if (body == ATTND__REQUEST__BODY_STEP ||
        (must_wait && kinds[body < N_KINDS ? body : 0].has_line)) {
        serve_and_end(e, req, now_ns);
    } else if (must_wait) {
        turns_add(e, req, NULL);
    } else {
        uint32_t of = turns_of(e, req);
        uint64_t began_ns = turn_begin(e);
        serve_and_end(e, req, now_ns);
        turn_end(e, of, began_ns, false);
    }
}

bool engine_serve_turns(struct engine *e)
{
    struct tenant *payer = NULL;
    struct request *req;
    if (e->turns.n == 0)
        return false;
    bool steps_wait = batch_waits(e, &payer);
    if ((req = turns_next_of_memory(e, e->turn_ns)) != NULL)
        run_turn(e, req, steps_wait);
    while ((req = turns_next(e, steps_wait, payer)) != NULL) {
        run_turn(e, req, steps_wait);
        seqs_wake(e); /* what waited for its sequence is in its tenant's line at once */
    }
    return e->turns.n > e->turns.n_memory;
}

void engine_end_turns(struct engine *e)
{
    struct request *req;
    while (e->turns.n > 0) {
        turns_renew(e);
        e->turns.memory_at_ns = 0;
        if ((req = turns_next_of_memory(e, UINT64_MAX)) != NULL)
            run_turn(e, req, false);
        while ((req = turns_next(e, false, NULL)) != NULL)
            run_turn(e, req, false);
    }
}
