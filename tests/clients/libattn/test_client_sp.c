/* test_client_sp.c: libattn's SP transport at a peer that the test plays byte by byte. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "clients/libattn/transport/transport.h"
#include "proto/attn_time.h"

#define PATIENCE_NS UINT64_C(300000000000)
#define MOST_BYTES (1u << 20)

static const struct client_transport_ops *const ops = &transport_sp_ops;
static const uint8_t req[8] = {0, 'S', 'P', 0, 0, 0x30, 0, 0}, rep[8] = {0, 'S', 'P', 0, 0, 0x31};

struct fixture {
    char path[64], url[80];
    int listen_fd, peer; /* -1: none */
    struct client_transport *t;
};

static int set_up(void **state)
{
    static unsigned int n;
    struct fixture *f = calloc(1, sizeof *f);
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(f->path, sizeof f->path, "/tmp/attn_sp_%d_%u.sock", (int)getpid(), n++);
    snprintf(f->url, sizeof f->url, "ipc://%s", f->path);
    snprintf(a.sun_path, sizeof a.sun_path, "%s", f->path);
    unlink(f->path);
    f->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    f->peer = -1;
    if (bind(f->listen_fd, (struct sockaddr *)&a, sizeof a) != 0 || listen(f->listen_fd, 8) != 0)
        return -1;
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    if (f->t != NULL)
        ops->close(f->t);
    if (f->peer >= 0)
        close(f->peer);
    close(f->listen_fd);
    unlink(f->path);
    free(f);
    return 0;
}

static void open_transport(struct fixture *f)
{
    char why[128] = "";
    assert_int_equal(ops->open(f->url, NULL, &f->t, why, sizeof why), ATTN_OK);
    ops->set_max_message(f->t, MOST_BYTES);
}

static void put(struct fixture *f, const void *bytes, size_t n)
{
    assert_int_equal(send(f->peer, bytes, n, MSG_NOSIGNAL), (ssize_t)n);
}

static void get(struct fixture *f, void *bytes, size_t n)
{
    assert_int_equal(recv(f->peer, bytes, n, MSG_WAITALL), (ssize_t)n);
}

/* Receives until there is a message (true), or until there is no connection. */
static bool receive(struct fixture *f, struct client_message *out_m)
{
    uint64_t end_ns = attn_now_ns() + PATIENCE_NS, n_before = ops->n_failures(f->t);
    while (ops->n_failures(f->t) == n_before) {
        if (ops->recv(f->t, out_m))
            return true;
        assert_true(attn_now_ns() < end_ns);
        ops->wait(f->t, 1000000);
    }
    return false;
}

static void accept_peer(struct fixture *f)
{
    uint8_t hello[8];
    f->peer = accept(f->listen_fd, NULL, NULL);
    assert_true(f->peer >= 0);
    struct client_message m;
    assert_false(ops->recv(f->t, &m));
    get(f, hello, sizeof hello);
    assert_memory_equal(hello, req, sizeof req);
}

static void connect_peer(struct fixture *f)
{
    struct client_message m;
    open_transport(f);
    accept_peer(f);
    put(f, rep, sizeof rep);
    while (!ops->is_connected(f->t)) {
        ops->wait(f->t, PATIENCE_NS);
        assert_false(ops->recv(f->t, &m));
    }
}

/* The bytes of a message on ipc: type, length, id, body of n bytes that depend on the id. */
static size_t message(uint8_t *dst, uint32_t id, size_t n)
{
    uint64_t length = n + 4;
    dst[0] = 1;
    for (int i = 0; i < 8; i++)
        dst[1 + i] = (uint8_t)(length >> (56 - 8 * i));
    for (int i = 0; i < 4; i++)
        dst[9 + i] = (uint8_t)((id | 0x80000000u) >> (24 - 8 * i));
    for (size_t i = 0; i < n; i++)
        dst[13 + i] = (uint8_t)(id * 31 + i * 7);
    return 13 + n;
}

static void assert_message(struct fixture *f, uint32_t id, size_t n)
{
    struct client_message m;
    uint8_t *want = malloc(13 + n);
    assert_true(receive(f, &m));
    message(want, id, n);
    assert_int_equal(m.id, id);
    assert_int_equal(m.bytes, n);
    assert_int_equal((uintptr_t)m.base % 64, 0);
    assert_memory_equal(m.base, want + 13, n);
    ops->message_free(f->t, m.base);
    free(want);
}

