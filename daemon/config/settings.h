/* settings.h: changes the settings of a running daemon, for SIGHUP on the loop's thread and for
 * operators on the engine's. */
#ifndef ATTND_DAEMON_CONFIG_SETTINGS_H
#define ATTND_DAEMON_CONFIG_SETTINGS_H

#include "daemon/config/config.h"

struct settings;

/* Sets the log's level and format and the threshold of slow steps from cfg. */
void settings_publish(const struct config *cfg);
/* Logs config.unknown. */
void settings_say_unknown(const struct config *cfg);

/* Callbacks, run inside the call that changes settings, on its thread. */
struct settings_user {
    void *user;
    /* Reads the files that settings name again. ATTN_EINVAL and others: why gets the sentence, and
     * nothing has changed. */
    attn_status (*read_files)(void *user, const struct config *cfg, char *why, size_t why_bytes);
    /* The values in cfg have changed: applies them. */
    void (*took)(void *user, const struct config *cfg);
};

/* cfg stays the caller's and is changed in place; its users read it by config_now, without a lock.
 * argc and argv are what it was loaded from. ATTN_ENOMEM. */
attn_status settings_open(struct config *cfg, int argc, char **argv,
                          const struct settings_user *user, struct settings **out_settings);
void settings_close(struct settings *s); /* NULL is fine */

/* Reads all sources, and the files that they name, again; takes over and logs what may change.
 * *out_n_taken counts settings that changed, *out_n_kept those that need a restart. ATTN_EINVAL and
 * others: why gets the sentence, and nothing has changed. */
attn_status settings_reload(struct settings *s, uint32_t *out_n_taken, uint32_t *out_n_kept,
                            char *why, size_t why_bytes);
/* How often settings_reload was called. Any thread. */
uint32_t settings_n_reloads(const struct settings *s);
/* Whether the latest settings_reload failed; true: why gets its sentence. */
bool settings_are_refused(struct settings *s, char *why, size_t why_bytes);
/* All settings as config_print writes them; the caller frees it. NULL: no memory. */
char *settings_text(struct settings *s);
/* Sets one setting, until it is set again or the sources are read again. ATTN_ENOTFOUND: no such
 * setting; ATTN_ENOTSUP: it needs a restart; ATTN_EINVAL: the value is wrong; why names it. */
attn_status settings_set(struct settings *s, const char *name, const char *value, char *why,
                         size_t why_bytes);
/* Calls tell for every setting, in the order of the option table; for a list once per entry. */
typedef void (*settings_fn)(void *user, const char *name, const char *value, const char *origin,
                            bool changes_at_once);
void settings_each(struct settings *s, settings_fn tell, void *user);

#endif
