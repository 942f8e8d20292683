/* lane.c: keeps a lane's plans and turns its bells into steps.
 *
 * A plan reserves nothing: appends reserved for all its layers would keep truncations and copies of
 * shared blocks waiting for a worker that may never ring. Launching layers before their bell,
 * behind a kernel that waits for it, was tried: on an H100 under MPS only 4 to 44 % of these
 * launches held, the others were cancelled, and a layer took 8 to 22 us longer.
 */
#include "daemon/engine/step/lane.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/engine.h"

/* --- devices ---------------------------------------------------------------------------------- */

static bool is_one_gpu(const struct lane_device *a, const struct lane_device *b)
{
    return memcmp(a->uuid, b->uuid, sizeof a->uuid) == 0;
}

static bool is_host_memory(const struct lane_device *d)
{
    static const struct lane_device none;
    return is_one_gpu(d, &none);
}

const char *lane_device_format(const struct lane_device *d, char out[LANE_DEVICE_TEXT_BYTES])
{
    if (is_host_memory(d))
        return "host memory";
    int n = snprintf(out, LANE_DEVICE_TEXT_BYTES, "GPU ");
    for (size_t i = 0; i < sizeof d->uuid; i++)
        n += snprintf(out + n, LANE_DEVICE_TEXT_BYTES - (size_t)n, "%02x", d->uuid[i]);
    return out;
}

attn_status lane_device_check(const struct lane_device *theirs, const struct lane_device *ours,
                              char *why, size_t why_bytes)
{
    char a[LANE_DEVICE_TEXT_BYTES], b[LANE_DEVICE_TEXT_BYTES];
    if (is_host_memory(theirs) != is_host_memory(ours)) {
        snprintf(why, why_bytes, "the worker's region is on %s, the daemon's on %s",
                 lane_device_format(theirs, a), lane_device_format(ours, b));
        return ATTN_ENOTSUP;
    }
    if (is_host_memory(ours))
        return ATTN_OK;
    if (is_one_gpu(theirs, ours) && (!theirs->is_shared || !ours->is_shared)) {
        snprintf(why, why_bytes,
                 "%s is shared in time slices: %s not under MPS; start both under it",
                 lane_device_format(ours, a),
                 theirs->is_shared ? "the daemon is"
                 : ours->is_shared ? "the worker is"
                                   : "worker and daemon are");
        return ATTN_ENOTSUP;
    }
    if (theirs->driver_version != ours->driver_version) {
        snprintf(why, why_bytes, "the worker's driver is %" PRIu32 ", the daemon's %" PRIu32,
                 theirs->driver_version, ours->driver_version);
        return ATTN_ENOTSUP;
    }
    return ATTN_OK;
}

/* --- plans ------------------------------------------------------------------------------------ */

static void plan_unref(struct lane_plan *p)
{
    if (--p->n_refs == 0)
        free(p);
}

static uint32_t plan_end(const struct lane_plan *p)
{
    return p->first_bell + p->n_layers;
}

/* Number of bells from a to b; they wrap around. */
static uint32_t distance(uint32_t a, uint32_t b)
{
    return b - a;
}

static void drop_all(struct lane *l)
{
    while (l->n_plans > 0)
        plan_unref(l->plans[--l->n_plans]);
}

/* Drops the first plan once its last bell was taken. */
static void drop_finished(struct lane *l)
{
    if (l->n_plans == 0 || plan_end(l->plans[0]) != l->taken + 1)
        return;
    plan_unref(l->plans[0]);
    l->n_plans--;
    memmove(l->plans, l->plans + 1, l->n_plans * sizeof l->plans[0]);
}

/* How many plans have bells before this one, which was not taken yet. */
static uint32_t n_plans_before(const struct lane *l, uint32_t bell)
{
    uint32_t n = 0;
    while (n < l->n_plans && distance(l->plans[0]->first_bell, l->plans[n]->first_bell) <
                                 distance(l->plans[0]->first_bell, bell))
        n++;
    return n;
}

/* Drops all that is planned from this bell on. */
static void abandon(struct lane *l, uint32_t bell)
{
    uint32_t n = n_plans_before(l, bell);
    while (l->n_plans > n)
        plan_unref(l->plans[--l->n_plans]);
    if (n > 0)
        l->plans[n - 1]->n_layers = distance(l->plans[n - 1]->first_bell, bell);
    drop_finished(l);
}