static void a_stream_may_be_cut_anywhere(void **state)
{
    struct fixture *f = *state;
    struct client_message m;
    uint8_t bytes[8 + 3 * 64];
    size_t n = 8;
    memcpy(bytes, rep, 8);
    for (uint32_t i = 0; i < 3; i++)
        n += message(bytes + n, 5 + i, 20 * i);
    open_transport(f);
    accept_peer(f);
    size_t ends[3] = {8 + 13, 8 + 13 + 33, n};
    for (size_t at = 0, i = 0; at < n; at++) {
        put(f, bytes + at, 1);
        if (i < 3 && at + 1 == ends[i]) {
            assert_message(f, 5 + (uint32_t)i, 20 * i);
            i++;
        } else {
            assert_false(ops->recv(f->t, &m));
        }
    }
    assert_int_equal(ops->n_failures(f->t), 0);
    assert_int_equal(ops->generation(f->t), 1);
}

static void many_messages_may_come_in_one_piece(void **state)
{
    struct fixture *f = *state;
    enum { N = 200 };
    uint8_t *bytes = malloc(N * 200);
    size_t n = 0;
    for (uint32_t i = 0; i < N; i++) /* of all sizes, so that heads lie across every edge */
        n += message(bytes + n, i, i % 97);
    connect_peer(f);
    put(f, bytes, n);
    for (uint32_t i = 0; i < N; i++)
        assert_message(f, i, i % 97);
    free(bytes);
}

static void a_large_message_is_read_and_written_in_pieces(void **state)
{
    struct fixture *f = *state;
    enum { N = MOST_BYTES };
    uint8_t *bytes = malloc(N + 13), *got = malloc(N + 13);
    connect_peer(f);
    message(bytes, 77, N);
    void *large = ops->message_alloc(f->t, N, 0), *small = ops->message_alloc(f->t, 10, 0);
    memcpy(large, bytes + 13, N);
    assert_true(ops->send(f->t, 77, large, false));
    bool is_taken = ops->send(f->t, 78, small, false); /* behind the large one: usually not yet */
    for (size_t at = 0; at < N + 13;) {
        size_t n = N + 13 - at < 10000 ? N + 13 - at : 10000;
        get(f, got + at, n);
        at += n;
        struct client_message m;
        assert_false(ops->recv(f->t, &m)); /* goes on writing */
    }
    assert_memory_equal(got, bytes, N + 13);
    if (!is_taken)
        assert_true(ops->send(f->t, 78, small, false));
    get(f, got, 13 + 10);
    assert_int_equal(got[12], 78);

    for (size_t at = 0; at < N + 13; at += 100000) {
        struct client_message m;
        put(f, bytes + at, N + 13 - at < 100000 ? N + 13 - at : 100000);
        if (at + 100000 < N + 13)
            assert_false(ops->recv(f->t, &m));
    }
    assert_message(f, 77, N);
    free(bytes);
    free(got);
}

static void a_connection_that_ends_in_a_message_is_made_anew(void **state)
{
    struct fixture *f = *state;
    struct client_message m;
    uint8_t bytes[64], *large = calloc(1, MOST_BYTES);
    connect_peer(f);
    void *request = ops->message_alloc(f->t, MOST_BYTES, 0);
    memset(request, 1, MOST_BYTES);
    assert_true(ops->send(f->t, 3, request, false)); /* a part of it */
    put(f, bytes, message(bytes, 5, 40) - 1);
    close(f->peer);
    assert_false(receive(f, &m));
    assert_false(ops->is_connected(f->t));
    void *early = ops->message_alloc(f->t, 8, 0);
    assert_false(ops->send(f->t, 4, early, false));
    ops->message_free(f->t, early);

    assert_int_equal(fcntl(f->listen_fd, F_SETFL, O_NONBLOCK), 0);
    for (f->peer = -1; f->peer < 0; f->peer = accept(f->listen_fd, NULL, NULL)) {
        assert_false(ops->recv(f->t, &m)); /* connects when it is time */
        ops->wait(f->t, 1000000);
    }
    put(f, rep, sizeof rep);
    while (ops->generation(f->t) == 1) {
        assert_false(ops->recv(f->t, &m));
        ops->wait(f->t, 1000000);
    }
    put(f, bytes, message(bytes, 6, 40));
    assert_message(f, 6, 40); /* nothing of the old stream is left */
    free(large);
}

