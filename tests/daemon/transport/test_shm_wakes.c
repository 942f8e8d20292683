/* test_shm_wakes.c: who sleeps is woken, and who has nothing to do sleeps: a real engine, transport
 * and loop in this process, whose engine has lost its timer: epoll_wait (wrapped by the linker)
 * ends for a wake-up alone, so that a wake-up that is lost is a request that is never answered.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/transport/shm_internal.h"
#include "proto/attn_time.h"
#include "tests/daemon/config_defaults.h"
#include "tests/daemon/engine/engine_fixture.h"
#include "tests/daemon/engine/fake_host.h"
#include "tests/daemon/transport/shm_link.h"
#include "tests/random.h"

enum { PATIENCE_MS = 20000, N_CLIENTS = 8, MIN_SLEEP_MS = 100, SPINS = 20000 };

/* --- the engine's sleep ----------------------------------------------------------------------- */

static _Atomic uint32_t n_sleeps, n_woken;
static _Atomic int asked_ms; /* how long the engine meant to sleep */
static _Atomic bool is_asleep;

int __real_epoll_wait(int fd, struct epoll_event *events, int n, int timeout_ms);
int __wrap_epoll_wait(int fd, struct epoll_event *events, int n, int timeout_ms);

int __wrap_epoll_wait(int fd, struct epoll_event *events, int n, int timeout_ms)
{
    atomic_store(&asked_ms, timeout_ms);
    atomic_fetch_add(&n_sleeps, 1);
    atomic_store(&is_asleep, true);
    int rc = __real_epoll_wait(fd, events, n, timeout_ms == 0 ? 0 : -1);
    atomic_store(&is_asleep, false);
    n_woken += rc > 0;
    return rc;
}

/* --- the daemon ------------------------------------------------------------------------------- */

struct backend {
    int unused;
};

static void no_info(const struct backend *b, struct backend_info *out)
{
    (void)b;
    *out = (struct backend_info){
        .name = "none", .device = "none", .kv_bytes = 1 << 20, .max_in_flight = 1};
}

static attn_status no_register(struct backend *b, void *p, size_t bytes)
{
    (void)b, (void)p, (void)bytes;
    return ATTN_OK;
}

static void no_unregister(struct backend *b, void *p, size_t bytes)
{
    (void)b, (void)p, (void)bytes;
}

static const struct backend_ops no_device = {
    .abi = BACKEND_ABI,
    .name = "none",
    .info = no_info,
    .host_alloc = fake_host_alloc,
    .host_free = fake_host_free,
    .host_register = no_register,
    .host_unregister = no_unregister,
};

struct daemon_end {
    attn_status closed; /* the engine */
    uint32_t n_clients; /* the engine's, when it closed */
    struct principal who; /* the last of them */
};

static struct daemon {
    struct config cfg;
    struct backend backend;
    struct iobuf_pool *bufs;
    struct engine_fixture fixture;
    struct engine *engine;
    uv_loop_t loop;
    uv_async_t close, probe;
    uv_prepare_t prepare;
    bool is_probed;
    int sleep_ms; /* what the loop means to sleep after the last probe; -1: without end */
    sem_t is_answered;
    pthread_t thread;
    bool is_over;
    struct daemon_end end;
    struct transport_env env;
    struct transport *t;
    char path[64];
} d;

/* As main.c does it, on the loop's thread. */
static void on_close(uv_async_t *async)
{
    (void)async;
    d.t->ops->stop(d.t);
    d.end.closed = engine_close(d.engine);
    engine_fixture_close(&d.fixture);
    const struct shm_client *c;
    LIST_FOREACH(c, &((struct transport_shm *)d.t)->clients, entry) {
        d.end.n_clients++;
        d.end.who = c->principal;
    }
    d.t->ops->close(d.t);
    uv_close((uv_handle_t *)&d.close, NULL);
    uv_close((uv_handle_t *)&d.probe, NULL);
    uv_close((uv_handle_t *)&d.prepare, NULL);
}

static void on_probe(uv_async_t *async)
{
    (void)async;
    d.is_probed = true;
}

/* Right before the loop sleeps. */
static void on_prepare(uv_prepare_t *prepare)
{
    if (!d.is_probed)
        return;
    d.is_probed = false;
    d.sleep_ms = uv_backend_timeout(prepare->loop);
    sem_post(&d.is_answered);
}

/* How long the loop means to sleep when nothing is left to do. */
static int loop_sleep_ms(void)
{
    uv_async_send(&d.probe);
    while (sem_wait(&d.is_answered) != 0)
        continue;
    return d.sleep_ms;
}

static void *run_loop(void *arg)
{
    uv_run(&d.loop, UV_RUN_DEFAULT);
    return arg;
}

