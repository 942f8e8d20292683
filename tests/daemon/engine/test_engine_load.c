/* test_engine_load.c: the engine under many requests at once: random ones against a model,
 * thousands of sequences, many threads; and the ready queue alone. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/clock.h"
#include "daemon/engine/core/ready.h"
#include "tests/daemon/config_defaults.h"
#include "tests/daemon/engine/engine_rig.h"
#include "tests/random.h"

#define BOTH (WIRE_STEP_APPEND | WIRE_STEP_ATTEND)

static struct rig r;
static uint64_t seed;

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

/* --- random requests -------------------------------------------------------------------------- */

enum { NAMES = 24, OPS = 400 };

enum kind { STEP, TRUNCATE, CLOSE, OPEN, FORK };

/* A request as it was sent. Replayed in the order of sending, those that were answered with ok must
 * give the lengths that the cache has: requests on one sequence keep their order. */
struct op {
    enum kind kind;
    uint64_t id, seq[3], new_seq;
    uint32_t layer, pos[3], n[3], n_items, len;
};

struct model_seq {
    uint64_t name;
    bool is_open;
    uint32_t len[RIG_LAYERS];
};

static struct op ops[OPS];
static struct model_seq model[NAMES + OPS];
static uint32_t n_model;

static struct model_seq *model_of(uint64_t name)
{
    for (uint32_t i = 0; i < n_model; i++)
        if (model[i].name == name)
            return &model[i];
    model[n_model] = (struct model_seq){.name = name};
    return &model[n_model++];
}

static void send_control(struct op *o)
{
    Attnd__Truncate t = ATTND__TRUNCATE__INIT;
    Attnd__Close c = ATTND__CLOSE__INIT;
    Attnd__Open p = ATTND__OPEN__INIT;
    Attnd__Fork f = ATTND__FORK__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = r.session;
    t.seq = c.seq = p.seq = f.seq = o->seq[0];
    t.epoch = c.epoch = f.epoch = 1;
    t.len = o->len;
    p.pool = r.pool;
    f.new_seq = o->new_seq;
    if (o->kind == TRUNCATE) {
        h.body_case = ATTND__REQUEST__BODY_TRUNCATE;
        h.truncate = &t;
    } else if (o->kind == CLOSE) {
        h.body_case = ATTND__REQUEST__BODY_CLOSE;
        h.close = &c;
    } else if (o->kind == OPEN) {
        h.body_case = ATTND__REQUEST__BODY_OPEN;
        h.open = &p;
    } else {
        h.body_case = ATTND__REQUEST__BODY_FORK;
        h.fork = &f;
    }
    o->id = rig_send(&r, &h, NULL, 0);
}

static uint64_t any_name(uint32_t n_forks)
{
    return 1 + below(NAMES + n_forks);
}

static void send_random(struct op *o, uint32_t *n_forks)
{
    uint32_t dice = below(100);
    *o = (struct op){.kind = dice < 70   ? STEP
                             : dice < 78 ? TRUNCATE
                             : dice < 83 ? CLOSE
                             : dice < 93 ? OPEN
                                         : FORK};
    o->seq[0] = any_name(*n_forks);
    if (o->kind == OPEN)
        o->seq[0] = 1 + below(NAMES);
    o->len = below(12);
    if (o->kind == FORK)
        o->new_seq = NAMES + ++*n_forks;
    if (o->kind != STEP) {
        send_control(o);
        return;
    }
    o->layer = below(RIG_LAYERS);
    o->n_items = 1 + below(3);
    for (uint32_t i = 0; i < o->n_items; i++) {
        do
            o->seq[i] = any_name(*n_forks);
        while ((i > 0 && o->seq[i] == o->seq[0]) || (i > 1 && o->seq[i] == o->seq[1]));
        struct model_seq *m = model_of(o->seq[i]); /* a guess from what was answered so far */
        o->pos[i] = below(10) == 0 ? m->len[o->layer] + below(3) : below(m->len[o->layer] + 1);
        o->n[i] = 1 + below(12);
    }
    struct rig_step s = {.layer = o->layer,
                         .flags = below(4) == 0 ? WIRE_STEP_APPEND : BOTH,
                         .n_items = o->n_items,
                         .seq = o->seq,
                         .pos = o->pos,
                         .n_tokens = o->n};
    o->id = rig_send_step(&r, &s);
}

