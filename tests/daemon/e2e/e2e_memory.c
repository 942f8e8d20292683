/* e2e_memory.c: a daemon with tiny limits is flooded with every kind of request, over every
 * transport, by clients that ask for all they can and read nothing. After each flood it lives, a
 * good client's step is answered right, and its memory is below what it said at the start, with
 * listen.shm_memory where clients share it. Where a control group for memory can be made, the
 * kernel holds it to that, too. E2E_SAY=1 in the environment prints the figures.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/lane_link.h"
#include "tests/daemon/transport/lane_steps.h"
#include "tests/daemon/transport/shm_link.h"

enum {
    MIB = 1 << 20,
    SHARED = 24 * MIB, /* listen.shm_memory */
    IDS = 131072, /* cache.max_seq_tokens, and the ids of a message */
    FLOODERS = 12, /* connections of a flood */
    A_FLOOD = 3000, /* messages of one of them, at most */
    SLACK = 16 * MIB, /* of the kernel, in the group */
};

static struct e2e d;
static struct e2e_client good;
static struct e2e_seq seq;
static uint32_t n_good; /* tokens of seq */
static uint64_t said; /* bytes at most, by the daemon's log */
static char group[96]; /* "": none can be made */
static uint32_t ids[IDS];
static char http_port[16], config[96];

/* --- a control group -------------------------------------------------------------------------- */

static bool write_to(const char *file, const char *text)
{
    char path[160];
    snprintf(path, sizeof path, "%s/%s", group, file);
    FILE *f = fopen(path, "w");
    bool is_written = f != NULL && fputs(text, f) >= 0;
    return f != NULL && fclose(f) == 0 && is_written;
}

static void enter_group(void)
{
    char pid[16];
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    if (group[0] != '\0' && !write_to("cgroup.procs", pid))
        _exit(111);
}

/* Makes a group whose memory can be limited. */
static void make_group(void)
{
    static const struct {
        const char *root, *limit;
    } versions[] = {{"/sys/fs/cgroup/memory", "memory.limit_in_bytes"},
                    {"/sys/fs/cgroup", "memory.max"}};
    for (int i = 0; i < 2; i++) {
        char path[160];
        snprintf(group, sizeof group, "%s/attnd_memory_%d", versions[i].root, (int)getpid());
        if (mkdir(group, 0700) != 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", group, versions[i].limit);
        if (access(path, W_OK) == 0)
            return;
        rmdir(group);
    }
    group[0] = '\0';
}

static void limit_group(uint64_t bytes)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)bytes);
    if (group[0] != '\0')
        assert_true(write_to("memory.limit_in_bytes", text) || write_to("memory.max", text));
}

/* --- the daemon's memory ---------------------------------------------------------------------- */

static uint64_t file_number(const char *path, const char *word)
{
    char line[512];
    uint64_t n = UINT64_MAX;
    FILE *f = fopen(path, "r");
    while (f != NULL && n == UINT64_MAX && fgets(line, sizeof line, f) != NULL) {
        const char *at = strstr(line, word);
        if (at != NULL)
            n = strtoull(at + strlen(word), NULL, 10);
    }
    if (f != NULL)
        fclose(f);
    return n;
}

static pid_t serving_pid(void)
{
    pid_t child = e2e_child(&d);
    return child != 0 ? child : d.pid;
}

static uint64_t memory_now(void)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/status", (int)serving_pid());
    return 1024 * (file_number(path, "RssAnon:") + file_number(path, "RssShmem:"));
}

static Attnd__Request request_of(Attnd__Request__BodyCase body)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = good.session;
    h.body_case = body;
    return h;
}

