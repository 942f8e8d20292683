/* process.c: a process that floods the daemon with requests or connections, as many at once as
 * asked for, until it is killed. */
#include "tests/daemon/flood/flood.h"

#include <arpa/inet.h>
#include <openssl/ssl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/tls_stream.h"

struct e2e flood_daemon;
int flood_in_flight = 64;

/* A connection on its way that begins with these bytes. RST ends it, so that ports suffice. */
static int connection_begin(int epoll, const void *bytes, size_t n)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct linger at_once = {.l_onoff = 1};
    to.sin_port = htons((uint16_t)atoi(strrchr(flood_daemon.tls_url, ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct epoll_event ev = {.events = EPOLLIN, .data.fd = fd};
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) != 0 ||
        connect(fd, (struct sockaddr *)&to, sizeof to) != 0 ||
        (n > 0 && send(fd, bytes, n, MSG_NOSIGNAL) < 0) ||
        epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &ev) != 0) {
        perror("bench_flood: connection");
        _exit(1);
    }
    return fd;
}

/* The same hello again and again, each on a connection of its own that ends with the answer: costs
 * this side next to nothing, and the daemon a key exchange and a signature. */
void flood_handshakes(struct flood_answered *a)
{
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    struct tls_stream *tls = tls_stream_new(context, "localhost");
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    size_t n_hello;
    (void)tls_stream_handshake(tls);
    const uint8_t *hello = tls_stream_pending(tls, &n_hello);
    for (int i = 0; i < flood_in_flight; i++)
        connection_begin(epoll, hello, n_hello);
    atomic_store(&a->is_ready, true);
    for (;;) {
        struct epoll_event ready[64];
        int n = epoll_wait(epoll, ready, 64, -1);
        for (int i = 0; i < n; i++) {
            uint8_t answer[8192];
            ssize_t got = recv(ready[i].data.fd, answer, sizeof answer, 0);
            atomic_fetch_add(got > 0 ? &a->n_ok : &a->n_other, 1);
            atomic_fetch_add(&a->bytes, got > 0 ? (uint64_t)got : 0);
            close(ready[i].data.fd);
            connection_begin(epoll, hello, n_hello);
        }
    }
}

void flood_connections(struct flood_answered *a)
{
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    atomic_store(&a->is_ready, true);
    for (;;) {
        close(connection_begin(epoll, NULL, 0));
        atomic_fetch_add(&a->n_ok, 1);
    }
}

bool flood_is_possible(const struct flood_kind *k)
{
    return k->connect == NULL || flood_daemon.tls_url[0] != '\0';
}

void flood_enter(struct e2e_client *c, const char *token)
{
    struct e2e by = flood_daemon;
    if (by.tls_url[0] == '\0') /* libattn's socket, which may be used after a fork */
        snprintf(by.tls_url, sizeof by.tls_url, "%s", flood_daemon.url);
    e2e_connect_tls(c, &by);
    const Attnd__Reply *r = e2e_hello(c, token);
    if (r->status != ATTN_OK)
        fail_msg("no session: %s", r->message);
}

static void take(struct flooder *f, struct flood_answered *a, const struct wire_reply *r)
{
    const Attnd__Reply *h = r->header;
    atomic_fetch_add(h->status == ATTN_OK ? &a->n_ok : &a->n_other, 1);
    atomic_fetch_add(&a->bytes, r->payload_bytes);
    if (h->status != ATTN_OK)
        atomic_store(&a->last_other, (int)h->status);
    else if (h->body_case == ATTND__REPLY__BODY_POOL && r->request_id == f->pool_request)
        f->pool_made = h->pool->pool;
}

static void flood(const struct flood_kind *k, uint32_t of, struct flood_answered *a)
{
    static struct flooder f;
    int most = flood_in_flight;
    if (k->most_in_flight != 0 && k->most_in_flight < most)
        most = k->most_in_flight;
    uint64_t n_answered = 0;
    f.of = of;
    flood_enter(&f.c, FLOOD_TOKEN);
    flood_prepare(&f, k);
    if (f.payload == NULL) /* of a message that is still needed */
        e2e_forget(&f.c);
    else
        f.c.replies = NULL;
    n_answered = f.n_sent;
    atomic_store(&a->is_ready, true);
    for (;;) {
        while (f.n_sent - n_answered < (uint64_t)most)
            k->send(&f);
        e2e_await_ms(&f.c, 0, 1);
        for (struct e2e_reply *r = f.c.replies; r != NULL; r = r->next, n_answered++) {
            const Attnd__Reply *h = r->wire.header;
            take(&f, a, &r->wire);
            if (h->status != ATTN_OK || f.n_close == FLOOD_NAMES)
                continue;
            if (k->then == FLOOD_CLOSE && h->body_case == ATTND__REPLY__BODY_SEQ) {
                f.close_name[f.n_close] = f.name_of[r->wire.request_id % FLOOD_NAMES];
                f.close_epoch[f.n_close++] = h->seq->epoch;
            } else if (k->then == FLOOD_GOODBYE && h->body_case == ATTND__REPLY__BODY_HELLO) {
                f.close_name[f.n_close++] = h->hello->session;
            }
        }
        e2e_forget(&f.c);
    }
}

pid_t flood_start(const struct flood_kind *k, uint32_t of, struct flood_answered *a)
{
    *a = (struct flood_answered){0};
    fflush(stdout);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sched_setscheduler(0, SCHED_OTHER, &(struct sched_param){0});
    if (k->connect != NULL)
        k->connect(a);
    else
        flood(k, of, a);
    _exit(1);
}
