/* test_request.c: a request's deadlines, replies and counts; and the log's one line a message. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/address.h"
#include "daemon/base/clock.h"
#include "daemon/base/journal.h"
#include "daemon/base/log.h"
#include "daemon/base/slow.h"
#include "daemon/request/request.h"
#include "daemon/transport/transport.h"
#include "proto/wire_codes.h"
#include "tests/daemon/engine/fake_host.h"
#include "tests/random.h"

static struct request *replied;

static void take_reply(struct request *req)
{
    assert_null(replied);
    replied = req;
}

static const struct transport_ops fake_transport = {.label = STATS_SHM, .reply = take_reply};

static struct iobuf_pool *pool;

static int setup(void **state)
{
    (void)state;
    memset(&stats, 0, sizeof(stats));
    replied = NULL;
    return iobuf_pool_open(&fake_host, NULL, 64 << 10, &pool) == ATTN_OK ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    request_free(replied);
    iobuf_pool_close(pool);
    return 0;
}

/* A decoded request: a step of one item, or stats. */
static struct request *request_of(bool is_step, uint64_t timeout_us, uint64_t now_ns)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Step step = ATTND__STEP__INIT;
    Attnd__Stats query = ATTND__STATS__INIT;
    uint64_t seq = 1;
    uint32_t one = 1, zero = 0;
    char why[256] = "";
    h.timeout_us = timeout_us;
    if (is_step) {
        h.body_case = ATTND__REQUEST__BODY_STEP;
        h.step = &step;
        step.flags = WIRE_STEP_ATTEND;
        step.dtype = ATTND__DTYPE__F32;
        step.seq = &seq;
        step.epoch = &one;
        step.pos = &zero;
        step.n_tokens = &one;
        step.n_seq = step.n_epoch = step.n_pos = step.n_n_tokens = 1;
    } else {
        h.body_case = ATTND__REQUEST__BODY_STATS;
        h.stats = &query;
    }
    size_t n = wire_request_head_bytes(&h);
    struct request *req = request_new(&fake_transport, NULL, NULL, pool, n);
    assert_non_null(req);
    wire_request_head_encode(&h, 77, 0, req->msg->data);
    if (request_decode(req, now_ns, 1000, 5000, 64 << 10, why, sizeof(why)) != ATTN_OK)
        fail_msg("%s", why);
    return req;
}

static void decode_reply(struct wire_arena *arena, struct wire_reply *out)
{
    char why[256] = "";
    assert_non_null(replied);
    assert_non_null(replied->reply);
    wire_arena_init(arena, NULL, 0, 1 << 20);
    struct iobuf *r = replied->reply;
    if (wire_reply_decode(r->data + r->offset, r->n_bytes, arena, out, why, sizeof(why)) != ATTN_OK)
        fail_msg("%s", why);
}

static void a_deadline_is_the_default_the_clients_or_the_longest_allowed(void **state)
{
    (void)state;
    static const struct {
        uint64_t timeout_us, expected_us;
    } cases[] = {{0, 1000}, {1, 1}, {999, 999}, {5000, 5000}, {5001, 5000}, {UINT64_MAX, 5000}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct request *req = request_of(true, cases[i].timeout_us, 123456789);
        assert_int_equal(req->received_ns, 123456789);
        assert_int_equal(req->deadline_ns, 123456789 + cases[i].expected_us * 1000);
        request_reply_error(req, ATTN_EDEADLINE, 0, "late");
        request_free(replied);
        replied = NULL;
    }
}

/* A header of many ids, which are a byte each in the message and four when it is unpacked. */
static struct request *open_of(uint32_t n_ids, struct share *share)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Open open = ATTND__OPEN__INIT;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &open;
    open.seq = 1;
    open.n_tokens = n_ids;
    open.tokens = calloc(n_ids, sizeof *open.tokens);
    size_t n = wire_request_head_bytes(&h);
    struct request *req = request_new(&fake_transport, NULL, share, pool, n);
    assert_non_null(req);
    wire_request_head_encode(&h, 78, 0, req->msg->data);
    free(open.tokens);
    return req;
}

