/* device.c: tries backends in order, to count devices, to open one, or to test one. */
#include "daemon/process/device.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "cache/kv.h"
#include "daemon/base/log.h"
#include "daemon/cards/cards.h"
#include "daemon/engine/engine.h"
#include "daemon/transport/transport.h"
#include "kernels/faults.h"
#include "kernels/load.h"
#include "kernels/selftest.h"

enum { WHY_BYTES = 512 };

static const char *const in_order[] = {"cuda", "hip", "cpu"};

static bool is_auto(const struct config *cfg)
{
    return strcmp(cfg->backend, "auto") == 0;
}

/* Calls try for each backend that the settings allow (only: this one; NULL: any of them), until one
 * returns other than ATTN_ENOTSUP, which becomes the result. */
static attn_status try_each(const struct config *cfg,
                            attn_status (*try)(const struct config *cfg, const char *name,
                                               void *arg),
                            void *arg, const char *only)
{
    attn_status st = ATTN_ENOTSUP;
    if (only == NULL && !is_auto(cfg))
        only = cfg->backend;
    for (size_t i = 0; i < sizeof in_order / sizeof in_order[0] && st == ATTN_ENOTSUP; i++)
        if (only == NULL || strcmp(only, in_order[i]) == 0)
            st = try(cfg, in_order[i], arg);
    return st;
}

/* --- to serve --------------------------------------------------------------------------------- */

/* Threads of a cpu device: as set, else its part of the cores. */
static uint32_t threads_of(const struct config *cfg, const struct device_choice *which)
{
    uint32_t n_cores = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    if (cfg->threads != 0 || which->n_alike <= 1)
        return cfg->threads;
    return n_cores > which->n_alike ? n_cores / which->n_alike : 1;
}

/* Says once what is taken at most, for planning. */
static void say_need(const struct device_choice *which, const struct memory_need *n,
                     const struct memory_fit *fit)
{
    if (which->n == 0)
        log_info("host memory: %" PRIu64 " MiB at most, of this %" PRIu64 " for KV, %" PRIu64
                 " for messages, %" PRIu64 " for tables, %" PRIu64 " for clients, %" PRIu64
                 " for evicted and idle blocks; what clients share is not in it",
                 fit->all_bytes >> 20, n->kv_bytes >> 20, n->io_bytes >> 20, n->table_bytes >> 20,
                 n->client_bytes >> 20, n->tier_bytes >> 20);
}

/* How many of the devices have their KV memory in the host's. */
static uint32_t device_count_in_host(const struct config *cfg)
{
    struct config_device devices[CONFIG_MAX_DEVICES] = {0};
    const struct backend_ops *ops;
    char why[WHY_BYTES];
    bool is_cpu = strcmp(cfg->backend, "cpu") == 0;
    uint32_t n, n_in_host = 0;
    if (is_auto(cfg)) { /* a GPU's module that finds a device is taken */
        is_cpu = true;
        for (size_t i = 0; i < sizeof in_order / sizeof in_order[0]; i++)
            if (strcmp(in_order[i], "cpu") != 0 &&
                backend_load(in_order[i], &ops, why, sizeof why) == ATTN_OK &&
                ops->n_devices != NULL && ops->n_devices() > 0)
                is_cpu = false;
    }
    config_devices(cfg->device_index, devices, &n);
    for (uint32_t i = 0; i < (n > 0 ? n : 1); i++)
        n_in_host +=
            devices[i].backend[0] == '\0' ? is_cpu : strcmp(devices[i].backend, "cpu") == 0;
    return n_in_host;
}

