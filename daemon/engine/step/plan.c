/* plan.c: receives plans and has them checked before their first bell, so that a mistake is
 * answered with its reason.
 *
 * The primary has all lanes. A plan with sequences on other cards goes to each of these in turn,
 * which checks its own. Later plans of the lane wait meanwhile, so plans keep their order.
 */
#include "daemon/engine/step/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/base/stats.h"
#include "daemon/engine/core/answer.h"
#include "daemon/engine/core/message.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/core/sleep.h"
#include "daemon/engine/core/status.h"
#include "daemon/engine/step/lane_device.h"
#include "daemon/engine/step/plan_check.h"

void engine_lane_add(struct engine *e, struct lane *l)
{
    LIST_INSERT_HEAD(&e->lanes, l, entry);
}

void engine_lane_remove(struct lane *l)
{
    l->is_stuck = lane_is_stuck(l->engine);
    LIST_REMOVE(l, entry);
}

static struct lane *lane_find(struct engine *e, uint64_t id)
{
    struct lane *l;
    LIST_FOREACH(l, &e->lanes, entry)
        if (l->id == id && !l->is_closed)
            return l;
    return NULL;
}

/* A plan that other cards check, one after the other. */
struct plan_tour {
    struct engine_message message; /* first */
    struct engine *primary;
    struct lane *lane; /* stays until the tour is over */
    struct request *req; /* the primary's; not changed here */
    uint32_t cards; /* still to be asked, one bit each */
    bool is_behind;
    uint64_t in_bytes;
    attn_status status;
    char why[2 * WHY_BYTES];
};

static void tour_ends(struct engine *e, struct engine_message *message);

static void tour_checks(struct engine *e, struct engine_message *message);

static void tour_goes_on(struct plan_tour *t)
{
    struct engine *to = t->primary;
    t->message.on_message = tour_ends;
    if (t->status == ATTN_OK && t->cards != 0) {
        uint32_t card = (uint32_t)__builtin_ctz(t->cards);
        t->cards &= t->cards - 1;
        t->message.on_message = tour_checks;
        to = peers_at(t->primary, card);
    }
    engine_message_push(to, &t->message);
}

/* Checks the plan on a card that has some of its sequences, on that card's thread. Messages are
 * handled before earlier requests; if there are any, they may still move positions. */
static void tour_checks(struct engine *e, struct engine_message *message)
{
    struct plan_tour *t = (struct plan_tour *)message;
    bool is_behind = t->is_behind || atomic_load(&e->queue.n_requests) > 0;
    const Attnd__Request *h = t->req->wire.header;
    uint32_t session;
    if (engine_health(e) == ATTN_OK &&
        session_find(e->env.sessions, h->session, &session) == ATTN_OK) {
        const struct pool *p = pool_of_handle(e, session_tenant(e, session), h->plan->step->pool);
        if (p != NULL) /* else its steps will fail */
            t->status = plan_check_items(e, h->plan, session, p, is_behind, t->why, sizeof t->why);
    }
    tour_goes_on(t);
}

static attn_status lane_takes(struct lane *l, struct request *req, uint64_t in_bytes,
                              struct answer *a)
{
    attn_status st = lane_plan(l, req, in_bytes, a->why, sizeof a->why);
    if (st == ATTN_OK)
        stats_add(plans, 1);
    return st;
}

/* Sends a plan that the primary has checked to the other cards, if it concerns any. true: it will
 * be answered later. */
static bool tour_begins(struct engine *e, struct lane *l, struct request *req, uint64_t in_bytes,
                        attn_status *out_st, struct answer *a)
{
    uint32_t cards = peers_of_plan(e, req);
    if (cards == 0)
        return false;
    struct plan_tour *t = calloc(1, sizeof *t);
    if (t == NULL) {
        *out_st = answer_no(a, ATTN_ENOMEM, "no memory to ask other cards about a plan");
        return false;
    }
    *t = (struct plan_tour){.primary = e,
                            .lane = l,
                            .req = req,
                            .cards = cards,
                            .is_behind = plan_is_behind(l),
                            .in_bytes = in_bytes};
    l->is_asking = true;
    l->n_busy++;
    tour_goes_on(t);
    return true;
}

static attn_status run_of_lane(struct engine *e, struct lane *l, struct request *req,
                               uint32_t session, struct answer *a)
{
    const Attnd__Plan *h = req->wire.header->plan;
    struct wire_step_layout layout = {0};
    attn_status st = ATTN_OK;
    if (engine_health(l->engine) != ATTN_OK)
        return answer_no(a, ATTN_EDEVICE, "plan.lane is 0x%016" PRIx64 ", whose device is lost",
                         h->lane);
    if (h->step == NULL && h->n_layers > 0)
        return answer_no(a, ATTN_EINVAL, "plan.step is missing");
    if (h->n_layers > 0)
        st = plan_check(e, h, session, l, &layout, a->why, sizeof a->why);
    if (st == ATTN_OK && h->n_layers > 0)
        a->is_later = tour_begins(e, l, req, layout.request_bytes, &st, a);
    if (st == ATTN_OK && !a->is_later)
        st = lane_takes(l, req, layout.request_bytes, a);
    return st;
}

/* Runs the plans that came while another was being checked. */
static void run_waiting(struct engine *e, struct lane *l)
{
    struct request *req;
    while (!l->is_asking && (req = STAILQ_FIRST(&l->waiting)) != NULL) {
        struct answer a;
        uint32_t session;
        attn_status st = engine_stop_status(e);
        STAILQ_REMOVE_HEAD(&l->waiting, queued);
        answer_init(&a);
        if (atomic_load(&e->is_stopping))
            st = answer_no(&a, engine_stop_status(e), "the daemon is stopping");
        else if (l->is_closed)
            st = answer_no(&a, ATTN_ENOTFOUND, "the lane was closed");
        else if (session_find(e->env.sessions, req->wire.header->session, &session) != ATTN_OK)
            st = answer_no(&a, ATTN_ENOTFOUND, "the session has ended");
        else
            st = run_of_lane(e, l, req, session, &a);
        if (!a.is_later)
            engine_end(e, req, st, &a);
    }
}

static void tour_ends(struct engine *e, struct engine_message *message)
{
    struct plan_tour *t = (struct plan_tour *)message;
    struct lane *l = t->lane;
    struct answer a;
    attn_status st = t->status;
    answer_init(&a);
    l->is_asking = false;
    l->n_busy--;
    if (st != ATTN_OK)
        answer_no(&a, st, "%s", t->why);
    else if (atomic_load(&e->is_stopping))
        st = answer_no(&a, engine_stop_status(e), "the daemon is stopping");
    else if (l->is_closed)
        st = answer_no(&a, ATTN_ENOTFOUND, "the lane was closed");
    else
        st = lane_takes(l, t->req, t->in_bytes, &a);
    engine_end(e, t->req, st, &a);
    free(t);
    run_waiting(e, l);
    lane_release(l);
}

attn_status plan_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    const Attnd__Plan *h = req->wire.header->plan;
    struct lane *l = lane_find(e, h->lane);
    if (l == NULL) {
        engine_poll_pollers(e); /* a lane may have been added since the last poll */
        l = lane_find(e, h->lane);
    }
    if (l == NULL)
        return answer_no(a, ATTN_ENOTFOUND, "plan.lane is 0x%016" PRIx64 ", no such lane", h->lane);
    if (!l->is_asking)
        return run_of_lane(e, l, req, session, a);
    STAILQ_INSERT_TAIL(&l->waiting, req, queued);
    a->is_later = true;
    return ATTN_OK;
}
