/* live.c: changes settings of a running daemon, when the file is read again or an operator asks. */
#include <stdlib.h>
#include <string.h>

#include "daemon/config/option.h"

/* Sets an option's origin; if there is no memory the old one stays. */
static void take_origin(struct config *c, size_t option, const char *origin)
{
    char *copy = strdup(origin);
    if (copy == NULL)
        return;
    free(c->origins[option]);
    c->origins[option] = copy;
}

void config_take_over(struct config *c, const struct config *now, config_change_fn tell, void *user)
{
    for (size_t i = 0; i < config_n_options; i++) {
        const struct config_option *o = &config_options[i];
        char name[CONFIG_NAME_BYTES], value[512];
        bool is_equal = config_option_is_equal(o, c, now);
        if (is_equal || o->effect == AT_ONCE)
            take_origin(c, i, now->origins[i]);
        if (is_equal)
            continue;
        if (o->effect == AT_ONCE)
            config_option_copy(o, c, now);
        config_option_name(o, name);
        config_option_format(o, now, 0, value, sizeof(value));
        tell(user, name, value, o->effect == AT_ONCE);
    }
}

attn_status config_propose(const struct config *c, const char *name, const char *value,
                           struct config *out_next, char *why, size_t why_bytes)
{
    const struct config_option *o = config_option_find(name);
    char reason[512];
    if (o == NULL) {
        const struct config_option *near = config_option_nearest(name);
        char known[CONFIG_NAME_BYTES] = "";
        if (near != NULL)
            config_option_name(near, known);
        snprintf(why, why_bytes, "no setting is named %.64s%s%s", name,
                 near != NULL ? "; the nearest is " : "", known);
        return ATTN_ENOTFOUND;
    }
    if (o->effect != AT_ONCE) {
        snprintf(why, why_bytes, "%s needs a restart", name);
        return ATTN_ENOTSUP;
    }
    struct config next = *c; /* owns nothing: only numbers and choices change at once */
    attn_status st = config_option_parse(o, value, &next, reason, sizeof(reason));
    if (st != ATTN_OK)
        snprintf(why, why_bytes, "%s = %.100s %s", name, value, reason);
    else
        st = config_check(&next, why, why_bytes);
    if (st == ATTN_OK)
        *out_next = next;
    return st;
}

void config_set(struct config *c, const char *name, const struct config *next)
{
    const struct config_option *o = config_option_find(name);
    config_option_copy(o, c, next);
    take_origin(c, (size_t)(o - config_options), "attnctl");
}