/* ---- beside others ---- */

static void send_filled(struct fixture *f, uint32_t id, size_t n, bool is_beside)
{
    uint8_t *bytes = malloc(13 + n);
    void *m = ops->message_alloc(f->t, n, 0);
    message(bytes, id, n);
    memcpy(m, bytes + 13, n);
    free(bytes);
    assert_true(ops->send(f->t, id, m, is_beside));
}

/* The message that comes at fd, while the transport goes on writing. */
static void expect_message(struct fixture *f, int fd, uint32_t id, size_t n)
{
    uint8_t *want = malloc(13 + n), *got = malloc(13 + n);
    struct client_message m;
    message(want, id, n);
    for (size_t at = 0; at < 13 + n;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (poll(&p, 1, (int)(PATIENCE_NS / 1000000)) != 1)
            fail_msg("message %u ends after %zu bytes", id, at);
        ssize_t k = recv(fd, got + at, 13 + n - at, 0);
        assert_true(k > 0);
        at += (size_t)k;
        assert_false(ops->recv(f->t, &m));
    }
    assert_memory_equal(got, want, 13 + n);
    free(want);
    free(got);
}

/* What is sent beside goes over the first connection, and a second one is made: its other end. */
static int connect_beside(struct fixture *f, uint32_t id)
{
    uint8_t hello[8];
    struct client_message m;
    uint64_t generation = ops->generation(f->t);
    send_filled(f, id, 100, true);
    expect_message(f, f->peer, id, 100);
    int fd = accept(f->listen_fd, NULL, NULL);
    assert_true(fd >= 0);
    assert_false(ops->recv(f->t, &m));
    assert_int_equal(recv(fd, hello, sizeof hello, MSG_WAITALL), sizeof hello);
    assert_memory_equal(hello, req, sizeof req);
    assert_int_equal(send(fd, rep, sizeof rep, MSG_NOSIGNAL), sizeof rep);
    ops->wait(f->t, PATIENCE_NS); /* its descriptor is the transport's */
    assert_false(ops->recv(f->t, &m));
    assert_int_equal(ops->generation(f->t), generation); /* nothing was lost */
    return fd;
}

static void nothing_waits_for_a_large_message_beside(void **state)
{
    struct fixture *f = *state;
    struct client_message m;
    enum { N = MOST_BYTES, N_SENT = 16 << 20 }; /* more than a socket holds */
    uint8_t *bytes = malloc(N + 13), small[64];
    connect_peer(f);
    int beside = connect_beside(f, 5);
    send_filled(f, 77, N_SENT, true); /* of which the socket takes a part */
    send_filled(f, 78, 20, false);
    expect_message(f, f->peer, 78, 20);
    send_filled(f, 79, 100, true); /* no room beside: the first one has it */
    expect_message(f, f->peer, 79, 100);
    expect_message(f, beside, 77, N_SENT);

    size_t n = message(bytes, 77, N); /* and back, in pieces */
    assert_int_equal(send(beside, bytes, n / 8, MSG_NOSIGNAL), n / 8);
    assert_false(ops->recv(f->t, &m));
    put(f, small, message(small, 78, 20));
    assert_message(f, 78, 20);
    for (size_t at = n / 8; at < n;) {
        ssize_t k = send(beside, bytes + at, n - at, MSG_NOSIGNAL | MSG_DONTWAIT);
        at += k > 0 ? (size_t)k : 0;
        if (at < n)
            assert_false(ops->recv(f->t, &m));
    }
    assert_message(f, 77, N);
    free(bytes);
    close(beside);
}

/* All that has come. */
static size_t come(int fd)
{
    static uint8_t bytes[1 << 20];
    size_t n = 0;
    for (ssize_t k; (k = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT)) > 0;)
        n += (size_t)k;
    return n;
}

