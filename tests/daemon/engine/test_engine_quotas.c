/* test_engine_quotas.c: 32 sessions of one tenant do at random what is charged to it, while batches
 * fail and leases end. After every request what is counted is what there is, and never over. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/daemon/engine/engine_rig.h"
#include "tests/random.h"

enum {
    N = 32,
    BLOCKS = 90,
    SEQUENCES = 12,
    SESSIONS = 20,
    POOLS = 3,
    BYTES = 2500,
    UID = 5000,
    IDS = 20
};

static struct rig r;
static uint64_t random_state;
static uint64_t sessions[N];
static struct tenant *who;
static uint32_t n_resized, n_resizes_refused;

static uint32_t below(uint32_t n)
{
    return (uint32_t)(random_mixed(&random_state) % n);
}

static void tweak(struct rig *rig)
{
    char path[64], why[256];
    snprintf(path, sizeof path, "/tmp/attnd_quotas_%ld", (long)getpid());
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fchmod(fileno(f), 0600), 0);
    fprintf(f,
            "[t]\nusers = %d\nblocks = %d\nsequences = %d\nsessions = %d\npools = %d\n"
            "bytes_in_flight = 64K\n",
            UID, BLOCKS, SEQUENCES, SESSIONS, POOLS);
    fclose(f);
    if (tenants_open(path, &rig->fixture.tenants, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    unlink(path);
    tenants_find(rig->fixture.tenants, "t")->most[TENANT_BYTES] = BYTES; /* the steps are small */
    rig->principal = (struct principal){.kind = PRINCIPAL_USER}; /* root: the operator */
    rig->cfg.max_sessions = 2 * N;
    rig->cfg.max_pools = 8;
    rig->cfg.max_batch_items = 8;
    rig->epoch = 1;
}

/* What there is of the tenant's, counted where it is. */
static void count(uint64_t out[TENANT_N_QUOTAS])
{
    memset(out, 0, TENANT_N_QUOTAS * sizeof *out);
    for (uint32_t i = 0; i < r.engine->n_pools; i++) {
        const struct pool *p = &r.engine->pools[i];
        if (p->device == NULL || p->tenant != who->id)
            continue;
        out[TENANT_POOLS]++;
        out[TENANT_BLOCKS] += p->config.n_blocks;
        out[TENANT_SEQUENCES] += kv_pool_sequences(r.kv, p->id);
    }
    for (uint32_t i = 0; i < session_slots(r.cfg.max_sessions); i++) {
        const struct session *s = session_at(r.sessions, i);
        out[TENANT_SESSIONS] += s->id != 0 && s->tenant == who;
    }
    const struct task *t;
    TAILQ_FOREACH(t, &r.engine->held, held)
        out[TENANT_BYTES] += t->req->charge.tenant == who ? t->req->charge.tenant_bytes : 0;
}

static void check(void)
{
    uint64_t there[TENANT_N_QUOTAS];
    count(there);
    for (int q = 0; q < TENANT_N_QUOTAS; q++) {
        assert_int_equal(who->used[q], there[q]);
        assert_in_range(there[q], 0, who->most[q]);
        assert_int_equal(atomic_load(&stats.tenants[who->stats].used[q]), there[q]);
    }
}

/* A request's answer, if there is one by now: at a full quota, and only there, it may say so. */
static void check_answer(uint64_t id, enum tenant_quota q, uint64_t left, uint64_t n)
{
    const Attnd__Reply *reply = rig_reply(&r, id);
    if (reply != NULL && n > left)
        assert_int_not_equal(reply->status, ATTN_OK);
    if (reply != NULL && reply->status == ATTN_EQUOTA)
        assert_true(n > left || q == TENANT_BLOCKS); /* blocks: or too many pools */
}

static void say_hello(uint32_t i)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Hello hello = ATTND__HELLO__INIT;
    uint64_t left = tenant_left(who, TENANT_SESSIONS);
    hello.protocol_version = 1;
    hello.nonce = r.next_id;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &hello;
    uint64_t id = rig_send(&r, &h, NULL, 0);
    engine_turn(r.engine, 0);
    check_answer(id, TENANT_SESSIONS, left, 1);
    if (rig_answer(&r, id)->status == ATTN_OK)
        sessions[i] = rig_answer(&r, id)->hello->session;
}

static void make_pool(void)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate body = ATTND__POOL_CREATE__INIT;
    char name[16];
    snprintf(name, sizeof name, "%u", below(6));
    spec.name = name;
    spec.num_layers = RIG_LAYERS;
    spec.num_q_heads = RIG_Q_HEADS;
    spec.num_kv_heads = RIG_KV_HEADS;
    spec.head_dim_k = RIG_DIM;
    spec.block_tokens = RIG_BLOCK_TOKENS;
    spec.q_dtype = ATTND__DTYPE__F32;
    spec.n_blocks = 10 + below(40);
    body.spec = &spec;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &body;
    uint64_t id = rig_send(&r, &h, NULL, 0);
    engine_turn(r.engine, 0);
    if (rig_answer(&r, id)->status == ATTN_OK)
        r.pool = rig_answer(&r, id)->pool->pool;
}

