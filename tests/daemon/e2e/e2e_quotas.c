/* e2e_quotas.c: 32 clients of one tenant race for each of its quotas: the real daemon over tls+tcp
 * gives all of it and not one piece more. Each quota has a tenant, so that no test sees what
 * another has left. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <openssl/evp.h>

#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/certs.h"

enum {
    N = 32,
    ROUNDS = 4,
    BLOCKS = 37,
    SEQUENCES = 41,
    SESSIONS = 19,
    POOLS = 7,
    BYTES = 65536,
    LONG_IDS = 4096, /* cache.max_seq_tokens: three pages beyond the first */
    LONGS = 5, /* sequences with so many */
    TABLE_BYTES = LONGS * 3 * 4096,
    TIER_BYTES = 100001,
    PROMPTS = 512
};

static struct e2e d;
static char tenants_file[64];
static struct e2e_client c[N];

static void write_tenant(FILE *f, const char *name, const char *quota, int most)
{
    uint8_t hash[32];
    assert_int_equal(EVP_Digest(name, strlen(name), hash, NULL, EVP_sha256(), NULL), 1);
    fprintf(f, "[%s]\n%s = %d\ntoken_sha256 = ", name, quota, most);
    for (int i = 0; i < 32; i++)
        fprintf(f, "%02x", hash[i]);
    fputc('\n', f);
}

static int start(void **state)
{
    (void)state;
    snprintf(tenants_file, sizeof tenants_file, "/tmp/attnd_quotas_%ld", (long)getpid());
    FILE *f = fopen(tenants_file, "w");
    assert_non_null(f);
    fchmod(fileno(f), 0600);
    write_tenant(f, "blocks", "blocks", BLOCKS * e2e_blocks_each());
    write_tenant(f, "sequences", "sequences", SEQUENCES);
    write_tenant(f, "sessions", "sessions", SESSIONS);
    write_tenant(f, "pools", "pools", POOLS);
    write_tenant(f, "bytes", "bytes_in_flight", BYTES);
    write_tenant(f, "tables", "table_bytes", TABLE_BYTES);
    write_tenant(f, "host", "host_bytes", TIER_BYTES);
    write_tenant(f, "disk", "disk_bytes", TIER_BYTES);
    fclose(f);
    const char *const flags[] = {"--listen.tenants",
                                 tenants_file,
                                 "--cache.max_pools",
                                 "256",
                                 "--listen.peer_share",
                                 "100",
                                 "--listen.handshake_timeout",
                                 "5m",
                                 "--cache.host_memory",
                                 "1M",
                                 "--cache.disk_path",
                                 "/tmp",
                                 "--cache.disk_size",
                                 "16M",
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

/* All clients as this tenant, each with a session; the token is the tenant's name. */
static void enter(const char *tenant)
{
    for (int i = 0; i < N; i++) {
        e2e_connect_tls(&c[i], &d);
        assert_int_equal(e2e_hello(&c[i], tenant)->status, ATTN_OK);
    }
}

static void leave(void)
{
    for (int i = 0; i < N; i++)
        e2e_disconnect(&c[i]);
}

static uint64_t send_pool(struct e2e_client *client, uint32_t number, uint32_t n_blocks)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate body = ATTND__POOL_CREATE__INIT;
    char name[32];
    snprintf(name, sizeof name, "race %u", number);
    spec.name = name;
    spec.num_layers = spec.num_q_heads = spec.num_kv_heads = 1;
    spec.head_dim_k = 8;
    spec.q_dtype = ATTND__DTYPE__F32;
    spec.n_blocks = n_blocks;
    body.spec = &spec;
    h.session = client->session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &body;
    return e2e_send(client, &h, NULL, 0);
}

static uint64_t send_open(struct e2e_client *client, uint32_t pool, uint64_t seq)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Open body = ATTND__OPEN__INIT;
    body.seq = seq;
    body.pool = pool;
    h.session = client->session;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &body;
    return e2e_send(client, &h, NULL, 0);
}

