/* last_good.h: which settings a process runs with: its own or, where these are refused and a keeper
 * has a predecessor's (keeper/kept_settings.h), the last good ones. A process that ends because of
 * a mistake in a file would cost the cache: systemd gives up, and drops what it keeps. Main thread.
 */
#ifndef ATTND_DAEMON_PROCESS_LAST_GOOD_H
#define ATTND_DAEMON_PROCESS_LAST_GOOD_H

#include "daemon/config/settings.h"
#include "daemon/keeper/kept_settings.h"

struct last_good {
    struct kept_settings kept; /* as the keeper has them */
    bool is_used; /* this process runs with them */
    char refused[512]; /* why its own are refused; "": they are not */
    uint32_t n_reloads; /* how many have been looked at */
};

/* Reads this process's settings and, to serve or to check them, what they name (process/check.h).
 * Where they are refused, takes the last good ones, if there are any, to serve with. Logs what is
 * wrong. Returns an exit code; *out_cfg and *out_action are written if it is EX_OK. */
int last_good_choose(int argc, char **argv, struct last_good *out, struct config *out_cfg,
                     enum config_action *out_action);
/* Once the daemon serves, and about ten times a second: has the keeper keep settings that have been
 * read and are good, and tells systemd and /metrics whether the latest are. */
void last_good_begin(struct last_good *g, struct settings *s, const struct config *cfg);
void last_good_follow(struct last_good *g, struct settings *s, const struct config *cfg);
void last_good_fini(struct last_good *g);

/* Whether a predecessor's cache was handed in and nobody has taken it. */
bool last_good_has_cache(void);
/* Waits for a second, before a start that failed ends a process whose cache is kept: systemd gives
 * up after 100 starts in a minute (StartLimitBurst=), and that would cost the cache. */
void last_good_pause(void);

#endif
