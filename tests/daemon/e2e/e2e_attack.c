/* e2e_attack.c: two tenants attack each other, and the listeners, while a worker of each goes on
 * with its sequences. For so many seconds (argument; 3 without one), after a calm third of that
 * time, at most a minute:
 *
 *   worker    appends, attends, truncates; every answer is compared with the reference
 *   flooder   keeps more of the largest steps under way than its quota allows
 *   prober    names what is the other's, whose ids, handles and session it has been told
 *   hoarder   takes pools, sequences and sessions to the end of its quotas, again and again
 *   stranger  no TLS, broken TLS, handshakes and messages that stop or are random bytes
 *
 * Each is a process. Meanwhile no quota is ever over, and at the end the daemon stops in order.
 * Prints what the workers felt. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <arpa/inet.h>
#include <cmocka.h>

#include "clients/libattn/transport/transport.h"
#include "proto/attn_time.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/certs.h"
#include "tests/random.h"

enum {
    BLOCKS = 400,
    POOL_BLOCKS = 200, /* of the pool that all of a tenant use */
    SEQUENCES = 60,
    SESSIONS = 24,
    POOLS = 6,
    BYTES = 4 << 20,
    WORKER_SEQS = 4,
    MAX_TOKENS = 200,
    MAX_TIMES = 1 << 18,
    N_ROLES = 5,
};

#define PATIENCE_NS UINT64_C(300000000000)

static const char *const tenants[2] = {"alpha", "beta"};
static struct e2e d;
static uint64_t seed;

/* What processes tell each other. */
static struct shared {
    uint64_t session[2]; /* of the workers, which the other tenant's prober knows */
    uint32_t pool[2];
    _Atomic bool is_attacked, has_ended;
    _Atomic uint64_t until_ns; /* once it is attacked */
    _Atomic uint64_t n_attacks[N_ROLES];
    _Atomic uint32_t n_times[2][2]; /* [tenant][calm, under attack] */
    uint32_t times_us[2][2][MAX_TIMES];
} * shared;

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

/* Has each worker done a step in this phase, calm or under attack? However busy the machine is. */
static bool has_done(int phase)
{
    return shared->has_ended || (shared->n_times[0][phase] > 0 && shared->n_times[1][phase] > 0);
}

static bool is_over(void)
{
    return shared->has_ended ||
           (shared->is_attacked && attn_now_ns() >= shared->until_ns && has_done(1));
}