/* The next token's step of a layer; beside a flood it may be refused for a while. */
static void step_well(uint32_t layer)
{
    struct e2e_item it = {&seq, n_good, 1};
    struct e2e_step s;
    const struct wire_reply *r;
    e2e_build_step(&s, &good, layer, E2E_BOTH, &it, 1);
    uint8_t *payload = malloc(s.layout.request_bytes);
    e2e_fill_step(&s, layer, &it, payload);
    Attnd__Request h = request_of(ATTND__REQUEST__BODY_STEP);
    h.step = &s.wire;
    do
        r = e2e_await(&good, e2e_send(&good, &h, payload, s.layout.request_bytes));
    while (r->header->status == ATTN_EOVERLOAD);
    free(payload);
    e2e_check_step(r, layer, E2E_BOTH, &it, 1);
}

/* The daemon is well: alive, right, and no larger than it said, with what clients share. */
static void look_with(const char *flood, uint64_t shared)
{
    uint64_t bytes = memory_now();
    if (getenv("E2E_SAY") != NULL)
        printf("%-12s %6.1f of %.1f MiB\n", flood, (double)bytes / MIB,
               (double)(said + shared) / MIB);
    if (bytes > said + shared)
        fail_msg("%s: the daemon has %llu bytes, it said %llu, and %llu are shared", flood,
                 (unsigned long long)bytes, (unsigned long long)said, (unsigned long long)shared);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        step_well(layer);
    n_good++;
    e2e_forget(&good);
}

static void look(const char *flood)
{
    look_with(flood, 0);
}

/* --- clients that do not read ----------------------------------------------------------------- */

