/* request.c: makes, decodes, answers and frees requests; the only place that counts steps.
 */
#include "daemon/request/request.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/slow.h"
#include "daemon/request/session.h"
#include "proto/wire_codes.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_SENTENCE_BYTES = 480 };

/* --- the arena's chunks ----------------------------------------------------------------------- */

/* A header that is large when unpacked takes of the memory for messages, so it counts there. */
static void *chunk_take(void *user, size_t *bytes, void **out_handle)
{
    struct request *req = user;
    struct iobuf *buf = iobuf_acquire(req->bufs, req->share, *bytes);
    if (buf == NULL)
        return NULL;
    *bytes = buf->capacity_bytes;
    *out_handle = buf;
    return buf->data;
}

static void chunk_give(void *handle)
{
    iobuf_release(handle);
}

void request_set_bufs(struct request *req, struct iobuf_pool *bufs)
{
    if (bufs == NULL)
        return;
    req->bufs = bufs;
    req->arena.source =
        (struct wire_arena_source){.take = chunk_take, .give = chunk_give, .user = req};
}

/* --- life ------------------------------------------------------------------------------------- */

struct request *request_new(const struct transport_ops *t, void *peer, struct share *share,
                            struct iobuf_pool *pool, size_t msg_bytes)
{
    struct request *req = malloc(sizeof(*req));
    if (req == NULL)
        return NULL;
    request_init(req, t, peer);
    req->share = share;
    if (pool != NULL)
        request_set_bufs(req, pool);
    size_t room = msg_bytes > REQUEST_MIN_MSG_BYTES ? msg_bytes : REQUEST_MIN_MSG_BYTES;
    req->msg = pool != NULL ? iobuf_acquire(pool, share, room) : iobuf_heap_new(room);
    if (req->msg == NULL) {
        free(req);
        return NULL;
    }
    req->msg->n_bytes = msg_bytes;
    return req;
}

attn_status request_grow(struct request *req, struct iobuf_pool *pool, size_t msg_bytes,
                         size_t n_kept)
{
    struct iobuf *msg = iobuf_acquire(pool, req->share, msg_bytes);
    if (msg == NULL)
        return ATTN_EOVERLOAD;
    memcpy(msg->data, req->msg->data, n_kept);
    iobuf_release(req->msg);
    req->msg = msg;
    return ATTN_OK;
}

void request_init(struct request *req, const struct transport_ops *t, void *peer)
{
    memset(req, 0, offsetof(struct request, arena_bytes));
    req->transport = t;
    req->peer = peer;
    wire_arena_init(&req->arena, req->arena_bytes, sizeof(req->arena_bytes),
                    REQUEST_MAX_ARENA_BYTES);
}

void request_free(struct request *req)
{
    if (req == NULL)
        return;
    assert(req->charge.place.queue == NULL);
    iobuf_release(req->msg);
    iobuf_release(req->reply);
    wire_arena_reset(&req->arena);
    free(req);
}

static bool is_step(const struct request *req)
{
    return req->wire.header != NULL && req->wire.header->body_case == ATTND__REQUEST__BODY_STEP;
}

static void count(const struct request *req)
{
    stats_add(requests_received, 1);
    if (is_step(req)) {
        stats_add(steps_received, 1);
        stats_add(steps_in_flight, 1);
    }
}

/* Counts a request that was decoded, with this result, and sets its times. */
static attn_status decoded(struct request *req, attn_status st, uint64_t now_ns,
                           uint64_t default_timeout_us, uint64_t max_timeout_us, char *why,
                           size_t why_bytes)
{
    req->received_ns = now_ns;
    req->deadline_ns = now_ns + default_timeout_us * 1000;
    if (st == ATTN_ENOMEM) { /* not malformed: it may be decoded later */
        req->wire.header = NULL;
        stats_add(requests_refused_overload, 1);
        snprintf(why, why_bytes,
                 "no buffer to unpack the message: cache.io_memory, or this connection's share of "
                 "it (listen.peer_share), is used up");
        return ATTN_EOVERLOAD;
    }
    if (st != ATTN_OK) {
        req->wire.header = NULL;
        stats_add(messages_malformed, 1);
        return st;
    }
    count(req);
    uint64_t timeout_us = req->wire.header->timeout_us;
    if (timeout_us > max_timeout_us)
        timeout_us = max_timeout_us;
    if (timeout_us != 0)
        req->deadline_ns = now_ns + timeout_us * 1000;
    return ATTN_OK;
}

