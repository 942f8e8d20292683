/* check.c: looks at what settings name: files, folders, addresses, backends, memory. */
#define _GNU_SOURCE /* O_PATH */
#include "daemon/process/check.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sysexits.h>
#include <unistd.h>

#include "cache/kv.h"
#include "daemon/base/address.h"
#include "daemon/engine/engine.h"
#include "daemon/process/device.h"
#include "daemon/process/memory.h"
#include "daemon/request/tenant.h"
#include "daemon/transport/tls_server.h"

static int check_files(const struct config *cfg, char *why, size_t why_bytes)
{
    struct tenants *tenants;
    if (tenants_open(cfg->tenants, &tenants, why, why_bytes) != ATTN_OK)
        return EX_CONFIG;
    tenants_close(tenants);
    for (uint32_t i = 0; i < cfg->n_listen; i++) {
        struct tls_server *tls;
        if (strncmp(cfg->listen[i], "tls+", 4) != 0)
            continue;
        attn_status st = tls_server_open(cfg, &tls, why, why_bytes);
        if (st == ATTN_OK)
            tls_server_close(tls);
        return st == ATTN_OK ? EX_OK : EX_CONFIG; /* all such addresses have the same files */
    }
    return EX_OK;
}

static int check_disk(const struct config *cfg, char *why, size_t why_bytes)
{
    struct statvfs fs;
    const char *path = cfg->disk_path;
    if (path[0] == '\0')
        return EX_OK;
    int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    bool is_good = fd >= 0 && fstatvfs(fd, &fs) == 0 && access(path, W_OK | X_OK) == 0;
    int why_not = errno;
    if (fd >= 0)
        close(fd);
    if (!is_good) {
        snprintf(why, why_bytes, "cache.disk_path = %s: %s", path, strerror(why_not));
        return EX_CONFIG;
    }
    uint64_t most = (uint64_t)fs.f_blocks * fs.f_frsize;
    if (cfg->disk_bytes <= most)
        return EX_OK;
    snprintf(why, why_bytes,
             "cache.disk_size: %" PRIu64 " MiB, and the file system of cache.disk_path = %s has "
             "%" PRIu64,
             cfg->disk_bytes >> 20, path, most >> 20);
    return EX_CONFIG;
}

static int check_address(const char *url, char *why, size_t why_bytes)
{
    struct address a;
    char reason[256];
    attn_status st = address_parse_url(url, &a, reason, sizeof reason);
    if (st == ATTN_OK)
        st = address_check(&a, reason, sizeof reason);
    if (st == ATTN_OK)
        return EX_OK;
    snprintf(why, why_bytes, "%s: %s", url, reason);
    return EX_CANTCREAT;
}

static int check_memory(const struct config *cfg, char *why, size_t why_bytes)
{
    struct kv_config kc = engine_kv_config(cfg, cfg->kv_memory_bytes);
    struct config_device devices[CONFIG_MAX_DEVICES];
    uint32_t n;
    if (kv_config_check(&kc, why, why_bytes) != ATTN_OK)
        return EX_CONFIG;
    config_devices(cfg->device_index, devices, &n);
    struct memory_need need = device_memory_need(cfg, n > 0 ? n : 1);
    attn_status st = memory_check_at_all("", &need, why, why_bytes);
    return st == ATTN_OK ? EX_OK : EX_UNAVAILABLE;
}

int settings_check(const struct config *cfg, bool have_served, char *why, size_t why_bytes)
{
    char admin[256];
    int code = check_files(cfg, why, why_bytes);
    if (code == EX_OK)
        code = check_disk(cfg, why, why_bytes);
    for (uint32_t i = 0; i < cfg->n_listen && code == EX_OK; i++)
        code = check_address(cfg->listen[i], why, why_bytes);
    if (code == EX_OK && !config_admin_is_extra(cfg) && config_admin_url(cfg, admin, sizeof admin))
        code = check_address(admin, why, why_bytes);
    if (code != EX_OK || have_served)
        return code;
    if (device_modules_check(cfg, why, why_bytes) != ATTN_OK)
        return EX_UNAVAILABLE;
    return check_memory(cfg, why, why_bytes);
}