/* With the tenant's certificate, and without hello. */
static void connect_as(struct e2e_client *c, int tenant)
{
    char why[256], name[32];
    *c = (struct e2e_client){.next_id = 1, .socket = -1};
    struct client_credentials files = {.ca_file = certs_file(CERTS_GOOD, "ca.crt")};
    snprintf(name, sizeof name, "%s.crt", tenants[tenant]);
    files.cert_file = certs_file(CERTS_GOOD, name);
    snprintf(name, sizeof name, "%s.key", tenants[tenant]);
    files.cert_key_file = certs_file(CERTS_GOOD, name);
    if (transport_sp_ops.open(d.tls_url, &files, &c->tls, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    transport_sp_ops.set_max_message(c->tls, UINT32_MAX);
    free((char *)(uintptr_t)files.ca_file);
    free((char *)(uintptr_t)files.cert_file);
    free((char *)(uintptr_t)files.cert_key_file);
}

static uint64_t send_hello(struct e2e_client *c, uint64_t resume)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Hello hello = ATTND__HELLO__INIT;
    hello.protocol_version = 1;
    hello.nonce = 1 + (uint64_t)below(UINT32_MAX / 2) * below(UINT32_MAX / 2);
    hello.resume_session = resume;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &hello;
    return e2e_send(c, &h, NULL, 0);
}

/* A session, as soon as the tenant's quota has one. */
static void enter(struct e2e_client *c, int tenant)
{
    uint64_t until_ns = attn_now_ns() + PATIENCE_NS;
    connect_as(c, tenant);
    for (;;) {
        const Attnd__Reply *r = e2e_await(c, send_hello(c, 0))->header;
        if (r->status == ATTN_OK) {
            c->session = r->hello->session;
            break;
        }
        assert_true(r->status == ATTN_EQUOTA || r->status == ATTN_EOVERLOAD);
        assert_true(attn_now_ns() < until_ns);
        e2e_forget(c);
    }
    e2e_forget(c);
}

/* ---- the worker ---- */

static bool is_busy(attn_status st)
{
    return st == ATTN_EOVERLOAD || st == ATTN_EDEADLINE;
}

static void note_time(int tenant, uint64_t since_ns)
{
    uint64_t now_ns = attn_now_ns();
    int phase = shared->is_attacked;
    uint32_t n = atomic_fetch_add(&shared->n_times[tenant][phase], 1);
    if (n < MAX_TIMES)
        shared->times_us[tenant][phase][n] = (uint32_t)((now_ns - since_ns) / 1000);
}

/* One step of all its sequences, until it is done: a flood of its own tenant may be in its way. */
static void step(struct e2e_client *c, int tenant, uint32_t layer, const struct e2e_item *items,
                 uint32_t n)
{
    uint64_t since_ns = attn_now_ns();
    for (;;) {
        uint64_t id = e2e_send_step(c, layer, E2E_BOTH, items, n, 0);
        const struct wire_reply *r = e2e_await(c, id);
        if (!is_busy((attn_status)r->header->status)) {
            e2e_check_step(r, layer, E2E_BOTH, items, n);
            break;
        }
        assert_true(attn_now_ns() < since_ns + PATIENCE_NS);
        e2e_forget(c);
    }
    note_time(tenant, since_ns);
    e2e_forget(c);
}

static void be_worker(int tenant)
{
    static struct e2e_seq s[WORKER_SEQS];
    struct e2e_item items[WORKER_SEQS];
    struct e2e_client c;
    uint32_t len = 0;
    enter(&c, tenant);
    e2e_make_pool(&c, ATTN_BF16, POOL_BLOCKS);
    for (uint32_t i = 0; i < WORKER_SEQS; i++)
        assert_int_equal(e2e_open_seq(&c, &s[i], 1000 * ((uint64_t)tenant + 1) + i, i), ATTN_OK);
    shared->session[tenant] = c.session;
    shared->pool[tenant] = c.pool;
    while (!is_over()) {
        uint32_t n = below(8) == 0 ? 1 + below(20) : 1;
        for (uint32_t i = 0; i < WORKER_SEQS; i++)
            items[i] = (struct e2e_item){&s[i], len, n};
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            step(&c, tenant, layer, items, WORKER_SEQS);
        len += n;
        if (len <= MAX_TOKENS)
            continue;
        len = below(10);
        for (uint32_t i = 0; i < WORKER_SEQS; i++)
            assert_int_equal(e2e_truncate(&c, &s[i], len), ATTN_OK);
        e2e_forget(&c);
    }
    for (uint32_t i = 0; i < WORKER_SEQS; i++) /* all is there to the end */
        assert_int_equal(e2e_close_seq(&c, &s[i]), ATTN_OK);
    e2e_disconnect(&c);
}

/* ---- attacks ---- */

static void be_flooder(int tenant)
{
    enum { DEEP = 96 };
    static struct e2e_seq s[4];
    struct e2e_client c;
    enter(&c, tenant);
    e2e_make_pool(&c, ATTN_BF16, POOL_BLOCKS);
    uint64_t until_ns = attn_now_ns() + PATIENCE_NS;
    for (uint32_t i = 0; i < 4; i++) {
        while (e2e_open_seq(&c, &s[i], 9000 + i, i) != ATTN_OK) { /* the hoarder has them all */
            assert_true(attn_now_ns() < until_ns);
            e2e_forget(&c);
        }
    }
    while (!is_over()) {
        uint64_t ids[DEEP];
        for (uint32_t i = 0; i < DEEP; i++) {
            struct e2e_item it = {&s[i % 4], 0, 200};
            ids[i] = e2e_send_zeros(&c, i / 4 % E2E_LAYERS, &it, 0);
        }
        if (below(4) == 0)
            usleep(100000); /* a slow reader is what is tested: it reads nothing meanwhile */
        for (uint32_t i = 0; i < DEEP; i++) {
            attn_status st = (attn_status)e2e_await(&c, ids[i])->header->status;
            assert_true(st == ATTN_OK || is_busy(st));
        }
        e2e_forget(&c);
        shared->n_attacks[1] += DEEP;
    }
    e2e_disconnect(&c);
}

/* What the other has must be what nobody has. */
static void be_prober(int tenant)
{
    struct e2e_client c;
    int other = !tenant;
    enter(&c, tenant);
    e2e_make_pool(&c, ATTN_BF16, POOL_BLOCKS);
    uint64_t own = c.session;
    while (!is_over()) {
        struct e2e_seq theirs = {.name = 1000 * ((uint64_t)other + 1) + below(WORKER_SEQS),
                                 .epoch = 1 + below(3)};
        struct e2e_item it = {&theirs, 0, 1};
        uint32_t len[E2E_LAYERS];
        c.pool = shared->pool[other];
        assert_int_equal(e2e_adopt(&c, &theirs, len), ATTN_ENOTFOUND);
        assert_int_equal(e2e_close_seq(&c, &theirs), ATTN_ENOTFOUND);
        assert_int_equal(e2e_truncate(&c, &theirs, 0), ATTN_ENOTFOUND);
        attn_status st = (attn_status)e2e_await(&c, e2e_send_zeros(&c, 0, &it, 0))->header->status;
        assert_true(st == ATTN_ENOTFOUND || is_busy(st));
        c.session = shared->session[other];
        assert_int_equal(e2e_close_seq(&c, &theirs), ATTN_ENOTFOUND);
        assert_int_equal(e2e_await(&c, send_hello(&c, shared->session[other]))->header->status,
                         ATTN_ENOTFOUND);
        c.session = own;
        e2e_forget(&c);
        shared->n_attacks[2] += 6;
    }
    e2e_disconnect(&c);
}

static uint64_t send_pool(struct e2e_client *c, uint32_t number)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate body = ATTND__POOL_CREATE__INIT;
    char name[32];
    snprintf(name, sizeof name, "hoard %u", number);
    spec.name = name;
    spec.num_layers = spec.num_q_heads = spec.num_kv_heads = 1;
    spec.head_dim_k = 8;
    spec.q_dtype = ATTND__DTYPE__F32;
    spec.n_blocks = 1 + below(60);
    body.spec = &spec;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &body;
    return e2e_send(c, &h, NULL, 0);
}

