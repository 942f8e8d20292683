/* load.c: loads settings from their four sources: defaults, file, environment, flags.
 *
 * Each source passes option, text and origin to set_option, which parses and stores them. A list
 * given by a later source replaces the earlier source's list as a whole.
 */
#define _GNU_SOURCE /* asprintf */
#include "daemon/config/config.h"

#include <errno.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/config/option.h"

extern char **environ;

enum { MAX_ORIGIN_BYTES = 512 };

/* ATTND_ variables that are not settings of this program: the modules' folder, the cpu backend's
 * instruction set, the clients' address and credentials. */
static const char *const other_variables[] = {
    "ATTND_MODULE_DIR", "ATTND_CPU_ISA",       "ATTND_ENDPOINT",          "ATTND_KEY_FILE",
    "ATTND_CA_FILE",    "ATTND_TLS_CERT_FILE", "ATTND_TLS_CERT_KEY_FILE",
};

struct loader {
    struct config *c;
    uint8_t *ranks; /* the source of each option's value */
    struct config_fault *fault; /* why it failed, if st is not ATTN_OK */
    attn_status st;
    bool is_flag_bad;
    /* of the file being read */
    const char *file;
    FILE *stream;
    uint32_t line, failed_line;
};
enum { RANK_DEFAULT, RANK_FILE, RANK_ENVIRONMENT, RANK_FLAG };

static void set_option(struct loader *l, const struct config_option *o, uint8_t rank,
                       const char *origin, const char *text)
{
    size_t i = (size_t)(o - config_options);
    char reason[512], name[CONFIG_NAME_BYTES];
    config_option_name(o, name);
    if (rank == RANK_FILE && l->ranks[i] == RANK_FILE && o->type != OPTION_URLS) {
        snprintf(l->fault->why, sizeof(l->fault->why), "%s: %s is given twice (first at %s)",
                 origin, name, l->c->origins[i]);
        l->st = ATTN_EINVAL;
        return;
    }
    if (rank != l->ranks[i])
        config_option_clear(o, l->c);
    attn_status st = config_option_parse(o, text, l->c, reason, sizeof(reason));
    if (st != ATTN_OK) {
        snprintf(l->fault->why, sizeof(l->fault->why), "%s: %s = %s %s", origin, name, text,
                 reason);
        l->st = st;
        l->is_flag_bad = rank == RANK_FLAG;
        return;
    }
    char *copy = strdup(origin);
    if (copy == NULL) {
        snprintf(l->fault->why, sizeof(l->fault->why), "%s: out of memory", origin);
        l->st = ATTN_ENOMEM;
        return;
    }
    free(l->c->origins[i]);
    l->c->origins[i] = copy;
    l->ranks[i] = rank;
}

/* Sets the address where workers connect by default. */
static void default_listen(struct loader *l, const struct config_option *o)
{
    char url[256] = "ipc://";
    size_t n = strlen(url);
    if (config_default_path(url + n, sizeof(url) - n, l->fault->why, sizeof(l->fault->why)))
        set_option(l, o, RANK_DEFAULT, "default", url);
    else
        l->st = ATTN_EINVAL;
}

static void load_defaults(struct loader *l)
{
    for (size_t i = 0; i < config_n_options && l->st == ATTN_OK; i++)
        if (config_options[i].type != OPTION_URLS)
            set_option(l, &config_options[i], RANK_DEFAULT, "default",
                       config_options[i].default_text);
}

/* Reads one line for inih, without leading blanks, so that an indented line does not continue the
 * line above. */
static char *read_line(char *str, int num, void *user)
{
    struct loader *l = user;
    if (l->st != ATTN_OK || fgets(str, num, l->stream) == NULL)
        return NULL;
    l->line++;
    size_t n = strlen(str);
    if (n + 1 == (size_t)num && str[n - 1] != '\n') {
        snprintf(l->fault->why, sizeof(l->fault->why), "%s:%u: line is longer than %d bytes",
                 l->file, l->line, num - 2);
        l->st = ATTN_EINVAL;
        return NULL;
    }
    for (size_t i = 1; i < n; i++) /* a comment behind a value */
        if (str[i] == '#' && (str[i - 1] == ' ' || str[i - 1] == '\t')) {
            str[i] = '\n';
            str[n = i + 1] = '\0';
        }
    size_t blanks = strspn(str, " \t");
    memmove(str, str + blanks, n - blanks + 1);
    return str;
}

