/* config.c: the four sources of settings (defaults, file, environment, flags) and the texts about
 * them.
 *
 * Each source hands (option, text, where it stands) to set_option, which parses, stores and notes
 * the origin. A list given by a later source replaces the earlier source's list as a whole.
 */
#include "daemon/config.h"

#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/config_option.h"

extern char **environ;

static const char default_file[] = "/etc/attnd/attnd.conf";
enum { MAX_NAME_BYTES = 64, MAX_ORIGIN_BYTES = 512 };

/* ATTND_ variables that are no settings of this program: the modules' folder, the cpu backend's
 * instruction set, the clients' address. */
static const char *const other_variables[] = {"ATTND_MODULE_DIR", "ATTND_CPU_ISA",
                                              "ATTND_ENDPOINT"};

struct loader {
    struct config *c;
    uint8_t *ranks; /* of each option: the source its value is from */
    struct config_fault *fault; /* why it failed, if st says so */
    attn_status st;
    bool is_flag_bad;
    /* of the file being read */
    const char *file;
    FILE *stream;
    uint32_t line, failed_line;
};
enum { RANK_DEFAULT, RANK_FILE, RANK_ENVIRONMENT, RANK_FLAG };

static void option_name(const struct config_option *o, char out[MAX_NAME_BYTES])
{
    snprintf(out, MAX_NAME_BYTES, "%s.%s", o->section, o->key);
}

