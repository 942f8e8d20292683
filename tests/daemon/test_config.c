/* test_config.c: where settings come from, and what every mistake is called. */
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

static void defaults_are_those_of_the_table(void **state)
{
    (void)state;
    struct config c;
    config_expect_ok(&c, ARGS("--config", config_given_file("")));
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
    config_expect_ok(&c, ARGS("--config", config_given_file("")));
    assert_string_equal(c.listen[0], geteuid() == 0 ? "ipc:///run/attnd/attnd.sock"
                                                    : "ipc:///run/user/7/attnd.sock");
    config_fini(&c);
}

static void a_user_without_a_runtime_directory_must_say_where_to_listen(void **state)
{
    (void)state;
    const char *file = config_given_file("");
    struct config c;
    bool is_root = geteuid() == 0;
    unsetenv("RUNTIME_DIRECTORY");
    unsetenv("XDG_RUNTIME_DIR");
    if (is_root)
        assert_int_equal(seteuid(65534), 0);
    config_expect_failure("listen.address|no default|$XDG_RUNTIME_DIR", ARGS("--config", file));
    config_expect_ok(&c, ARGS("--config", file, "--listen", "ipc:///run/x"));
    config_fini(&c);
    config_expect_ok(&c, ARGS("--config", file, "--self-test"));
    config_fini(&c);
    if (is_root)
        assert_int_equal(seteuid(0), 0);
}

static void a_later_source_overrides_an_earlier_one(void **state)
{
    (void)state;
    struct config c;
    const char *file =
        config_given_file("[engine]\nlease = 1s\ndefault_timeout = 1s\nmax_timeout = 1m\n");
    config_given_environment("ATTND_ENGINE_LEASE", "2s");
    config_given_environment("ATTND_ENGINE_DEFAULT_TIMEOUT", "2s");
    config_expect_ok(&c, ARGS("--config", file, "--engine.lease", "3s"));
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
    config_given_file("");
    config_expect_ok(&c, ARGS("--config", config_file, "--backend", "cpu", "--device.threads=3",
                              "--listen", "tcp://127.0.0.1:0", "--listen=ipc:///tmp/x",
                              "--listen.http", "off"));
    assert_string_equal(c.backend, "cpu");
    assert_int_equal(c.threads, 3);
    assert_int_equal(c.n_listen, 2);
    assert_string_equal(c.listen[0], "tcp://127.0.0.1:0");
    assert_string_equal(c.listen[1], "ipc:///tmp/x");
    assert_string_equal(c.http, "");
    config_fini(&c);
}

/* What is accepted leaves a daemon that a worker can use. */
static void a_value_that_nobody_could_use_is_refused_by_name(void **state)
{
    (void)state;
    static const char *const flags[] = {"listen.max_peers=3",       "listen.handshake_timeout=99ms",
                                        "listen.body_timeout=99ms", "listen.write_timeout=99ms",
                                        "listen.peer_share=0",      "listen.principal_share=0",
                                        "listen.max_message=63K",   "listen.max_peer_write=63K",
                                        "listen.shm_client=1023K",  "cache.max_seq_tokens=15",
                                        "cache.table_memory=1023K", "cache.io_memory=1023K",
                                        "engine.max_queue=1023K",   "engine.max_queue_requests=7",
                                        "engine.max_sessions=1",    "engine.default_timeout=99ms",
                                        "engine.max_timeout=99ms",  "engine.stall_timeout=99ms"};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        char flag[64], parts[96];
        const char *equals = strchr(flags[i], '=');
        snprintf(flag, sizeof flag, "--%s", flags[i]);
        snprintf(parts, sizeof parts, "%.*s|%s", (int)(equals - flags[i]), flags[i], equals + 1);
        config_expect_failure(parts, ARGS(flag));
    }
    config_expect_failure("listen.max_message = 64M|is more than engine.max_queue = 32M",
                          ARGS("--engine.max_queue=32M"));
}

