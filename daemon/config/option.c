/* option.c: the table of all settings of attnd, and parsing and formatting their values. */
#include "daemon/config/option.h"

#include <assert.h>
#include <ctype.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/address.h"
#include "proto/shm_ring.h"
#include "proto/wire.h"

#define KIB (1ull << 10)
#define MIB (1ull << 20)
#define GIB (1ull << 30)
#define TIB (1ull << 40)
#define MS 1000ull
#define SEC 1000000ull
#define HOUR (3600 * SEC)

#define AT(field) offsetof(struct config, field)
#define NUMBER(section, key, type, field, effect, def, lo, hi, help)                               \
    {                                                                                              \
        section, key, type, effect, AT(field), def, lo, hi, NULL, help                             \
    }
#define COUNT(section, key, ...) NUMBER(section, key, OPTION_COUNT, __VA_ARGS__)
#define BYTES(section, key, ...) NUMBER(section, key, OPTION_BYTES, __VA_ARGS__)
#define TIME(section, key, ...) NUMBER(section, key, OPTION_TIME, __VA_ARGS__)
#define CHOICE(section, key, field, effect, def, choices, help)                                    \
    {                                                                                              \
        section, key, OPTION_CHOICE, effect, AT(field), def, 0,                                    \
            sizeof(((struct config *)0)->field), choices, help                                     \
    }

#define FILE_NAME(section, key, field, help)                                                       \
    {                                                                                              \
        section, key, OPTION_FILE, RESTART, AT(field), "off", 0, 0, NULL, help                     \
    }