static int handle_line(void *user, const char *section, const char *key, const char *value)
{
    struct loader *l = user;
    if (l->st != ATTN_OK)
        return 1;
    char origin[MAX_ORIGIN_BYTES], name[256];
    snprintf(origin, sizeof(origin), "%s:%u", l->file, l->line);
    snprintf(name, sizeof(name), "%s.%s", section, key);
    const struct config_option *o = config_option_find(name);
    if (o == NULL) {
        const struct config_option *near = config_option_nearest(name);
        const char *unknown = section[0] != '\0' ? name : key;
        if (near != NULL)
            snprintf(l->fault->why, sizeof(l->fault->why),
                     "%s: unknown setting %s; the nearest is %s in [%s]", origin, unknown,
                     near->key, near->section);
        else
            snprintf(l->fault->why, sizeof(l->fault->why),
                     "%s: unknown setting %s; attnd --help lists all", origin, unknown);
        l->st = ATTN_EINVAL;
    } else {
        set_option(l, o, RANK_FILE, origin, value);
    }
    if (l->st != ATTN_OK)
        l->failed_line = l->line;
    return 1;
}

/* Reads settings from f; file: its name, for origins and errors. */
static void load_stream(struct loader *l, const char *file, FILE *f)
{
    l->file = file;
    l->line = 0;
    l->stream = f;
    int line = ini_parse_stream(read_line, l, handle_line, l);
    if (l->st == ATTN_OK && ferror(l->stream)) {
        snprintf(l->fault->why, sizeof(l->fault->why), "%s: cannot be read: %s", file,
                 strerror(errno));
        l->st = ATTN_EINVAL;
    }
    /* inih reads on after its first error; report the earlier mistake */
    if (line > 0 && (l->st == ATTN_OK || (uint32_t)line < l->failed_line)) {
        snprintf(l->fault->why, sizeof(l->fault->why),
                 "%s:%d: is neither [section] nor key = value", file, line);
        l->st = ATTN_EINVAL;
    }
}

static void load_file(struct loader *l, const char *file, bool must_exist)
{
    FILE *f = fopen(file, "re");
    if (f != NULL) {
        load_stream(l, file, f);
        fclose(f);
    } else if (errno != ENOENT || must_exist) {
        snprintf(l->fault->why, sizeof(l->fault->why), "%s: cannot be read: %s", file,
                 strerror(errno));
        l->st = ATTN_ENOTFOUND;
    }
}

/* Where this program's installed settings file would be: PREFIX/etc/attnd/attnd.conf for a program
 * in PREFIX/bin, /etc/attnd/attnd.conf for one in /usr/bin. */
static void installed_path(char *out, size_t out_bytes)
{
    char prefix[1000];
    ssize_t n = readlink("/proc/self/exe", prefix, sizeof(prefix) - 1);
    prefix[n > 0 ? n : 0] = '\0';
    for (int i = 0; i < 2; i++) { /* without /bin/attnd */
        char *slash = strrchr(prefix, '/');
        if (slash != NULL)
            *slash = '\0';
    }
    snprintf(out, out_bytes, "%s/etc/attnd/attnd.conf", strcmp(prefix, "/usr") == 0 ? "" : prefix);
}

static bool is_other_variable(const char *name, size_t n)
{
    for (size_t i = 0; i < sizeof(other_variables) / sizeof(other_variables[0]); i++)
        if (strlen(other_variables[i]) == n && memcmp(other_variables[i], name, n) == 0)
            return true;
    return strncmp(name, "ATTND_TEST_", 11) == 0; /* seeds and the like, from a test */
}

