/* sp_server.c: the fake engine in place of the real one's functions, the transport's loop, waiting
 * for its counters, and the raw client.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/daemon/transport/sp_server.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/address.h"
#include "daemon/base/log.h"
#include "proto/attn_time.h"
#include "tests/daemon/config_defaults.h"
#include "tests/daemon/engine/fake_host.h"

enum { PATIENCE_S = 300, LOOKS = 10 };
static const uint64_t NO_LOOKS = UINT64_MAX;

/* ---- the fake engine ---- */

static uint8_t pattern(uint64_t request_id, size_t i)
{
    return (uint8_t)((request_id + i) % 251);
}

static void answer(const struct engine *e, struct request *req)
{
    const Attnd__Request *h = req->wire.header;
    if (h->body_case != ATTND__REQUEST__BODY_STEP) {
        request_reply_error(req, ATTN_ENOTSUP, 0, "the fake engine knows steps alone");
        return;
    }
    if (e->tenant != NULL)
        snprintf(req->principal.tenant, sizeof req->principal.tenant, "%s", e->tenant);
    uint64_t wanted = h->step->seq[0];
    size_t n = wanted != 0 ? (size_t)wanted : req->wire.payload_bytes;
    Attnd__Reply reply = ATTND__REPLY__INIT;
    Attnd__StepReply step = ATTND__STEP_REPLY__INIT;
    reply.body_case = ATTND__REPLY__BODY_STEP;
    reply.step = &step;
    uint8_t *payload;
    if (request_reply_begin(req, &reply, n, &payload) != ATTN_OK) {
        request_reply_error(req, ATTN_EOVERLOAD, 1000, "no buffer for the reply");
        return;
    }
    if (wanted != 0)
        for (size_t i = 0; i < n; i++)
            payload[i] = pattern(req->wire.request_id, i);
    else
        memcpy(payload, req->wire.payload, n);
    request_reply(req, ATTN_OK);
}

void engine_submit(struct engine *e, struct request *req)
{
    /* transports must hand bodies over where a device can read them in place */
    if ((uintptr_t)req->msg->data % 64 != 0)
        abort();
    if (e->on_submit != NULL)
        e->on_submit();
    pthread_mutex_lock(&e->lock);
    e->last = req->principal;
    req->next = NULL;
    *e->tail = req;
    e->tail = &req->next;
    e->n_queued++;
    pthread_cond_broadcast(&e->wake);
    pthread_mutex_unlock(&e->lock);
}

void engine_renew(struct engine *e, uint64_t session)
{
    pthread_mutex_lock(&e->lock);
    e->renewed = session;
    pthread_mutex_unlock(&e->lock);
}

