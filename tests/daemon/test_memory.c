/* test_memory.c: what the machine and its control groups leave, read from a root of the test's own.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/process/memory.h"

#define MIB (UINT64_C(1) << 20)

static char root[64];

static void write_file(const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')) != NULL; p++) {
        *p = '\0';
        mkdir(full, 0700);
        *p = '/';
    }
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

static int make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "/tmp/attnd_memory_XXXXXX");
    assert_non_null(mkdtemp(root));
    write_file("proc/meminfo", "MemTotal: 1048576 kB\nMemFree: 5 kB\nMemAvailable: 524288 kB\n");
    return 0;
}

static int drop_root(void **state)
{
    char command[96];
    (void)state;
    snprintf(command, sizeof command, "rm -r %s", root);
    return system(command) != 0;
}

/* One group of version 2, in MiB; limit NULL: max. */
static void group(const char *path, const char *limit, unsigned used, unsigned cache)
{
    char at[256], text[128];
    snprintf(at, sizeof at, "sys/fs/cgroup%s/memory.max", path);
    write_file(at, limit == NULL ? "max\n" : limit);
    snprintf(at, sizeof at, "sys/fs/cgroup%s/memory.current", path);
    snprintf(text, sizeof text, "%llu\n", used * (unsigned long long)MIB);
    write_file(at, text);
    snprintf(at, sizeof at, "sys/fs/cgroup%s/memory.stat", path);
    snprintf(text, sizeof text, "anon 5\ninactive_file %llu\nactive_file 1\n",
             cache * (unsigned long long)MIB);
    write_file(at, text);
}

static void assert_room(uint64_t free_mib, uint64_t limit_mib, const char *what)
{
    struct memory_room room;
    memory_room_read(root, &room);
    assert_int_equal(room.free_bytes, free_mib * MIB);
    assert_int_equal(room.limit_bytes, limit_mib * MIB);
    assert_string_equal(room.what, what);
}

static void the_least_of_machine_group_and_groups_above_counts(void **state)
{
    (void)state;
    assert_room(512, 1024, "MemAvailable of this machine");
    write_file("proc/self/cgroup", "0::/a.slice/attnd.service\n");
    assert_room(512, 1024, "MemAvailable of this machine"); /* the files are not there */
    group("/a.slice/attnd.service", NULL, 10, 0);
    group("/a.slice", "419430400\n", 100, 30); /* 400 MiB, of which 30 can be dropped */
    assert_room(330, 400, "/sys/fs/cgroup/a.slice/memory.max");
    group("/a.slice/attnd.service", "67108864\n", 10, 0);
    assert_room(54, 64, "/sys/fs/cgroup/a.slice/attnd.service/memory.max");
    group("/a.slice/attnd.service", "67108864\n", 100, 0); /* over it already */
    assert_room(0, 64, "/sys/fs/cgroup/a.slice/attnd.service/memory.max");
}

static void a_container_sees_its_group_as_the_top(void **state)
{
    (void)state;
    write_file("proc/self/cgroup", "0::/\n");
    group("", "134217728\n", 28, 0);
    assert_room(100, 128, "/sys/fs/cgroup/memory.max");
    write_file("proc/self/cgroup", "0::/docker/0123456789abcdef\n");
    assert_room(100, 128, "/sys/fs/cgroup/memory.max");
}

static void version_1_is_read_too(void **state)
{
    (void)state;
    write_file("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/pods/7\n0::/\n");
    write_file("sys/fs/cgroup/memory/pods/7/memory.limit_in_bytes", "104857600\n");
    write_file("sys/fs/cgroup/memory/pods/7/memory.usage_in_bytes", "52428800\n");
    write_file("sys/fs/cgroup/memory/pods/7/memory.stat", "total_inactive_file 10485760\n");
    write_file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"); /* none */
    write_file("sys/fs/cgroup/memory/memory.usage_in_bytes", "99\n");
    assert_room(60, 100, "/sys/fs/cgroup/memory/pods/7/memory.limit_in_bytes");
}

static struct memory_fit fit; /* by the last check */

static attn_status check(const char *at, uint64_t kv, uint64_t io, uint64_t tier, char *why)
{
    const struct memory_need need = {.kv_bytes = kv, .io_bytes = io, .tier_bytes = tier};
    fit = (struct memory_fit){77, 77};
    return memory_check(at, &need, &fit, why, 512);
}

