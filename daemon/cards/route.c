/* route.c: sends a request to the engine of its card, which its epoch, its sequence's name or its
 * pool decides. The route lock is held for reading from that decision until the request is in the
 * engine's inbox, and for writing while a sequence changes its card (cards/move.c), so requests of
 * one connection stay in order.
 */
#include "daemon/cards/route.h"

#include <inttypes.h>
#include <stdio.h>

#include "daemon/base/stack.h"
#include "daemon/base/stats.h"
#include "daemon/cards/cards.h"
#include "daemon/cards/internal.h"
#include "daemon/cards/names.h"
#include "daemon/cards/prefix.h"
#include "daemon/cards/step.h"
#include "daemon/engine/core/inbox.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/operator/lists.h"

enum { NO_POOL = UINT32_MAX };

/* reply of a request whose transport the primary polls: passes it to the primary's thread, the only
 * one that may reply there. */
static void give_back(struct request *req)
{
    struct engine *primary = req->primary;
    if (req->bell != NULL) { /* req->why is valid only during this call */
        snprintf(req->bell->why, sizeof req->bell->why, "%s", req->why == NULL ? "" : req->why);
        req->why = req->bell->why;
    }
    stack_push(&primary->returned, req);
    engine_wake(primary);
}

/* Stands in for the table of a polled transport, and passes replies through give_back. */
static const struct transport_ops *returning_ops(enum stats_transport label)
{
    static const struct transport_ops shm = {.label = STATS_SHM, .reply = give_back};
    static const struct transport_ops gpu = {.label = STATS_GPU, .reply = give_back};
    return label == STATS_GPU ? &gpu : &shm;
}

/* Lets a thread other than the primary's answer the request from now on. */
static void leave_primary(struct cards *c, struct request *req)
{
    if (!req->transport->is_polled)
        return;
    req->primary = c->peers.at[0];
    req->polled = req->transport;
    req->transport = returning_ops(req->transport->label);
}

/* Sends the request to a card. from: the engine that had it; NULL: it comes from a listener. */
static void send_to(struct cards *c, struct request *req, struct engine *from, uint32_t card)
{
    if (card != 0) {
        engine_renew(c->peers.at[0], request_session(req));
        leave_primary(c, req);
    }
    if (from == NULL)
        engine_take(c->peers.at[card], req);
    else
        engine_hand_over(c->peers.at[card], req);
}

/* Refuses the request: here, or if an engine had it, by sending it back there to be refused. */
static void refuse(struct cards *c, struct request *req, struct engine *from, attn_status st,
                   const char *why)
{
    if (from != NULL) {
        engine_hand_over(from, req);
        return;
    }
    engine_renew(c->peers.at[0], request_session(req));
    request_reply_error(req, st, 0, "%s", why);
}

static void send_step(struct cards *c, struct request *req, struct engine *from)
{
    if (req->shard != NULL) {
        cards_shard_again(c, req);
        return;
    }
    uint32_t of_cards = cards_of_step(c, req);
    if ((of_cards & (of_cards - 1)) == 0) {
        send_to(c, req, from, of_cards == 0 ? 0 : (uint32_t)__builtin_ctz(of_cards));
        return;
    }
    engine_renew(c->peers.at[0], request_session(req));
    leave_primary(c, req);
    cards_step_split(c, req, from, of_cards);
}

/* Where an open may go: to the primary if its pool is split. */
static struct card_place place_of_open(struct cards *c, const Attnd__Open *o)
{
    uint32_t pool = pool_index_of_handle(o->pool);
    bool is_split =
        pool < c->max_pools &&
        atomic_load_explicit(&c->peers.at[0]->published[pool].is_split, memory_order_relaxed);
    return (struct card_place){.must_be = is_split ? 0 : CARDS_MAX,
                               .prefix = is_split ? 0 : cards_prefix_card(c, o)};
}

/* The card where an open of these tokens would find most, as far as is known. */
static uint32_t card_of_probe(struct cards *c, const Attnd__Probe *ask)
{
    Attnd__Open o = ATTND__OPEN__INIT;
    o.pool = ask->pool;
    o.tokens = ask->tokens;
    o.n_tokens = ask->n_tokens;
    o.adapter = ask->adapter;
    struct card_place at = place_of_open(c, &o);
    return at.must_be != CARDS_MAX ? at.must_be : at.prefix != CARDS_MAX ? at.prefix : 0;
}

/* Sends a request that may make a sequence of this name. */
static void send_maker(struct cards *c, struct request *req, struct engine *from,
                       struct seq_name name, uint32_t pool, struct card_place to)
{
    const Attnd__Request *h = req->wire.header;
    char why[WHY_BYTES];
    bool no_memory;
    uint32_t at = cards_place(c, req, name, pool, to, &no_memory);
    if (at != CARDS_MAX) {
        if (h->body_case == ATTND__REQUEST__BODY_OPEN)
            cards_prefix_note(c, h->open, at);
        send_to(c, req, from, at);
        return;
    }
    snprintf(why, sizeof why, "sequence %" PRIu64 "%s", name.name,
             no_memory ? ": no memory for its name" : " is open");
    refuse(c, req, from, no_memory ? ATTN_ENOMEM : ATTN_EEXIST, why);
}

