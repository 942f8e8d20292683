/* moved.c: sequences that were moved to another daemon.
 *
 * Requests of names that are not open go to the first device's engine, so what another one closes
 * is noted in its cache, too; in the other one's for requests that are on their way there.
 */
#include "daemon/engine/core/moved.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache/kv_move.h"
#include "cache/kv_seq.h"
#include "daemon/base/log.h"
#include "daemon/engine/core/message.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/session_run.h"

struct moved_message {
    struct engine_message message;
    uint32_t tenant, epoch;
    uint64_t name;
    struct kv_moved to;
    char url[KV_URL_BYTES];
};

attn_status moved_check(const Attnd__Moved *to, struct answer *a)
{
    size_t n = strlen(to->url);
    if (n == 0 || n >= KV_URL_BYTES)
        return answer_no(a, ATTN_EINVAL, "close.moved.url has %zu bytes, expected 1 to %d", n,
                         KV_URL_BYTES - 1);
    return ATTN_OK;
}

static void note(struct engine *e, const struct moved_message *m)
{
    uint64_t life_us = config_now(e->env.cfg, lease_us);
    kv_moved_note(e->env.kv, m->tenant, m->name, m->epoch, &m->to,
                  (uint32_t)(life_us / 1000000) + 1);
}

static void on_moved(struct engine *e, struct engine_message *message)
{
    struct moved_message *m = (struct moved_message *)message;
    note(e, m);
    free(m);
}

void moved_note(struct engine *e, uint32_t tenant, const Attnd__Close *close)
{
    struct moved_message *m = malloc(sizeof *m);
    if (m == NULL) { /* whoever asks for it is told that it is not here */
        log_error("no memory to note where sequence %" PRIu64 " went", close->seq);
        return;
    }
    *m = (struct moved_message){.message = {.on_message = on_moved},
                                .tenant = tenant,
                                .epoch = close->epoch,
                                .name = close->seq,
                                .to = {.id = close->moved->seq, .epoch = close->moved->epoch}};
    snprintf(m->url, sizeof m->url, "%s", close->moved->url);
    m->to.url = m->url;
    note(e, m);
    if (is_primary(e))
        free(m);
    else
        engine_message_push(peers_at(e, 0), &m->message);
}

attn_status moved_or_gone(struct engine *e, uint32_t tenant, uint64_t name, uint32_t epoch,
                          char *why, size_t why_bytes)
{
    struct kv_moved to;
    if (!kv_moved_find(e->env.kv, tenant, name, epoch, &to)) {
        snprintf(why, why_bytes, "sequence %" PRIu64 " is not open", name);
        return ATTN_ENOTFOUND;
    }
    snprintf(why, why_bytes, "sequence %" PRIu64 " has moved to %s: %" PRIu64 ", epoch %" PRIu32,
             name, to.url, to.id, to.epoch);
    return ATTN_EMOVED;
}

attn_status locate_run(struct engine *e, struct request *req, uint32_t session, struct answer *a)
{
    const Attnd__Locate *ask = req->wire.header->locate;
    uint32_t tenant = tenant_id(session_tenant(e, session));
    kv_seq_id seq;
    if (kv_seq_find(e->env.kv, tenant, ask->seq, &seq) == ATTN_OK) {
        struct kv_seq_info info;
        kv_seq_info(e->env.kv, seq, &info);
        Attnd__Moved *body = answer_moved(a);
        body->seq = ask->seq;
        body->epoch = info.epoch;
        return ATTN_OK;
    }
    struct kv_moved to;
    if (!kv_moved_find(e->env.kv, tenant, ask->seq, ask->epoch, &to))
        return answer_no(a, ATTN_ENOTFOUND, "sequence %" PRIu64 " is not open", ask->seq);
    Attnd__Moved *body = answer_moved(a);
    body->url = (char *)(uintptr_t)to.url; /* packing only reads it */
    body->seq = to.id;
    body->epoch = to.epoch;
    return ATTN_OK;
}
