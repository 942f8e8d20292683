/* main.c: the daemon's life: settings, device, message buffers, engine, stats endpoint, transports;
 * run; and the same backwards. The main thread runs the event loop: sockets and signals.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>
#include <uv.h>

#include "daemon/clock.h"
#include "daemon/config.h"
#include "daemon/device.h"
#include "daemon/engine.h"
#include "daemon/health.h"
#include "daemon/http.h"
#include "daemon/iobuf.h"
#include "daemon/log.h"
#include "daemon/notify.h"
#include "daemon/transport.h"

enum {
    WHY_BYTES = 512,
    TICK_MS = 100, /* heartbeat, watchdog, the device's health */
    DRAIN_TICK_MS = 5,
    LAST_REPLIES_MS = 1000, /* for answers of the last moment to be written and read */
};

struct daemon {
    int argc;
    char **argv;
    struct config cfg;
    struct device device;
    struct iobuf_pool *bufs;
    struct kv *kv;
    struct session_table *sessions;
    struct engine *engine;
    struct http *http;
    uv_loop_t *loop;
    struct transport_env env;
    struct transport *transports[CONFIG_MAX_LISTEN];
    uint32_t n_transports;
    uv_timer_t tick;
    uv_signal_t signals[3];
    uint64_t watchdog_ns, next_watchdog_ns;
    bool has_handlers, is_draining, is_stopping;
    uint64_t drain_until_ns;
    int exit_code;
};

/* --- signals and time ------------------------------------------------------------------------- */

static void finish(struct daemon *d, int exit_code)
{
    d->exit_code = exit_code;
    uv_stop(d->loop);
}

static bool transports_are_idle(const struct daemon *d)
{
    for (uint32_t i = 0; i < d->n_transports; i++)
        if (!d->transports[i]->ops->is_idle(d->transports[i]))
            return false;
    return true;
}

static void on_tick(uv_timer_t *timer);

static void drain(struct daemon *d)
{
    engine_drain(d->engine);
    d->is_draining = true;
    d->drain_until_ns = clock_now_ns() + d->cfg.drain_timeout_us * 1000;
    health_set_ready(false);
    notify_send("STOPPING=1\nSTATUS=draining");
    log_info("draining: no new sequences; steps go on until none is in flight, %" PRIu64
             " ms at most",
             d->cfg.drain_timeout_us / 1000);
    uv_timer_start(&d->tick, on_tick, DRAIN_TICK_MS, DRAIN_TICK_MS);
}

static void on_tick(uv_timer_t *timer)
{
    struct daemon *d = timer->data;
    uint64_t now_ns = clock_now_ns();
    health_beat(HEALTH_LOOP);
    if (engine_health(d->engine) != ATTN_OK) {
        log_error("the device is lost; ending so that a restart can take it again");
        finish(d, EX_OSERR);
        return;
    }
    uint64_t silent_ns;
    if (d->watchdog_ns != 0 && now_ns >= d->next_watchdog_ns &&
        !health_is_stalled(HEALTH_ENGINE, d->cfg.stall_timeout_us * 1000, &silent_ns)) {
        d->next_watchdog_ns = now_ns + d->watchdog_ns / 2;
        notify_send("WATCHDOG=1");
    }
    if (!d->is_draining) {
        if (engine_is_draining(d->engine)) /* a client asked */
            drain(d);
        return;
    }
    if (engine_is_drained(d->engine) && transports_are_idle(d)) {
        log_info("drained");
        finish(d, EX_OK);
    } else if (now_ns >= d->drain_until_ns) {
        log_warn("%" PRIu64 " requests are still in flight after the drain timeout",
                 stats_get(queue_requests));
        finish(d, EX_OK);
    }
}

static void on_terminate(uv_signal_t *s, int number)
{
    struct daemon *d = s->data;
    if (d->is_stopping)
        return;
    if (!d->is_draining) {
        log_info("%s", number == SIGINT ? "SIGINT" : "SIGTERM");
        drain(d);
        return;
    }
    log_warn("a second signal: stopping now");
    finish(d, EX_OK);
}

static void log_start(const struct config *cfg)
{
    enum log_level level;
    if (log_level_parse(cfg->log_level, &level) == 0)
        log_init(level);
}

