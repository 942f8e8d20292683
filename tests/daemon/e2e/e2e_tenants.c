/* e2e_tenants.c: who may connect, what tenants see of each other, and their quotas, of the real
 * daemon over tls+tcp. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/attn_time.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/certs.h"

enum { BLOCKS = 40, SEQUENCES = 20, SESSIONS = 40, BYTES = 200000, N_RACERS = 5 };
#define PATIENCE_NS UINT64_C(300000000000)

static struct e2e d;
static char tenants_file[64];

static char *read_file(const char *path)
{
    char *text = calloc(1, 4096);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    (void)!fread(text, 1, 4095, f);
    fclose(f);
    return text;
}

static char *token_of(enum certs c, const char *tenant)
{
    char name[64];
    snprintf(name, sizeof name, "%s.token", tenant);
    char *path = certs_file(c, name), *token = read_file(path);
    free(path);
    token[strcspn(token, "\n")] = '\0';
    return token;
}

static int start(void **state)
{
    (void)state;
    char *made = certs_file(CERTS_GOOD, "tenants.conf"), *text = read_file(made);
    snprintf(tenants_file, sizeof tenants_file, "/tmp/attnd_tenants_%ld", (long)getpid());
    FILE *f = fopen(tenants_file, "w");
    assert_non_null(f);
    fchmod(fileno(f), 0600);
    fprintf(f,
            "%s\n[alpha]\nblocks = %u\nsequences = %d\nsessions = %d\nbytes_in_flight = %d\n"
            "[local]\nusers = 12345\n",
            text, BLOCKS * e2e_blocks_each(), SEQUENCES, SESSIONS, BYTES);
    fclose(f);
    free(text);
    free(made);
    const char *const flags[] = {"--listen.tenants",
                                 tenants_file,
                                 "--engine.lease",
                                 "4s",
                                 "--listen.handshake_timeout",
                                 "5m",
                                 NULL};
    e2e_start(&d, flags);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    e2e_stop(&d);
    unlink(tenants_file);
    return 0;
}

static attn_status hello(struct e2e_client *c, enum certs set, const char *tenant)
{
    char *token = token_of(set, tenant);
    e2e_connect_tls(c, &d);
    attn_status st = (attn_status)e2e_hello(c, token)->status;
    free(token);
    return st;
}

static void enter(struct e2e_client *c, const char *tenant)
{
    assert_int_equal(hello(c, CERTS_GOOD, tenant), ATTN_OK);
}

static void expect(const Attnd__Reply *r, attn_status st, const char *part)
{
    if (r->status != st || strstr(r->message, part) == NULL)
        fail_msg("%s \"%s\", expected %s \"%s\"", attn_status_name((attn_status)r->status),
                 r->message, attn_status_name(st), part);
}

static const Attnd__Reply *describe(struct e2e_client *c, const char *name)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolDescribe body = ATTND__POOL_DESCRIBE__INIT;
    body.name = (char *)(uintptr_t)name;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_POOL_DESCRIBE;
    h.pool_describe = &body;
    return e2e_call(c, &h);
}

static uint64_t send_open(struct e2e_client *c, uint32_t pool, uint64_t seq)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Open body = ATTND__OPEN__INIT;
    body.seq = seq;
    body.pool = pool;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &body;
    return e2e_send(c, &h, NULL, 0);
}

static const Attnd__Reply *adopt(struct e2e_client *c, uint64_t seq)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Adopt body = ATTND__ADOPT__INIT;
    body.seq = seq;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_ADOPT;
    h.adopt = &body;
    return e2e_call(c, &h);
}

static const Attnd__Reply *plain(struct e2e_client *c, Attnd__Request__BodyCase what)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Stats stats = ATTND__STATS__INIT;
    Attnd__Drain drain = ATTND__DRAIN__INIT;
    h.session = c->session;
    h.body_case = what;
    if (what == ATTND__REQUEST__BODY_STATS)
        h.stats = &stats;
    else
        h.drain = &drain;
    return e2e_call(c, &h);
}

/* Asks again and again: each answer is a turn of the daemon. */
static void wait_for(struct e2e_client *c, const char *part)
{
    uint64_t until_ns = attn_now_ns() + PATIENCE_NS;
    while (attn_now_ns() < until_ns) {
        if (strstr(plain(c, ATTND__REQUEST__BODY_STATS)->stats->json, part) != NULL)
            return;
        e2e_forget(c);
    }
    fail_msg("the stats do not get to %s: %s", part,
             plain(c, ATTND__REQUEST__BODY_STATS)->stats->json);
}