/* clang-format off */
const struct config_option config_options[] = {
    CHOICE("device", "backend", backend, RESTART, "auto", "auto cpu cuda hip",
        "What computes attention. auto takes the first of cuda, hip and cpu that opens."),
    TIME("device", "balance", balance_us, AT_ONCE, "1s", 0, HOUR,
        "Of several cards, how often to look whether one has little room or time left and another has\n"
        "much: then sequences of whole pools move there, while they are used. 0: never."),
    {"device", "index", OPTION_TEXT, RESTART, AT(device_index), "0", 0, 0, NULL,
        "Which GPUs, by the driver's numbers: one, several (0,1), eight at most, or all. Each sequence\n"
        "lives on one of them, or is split over all. With the cpu backend every number is one more\n"
        "engine with threads and memory of its own. A device of another backend has that before its\n"
        "number: 0,cpu:0 or cuda:0,hip:0; lanes (gpu:///PATH) need cards of one backend."},
    BYTES("device", "kv_memory", kv_memory_bytes, RESTART, "1G", MIB, 64 * TIB,
        "Memory for the K and V of all pools together, on each device. Taken at start, never grows."),
    COUNT("device", "threads", threads, RESTART, "0", 0, 1024,
        "Threads of the cpu backend. 0: one per core, shared by its engines."),

    {"listen", "address", OPTION_URLS, RESTART, AT(listen), "ipc:///run/attnd/attnd.sock", 0, 0,
        NULL,
        "Where workers connect: ipc:///PATH, tcp://HOST:PORT or tls+tcp://HOST:PORT with nanomsg's\n"
        "protocol, shm:///PATH for workers on this host, through shared memory; gpu:///PATH for lanes of\n"
        "workers on the daemon's GPU. May be given several times. HOST is an address, localhost, or *\n"
        "for every address. Beyond loopback, tls+tcp needs tenants or tls_ca; tcp needs insecure_tcp =\n"
        "yes and tenants. Without any address, it is ipc and attnd.sock in $RUNTIME_DIRECTORY if that is\n"
        "set (systemd does so), else in /run/attnd for root and in $XDG_RUNTIME_DIR for others."},
    FILE_NAME("listen", "tls_cert", tls_cert,
        "The daemon's certificate for tls+tcp addresses, and those of the CAs between, as PEM. This\n"
        "and the files below: an absolute path, or the name of a systemd credential."),
    FILE_NAME("listen", "tls_key", tls_key,
        "Its private key. Only the daemon's user may be able to read it, or root and one group."),
    FILE_NAME("listen", "tls_ca", tls_ca,
        "CA certificates, as PEM: workers show a certificate of one of them, whose common name is\n"
        "their tenant's if there are tenants. off: they are not asked for one."),
    CHOICE("listen", "tls_client_cert", tls_client_cert, AT_ONCE, "required", "required optional",
        "Whether a worker must show its certificate, where tls_ca is set."),
    CHOICE("listen", "tls_min_version", tls_min_version, AT_ONCE, "1.3", "1.3 1.2",
        "Oldest TLS that is spoken. 1.2 is for clients whose library has no other: nng with mbedTLS 2."),
    CHOICE("listen", "insecure_tcp", insecure_tcp, RESTART, "no", "no yes",
        "yes: a tcp address may be other than loopback. Whoever sees the network's packets sees tokens\n"
        "and tensors: for closed networks."),
    FILE_NAME("listen", "tenants", tenants,
        "Who may connect: a file with a section for each tenant, see docs/operations.md. off: everyone\n"
        "who reaches a socket."),
    {"listen", "admin", OPTION_TEXT, RESTART, AT(admin), "auto", 0, 0, NULL,
        "Path, or ipc://PATH, of a Unix socket of mode 0600 for what changes all, such as drain;\n"
        "on other sockets that is answered to root and to attnd's own user alone. auto: the path of\n"
        "the first ipc address, or without one of the address that attnd has without any, with .admin\n"
        "behind it. off: none."},
    {"listen", "http", OPTION_TEXT, RESTART, AT(http), "127.0.0.1:9470", 0, 0, NULL,
        "HOST:PORT of /metrics, /stats, /healthz and /readyz; loopback only. off: none."},
    COUNT("listen", "threads", loops, RESTART, "0", 0, 64,
        "Threads that share the connections over sockets: each reads, decrypts, decodes and answers\n"
        "for its own. 0: one for every four cores, 8 at most."),
    TIME("listen", "spin", loop_spin_us, AT_ONCE, "0", 0, 10 * MS,
        "How long each of them watches its sockets without pause after it had something to do, before\n"
        "it sleeps: steps are answered sooner, and it takes a core meanwhile. 0: not at all."),
    COUNT("listen", "max_peers", max_peers, AT_ONCE, "4096", 4, 1000000,
        "Connections open at once; more are closed at once and counted."),
    COUNT("listen", "peer_share", peer_share, AT_ONCE, "75", 1, 100,
        "Percent that one connection may hold of what the others leave of engine.max_queue_requests,\n"
        "engine.max_queue, cache.io_memory and engine.max_sessions; what it wants beyond is answered\n"
        "\"overloaded\". Below 100 a quarter of each stays free for connections that hold little."),
    COUNT("listen", "principal_share", principal_share, AT_ONCE, "95", 1, 100,
        "The same for all connections of one user of this host, of one certificate or, without one,\n"
        "of one address together, and of listen.max_peers and listen.shm_memory, too. 100: no bound."),
    BYTES("listen", "max_message", max_message_bytes, AT_ONCE, "64M", 64 * KIB, 2 * GIB,
        "Largest message a worker may send. Workers are told when they connect, also of\n"
        "engine.max_step_items and engine.max_step_tokens."),
    TIME("listen", "handshake_timeout", handshake_timeout_us, AT_ONCE, "5s", 100 * MS, HOUR,
        "From connecting to a complete protocol handshake; with tenants, over a network, as long again\n"
        "to a request that is one of theirs."),
    TIME("listen", "body_timeout", body_timeout_us, AT_ONCE, "30s", 100 * MS, HOUR,
        "From the first byte of a message to its last."),
    TIME("listen", "write_timeout", write_timeout_us, AT_ONCE, "30s", 100 * MS, HOUR,
        "For a worker to take its waiting replies; a slower one is cut."),
    TIME("listen", "host_timeout", host_timeout_us, AT_ONCE, "1m", 1000 * MS, HOUR,
        "For the host of a worker on a network to say that it is still there; else the connection ends.\n"
        "For those that connect from then on."),
    BYTES("listen", "max_peer_write", max_peer_write_bytes, AT_ONCE, "64M", 64 * KIB, 64 * GIB,
        "Replies that may wait for one worker before it is cut. One reply alone always may."),
    COUNT("listen", "shm_slots", shm_slots, AT_ONCE, "256", 1, SHM_MAX_SLOTS,
        "Requests that one shm client may have in flight, rounded down to a power of two. This and the\n"
        "next: of clients that connect from then on."),
    BYTES("listen", "shm_client", shm_client_bytes, AT_ONCE, "16M", MIB, 4 * GIB,
        "Memory shared with one shm client: its requests and replies in flight, together, take no\n"
        "more. Pages count as they are touched; on a GPU backend all are pinned."),
    BYTES("listen", "shm_memory", shm_memory_bytes, AT_ONCE, "4G", MIB, 64 * TIB,
        "The same for all shm clients together, with 6 KiB for each slot, and for lanes: the regions\n"
        "of both sides. More clients are refused."),

    COUNT("cache", "max_sequences", max_sequences, RESTART, "4096", 1, 16777216,
        "Sequences open at once, of all pools."),
    COUNT("cache", "max_seq_tokens", max_seq_tokens, RESTART, "131072", 16, 1 << 28,
        "Tokens of one sequence."),
    COUNT("cache", "max_pools", max_pools, RESTART, "16", 1, 1024,
        "Pools (KV geometries) at once."),
    COUNT("cache", "max_layers", max_layers, RESTART, "128", 1, WIRE_MAX_LAYERS,
        "Layers of a pool."),
    BYTES("cache", "table_memory", table_memory_bytes, RESTART, "0", 0, TIB,
        "Host memory, for each device, for what tables take as they fill: token ids and table entries of\n"
        "sequences beyond the first 1,024 of each, their notes, and the records of blocks. 0: 64M and a\n"
        "256th of device.kv_memory. When it is used up, what needs more is refused as \"over quota\"."),
    BYTES("cache", "io_memory", io_memory_bytes, RESTART, "256M", MIB, TIB,
        "Memory for messages and replies in flight, rounded up to a power of two. Taken at start;\n"
        "when it is used up, requests are answered \"overloaded\"."),
    BYTES("cache", "host_memory", host_memory_bytes, RESTART, "0", 0, 64 * TIB,
        "Host memory, for each device, for blocks of known tokens that make way for others; 0: they\n"
        "are computed anew. Page-locked with a GPU. Taken when it is needed, gone with the process."),
    BYTES("cache", "idle_memory", idle_memory_bytes, RESTART, "0", 0, 4 * TIB,
        "Host memory, for each device, for blocks that make way when blocks run out: of idle\n"
        "sequences, and those that steps do not choose; 0: such requests are answered \"out of blocks\".\n"
        "Page-locked with a GPU. Kept as the cache is: with another size, sequences that have blocks\n"
        "there are dropped at a restart."),
    FILE_NAME("cache", "disk_path", disk_path,
        "Folder for a file, for each device, of what makes way in host memory. It has no name there\n"
        "and is gone with the process. off: none; with disk_size."),
    BYTES("cache", "disk_size", disk_bytes, RESTART, "0", 0, 16 * TIB,
        "Size of that file, taken at the start; 0: none. Without host_memory 64 MiB of memory are\n"
        "used for what is on its way."),

    COUNT("engine", "max_batch_items", max_batch_items, RESTART, "4096", 1, 65536,
        "Items (sequences of a step) launched together."),
    COUNT("engine", "max_batch_tokens", max_batch_tokens, RESTART, "16384", 1, 1 << 20,
        "Query tokens launched together."),
    COUNT("engine", "max_step_items", max_step_items, AT_ONCE, "1024", 1, WIRE_MAX_STEP_ITEMS,
        "Items of one step; at most max_batch_items."),
    COUNT("engine", "max_step_tokens", max_step_tokens, AT_ONCE, "8192", 1, 1 << 20,
        "Query tokens of one step; at most max_batch_tokens."),
    COUNT("engine", "max_queue_requests", max_queue_requests, AT_ONCE, "8192", 8, 1 << 20,
        "Requests that may wait; more are answered \"overloaded\" with the time to wait."),
    BYTES("engine", "max_queue", max_queue_bytes, AT_ONCE, "128M", MIB, TIB,
        "The same bound in bytes of messages."),
    TIME("engine", "default_timeout", default_timeout_us, AT_ONCE, "10s", 100 * MS, 24 * HOUR,
        "Deadline of a request that names none."),
    TIME("engine", "max_timeout", max_timeout_us, AT_ONCE, "10m", 100 * MS, 24 * HOUR,
        "Longest deadline a request may name; longer ones are shortened to it."),
    COUNT("engine", "max_sessions", max_sessions, RESTART, "4096", 2, 1 << 20,
        "Sessions (hello messages) at once. A few more are kept for the admin socket's clients."),
    TIME("engine", "lease", lease_us, AT_ONCE, "30s", 10 * MS, 24 * HOUR,
        "Silence of a session after which its sequences are freed. A shorter one counts after one more\n"
        "of the old: by then clients have been told."),
    TIME("engine", "spin", spin_us, AT_ONCE, "200us", 0, 10 * MS,
        "How long the engine watches for the next request of shm clients before it sleeps, while\n"
        "they send often. 0: not at all."),
    TIME("engine", "fence", fence_us, AT_ONCE, "0", 0, HOUR,
        "Appends are served for this long after an operator's `fence`, and refused as fenced from then\n"
        "on, until the next: for a cluster that must know when a daemon that it can't reach has\n"
        "stopped. 0: they are always served."),
    TIME("engine", "drain_delay", drain_delay_us, AT_ONCE, "0", 0, HOUR,
        "How long SIGTERM only makes /readyz fail, for balancers to see it, before the drain begins."),
    TIME("engine", "drain_timeout", drain_timeout_us, AT_ONCE, "30s", 0, HOUR,
        "How long SIGTERM waits for requests in flight. Then tokens are finished, and none is begun."),
    TIME("engine", "token_timeout", token_timeout_us, AT_ONCE, "1s", 0, HOUR,
        "How long a drain waits for the next layer of a token that some layers have."),
    TIME("engine", "stall_timeout", stall_timeout_us, AT_ONCE, "30s", 100 * MS, HOUR,
        "A thread that has shown no life for this long makes /healthz fail. A device that has given no\n"
        "batch back for this long is taken for lost."),

    CHOICE("log", "level", log_level, AT_ONCE, "info", "error warn info debug",
        "Least severe messages that are logged."),
    CHOICE("log", "format", log_format, AT_ONCE, "logfmt", "logfmt json",
        "How lines are written. The journal gets them bare, with a field per value."),

    TIME("stats", "slow_step", slow_step_us, AT_ONCE, "1s", 0, HOUR,
        "A step that takes longer, from its first byte to its reply's last, is logged and kept with\n"
        "its times by stage (attnctl slow). 0: none."),
    COUNT("stats", "canary", canary, AT_ONCE, "10000", 0, 1000000000,
        "Of so many items one is computed again by a float64 reference while the engine is idle, on a\n"
        "thread of its own. An error beyond its bound is logged and makes /healthz fail. 0: none."),
};
/* clang-format on */
const size_t config_n_options = sizeof(config_options) / sizeof(config_options[0]);

