/* fake_daemon.c: the thread that answers requests of the fake daemon, as a healthy daemon would or
 * as the test planned. */
#include "tests/clients/fake_daemon.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HELD 64
#define POLL_MS 5

/* An answer on its way. */
struct answer {
    struct fake_message to; /* without its body */
    uint8_t *message;
    size_t bytes;
};

struct session {
    struct fake_daemon *f;
    struct fake_sp sp;
    struct answer held[MAX_HELD];
    uint32_t n_held;
    uint32_t num_q_heads, num_kv_heads, head_dim, num_layers;
    Attnd__PoolSpec *spec;
};

static bool take_one(atomic_uint *n)
{
    unsigned int v = atomic_load(n);
    while (v > 0 && !atomic_compare_exchange_weak(n, &v, v - 1))
        ;
    return v > 0;
}

static void send_answer(struct session *s, struct answer *a)
{
    if (atomic_load(&s->f->plan.is_repeating))
        fake_sp_send(&s->sp, &a->to, a->message, a->bytes);
    fake_sp_send(&s->sp, &a->to, a->message, a->bytes);
    free(a->message);
}

/* Wrecks an encoded reply in the planned way. */
static void garble(struct fake_daemon *f, struct answer *a)
{
    uint8_t *m = a->message;
    switch (atomic_load(&f->plan.garbling)) {
    case FAKE_EMPTY:
        a->bytes = 0;
        break;
    case FAKE_CUT:
        a->bytes--;
        break;
    case FAKE_BAD_MAGIC:
        m[0] ^= 0xff;
        break;
    case FAKE_BAD_HEADER:
        memset(m + WIRE_PREAMBLE_BYTES, 0xff, m[8]);
        break;
    case FAKE_OTHER_ID:
        m[16 + 7] ^= 0x40;
        break;
    default:
        break;
    }
}

/* Encodes h and payload as the answer to request id, which came in message m. */
static void reply(struct session *s, Attnd__Reply *h, uint64_t id, const void *payload,
                  size_t payload_bytes, const struct fake_message *m, bool is_step, bool is_garbled)
{
    struct fake_daemon *f = s->f;
    enum fake_garbling g = is_garbled ? atomic_load(&f->plan.garbling) : FAKE_INTACT;
    if (g == FAKE_NO_BODY)
        h->body_case = ATTND__REPLY__BODY__NOT_SET;
    if (g == FAKE_SHORT_PAYLOAD && payload_bytes > 0)
        payload_bytes -= s->head_dim * sizeof(float);
    size_t head = wire_reply_head_bytes(h);
    struct answer a = {.to = *m, .bytes = head + payload_bytes};
    a.message = malloc(a.bytes);
    MUST(a.message != NULL);
    wire_reply_head_encode(h, id, payload_bytes, a.message);
    memcpy(a.message + head, payload, payload_bytes);
    if (is_garbled)
        garble(f, &a);

    if (is_step && atomic_load(&f->plan.n_hold) > 0) {
        MUST(s->n_held < MAX_HELD);
        s->held[s->n_held++] = a;
        if (s->n_held < atomic_load(&f->plan.n_hold))
            return;
        while (s->n_held > 0)
            send_answer(s, &s->held[--s->n_held]);
        return;
    }
    send_answer(s, &a);
}

static void on_hello(const struct fake_daemon *f, const Attnd__Hello *q, Attnd__HelloReply *r)
{
    r->protocol_version = 1;
    r->session = q->resume_session != 0 ? q->resume_session : 77;
    r->server_version = (char *)"fake";
    r->backend = (char *)"none";
    r->lease_us = f->lease_us != 0 ? f->lease_us : 600000000;
    r->max_message_bytes = f->max_message_bytes != 0 ? f->max_message_bytes : 64 << 20;
    r->max_step_items = 256;
    r->max_step_tokens = f->max_step_tokens != 0 ? f->max_step_tokens : 4096;
    r->max_seq_tokens = 65536;
    r->max_sequences = 512;
}