static void be_hoarder(int tenant)
{
    struct e2e_client c;
    enter(&c, tenant);
    e2e_make_pool(&c, ATTN_BF16, POOL_BLOCKS);
    while (!is_over()) {
        static struct e2e_seq s;
        for (uint32_t i = 0; i < 12; i++)
            e2e_await(&c, send_pool(&c, below(20)));
        for (uint64_t i = 0; i < 70; i++)
            if (e2e_open_seq(&c, &s, 100 + i, 0) != ATTN_OK)
                break;
        for (uint32_t i = 0; i < 30; i++)
            e2e_await(&c, send_hello(&c, 0));
        for (uint64_t i = 0; i < 70; i++) {
            s = (struct e2e_seq){.name = 100 + i};
            uint32_t len[E2E_LAYERS];
            if (e2e_adopt(&c, &s, len) == ATTN_OK)
                e2e_close_seq(&c, &s);
        }
        e2e_forget(&c);
        shared->n_attacks[3] += 180;
    }
    e2e_disconnect(&c);
}

static void be_stranger(int tenant)
{
    struct sockaddr_in sa = {.sin_family = AF_INET};
    sa.sin_port = htons((uint16_t)atoi(strrchr(d.tls_url, ':') + 1));
    sa.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fds[16], n = 0;
    while (!is_over()) {
        uint8_t junk[4096];
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0 || connect(fd, (struct sockaddr *)&sa, sizeof sa) != 0) {
            close(fd);
            continue;
        }
        for (size_t i = 0; i < sizeof junk; i++)
            junk[i] = (uint8_t)below(256);
        if (below(2) == 0)
            memcpy(junk, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11); /* a client's hello */
        (void)!send(fd, junk, 1 + below(sizeof junk), MSG_NOSIGNAL | MSG_DONTWAIT);
        fds[n++] = fd;
        for (; n == 16; n = 0) /* some stay for a while */
            for (int i = 0; i < 16; i++)
                close(fds[i]);
        if (below(8) == 0) { /* inside of TLS */
            struct e2e_client c;
            connect_as(&c, tenant);
            e2e_send_bytes(&c, junk, 1 + below(sizeof junk));
            e2e_await_ms(&c, 1, 50);
            e2e_disconnect(&c);
        }
        usleep(2000); /* the rate of the attack: some hundred connections per second */
        shared->n_attacks[4]++;
    }
}

/* ---- the whole ---- */

static void (*const roles[N_ROLES])(int) = {be_worker, be_flooder, be_prober, be_hoarder,
                                            be_stranger};
static const char *const role_names[N_ROLES] = {"worker", "flooder", "prober", "hoarder",
                                                "stranger"};

static pid_t begin(int role, int tenant)
{
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    seed = (uint64_t)(1 + role * 2 + tenant);
    roles[role](tenant);
    _exit(0);
}

/* What the daemon counts of a tenant is never over. */
static void check_quotas(struct e2e_client *c)
{
    static const struct {
        const char *name;
        uint64_t most;
    } quotas[] = {{"\"tenant_pool_blocks\":", BLOCKS},
                  {"\"tenant_sequences\":", SEQUENCES},
                  {"\"tenant_sessions\":", SESSIONS},
                  {"\"tenant_pools\":", POOLS},
                  {"\"tenant_bytes_in_flight\":", BYTES}};
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Stats stats = ATTND__STATS__INIT;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &stats;
    const Attnd__Reply *r = e2e_call(c, &h);
    if (r->status != ATTN_OK)
        fail_msg("stats: %s", r->message);
    for (size_t i = 0; i < sizeof quotas / sizeof quotas[0]; i++) {
        const char *at = strstr(r->stats->json, quotas[i].name);
        assert_non_null(at);
        uint64_t used = strtoull(at + strlen(quotas[i].name), NULL, 10);
        if (used > quotas[i].most)
            fail_msg("%s %llu is over its quota", quotas[i].name, (unsigned long long)used);
    }
    e2e_forget(c);
}

