/* test_shm_abuse.c: the running daemon between well-behaved clients, whose every output is
 * verified, and clients that scribble over their memory, submit nonsense, stall, die, or try to
 * take the memory away. It also holds who may connect.
 *
 * Clients are processes of their own: the binary runs itself as "good" or "hostile".
 *   SHM_SOAK_SECONDS=120 SHM_SEED=7 test_shm_abuse
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/attn_time.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/shm_hostile.h"
#include "tests/daemon/transport/shm_link.h"
#include "tests/random.h"

enum { N_GOOD = 2, N_HOSTILE = 4, DEFAULT_SECONDS = 6, PATIENCE_S = 300 };

static double now_s(void)
{
    return (double)attn_now_ns() * 1e-9;
}

static const char *good_path;
static double end_s;
static uint64_t seed;

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

/* --- a well-behaved client -------------------------------------------------------------------- */

static void every_output_is_right(void **state)
{
    (void)state;
    static struct e2e_seq s[2];
    struct e2e d = {0};
    uint64_t name = (uint64_t)getpid() << 20;
    uint32_t n_rounds = 0;
    snprintf(d.shm_path, sizeof d.shm_path, "%s", good_path);
    while (n_rounds == 0 || now_s() < end_s) {
        struct e2e_client c;
        e2e_connect_shm(&c, &d);
        e2e_make_pool(&c, ATTN_BF16, 1024);
        for (uint32_t i = 0; i < 2; i++)
            assert_int_equal(e2e_open_seq(&c, &s[i], ++name, below(1000)), ATTN_OK);
        uint32_t pos = 0;
        for (uint32_t k = 0; k < 12; k++) {
            uint32_t n = 1 + below(k % 4 == 0 ? 40 : 3);
            uint64_t id[E2E_LAYERS];
            struct e2e_item items[2] = {{&s[0], pos, n}, {&s[1], pos, n}};
            for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
                id[layer] = e2e_send_step(&c, layer, E2E_BOTH, items, 2, 0);
            for (uint32_t layer = E2E_LAYERS; layer-- > 0;)
                e2e_check_step(e2e_await(&c, id[layer]), layer, E2E_BOTH, items, 2);
            pos += n;
        }
        for (uint32_t i = 0; i < 2; i++)
            assert_int_equal(e2e_close_seq(&c, &s[i]), ATTN_OK);
        e2e_disconnect(&c);
        n_rounds++;
    }
}

/* --- the daemon seen from outside ------------------------------------------------------------- */

static uint32_t count_descriptors(pid_t pid)
{
    char path[64];
    uint32_t n = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    assert_non_null(dir);
    while (readdir(dir) != NULL)
        n++;
    closedir(dir);
    return n;
}

static uint32_t count_regions(pid_t pid)
{
    char line[512];
    uint32_t n = 0;
    snprintf(line, sizeof line, "/proc/%d/maps", (int)pid);
    FILE *f = fopen(line, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f) != NULL)
        n += strstr(line, "attnd-shm") != NULL;
    fclose(f);
    return n;
}

static pid_t spawn_self(const char *role, const char *path, double seconds, unsigned child_seed)
{
    char self[256], time_text[32], seed_text[32];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = '\0';
    snprintf(time_text, sizeof time_text, "%f", seconds);
    snprintf(seed_text, sizeof seed_text, "%u", child_seed);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        execl(self, self, role, path, time_text, seed_text, NULL);
        _exit(127);
    }
    return pid;
}

static void hostile_clients_harm_themselves_alone(void **state)
{
    (void)state;
    struct e2e d;
    static const char *const flags[] = {"--engine.lease", "20s", "--listen.handshake_timeout", "1s",
                                        NULL};
    const char *soak = getenv("SHM_SOAK_SECONDS"), *seed_text = getenv("SHM_SEED");
    double seconds = soak != NULL ? atof(soak) : DEFAULT_SECONDS;
    unsigned base = seed_text != NULL ? (unsigned)atoi(seed_text) : 1;
    e2e_start(&d, flags);
    struct e2e_client c;
    e2e_connect_shm(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, 1024); /* for the hostile to find */
    e2e_disconnect(&c);
    double patient_s = now_s() + PATIENCE_S;
    while (count_regions(d.pid) > 0) {
        assert_true(now_s() < patient_s);
        sched_yield();
    }
    uint32_t n_descriptors = count_descriptors(d.pid);

    pid_t pids[N_GOOD + N_HOSTILE];
    double until_s = now_s() + seconds;
    for (uint32_t i = 0; i < N_GOOD + N_HOSTILE; i++)
        pids[i] = spawn_self(i < N_GOOD ? "good" : "hostile", d.shm_path, seconds, base * 100 + i);
    for (uint32_t i = N_GOOD + N_HOSTILE; i-- > 0;) {
        int status;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        bool was_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        if (i >= N_GOOD && was_killed && now_s() < until_s) { /* by itself: the next one */
            pids[i] = spawn_self("hostile", d.shm_path, until_s - now_s(), base += 1000);
            i++;
        } else if (!(WIFEXITED(status) && WEXITSTATUS(status) == 0) &&
                   !(i >= N_GOOD && was_killed)) {
            fail_msg("client %u (seed %s) ended with status 0x%x", i,
                     seed_text != NULL ? seed_text : "1", status);
        }
    }
    /* everything of theirs is given back */
    patient_s = now_s() + PATIENCE_S;
    while (count_regions(d.pid) > 0 || count_descriptors(d.pid) > n_descriptors) {
        if (now_s() > patient_s)
            fail_msg("%u regions and %u descriptors (%u before) are left", count_regions(d.pid),
                     count_descriptors(d.pid), n_descriptors);
        sched_yield();
    }
    e2e_stop(&d);
}