/* The thread that receives has the others' messages, too: it goes on with one beside in slices. */
static void a_large_message_beside_is_written_in_slices(void **state)
{
    struct fixture *f = *state;
    struct client_message m;
    enum { N = 16 << 20, SLICE = 64 << 10 }; /* more than a socket holds */
    connect_peer(f);
    int beside = connect_beside(f, 5);
    send_filled(f, 77, N, true);
    size_t n = come(beside), n_turns = 0;
    assert_in_range(n, 1, N - 2 * SLICE); /* what the socket took */
    for (; n < N + 13; n_turns++) {
        assert_false(ops->recv(f->t, &m));
        size_t more = come(beside);
        assert_in_range(more, 1, SLICE);
        n += more;
        if (n < N + 13)
            ops->wait(f->t, PATIENCE_NS); /* it is woken for the next */
    }
    assert_int_equal(n, N + 13);
    assert_true(n_turns > 8);
    close(beside);
}

static void a_connection_beside_that_is_lost_is_made_when_it_is_needed(void **state)
{
    struct fixture *f = *state;
    struct client_message m;
    connect_peer(f);
    int beside = connect_beside(f, 5);
    send_filled(f, 6, 100, true);
    expect_message(f, beside, 6, 100);
    uint64_t generation = ops->generation(f->t);
    close(beside); /* before it has answered */
    while (ops->generation(f->t) == generation) {
        ops->wait(f->t, 1000000);
        assert_false(ops->recv(f->t, &m));
    }
    assert_int_equal(ops->generation(f->t), generation + 1); /* so the client sends it again */
    assert_true(ops->is_connected(f->t));
    ops->wait(f->t, 30000000); /* longer than it waits before it connects */
    assert_false(ops->recv(f->t, &m));
    assert_int_equal(fcntl(f->listen_fd, F_SETFL, O_NONBLOCK), 0);
    assert_true(accept(f->listen_fd, NULL, NULL) < 0);

    send_filled(f, 6, 100, true); /* the second one is gone: over the first */
    expect_message(f, f->peer, 6, 100);
    for (beside = -1; beside < 0; beside = accept(f->listen_fd, NULL, NULL)) {
        ops->wait(f->t, 1000000);
        assert_false(ops->recv(f->t, &m));
    }
    close(beside);
}

static void bytes_outside_the_protocol_end_the_connection(void **state)
{
    struct fixture *f = *state;
    uint8_t bytes[64];
    struct {
        const char *why;
        size_t at;
        uint8_t value;
    } cases[] = {
        {"unknown type", 0, 2},
        {"at most 1048576", 5, 1}, /* length */
        {"at most 1048576", 8, 3}, /* shorter than an id */
        {"at most 1048576", 9, 0}, /* an id of a device in between */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct client_message m;
        char why[128];
        connect_peer(f);
        size_t n = message(bytes, 1, 20);
        bytes[cases[i].at] = cases[i].value;
        put(f, bytes, n);
        assert_false(receive(f, &m));
        ops->why_not(f->t, why, sizeof why);
        assert_non_null(strstr(why, cases[i].why));
        ops->close(f->t);
        f->t = NULL;
        close(f->peer);
        f->peer = -1;
    }
}

static void a_peer_of_another_protocol_is_named(void **state)
{
    struct fixture *f = *state;
    struct client_message m;
    char why[128];
    open_transport(f);
    accept_peer(f);
    put(f, "HTTP/1.0 400 Bad Request", 24);
    assert_false(receive(f, &m));
    ops->why_not(f->t, why, sizeof why);
    assert_non_null(strstr(why, "does not speak SP"));
    assert_int_equal(ops->generation(f->t), 0);
}

static void assert_why_not(const char *url, const char *words)
{
    struct client_transport *t;
    char why[128] = "";
    assert_int_equal(ops->open(url, NULL, &t, why, sizeof why), ATTN_OK);
    assert_int_equal(ops->n_failures(t), 1); /* known at once */
    ops->why_not(t, why, sizeof why);
    if (strstr(why, words) == NULL)
        fail_msg("%s: \"%s\" lacks \"%s\"", url, why, words);
    ops->close(t);
}

