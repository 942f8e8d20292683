/* last_good.c: chooses between settings, and keeps the good ones for the next process. */
#include "daemon/process/last_good.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include "daemon/base/health.h"
#include "daemon/base/log.h"
#include "daemon/keeper/notify.h"
#include "daemon/process/check.h"

enum { PAUSE_MS = 1000 };

bool last_good_has_cache(void)
{
    char name[KEEP_NAME_BYTES];
    return keep_find("arena-", name);
}

void last_good_pause(void)
{
    log_info("the kept cache waits for another start");
    (void)poll(NULL, 0, PAUSE_MS);
}

/* Reads this process's own settings. Returns an exit code. */
static int own(int argc, char **argv, struct config *cfg, enum config_action *out_action, char *why,
               size_t why_bytes)
{
    struct config_fault fault;
    if (config_load(argc, argv, cfg, out_action, &fault) != ATTN_OK) {
        snprintf(why, why_bytes, "%s", fault.why);
        return fault.is_flag ? EX_USAGE : EX_CONFIG;
    }
    if (*out_action != CONFIG_RUN && *out_action != CONFIG_CHECK)
        return EX_OK;
    settings_say_unknown(cfg);
    int code = settings_check(cfg, false, why, why_bytes);
    if (code != EX_OK)
        config_fini(cfg);
    return code;
}

/* Reads the kept ones. */
static bool last(const struct kept_settings *kept, struct config *cfg)
{
    struct config_fault fault;
    if (kept_settings_load(kept, cfg, &fault) != ATTN_OK) {
        log_error("%s", fault.why);
        return false;
    }
    if (settings_check(cfg, true, fault.why, sizeof fault.why) == EX_OK)
        return true;
    log_error("the last good settings are refused, too: %s", fault.why);
    config_fini(cfg);
    return false;
}

int last_good_choose(int argc, char **argv, struct last_good *out, struct config *out_cfg,
                     enum config_action *out_action)
{
    char why[2048];
    *out = (struct last_good){0};
    kept_settings_take(&out->kept);
    int code = own(argc, argv, out_cfg, out_action, why, sizeof why);
    if (code == EX_OK)
        return EX_OK;
    log_error("%s", why);
    bool is_kept = out->kept.text_fd >= 0;
    if (is_kept && last(&out->kept, out_cfg)) {
        log_error("THE SETTINGS ARE REFUSED, and the last good ones are used: mend them, then "
                  "restart attnd");
        snprintf(out->refused, sizeof out->refused, "%.500s", why);
        out->is_used = true;
        *out_action = CONFIG_RUN;
        return EX_OK;
    }
    last_good_fini(out);
    if (!last_good_has_cache())
        return code;
    last_good_pause();
    return EX_TEMPFAIL;
}

/* Tells whether the settings that were read last are in use. */
static void tell(const struct last_good *g)
{
    char state[640];
    bool is_good = g->refused[0] == '\0';
    health_set_settings_good(is_good);
    snprintf(
        state, sizeof state, "STATUS=serving%s%s",
        is_good ? "" : "; the settings are refused, the last good ones are used: ", g->refused);
    notify_send(state);
}

/* Has the keeper keep the settings in use, once they have been read back and found good. */
static void keep(struct last_good *g, struct settings *s, const struct config *cfg)
{
    char why[2048] = "no memory", *text;
    struct kept_settings next;
    struct config again;
    if (!keep_is_there())
        return;
    text = settings_text(s);
    bool is_copied =
        text != NULL && kept_settings_copy(text, cfg, &next, why, sizeof why) == ATTN_OK;
    free(text);
    bool is_good = is_copied && last(&next, &again);
    if (is_good) {
        config_fini(&again);
        kept_settings_replace(&g->kept, &next);
        return;
    }
    if (is_copied)
        kept_settings_close(&next);
    log_warn("the settings are not kept for the next process%s%s", is_copied ? "" : ": ",
             is_copied ? "" : why);
}

void last_good_begin(struct last_good *g, struct settings *s, const struct config *cfg)
{
    if (!g->is_used)
        keep(g, s, cfg);
    tell(g);
}

void last_good_follow(struct last_good *g, struct settings *s, const struct config *cfg)
{
    uint32_t n = settings_n_reloads(s);
    if (n == g->n_reloads)
        return;
    g->n_reloads = n;
    if (!settings_are_refused(s, g->refused, sizeof g->refused)) {
        g->refused[0] = '\0';
        if (!g->is_used) /* its files are those that are kept */
            keep(g, s, cfg);
    }
    tell(g);
}

void last_good_fini(struct last_good *g)
{
    kept_settings_close(&g->kept);
}
