/* cards_tell.c: what engines tell and ask each other: sessions, requests that were carried out,
 * pools.
 *
 * A note is pushed before the reply that it belongs to; an engine takes its inbox first and its
 * notes then, and looks at the notes first: so a note is known before whatever its reply led to.
 */
#include <inttypes.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/cards_internal.h"
#include "daemon/clock.h"
#include "daemon/engine_pool.h"
#include "daemon/engine_queue.h"
#include "daemon/engine_session.h"
#include "daemon/engine_tenants.h"
#include "daemon/log.h"
#include "daemon/stack.h"
#include "daemon/stats.h"

enum { ASK_SECONDS = 30 };

enum call_state { CALL_WAITS, CALL_RUNS, CALL_IS_LEFT }; /* left: nobody waits for it any more */

static struct card_note *note_new(enum note_kind kind, uint32_t slot, uint64_t session)
{
    struct card_note *n = calloc(1, sizeof *n);
    if (n != NULL) {
        n->kind = kind;
        n->slot = slot;
        n->session = session;
    }
    return n;
}

static void note_push(struct engine *e, struct card_note *n)
{
    stack_push(&e->notes, n);
    engine_wake(e);
}

bool cards_is_quiet(const struct engine *e)
{
    return stack_is_empty(&e->notes) && stack_is_empty(&e->returned) &&
           stack_is_empty(&e->parts_in) && stack_is_empty(&e->parts_back);
}

/* --- sessions --------------------------------------------------------------------------------- */

attn_status cards_session_begin(struct cards *c, uint32_t slot, uint64_t id, uint32_t tenant,
                                const char *client)
{
    struct card_note *notes[CARDS_MAX] = {0};
    bool is_whole = cards_tenant_set(c, id, tenant) == ATTN_OK;
    for (uint32_t i = 1; i < c->n; i++) {
        notes[i] = note_new(NOTE_BEGIN, slot, id);
        is_whole &= notes[i] != NULL;
    }
    atomic_store(&c->slots[slot], is_whole ? c->n : 1);
    for (uint32_t i = 1; i < c->n; i++) {
        if (is_whole) {
            notes[i]->tenant = tenant;
            snprintf(notes[i]->client, sizeof notes[i]->client, "%s", client);
            note_push(c->engines[i], notes[i]);
        } else {
            free(notes[i]);
        }
    }
    return is_whole ? ATTN_OK : ATTN_ENOMEM;
}

