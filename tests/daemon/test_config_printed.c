/* test_config_printed.c: what is told of settings: printed, in the help and the packaged file, and
 * when they change. With --update the program rewrites the packaged configuration from the option
 * table instead. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/address.h"
#include "daemon/config/config.h"
#include "daemon/config/option.h"
#include "tests/daemon/config_rig.h"

static void captured(void (*write)(const struct config *, FILE *), const struct config *c,
                     char **out_text)
{
    size_t n;
    FILE *f = open_memstream(out_text, &n);
    write(c, f);
    fclose(f);
}

static void print_config_shows_origins_and_reads_back_to_the_same(void **state)
{
    (void)state;
    struct config c, again;
    char *text, *text_again, line[128];
    const char *f = config_given_file("[cache]\nmax_pools = 3\n");
    config_given_environment("ATTND_LOG_LEVEL", "warn");
    config_expect_ok(&c, ARGS("--config", f, "--listen", "ipc:///a", "--listen",
                              "tcp://127.0.0.1:1", "--engine.lease=1500ms", "--listen.http=off"));
    captured(config_print, &c, &text);
    snprintf(line, sizeof(line), "# from %s:2\nmax_pools = 3\n", f);
    assert_non_null(strstr(text, line));
    assert_non_null(
        strstr(text, "# from environment ATTND_LOG_LEVEL; SIGHUP changes it\nlevel = warn\n"));
    assert_non_null(
        strstr(text, "# from flag --engine.lease; SIGHUP changes it\nlease = 1500ms\n"));
    assert_non_null(strstr(text, "# from flag --listen\naddress = ipc:///a\n"));
    assert_non_null(strstr(text, "# from default\nmax_layers = 128\n"));
    unsetenv("ATTND_LOG_LEVEL");
    config_expect_ok(&again, ARGS("--config", config_given_file(text)));
    captured(config_print, &again, &text_again);
    /* all origins are the file now; the values are what they were */
    char *a = text, *b = text_again;
    for (; *a != '\0' && *b != '\0'; a += strcspn(a, "\n") + 1, b += strcspn(b, "\n") + 1)
        if (*a != '#')
            assert_memory_equal(a, b, strcspn(a, "\n") + 1);
    assert_int_equal(*a, *b);
    /* also where neither file nor environment count */
    struct config_fault fault;
    struct config_file cert = {"listen.tls_cert", "/elsewhere"};
    FILE *in = fmemopen(text, strlen(text), "r");
    config_given_environment("ATTND_LOG_LEVEL", "debug");
    config_fini(&again);
    memset(&again, 0xee, sizeof again);
    assert_int_equal(config_load_printed(in, &cert, 1, &again, &fault), ATTN_OK);
    fclose(in);
    assert_string_equal(again.tls_cert, "/elsewhere");
    assert_string_equal(again.log_level, "warn");
    assert_int_equal(again.lease_us, c.lease_us);
    assert_int_equal(again.n_listen, 2);
    assert_string_equal(again.listen[1], c.listen[1]);
    in = fmemopen((char *)(uintptr_t) "[engine]\nleese = 3s\n", 20, "r");
    config_fini(&again);
    assert_int_not_equal(config_load_printed(in, NULL, 0, &again, &fault), ATTN_OK);
    assert_non_null(strstr(fault.why, "last good settings:2: unknown setting engine.leese"));
    fclose(in);
    free(text);
    free(text_again);
    config_fini(&c);
}

/* The packaged file: every option with its help text and, commented out, its default. */
static void manual_to(const struct config *c, FILE *f)
{
    (void)c;
    fprintf(
        f,
        "# attnd.conf: settings of attnd, each with its default.\n"
        "#\n"
        "# A value here is overridden by the environment (ATTND_SECTION_KEY), that by a flag\n"
        "# (--section.key VALUE). `attnd --print-config` shows what is in force and from where;\n"
        "# `attnd --check-config` finds mistakes. Sizes: K, M, G, T. Times: us, ms, s, m, h.\n"
        "# SIGHUP reads it again: what says so takes effect at once, the rest with a restart.\n");
    const char *section = "";
    for (size_t i = 0; i < config_n_options; i++) {
        const struct config_option *o = &config_options[i];
        if (strcmp(section, o->section) != 0)
            fprintf(f, "\n[%s]\n", o->section);
        section = o->section;
        char range[64];
        config_option_range(o, range, sizeof(range));
        fputc('\n', f);
        for (const char *p = o->help; *p != '\0';) {
            size_t n = strcspn(p, "\n");
            fprintf(f, "# %.*s\n", (int)n, p);
            p += n + (p[n] == '\n');
        }
        if (range[0] != '\0')
            fprintf(f, "# %s: %s.\n", o->type == OPTION_CHOICE ? "One of" : "Range", range);
        if (o->effect == AT_ONCE)
            fprintf(f, "# SIGHUP changes it.\n");
        fprintf(f, "#%s = %s\n", o->key, o->default_text);
    }
}