static void a_large_header_is_unpacked_into_what_its_connection_may_hold(void **state)
{
    (void)state;
    char why[256] = "";
    struct principal who = {.kind = PRINCIPAL_USER, .uid = 7};
    struct share_table *table = share_table_open(100, 100);
    struct share *share = share_open(table, &who);
    struct request *req = open_of(5000, share);
    uint64_t message = share_held(share, SHARE_SMALL_BYTES);
    assert_int_equal(request_decode(req, 1, 1000, 5000, 64 << 10, why, sizeof why), ATTN_OK);
    assert_int_equal(req->wire.header->open->n_tokens, 5000);
    assert_true(share_held(share, SHARE_SMALL_BYTES) >= message + 5000 * sizeof(uint32_t));
    request_reply_error(req, ATTN_EINVAL, 0, "no");
    request_free(replied);
    replied = NULL;
    assert_int_equal(share_held(share, SHARE_SMALL_BYTES), 0);
    /* the pool has 64 KiB */
    uint64_t malformed = stats_get(messages_malformed);
    req = open_of(20000, share);
    assert_int_equal(request_decode(req, 1, 1000, 5000, 64 << 10, why, sizeof why), ATTN_EOVERLOAD);
    assert_non_null(strstr(why, "cache.io_memory"));
    assert_int_equal(req->wire.request_id, 78);
    assert_int_equal(stats_get(messages_malformed), malformed);
    request_reply_error(req, ATTN_EOVERLOAD, 0, "%s", why);
    request_free(replied);
    replied = NULL;
    assert_int_equal(share_held(share, SHARE_SMALL_BYTES), 0);
    share_unref(share);
    share_table_close(table);
}

/* A step whose payload is n_bytes of codes, each group's scale 1. */
static struct request *codes_of(size_t n_bytes, uint32_t flags)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Step step = ATTND__STEP__INIT;
    uint64_t seq = 0x1122334455667788;
    uint32_t epoch = 300, pos = 70000, one = 1;
    const float scale = 1;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &step;
    step.flags = flags;
    step.dtype = ATTND__DTYPE__FP8_E4M3;
    step.n_indices = flags & WIRE_STEP_SPARSE ? 1 : 0;
    step.seq = &seq;
    step.epoch = &epoch;
    step.pos = &pos;
    step.n_tokens = &one;
    step.n_seq = step.n_epoch = step.n_pos = step.n_n_tokens = 1;
    size_t head = wire_request_head_bytes(&h);
    struct request *req = request_new(&fake_transport, NULL, NULL, pool, head + n_bytes);
    assert_non_null(req);
    wire_request_head_encode(&h, 79, n_bytes, req->msg->data);
    uint8_t *payload = req->msg->data + head;
    for (size_t i = 0; i < n_bytes; i++)
        payload[i] = (uint8_t)(i % 0x7f);
    for (size_t at = 0; at + sizeof scale <= n_bytes; at += WIRE_CODES_GROUP + sizeof scale)
        memcpy(payload + at, &scale, sizeof scale);
    return req;
}

static void codes_become_bf16_in_a_buffer_of_their_own(void **state)
{
    (void)state;
    enum { N = 3 * WIRE_CODES_GROUP + 17 };
    char why[256] = "";
    uint16_t want[N];
    struct request *req = codes_of(wire_codes_bytes(N), WIRE_STEP_ATTEND);
    wire_codes_get(req->msg->data + req->msg->n_bytes - wire_codes_bytes(N), N, want);
    struct iobuf *coded = req->msg;
    assert_int_equal(request_decode(req, 1, 1000, 5000, 64 << 10, why, sizeof why), ATTN_OK);
    assert_ptr_not_equal(req->msg, coded);
    assert_int_equal(req->wire.payload_bytes, sizeof want);
    assert_ptr_equal(req->wire.payload + sizeof want, req->msg->data + req->msg->n_bytes);
    assert_int_equal((uintptr_t)req->wire.payload % WIRE_ALIGN, 0);
    assert_memory_equal(req->wire.payload, want, sizeof want);
    const Attnd__Step *step = req->wire.header->step;
    assert_int_equal(step->dtype, ATTND__DTYPE__BF16);
    assert_true(req->is_widened);
    assert_int_equal(step->seq[0], 0x1122334455667788); /* not in what was given back */
    assert_int_equal(step->epoch[0], 300);
    assert_int_equal(step->pos[0], 70000);
    request_reply_error(req, ATTN_EINVAL, 0, "no");
}