static void tell_change(void *user, const char *name, const char *value, bool is_taken)
{
    (void)user;
    if (is_taken)
        log_info("settings: %s is now %s", name, value);
    else
        log_warn("settings: %s changed; that needs a restart", name);
}

static void on_reload(uv_signal_t *s, int number)
{
    struct daemon *d = s->data;
    struct config now;
    enum config_action action;
    struct config_fault fault;
    (void)number;
    if (d->is_stopping)
        return;
    if (config_load(d->argc, d->argv, &now, &action, &fault) != ATTN_OK) {
        log_error("SIGHUP: the settings stay as they are: %s", fault.why);
        return;
    }
    log_info("SIGHUP: settings read");
    config_take_over(&d->cfg, &now, tell_change, NULL);
    config_fini(&now);
    log_start(&d->cfg);
    engine_reload(d->engine, &d->cfg);
}

/* --- start, run, stop ------------------------------------------------------------------------- */

static void handlers_start(struct daemon *d)
{
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP};
    signal(SIGPIPE, SIG_IGN);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        uv_signal_init(d->loop, &d->signals[i]);
        d->signals[i].data = d;
        uv_signal_start(&d->signals[i], numbers[i] == SIGHUP ? on_reload : on_terminate,
                        numbers[i]);
    }
    uv_timer_init(d->loop, &d->tick);
    d->tick.data = d;
    uv_timer_start(&d->tick, on_tick, 0, TICK_MS);
    d->watchdog_ns = notify_watchdog_us() * 1000;
    d->has_handlers = true;
}

/* Cache, sessions and the engine that works with them; what was opened is daemon_stop's. */
static attn_status engine_begin(struct daemon *d, char *why, size_t why_bytes)
{
    struct backend_info info;
    d->device.ops->info(d->device.backend, &info);
    struct kv_config kc = engine_kv_config(&d->cfg, info.kv_bytes);
    attn_status st = kv_open(&kc, -1, &d->kv, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    st = session_table_open(d->cfg.max_sessions, &d->sessions);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "no memory for %" PRIu32 " sessions (engine.max_sessions)",
                 d->cfg.max_sessions);
        return st;
    }
    struct engine_parts parts = {
        .cfg = &d->cfg,
        .ops = d->device.ops,
        .backend = d->device.backend,
        .bufs = d->bufs,
        .kv = d->kv,
        .sessions = d->sessions,
    };
    st = engine_open(&parts, &d->engine, why, why_bytes);
    return st == ATTN_OK ? engine_start(d->engine, why, why_bytes) : st;
}

static int transports_start(struct daemon *d)
{
    char why[WHY_BYTES];
    d->env = (struct transport_env){.loop = d->loop,
                                    .cfg = &d->cfg,
                                    .backend_ops = d->device.ops,
                                    .backend = d->device.backend,
                                    .engine = d->engine,
                                    .bufs = d->bufs};
    for (uint32_t i = 0; i < d->cfg.n_listen; i++) {
        const struct transport_ops *ops = transport_find(d->cfg.listen[i]);
        struct transport **t = &d->transports[d->n_transports];
        if (ops->open(&d->env, d->cfg.listen[i], t, why, sizeof why) != ATTN_OK) {
            log_error("%s", why);
            return EX_CANTCREAT;
        }
        d->n_transports++;
        log_info("listening on %s", ops->url(*t));
    }
    return EX_OK;
}

/* An exit code; what was started is daemon_stop's. */
static int daemon_start(struct daemon *d)
{
    char why[WHY_BYTES];
    if (device_open(&d->cfg, &d->device) != ATTN_OK)
        return EX_UNAVAILABLE;
    attn_status st =
        iobuf_pool_open(d->device.ops, d->device.backend, d->cfg.io_memory_bytes, &d->bufs);
    if (st != ATTN_OK) {
        log_error("cache.io_memory: %" PRIu64 " bytes can't be had: %s", d->cfg.io_memory_bytes,
                  attn_status_message(st));
        return EX_OSERR;
    }
    st = engine_begin(d, why, sizeof why);
    if (st != ATTN_OK) {
        log_error("%s", why);
        return EX_OSERR;
    }
    if (d->cfg.http[0] != '\0') {
        st = http_open(d->cfg.http, d->cfg.stall_timeout_us, &d->http, why, sizeof why);
        if (st != ATTN_OK) {
            log_error("%s", why);
            return EX_CANTCREAT;
        }
        log_info("stats on http://%.*s:%u", (int)(strrchr(d->cfg.http, ':') - d->cfg.http),
                 d->cfg.http, http_port(d->http));
    }
    handlers_start(d);
    return transports_start(d);
}