static uint64_t send_hello(struct e2e_client *client, const char *token, uint64_t nonce)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Hello hello = ATTND__HELLO__INIT;
    hello.protocol_version = 1;
    hello.token = (char *)(uintptr_t)token;
    hello.nonce = nonce;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &hello;
    return e2e_send(client, &h, NULL, 0);
}

/* Waits for one answer of each client; the number that was given, the others are refused for the
 * quota. was_given: by client. */
static uint32_t count_given(const uint64_t ids[N], bool was_given[N])
{
    uint32_t n = 0;
    for (int i = 0; i < N; i++) {
        attn_status st = (attn_status)e2e_await(&c[i], ids[i])->header->status;
        was_given[i] = st == ATTN_OK;
        n += was_given[i];
        if (st != ATTN_OK)
            assert_int_equal(st, ATTN_EQUOTA);
    }
    return n;
}

/* ---- tests ---- */

/* Pools of one to three blocks, all at once, then of one until nothing is left. */
static void blocks_are_never_over_by_one(void **state)
{
    (void)state;
    uint64_t ids[N];
    bool is_made[N];
    uint32_t sum = 0;
    enter("blocks");
    for (uint32_t i = 0; i < N; i++)
        ids[i] = send_pool(&c[i], i, 1 + i % 3);
    count_given(ids, is_made);
    for (uint32_t i = 0; i < N; i++)
        sum += is_made[i] ? 1 + i % 3 : 0;
    for (uint32_t i = 0; i < N; i++)
        ids[i] = send_pool(&c[i], N + i, 1);
    assert_int_equal(sum + count_given(ids, is_made), BLOCKS);
    leave();
}

/* The second time nobody is given another one, and who asks for the same has it. */
static void pools_are_never_over_by_one(void **state)
{
    (void)state;
    uint64_t ids[N];
    bool is_made[N], is_there[N];
    enter("pools");
    for (uint32_t i = 0; i < N; i++)
        ids[i] = send_pool(&c[i], i, 1);
    assert_int_equal(count_given(ids, is_made), POOLS);
    for (uint32_t i = 0; i < N; i++)
        ids[i] = send_pool(&c[i], i, 1);
    assert_int_equal(count_given(ids, is_there), POOLS);
    assert_memory_equal(is_made, is_there, sizeof is_made);
    leave();
}

static void sequences_are_never_over_by_one(void **state)
{
    (void)state;
    enter("sequences");
    e2e_make_pool(&c[0], ATTN_BF16, 8);
    uint32_t pool = c[0].pool;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t ids[2][N];
        bool is_open[2][N];
        for (uint32_t k = 0; k < 2; k++)
            for (uint32_t i = 0; i < N; i++)
                ids[k][i] = send_open(&c[i], pool, 1 + k * N + i);
        uint32_t n = count_given(ids[0], is_open[0]);
        assert_int_equal(n + count_given(ids[1], is_open[1]), SEQUENCES);
        for (uint32_t k = 0; k < 2; k++) {
            for (uint32_t i = 0; i < N; i++) {
                const struct wire_reply *w =
                    e2e_await(&c[i], send_open(&c[i], pool, 1 + k * N + i));
                /* the name is taken, by this client or by nobody */
                assert_int_equal(w->header->status, is_open[k][i] ? ATTN_EEXIST : ATTN_EQUOTA);
            }
        }
        for (uint32_t i = 0; i < 2 * N; i++) {
            struct e2e_seq s = {.name = 1 + i};
            uint32_t len[E2E_LAYERS];
            if (is_open[i / N][i % N] && e2e_adopt(&c[0], &s, len) == ATTN_OK)
                assert_int_equal(e2e_close_seq(&c[0], &s), ATTN_OK);
        }
    }
    leave();
}