static void codes_that_are_none_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        size_t n_bytes;
        uint32_t flags;
        attn_status status;
        const char *why;
    } cases[] = {
        {132 + 4, WIRE_STEP_ATTEND, ATTN_EINVAL,
         "payload bytes are 136 and step.dtype is fp8_e4m3"},
        {2, WIRE_STEP_ATTEND, ATTN_EINVAL, "payload bytes are 2 and"},
        {132, WIRE_STEP_ATTEND | WIRE_STEP_SPARSE, ATTN_EINVAL, "flag sparse 32"},
        {132 * 260, WIRE_STEP_ATTEND, ATTN_EINVAL, /* 33 KiB, of 65 KiB in bf16 */
         "bytes, over the limit of 65536 (listen.max_message)"},
        {20000, WIRE_STEP_ATTEND, ATTN_EOVERLOAD, "cache.io_memory"}, /* the pool has 64 KiB */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char why[256] = "";
        struct iobuf *other =
            cases[i].n_bytes == 20000 ? iobuf_acquire(pool, NULL, 16 << 10) : NULL;
        struct request *req = codes_of(cases[i].n_bytes, cases[i].flags);
        if (request_decode(req, 1, 1000, 5000, 64 << 10, why, sizeof why) != cases[i].status)
            fail_msg("%zu: %s", i, why);
        if (strstr(why, cases[i].why) == NULL)
            fail_msg("%s", why);
        assert_null(req->wire.header);
        assert_int_equal(req->wire.request_id, 79);
        request_reply_error(req, cases[i].status, 0, "%s", why);
        request_free(replied);
        replied = NULL;
        iobuf_release(other);
    }
    struct request *req = codes_of(0, WIRE_STEP_ATTEND); /* no elements: the layout refuses it */
    char why[256] = "";
    assert_int_equal(request_decode(req, 1, 1000, 5000, 64 << 10, why, sizeof why), ATTN_OK);
    assert_int_equal(req->wire.payload_bytes, 0);
    request_reply_error(req, ATTN_EINVAL, 0, "no");
}

static void a_reply_has_its_payload_where_it_was_promised(void **state)
{
    (void)state;
    struct request *req = request_of(true, 0, clock_now_ns());
    Attnd__Reply h = ATTND__REPLY__INIT;
    Attnd__StepReply step = ATTND__STEP_REPLY__INIT;
    uint8_t *payload;
    h.body_case = ATTND__REPLY__BODY_STEP;
    h.step = &step;
    assert_int_equal(request_reply_begin(req, &h, 5000, &payload), ATTN_OK);
    assert_int_equal((uintptr_t)payload % WIRE_ALIGN, 0);
    assert_int_equal(request_reply_begin(req, &h, 100, &payload), ATTN_OK); /* again, smaller */
    memset(payload, 0xa5, 100);
    request_reply(req, ATTN_OK);
    struct wire_arena arena;
    struct wire_reply r;
    decode_reply(&arena, &r);
    assert_int_equal(r.request_id, 77);
    assert_int_equal(r.payload_bytes, 100);
    for (int i = 0; i < 100; i++)
        assert_int_equal(r.payload[i], 0xa5);
    wire_arena_reset(&arena);
}

static void an_error_is_answered_without_a_free_buffer(void **state)
{
    (void)state;
    struct request *req = request_of(true, 0, clock_now_ns());
    struct iobuf *taken[16];
    int n = 0;
    while ((taken[n] = iobuf_acquire(pool, NULL, 1)) != NULL)
        n++;
    Attnd__Reply h = ATTND__REPLY__INIT;
    uint8_t *payload;
    assert_int_equal(request_reply_begin(req, &h, 0, &payload), ATTN_EOVERLOAD);
    request_reply_error(req, ATTN_EOVERLOAD, 2500, "queue of %d requests is full", 9);
    struct wire_arena arena;
    struct wire_reply r;
    decode_reply(&arena, &r);
    assert_int_equal(r.request_id, 77);
    assert_int_equal(r.header->status, ATTN_EOVERLOAD);
    assert_string_equal(r.header->message, "queue of 9 requests is full");
    assert_int_equal(r.header->retry_after_us, 2500);
    wire_arena_reset(&arena);
    while (n > 0)
        iobuf_release(taken[--n]);
}