static const struct unit {
    const char *text;
    uint64_t factor;
} byte_units[] = {{"", 1}, {"K", KIB}, {"M", MIB}, {"G", GIB}, {"T", TIB}},
  time_units[] = {{"us", 1}, {"ms", MS}, {"s", SEC}, {"m", 60 * SEC}, {"h", HOUR}},
  no_units[] = {{"", 1}};

static void units_of(enum option_type type, const struct unit **out_units, size_t *out_n)
{
    *out_units = type == OPTION_BYTES ? byte_units : type == OPTION_TIME ? time_units : no_units;
    *out_n = type == OPTION_BYTES || type == OPTION_TIME ? 5 : 1;
}

/* Formats a number in the largest unit that divides it: "64M". */
static void format_number(enum option_type type, uint64_t v, char *out, size_t out_bytes)
{
    const struct unit *units;
    size_t n;
    units_of(type, &units, &n);
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (v != 0 && v % units[i].factor == 0)
            best = i;
    if (v == 0)
        snprintf(out, out_bytes, "0");
    else
        snprintf(out, out_bytes, "%" PRIu64 "%s", v / units[best].factor, units[best].text);
}

static attn_status parse_number(const struct config_option *o, const char *text, uint64_t *out,
                                char *why, size_t why_bytes)
{
    static const char *const kinds[] = {
        [OPTION_COUNT] = "a whole number",
        [OPTION_BYTES] = "a size (such as 512K, 64M, 2G)",
        [OPTION_TIME] = "a time with its unit (such as 50us, 250ms, 10s, 5m)",
    };
    uint64_t v = 0;
    const char *p = text;
    bool is_huge = false;
    for (; isdigit((unsigned char)*p); p++)
        is_huge |= __builtin_mul_overflow(v, 10u, &v) ||
                   __builtin_add_overflow(v, (uint64_t)(*p - '0'), &v);
    const struct unit *units, *unit = NULL;
    size_t n;
    units_of(o->type, &units, &n);
    for (size_t i = 0; i < n && p > text; i++)
        if (strcmp(p, units[i].text) == 0)
            unit = &units[i];
    if (unit == NULL && p > text && *p == '\0' && v == 0 && !is_huge)
        unit = &units[0]; /* 0 needs no unit */
    if (unit == NULL) {
        snprintf(why, why_bytes, "is not %s", kinds[o->type]);
        return ATTN_EINVAL;
    }
    is_huge |= __builtin_mul_overflow(v, unit->factor, &v);
    if (is_huge || v < o->min || v > o->max) {
        char range[64];
        config_option_range(o, range, sizeof(range));
        snprintf(why, why_bytes, "is out of range, %s", range);
        return ATTN_EINVAL;
    }
    *out = v;
    return ATTN_OK;
}