static void replay(const struct op *o)
{
    const Attnd__Reply *reply = rig_reply(&r, o->id);
    assert_non_null(reply);
    struct model_seq *m = model_of(o->seq[0]);
    if (o->kind == STEP) {
        if (reply->body_case != ATTND__REPLY__BODY_STEP)
            return;
        for (uint32_t i = 0; i < o->n_items; i++) {
            if (reply->step->n_item_status > 0 && reply->step->item_status[i] != ATTN_OK)
                continue;
            uint32_t *len = &model_of(o->seq[i])->len[o->layer], end = o->pos[i] + o->n[i];
            *len = end > *len ? end : *len;
        }
        return;
    }
    if (reply->status != ATTN_OK)
        return;
    if (o->kind == TRUNCATE) {
        for (uint32_t l = 0; l < RIG_LAYERS; l++)
            m->len[l] = m->len[l] > o->len ? o->len : m->len[l];
    } else if (o->kind == CLOSE) {
        m->is_open = false;
        memset(m->len, 0, sizeof m->len);
    } else if (o->kind == OPEN) {
        m->is_open = true;
    } else {
        struct model_seq *f = model_of(o->new_seq);
        f->is_open = true;
        for (uint32_t l = 0; l < RIG_LAYERS; l++)
            f->len[l] = reply->seq->layer_len[l];
    }
}

static void one_large_batch(struct rig *rig)
{
    rig->backend.max_in_flight = 1;
}

static void two_small_batches(struct rig *rig)
{
    rig->cfg.max_batch_items = 5;
}

static void random_requests_keep_their_order_and_the_cache(void **state)
{
    (void)state;
    for (unsigned round = 1; round <= 60; round++) {
        seed = round;
        n_model = 0;
        rig_open(&r, round % 3 == 0 ? one_large_batch : round % 3 == 1 ? two_small_batches : NULL);
        uint32_t n_forks = 0, n_replayed = 0;
        for (uint32_t i = 0; i < OPS; i++) {
            send_random(&ops[i], &n_forks);
            uint32_t dice = below(10);
            if (dice < 3) {
                r.backend.is_held = below(2) == 0;
                if (below(8) == 0)
                    r.backend.fail_batch = ATTN_EINTERNAL;
                if (below(8) == 0)
                    r.backend.fail_submit = ATTN_EINTERNAL;
                rig_run(&r);
            } else if (dice == 3) {
                r.backend.is_held = false;
                rig_run(&r);
                while (n_replayed <= i)
                    replay(&ops[n_replayed++]);
                if (kv_check(r.kv) != ATTN_OK)
                    fail_msg("seed %u, request %u: %s", round, i, kv_last_error(r.kv));
            }
        }
        r.backend.is_held = false;
        rig_run(&r);
        while (n_replayed < OPS)
            replay(&ops[n_replayed++]);
        for (uint32_t i = 0; i < n_model; i++) {
            kv_seq_id id;
            bool is_open = kv_seq_find(r.kv, TENANT_OPERATOR, model[i].name, &id) == ATTN_OK;
            if (is_open != model[i].is_open)
                fail_msg("seed %u: sequence %llu is %s", round, (unsigned long long)model[i].name,
                         is_open ? "open" : "closed");
            for (uint32_t l = 0; is_open && l < RIG_LAYERS; l++)
                if (rig_len(&r, model[i].name, l) != model[i].len[l])
                    fail_msg("seed %u: sequence %llu layer %u has %u tokens, expected %u", round,
                             (unsigned long long)model[i].name, l, rig_len(&r, model[i].name, l),
                             model[i].len[l]);
        }
        rig_close(&r);
    }
}