struct memory_need device_memory_need(const struct config *cfg, uint32_t n)
{
    struct kv_config kc = engine_kv_config(cfg, cfg->kv_memory_bytes);
    uint64_t full = kv_full_bytes(&kc), most = kv_fixed_bytes(&kc) + config_table_bytes(cfg);
    return (struct memory_need){
        .kv_bytes = cfg->kv_memory_bytes * device_count_in_host(cfg),
        .io_bytes = cfg->io_memory_bytes,
        .tier_bytes = (config_tier_bytes(cfg) + config_tier_record_bytes(cfg) +
                       config_disk_record_bytes(cfg) + cfg->idle_memory_bytes) *
                      n,
        .table_bytes = ((full < most ? full : most) + engine_table_bytes(cfg)) * n,
        .client_bytes = transport_client_bytes(cfg) + cfg->max_queue_requests * cards_step_bytes(n),
    };
}

static attn_status open_one(const struct config *cfg, const struct device_choice *which,
                            const char *name, int import_fd, struct device *out, char *why,
                            size_t why_bytes)
{
    bool is_last = which->n + 1 >= which->n_all;
    const struct backend_ops *ops;
    attn_status st = backend_load(name, &ops, why, why_bytes);
    if (st == ATTN_OK && cfg->faults[0] != '\0' && is_last)
        st = backend_faults(ops, cfg->faults, &ops, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    struct backend_config bc = {
        .kv_bytes = cfg->kv_memory_bytes,
        .max_batch_items = cfg->max_batch_items,
        .max_batch_tokens = cfg->max_batch_tokens,
        .n_threads = threads_of(cfg, which),
        .device_index = (int32_t)which->index,
        .import_fd = import_fd,
    };
    /* imported memory is counted as used already */
    bool takes_kv = strcmp(name, "cpu") == 0 && import_fd < 0;
    struct memory_need need = device_memory_need(cfg, which->n_all);
    need.kv_bytes = takes_kv ? bc.kv_bytes * which->n_alike_to_come : 0;
    need.io_bytes = which->n == 0 ? need.io_bytes : 0;
    need.taken_bytes = which->taken_bytes;
    struct memory_fit fit;
    bool is_short = memory_check("", &need, &fit, why, why_bytes) != ATTN_OK;
    if (is_short && !which->may_be_short)
        return ATTN_EQUOTA;
    if (is_short) {
        log_warn("memory is short, so tables grow no more and clients share none, until a restart "
                 "finds room: %s",
                 why);
        fit = (struct memory_fit){0};
    } else {
        say_need(which, &need, &fit);
    }
    struct backend *b = NULL;
    st = ops->open(&bc, &b);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "%s%s", st == ATTN_ENOMEM ? "device.kv_memory: " : "",
                 b == NULL ? attn_status_message(st) : ops->last_error(b));
        ops->close(b);
        return st;
    }
    *out = (struct device){ops, b, is_short, fit.left_bytes};
    return ATTN_OK;
}

static attn_status try_to_count(const struct config *cfg, const char *name, void *arg)
{
    const struct backend_ops *ops;
    char why[WHY_BYTES];
    uint32_t *n = arg;
    (void)cfg;
    if (backend_load(name, &ops, why, sizeof why) == ATTN_OK)
        *n = ops->n_devices == NULL ? 1 : ops->n_devices();
    return *n > 0 ? ATTN_OK : ATTN_ENOTSUP;
}

uint32_t device_count(const struct config *cfg)
{
    uint32_t n = 0;
    try_each(cfg, try_to_count, &n, NULL);
    return n;
}

/* The result of trying backends. */
struct attempt {
    const struct device_choice *which;
    struct device device;
    char why[2 * WHY_BYTES]; /* of those that failed */
};

static attn_status try_to_open(const struct config *cfg, const char *name, void *arg)
{
    char why[WHY_BYTES];
    struct attempt *a = arg;
    log_info("opening backend %s", name);
    if (open_one(cfg, a->which, name, -1, &a->device, why, sizeof why) == ATTN_OK)
        return ATTN_OK;
    if (is_auto(cfg))
        log_info("backend %s is not used: %s", name, why);
    size_t n = strlen(a->why);
    snprintf(a->why + n, sizeof a->why - n, "%sbackend %s can't be used: %s", n > 0 ? "; " : "",
             name, why);
    return ATTN_ENOTSUP; /* whatever the error was, the next backend may work */
}