static struct lane_plan *plan_new(const struct request *req, uint64_t in_bytes)
{
    const Attnd__Plan *h = req->wire.header->plan;
    const Attnd__Step *s = h->step;
    size_t n = s->n_seq;
    struct lane_plan *p =
        malloc(sizeof *p + n * (sizeof(uint64_t) + 3 * sizeof(uint32_t)) + h->n_layers * 4);
    if (p == NULL)
        return NULL;
    uint64_t *seq = (uint64_t *)(p + 1);
    uint32_t *epoch = (uint32_t *)(seq + n), *pos = epoch + n, *n_tokens = pos + n;
    uint32_t *layers = n_tokens + n;
    memcpy(seq, s->seq, n * sizeof *seq);
    memcpy(epoch, s->epoch, n * sizeof *epoch);
    memcpy(pos, s->pos, n * sizeof *pos);
    memcpy(n_tokens, s->n_tokens, n * sizeof *n_tokens);
    memcpy(layers, h->layers, h->n_layers * sizeof *layers);
    *p = (struct lane_plan){
        .n_refs = 1,
        .first_bell = h->first_bell,
        .n_layers = (uint32_t)h->n_layers,
        .layers = layers,
        .session = req->wire.header->session,
        .timeout_us = (req->deadline_ns - req->received_ns) / 1000,
        .in_offset = h->in_offset,
        .out_offset = h->out_offset,
        .in_bytes = in_bytes,
        .step = *s,
    };
    p->step.seq = seq;
    p->step.epoch = epoch;
    p->step.pos = pos;
    p->step.n_tokens = n_tokens;
    return p;
}

static bool is_same(const struct lane_plan *p, const Attnd__Request *header)
{
    const Attnd__Plan *h = header->plan;
    const Attnd__Step *a = &p->step, *b = h->step;
    size_t n = a->n_seq;
    return p->session == header->session && p->first_bell == h->first_bell &&
           p->n_layers == h->n_layers && p->in_offset == h->in_offset &&
           p->out_offset == h->out_offset && a->pool == b->pool && a->flags == b->flags &&
           a->dtype == b->dtype && n == b->n_seq &&
           memcmp(a->seq, b->seq, n * sizeof *a->seq) == 0 &&
           memcmp(a->epoch, b->epoch, n * sizeof *a->epoch) == 0 &&
           memcmp(a->pos, b->pos, n * sizeof *a->pos) == 0 &&
           memcmp(a->n_tokens, b->n_tokens, n * sizeof *a->n_tokens) == 0 &&
           memcmp(p->layers, h->layers, h->n_layers * sizeof *h->layers) == 0;
}

/* Whether the request is a copy of an old plan: one that is over or was replaced. An abandonment
 * may be repeated. */
static bool is_late(const struct lane *l, const struct request *req)
{
    uint64_t id = req->wire.request_id;
    bool is_abandonment = req->wire.header->plan->n_layers == 0;
    return req->wire.header->session == l->plan_session &&
           (id < l->plan_request || (id == l->plan_request && !is_abandonment));
}

/* Which bells a new plan may begin with: [*out_first, *out_last], wrapping around. */
static void expected(const struct lane *l, uint32_t *out_first, uint32_t *out_last)
{
    *out_first = l->taken + 1;
    *out_last = l->n_plans > 0 ? plan_end(l->plans[l->n_plans - 1]) : *out_first;
}

attn_status lane_plan(struct lane *l, const struct request *req, uint64_t in_bytes, char *why,
                      size_t why_bytes)
{
    const Attnd__Plan *h = req->wire.header->plan;
    uint32_t first, last;
    lane_poll(l); /* a bell rung before the plan was sent comes first */
    for (uint32_t i = 0; i < l->n_plans; i++)
        if (h->n_layers > 0 && is_same(l->plans[i], req->wire.header))
            return ATTN_OK;
    if (is_late(l, req)) {
        snprintf(why, why_bytes, "plan: request %" PRIu64 " is over, a later plan has been taken",
                 req->wire.request_id);
        return ATTN_EINVAL;
    }
    expected(l, &first, &last);
    if (distance(first, h->first_bell) > distance(first, last)) {
        snprintf(why, why_bytes,
                 "plan.first_bell is %" PRIu32 ", a plan may begin with %" PRIu32 " to %" PRIu32,
                 h->first_bell, first, last);
        return ATTN_EINVAL;
    }
    struct lane_plan *p = NULL;
    if (h->n_layers > 0 && n_plans_before(l, h->first_bell) == LANE_MAX_PLANS) {
        snprintf(why, why_bytes, "the lane has %d plans that are not finished", LANE_MAX_PLANS);
        return ATTN_EOVERLOAD;
    }
    if (h->n_layers > 0 && (p = plan_new(req, in_bytes)) == NULL) {
        snprintf(why, why_bytes, "no memory for a plan of %zu items", h->step->n_seq);
        return ATTN_ENOMEM;
    }
    abandon(l, h->first_bell);
    if (p != NULL) {
        l->plans[l->n_plans++] = p;
        l->status = ATTN_OK;
    }
    l->plan_session = req->wire.header->session;
    l->plan_request = req->wire.request_id;
    l->taken_ns = clock_now_ns();
    return ATTN_OK;
}

