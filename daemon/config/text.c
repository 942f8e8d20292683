/* text.c: settings as text: for --print-config and --help. */
#include <string.h>

#include "daemon/config/config.h"
#include "daemon/config/option.h"

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

/* The help text, each line behind prefix. */
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
        "  --check-config        read all settings, exit 0 if they are good\n"
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
