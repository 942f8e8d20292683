/* shm_hostile.c: a hostile client in a loop. Each turn connects and does one of six
 * things: scribbles over a step in flight, submits random entries, writes random words, abuses the
 * descriptors it got, stalls or dies, or says a strange hello.
 */
#define _GNU_SOURCE
#include "tests/daemon/transport/shm_hostile.h"

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/attn_time.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/shm_link.h"
#include "tests/random.h"

static double end_s;
static uint64_t seed;

static double now_s(void)
{
    return (double)attn_now_ns() * 1e-9;
}

static uint32_t below(uint32_t n)
{
    return random_below(&seed, n);
}

static uint64_t random64(void)
{
    return random_mixed(&seed);
}

/* Random bytes, small numbers and numbers near limits. */
static uint64_t nasty(const struct shm_link *l)
{
    const uint64_t edges[] = {0,
                              1,
                              64,
                              1024,
                              l->welcome.data_offset,
                              l->welcome.region_bytes,
                              l->welcome.region_bytes - 64,
                              UINT32_MAX,
                              UINT64_MAX - 63,
                              l->welcome.n_slots};
    switch (below(3)) {
    case 0:
        return edges[below(sizeof edges / sizeof edges[0])];
    case 1:
        return l->welcome.data_offset + 64 * (uint64_t)below(1000);
    default:
        return random64() >> below(64);
    }
}

/* A client that does nothing for a moment, as long as it likes: what the daemon must bear. */
static void nap(void)
{
    struct timespec t = {.tv_nsec = below(3000000)};
    nanosleep(&t, NULL);
}

struct message {
    uint8_t bytes[1 << 14];
    size_t n;
};

static void make_message(struct message *m, Attnd__Request *h, size_t payload_bytes)
{
    size_t head = wire_request_head_bytes(h);
    wire_request_head_encode(h, random64() | 1, payload_bytes, m->bytes);
    memset(m->bytes + head, (int)below(256), payload_bytes);
    m->n = head + payload_bytes;
}

/* A session and a sequence of the hostile client's own; 0: none. */
static uint64_t open_session(struct shm_link *l, uint32_t *out_pool, uint64_t *out_seq)
{
    static _Alignas(64) uint8_t copy[1 << 16];
    struct message m;
    uint8_t memory[8192];
    char why[256];
    Attnd__Hello hello = ATTND__HELLO__INIT;
    Attnd__PoolDescribe describe = ATTND__POOL_DESCRIBE__INIT;
    Attnd__Open open = ATTND__OPEN__INIT;
    uint64_t session = 0;
    *out_seq = random64();
    for (int i = 0; i < 3; i++) {
        Attnd__Request h = ATTND__REQUEST__INIT;
        const uint8_t *reply;
        size_t n;
        struct wire_arena arena;
        struct wire_reply w;
        h.session = session;
        if (i == 0) {
            h.body_case = ATTND__REQUEST__BODY_HELLO;
            h.hello = &hello;
            hello.protocol_version = 1;
        } else if (i == 1) {
            h.body_case = ATTND__REQUEST__BODY_POOL_DESCRIBE;
            h.pool_describe = &describe;
            describe.name = "e2e";
        } else {
            h.body_case = ATTND__REQUEST__BODY_OPEN;
            h.open = &open;
            open.pool = *out_pool;
            open.seq = *out_seq;
        }
        make_message(&m, &h, 0);
        if (!shm_link_send(l, m.bytes, m.n) || !shm_link_receive(l, 2000, &reply, &n) ||
            n > sizeof copy)
            return 0;
        memcpy(copy, reply, n);
        wire_arena_init(&arena, memory, sizeof memory, sizeof memory);
        if (wire_reply_decode(copy, n, &arena, &w, why, sizeof why) != ATTN_OK ||
            w.header->status != ATTN_OK)
            return 0;
        if (i == 0)
            session = w.header->hello->session;
        else if (i == 1)
            *out_pool = w.header->pool->pool;
    }
    return session;
}

