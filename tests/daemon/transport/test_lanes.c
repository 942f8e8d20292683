/* test_lanes.c: gpu:// of the real daemon on the cpu backend: layers that are rung for, workers
 * that come and go, die, or say what no worker should. Plans and checks go over the transport that
 * the environment names. */
#define _GNU_SOURCE /* memfd_create */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/lane_link.h"
#include "tests/daemon/transport/lane_steps.h"
#include "tests/random.h"

enum { MAX_SEQS = 8, LONG_MS = 20000, MIB = 1 << 20 };

static struct e2e d, one;
static uint64_t random_state = 1;

static uint32_t random_to(uint32_t n)
{
    return random_below(&random_state, n);
}

static int start(void **state)
{
    (void)state;
    e2e_start(&d, NULL);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    e2e_stop(&d);
    return 0;
}

static void connect_all(struct e2e_client *c, struct lane_link *l)
{
    e2e_connect(c, &d);
    if (!lane_link_open(l, d.gpu_path, 4 * MIB, 2 * MIB))
        fail_msg("no lane: %s", l->welcome.message);
}

static void disconnect_all(struct e2e_client *c, struct lane_link *l)
{
    lane_link_close(l);
    e2e_disconnect(c);
}

static void shuffle(uint32_t layers[E2E_LAYERS])
{
    for (uint32_t i = 0; i < E2E_LAYERS; i++) {
        uint32_t k = random_to(i + 1);
        layers[i] = layers[k];
        layers[k] = i;
    }
}

static struct lane_places random_places(void)
{
    return (struct lane_places){64 * random_to(1000), LANE_OUT_OFFSET + 64 * random_to(1000)};
}

/* Sequences of random lengths, chunks of prompts and single tokens, layers in any order; what is
 * cached by bells is what steps find, and the other way round. */
static void layers_rung_for_are_what_steps_compute(void **state)
{
    (void)state;
    static struct e2e_seq seqs[MAX_SEQS];
    struct e2e_client c;
    struct lane_link l;
    uint32_t len[MAX_SEQS] = {0};
    connect_all(&c, &l);
    e2e_make_pool(&c, ATTN_BF16, 400);
    for (uint32_t i = 0; i < MAX_SEQS; i++)
        assert_int_equal(e2e_open_seq(&c, &seqs[i], 100 + i, 7 * i + 1), ATTN_OK);
    for (int round = 0; round < 60; round++) {
        struct e2e_item items[MAX_SEQS];
        uint32_t n = 0, layers[E2E_LAYERS] = {0};
        for (uint32_t i = 0; i < MAX_SEQS; i++) {
            uint32_t n_tokens = random_to(4) ? 1 : 1 + random_to(20);
            if (random_to(2) || (i == MAX_SEQS - 1 && n == 0))
                items[n++] = (struct e2e_item){&seqs[i], len[i], n_tokens};
        }
        shuffle(layers);
        struct e2e_step s;
        struct lane_places at = random_places();
        e2e_build_step(&s, &c, 0, E2E_BOTH | (random_to(2) ? WIRE_STEP_LSE : 0), items, n);
        bool is_by_bells = random_to(4) != 0;
        if (is_by_bells)
            lane_plan_well(&c, &l, layers, E2E_LAYERS, &s, at);
        for (uint32_t k = 0; k < E2E_LAYERS; k++)
            if (is_by_bells)
                lane_layer(&l, &s, items, layers[k], at);
            else
                e2e_step(&c, layers[k], items, n);
        for (uint32_t i = 0; i < n; i++)
            len[items[i].seq - seqs] += items[i].n_tokens;
    }
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        struct e2e_item it = {&seqs[i], len[i] - 1, 1};
        e2e_step(&c, 1, &it, 1);
        assert_int_equal(e2e_close_seq(&c, &seqs[i]), ATTN_OK);
    }
    disconnect_all(&c, &l);
}

