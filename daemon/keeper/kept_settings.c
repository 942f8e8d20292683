/* kept_settings.c: settings and their files as memfds with names at the keeper: "settings", and
 * "settings-listen.tenants" for what was in the file that this setting names. */
#define _GNU_SOURCE /* memfd_create */
#include "daemon/keeper/kept_settings.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/credential.h"

static const char text_name[] = "settings", file_prefix[] = "settings-";

static void name_at_keeper(const char *setting, char out[KEEP_NAME_BYTES])
{
    snprintf(out, KEEP_NAME_BYTES, "%s%.*s", file_prefix, KEEP_NAME_BYTES - 16, setting);
}

void kept_settings_take(struct kept_settings *out)
{
    char name[KEEP_NAME_BYTES];
    *out = (struct kept_settings){.text_fd = keep_take(text_name)};
    while (out->n_files < CONFIG_MAX_FILES && keep_find(file_prefix, name)) {
        struct kept_file *f = &out->files[out->n_files++];
        snprintf(f->name, sizeof f->name, "%s", name + strlen(file_prefix));
        f->fd = keep_take(name);
    }
}

/* A memfd that its owner alone may open, as files of secrets must be; -1: see errno. */
static int memory_file(const char *name)
{
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && fchmod(fd, 0600) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static bool write_all(int fd, const char *bytes, size_t n)
{
    while (n > 0) {
        ssize_t written = write(fd, bytes, n);
        if (written <= 0)
            return false;
        bytes += written;
        n -= (size_t)written;
    }
    return true;
}

/* Writes what is in f; false: see errno. */
static bool copy_file(FILE *f, int fd)
{
    char bytes[4096];
    size_t n;
    while ((n = fread(bytes, 1, sizeof bytes, f)) > 0)
        if (!write_all(fd, bytes, n))
            return false;
    return ferror(f) == 0;
}

attn_status kept_settings_copy(const char *text, const struct config *cfg,
                               struct kept_settings *out, char *why, size_t why_bytes)
{
    struct config_file files[CONFIG_MAX_FILES];
    uint32_t n = config_files(cfg, files);
    struct kept_settings k = {.text_fd = memory_file("attnd-settings")};
    bool is_copied = k.text_fd >= 0 && write_all(k.text_fd, text, strlen(text));
    if (!is_copied)
        snprintf(why, why_bytes, "memfd: %s", strerror(errno));
    for (uint32_t i = 0; i < n && is_copied; i++) {
        FILE *f = credential_open(files[i].path, false, why, why_bytes);
        struct kept_file *copy = &k.files[k.n_files++];
        copy->fd = memory_file("attnd-settings");
        snprintf(copy->name, sizeof copy->name, "%s", files[i].name);
        is_copied = f != NULL && copy->fd >= 0 && copy_file(f, copy->fd);
        if (!is_copied && f != NULL)
            snprintf(why, why_bytes, "%s = %s: %s", files[i].name, files[i].path, strerror(errno));
        if (f != NULL)
            fclose(f);
    }
    if (!is_copied) {
        kept_settings_close(&k);
        return ATTN_EINVAL;
    }
    *out = k;
    return ATTN_OK;
}

attn_status kept_settings_load(const struct kept_settings *k, struct config *out_cfg,
                               struct config_fault *out_fault)
{
    char paths[CONFIG_MAX_FILES][32];
    struct config_file files[CONFIG_MAX_FILES];
    snprintf(paths[0], sizeof paths[0], "/proc/self/fd/%d", k->text_fd);
    FILE *f = k->text_fd < 0 ? NULL : fopen(paths[0], "re");
    if (f == NULL) {
        snprintf(out_fault->why, sizeof out_fault->why, "the last good settings: %s",
                 k->text_fd < 0 ? "there are none" : strerror(errno));
        return ATTN_ENOTFOUND;
    }
    for (uint32_t i = 0; i < k->n_files; i++) {
        snprintf(paths[i], sizeof paths[i], "/proc/self/fd/%d", k->files[i].fd);
        files[i] = (struct config_file){k->files[i].name, paths[i]};
    }
    attn_status st = config_load_printed(f, files, k->n_files, out_cfg, out_fault);
    fclose(f);
    return st;
}

void kept_settings_replace(struct kept_settings *k, const struct kept_settings *next)
{
    char name[KEEP_NAME_BYTES];
    for (uint32_t i = 0; i < k->n_files; i++) {
        name_at_keeper(k->files[i].name, name);
        keep_drop(name);
    }
    if (k->text_fd >= 0)
        keep_drop(text_name);
    kept_settings_close(k);
    *k = *next;
    for (uint32_t i = 0; i < k->n_files; i++) {
        name_at_keeper(k->files[i].name, name);
        keep_put(name, k->files[i].fd);
    }
    keep_put(text_name, k->text_fd); /* last: without it the others count for nothing */
}

void kept_settings_close(struct kept_settings *k)
{
    for (uint32_t i = 0; i < k->n_files; i++)
        if (k->files[i].fd >= 0)
            close(k->files[i].fd);
    if (k->text_fd >= 0)
        close(k->text_fd);
    *k = (struct kept_settings){.text_fd = -1};
}