static int daemon_start_with(uint64_t spin_us)
{
    char url[96], why[512] = "";
    static uint32_t n;
    memset(&d, 0, sizeof d);
    log_init(LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    config_defaults(&d.cfg);
    d.cfg.io_memory_bytes = 1 << 20;
    d.cfg.max_sequences = 16;
    d.cfg.spin_us = spin_us;
    d.cfg.handshake_timeout_us = 8000; /* looked at every 2 ms */
    snprintf(d.path, sizeof d.path, "/tmp/attnd-wakes-%d-%u", (int)getpid(), n++);
    snprintf(url, sizeof url, "shm://%s", d.path);
    assert_int_equal(iobuf_pool_open(&no_device, &d.backend, d.cfg.io_memory_bytes, &d.bufs),
                     ATTN_OK);
    if (engine_fixture_open(&d.fixture, &d.cfg, &no_device, &d.backend, d.bufs, &d.engine, why,
                            sizeof why) != ATTN_OK ||
        engine_start(d.engine, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    assert_int_equal(uv_loop_init(&d.loop), 0);
    uv_async_init(&d.loop, &d.close, on_close);
    uv_async_init(&d.loop, &d.probe, on_probe);
    uv_prepare_init(&d.loop, &d.prepare);
    uv_prepare_start(&d.prepare, on_prepare);
    sem_init(&d.is_answered, 0, 0);
    d.env = (struct transport_env){.loop = &d.loop,
                                   .cfg = &d.cfg,
                                   .backend_ops = &no_device,
                                   .backend = &d.backend,
                                   .engine = d.engine,
                                   .bufs = d.bufs,
                                   .shares = share_table_open(100, 100),
                                   .shared_most = UINT64_MAX};
    if (transport_shm_ops.open(&d.env, url, &d.t, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    assert_int_equal(pthread_create(&d.thread, NULL, run_loop, NULL), 0);
    return 0;
}

/* To sleep at once is to race at once. */
static int daemon_start(void **state)
{
    (void)state;
    return daemon_start_with(0);
}

static int daemon_start_spinning(void **state)
{
    (void)state;
    return daemon_start_with(200);
}

static struct daemon_end daemon_end(void)
{
    if (!d.is_over) {
        uv_async_send(&d.close);
        pthread_join(d.thread, NULL);
    }
    d.is_over = true;
    return d.end;
}

static int daemon_stop(void **state)
{
    (void)state;
    assert_int_equal(daemon_end().closed, ATTN_OK);
    assert_int_equal(uv_loop_close(&d.loop), 0);
    assert_int_equal(d.env.n_peers, 0);
    assert_int_equal(d.env.shared_bytes, 0);
    iobuf_pool_close(d.bufs);
    share_table_close(d.env.shares);
    config_fini(&d.cfg);
    clock_use(NULL);
    return 0;
}

/* --- a client --------------------------------------------------------------------------------- */

/* Writes a hello into the slot's memory, to be submitted; a session of 0 opens one. */
static struct shm_submit make_hello(struct shm_link *l, uint32_t slot, uint64_t id,
                                    uint64_t session)
{
    Attnd__Hello b = ATTND__HELLO__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.protocol_version = 1;
    b.client_name = (char *)(uintptr_t) "wakes";
    b.resume_session = session;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &b;
    struct shm_submit e = {
        .request_offset = l->welcome.data_offset + slot * l->part_bytes,
        .request_bytes = (uint32_t)wire_request_head_bytes(&h),
        .room_bytes = (uint32_t)(l->part_bytes / 2),
        .slot = slot,
    };
    e.room_offset = e.request_offset + l->part_bytes / 2;
    wire_request_head_encode(&h, id, 0, l->base + e.request_offset);
    return e;
}

static bool has_reply(const struct shm_link *l)
{
    return atomic_load(&l->control->completed) != l->completed;
}

/* Awake, the client is as quick as the engine: it can send again while the engine falls asleep.
 * If it takes long, it leaves the CPU to others. */
static void await_reply(const struct shm_link *l)
{
    for (uint32_t k = 0; k < SPINS && !has_reply(l); k++)
        attn_cpu_pause();
    for (uint64_t until_ns = attn_now_ns() + PATIENCE_MS * 1000000ull; !has_reply(l);) {
        if (attn_now_ns() >= until_ns)
            fail_msg("a request is not answered: of %u sleeps %u were ended by a wake-up", n_sleeps,
                     n_woken);
        sched_yield();
    }
}

/* The session that the oldest reply names. */
static uint64_t take_reply(struct shm_link *l, uint64_t id)
{
    static _Alignas(64) uint8_t copy[4096];
    const uint8_t *reply;
    size_t n;
    char why[256];
    struct wire_arena arena;
    struct wire_reply r;
    assert_true(shm_link_receive(l, 0, &reply, &n));
    assert_true(n <= sizeof copy);
    memcpy(copy, reply, n);
    wire_arena_init(&arena, NULL, 0, 1 << 20);
    if (wire_reply_decode(copy, n, &arena, &r, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    assert_int_equal(r.request_id, id);
    assert_int_equal(r.header->status, ATTN_OK);
    uint64_t session = r.header->hello->session;
    wire_arena_reset(&arena);
    return session;
}

static uint64_t say_hello(struct shm_link *l, uint64_t id)
{
    struct shm_submit e = make_hello(l, 0, id, 0);
    shm_link_submit(l, &e);
    await_reply(l);
    return take_reply(l, id);
}

/* Until the engine sleeps; fails when it does not. */
static void wait_for_sleep(void)
{
    uint64_t until_ns = attn_now_ns() + PATIENCE_MS * 1000000ull;
    while (!atomic_load(&is_asleep)) {
        assert_true(attn_now_ns() < until_ns);
        sched_yield();
    }
}

static void every_request_ends_a_sleep(void **state)
{
    (void)state;
    enum { N = 50000 };
    struct shm_link l;
    uint64_t seed = 3;
    assert_true(shm_link_open(&l, d.path, 4, 0));
    uint64_t session = say_hello(&l, 1);
    struct shm_submit e[2] = {make_hello(&l, 1, 100, session), make_hello(&l, 2, 101, session)};
    uint32_t woken_before = n_woken, sleeps_before = n_sleeps;
    shm_link_submit(&l, &e[0]);
    for (uint32_t i = 1; i < N; i++) {
        await_reply(&l);
        /* from before the engine falls asleep to behind; now and then far behind */
        for (uint32_t k = random_below(&seed, i % 64 == 0 ? 2000 : 40); k > 0; k--)
            attn_cpu_pause();
        shm_link_submit(&l, &e[i % 2]);
        assert_int_equal(take_reply(&l, 100 + (i - 1) % 2), session);
    }
    await_reply(&l);
    wait_for_sleep();
    uint32_t woken = n_woken - woken_before, sleeps = n_sleeps - sleeps_before;
    if (woken < 100)
        fail_msg("%u requests ended %u of %u sleeps: the race was not run", N, woken, sleeps);
    struct daemon_end end = daemon_end(); /* with the client still there */
    assert_int_equal(end.n_clients, 1);
    assert_int_equal(end.who.kind, PRINCIPAL_USER);
    assert_int_equal(end.who.uid, geteuid());
    assert_int_equal(end.who.pid, getpid());
    shm_link_close(&l);
}

static void who_has_nothing_to_do_sleeps(void **state)
{
    (void)state;
    struct shm_link l[N_CLIENTS];
    for (uint32_t i = 0; i < N_CLIENTS; i++) {
        assert_true(shm_link_open(&l[i], d.path, 4, 1 << 18));
        say_hello(&l[i], i + 1);
    }
    wait_for_sleep();
    assert_true(atomic_load(&asked_ms) >= MIN_SLEEP_MS);
    assert_int_equal(loop_sleep_ms(), -1);
    for (uint32_t i = 0; i < N_CLIENTS; i++) { /* nor does one that left keep it busy */
        shm_link_close(&l[i]);
        while (i + 1 < N_CLIENTS && loop_sleep_ms() != -1)
            sched_yield();
    }
    wait_for_sleep();
    assert_true(atomic_load(&asked_ms) >= MIN_SLEEP_MS);
}

/* --- the hello's deadline, on a time of the test's own ---------------------------------------- */

static _Atomic uint64_t virtual_ns, n_asked;

static uint64_t virtual_now_ns(void)
{
    atomic_fetch_add(&n_asked, 1);
    return atomic_load(&virtual_ns);
}

static int daemon_start_on_virtual_time(void **state)
{
    atomic_store(&virtual_ns, 1000000000000);
    clock_use(virtual_now_ns);
    return daemon_start(state);
}

static void a_hello_is_late_by_the_daemons_clock_alone(void **state)
{
    (void)state;
    struct shm_link silent = {.base = NULL, .memfd = -1, .wake_fd = -1};
    silent.socket = shm_link_connect(d.path);
    assert_true(silent.socket >= 0);
    for (uint64_t seen = n_asked; n_asked < seen + 10;) /* looked at again and again */
        assert_false(shm_link_is_gone(&silent, 1));
    virtual_ns += d.cfg.handshake_timeout_us * 1000 - 1;
    for (uint64_t seen = n_asked; n_asked < seen + 10;)
        assert_false(shm_link_is_gone(&silent, 1));
    virtual_ns += 1;
    assert_true(shm_link_is_gone(&silent, PATIENCE_MS));
    shm_link_close(&silent);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, daemon_start, daemon_stop)
    const struct CMUnitTest tests[] = {
        TEST(every_request_ends_a_sleep),
        cmocka_unit_test_setup_teardown(who_has_nothing_to_do_sleeps, daemon_start_spinning,
                                        daemon_stop),
        cmocka_unit_test_setup_teardown(a_hello_is_late_by_the_daemons_clock_alone,
                                        daemon_start_on_virtual_time, daemon_stop),
    };
    return cmocka_run_group_tests_name("wakes", tests, NULL, NULL);
}