/* The option whose variable has this name, or NULL and the nearest one. */
static const struct config_option *find_variable(const char *name,
                                                 const struct config_option **out_nearest)
{
    uint32_t best = UINT32_MAX;
    *out_nearest = NULL;
    for (size_t i = 0; i < config_n_options; i++) {
        char known[CONFIG_NAME_BYTES];
        config_option_variable(&config_options[i], known);
        if (strcmp(name, known) == 0)
            return &config_options[i];
        uint32_t d = config_name_distance(name, known);
        if (d < best && config_name_is_near(name, d)) {
            best = d;
            *out_nearest = &config_options[i];
        }
    }
    return NULL;
}

/* Adds a sentence about a variable that is no setting. */
static void add_unknown(struct loader *l, const char *name, const struct config_option *near)
{
    char known[CONFIG_NAME_BYTES] = "", *all;
    const char *before = l->c->unknown;
    if (near != NULL)
        config_option_variable(near, known);
    int n = asprintf(&all, "%s%sthe environment's %s is no setting and is ignored; %s%s",
                     before != NULL ? before : "", before != NULL ? "\n" : "", name,
                     near != NULL ? "the nearest is " : "attnd --help lists all", known);
    if (n < 0) {
        snprintf(l->fault->why, sizeof(l->fault->why), "out of memory");
        l->st = ATTN_ENOMEM;
        return;
    }
    free(l->c->unknown);
    l->c->unknown = all;
}

static void load_environment(struct loader *l)
{
    for (char **e = environ; *e != NULL && l->st == ATTN_OK; e++) {
        size_t n = strcspn(*e, "=");
        if (strncmp(*e, "ATTND_", 6) != 0 || (*e)[n] == '\0' || is_other_variable(*e, n))
            continue;
        char origin[MAX_ORIGIN_BYTES], name[256];
        const struct config_option *near;
        snprintf(name, sizeof(name), "%.*s", (int)n, *e);
        snprintf(origin, sizeof(origin), "environment %s", name);
        const struct config_option *o = find_variable(name, &near);
        if (o != NULL)
            set_option(l, o, RANK_ENVIRONMENT, origin, *e + n + 1);
        else
            add_unknown(l, name, near);
    }
}

/* One flag of the command line: a setting, or a flag of its own such as --help. */
struct flag {
    const struct config_option *option; /* NULL: it is not a setting */
    bool is_config_file;
    bool is_danger; /* --danger-inject-faults */
    enum config_action action; /* of the other flags */
    const char *value; /* of a setting or --config */
};

/* Settings that have a flag without their section; below, flags that are not settings. */
static const struct {
    const char *flag, *name;
} short_flags[] = {
    {"--backend", "device.backend"},
    {"--listen", "listen.address"},
};
static const struct {
    const char *flag;
    enum config_action action;
} words[] = {
    {"--check-config", CONFIG_CHECK},  {"--print-config", CONFIG_PRINT},
    {"--help", CONFIG_HELP},           {"-h", CONFIG_HELP},
    {"--version", CONFIG_VERSION},     {"--self-test", CONFIG_SELF_TEST},
    {"--supervise", CONFIG_SUPERVISE},
};

/* Allows --backend NAME+faults:TEXT, which breaks what attnd promises: only for tests. */
static const char danger_flag[] = "--danger-inject-faults";

/* Splits the faults off the value of --backend. */
static void take_faults(struct loader *l, struct flag *flag, char value[CONFIG_NAME_BYTES])
{
    static const char sign[] = "+faults:";
    const char *at = strstr(flag->value, sign);
    if (strcmp(flag->option->key, "backend") != 0 || at == NULL)
        return;
    const char *text = at + sizeof(sign) - 1;
    if (strlen(text) >= sizeof(l->c->faults)) {
        snprintf(l->fault->why, sizeof(l->fault->why),
                 "flag --backend: faults of %zu bytes, %zu "
                 "are allowed",
                 strlen(text), sizeof(l->c->faults) - 1);
        l->st = ATTN_EINVAL;
        l->is_flag_bad = true;
        return;
    }
    strcpy(l->c->faults, text);
    snprintf(value, CONFIG_NAME_BYTES, "%.*s", (int)(at - flag->value), flag->value);
    flag->value = value;
}