static void the_longest_sentence_is_cut_and_stays_text(void **state)
{
    (void)state;
    char text[4000];
    memset(text, 'x', sizeof(text));
    text[0] = (char)0xff;
    text[1] = '\n';
    text[sizeof(text) - 1] = '\0';
    struct request *req = request_new(&fake_transport, NULL, NULL, NULL, 0); /* from the heap */
    request_reply_error(req, ATTN_EPROTO, UINT64_MAX, "%s", text);
    struct wire_arena arena;
    struct wire_reply r;
    decode_reply(&arena, &r);
    assert_int_equal(r.request_id, 0);
    assert_memory_equal(r.header->message, "??xxx", 5);
    assert_true(strlen(r.header->message) > 400);
    wire_arena_reset(&arena);
}

static void a_large_message_that_is_refused_gives_its_buffer_back(void **state)
{
    (void)state;
    struct iobuf_pool *large;
    assert_int_equal(iobuf_pool_open(&fake_host, NULL, 128 << 10, &large), ATTN_OK);
    struct request *req =
        request_new(&fake_transport, NULL, NULL, large, REQUEST_MAX_REUSED_BYTES + 1);
    assert_non_null(req);
    request_reply_error(req, ATTN_EOVERLOAD, 1, "too much");
    assert_ptr_equal(replied, req);
    assert_null(replied->msg); /* while its answer waits to be written */
    assert_null(replied->reply->pool);
    struct wire_arena arena;
    struct wire_reply r;
    decode_reply(&arena, &r);
    assert_string_equal(r.header->message, "too much");
    wire_arena_reset(&arena);
    iobuf_pool_close(large); /* nothing of it is out */
}

static void a_request_that_does_not_decode_counts_as_malformed_alone(void **state)
{
    (void)state;
    char why[256] = "";
    struct request *req = request_new(&fake_transport, NULL, NULL, pool, 30);
    memset(req->msg->data, 0x11, 30);
    assert_int_equal(request_decode(req, 5, 1, 1, 64 << 10, why, sizeof(why)), ATTN_EPROTO);
    assert_true(strlen(why) > 10);
    assert_int_equal(stats_get(messages_malformed), 1);
    assert_int_equal(stats_get(requests_received), 0);
    request_reply_error(req, ATTN_EPROTO, 0, "%s", why);
    assert_int_equal(atomic_load(&stats.steps_answered[-ATTN_EPROTO]), 0);
}

static void steps_received_are_answered_or_in_flight(void **state)
{
    (void)state;
    struct request *a = request_of(true, 0, clock_now_ns());
    struct request *b = request_of(true, 0, clock_now_ns());
    struct request *c = request_of(false, 0, clock_now_ns());
    assert_int_equal(stats_get(requests_received), 3);
    assert_int_equal(stats_get(steps_received), 2);
    assert_int_equal(stats_get(steps_in_flight), 2);
    request_reply_error(a, ATTN_ENOTFOUND, 0, "no");
    request_free(replied);
    replied = NULL;
    assert_int_equal(stats_get(steps_in_flight), 1);
    Attnd__Reply h = ATTND__REPLY__INIT;
    uint8_t *payload;
    b->batched_ns = b->received_ns + 7000;
    b->device_ns = 3000;
    assert_int_equal(request_reply_begin(b, &h, 0, &payload), ATTN_OK);
    request_reply(b, ATTN_OK);
    request_free(replied);
    replied = NULL;
    request_reply_error(c, ATTN_ENOTSUP, 0, "no");
    assert_int_equal(stats_get(steps_in_flight), 0);
    uint64_t n_answered = 0;
    for (int i = 0; i < STATS_N_STATUS; i++)
        n_answered += atomic_load(&stats.steps_answered[i]);
    assert_int_equal(n_answered, 2);
    assert_int_equal(atomic_load(&stats.steps_answered[0]), 1);
    assert_int_equal(atomic_load(&stats.steps_answered[-ATTN_ENOTFOUND]), 1);
    assert_int_equal(atomic_load(&stats.time[STATS_SHM][STATS_QUEUE].sum_ns), 7000);
    assert_int_equal(atomic_load(&stats.time[STATS_SHM][STATS_DEVICE].sum_ns), 3000);
}

static uint64_t given_ns;
static uint64_t given_now(void)
{
    return given_ns;
}

/* A step that was begun at 1000 and has some of the later moments, each 10 to 99 after the last. */
static uint64_t seed = 1;

