/* session.c: keeps the sessions of the other cards in step with the primary's. Each change is a
 * message to the other engines. */
#include "daemon/cards/session.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "cache/kv_owner.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/cards/cards.h"
#include "daemon/cards/internal.h"
#include "daemon/cards/names.h"
#include "daemon/engine/core/message.h"
#include "daemon/engine/core/session_run.h"

struct session_message {
    struct engine_message message; /* first */
    uint32_t slot, tenant;
    uint64_t session, request;
    char client[SESSION_NAME_BYTES];
};

static struct session_message *message_new(void (*on_message)(struct engine *e,
                                                              struct engine_message *n),
                                           uint32_t slot, uint64_t session)
{
    struct session_message *n = calloc(1, sizeof *n);
    if (n != NULL)
        *n = (struct session_message){
            .message.on_message = on_message, .slot = slot, .session = session};
    return n;
}

static void session_begins(struct engine *e, struct engine_message *message)
{
    struct session_message *n = (struct session_message *)message;
    session_restore(e->env.sessions, n->slot, n->session, n->client, clock_now_ns());
    session_at(e->env.sessions, n->slot)->tenant = tenants_of_id(e->env.tenants, n->tenant);
    kv_owner_begin(e->env.kv, n->slot, n->session, n->tenant, n->client);
    free(n);
}

attn_status cards_session_begin(struct engine *primary, uint32_t slot, uint64_t id, uint32_t tenant,
                                const char *client)
{
    struct cards *c = cards_of(primary);
    struct session_message *messages[CARDS_MAX] = {0};
    bool is_whole = cards_tenant_set(c, id, tenant) == ATTN_OK;
    for (uint32_t i = 1; i < c->peers.n; i++) {
        messages[i] = message_new(session_begins, slot, id);
        is_whole &= messages[i] != NULL;
    }
    atomic_store(&c->slots[slot], is_whole ? c->peers.n : 1);
    for (uint32_t i = 1; i < c->peers.n; i++) {
        if (is_whole) {
            messages[i]->tenant = tenant;
            snprintf(messages[i]->client, sizeof messages[i]->client, "%s", client);
            engine_message_push(c->peers.at[i], &messages[i]->message);
        } else {
            free(messages[i]);
        }
    }
    return is_whole ? ATTN_OK : ATTN_ENOMEM;
}

static void session_ends(struct engine *e, struct engine_message *message)
{
    struct session_message *n = (struct session_message *)message;
    uint32_t slot;
    if (session_find(e->env.sessions, n->session, &slot) == ATTN_OK)
        session_kill(e, slot, "the session has ended");
    free(n);
}

void cards_session_end(struct engine *primary, uint32_t slot, uint64_t id)
{
    struct cards *c = cards_of(primary);
    cards_tenant_forget(c, id);
    if (atomic_load(&c->slots[slot]) == 1)
        return; /* the other cards do not have it */
    for (uint32_t i = 1; i < c->peers.n; i++) {
        struct session_message *n = message_new(session_ends, slot, id);
        if (n != NULL) {
            engine_message_push(c->peers.at[i], &n->message);
        } else { /* the slot stays taken, and that card keeps the session's sequences */
            log_error("no memory to end session %08" PRIx32 " on card %" PRIu32, session_label(id),
                      i);
        }
    }
}

bool cards_session_release(struct engine *e, uint32_t slot)
{
    struct cards *c = cards_of(e);
    if (e->env.card == 0)
        return atomic_load(&c->slots[slot]) <= 1;
    if (atomic_fetch_sub(&c->slots[slot], 1) == 2)
        engine_wake(c->peers.at[0]);
    return true;
}

void cards_session_kept(struct cards *c, uint32_t slot, uint32_t n_cards)
{
    atomic_store(&c->slots[slot], n_cards);
}

/* --- requests that were carried out ----------------------------------------------------------- */

static void request_is_seen(struct engine *e, struct engine_message *message)
{
    struct session_message *n = (struct session_message *)message;
    if (kv_owner_id(e->env.kv, n->slot) == n->session)
        kv_owner_saw(e->env.kv, n->slot, n->request);
    free(n);
}

bool cards_request_begin(struct engine *e)
{
    struct cards *c = cards_of(e);
    struct session_message **notes = c->notes[e->env.card];
    for (uint32_t i = 0; i < c->peers.n; i++)
        if (i != e->env.card && notes[i] == NULL &&
            (notes[i] = message_new(request_is_seen, 0, 0)) == NULL)
            return false;
    return true;
}

void cards_request_done(struct engine *e, uint32_t slot, uint64_t session, uint64_t request)
{
    struct cards *c = cards_of(e);
    for (uint32_t i = 0; i < c->peers.n; i++) {
        struct session_message *n = c->notes[e->env.card][i];
        if (n == NULL)
            continue; /* this card */
        c->notes[e->env.card][i] = NULL;
        n->slot = slot;
        n->session = session;
        n->request = request;
        engine_message_push(c->peers.at[i], &n->message);
    }
}
