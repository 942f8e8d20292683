/* test_config.c: where settings come from, and what every mistake is called. With --update the
 * program rewrites the packaged configuration from the option table instead. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/address.h"
#include "daemon/config.h"
#include "daemon/config_option.h"

extern char **environ;

enum { MAX_ARGS = 16 };

static char file_path[64];

/* The environment and the file of one load. */
static void given_environment(const char *name, const char *value)
{
    assert_int_equal(setenv(name, value, 1), 0);
}

static const char *given_file(const char *text)
{
    snprintf(file_path, sizeof(file_path), "/tmp/attnd_config_%ld.conf", (long)getpid());
    FILE *f = fopen(file_path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    return file_path;
}

static int reset(void **state)
{
    (void)state;
    for (char **e = environ; *e != NULL;) {
        char name[256];
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(*e, "="), *e);
        if (strncmp(name, "ATTND_", 6) == 0) {
            unsetenv(name);
            e = environ;
        } else {
            e++;
        }
    }
    /* no settings and no mistakes */
    setenv("ATTND_MODULE_DIR", "/nowhere", 1);
    setenv("ATTND_CPU_ISA", "avx2", 1);
    setenv("ATTND_ENDPOINT", "tcp://127.0.0.1:1", 1);
    setenv("ATTND_TEST_SEED", "5", 1);
    setenv("RUNTIME_DIRECTORY", "/run/test:/run/other", 1);
    return 0;
}

static attn_status load(struct config *c, enum config_action *action, struct config_fault *fault,
                        const char *const *args)
{
    char *argv[MAX_ARGS + 1] = {(char *)(uintptr_t) "attnd"};
    int argc = 1;
    for (; args[argc - 1] != NULL; argc++)
        argv[argc] = (char *)(uintptr_t)args[argc - 1];
    memset(c, 0xee, sizeof(*c));
    memset(fault, 0x55, sizeof(*fault));
    *action = CONFIG_RUN;
    return config_load(argc, argv, c, action, fault);
}

#define ARGS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define NO_ARGS ((const char *const[]){NULL})

static void expect_ok(struct config *c, const char *const *args)
{
    struct config_fault fault;
    enum config_action action;
    if (load(c, &action, &fault, args) != ATTN_OK)
        fail_msg("%s", fault.why);
}

