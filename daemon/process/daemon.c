/* daemon.c: starts the daemon (stats endpoint, transports, devices, message buffers, engines), runs
 * it, and stops it in reverse order. The main thread runs the first event loop: listeners, signals,
 * and its part of the connections (transport/loops.h).
 *
 * Sockets listen before the device is opened, which may take seconds: connections made in the
 * meantime wait in the backlog until the loop runs.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>
#include <uv.h>

#include "daemon/base/clock.h"
#include "daemon/base/health.h"
#include "daemon/base/iobuf.h"
#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "daemon/config/settings.h"
#include "daemon/engine/engine.h"
#include "daemon/http/http.h"
#include "daemon/keeper/keep.h"
#include "daemon/keeper/notify.h"
#include "daemon/process/card_open.h"
#include "daemon/process/daemon.h"
#include "daemon/process/loop_memory.h"
#include "daemon/transport/loops.h"
#include "daemon/transport/transport.h"

enum {
    WHY_BYTES = 512,
    TICK_MS = 100, /* of heartbeat, watchdog and the check of devices */
    DRAIN_TICK_MS = 5,
    LAST_TOKENS_MS = 5000, /* after the drain timeout: to finish tokens that are begun */
    LAST_ANSWERS_MS = 5000, /* then: to answer what is in the engine */
    LAST_REPLIES_MS = 1000, /* then: for the last replies to be written and read */
    LAST_REPLIES_OF_LOST_MS = 300, /* the same when the device is lost */
};

#define DEVICE_TIMEOUT_US "300000000" /* a driver may take minutes to wake several devices */

struct daemon {
    int argc;
    char **argv;
    struct config *cfg;
    struct last_good *last_good;
    struct card_list cards;
    struct iobuf_pool *bufs;
    struct tenants *tenants; /* NULL: there are no tenants */
    struct share_table *shares;
    struct settings *settings;
    struct engine *engine; /* of the first card, to which transports submit */
    struct http *http;
    uv_loop_t *loop;
    struct loops *loops; /* with it as the first */
    struct transport_env env;
    struct transport *transports[CONFIG_MAX_LISTEN + 1]; /* with the admin socket's */
    uint32_t n_transports;
    uv_timer_t tick;
    uv_signal_t signals[4];
    uint64_t watchdog_ns, next_watchdog_ns;
    bool has_handlers, is_draining, is_stopping;
    bool is_ending; /* draining: sequences do not hold it up, or no longer */
    bool ends_tokens; /* draining: begun tokens are finished, no new one begins */
    bool is_handing_over; /* no new request is read; those taken are answered */
    uint64_t leave_at_ns; /* when a delayed drain begins; 0: none */
    uint64_t drain_until_ns;
    int exit_code;
};

/* --- signals and time ------------------------------------------------------------------------- */

/* Ends the loop's run, once it has served the signals that have come: from now on they do nothing,
 * so that a flood of them can't keep it. */
static void stop(struct daemon *d)
{
    d->is_stopping = true;
    uv_stop(d->loop);
}

static void finish(struct daemon *d, int exit_code)
{
    d->exit_code = exit_code;
    stop(d);
}

static bool transports_are_idle(const struct daemon *d)
{
    for (uint32_t i = 0; i < d->n_transports; i++)
        if (!d->transports[i]->ops->is_idle(d->transports[i]))
            return false;
    return true;
}

static void on_tick(uv_timer_t *timer);

static void stop_transports(struct daemon *d)
{
    for (uint32_t i = 0; i < d->n_transports; i++)
        d->transports[i]->ops->stop(d->transports[i]);
}

/* Ends with this code once all requests that were taken are answered. The successor has the rest:
 * requests wait for it in the sockets, sequences in the kept cache. */
static void hand_over(struct daemon *d, int exit_code)
{
    d->is_handing_over = true;
    d->exit_code = exit_code;
    d->drain_until_ns = clock_now_ns() + config_now(d->cfg, drain_timeout_us) * 1000;
    health_set_ready(false);
    notify_send("STOPPING=1\nSTATUS=handing over");
    log_info("handing over: what was received is answered, the rest waits for the next process");
    stop_transports(d);
    uv_timer_start(&d->tick, on_tick, 0, DRAIN_TICK_MS);
}