static void sessions_are_never_over_by_one(void **state)
{
    (void)state;
    uint64_t ids[N];
    bool is_in[N], is_in_again[N];
    for (int i = 0; i < N; i++)
        e2e_connect_tls(&c[i], &d);
    for (int i = 0; i < N; i++)
        ids[i] = send_hello(&c[i], "sessions", 1000 + (uint64_t)i);
    assert_int_equal(count_given(ids, is_in), SESSIONS);
    /* a hello that is repeated asks for nothing, at the quota, too */
    for (int i = 0; i < N; i++)
        ids[i] = send_hello(&c[i], "sessions", 1000 + (uint64_t)i);
    assert_int_equal(count_given(ids, is_in_again), SESSIONS);
    assert_memory_equal(is_in, is_in_again, sizeof is_in);
    leave();
}

/* Every client sends steps until none is on its way: those that fit are answered, and the daemon's
 * own count is back at nothing. What is under way at a time test_engine_quotas counts. */
static void bytes_in_flight_come_back_from_all(void **state)
{
    (void)state;
    static struct e2e_seq s[N];
    uint32_t n_ok = 0, n_refused = 0;
    enter("bytes");
    e2e_make_pool(&c[0], ATTN_BF16, 64);
    for (uint32_t i = 0; i < N; i++) {
        c[i].pool = c[0].pool;
        assert_int_equal(e2e_open_seq(&c[i], &s[i], 1 + i, i), ATTN_OK);
    }
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t ids[8][N];
        for (uint32_t k = 0; k < 8; k++) {
            for (uint32_t i = 0; i < N; i++) {
                struct e2e_item it = {&s[i], 0, 1 + (i + k) % 16};
                ids[k][i] = e2e_send_zeros(&c[i], k % E2E_LAYERS, &it, 0);
            }
        }
        for (uint32_t k = 0; k < 8; k++) {
            for (uint32_t i = 0; i < N; i++) {
                attn_status st = (attn_status)e2e_await(&c[i], ids[k][i])->header->status;
                assert_true(st == ATTN_OK || st == ATTN_EOVERLOAD);
                n_ok += st == ATTN_OK;
                n_refused += st != ATTN_OK;
            }
        }
    }
    assert_int_equal(n_ok + n_refused, ROUNDS * 8 * N);
    assert_true(n_ok > 0);
    /* nothing is held: a step of nearly all of the quota passes */
    struct e2e_item large = {&s[0], 0, 120};
    assert_int_equal(e2e_await(&c[0], e2e_send_zeros(&c[0], 0, &large, 0))->header->status,
                     ATTN_OK);
    leave();
}

/* One prompt of each client at once, each with a whole block that is published and soon evicted. */
static void run_prompts(uint32_t round)
{
    static struct e2e_seq s[N];
    static uint32_t ids[E2E_BLOCK_TOKENS];
    uint64_t sent[N];
    for (uint32_t i = 0; i < N; i++) {
        s[i].name = 1 + i;
        Attnd__Request h = ATTND__REQUEST__INIT;
        Attnd__Open body = ATTND__OPEN__INIT;
        for (uint32_t t = 0; t < E2E_BLOCK_TOKENS; t++)
            ids[t] = (round * N + i) % PROMPTS * 1000 + t;
        body.seq = s[i].name;
        body.pool = c[0].pool;
        body.n_tokens = E2E_BLOCK_TOKENS;
        body.tokens = ids;
        h.session = c[i].session;
        h.body_case = ATTND__REQUEST__BODY_OPEN;
        h.open = &body;
        sent[i] = e2e_send(&c[i], &h, NULL, 0);
    }
    for (uint32_t i = 0; i < N; i++) {
        const Attnd__Reply *r = e2e_await(&c[i], sent[i])->header;
        assert_int_equal(r->status, ATTN_OK);
        s[i].epoch = r->seq->epoch;
    }
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        for (uint32_t i = 0; i < N; i++) {
            struct e2e_item it = {&s[i], 0, E2E_BLOCK_TOKENS};
            sent[i] = e2e_send_zeros(&c[i], layer, &it, 0);
        }
        for (uint32_t i = 0; i < N; i++)
            assert_int_equal(e2e_await(&c[i], sent[i])->header->status, ATTN_OK);
    }
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(e2e_close_seq(&c[i], &s[i]), ATTN_OK);
        e2e_forget(&c[i]);
    }
}