/* The load fails and its sentence has all parts (separated by |). */
static void expect_failure(const char *parts, const char *const *args)
{
    char copy[512];
    struct config_fault fault;
    enum config_action action;
    struct config c;
    if (load(&c, &action, &fault, args) == ATTN_OK) {
        config_fini(&c);
        fail_msg("accepted, expected \"%s\"", parts);
    }
    snprintf(copy, sizeof(copy), "%s", parts);
    for (char *part = strtok(copy, "|"); part != NULL; part = strtok(NULL, "|"))
        if (strstr(fault.why, part) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", fault.why, part);
    /* the texts about flags begin so, and no others */
    assert_int_equal(fault.is_flag, strncmp(fault.why, "flag", 4) == 0);
    static const struct config empty;
    assert_memory_equal(&c, &empty, sizeof(c));
}

static void defaults_are_those_of_the_table(void **state)
{
    (void)state;
    struct config c;
    expect_ok(&c, ARGS("--config", given_file("")));
    assert_string_equal(c.backend, "auto");
    assert_int_equal(c.kv_memory_bytes, 1u << 30);
    assert_int_equal(c.io_memory_bytes, 256u << 20);
    assert_int_equal(c.max_message_bytes, 64u << 20);
    assert_int_equal(c.max_sequences, 4096);
    assert_int_equal(c.max_seq_tokens, 131072);
    assert_int_equal(c.max_peers, 4096);
    assert_int_equal(c.lease_us, 30000000);
    assert_int_equal(c.default_timeout_us, 10000000);
    assert_int_equal(c.max_timeout_us, 600000000);
    assert_string_equal(c.http, "127.0.0.1:9470");
    assert_int_equal(c.n_listen, 1);
    assert_string_equal(c.listen[0], "ipc:///run/test/attnd.sock");
    assert_string_equal(c.log_level, "info");
    config_fini(&c);
}

static void the_default_socket_is_in_the_users_runtime_directory(void **state)
{
    (void)state;
    struct config c;
    unsetenv("RUNTIME_DIRECTORY");
    setenv("XDG_RUNTIME_DIR", "/run/user/7", 1);
    expect_ok(&c, ARGS("--config", given_file("")));
    assert_string_equal(c.listen[0], geteuid() == 0 ? "ipc:///run/attnd/attnd.sock"
                                                    : "ipc:///run/user/7/attnd.sock");
    config_fini(&c);
}

static void a_user_without_a_runtime_directory_must_say_where_to_listen(void **state)
{
    (void)state;
    const char *file = given_file("");
    struct config c;
    bool is_root = geteuid() == 0;
    unsetenv("RUNTIME_DIRECTORY");
    unsetenv("XDG_RUNTIME_DIR");
    if (is_root)
        assert_int_equal(seteuid(65534), 0);
    expect_failure("listen.address|no default|$XDG_RUNTIME_DIR", ARGS("--config", file));
    expect_ok(&c, ARGS("--config", file, "--listen", "ipc:///run/x"));
    config_fini(&c);
    expect_ok(&c, ARGS("--config", file, "--self-test"));
    config_fini(&c);
    if (is_root)
        assert_int_equal(seteuid(0), 0);
}

static void a_later_source_overrides_an_earlier_one(void **state)
{
    (void)state;
    struct config c;
    const char *file = given_file("[engine]\nlease = 1s\ndefault_timeout = 1s\nmax_timeout = 1m\n");
    given_environment("ATTND_ENGINE_LEASE", "2s");
    given_environment("ATTND_ENGINE_DEFAULT_TIMEOUT", "2s");
    expect_ok(&c, ARGS("--config", file, "--engine.lease", "3s"));
    assert_int_equal(c.lease_us, 3000000);
    assert_int_equal(c.default_timeout_us, 2000000);
    assert_int_equal(c.max_timeout_us, 60000000);
    assert_int_equal(c.drain_timeout_us, 30000000);
    config_fini(&c);
}

static void both_forms_of_a_flag_and_the_short_ones_work(void **state)
{
    (void)state;
    struct config c;
    given_file("");
    expect_ok(&c, ARGS("--config", file_path, "--backend", "cpu", "--device.threads=3", "--listen",
                       "tcp://127.0.0.1:0", "--listen=ipc:///tmp/x", "--listen.http", "off"));
    assert_string_equal(c.backend, "cpu");
    assert_int_equal(c.threads, 3);
    assert_int_equal(c.n_listen, 2);
    assert_string_equal(c.listen[0], "tcp://127.0.0.1:0");
    assert_string_equal(c.listen[1], "ipc:///tmp/x");
    assert_string_equal(c.http, "");
    config_fini(&c);
}

static void a_list_of_a_later_source_replaces_the_earlier_list(void **state)
{
    (void)state;
    struct config c;
    const char *file = given_file("[listen]\naddress = ipc:///a\naddress = ipc:///b, ipc:///c\n");
    expect_ok(&c, ARGS("--config", file));
    assert_int_equal(c.n_listen, 3);
    assert_string_equal(c.listen[2], "ipc:///c");
    config_fini(&c);
    given_environment("ATTND_LISTEN_ADDRESS", "ipc:///d ipc:///e");
    expect_ok(&c, ARGS("--config", file));
    assert_int_equal(c.n_listen, 2);
    assert_string_equal(c.listen[0], "ipc:///d");
    config_fini(&c);
}

static void sizes_and_times_have_units(void **state)
{
    (void)state;
    static const struct {
        const char *flag;
        uint64_t bytes;
    } sizes[] = {{"--device.kv_memory=1048576", 1 << 20},
                 {"--device.kv_memory=1024K", 1 << 20},
                 {"--device.kv_memory=3M", 3 << 20},
                 {"--device.kv_memory=2G", 2ull << 30},
                 {"--device.kv_memory=1T", 1ull << 40}};
    static const struct {
        const char *flag;
        uint64_t us;
    } times[] = {{"--engine.lease=10000us", 10000},
                 {"--engine.lease=250ms", 250000},
                 {"--engine.lease=5s", 5000000},
                 {"--engine.lease=2m", 120000000},
                 {"--engine.lease=1h", 3600000000}};
    struct config c;
    given_file("");
    for (size_t i = 0; i < 5; i++) {
        expect_ok(&c, ARGS("--config", file_path, sizes[i].flag, times[i].flag));
        assert_int_equal(c.kv_memory_bytes, sizes[i].bytes);
        assert_int_equal(c.lease_us, times[i].us);
        config_fini(&c);
    }
    expect_ok(&c, ARGS("--config", file_path, "--engine.drain_timeout=0"));
    assert_int_equal(c.drain_timeout_us, 0);
    config_fini(&c);
}

static void a_bad_value_is_named_with_its_source_key_and_range(void **state)
{
    (void)state;
    given_file("");
    const char *f = file_path;
    expect_failure("flag --cache.max_pools|cache.max_pools = 0|out of range, 1 to 1024",
                   ARGS("--config", f, "--cache.max_pools=0"));
    expect_failure("cache.max_pools = 1025|out of range",
                   ARGS("--config", f, "--cache.max_pools=1025"));
    expect_failure("= 99999999999999999999999|out of range",
                   ARGS("--config", f, "--cache.max_pools=99999999999999999999999"));
    expect_failure("= 99999999999T|out of range, 1M to 64T",
                   ARGS("--config", f, "--device.kv_memory=99999999999T"));
    expect_failure("= -1|is not a whole number", ARGS("--config", f, "--cache.max_pools=-1"));
    expect_failure("= 1K|is not a whole number", ARGS("--config", f, "--cache.max_pools=1K"));
    expect_failure("= |is not a whole number", ARGS("--config", f, "--cache.max_pools="));
    expect_failure("= 5Q|is not a size", ARGS("--config", f, "--device.kv_memory=5Q"));
    expect_failure("= 30|is not a time with its unit", ARGS("--config", f, "--engine.lease=30"));
    expect_failure("= s|is not a time", ARGS("--config", f, "--engine.lease=s"));
    expect_failure("device.backend = gpu|is not one of auto, cpu, cuda, hip",
                   ARGS("--config", f, "--backend=gpu"));
    expect_failure("device.backend = |is not one of", ARGS("--config", f, "--backend="));
    expect_failure("device.backend = cpu cuda|is not one of",
                   ARGS("--config", f, "--backend=cpu cuda"));
    expect_failure("log.level = loud", ARGS("--config", f, "--log.level", "loud"));
    given_environment("ATTND_CACHE_MAX_POOLS", "many");
    expect_failure("environment ATTND_CACHE_MAX_POOLS|cache.max_pools = many", ARGS("--config", f));
    unsetenv("ATTND_CACHE_MAX_POOLS");
    given_file("\n[cache]\n# a comment\nmax_pools = x\n");
    char where[128];
    snprintf(where, sizeof(where), "%s:4|cache.max_pools = x", f);
    expect_failure(where, ARGS("--config", f));
}

static void an_unknown_name_is_an_error_with_the_nearest_known_one(void **state)
{
    (void)state;
    const char *f = given_file("[cache]\nmax_sequence = 4\n");
    expect_failure(":2|unknown setting cache.max_sequence|nearest is max_sequences in [cache]",
                   ARGS("--config", f));
    given_file("[cache]\nlease = 4s\n");
    expect_failure(":2|unknown setting cache.lease|nearest is lease in [engine]",
                   ARGS("--config", f));
    given_file("lease = 4s\n");
    expect_failure(":1|unknown setting lease|nearest is lease in [engine]", ARGS("--config", f));
    given_file("");
    expect_failure("unknown --bakend|--backend", ARGS("--config", f, "--bakend", "cpu"));
    expect_failure("unknown --engine.leese|--engine.lease",
                   ARGS("--config", f, "--engine.leese=3s"));
    expect_failure("unknown --conifg|--config", ARGS("--conifg", f));
    expect_failure("unknown --check-confg|--check-config", ARGS("--check-confg"));
    expect_failure("unexpected argument \"serve\"", ARGS("serve"));
    given_environment("ATTND_ENGINE_LEESE", "3s");
    expect_failure("unknown variable ATTND_ENGINE_LEESE|ATTND_ENGINE_LEASE", ARGS("--config", f));
}

static void a_file_that_is_no_ini_file_is_refused_by_line(void **state)
{
    (void)state;
    char where[128], long_line[600];
    const char *f = given_file("[cache]\nmax_pools\n");
    snprintf(where, sizeof(where), "%s:2|is neither [section] nor key = value", f);
    expect_failure(where, ARGS("--config", f));
    given_file("[cache\nmax_pools = 3\n");
    expect_failure(":1|is neither", ARGS("--config", f));
    given_file("[cache]\nmax_pools = 3\nmax_pools = 4\n");
    expect_failure(":3|cache.max_pools is given twice|:2", ARGS("--config", f));
    memset(long_line, '#', sizeof(long_line));
    long_line[sizeof(long_line) - 1] = '\0';
    given_file(long_line);
    expect_failure(":1|longer than", ARGS("--config", f));
    expect_failure("/nowhere/attnd.conf|cannot be read|No such file",
                   ARGS("--config", "/nowhere/attnd.conf"));
    expect_failure("/tmp|cannot be read", ARGS("--config", "/tmp"));
    expect_failure("--config needs a value", ARGS("--config"));
    expect_failure("--backend needs a value", ARGS("--backend"));
}

static void indented_lines_and_comments_are_what_they_look_like(void **state)
{
    (void)state;
    struct config c;
    expect_ok(&c, ARGS("--config", given_file("; a\n[cache]\n  max_pools = 3 ; three\n"
                                              "\tmax_layers = 5\n# b\n[log]\nlevel=debug\n")));
    assert_int_equal(c.max_pools, 3);
    assert_int_equal(c.max_layers, 5);
    assert_string_equal(c.log_level, "debug");
    config_fini(&c);
}

static void addresses_that_others_can_reach_are_refused_by_name(void **state)
{
    (void)state;
    static const char *const refused[] = {"tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:1",
                                          "tcp://[::]:5555", "tcp://[2001:db8::1]:5555"};
    static const char *const fine[] = {"tcp://127.0.0.1:5555", "tcp://127.9.9.9:1",
                                       "tcp://[::1]:5555", "tcp://localhost:5555"};
    struct config c;
    given_file("");
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        char parts[256];
        snprintf(parts, sizeof(parts), "flag --listen|listen.address = %s|not a loopback address",
                 refused[i]);
        expect_failure(parts, ARGS("--config", file_path, "--listen", refused[i]));
        snprintf(parts, sizeof(parts), "listen.http = %s|not a loopback address", refused[i] + 6);
        expect_failure(parts, ARGS("--config", file_path, "--listen.http", refused[i] + 6));
    }
    for (size_t i = 0; i < sizeof(fine) / sizeof(fine[0]); i++) {
        expect_ok(&c,
                  ARGS("--config", file_path, "--listen", fine[i], "--listen.http", fine[i] + 6));
        config_fini(&c);
    }
}

