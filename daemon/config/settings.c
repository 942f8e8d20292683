/* settings.c: reads all settings again, or sets one. A mutex orders changes; readers do not
 * lock. */
#include "daemon/config/settings.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/slow.h"
#include "daemon/config/option.h"

struct settings {
    struct config *cfg;
    int argc;
    char **argv;
    struct settings_user user;
    pthread_mutex_t lock;
    uint32_t n_taken, n_kept; /* settings taken over, or waiting for a restart, in this change */
};

void settings_publish(const struct config *cfg)
{
    enum log_level level;
    enum log_format format;
    if (log_level_parse(cfg->log_level, &level) == 0 &&
        log_format_parse(cfg->log_format, &format) == 0)
        log_init(level, format);
    slow_set_threshold_ns(cfg->slow_step_us * 1000);
}

attn_status settings_open(struct config *cfg, int argc, char **argv,
                          const struct settings_user *user, struct settings **out_settings)
{
    struct settings *s = calloc(1, sizeof *s);
    if (s == NULL)
        return ATTN_ENOMEM;
    *s = (struct settings){.cfg = cfg, .argc = argc, .argv = argv, .user = *user};
    pthread_mutex_init(&s->lock, NULL);
    *out_settings = s;
    return ATTN_OK;
}

void settings_close(struct settings *s)
{
    if (s == NULL)
        return;
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static void notify_change(void *user, const char *name, const char *value, bool is_taken)
{
    struct settings *s = user;
    s->n_taken += is_taken;
    s->n_kept += !is_taken;
    if (is_taken)
        log_info("settings: %s is now %s", name, value);
    else
        log_warn("settings: %s changed; that needs a restart", name);
}

attn_status settings_reload(struct settings *s, uint32_t *out_n_taken, uint32_t *out_n_kept,
                            char *why, size_t why_bytes)
{
    struct config now;
    char reason[1024];
    enum config_action action;
    struct config_fault fault;
    attn_status st = config_load(s->argc, s->argv, &now, &action, &fault);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "the settings stay as they are: %s", fault.why);
        return st;
    }
    pthread_mutex_lock(&s->lock);
    s->n_taken = s->n_kept = 0;
    struct config next = *s->cfg; /* the settings as they will be; owns nothing */
    for (size_t i = 0; i < config_n_options; i++)
        if (config_options[i].effect == AT_ONCE)
            config_option_copy(&config_options[i], &next, &now);
    st = s->user.read_files(s->user.user, &next, reason, sizeof reason);
    if (st == ATTN_OK) {
        config_take_over(s->cfg, &now, notify_change, s);
        s->user.took(s->user.user, s->cfg);
        *out_n_taken = s->n_taken;
        *out_n_kept = s->n_kept;
    } else {
        snprintf(why, why_bytes, "the settings stay as they are: %s", reason);
    }
    pthread_mutex_unlock(&s->lock);
    config_fini(&now);
    return st;
}

attn_status settings_set(struct settings *s, const char *name, const char *value, char *why,
                         size_t why_bytes)
{
    struct config next;
    pthread_mutex_lock(&s->lock);
    attn_status st = config_propose(s->cfg, name, value, &next, why, why_bytes);
    if (st == ATTN_OK && strncmp(config_option_find(name)->key, "tls_", 4) == 0)
        st = s->user.read_files(s->user.user, &next, why, why_bytes);
    if (st == ATTN_OK) {
        config_set(s->cfg, name, &next);
        log_info("settings: %s is now %s", name, value);
        s->user.took(s->user.user, s->cfg);
    }
    pthread_mutex_unlock(&s->lock);
    return st;
}

void settings_each(struct settings *s, settings_fn tell, void *user)
{
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < config_n_options; i++) {
        const struct config_option *o = &config_options[i];
        uint32_t n = o->type == OPTION_URLS ? s->cfg->n_listen : 1;
        char name[64], value[512];
        snprintf(name, sizeof name, "%s.%s", o->section, o->key);
        for (uint32_t k = 0; k < n; k++) {
            config_option_format(o, s->cfg, k, value, sizeof value);
            tell(user, name, value, s->cfg->origins[i], o->effect == AT_ONCE);
        }
    }
    pthread_mutex_unlock(&s->lock);
}
