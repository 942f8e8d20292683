/* e2e.c: daemon process and client sockets of the end-to-end tests. */
#include "tests/daemon/e2e/e2e.h"
#include "clients/libattn/transport/transport.h"
#include "proto/attn_time.h"
#include "tests/daemon/transport/certs.h"
#include "tests/daemon/transport/shm_link.h"

#include <errno.h>
#include <fcntl.h>
#include <nanomsg/nn.h>
#include <nanomsg/reqrep.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { TIMEOUT_MS = 300000 }; /* of what hangs */
enum { LOOK_MS = 1000 }; /* whether the daemon is there still */
enum { STUCK_MS = 5000 }; /* of what is sent again: another socket is tried */

static int64_t now_ms(void)
{
    return (int64_t)(attn_now_ns() / 1000000);
}

/* --- the daemon ------------------------------------------------------------------------------- */

static void make_dir(struct e2e *d)
{
    *d = (struct e2e){0};
    snprintf(d->dir, sizeof d->dir, "/tmp/attnd-e2e-XXXXXX");
    assert_non_null(mkdtemp(d->dir));
    snprintf(d->url, sizeof d->url, "ipc://%s/s", d->dir);
    snprintf(d->shm_path, sizeof d->shm_path, "%s/m", d->dir);
    snprintf(d->gpu_path, sizeof d->gpu_path, "%s/g", d->dir);
    snprintf(d->log, sizeof d->log, "%s/log", d->dir);
}

bool e2e_is_spread(void)
{
    return getenv("E2E_CARDS") != NULL && getenv("E2E_SPLIT") == NULL;
}

uint32_t e2e_blocks_each(void)
{
    uint32_t n = 1;
    for (const char *c = getenv("E2E_CARDS"); c != NULL && *c != '\0'; c++)
        n += *c == ',';
    return n;
}

uint32_t e2e_most_cards(void)
{
    const char *most = getenv("E2E_MOST_CARDS");
    return most == NULL ? UINT32_MAX : (uint32_t)atoi(most);
}

void (*e2e_before_exec)(void);

/* Another one than was built, for tests that run where they were not built. */
static const char *e2e_binary(void)
{
    const char *path = getenv("ATTND_TEST_BINARY");
    return path != NULL ? path : ATTND_BINARY;
}

static void spawn(struct e2e *d, const char **argv)
{
    d->pid = fork();
    assert_true(d->pid >= 0);
    if (d->pid > 0)
        return;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed test leaves no daemon behind */
    int log = open(d->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    dup2(log, 1);
    dup2(log, 2);
    if (e2e_before_exec != NULL)
        e2e_before_exec();
    execv(argv[0], (char **)(uintptr_t)argv);
    _exit(127);
}

static bool is_transport(const char *name)
{
    const char *transport = getenv("E2E_TRANSPORT");
    return transport != NULL && strcmp(transport, name) == 0;
}

/* Where it listens over a network, by its log, if it does. */
static void find_url(const struct e2e *d, const char *scheme, char *url, size_t url_bytes)
{
    static const char mark[] = "listening on ";
    char line[1024];
    FILE *f = fopen(d->log, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f) != NULL) {
        const char *at = strstr(line, mark);
        at = at == NULL ? NULL : at + strlen(mark);
        if (at != NULL && strncmp(at, scheme, strlen(scheme)) == 0)
            snprintf(url, url_bytes, "%.*s", (int)strcspn(at, "\"\n"), at);
    }
    fclose(f);
}

static void show_log(const struct e2e *d)
{
    char command[128];
    snprintf(command, sizeof command, "cat %s >&2", d->log);
    (void)!system(command);
}

/* Until the log has the text, or the process has ended if that is no use. */
static bool await_log(const struct e2e *d, const char *text, bool while_it_lives)
{
    int grows = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    int ends = while_it_lives ? (int)syscall(SYS_pidfd_open, d->pid, 0) : -1;
    /* the folder: a log may have yet to be made */
    assert_true(grows >= 0 && inotify_add_watch(grows, d->dir, IN_MODIFY | IN_CREATE) >= 0);
    int64_t until = now_ms() + TIMEOUT_MS, left;
    bool has_ended = false, has_text;
    while (!(has_text = e2e_log_has(d, text)) && !has_ended && (left = until - now_ms()) > 0) {
        struct pollfd fds[] = {{.fd = grows, .events = POLLIN}, {.fd = ends, .events = POLLIN}};
        poll(fds, 2, (int)left);
        char events[4096];
        while (read(grows, events, sizeof events) > 0)
            continue;
        has_ended = fds[1].revents != 0;
    }
    close(grows);
    if (ends >= 0)
        close(ends);
    return has_text;
}