static void a_plan_left_half_way_is_planned_again(void **state)
{
    (void)state;
    static struct e2e_seq seq;
    static const uint32_t all[] = {0, 1, 2};
    struct e2e_client c;
    struct lane_link l;
    connect_all(&c, &l);
    e2e_make_pool(&c, ATTN_BF16, 400);
    assert_int_equal(e2e_open_seq(&c, &seq, 1, 5), ATTN_OK);
    struct lane_places at = {0, LANE_OUT_OFFSET};
    for (uint32_t pos = 0; pos < 40; pos++) {
        struct e2e_item it = {&seq, pos, 1};
        struct e2e_step s;
        e2e_build_step(&s, &c, 0, E2E_BOTH, &it, 1);
        lane_plan_well(&c, &l, all, 3, &s, at);
        uint32_t n = random_to(3); /* layers until the worker begins anew */
        for (uint32_t k = 0; k < n; k++)
            lane_layer(&l, &s, &it, k, at);
        lane_plan_well(&c, &l, all, 3, &s, at);
        lane_plan_well(&c, &l, all, 3, &s, at); /* a copy that arrives late */
        for (uint32_t k = 0; k < 3; k++)
            lane_layer(&l, &s, &it, k, at);
    }
    disconnect_all(&c, &l);
}

/* A lane's region may be anybody's to write: words that make no sense cost the liar its plan. */
static void bells_that_lie_are_refused_and_counted(void **state)
{
    (void)state;
    static struct e2e_seq seq;
    static const uint32_t all[] = {0, 1, 2};
    struct e2e_client c;
    struct lane_link l;
    size_t n_before, n_after;
    connect_all(&c, &l);
    e2e_make_pool(&c, ATTN_BF16, 400);
    assert_int_equal(e2e_open_seq(&c, &seq, 2, 9), ATTN_OK);
    struct lane_places at = {0, LANE_OUT_OFFSET};
    struct e2e_item it = {&seq, 0, 30};
    e2e_step(&c, 0, &it, 1);
    void *before = e2e_read_back(&c, &seq, 0, 30, &n_before);
    it = (struct e2e_item){&seq, 30, 1};
    struct e2e_step s;
    e2e_build_step(&s, &c, 0, E2E_BOTH, &it, 1);
    for (uint32_t k = 0; k < 40; k++) {
        assert_int_equal(lane_plan(&c, &l, all, 1, &s, at)->status, ATTN_OK);
        memset(l.in, 0xff, s.layout.request_bytes); /* NaN, if it is stored */
        uint32_t lie = l.count + (k % 2 ? 2 : 2 + random_to(1u << 24) * 256);
        atomic_store(&l.page->bell, lie);
        assert_int_equal(lane_link_await(&l, lie, LONG_MS), ATTN_EPROTO);
        l.count = lie;
    }
    assert_int_equal(lane_link_ring(&l, LONG_MS), ATTN_EPROTO); /* of no plan */
    void *after = e2e_read_back(&c, &seq, 0, 30, &n_after);
    assert_int_equal(n_before, n_after);
    assert_memory_equal(before, after, n_before);
    assert_int_equal(e2e_item(&c, &seq, 1, 1, 1), ATTN_EINVAL); /* layer 1 is empty as before */
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Stats b = ATTND__STATS__INIT;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &b;
    const char *refused = strstr(e2e_call(&c, &h)->stats->json, "\"bells_refused_total\"");
    assert_int_equal(strtol(strchr(refused, ':') + 1, NULL, 10), 41);
    free(before);
    free(after);
    disconnect_all(&c, &l);
}

