/* request.c: making, decoding, answering and freeing a request; the one place that counts steps.
 */
#include "daemon/request.h"
#include "daemon/clock.h"

#include <assert.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SENTENCE_BYTES = 480 };

struct request *request_new(const struct transport_ops *t, void *peer, struct iobuf_pool *pool,
                            size_t msg_bytes)
{
    struct request *req = malloc(sizeof(*req));
    if (req == NULL)
        return NULL;
    request_init(req, t, peer);
    size_t room = msg_bytes > REQUEST_MIN_MSG_BYTES ? msg_bytes : REQUEST_MIN_MSG_BYTES;
    req->msg = pool != NULL ? iobuf_acquire(pool, room) : iobuf_heap_new(room);
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
    struct iobuf *msg = iobuf_acquire(pool, msg_bytes);
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
    iobuf_release(req->msg);
    iobuf_release(req->reply);
    wire_arena_reset(&req->arena);
    free(req);
}

static bool is_step(const struct request *req)
{
    return req->wire.header != NULL && req->wire.header->body_case == ATTND__REQUEST__BODY_STEP;
}

/* Takes over what decoding gave: counts the request and sets its times. */
static attn_status decoded(struct request *req, attn_status st, uint64_t now_ns,
                           uint64_t default_timeout_us, uint64_t max_timeout_us)
{
    req->received_ns = now_ns;
    req->deadline_ns = now_ns + default_timeout_us * 1000;
    if (st != ATTN_OK) {
        req->wire.header = NULL;
        stats_add(messages_malformed, 1);
        return st;
    }
    stats_add(requests_received, 1);
    uint64_t timeout_us = req->wire.header->timeout_us;
    if (timeout_us > max_timeout_us)
        timeout_us = max_timeout_us;
    if (timeout_us != 0)
        req->deadline_ns = now_ns + timeout_us * 1000;
    if (is_step(req)) {
        stats_add(steps_received, 1);
        stats_add(steps_in_flight, 1);
    }
    return ATTN_OK;
}

attn_status request_decode(struct request *req, uint64_t now_ns, uint64_t default_timeout_us,
                           uint64_t max_timeout_us, char *why, size_t why_bytes)
{
    attn_status st = wire_request_decode(req->msg->data, req->msg->n_bytes, &req->arena, &req->wire,
                                         why, why_bytes);
    return decoded(req, st, now_ns, default_timeout_us, max_timeout_us);
}

attn_status request_decode_apart(struct request *req, uint8_t *head, uint8_t *payload,
                                 uint64_t now_ns, uint64_t default_timeout_us,
                                 uint64_t max_timeout_us, char *why, size_t why_bytes)
{
    attn_status st =
        wire_request_decode_apart(head, payload, &req->arena, &req->wire, why, why_bytes);
    return decoded(req, st, now_ns, default_timeout_us, max_timeout_us);
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
    assert(req->msg->pool != NULL); /* heap messages are refused, never served */
    iobuf_release(req->reply);
    req->reply = iobuf_acquire(req->msg->pool, n_bytes);
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
    assert(req->reply != NULL);
    if (is_step(req)) {
        uint64_t now_ns = clock_now_ns();
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
}

void request_reply_error(struct request *req, attn_status st, uint64_t retry_after_us,
                         const char *format, ...)
{
    char sentence[MAX_SENTENCE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    /* protobuf strings are UTF-8: a sentence that quotes a client's bytes must stay one */
    for (char *c = sentence; *c != '\0'; c++)
        if ((unsigned char)*c < 0x20 || (unsigned char)*c >= 0x7f)
            *c = '?';

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
