/* test_lane.c: one lane, or several, under an engine without a thread: what a bell becomes, how it
 * is answered, what a plan may be, and that bells which lie change nothing. */
#define _GNU_SOURCE /* memfd_create */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/engine/step/lane.h"
#include "tests/daemon/engine/engine_rig.h"
#include "tests/random.h"

enum { IN_BYTES = 1 << 18, OUT_BYTES = 1 << 18, SEQS = 6 };

struct side {
    struct lane lane;
    struct lane_page page;
    _Alignas(64) uint8_t in[IN_BYTES], out[OUT_BYTES];
};

static struct rig r;
static struct side *sides[2];
static struct engine_poller poller;
static _Atomic bool has_news;
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
    memset(s->out + LANE_OUT_OFFSET, 0xff, OUT_BYTES - LANE_OUT_OFFSET);
    s->lane.id = id;
    s->lane.engine = r.engine;
    s->lane.transport = &transport;
    s->lane.out_news = &has_news;
    s->lane.page = &s->page;
    s->lane.in = (struct backend_region){.p = s->in, .bytes = IN_BYTES};
    s->lane.out = (struct backend_region){.p = s->out, .bytes = OUT_BYTES};
    lane_init(&s->lane);
    engine_lane_add(r.engine, &s->lane);
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
    rig_open(&r, tweak);
    side_open(&sides[0], 11);
    side_open(&sides[1], 12);
    poller = (struct engine_poller){.poll = poll_lanes, .may_sleep = may_sleep, .awake = awake};
    engine_poller_add(r.engine, &poller);
    rig_open_many(&r, 1, SEQS);
}

static void close_rig(void)
{
    for (int i = 0; i < 2; i++) {
        assert_int_equal(sides[i]->lane.n_busy, 0);
        lane_fini(&sides[i]->lane);
    }
    rig_close(&r);
    for (int i = 0; i < 2; i++)
        free(sides[i]);
}

/* --- a worker --------------------------------------------------------------------------------- */

struct planned {
    uint64_t lane;
    uint32_t first_bell, n_layers, n_items, pos, n_tokens;
    uint32_t layers[RIG_LAYERS];
    uint64_t first_seq, in_offset, out_offset, timeout_us;
    uint32_t flags, pool, epoch, step_layer;
    bool is_twice; /* all items name the first sequence */
};

/* One token each of n_items sequences from the first, in all layers. */
static struct planned plan_of(uint32_t first_bell, uint32_t n_items, uint32_t pos)
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

static uint64_t send_plan(const struct planned *p)
{
    uint64_t seq[64];
    uint32_t epoch[64], pos[64], n_tokens[64];
    Attnd__Step step = ATTND__STEP__INIT;
    Attnd__Plan plan = ATTND__PLAN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    for (uint32_t i = 0; i < p->n_items; i++) {
        seq[i] = p->first_seq + (p->is_twice ? 0 : i);
        epoch[i] = p->epoch ? p->epoch : rig_epoch(&r, seq[i]);
        pos[i] = p->pos;
        n_tokens[i] = p->n_tokens;
    }
    step.pool = p->pool ? p->pool : r.pool;
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
    h.session = r.session;
    h.timeout_us = p->timeout_us;
    h.body_case = ATTND__REQUEST__BODY_PLAN;
    h.plan = &plan;
    return rig_send(&r, &h, NULL, 0);
}

static attn_status plan(const struct planned *p)
{
    uint64_t id = send_plan(p);
    rig_run(&r);
    return (attn_status)rig_answer(&r, id)->status;
}

static void refused(const struct planned *p, attn_status st, const char *part)
{
    uint64_t id = send_plan(p);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), st, part);
}

static void ring(int side, uint32_t bell)
{
    atomic_store(&sides[side]->page.bell, bell);
}

static uint32_t done(int side)
{
    uint32_t word;
    memcpy(&word, sides[side]->out, sizeof word);
    return word;
}

static int32_t verdict_of(int side, uint32_t bell)
{
    uint64_t v = atomic_load(&sides[side]->page.verdict);
    assert_int_equal((uint32_t)v, bell);
    return (int32_t)(v >> 32);
}

static float output(int side, uint64_t offset)
{
    float x;
    memcpy(&x, sides[side]->out + offset, sizeof x);
    return x;
}

