/* e2e_keep.c: descriptors go to a service manager and from there to the next process. The manager
 * is this test: a socket for $NOTIFY_SOCKET, and what systemd's descriptor store does with what
 * comes there.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "cache/arena.h"

enum {
    FIRST_FD = 3,
    MAX_FDS = 16,
    N_SETTINGS = 3, /* the last good ones, and their certificate and key */
    N_KEPT = 6 + N_SETTINGS, /* sockets of ipc, its admin, shm and gpu; arena, memory */
    LEN = 200,
};

static struct e2e d;
static struct e2e_client c;
static struct e2e_seq seq, other;
static struct {
    char path[96];
    int socket;
    struct {
        int fd;
        char name[200];
    } fds[MAX_FDS];
    uint32_t n_fds, n_removed;
    char status[1024]; /* the latest */
    pthread_t thread; /* reads; attnd waits for the answers to its barriers */
    pthread_mutex_t lock;
    _Atomic bool is_stopping;
} manager;

/* --- the manager ------------------------------------------------------------------------------ */

static void forget(uint32_t i)
{
    close(manager.fds[i].fd);
    manager.fds[i] = manager.fds[--manager.n_fds];
}

static void take(const char *text, int fd)
{
    char name[200] = "";
    const char *at = strstr(text, "FDNAME=");
    if (at != NULL)
        snprintf(name, sizeof name, "%.*s", (int)strcspn(at + 7, "\n"), at + 7);
    if (strncmp(text, "FDSTOREREMOVE=1", 15) == 0) {
        manager.n_removed++;
        for (uint32_t i = manager.n_fds; i-- > 0;)
            if (strcmp(manager.fds[i].name, name) == 0)
                forget(i);
    } else if (strncmp(text, "FDSTORE=1", 9) == 0) {
        assert_true(fd >= 0 && manager.n_fds < MAX_FDS && name[0] != '\0');
        assert_null(strchr(name, ':')); /* names are separated by it */
        manager.fds[manager.n_fds].fd = fd;
        strcpy(manager.fds[manager.n_fds++].name, name);
    } else if (fd >= 0) {
        assert_string_equal(text, "BARRIER=1");
        close(fd);
    } else if (strncmp(text, "STATUS=", 7) == 0) {
        strcpy(manager.status, text + 7);
    }
}

/* Takes one message; false: none is there. */
static bool read_one(void)
{
    char text[1024], control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = {text, sizeof text - 1};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(manager.socket, &m, MSG_CMSG_CLOEXEC);
    if (n < 0)
        return false;
    text[n] = '\0';
    int fd = -1;
    const struct cmsghdr *head = CMSG_FIRSTHDR(&m);
    if (head != NULL)
        memcpy(&fd, CMSG_DATA(head), sizeof fd);
    take(text, fd);
    return true;
}

/* Takes what has been sent. */
static void manager_read(void)
{
    pthread_mutex_lock(&manager.lock);
    while (read_one())
        ;
    pthread_mutex_unlock(&manager.lock);
}

static void *manage(void *arg)
{
    struct pollfd p = {.fd = manager.socket, .events = POLLIN};
    (void)arg;
    while (!atomic_load(&manager.is_stopping)) {
        (void)poll(&p, 1, 20);
        manager_read();
    }
    return NULL;
}

static void manager_open(void)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    memset(&manager, 0, sizeof manager);
    snprintf(manager.path, sizeof manager.path, "/tmp/attnd-notify-%d", (int)getpid());
    strcpy(a.sun_path, manager.path);
    unlink(manager.path);
    manager.socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_int_equal(bind(manager.socket, (struct sockaddr *)&a, sizeof a), 0);
    pthread_mutex_init(&manager.lock, NULL);
    assert_int_equal(pthread_create(&manager.thread, NULL, manage, NULL), 0);
}

static void manager_close(void)
{
    atomic_store(&manager.is_stopping, true);
    pthread_join(manager.thread, NULL);
    while (manager.n_fds > 0)
        forget(0);
    close(manager.socket);
    unlink(manager.path);
}