static void *engine_run(void *arg)
{
    struct engine *e = arg;
    pthread_mutex_lock(&e->lock);
    while (!e->is_stopped || e->head != NULL) {
        if (e->head == NULL || e->is_held) {
            pthread_cond_wait(&e->wake, &e->lock);
            continue;
        }
        struct request *list = e->head, *ordered = NULL;
        bool is_reversed = e->is_reversed;
        e->head = NULL;
        e->tail = &e->head;
        e->n_queued = 0;
        pthread_mutex_unlock(&e->lock);
        while (is_reversed && list != NULL) {
            struct request *req = list;
            list = req->next;
            req->next = ordered;
            ordered = req;
        }
        if (is_reversed)
            list = ordered;
        while (list != NULL) {
            struct request *req = list;
            list = req->next;
            answer(e, req);
        }
        pthread_mutex_lock(&e->lock);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

void engine_hold(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->is_held = true;
    pthread_mutex_unlock(&e->lock);
}

void engine_release(struct engine *e, bool is_reversed)
{
    pthread_mutex_lock(&e->lock);
    e->is_held = false;
    e->is_reversed = is_reversed;
    pthread_cond_broadcast(&e->wake);
    pthread_mutex_unlock(&e->lock);
}

void engine_wait_queued(struct engine *e, uint32_t n)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_S;
    pthread_mutex_lock(&e->lock);
    int rc = 0;
    while (e->n_queued < n && rc == 0)
        rc = pthread_cond_timedwait(&e->wake, &e->lock, &until);
    uint32_t n_queued = e->n_queued;
    pthread_mutex_unlock(&e->lock);
    if (rc != 0)
        fail_msg("%u of %u requests reached the engine", n_queued, n);
}

/* ---- the server ---- */

/* A loop is about to wait for what comes next, so all that it counts has been counted. */
static pthread_mutex_t turn_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turned = PTHREAD_COND_INITIALIZER;

static void tell_turn(void)
{
    pthread_mutex_lock(&turn_lock);
    pthread_cond_broadcast(&turned);
    pthread_mutex_unlock(&turn_lock);
}

static void *loop_run(void *arg)
{
    struct server *s = arg;
    uv_run(&s->loop, UV_RUN_DEFAULT);
    tell_turn();
    return NULL;
}

static void turn_close(void *turn)
{
    uv_close(turn, NULL);
}

static void on_stop(uv_async_t *async)
{
    struct server *s = async->data;
    s->t->ops->close(s->t);
    uv_close((uv_handle_t *)async, NULL);
    uv_close((uv_handle_t *)&s->drain, NULL);
    for (uint32_t i = 0; i < loops_count(s->loops); i++)
        loop_call(loops_at(s->loops, i), turn_close, &s->turn[i]);
}

static _Thread_local uint64_t n_looks; /* of this thread */

static void find_timer(uv_handle_t *h, void *out_has)
{
    if (h->type == UV_TIMER && uv_is_active(h))
        *(bool *)out_has = true;
}

static void on_turn(uv_prepare_t *turn)
{
    struct server *s = turn->data;
    bool has_timer = false;
    uv_walk(turn->loop, find_timer, &has_timer);
    atomic_store(&s->n_looks[turn - s->turn], has_timer ? n_looks : NO_LOOKS);
    atomic_fetch_add(&s->n_turns, 1);
    tell_turn();
}

static bool is_at(const _Atomic uint64_t *counter, uint64_t value, bool is_exact)
{
    uint64_t v = atomic_load(counter);
    return is_exact ? v == value : v >= value;
}

static void turn_open(void *arg)
{
    uv_prepare_t *turn = arg;
    struct server *s = turn->data;
    assert_int_equal(uv_prepare_init(loops_at(s->loops, (uint32_t)(turn - s->turn))->uv, turn), 0);
    uv_prepare_start(turn, on_turn);
}

uint32_t server_loops(void)
{
    const char *n = getenv("ATTND_LISTEN_THREADS");
    return n == NULL ? 1 : (uint32_t)strtoul(n, NULL, 10);
}

/* Counters are the loops': they change in their turns alone. */
static bool await_counter(const _Atomic uint64_t *counter, uint64_t value, bool is_exact)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_S;
    pthread_mutex_lock(&turn_lock);
    bool is_there;
    int rc = 0;
    while (!(is_there = is_at(counter, value, is_exact)) && rc == 0)
        rc = pthread_cond_timedwait(&turned, &turn_lock, &until);
    pthread_mutex_unlock(&turn_lock);
    return is_there;
}

void server_look(void)
{
    n_looks++;
}

void server_wait_for_looks(struct server *s)
{
    for (uint32_t i = 0; i < loops_count(s->loops); i++) {
        uint64_t n = atomic_load(&s->n_looks[i]);
        wait_at_least(&s->n_looks[i], n < NO_LOOKS - LOOKS ? n + LOOKS : n);
    }
}

static void on_drain(uv_async_t *async)
{
    struct server *s = async->data;
    s->t->ops->stop(s->t);
}