static void look(struct e2e_client c[2])
{
    if (waitpid(d.pid, NULL, WNOHANG) == d.pid) {
        char command[128];
        snprintf(command, sizeof command, "tail -n 60 %s >&2", d.log);
        (void)!system(command);
        fail_msg("attnd has ended");
    }
    siginfo_t ended = {0};
    if (waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid != 0)
        shared->has_ended = true; /* too early, or it is over */
    check_quotas(&c[0]);
    check_quotas(&c[1]);
}

static int by_time(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void print_times(void)
{
    printf("| worker | steps | p50, ms | p99, ms | longest, ms |\n|---|---|---|---|---|\n");
    for (int t = 0; t < 2; t++) {
        for (int phase = 0; phase < 2; phase++) {
            uint32_t n = shared->n_times[t][phase], *us = shared->times_us[t][phase];
            n = n < MAX_TIMES ? n : MAX_TIMES;
            if (n == 0)
                continue;
            qsort(us, n, sizeof *us, by_time);
            printf("| %s, %s | %u | %.1f | %.1f | %.1f |\n", tenants[t],
                   phase == 0 ? "calm" : "under attack", n, us[n / 2] / 1e3, us[n * 99 / 100] / 1e3,
                   us[n - 1] / 1e3);
        }
    }
    for (int i = 1; i < N_ROLES; i++)
        printf("%s: %llu attempts\n", role_names[i], (unsigned long long)shared->n_attacks[i]);
}

/* A lease longer than a busy machine keeps anybody from asking, and short enough for sessions that
 * are hoarded to end while the test lasts. */
static void start_daemon(char *tenants_file, uint64_t seconds)
{
    char *ca = certs_file(CERTS_GOOD, "ca.crt");
    snprintf(tenants_file, 64, "/tmp/attnd_attack_%ld", (long)getpid());
    FILE *f = fopen(tenants_file, "w");
    assert_non_null(f);
    fchmod(fileno(f), 0600);
    for (int i = 0; i < 2; i++)
        fprintf(f,
                "[%s]\nblocks = %d\nsequences = %d\nsessions = %d\npools = %d\n"
                "bytes_in_flight = %d\n",
                tenants[i], BLOCKS, SEQUENCES, SESSIONS, POOLS, BYTES);
    fclose(f);
    const char *const flags[] = {"--listen.tenants",
                                 tenants_file,
                                 "--listen.tls_ca",
                                 ca,
                                 "--listen.tls_client_cert",
                                 "optional",
                                 "--engine.lease",
                                 seconds >= 300  ? "60s"
                                 : seconds >= 60 ? "15s"
                                                 : "3s",
                                 "--listen.handshake_timeout",
                                 "5m", /* who is late with hello on a busy machine */
                                 NULL};
    setenv("E2E_TRANSPORT", "tls", 1);
    e2e_start(&d, flags);
    free(ca);
}

int main(int argc, char **argv)
{
    uint64_t seconds = argc > 1 ? strtoull(argv[1], NULL, 10) : 3;
    char tenants_file[64];
    struct e2e_client c[2];
    pid_t pids[2 * N_ROLES];
    int n = 0, n_failed = 0, status;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    start_daemon(tenants_file, seconds);
    for (int t = 0; t < 2; t++)
        pids[n++] = begin(0, t);
    for (int t = 0; t < 2; t++) /* who looks has its session before the hoarders come */
        enter(&c[t], t);
    const double calm_s = seconds < 180 ? (double)seconds / 3 : 60;
    while (!shared->has_ended && (shared->pool[0] == 0 || shared->pool[1] == 0))
        look(c);
    uint64_t calm_until_ns = attn_now_ns() + (uint64_t)(calm_s * 1e9);
    while (attn_now_ns() < calm_until_ns || !has_done(0))
        look(c);
    shared->until_ns = UINT64_MAX;
    shared->is_attacked = true;
    for (int role = 1; role < N_ROLES; role++) { /* flooders before hoarders have all */
        for (int t = 0; t < 2; t++)
            pids[n++] = begin(role, t);
        while (!shared->has_ended && shared->n_attacks[role] == 0)
            look(c);
    }
    shared->until_ns = attn_now_ns() + seconds * 1000000000;
    while (!is_over())
        look(c);
    for (int i = 0; i < n; i++) {
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "the %s of %s failed\n", role_names[i / 2], tenants[i % 2]);
            n_failed++;
        }
    }
    e2e_disconnect(&c[0]);
    e2e_disconnect(&c[1]);
    e2e_stop(&d);
    unlink(tenants_file);
    print_times();
    return n_failed != 0;
}