static void a_refusal_is_one_sentence_with_all_sizes(void **state)
{
    (void)state;
    char why[512];
    write_file("proc/self/cgroup", "0::/x\n");
    group("/x", "134217728\n", 8, 0);
    assert_int_equal(check(root, 256 * MIB, 16 * MIB, 0, why), ATTN_ENOMEM);
    assert_string_equal(why,
                        "device.kv_memory 256 MiB, cache.io_memory 16 MiB, tables "
                        "(cache.max_sequences, table_memory) 0 MiB, clients (listen.max_peers, "
                        "engine.max_queue_requests) 0 MiB and 24 MiB for attnd itself do not fit: "
                        "120 MiB of 128 are free (/sys/fs/cgroup/x/memory.max)");
    assert_int_equal(fit.left_bytes, 77);
    assert_int_equal(check(root, 64 * MIB, 32 * MIB, 0, why), ATTN_OK);
    assert_int_equal(fit.left_bytes, 0);
    assert_int_equal(check(root, 64 * MIB, 32 * MIB, 1, why), ATTN_ENOMEM);
    assert_int_equal(check(root, 32 * MIB, 32 * MIB, 32 * MIB, why), ATTN_OK);
    assert_int_equal(check(root, 0, 16 * MIB, 256 * MIB, why), ATTN_ENOMEM);
    assert_non_null(strstr(why, "cache.host_memory and idle_memory 256 MiB"));
    assert_int_equal(check(root, 0, 1, UINT64_MAX, why), ATTN_ENOMEM);
    assert_int_equal(check(root, 64 * MIB, 33 * MIB, 0, why), ATTN_ENOMEM);
    assert_int_equal(check(root, UINT64_MAX, 1, 0, why), ATTN_ENOMEM);
    assert_int_equal(check("/nowhere", 64 * MIB, MIB, 0, why), ATTN_OK);
    assert_true(fit.left_bytes == UINT64_MAX);
}

static void tables_and_clients_count_and_what_is_taken_does_not(void **state)
{
    (void)state;
    char why[512];
    write_file("proc/self/cgroup", "0::/x\n");
    group("/x", "134217728\n", 8, 0); /* leaves 120 */
    struct memory_need need = {
        .io_bytes = 16 * MIB, .table_bytes = 50 * MIB, .client_bytes = 20 * MIB};
    assert_int_equal(memory_check(root, &need, &fit, why, sizeof why), ATTN_OK);
    assert_int_equal(fit.left_bytes, 10 * MIB);
    assert_int_equal(fit.all_bytes, 110 * MIB);
    need.table_bytes += 11 * MIB;
    assert_int_equal(memory_check(root, &need, &fit, why, sizeof why), ATTN_ENOMEM);
    assert_non_null(strstr(why, "table_memory) 61 MiB, clients"));
    assert_non_null(strstr(why, "max_queue_requests) 20 MiB"));
    need.taken_bytes = MIB;
    assert_int_equal(memory_check(root, &need, &fit, why, sizeof why), ATTN_OK);
    assert_int_equal(fit.left_bytes, 0);
    need.table_bytes = need.client_bytes = UINT64_MAX;
    assert_int_equal(memory_check(root, &need, &fit, why, sizeof why), ATTN_ENOMEM);
    need.taken_bytes = UINT64_MAX;
    assert_int_equal(memory_check(root, &need, &fit, why, sizeof why), ATTN_OK);
    /* what is used counts where a process is to start, not where its settings are judged */
    need = (struct memory_need){.kv_bytes = 66 * MIB, .io_bytes = 32 * MIB};
    assert_int_equal(memory_check(root, &need, &fit, why, sizeof why), ATTN_ENOMEM);
    assert_int_equal(memory_check_at_all(root, &need, why, sizeof why), ATTN_OK);
    need.table_bytes = 7 * MIB;
    assert_int_equal(memory_check_at_all(root, &need, why, sizeof why), ATTN_ENOMEM);
    assert_non_null(strstr(why, "table_memory) 7 MiB, "));
    assert_non_null(strstr(why, " do not fit: there are 128 MiB (/sys/fs/cgroup/x/memory.max)"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_least_of_machine_group_and_groups_above_counts,
                                        make_root, drop_root),
        cmocka_unit_test_setup_teardown(a_container_sees_its_group_as_the_top, make_root,
                                        drop_root),
        cmocka_unit_test_setup_teardown(version_1_is_read_too, make_root, drop_root),
        cmocka_unit_test_setup_teardown(tables_and_clients_count_and_what_is_taken_does_not,
                                        make_root, drop_root),
        cmocka_unit_test_setup_teardown(a_refusal_is_one_sentence_with_all_sizes, make_root,
                                        drop_root),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
