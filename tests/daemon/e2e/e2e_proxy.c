/* e2e_proxy.c: requests of all kinds over a network that drops, duplicates, delays, reorders and
 * cuts, to the running daemon. Whatever arrives however often and late: every answer is right by a
 * model that knows nothing of it.
 *
 * PROXY_SECONDS in the environment: how long (3). PROXY_SEED: with what (by the clock).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/attn_time.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/sp_proxy.h"
#include "tests/random.h"

enum { SEQS = 6, RETRY_MS = 15, MAX_LEN = 120 };

struct live {
    struct e2e_seq seq;
    uint32_t len;
    bool is_open;
};

static struct e2e d;
static struct e2e_client c, judge; /* over the bad network; over none */
static struct sp_proxy proxy;
static struct live live[SEQS];
static uint64_t next_name = 1, random_state, n_steps;

static uint32_t below(uint32_t n)
{
    return random_below(&random_state, n);
}

static void expect_ok(attn_status st)
{
    if (st != ATTN_OK)
        fail_msg("%s, after %llu steps", attn_status_name(st), (unsigned long long)n_steps);
}

/* Tokens of the sequence that are written from now on differ from all before. */
static void new_stream(struct live *l)
{
    uint32_t stream = below(1u << 30);
    for (uint32_t i = l->len; i < E2E_MAX_TOKENS; i++)
        l->seq.stream[i] = stream;
}

static void step(struct live *l)
{
    uint32_t n = 1 + below(4);
    struct e2e_item item = {&l->seq, l->len, n};
    if (l->len + n > MAX_LEN)
        return;
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        e2e_step(&c, layer, &item, 1);
    l->len += n;
    n_steps++;
}

static void fork_into(struct live *l, struct live *child)
{
    uint32_t len = l->len == 0 ? 0 : below(l->len + 1);
    expect_ok(e2e_fork(&c, &l->seq, &child->seq, next_name++, len, below(1u << 30)));
    child->len = len;
    child->is_open = true;
}

static void truncate_some(struct live *l)
{
    l->len = l->len == 0 ? 0 : below(l->len + 1);
    expect_ok(e2e_truncate(&c, &l->seq, l->len));
    new_stream(l);
}

static void close_it(struct live *l)
{
    attn_status st = e2e_close_seq(&c, &l->seq);
    if (st != ATTN_ENOTFOUND) /* the answer to a copy */
        expect_ok(st);
    l->is_open = false;
}

static void adopt(struct live *l)
{
    uint32_t lens[E2E_LAYERS];
    expect_ok(e2e_adopt(&c, &l->seq, lens));
    for (uint32_t i = 0; i < E2E_LAYERS; i++)
        assert_int_equal(lens[i], l->len);
}

static void ask_for_the_pool(void)
{
    Attnd__PoolDescribe b = ATTND__POOL_DESCRIBE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.name = "e2e";
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_DESCRIBE;
    h.pool_describe = &b;
    e2e_call(&c, &h);
}

/* --- a pool beside that of the sequences ------------------------------------------------------ */

static struct {
    uint32_t pool;
    uint64_t request; /* the last that found it */
    bool is_held;
} second;

static const Attnd__Reply *make_second(struct e2e_client *who, const char *name)
{
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate b = ATTND__POOL_CREATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    spec.name = (char *)(uintptr_t)name;
    spec.num_layers = spec.num_q_heads = spec.num_kv_heads = 1;
    spec.head_dim_k = E2E_DIM;
    spec.n_blocks = 4;
    spec.q_dtype = ATTND__DTYPE__F32;
    spec.split = ATTND__SPLIT__SPLIT_WHOLE;
    b.spec = &spec;
    h.session = who->session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &b;
    return e2e_call(who, &h);
}

static void release(struct e2e_client *who, uint32_t pool, uint64_t request)
{
    Attnd__PoolRelease b = ATTND__POOL_RELEASE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.pool = pool;
    b.request = request;
    h.session = who->session;
    h.body_case = ATTND__REQUEST__BODY_POOL_RELEASE;
    h.pool_release = &b;
    expect_ok((attn_status)e2e_call(who, &h)->status);
}

/* There are two pools at most: a third has room if and only if the second is not held. */
static void judge_holds(void)
{
    uint64_t request = judge.next_id;
    const Attnd__Reply *r = make_second(&judge, "judge's");
    assert_int_equal(r->status, second.is_held ? ATTN_EQUOTA : ATTN_OK);
    if (r->status == ATTN_OK)
        release(&judge, r->pool->pool, request);
    e2e_forget(&judge);
}