static struct request *step_with_moments(uint32_t which, uint64_t *out_end_ns)
{
    struct request *req = request_of(true, 0, 1000);
    uint64_t *moments[] = {&req->taken_ns, &req->batched_ns, &req->done_ns, &req->replied_ns};
    uint64_t at = 1000;
    req->began_ns = which & 1 ? 900 : 0;
    for (size_t i = 0; i < sizeof moments / sizeof moments[0]; i++)
        if (which & 2u << i)
            *moments[i] = at += 10 + random_below(&seed, 90);
    *out_end_ns = at;
    return req;
}

static void stages_add_up_to_the_total_whatever_a_step_went_through(void **state)
{
    (void)state;
    for (uint32_t which = 0; which < 32; which++)
        for (uint64_t device_ns = 0; device_ns <= 1000; device_ns += 50) {
            uint64_t end_ns, ns[STAGE_N], sum = 0;
            struct request *req = step_with_moments(which, &end_ns);
            req->device_ns = device_ns;
            memset(ns, 0xff, sizeof ns);
            request_stages(req, end_ns + 7, ns);
            for (int s = 0; s < STAGE_N; s++)
                sum += ns[s];
            assert_int_equal(sum, end_ns + 7 - (which & 1 ? 900 : 1000));
            assert_int_equal(ns[STAGE_RECEIVE], which & 1 ? 100 : 0);
            uint64_t in_flight_ns = ns[STAGE_DEVICE] + ns[STAGE_LAUNCH];
            if ((which & 12) == 12) /* launched and back */
                assert_int_equal(in_flight_ns, req->done_ns - req->batched_ns);
            if ((which & 12) == 12 && device_ns < in_flight_ns)
                assert_int_equal(ns[STAGE_DEVICE], device_ns);
            request_reply_error(req, ATTN_ENOTFOUND, 0, "no");
            request_free(replied);
            replied = NULL;
        }
}