static void why_there_is_no_connection_is_known_at_once(void **state)
{
    struct fixture *f = *state;
    assert_why_not("ipc:///tmp/attn-nobody/is.here", "no such path");
    assert_why_not("ipc:///dev/null", "not a socket");
    close(f->listen_fd);
    assert_why_not(f->url, "nobody listens");
    unlink(f->path);
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s", f->path);
    f->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(f->listen_fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(f->listen_fd, 1), 0);
    assert_why_not(f->url, "another type");
    if (geteuid() != 0) {
        assert_int_equal(chmod(f->path, 0), 0);
        assert_why_not(f->url, "no permission");
    }
}

static void wake_ends_a_wait_and_is_seen_once(void **state)
{
    struct fixture *f = *state;
    struct client_message m;
    connect_peer(f);
    ops->wake(f->t);
    ops->wait(f->t, PATIENCE_NS); /* the test's time limit says whether it ends */
    uint64_t start_ns = attn_now_ns();
    ops->wake(f->t);
    assert_false(ops->recv(f->t, &m)); /* as a poll that waits for nothing does: quiet again */
    ops->wait(f->t, 30000000);
    assert_true(attn_now_ns() - start_ns >= 29000000);
}

#define T(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

/* ---- names: what the name service says is the test's ---- */

static const char *answers[8]; /* addresses of the host, in this order */
static atomic_int n_unknown; /* lookups that fail before it is known */
static atomic_int n_lookups;
static sem_t hangs; /* a lookup waits for it, if does_hang */
static atomic_bool does_hang;

int __real_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out);
int __wrap_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out);

int __wrap_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out)
{
    struct addrinfo numeric = *hints, **end = out;
    if (strcmp(host, "attnd.test") != 0 || (hints->ai_flags & AI_NUMERICHOST) != 0)
        return __real_getaddrinfo(host, port, hints, out);
    atomic_fetch_add(&n_lookups, 1);
    while (atomic_load(&does_hang) && sem_wait(&hangs) != 0)
        ;
    if (atomic_fetch_sub(&n_unknown, 1) > 0)
        return EAI_NONAME;
    numeric.ai_flags |= AI_NUMERICHOST;
    for (int i = 0; answers[i] != NULL; i++) { /* glibc frees a chain entry by entry */
        if (__real_getaddrinfo(answers[i], port, &numeric, end) != 0)
            return EAI_FAIL;
        end = &(*end)->ai_next;
    }
    return 0;
}

/* Listens at a free port of 127.0.0.1, which the url names by its host's name. */
static void listen_by_name(struct fixture *f)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    close(f->listen_fd);
    f->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(f->listen_fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(f->listen_fd, 8), 0);
    assert_int_equal(getsockname(f->listen_fd, (struct sockaddr *)&a, &n), 0);
    snprintf(f->url, sizeof f->url, "tcp://attnd.test:%u", ntohs(a.sin_port));
    memset(answers, 0, sizeof answers);
    atomic_store(&n_unknown, 0);
    atomic_store(&n_lookups, 0);
    atomic_store(&does_hang, false);
}

static void connect_by_name(struct fixture *f)
{
    struct client_message m;
    struct pollfd fd = {.fd = f->listen_fd, .events = POLLIN};
    uint64_t end_ns = attn_now_ns() + PATIENCE_NS;
    while (poll(&fd, 1, 0) == 0) {
        assert_false(ops->recv(f->t, &m));
        ops->wait(f->t, 1000000);
        assert_true(attn_now_ns() < end_ns);
    }
    accept_peer(f);
    put(f, rep, sizeof rep);
    while (!ops->is_connected(f->t)) {
        ops->wait(f->t, PATIENCE_NS);
        assert_false(ops->recv(f->t, &m));
    }
}

/* As of localhost: ::1, where nobody is, and 127.0.0.1. None of them counts as a failure. */
static void every_address_of_a_name_is_tried_in_order(void **state)
{
    struct fixture *f = *state;
    static const char *const orders[][4] = {
        {"127.0.0.1", NULL},
        {"::1", "127.0.0.1", NULL},
        {"127.0.0.3", "::1", "127.0.0.1", NULL},
        {"127.0.0.1", "127.0.0.3", NULL},
    };
    for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++) {
        listen_by_name(f);
        memcpy(answers, orders[i], sizeof orders[i]);
        open_transport(f);
        connect_by_name(f);
        assert_int_equal(ops->n_failures(f->t), 0);
        assert_int_equal(atomic_load(&n_lookups), 1);
        ops->close(f->t);
        f->t = NULL;
        close(f->peer);
    }
    f->peer = -1;
}

