/* doctor.c: attnctl doctor: what may keep attnd from running well on this machine, and what to do
 * about it. Each check is a line with ok, warn or fail. */
#include <errno.h>
#include <glob.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clients/attnctl/attnctl.h"

enum verdict { OK, WARN, FAIL };
static const char *const verdicts[] = {"ok", "warn", "fail"};

struct report {
    json_t *checks;
    bool has_failure;
};

__attribute__((format(printf, 5, 6))) static void
say(struct report *r, const char *check, enum verdict v, const char *fix, const char *format, ...)
{
    char found[512];
    va_list args;
    va_start(args, format);
    vsnprintf(found, sizeof found, format, args);
    va_end(args);
    r->has_failure |= v == FAIL;
    json_array_append_new(r->checks,
                          json_pack("{s:s, s:s, s:s, s:s}", "check", check, "verdict", verdicts[v],
                                    "found", found, "fix", v == OK ? "" : fix));
}

/* Of the daemon, as its stats have it: null is no limit. A tenant's have none. */
static void check_limit(struct report *r, const char *name, const json_t *limit, uint64_t wanted,
                        const char *fix)
{
    if (json_is_null(limit))
        say(r, name, OK, "", "the daemon has no limit");
    else if (limit != NULL)
        say(r, name, json_number_value(limit) >= (double)wanted ? OK : WARN, fix,
            "the daemon has %.0f, %" PRIu64 " are wanted", json_number_value(limit), wanted);
}

/* The descriptors that listen.max_peers takes, as the settings have it. */
static uint64_t descriptors_of(const json_t *config)
{
    enum { SPARE = 64, DEFAULT_PEERS = 4096 };
    const json_t *c;
    size_t i;
    json_array_foreach(json_object_get(config, "config"), i, c)
    {
        const char *name = json_string_value(json_object_get(c, "name"));
        const char *value = json_string_value(json_object_get(c, "value"));
        if (name != NULL && value != NULL && strcmp(name, "listen.max_peers") == 0)
            return strtoull(value, NULL, 10) + SPARE;
    }
    return DEFAULT_PEERS + SPARE;
}

static void check_limits(struct report *r, const json_t *stats, const json_t *config, bool has_gpu)
{
    check_limit(r, "open files", json_object_get(stats, "max_fds"), descriptors_of(config),
                "raise the hard limit (ulimit -Hn, LimitNOFILE=) to listen.max_peers and 64 more");
    if (has_gpu)
        check_limit(r, "locked memory", json_object_get(stats, "max_locked_bytes"),
                    UINT64_C(1) << 30,
                    "a GPU backend pins cache.io_memory and shm clients: ulimit -Hl, "
                    "LimitMEMLOCK=");
}

/* A process that is attnd; 0: none can be seen. */
static int running_daemon(void)
{
    glob_t g;
    int pid = 0;
    bool has_any = glob("/proc/[0-9]*/comm", 0, NULL, &g) == 0;
    for (size_t i = 0; has_any && i < g.gl_pathc && pid == 0; i++) {
        char name[32] = "";
        FILE *f = fopen(g.gl_pathv[i], "re");
        if (f != NULL && fgets(name, sizeof name, f) != NULL && strcmp(name, "attnd\n") == 0)
            pid = (int)strtol(g.gl_pathv[i] + strlen("/proc/"), NULL, 10);
        if (f != NULL)
            fclose(f);
    }
    globfree(&g);
    return pid;
}

static void say_no_connection(struct report *r)
{
    int pid = running_daemon();
    if (pid == 0)
        say(r, "daemon", FAIL, "start attnd, or give its address with --endpoint", "%s",
            attn_last_error()->message);
    else
        say(r, "daemon", FAIL,
            "give --endpoint one of the addresses that its log has (\"listening on\"); operators "
            "need its listen.admin, or an ipc or shm address",
            "%s; but attnd runs, as process %d", attn_last_error()->message, pid);
}