static int stored(const char *prefix)
{
    for (uint32_t i = 0; i < manager.n_fds; i++)
        if (strncmp(manager.fds[i].name, prefix, strlen(prefix)) == 0)
            return manager.fds[i].fd;
    return -1;
}

/* In the child: what a manager gives to a service. */
static void hand_in(void)
{
    char text[MAX_FDS * 200] = "", number[16];
    int copies[MAX_FDS];
    for (uint32_t i = 0; i < manager.n_fds; i++) {
        copies[i] = fcntl(manager.fds[i].fd, F_DUPFD_CLOEXEC, FIRST_FD + MAX_FDS);
        strcat(strcat(text, i == 0 ? "" : ":"), manager.fds[i].name);
    }
    for (uint32_t i = 0; i < manager.n_fds; i++)
        dup2(copies[i], FIRST_FD + (int)i);
    setenv("NOTIFY_SOCKET", manager.path, 1);
    setenv("FDSTORE", "32", 1);
    setenv("LISTEN_FDNAMES", text, 1);
    snprintf(number, sizeof number, "%u", (unsigned)manager.n_fds);
    setenv("LISTEN_FDS", number, 1);
    snprintf(number, sizeof number, "%d", (int)getpid());
    setenv("LISTEN_PID", number, 1);
}

static void start(const char *const *flags, bool is_first)
{
    /* what the test has looked at and changed comes before what the manager's thread does now */
    pthread_mutex_lock(&manager.lock);
    pthread_mutex_unlock(&manager.lock);
    e2e_before_exec = hand_in;
    if (is_first)
        e2e_start(&d, flags);
    else
        e2e_restart(&d, flags);
    e2e_before_exec = NULL;
    manager_read();
}

static void end(int number)
{
    e2e_signal(&d, number);
    e2e_wait(&d);
    manager_read();
}

static int setup(void **state)
{
    (void)state;
    manager_open();
    start(NULL, true);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_F32, 64);
    assert_int_equal(e2e_open_seq(&c, &seq, 1, 1), ATTN_OK);
    assert_int_equal(e2e_open_seq(&c, &other, 2, 2), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        e2e_step(&c, layer, &(struct e2e_item){&seq, 0, LEN}, 1);
        e2e_step(&c, layer, &(struct e2e_item){&other, 0, LEN}, 1);
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    e2e_disconnect(&c);
    if (d.pid != 0)
        end(SIGTERM);
    manager_close();
    char admin[512];
    snprintf(admin, sizeof admin, "%s.admin", d.url + strlen("ipc://"));
    unlink(admin);
    unlink(d.shm_path);
    unlink(d.gpu_path);
    unlink(d.url + strlen("ipc://"));
    e2e_stop(&d);
    return 0;
}

/* The same client at the next process, where its session is known. */
static void reconnect(void)
{
    uint64_t session = c.session, next_id = c.next_id;
    uint32_t pool = c.pool;
    e2e_disconnect(&c);
    e2e_connect(&c, &d);
    c.session = session;
    c.next_id = next_id;
    c.pool = pool;
}

static void assert_same(struct e2e_seq *s, void *const before[E2E_LAYERS])
{
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        size_t bytes;
        void *now = e2e_read_back(&c, s, layer, LEN, &bytes);
        assert_memory_equal(now, before[layer], bytes);
        free(now);
    }
}

static void read_all(struct e2e_seq *s, void *out[E2E_LAYERS])
{
    size_t bytes;
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        out[layer] = e2e_read_back(&c, s, layer, LEN, &bytes);
}

static void free_all(void *bytes[E2E_LAYERS])
{
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        free(bytes[layer]);
}

static struct kv_header arena_header(void)
{
    struct kv_header h;
    assert_int_equal(pread(stored("arena-"), &h, sizeof h, 0), sizeof h);
    return h;
}

/* --- tests ------------------------------------------------------------------------------------ */

