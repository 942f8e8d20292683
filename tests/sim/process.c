/* process.c: the daemon's process: it is started as main.c would, serves, is killed at any place
 * where it asks the outside for something, ends by itself, and is followed by the next one. */
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/health.h"
#include "daemon/base/log.h"
#include "daemon/base/stack.h"
#include "daemon/base/stats.h"
#include "daemon/config/config.h"
#include "daemon/engine/core/state.h"
#include "daemon/engine/engine.h"
#include "daemon/process/daemon.h"
#include "net.h"

enum {
    MAX_POINTS_TO_KILL = 4000,
    MAX_POINTS_TO_KILL_IN_STOP = 300,
    MAX_TURN_NS = 500 * 1000 * 1000,
    CHECK_EVERY = 16
};
enum end { BEGINS, KILLED, EXITED };

struct engine *sim_engine, *sim_engines[SIM_MAX_CARDS];
uint32_t sim_n_engines;
uint64_t sim_life;

static jmp_buf way_out;
static enum end left; /* how, where a thread must be left first */
static uint32_t engine_threads[SIM_MAX_CARDS], n_in_turn;
static bool is_up, is_serving, is_last, is_over, is_upgrade_asked;
static uint64_t points_to_kill; /* 0: no kill is due */
static uint32_t n_aimed; /* kills that aim, to come */
static int exit_code;
static uint64_t empty_since_ns, turns;
static uint64_t short_until_ns;

attn_status __wrap_engine_start(struct engine *e, char *why, size_t why_bytes);
attn_status __wrap_engine_stop(struct engine *e);
attn_status __real_engine_stop(struct engine *e);
attn_status __wrap_engine_close(struct engine *e);
attn_status __real_engine_close(struct engine *e);

/* --- the engines' threads --------------------------------------------------------------------- */

static void *engine_main(void *arg)
{
    struct engine *e = arg;
    while (!atomic_load(&e->is_stopping)) {
        n_in_turn++;
        bool is_busy = engine_turn(e, MAX_TURN_NS);
        n_in_turn--;
        if (++turns % CHECK_EVERY == 0)
            process_check(e);
        thread_sleep(is_busy ? sim_below(5000) : sim_between(500, 20000));
    }
    return NULL;
}

attn_status __wrap_engine_start(struct engine *e, char *why, size_t why_bytes)
{
    (void)why, (void)why_bytes;
    sim_engine = sim_n_engines == 0 ? e : sim_engine;
    sim_engines[sim_n_engines] = e;
    engine_threads[sim_n_engines++] = thread_start(engine_main, e);
    e->has_thread = true;
    if (sim_n_engines == 1)
        lanes_process_begin(e);
    is_serving = true;
    return ATTN_OK;
}

static void engine_thread_end(struct engine *e)
{
    uint32_t i = 0;
    while (i < sim_n_engines && sim_engines[i] != e)
        i++;
    if (i == sim_n_engines || !e->has_thread)
        return;
    atomic_store(&e->is_stopping, true);
    engine_wake(e);
    thread_join(engine_threads[i]);
    e->has_thread = false; /* the end of its work is done by who stops it */
    process_check(e);
}

attn_status __wrap_engine_stop(struct engine *e)
{
    engine_thread_end(e);
    return __real_engine_stop(e);
}

attn_status __wrap_engine_close(struct engine *e)
{
    if (e != NULL)
        __wrap_engine_stop(e);
    if (e == sim_engine)
        lanes_process_end();
    sim_engine = e == sim_engine ? NULL : sim_engine;
    return __real_engine_close(e);
}

/* --- books ------------------------------------------------------------------------------------ */