/* Tenant whose namespace applies: the session's, or the one that an operator names. */
static uint32_t tenant_of(struct cards *c, const Attnd__Request *h)
{
    if (!c->has_tenants)
        return TENANT_OPERATOR;
    if (h->body_case == ATTND__REQUEST__BODY_KILL)
        return tenant_id_of_name(h->kill->tenant);
    if (h->body_case == ATTND__REQUEST__BODY_RETIRE)
        return tenant_id_of_name(h->retire->tenant);
    if (h->body_case == ATTND__REQUEST__BODY_MOVE)
        return tenant_id_of_name(h->move->tenant);
    return cards_tenant(c, h->session);
}

static void send_by_name(struct cards *c, struct request *req, struct engine *from, uint64_t name)
{
    struct seq_name of = {tenant_of(c, req->wire.header), name};
    send_to(c, req, from, cards_of_name(c, of));
}

/* A fork goes to the card of its source sequence; but a repeated one, whose fork is open on another
 * card because either has moved since, goes there. */
static void send_fork(struct cards *c, struct request *req, struct engine *from)
{
    const Attnd__Fork *f = req->wire.header->fork;
    uint32_t tenant = tenant_of(c, req->wire.header);
    struct seq_name made = {tenant, f->new_seq};
    struct card_place at = {.must_be = cards_of_name(c, (struct seq_name){tenant, f->seq})};
    if (cards_are_elsewhere(c, at.must_be, made))
        send_to(c, req, from, cards_of_name(c, made));
    else
        send_maker(c, req, from, made, NO_POOL, at);
}

static void send_on(struct cards *c, struct request *req, struct engine *from)
{
    const Attnd__Request *h = req->wire.header;
    switch (h->body_case) {
    case ATTND__REQUEST__BODY_STEP:
        send_step(c, req, from);
        return;
    case ATTND__REQUEST__BODY_OPEN:
        send_maker(c, req, from, (struct seq_name){tenant_of(c, h), h->open->seq},
                   pool_index_of_handle(h->open->pool), place_of_open(c, h->open));
        return;
    case ATTND__REQUEST__BODY_FORK:
        send_fork(c, req, from);
        return;
    case ATTND__REQUEST__BODY_PROBE:
        send_to(c, req, from, card_of_probe(c, h->probe));
        return;
    case ATTND__REQUEST__BODY_CALLS: /* the last call's card ends it */
        leave_primary(c, req);
        send_to(c, req, from, 0);
        return;
    case ATTND__REQUEST__BODY_TOKENS:
        send_by_name(c, req, from, h->tokens->seq);
        return;
    case ATTND__REQUEST__BODY_TRUNCATE:
        send_by_name(c, req, from, h->truncate->seq);
        return;
    case ATTND__REQUEST__BODY_COMMIT:
        send_by_name(c, req, from, h->commit->seq);
        return;
    case ATTND__REQUEST__BODY_CLOSE:
        send_by_name(c, req, from, h->close->seq);
        return;
    case ATTND__REQUEST__BODY_EXPORT:
        send_by_name(c, req, from, h->export->seq);
        return;
    case ATTND__REQUEST__BODY_IMPORT:
        send_by_name(c, req, from, h->import->seq);
        return;
    case ATTND__REQUEST__BODY_ADOPT:
        send_by_name(c, req, from, h->adopt->seq);
        return;
    case ATTND__REQUEST__BODY_NOTE:
        send_by_name(c, req, from, h->note->seq);
        return;
    case ATTND__REQUEST__BODY_LOCATE:
        send_by_name(c, req, from, h->locate->seq);
        return;
    case ATTND__REQUEST__BODY_RETIRE:
        send_by_name(c, req, from, h->retire->seq);
        return;
    case ATTND__REQUEST__BODY_MOVE:
        send_by_name(c, req, from, h->move->seq);
        return;
    case ATTND__REQUEST__BODY_KILL:
        if (h->kill->session[0] != '\0')
            send_to(c, req, from, 0);
        else
            send_by_name(c, req, from, h->kill->seq);
        return;
    case ATTND__REQUEST__BODY_INSPECT:
        send_to(c, req, from, list_device(c->peers.at[0], h->inspect));
        return;
    default:
        send_to(c, req, from, 0);
        return;
    }
}

void cards_send_again(struct cards *c, struct request *list, struct engine *from)
{
    /* all before the first is sent, or a copy of a fork would keep the name for the old card */
    for (struct request *req = list; req != NULL; req = req->next)
        charge_unplace(&req->charge);
    stack_for_each(struct request, req, list)
        send_on(c, req, from);
}

uint32_t cards_of_plan(struct engine *primary, const struct request *plan)
{
    struct cards *c = cards_of(primary);
    pthread_rwlock_rdlock(&c->route);
    uint32_t of_cards = cards_of_step(c, plan);
    pthread_rwlock_unlock(&c->route);
    return of_cards & ~1u;
}

void cards_route(struct engine *e, struct request *req)
{
    struct cards *c = cards_of(e);
    pthread_rwlock_rdlock(&c->route);
    send_on(c, req, NULL);
    pthread_rwlock_unlock(&c->route);
}