/* Pools of one layer; the reply. */
static const Attnd__Reply *make_pool(struct e2e_client *c, const char *name, uint32_t n_blocks)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate body = ATTND__POOL_CREATE__INIT;
    spec.name = (char *)(uintptr_t)name;
    spec.num_layers = spec.num_q_heads = spec.num_kv_heads = 1;
    spec.head_dim_k = 8;
    spec.q_dtype = ATTND__DTYPE__F32;
    spec.n_blocks = n_blocks;
    body.spec = &spec;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &body;
    return e2e_call(c, &h);
}

/* ---- who may connect ---- */

static void a_hello_without_a_tenants_token_is_refused(void **state)
{
    (void)state;
    struct e2e_client c;
    e2e_connect_tls(&c, &d);
    expect(e2e_hello(&c, ""), ATTN_EAUTH, "hello has no token");
    expect(e2e_hello(&c, "wrong"), ATTN_EAUTH, "hello.token is refused");
    e2e_disconnect(&c);
    assert_int_equal(hello(&c, CERTS_FOREIGN, "alpha"), ATTN_EAUTH); /* of another daemon */
    /* nothing else is answered either */
    expect(plain(&c, ATTND__REQUEST__BODY_STATS), ATTN_ENOTFOUND, "say hello first");
    expect(plain(&c, ATTND__REQUEST__BODY_DRAIN), ATTN_ENOTFOUND, "say hello first");
    e2e_disconnect(&c);
    enter(&c, "alpha");
    e2e_disconnect(&c);
}

static void the_socket_files_owner_is_the_operator(void **state)
{
    (void)state;
    struct e2e_client operator, c;
    unsetenv("E2E_TRANSPORT");
    e2e_connect(&operator, & d);
    setenv("E2E_TRANSPORT", "tls", 1);
    assert_non_null(
        strstr(plain(&operator, ATTND__REQUEST__BODY_STATS)->stats->json, "requests_received"));
    enter(&c, "beta");
    const Attnd__Reply *r = plain(&c, ATTND__REQUEST__BODY_STATS);
    assert_non_null(strstr(r->stats->json, "\"tenant\":\"beta\""));
    assert_null(strstr(r->stats->json, "requests_received"));
    assert_null(strstr(r->stats->json, "alpha"));
    expect(plain(&c, ATTND__REQUEST__BODY_DRAIN), ATTN_EAUTH, "drain is for root");
    e2e_disconnect(&c);
    e2e_disconnect(&operator);
}

static void a_connection_stays_its_tenants(void **state)
{
    (void)state;
    struct e2e_client a, b;
    char *token = token_of(CERTS_GOOD, "beta");
    enter(&a, "alpha");
    expect(e2e_hello(&a, token), ATTN_EAUTH, "another tenant");
    e2e_connect_tls(&b, &d); /* one that has said no hello, and has the session's number */
    b.session = a.session;
    assert_int_equal(plain(&b, ATTND__REQUEST__BODY_STATS)->status, ATTN_OK);
    expect(e2e_hello(&b, token), ATTN_EAUTH, "another tenant");
    free(token);
    e2e_disconnect(&a);
    e2e_disconnect(&b);
}

/* ---- what they see of each other ---- */

