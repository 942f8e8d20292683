/* config.h: the daemon's settings: defaults, then an INI file, then ATTND_* variables, then flags.
 *
 * The option table (config/option.c) is the one place that defines a setting: name, type, range,
 * default, help text, and whether SIGHUP changes it. --help, --print-config (with the origin of
 * each value) and systemd/attnd.conf follow it. An unknown key or a value out of range is an error
 * that names it (and the nearest known key). An unknown variable is not: others than attnd set
 * ATTND_ variables, too; config.unknown says so. Nothing here logs; the caller prints what is
 * wrong.
 */
#ifndef ATTND_DAEMON_CONFIG_CONFIG_H
#define ATTND_DAEMON_CONFIG_CONFIG_H

#include <stdio.h>

#include "proto/attn_types.h"

#define CONFIG_MAX_LISTEN 8
#define CONFIG_MAX_DEVICES 8

struct config {
    /* [device] */
    char backend[16]; /* auto, cpu, cuda, hip */
    char faults[128]; /* TEXT of --backend NAME+faults:TEXT (kernels/faults.h); "": none */
    char *device_index; /* "0,1", "all" */
    uint64_t kv_memory_bytes; /* KV memory of all pools */
    uint32_t threads; /* of the cpu backend; 0: one per core */
    /* [listen] */
    char *listen[CONFIG_MAX_LISTEN]; /* urls, owned */
    uint32_t n_listen;
    uint32_t loops; /* listen.threads; 0: by the number of cores */
    uint64_t loop_spin_us; /* listen.spin */
    char *admin; /* path of the admin socket, "auto" or "" off */
    char *http; /* host:port of the stats endpoint, "" off */
    uint32_t max_peers;
    uint64_t max_message_bytes;
    uint64_t handshake_timeout_us, body_timeout_us, write_timeout_us, host_timeout_us;
    uint32_t peer_share, principal_share; /* percent of what others leave (share.h) */
    uint64_t max_peer_write_bytes; /* replies queued to one peer before it is cut */
    uint32_t shm_slots; /* requests of one shm client in flight */
    uint64_t shm_client_bytes, shm_memory_bytes; /* shared with one client, with all clients */
    char *tls_cert, *tls_key, *tls_ca; /* files of tls+tcp://, "" none; see credential.h */
    char tls_client_cert[16]; /* with tls_ca: required, optional */
    char tls_min_version[8]; /* 1.3, 1.2 */
    char insecure_tcp[8]; /* yes: tcp:// beyond loopback, without TLS */
    char *tenants; /* file; "": there are no tenants */
    /* [cache] */
    uint32_t max_sequences, max_seq_tokens, max_pools, max_layers;
    uint64_t table_memory_bytes; /* of each card, for tables that fill; 0: config_table_bytes */
    uint64_t io_memory_bytes; /* message buffers */
    uint64_t host_memory_bytes; /* of each card, for evicted blocks; 0: none */
    uint64_t idle_memory_bytes; /* of each card, for blocks that make way and are kept; 0: none */
    char *disk_path; /* folder, "" none */
    uint64_t disk_bytes; /* of each card's file there; 0: none */
    /* [engine] */
    uint32_t max_batch_items, max_batch_tokens;
    uint32_t max_step_items, max_step_tokens;
    uint32_t max_queue_requests;
    uint64_t max_queue_bytes;
    uint64_t default_timeout_us, max_timeout_us;
    uint32_t max_sessions;
    uint64_t lease_us;
    uint64_t spin_us;
    uint64_t fence_us; /* appends are served for so long after a fence request; 0: always */
    uint64_t drain_delay_us; /* before a drain: /readyz fails, all is still served */
    uint64_t drain_timeout_us;
    uint64_t token_timeout_us; /* of a drain: longest wait for the next layer of a begun token */
    uint64_t stall_timeout_us; /* a thread silent for longer makes /healthz fail */
    /* [log] */
    char log_level[8];
    char log_format[8]; /* logfmt, json */
    /* [stats] */
    uint64_t slow_step_us; /* 0: none is slow */
    uint64_t balance_us; /* how often cards are compared for balance; 0: never */
    uint32_t canary; /* one item in so many is recomputed; 0: none */