/* Rings, and the device answers. */
static void pass(int side, uint32_t bell)
{
    ring(side, bell);
    rig_run(&r);
    assert_int_equal(done(side), bell);
}

/* --- tests ------------------------------------------------------------------------------------ */

static void a_bell_is_the_next_layer_of_the_plan(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0);
    p.layers[0] = 2, p.layers[1] = 0, p.layers[2] = 3, p.layers[3] = 1;
    p.out_offset = 192;
    assert_int_equal(plan(&p), ATTN_OK);
    for (uint32_t bell = 1; bell <= 4; bell++) {
        pass(0, bell);
        assert_int_equal(rig_len(&r, 1, p.layers[bell - 1]), 1);
        assert_int_equal(rig_len(&r, 2, p.layers[bell - 1]), 1);
        assert_true(output(0, 192) == 1);
        for (uint32_t k = bell; k < 4; k++)
            assert_int_equal(rig_len(&r, 1, p.layers[k]), 0);
        memset(sides[0]->out + 192, 0xff, 64);
    }
    assert_int_equal(atomic_load(&sides[0]->page.verdict), 0); /* the host said nothing */
    p = plan_of(5, 2, 1);
    assert_int_equal(plan(&p), ATTN_OK);
    for (uint32_t bell = 5; bell <= 8; bell++)
        pass(0, bell);
    assert_true(output(0, LANE_OUT_OFFSET) == 2);
    assert_int_equal(stats_get(bells_refused), 0);
    assert_int_equal(stats_get(plans), 2);
}

static void bells_count_past_the_end_of_their_bits(void **state)
{
    (void)state;
    sides[0]->lane.taken = 0xfffffffd;
    ring(0, 0xfffffffd);
    struct planned p = plan_of(0xfffffffe, 1, 0);
    assert_int_equal(plan(&p), ATTN_OK);
    p = plan_of(2, 1, 1);
    assert_int_equal(plan(&p), ATTN_OK); /* behind it */
    for (uint32_t k = 0; k < 8; k++)
        pass(0, 0xfffffffe + k);
    assert_int_equal(rig_len(&r, 1, 3), 2);
}

static void bells_that_are_there_together_are_one_batch(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0), q = plan_of(1, 2, 0);
    q.lane = 12;
    q.first_seq = 3;
    assert_int_equal(plan(&p), ATTN_OK);
    assert_int_equal(plan(&q), ATTN_OK);
    uint32_t n_batches = r.backend.n_batches;
    ring(0, 1);
    ring(1, 1);
    rig_run(&r);
    assert_int_equal(r.backend.n_batches, n_batches + 1);
    assert_int_equal(r.backend.batches[n_batches].n_items, 4);
    assert_int_equal(done(0), 1);
    assert_int_equal(done(1), 1);
}

/* More items than a batch may have: no device can say when all are done. */
static void a_bell_that_takes_several_batches_is_answered_by_the_host(void **state)
{
    (void)state;
    struct planned p = plan_of(1, SEQS, 0);
    assert_int_equal(plan(&p), ATTN_OK);
    ring(0, 1);
    rig_run(&r);
    assert_int_equal(done(0), 0);
    assert_int_equal(verdict_of(0, 1), ATTN_OK);
    assert_int_equal(rig_len(&r, SEQS, 0), 1);
}

static void the_next_bell_may_come_before_the_host_knows(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 1, 0);
    assert_int_equal(plan(&p), ATTN_OK);
    r.backend.is_held = true;
    for (uint32_t bell = 1; bell <= 3; bell++) {
        ring(0, bell);
        engine_turn(r.engine, 0);
    }
    assert_int_equal(sides[0]->lane.n_busy, 3);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(done(0), 3);
    assert_int_equal(rig_len(&r, 1, 2), 1);
    pass(0, 4);
}