static int connect_ipc(void)
{
    static const uint8_t hello[8] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    uint8_t theirs[8];
    snprintf(at.sun_path, sizeof at.sun_path, "%.90s", d.url + strlen("ipc://"));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (const struct sockaddr *)&at, sizeof at) != 0 ||
        send(fd, hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello ||
        recv(fd, theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs) {
        close(fd);
        return -1;
    }
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* Sends all of it, unless the daemon hangs up. */
static bool send_all(int fd, const uint8_t *bytes, size_t n)
{
    while (n > 0) {
        ssize_t k = send(fd, bytes, n, MSG_NOSIGNAL);
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        if (k < 0 && errno == EAGAIN && poll(&p, 1, 60000) == 1)
            continue;
        if (k <= 0)
            return false;
        bytes += k;
        n -= (size_t)k;
    }
    return true;
}

/* One message with its frame; freed by the caller. */
static uint8_t *frame(Attnd__Request *h, const void *payload, size_t payload_bytes, size_t *out_n)
{
    size_t head = wire_request_head_bytes(h), body = head + payload_bytes;
    uint8_t *b = calloc(1, 13 + body);
    uint64_t length = body + 4;
    b[0] = 1;
    for (int i = 0; i < 8; i++)
        b[1 + i] = (uint8_t)(length >> (56 - 8 * i));
    b[9] = 0x80;
    wire_request_head_encode(h, 7, payload_bytes, b + 13);
    if (payload_bytes > 0)
        memcpy(b + 13 + head, payload, payload_bytes);
    *out_n = 13 + body;
    return b;
}

/* Several connections send a message over and over, and read nothing until they are cut. */
static void flood_ipc(Attnd__Request *h, const void *payload, size_t payload_bytes)
{
    int fds[FLOODERS];
    size_t n;
    uint8_t *b = frame(h, payload, payload_bytes, &n);
    uint32_t most = n > 65536 ? 200 : A_FLOOD;
    for (int i = 0; i < FLOODERS; i++) {
        fds[i] = connect_ipc();
        for (uint32_t k = 0; fds[i] >= 0 && k < most && send_all(fds[i], b, n); k++)
            ;
    }
    look("ipc");
    for (int i = 0; i < FLOODERS; i++)
        close(fds[i]);
    free(b);
}

/* --- floods ----------------------------------------------------------------------------------- */

static const Attnd__Reply *open_with(uint64_t name, uint32_t n_ids)
{
    Attnd__Open body = ATTND__OPEN__INIT;
    Attnd__Request h = request_of(ATTND__REQUEST__BODY_OPEN);
    body.seq = name;
    body.pool = good.pool;
    body.tokens = ids;
    body.n_tokens = n_ids;
    h.open = &body;
    return e2e_call(&good, &h);
}

static void kill_seqs(uint64_t first, uint64_t past)
{
    for (uint64_t name = first; name < past; name++) {
        Attnd__Kill body = ATTND__KILL__INIT;
        Attnd__Request h = request_of(ATTND__REQUEST__BODY_KILL);
        body.seq = name;
        h.kill = &body;
        e2e_call(&good, &h);
        e2e_forget(&good);
    }
}

/* Ids of sequences that have no K and V, by open, tokens and fork. */
static void ids_without_kv(void **state)
{
    (void)state;
    const Attnd__Reply *r;
    uint64_t name = 1000;
    while ((r = open_with(name, IDS))->status == ATTN_OK)
        name++;
    assert_int_equal(r->status, ATTN_EQUOTA);
    assert_non_null(strstr(r->message, "cache.table_memory"));
    assert_in_range(name, 1001, 1008); /* 4 MiB */
    look("open");
    Attnd__Tokens t = ATTND__TOKENS__INIT;
    Attnd__Request h = request_of(ATTND__REQUEST__BODY_TOKENS);
    h.tokens = &t;
    t.epoch = 1;
    t.tokens = ids;
    t.n_tokens = 4096;
    for (uint64_t more = 2000; more < 2050; more++) {
        if (open_with(more, 0)->status != ATTN_OK)
            break;
        t.seq = more;
        for (t.pos = 0; (r = e2e_call(&good, &h))->status == ATTN_OK && t.pos + 8192 < IDS;)
            t.pos += 4096;
        e2e_forget(&good);
    }
    look("tokens");
    kill_seqs(1000, name);
    kill_seqs(2000, 2050);
    assert_int_equal(open_with(1000, IDS)->status, ATTN_OK); /* it is given back */
    kill_seqs(1000, 1001);
    look("closed");
}

static void sequences_and_forks(void **state)
{
    (void)state;
    static struct e2e_seq s[4];
    uint32_t n = 0;
    assert_int_equal(e2e_open_seq(&good, &s[0], 3000, 1), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        assert_int_equal(e2e_item(&good, &s[0], layer, 0, 512), ATTN_OK);
    while (n < 400 && e2e_fork(&good, &s[0], &s[1], 3001 + n, 512, 2) == ATTN_OK) {
        for (uint32_t layer = 0; layer < E2E_LAYERS && n < 100; layer++)
            e2e_item(&good, &s[1], layer, 512,
                     1); /* its own table, and a block while there is one */
        n++;
        e2e_forget(&good);
    }
    assert_in_range(n, 100, 399); /* all sequences are open */
    look("forks");
    kill_seqs(3000, 3001 + n);
}

static void replies_that_nobody_reads(void **state)
{
    (void)state;
    Attnd__Stats stats = ATTND__STATS__INIT;
    Attnd__Request h = request_of(ATTND__REQUEST__BODY_STATS);
    h.stats = &stats;
    flood_ipc(&h, NULL, 0);
    Attnd__Export export = ATTND__EXPORT__INIT;
    h = request_of(ATTND__REQUEST__BODY_EXPORT);
    h.export = &export;
    export.seq = seq.name;
    export.n_blocks = 1;
    flood_ipc(&h, NULL, 0);
    struct e2e_item it = {&seq, n_good, 4};
    struct e2e_step step;
    e2e_build_step(&step, &good, 0, WIRE_STEP_ATTEND, &it, 1);
    uint8_t *payload = calloc(1, step.layout.request_bytes);
    h = request_of(ATTND__REQUEST__BODY_STEP);
    h.step = &step.wire;
    flood_ipc(&h, payload, step.layout.request_bytes);
    free(payload);
    Attnd__Hello hello = ATTND__HELLO__INIT;
    h = request_of(ATTND__REQUEST__BODY_HELLO);
    h.hello = &hello;
    h.session = 0;
    flood_ipc(&h, NULL, 0);
}

/* Refused at once: requests of no session, payloads that are too large, headers that unpack to
 * much. */
static void requests_that_are_refused(void **state)
{
    (void)state;
    Attnd__Open open = ATTND__OPEN__INIT;
    Attnd__Request h = request_of(ATTND__REQUEST__BODY_OPEN);
    h.open = &open;
    h.session = 1;
    open.pool = 99;
    flood_ipc(&h, NULL, 0);
    open.tokens = ids;
    open.n_tokens = IDS;
    flood_ipc(&h, NULL, 0);
    h.session = good.session;
    flood_ipc(&h, NULL, 0);
    Attnd__Step step = ATTND__STEP__INIT;
    uint8_t *payload = calloc(1, MIB / 2);
    h = request_of(ATTND__REQUEST__BODY_STEP);
    h.step = &step;
    flood_ipc(&h, payload, MIB / 2);
    Attnd__Import import = ATTND__IMPORT__INIT;
    h = request_of(ATTND__REQUEST__BODY_IMPORT);
    h.import = &import;
    flood_ipc(&h, payload, MIB / 2);
    free(payload);
}

static void pools_that_come_and_go(void **state)
{
    (void)state;
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate body = ATTND__POOL_CREATE__INIT;
    Attnd__PoolDrop drop = ATTND__POOL_DROP__INIT;
    Attnd__Request h = request_of(ATTND__REQUEST__BODY_POOL_CREATE);
    Attnd__Request bye = request_of(ATTND__REQUEST__BODY_POOL_DROP);
    char name[16];
    h.pool_create = &body;
    bye.pool_drop = &drop;
    body.spec = &spec;
    spec.name = drop.name = name;
    spec.num_layers = spec.num_q_heads = spec.num_kv_heads = 1;
    spec.head_dim_k = 16;
    spec.q_dtype = ATTND__DTYPE__BF16;
    spec.block_tokens = 256;
    uint32_t n_refused = 0;
    for (uint32_t i = 0; i < 40; i++) {
        snprintf(name, sizeof name, "p%u", i);
        spec.n_blocks = 40 + i * 8;
        n_refused += e2e_call(&good, &h)->status != ATTN_OK;
        if (i % 2 == 1)
            e2e_call(&good, &bye);
        e2e_forget(&good);
    }
    assert_true(n_refused > 0);
    look("pools");
    for (uint32_t i = 0; i < 40; i++) {
        snprintf(name, sizeof name, "p%u", i);
        e2e_call(&good, &bye);
        e2e_forget(&good);
    }
}

static void clients_that_share_memory(void **state)
{
    (void)state;
    static struct shm_link l[64];
    uint32_t n = 0;
    while (n < 64 && shm_link_open(&l[n], d.shm_path, 0, 0)) {
        memset(l[n].base + l[n].welcome.data_offset, 1,
               l[n].welcome.region_bytes - l[n].welcome.data_offset);
        n++;
    }
    assert_in_range(n, 2, 24);
    assert_non_null(strstr(l[n].welcome.message, "listen.shm_memory"));
    /* each has all of its slots in flight, with headers that unpack to much */
    Attnd__Open open = ATTND__OPEN__INIT;
    Attnd__Request h = request_of(ATTND__REQUEST__BODY_OPEN);
    h.open = &open;
    open.seq = 1;
    open.pool = 99;
    open.tokens = ids;
    open.n_tokens = 30000;
    size_t bytes = wire_request_head_bytes(&h);
    uint8_t *msg = malloc(bytes);
    wire_request_head_encode(&h, 9, 0, msg);
    for (uint32_t i = 0; i < n; i++)
        while (shm_link_send(&l[i], msg, bytes))
            ;
    free(msg);
    look_with("shm", SHARED);
    while (n > 0)
        shm_link_close(&l[--n]);
}

static void lanes(void **state)
{
    (void)state;
    static struct lane_link l[40];
    uint32_t n = 0;
    struct e2e_client c;
    while (!lane_link_open(&l[0], d.gpu_path, 2 * MIB, 2 * MIB)) /* once others are gone */
        assert_non_null(strstr(l[0].welcome.message, "listen.shm_memory"));
    n++;
    while (n < 40 && lane_link_open(&l[n], d.gpu_path, 2 * MIB, 2 * MIB)) {
        memset(l[n].in, 1, 2 * MIB);
        n++;
    }
    assert_in_range(n, 2, 12);
    assert_non_null(strstr(l[n].welcome.message, "listen.shm_memory"));
    look_with("lanes", SHARED);
    e2e_connect(&c, &d);
    c.pool = good.pool;
    c.session = good.session;
    static const uint32_t all[] = {0, 1, 2};
    struct e2e_item it = {&seq, n_good, 1};
    struct e2e_step s;
    e2e_build_step(&s, &c, 0, WIRE_STEP_ATTEND, &it, 1);
    for (uint32_t i = 0; i < n; i++)
        lane_plan(&c, &l[i], all, 3, &s, (struct lane_places){0, LANE_OUT_OFFSET});
    look_with("plans", SHARED);
    e2e_disconnect(&c);
    while (n > 0)
        lane_link_close(&l[--n]);
}

static void tls_clients_that_do_not_read(void **state)
{
    (void)state;
    struct e2e_client c[8];
    Attnd__Stats stats = ATTND__STATS__INIT;
    Attnd__Request h = request_of(ATTND__REQUEST__BODY_STATS);
    h.stats = &stats;
    for (int i = 0; i < 8; i++) {
        e2e_connect_tls(&c[i], &d);
        for (int k = 0; k < 100; k++)
            e2e_send(&c[i], &h, NULL, 0);
    }
    look("tls");
    for (int i = 0; i < 8; i++)
        e2e_disconnect(&c[i]);
}

static void scrapes_that_nobody_reads(void **state)
{
    (void)state;
    static const char ask[] = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
    int fds[FLOODERS];
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)atoi(http_port)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    for (int i = 0; i < FLOODERS; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(fds[i], (const struct sockaddr *)&at, sizeof at) != 0)
            continue;
        fcntl(fds[i], F_SETFL, O_NONBLOCK);
        for (int k = 0; k < 200; k++)
            (void)!send(fds[i], ask, sizeof ask - 1, MSG_NOSIGNAL);
    }
    look("http");
    for (int i = 0; i < FLOODERS; i++)
        close(fds[i]);
}