void e2e_start(struct e2e *d, const char *const *flags)
{
    make_dir(d);
    e2e_restart(d, flags);
}

void e2e_restart(struct e2e *d, const char *const *flags)
{
    unlink(d->log);
    const char *network = is_transport("tls")   ? " tls+tcp://127.0.0.1:0"
                          : is_transport("tcp") ? " tcp://127.0.0.1:0"
                                                : "";
    char urls[400], *cert = certs_file(CERTS_GOOD, "server.crt");
    char *key = certs_file(CERTS_GOOD, "server.key");
    snprintf(urls, sizeof urls, "%s shm://%s gpu://%s%s", d->url, d->shm_path, d->gpu_path,
             network);
    /* on a busy machine a step may take long, and is to be computed all the same */
    const char *argv[64] = {e2e_binary(), "--backend",
                            "cpu",        "--listen",
                            urls,         "--listen.http",
                            "off",        "--device.kv_memory",
                            "16M",        "--cache.io_memory",
                            "64M",        "--device.threads",
                            "2",          "--cache.max_seq_tokens",
                            "4096",       "--listen.shm_client",
                            "512M",       "--listen.shm_memory",
                            "64G",        "--engine.default_timeout",
                            "10m",        "--engine.drain_timeout",
                            "10m",        "--listen.tls_cert",
                            cert,         "--listen.tls_key",
                            key};
    int n = 27;
    if (getenv("E2E_CARDS") != NULL) {
        argv[n++] = "--device.index";
        argv[n++] = getenv("E2E_CARDS");
        argv[n++] = "--device.balance"; /* sequences move whenever cards are uneven */
        argv[n++] = "1ms";
    }
    for (; flags != NULL && *flags != NULL; flags++)
        argv[n++] = *flags;
    assert_true(n < 64);
    spawn(d, argv);
    free(cert);
    free(key);
    if (!await_log(d, "is ready", true)) {
        show_log(d);
        fail_msg("attnd did not get ready");
    }
    find_url(d, "tls+tcp:", d->tls_url, sizeof d->tls_url);
    find_url(d, "tcp:", d->tcp_url, sizeof d->tcp_url);
}

int e2e_run(struct e2e *d, const char *const *flags)
{
    make_dir(d);
    const char *argv[64] = {e2e_binary()};
    int n = 1;
    for (; *flags != NULL; flags++)
        argv[n++] = *flags;
    spawn(d, argv);
    return e2e_wait(d);
}

void e2e_signal(struct e2e *d, int number)
{
    assert_int_equal(kill(d->pid, number), 0);
}

pid_t e2e_child(const struct e2e *d)
{
    char path[64];
    long pid = 0;
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)d->pid, (int)d->pid);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    if (fscanf(f, "%ld", &pid) != 1)
        pid = 0;
    fclose(f);
    return (pid_t)pid;
}

void e2e_kill_child(const struct e2e *d)
{
    pid_t pid = e2e_child(d);
    assert_true(pid > 0);
    assert_int_equal(kill(pid, SIGKILL), 0);
}

void e2e_pause(struct e2e *d)
{
    siginfo_t stopped;
    e2e_signal(d, SIGSTOP); /* a thread that computes goes on for a while after it */
    assert_int_equal(waitid(P_PID, (id_t)d->pid, &stopped, WSTOPPED), 0);
}

/* Until the process has ended, which is a readable descriptor; false: it goes on. */
static bool await_end(pid_t pid, int *out_status)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    assert_true(fd >= 0);
    int64_t until = now_ms() + TIMEOUT_MS, left;
    pid_t ended = 0;
    while ((ended = waitpid(pid, out_status, WNOHANG)) == 0 && (left = until - now_ms()) > 0)
        poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, (int)left);
    close(fd);
    return ended == pid;
}

