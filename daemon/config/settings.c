/* settings.c: reads all settings again, or sets one. A mutex orders changes; readers do not
 * lock. */
#include "daemon/config/settings.h"

#include <pthread.h>
#include <stdatomic.h>
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
    _Atomic uint32_t n_reloads;
    char refused[2048]; /* why the latest reload failed; "": it did not */
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

void settings_say_unknown(const struct config *cfg)
{
    for (const char *at = cfg->unknown; at != NULL && *at != '\0'; at += *at == '\n') {
        int n = (int)strcspn(at, "\n");
        log_warn("%.*s", n, at);
        at += n;
    }
}

/* Takes over what was read. */
static attn_status take_over(struct settings *s, const struct config *now, char *why,
                             size_t why_bytes)
{
    struct config next = *s->cfg; /* the settings as they will be; owns nothing */
    for (size_t i = 0; i < config_n_options; i++)
        if (config_options[i].effect == AT_ONCE)
            config_option_copy(&config_options[i], &next, now);
    attn_status st = s->user.read_files(s->user.user, &next, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    config_take_over(s->cfg, now, notify_change, s);
    s->user.took(s->user.user, s->cfg);
    return ATTN_OK;
}

attn_status settings_reload(struct settings *s, uint32_t *out_n_taken, uint32_t *out_n_kept,
                            char *why, size_t why_bytes)
{
    struct config now;
    enum config_action action;
    struct config_fault fault;
    attn_status st = config_load(s->argc, s->argv, &now, &action, &fault);
    if (st == ATTN_OK)
        settings_say_unknown(&now);
    pthread_mutex_lock(&s->lock);
    s->n_taken = s->n_kept = 0;
    if (st == ATTN_OK) {
        st = take_over(s, &now, fault.why, sizeof fault.why);
        config_fini(&now);
    }
    if (st == ATTN_OK) {
        *out_n_taken = s->n_taken;
        *out_n_kept = s->n_kept;
    } else {
        snprintf(why, why_bytes, "the settings stay as they are: %s", fault.why);
    }
    snprintf(s->refused, sizeof s->refused, "%s", st == ATTN_OK ? "" : fault.why);
    atomic_fetch_add(&s->n_reloads, 1);
    pthread_mutex_unlock(&s->lock);
    return st;
}

uint32_t settings_n_reloads(const struct settings *s)
{
    return atomic_load(&s->n_reloads);
}

bool settings_are_refused(struct settings *s, char *why, size_t why_bytes)
{
    pthread_mutex_lock(&s->lock);
    bool is_refused = s->refused[0] != '\0';
    if (is_refused)
        snprintf(why, why_bytes, "%s", s->refused);
    pthread_mutex_unlock(&s->lock);
    return is_refused;
}

char *settings_text(struct settings *s)
{
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    if (f == NULL)
        return NULL;
    pthread_mutex_lock(&s->lock);
    config_print(s->cfg, f);
    pthread_mutex_unlock(&s->lock);
    if (fclose(f) == 0)
        return text;
    free(text);
    return NULL;
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