/* The length of a layer as a successor would find it if the process died now. */
static uint32_t len_after_a_kill(uint64_t seq, uint32_t layer)
{
    struct backend_info info;
    char why[256];
    struct kv *kv;
    struct kv_seq_info i;
    kv_seq_id id;
    struct stat sb;
    int fd = memfd_create("copy", MFD_ALLOW_SEALING), from = kv_fd(r.kv);
    assert_int_equal(fstat(from, &sb), 0);
    uint8_t *bytes = malloc((size_t)sb.st_size);
    assert_int_equal(pread(from, bytes, (size_t)sb.st_size, 0), sb.st_size);
    assert_int_equal(pwrite(fd, bytes, (size_t)sb.st_size, 0), sb.st_size);
    free(bytes);
    rig_backend_ops.info(&r.backend, &info);
    struct kv_config c = engine_kv_config(&r.cfg, info.kv_bytes);
    if (kv_open(&c, fd, &kv, why, sizeof why) != ATTN_OK)
        fail_msg("the successor finds no cache: %s", why);
    assert_int_equal(kv_check(kv), ATTN_OK);
    assert_int_equal(kv_seq_find(kv, TENANT_OPERATOR, seq, &id), ATTN_OK);
    kv_seq_info(kv, id, &i);
    uint32_t len = i.layer_len[layer];
    kv_close(kv);
    close(fd);
    return len;
}

static void what_the_device_has_answered_is_there_after_a_kill(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0), other = plan_of(1, 1, 0);
    other.lane = 12;
    other.first_seq = 4;
    assert_int_equal(plan(&p), ATTN_OK);
    assert_int_equal(plan(&other), ATTN_OK);
    r.backend.is_held = true;
    ring(0, 1);
    ring(1, 1);
    engine_turn(r.engine, 0);
    assert_int_equal(r.backend.n_in_flight, 1);
    assert_int_equal(len_after_a_kill(1, 0), 0); /* nobody has answered yet */
    rig_device_signals(&r, 1); /* one word is out, and no worker has been told */
    assert_int_equal(done(0), 0);
    assert_int_equal(done(1), 0);
    assert_int_equal(len_after_a_kill(1, 0), 1);
    rig_device_signals(&r, UINT32_MAX);
    assert_int_equal(done(0), 1);
    assert_int_equal(done(1), 1);
    assert_int_equal(rig_len(&r, 2, 0), 0); /* nobody has committed it */
    for (uint64_t seq = 1; seq <= 4; seq++)
        assert_int_equal(len_after_a_kill(seq, 0), seq != 3);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_len(&r, 2, 0), 1);
    assert_int_equal(len_after_a_kill(2, 0), 1);
    assert_int_equal(rig_truncate(&r, 2, 0), ATTN_OK);
    assert_int_equal(len_after_a_kill(2, 0), 0);
}

static void a_bell_whose_batch_fails_is_not_there_after_a_kill(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 1, 0);
    assert_int_equal(plan(&p), ATTN_OK);
    pass(0, 1);
    r.backend.fail_batch = ATTN_EINTERNAL;
    ring(0, 2);
    rig_run(&r);
    assert_int_equal(verdict_of(0, 2), ATTN_EINTERNAL);
    assert_int_equal(len_after_a_kill(1, 0), 1);
    assert_int_equal(len_after_a_kill(1, 1), 0);
}

/* Lane 0 rings, and its device tells everybody whom it can; the host has not looked. */
static void device_answers(void)
{
    struct planned p = plan_of(1, 1, 0);
    assert_int_equal(plan(&p), ATTN_OK);
    r.backend.is_held = true;
    ring(0, 1);
    engine_turn(r.engine, 0);
    rig_device_signals(&r, UINT32_MAX);
}

/* By another batch's fault, say, right after it has told everybody. */
static void what_a_device_had_answered_when_it_was_lost_is_committed(void **state)
{
    (void)state;
    device_answers();
    assert_int_equal(done(0), 1);
    r.backend.fail_batch = ATTN_EDEVICE;
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(engine_health(r.engine), ATTN_EDEVICE);
    assert_int_equal(rig_len(&r, 1, 0), 1);
    assert_int_equal(len_after_a_kill(1, 0), 1);
}

static void a_bell_waits_for_the_host_where_the_device_cannot_tell_the_cache(void **state)
{
    (void)state;
    device_answers();
    assert_int_equal(done(0), 0);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(verdict_of(0, 1), ATTN_OK);
    assert_int_equal(len_after_a_kill(1, 0), 1);
}