void cards_session_end(struct cards *c, uint32_t slot, uint64_t id)
{
    cards_tenant_forget(c, id);
    if (atomic_load(&c->slots[slot]) == 1)
        return; /* it was not begun by the others */
    for (uint32_t i = 1; i < c->n; i++) {
        struct card_note *n = note_new(NOTE_END, slot, id);
        if (n != NULL)
            note_push(c->engines[i], n);
        else /* the slot stays taken, the card's sequences stay */
            log_error("no memory to end session %08" PRIx32 " on card %" PRIu32, session_label(id),
                      i);
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

static void session_begins(struct engine *e, const struct card_note *n)
{
    tenants_turn(e); /* it may be a new tenant's */
    session_restore(e->parts.sessions, n->slot, n->session, n->client, clock_now_ns());
    session_at(e->parts.sessions, n->slot)->tenant = tenants_of_id(e->parts.tenants, n->tenant);
    kv_owner_begin(e->parts.kv, n->slot, n->session, n->tenant, n->client);
}

static void session_ends(struct engine *e, const struct card_note *n)
{
    uint32_t slot;
    if (session_find(e->parts.sessions, n->session, &slot) == ATTN_OK)
        session_kill(e, slot, "the session has ended");
}

/* --- requests that were carried out ----------------------------------------------------------- */

void cards_saw(struct engine *e, uint32_t slot, uint64_t session, uint64_t request)
{
    struct cards *c = e->parts.cards;
    for (uint32_t i = 0; i < c->n; i++) {
        struct card_note *n = c->engines[i] == e ? NULL : note_new(NOTE_SAW, slot, session);
        if (n != NULL) {
            n->request = request;
            note_push(c->engines[i], n);
        } else if (c->engines[i] != e) {
            log_error("no memory to tell card %" PRIu32 " of a request", i);
        }
    }
}

static void request_is_seen(struct engine *e, const struct card_note *n)
{
    if (kv_owner_id(e->parts.kv, n->slot) == n->session)
        kv_owner_saw(e->parts.kv, n->slot, n->request);
}

/* --- calls ------------------------------------------------------------------------------------ */

attn_status cards_ask(struct engine *e, void (*fn)(struct engine *e, void *arg), void *arg)
{
    if (!e->has_thread) {
        fn(e, arg);
        return ATTN_OK;
    }
    struct card_note *n = note_new(NOTE_CALL, 0, 0);
    if (n == NULL)
        return ATTN_ENOMEM;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += ASK_SECONDS;
    n->fn = fn;
    n->arg = arg;
    sem_init(&n->done, 0, 0);
    note_push(e, n);
    while (sem_timedwait(&n->done, &until) != 0) {
        int waits = CALL_WAITS;
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        if (now.tv_sec < until.tv_sec)
            continue; /* a signal */
        if (atomic_compare_exchange_strong(&n->state, &waits, CALL_IS_LEFT))
            return ATTN_ETIMEDOUT;
        until.tv_sec = now.tv_sec + ASK_SECONDS; /* it is at work with what is ours */
    }
    sem_destroy(&n->done);
    free(n);
    return ATTN_OK;
}

/* true: the note is somebody else's. */
static bool call_run(struct engine *e, struct card_note *n)
{
    int waits = CALL_WAITS;
    if (!atomic_compare_exchange_strong(&n->state, &waits, CALL_RUNS)) {
        sem_destroy(&n->done);
        return false;
    }
    n->fn(e, n->arg);
    sem_post(&n->done);
    return true;
}

void card_move_tell(struct engine *e, struct card_move *m, struct card_note *n)
{
    n->kind = NOTE_MOVE;
    n->arg = m;
    note_push(e, n);
}

void cards_listen(struct engine *e)
{
    for (struct card_note *n = stack_take_all(&e->notes), *next; n != NULL; n = next) {
        next = n->next;
        if (n->kind == NOTE_MOVE) {
            card_move_step(e, n->arg);
            continue;
        }
        if (n->kind == NOTE_CALL && call_run(e, n))
            continue;
        if (n->kind == NOTE_BEGIN)
            session_begins(e, n);
        else if (n->kind == NOTE_END)
            session_ends(e, n);
        else if (n->kind == NOTE_SAW)
            request_is_seen(e, n);
        free(n);
    }
    for (struct request *req = stack_take_all(&e->returned), *next; req != NULL; req = next) {
        next = req->next;
        req->polled->reply(req);
    }
}

/* --- pools ------------------------------------------------------------------------------------ */

static void pool_say(struct engine *e, const struct pool *p, uint32_t index)
{
    struct card_pool *told = &e->parts.cards->pools[e->parts.card][index];
    struct kv_pool_spec ks = {0};
    uint32_t n_free = 0;
    bool is_split = p != NULL && pool_is_split(&p->split);
    if (p != NULL && (!is_split || e->parts.card == 0)) /* its blocks are counted there */
        kv_pool_info(e->parts.kv, p->id, &ks, &n_free);
    atomic_store_explicit(&told->is_split, is_split, memory_order_relaxed);
    atomic_store_explicit(&told->blocks, ks.n_blocks, memory_order_relaxed);
    atomic_store_explicit(&told->free, n_free, memory_order_relaxed);
    atomic_store_explicit(&told->cached, p == NULL ? 0 : kv_pool_cached(e->parts.kv, p->id),
                          memory_order_relaxed);
    atomic_store_explicit(&told->sequences, p == NULL ? 0 : kv_pool_sequences(e->parts.kv, p->id),
                          memory_order_relaxed);
    atomic_store_explicit(&told->bytes, p == NULL ? 0 : p->device_bytes, memory_order_relaxed);
}

void cards_publish(struct engine *e)
{
    uint32_t card = e->parts.card;
    atomic_store_explicit(&e->parts.cards->free_bytes[card], e->info.kv_bytes - e->device_bytes,
                          memory_order_relaxed);
    for (uint32_t i = 0; i < e->parts.cfg->max_pools; i++)
        pool_say(e, pool_of_kv(e, (kv_pool_id){i}), i);
    stats_card_set(card, STATS_CARD_SEQUENCES, e->gauges.sequences);
    stats_card_set(card, STATS_CARD_BLOCKS, e->gauges.blocks_total);
    stats_card_set(card, STATS_CARD_FREE, e->gauges.blocks_free);
    stats_card_set(card, STATS_CARD_MEMORY, e->info.kv_bytes);
}

uint64_t cards_least_free_bytes(const struct cards *c, const struct engine *but, uint64_t most)
{
    for (uint32_t i = 0; i < c->n_joined; i++) {
        uint64_t n = atomic_load_explicit(&c->free_bytes[i], memory_order_relaxed);
        most = c->engines[i] != but && n < most ? n : most;
    }
    return most;
}

struct pool_count cards_pool_count(const struct cards *c, const struct engine *but, uint32_t index)
{
    struct pool_count sum = {0};
    for (uint32_t i = 0; i < c->n_joined; i++) {
        struct card_pool *p = &c->pools[i][index];
        if (c->engines[i] == but)
            continue;
        sum.blocks += atomic_load_explicit(&p->blocks, memory_order_relaxed);
        sum.cached += atomic_load_explicit(&p->cached, memory_order_relaxed);
        sum.free += atomic_load_explicit(&p->free, memory_order_relaxed);
        sum.sequences += atomic_load_explicit(&p->sequences, memory_order_relaxed);
        sum.bytes += atomic_load_explicit(&p->bytes, memory_order_relaxed);
    }
    return sum;
}

void cards_stats_add(const struct cards *c, const struct engine *but, struct kv_stats *sum)
{
    struct kv_stats s;
    for (uint32_t i = 0; i < c->n_joined; i++) {
        if (c->engines[i] == but)
            continue;
        kv_stats_read(c->engines[i]->parts.kv, &s);
#define X(field) sum->field += s.field;
        KV_STATS_MAP(X)
#undef X
    }
}

struct pool_ask {
    const Attnd__PoolSpec *spec;
    uint32_t index, generation, tenant;
    attn_status status;
    char *why;
    size_t why_bytes;
};

static void pool_create_here(struct engine *e, void *arg)
{
    struct pool_ask *ask = arg;
    struct pool *p;
    const struct tenant *who = tenants_of_id(e->parts.tenants, ask->tenant);
    ask->status = pool_create(e, who, ask->spec, &p, ask->why, ask->why_bytes);
    if (ask->status == ATTN_OK && (uint32_t)(p - e->pools) != ask->index) {
        snprintf(ask->why, ask->why_bytes, "pool \"%s\" has another place on card %" PRIu32,
                 ask->spec->name, e->parts.card);
        ask->status = ATTN_EINTERNAL;
    }
    if (ask->status == ATTN_OK)
        pool_rename(e, p, ask->generation);
    cards_publish(e);
}

static void pool_drop_here(struct engine *e, void *arg)
{
    struct pool_ask *ask = arg;
    struct pool *p = pool_of_kv(e, (kv_pool_id){ask->index});
    ask->status = p == NULL ? ATTN_OK : pool_drop(e, p, ask->why, ask->why_bytes);
    cards_publish(e);
}

/* The others, from the first on; *out_n_done: how many did it. Lost ones are passed over. */
static attn_status ask_others(struct cards *c, void (*fn)(struct engine *e, void *arg),
                              struct pool_ask *ask, uint32_t n, uint32_t *out_n_done)
{
    for (*out_n_done = 0; *out_n_done + 1 < n; ++*out_n_done) {
        struct engine *e = c->engines[*out_n_done + 1];
        if (card_is_lost(e))
            continue;
        if (cards_ask(e, fn, ask) != ATTN_OK) {
            snprintf(ask->why, ask->why_bytes, "card %" PRIu32 " does not answer", e->parts.card);
            return ATTN_EOVERLOAD;
        }
        if (ask->status != ATTN_OK)
            return ask->status;
    }
    return ATTN_OK;
}

attn_status cards_pool_create(struct engine *lead, const struct pool *p,
                              const Attnd__PoolSpec *asked, char *why, size_t why_bytes)
{
    char ignored[WHY_BYTES];
    struct cards *c = lead->parts.cards;
    uint32_t n_done, n_undone;
    struct pool_ask ask = {asked, p->id.index, p->generation, p->tenant, ATTN_OK, why, why_bytes};
    if (pool_is_split(&p->split) && !cards_are_whole(c)) {
        snprintf(why, why_bytes, "split %s: a card is lost", attn_split_name(p->split.how));
        return ATTN_EDEVICE;
    }
    attn_status st = ask_others(c, pool_create_here, &ask, c->n_joined, &n_done);
    if (st == ATTN_OK)
        return ATTN_OK;
    ask.why = ignored;
    ask.why_bytes = sizeof ignored;
    ask_others(c, pool_drop_here, &ask, n_done + 1, &n_undone);
    return st;
}

attn_status cards_pool_drop(struct engine *lead, const struct pool *p, char *why, size_t why_bytes)
{
    char ignored[WHY_BYTES];
    struct cards *c = lead->parts.cards;
    uint32_t n_done, n_undone;
    struct pool_ask ask = {p->spec.wire, p->id.index, p->generation, p->tenant,
                           ATTN_OK,      why,         why_bytes};
    attn_status st = ask_others(c, pool_drop_here, &ask, c->n_joined, &n_done);
    if (st == ATTN_OK)
        return ATTN_OK;
    ask.why = ignored;
    ask.why_bytes = sizeof ignored;
    ask_others(c, pool_create_here, &ask, n_done + 1, &n_undone);
    return st;
}

/* --- a lost card ------------------------------------------------------------------------------ */

static bool is_of_split_pool(const struct engine *e, kv_seq_id id)
{
    struct kv_seq_info info;
    kv_seq_info(e->parts.kv, id, &info);
    const struct pool *p = pool_of_kv(e, info.pool);
    return p != NULL && pool_is_split(&p->split);
}

void cards_drop_sequences(struct engine *e, bool is_split)
{
    uint32_t n = 0;
    for (kv_seq_id id = {0}; kv_seq_next(e->parts.kv, UINT32_MAX, &id) == ATTN_OK; id.index++) {
        if (is_split && !is_of_split_pool(e, id))
            continue;
        if (seq_is_busy(e, id.index))
            continue; /* in a batch that has not come back */
        seq_close(e, id);
        seq_closed(e, id.index);
        n++;
    }
    if (n == 0)
        return;
    e->is_dirty = true;
    if (is_split)
        log_error("a card is lost, and %" PRIu32 " sequences that are split over it", n);
    else
        log_error("card %" PRIu32 " is lost, and %" PRIu32 " sequences with it", e->parts.card, n);
}