static void slow_steps_are_kept_with_their_stages_and_the_latest_stay(void **state)
{
    (void)state;
    static struct slow_step kept[SLOW_MAX];
    uint64_t end_ns, ns[STAGE_N];
    log_init(LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    clock_use(given_now);
    slow_set_threshold_ns(5000);
    uint32_t n_before = slow_read(kept);
    assert_int_equal(n_before, 0);
    for (uint64_t i = 0; i < SLOW_MAX + 5; i++) {
        struct request *req = step_with_moments(31, &end_ns);
        given_ns = 900 + 5000 + i;
        request_stages(req, given_ns, ns);
        req->status = ATTN_ENOBLOCKS;
        request_sent(req);
        given_ns = 900 + 4999; /* as long as a step that is not slow */
        request_sent(req);
        request_free(req);
    }
    clock_use(NULL);
    slow_set_threshold_ns(0);
    assert_false(slow_is(UINT64_MAX));
    log_init(LOG_LEVEL_INFO, LOG_FORMAT_LOGFMT);
    assert_int_equal(slow_read(kept), SLOW_MAX);
    assert_int_equal(stats_get(steps_slow), SLOW_MAX + 5);
    for (uint32_t i = 0; i < SLOW_MAX; i++) {
        uint64_t total = 0;
        for (int s = 0; s < STAGE_N; s++)
            total += kept[i].stage_ns[s];
        assert_int_equal(kept[i].number, i + 6);
        assert_int_equal(total, 5000 + i + 5);
    }
    assert_memory_equal(kept[SLOW_MAX - 1].stage_ns, ns, sizeof ns);
    assert_int_equal(kept[0].status, ATTN_ENOBLOCKS);
    assert_string_equal(kept[0].transport, "shm");
    uint64_t n = 0;
    for (int b = 0; b < STATS_BUCKETS; b++)
        n += atomic_load(&stats.stage[STAGE_SEND].bucket[b]);
    assert_int_equal(n, 2 * (SLOW_MAX + 5));
}

static void every_address_has_a_transport(void **state)
{
    (void)state;
    static const struct {
        const char *url;
        enum stats_transport label;
    } cases[] = {{"ipc:///run/a.sock", STATS_IPC},
                 {"tcp://[::1]:5555", STATS_TCP},
                 {"shm:///run/a.shm", STATS_SHM}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct address a;
        char why[256];
        assert_int_equal(address_parse_url(cases[i].url, &a, why, sizeof(why)), ATTN_OK);
        const struct transport_ops *ops = transport_find(cases[i].url);
        assert_non_null(ops);
        assert_int_equal(ops->label, cases[i].label);
        assert_memory_equal(ops->scheme, cases[i].url, strlen(ops->scheme));
    }
    assert_null(transport_find("udp://127.0.0.1:1"));
    assert_null(transport_find("ipc:/"));
    assert_null(transport_find(""));
}

static void a_principal_has_a_name_for_the_log(void **state)
{
    (void)state;
    static const struct {
        struct principal who;
        const char *text;
    } cases[] = {
        {{.kind = PRINCIPAL_USER, .family = AF_UNIX, .uid = 1, .gid = 2, .pid = 3},
         "uid 1, gid 2, pid 3"},
        {{.kind = PRINCIPAL_USER, .uid = UINT32_MAX, .gid = UINT32_MAX, .pid = INT32_MAX},
         "uid 4294967295, gid 4294967295, pid 2147483647"},
        {{.kind = PRINCIPAL_ANONYMOUS,
          .family = AF_INET,
          .host = {[10] = 0xff, [11] = 0xff, 10, 1, 2, 3}},
         "anonymous over IPv4 from 10.1.2.3"},
        {{.kind = PRINCIPAL_ANONYMOUS, .family = AF_INET6, .host = {0xfd, [15] = 7}},
         "anonymous over IPv6 from fd00::7"},
        {{.kind = PRINCIPAL_UNKNOWN}, "unknown"},
    };
    char text[PRINCIPAL_TEXT_BYTES];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_string_equal(principal_format(&cases[i].who, text), cases[i].text);
    struct request *req = request_new(&fake_transport, NULL, NULL, pool, 0);
    assert_int_equal(req->principal.kind, PRINCIPAL_UNKNOWN);
    request_free(req);
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    struct principal who = principal_of_socket(fds[0]);
    assert_true(who.kind == PRINCIPAL_USER && who.uid == geteuid() && who.pid == getpid());
    close(fds[0]);
    close(fds[1]);
    assert_int_equal(principal_of_socket(fds[0]).kind, PRINCIPAL_UNKNOWN);
}

/* ---- log ---- */

/* stderr, caught in a file. */
struct capture {
    FILE *f;
    int saved;
};

static struct capture capture_begin(void)
{
    struct capture c = {tmpfile(), dup(STDERR_FILENO)};
    assert_non_null(c.f);
    dup2(fileno(c.f), STDERR_FILENO);
    unsetenv("JOURNAL_STREAM");
    return c;
}

/* What was written, the first line's time as TIME. */
static char *capture_end(struct capture *c)
{
    static char got[8192];
    char *time;
    dup2(c->saved, STDERR_FILENO);
    close(c->saved);
    rewind(c->f);
    size_t n = fread(got, 1, sizeof(got) - 1, c->f);
    got[n] = '\0';
    fclose(c->f);
    if ((time = strstr(got, "ts=2")) != NULL) /* ts=2026-11-23T12:00:00.000Z */
        memmove(memcpy(time, "TIME", 4) + 4, time + 27, strlen(time + 27) + 1);
    else if ((time = strstr(got, "\"ts\":\"2")) != NULL)
        memmove(memcpy(time, "TIME", 4) + 4, time + 31, strlen(time + 31) + 1);
    return got;
}

/* What log_write puts on stderr, with JOURNAL_STREAM naming that stream or another. */
static char *logged(bool is_journal, enum log_level max, enum log_level level, const char *text)
{
    char stream[64];
    struct stat sb;
    struct capture c = capture_begin();
    assert_int_equal(fstat(STDERR_FILENO, &sb), 0);
    snprintf(stream, sizeof(stream), "%llu:%llu", (unsigned long long)sb.st_dev,
             (unsigned long long)sb.st_ino + (is_journal ? 0 : 1));
    setenv("JOURNAL_STREAM", stream, 1);
    journal_set_path("/nowhere"); /* of the machine's own we want nothing */
    log_init(max, LOG_FORMAT_LOGFMT);
    log_write(level, "%s", text);
    return capture_end(&c);
}

static void the_journal_gets_a_field_per_value(void **state)
{
    (void)state;
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    char quoted[64], got[1024], stream[64], dir[] = "/tmp/attnd_journal_XXXXXX";
    struct stat sb;
    assert_non_null(mkdtemp(dir));
    snprintf(at.sun_path, sizeof at.sun_path, "%s/socket", dir);
    int fd = socket(AF_UNIX, SOCK_DGRAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof at), 0);
    journal_set_path(at.sun_path);
    struct capture c = capture_begin();
    assert_int_equal(fstat(STDERR_FILENO, &sb), 0);
    snprintf(stream, sizeof(stream), "%llu:%llu", (unsigned long long)sb.st_dev,
             (unsigned long long)sb.st_ino);
    setenv("JOURNAL_STREAM", stream, 1);
    log_init(LOG_LEVEL_INFO, LOG_FORMAT_JSON);
    log_event(LOG_LEVEL_WARN, "slow step", "total=%.3f session=%04x peer=%s to=me", 1.5, 0x12,
              log_quote("uid 0, \"x\\", quoted, sizeof quoted));
    ssize_t n = recv(fd, got, sizeof got - 1, MSG_DONTWAIT);
    assert_true(n > 0);
    got[n] = '\0';
    assert_string_equal(got, "PRIORITY=4\nSYSLOG_IDENTIFIER=attnd\n"
                             "MESSAGE=slow step total=1.500 session=0012 "
                             "peer=\"uid 0, \\\"x\\\\\" to=me\n"
                             "ATTND_TOTAL=1.500\nATTND_SESSION=0012\n"
                             "ATTND_PEER=uid 0, \"x\\\nATTND_TO=me\n");
    log_info("two\nMESSAGE=lines"); /* as a client's name may have it */
    n = recv(fd, got, sizeof got - 1, MSG_DONTWAIT);
    got[n > 0 ? n : 0] = '\0';
    assert_string_equal(got, "PRIORITY=6\nSYSLOG_IDENTIFIER=attnd\nMESSAGE=two?MESSAGE=lines\n");
    close(fd);
    unlink(at.sun_path);
    log_info("nobody reads");
    assert_string_equal(capture_end(&c), "<6>nobody reads\n");
    journal_set_path("/nowhere");
    rmdir(dir);
}