static void say_opened(const struct config *cfg, const struct device *d)
{
    struct backend_info info;
    d->ops->info(d->backend, &info);
    if (cfg->faults[0] != '\0')
        log_warn("faults are injected: %s", cfg->faults);
    log_info("backend %s on %s: %" PRIu64 " MiB of KV memory, %" PRIu32 " processors", info.name,
             info.device, info.kv_bytes >> 20, info.n_processors);
}

attn_status device_open(const struct config *cfg, const struct device_choice *which,
                        struct device *out_device)
{
    struct attempt a = {.which = which, .why = ""};
    if (try_each(cfg, try_to_open, &a, which->backend) != ATTN_OK) {
        log_error("%s%s", is_auto(cfg) ? "no backend can be used: " : "", a.why);
        return ATTN_ENOTSUP;
    }
    say_opened(cfg, &a.device);
    *out_device = a.device;
    return ATTN_OK;
}

attn_status device_import(const struct config *cfg, const struct device_choice *which,
                          const char *backend, int memory_fd, struct device *out_device, char *why,
                          size_t why_bytes)
{
    struct device d;
    const char *wanted = which->backend != NULL ? which->backend : cfg->backend;
    if (strcmp(wanted, "auto") != 0 && strcmp(wanted, backend) != 0) {
        snprintf(why, why_bytes, "device.backend is %s, the kept KV memory is of %s", wanted,
                 backend);
        return ATTN_EINVAL;
    }
    attn_status st = open_one(cfg, which, backend, memory_fd, &d, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    say_opened(cfg, &d);
    *out_device = d;
    return ATTN_OK;
}

void device_close(struct device *d)
{
    if (d->ops != NULL)
        d->ops->close(d->backend);
    *d = (struct device){0};
}

/* --- to check --------------------------------------------------------------------------------- */

static attn_status try_to_check(const struct config *cfg, const char *name, void *arg)
{
    FILE *out = arg;
    const struct backend_ops *ops;
    char why[WHY_BYTES];
    if (backend_load(name, &ops, why, sizeof why) != ATTN_OK) {
        fprintf(out, "backend %s: %s\n", name, why);
        return ATTN_ENOTSUP;
    }
    struct config_device devices[CONFIG_MAX_DEVICES] = {0};
    uint32_t n;
    config_devices(cfg->device_index, devices, &n); /* only the first is tested */
    return selftest_run(ops, (int32_t)devices[0].index, cfg->threads, out);
}

static attn_status module_check(const char *name, char *why, size_t why_bytes)
{
    const struct backend_ops *ops;
    char reason[WHY_BYTES];
    if (name[0] == '\0' || strcmp(name, "auto") == 0 ||
        backend_load(name, &ops, reason, sizeof reason) == ATTN_OK)
        return ATTN_OK;
    snprintf(why, why_bytes, "backend %s can't be used: %s", name, reason);
    return ATTN_ENOTSUP;
}

attn_status device_modules_check(const struct config *cfg, char *why, size_t why_bytes)
{
    struct config_device devices[CONFIG_MAX_DEVICES] = {0};
    uint32_t n;
    config_devices(cfg->device_index, devices, &n);
    attn_status st = ATTN_OK;
    bool is_usual = n == 0; /* is device.backend any device's? */
    for (uint32_t i = 0; i < n && st == ATTN_OK; i++) {
        is_usual |= devices[i].backend[0] == '\0';
        st = module_check(devices[i].backend, why, why_bytes);
    }
    return st == ATTN_OK && is_usual ? module_check(cfg->backend, why, why_bytes) : st;
}

attn_status device_self_test(const struct config *cfg, FILE *out)
{
    return try_each(cfg, try_to_check, out, NULL);
}