static void on_close_timeout(uv_timer_t *timer)
{
    uv_stop(timer->loop);
}

static void close_handle(uv_handle_t *h, void *arg)
{
    (void)arg;
    if (!uv_is_closing(h))
        uv_close(h, NULL);
}

static void on_last_replies(uv_timer_t *timer)
{
    struct daemon *d = timer->data;
    bool is_done = true;
    for (uint32_t i = 0; i < d->n_transports; i++)
        is_done &= d->transports[i]->ops->hang_up(d->transports[i]);
    if (is_done || clock_now_ns() >= d->drain_until_ns)
        uv_stop(d->loop);
}

/* Lets the loop write what is owed and the peers read it, for a moment. */
static void write_last_replies(struct daemon *d)
{
    d->drain_until_ns = clock_now_ns() + (uint64_t)LAST_REPLIES_MS * 1000000;
    uv_timer_start(&d->tick, on_last_replies, 0, 1);
    uv_run(d->loop, UV_RUN_DEFAULT);
    uv_timer_start(&d->tick, on_close_timeout, LAST_REPLIES_MS, 0);
}

static void daemon_stop(struct daemon *d)
{
    health_set_ready(false);
    d->is_stopping = true;
    if (d->has_handlers)
        uv_timer_stop(&d->tick); /* it looks at the engine */
    for (uint32_t i = 0; i < d->n_transports; i++)
        d->transports[i]->ops->stop(d->transports[i]);
    if (engine_close(d->engine) != ATTN_OK) {
        log_error("the device does not give its batches back; ending without it");
        fflush(NULL);
        _exit(EX_OSERR);
    }
    if (d->n_transports > 0)
        write_last_replies(d);
    for (uint32_t i = 0; i < d->n_transports; i++)
        d->transports[i]->ops->close(d->transports[i]);
    if (d->loop != NULL) {
        uv_run(d->loop, UV_RUN_NOWAIT);
        uv_walk(d->loop, close_handle, NULL);
        uv_run(d->loop, UV_RUN_DEFAULT);
        uv_loop_close(d->loop);
    }
    http_close(d->http);
    session_table_close(d->sessions);
    kv_close(d->kv);
    iobuf_pool_close(d->bufs);
    device_close(&d->device);
}

static int daemon_run(struct daemon *d)
{
    int code = daemon_start(d);
    if (code == EX_OK) {
        health_set_ready(true);
        notify_send("READY=1\nSTATUS=serving");
        log_info("attnd %s is ready", ATTND_VERSION);
        uv_run(d->loop, UV_RUN_DEFAULT);
        code = d->exit_code;
    }
    daemon_stop(d);
    if (code == EX_OK)
        log_info("stopped");
    return code;
}

static int self_test(const struct config *cfg)
{
    printf("attnd %s\n", ATTND_VERSION);
    attn_status st = device_self_test(cfg, stdout);
    return st == ATTN_OK ? EX_OK : st == ATTN_ENOTSUP ? EX_UNAVAILABLE : EX_SOFTWARE;
}

int main(int argc, char **argv)
{
    static struct daemon d;
    enum config_action action;
    struct config_fault fault;
    d.argc = argc;
    d.argv = argv;
    log_init(LOG_LEVEL_INFO);
    if (config_load(argc, argv, &d.cfg, &action, &fault) != ATTN_OK) {
        log_error("%s", fault.why);
        return fault.is_flag ? EX_USAGE : EX_CONFIG;
    }
    switch (action) {
    case CONFIG_HELP:
        config_help(stdout);
        break;
    case CONFIG_VERSION:
        printf("attnd %s\n", ATTND_VERSION);
        break;
    case CONFIG_PRINT:
        config_print(&d.cfg, stdout);
        break;
    case CONFIG_CHECK:
        break;
    case CONFIG_SELF_TEST:
        d.exit_code = self_test(&d.cfg);
        break;
    case CONFIG_RUN:
        log_start(&d.cfg);
        d.loop = uv_default_loop();
        d.exit_code = daemon_run(&d);
        break;
    }
    config_fini(&d.cfg);
    return d.exit_code;
}