static attn_status parse_choice(const struct config_option *o, const char *text, char *out,
                                char *why, size_t why_bytes)
{
    size_t n = strlen(text);
    for (const char *p = o->choices; n > 0 && *p != '\0'; p += strcspn(p, " "), p += *p == ' ')
        if (strcspn(p, " ") == n && memcmp(p, text, n) == 0) {
            memset(out, 0, o->max);
            memcpy(out, text, n);
            return ATTN_OK;
        }
    char range[64];
    config_option_range(o, range, sizeof(range));
    snprintf(why, why_bytes, "is not one of %s", range);
    return ATTN_EINVAL;
}

static attn_status add_url(const char *url, struct config *c, char *why, size_t why_bytes)
{
    struct address a;
    char reason[256];
    if (address_parse_url(url, &a, reason, sizeof(reason)) != ATTN_OK) {
        snprintf(why, why_bytes, "cannot be listened on: %s", reason);
        return ATTN_EINVAL;
    }
    if (c->n_listen == CONFIG_MAX_LISTEN) {
        snprintf(why, why_bytes, "is one address too many, at most %d", CONFIG_MAX_LISTEN);
        return ATTN_EINVAL;
    }
    for (uint32_t i = 0; i < c->n_listen; i++)
        if (strcmp(c->listen[i], url) == 0) {
            snprintf(why, why_bytes, "is given twice");
            return ATTN_EINVAL;
        }
    char *copy = strdup(url);
    if (copy == NULL) {
        snprintf(why, why_bytes, "cannot be kept: out of memory");
        return ATTN_ENOMEM;
    }
    c->listen[c->n_listen++] = copy;
    return ATTN_OK;
}