void request_take_bell(struct request *req, struct request_bell *bell, const Attnd__Request *header,
                       uint8_t *payload, size_t payload_bytes, uint64_t now_ns, uint64_t timeout_us)
{
    req->bell = bell;
    req->wire =
        (struct wire_request){.header = header, .payload = payload, .payload_bytes = payload_bytes};
    req->received_ns = now_ns;
    req->deadline_ns = now_ns + timeout_us * 1000;
    count(req);
}

/* Makes of a step whose tensors came as codes what it would have been in bf16. ATTN_ENOMEM: there
 * is no buffer for that. */
static attn_status widen(struct request *req, uint64_t max_message_bytes, char *why,
                         size_t why_bytes)
{
    struct wire_request *w = &req->wire;
    Attnd__Step *step = w->header->step;
    const size_t head_bytes = (size_t)(w->payload - req->msg->data);
    size_t n;
    if (step->flags & WIRE_STEP_SPARSE) {
        snprintf(why, why_bytes,
                 "step.dtype is fp8_e4m3 (4), which a step of flag sparse 32 is not");
        return ATTN_EINVAL;
    }
    if (!wire_codes_count(w->payload_bytes, &n)) {
        snprintf(why, why_bytes,
                 "payload bytes are %zu and step.dtype is fp8_e4m3 (4): no number of elements, %d "
                 "and a scale in a group, takes so many",
                 w->payload_bytes, WIRE_CODES_GROUP);
        return ATTN_EINVAL;
    }
    const size_t payload_bytes = n * sizeof(uint16_t);
    if (head_bytes + payload_bytes > max_message_bytes) {
        snprintf(why, why_bytes,
                 "step.dtype is fp8_e4m3 (4): in bf16 the message has %zu bytes, over the limit of "
                 "%" PRIu64 " (listen.max_message)",
                 head_bytes + payload_bytes, max_message_bytes);
        return ATTN_EINVAL;
    }
    struct iobuf *msg = iobuf_acquire(req->msg->pool, req->share, head_bytes + payload_bytes);
    if (msg == NULL)
        return ATTN_ENOMEM;
    wire_codes_get(w->payload, n, (uint16_t *)(void *)(msg->data + head_bytes));
    iobuf_release(req->msg); /* the header is in the arena */
    req->msg = msg;
    w->payload = msg->data + head_bytes;
    w->payload_bytes = payload_bytes;
    step->dtype = ATTND__DTYPE__BF16;
    req->is_widened = true;
    return ATTN_OK;
}

attn_status request_decode(struct request *req, uint64_t now_ns, uint64_t default_timeout_us,
                           uint64_t max_timeout_us, uint64_t max_message_bytes, char *why,
                           size_t why_bytes)
{
    attn_status st = wire_request_decode(req->msg->data, req->msg->n_bytes, &req->arena, &req->wire,
                                         why, why_bytes);
    if (st == ATTN_OK && is_step(req) && req->wire.header->step->dtype == ATTND__DTYPE__FP8_E4M3)
        st = widen(req, max_message_bytes, why, why_bytes);
    return decoded(req, st, now_ns, default_timeout_us, max_timeout_us, why, why_bytes);
}

attn_status request_decode_apart(struct request *req, uint8_t *head, uint8_t *payload,
                                 uint64_t now_ns, uint64_t default_timeout_us,
                                 uint64_t max_timeout_us, char *why, size_t why_bytes)
{
    attn_status st =
        wire_request_decode_apart(head, payload, &req->arena, &req->wire, why, why_bytes);
    return decoded(req, st, now_ns, default_timeout_us, max_timeout_us, why, why_bytes);
}

uint64_t request_session(const struct request *req)
{
    const Attnd__Request *h = req->wire.header;
    return h->body_case == ATTND__REQUEST__BODY_HELLO ? h->hello->resume_session : h->session;
}

bool request_may_administer(const struct request *req)
{
    const struct principal *who = &req->principal;
    return req->transport->is_admin ||
           (who->kind == PRINCIPAL_USER && (who->uid == 0 || who->uid == geteuid()));
}

attn_status request_reply_reserve(struct request *req, size_t n_bytes)
{
    if (req->room != NULL) {
        if (n_bytes > req->room->capacity_bytes)
            return ATTN_EINVAL;
        req->reply = req->room;
        req->reply->offset = 0;
        req->reply->n_bytes = n_bytes;
        return ATTN_OK;
    }
    assert(req->msg->pool != NULL); /* a message from the heap is refused, never served */
    iobuf_release(req->reply);
    req->reply = iobuf_acquire_owed(req->msg->pool, req->share, n_bytes);
    return req->reply == NULL ? ATTN_EOVERLOAD : ATTN_OK;
}

