/* lanes.c: lanes, without the transport that opens them (daemon/transport/gpu.c): a page of words
 * and two regions that worker and engine both see, as if they had been handed over. A worker plans
 * a token of some sequences, rings a bell for each layer, and compares what is in its region when
 * the word says so, or hears by the page why not. Bells lie now and then; a lane is over with the
 * process or the worker. */
#include <math.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/engine/core/state.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/step/lane.h"
#include "model.h"

enum { REGION_BYTES = 64 << 10, MAX_LANES = 64 };

struct shared_lane {
    struct lane lane;
    struct lane_page page;
    _Alignas(64) uint8_t in[REGION_BYTES], out[REGION_BYTES];
    bool is_known, is_left; /* to the engine; by its worker */
    bool is_over; /* its process is gone */
};

static struct shared_lane *lanes[MAX_LANES]; /* of the process */
static uint32_t n_lanes;
static struct engine_poller *poller;
static _Atomic bool has_news;

/* --- the engine's side ------------------------------------------------------------------------ */

static bool poll_lanes(struct engine_poller *p)
{
    bool has_work = false;
    (void)p;
    for (uint32_t i = 0; i < n_lanes; i++) {
        struct shared_lane *l = lanes[i];
        if (!l->is_known && !l->is_left) {
            engine_lane_add(sim_engine, &l->lane);
            l->is_known = true;
        }
        if (l->is_left && !l->lane.is_closed)
            lane_close(&l->lane);
        if (l->is_left && l->is_known && l->lane.n_busy == 0) {
            engine_lane_remove(&l->lane);
            l->is_known = false;
        }
        if (l->is_known && !l->is_left)
            has_work |= lane_poll(&l->lane);
    }
    return has_work;
}

static bool may_sleep(struct engine_poller *p)
{
    (void)p;
    return true; /* bells wake nobody */
}

static void awake(struct engine_poller *p)
{
    (void)p;
}

static uint64_t nap_ns(struct engine_poller *p)
{
    uint64_t most_ns = UINT64_MAX;
    (void)p;
    for (uint32_t i = 0; i < n_lanes; i++) {
        const struct lane *l = &lanes[i]->lane;
        bool is_recent = clock_now_ns() - l->taken_ns < 10 * SIM_MS;
        if (l->n_plans > 0 && most_ns > 0)
            most_ns = is_recent ? 0 : SIM_MS;
    }
    return most_ns;
}

void lanes_process_begin(struct engine *e)
{
    n_lanes = 0;
    if (!sim_plan.has_lanes)
        return;
    poller = sim_alloc(sizeof *poller);
    *poller = (struct engine_poller){
        .poll = poll_lanes, .may_sleep = may_sleep, .awake = awake, .nap_ns = nap_ns};
    engine_poller_add(e, poller);
}

void lanes_process_end(void)
{
    for (uint32_t i = 0; i < n_lanes; i++) {
        if (lanes[i]->lane.n_busy > 0)
            sim_fail("the engine has stopped and has %u bells of a lane", lanes[i]->lane.n_busy);
        lane_fini(&lanes[i]->lane);
    }
}

void lanes_forget_process(void)
{
    for (uint32_t i = 0; i < n_lanes; i++)
        lanes[i]->is_over = true;
    n_lanes = 0;
}

/* --- a worker's side -------------------------------------------------------------------------- */

static const struct transport_ops transport = {.label = STATS_GPU, .reply = lane_reply};

static void lane_make(struct peer *p)
{
    if (n_lanes == MAX_LANES || sim_engine == NULL)
        return;
    struct shared_lane *l = p->lane = sim_alloc(sizeof *l);
    l->lane.id = sim_random();
    l->lane.engine = sim_engine;
    l->lane.transport = &transport;
    l->lane.out_news = &has_news;
    l->lane.page = &l->page;
    l->lane.in = (struct backend_region){.p = l->in, .bytes = REGION_BYTES};
    l->lane.out = (struct backend_region){.p = l->out, .bytes = REGION_BYTES};
    lane_init(&l->lane);
    lanes[n_lanes++] = l;
    engine_wake(sim_engine);
}

void lane_leave(struct peer *p)
{
    if (p->lane != NULL)
        p->lane->is_left = true;
    p->lane = NULL;
}

/* The plan is over; is_sure: nothing was done for it that is not known. */
void plan_end(struct ask *a, bool is_sure)
{
    struct peer *p = a->peer;
    if (p->plan == a)
        p->plan = NULL;
    for (uint32_t i = 0; i < a->n_items; i++) {
        struct seq *s = a->of[i];
        if (s->control != a)
            continue;
        s->control = NULL;
        if (is_sure)
            continue;
        s->is_unsure = true;
        s->sure_len = a->pos[i];
    }
}

static bool may_be_planned(const struct seq *s)
{
    bool is_even = s != NULL && s->is_open && !s->is_gone && !s->is_unsure && seq_is_quiet(s);
    for (uint32_t l = 1; is_even && l < N_LAYERS; l++)
        is_even &= s->len[l] == s->len[0];
    return is_even && s->len[0] + 4 <= MAX_LEN;
}

