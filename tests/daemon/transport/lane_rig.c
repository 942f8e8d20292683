/* lane_rig.c: two lanes of memory under an engine that the tests turn. */
#include "tests/daemon/transport/lane_rig.h"

#include <stdlib.h>
#include <string.h>

struct rig lane_rig;
struct side *sides[2];
static struct engine_poller poller;
_Atomic bool lane_rig_has_news;
static bool is_kept; /* a successor would take up the cache */
static attn_status fail_register;

static bool poll_lanes(struct engine_poller *p)
{
    (void)p;
    bool has_work = false;
    for (int i = 0; i < 2; i++)
        has_work |= lane_poll(&sides[i]->lane);
    return has_work;
}

static bool may_sleep(struct engine_poller *p)
{
    (void)p;
    return true;
}

static void awake(struct engine_poller *p)
{
    (void)p;
}

static const struct transport_ops transport = {.label = STATS_GPU, .reply = lane_reply};

static void side_open(struct side **out_s, uint64_t id)
{
    struct side *s = *out_s = aligned_alloc(64, sizeof *s);
    memset(s, 0, sizeof *s);
    memset(s->out + LANE_OUT_OFFSET, 0xff, LANE_RIG_BYTES - LANE_OUT_OFFSET);
    s->lane.id = id;
    s->lane.engine = lane_rig.engine;
    s->lane.transport = &transport;
    s->lane.out_news = &lane_rig_has_news;
    s->lane.page = &s->page;
    s->lane.in = (struct backend_region){.p = s->in, .bytes = LANE_RIG_BYTES};
    s->lane.out = (struct backend_region){.p = s->out, .bytes = LANE_RIG_BYTES};
    lane_init(&s->lane);
    engine_lane_add(lane_rig.engine, &s->lane);
}

static void tweak(struct rig *rig)
{
    rig->cfg.max_batch_items = 4;
    rig->cfg.max_step_tokens = rig->cfg.max_batch_tokens = 1024;
    rig->fixture.is_kept = is_kept;
    rig->backend.features = BACKEND_HAS_WORDS | BACKEND_HAS_DEVICE_ADDRESSES | BACKEND_HAS_REGIONS;
    rig->backend.fail_register = fail_register;
}

static void open_rig(void)
{
    rig_open(&lane_rig, tweak);
    side_open(&sides[0], 11);
    side_open(&sides[1], 12);
    poller = (struct engine_poller){.poll = poll_lanes, .may_sleep = may_sleep, .awake = awake};
    engine_poller_add(lane_rig.engine, &poller);
    rig_open_many(&lane_rig, 1, LANE_RIG_SEQS);
}

static void close_rig(void)
{
    for (int i = 0; i < 2; i++) {
        assert_int_equal(sides[i]->lane.n_busy, 0);
        lane_fini(&sides[i]->lane);
    }
    rig_close(&lane_rig);
    for (int i = 0; i < 2; i++)
        free(sides[i]);
}

/* --- a worker --------------------------------------------------------------------------------- */

struct planned plan_of(uint32_t first_bell, uint32_t n_items, uint32_t pos)
{
    return (struct planned){.lane = 11,
                            .first_bell = first_bell,
                            .n_layers = RIG_LAYERS,
                            .layers = {0, 1, 2, 3},
                            .n_items = n_items,
                            .first_seq = 1,
                            .pos = pos,
                            .n_tokens = 1,
                            .out_offset = LANE_OUT_OFFSET,
                            .flags = WIRE_STEP_APPEND | WIRE_STEP_ATTEND};
}

uint64_t plan_send(const struct planned *p)
{
    uint64_t seq[64];
    uint32_t epoch[64], pos[64], n_tokens[64];
    Attnd__Step step = ATTND__STEP__INIT;
    Attnd__Plan plan = ATTND__PLAN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    for (uint32_t i = 0; i < p->n_items; i++) {
        seq[i] = p->first_seq + (p->is_twice ? 0 : i);
        epoch[i] = p->epoch ? p->epoch : rig_epoch(&lane_rig, seq[i]);
        pos[i] = p->pos;
        n_tokens[i] = p->n_tokens;
    }
    step.pool = p->pool ? p->pool : lane_rig.pool;
    step.layer = p->step_layer;
    step.flags = p->flags;
    step.dtype = ATTND__DTYPE__F32;
    step.n_seq = step.n_epoch = step.n_pos = step.n_n_tokens = p->n_items;
    step.seq = seq;
    step.epoch = epoch;
    step.pos = pos;
    step.n_tokens = n_tokens;
    plan.lane = p->lane;
    plan.first_bell = p->first_bell;
    plan.n_layers = p->n_layers;
    plan.layers = (uint32_t *)(uintptr_t)p->layers;
    plan.step = &step;
    plan.in_offset = p->in_offset;
    plan.out_offset = p->out_offset;
    h.session = lane_rig.session;
    h.timeout_us = p->timeout_us;
    h.body_case = ATTND__REQUEST__BODY_PLAN;
    h.plan = &plan;
    return rig_send(&lane_rig, &h, NULL, 0);
}

attn_status plan_make(const struct planned *p)
{
    uint64_t id = plan_send(p);
    rig_run(&lane_rig);
    return (attn_status)rig_answer(&lane_rig, id)->status;
}

void plan_refused(const struct planned *p, attn_status st, const char *part)
{
    uint64_t id = plan_send(p);
    rig_run(&lane_rig);
    rig_assert_says(rig_answer(&lane_rig, id), st, part);
}

void side_ring(int side, uint32_t bell)
{
    atomic_store(&sides[side]->page.bell, bell);
}

uint32_t side_done(int side)
{
    uint32_t word;
    memcpy(&word, sides[side]->out, sizeof word);
    return word;
}

int32_t side_verdict(int side, uint32_t bell)
{
    uint64_t v = atomic_load(&sides[side]->page.verdict);
    assert_int_equal((uint32_t)v, bell);
    return (int32_t)(v >> 32);
}

float side_output(int side, uint64_t offset)
{
    float x;
    memcpy(&x, sides[side]->out + offset, sizeof x);
    return x;
}

void side_pass(int side, uint32_t bell)
{
    side_ring(side, bell);
    rig_run(&lane_rig);
    assert_int_equal(side_done(side), bell);
}

void lane_run(void **state)
{
    void (*const *test)(void **) = *state;
    open_rig();
    (*test)(NULL);
    close_rig();
}

void lane_run_kept(void **state)
{
    is_kept = true;
    lane_run(state);
    is_kept = false;
}

void lane_run_kept_unsignalled(void **state)
{
    fail_register = ATTN_ENOMEM;
    lane_run_kept(state);
    fail_register = ATTN_OK;
}