static void kill_and_connect(void)
{
    uint32_t len[E2E_LAYERS];
    e2e_disconnect(&good);
    e2e_kill_child(&d);
    e2e_connect(&good, &d);
    e2e_make_pool(&good, ATTN_BF16, 100);
    assert_int_equal(e2e_adopt(&good, &seq, len), ATTN_OK); /* with what it had */
    assert_int_equal(len[0], n_good);
}

static void a_successor_counts_what_is_there(void **state)
{
    (void)state;
    uint64_t name = 5000;
    while (open_with(name, IDS)->status == ATTN_OK)
        name++;
    look("before");
    kill_and_connect();
    look("after");
    assert_int_equal(open_with(name, IDS)->status, ATTN_EQUOTA);
    assert_int_equal(open_with(6000, 1024)->status, ATTN_OK);
}

/* What a predecessor has left never keeps a successor from coming up. */
static void a_successor_comes_up_where_memory_is_short(void **state)
{
    (void)state;
    char path[160];
    if (group[0] == '\0')
        skip();
    snprintf(path, sizeof path, "%s/memory.usage_in_bytes", group);
    if (access(path, R_OK) != 0)
        snprintf(path, sizeof path, "%s/memory.current", group);
    kill_seqs(5000, 5008);
    assert_int_equal(open_with(5000, IDS / 2)->status, ATTN_OK);
    limit_group(file_number(path, "") + 4 * MIB);
    kill_and_connect();
    e2e_await_log(&d, "memory is short, so tables grow no more");
    look("short");
    const Attnd__Reply *r = open_with(5001, IDS / 8);
    assert_int_equal(r->status, ATTN_EQUOTA);
    assert_non_null(strstr(r->message, "cache.table_memory"));
    assert_int_equal(open_with(5002, 1024)->status, ATTN_OK);
    limit_group(said + SHARED + SLACK);
    kill_and_connect();
    assert_int_equal(open_with(5001, IDS / 8)->status, ATTN_OK);
    look("room again");
}

