/* operator.c: what operators ask of a daemon: figures, who holds what, events; to end, move,
 * change, drain or fence. Each is one request, and waits for its answer. */
#include "clients/libattn/core/core.h"

#include <stdio.h>
#include <string.h>

static attn_status take_json(struct client_request *r, const struct wire_reply *reply)
{
    char **out_json = r->take_arg;
    if (reply->header->body_case != ATTND__REPLY__BODY_STATS) {
        snprintf(r->result.message, sizeof r->result.message, "answer without a body");
        return ATTN_EPROTO;
    }
    *out_json = strdup(reply->header->stats->json);
    if (*out_json == NULL)
        snprintf(r->result.message, sizeof r->result.message, "no memory for the answer");
    return *out_json != NULL ? ATTN_OK : ATTN_ENOMEM;
}

attn_status attn_client_stats(attn_client *c, uint64_t timeout_us, char **out_json)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Stats stats = ATTND__STATS__INIT;
    if (out_json == NULL)
        return error_set(ATTN_EINVAL, "out_json is NULL");
    req.body_case = ATTND__REQUEST__BODY_STATS;
    req.stats = &stats;
    return client_call(c, &req, timeout_us, take_json, out_json);
}

attn_status attn_client_inspect(attn_client *c, const char *topic, uint64_t after,
                                uint64_t timeout_us, char **out_json)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Inspect inspect = ATTND__INSPECT__INIT;
    if (topic == NULL || out_json == NULL)
        return error_set(ATTN_EINVAL, "topic or out_json is NULL");
    inspect.topic = (char *)topic;
    inspect.after = after;
    req.body_case = ATTND__REQUEST__BODY_INSPECT;
    req.inspect = &inspect;
    return client_call(c, &req, timeout_us, take_json, out_json);
}

attn_status attn_client_watch(attn_client *c, uint64_t after, uint64_t wait_us, uint64_t timeout_us,
                              char **out_json)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Inspect inspect = ATTND__INSPECT__INIT;
    if (out_json == NULL)
        return error_set(ATTN_EINVAL, "out_json is NULL");
    inspect.topic = (char *)"events";
    inspect.after = after;
    inspect.wait_us = wait_us;
    req.body_case = ATTND__REQUEST__BODY_INSPECT;
    req.inspect = &inspect;
    return client_call(c, &req, wait_us + timeout_us, take_json, out_json);
}

static attn_status kill_call(attn_client *c, const Attnd__Kill *kill, uint64_t timeout_us)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    req.body_case = ATTND__REQUEST__BODY_KILL;
    req.kill = (Attnd__Kill *)kill;
    return client_call(c, &req, timeout_us, NULL, NULL);
}

attn_status attn_client_kill_session(attn_client *c, const char *session, uint64_t timeout_us)
{
    Attnd__Kill kill = ATTND__KILL__INIT;
    if (session == NULL || session[0] == '\0')
        return error_set(ATTN_EINVAL, "session is NULL or empty");
    kill.session = (char *)session;
    return kill_call(c, &kill, timeout_us);
}

attn_status attn_client_kill_seq(attn_client *c, const char *tenant, uint64_t seq,
                                 uint64_t timeout_us)
{
    Attnd__Kill kill = ATTND__KILL__INIT;
    kill.seq = seq;
    kill.tenant = (char *)(tenant != NULL ? tenant : "");
    return kill_call(c, &kill, timeout_us);
}

attn_status attn_client_retire_seq(attn_client *c, const char *tenant, uint64_t seq,
                                   uint64_t timeout_us)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Retire retire = ATTND__RETIRE__INIT;
    retire.seq = seq;
    retire.tenant = (char *)(tenant != NULL ? tenant : "");
    req.body_case = ATTND__REQUEST__BODY_RETIRE;
    req.retire = &retire;
    return client_call(c, &req, timeout_us, NULL, NULL);
}

attn_status attn_client_fence(attn_client *c, uint64_t since_ns, uint64_t timeout_us)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Fence fence = ATTND__FENCE__INIT;
    fence.sent_ns = since_ns == 0 ? attn_now_ns() : since_ns;
    req.body_case = ATTND__REQUEST__BODY_FENCE;
    req.fence = &fence;
    return client_call(c, &req, timeout_us, NULL, NULL);
}

attn_status attn_client_move_seq(attn_client *c, const char *tenant, uint64_t seq, uint32_t card,
                                 uint64_t timeout_us)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Move move = ATTND__MOVE__INIT;
    move.seq = seq;
    move.tenant = (char *)(tenant != NULL ? tenant : "");
    move.card = card;
    req.body_case = ATTND__REQUEST__BODY_MOVE;
    req.move = &move;
    return client_call(c, &req, timeout_us, NULL, NULL);
}

attn_status attn_client_configure(attn_client *c, const char *name, const char *value,
                                  uint64_t timeout_us)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Configure configure = ATTND__CONFIGURE__INIT;
    if (name == NULL || value == NULL)
        return error_set(ATTN_EINVAL, "name or value is NULL");
    configure.name = (char *)name;
    configure.value = (char *)value;
    req.body_case = ATTND__REQUEST__BODY_CONFIGURE;
    req.configure = &configure;
    return client_call(c, &req, timeout_us, NULL, NULL);
}

attn_status attn_client_pool_drop(attn_client *c, const char *tenant, const char *name,
                                  uint64_t timeout_us)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__PoolDrop drop = ATTND__POOL_DROP__INIT;
    if (name == NULL)
        return error_set(ATTN_EINVAL, "name is NULL");
    drop.name = (char *)name;
    drop.tenant = (char *)(tenant != NULL ? tenant : "");
    req.body_case = ATTND__REQUEST__BODY_POOL_DROP;
    req.pool_drop = &drop;
    return client_call(c, &req, timeout_us, NULL, NULL);
}

attn_status attn_client_reload(attn_client *c, uint64_t timeout_us, char **out_json)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Reload reload = ATTND__RELOAD__INIT;
    if (out_json == NULL)
        return error_set(ATTN_EINVAL, "out_json is NULL");
    req.body_case = ATTND__REQUEST__BODY_RELOAD;
    req.reload = &reload;
    return client_call(c, &req, timeout_us, take_json, out_json);
}

attn_status attn_client_drain(attn_client *c, uint64_t hold_us, uint64_t timeout_us)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    Attnd__Drain drain = ATTND__DRAIN__INIT;
    drain.hold_us = hold_us;
    req.body_case = ATTND__REQUEST__BODY_DRAIN;
    req.drain = &drain;
    return client_call(c, &req, timeout_us, NULL, NULL);
}