void server_drain(struct server *s)
{
    uint64_t until_ns = attn_now_ns() + PATIENCE_S * 1000000000ull;
    struct address a;
    char why[256];
    assert_int_equal(address_parse_url(s->url, &a, why, sizeof(why)), ATTN_OK);
    uv_async_send(&s->drain);
    while (attn_now_ns() < until_ns) {
        uint64_t n_turns = atomic_load(&s->n_turns);
        int fd = socket(a.sa.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        socklen_t n = a.sa.any.sa_family == AF_UNIX ? sizeof(a.sa.un) : sizeof(a.sa.in);
        int rc = connect(fd, &a.sa.any, n);
        close(fd);
        if (rc != 0)
            return;
        await_counter(&s->n_turns, n_turns + 1, false); /* it has not shut them yet */
    }
    fail_msg("%s still listens", s->url);
}

void server_init(struct server *s)
{
    memset(s, 0, sizeof(*s));
    config_defaults(&s->cfg);
    s->cfg.io_memory_bytes = 64 << 20;
    s->cfg.max_message_bytes = 16 << 20;
    log_init(LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    pthread_mutex_init(&s->engine.lock, NULL);
    pthread_cond_init(&s->engine.wake, NULL);
    s->engine.tail = &s->engine.head;
}

void server_start(struct server *s, const char *url)
{
    char why[512] = "";
    static int n_started;
    if (strcmp(url, "ipc") == 0)
        snprintf(s->url, sizeof(s->url), "ipc:///tmp/attnd_test_%ld_%d.sock", (long)getpid(),
                 n_started++);
    else if (strcmp(url, "tls") == 0)
        snprintf(s->url, sizeof(s->url), "tls+tcp://127.0.0.1:0");
    else if (strcmp(url, "tcp") == 0)
        snprintf(s->url, sizeof(s->url), "tcp://127.0.0.1:0");
    else
        snprintf(s->url, sizeof(s->url), "%s", url);
    assert_int_equal(iobuf_pool_open(&fake_host, NULL, s->cfg.io_memory_bytes, &s->bufs), ATTN_OK);
    assert_int_equal(uv_loop_init(&s->loop), 0);
    assert_int_equal(uv_async_init(&s->loop, &s->stop, on_stop), 0);
    assert_int_equal(uv_async_init(&s->loop, &s->drain, on_drain), 0);
    assert_int_equal(loops_open(&s->loop, server_loops(), &s->loops), ATTN_OK);
    for (uint32_t i = 0; i < loops_count(s->loops); i++) {
        s->turn[i].data = s;
        loop_call(loops_at(s->loops, i), turn_open, &s->turn[i]);
    }
    s->stop.data = s;
    s->drain.data = s;
    s->shares = share_table_open(s->cfg.peer_share, s->cfg.principal_share);
    assert_non_null(s->shares);
    s->env = (struct transport_env){.loop = &s->loop,
                                    .loops = s->loops,
                                    .cfg = &s->cfg,
                                    .engine = &s->engine,
                                    .bufs = s->bufs,
                                    .shares = s->shares};
    const struct transport_ops *ops = strncmp(s->url, "ipc", 3) == 0   ? &transport_ipc_ops
                                      : strncmp(s->url, "tls", 3) == 0 ? &transport_tls_ops
                                                                       : &transport_tcp_ops;
    if (ops->open(&s->env, s->url, &s->t, why, sizeof(why)) != ATTN_OK)
        fail_msg("%s", why);
    assert_ptr_equal(s->t->ops, ops);
    snprintf(s->url, sizeof(s->url), "%s", ops->url(s->t));
    assert_int_equal(pthread_create(&s->engine.thread, NULL, engine_run, &s->engine), 0);
    assert_int_equal(pthread_create(&s->thread, NULL, loop_run, s), 0);
}

void server_stop(struct server *s)
{
    engine_release(&s->engine, false);
    uv_async_send(&s->stop);
    pthread_join(s->thread, NULL);
    pthread_mutex_lock(&s->engine.lock);
    s->engine.is_stopped = true;
    pthread_cond_broadcast(&s->engine.wake);
    pthread_mutex_unlock(&s->engine.lock);
    pthread_join(s->engine.thread, NULL);
    loops_close(s->loops);
    assert_int_equal(uv_loop_close(&s->loop), 0);
    struct iobuf *all = iobuf_acquire(s->bufs, NULL, s->cfg.io_memory_bytes);
    assert_non_null(all); /* every buffer came back */
    iobuf_release(all);
    iobuf_pool_close(s->bufs);
    share_table_close(s->shares);
    config_fini(&s->cfg);
    assert_int_equal(s->env.n_peers, 0);
    assert_int_equal(stats_get(peers), 0);
    assert_int_equal(stats_get(steps_in_flight), 0);
}

void wait_at_least(const _Atomic uint64_t *counter, uint64_t value)
{
    if (!await_counter(counter, value, false))
        fail_msg("counter stays at %llu, not %llu", (unsigned long long)atomic_load(counter),
                 (unsigned long long)value);
}

void wait_equal(const _Atomic uint64_t *counter, uint64_t value)
{
    if (!await_counter(counter, value, true))
        fail_msg("counter stays at %llu, not %llu", (unsigned long long)atomic_load(counter),
                 (unsigned long long)value);
}

/* ---- messages ---- */

uint8_t *step_message(uint64_t request_id, uint32_t reply_bytes, const void *payload,
                      uint32_t payload_bytes, size_t *out_bytes)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Step step = ATTND__STEP__INIT;
    uint64_t seq = reply_bytes;
    uint32_t one = 1, zero = 0;
    h.session = STEP_SESSION;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &step;
    step.flags = WIRE_STEP_ATTEND;
    step.dtype = ATTND__DTYPE__F32;
    step.seq = &seq;
    step.epoch = &one;
    step.pos = &zero;
    step.n_tokens = &one;
    step.n_seq = step.n_epoch = step.n_pos = step.n_n_tokens = 1;
    size_t head = wire_request_head_bytes(&h);
    uint8_t *msg = aligned_alloc(64, (head + payload_bytes + 63) / 64 * 64);
    assert_non_null(msg);
    wire_request_head_encode(&h, request_id, payload_bytes, msg);
    if (payload_bytes > 0)
        memcpy(msg + head, payload, payload_bytes);
    *out_bytes = head + payload_bytes;
    return msg;
}

static void decode_reply(const uint8_t *msg, size_t n, struct wire_arena *arena,
                         struct wire_reply *out, uint8_t **out_copy)
{
    char why[256] = "";
    uint8_t *copy = aligned_alloc(64, (n + 64) / 64 * 64);
    memcpy(copy, msg, n);
    wire_arena_init(arena, NULL, 0, 1 << 20);
    if (wire_reply_decode(copy, n, arena, out, why, sizeof(why)) != ATTN_OK)
        fail_msg("reply of %zu bytes does not decode: %s", n, why);
    *out_copy = copy;
}

void check_step_reply(uint8_t *msg, size_t n, uint64_t request_id, uint32_t reply_bytes,
                      const void *payload, uint32_t payload_bytes)
{
    struct wire_arena arena;
    struct wire_reply r;
    uint8_t *copy;
    decode_reply(msg, n, &arena, &r, &copy);
    assert_int_equal(r.request_id, request_id);
    if (r.header->status != ATTN_OK)
        fail_msg("%s: %s", attn_status_name(r.header->status), r.header->message);
    assert_int_equal(r.payload_bytes, reply_bytes != 0 ? reply_bytes : payload_bytes);
    if (reply_bytes == 0) {
        if (payload_bytes > 0)
            assert_memory_equal(r.payload, payload, payload_bytes);
    } else {
        for (size_t i = 0; i < reply_bytes; i++)
            if (r.payload[i] != pattern(request_id, i))
                fail_msg("reply %llu: byte %zu is wrong", (unsigned long long)request_id, i);
    }
    wire_arena_reset(&arena);
    free(copy);
}

void check_error_reply(uint8_t *msg, size_t n, uint64_t request_id, attn_status st,
                       const char *sentence_part)
{
    struct wire_arena arena;
    struct wire_reply r;
    uint8_t *copy;
    decode_reply(msg, n, &arena, &r, &copy);
    assert_int_equal(r.request_id, request_id);
    assert_int_equal(r.header->status, st);
    if (strstr(r.header->message, sentence_part) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", r.header->message, sentence_part);
    wire_arena_reset(&arena);
    free(copy);
}

/* ---- a raw client ---- */

void raw_connect_with(int fd, const char *url)
{
    struct address a;
    char why[256] = "";
    if (address_parse_url(url, &a, why, sizeof(why)) != ATTN_OK)
        fail_msg("%s", why);
    struct timeval patience = {.tv_sec = PATIENCE_S};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    socklen_t n = a.sa.any.sa_family == AF_UNIX ? sizeof(a.sa.un) : sizeof(a.sa.in);
    while (connect(fd, &a.sa.any, n) != 0 && errno != EISCONN) /* a fuzzer has an alarm */
        if (errno != EINTR)
            fail_msg("connect %s: %s", url, strerror(errno));
}

int raw_connect(const char *url)
{
    int fd = socket(strncmp(url, "ipc", 3) == 0 ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    raw_connect_with(fd, url);
    return fd;
}

void raw_send(int fd, const void *bytes, size_t n)
{
    for (size_t at = 0; at < n;) {
        ssize_t k = send(fd, (const uint8_t *)bytes + at, n - at, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            fail_msg("send: %s", strerror(errno));
        at += (size_t)k;
    }
}

bool raw_receive(int fd, void *bytes, size_t n)
{
    for (size_t at = 0; at < n;) {
        ssize_t k = recv(fd, (uint8_t *)bytes + at, n - at, 0);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            fail_msg("nothing came for %d s", PATIENCE_S);
        if (k <= 0)
            return false;
        at += (size_t)k;
    }
    return true;
}

void raw_handshake(int fd)
{
    static const uint8_t ours[8] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
    static const uint8_t theirs[8] = {0, 'S', 'P', 0, 0, 0x31, 0, 0};
    uint8_t got[8];
    raw_send(fd, ours, 8);
    assert_true(raw_receive(fd, got, 8));
    assert_memory_equal(got, theirs, 8);
}

static size_t put_length(uint8_t *head, bool is_ipc, uint64_t length)
{
    size_t at = 0;
    if (is_ipc)
        head[at++] = 1;
    for (int shift = 56; shift >= 0; shift -= 8)
        head[at++] = (uint8_t)(length >> shift);
    return at;
}

static size_t put_id(uint8_t *p, uint32_t id)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(id >> (24 - 8 * i));
    return 4;
}

void raw_send_message(int fd, bool is_ipc, uint32_t n_ids, uint32_t id, const void *body, size_t n)
{
    uint8_t *bytes = malloc(9 + 4 * (size_t)n_ids + n);
    assert_non_null(bytes);
    size_t at = put_length(bytes, is_ipc, n + 4 * (uint64_t)n_ids);
    for (uint32_t i = 1; i < n_ids; i++)
        at += put_id(bytes + at, i);
    at += put_id(bytes + at, id | 0x80000000u);
    if (n > 0)
        memcpy(bytes + at, body, n);
    raw_send(fd, bytes, at + n);
    free(bytes);
}

uint8_t *raw_receive_message(int fd, bool is_ipc, uint32_t n_ids, uint32_t *out_id, size_t *out_n)
{
    uint8_t head[9], word[4];
    size_t k = is_ipc ? 9 : 8;
    if (!raw_receive(fd, head, k))
        return NULL;
    if (is_ipc)
        assert_int_equal(head[0], 1);
    uint64_t length = 0;
    for (size_t i = k - 8; i < k; i++)
        length = length << 8 | head[i];
    assert_true(length >= 4 * (uint64_t)n_ids && length < 1u << 30);
    for (uint32_t i = 1; i <= n_ids; i++) {
        if (!raw_receive(fd, word, 4))
            return NULL;
        uint32_t id =
            (uint32_t)word[0] << 24 | (uint32_t)word[1] << 16 | (uint32_t)word[2] << 8 | word[3];
        if (i < n_ids)
            assert_int_equal(id, i);
        else
            *out_id = id & 0x7fffffffu;
        assert_int_equal(id >> 31, i == n_ids);
    }
    *out_n = (size_t)(length - 4 * (uint64_t)n_ids);
    uint8_t *body = malloc(*out_n + 1);
    assert_non_null(body);
    if (!raw_receive(fd, body, *out_n)) {
        free(body);
        return NULL;
    }
    return body;
}

void raw_expect_end(int fd)
{
    uint8_t byte[4096];
    while (raw_receive(fd, byte, 1))
        continue;
}

uint64_t seed_from_clock(void)
{
    uint64_t seed = (uint64_t)time(NULL) * 2654435761u | 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    return seed;
}
