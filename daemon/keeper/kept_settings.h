/* kept_settings.h: the settings that the daemon last ran with, and what was in their files, as a
 * keeper (keep.h) holds them beside the cache: what a successor starts with where today's settings
 * are refused, since a process that ends would cost the cache. Main thread only.
 */
#ifndef ATTND_DAEMON_KEEPER_KEPT_SETTINGS_H
#define ATTND_DAEMON_KEEPER_KEPT_SETTINGS_H

#include "daemon/config/config.h"
#include "daemon/keeper/keep.h"

/* Memfds: of the settings as config_print writes them, and of each file. */
struct kept_settings {
    int text_fd; /* -1: there are no settings */
    struct kept_file {
        char name[KEEP_NAME_BYTES]; /* of the setting */
        int fd;
    } files[CONFIG_MAX_FILES];
    uint32_t n_files;
};

/* Takes what a predecessor left; the keeper still has it, too. */
void kept_settings_take(struct kept_settings *out);
/* Copies settings: text is what config_print wrote, and cfg names the files. ATTN_EINVAL: why names
 * what could not be read or copied. */
attn_status kept_settings_copy(const char *text, const struct config *cfg,
                               struct kept_settings *out, char *why, size_t why_bytes);
/* Fills *out_cfg, whose files are those copies while this process has them open. Fails as
 * config_load does. */
attn_status kept_settings_load(const struct kept_settings *k, struct config *out_cfg,
                               struct config_fault *out_fault);
/* Gives the keeper *next in place of *k, which becomes that. */
void kept_settings_replace(struct kept_settings *k, const struct kept_settings *next);
/* Closes this process's descriptors. */
void kept_settings_close(struct kept_settings *k);

#endif