static void bells_that_lie_change_nothing(void **state)
{
    (void)state;
    static const uint32_t lies[] = {2, 7, 0xfffffff0, 0x80000000, 0x12345678};
    struct planned p;
    uint32_t next = 1;
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        p = plan_of(next, 1, 0);
        assert_int_equal(plan(&p), ATTN_OK);
        uint32_t lie = next + lies[i] - (lies[i] < 8 ? 1 : 0);
        ring(0, lie);
        rig_run(&r);
        assert_int_equal(verdict_of(0, lie), ATTN_EPROTO);
        assert_non_null(strstr(sides[0]->page.why, "is next"));
        assert_int_equal(stats_get(bells_refused), i + 1);
        for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
            assert_int_equal(rig_len(&r, 1, layer), 0);
        next = lie + 1;
    }
    ring(0, next); /* of no plan: what was planned is gone */
    rig_run(&r);
    assert_int_equal(verdict_of(0, next), ATTN_EPROTO);
    ring(0, next); /* once more is no bell */
    rig_run(&r);
    assert_int_equal(stats_get(bells_refused), sizeof lies / sizeof *lies + 1);
    p = plan_of(next + 1, 1, 0); /* whoever plans anew goes on */
    assert_int_equal(plan(&p), ATTN_OK);
    pass(0, next + 1);
}

static void a_plan_is_the_same_when_repeated_and_replaced_when_not(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0), q;
    assert_int_equal(plan(&p), ATTN_OK);
    assert_int_equal(plan(&p), ATTN_OK);
    pass(0, 1);
    assert_int_equal(plan(&p), ATTN_OK); /* half done: still the same */
    assert_int_equal(sides[0]->lane.n_plans, 1);
    q = plan_of(2, 2, 0); /* from its second bell on another */
    q.layers[0] = 3;
    q.n_layers = 1;
    assert_int_equal(plan(&q), ATTN_OK);
    pass(0, 2);
    assert_int_equal(rig_len(&r, 1, 3), 1);
    assert_int_equal(rig_len(&r, 1, 1), 0);
    q.first_bell = 3;
    q.n_layers = 0; /* abandons nothing */
    assert_int_equal(plan(&q), ATTN_OK);
    p = plan_of(3, 2, 0);
    assert_int_equal(plan(&p), ATTN_OK);
    pass(0, 3);
    q.first_bell = 4;
    assert_int_equal(plan(&q), ATTN_OK); /* the other three layers */
    ring(0, 4);
    rig_run(&r);
    assert_int_equal(verdict_of(0, 4), ATTN_EPROTO);
    assert_int_equal(rig_len(&r, 1, 1), 0);
    p = plan_of(5, 2, 0); /* all again: written again, the same */
    assert_int_equal(plan(&p), ATTN_OK);
    for (uint32_t bell = 5; bell <= 8; bell++)
        pass(0, bell);
    assert_int_equal(rig_len(&r, 1, 1), 1);
}

/* The message was late, or its first copy was refused: it must not come back in place of a plan
 * that was made after it, for whose layers the tensors will be. */
static void a_late_copy_of_a_plan_that_was_replaced_changes_nothing(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0), q = plan_of(1, 2, 0);
    r.keeps_sent = true;
    uint64_t first = send_plan(&p);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, first)->status, ATTN_OK);
    q.first_seq = 3;
    uint64_t second = send_plan(&q);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, second)->status, ATTN_OK);
    rig_resend(&r, first);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, first), ATTN_EINVAL, "a later plan");
    rig_resend(&r, second); /* the one that is in force may be repeated */
    rig_run(&r);
    assert_int_equal(rig_answer(&r, second)->status, ATTN_OK);
    pass(0, 1);
    assert_int_equal(rig_len(&r, 1, 0), 0);
    assert_int_equal(rig_len(&r, 3, 0), 1);
}

static void plans_queue_up(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 1, 0);
    for (uint32_t k = 0; k < LANE_MAX_PLANS; k++) {
        p = plan_of(1 + 4 * k, 1, k); /* positions that are there when their turn comes */
        assert_int_equal(plan(&p), ATTN_OK);
    }
    p = plan_of(1 + 4 * LANE_MAX_PLANS, 1, LANE_MAX_PLANS);
    refused(&p, ATTN_EOVERLOAD, "plans that are not finished");
    for (uint32_t bell = 1; bell <= 4 * LANE_MAX_PLANS; bell++)
        pass(0, bell);
    assert_int_equal(rig_len(&r, 1, 3), LANE_MAX_PLANS);
    assert_int_equal(plan(&p), ATTN_OK);
    p.first_bell -= 1;
    refused(&p, ATTN_EINVAL, "plan.first_bell is 16, a plan may begin with 17 to 21");
    p.first_bell = 22;
    refused(&p, ATTN_EINVAL, "plan.first_bell is 22");
}