static void send_step(void)
{
    uint64_t left = tenant_left(who, TENANT_BYTES);
    uint32_t seq = 1 + below(IDS), layer = below(RIG_LAYERS), n_tokens = 1 + below(16);
    uint64_t id = rig_send_item(&r, seq, layer, 0, n_tokens);
    engine_turn(r.engine, 0);
    const Attnd__Reply *reply = rig_reply(&r, id);
    if (reply == NULL) /* held: it was charged */
        assert_true(tenant_left(who, TENANT_BYTES) < left || !r.backend.is_held);
}

/* At the quota of blocks it is refused; whoever waits for a batch waits for the device. */
static void resize_pool(void)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolResize b = ATTND__POOL_RESIZE__INIT;
    char name[8];
    snprintf(name, sizeof name, "%u", below(6));
    b.name = name;
    b.n_blocks = 5 + below(60);
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_RESIZE;
    h.pool_resize = &b;
    r.backend.is_held = false;
    uint64_t id = rig_send(&r, &h, NULL, 0);
    engine_turn(r.engine, 0);
    const Attnd__Reply *reply = rig_reply(&r, id);
    n_resized += reply != NULL && reply->status == ATTN_OK;
    n_resizes_refused += reply != NULL && reply->status == ATTN_EQUOTA;
}

static void say_goodbye(void)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Goodbye b = ATTND__GOODBYE__INIT;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_GOODBYE;
    h.goodbye = &b;
    rig_send(&r, &h, NULL, 0);
}

static void do_something(void)
{
    uint32_t i = below(N), seq;
    uint64_t left = tenant_left(who, TENANT_SEQUENCES);
    r.session = sessions[i];
    switch (below(14)) {
    case 13:
        if (below(4) == 0)
            say_goodbye();
        break;
    case 10:
        resize_pool();
        break;
    case 0:
        say_hello(i);
        break;
    case 1:
        make_pool();
        break;
    case 2:
    case 3: {
        uint64_t id = rig_send_open(&r, 1 + below(IDS));
        engine_turn(r.engine, 0);
        check_answer(id, TENANT_SEQUENCES, left, 1);
        break;
    }
    case 4:
        seq = 1 + below(IDS);
        rig_send_fork(&r, seq, 1 + below(IDS));
        break;
    case 5:
        rig_send_adopt(&r, 1 + below(IDS));
        break;
    case 6:
        r.epoch = 1 + below(6);
        rig_send_close(&r, 1 + below(IDS));
        r.epoch = 1;
        break;
    case 7:
        r.backend.fail_batch = below(2) ? ATTN_EINTERNAL : ATTN_OK;
        r.backend.fail_submit = below(2) ? ATTN_ENOMEM : ATTN_OK;
        break;
    case 8:
        r.backend.is_held = below(2);
        break;
    case 9:
        rig_now_ns += (uint64_t)(below(8) == 0 ? 20 : 1) * 1000000000; /* some leases end */
        break;
    default:
        send_step();
    }
    engine_turn(r.engine, 0);
}

static void forget_answers(void)
{
    while (r.answers != NULL) {
        struct rig_answer *a = r.answers;
        r.answers = a->next;
        wire_arena_reset(&a->arena);
        request_free(a->req);
        test_free(a);
    }
}

static void nothing_is_over_its_quota_and_all_comes_back(void **state)
{
    (void)state;
    uint64_t most[TENANT_N_QUOTAS] = {0};
    for (unsigned first = 1; first <= 6; first++) {
        random_state = first;
        rig_open(&r, tweak);
        r.principal.uid = UID;
        r.pool = 0;
        uint64_t session = rig_hello(&r, "first");
        for (uint32_t i = 0; session_at(r.sessions, i)->id != 0; i++)
            if (session_at(r.sessions, i)->id == session)
                who = session_at(r.sessions, i)->tenant;
        for (int i = 0; i < N; i++)
            sessions[i] = session;
        for (int i = 0; i < 3000; i++) {
            do_something();
            check();
            for (int q = 0; q < TENANT_N_QUOTAS; q++)
                most[q] = who->used[q] > most[q] ? who->used[q] : most[q];
            if (i % 64 == 0)
                forget_answers();
        }
        /* everybody leaves */
        r.backend.is_held = false;
        rig_run(&r);
        rig_now_ns += 2 * r.cfg.lease_us * 1000;
        rig_run(&r);
        check();
        assert_int_equal(who->used[TENANT_BYTES], 0);
        assert_int_equal(who->used[TENANT_SESSIONS], 0);
        assert_int_equal(who->used[TENANT_SEQUENCES], 0);
        struct tenants *t = r.fixture.tenants;
        rig_close(&r);
        tenants_close(t);
    }
    assert_int_equal(most[TENANT_POOLS], POOLS); /* the bounds were reached */
    assert_int_equal(most[TENANT_SEQUENCES], SEQUENCES);
    assert_int_equal(most[TENANT_SESSIONS], SESSIONS);
    assert_in_range(most[TENANT_BYTES], BYTES / 2 + 1, BYTES);
    assert_in_range(most[TENANT_BLOCKS], BLOCKS - 10, BLOCKS);
    assert_true(n_resized > 100 && n_resizes_refused > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_over_its_quota_and_all_comes_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