static void on_pool(struct session *s, const Attnd__PoolSpec *spec)
{
    size_t n = attnd__pool_spec__get_packed_size(spec);
    uint8_t *bytes = malloc(n);
    MUST(bytes != NULL);
    attnd__pool_spec__pack(spec, bytes);
    if (s->spec != NULL)
        attnd__pool_spec__free_unpacked(s->spec, NULL);
    s->spec = attnd__pool_spec__unpack(NULL, n, bytes);
    free(bytes);
    MUST(s->spec != NULL);
    s->num_q_heads = spec->num_q_heads;
    s->num_kv_heads = spec->num_kv_heads;
    s->head_dim = spec->head_dim_k;
    s->num_layers = spec->num_layers;
}

static void on_step(struct session *s, const struct wire_request *req, const struct fake_message *m)
{
    struct fake_daemon *f = s->f;
    const Attnd__Step *st = req->header->step;
    Attnd__Reply h = ATTND__REPLY__INIT;
    Attnd__StepReply body = ATTND__STEP_REPLY__INIT;
    int32_t item_status[256] = {0};
    struct wire_step_layout l;
    char why[128];
    atomic_fetch_add(&f->n_steps, 1);
    atomic_store(&f->last_step_id, req->request_id);
    h.queue_ns = 1000;
    h.device_ns = 2000;
    attn_status lst =
        wire_step_layout_of(st,
                            &(struct wire_shape){s->num_q_heads, s->num_kv_heads, s->head_dim,
                                                 s->head_dim, false, ATTN_F32, 0, 0},
                            &l, why, sizeof why);
    MUST(lst == ATTN_OK && l.request_bytes == req->payload_bytes);
    if (take_one(&f->plan.n_fail)) {
        h.status = atomic_load(&f->plan.status);
        h.retry_after_us = atomic_load(&f->plan.retry_after_us);
        h.message = (char *)"planned failure of step";
        reply(s, &h, req->request_id, "", 0, m, true, true);
        return;
    }
    h.body_case = ATTND__REPLY__BODY_STEP;
    h.step = &body;
    uint32_t failed = atomic_load(&f->plan.failed_item);
    if (failed > 0 && failed <= st->n_seq) {
        item_status[failed - 1] = h.status = ATTN_ENOBLOCKS;
        h.message = (char *)"item is out of blocks";
        body.n_item_status = st->n_seq;
        body.item_status = item_status;
    }
    float *payload = calloc(1, l.reply_bytes + 1);
    MUST(payload != NULL);
    size_t row = (size_t)s->num_q_heads * s->head_dim, t = 0;
    const float *q = (const float *)(req->payload + l.q_offset);
    for (size_t i = 0; i < st->n_seq && (st->flags & WIRE_STEP_ATTEND) != 0; i++) {
        for (uint32_t j = 0; j < st->n_tokens[i]; j++, t++) {
            for (size_t e = 0; e < row; e++) {
                float x;
                memcpy(&x, q + t * row + e, sizeof x);
                payload[l.out_offset / 4 + t * row + e] = 2 * x + (float)st->seq[i];
            }
            for (uint32_t e = 0; (st->flags & WIRE_STEP_LSE) != 0 && e < s->num_q_heads; e++)
                payload[l.lse_offset / 4 + t * s->num_q_heads + e] = (float)(st->pos[i] + j);
        }
    }
    reply(s, &h, req->request_id, payload, l.reply_bytes, m, true, true);
    free(payload);
}