/* The drain has taken too long: workers may still finish the tokens that they have begun. */
static void end_tokens(struct daemon *d)
{
    uint64_t most_ns = (uint64_t)LAST_TOKENS_MS * 1000000;
    uint64_t one_ns = config_now(d->cfg, token_timeout_us) * 1000;
    d->ends_tokens = true;
    d->drain_until_ns = clock_now_ns() + (one_ns > most_ns ? one_ns : most_ns);
    engine_end_tokens(d->engine);
}

/* That has taken too long, too: what was taken is answered, and nothing more is read. */
static void answer_the_last(struct daemon *d)
{
    d->is_handing_over = true;
    d->drain_until_ns = clock_now_ns() + (uint64_t)LAST_ANSWERS_MS * 1000000;
    stop_transports(d);
}

/* Nothing holds the drain up any more: it ends soon. */
static void drain_ends(struct daemon *d)
{
    d->is_ending = true;
    d->drain_until_ns = clock_now_ns() + config_now(d->cfg, drain_timeout_us) * 1000;
    notify_send("STOPPING=1\nSTATUS=draining");
    log_info("draining: no new sequences; steps go on until none is in flight, %" PRIu64
             " ms at most",
             config_now(d->cfg, drain_timeout_us) / 1000);
}

/* Follows the engine, which refuses what is new already. */
static void drain(struct daemon *d)
{
    d->is_draining = true;
    health_set_ready(false);
    if (engine_is_held(d->engine)) {
        notify_send("STATUS=draining: sequences may move away");
        log_info(
            "draining: no new sequences; those that are open are served until they have moved");
    } else {
        drain_ends(d);
    }
    uv_timer_start(&d->tick, on_tick, DRAIN_TICK_MS, DRAIN_TICK_MS);
}

/* Whether the drain is over: nothing is in flight, and no sequence is in the middle of a token. */
static bool is_over(const struct daemon *d)
{
    bool has_workers = !d->is_handing_over && d->env.n_peers > 0;
    bool is_still = has_workers ? engine_is_drained(d->engine) : engine_is_idle(d->engine);
    return is_still && transports_are_idle(d);
}

/* Delays the drain: /readyz fails, so that load balancers send no new clients, but all is still
 * served. */
static void leave_later(struct daemon *d)
{
    d->leave_at_ns = clock_now_ns() + config_now(d->cfg, drain_delay_us) * 1000;
    health_set_ready(false);
    log_info("not ready: the drain begins in %" PRIu64 " ms (engine.drain_delay)",
             config_now(d->cfg, drain_delay_us) / 1000);
}

static void on_tick(uv_timer_t *timer)
{
    struct daemon *d = timer->data;
    uint64_t now_ns = clock_now_ns();
    if (loops_have_turned(d->loops))
        health_beat(HEALTH_LOOP);
    log_flush_left_out();
    cards_give_up(&d->cards);
    if (!d->is_draining && !d->is_handing_over)
        last_good_follow(d->last_good, d->settings, d->cfg);
    if (cards_are_lost(&d->cards)) {
        log_error("the device is lost; ending so that a restart can take it again");
        finish(d, EX_TEMPFAIL);
        return;
    }
    uint64_t silent_ns, stall_ns = config_now(d->cfg, stall_timeout_us) * 1000;
    if (d->watchdog_ns != 0 && now_ns >= d->next_watchdog_ns &&
        !cards_are_stalled(&d->cards, stall_ns) &&
        !health_is_stalled(HEALTH_LOOP, stall_ns, &silent_ns)) {
        d->next_watchdog_ns = now_ns + d->watchdog_ns / 2;
        notify_send("WATCHDOG=1");
    }
    if (!d->is_draining && !d->is_handing_over) {
        bool has_waited = d->leave_at_ns != 0 && now_ns >= d->leave_at_ns;
        if (has_waited)
            engine_drain(d->engine, 0);
        if (engine_is_draining(d->engine)) /* also: a client asked */
            drain(d);
        return;
    }
    if (!d->is_ending && !d->is_handing_over) {
        if (engine_is_held(d->engine))
            return;
        drain_ends(d);
    }
    if (is_over(d)) {
        log_info("%s", d->is_handing_over ? "all is answered" : "drained");
        stop(d);
    } else if (now_ns >= d->drain_until_ns && !d->is_handing_over && !d->ends_tokens) {
        log_info("the drain timeout is over: tokens are finished, none is begun");
        end_tokens(d);
    } else if (now_ns >= d->drain_until_ns) {
        log_warn("%" PRIu64 " requests are still in flight after the drain timeout",
                 stats_get(queue_requests));
        if (d->is_handing_over)
            stop(d);
        else
            answer_the_last(d);
    }
}