static void a_hello_that_cannot_be_is_refused_by_name(void **state)
{
    (void)state;
    struct lane_link l;
    const struct lane_hello good = lane_link_hello(2 * MIB, 2 * MIB);
    struct {
        struct lane_hello h;
        int fd;
        size_t h_bytes;
        attn_status st; /* ATTN_OK: it is hung up on */
        const char *part;
    } cases[] = {
        {good, -1, sizeof good, ATTN_EPROTO, "without one descriptor"},
        {good, lane_link_memfd(2 * MIB, false), sizeof good, ATTN_EINVAL, "not sealed"},
        {good, lane_link_memfd(4 * MIB, true), sizeof good, ATTN_EINVAL, "has 4194304 bytes"},
        {good, lane_link_memfd(MIB, true), sizeof good, ATTN_EINVAL, "has 1048576 bytes"},
        {good, open("/dev/zero", O_RDWR | O_CLOEXEC), sizeof good, ATTN_EINVAL, "import_fd has 0"},
        {good, memfd_create("huge", MFD_CLOEXEC | MFD_HUGETLB | MFD_ALLOW_SEALING), sizeof good,
         ATTN_EINVAL, "of huge pages"},
        {good, lane_link_memfd(2 * MIB, true), sizeof good, ATTN_ENOTSUP, "version is 9"},
        {good, lane_link_memfd(2 * MIB, true), sizeof good, ATTN_ENOTSUP,
         "the worker's region is on GPU 07070707070707070707070707070707, the daemon's on host"},
        {good, lane_link_memfd(2 * MIB, true), sizeof good, ATTN_EINVAL, "out_bytes is 4096"},
        {good, lane_link_memfd(2 * MIB, true), sizeof good, ATTN_EINVAL, "listen.shm_client"},
        {good, lane_link_memfd(2 * MIB, true), sizeof good, ATTN_EPROTO, "no hello"},
        {good, lane_link_memfd(2 * MIB, true), 20, ATTN_EPROTO, "no hello"},
    };
    cases[6].h.version = 9;
    memset(cases[7].h.device.uuid, 7, 16);
    cases[8].h.out_bytes = 4096;
    cases[9].h.out_bytes = (uint64_t)1 << 40;
    cases[10].h.magic = 0x4d485341;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_false(lane_link_say(&l, d.gpu_path, &cases[i].h, cases[i].h_bytes, cases[i].fd));
        if (l.welcome.status != (int32_t)cases[i].st ||
            strstr(l.welcome.message, cases[i].part) == NULL)
            fail_msg("case %zu: status %d: %s", i, l.welcome.status, l.welcome.message);
    }
    assert_true(lane_link_open(&l, d.gpu_path, 2 * MIB, 2 * MIB)); /* others are served */
    lane_link_close(&l);
}

static void set(struct e2e_client *c, const char *name, const char *value)
{
    Attnd__Configure set = ATTND__CONFIGURE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    set.name = (char *)(uintptr_t)name;
    set.value = (char *)(uintptr_t)value;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_CONFIGURE;
    h.configure = &set;
    const Attnd__Reply *r = e2e_call(c, &h);
    if (r->status != ATTN_OK)
        fail_msg("%s = %s: %s", name, value, r->message);
}

/* Opens lanes of 6 MiB until one is refused, which must name this; how many are open. */
static uint32_t open_most(struct lane_link *l, uint32_t n, uint32_t most, const char *name)
{
    for (; n < most; n++)
        if (!lane_link_open(&l[n], one.gpu_path, 2 * MIB, 4 * MIB))
            break;
    if (n == most)
        fail_msg("%u lanes are open", n);
    assert_int_equal(l[n].welcome.status, ATTN_EQUOTA);
    if (strstr(l[n].welcome.message, name) == NULL)
        fail_msg("%s", l[n].welcome.message);
    return n;
}

static void what_both_sides_share_is_bounded(void **state)
{
    (void)state;
    enum { MOST = 20 };
    static const char *const flags[] = {"--listen.shm_client",
                                        "4M",
                                        "--listen.shm_memory",
                                        "64M",
                                        "--listen.principal_share",
                                        "50",
                                        NULL};
    struct lane_link l[MOST];
    struct e2e_client c;
    e2e_start(&one, flags);
    e2e_connect_shm(&c, &one); /* as an operator; its memory counts, too */
    uint32_t n = open_most(l, 0, MOST, "listen.principal_share");
    assert_in_range(n, 1, 4); /* half of what is left: a third of all */
    set(&c, "listen.principal_share", "100");
    set(&c, "listen.peer_share", "100");
    n = open_most(l, n, MOST, "listen.shm_memory");
    assert_in_range(n, 5, 9);
    set(&c, "listen.shm_memory", "8M"); /* less than what is in use */
    assert_int_equal(open_most(l, n, MOST, "listen.shm_memory"), n);
    while (n > 1)
        lane_link_close(&l[--n]);
    set(&c, "listen.shm_memory", "24M"); /* the client's and two lanes */
    while (!lane_link_open(&l[1], one.gpu_path, 2 * MIB, 4 * MIB)) /* once it has noticed */
        assert_non_null(strstr(l[1].welcome.message, "listen.shm_memory"));
    assert_int_equal(open_most(l, 2, MOST, "listen.shm_memory"), 2);
    lane_link_close(&l[0]);
    lane_link_close(&l[1]);
    e2e_disconnect(&c);
    e2e_stop(&one);
}