void process_check(struct engine *e)
{
    bool was_daemon = sim_is_daemon;
    struct kv_stats s;
    uint64_t n_answered = 0;
    sim_is_daemon = false;
    sim_counts.cache_checks++;
    struct kv *kv = e->env.kv;
    if (kv_check(kv) != ATTN_OK)
        sim_fail("the cache's books are wrong: %s", kv_last_error(kv));
    const struct tier_store *tiers[] = {e->tier.blocks, e->tier.disk_blocks};
    for (int i = 0; i < 2; i++) {
        const char *wrong = tiers[i] == NULL ? NULL : tier_store_check(tiers[i]);
        if (wrong != NULL)
            sim_fail("the books of %s are wrong: %s", i == 0 ? "host memory" : "the file", wrong);
    }
    kv_stats_read(kv, &s);
    if (s.blocks_total != s.blocks_free + s.blocks_used + s.blocks_cached)
        sim_fail("%llu blocks, %llu free and %llu used", (unsigned long long)s.blocks_total,
                 (unsigned long long)s.blocks_free, (unsigned long long)s.blocks_used);
    for (size_t i = 0; i < STATS_N_STATUS; i++)
        n_answered += atomic_load(&stats.steps_answered[i]);
    if (n_in_turn == 0 && stats_get(steps_received) != n_answered + stats_get(steps_in_flight))
        sim_fail("%llu steps received, %llu answered, %llu in flight",
                 (unsigned long long)stats_get(steps_received), (unsigned long long)n_answered,
                 (unsigned long long)stats_get(steps_in_flight));
    sim_is_daemon = was_daemon;
}

static void check_engine_is_empty(struct engine *e)
{
    struct kv_stats s;
    process_check(e);
    kv_stats_read(e->env.kv, &s);
    for (kv_seq_id seq = {0}; kv_seq_next(e->env.kv, UINT32_MAX, &seq) == ATTN_OK; seq.index++) {
        struct kv_seq_info i;
        kv_seq_info(e->env.kv, seq, &i);
        sim_say("left: %04x at epoch %u of owner %u", (unsigned)(i.name & 0xffff), i.epoch,
                i.owner);
    }
    if (s.sequences != 0 || s.blocks_used != 0 || s.blocks_reserved != 0)
        sim_fail("everything is closed, and %llu sequences and %llu blocks are left, %llu reserved",
                 (unsigned long long)s.sequences, (unsigned long long)s.blocks_used,
                 (unsigned long long)s.blocks_reserved);
    if (!engine_is_idle(e))
        sim_fail("nobody asks, and an engine is not idle");
}

void process_check_is_empty(void)
{
    for (uint32_t i = 0; i < sim_n_engines; i++)
        check_engine_is_empty(sim_engines[i]);
    if (stats_get(steps_in_flight) != 0 || stats_get(queue_requests) != 0 ||
        stats_get(queue_bytes) != 0)
        sim_fail("nobody asks, and %llu steps are in flight, %llu requests queued of %llu bytes",
                 (unsigned long long)stats_get(steps_in_flight),
                 (unsigned long long)stats_get(queue_requests),
                 (unsigned long long)stats_get(queue_bytes));
}

/* --- start and end ---------------------------------------------------------------------------- */

static uint64_t now_ns(void)
{
    process_point();
    if (thread_is_one())
        sim_now_ns += 250; /* an engine that spins sees time go by */
    return sim_now_ns;
}

/* What a new process would find as zeros. */
static void clear_statics(void)
{
    memset(&stats, 0, sizeof stats);
    health_set_ready(false);
    health_set_draining(false);
    health_end(HEALTH_LOOP);
    for (uint32_t i = 0; i < SIM_MAX_CARDS; i++)
        health_end(HEALTH_ENGINE + i);
}