static void what_is_wrong_with_a_plan_is_named(void **state)
{
    (void)state;
    const struct planned good = plan_of(1, 2, 0);
    struct {
        const char *part;
        attn_status st;
        struct planned p;
    } cases[] = {
        {"plan.lane is 0x000000000000000d, no such lane", ATTN_ENOTFOUND, good},
        {"plan.lane is 0x0000000000000000, no such lane", ATTN_ENOTFOUND, good},
        {"plan.layers[2] is 4, the pool has 4 layers", ATTN_EINVAL, good},
        {"plan.step.layer is 1", ATTN_EINVAL, good},
        {"plan.step.pool is 99", ATTN_ENOTFOUND, good},
        {"item 1 (sequence 7): no such sequence", ATTN_ENOTFOUND, good},
        {"item 1 (sequence 1): it is in this plan twice", ATTN_EINVAL, good},
        {"item 0 (sequence 1): epoch is 5", ATTN_ESTALE, good},
        {"item 0 (sequence 1): pos is 1, layer 0 has 0 tokens", ATTN_EINVAL, good},
        {"is not appended yet: layer 0 has 0", ATTN_EINVAL, good},
        {"plan.in_offset is 32", ATTN_EINVAL, good},
        {"plan.in_offset is 262080", ATTN_EINVAL, good},
        {"plan.in_offset is 18446744073709551552", ATTN_EINVAL, good},
        {"plan.out_offset is 64", ATTN_EINVAL, good},
        {"plan.out_offset is 262144", ATTN_EINVAL, good},
        {"plan.out_offset is 1099511627776", ATTN_EINVAL, good},
        {"lse", ATTN_EINVAL, good},
        {"blocks, pool", ATTN_ENOBLOCKS, good},
    };
    cases[0].p.lane = 13;
    cases[1].p.lane = 0;
    cases[2].p.layers[2] = 4;
    cases[3].p.step_layer = 1;
    cases[4].p.pool = 99;
    cases[5].p.first_seq = 6;
    cases[6].p.is_twice = true;
    cases[7].p.epoch = 5;
    cases[8].p.pos = 1;
    cases[9].p.flags = WIRE_STEP_ATTEND;
    cases[10].p.in_offset = 32;
    cases[11].p.in_offset = IN_BYTES - 64;
    cases[12].p.in_offset = UINT64_MAX - 63;
    cases[13].p.out_offset = 64;
    cases[14].p.out_offset = OUT_BYTES;
    cases[15].p.out_offset = (uint64_t)1 << 40;
    cases[16].p.flags = WIRE_STEP_APPEND | WIRE_STEP_LSE;
    cases[17].p.n_tokens = 320; /* 80 blocks of 64 */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refused(&cases[i].p, cases[i].st, cases[i].part);
    ring(0, 1);
    rig_run(&r);
    assert_int_equal(verdict_of(0, 1), ATTN_EPROTO); /* none of them was taken */
    for (uint64_t seq = 1; seq <= SEQS; seq++)
        assert_int_equal(rig_len(&r, seq, 0), 0);
}

/* As a step's item: who decodes by a lane learns where its sequence went, too. */
static void a_plan_of_a_sequence_that_was_moved_is_told_where(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0);
    Attnd__Moved moved = ATTND__MOVED__INIT;
    Attnd__Close close = ATTND__CLOSE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    p.epoch = rig_epoch(&r, 1); /* of both */
    assert_int_equal(rig_epoch(&r, 2), p.epoch);
    moved.url = "tcp://there:7471";
    moved.seq = 200;
    moved.epoch = 9;
    close.seq = 2;
    close.epoch = p.epoch;
    close.moved = &moved;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_CLOSE;
    h.close = &close;
    assert_int_equal(rig_call(&r, &h)->status, ATTN_OK);
    refused(&p, ATTN_EMOVED,
            "item 1 (sequence 2): sequence 2 has moved to tcp://there:7471: 200, epoch 9");
    p.epoch++; /* no handle had it */
    p.first_seq = 2;
    refused(&p, ATTN_ENOTFOUND, "item 0 (sequence 2): no such sequence");
    assert_int_equal(rig_len(&r, 1, 0), 0);
}