    char **origins; /* where each option's value came from, in the table's order */
    char *unknown; /* ATTND_ variables that are no settings: a sentence each, a line each; NULL */
};

/* Reads a setting that may change while the daemon runs. Any thread. */
#define config_now(cfg, field) __atomic_load_n(&(cfg)->field, __ATOMIC_RELAXED)

/* What the command line asked for besides settings. */
enum config_action {
    CONFIG_RUN,
    CONFIG_CHECK, /* --check-config: exit 0 if config_load succeeded */
    CONFIG_PRINT, /* --print-config */
    CONFIG_HELP,
    CONFIG_VERSION,
    CONFIG_SELF_TEST, /* --self-test: checks the backend that would be used */
    CONFIG_SUPERVISE, /* --supervise */
};

/* Why config_load failed. */
struct config_fault {
    char why[2048]; /* names source, key and value */
    bool is_flag; /* the fault is in the command line */
};

/* Fills *c from all sources; config_fini frees it, also of an empty one. On failure only *out_fault
 * is written and *c is empty. For CONFIG_HELP and CONFIG_VERSION no source is read and *c is empty,
 * too; for CONFIG_SELF_TEST it need not have an address to listen at. */
attn_status config_load(int argc, char **argv, struct config *c, enum config_action *out_action,
                        struct config_fault *out_fault);

/* The files that settings name. */
enum { CONFIG_MAX_FILES = 4 };
struct config_file {
    const char *name; /* of the setting, as "listen.tenants" */
    const char *path; /* or a credential's name */
};
uint32_t config_files(const struct config *c, struct config_file out[CONFIG_MAX_FILES]);
/* Fills *c from what config_print wrote to f, and from nothing else; of files[], path counts. Fails
 * as config_load does. */
attn_status config_load_printed(FILE *f, const struct config_file *files, uint32_t n_files,
                                struct config *c, struct config_fault *out_fault);

/* Called for each setting that changed, with its new value as text (of a list, the first entry).
 * is_taken: it takes effect at once; else after a restart. */
typedef void (*config_change_fn)(void *user, const char *name, const char *value, bool is_taken);
/* Copies the settings that take effect at once from *now to *c, and calls tell for every setting
 * that differs. Numbers are stored atomically, so other threads may read them by config_now. */
void config_take_over(struct config *c, const struct config *now, config_change_fn tell,
                      void *user);
/* Makes *out_next a copy of *c with one setting changed, which must take effect at once; the copy
 * owns nothing.
 * Errors ATTN_ENOTFOUND no such setting; ATTN_ENOTSUP it needs a restart; ATTN_EINVAL the value is
 *          wrong in itself or together with others */
attn_status config_propose(const struct config *c, const char *name, const char *value,
                           struct config *out_next, char *why, size_t why_bytes);
/* Takes that setting over from *next, which config_propose made; stores it like
 * config_take_over. */
void config_set(struct config *c, const char *name, const struct config *next);
/* Writes all settings to f as an INI file, each with its origin ("# from ..."). */
void config_print(const struct config *c, FILE *f);
/* Host memory of each card for evicted blocks, including blocks on their way to the disk file. */
uint64_t config_tier_bytes(const struct config *c);
/* The same for the records of blocks in that memory, and for those of blocks in the file. */
uint64_t config_tier_record_bytes(const struct config *c);
uint64_t config_disk_record_bytes(const struct config *c);
/* Host memory of each card for what the cache's tables take as they fill. */
uint64_t config_table_bytes(const struct config *c);
/* Parses a list of devices, as of device.index. *out_n 0: all devices. false: it is not valid. */
struct config_device {
    char backend[8]; /* "": device.backend */
    uint32_t index;
};
bool config_devices(const char *text, struct config_device out[CONFIG_MAX_DEVICES],
                    uint32_t *out_n);
/* The url of the admin socket; false: there is none. */
bool config_admin_url(const struct config *c, char *out, size_t out_bytes);
/* Whether that is only for operators to find a daemon without ipc addresses: another daemon may
 * have it, and this one starts all the same. */
bool config_admin_is_extra(const struct config *c);
void config_help(FILE *f);
void config_fini(struct config *c);

#endif