static void a_name_that_nobody_knows_yet_is_asked_for_again(void **state)
{
    struct fixture *f = *state;
    char why[256] = "";
    listen_by_name(f);
    answers[0] = "127.0.0.1";
    atomic_store(&n_unknown, 3);
    open_transport(f);
    struct client_message m;
    assert_false(receive(f, &m));
    ops->why_not(f->t, why, sizeof why);
    assert_non_null(strstr(why, "attnd.test: "));
    connect_by_name(f);
    assert_int_equal(ops->n_failures(f->t), 3);

    /* it has moved, and the service fails: the last answer is good still */
    atomic_store(&n_unknown, 1);
    close(f->peer);
    assert_false(receive(f, &m));
    connect_by_name(f);
    assert_int_equal(atomic_load(&n_lookups), 5);
}

static void nobody_at_any_address_is_one_failure(void **state)
{
    struct fixture *f = *state;
    struct client_message m;
    char why[256] = "";
    listen_by_name(f);
    answers[0] = "127.0.0.2";
    answers[1] = "127.0.0.3";
    open_transport(f);
    assert_false(receive(f, &m));
    assert_int_equal(ops->n_failures(f->t), 1);
    ops->why_not(f->t, why, sizeof why);
    assert_non_null(strstr(why, "nobody listens there"));
}

/* One address hangs up and nobody listens at the next: whenever it is asked, the first is told
 * of. */
static void the_address_that_came_furthest_says_why(void **state)
{
    struct fixture *f = *state;
    struct client_message m;
    const uint64_t end_ns = attn_now_ns() + PATIENCE_NS;
    listen_by_name(f);
    answers[0] = "127.0.0.1";
    answers[1] = "127.0.0.3";
    open_transport(f);
    while (ops->n_failures(f->t) < 4) {
        struct pollfd fd = {.fd = f->listen_fd, .events = POLLIN};
        char why[256] = "";
        if (poll(&fd, 1, 0) > 0)
            close(accept(f->listen_fd, NULL, NULL));
        ops->wait(f->t, 1000000);
        assert_false(ops->recv(f->t, &m));
        ops->why_not(f->t, why, sizeof why);
        if (ops->n_failures(f->t) > 0)
            assert_non_null(strstr(why, "the peer hung up in the handshake"));
        assert_true(attn_now_ns() < end_ns);
    }
}

static void closing_does_not_wait_for_the_name_service(void **state)
{
    struct fixture *f = *state;
    listen_by_name(f);
    answers[0] = "127.0.0.1";
    sem_init(&hangs, 0, 0);
    atomic_store(&does_hang, true);
    open_transport(f);
    ops->close(f->t);
    f->t = NULL;
    atomic_store(&does_hang, false);
    sem_post(&hangs);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(a_stream_may_be_cut_anywhere),
        T(many_messages_may_come_in_one_piece),
        T(a_large_message_is_read_and_written_in_pieces),
        T(a_connection_that_ends_in_a_message_is_made_anew),
        T(nothing_waits_for_a_large_message_beside),
        T(a_large_message_beside_is_written_in_slices),
        T(a_connection_beside_that_is_lost_is_made_when_it_is_needed),
        T(bytes_outside_the_protocol_end_the_connection),
        T(a_peer_of_another_protocol_is_named),
        T(why_there_is_no_connection_is_known_at_once),
        T(wake_ends_a_wait_and_is_seen_once),
        T(every_address_of_a_name_is_tried_in_order),
        T(a_name_that_nobody_knows_yet_is_asked_for_again),
        T(nobody_at_any_address_is_one_failure),
        T(the_address_that_came_furthest_says_why),
        T(closing_does_not_wait_for_the_name_service),
    };
    return cmocka_run_group_tests_name("client_sp", tests, NULL, NULL);
}