/* --- start and stop --------------------------------------------------------------------------- */

static int start(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < IDS; i++)
        ids[i] = i % 128; /* a byte in the message, four when unpacked */
    snprintf(config, sizeof config, "/tmp/attnd-e2e-memory-%d", (int)getpid());
    FILE *f = fopen(config, "w");
    assert_non_null(f);
    fputs("[listen]\nmax_message = 1M\nmax_peers = 64\nprincipal_share = 100\n"
          "[cache]\nmax_sequences = 256\ntable_memory = 4M\nmax_pools = 4\nmax_layers = 8\n"
          "[engine]\nmax_queue = 4M\nmax_queue_requests = 64\nmax_sessions = 64\nlease = 2m\n"
          "max_batch_items = 256\nmax_batch_tokens = 2048\nmax_step_items = 64\n"
          "max_step_tokens = 1024\n",
          f);
    fclose(f);
    const char *const flags[] = {"--config",
                                 config,
                                 "--supervise",
                                 "--device.kv_memory",
                                 "16M",
                                 "--cache.io_memory",
                                 "8M",
                                 "--cache.max_seq_tokens",
                                 "131072",
                                 "--listen.shm_client",
                                 "2M",
                                 "--listen.shm_memory",
                                 "24M",
                                 "--listen",
                                 "tls+tcp://127.0.0.1:0",
                                 "--listen.http",
                                 "127.0.0.1:0",
                                 NULL};
    make_group();
    e2e_before_exec = enter_group;
    e2e_start(&d, flags);
    e2e_before_exec = NULL;
    said = file_number(d.log, "host memory: ") * MIB;
    assert_in_range(said, 40 * MIB, 256 * MIB);
    uint64_t port = file_number(d.log, "http://127.0.0.1:");
    snprintf(http_port, sizeof http_port, "%u", (unsigned)port);
    limit_group(said + SHARED + SLACK);
    e2e_connect(&good, &d);
    e2e_make_pool(&good, ATTN_BF16, 100);
    assert_int_equal(e2e_open_seq(&good, &seq, 1, 1), ATTN_OK);
    look("start");
    return 0;
}

static int stop(void **state)
{
    (void)state;
    e2e_disconnect(&good);
    e2e_stop(&d);
    unlink(config);
    if (group[0] != '\0')
        rmdir(group);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_without_kv),
        cmocka_unit_test(sequences_and_forks),
        cmocka_unit_test(replies_that_nobody_reads),
        cmocka_unit_test(requests_that_are_refused),
        cmocka_unit_test(pools_that_come_and_go),
        cmocka_unit_test(clients_that_share_memory),
        cmocka_unit_test(lanes),
        cmocka_unit_test(tls_clients_that_do_not_read),
        cmocka_unit_test(scrapes_that_nobody_reads),
        cmocka_unit_test(a_successor_counts_what_is_there),
        cmocka_unit_test(a_successor_comes_up_where_memory_is_short),
    };
    return cmocka_run_group_tests_name("e2e_memory", tests, start, stop);
}
