/* check.c: rules over several settings: which must agree, and what follows from them. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/address.h"
#include "daemon/config/option.h"

#define TIER_STAGING_BYTES ((uint64_t)64 << 20) /* for a disk where cache.host_memory is 0 */
#define TIER_RECORD_PART                                                                           \
    16 /* of the blocks' bytes, for their records: enough for blocks of 4 KiB */
#define DISK_RECORD_PART 256 /* for blocks of 64 KiB: of smaller ones a file is not filled */
#define TIER_RECORD_BYTES ((uint64_t)16 << 20)
#define TABLE_BYTES ((uint64_t)64 << 20) /* cache.table_memory where that is 0, with */
#define TABLE_LEAST_BYTES ((uint64_t)1 << 20)
#define TABLE_PART_OF_KV 256 /* so much of device.kv_memory, for the records of small blocks */

/* Which settings an address requires depends on how far it can be reached. */
static attn_status check_listeners(const struct config *c, char *why, size_t why_bytes)
{
    bool has_tenants = c->tenants[0] != '\0', has_ca = c->tls_ca[0] != '\0';
    for (uint32_t i = 0; i < c->n_listen; i++) {
        const char *url = c->listen[i], *needs = NULL;
        struct address a;
        if (address_parse_url(url, &a, why, why_bytes) != ATTN_OK)
            return ATTN_EINVAL;
        if (a.is_tls && (c->tls_cert[0] == '\0' || c->tls_key[0] == '\0'))
            needs = c->tls_cert[0] == '\0' ? "needs listen.tls_cert" : "needs listen.tls_key";
        else if (a.is_tls && !a.is_loopback && !has_tenants &&
                 !(has_ca && strcmp(c->tls_client_cert, "required") == 0))
            needs = "is not a loopback address: it needs tokens (listen.tenants) or client "
                    "certificates (listen.tls_ca, listen.tls_client_cert = required)";
        else if (!a.is_tls && !a.is_loopback && strcmp(c->insecure_tcp, "yes") != 0)
            needs = "is not a loopback address: use tls+tcp://, or set listen.insecure_tcp = yes "
                    "if nobody else sees the network's packets";
        else if (!a.is_tls && !a.is_loopback && !has_tenants)
            needs = "is not a loopback address: with listen.insecure_tcp it needs tokens "
                    "(listen.tenants)";
        if (needs != NULL) {
            snprintf(why, why_bytes, "listen.address = %s (%s) %s", url,
                     c->origins[config_option_find("listen.address") - config_options], needs);
            return ATTN_EINVAL;
        }
    }
    return ATTN_OK;
}

attn_status config_check(const struct config *c, char *why, size_t why_bytes)
{
    const struct {
        const char *small_name, *large_name;
        uint64_t small, large;
    } pairs[] = {
        {"engine.max_step_items", "engine.max_batch_items", c->max_step_items, c->max_batch_items},
        {"engine.max_step_tokens", "engine.max_batch_tokens", c->max_step_tokens,
         c->max_batch_tokens},
        {"engine.default_timeout", "engine.max_timeout", c->default_timeout_us, c->max_timeout_us},
        {"listen.max_message", "cache.io_memory", c->max_message_bytes, c->io_memory_bytes},
        {"listen.max_message", "engine.max_queue", c->max_message_bytes, c->max_queue_bytes},
        {"listen.shm_client", "listen.shm_memory", c->shm_client_bytes, c->shm_memory_bytes},
    };
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        if (pairs[i].small <= pairs[i].large)
            continue;
        char text[2][64];
        const char *names[2] = {pairs[i].small_name, pairs[i].large_name};
        const char *origins[2];
        for (int k = 0; k < 2; k++) {
            const struct config_option *o = config_option_find(names[k]);
            config_option_format(o, c, 0, text[k], sizeof(text[k]));
            origins[k] = c->origins[o - config_options];
        }
        snprintf(why, why_bytes, "%s = %s (%s) is more than %s = %s (%s)", names[0], text[0],
                 origins[0], names[1], text[1], origins[1]);
        return ATTN_EINVAL;
    }
    if (c->table_memory_bytes > 0 && c->table_memory_bytes < TABLE_LEAST_BYTES) {
        const struct config_option *o = config_option_find("cache.table_memory");
        char text[64];
        config_option_format(o, c, 0, text, sizeof text);
        snprintf(why, why_bytes, "cache.table_memory = %s (%s) is less than 1M, and not 0", text,
                 c->origins[o - config_options]);
        return ATTN_EINVAL;
    }
    if ((c->disk_bytes > 0) != (c->disk_path[0] != '\0')) {
        bool has_size = c->disk_bytes > 0;
        snprintf(why, why_bytes, "cache.%s is set, and cache.%s is not",
                 has_size ? "disk_size" : "disk_path", has_size ? "disk_path" : "disk_size");
        return ATTN_EINVAL;
    }
    return check_listeners(c, why, why_bytes);
}