/* A step of its own sequence, right or nearly so. */
static void make_step(struct message *m, uint64_t session, uint32_t pool, uint64_t seq)
{
    Attnd__Step b = ATTND__STEP__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint32_t one = 1, pos = below(4), n_tokens = 1 + below(8);
    b.pool = pool;
    b.layer = below(E2E_LAYERS);
    b.flags = E2E_BOTH;
    b.dtype = ATTND__DTYPE__BF16;
    b.n_seq = b.n_epoch = b.n_pos = b.n_n_tokens = 1;
    b.seq = &seq;
    b.epoch = &one;
    b.pos = &pos;
    b.n_tokens = &n_tokens;
    h.session = session;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &b;
    make_message(m, &h, (size_t)n_tokens * (E2E_Q_HEADS + 2 * E2E_KV_HEADS) * E2E_DIM * 2);
    if (below(10) == 0)
        m->bytes[below(96)] ^= (uint8_t)(1u << below(8));
}

struct scribbler {
    struct shm_link *l;
    uint64_t seed;
    uint64_t begin, end;
    atomic_bool is_over;
};

/* Changes what the daemon reads while it reads it, and what the other thread writes: these races
 * are what the daemon must survive, so the thread sanitizer is not asked about them. */
__attribute__((no_sanitize("thread"))) static void *scribble(void *arg)
{
    struct scribbler *s = arg;
    volatile uint8_t *p = s->l->base;
    while (!atomic_load(&s->is_over)) {
        for (int i = 0; i < 200; i++)
            p[s->begin + random_below(&s->seed, (uint32_t)(s->end - s->begin))] =
                (uint8_t)random_next(&s->seed);
        /* between two bursts the daemon meets memory that stays as it is */
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    return NULL;
}

/* Valid and invalid requests, many in flight, replies read or not, while a second thread

 * scribbles. */
static void submit_and_scribble(struct shm_link *l)
{
    uint32_t pool;
    uint64_t seq, session = open_session(l, &pool, &seq);
    struct scribbler s = {.l = l, .seed = seed ^ 1};
    pthread_t thread;
    bool reads = below(3) != 0, has_thread = below(2) == 0;
    switch (below(3)) {
    case 0: /* heads of messages */
        s.begin = l->welcome.data_offset;
        s.end = s.begin + 256;
        break;
    case 1: /* control words and rings */
        s.end = l->welcome.data_offset;
        break;
    default:
        s.end = l->welcome.region_bytes;
        break;
    }
    if (has_thread)
        pthread_create(&thread, NULL, scribble, &s);
    for (uint32_t i = 0; i < 300 && !shm_link_is_gone(l, 0); i++) {
        struct message m;
        const uint8_t *reply;
        size_t n;
        make_step(&m, session, pool, seq);
        if (!shm_link_send(l, m.bytes, m.n) && reads)
            shm_link_receive(l, 5, &reply, &n);
        if (below(20) == 0)
            nap();
    }
    if (has_thread) {
        atomic_store(&s.is_over, true);
        pthread_join(thread, NULL);
    }
}

static void random_entries(struct shm_link *l)
{
    for (uint32_t i = 0; i < 50 && !shm_link_is_gone(l, 0); i++) {
        struct shm_submit e = {
            .request_offset = nasty(l),
            .room_offset = nasty(l),
            .request_bytes = (uint32_t)nasty(l),
            .room_bytes = (uint32_t)nasty(l),
            .slot = below(4) == 0 ? (uint32_t)nasty(l) : below(l->welcome.n_slots),
            .reserved = below(20) == 0,
        };
        shm_link_submit(l, &e);
        if (below(8) == 0)
            nap();
    }
}

static void random_words(struct shm_link *l)
{
    for (uint32_t i = 0; i < 200; i++) {
        _Atomic uint32_t *words[] = {&l->control->submitted, &l->control->daemon_sleeps,
                                     &l->control->completed, &l->control->client_sleeps};
        atomic_store(words[below(i < 100 ? 4 : 3) + (i < 100 ? 0 : 1)],
                     below(2) == 0 ? below(4) : (uint32_t)nasty(l));
        shm_link_wake(l);
        if (below(16) == 0)
            nap();
    }
}

/* Takes memory away, or tries to; abuses the descriptors. */
static void abuse_descriptors(struct shm_link *l)
{
    uint32_t pool;
    uint64_t seq, session = open_session(l, &pool, &seq), n = UINT64_MAX - 1;
    if (ftruncate(l->memfd, 0) == 0 || ftruncate(l->memfd, 1 << 30) == 0 ||
        fcntl(l->memfd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0)
        _exit(3); /* the seals do not hold */
    fcntl(l->wake_fd, F_SETFL, 0); /* blocking from now on */
    for (uint32_t i = 0; i < 100 && !shm_link_is_gone(l, 0); i++) {
        struct message m;
        make_step(&m, session, pool, seq);
        shm_link_send(l, m.bytes, m.n);
        fallocate(l->memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                  (off_t)(below(2) == 0 ? l->welcome.data_offset + 4096 : l->welcome.region_bytes));
        if (below(10) == 0)
            nap();
    }
    fcntl(l->wake_fd, F_SETFL, O_NONBLOCK);
    uint64_t drained;
    if (read(l->wake_fd, &drained, sizeof drained) < 0 || write(l->wake_fd, &n, sizeof n) < 0)
        return;
}

/* Steps whose replies nobody takes; then silence, or nothing at all. */
static void stall_or_die(struct shm_link *l)
{
    uint32_t pool;
    uint64_t seq, session = open_session(l, &pool, &seq);
    struct message m;
    atomic_store(&l->control->client_sleeps, below(3));
    for (uint32_t i = 0; i < l->welcome.n_slots; i++) {
        make_step(&m, session, pool, seq);
        shm_link_send(l, m.bytes, m.n);
    }
    if (below(2) == 0)
        nap();
    else if (below(2) == 0)
        kill(getpid(), SIGKILL);
}

/* Anything before, or instead of, a hello. */
static void strange_hellos(const char *path)
{
    struct shm_hello h = {.magic = SHM_MAGIC, .version = SHM_VERSION};
    uint8_t junk[512];
    int fd = shm_link_connect(path);
    if (fd < 0)
        return;
    for (size_t i = 0; i < sizeof junk; i++)
        junk[i] = (uint8_t)below(256);
    switch (below(6)) {
    case 0:
        break; /* silence, then gone */
    case 1:
        h.magic = (uint32_t)random64();
        break;
    case 2:
        h.version = 1 + below(9);
        break;
    case 3:
        h.region_bytes = random64() >> below(64);
        h.n_slots = (uint32_t)random64() >> below(32);
        break;
    case 4:
        h.reserved = 1;
        break;
    case 5:
        (void)!send(fd, junk, 1 + below(sizeof junk), MSG_NOSIGNAL);
        break;
    }
    if (below(4) != 0)
        (void)!send(fd, &h, 1 + below(2) * (sizeof h - 1), MSG_NOSIGNAL);
    if (below(2) == 0) { /* descriptors that nobody asked for */
        union {
            struct cmsghdr align;
            char bytes[CMSG_SPACE(sizeof(int))];
        } control = {0};
        struct iovec iov = {&h, sizeof h};
        struct msghdr m = {.msg_iov = &iov,
                           .msg_iovlen = 1,
                           .msg_control = control.bytes,
                           .msg_controllen = sizeof control.bytes};
        control.align.cmsg_len = CMSG_LEN(sizeof(int));
        control.align.cmsg_level = SOL_SOCKET;
        control.align.cmsg_type = SCM_RIGHTS;
        memcpy(CMSG_DATA(&control.align), &fd, sizeof fd);
        (void)!sendmsg(fd, &m, MSG_NOSIGNAL);
    }
    if (below(2) == 0)
        nap();
    close(fd);
}

int shm_be_hostile(const char *path, double until_s, unsigned with_seed)
{
    end_s = until_s;
    seed = with_seed;
    while (now_s() < end_s) {
        struct shm_link l;
        uint32_t what = below(6);
        if (what == 5) {
            strange_hellos(path);
            continue;
        }
        uint32_t n_slots = 1u << below(7);
        if (!shm_link_open(&l, path, n_slots, (uint64_t)64 << (10 + below(6))))
            continue;
        if (what == 0)
            submit_and_scribble(&l);
        else if (what == 1)
            random_entries(&l);
        else if (what == 2)
            random_words(&l);
        else if (what == 3)
            abuse_descriptors(&l);
        else
            stall_or_die(&l);
        if (below(8) == 0) /* says something after hello */
            (void)!send(l.socket, "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        shm_link_close(&l);
    }
    return 0;
}