static void a_session_of_another_tenant_does_not_exist(void **state)
{
    (void)state;
    struct e2e_client a, b;
    enter(&a, "alpha");
    enter(&b, "beta");
    uint64_t own = b.session;
    b.session = a.session;
    expect(plain(&b, ATTND__REQUEST__BODY_STATS), ATTN_ENOTFOUND, "was never made");
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Hello body = ATTND__HELLO__INIT;
    char *token = token_of(CERTS_GOOD, "beta");
    body.protocol_version = 1;
    body.token = token;
    body.resume_session = a.session;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &body;
    expect(e2e_call(&b, &h), ATTN_ENOTFOUND, "was never made");
    b.session = own;
    assert_int_equal(plain(&b, ATTND__REQUEST__BODY_STATS)->status, ATTN_OK);
    free(token);
    e2e_disconnect(&a);
    e2e_disconnect(&b);
}

/* The same names, each with its own; and what is the other's is answered like what is not. */
static const Attnd__Reply *drop_pool(struct e2e_client *c, char *tenant, char *name)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolDrop drop = ATTND__POOL_DROP__INIT;
    drop.tenant = tenant;
    drop.name = name;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_POOL_DROP;
    h.pool_drop = &drop;
    return e2e_call(c, &h);
}

static void names_belong_to_their_tenant(void **state)
{
    (void)state;
    struct e2e_client a, b;
    static struct e2e_seq of_a, of_b, taken;
    enter(&a, "alpha");
    enter(&b, "beta");
    e2e_make_pool(&a, ATTN_BF16, 24);
    e2e_make_pool(&b, ATTN_BF16, 24);
    assert_int_not_equal(a.pool, b.pool);
    assert_int_equal(e2e_open_seq(&a, &of_a, 7, 1), ATTN_OK);
    assert_int_equal(e2e_open_seq(&b, &of_b, 7, 2), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        struct e2e_item ia = {&of_a, 0, 40}, ib = {&of_b, 0, 30};
        e2e_step(&a, layer, &ia, 1);
        e2e_step(&b, layer, &ib, 1);
    }
    assert_int_equal(e2e_open_seq(&a, &taken, 8, 3), ATTN_OK);

    expect(adopt(&b, 8), ATTN_ENOTFOUND, "sequence 8 is not open");
    expect(adopt(&b, 9), ATTN_ENOTFOUND, "sequence 9 is not open");
    expect(e2e_await(&b, send_open(&b, a.pool, 11))->header, ATTN_ENOTFOUND, "no such pool");
    expect(e2e_await(&b, send_open(&b, 99, 11))->header, ATTN_ENOTFOUND, "no such pool");
    assert_int_equal(make_pool(&a, "of alpha", 4)->status, ATTN_OK);
    expect(describe(&b, "of alpha"), ATTN_ENOTFOUND, "no pool is named \"of alpha\"");
    expect(describe(&b, "of nobody"), ATTN_ENOTFOUND, "no pool is named \"of nobody\"");
    assert_int_equal(e2e_item(&b, &taken, 0, 0, 1), ATTN_ENOTFOUND);

    struct e2e_item past = {&of_a, 40, 1}; /* unhurt, and not the other's */
    e2e_step(&a, 0, &past, 1);
    assert_int_equal(e2e_close_seq(&a, &of_a), ATTN_OK);
    assert_int_equal(e2e_close_seq(&a, &taken), ATTN_OK);
    struct e2e_item more = {&of_b, 30, 1};
    e2e_step(&b, 0, &more, 1);

    struct e2e_client operator;
    unsetenv("E2E_TRANSPORT");
    e2e_connect(&operator, & d);
    setenv("E2E_TRANSPORT", "tls", 1);
    expect(drop_pool(&operator, "", "of alpha"), ATTN_ENOTFOUND, "no pool is named \"of alpha\"");
    expect(drop_pool(&operator, "beta", "of alpha"), ATTN_ENOTFOUND,
           "no pool of tenant beta is named \"of alpha\"");
    expect(drop_pool(&operator, "gamma rays", "of alpha"), ATTN_ENOTFOUND,
           "pool_drop.tenant: no tenant is named \"gamma rays\"");
    assert_int_equal(drop_pool(&operator, "alpha", "of alpha")->status, ATTN_OK);
    expect(describe(&a, "of alpha"), ATTN_ENOTFOUND, "no pool is named \"of alpha\"");
    e2e_disconnect(&operator);
    e2e_disconnect(&a);
    e2e_disconnect(&b);
}