/* --- bells ------------------------------------------------------------------------------------ */

/* Answers a bell from the host. The reason of the first failure stays until the next plan. */
static void tell(struct lane *l, uint32_t bell, attn_status st, const char *why)
{
    if (st != ATTN_OK && l->status == ATTN_OK) {
        snprintf(l->page->why, sizeof l->page->why, "%s", why);
        l->status = st;
    }
    atomic_store_explicit(&l->page->verdict, lane_verdict(bell, st), memory_order_release);
}

static void refuse(struct lane *l, uint32_t bell, attn_status st, const char *why)
{
    stats_add(bells_refused, 1);
    l->taken = bell;
    drop_all(l);
    tell(l, bell, st, why);
}

static void fail_as_lost(struct lane *l, uint32_t bell)
{
    l->taken = bell;
    drop_all(l);
    tell(l, bell, ATTN_EDEVICE, "the device that the lane's region is on is lost");
}

static struct lane_bell *bell_find_free(struct lane *l)
{
    for (int i = 0; i < LANE_BELLS; i++)
        if (l->bells[i].plan == NULL)
            return &l->bells[i];
    return NULL;
}

/* Makes a request of the next layer of the first plan. */
static void ring(struct lane *l, struct lane_bell *b, uint32_t value)
{
    struct lane_plan *p = l->plans[0];
    p->n_refs++;
    l->n_busy++;
    l->taken = value;
    b->plan = p;
    b->value = value;
    b->step = p->step;
    b->step.layer = p->layers[distance(p->first_bell, value)];
    attnd__request__init(&b->header);
    b->header.session = p->session;
    b->header.body_case = ATTND__REQUEST__BODY_STEP;
    b->header.step = &b->step;
    b->io = (struct request_bell){
        .out = l->out.p + p->out_offset,
        .done = {.word = (uint32_t *)(void *)l->out.p, .value = value},
    };
    request_init(&b->req, l->transport, l);
    b->req.principal = l->principal;
    b->req.msg = &b->msg;
    b->req.room = &b->room;
    l->taken_ns = clock_now_ns();
    request_take_bell(&b->req, &b->io, &b->header, l->in.p + p->in_offset, p->in_bytes, l->taken_ns,
                      p->timeout_us);
    drop_finished(l);
    engine_submit(l->engine, &b->req); /* may answer at once */
}

bool lane_poll(struct lane *l)
{
    uint32_t rung = atomic_load_explicit(&l->page->bell, memory_order_acquire);
    char why[128];
    if (rung == l->taken || l->is_closed)
        return false;
    if (rung != l->taken + 1) {
        snprintf(why, sizeof why, "bell is %" PRIu32 ", %" PRIu32 " is next", rung, l->taken + 1);
        refuse(l, rung, ATTN_EPROTO, why);
    } else if (l->n_plans == 0) {
        snprintf(why, sizeof why, "bell %" PRIu32 " is of no plan", rung);
        refuse(l, rung, l->status == ATTN_OK ? ATTN_EPROTO : l->status, why);
    } else if (engine_health(l->engine) != ATTN_OK) {
        fail_as_lost(l, rung);
    } else {
        struct lane_bell *b = bell_find_free(l);
        if (b == NULL)
            return false; /* the device has answered all; its poll will return them soon */
        ring(l, b, rung);
    }
    return true;
}

void lane_reply(struct request *req)
{
    struct lane_bell *b = (struct lane_bell *)(void *)req; /* its first member */
    struct lane *l = b->lane;
    bool is_signalled = req->status == ATTN_OK && b->io.is_signalled;
    if (req->status != ATTN_OK)
        drop_all(l); /* later layers would compute on missing results */
    if (!is_signalled && !l->is_closed)
        tell(l, b->value, req->status, req->why);
    wire_arena_reset(&req->arena);
    plan_unref(b->plan);
    b->plan = NULL;
    l->n_busy--;
    lane_release(l);
}

void lane_release(struct lane *l)
{
    if (l->n_busy == 0 && l->is_closed)
        atomic_store(l->out_news, true);
}

/* --- life ------------------------------------------------------------------------------------- */

void lane_init(struct lane *l)
{
    STAILQ_INIT(&l->waiting);
    for (int i = 0; i < LANE_BELLS; i++) {
        struct lane_bell *b = &l->bells[i];
        b->lane = l;
        b->room = (struct iobuf){.data = b->room_bytes, .capacity_bytes = sizeof b->room_bytes};
    }
}

void lane_close(struct lane *l)
{
    l->is_closed = true;
    drop_all(l);
}

void lane_fini(struct lane *l)
{
    lane_close(l);
}
