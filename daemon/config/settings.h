/* settings.h: the settings of a running daemon: all changes are made here, by SIGHUP on the loop's
 * thread or by operators on the engine's. */
#ifndef ATTND_DAEMON_CONFIG_SETTINGS_H
#define ATTND_DAEMON_CONFIG_SETTINGS_H

#include "daemon/config/config.h"

struct settings;

/* Hands on what any thread looks up by itself: how much is logged, what counts as slow. */
void settings_publish(const struct config *cfg);

/* Callbacks for changes, run inside the call that makes them, on its thread. */
struct settings_user {
    void *user;
    /* Reads again the files that settings name. ATTN_EINVAL and others: why gets the sentence;
     * nothing has changed. */
    attn_status (*read_files)(void *user, const struct config *cfg, char *why, size_t why_bytes);
    /* Takes the new values over. */
    void (*took)(void *user, const struct config *cfg);
};

/* cfg stays the caller's, and is read without a lock by whoever has it (config.h says how); argc
 * and argv are what it was loaded from. ATTN_ENOMEM. */
attn_status settings_open(struct config *cfg, int argc, char **argv,
                          const struct settings_user *user, struct settings **out_settings);
void settings_close(struct settings *s); /* NULL is fine */

/* All sources again, and the files that they name; what may change is taken over and logged.
 * n_taken and n_kept count what changed, and what changed but needs a restart. ATTN_EINVAL and
 * others: why; nothing changed. */
attn_status settings_reload(struct settings *s, uint32_t *out_n_taken, uint32_t *out_n_kept,
                            char *why, size_t why_bytes);
/* One setting, until it is set again or the sources are read again. ATTN_ENOTFOUND no such setting,
 * ATTN_ENOTSUP it needs a restart, ATTN_EINVAL the value: why names it. */
attn_status settings_set(struct settings *s, const char *name, const char *value, char *why,
                         size_t why_bytes);
/* Tells of every setting, in the order of the option table; a list's entries one by one. */
typedef void (*settings_fn)(void *user, const char *name, const char *value, const char *origin,
                            bool changes_at_once);
void settings_each(struct settings *s, settings_fn tell, void *user);

#endif