static void check_daemon(struct report *r, const struct arguments *a)
{
    attn_client *c = NULL;
    json_t *config = NULL, *stats = NULL;
    struct attn_client_info info = {.struct_size = sizeof info};
    attn_status st = connect_to(a, &c);
    if (st != ATTN_OK) {
        say_no_connection(r);
        return;
    }
    attn_client_info(c, &info);
    say(r, "daemon", OK, "", "attnd %s on %s, backend %s", info.server_version, a->endpoint,
        info.backend);
    st = inspect(c, "config", 0, a->timeout_us, &config);
    if (st == ATTN_OK)
        say(r, "operator", OK, "", "this user may ask and change all");
    else
        say(r, "operator", WARN,
            "on its host, as root or the daemon's user, give --endpoint its ipc or shm address, or "
            "ipc:///run/attnd/attnd.sock, beside which it has a socket for operators "
            "(listen.admin)",
            "%s", attn_last_error()->message);
    if (ask_stats(c, a, &stats) == ATTN_OK)
        check_limits(r, stats, config, strcmp(info.backend, "cpu") != 0);
    json_decref(stats);
    json_decref(config);
    attn_client_close(c);
}

/* A number of /proc or /sys; -1: it can't be read. */
static int64_t file_number(const char *path, const char *key)
{
    char line[256];
    int64_t value = -1;
    FILE *f = fopen(path, "re");
    while (f != NULL && value < 0 && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, key, strlen(key)) == 0)
            value = strtoll(line + strlen(key), NULL, 10);
    if (f != NULL)
        fclose(f);
    return value;
}

static void check_memory(struct report *r)
{
    int64_t kib = file_number("/proc/meminfo", "MemAvailable:");
    say(r, "memory", kib >= 2 << 20 ? OK : WARN,
        "the cpu backend's device.kv_memory (1G unless set) must fit what is available",
        "%.1f GiB are available", (double)kib / (1 << 20));
    int64_t huge = file_number("/proc/meminfo", "HugePages_Free:");
    say(r, "huge pages", OK, "",
        "%" PRId64 " of 2 MiB are free; the cpu backend uses them if they are enough",
        huge < 0 ? 0 : huge);
}

/* Can a device of this kind be opened? */
static bool check_devices(struct report *r, const char *check, const char *pattern, const char *fix)
{
    glob_t g;
    bool has_any = glob(pattern, 0, NULL, &g) == 0;
    for (size_t i = 0; has_any && i < g.gl_pathc; i++) {
        bool may = access(g.gl_pathv[i], R_OK | W_OK) == 0;
        say(r, check, may ? OK : FAIL, fix, "%s: %s", g.gl_pathv[i],
            may ? "may be opened" : strerror(errno));
    }
    globfree(&g);
    return has_any;
}

static void check_mps(struct report *r)
{
    const char *path = getenv("CUDA_MPS_PIPE_DIRECTORY");
    char control[512];
    snprintf(control, sizeof control, "%s/control", path != NULL ? path : "/tmp/nvidia-mps");
    if (access(control, F_OK) == 0)
        say(r, "MPS", OK, "", "its daemon is at %s", control);
    else
        say(r, "MPS", WARN,
            "processes that share the GPU with attnd take turns with it; nvidia-cuda-mps-control "
            "-d "
            "lets them run beside each other",
            "no daemon at %s", control);
}

static void check_devices_of_all_kinds(struct report *r)
{
    bool has_nvidia = check_devices(r, "NVIDIA device", "/dev/nvidia[0-9]*",
                                    "give the daemon's user access to the device file");
    bool has_amd = check_devices(r, "AMD device", "/dev/kfd",
                                 "put the daemon's user into the groups render and video");
    if (has_nvidia)
        check_mps(r);
    if (!has_nvidia && !has_amd)
        say(r, "device", WARN, "load the GPU's driver, or go on with the cpu backend",
            "no GPU: there is neither /dev/nvidia0 nor /dev/kfd");
}

int run_doctor(const struct arguments *a)
{
    struct report r = {.checks = json_array()};
    check_daemon(&r, a);
    check_memory(&r);
    check_devices_of_all_kinds(&r);
    if (a->is_json) {
        json_t *o = json_pack("{s:O, s:b}", "checks", r.checks, "healthy", !r.has_failure);
        print_json(o);
        json_decref(o);
    } else {
        json_t *c;
        size_t i;
        json_array_foreach(r.checks, i, c)
        {
            const char *fix = json_string_value(json_object_get(c, "fix"));
            printf("%-4s  %-14s %s\n", json_string_value(json_object_get(c, "verdict")),
                   json_string_value(json_object_get(c, "check")),
                   json_string_value(json_object_get(c, "found")));
            if (fix != NULL && fix[0] != '\0')
                printf("      %-14s %s\n", "", fix);
        }
    }
    json_decref(r.checks);
    int rc = printed();
    return r.has_failure ? EXIT_FAILED : rc;
}
