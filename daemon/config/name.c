/* name.c: settings by their names, and the name that was meant by one that is none. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "daemon/config/option.h"

void config_option_name(const struct config_option *o, char out[CONFIG_NAME_BYTES])
{
    snprintf(out, CONFIG_NAME_BYTES, "%s.%s", o->section, o->key);
}

const struct config_option *config_option_find(const char *name)
{
    for (size_t i = 0; i < config_n_options; i++) {
        char known[CONFIG_NAME_BYTES];
        config_option_name(&config_options[i], known);
        if (strcmp(known, name) == 0)
            return &config_options[i];
    }
    return NULL;
}

static uint32_t min3(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t ab = a < b ? a : b;
    return ab < c ? ab : c;
}

uint32_t config_name_distance(const char *a, const char *b)
{
    uint32_t row[CONFIG_NAME_BYTES + 1];
    uint32_t n = (uint32_t)strnlen(b, CONFIG_NAME_BYTES);
    for (uint32_t j = 0; j <= n; j++)
        row[j] = j;
    for (uint32_t i = 1; a[i - 1] != '\0' && i <= CONFIG_NAME_BYTES; i++) {
        uint32_t diagonal = row[0];
        row[0] = i;
        for (uint32_t j = 1; j <= n; j++) {
            uint32_t up = row[j];
            row[j] = min3(up + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1]));
            diagonal = up;
        }
    }
    return row[n];
}

bool config_name_is_near(const char *name, uint32_t distance)
{
    return distance <= 1 + strlen(name) / 3;
}

const struct config_option *config_option_nearest(const char *name)
{
    const struct config_option *best = NULL;
    uint32_t best_distance = UINT32_MAX;
    const char *dot = strchr(name, '.');
    for (size_t i = 0; i < config_n_options; i++) {
        char known[CONFIG_NAME_BYTES];
        config_option_name(&config_options[i], known);
        uint32_t d = config_name_distance(name, known);
        uint32_t d_key =
            1 + config_name_distance(dot != NULL ? dot + 1 : name, config_options[i].key);
        if (d_key < d)
            d = d_key;
        if (d < best_distance) {
            best_distance = d;
            best = &config_options[i];
        }
    }
    return config_name_is_near(name, best_distance) ? best : NULL;
}

void config_option_variable(const struct config_option *o, char out[CONFIG_NAME_BYTES])
{
    snprintf(out, CONFIG_NAME_BYTES, "ATTND_%s_%s", o->section, o->key);
    for (char *p = out; *p != '\0'; p++)
        *p = (char)toupper((unsigned char)*p);
}
