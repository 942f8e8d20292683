/* engine_rig.c: the engine under test, its transport, messages in and out. */
#include "tests/daemon/engine/engine_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/cards/cards.h"
#include "daemon/cards/restore.h"
#include "daemon/engine/core/published.h"

static struct rig *current; /* cmocka runs one test at a time */

static void fake_reply(struct request *req)
{
    struct rig_answer *a = test_calloc(1, sizeof *a);
    char why[256];
    a->req = req;
    wire_arena_init(&a->arena, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    attn_status st = wire_reply_decode(req->reply->data + req->reply->offset, req->reply->n_bytes,
                                       &a->arena, &a->reply, why, sizeof why);
    if (st != ATTN_OK)
        fail_msg("a reply does not decode: %s", why);
    a->next = current->answers;
    current->answers = a;
}

static const struct transport_ops fake_transport = {.label = STATS_IPC, .reply = fake_reply};
static const struct transport_ops fake_admin = {
    .label = STATS_IPC, .reply = fake_reply, .is_admin = true};

static uint64_t fake_clock(void)
{
    if (rig_look_ns > 0) /* else other threads may look, too */
        rig_now_ns += rig_look_ns;
    return rig_now_ns;
}

void rig_tenants(struct rig *r, uint32_t n, const uint32_t *shares)
{
    char path[64], why[256];
    snprintf(path, sizeof path, "/tmp/attnd_tenants_%ld", (long)getpid());
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fchmod(fileno(f), 0600), 0);
    for (uint32_t i = 0; i < n; i++)
        fprintf(f, "[t%u]\nusers = %u\nshare = %u\n", i, RIG_UID + i, shares[i]);
    fclose(f);
    if (tenants_open(path, &r->fixture.tenants, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    unlink(path);
    r->principal = (struct principal){.kind = PRINCIPAL_USER}; /* root: the operator */
}

/* Another card, whose engine has no thread either. */
static void open_second(struct rig *r)
{
    char why[512] = "";
    r->second_backend.rig = r;
    r->second_backend.kv_bytes = r->backend.kv_bytes;
    r->second_fixture.cards = r->fixture.cards;
    r->second_fixture.card = 1;
    cards_join(r->fixture.cards, r->engine);
    if (engine_fixture_open(&r->second_fixture, &r->cfg, &rig_backend_ops, &r->second_backend,
                            r->bufs, &r->second, why, sizeof why) != ATTN_OK)
        fail_msg("the second engine does not open: %s", why);
    cards_join(r->fixture.cards, r->second);
    pools_publish(r->engine);
    pools_publish(r->second);
}

void rig_open(struct rig *r, void (*tweak)(struct rig *r))
{
    char why[512] = "";
    memset(r, 0, sizeof *r);
    r->head_dim = RIG_DIM;
    memset(&stats, 0, sizeof stats);
    current = r;
    log_init(LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    rig_now_ns = 1000000000;
    rig_look_ns = 0;
    clock_use(fake_clock);
    r->next_id = 1;
    r->backend.rig = r;
    r->backend.kv_bytes = 1 << 20;
    r->backend.max_in_flight = r->second_backend.max_in_flight = 2;
    r->cfg = (struct config){
        .max_sequences = 256,
        .max_seq_tokens = 4096,
        .max_pools = 4,
        .max_layers = 8,
        .max_message_bytes = 1 << 20,
        .io_memory_bytes = 8 << 20,
        .max_batch_items = 64,
        .max_batch_tokens = 256,
        .max_step_items = 32,
        .max_step_tokens = 128,
        .max_queue_requests = 512,
        .max_queue_bytes = 4 << 20,
        .default_timeout_us = 1000000,
        .max_timeout_us = 10000000,
        .max_sessions = 16,
        .lease_us = 30000000,
    };
    if (tweak != NULL)
        tweak(r);
    if (r->has_second)
        assert_int_equal(cards_open(2, r->cfg.max_pools, r->cfg.max_sessions, &r->fixture.cards),
                         ATTN_OK);
    assert_int_equal(
        iobuf_pool_open(&rig_backend_ops, &r->backend, r->cfg.io_memory_bytes, &r->bufs), ATTN_OK);
    if (engine_fixture_open(&r->fixture, &r->cfg, &rig_backend_ops, &r->backend, r->bufs,
                            &r->engine, why, sizeof why) != ATTN_OK)
        fail_msg("the engine does not open: %s", why);
    if (r->has_second)
        open_second(r);
    r->kv = r->fixture.kv;
    r->sessions = r->fixture.sessions;
    r->session = rig_hello(r, "test");
    r->pool = rig_pool(r, "p", 64);
}

static void close_one(struct engine *e)
{
    struct backend *b = e->env.backend;
    assert_int_equal(engine_close(e), ATTN_OK);
    rig_backend_free_pools(b);
}

static void close_engine(struct rig *r)
{
    close_one(r->engine);
    if (r->second != NULL)
        close_one(r->second);
    r->second = NULL;
}

void rig_forget(struct rig *r)
{
    while (r->answers != NULL) {
        struct rig_answer *a = r->answers;
        r->answers = a->next;
        wire_arena_reset(&a->arena);
        request_free(a->req);
        test_free(a);
    }
}

void rig_close(struct rig *r)
{
    r->backend.is_held = r->second_backend.is_held = false;
    rig_run(r);
    assert_int_equal(atomic_load(&r->engine->queue.n_requests), 0);
    assert_int_equal(atomic_load(&r->engine->queue.bytes), 0);
    assert_false(r->backend.has_conflict);
    assert_false(r->backend.has_patch_conflict || r->second_backend.has_patch_conflict);
    assert_false(r->backend.has_table_conflict || r->second_backend.has_table_conflict);
    assert_false(r->backend.has_choice_conflict || r->second_backend.has_choice_conflict);
    if (kv_check(r->kv) != ATTN_OK)
        fail_msg("the cache is inconsistent: %s", kv_last_error(r->kv));
    for (uint32_t i = 0; i < r->cfg.max_sequences; i++)
        assert_false(seq_is_busy(r->engine, i));
    uint64_t answered = 0;
    for (uint32_t i = 0; i < STATS_N_STATUS; i++)
        answered += atomic_load(&stats.steps_answered[i]);
    assert_int_equal(stats_get(steps_received), answered);
    assert_int_equal(stats_get(steps_in_flight), 0);
    assert_int_equal(stats_get(queue_requests), 0);

    close_engine(r);
    assert_int_equal(r->backend.n_registered, 0);
    engine_fixture_close(&r->fixture);
    idle_memory_close(&r->fixture.idle);
    idle_memory_close(&r->second_fixture.idle);
    if (r->has_second)
        engine_fixture_close(&r->second_fixture);
    cards_close(r->fixture.cards);
    clock_use(NULL);
    rig_forget(r);
    while (r->sent != NULL) {
        struct rig_sent *s = r->sent;
        r->sent = s->next;
        test_free(s);
    }
    iobuf_pool_close(r->bufs);
}

static FILE *counted;
static int shown; /* where the log went before */

void rig_log_begin(void)
{
    counted = tmpfile();
    shown = dup(STDERR_FILENO);
    assert_true(counted != NULL && shown >= 0);
    dup2(fileno(counted), STDERR_FILENO);
    log_init(LOG_LEVEL_INFO, LOG_FORMAT_LOGFMT);
}

uint32_t rig_log_end(void)
{
    uint32_t n = 0;
    log_init(LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    dup2(shown, STDERR_FILENO);
    close(shown);
    rewind(counted);
    for (int c; (c = fgetc(counted)) != EOF;)
        n += c == '\n';
    fclose(counted);
    return n;
}

static void take_over(struct rig *r, struct engine_fixture *fixture, struct backend *b,
                      struct engine **out_engine)
{
    char why[512] = "";
    int fd = dup(kv_fd(fixture->kv));
    engine_fixture_close(fixture);
    b->used_bytes = b->n_pools = 0;
    if (engine_fixture_take_over(fixture, fd, &r->cfg, &rig_backend_ops, b, r->bufs, out_engine,
                                 why, sizeof why) != ATTN_OK)
        fail_msg("the successor does not open: %s", why);
    close(fd);
    if (fixture->cards != NULL)
        cards_join(fixture->cards, *out_engine);
}

attn_status rig_try_to_succeed(struct rig *r, void (*change)(struct rig *r),
                               struct engine_kept *out_kept)
{
    char why[512] = "";
    struct engine_kept other;
    close_engine(r);
    if (change != NULL)
        change(r);
    cards_close(r->fixture.cards);
    r->fixture.cards = NULL;
    if (r->has_second)
        assert_int_equal(cards_open(2, r->cfg.max_pools, r->cfg.max_sessions, &r->fixture.cards),
                         ATTN_OK);
    r->second_fixture.cards = r->fixture.cards;
    take_over(r, &r->fixture, &r->backend, &r->engine);
    r->kv = r->fixture.kv;
    r->sessions = r->fixture.sessions;
    if (r->has_second)
        take_over(r, &r->second_fixture, &r->second_backend, &r->second);
    attn_status st = engine_restore_pools(r->engine, out_kept);
    if (st == ATTN_OK && r->has_second)
        st = engine_restore_pools(r->second, &other);
    if (st == ATTN_OK && r->has_second)
        st = cards_restore_pools(r->fixture.cards, why, sizeof why);
    if (st == ATTN_OK)
        st = engine_restore(r->engine, out_kept);
    if (st == ATTN_OK && r->has_second)
        st = engine_restore(r->second, &other);
    return st == ATTN_OK && r->has_second ? cards_restore(r->fixture.cards) : st;
}

struct engine_kept rig_succeed(struct rig *r, void (*change)(struct rig *r))
{
    struct engine_kept kept;
    rig_run(r);
    assert_int_equal(rig_try_to_succeed(r, change, &kept), ATTN_OK);
    return kept;
}

void rig_run(struct rig *r)
{
    uint32_t n_quiet = 0;
    while (n_quiet < (r->second == NULL ? 1 : 3)) { /* each may have woken the other */
        bool is_busy = engine_turn(r->engine, 0);
        if (r->second != NULL)
            is_busy |= engine_turn(r->second, 0);
        is_busy |= atomic_load(&r->engine->tier.came) != NULL; /* moves, since it looked */
        is_busy |= atomic_load(&r->engine->inbox) != NULL; /* calls, as those before them ended */
        n_quiet = is_busy ? 0 : n_quiet + 1;
    }
}

static void submit(struct rig *r, struct request *req)
{
    char why[256];
    attn_status st = request_decode(req, rig_now_ns, r->cfg.default_timeout_us,
                                    r->cfg.max_timeout_us, UINT64_MAX, why, sizeof why);
    if (st != ATTN_OK)
        fail_msg("a request does not decode: %s", why);
    req->principal = r->principal;
    engine_submit(r->engine, req);
}

static void keep_sent(struct rig *r, uint64_t id, const struct iobuf *msg)
{
    if (!r->keeps_sent)
        return;
    struct rig_sent *s = test_malloc(sizeof *s + msg->n_bytes);
    *s = (struct rig_sent){.next = r->sent, .id = id, .n_bytes = msg->n_bytes};
    memcpy(s->bytes, msg->data, msg->n_bytes);
    r->sent = s;
}

uint64_t rig_send(struct rig *r, Attnd__Request *h, const void *payload, size_t payload_bytes)
{
    uint64_t id = r->next_id++;
    size_t head = wire_request_head_bytes(h);
    struct request *req = request_new(r->is_admin ? &fake_admin : &fake_transport, NULL, r->share,
                                      r->bufs, head + payload_bytes);
    assert_non_null(req);
    wire_request_head_encode(h, id, payload_bytes, req->msg->data);
    if (payload_bytes > 0)
        memcpy(req->msg->data + head, payload, payload_bytes);
    keep_sent(r, id, req->msg);
    submit(r, req);
    return id;
}

void rig_resend(struct rig *r, uint64_t id)
{
    const struct rig_sent *s = r->sent;
    while (s->id != id)
        s = s->next;
    struct request *req = request_new(r->is_admin ? &fake_admin : &fake_transport, NULL, r->share,
                                      r->bufs, s->n_bytes);
    assert_non_null(req);
    memcpy(req->msg->data, s->bytes, s->n_bytes);
    submit(r, req);
}

const struct wire_reply *rig_wire_reply(struct rig *r, uint64_t id)
{
    for (struct rig_answer *a = r->answers; a != NULL; a = a->next)
        if (a->reply.request_id == id)
            return &a->reply;
    return NULL;
}

const Attnd__Reply *rig_reply(struct rig *r, uint64_t id)
{
    const struct wire_reply *w = rig_wire_reply(r, id);
    return w == NULL ? NULL : w->header;
}

const Attnd__Reply *rig_answer(struct rig *r, uint64_t id)
{
    const Attnd__Reply *reply = rig_reply(r, id);
    assert_non_null(reply);
    return reply;
}

const Attnd__Reply *rig_call(struct rig *r, Attnd__Request *h)
{
    uint64_t id = rig_send(r, h, NULL, 0);
    rig_run(r);
    return rig_answer(r, id);
}

void rig_assert_says(const Attnd__Reply *reply, attn_status st, const char *part)
{
    if (reply->status != st || strstr(reply->message, part) == NULL)
        fail_msg("%s \"%s\", expected %s \"%s\"", attn_status_name((attn_status)reply->status),
                 reply->message, attn_status_name(st), part);
}