static void a_list_of_a_later_source_replaces_the_earlier_list(void **state)
{
    (void)state;
    struct config c;
    const char *file =
        config_given_file("[listen]\naddress = ipc:///a\naddress = ipc:///b, ipc:///c\n");
    config_expect_ok(&c, ARGS("--config", file));
    assert_int_equal(c.n_listen, 3);
    assert_string_equal(c.listen[2], "ipc:///c");
    config_fini(&c);
    config_given_environment("ATTND_LISTEN_ADDRESS", "ipc:///d ipc:///e");
    config_expect_ok(&c, ARGS("--config", file));
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
    config_given_file("");
    for (size_t i = 0; i < 5; i++) {
        config_expect_ok(&c, ARGS("--config", config_file, sizes[i].flag, times[i].flag));
        assert_int_equal(c.kv_memory_bytes, sizes[i].bytes);
        assert_int_equal(c.lease_us, times[i].us);
        config_fini(&c);
    }
    config_expect_ok(&c, ARGS("--config", config_file, "--engine.drain_timeout=0"));
    assert_int_equal(c.drain_timeout_us, 0);
    config_fini(&c);
}

static void a_bad_value_is_named_with_its_source_key_and_range(void **state)
{
    (void)state;
    config_given_file("");
    const char *f = config_file;
    config_expect_failure("flag --cache.max_pools|cache.max_pools = 0|out of range, 1 to 1024",
                          ARGS("--config", f, "--cache.max_pools=0"));
    config_expect_failure("cache.max_pools = 1025|out of range",
                          ARGS("--config", f, "--cache.max_pools=1025"));
    config_expect_failure("= 99999999999999999999999|out of range",
                          ARGS("--config", f, "--cache.max_pools=99999999999999999999999"));
    config_expect_failure("= 99999999999T|out of range, 1M to 64T",
                          ARGS("--config", f, "--device.kv_memory=99999999999T"));
    config_expect_failure("= -1|is not a whole number",
                          ARGS("--config", f, "--cache.max_pools=-1"));
    config_expect_failure("= 1K|is not a whole number",
                          ARGS("--config", f, "--cache.max_pools=1K"));
    config_expect_failure("= |is not a whole number", ARGS("--config", f, "--cache.max_pools="));
    config_expect_failure("= 5Q|is not a size", ARGS("--config", f, "--device.kv_memory=5Q"));
    config_expect_failure("= 30|is not a time with its unit",
                          ARGS("--config", f, "--engine.lease=30"));
    config_expect_failure("= s|is not a time", ARGS("--config", f, "--engine.lease=s"));
    config_expect_failure("device.backend = gpu|is not one of auto, cpu, cuda, hip",
                          ARGS("--config", f, "--backend=gpu"));
    config_expect_failure("device.backend = |is not one of", ARGS("--config", f, "--backend="));
    config_expect_failure("device.backend = cpu cuda|is not one of",
                          ARGS("--config", f, "--backend=cpu cuda"));
    config_expect_failure("log.level = loud", ARGS("--config", f, "--log.level", "loud"));
    config_given_environment("ATTND_CACHE_MAX_POOLS", "many");
    config_expect_failure("environment ATTND_CACHE_MAX_POOLS|cache.max_pools = many",
                          ARGS("--config", f));
    unsetenv("ATTND_CACHE_MAX_POOLS");
    config_given_file("\n[cache]\n# a comment\nmax_pools = x\n");
    char where[128];
    snprintf(where, sizeof(where), "%s:4|cache.max_pools = x", f);
    config_expect_failure(where, ARGS("--config", f));
}

static void a_comment_may_stand_behind_a_value(void **state)
{
    (void)state;
    struct config c;
    const char *f = config_given_file("[cache]\nmax_pools = 7 # seven\n  # max_layers = 9\n"
                                      "[log] # all of it\nlevel = debug\t#\n");
    config_expect_ok(&c, ARGS("--config", f));
    assert_int_equal(c.max_pools, 7);
    assert_string_equal(c.log_level, "debug");
    config_fini(&c);
}