/* A worker in a process of its own, which is killed at some moment of its work. */
static pid_t start_worker(uint64_t name)
{
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    static struct e2e_seq seq;
    static const uint32_t all[] = {0, 1, 2};
    struct e2e_client c;
    struct lane_link l;
    e2e_connect_shm(&c, &d);
    if (!lane_link_open(&l, d.gpu_path, 2 * MIB, 2 * MIB))
        _exit(3);
    e2e_make_pool(&c, ATTN_BF16, 400);
    if (e2e_open_seq(&c, &seq, name, 3) != ATTN_OK)
        _exit(4);
    struct lane_places at = {0, LANE_OUT_OFFSET};
    for (uint32_t pos = 0;; pos = pos < 1000 ? pos + 1 : pos) {
        struct e2e_item it = {&seq, pos, 1};
        struct e2e_step s;
        e2e_build_step(&s, &c, 0, E2E_BOTH, &it, 1);
        if (lane_plan(&c, &l, all, 3, &s, at)->status != ATTN_OK)
            _exit(5);
        for (uint32_t k = 0; k < 3; k++) {
            e2e_fill_step(&s, k, &it, l.in);
            if (lane_link_ring(&l, LONG_MS) != 0)
                _exit(6);
        }
    }
}

static void workers_that_are_killed_harm_nobody(void **state)
{
    (void)state;
    static struct e2e_seq seq;
    static const uint32_t all[] = {0, 1, 2};
    struct e2e_client c;
    struct lane_link l;
    uint32_t pos = 0;
    connect_all(&c, &l);
    e2e_make_pool(&c, ATTN_BF16, 400);
    assert_int_equal(e2e_open_seq(&c, &seq, 3, 11), ATTN_OK);
    struct lane_places at = {0, LANE_OUT_OFFSET};
    for (uint32_t i = 0; i < 6; i++) {
        int status;
        pid_t pid = start_worker(1000 + i);
        assert_true(pid > 0);
        uint32_t n = 5 + random_to(20);
        for (uint32_t k = 0; k < n; k++, pos++) { /* beside it */
            struct e2e_item it = {&seq, pos, 1};
            struct e2e_step s;
            e2e_build_step(&s, &c, 0, E2E_BOTH, &it, 1);
            lane_plan_well(&c, &l, all, 3, &s, at);
            for (uint32_t j = 0; j < 3; j++)
                lane_layer(&l, &s, &it, j, at);
        }
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status)); /* it was at work until then */
    }
    disconnect_all(&c, &l);
}

static void a_daemon_that_is_killed_hangs_up(void **state)
{
    (void)state;
    struct e2e_client c;
    struct lane_link l;
    connect_all(&c, &l);
    assert_false(lane_link_is_gone(&l, 0));
    e2e_signal(&d, SIGKILL);
    assert_true(lane_link_is_gone(&l, LONG_MS));
    assert_int_equal(e2e_wait(&d), -SIGKILL);
    memset(l.in, 1, l.welcome.in_bytes); /* regions are there as long as somebody has them */
    disconnect_all(&c, &l);
    e2e_restart(&d, NULL);
    connect_all(&c, &l);
    disconnect_all(&c, &l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_rung_for_are_what_steps_compute),
        cmocka_unit_test(a_plan_left_half_way_is_planned_again),
        cmocka_unit_test(a_hello_that_cannot_be_is_refused_by_name),
        cmocka_unit_test(what_both_sides_share_is_bounded),
        cmocka_unit_test(bells_that_lie_are_refused_and_counted),
        cmocka_unit_test(workers_that_are_killed_harm_nobody),
        cmocka_unit_test(a_daemon_that_is_killed_hangs_up),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
