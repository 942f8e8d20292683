/* text.c: settings as people read and write them: names, the known name nearest to a misspelt one,
 * --print-config and --help. */
#include <ctype.h>
#include <string.h>

#include "daemon/config/option.h"

/* --- names ------------------------------------------------------------------------------------ */

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

/* --- all of them ------------------------------------------------------------------------------ */

void config_print(const struct config *c, FILE *f)
{
    const char *section = "";
    for (size_t i = 0; i < config_n_options; i++) {
        const struct config_option *o = &config_options[i];
        if (strcmp(section, o->section) != 0)
            fprintf(f, "%s[%s]\n", i > 0 ? "\n" : "", o->section);
        section = o->section;
        uint32_t n = o->type == OPTION_URLS ? c->n_listen : 1;
        for (uint32_t k = 0; k < n; k++) {
            char value[512];
            config_option_format(o, c, k, value, sizeof(value));
            fprintf(f, "# from %s%s\n%s = %s\n", c->origins[i],
                    o->effect == AT_ONCE ? "; SIGHUP changes it" : "", o->key, value);
        }
    }
}

/* Prints a help text, each line behind prefix. */
static void print_help_text(FILE *f, const char *prefix, const char *help)
{
    for (const char *p = help; *p != '\0';) {
        size_t n = strcspn(p, "\n");
        fprintf(f, "%s%.*s\n", prefix, (int)n, p);
        p += n + (p[n] == '\n');
    }
}

void config_help(FILE *f)
{
    fprintf(
        f, "%s",
        "attnd - paged attention as a network service\n\n"
        "usage: attnd [flags]\n\n"
        "  --config FILE         settings. Without it, of a program in PREFIX/bin,\n"
        "                        PREFIX/etc/attnd/attnd.conf if it exists; of one in /usr/bin,\n"
        "                        /etc/attnd/attnd.conf\n"
        "  --check-config        read all settings and what they name, exit 0 if a start with\n"
        "                        them would not be refused\n"
        "  --print-config        print every setting, its value and where it is from\n"
        "  --self-test           check the backend against a float64 reference on this\n"
        "                        machine, print a report, exit 0 if all is well\n"
        "  --supervise           run attnd in a child process, keep its cache and sockets and\n"
        "                        start it again when it dies; SIGUSR2 starts the binary anew\n"
        "  --version, --help\n"
        "  --backend NAME        short for --device.backend\n"
        "  --listen URL          short for --listen.address, repeatable\n\n"
        "A setting comes from its default, then the file ([section] key = value), then the\n"
        "environment (ATTND_SECTION_KEY), then a flag (--section.key VALUE); the last one "
        "counts.\n"
        "SIGHUP reads them again: those that say so take effect at once, others with a restart.\n");
    for (size_t i = 0; i < config_n_options; i++) {
        const struct config_option *o = &config_options[i];
        char range[64];
        config_option_range(o, range, sizeof(range));
        fprintf(f, "\n  --%s.%s (default %s%s%s%s)\n", o->section, o->key, o->default_text,
                range[0] != '\0' ? "; " : "", range,
                o->effect == AT_ONCE ? "; SIGHUP changes it" : "");
        print_help_text(f, "      ", o->help);
    }
}