static void a_failed_layer_ends_the_plan(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0);
    assert_int_equal(plan(&p), ATTN_OK);
    pass(0, 1);
    r.backend.fail_batch = ATTN_EINTERNAL;
    ring(0, 2);
    rig_run(&r);
    assert_int_equal(done(0), 1);
    assert_int_equal(verdict_of(0, 2), ATTN_EINTERNAL);
    ring(0, 3); /* the worker's stream goes on: each layer is told the same */
    rig_run(&r);
    assert_int_equal(verdict_of(0, 3), ATTN_EINTERNAL);
    assert_int_equal(rig_len(&r, 1, 1), 0);
    p = plan_of(4, 2, 0);
    assert_int_equal(plan(&p), ATTN_OK);
    for (uint32_t bell = 4; bell <= 7; bell++)
        pass(0, bell);
    assert_int_equal(rig_len(&r, 1, 1), 1);
}

/* What is true when it is planned need not be when it is rung for. */
static void a_bell_is_checked_as_a_step(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0);
    assert_int_equal(plan(&p), ATTN_OK);
    assert_int_equal(rig_truncate(&r, 2, 0), ATTN_OK); /* raises the epoch */
    ring(0, 1);
    rig_run(&r);
    assert_int_equal(verdict_of(0, 1), ATTN_ESTALE);
    assert_non_null(strstr(sides[0]->page.why, "item 1 (sequence 2): epoch is"));
}

static void a_bell_that_waits_too_long_is_told_so(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 1, 0), q = p;
    p.timeout_us = q.timeout_us = 1000;
    q.lane = 12;
    assert_int_equal(plan(&p), ATTN_OK);
    assert_int_equal(plan(&q), ATTN_OK);
    r.backend.is_held = true;
    ring(0, 1);
    engine_turn(r.engine, 0);
    ring(1, 1); /* the same sequence and layer: it waits */
    engine_turn(r.engine, 0);
    rig_now_ns += 2000000;
    engine_turn(r.engine, 0);
    assert_int_equal(verdict_of(1, 1), ATTN_EDEADLINE);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(done(0), 1);
}

static void a_worker_that_goes_leaves_what_is_in_work_to_end(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 1, 0);
    assert_int_equal(plan(&p), ATTN_OK);
    r.backend.is_held = true;
    ring(0, 1);
    engine_turn(r.engine, 0);
    lane_close(&sides[0]->lane);
    ring(0, 2);
    engine_turn(r.engine, 0);
    assert_int_equal(sides[0]->lane.n_busy, 1);
    assert_false(atomic_load(&has_news));
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(sides[0]->lane.n_busy, 0);
    assert_true(atomic_load(&has_news));
    assert_int_equal(rig_len(&r, 1, 0), 1);
    assert_int_equal(rig_len(&r, 1, 1), 0);
    refused(&p, ATTN_ENOTFOUND, "no such lane");
}

/* Random plans and random bells, next to true ones: lengths move by true bells alone. */
static void random_bells_never_move_a_length(void **state)
{
    (void)state;
    uint64_t seed = 12345;
    uint32_t count = 0, len[RIG_LAYERS] = {0};
    struct planned p = {0};
    uint32_t n_left = 0;
    for (int i = 0; i < 3000; i++) {
        uint32_t dice = random_below(&seed, 256);
        if (n_left == 0) {
            p = plan_of(count + 1, 1, len[RIG_LAYERS - 1] % 20);
            if (plan(&p) == ATTN_OK)
                n_left = RIG_LAYERS;
        } else if (dice < 200) {
            pass(0, ++count);
            uint32_t layer = p.layers[RIG_LAYERS - n_left--];
            len[layer] = p.pos + 1 > len[layer] ? p.pos + 1 : len[layer];
        } else {
            uint32_t lie =
                dice < 230 ? (uint32_t)random_mixed(&seed) : count + 2 + random_below(&seed, 16);
            ring(0, lie);
            rig_run(&r);
            n_left = lie == count + 1 ? n_left : 0;
            count = lie;
            if (verdict_of(0, lie) == ATTN_OK)
                fail_msg("bell %u was believed", lie);
        }
        for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
            assert_int_equal(rig_len(&r, 1, layer), len[layer]);
    }
}