static int run(void)
{
    char host[16], disk[16], idle[16];
    snprintf(idle, sizeof idle, "%s", sim_plan.idle_memory);
    snprintf(host, sizeof host, "%s", sim_plan.host_memory);
    snprintf(disk, sizeof disk, "%s", sim_plan.disk_size);
    char cards[16], threads[16];
    snprintf(threads, sizeof threads, "%u", sim_plan.n_loops);
    snprintf(cards, sizeof cards, "%s", "0,1,2");
    cards[2 * sim_plan.n_cards - 1] = '\0';
    bool has_disk = strcmp(disk, "0") != 0;
    char *argv[] = {"attnd",
                    "--device.index",
                    cards,
                    "--backend",
                    "cpu",
                    "--listen",
                    "ipc:///sim",
                    "--listen.threads",
                    threads,
                    "--listen.http",
                    "off",
                    "--listen.admin",
                    "off",
                    "--listen.max_peers",
                    "16",
                    "--listen.max_message",
                    "128K",
                    "--listen.max_peer_write",
                    "512K",
                    "--listen.handshake_timeout",
                    "2s",
                    "--listen.body_timeout",
                    "3s",
                    "--listen.write_timeout",
                    "3s",
                    "--device.kv_memory",
                    "2M",
                    "--cache.io_memory",
                    "1M",
                    "--cache.max_sequences",
                    "64",
                    "--cache.max_seq_tokens",
                    "256",
                    "--cache.max_pools",
                    "2",
                    "--cache.max_layers",
                    "4",
                    "--engine.max_batch_items",
                    "16",
                    "--engine.max_batch_tokens",
                    "128",
                    "--engine.max_step_items",
                    "16",
                    "--engine.max_step_tokens",
                    "128",
                    "--engine.max_queue_requests",
                    "64",
                    "--engine.max_queue",
                    "1M",
                    "--engine.max_sessions",
                    "32",
                    "--engine.lease",
                    "10s",
                    "--engine.default_timeout",
                    "2s",
                    "--engine.stall_timeout",
                    "2s",
                    "--engine.drain_timeout",
                    "2s",
                    "--cache.host_memory",
                    host,
                    "--cache.idle_memory",
                    idle,
                    "--cache.disk_size",
                    disk,
                    "--cache.disk_path",
                    has_disk ? SIM_DISK : "off",
                    NULL};
    struct config cfg;
    struct config_fault fault;
    enum config_action action;
    int argc = (int)(sizeof argv / sizeof argv[0]) - 1;
    if (config_load(argc, argv, &cfg, &action, &fault) != ATTN_OK) {
        sim_say("settings: %s", fault.why);
        return EX_CONFIG;
    }
    /* its settings are the same in every life: none are kept */
    struct last_good g = {.kept = {.text_fd = -1}, .is_used = true};
    keep_begin();
    int code = daemon_run(&cfg, argc, argv, &g);
    config_fini(&cfg);
    return code;
}

static void on_start(void *arg, uint64_t word);
static void on_stop(void *arg, uint64_t word);

/* The process is gone; what it had is the kernel's again. */
static void bury(enum end how)
{
    sim_forget_process();
    threads_forget();
    lanes_forget_process();
    sim_engine = NULL;
    sim_n_engines = n_in_turn = 0;
    uv_process_end();
    is_up = false;
    points_to_kill = 0;
    if (how == EXITED && exit_code == EX_OK && memory_n_held() != 0)
        sim_fail("the process ended and has %llu pieces of memory left",
                 (unsigned long long)memory_n_held());
    memory_reap();
    outside_end();
    net_process_gone(outside_has_kept() && !is_last);
    sim_say("process %llu is gone: %s %d", (unsigned long long)sim_life,
            how == KILLED ? "killed" : "exit code", how == KILLED ? SIGKILL : exit_code);
    if (is_last && how == EXITED && exit_code == EX_OK)
        is_over = true;
    else
        sim_at(sim_between(SIM_MS, 40 * SIM_MS), SIM_WORLD, on_start, NULL, 0);
}

/* Whether the process had a reason to end so. */
static void judge_end(void)
{
    bool is_explained = sim_now_ns < short_until_ns; /* without memory everything may end */
    is_explained |= exit_code == EX_TEMPFAIL && is_upgrade_asked;
    is_explained |= exit_code == EX_TEMPFAIL && sim_counts.lost_devices > 0;
    is_explained |= exit_code == EX_OK && is_last;
    if (!is_explained)
        sim_fail("the process ended with %d%s", exit_code, is_serving ? "" : " before it served");
    sim_counts.failed_starts += !is_serving;
}