static void addresses_that_are_none_are_refused_with_the_reason(void **state)
{
    (void)state;
    char long_path[200] = "ipc:///";
    memset(long_path + 7, 'x', 150);
    static const char *const bad[][2] = {
        {"", "names no address"},
        {"udp://1.2.3.4:5", "none of ipc://, shm:// and tcp://"},
        {"ipc://relative", "not absolute"},
        {"tcp://127.0.0.1", "has no port"},
        {"tcp://127.0.0.1:", "has no port"},
        {"tcp://127.0.0.1:x", "is not a number"},
        {"tcp://127.0.0.1:65536", "is not a number from 0 to 65535"},
        {"tcp://:5555", "host is empty"},
        {"tcp://example.org:5555", "is not an IPv4 address"},
        {"tcp://[::1:5555", "is not an IPv4 address"},
        {"tcp://[zz]:5555", "is not an IPv4 address"},
        {"ipc:///a ipc:///a", "is given twice"},
    };
    given_file("");
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        expect_failure(bad[i][1], ARGS("--config", file_path, "--listen", bad[i][0]));
    expect_failure("over the limit", ARGS("--config", file_path, "--listen", long_path));
    expect_failure("at most 8",
                   ARGS("--config", file_path, "--listen",
                        "ipc:///1,ipc:///2,ipc:///3,ipc:///4,ipc:///5,ipc:///6,ipc:///7,ipc:///8,"
                        "ipc:///9"));
    expect_failure("listen.http = nine|has no port",
                   ARGS("--config", file_path, "--listen.http", "nine"));
}