static void on_terminate(uv_signal_t *s, int number)
{
    struct daemon *d = s->data;
    if (d->is_stopping)
        return;
    if (!d->is_draining && !d->is_handing_over) {
        log_info("%s", number == SIGINT ? "SIGINT" : "SIGTERM");
        if (keep_is_there()) {
            hand_over(d, EX_OK);
        } else if (config_now(d->cfg, drain_delay_us) > 0 && d->leave_at_ns == 0) {
            leave_later(d);
        } else {
            engine_drain(d->engine, 0);
            drain(d);
        }
        return;
    }
    if (d->is_draining && !d->is_ending) {
        log_info("a signal: sequences that have not moved are not waited for");
        engine_drain(d->engine, 0);
        return;
    }
    log_warn("a second signal: stopping now");
    finish(d, EX_OK);
}

static void on_upgrade(uv_signal_t *s, int number)
{
    struct daemon *d = s->data;
    (void)number;
    if (d->is_stopping || d->is_draining || d->is_handing_over)
        return;
    if (!keep_is_there()) {
        log_warn("SIGUSR2 is ignored: nobody keeps the cache for the next process");
        return;
    }
    log_info("SIGUSR2");
    hand_over(d, EX_TEMPFAIL);
}

/* settings_user.read_files: reads certificates and tenants again. */
static attn_status read_files(void *user, const struct config *cfg, char *why, size_t why_bytes)
{
    struct daemon *d = user;
    struct tenants *tenants;
    attn_status st = tenants_open(cfg->tenants, &tenants, why, why_bytes);
    for (uint32_t i = 0; i < d->n_transports && st == ATTN_OK; i++)
        if (d->transports[i]->ops->reload != NULL)
            st = d->transports[i]->ops->reload(d->transports[i], cfg, why, why_bytes);
    if (st == ATTN_OK)
        engine_take_tenants(d->engine, tenants);
    else
        tenants_close(tenants);
    return st;
}

static void settings_took(void *user, const struct config *cfg)
{
    struct daemon *d = user;
    settings_publish(cfg);
    for (uint32_t i = 0; i < d->cards.n; i++)
        engine_reload(d->cards.at[i].engine, cfg);
    share_table_set(d->shares, cfg->peer_share, cfg->principal_share);
    http_set_stall_timeout(d->http, cfg->stall_timeout_us);
}

static void on_reload(uv_signal_t *s, int number)
{
    struct daemon *d = s->data;
    uint32_t n_taken, n_kept;
    char why[WHY_BYTES];
    (void)number;
    if (d->is_stopping)
        return;
    log_info("SIGHUP: settings are read");
    if (settings_reload(d->settings, &n_taken, &n_kept, why, sizeof why) != ATTN_OK)
        log_error("SIGHUP: %s", why);
}

/* --- start, run, stop ------------------------------------------------------------------------- */

static void handlers_start(struct daemon *d)
{
    static const struct {
        int number;
        uv_signal_cb cb;
    } handlers[] = {{SIGTERM, on_terminate},
                    {SIGINT, on_terminate},
                    {SIGHUP, on_reload},
                    {SIGUSR2, on_upgrade}};
    for (size_t i = 0; i < sizeof handlers / sizeof handlers[0]; i++) {
        uv_signal_init(d->loop, &d->signals[i]);
        d->signals[i].data = d;
        uv_signal_start(&d->signals[i], handlers[i].cb, handlers[i].number);
    }
    uv_timer_init(d->loop, &d->tick);
    d->tick.data = d;
    uv_timer_start(&d->tick, on_tick, 0, TICK_MS);
    d->watchdog_ns = notify_watchdog_us() * 1000;
    d->has_handlers = true;
}

/* Opens caches, sessions and engines. On failure daemon_stop closes what was opened. */
static attn_status engines_begin(struct daemon *d, char *why, size_t why_bytes)
{
    d->shares = share_table_open(d->cfg->peer_share, d->cfg->principal_share);
    if (d->shares == NULL) {
        snprintf(why, why_bytes, "no memory for the shares of peers");
        return ATTN_ENOMEM;
    }
    const struct settings_user user = {d, read_files, settings_took};
    attn_status st = settings_open(d->cfg, d->argc, d->argv, &user, &d->settings);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "no memory for the settings");
        return st;
    }
    struct engine_env env = {
        .cfg = d->cfg,
        .bufs = d->bufs,
        .tenants = d->tenants,
        .settings = d->settings,
    };
    st = cards_engines_begin(&d->cards, &env, why, why_bytes);
    d->engine = st == ATTN_OK ? d->cards.at[0].engine : NULL;
    return st;
}