int e2e_wait(struct e2e *d)
{
    int status;
    if (!await_end(d->pid, &status)) {
        kill(d->pid, SIGKILL);
        waitpid(d->pid, &status, 0);
        d->pid = 0;
        fail_msg("attnd did not end");
    }
    d->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

bool e2e_log_has(const struct e2e *d, const char *text)
{
    char buf[65536];
    FILE *f = fopen(d->log, "r");
    if (f == NULL)
        return false;
    size_t n = fread(buf, 1, sizeof buf - 1, f);
    fclose(f);
    buf[n] = '\0';
    return strstr(buf, text) != NULL;
}

void e2e_await_log(const struct e2e *d, const char *text)
{
    if (!await_log(d, text, false))
        fail_msg("attnd did not say \"%s\"", text);
}

void e2e_stop(struct e2e *d)
{
    if (d->pid != 0) {
        e2e_signal(d, SIGTERM);
        int code = e2e_wait(d);
        if (code != 0)
            show_log(d);
        assert_int_equal(code, 0);
    }
    unlink(d->log);
    assert_int_equal(rmdir(d->dir), 0); /* it took its socket away */
}

/* --- a client --------------------------------------------------------------------------------- */

const Attnd__Reply *e2e_hello(struct e2e_client *c, const char *token)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Hello hello = ATTND__HELLO__INIT;
    hello.protocol_version = 1;
    hello.client_name = "e2e";
    hello.token = (char *)(uintptr_t)token;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &hello;
    const Attnd__Reply *r = e2e_call(c, &h);
    if (r->status == ATTN_OK)
        c->session = r->hello->session;
    return r;
}

static void say_hello(struct e2e_client *c)
{
    assert_int_equal(e2e_hello(c, "")->status, ATTN_OK);
}

void e2e_connect_shm(struct e2e_client *c, const struct e2e *d)
{
    *c = (struct e2e_client){.next_id = 1, .socket = -1, .pid = d->pid};
    c->shm = malloc(sizeof *c->shm);
    if (!shm_link_open(c->shm, d->shm_path, 32, 0))
        fail_msg("no shared memory: %s", c->shm->welcome.message);
    say_hello(c);
}