static const struct config_option *option_find(const char *name)
{
    for (size_t i = 0; i < config_n_options; i++) {
        char known[MAX_NAME_BYTES];
        option_name(&config_options[i], known);
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

/* Levenshtein distance; long texts are compared by their beginning. */
static uint32_t edit_distance(const char *a, const char *b)
{
    uint32_t row[MAX_NAME_BYTES + 1];
    uint32_t n = (uint32_t)strnlen(b, MAX_NAME_BYTES);
    for (uint32_t j = 0; j <= n; j++)
        row[j] = j;
    for (uint32_t i = 1; a[i - 1] != '\0' && i <= MAX_NAME_BYTES; i++) {
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

/* The known name nearest to name; also looks at the key alone, for the right key in a wrong
 * section. */
static const struct config_option *option_nearest(const char *name)
{
    const struct config_option *best = NULL;
    uint32_t best_distance = UINT32_MAX;
    const char *dot = strchr(name, '.');
    for (size_t i = 0; i < config_n_options; i++) {
        char known[MAX_NAME_BYTES];
        option_name(&config_options[i], known);
        uint32_t d = edit_distance(name, known);
        uint32_t d_key = 1 + edit_distance(dot != NULL ? dot + 1 : name, config_options[i].key);
        if (d_key < d)
            d = d_key;
        if (d < best_distance) {
            best_distance = d;
            best = &config_options[i];
        }
    }
    return best;
}

/* "section.key" as ATTND_SECTION_KEY */
static void variable_name(const struct config_option *o, char out[MAX_NAME_BYTES])
{
    snprintf(out, MAX_NAME_BYTES, "ATTND_%s_%s", o->section, o->key);
    for (char *p = out; *p != '\0'; p++)
        *p = (char)toupper((unsigned char)*p);
}

static void set_option(struct loader *l, const struct config_option *o, uint8_t rank,
                       const char *origin, const char *text)
{
    size_t i = (size_t)(o - config_options);
    char reason[512], name[MAX_NAME_BYTES];
    option_name(o, name);
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

/* Where workers connect if nothing else is said. */
static void default_listen(struct loader *l, const struct config_option *o)
{
    char url[256], dir[200];
    const char *runtime = getenv("RUNTIME_DIRECTORY");
    const char *xdg = getenv("XDG_RUNTIME_DIR");
    if (runtime != NULL && runtime[0] != '\0')
        snprintf(dir, sizeof(dir), "%.*s", (int)strcspn(runtime, ":"), runtime);
    else if (geteuid() == 0)
        snprintf(dir, sizeof(dir), "/run/attnd");
    else if (xdg != NULL && xdg[0] != '\0')
        snprintf(dir, sizeof(dir), "%s", xdg);
    else {
        snprintf(l->fault->why, sizeof(l->fault->why),
                 "listen.address has no default for a user other than root without "
                 "$XDG_RUNTIME_DIR; give one");
        l->st = ATTN_EINVAL;
        return;
    }
    snprintf(url, sizeof(url), "ipc://%s/attnd.sock", dir);
    set_option(l, o, RANK_DEFAULT, "default", url);
}

static void load_defaults(struct loader *l)
{
    for (size_t i = 0; i < config_n_options && l->st == ATTN_OK; i++)
        if (config_options[i].type != OPTION_URLS)
            set_option(l, &config_options[i], RANK_DEFAULT, "default",
                       config_options[i].default_text);
}

/* inih's reader: one line a call, without leading blanks, so that an indented line is a line of its
 * own and not more of the one above. */
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
    const struct config_option *o = option_find(name);
    if (o == NULL) {
        const struct config_option *near = option_nearest(name);
        snprintf(l->fault->why, sizeof(l->fault->why),
                 "%s: unknown setting %s; the nearest is %s in [%s]", origin,
                 section[0] != '\0' ? name : key, near->key, near->section);
        l->st = ATTN_EINVAL;
    } else {
        set_option(l, o, RANK_FILE, origin, value);
    }
    if (l->st != ATTN_OK)
        l->failed_line = l->line;
    return 1;
}

static void load_file(struct loader *l, const char *file, bool must_exist)
{
    l->file = file;
    l->line = 0;
    l->stream = fopen(file, "re");
    if (l->stream == NULL) {
        if (errno == ENOENT && !must_exist)
            return;
        snprintf(l->fault->why, sizeof(l->fault->why), "%s: cannot be read: %s", file,
                 strerror(errno));
        l->st = ATTN_ENOTFOUND;
        return;
    }
    int line = ini_parse_stream(read_line, l, handle_line, l);
    if (l->st == ATTN_OK && ferror(l->stream)) {
        snprintf(l->fault->why, sizeof(l->fault->why), "%s: cannot be read: %s", file,
                 strerror(errno));
        l->st = ATTN_EINVAL;
    }
    /* inih reads on behind its first error; the earlier mistake is the one to tell */
    if (line > 0 && (l->st == ATTN_OK || (uint32_t)line < l->failed_line)) {
        snprintf(l->fault->why, sizeof(l->fault->why),
                 "%s:%d: is neither [section] nor key = value", file, line);
        l->st = ATTN_EINVAL;
    }
    fclose(l->stream);
}

static bool is_other_variable(const char *name, size_t n)
{
    for (size_t i = 0; i < sizeof(other_variables) / sizeof(other_variables[0]); i++)
        if (strlen(other_variables[i]) == n && memcmp(other_variables[i], name, n) == 0)
            return true;
    return strncmp(name, "ATTND_TEST_", 11) == 0; /* seeds and the like, inherited from a test */
}

static void load_environment(struct loader *l)
{
    for (char **e = environ; *e != NULL && l->st == ATTN_OK; e++) {
        size_t n = strcspn(*e, "=");
        if (strncmp(*e, "ATTND_", 6) != 0 || (*e)[n] == '\0' || is_other_variable(*e, n))
            continue;
        char origin[MAX_ORIGIN_BYTES], name[256], known[MAX_NAME_BYTES];
        snprintf(name, sizeof(name), "%.*s", (int)n, *e);
        snprintf(origin, sizeof(origin), "environment %s", name);
        const struct config_option *o = NULL, *near = NULL;
        uint32_t best = UINT32_MAX;
        for (size_t i = 0; i < config_n_options && o == NULL; i++) {
            variable_name(&config_options[i], known);
            uint32_t d = edit_distance(name, known);
            if (d < best) {
                best = d;
                near = &config_options[i];
            }
            if (d == 0 && strcmp(name, known) == 0)
                o = &config_options[i];
        }
        if (o == NULL) {
            variable_name(near, known);
            snprintf(l->fault->why, sizeof(l->fault->why),
                     "environment: unknown variable %s; the nearest is %s", name, known);
            l->st = ATTN_EINVAL;
            return;
        }
        set_option(l, o, RANK_ENVIRONMENT, origin, *e + n + 1);
    }
}

/* What a flag is: a setting, a word of its own, or unknown. */
struct flag {
    const struct config_option *option; /* NULL: is a word */
    bool is_config_file;
    enum config_action action; /* of other words */
    const char *value; /* of option and --config */
};

/* Flags that need no section, and words. */
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
    {"--check-config", CONFIG_CHECK}, {"--print-config", CONFIG_PRINT},
    {"--help", CONFIG_HELP},          {"-h", CONFIG_HELP},
    {"--version", CONFIG_VERSION},    {"--self-test", CONFIG_SELF_TEST},
};

static void refuse_flag(struct loader *l, const char *arg, size_t n)
{
    char name[256], known[MAX_NAME_BYTES], best_name[MAX_NAME_BYTES + 2] = "";
    snprintf(name, sizeof(name), "%.*s", (int)n, arg);
    l->st = ATTN_EINVAL;
    l->is_flag_bad = true;
    if (strncmp(name, "--", 2) != 0) {
        snprintf(l->fault->why, sizeof(l->fault->why),
                 "flag: unexpected argument \"%s\"; see --help", name);
        return;
    }
    const struct config_option *near = option_nearest(name + 2);
    option_name(near, known);
    snprintf(best_name, sizeof(best_name), "--%s", known);
    uint32_t best = edit_distance(name, best_name);
    for (size_t i = 0; i < sizeof(short_flags) / sizeof(short_flags[0]) + 1; i++) {
        bool is_last = i == sizeof(short_flags) / sizeof(short_flags[0]);
        const char *candidate = is_last ? "--config" : short_flags[i].flag;
        if (edit_distance(name, candidate) <= best) {
            best = edit_distance(name, candidate);
            snprintf(best_name, sizeof(best_name), "%s", candidate);
        }
    }
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        if (edit_distance(name, words[i].flag) < best) {
            best = edit_distance(name, words[i].flag);
            snprintf(best_name, sizeof(best_name), "%s", words[i].flag);
        }
    snprintf(l->fault->why, sizeof(l->fault->why), "flag: unknown %s; the nearest is %s", name,
             best_name);
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
    out->is_config_file = strcmp(name, "--config") == 0;
    for (size_t s = 0; s < sizeof(short_flags) / sizeof(short_flags[0]); s++)
        if (strcmp(name, short_flags[s].flag) == 0)
            out->option = option_find(short_flags[s].name);
    if (out->option == NULL && strncmp(name, "--", 2) == 0)
        out->option = option_find(name + 2);
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

/* Settings that must agree with each other. */
static attn_status check_together(const struct config *c, char *why, size_t why_bytes)
{
    const struct {
        const char *small_name, *large_name;
        uint64_t small, large;
    } pairs[] = {
        {"engine.max_step_items", "engine.max_batch_items", c->max_step_items, c->max_batch_items},
        {"engine.max_step_tokens", "engine.max_batch_tokens", c->max_step_tokens,
         c->max_batch_tokens},
        {"engine.default_timeout", "engine.max_timeout", c->default_timeout_us, c->max_timeout_us},
        {"listen.max_message", "cache.io_memory", c->max_message_bytes, c->io_memory_bytes},
        {"listen.shm_client", "listen.shm_memory", c->shm_client_bytes, c->shm_memory_bytes},
    };
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        if (pairs[i].small <= pairs[i].large)
            continue;
        char text[2][64];
        const char *names[2] = {pairs[i].small_name, pairs[i].large_name};
        const char *origins[2];
        for (int k = 0; k < 2; k++) {
            const struct config_option *o = option_find(names[k]);
            config_option_format(o, c, 0, text[k], sizeof(text[k]));
            origins[k] = c->origins[o - config_options];
        }
        snprintf(why, why_bytes, "%s = %s (%s) is more than %s = %s (%s)", names[0], text[0],
                 origins[0], names[1], text[1], origins[1]);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
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

attn_status config_load(int argc, char **argv, struct config *c, enum config_action *out_action,
                        struct config_fault *out_fault)
{
    struct loader l;
    struct flag flag;
    const char *file = NULL;
    enum config_action action = CONFIG_RUN;
    if (loader_init(&l, c, out_fault) != ATTN_OK)
        goto done;

    for (int i = 1; i < argc && l.st == ATTN_OK; i++) {
        read_flag(&l, argc, argv, &i, &flag);
        if (flag.is_config_file)
            file = flag.value;
        else if (flag.action != CONFIG_RUN && action != CONFIG_HELP)
            action = flag.action;
    }
    if (l.st != ATTN_OK || action == CONFIG_HELP || action == CONFIG_VERSION)
        goto done;

    load_defaults(&l);
    if (l.st == ATTN_OK)
        load_file(&l, file != NULL ? file : default_file, file != NULL);
    if (l.st == ATTN_OK)
        load_environment(&l);
    for (int i = 1; i < argc && l.st == ATTN_OK; i++) {
        int at = i;
        read_flag(&l, argc, argv, &i, &flag);
        if (flag.option == NULL)
            continue;
        char origin[MAX_ORIGIN_BYTES];
        snprintf(origin, sizeof(origin), "flag %.*s", (int)strcspn(argv[at], "="), argv[at]);
        set_option(&l, flag.option, RANK_FLAG, origin, flag.value);
    }
    if (l.st == ATTN_OK && c->n_listen == 0 && action != CONFIG_SELF_TEST)
        default_listen(&l, option_find("listen.address"));
    if (l.st == ATTN_OK)
        l.st = check_together(c, out_fault->why, sizeof(out_fault->why));
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

void config_take_over(struct config *c, const struct config *now, config_change_fn tell, void *user)
{
    for (size_t i = 0; i < config_n_options; i++) {
        const struct config_option *o = &config_options[i];
        char name[MAX_NAME_BYTES], value[512];
        if (config_option_is_equal(o, c, now))
            continue;
        if (o->effect == AT_ONCE)
            config_option_copy(o, c, now);
        option_name(o, name);
        config_option_format(o, now, 0, value, sizeof(value));
        tell(user, name, value, o->effect == AT_ONCE);
    }
}

void config_fini(struct config *c)
{
    for (size_t i = 0; i < config_n_options; i++) {
        config_option_clear(&config_options[i], c);
        if (c->origins != NULL)
            free(c->origins[i]);
    }
    free(c->origins);
    memset(c, 0, sizeof(*c));
}

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
        f,
        "attnd - paged attention as a network service\n\n"
        "usage: attnd [flags]\n\n"
        "  --config FILE         settings (default %s if it exists)\n"
        "  --check-config        read all settings, exit 0 if they are good\n"
        "  --print-config        print every setting, its value and where it is from\n"
        "  --self-test           check the backend against a float64 reference on this\n"
        "                        machine, print a report, exit 0 if all is well\n"
        "  --version, --help\n"
        "  --backend NAME        short for --device.backend\n"
        "  --listen URL          short for --listen.address, repeatable\n\n"
        "A setting comes from its default, then the file ([section] key = value), then the\n"
        "environment (ATTND_SECTION_KEY), then a flag (--section.key VALUE); the last one "
        "counts.\n"
        "SIGHUP reads them again: those that say so take effect at once, others with a restart.\n",
        default_file);
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