static void an_event_has_its_values_apart_in_both_formats(void **state)
{
    (void)state;
    char quoted[32];
    for (int is_json = 0; is_json < 2; is_json++) {
        struct capture c = capture_begin();
        log_init(LOG_LEVEL_INFO, is_json ? LOG_FORMAT_JSON : LOG_FORMAT_LOGFMT);
        log_event(LOG_LEVEL_WARN, "slow step", "total=%.3f session=0x%04x n=%d peer=%s to=me", 1.5,
                  0x12, 7, log_quote("uid 0, \"x\\", quoted, sizeof quoted));
        assert_string_equal(
            capture_end(&c),
            is_json ? "{TIME,\"level\":\"warn\",\"msg\":\"slow step\",\"total\":1.500,"
                      "\"session\":\"0x0012\",\"n\":7,\"peer\":\"uid 0, \\\"x\\\\\","
                      "\"to\":\"me\"}\n"
                    : "TIME level=warn msg=\"slow step\" total=1.500 session=0x0012 n=7 "
                      "peer=\"uid 0, \\\"x\\\\\" to=me\n");
    }
}

static void a_flood_of_lines_is_cut_and_what_was_left_out_is_counted(void **state)
{
    (void)state;
    given_ns = 5000000000;
    clock_use(given_now);
    struct capture c = capture_begin();
    log_init(LOG_LEVEL_INFO, LOG_FORMAT_LOGFMT);
    for (int i = 0; i < 25; i++)
        log_limited("drops", LOG_LEVEL_INFO, log_write, "drop %d", i);
    log_flush_left_out(); /* the second is not over */
    given_ns += 1000000000;
    log_flush_left_out();
    log_flush_left_out();
    const char *got = capture_end(&c);
    clock_use(NULL);
    for (int i = 0; i < 25; i++) {
        char line[64];
        snprintf(line, sizeof line, "msg=\"drop %d\"", i);
        assert_int_equal(strstr(got, line) != NULL, i < LOG_LIMIT);
    }
    const char *line = strstr(got, "level=info msg=\"lines left out\" of=\"drops\" n=15\n");
    assert_non_null(line);
    assert_null(strstr(strchr(line, '\n'), "drops"));
}