static void help_to(const struct config *c, FILE *f)
{
    (void)c;
    config_help(f);
}

static void the_packaged_file_is_the_manual_of_the_option_table(void **state)
{
    (void)state;
    char *manual, packaged[1 << 16];
    captured(manual_to, NULL, &manual);
    FILE *f = fopen(PACKAGED_CONF, "r");
    assert_non_null(f);
    size_t n = fread(packaged, 1, sizeof(packaged) - 1, f);
    fclose(f);
    packaged[n] = '\0';
    if (strcmp(manual, packaged) != 0)
        fail_msg("%s is not what the option table says; run test_config --update", PACKAGED_CONF);
    free(manual);
}

/* Takes the comment marks off the defaults: they must be what a daemon without a file uses. */
static void every_default_of_the_packaged_file_can_be_switched_on(void **state)
{
    (void)state;
    struct config c, defaults;
    char *manual;
    captured(manual_to, NULL, &manual);
    for (char *p = manual; (p = strstr(p, "\n#")) != NULL; p++)
        if (p[2] != ' ' && p[2] != '\n')
            p[1] = ' ';
    config_expect_ok(&c, ARGS("--config", config_given_file(manual)));
    unsetenv("RUNTIME_DIRECTORY");
    setenv("XDG_RUNTIME_DIR", "/run/attnd", 1);
    config_expect_ok(&defaults, ARGS("--config", config_given_file("")));
    for (size_t i = 0; i < config_n_options; i++) {
        char a[512], b[512];
        config_option_format(&config_options[i], &c, 0, a, sizeof(a));
        config_option_format(&config_options[i], &defaults, 0, b, sizeof(b));
        assert_string_equal(a, b);
        if (strstr(c.origins[i], config_file) == NULL)
            fail_msg("%s.%s is not in the packaged file", config_options[i].section,
                     config_options[i].key);
    }
    config_fini(&c);
    config_fini(&defaults);
    free(manual);
}

static void help_names_every_setting(void **state)
{
    (void)state;
    char *help;
    captured(help_to, NULL, &help);
    for (size_t i = 0; i < config_n_options; i++) {
        char flag[128];
        snprintf(flag, sizeof(flag), "--%s.%s (default %s", config_options[i].section,
                 config_options[i].key, config_options[i].default_text);
        assert_non_null(strstr(help, flag));
    }
    free(help);
}

/* ---- settings read again ---- */

struct change {
    uint32_t n;
    char name[64], value[512];
    bool is_taken;
};

static void note_change(void *user, const char *name, const char *value, bool is_taken)
{
    struct change *t = user;
    t->n++;
    t->is_taken = is_taken;
    snprintf(t->name, sizeof(t->name), "%s", name);
    snprintf(t->value, sizeof(t->value), "%s", value);
}

/* A value of the option other than the one in c. */
static void other_value(const struct config_option *o, const struct config *c, char out[512])
{
    char now[512], range[64];
    config_option_format(o, c, 0, now, sizeof(now));
    config_option_range(o, range, sizeof(range));
    if (o->type == OPTION_URLS)
        snprintf(out, 512, "ipc:///else");
    else if (o->type == OPTION_FILE)
        snprintf(out, 512, "/else");
    else if (strcmp(o->key, "index") == 0)
        snprintf(out, 512, "0,1");
    else if (o->type == OPTION_TEXT)
        snprintf(out, 512, "off");
    else
        snprintf(out, 512, "%.*s", (int)strcspn(range, ", "), range);
    if (strcmp(out, now) == 0)
        snprintf(out, 512, "%s", strrchr(range, ' ') + 1);
    assert_string_not_equal(out, now);
}