static void on_start(void *arg, uint64_t word)
{
    (void)arg, (void)word;
    clear_statics();
    log_init(sim_is_verbose ? LOG_LEVEL_INFO : LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    uv_process_begin();
    outside_begin();
    sim_counts.starts++;
    is_up = true;
    is_serving = false;
    is_upgrade_asked = false;
    if (!outside_has_kept())
        empty_since_ns = sim_now_ns;
    if (sim_has_faults && sim_plan.fail_alloc > 0 && sim_chance(200)) {
        short_until_ns = sim_now_ns + 1;
        memory_be_short(1);
    }
    sim_say("process %llu starts%s", (unsigned long long)sim_life + 1,
            outside_has_kept() ? " with a kept cache" : "");
    if (is_last)
        sim_at(sim_between(0, 20 * SIM_MS), SIM_WORLD, on_stop, NULL, 0);
    switch (setjmp(way_out)) {
    case BEGINS:
        sim_is_daemon = true;
        exit_code = run();
        sim_is_daemon = false;
        judge_end();
        bury(EXITED);
        break;
    case EXITED:
        sim_is_daemon = false;
        judge_end();
        bury(EXITED);
        break;
    case KILLED:
        sim_counts.kills++;
        bury(KILLED);
        break;
    }
}

_Noreturn void process_leave(void)
{
    longjmp(way_out, (int)left);
}

static _Noreturn void leave(enum end how)
{
    left = how;
    thread_leave(); /* comes back if it is on no thread */
    process_leave();
}

_Noreturn void process_exit(int code)
{
    exit_code = code;
    leave(EXITED);
}

void process_point(void)
{
    if (sim_is_daemon && sim_has_faults && thread_is_one() && sim_below(10000) < sim_plan.stop)
        thread_sleep(sim_between(SIM_US, 2 * SIM_MS));
    if (!sim_is_daemon || points_to_kill == 0)
        return;
    if (!sim_has_faults && !is_last)
        points_to_kill = 0;
    else if (--points_to_kill == 0)
        leave(KILLED);
}

void process_may_be_killed(uint32_t of_thousand)
{
    if (!sim_has_faults || points_to_kill > 0 || n_aimed == 0 || !sim_chance(of_thousand))
        return;
    n_aimed--;
    points_to_kill = 1 + sim_below(30);
}

static void on_kill(void *arg, uint64_t word)
{
    (void)arg, (void)word;
    if (sim_has_faults && !is_up)
        sim_at(5 * SIM_MS, SIM_WORLD, on_kill, NULL, 0);
    else if (sim_has_faults)
        points_to_kill = 1 + sim_below(sim_chance(300) ? 50 : MAX_POINTS_TO_KILL);
}

static void on_upgrade(void *arg, uint64_t word)
{
    (void)arg, (void)word;
    if (!sim_has_faults || !is_up || sim_engine == NULL || !outside_has_kept())
        return;
    sim_say("SIGUSR2");
    sim_counts.upgrades++;
    is_upgrade_asked = true;
    uv_deliver_signal(SIGUSR2);
}

static void on_shortage(void *arg, uint64_t word)
{
    (void)arg, (void)word;
    if (!sim_has_faults)
        return;
    uint64_t for_ns = sim_between(SIM_MS, 30 * SIM_MS);
    sim_say("memory is short for %llu us", (unsigned long long)for_ns / 1000);
    short_until_ns = sim_now_ns + for_ns;
    memory_be_short(for_ns);
}

void process_begin(void)
{
    uint64_t all_ns = sim_plan.n_ops * SIM_MS; /* about as long as a run is busy */
    is_up = is_last = is_over = false;
    points_to_kill = 0;
    n_aimed = sim_plan.n_aimed;
    short_until_ns = 0;
    empty_since_ns = sim_now_ns;
    sim_engine = NULL;
    sim_n_engines = n_in_turn = 0;
    clock_use(now_ns);
    sim_at(0, SIM_WORLD, on_start, NULL, 0);
    for (uint32_t i = 0; i < sim_plan.n_kills; i++)
        sim_at(sim_between(0, all_ns), SIM_WORLD, on_kill, NULL, 0);
    for (uint32_t i = 0; i < sim_plan.n_upgrades; i++)
        sim_at(sim_between(0, all_ns), SIM_WORLD, on_upgrade, NULL, 0);
    for (uint32_t i = 0; sim_plan.fail_alloc > 0 && i < 3; i++)
        sim_at(sim_between(0, all_ns), SIM_WORLD, on_shortage, NULL, 0);
}

bool process_is_up(void)
{
    return is_up;
}

uint64_t process_empty_since_ns(void)
{
    return empty_since_ns;
}

static void on_stop(void *arg, uint64_t word)
{
    (void)arg, (void)word;
    if (!is_up)
        return; /* the next one is told as it starts */
    sim_say("SIGTERM");
    if (!uv_deliver_signal(SIGTERM)) /* it is not ready for it yet */
        sim_at(SIM_MS, SIM_WORLD, on_stop, NULL, 0);
}

void process_stop(void)
{
    is_last = true;
    if (sim_plan.n_kills > 0 && sim_chance(300))
        points_to_kill = 1 + sim_below(MAX_POINTS_TO_KILL_IN_STOP);
    on_stop(NULL, 0);
}

bool process_is_over(void)
{
    return is_over;
}