static void two_gpus_need_no_mps_and_one_does(void **state)
{
    (void)state;
    enum { OURS = 1, OTHER = 2, HOST = 0 };
    const struct {
        uint8_t theirs, ours;
        bool is_their_mps, is_our_mps;
        uint32_t driver;
        attn_status st;
        const char *part;
    } cases[] = {
        {HOST, HOST, false, false, 0, ATTN_OK, ""},
        {OURS, OURS, true, true, 13000, ATTN_OK, ""},
        {OTHER, OURS, false, false, 13000, ATTN_OK, ""},
        {OTHER, OURS, true, false, 13000, ATTN_OK, ""},
        {OURS, OURS, false, true, 13000, ATTN_ENOTSUP, "time slices: the worker is not"},
        {OURS, OURS, true, false, 13000, ATTN_ENOTSUP, "time slices: the daemon is not"},
        {OURS, OURS, false, false, 13000, ATTN_ENOTSUP, "time slices: worker and daemon are not"},
        {OURS, OURS, true, true, 12080, ATTN_ENOTSUP, "driver is 12080, the daemon's 13000"},
        {OTHER, OURS, false, false, 12080, ATTN_ENOTSUP, "driver is 12080, the daemon's 13000"},
        {HOST, OURS, false, false, 0, ATTN_ENOTSUP,
         "region is on host memory, the daemon's on GPU "},
        {OTHER, HOST, false, false, 13000, ATTN_ENOTSUP,
         "on GPU 02020202020202020202020202020202, the daemon's on host memory"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct lane_device theirs = {.driver_version = cases[i].driver,
                                     .is_shared = cases[i].is_their_mps};
        struct lane_device ours = {.driver_version = 13000, .is_shared = cases[i].is_our_mps};
        char why[200] = "";
        memset(theirs.uuid, cases[i].theirs, sizeof theirs.uuid);
        memset(ours.uuid, cases[i].ours, sizeof ours.uuid);
        if (lane_device_check(&theirs, &ours, why, sizeof why) != cases[i].st ||
            strstr(why, cases[i].part) == NULL)
            fail_msg("case %zu: %s", i, why);
    }
}

/* A test between opening and closing: what the rig keeps would count as the test's leak. */
static void run(void **state)
{
    void (*const *test)(void **) = *state;
    open_rig();
    (*test)(NULL);
    close_rig();
}

static void run_kept(void **state)
{
    is_kept = true;
    run(state);
    is_kept = false;
}

static void run_kept_unsignalled(void **state)
{
    fail_register = ATTN_ENOMEM;
    run_kept(state);
    fail_register = ATTN_OK;
}

int main(void)
{
#define T(name) T_BY(run, name)
#define T_BY(run, name)                                                                            \
    {                                                                                              \
#name, run, NULL, NULL, &(void (*)(void **))                                               \
        {                                                                                          \
            name                                                                                   \
        }                                                                                          \
    }
    const struct CMUnitTest tests[] = {
        T(a_bell_is_the_next_layer_of_the_plan),
        T(bells_count_past_the_end_of_their_bits),
        T(bells_that_are_there_together_are_one_batch),
        T(a_bell_that_takes_several_batches_is_answered_by_the_host),
        T(the_next_bell_may_come_before_the_host_knows),
        T_BY(run_kept, what_the_device_has_answered_is_there_after_a_kill),
        T_BY(run_kept, a_bell_whose_batch_fails_is_not_there_after_a_kill),
        T_BY(run_kept, what_a_device_had_answered_when_it_was_lost_is_committed),
        T_BY(run_kept_unsignalled,
             a_bell_waits_for_the_host_where_the_device_cannot_tell_the_cache),
        T(bells_that_lie_change_nothing),
        T(a_plan_is_the_same_when_repeated_and_replaced_when_not),
        T(a_late_copy_of_a_plan_that_was_replaced_changes_nothing),
        T(plans_queue_up),
        T(what_is_wrong_with_a_plan_is_named),
        T(a_plan_of_a_sequence_that_was_moved_is_told_where),
        T(a_failed_layer_ends_the_plan),
        T(a_bell_is_checked_as_a_step),
        T(a_bell_that_waits_too_long_is_told_so),
        T(a_worker_that_goes_leaves_what_is_in_work_to_end),
        T(random_bells_never_move_a_length),
        T(two_gpus_need_no_mps_and_one_does),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