/* Whether a process of another user can open a link. */
static bool no_client_can_connect(const struct e2e *d)
{
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        struct shm_link l;
        if (setgid(65534) != 0 || setuid(65534) != 0)
            _exit(2);
        _exit(shm_link_open(&l, d->shm_path, 0, 0) ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) < 2);
    return WEXITSTATUS(status) == 0;
}

static void others_are_refused(void **state)
{
    (void)state;
    struct e2e d;
    int status;
    if (geteuid() != 0)
        skip();
    e2e_start(&d, NULL);
    assert_int_equal(chmod(d.dir, 0711), 0);
    assert_false(no_client_can_connect(&d)); /* the file's mode */
    assert_int_equal(chmod(d.shm_path, 0666), 0);
    assert_true(no_client_can_connect(&d)); /* let in by it */
    /* who got past the file's mode is looked at again */
    e2e_pause(&d);
    int connected[2];
    char byte = 0;
    assert_int_equal(pipe(connected), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct shm_link l;
        if (setgid(65534) != 0 || setuid(65534) != 0)
            _exit(2);
        l.socket = shm_link_connect(d.shm_path);
        if (write(connected[1], &byte, 1) != 1)
            _exit(3);
        _exit(l.socket >= 0 && shm_link_is_gone(&l, 20000) ? 0 : 1);
    }
    assert_int_equal(read(connected[0], &byte, 1), 1);
    close(connected[0]);
    close(connected[1]);
    assert_int_equal(chmod(d.shm_path, 0660), 0);
    e2e_signal(&d, SIGCONT);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    e2e_stop(&d);
}

static void memory_is_bounded(void **state)
{
    (void)state;
    struct e2e d;
    struct shm_link l[5];
    static const char *const flags[] = {"--listen.shm_client",
                                        "1M",
                                        "--listen.shm_memory",
                                        "10M", /* with a request of the heap for each slot */
                                        "--listen.peer_share",
                                        "100",
                                        "--listen.principal_share",
                                        "100",
                                        NULL};
    e2e_start(&d, flags);
    for (uint32_t i = 0; i < 4; i++) {
        assert_true(
            shm_link_open(&l[i], d.shm_path, 0, (uint64_t)1 << 40)); /* gets what there is */
        assert_int_equal(l[i].welcome.region_bytes, 1 << 20);
    }
    assert_false(shm_link_open(&l[4], d.shm_path, 0, 0));
    assert_int_equal(l[4].welcome.status, ATTN_EQUOTA);
    assert_non_null(strstr(l[4].welcome.message, "listen.shm_memory"));
    shm_link_close(&l[2]);
    double patient_s = now_s() + PATIENCE_S;
    while (!shm_link_open(&l[2], d.shm_path, 8, 0)) /* once it has noticed */
        assert_true(now_s() < patient_s);
    assert_int_equal(l[2].welcome.n_slots, 8);
    for (uint32_t i = 0; i < 4; i++)
        shm_link_close(&l[i]);
    e2e_stop(&d);
}

int main(int argc, char **argv)
{
    if (argc == 5) {
        good_path = argv[2];
        end_s = now_s() + atof(argv[3]);
        seed = (uint64_t)atoi(argv[4]);
        if (strcmp(argv[1], "hostile") == 0)
            return shm_be_hostile(argv[2], end_s, (unsigned)seed);
        const struct CMUnitTest tests[] = {cmocka_unit_test(every_output_is_right)};
        return cmocka_run_group_tests_name("good", tests, NULL, NULL);
    }
    const struct CMUnitTest all[] = {
        cmocka_unit_test(hostile_clients_harm_themselves_alone),
        cmocka_unit_test(others_are_refused),
        cmocka_unit_test(memory_is_bounded),
    };
    return cmocka_run_group_tests_name("shm_abuse", all, NULL, NULL);
}