static void an_unknown_name_is_an_error_with_the_nearest_known_one(void **state)
{
    (void)state;
    const char *f = config_given_file("[cache]\nmax_sequence = 4\n");
    config_expect_failure(
        ":2|unknown setting cache.max_sequence|nearest is max_sequences in [cache]",
        ARGS("--config", f));
    config_given_file("[cache]\nlease = 4s\n");
    config_expect_failure(":2|unknown setting cache.lease|nearest is lease in [engine]",
                          ARGS("--config", f));
    config_given_file("lease = 4s\n");
    f = config_given_file("[cache]\nfrobnicate = 5\n");
    config_expect_failure(":2|unknown setting cache.frobnicate|attnd --help", ARGS("--config", f));
    config_expect_failure("unknown --frobnicate|attnd --help", ARGS("--frobnicate"));
    f = config_given_file("lease = 5s\n");
    config_expect_failure(":1|unknown setting lease|nearest is lease in [engine]",
                          ARGS("--config", f));
    config_given_file("");
    config_expect_failure("unknown --bakend|--backend", ARGS("--config", f, "--bakend", "cpu"));
    config_expect_failure("unknown --engine.leese|--engine.lease",
                          ARGS("--config", f, "--engine.leese=3s"));
    config_expect_failure("unknown --conifg|--config", ARGS("--conifg", f));
    config_expect_failure("unknown --check-confg|--check-config", ARGS("--check-confg"));
    config_expect_failure("unexpected argument \"serve\"", ARGS("serve"));
}

static void an_unknown_variable_is_told_with_the_nearest_known_one(void **state)
{
    (void)state;
    struct config c;
    const char *f = config_given_file("");
    config_expect_ok(&c, ARGS("--config", f));
    assert_null(c.unknown);
    config_fini(&c);
    /* a typo, and what Kubernetes sets for a service named attnd */
    config_given_environment("ATTND_ENGINE_LEESE", "3s");
    config_given_environment("ATTND_PORT_7471_TCP", "tcp://10.0.0.7:7471");
    config_given_environment("ATTND_ENGINE_SPIN", "1ms");
    config_expect_ok(&c, ARGS("--config", f));
    assert_int_equal(c.lease_us, 30000000);
    assert_int_equal(c.spin_us, 1000);
    assert_non_null(strstr(
        c.unknown,
        "ATTND_ENGINE_LEESE is no setting and is ignored; the nearest is ATTND_ENGINE_LEASE"));
    assert_non_null(strstr(
        c.unknown, "ATTND_PORT_7471_TCP is no setting and is ignored; attnd --help lists all"));
    assert_null(strstr(c.unknown, "SPIN"));
    config_fini(&c);
}

static void a_file_that_is_no_ini_file_is_refused_by_line(void **state)
{
    (void)state;
    char where[128], long_line[600];
    const char *f = config_given_file("[cache]\nmax_pools\n");
    snprintf(where, sizeof(where), "%s:2|is neither [section] nor key = value", f);
    config_expect_failure(where, ARGS("--config", f));
    config_given_file("[cache\nmax_pools = 3\n");
    config_expect_failure(":1|is neither", ARGS("--config", f));
    config_given_file("[cache]\nmax_pools = 3\nmax_pools = 4\n");
    config_expect_failure(":3|cache.max_pools is given twice|:2", ARGS("--config", f));
    memset(long_line, '#', sizeof(long_line));
    long_line[sizeof(long_line) - 1] = '\0';
    config_given_file(long_line);
    config_expect_failure(":1|longer than", ARGS("--config", f));
    config_expect_failure("/nowhere/attnd.conf|cannot be read|No such file",
                          ARGS("--config", "/nowhere/attnd.conf"));
    config_expect_failure("/tmp|cannot be read", ARGS("--config", "/tmp"));
    config_expect_failure("--config needs a value", ARGS("--config"));
    config_expect_failure("--backend needs a value", ARGS("--backend"));
}