static void a_killed_process_leaves_everything_to_the_next(void **state)
{
    (void)state;
    void *before[E2E_LAYERS], *others[E2E_LAYERS];
    read_all(&seq, before);
    read_all(&other, others);
    assert_true(stored("ipc=///") >= 0 && stored("shm=///") >= 0);
    assert_true(stored("arena-") >= 0 && stored("memory-cpu-") >= 0);
    assert_int_equal(manager.n_fds, N_KEPT);
    end(SIGKILL);

    struct sockaddr_un a = {.sun_family = AF_UNIX}; /* the listener is open all the time */
    strcpy(a.sun_path, d.url + strlen("ipc://"));
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    start(NULL, false);
    uint8_t greeting[8];
    assert_int_equal(recv(fd, greeting, sizeof greeting, MSG_WAITALL), sizeof greeting);
    close(fd);

    reconnect();
    assert_same(&seq, before);
    assert_same(&other, others);
    e2e_step(&c, 0, &(struct e2e_item){&seq, LEN, 3}, 1);
    assert_int_equal(manager.n_fds, N_KEPT); /* nothing was put again */
    assert_true(
        e2e_log_has(&d, "kept: 2 sequences of 400 tokens, 1 pools, 1 sessions; dropped: 0"));
    assert_true(e2e_log_has(&d, ": all work: tiles in ")); /* what computes it */
    free_all(before);
    free_all(others);
    end(SIGTERM);
    assert_int_equal(access(a.sun_path, F_OK), 0);
    start(NULL, false); /* after a clean end, too */
    reconnect();
    e2e_step(&c, 0, &(struct e2e_item){&seq, LEN + 3, 1}, 1);
}

static void sigterm_answers_what_was_received_and_nothing_else(void **state)
{
    (void)state;
    Attnd__Stats b = ATTND__STATS__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint64_t id[20];
    for (uint32_t i = 0; i < 20; i++)
        id[i] = e2e_send_zeros(&c, i % E2E_LAYERS, &(struct e2e_item){&seq, 0, LEN}, 0);
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &b;
    assert_int_equal(e2e_call(&c, &h)->status, ATTN_OK); /* they have arrived */
    e2e_signal(&d, SIGTERM);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(e2e_await(&c, id[i])->header->status, ATTN_OK);
    assert_int_equal(e2e_wait(&d), 0);
    assert_true(e2e_log_has(&d, "all is answered"));
    start(NULL, false); /* for a request that comes now, the listener is open again */
    reconnect();
    assert_int_equal(e2e_item(&c, &seq, 0, LEN, 1), ATTN_OK);
}

static void starts_empty(const char *const *flags, const char *why)
{
    start(flags, false);
    if (!e2e_log_has(&d, "starting empty, the kept cache can't be used: ") ||
        !e2e_log_has(&d, why)) {
        char command[128];
        snprintf(command, sizeof command, "cat %s >&2", d.log);
        (void)!system(command);
        fail_msg("the log does not say %s", why);
    }
    assert_int_equal(manager.n_fds, N_KEPT); /* the new ones in place of the old */
    assert_int_equal(manager.n_removed, 2 + N_SETTINGS);
    e2e_disconnect(&c);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_F32, 64);
    assert_int_equal(e2e_open_seq(&c, &seq, 1, 1), ATTN_OK);
    e2e_step(&c, 0, &(struct e2e_item){&seq, 0, 5}, 1);
}

static void other_limits_start_empty_and_say_which(void **state)
{
    (void)state;
    end(SIGKILL);
    starts_empty((const char *const[]){"--cache.max_sequences", "100", NULL},
                 "arena: made with max_sequences 4096, configured is 100");
}

static void other_memory_starts_empty_and_says_so(void **state)
{
    (void)state;
    end(SIGKILL);
    starts_empty((const char *const[]){"--device.kv_memory", "65M", NULL}, "kv_bytes is 68157440");
}

static void an_unknown_arena_starts_empty_by_its_version(void **state)
{
    (void)state;
    end(SIGKILL);
    struct kv_header h = arena_header();
    h.version++;
    assert_int_equal(pwrite(stored("arena-"), &h, sizeof h, 0), sizeof h);
    char why[64];
    snprintf(why, sizeof why, "arena: version %u, this program has version %u", h.version,
             h.version - 1);
    starts_empty(NULL, why);
}