attn_status request_reply_begin(struct request *req, const Attnd__Reply *header,
                                size_t payload_bytes, uint8_t **out_payload)
{
    size_t head_bytes = wire_reply_head_bytes(header);
    attn_status st = request_reply_reserve(req, head_bytes + payload_bytes);
    if (st != ATTN_OK)
        return st;
    wire_reply_head_encode(header, req->wire.request_id, payload_bytes, req->reply->data);
    *out_payload = req->reply->data + head_bytes;
    return ATTN_OK;
}

void request_reply(struct request *req, attn_status st)
{
    assert(req->reply != NULL || req->bell != NULL || req->shard != NULL);
    struct queue_place place = charge_release(&req->charge, st);
    req->status = st;
    if (is_step(req) && req->shard == NULL) {
        uint64_t now_ns = req->replied_ns = clock_now_ns();
        enum stats_transport label = req->transport->label;
        stats_observe_ns(label, STATS_TOTAL, now_ns - req->received_ns);
        if (req->batched_ns != 0) {
            stats_observe_ns(label, STATS_QUEUE, req->batched_ns - req->received_ns);
            stats_observe_ns(label, STATS_DEVICE, req->device_ns);
        }
        stats_count_answer(st);
        stats_sub(steps_in_flight, 1);
    }
    req->transport->reply(req);
    queue_leave(place);
}

static double seconds(uint64_t ns)
{
    return (double)ns * 1e-9;
}

static void log_slow_step(const struct request *req, const uint64_t stage_ns[STAGE_N],
                          uint64_t total_ns)
{
    const Attnd__Step *step = req->wire.header->step;
    struct timespec now = clock_wall();
    char who[PRINCIPAL_TEXT_BYTES];
    struct slow_step s = {
        .unix_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec,
        .request_id = req->wire.request_id,
        .session = req->wire.header->session,
        .pool = step->pool,
        .layer = step->layer,
        .n_items = (uint32_t)step->n_seq,
        .status = req->status,
        .transport = stats_transport_name(req->transport->label),
    };
    memcpy(s.stage_ns, stage_ns, sizeof s.stage_ns);
    for (size_t i = 0; i < step->n_n_tokens; i++)
        s.n_tokens += step->n_tokens[i];
    snprintf(s.who, sizeof s.who, "%s", principal_format(&req->principal, who));
    slow_add(&s);
    stats_add(steps_slow, 1);
    const char *status = attn_status_message(s.status);
    char quoted[2][SLOW_WHO_BYTES + 8];
    log_limited("slow steps", LOG_LEVEL_WARN, log_event, "slow step",
                "total=%.6f receive=%.6f queue=%.6f wait=%.6f launch=%.6f device=%.6f reply=%.6f "
                "send=%.6f session=%08" PRIx32 " request=%" PRIu64 " pool=%" PRIu32
                " layer=%" PRIu32 " items=%" PRIu32 " tokens=%" PRIu32
                " status=%s transport=%s peer=%s",
                seconds(total_ns), seconds(stage_ns[STAGE_RECEIVE]), seconds(stage_ns[STAGE_QUEUE]),
                seconds(stage_ns[STAGE_WAIT]), seconds(stage_ns[STAGE_LAUNCH]),
                seconds(stage_ns[STAGE_DEVICE]), seconds(stage_ns[STAGE_REPLY]),
                seconds(stage_ns[STAGE_SEND]), session_label(s.session), s.request_id, s.pool,
                s.layer, s.n_items, s.n_tokens, log_quote(status, quoted[0], sizeof quoted[0]),
                s.transport, log_quote(s.who, quoted[1], sizeof quoted[1]));
}

/* The time from *at to until (0: unknown, takes no time); advances *at. */
static uint64_t step_to(uint64_t *at, uint64_t until)
{
    uint64_t ns = until > *at ? until - *at : 0;
    *at += ns;
    return ns;
}

void request_stages(const struct request *req, uint64_t sent_ns, uint64_t out_ns[STAGE_N])
{
    uint64_t at = req->began_ns != 0 ? req->began_ns : req->received_ns;
    out_ns[STAGE_RECEIVE] = step_to(&at, req->received_ns);
    out_ns[STAGE_QUEUE] = step_to(&at, req->taken_ns);
    out_ns[STAGE_WAIT] = step_to(&at, req->batched_ns);
    uint64_t in_flight_ns = step_to(&at, req->done_ns);
    out_ns[STAGE_DEVICE] = req->device_ns < in_flight_ns ? req->device_ns : in_flight_ns;
    out_ns[STAGE_LAUNCH] = in_flight_ns - out_ns[STAGE_DEVICE];
    out_ns[STAGE_REPLY] = step_to(&at, req->replied_ns);
    out_ns[STAGE_SEND] = step_to(&at, sent_ns);
}