static void settings_that_contradict_each_other_are_both_named(void **state)
{
    (void)state;
    given_file("");
    const char *f = file_path;
    expect_failure(
        "engine.max_step_items = 4096 (flag --engine.max_step_items) is more than "
        "engine.max_batch_items = 16 (flag --engine.max_batch_items)",
        ARGS("--config", f, "--engine.max_step_items=4096", "--engine.max_batch_items=16"));
    expect_failure("engine.max_step_tokens|engine.max_batch_tokens",
                   ARGS("--config", f, "--engine.max_step_tokens=20000"));
    expect_failure("engine.default_timeout = 1h|engine.max_timeout = 10m (default)",
                   ARGS("--config", f, "--engine.default_timeout=1h"));
    expect_failure("listen.max_message = 64M (default)|cache.io_memory = 1M",
                   ARGS("--config", f, "--cache.io_memory=1M"));
}

static void words_on_the_command_line_are_actions(void **state)
{
    (void)state;
    static const struct {
        const char *word;
        enum config_action action;
    } words[] = {{"--check-config", CONFIG_CHECK},
                 {"--print-config", CONFIG_PRINT},
                 {"--help", CONFIG_HELP},
                 {"-h", CONFIG_HELP},
                 {"--version", CONFIG_VERSION}};
    struct config_fault fault;
    given_file("");
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        struct config c;
        enum config_action action;
        assert_int_equal(load(&c, &action, &fault, ARGS("--config", file_path, words[i].word)),
                         ATTN_OK);
        assert_int_equal(action, words[i].action);
        config_fini(&c);
    }
}

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
    const char *f = given_file("[cache]\nmax_pools = 3\n");
    given_environment("ATTND_LOG_LEVEL", "warn");
    expect_ok(&c, ARGS("--config", f, "--listen", "ipc:///a", "--listen", "tcp://127.0.0.1:1",
                       "--engine.lease=1500ms", "--listen.http=off"));
    captured(config_print, &c, &text);
    snprintf(line, sizeof(line), "# from %s:2\nmax_pools = 3\n", f);
    assert_non_null(strstr(text, line));
    assert_non_null(
        strstr(text, "# from environment ATTND_LOG_LEVEL; SIGHUP changes it\nlevel = warn\n"));
    assert_non_null(strstr(text, "# from flag --engine.lease\nlease = 1500ms\n"));
    assert_non_null(strstr(text, "# from flag --listen\naddress = ipc:///a\n"));
    assert_non_null(strstr(text, "# from default\nmax_layers = 128\n"));
    unsetenv("ATTND_LOG_LEVEL");
    expect_ok(&again, ARGS("--config", given_file(text)));
    captured(config_print, &again, &text_again);
    /* all origins are the file now; the values are what they were */
    char *a = text, *b = text_again;
    for (; *a != '\0' && *b != '\0'; a += strcspn(a, "\n") + 1, b += strcspn(b, "\n") + 1)
        if (*a != '#')
            assert_memory_equal(a, b, strcspn(a, "\n") + 1);
    assert_int_equal(*a, *b);
    free(text);
    free(text_again);
    config_fini(&c);
    config_fini(&again);
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
    expect_ok(&c, ARGS("--config", given_file(manual)));
    unsetenv("RUNTIME_DIRECTORY");
    setenv("XDG_RUNTIME_DIR", "/run/attnd", 1);
    expect_ok(&defaults, ARGS("--config", given_file("")));
    for (size_t i = 0; i < config_n_options; i++) {
        char a[512], b[512];
        config_option_format(&config_options[i], &c, 0, a, sizeof(a));
        config_option_format(&config_options[i], &defaults, 0, b, sizeof(b));
        assert_string_equal(a, b);
        if (strstr(c.origins[i], file_path) == NULL)
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

struct told {
    uint32_t n;
    char name[64], value[512];
    bool is_taken;
};

static void note_change(void *user, const char *name, const char *value, bool is_taken)
{
    struct told *t = user;
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
        struct told t = {0};
        char name[64], value[512], before[512], after[512], why[256];
        expect_ok(&c, NO_ARGS);
        expect_ok(&now, NO_ARGS);
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
    assert_int_equal(n_taken, 6);
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
            struct told t = {0};
            const size_t at[2] = {i, k};
            for (int s = 0; s < 2; s++) {
                const char *args[5] = {"--listen", lists[at[s]][0]};
                if (lists[at[s]][1] != NULL) {
                    args[2] = "--listen";
                    args[3] = lists[at[s]][1];
                }
                expect_ok(&c[s], args);
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

static int cleanup(void **state)
{
    (void)state;
    unlink(file_path);
    return 0;
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
#define TEST(name) cmocka_unit_test_setup(name, reset)
    const struct CMUnitTest tests[] = {
        TEST(defaults_are_those_of_the_table),
        TEST(the_default_socket_is_in_the_users_runtime_directory),
        TEST(a_user_without_a_runtime_directory_must_say_where_to_listen),
        TEST(a_later_source_overrides_an_earlier_one),
        TEST(both_forms_of_a_flag_and_the_short_ones_work),
        TEST(a_list_of_a_later_source_replaces_the_earlier_list),
        TEST(sizes_and_times_have_units),
        TEST(a_bad_value_is_named_with_its_source_key_and_range),
        TEST(an_unknown_name_is_an_error_with_the_nearest_known_one),
        TEST(a_file_that_is_no_ini_file_is_refused_by_line),
        TEST(indented_lines_and_comments_are_what_they_look_like),
        TEST(addresses_that_others_can_reach_are_refused_by_name),
        TEST(addresses_that_are_none_are_refused_with_the_reason),
        TEST(settings_that_contradict_each_other_are_both_named),
        TEST(words_on_the_command_line_are_actions),
        TEST(print_config_shows_origins_and_reads_back_to_the_same),
        TEST(the_packaged_file_is_the_manual_of_the_option_table),
        TEST(every_default_of_the_packaged_file_can_be_switched_on),
        TEST(help_names_every_setting),
        TEST(each_changed_setting_is_told_and_taken_if_it_may_be),
        TEST(a_list_changes_with_any_of_its_entries),
        TEST(help_says_what_sighup_changes),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, cleanup);
}