static void a_damaged_sequence_is_dropped_alone(void **state)
{
    (void)state;
    void *before[E2E_LAYERS];
    read_all(&other, before);
    end(SIGKILL);
    struct kv_header h = arena_header();
    struct kv_seq_rec r;
    off_t at = (off_t)h.offset[KV_SEQS];
    for (;; at += (off_t)sizeof r) {
        assert_int_equal(pread(stored("arena-"), &r, sizeof r, at), sizeof r);
        if (r.state == KV_LIVE && r.name == seq.name)
            break;
    }
    r.seal ^= 1;
    assert_int_equal(pwrite(stored("arena-"), &r, sizeof r, at), sizeof r);
    start(NULL, false);
    assert_true(
        e2e_log_has(&d, "kept: 1 sequences of 200 tokens, 1 pools, 1 sessions; dropped: 1"));
    reconnect();
    assert_same(&other, before);
    assert_int_equal(e2e_item(&c, &seq, 0, LEN, 1), ATTN_ENOTFOUND);
    free_all(before);
}

static void half_a_cache_is_none(void **state)
{
    (void)state;
    end(SIGKILL);
    for (uint32_t i = manager.n_fds; i-- > 0;)
        if (strncmp(manager.fds[i].name, "memory-", 7) == 0)
            forget(i);
    start(NULL, false);
    assert_true(e2e_log_has(&d, "what was kept as arena-"));
    assert_int_equal(manager.n_fds, N_KEPT);
    e2e_disconnect(&c);
    e2e_connect(&c, &d);
}

/* Starts with settings that are refused; those that were good are in use, and the log says why. */
static void starts_as_before(const char *const *flags, const char *why)
{
    start(flags, false);
    assert_true(e2e_log_has(&d, "level=error") && e2e_log_has(&d, why));
    assert_non_null(strstr(manager.status, "the settings are refused"));
    assert_non_null(strstr(manager.status, why));
    assert_int_equal(manager.n_fds, N_KEPT);
    assert_int_equal(manager.n_removed, 0);
}

static void a_mistake_in_the_settings_does_not_cost_the_cache(void **state)
{
    (void)state;
    static const struct {
        const char *flags[5], *why;
        int how; /* the process before it ends */
    } mistakes[] = {
        {{"--engine.leese", "3s"}, "unknown --engine.leese", SIGTERM},
        {{"--engine.default_timeout", "11h"}, "is more than engine.max_timeout", SIGKILL},
        {{"--listen.tenants", "/nowhere/tenants"}, "/nowhere/tenants: No such file", SIGTERM},
        {{"--listen", "ipc:///nowhere/else/s"}, "directory /nowhere/else", SIGKILL},
        {{"--device.kv_memory", "60T"}, "device.kv_memory", SIGTERM},
        {{"--cache.max_sequences", "1000000", "--cache.max_seq_tokens", "268435456"},
         "max_sequences 1000000",
         SIGKILL},
    };
    void *before[E2E_LAYERS];
    read_all(&seq, before);
    for (size_t i = 0; i < sizeof mistakes / sizeof mistakes[0]; i++) {
        end(mistakes[i].how);
        starts_as_before(mistakes[i].flags, mistakes[i].why);
        reconnect();
        assert_same(&seq, before);
    }
    end(SIGTERM);
    start(NULL, false); /* mended */
    assert_string_equal(manager.status, "serving");
    assert_false(e2e_log_has(&d, "level=error"));
    assert_int_equal(manager.n_fds, N_KEPT);
    reconnect();
    assert_same(&seq, before);
    free_all(before);
}

static void write_tenants(const char *path, const char *text)
{
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fchmod(fileno(f), 0600) | fclose(f), 0);
}