/* --- thousands of sequences ------------------------------------------------------------------- */

enum { MANY = 4200 };

static void room_for_many(struct rig *rig)
{
    rig->cfg.max_sequences = MANY + 8;
    rig->cfg.max_seq_tokens = 64;
    rig->cfg.max_queue_requests = 4096;
    rig->cfg.io_memory_bytes = 128 << 20;
    rig->backend.kv_bytes = 64 << 20;
}

static void thousands_of_sequences_are_kept_apart(void **state)
{
    (void)state;
    static uint64_t id[MANY / 20];
    rig_open(&r, room_for_many);
    r.pool = rig_pool(&r, "large", MANY * 2);
    for (uint64_t i = 0; i < MANY; i++)
        assert_int_equal(rig_open_seq(&r, 1000000 + i * 977), ATTN_OK);
    for (uint32_t t = 0; t < 3; t++) {
        for (uint32_t k = 0; k < MANY / 20; k++) {
            uint64_t seq[21];
            uint32_t pos[21], n[21];
            for (uint32_t i = 0; i < 21; i++) {
                seq[i] = i == 20 ? k : 1000000 + (uint64_t)(i * (MANY / 20) + k) * 977;
                pos[i] = t * (k % 3 + 1);
                n[i] = k % 3 + 1;
            }
            struct rig_step s = {
                .flags = BOTH, .n_items = 21, .seq = seq, .pos = pos, .n_tokens = n};
            id[k] = rig_send_step(&r, &s);
        }
        rig_run(&r);
        for (uint32_t k = 0; k < MANY / 20; k++) {
            const Attnd__Reply *reply = rig_reply(&r, id[k]);
            assert_non_null(reply);
            assert_int_equal(reply->status, ATTN_ENOTFOUND); /* the 21st of each */
            for (uint32_t i = 0; i < 21; i++)
                assert_int_equal(reply->step->item_status[i], i == 20 ? ATTN_ENOTFOUND : ATTN_OK);
        }
    }
    for (uint32_t i = 0; i < MANY; i++)
        assert_int_equal(rig_len(&r, 1000000 + (uint64_t)i * 977, 0),
                         3 * (i % (MANY / 20) % 3 + 1));
    rig_close(&r);
}

/* --- many threads ----------------------------------------------------------------------------- */

enum { THREADS = 4, EACH = 2000 };

static _Atomic uint32_t n_answered, n_ok;
static struct iobuf_pool *bufs;
static struct engine *engine;

