/* renew.c: the renewal of a session's lease: a hello that names the session. Its answer also says
 * whether the session is gone and whether the daemon is a new process.
 *
 * A renewal has no slot and no deadline. Any thread may send one; the answer is taken by whichever
 * thread reads. The keeper (keep.c) sends them while the client is idle, and lead.c and reply.c
 * when they need to know what became of the session.
 */
#include "clients/libattn/core/core.h"

#define REPLY_BYTES 4096
#define ARENA_BYTES 2048

/* The number of the session goes with it, and comes back with the answer. */
static uint64_t renewal_id(uint32_t session_number)
{
    return (uint64_t)session_number << 32 | CLIENT_RENEWAL_ID;
}

static void *renewal_build(struct attn_client *c)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Hello hello = ATTND__HELLO__INIT;
    pthread_mutex_lock(&c->lock);
    req.session = hello.resume_session = c->info.session;
    uint64_t id = renewal_id(atomic_load(&c->session_number));
    pthread_mutex_unlock(&c->lock);
    hello.protocol_version = CLIENT_PROTOCOL_VERSION;
    hello.token = c->token != NULL ? c->token : hello.token;
    req.body_case = ATTND__REQUEST__BODY_HELLO;
    req.hello = &hello;
    void *m = c->t->ops->message_alloc(c->t, wire_request_head_bytes(&req), REPLY_BYTES);
    if (m != NULL)
        wire_request_head_encode(&req, id, 0, m);
    return m;
}

bool renewal_send(struct attn_client *c)
{
    void *m = renewal_build(c);
    if (m == NULL)
        return false;
    if (c->t->ops->send(c->t, CLIENT_RENEWAL_ID, m, false))
        return true;
    c->t->ops->message_free(c->t, m);
    return false;
}

void renewal_take(struct attn_client *c, struct client_message *m)
{
    uint8_t memory[ARENA_BYTES];
    char why[ATTN_MESSAGE_BYTES];
    struct wire_arena arena;
    struct wire_reply reply;
    wire_arena_init(&arena, memory, sizeof memory, WIRE_ARENA_LIMIT_BYTES);
    attn_status st = wire_reply_decode(m->base, m->bytes, &arena, &reply, why, sizeof why);
    pthread_mutex_lock(&c->lock);
    if (st == ATTN_OK && reply.request_id == renewal_id(atomic_load(&c->session_number))) {
        c->is_session_gone |= reply.header->status == ATTN_ENOTFOUND;
        if (reply.header->body_case == ATTND__REPLY__BODY_HELLO) {
            c->info.boot_id = reply.header->hello->boot_id;
            c->is_kept_daemon = reply.header->hello->is_kept;
        }
        c->is_renewed = true;
    }
    pthread_mutex_unlock(&c->lock);
    wire_arena_reset(&arena);
    c->t->ops->message_free(c->t, m->base);
}