static uint64_t used_of(const char *counter)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Stats stats = ATTND__STATS__INIT;
    h.session = c[0].session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &stats;
    const char *at = strstr(e2e_call(&c[0], &h)->stats->json, counter);
    assert_non_null(at);
    return strtoull(at + strlen(counter), NULL, 10);
}

/* Blocks make way for each other: nothing is refused, and no byte is over. */
static void bytes_in_tiers_are_never_over_by_one(void **state)
{
    static const struct {
        const char *tenant, *counter;
    } tiers[] = {{"host", "\"tenant_host_bytes\":"}, {"disk", "\"tenant_disk_bytes\":"}};
    (void)state;
    for (int k = 0; k < 2; k++) {
        uint64_t most = 0;
        enter(tiers[k].tenant);
        e2e_make_pool(&c[0], ATTN_BF16, 2 * N);
        for (int i = 1; i < N; i++)
            c[i].pool = c[0].pool;
        for (uint32_t round = 0; most < TIER_BYTES * 3 / 4; round++) {
            run_prompts(round);
            uint64_t used = used_of(tiers[k].counter);
            assert_in_range(used, 0, TIER_BYTES);
            most = used > most ? used : most;
            assert_in_range(round, 0, 500);
        }
        for (uint32_t round = 0; round < ROUNDS; round++) {
            run_prompts(round);
            assert_in_range(used_of(tiers[k].counter), 0, TIER_BYTES);
        }
        leave();
    }
}

static uint64_t send_long(struct e2e_client *client, uint32_t pool, uint64_t seq)
{
    static uint32_t ids[LONG_IDS];
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Open body = ATTND__OPEN__INIT;
    body.seq = seq;
    body.pool = pool;
    body.tokens = ids;
    body.n_tokens = LONG_IDS;
    h.session = client->session;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &body;
    return e2e_send(client, &h, NULL, 0);
}

/* Sequences of ids without K and V, opened by all at once and closed by those that have one. */
static void bytes_of_tables_are_never_over_by_one(void **state)
{
    (void)state;
    enter("tables");
    e2e_make_pool(&c[0], ATTN_BF16, 8);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint64_t ids[N];
        bool is_open[N];
        for (uint32_t i = 0; i < N; i++)
            ids[i] = send_long(&c[i], c[0].pool, 1 + i);
        assert_int_equal(count_given(ids, is_open), LONGS);
        assert_int_equal(used_of("\"tenant_table_bytes\":"), TABLE_BYTES);
        const Attnd__Reply *r = e2e_await(&c[0], send_long(&c[0], c[0].pool, 100))->header;
        assert_int_equal(r->status, ATTN_EQUOTA);
        assert_non_null(strstr(r->message, "table_bytes"));
        for (uint32_t i = 0; i < N; i++) {
            struct e2e_seq s = {.name = 1 + i};
            uint32_t len[E2E_LAYERS];
            if (is_open[i] && e2e_adopt(&c[0], &s, len) == ATTN_OK)
                assert_int_equal(e2e_close_seq(&c[0], &s), ATTN_OK);
        }
        assert_int_equal(used_of("\"tenant_table_bytes\":"), 0);
    }
    leave();
}

int main(void)
{
    setenv("E2E_TRANSPORT", "tls", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_never_over_by_one),
        cmocka_unit_test(pools_are_never_over_by_one),
        cmocka_unit_test(sequences_are_never_over_by_one),
        cmocka_unit_test(sessions_are_never_over_by_one),
        cmocka_unit_test(bytes_in_flight_come_back_from_all),
        cmocka_unit_test(bytes_of_tables_are_never_over_by_one),
        cmocka_unit_test(bytes_in_tiers_are_never_over_by_one),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