static void hold_or_release(void)
{
    if (second.is_held && below(2) == 0) {
        release(&c, second.pool, second.request);
        second.is_held = false;
    } else { /* for the first time, or again */
        second.request = c.next_id;
        const Attnd__Reply *r = make_second(&c, "second");
        expect_ok((attn_status)r->status);
        second.pool = r->pool->pool;
        second.is_held = true;
    }
}

static void do_something(void)
{
    struct live *l = &live[below(SEQS)], *other = &live[below(SEQS)];
    uint32_t r = below(100);
    if (!l->is_open) {
        l->len = 0;
        /* the same name again, now and then, with all that is on its way for its former life */
        uint64_t name = l->seq.name != 0 && below(3) == 0 ? l->seq.name : next_name++;
        expect_ok(e2e_open_seq(&c, &l->seq, name, below(1u << 30)));
        l->is_open = true;
    } else if (r < 60) {
        step(l);
    } else if (r < 70) {
        truncate_some(l);
    } else if (r < 76 && !other->is_open) {
        fork_into(l, other);
    } else if (r < 82) {
        close_it(l);
    } else if (r < 88) {
        adopt(l);
    } else if (r < 98) {
        hold_or_release();
    } else {
        ask_for_the_pool();
    }
    e2e_forget(&c);
    if (below(6) == 0) /* copies find the second pool as it was left until then */
        judge_holds();
}

static void every_answer_is_right_over_a_bad_network(void **state)
{
    (void)state;
    const char *seconds = getenv("PROXY_SECONDS"), *seed = getenv("PROXY_SEED");
    uint64_t for_ns = (uint64_t)(seconds == NULL ? 3 : atoi(seconds)) * 1000000000u;
    random_state = seed != NULL ? strtoull(seed, NULL, 10) : attn_now_ns();
    print_message("PROXY_SEED=%llu\n", (unsigned long long)random_state);
    static const char *const flags[] = {"--cache.max_pools", "2", NULL};
    e2e_start(&d, flags);
    struct e2e by_proxy = d;
    proxy = (struct sp_proxy){
        .per_mille = {[SP_DROP] = 20, [SP_TWICE] = 50, [SP_HOLD] = 40, [SP_OLD] = 60, [SP_CUT] = 3},
        .random = random_state,
    };
    snprintf(proxy.path, sizeof proxy.path, "%.80s.proxy", d.url + strlen("ipc://"));
    snprintf(proxy.daemon_path, sizeof proxy.daemon_path, "%.90s", d.url + strlen("ipc://"));
    snprintf(by_proxy.url, sizeof by_proxy.url, "ipc://%.88s", proxy.path);
    sp_proxy_start(&proxy);
    e2e_connect_badly(&c, &by_proxy, RETRY_MS);
    e2e_connect(&judge, &d);
    e2e_make_pool(&c, ATTN_F32, 256);
    uint64_t until_ns = attn_now_ns() + for_ns, n_done = 0;
    for (; attn_now_ns() < until_ns; n_done++)
        do_something();
    print_message("%llu operations, %llu sent again; passed %llu, dropped %llu, twice %llu, held "
                  "%llu, old copies %llu, cuts %llu\n",
                  (unsigned long long)n_done, (unsigned long long)c.n_retries,
                  (unsigned long long)proxy.n[SP_PASS], (unsigned long long)proxy.n[SP_DROP],
                  (unsigned long long)proxy.n[SP_TWICE], (unsigned long long)proxy.n[SP_HOLD],
                  (unsigned long long)proxy.n[SP_OLD], (unsigned long long)proxy.n[SP_CUT]);
    for (uint32_t i = 0; i < SEQS; i++) /* all that is left, from its first token on */
        for (uint32_t layer = 0; layer < E2E_LAYERS && live[i].is_open && live[i].len > 0;
             layer++) {
            struct e2e_item item = {&live[i].seq, 0, live[i].len};
            uint64_t id = e2e_send_step(&c, layer, WIRE_STEP_ATTEND, &item, 1, 0);
            e2e_check_step(e2e_await(&c, id), layer, WIRE_STEP_ATTEND, &item, 1);
        }
    e2e_disconnect(&judge);
    e2e_disconnect(&c);
    sp_proxy_stop(&proxy);
    e2e_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_answer_is_right_over_a_bad_network)};
    return cmocka_run_group_tests_name("proxy", tests, NULL, NULL);
}