/* Adds the urls of one value, separated by blanks or commas. */
static attn_status add_urls(const char *text, struct config *c, char *why, size_t why_bytes)
{
    static const char separators[] = " \t,";
    uint32_t n_before = c->n_listen;
    for (const char *p = text; *p != '\0';) {
        p += strspn(p, separators);
        size_t n = strcspn(p, separators);
        char url[256];
        if (n == 0)
            break;
        if (n >= sizeof(url)) {
            snprintf(why, why_bytes, "is too long for an address");
            return ATTN_EINVAL;
        }
        memcpy(url, p, n);
        url[n] = '\0';
        attn_status st = add_url(url, c, why, why_bytes);
        if (st != ATTN_OK)
            return st;
        p += n;
    }
    if (c->n_listen == n_before) {
        snprintf(why, why_bytes, "names no address");
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

static attn_status set_text(const char *text, char **out, char *why, size_t why_bytes)
{
    char *copy = strdup(text);
    if (copy == NULL) {
        snprintf(why, why_bytes, "cannot be kept: out of memory");
        return ATTN_ENOMEM;
    }
    free(*out);
    *out = copy;
    return ATTN_OK;
}

static attn_status set_http(const char *text, char **out, char *why, size_t why_bytes)
{
    bool is_off = strcmp(text, "off") == 0;
    struct address a;
    char reason[256];
    if (!is_off && address_parse_host_port(text, &a, reason, sizeof(reason)) != ATTN_OK) {
        snprintf(why, why_bytes, "cannot be listened on: %s", reason);
        return ATTN_EINVAL;
    }
    if (!is_off && !a.is_loopback) {
        snprintf(why, why_bytes,
                 "is not a loopback address; whoever reaches it sees everything: give "
                 "127.0.0.1:PORT, and let others in by a proxy that asks who they are");
        return ATTN_EINVAL;
    }
    return set_text(is_off ? "" : text, out, why, why_bytes);
}

/* Sets a file: a path, or the name of a systemd credential. */
static attn_status set_file(const char *text, char **out, char *why, size_t why_bytes)
{
    bool is_off = strcmp(text, "off") == 0;
    if (!is_off && text[0] != '/' && (text[0] == '\0' || strchr(text, '/') != NULL)) {
        snprintf(why, why_bytes, "is neither an absolute path nor the name of a credential");
        return ATTN_EINVAL;
    }
    return set_text(is_off ? "" : text, out, why, why_bytes);
}

static attn_status set_admin(const char *text, char **out, char *why, size_t why_bytes)
{
    bool is_off = strcmp(text, "off") == 0, is_auto = strcmp(text, "auto") == 0;
    char url[256], reason[256];
    struct address a;
    if (strncmp(text, "ipc://", 6) == 0) /* may be written like other addresses */
        text += 6;
    int n = snprintf(url, sizeof(url), "admin://%s", text);
    if (!is_off && !is_auto &&
        (n >= (int)sizeof(url) || address_parse_url(url, &a, reason, sizeof(reason)) != ATTN_OK)) {
        snprintf(why, why_bytes, "cannot be listened on: %s",
                 n >= (int)sizeof(url) ? "too long" : reason);
        return ATTN_EINVAL;
    }
    return set_text(is_off ? "" : text, out, why, why_bytes);
}

/* Parses one device of a list: N, or BACKEND:N. Returns its end; NULL: it is not one. */
static const char *parse_device(const char *at, struct config_device *out)
{
    static const char *const backends[] = {"cpu", "cuda", "hip"};
    *out = (struct config_device){0};
    for (size_t i = 0; i < sizeof backends / sizeof backends[0]; i++) {
        size_t n = strlen(backends[i]);
        if (strncmp(at, backends[i], n) != 0 || at[n] != ':')
            continue;
        memcpy(out->backend, backends[i], n);
        at += n + 1;
        break;
    }
    char *end;
    unsigned long index = strtoul(at, &end, 10);
    if (!isdigit((unsigned char)*at) || end - at > 3 || index > 127)
        return NULL;
    out->index = (uint32_t)index;
    return end;
}

bool config_devices(const char *text, struct config_device out[CONFIG_MAX_DEVICES], uint32_t *out_n)
{
    *out_n = 0;
    if (strcmp(text, "all") == 0)
        return true;
    for (const char *at = text;; at++) {
        struct config_device d;
        at = parse_device(at, &d);
        if (at == NULL || *out_n == CONFIG_MAX_DEVICES || (*at != ',' && *at != '\0'))
            return false;
        for (uint32_t i = 0; i < *out_n; i++)
            if (out[i].index == d.index && strcmp(out[i].backend, d.backend) == 0)
                return false;
        out[(*out_n)++] = d;
        if (*at == '\0')
            return true;
    }
}

static attn_status set_devices(const char *text, char **out, char *why, size_t why_bytes)
{
    struct config_device devices[CONFIG_MAX_DEVICES];
    uint32_t n;
    if (config_devices(text, devices, &n))
        return set_text(text, out, why, why_bytes);
    snprintf(why, why_bytes,
             "is neither \"all\" nor a list such as 0,1 or 0,cpu:0 of up to %d different devices, "
             "numbers 0 to 127",
             CONFIG_MAX_DEVICES);
    return ATTN_EINVAL;
}

attn_status config_option_parse(const struct config_option *o, const char *text, struct config *c,
                                char *why, size_t why_bytes)
{
    char *field = (char *)c + o->offset;
    uint64_t v = 0;
    attn_status st;
    switch (o->type) {
    case OPTION_COUNT:
        st = parse_number(o, text, &v, why, why_bytes);
        if (st == ATTN_OK)
            *(uint32_t *)(void *)field = (uint32_t)v;
        return st;
    case OPTION_BYTES:
    case OPTION_TIME:
        st = parse_number(o, text, &v, why, why_bytes);
        if (st == ATTN_OK)
            *(uint64_t *)(void *)field = v;
        return st;
    case OPTION_CHOICE:
        return parse_choice(o, text, field, why, why_bytes);
    case OPTION_TEXT:
        if (o->offset == AT(device_index))
            return set_devices(text, (char **)(void *)field, why, why_bytes);
        return (o->offset == AT(admin) ? set_admin : set_http)(text, (char **)(void *)field, why,
                                                               why_bytes);
    case OPTION_FILE:
        return set_file(text, (char **)(void *)field, why, why_bytes);
    case OPTION_URLS:
        return add_urls(text, c, why, why_bytes);
    }
    return ATTN_EINTERNAL;
}

void config_option_clear(const struct config_option *o, struct config *c)
{
    if (o->type == OPTION_URLS) {
        while (c->n_listen > 0)
            free(c->listen[--c->n_listen]);
    } else if (o->type == OPTION_TEXT || o->type == OPTION_FILE) {
        char **text = (char **)(void *)((char *)c + o->offset);
        free(*text);
        *text = NULL;
    }
}

void config_option_format(const struct config_option *o, const struct config *c, uint32_t entry,
                          char *out, size_t out_bytes)
{
    const char *field = (const char *)c + o->offset;
    switch (o->type) {
    case OPTION_COUNT:
        format_number(o->type, *(const uint32_t *)(const void *)field, out, out_bytes);
        break;
    case OPTION_BYTES:
    case OPTION_TIME:
        format_number(o->type, *(const uint64_t *)(const void *)field, out, out_bytes);
        break;
    case OPTION_CHOICE:
        snprintf(out, out_bytes, "%s", field);
        break;
    case OPTION_TEXT:
    case OPTION_FILE: {
        const char *text = *(char *const *)(const void *)field;
        snprintf(out, out_bytes, "%s", text == NULL || text[0] == '\0' ? "off" : text);
        break;
    }
    case OPTION_URLS:
        snprintf(out, out_bytes, "%s", c->listen[entry]);
        break;
    }
}

bool config_option_is_equal(const struct config_option *o, const struct config *a,
                            const struct config *b)
{
    const char *x = (const char *)a + o->offset, *y = (const char *)b + o->offset;
    switch (o->type) {
    case OPTION_COUNT:
        return memcmp(x, y, sizeof(uint32_t)) == 0;
    case OPTION_BYTES:
    case OPTION_TIME:
        return memcmp(x, y, sizeof(uint64_t)) == 0;
    case OPTION_CHOICE:
        return strcmp(x, y) == 0;
    case OPTION_TEXT:
    case OPTION_FILE:
        return strcmp(*(char *const *)(const void *)x, *(char *const *)(const void *)y) == 0;
    case OPTION_URLS:
        if (a->n_listen != b->n_listen)
            return false;
        for (uint32_t i = 0; i < a->n_listen; i++)
            if (strcmp(a->listen[i], b->listen[i]) != 0)
                return false;
        return true;
    }
    return false;
}

void config_option_copy(const struct config_option *o, struct config *to, const struct config *from)
{
    char *dst = (char *)to + o->offset;
    const char *src = (const char *)from + o->offset;
    assert(o->effect == AT_ONCE && o->type != OPTION_TEXT && o->type != OPTION_FILE &&
           o->type != OPTION_URLS);
    if (o->type == OPTION_CHOICE)
        memcpy(dst, src, o->max);
    else if (o->type == OPTION_COUNT) /* the engine's thread may be reading it */
        __atomic_store_n((uint32_t *)(void *)dst, *(const uint32_t *)(const void *)src,
                         __ATOMIC_RELAXED);
    else
        __atomic_store_n((uint64_t *)(void *)dst, *(const uint64_t *)(const void *)src,
                         __ATOMIC_RELAXED);
}

void config_option_range(const struct config_option *o, char *out, size_t out_bytes)
{
    char lo[32], hi[32];
    out[0] = '\0';
    if (o->type == OPTION_COUNT || o->type == OPTION_BYTES || o->type == OPTION_TIME) {
        format_number(o->type, o->min, lo, sizeof(lo));
        format_number(o->type, o->max, hi, sizeof(hi));
        snprintf(out, out_bytes, "%s to %s", lo, hi);
    } else if (o->type == OPTION_CHOICE) {
        size_t n = 0;
        for (const char *p = o->choices; *p != '\0' && n + 3 < out_bytes; p++) {
            if (*p == ' ')
                out[n++] = ',';
            out[n++] = *p;
        }
        out[n] = '\0';
    }
}