void request_sent(const struct request *req)
{
    if (!is_step(req))
        return;
    uint64_t stage_ns[STAGE_N], total_ns = 0;
    request_stages(req, clock_now_ns(), stage_ns);
    for (enum stage s = 0; s < STAGE_N; s++) {
        stats_observe_stage_ns(s, stage_ns[s]);
        total_ns += stage_ns[s];
    }
    if (slow_is(total_ns))
        log_slow_step(req, stage_ns, total_ns);
}

void request_reply_error(struct request *req, attn_status st, uint64_t retry_after_us,
                         const char *format, ...)
{
    char sentence[MAX_SENTENCE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    /* protobuf strings must be UTF-8, and the sentence may quote any bytes of a client */
    for (char *c = sentence; *c != '\0'; c++)
        if ((unsigned char)*c < 0x20 || (unsigned char)*c >= 0x7f)
            *c = '?';
    req->why = sentence;
    if (req->shard != NULL) { /* the step is answered as a whole, when all shards are done */
        request_reply(req, st);
        return;
    }

    Attnd__Reply header = ATTND__REPLY__INIT;
    header.status = st;
    header.message = sentence;
    header.retry_after_us = retry_after_us;
    if (req->batched_ns != 0) {
        header.queue_ns = req->batched_ns - req->received_ns;
        header.device_ns = req->device_ns;
    }
    size_t head_bytes = wire_reply_head_bytes(&header);
    assert(head_bytes <= REQUEST_MIN_MSG_BYTES);
    if (req->reply == NULL && req->room != NULL) {
        req->reply = req->room;
    } else if (req->reply == NULL) {
        bool is_large = req->msg->capacity_bytes > REQUEST_MAX_REUSED_BYTES;
        req->reply = is_large ? iobuf_heap_new(head_bytes) : NULL;
        if (req->reply == NULL)
            req->reply = req->msg;
        else
            iobuf_release(req->msg);
        req->msg = NULL;
    }
    req->reply->offset = 0;
    req->reply->n_bytes = head_bytes;
    wire_reply_head_encode(&header, req->wire.request_id, 0, req->reply->data);
    request_reply(req, st);
}

bool request_seq(const Attnd__Request *h, uint64_t *out_name, uint32_t *out_epoch)
{
    *out_epoch = 0;
    switch (h->body_case) {
    case ATTND__REQUEST__BODY_OPEN:
        *out_name = h->open->seq;
        return true;
    case ATTND__REQUEST__BODY_FORK:
        *out_name = h->fork->seq;
        *out_epoch = h->fork->epoch;
        return true;
    case ATTND__REQUEST__BODY_TRUNCATE:
        *out_name = h->truncate->seq;
        *out_epoch = h->truncate->epoch;
        return true;
    case ATTND__REQUEST__BODY_COMMIT:
        *out_name = h->commit->seq;
        *out_epoch = h->commit->epoch;
        return true;
    case ATTND__REQUEST__BODY_TOKENS:
        *out_name = h->tokens->seq;
        *out_epoch = h->tokens->epoch;
        return true;
    case ATTND__REQUEST__BODY_CLOSE:
        *out_name = h->close->seq;
        *out_epoch = h->close->epoch;
        return true;
    case ATTND__REQUEST__BODY_NOTE:
        *out_name = h->note->seq;
        *out_epoch = h->note->epoch;
        return true;
    case ATTND__REQUEST__BODY_ADOPT:
        *out_name = h->adopt->seq;
        return true;
    case ATTND__REQUEST__BODY_EXPORT:
        *out_name = h->export->seq;
        *out_epoch = h->export->epoch;
        return true;
    case ATTND__REQUEST__BODY_IMPORT:
        *out_name = h->import->seq;
        *out_epoch = h->import->epoch;
        return true;
    case ATTND__REQUEST__BODY_KILL: /* of a sequence, not of a session */
        *out_name = h->kill->seq;
        return true;
    case ATTND__REQUEST__BODY_RETIRE:
        *out_name = h->retire->seq;
        return true;
    case ATTND__REQUEST__BODY_MOVE:
        *out_name = h->move->seq;
        return true;
    default:
        return false;
    }
}