void e2e_connect_tls(struct e2e_client *c, const struct e2e *d)
{
    *c = (struct e2e_client){.next_id = 1, .socket = -1, .pid = d->pid};
    char why[256], *ca = certs_file(CERTS_GOOD, "ca.crt");
    struct client_credentials files = {.ca_file = ca};
    if (transport_sp_ops.open(d->tls_url, &files, &c->tls, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    transport_sp_ops.set_max_message(c->tls, UINT32_MAX);
    free(ca);
}

void e2e_connect(struct e2e_client *c, const struct e2e *d)
{
    if (is_transport("shm")) {
        e2e_connect_shm(c, d);
        return;
    }
    if (is_transport("tls")) {
        e2e_connect_tls(c, d);
        say_hello(c);
        return;
    }
    struct e2e by_tcp = *d;
    if (is_transport("tcp"))
        snprintf(by_tcp.url, sizeof by_tcp.url, "%s", d->tcp_url);
    e2e_connect_badly(c, &by_tcp, 0);
}

static void open_socket(struct e2e_client *c)
{
    int again_ms = 2, max = -1, buffer = 8 << 20;
    int timeout = c->retry_ms != 0 ? STUCK_MS : LOOK_MS;
    c->socket = nn_socket(AF_SP_RAW, NN_REQ);
    assert_true(c->socket >= 0);
    nn_setsockopt(c->socket, NN_SOL_SOCKET, NN_RCVMAXSIZE, &max, sizeof max);
    nn_setsockopt(c->socket, NN_SOL_SOCKET, NN_SNDBUF, &buffer, sizeof buffer);
    nn_setsockopt(c->socket, NN_SOL_SOCKET, NN_RCVBUF, &buffer, sizeof buffer);
    nn_setsockopt(c->socket, NN_SOL_SOCKET, NN_SNDTIMEO, &timeout, sizeof timeout);
    if (c->retry_ms != 0)
        nn_setsockopt(c->socket, NN_SOL_SOCKET, NN_RECONNECT_IVL, &again_ms, sizeof again_ms);
    assert_true(nn_connect(c->socket, c->url) >= 0);
}

void e2e_connect_badly(struct e2e_client *c, const struct e2e *d, int retry_ms)
{
    *c = (struct e2e_client){.next_id = 1, .retry_ms = retry_ms, .pid = d->pid};
    snprintf(c->url, sizeof c->url, "%s", d->url);
    open_socket(c);
    say_hello(c);
}

static void reply_free(struct e2e_reply *r)
{
    wire_arena_reset(&r->arena);
    if (r->message != NULL)
        nn_freemsg(r->message);
    free(r->aligned);
    free(r);
}

void e2e_forget(struct e2e_client *c)
{
    while (c->replies != NULL) {
        struct e2e_reply *r = c->replies;
        c->replies = r->next;
        reply_free(r);
    }
}

void e2e_disconnect(struct e2e_client *c)
{
    e2e_forget(c);
    free(c->last);
    if (c->shm != NULL) {
        shm_link_close(c->shm);
        free(c->shm);
    } else if (c->tls != NULL) {
        transport_sp_ops.close(c->tls);
    } else {
        nn_close(c->socket);
    }
}

static bool receive(struct e2e_client *c, int timeout_ms);

/* And nobody has waited for it, as a test does that ends it. */
static bool has_ended(pid_t pid)
{
    siginfo_t ended = {.si_pid = 0};
    return waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid != 0;
}

void e2e_send_bytes(struct e2e_client *c, const void *bytes, size_t n)
{
    if (c->shm != NULL) {
        assert_true(n <= c->shm->part_bytes / 2);
        while (!shm_link_send(c->shm, bytes, n))
            assert_true(receive(c, TIMEOUT_MS)); /* a slot gets free */
        return;
    }
    uint32_t id = (uint32_t)c->next_id;
    if (c->tls != NULL) {
        void *message = transport_sp_ops.message_alloc(c->tls, n, 0);
        memcpy(message, bytes, n);
        while (!transport_sp_ops.send(c->tls, id & 0x7fffffff, message, false)) {
            if (c->may_fail && has_ended(c->pid)) {
                transport_sp_ops.message_free(c->tls, message);
                c->has_failed = true;
                return;
            }
            receive(c, 10); /* it connects, or takes the rest of an earlier one */
        }
        return;
    }
    uint8_t control[NN_CMSG_SPACE(sizeof(size_t) + 4)] __attribute__((aligned(16))) = {0};
    uint8_t be[4] = {(uint8_t)(0x80 | id >> 24), (uint8_t)(id >> 16), (uint8_t)(id >> 8),
                     (uint8_t)id};
    size_t four = 4;
    struct nn_cmsghdr *cmsg = (struct nn_cmsghdr *)(void *)control;
    cmsg->cmsg_len = NN_CMSG_LEN(sizeof(size_t) + 4);
    cmsg->cmsg_level = PROTO_SP;
    cmsg->cmsg_type = SP_HDR;
    memcpy(NN_CMSG_DATA(cmsg), &four, sizeof four);
    memcpy(NN_CMSG_DATA(cmsg) + sizeof four, be, 4);
    struct nn_iovec iov = {(void *)(uintptr_t)bytes, n};
    struct nn_msghdr h = {&iov, 1, control, sizeof control};
    int flags = c->may_fail ? NN_DONTWAIT : 0, sent = nn_sendmsg(c->socket, &h, flags);
    int64_t until = now_ms() + TIMEOUT_MS;
    while (sent < 0 && nn_errno() == ETIMEDOUT &&
           (c->retry_ms != 0 || (now_ms() < until && !has_ended(c->pid)))) {
        if (c->retry_ms != 0) {
            /* after many cuts libnanomsg may end each new connection itself, right behind its
             * handshake, for good */
            nn_close(c->socket);
            open_socket(c);
        }
        sent = nn_sendmsg(c->socket, &h, flags);
    }
    c->has_failed |= sent != (int)n;
    if (c->has_failed && !c->may_fail)
        fail_msg("nn_sendmsg: %s", nn_strerror(nn_errno()));
}

uint64_t e2e_send(struct e2e_client *c, Attnd__Request *h, const void *payload,
                  size_t payload_bytes)
{
    uint64_t id = c->next_id;
    size_t head = wire_request_head_bytes(h);
    uint8_t *msg = malloc(head + payload_bytes);
    assert_non_null(msg);
    wire_request_head_encode(h, id, payload_bytes, msg);
    if (payload_bytes > 0)
        memcpy(msg + head, payload, payload_bytes);
    e2e_send_bytes(c, msg, head + payload_bytes);
    free(c->last);
    c->last = msg;
    c->last_bytes = head + payload_bytes;
    c->next_id++;
    return id;
}

/* Decodes and keeps what was received. */
static void keep_reply(struct e2e_client *c, void *message, const void *bytes, size_t n)
{
    struct e2e_reply *r = calloc(1, sizeof *r);
    char why[256];
    r->message = message;
    r->aligned = aligned_alloc(64, (n + 127) / 64 * 64);
    assert_non_null(r->aligned);
    memcpy(r->aligned, bytes, n);
    wire_arena_init(&r->arena, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    attn_status st = wire_reply_decode(r->aligned, n, &r->arena, &r->wire, why, sizeof why);
    if (st != ATTN_OK)
        fail_msg("a reply of %zu bytes does not decode: %s", n, why);
    r->next = c->replies;
    c->replies = r;
}

static bool receive_tls(struct e2e_client *c, int timeout_ms)
{
    struct client_message m;
    int64_t until = now_ms() + timeout_ms;
    while (!transport_sp_ops.recv(c->tls, &m)) {
        int64_t left = until - now_ms();
        if (left <= 0)
            return false;
        transport_sp_ops.wait(c->tls, (uint64_t)left * 1000000);
    }
    keep_reply(c, NULL, m.base, m.bytes);
    transport_sp_ops.message_free(c->tls, m.base);
    return true;
}

/* A connection that is cut between the poll and the read takes its message with it: poll again. */
static bool receive_sp(struct e2e_client *c, int timeout_ms)
{
    int64_t until = now_ms() + timeout_ms;
    for (int64_t left = timeout_ms; left >= 0; left = until - now_ms()) {
        struct nn_pollfd p = {.fd = c->socket, .events = NN_POLLIN};
        if (nn_poll(&p, 1, (int)left) <= 0)
            return false;
        uint8_t control[256] __attribute__((aligned(16)));
        void *message = NULL;
        struct nn_iovec iov = {&message, NN_MSG};
        struct nn_msghdr h = {&iov, 1, control, sizeof control};
        int n = nn_recvmsg(c->socket, &h, NN_DONTWAIT);
        if (n >= 0) {
            keep_reply(c, message, message, (size_t)n);
            return true;
        }
        if (nn_errno() != EAGAIN)
            fail_msg("nn_recvmsg: %s", nn_strerror(nn_errno()));
    }
    return false;
}

/* Takes one message off the connection. false: none within timeout_ms. */
static bool receive(struct e2e_client *c, int timeout_ms)
{
    const uint8_t *reply;
    size_t bytes;
    if (c->shm != NULL) {
        bool has_reply = shm_link_receive(c->shm, timeout_ms, &reply, &bytes);
        if (has_reply)
            keep_reply(c, NULL, reply, bytes);
        return has_reply;
    }
    if (c->tls != NULL)
        return receive_tls(c, timeout_ms);
    return receive_sp(c, timeout_ms);
}

const struct wire_reply *e2e_await_ms(struct e2e_client *c, uint64_t id, int timeout_ms)
{
    int64_t until = now_ms() + timeout_ms;
    for (;;) {
        for (struct e2e_reply *r = c->replies; r != NULL; r = r->next)
            if (r->wire.request_id == id)
                return &r->wire;
        int64_t left = until - now_ms();
        if (left < 0 || !receive(c, (int)left))
            return NULL;
    }
}

const struct wire_reply *e2e_await(struct e2e_client *c, uint64_t id)
{
    int64_t until = now_ms() + TIMEOUT_MS;
    int look_ms = c->retry_ms != 0 ? c->retry_ms : LOOK_MS;
    const struct wire_reply *r = e2e_await_ms(c, id, look_ms);
    for (; r == NULL && now_ms() < until; r = e2e_await_ms(c, id, look_ms)) {
        if (c->retry_ms != 0) {
            e2e_send_bytes(c, c->last, c->last_bytes);
            c->n_retries++;
        } else if (has_ended(c->pid)) {
            break;
        }
    }
    if (r == NULL)
        fail_msg("request %llu was not answered%s", (unsigned long long)id,
                 has_ended(c->pid) ? ": attnd has ended" : "");
    return r;
}

const struct wire_reply *e2e_reply(const struct e2e_client *c, uint64_t id, uint32_t i)
{
    const struct e2e_reply *r = c->replies;
    for (; r != NULL; r = r->next)
        if (r->wire.request_id == id && i-- == 0)
            break;
    return r == NULL ? NULL : &r->wire;
}

const Attnd__Reply *e2e_call(struct e2e_client *c, Attnd__Request *h)
{
    return e2e_await(c, e2e_send(c, h, NULL, 0))->header;
}