static void refuse_flag(struct loader *l, const char *arg, size_t n)
{
    char name[256], known[CONFIG_NAME_BYTES], best_name[CONFIG_NAME_BYTES + 2] = "";
    snprintf(name, sizeof(name), "%.*s", (int)n, arg);
    l->st = ATTN_EINVAL;
    l->is_flag_bad = true;
    if (strncmp(name, "--", 2) != 0) {
        snprintf(l->fault->why, sizeof(l->fault->why),
                 "flag: unexpected argument \"%s\"; see --help", name);
        return;
    }
    const struct config_option *near = config_option_nearest(name + 2);
    uint32_t best = UINT32_MAX;
    if (near != NULL) {
        config_option_name(near, known);
        snprintf(best_name, sizeof(best_name), "--%s", known);
        best = config_name_distance(name, best_name);
    }
    for (size_t i = 0; i < sizeof(short_flags) / sizeof(short_flags[0]) + 1; i++) {
        bool is_last = i == sizeof(short_flags) / sizeof(short_flags[0]);
        const char *candidate = is_last ? "--config" : short_flags[i].flag;
        if (config_name_distance(name, candidate) <= best) {
            best = config_name_distance(name, candidate);
            snprintf(best_name, sizeof(best_name), "%s", candidate);
        }
    }
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        if (config_name_distance(name, words[i].flag) < best) {
            best = config_name_distance(name, words[i].flag);
            snprintf(best_name, sizeof(best_name), "%s", words[i].flag);
        }
    bool has_near = near != NULL || config_name_is_near(name, best);
    snprintf(l->fault->why, sizeof(l->fault->why), "flag: unknown %s; %s%s", name,
             has_near ? "the nearest is " : "attnd --help lists all", has_near ? best_name : "");
}

/* Reads argv[*i] (and the value behind it); moves *i to the last argument used. */
static void read_flag(struct loader *l, int argc, char **argv, int *i, struct flag *out)
{
    const char *arg = argv[*i];
    size_t n = strcspn(arg, "=");
    char name[256];
    memset(out, 0, sizeof(*out));
    out->action = CONFIG_RUN;
    snprintf(name, sizeof(name), "%.*s", (int)n, arg);
    for (size_t w = 0; w < sizeof(words) / sizeof(words[0]); w++)
        if (strcmp(arg, words[w].flag) == 0) {
            out->action = words[w].action;
            return;
        }
    out->is_danger = strcmp(arg, danger_flag) == 0;
    if (out->is_danger)
        return;
    out->is_config_file = strcmp(name, "--config") == 0;
    for (size_t s = 0; s < sizeof(short_flags) / sizeof(short_flags[0]); s++)
        if (strcmp(name, short_flags[s].flag) == 0)
            out->option = config_option_find(short_flags[s].name);
    if (out->option == NULL && strncmp(name, "--", 2) == 0)
        out->option = config_option_find(name + 2);
    if (out->option == NULL && !out->is_config_file) {
        refuse_flag(l, arg, n);
        return;
    }
    if (arg[n] == '=') {
        out->value = arg + n + 1;
    } else if (*i + 1 < argc) {
        out->value = argv[++*i];
    } else {
        snprintf(l->fault->why, sizeof(l->fault->why), "flag: %s needs a value", name);
        l->st = ATTN_EINVAL;
        l->is_flag_bad = true;
    }
}

static attn_status loader_init(struct loader *l, struct config *c, struct config_fault *fault)
{
    memset(c, 0, sizeof(*c));
    memset(l, 0, sizeof(*l));
    l->c = c;
    l->fault = fault;
    c->origins = calloc(config_n_options, sizeof(*c->origins));
    l->ranks = calloc(config_n_options, sizeof(*l->ranks));
    if (c->origins == NULL || l->ranks == NULL) {
        snprintf(fault->why, sizeof(fault->why), "out of memory");
        l->st = ATTN_ENOMEM;
    }
    return l->st;
}