static void indented_lines_and_comments_are_what_they_look_like(void **state)
{
    (void)state;
    struct config c;
    config_expect_ok(
        &c, ARGS("--config", config_given_file("; a\n[cache]\n  max_pools = 3 ; three\n"
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
    config_given_file("");
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        char parts[256];
        snprintf(parts, sizeof(parts),
                 "flag --listen|listen.address = %s|not a loopback address|listen.insecure_tcp",
                 refused[i]);
        config_expect_failure(parts, ARGS("--config", config_file, "--listen", refused[i]));
        snprintf(parts, sizeof(parts),
                 "listen.http = %s|not a loopback address|give 127.0.0.1:PORT, and let others in "
                 "by a proxy",
                 refused[i] + 6);
        config_expect_failure(parts,
                              ARGS("--config", config_file, "--listen.http", refused[i] + 6));
    }
    for (size_t i = 0; i < sizeof(fine) / sizeof(fine[0]); i++) {
        config_expect_ok(
            &c, ARGS("--config", config_file, "--listen", fine[i], "--listen.http", fine[i] + 6));
        config_fini(&c);
    }
}

static void what_an_address_needs_beyond_loopback_is_named(void **state)
{
    (void)state;
#define TLS "--listen", "tls+tcp://*:1", "--listen.tls_cert", "/c"
    struct config c;
    config_given_file("");
    const char *f = config_file;
    config_expect_failure("listen.address = tls+tcp://*:1|needs listen.tls_cert",
                          ARGS("--config", f, "--listen", "tls+tcp://*:1"));
    config_expect_failure("listen.address = tls+tcp://*:1|needs listen.tls_key",
                          ARGS("--config", f, TLS));
    config_expect_failure("tls+tcp://*:1|listen.tenants|listen.tls_ca",
                          ARGS("--config", f, TLS, "--listen.tls_key", "/k"));
    config_expect_failure("tls+tcp://*:1|listen.tls_client_cert = required",
                          ARGS("--config", f, TLS, "--listen.tls_key", "/k", "--listen.tls_ca",
                               "/a", "--listen.tls_client_cert", "optional"));
    config_expect_failure(
        "tcp://*:1|listen.insecure_tcp|listen.tenants",
        ARGS("--config", f, "--listen", "tcp://*:1", "--listen.insecure_tcp", "yes"));
    config_expect_failure("tcp://*:1|listen.insecure_tcp = yes",
                          ARGS("--config", f, "--listen", "tcp://*:1", "--listen.tenants", "/t"));
    config_expect_failure("listen.tls_key = a/b|credential",
                          ARGS("--config", f, "--listen.tls_key", "a/b"));
    config_expect_ok(&c,
                     ARGS("--config", f, TLS, "--listen.tls_key", "/k", "--listen.tls_ca", "ca"));
    config_fini(&c);
    config_expect_ok(&c,
                     ARGS("--config", f, TLS, "--listen.tls_key", "k", "--listen.tenants", "/t"));
    config_fini(&c);
    config_expect_ok(&c, ARGS("--config", f, "--listen", "tcp://*:1", "--listen.insecure_tcp",
                              "yes", "--listen.tenants", "/t"));
    config_fini(&c);
    config_expect_ok(&c, ARGS("--config", f, "--listen", "tls+tcp://127.0.0.1:1",
                              "--listen.tls_cert", "/c", "--listen.tls_key", "/k"));
    config_fini(&c);
#undef TLS
}

static void addresses_that_are_none_are_refused_with_the_reason(void **state)
{
    (void)state;
    char long_path[200] = "ipc:///";
    memset(long_path + 7, 'x', 150);
    static const char *const bad[][2] = {
        {"", "names no address"},
        {"udp://1.2.3.4:5", "none of ipc://, shm://, gpu://, tcp:// and tls+tcp://"},
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
    config_given_file("");
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        config_expect_failure(bad[i][1], ARGS("--config", config_file, "--listen", bad[i][0]));
    config_expect_failure("over the limit", ARGS("--config", config_file, "--listen", long_path));
    config_expect_failure(
        "at most 8", ARGS("--config", config_file, "--listen",
                          "ipc:///1,ipc:///2,ipc:///3,ipc:///4,ipc:///5,ipc:///6,ipc:///7,ipc:///8,"
                          "ipc:///9"));
    config_expect_failure("listen.http = nine|has no port",
                          ARGS("--config", config_file, "--listen.http", "nine"));
}

static void settings_that_contradict_each_other_are_both_named(void **state)
{
    (void)state;
    config_given_file("");
    const char *f = config_file;
    config_expect_failure(
        "engine.max_step_items = 4096 (flag --engine.max_step_items) is more than "
        "engine.max_batch_items = 16 (flag --engine.max_batch_items)",
        ARGS("--config", f, "--engine.max_step_items=4096", "--engine.max_batch_items=16"));
    config_expect_failure("engine.max_step_tokens|engine.max_batch_tokens",
                          ARGS("--config", f, "--engine.max_step_tokens=20000"));
    config_expect_failure("engine.default_timeout = 1h|engine.max_timeout = 10m (default)",
                          ARGS("--config", f, "--engine.default_timeout=1h"));
    config_expect_failure("listen.max_message = 64M (default)|cache.io_memory = 1M",
                          ARGS("--config", f, "--cache.io_memory=1M"));
    config_expect_failure("cache.disk_path is set, and cache.disk_size is not",
                          ARGS("--config", f, "--cache.disk_path=/var/tmp"));
    config_expect_failure("cache.disk_size is set, and cache.disk_path is not",
                          ARGS("--config", f, "--cache.disk_size=1G"));
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
    config_given_file("");
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        struct config c;
        enum config_action action;
        assert_int_equal(
            config_try(&c, &action, &fault, ARGS("--config", config_file, words[i].word)), ATTN_OK);
        assert_int_equal(action, words[i].action);
        config_fini(&c);
    }
}

static void the_admin_socket_stands_beside_the_first_ipc_address(void **state)
{
    (void)state;
    static const struct {
        const char *listen, *admin, *url; /* url NULL: none */
    } cases[] = {
        {"ipc:///tmp/x", "auto", "admin:///tmp/x.admin"},
        {"shm:///tmp/y tcp://127.0.0.1:0 ipc:///tmp/x", "auto", "admin:///tmp/x.admin"},
        /* or where that would be by default, so that operators find a daemon of other addresses */
        {"tcp://127.0.0.1:0", "auto", "admin:///run/test/attnd.sock.admin"},
        {"shm:///tmp/y", "auto", "admin:///run/test/attnd.sock.admin"},
        {"ipc:///tmp/"
         "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
         "aaaaaaaaaaaaaaaaaa",
         "auto", NULL}, /* there is no room in an address for .admin */
        {"ipc:///tmp/x", "off", NULL},
        {"tcp://127.0.0.1:0", "/tmp/door", "admin:///tmp/door"},
        {"tcp://127.0.0.1:0", "ipc:///tmp/door", "admin:///tmp/door"},
    };
    config_given_file("");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct config c;
        char url[256];
        config_expect_ok(&c, ARGS("--config", config_file, "--listen", cases[i].listen,
                                  "--listen.admin", cases[i].admin));
        assert_int_equal(config_admin_url(&c, url, sizeof(url)), cases[i].url != NULL);
        if (cases[i].url != NULL)
            assert_string_equal(url, cases[i].url);
        assert_int_equal(config_admin_is_extra(&c),
                         cases[i].url != NULL && strstr(cases[i].url, "/run/test") != NULL);
        config_fini(&c);
    }
    config_expect_failure("listen.admin = door|path \"door\" is not absolute (/run/...)",
                          ARGS("--config", config_file, "--listen.admin", "door"));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup(name, config_reset)
    const struct CMUnitTest tests[] = {
        TEST(defaults_are_those_of_the_table),
        TEST(the_default_socket_is_in_the_users_runtime_directory),
        TEST(a_user_without_a_runtime_directory_must_say_where_to_listen),
        TEST(a_later_source_overrides_an_earlier_one),
        TEST(both_forms_of_a_flag_and_the_short_ones_work),
        TEST(a_value_that_nobody_could_use_is_refused_by_name),
        TEST(a_list_of_a_later_source_replaces_the_earlier_list),
        TEST(sizes_and_times_have_units),
        TEST(a_bad_value_is_named_with_its_source_key_and_range),
        TEST(a_comment_may_stand_behind_a_value),
        TEST(an_unknown_name_is_an_error_with_the_nearest_known_one),
        TEST(an_unknown_variable_is_told_with_the_nearest_known_one),
        TEST(a_file_that_is_no_ini_file_is_refused_by_line),
        TEST(indented_lines_and_comments_are_what_they_look_like),
        TEST(addresses_that_others_can_reach_are_refused_by_name),
        TEST(what_an_address_needs_beyond_loopback_is_named),
        TEST(addresses_that_are_none_are_refused_with_the_reason),
        TEST(settings_that_contradict_each_other_are_both_named),
        TEST(words_on_the_command_line_are_actions),
        TEST(the_admin_socket_stands_beside_the_first_ipc_address),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, config_cleanup);
}