static int http_start(struct daemon *d)
{
    char why[WHY_BYTES];
    if (d->cfg->http[0] == '\0')
        return EX_OK;
    if (http_open(d->cfg->http, d->cfg->stall_timeout_us, &d->http, why, sizeof why) != ATTN_OK) {
        log_error("%s", why);
        return EX_CANTCREAT;
    }
    log_info("stats on http://%.*s:%u", (int)(strrchr(d->cfg->http, ':') - d->cfg->http),
             d->cfg->http, http_port(d->http));
    return EX_OK;
}

/* Opens a listener; why says why it can't be. */
static bool transport_open(struct daemon *d, const char *url, char *why, size_t why_bytes)
{
    const struct transport_ops *ops = transport_find(url);
    struct transport **t = &d->transports[d->n_transports];
    if (ops->open(&d->env, url, t, why, why_bytes) != ATTN_OK)
        return false;
    d->n_transports++;
    log_info("listening on %s", ops->url(*t));
    return true;
}

/* Opens the socket for operators. Returns an exit code. */
static int admin_start(struct daemon *d)
{
    char url[WHY_BYTES], why[WHY_BYTES];
    bool is_local = false;
    for (uint32_t i = 0; i < d->cfg->n_listen; i++)
        is_local |= strstr(d->cfg->listen[i], "tcp://") == NULL;
    if (config_admin_url(d->cfg, url, sizeof url)) {
        if (transport_open(d, url, why, sizeof why))
            return EX_OK;
        if (!config_admin_is_extra(d->cfg)) {
            log_error("%s", why);
            return EX_CANTCREAT;
        }
        log_warn("%s", why);
    }
    if (!is_local)
        log_warn("no socket for operators: attnctl can't ask or change what is theirs; set "
                 "listen.admin");
    return EX_OK;
}

static int transports_start(struct daemon *d)
{
    char why[WHY_BYTES];
    if (tenants_open(d->cfg->tenants, &d->tenants, why, sizeof why) != ATTN_OK) {
        log_error("%s", why);
        return EX_CONFIG;
    }
    uint32_t n_loops = d->cfg->loops > 0 ? d->cfg->loops : loops_of_cores();
    if (loops_open(d->loop, n_loops, &d->loops) != ATTN_OK) {
        log_error("listen.threads: no memory, descriptors or threads for %u event loops", n_loops);
        return EX_OSERR;
    }
    d->env.loop = d->loop;
    d->env.loops = d->loops;
    d->env.cfg = d->cfg;
    for (uint32_t i = 0; i < d->cfg->n_listen; i++)
        if (!transport_open(d, d->cfg->listen[i], why, sizeof why)) {
            log_error("%s", why);
            return EX_CANTCREAT;
        }
    return admin_start(d);
}

/* Bounds what clients on this host may share by what is left beside all else. */
static void shared_memory_begin(struct daemon *d, uint64_t left_bytes)
{
    bool is_asked = false;
    for (uint32_t i = 0; i < d->n_transports; i++)
        is_asked |= d->transports[i]->ops->is_polled;
    d->env.shared_most = left_bytes;
    if (is_asked && left_bytes < d->cfg->shm_memory_bytes)
        log_warn("of listen.shm_memory, %" PRIu64 " MiB, only %" PRIu64
                 " MiB fit beside the other memory: clients get no more than that",
                 d->cfg->shm_memory_bytes >> 20, left_bytes >> 20);
}

/* Opens what transports need before they serve: devices, message buffers, caches and engines.
 * Returns an exit code. */
static int engine_and_device_start(struct daemon *d)
{
    char why[WHY_BYTES];
    int code = cards_devices_begin(d->cfg, &d->cards);
    if (code != EX_OK)
        return code;
    const struct device *device = &d->cards.at[0].device; /* all devices can use its buffers */
    attn_status st =
        iobuf_pool_open(device->ops, device->backend, d->cfg->io_memory_bytes, &d->bufs);
    if (st != ATTN_OK) {
        log_error("cache.io_memory: %" PRIu64 " bytes can't be had: %s", d->cfg->io_memory_bytes,
                  attn_status_message(st));
        return EX_OSERR;
    }
    st = engines_begin(d, why, sizeof why);
    if (st != ATTN_OK) {
        log_error("%s", why);
        return EX_OSERR;
    }
    shared_memory_begin(d, device->left_bytes);
    d->env.backend_ops = device->ops;
    d->env.backend = device->backend;
    d->env.engine = d->engine;
    d->env.bufs = d->bufs;
    d->env.shares = d->shares;
    return EX_OK;
}

