/* session.c: a client's session: hello, which makes or resumes it, and goodbye, which gives it up.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "clients/libattn/core/core.h"

#define GOODBYE_US 1000000u /* no close takes longer for a daemon that does not answer */

static void copy_text(char *dst, size_t bytes, const char *src)
{
    snprintf(dst, bytes, "%s", src);
}

struct hello_answer {
    struct attn_client_info info;
    char lane_url[sizeof((struct attn_client *)0)->lane_url];
    uint64_t last_request_id;
    bool is_kept;
};

static attn_status take_hello(struct client_request *r, const struct wire_reply *reply)
{
    if (reply->header->body_case != ATTND__REPLY__BODY_HELLO) {
        copy_text(r->result.message, sizeof r->result.message, "answer to hello without a body");
        return ATTN_EPROTO;
    }
    const Attnd__HelloReply *h = reply->header->hello;
    struct hello_answer *out = r->take_arg;
    struct attn_client_info *info = &out->info;
    out->last_request_id = h->last_request_id;
    info->protocol_version = h->protocol_version;
    out->is_kept = h->is_kept;
    info->boot_id = h->boot_id;
    info->session = h->session;
    info->lease_us = h->lease_us;
    info->max_message_bytes = h->max_message_bytes;
    info->max_step_items = h->max_step_items;
    info->max_step_tokens = h->max_step_tokens;
    info->max_seq_tokens = h->max_seq_tokens;
    info->max_sequences = h->max_sequences;
    copy_text(info->server_version, sizeof info->server_version, h->server_version);
    copy_text(info->backend, sizeof info->backend, h->backend);
    copy_text(out->lane_url, sizeof out->lane_url, h->lane_url);
    return ATTN_OK;
}

static attn_status say_hello(struct attn_client *c, uint64_t session, uint64_t timeout_us,
                             struct hello_answer *out)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Hello hello = ATTND__HELLO__INIT;
    hello.protocol_version = CLIENT_PROTOCOL_VERSION;
    hello.client_name = c->name;
    hello.resume_session = session;
    hello.token = c->token != NULL ? c->token : hello.token;
    if (session == 0 && getrandom(&hello.nonce, sizeof hello.nonce, GRND_NONBLOCK) < 0)
        hello.nonce = 0; /* the daemon then knows a repeated hello by connection and request id */
    req.body_case = ATTND__REQUEST__BODY_HELLO;
    req.hello = &hello;
    return client_call(c, &req, timeout_us, take_hello, out);
}

attn_status session_begin(struct attn_client *c, uint64_t session, uint64_t timeout_us)
{
    struct hello_answer answer = {0};
    const struct client_transport_ops *ops = c->t->ops;
    attn_status st = say_hello(c, session, timeout_us, &answer);
    if (st != ATTN_OK)
        return st;
    struct attn_client_info info = answer.info;
    uint64_t most = ops->max_message(c->t);
    if (most != 0 && info.max_message_bytes > most)
        info.max_message_bytes = most;
    if (info.max_message_bytes > CLIENT_HELLO_REPLY_BYTES / 2) /* an answer's header comes on top */
        ops->set_max_message(c->t, info.max_message_bytes + WIRE_MAX_HEADER_BYTES);
    pthread_mutex_lock(&c->lock);
    c->info = info;
    copy_text(c->lane_url, sizeof c->lane_url, answer.lane_url);
    uint64_t last = answer.last_request_id >> REQUEST_SLOT_BITS;
    c->id_high = last > c->id_high ? last : c->id_high; /* ids of a session rise */
    c->is_session_gone = false;
    c->has_made_session = session == 0;
    c->is_kept_daemon = answer.is_kept;
    c->known_generation = ops->generation(c->t);
    c->is_streaming = ops->is_shared && strcmp(info.backend, "cpu") != 0;
    atomic_fetch_add(&c->session_number, 1);
    pthread_mutex_unlock(&c->lock);
    return ATTN_OK;
}

/* A session that was resumed is left to who made it: other clients may use it. */
void session_end(struct attn_client *c)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Goodbye goodbye = ATTND__GOODBYE__INIT;
    pthread_mutex_lock(&c->lock);
    bool is_ours = c->has_made_session && !c->is_session_gone;
    pthread_mutex_unlock(&c->lock);
    if (!is_ours || !c->t->ops->is_connected(c->t))
        return;
    struct error_kept kept = error_keep();
    req.body_case = ATTND__REQUEST__BODY_GOODBYE;
    req.goodbye = &goodbye;
    client_call(c, &req, GOODBYE_US, NULL, NULL); /* else the lease ends it */
    error_restore(&kept);
}

attn_status attn_client_reopen(attn_client *c, uint64_t timeout_us)
{
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    session_end(c);
    return session_begin(c, 0, timeout_us);
}

attn_status attn_client_ping(attn_client *c, uint64_t timeout_us, uint64_t *out_ns)
{
    struct hello_answer answer = {0};
    uint64_t start_ns = attn_now_ns();
    attn_status st = client_check(c);
    if (st == ATTN_OK)
        st = say_hello(c, client_info(c).session, timeout_us, &answer);
    if (st == ATTN_OK) {
        pthread_mutex_lock(&c->lock);
        c->info.boot_id = answer.info.boot_id;
        c->is_kept_daemon = answer.is_kept;
        pthread_mutex_unlock(&c->lock);
    }
    if (st == ATTN_OK && out_ns != NULL)
        *out_ns = attn_now_ns() - start_ns;
    return st;
}