static void count_reply(struct request *req)
{
    struct wire_arena arena;
    struct wire_reply reply;
    char why[256];
    wire_arena_init(&arena, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    if (wire_reply_decode(req->reply->data + req->reply->offset, req->reply->n_bytes, &arena,
                          &reply, why, sizeof why) == ATTN_OK &&
        reply.header->status == ATTN_OK)
        atomic_fetch_add(&n_ok, 1);
    wire_arena_reset(&arena);
    request_free(req);
    atomic_fetch_add(&n_answered, 1);
}
static const struct transport_ops counting = {.label = STATS_SHM, .reply = count_reply};

static void *say_hello(void *arg)
{
    (void)arg;
    for (uint32_t i = 0; i < EACH; i++) {
        Attnd__Hello b = ATTND__HELLO__INIT;
        Attnd__Request h = ATTND__REQUEST__INIT;
        char why[256];
        b.protocol_version = 1;
        h.body_case = ATTND__REQUEST__BODY_HELLO;
        h.hello = &b;
        struct request *req = NULL;
        while (req == NULL) /* buffers come back as answers are taken */
            req = request_new(&counting, NULL, NULL, bufs, wire_request_head_bytes(&h));
        wire_request_head_encode(&h, i + 1, 0, req->msg->data);
        if (request_decode(req, clock_now_ns(), 60000000, 60000000, UINT64_MAX, why, sizeof why) !=
            ATTN_OK)
            abort();
        engine_submit(engine, req);
    }
    return NULL;
}

static void requests_of_many_threads_are_all_answered(void **state)
{
    (void)state;
    struct config cfg;
    struct backend backend = {.kv_bytes = 1 << 20, .max_in_flight = 2};
    char why[256];
    pthread_t threads[THREADS];
    config_defaults(&cfg);
    cfg.max_sequences = 16;
    cfg.max_seq_tokens = 64;
    cfg.max_sessions = THREADS * EACH;
    cfg.max_queue_requests = 1 << 20;
    memset(&stats, 0, sizeof stats);
    assert_int_equal(iobuf_pool_open(&rig_backend_ops, &backend, 128 << 20, &bufs), ATTN_OK);
    struct engine_fixture fixture = {0};
    assert_int_equal(engine_fixture_open(&fixture, &cfg, &rig_backend_ops, &backend, bufs, &engine,
                                         why, sizeof why),
                     ATTN_OK);
    assert_int_equal(engine_start(engine, why, sizeof why), ATTN_OK);
    for (uint32_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, say_hello, NULL), 0);
    for (uint32_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    uint64_t until_ns = clock_now_ns() + 60000000000u;
    while (atomic_load(&n_answered) < THREADS * EACH && clock_now_ns() < until_ns)
        sched_yield();
    assert_int_equal(atomic_load(&n_answered), THREADS * EACH);
    assert_int_equal(atomic_load(&n_ok), THREADS * EACH);
    assert_int_equal(engine_close(engine), ATTN_OK);
    engine_fixture_close(&fixture);
    iobuf_pool_close(bufs);
    config_fini(&cfg);
}

/* --- the ready queue -------------------------------------------------------------------------- */

enum { TASKS = 300 };

static void ready_tasks_come_out_oldest_first(void **state)
{
    (void)state;
    static struct task tasks[TASKS];
    seed = 11;
    for (uint32_t round = 0; round < 200; round++) {
        struct ready_queue q;
        ready_init(&q);
        memset(tasks, 0, sizeof tasks);
        for (uint32_t i = 0; i < TASKS; i++)
            tasks[i].stamp = i;
        uint32_t n_fresh = 0, n_in = 0;
        for (uint32_t i = 0; i < 3 * TASKS; i++) {
            struct task *t = &tasks[below(TASKS)];
            uint32_t dice = below(10);
            if (dice < 4 && n_fresh < TASKS) { /* new ones come in order */
                if (tasks[n_fresh].place == TASK_NOWHERE) {
                    ready_push_fresh(&q, &tasks[n_fresh]);
                    n_in++;
                }
                n_fresh++;
            } else if (dice < 7 && t->place == TASK_NOWHERE) {
                ready_push_woken(&q, t);
                n_in++;
            } else if (t->place != TASK_NOWHERE && dice < 9) {
                ready_remove(&q, t);
                n_in--;
            }
            struct task *oldest = NULL;
            for (uint32_t k = 0; k < TASKS && oldest == NULL; k++)
                if (tasks[k].place != TASK_NOWHERE)
                    oldest = &tasks[k];
            assert_ptr_equal(ready_first(&q), oldest);
        }
        uint64_t last = 0;
        for (struct task *t = ready_first(&q); t != NULL; t = ready_first(&q)) {
            assert_true(t->stamp >= last);
            last = t->stamp;
            ready_remove(&q, t);
            n_in--;
        }
        assert_int_equal(n_in, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_requests_keep_their_order_and_the_cache),
        cmocka_unit_test(thousands_of_sequences_are_kept_apart),
        cmocka_unit_test(requests_of_many_threads_are_all_answered),
        cmocka_unit_test(ready_tasks_come_out_oldest_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