/* ---- quotas ---- */

static void blocks_of_pools_are_never_over_the_quota(void **state)
{
    (void)state;
    struct e2e_client c[N_RACERS];
    uint64_t ids[N_RACERS * 4];
    uint32_t n = 0, sum = 24; /* pools that nobody holds make way: these are held */
    for (int i = 0; i < N_RACERS; i++)
        enter(&c[i], "alpha");
    e2e_make_pool(&c[0], ATTN_BF16, 24);
    char says[64], counts[64];
    snprintf(says, sizeof says, "of its %u blocks", BLOCKS * e2e_blocks_each());
    snprintf(counts, sizeof counts, "\"tenant_pool_blocks\":%u", BLOCKS * e2e_blocks_each());
    expect(make_pool(&c[0], "large", BLOCKS), ATTN_EQUOTA, says);
    for (int round = 0; round < 4; round++) { /* all at once */
        for (int i = 0; i < N_RACERS; i++) {
            Attnd__Request h = ATTND__REQUEST__INIT;
            Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
            Attnd__PoolCreate body = ATTND__POOL_CREATE__INIT;
            char name[32];
            snprintf(name, sizeof name, "race %u", n);
            spec.name = name;
            spec.num_layers = spec.num_q_heads = spec.num_kv_heads = 1;
            spec.head_dim_k = 8;
            spec.q_dtype = ATTND__DTYPE__F32;
            spec.n_blocks = 5;
            body.spec = &spec;
            h.session = c[i].session;
            h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
            h.pool_create = &body;
            ids[n++] = e2e_send(&c[i], &h, NULL, 0);
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        const Attnd__Reply *r = e2e_await(&c[i % N_RACERS], ids[i])->header;
        if (r->status == ATTN_OK)
            sum += 5;
        else
            assert_int_equal(r->status, ATTN_EQUOTA);
    }
    assert_true(sum > BLOCKS - 10 && sum <= BLOCKS);
    for (int i = 0; i < BLOCKS; i++) { /* to the last block, and not one more */
        char name[32];
        snprintf(name, sizeof name, "one %d", i);
        if (make_pool(&c[0], name, 1)->status == ATTN_EQUOTA)
            break;
    }
    wait_for(&c[0], counts);
    expect(make_pool(&c[0], "none", 1), ATTN_EQUOTA, says);
    for (int i = 0; i < N_RACERS; i++)
        e2e_disconnect(&c[i]);
}

static void sequences_are_never_over_the_quota_and_come_back(void **state)
{
    (void)state;
    struct e2e_client c[N_RACERS];
    uint64_t ids[N_RACERS * 8];
    uint32_t epochs[N_RACERS * 8] = {0};
    for (int i = 0; i < N_RACERS; i++)
        enter(&c[i], "alpha");
    uint32_t pool = describe(&c[0], "one 0")->pool->pool;
    wait_for(&c[0], "\"tenant_sequences\":0");
    for (int round = 0; round < 3; round++) {
        uint32_t n_open = 0, n = 0;
        for (; n < N_RACERS * 8; n++)
            ids[n] = send_open(&c[n % N_RACERS], pool, 100 + n);
        for (uint32_t i = 0; i < n; i++) {
            const Attnd__Reply *r = e2e_await(&c[i % N_RACERS], ids[i])->header;
            epochs[i] = r->status == ATTN_OK ? r->seq->epoch : 0;
            n_open += epochs[i] != 0;
            if (r->status != ATTN_OK)
                expect(r, ATTN_EQUOTA, "all 20 sequences of its quota");
        }
        assert_int_equal(n_open, SEQUENCES);
        for (uint32_t i = 0; i < n; i++) {
            struct e2e_seq s = {.name = 100 + i, .epoch = epochs[i]};
            if (epochs[i] != 0)
                assert_int_equal(e2e_close_seq(&c[i % N_RACERS], &s), ATTN_OK);
        }
    }
    wait_for(&c[0], "\"tenant_sequences\":0");
    for (int i = 0; i < N_RACERS; i++)
        e2e_disconnect(&c[i]);
}

static void sessions_are_counted_until_their_lease_ends(void **state)
{
    (void)state;
    struct e2e_client c[SESSIONS + 1];
    uint32_t n = 0;
    uint64_t until_ns = attn_now_ns() + PATIENCE_NS;
    /* of the tests before some may still be there; in the end all are these */
    while (n < SESSIONS) {
        attn_status st = hello(&c[n], CERTS_GOOD, "alpha");
        if (st == ATTN_OK) {
            n++;
        } else {
            assert_int_equal(st, ATTN_EQUOTA);
            assert_true(attn_now_ns() < until_ns);
            e2e_disconnect(&c[n]);
        }
        for (uint32_t i = 0; i < n; i++)
            plain(&c[i], ATTND__REQUEST__BODY_STATS); /* renews */
    }
    e2e_connect_tls(&c[SESSIONS], &d);
    char *token = token_of(CERTS_GOOD, "alpha");
    expect(e2e_hello(&c[SESSIONS], token), ATTN_EQUOTA, "its 40 sessions");
    free(token);
    for (uint32_t i = 0; i <= SESSIONS; i++)
        e2e_disconnect(&c[i]);
    until_ns = attn_now_ns() + PATIENCE_NS;
    while (hello(&c[0], CERTS_GOOD, "alpha") == ATTN_EQUOTA) { /* leases end */
        assert_true(attn_now_ns() < until_ns);
        e2e_disconnect(&c[0]);
    }
    e2e_disconnect(&c[0]);
}

static void bytes_in_flight_come_back_however_steps_end(void **state)
{
    (void)state;
    enum { N = 200 };
    struct e2e_client c;
    static struct e2e_seq s;
    uint64_t ids[N];
    uint32_t n_ok = 0;
    enter(&c, "alpha");
    const Attnd__Reply *r = describe(&c, "e2e");
    c.pool = r->status == ATTN_OK ? r->pool->pool : 0;
    if (c.pool == 0)
        e2e_make_pool(&c, ATTN_BF16, 24);
    assert_int_equal(e2e_open_seq(&c, &s, 50, 1), ATTN_OK);
    struct e2e_item large = {&s, 0, 600};
    assert_int_equal(e2e_await(&c, e2e_send_zeros(&c, 0, &large, 0))->header->status, ATTN_EQUOTA);
    struct e2e_item it = {&s, 0, 40}, wrong = {&s, 300, 40};
    for (int i = 0; i < N; i++) /* every third leaves a gap, and fails */
        ids[i] = e2e_send_zeros(&c, 0, i % 3 == 2 ? &wrong : &it, 0);
    for (int i = 0; i < N; i++) {
        int32_t st = e2e_await(&c, ids[i])->header->status;
        n_ok += st == ATTN_OK;
        assert_true(st == ATTN_OK || st == ATTN_EOVERLOAD || st == ATTN_EINVAL);
    }
    assert_true(n_ok > 0);
    wait_for(&c, "\"tenant_bytes_in_flight\":0");
    assert_int_equal(e2e_close_seq(&c, &s), ATTN_OK);
    e2e_disconnect(&c);
}

int main(void)
{
    setenv("E2E_TRANSPORT", "tls", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_hello_without_a_tenants_token_is_refused),
        cmocka_unit_test(the_socket_files_owner_is_the_operator),
        cmocka_unit_test(a_connection_stays_its_tenants),
        cmocka_unit_test(a_session_of_another_tenant_does_not_exist),
        cmocka_unit_test(names_belong_to_their_tenant),
        cmocka_unit_test(blocks_of_pools_are_never_over_the_quota),
        cmocka_unit_test(sequences_are_never_over_the_quota_and_come_back),
        cmocka_unit_test(bytes_in_flight_come_back_however_steps_end),
        cmocka_unit_test(sessions_are_counted_until_their_lease_ends),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