struct ask *ask_plan(struct peer *p)
{
    static const uint32_t layers[N_LAYERS] = {0, 1};
    Attnd__Step step = ATTND__STEP__INIT;
    Attnd__Plan b = ATTND__PLAN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint64_t names[MAX_ITEMS];
    uint32_t epochs[MAX_ITEMS], n = 0;
    struct seq *of[MAX_ITEMS];
    for (uint32_t i = 0; i < MAX_SEQS && n < MAX_ITEMS; i++)
        if (may_be_planned(p->seqs[i]))
            of[n++] = p->seqs[i];
    if (p->lane == NULL || p->plan != NULL || n == 0)
        return NULL;
    struct ask *a = ask_new(p, ASK_PLAN);
    if (a == NULL)
        return NULL;
    a->flags = sim_chance(500) ? 3 : 7;
    for (uint32_t i = 0; i < n; i++) {
        a->of[i] = of[i];
        a->pos[i] = of[i]->len[0];
        a->n_tokens[i] = 1 + sim_below(4);
        names[i] = of[i]->name;
        epochs[i] = of[i]->epoch;
        of[i]->control = a;
    }
    step.pool = p->pool;
    step.flags = a->flags;
    step.dtype = ATTND__DTYPE__F32;
    step.n_seq = step.n_epoch = step.n_pos = step.n_n_tokens = n;
    step.seq = names;
    step.epoch = epochs;
    step.pos = a->pos;
    step.n_tokens = a->n_tokens;
    p->first_bell = b.first_bell = atomic_load(&p->lane->page.bell) + 1;
    b.lane = p->lane->lane.id;
    b.n_layers = N_LAYERS;
    b.layers = (uint32_t *)(uintptr_t)layers;
    b.step = &step;
    b.out_offset = LANE_OUT_OFFSET;
    h.body_case = ATTND__REQUEST__BODY_PLAN;
    h.plan = &b;
    ask_send(a, &h, NULL, 0);
    a->n_items = n;
    p->plan = a;
    p->is_rung = false;
    a->layer = 0;
    return a;
}

static void ring(struct peer *p, struct ask *a)
{
    struct wire_step_layout l;
    bool is_lie = sim_has_faults && sim_chance(10);
    const uint8_t *payload = step_payload(a, &l);
    memcpy(p->lane->in, payload, l.request_bytes);
    for (uint32_t i = LANE_OUT_OFFSET; i < REGION_BYTES; i += 4)
        memset(p->lane->out + i, 0xff, 4);
    atomic_store(&p->lane->page.bell, p->first_bell + a->layer + (is_lie ? 3 : 0));
    p->is_rung = true;
    sim_say("peer %u rings %u%s", p->number, p->first_bell + a->layer, is_lie ? ", a lie" : "");
}

static void check_region(const struct peer *p, const struct ask *a)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < a->n_items; i++)
        n += a->n_tokens[i];
    const float *out = (const float *)(const void *)(p->lane->out + LANE_OUT_OFFSET);
    size_t lse_at = ((size_t)n * Q_FLOATS * 4 + 63) / 64 * 64 / 4;
    for (size_t i = 0; i < (size_t)n * Q_FLOATS; i++)
        if (!is_as_expected(out[i], a->out[i]))
            sim_fail("peer %u: a row that a lane brought is wrong", p->number);
    for (size_t i = 0; (a->flags & WIRE_STEP_LSE) && i < (size_t)n * Q_HEADS; i++)
        if (!is_as_expected(out[lse_at + i], a->lse[i]))
            sim_fail("peer %u: an lse that a lane brought is wrong", p->number);
    sim_counts.rows += n;
}

static void hear(struct peer *p, struct ask *a)
{
    uint32_t done, bell = atomic_load(&p->lane->page.bell);
    uint64_t verdict = atomic_load(&p->lane->page.verdict);
    memcpy(&done, p->lane->out, sizeof done);
    bool is_notified = (uint32_t)verdict == bell, is_done = done == bell;
    attn_status st = is_notified && !is_done ? (attn_status)(int32_t)(verdict >> 32) : ATTN_OK;
    if (!is_notified && !is_done)
        return;
    if (bell != p->first_bell + a->layer) {
        if (st != ATTN_EPROTO)
            sim_fail("peer %u: a bell that lied was answered with %s", p->number,
                     attn_status_name(st));
        plan_end(a, false); /* of the layers before it all is known, but what a late one does */
        return;
    }
    sim_say("peer %u: bell %u: %s", p->number, bell, attn_status_name(st));
    if (st != ATTN_OK) {
        plan_end(a, false);
        return;
    }
    check_region(p, a);
    take_step(a);
    sim_counts.bells++;
    p->is_rung = false;
    if (++a->layer == N_LAYERS)
        plan_end(a, true);
}

void lane_tick(struct peer *p)
{
    struct ask *a = p->plan;
    if (!sim_plan.has_lanes)
        return;
    if (p->lane != NULL && p->lane->is_over) {
        if (a != NULL && p->is_rung)
            hear(p, a); /* it may have been answered before */
        a = p->plan;
        p->lane = NULL; /* its socket has closed */
        if (a != NULL && (a->is_answered || a->n_sent > 0)) {
            a->is_void = a->is_answered = true;
            plan_end(a, false);
        }
    } else if (p->lane == NULL) {
        lane_make(p);
    } else if (a != NULL && a->is_answered && !p->is_rung) {
        ring(p, a);
    } else if (a != NULL && p->is_rung) {
        hear(p, a);
    }
}