/* Waits until the manager has a text with this word, five minutes at most. */
static void await_kept(const char *name, const char *word)
{
    bool is_there = false;
    for (uint32_t ms = 0; !is_there && ms < 300000; ms++) {
        char text[64] = "";
        int fd = -1;
        pthread_mutex_lock(&manager.lock);
        for (uint32_t i = 0; i < manager.n_fds; i++)
            if (strcmp(manager.fds[i].name, name) == 0)
                fd = manager.fds[i].fd;
        is_there = fd >= 0 && pread(fd, text, sizeof text - 1, 0) > 0 && strstr(text, word) != NULL;
        pthread_mutex_unlock(&manager.lock);
        (void)poll(NULL, 0, !is_there);
    }
    assert_true(is_there);
}

/* What was in the files counts, not their names: they may be what is broken. */
static void nor_does_one_in_a_file_that_they_name(void **state)
{
    (void)state;
    char path[128];
    snprintf(path, sizeof path, "%s/tenants", d.dir);
    const char *const flags[] = {"--listen.tenants", path, NULL};
    write_tenants(path, "[first]\nusers = nobody\n");
    end(SIGTERM);
    start(flags, false);
    write_tenants(path, "[second]\nusers = nobody\n");
    e2e_signal(&d, SIGHUP); /* kept from now on */
    e2e_await_log(&d, "settings are read");
    await_kept("settings-listen.tenants", "[second]");
    await_kept("settings", ""); /* comes last */
    write_tenants(path, "[no name of a tenant]\n");
    end(SIGKILL);
    manager.n_removed = 0;
    start(flags, false);
    assert_non_null(strstr(manager.status, "the settings are refused"));
    assert_true(e2e_log_has(&d, "kept: 2 sequences of 400 tokens"));
    unlink(path);
    end(SIGTERM); /* and again, from what was kept then */
    start(flags, false);
    assert_non_null(strstr(manager.status, "No such file"));
    reconnect();
    e2e_step(&c, 0, &(struct e2e_item){&seq, LEN, 1}, 1);
}

/* A start that fails, with what is kept at hand, as a manager would try it. */
static void fails_to_start(const char *const *flags, int code, const char *why)
{
    struct e2e failing = {0};
    e2e_before_exec = hand_in;
    assert_int_equal(e2e_run(&failing, flags), code);
    e2e_before_exec = NULL;
    assert_true(e2e_log_has(&failing, why));
    /* not so fast that the manager gives up */
    assert_true(e2e_log_has(&failing, "the kept cache waits for another start"));
    e2e_stop(&failing);
    assert_true(stored("arena-") >= 0 && stored("memory-cpu-") >= 0);
}

static void without_good_settings_the_cache_waits_for_them(void **state)
{
    (void)state;
    static const char *const wrong[] = {"--engine.leese", "3s", NULL};
    void *before[E2E_LAYERS];
    read_all(&seq, before);
    end(SIGKILL);
    struct sockaddr_in taken = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof taken;
    char http[32];
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&taken, sizeof taken) | listen(fd, 1) |
                         getsockname(fd, (struct sockaddr *)&taken, &n),
                     0);
    snprintf(http, sizeof http, "127.0.0.1:%u", (unsigned)ntohs(taken.sin_port));
    fails_to_start((const char *const[]){"--listen", d.url, "--listen.http", http, NULL}, 73,
                   "Address already in use"); /* that shows as it starts */
    close(fd);
    for (uint32_t i = manager.n_fds; i-- > 0;)
        if (strncmp(manager.fds[i].name, "settings", 8) == 0)
            forget(i);
    fails_to_start(wrong, 75, "unknown --engine.leese"); /* not with a code that is final */
    start(NULL, false);
    reconnect();
    assert_same(&seq, before);
    free_all(before);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(a_killed_process_leaves_everything_to_the_next),
        T(sigterm_answers_what_was_received_and_nothing_else),
        T(other_limits_start_empty_and_say_which),
        T(other_memory_starts_empty_and_says_so),
        T(an_unknown_arena_starts_empty_by_its_version),
        T(a_damaged_sequence_is_dropped_alone),
        T(half_a_cache_is_none),
        T(a_mistake_in_the_settings_does_not_cost_the_cache),
        T(nor_does_one_in_a_file_that_they_name),
        T(without_good_settings_the_cache_waits_for_them),
    };
    return cmocka_run_group_tests_name("keep", tests, NULL, NULL);
}