static void on_request(struct session *s, const struct wire_request *req,
                       const struct fake_message *m)
{
    Attnd__Reply h = ATTND__REPLY__INIT;
    Attnd__HelloReply hello = ATTND__HELLO_REPLY__INIT;
    Attnd__PoolReply pool = ATTND__POOL_REPLY__INIT;
    Attnd__SeqReply seq = ATTND__SEQ_REPLY__INIT;
    Attnd__StatsReply stats = ATTND__STATS_REPLY__INIT;
    uint32_t layer_len[WIRE_MAX_LAYERS];
    const Attnd__Request *r = req->header;
    bool is_garbled = true;
    for (uint32_t i = 0; i < WIRE_MAX_LAYERS; i++)
        layer_len[i] = 100 + i;
    seq.pool = 9;
    seq.epoch = 1;
    seq.layer_len = layer_len;
    switch (r->body_case) {
    case ATTND__REQUEST__BODY_HELLO:
        on_hello(s->f, r->hello, &hello);
        h.body_case = ATTND__REPLY__BODY_HELLO;
        h.hello = &hello;
        is_garbled = false;
        break;
    case ATTND__REQUEST__BODY_GOODBYE:
        is_garbled = false;
        break;
    case ATTND__REQUEST__BODY_POOL_CREATE:
        on_pool(s, r->pool_create->spec);
        /* fall through */
    case ATTND__REQUEST__BODY_POOL_DESCRIBE:
        if (s->spec == NULL) {
            h.status = ATTN_ENOTFOUND;
            h.message = (char *)"pool: no such name";
            break;
        }
        pool.pool = 9;
        pool.spec = s->spec;
        pool.n_free_blocks = 123;
        h.body_case = ATTND__REPLY__BODY_POOL;
        h.pool = &pool;
        is_garbled = false;
        break;
    case ATTND__REQUEST__BODY_FORK:
    case ATTND__REQUEST__BODY_ADOPT:
        seq.n_layer_len = s->num_layers;
        seq.epoch = 2;
        /* fall through */
    case ATTND__REQUEST__BODY_OPEN:
    case ATTND__REQUEST__BODY_TRUNCATE:
        if (req->header->body_case == ATTND__REQUEST__BODY_TRUNCATE)
            seq.epoch = req->header->truncate->epoch + 1;
        h.body_case = ATTND__REPLY__BODY_SEQ;
        h.seq = &seq;
        break;
    case ATTND__REQUEST__BODY_STATS:
        stats.json = (char *)"{\"steps\": 1}";
        h.body_case = ATTND__REPLY__BODY_STATS;
        h.stats = &stats;
        break;
    default:
        break;
    }
    reply(s, &h, req->request_id, "", 0, m, false, is_garbled);
}

static void *run(void *arg)
{
    struct fake_daemon *f = arg;
    struct session s = {.f = f};
    fake_sp_open(&s.sp, f->url);
    while (!atomic_load(&f->is_stopping)) {
        struct fake_message m;
        struct wire_arena arena;
        struct wire_request req;
        char why[256] = "";
        uint8_t memory[4096];
        if (!fake_sp_recv(&s.sp, POLL_MS, &m))
            continue;
        wire_arena_init(&arena, memory, sizeof memory, WIRE_ARENA_LIMIT_BYTES);
        attn_status st = wire_request_decode(m.body, m.bytes, &arena, &req, why, sizeof why);
        if (st != ATTN_OK)
            fprintf(stderr, "fake daemon: %s\n", why);
        MUST(st == ATTN_OK);
        atomic_fetch_add(&f->n_requests, 1);
        if (f->see != NULL)
            f->see(f->user, req.header);
        bool is_of_session = req.header->body_case == ATTND__REQUEST__BODY_HELLO ||
                             req.header->body_case == ATTND__REQUEST__BODY_GOODBYE;
        if (!is_of_session && take_one(&f->plan.n_swallow))
            ; /* as if it never came */
        else if (req.header->body_case == ATTND__REQUEST__BODY_STEP)
            on_step(&s, &req, &m);
        else
            on_request(&s, &req, &m);
        wire_arena_reset(&arena);
        free(m.body);
    }
    while (s.n_held > 0)
        free(s.held[--s.n_held].message);
    if (s.spec != NULL)
        attnd__pool_spec__free_unpacked(s.spec, NULL);
    fake_sp_close(&s.sp);
    return NULL;
}

void fake_daemon_start(struct fake_daemon *f, const char *url)
{
    snprintf(f->url, sizeof f->url, "%s", url);
    atomic_store(&f->is_stopping, false);
    int rc = pthread_create(&f->thread, NULL, run, f);
    MUST(rc == 0);
}

void fake_daemon_stop(struct fake_daemon *f)
{
    atomic_store(&f->is_stopping, true);
    pthread_join(f->thread, NULL);
}