attn_status config_load_printed(FILE *f, const struct config_file *files, uint32_t n_files,
                                struct config *c, struct config_fault *out_fault)
{
    static const char label[] = "the last good settings";
    struct loader l;
    if (loader_init(&l, c, out_fault) == ATTN_OK)
        load_defaults(&l);
    if (l.st == ATTN_OK)
        load_stream(&l, label, f);
    for (uint32_t i = 0; i < n_files && l.st == ATTN_OK; i++) {
        const struct config_option *o = config_option_find(files[i].name);
        if (o != NULL) /* NULL: of another version; then what it printed has failed, too */
            set_option(&l, o, RANK_ENVIRONMENT, label, files[i].path);
    }
    if (l.st == ATTN_OK)
        l.st = config_check(c, out_fault->why, sizeof(out_fault->why));
    free(l.ranks);
    if (l.st != ATTN_OK)
        config_fini(c);
    out_fault->is_flag = false;
    return l.st;
}

attn_status config_load(int argc, char **argv, struct config *c, enum config_action *out_action,
                        struct config_fault *out_fault)
{
    struct loader l;
    struct flag flag;
    const char *file = NULL;
    char installed[1024];
    bool is_danger = false;
    enum config_action action = CONFIG_RUN;
    if (loader_init(&l, c, out_fault) != ATTN_OK)
        goto done;

    for (int i = 1; i < argc && l.st == ATTN_OK; i++) {
        read_flag(&l, argc, argv, &i, &flag);
        is_danger |= flag.is_danger;
        if (flag.is_config_file)
            file = flag.value;
        else if (flag.action != CONFIG_RUN && action != CONFIG_HELP)
            action = flag.action;
    }
    if (l.st != ATTN_OK || action == CONFIG_HELP || action == CONFIG_VERSION)
        goto done;

    installed_path(installed, sizeof(installed));
    load_defaults(&l);
    if (l.st == ATTN_OK)
        load_file(&l, file != NULL ? file : installed, file != NULL);
    if (l.st == ATTN_OK)
        load_environment(&l);
    for (int i = 1; i < argc && l.st == ATTN_OK; i++) {
        int at = i;
        read_flag(&l, argc, argv, &i, &flag);
        if (flag.option == NULL)
            continue;
        char value[CONFIG_NAME_BYTES];
        take_faults(&l, &flag, value);
        if (l.st != ATTN_OK)
            break;
        char origin[MAX_ORIGIN_BYTES];
        snprintf(origin, sizeof(origin), "flag %.*s", (int)strcspn(argv[at], "="), argv[at]);
        set_option(&l, flag.option, RANK_FLAG, origin, flag.value);
    }
    if (l.st == ATTN_OK && c->faults[0] != '\0' && !is_danger) {
        snprintf(out_fault->why, sizeof(out_fault->why),
                 "flag --backend: faults break what attnd promises; tests allow them with %s",
                 danger_flag);
        l.st = ATTN_EINVAL;
        l.is_flag_bad = true;
    }
    if (l.st == ATTN_OK && c->n_listen == 0 && action != CONFIG_SELF_TEST)
        default_listen(&l, config_option_find("listen.address"));
    if (l.st == ATTN_OK) {
        l.st = config_check(c, out_fault->why, sizeof(out_fault->why));
        /* why has the origin of each value: if one is a flag, the command line is wrong */
        l.is_flag_bad = l.st != ATTN_OK && strstr(out_fault->why, "(flag ") != NULL;
    }
done:
    free(l.ranks);
    if (l.st != ATTN_OK || action == CONFIG_HELP || action == CONFIG_VERSION)
        config_fini(c);
    if (l.st == ATTN_OK)
        *out_action = action;
    else
        out_fault->is_flag = l.is_flag_bad;
    return l.st;
}

void config_fini(struct config *c)
{
    for (size_t i = 0; i < config_n_options; i++) {
        config_option_clear(&config_options[i], c);
        if (c->origins != NULL)
            free(c->origins[i]);
    }
    free(c->origins);
    free(c->unknown);
    memset(c, 0, sizeof(*c));
}