static void a_log_line_has_a_priority_for_the_journal_and_time_and_level_for_others(void **state)
{
    (void)state;
    assert_string_equal(logged(true, LOG_LEVEL_INFO, LOG_LEVEL_ERROR, "no disk"), "<3>no disk\n");
    assert_string_equal(logged(false, LOG_LEVEL_INFO, LOG_LEVEL_ERROR, "no disk"),
                        "TIME level=error msg=\"no disk\"\n");
    assert_string_equal(logged(false, LOG_LEVEL_INFO, LOG_LEVEL_INFO, "a \"b\" \\"),
                        "TIME level=info msg=\"a \\\"b\\\" \\\\\"\n");
    assert_string_equal(logged(true, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG, "detail"), "");
    assert_string_equal(logged(true, LOG_LEVEL_DEBUG, LOG_LEVEL_DEBUG, "detail"), "<7>detail\n");
}

static void lines_are_kept_by_number_and_the_oldest_make_room(void **state)
{
    (void)state;
    static struct log_record kept[LOG_KEPT];
    struct capture c = capture_begin();
    log_init(LOG_LEVEL_INFO, LOG_FORMAT_LOGFMT);
    log_info("first");
    uint32_t n = log_read(0, kept);
    uint64_t number = kept[n - 1].number;
    assert_non_null(strstr(kept[n - 1].json, "\"level\":\"info\",\"msg\":\"first\"}"));
    assert_int_equal(log_read(number, kept), 0);
    log_debug("not written, not kept");
    for (int i = 0; i < LOG_KEPT + 7; i++)
        log_info("line %d", i);
    assert_int_equal(log_read(number, kept), LOG_KEPT);
    assert_int_equal(kept[0].number, number + 8); /* seven went by unseen */
    assert_non_null(strstr(kept[0].json, "line 7\""));
    assert_int_equal(log_read(number + 9, kept), LOG_KEPT - 2);
    assert_non_null(strstr(kept[0].json, "line 9\""));
    char longest[4000];
    memset(longest, '"', sizeof longest); /* twice as long when it is escaped */
    longest[sizeof longest - 1] = '\0';
    log_info("%s", longest);
    n = log_read(0, kept);
    assert_string_equal(kept[n - 1].json + strlen(kept[n - 1].json) - 2, "\"}");
    capture_end(&c);
}

static void a_clients_text_cannot_forge_a_line(void **state)
{
    (void)state;
    assert_string_equal(logged(true, LOG_LEVEL_INFO, LOG_LEVEL_INFO, "a\n<3>b\x1b[2J"),
                        "<6>a?<3>b?[2J\n");
    char longest[3000];
    memset(longest, 'y', sizeof(longest));
    longest[sizeof(longest) - 1] = '\0';
    char *line = logged(true, LOG_LEVEL_INFO, LOG_LEVEL_INFO, longest);
    assert_int_equal(strlen(line), 3 + 1023 + 1);
    assert_int_equal(line[3 + 1023], '\n');
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(a_large_header_is_unpacked_into_what_its_connection_may_hold),
        TEST(codes_become_bf16_in_a_buffer_of_their_own),
        TEST(codes_that_are_none_are_refused_by_name),
        TEST(a_deadline_is_the_default_the_clients_or_the_longest_allowed),
        TEST(a_reply_has_its_payload_where_it_was_promised),
        TEST(an_error_is_answered_without_a_free_buffer),
        TEST(the_longest_sentence_is_cut_and_stays_text),
        TEST(a_large_message_that_is_refused_gives_its_buffer_back),
        TEST(a_request_that_does_not_decode_counts_as_malformed_alone),
        TEST(steps_received_are_answered_or_in_flight),
        TEST(stages_add_up_to_the_total_whatever_a_step_went_through),
        TEST(slow_steps_are_kept_with_their_stages_and_the_latest_stay),
        TEST(every_address_has_a_transport),
        TEST(a_principal_has_a_name_for_the_log),
        TEST(a_log_line_has_a_priority_for_the_journal_and_time_and_level_for_others),
        TEST(the_journal_gets_a_field_per_value),
        TEST(an_event_has_its_values_apart_in_both_formats),
        TEST(a_flood_of_lines_is_cut_and_what_was_left_out_is_counted),
        TEST(lines_are_kept_by_number_and_the_oldest_make_room),
        TEST(a_clients_text_cannot_forge_a_line),
    };
    return cmocka_run_group_tests_name("request", tests, NULL, NULL);
}