static void each_changed_setting_is_told_and_taken_if_it_may_be(void **state)
{
    (void)state;
    uint32_t n_taken = 0;
    for (size_t i = 0; i < config_n_options; i++) {
        const struct config_option *o = &config_options[i];
        struct config c, now;
        struct change t = {0};
        char name[64], value[512], before[512], after[512], why[256];
        config_expect_ok(&c, NO_ARGS);
        config_expect_ok(&now, NO_ARGS);
        config_take_over(&c, &now, note_change, &t);
        assert_int_equal(t.n, 0);
        other_value(o, &c, value);
        config_option_clear(o, &now);
        assert_int_equal(config_option_parse(o, value, &now, why, sizeof(why)), ATTN_OK);
        config_option_format(o, &c, 0, before, sizeof(before));
        config_take_over(&c, &now, note_change, &t);
        snprintf(name, sizeof(name), "%s.%s", o->section, o->key);
        assert_int_equal(t.n, 1);
        assert_string_equal(t.name, name);
        assert_string_equal(t.value, value);
        assert_int_equal(t.is_taken, o->effect == AT_ONCE);
        config_option_format(o, &c, 0, after, sizeof(after));
        assert_string_equal(after, o->effect == AT_ONCE ? value : before);
        config_take_over(&c, &now, note_change, &t);
        assert_int_equal(t.n, o->effect == AT_ONCE ? 1 : 2); /* what was taken is no news */
        n_taken += o->effect == AT_ONCE;
        config_fini(&c);
        config_fini(&now);
    }
    assert_int_equal(n_taken, 33);
}

static void a_list_changes_with_any_of_its_entries(void **state)
{
    (void)state;
    static const char *const lists[][3] = {{"ipc:///a", NULL},
                                           {"ipc:///a", "ipc:///b", NULL},
                                           {"ipc:///a", "ipc:///c", NULL},
                                           {"ipc:///b", "ipc:///a", NULL}};
    for (size_t i = 0; i < 4; i++)
        for (size_t k = 0; k < 4; k++) {
            struct config c[2];
            struct change t = {0};
            const size_t at[2] = {i, k};
            for (int s = 0; s < 2; s++) {
                const char *args[5] = {"--listen", lists[at[s]][0]};
                if (lists[at[s]][1] != NULL) {
                    args[2] = "--listen";
                    args[3] = lists[at[s]][1];
                }
                config_expect_ok(&c[s], args);
            }
            config_take_over(&c[0], &c[1], note_change, &t);
            assert_int_equal(t.n, i != k);
            assert_false(t.is_taken);
            config_fini(&c[0]);
            config_fini(&c[1]);
        }
}

static void help_says_what_sighup_changes(void **state)
{
    (void)state;
    char *help;
    captured(help_to, NULL, &help);
    for (size_t i = 0; i < config_n_options; i++) {
        const struct config_option *o = &config_options[i];
        char begin[256];
        snprintf(begin, sizeof(begin), "--%s.%s (default ", o->section, o->key);
        const char *line = strstr(help, begin);
        assert_non_null(line);
        const char *says = strstr(line, "SIGHUP changes it");
        assert_int_equal(says != NULL && says < strchr(line, '\n'), o->effect == AT_ONCE);
    }
    free(help);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--update") == 0) {
        FILE *f = fopen(PACKAGED_CONF, "w");
        if (f == NULL)
            return 1;
        manual_to(NULL, f);
        return fclose(f) != 0;
    }
#define TEST(name) cmocka_unit_test_setup(name, config_reset)
    const struct CMUnitTest tests[] = {
        TEST(print_config_shows_origins_and_reads_back_to_the_same),
        TEST(the_packaged_file_is_the_manual_of_the_option_table),
        TEST(every_default_of_the_packaged_file_can_be_switched_on),
        TEST(help_names_every_setting),
        TEST(each_changed_setting_is_told_and_taken_if_it_may_be),
        TEST(a_list_changes_with_any_of_its_entries),
        TEST(help_says_what_sighup_changes),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, config_cleanup);
}