uint64_t config_tier_bytes(const struct config *c)
{
    return c->host_memory_bytes > 0 || c->disk_bytes == 0 ? c->host_memory_bytes
                                                          : TIER_STAGING_BYTES;
}

uint64_t config_tier_record_bytes(const struct config *c)
{
    uint64_t n = config_tier_bytes(c);
    return n == 0 ? 0 : n / TIER_RECORD_PART + TIER_RECORD_BYTES;
}

uint64_t config_disk_record_bytes(const struct config *c)
{
    return c->disk_bytes == 0 ? 0 : c->disk_bytes / DISK_RECORD_PART + TIER_RECORD_BYTES;
}

uint64_t config_table_bytes(const struct config *c)
{
    return c->table_memory_bytes > 0 ? c->table_memory_bytes
                                     : TABLE_BYTES + c->kv_memory_bytes / TABLE_PART_OF_KV;
}

bool config_default_path(char *out, size_t out_bytes, char *why, size_t why_bytes)
{
    const char *runtime = getenv("RUNTIME_DIRECTORY"), *xdg = getenv("XDG_RUNTIME_DIR");
    const char *dir = "/run/attnd";
    if (runtime != NULL && runtime[0] != '\0') {
        dir = runtime; /* the first of several */
    } else if (geteuid() != 0) {
        if (xdg == NULL || xdg[0] == '\0') {
            snprintf(why, why_bytes,
                     "listen.address has no default for a user other than root without "
                     "$XDG_RUNTIME_DIR; give one");
            return false;
        }
        dir = xdg;
    }
    int n = snprintf(out, out_bytes, "%.*s/attnd.sock", (int)strcspn(dir, ":"), dir);
    if (n < (int)out_bytes)
        return true;
    snprintf(why, why_bytes, "listen.address: the default is too long: %s", dir);
    return false;
}

bool config_admin_is_extra(const struct config *c)
{
    bool has_ipc = false;
    for (uint32_t i = 0; i < c->n_listen; i++)
        has_ipc |= strncmp(c->listen[i], "ipc://", 6) == 0;
    return !has_ipc && strcmp(c->admin, "auto") == 0;
}

bool config_admin_url(const struct config *c, char *out, size_t out_bytes)
{
    static const char scheme[] = "ipc://";
    struct address a;
    char path[200], why[256];
    const char *beside = NULL;
    if (strcmp(c->admin, "auto") != 0) {
        snprintf(out, out_bytes, "admin://%s", c->admin);
        return c->admin[0] != '\0';
    }
    for (uint32_t i = c->n_listen; i-- > 0;)
        if (strncmp(c->listen[i], scheme, strlen(scheme)) == 0)
            beside = c->listen[i] + strlen(scheme);
    if (beside == NULL && config_default_path(path, sizeof(path), why, sizeof(why)))
        beside = path;
    if (beside == NULL)
        return false;
    int n = snprintf(out, out_bytes, "admin://%s.admin", beside);
    return n < (int)out_bytes && address_parse_url(out, &a, why, sizeof(why)) == ATTN_OK;
}

uint32_t config_files(const struct config *c, struct config_file out[CONFIG_MAX_FILES])
{
    const struct config_file all[CONFIG_MAX_FILES] = {
        {"listen.tls_cert", c->tls_cert},
        {"listen.tls_key", c->tls_key},
        {"listen.tls_ca", c->tls_ca},
        {"listen.tenants", c->tenants},
    };
    uint32_t n = 0;
    for (uint32_t i = 0; i < CONFIG_MAX_FILES; i++)
        if (all[i].path[0] != '\0')
            out[n++] = all[i];
    return n;
}