/* Returns an exit code; daemon_stop ends what was started. */
static int daemon_start(struct daemon *d)
{
    int code = http_start(d);
    if (code == EX_OK)
        code = transports_start(d);
    if (code != EX_OK)
        return code;
    notify_send("STATUS=opening the device\nEXTEND_TIMEOUT_USEC=" DEVICE_TIMEOUT_US);
    code = engine_and_device_start(d);
    if (code == EX_OK)
        handlers_start(d);
    return code;
}

static void on_close_timeout(uv_timer_t *timer)
{
    uv_stop(timer->loop);
}

/* Handlers of signals stay until the process has ended: without them a signal would end it, with
 * another code and before the last steps. */
static void close_handle(uv_handle_t *h, void *arg)
{
    (void)arg;
    if (h->type == UV_SIGNAL)
        uv_unref(h);
    else if (!uv_is_closing(h))
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

/* Runs the loop for at most most_ms, so that owed replies are written and read. */
static void write_last_replies(struct daemon *d, uint64_t most_ms)
{
    d->drain_until_ns = clock_now_ns() + most_ms * 1000000;
    uv_timer_start(&d->tick, on_last_replies, 0, 1);
    uv_run(d->loop, UV_RUN_DEFAULT);
    uv_timer_start(&d->tick, on_close_timeout, most_ms, 0);
}

/* Ends the process without touching a lost device again, because its driver could block forever. */
static void end_without_device(struct daemon *d, bool is_all)
{
    write_last_replies(d, LAST_REPLIES_OF_LOST_MS);
    fflush(NULL);
    _exit(is_all ? EX_TEMPFAIL : d->exit_code);
}

static void daemon_stop(struct daemon *d)
{
    health_set_ready(false);
    d->is_stopping = true;
    if (d->has_handlers)
        uv_timer_stop(&d->tick); /* its callback uses the engine */
    stop_transports(d);
    bool is_all = d->engine != NULL && (d->cards.n == 1 || cards_are_lost(&d->cards));
    if (cards_stop(&d->cards) != ATTN_OK)
        end_without_device(d, is_all);
    if (d->has_handlers)
        write_last_replies(d, LAST_REPLIES_MS);
    for (uint32_t i = 0; i < d->n_transports; i++)
        d->transports[i]->ops->close(d->transports[i]);
    if (d->loop != NULL) {
        uv_run(d->loop, UV_RUN_NOWAIT);
        uv_walk(d->loop, close_handle, NULL);
        uv_run(d->loop, UV_RUN_DEFAULT);
        loops_close(d->loops);
    }
    http_close(d->http);
    settings_close(d->settings);
    cards_end(&d->cards);
    tenants_close(d->tenants);
    share_table_close(d->shares);
    iobuf_pool_close(d->bufs);
    cards_devices_end(&d->cards);
}

static int daemon_serve(struct daemon *d)
{
    bool has_cache = last_good_has_cache();
    int code = daemon_start(d);
    bool has_started = code == EX_OK;
    if (has_started) {
        health_set_ready(true);
        last_good_begin(d->last_good, d->settings, d->cfg);
        notify_send("READY=1");
        log_info("attnd %s is ready", ATTND_VERSION);
        uv_run(d->loop, UV_RUN_DEFAULT);
        code = d->exit_code;
    }
    daemon_stop(d);
    if (code == EX_OK)
        log_info("stopped");
    if (!has_started && has_cache)
        last_good_pause();
    return code;
}

int daemon_run(struct config *cfg, int argc, char **argv, struct last_good *g)
{
    static struct daemon d;
    d = (struct daemon){.cfg = cfg, .argc = argc, .argv = argv, .last_good = g};
    settings_publish(cfg);
    health_set_settings_good(!g->is_used);
    loop_memory_use();
    d.loop = uv_default_loop();
    if (d.loop == NULL) {
        log_error("no memory or descriptors for the event loop");
        return EX_OSERR;
    }
    return daemon_serve(&d);
}
