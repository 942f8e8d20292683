/* session.c: see session.h. */
#include "daemon/cards/session.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/cards/cards.h"
#include "daemon/cards/internal.h"
#include "daemon/cards/names.h"
#include "daemon/cards/note.h"

struct session_note {
    struct card_note note; /* first */
    uint32_t slot, tenant;
    uint64_t session, request;
    char client[SESSION_NAME_BYTES];
    card_session_ends *end;
};

static struct session_note *note_new(void (*heard)(struct engine *e, struct card_note *n),
                                     uint32_t slot, uint64_t session)
{
    struct session_note *n = calloc(1, sizeof *n);
    if (n != NULL)
        *n = (struct session_note){.note.heard = heard, .slot = slot, .session = session};
    return n;
}

static void session_begins(struct engine *e, struct card_note *note)
{
    struct session_note *n = (struct session_note *)note;
    session_restore(e->parts.sessions, n->slot, n->session, n->client, clock_now_ns());
    session_at(e->parts.sessions, n->slot)->tenant = tenants_of_id(e->parts.tenants, n->tenant);
    kv_owner_begin(e->parts.kv, n->slot, n->session, n->tenant, n->client);
    free(n);
}

attn_status cards_session_begin(struct cards *c, uint32_t slot, uint64_t id, uint32_t tenant,
                                const char *client)
{
    struct session_note *notes[CARDS_MAX] = {0};
    bool is_whole = cards_tenant_set(c, id, tenant) == ATTN_OK;
    for (uint32_t i = 1; i < c->n; i++) {
        notes[i] = note_new(session_begins, slot, id);
        is_whole &= notes[i] != NULL;
    }
    atomic_store(&c->slots[slot], is_whole ? c->n : 1);
    for (uint32_t i = 1; i < c->n; i++) {
        if (is_whole) {
            notes[i]->tenant = tenant;
            snprintf(notes[i]->client, sizeof notes[i]->client, "%s", client);
            card_note_push(c->engines[i], &notes[i]->note);
        } else {
            free(notes[i]);
        }
    }
    return is_whole ? ATTN_OK : ATTN_ENOMEM;
}

static void session_ends(struct engine *e, struct card_note *note)
{
    struct session_note *n = (struct session_note *)note;
    uint32_t slot;
    if (session_find(e->parts.sessions, n->session, &slot) == ATTN_OK)
        n->end(e, slot, "the session has ended");
    free(n);
}

void cards_session_end(struct cards *c, uint32_t slot, uint64_t id, card_session_ends *end)
{
    cards_tenant_forget(c, id);
    if (atomic_load(&c->slots[slot]) == 1)
        return; /* it was not begun by the others */
    for (uint32_t i = 1; i < c->n; i++) {
        struct session_note *n = note_new(session_ends, slot, id);
        if (n != NULL) {
            n->end = end;
            card_note_push(c->engines[i], &n->note);
        } else { /* the slot stays taken, the card's sequences stay */
            log_error("no memory to end session %08" PRIx32 " on card %" PRIu32, session_label(id),
                      i);
        }
    }
}

bool cards_session_let_go(struct engine *e, uint32_t slot)
{
    struct cards *c = e->parts.cards;
    if (e->parts.card == 0)
        return atomic_load(&c->slots[slot]) <= 1;
    if (atomic_fetch_sub(&c->slots[slot], 1) == 2)
        engine_wake(c->engines[0]);
    return true;
}

void cards_session_kept(struct cards *c, uint32_t slot, uint32_t n_cards)
{
    atomic_store(&c->slots[slot], n_cards);
}

_Atomic uint32_t *cards_held(const struct cards *c)
{
    return c->held;
}

/* --- requests that were carried out ----------------------------------------------------------- */

static void request_is_seen(struct engine *e, struct card_note *note)
{
    struct session_note *n = (struct session_note *)note;
    if (kv_owner_id(e->parts.kv, n->slot) == n->session)
        kv_owner_saw(e->parts.kv, n->slot, n->request);
    free(n);
}

void cards_saw(struct engine *e, uint32_t slot, uint64_t session, uint64_t request)
{
    struct cards *c = e->parts.cards;
    for (uint32_t i = 0; i < c->n; i++) {
        struct session_note *n =
            c->engines[i] == e ? NULL : note_new(request_is_seen, slot, session);
        if (n != NULL) {
            n->request = request;
            card_note_push(c->engines[i], &n->note);
        } else if (c->engines[i] != e) {
            log_error("no memory to tell card %" PRIu32 " of a request", i);
        }
    }
}
