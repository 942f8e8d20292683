/* turns.c: the lines of requests that wait for the engine's thread, and their accounts. */
#include "daemon/engine/core/turns.h"

#include <inttypes.h>

#include "daemon/base/clock.h"
#include "daemon/engine/core/answer.h"
#include "daemon/engine/core/peers.h"

static const uint64_t MEMORY_LOOK_NS = 1000 * 1000; /* how often to ask whether it is ready */
static const int64_t MOST_AHEAD_NS = 10 * 1000 * 1000;
enum { NOBODY = TENANT_MAX };

void turns_init(struct engine *e)
{
    e->turns.nobody.share = 1;
    for (uint32_t i = 0; i <= NOBODY; i++)
        for (uint32_t k = 0; k < TURN_N_LINES; k++)
            TAILQ_INIT(&e->turns.of[i].lines[k]);
}

/* --- accounts --------------------------------------------------------------------------------- */

/* The tenant of an account; NULL: nobody's. */
static struct tenant *tenant_at(const struct engine *e, uint32_t of)
{
    return of == NOBODY ? NULL : (struct tenant *)(uintptr_t)tenants_at(e->env.tenants, of);
}

static struct flow *flow_at(struct engine *e, uint32_t of)
{
    return of == NOBODY ? &e->turns.nobody : &tenant_at(e, of)->flow;
}

static uint32_t account_of(const struct engine *e, const struct tenant *who)
{
    return who == NULL ? NOBODY : tenants_index(e->env.tenants, who);
}

uint32_t turns_of(const struct engine *e, const struct request *req)
{
    struct tenants *t = e->env.tenants;
    uint32_t slot;
    if (t == NULL)
        return NOBODY;
    if (session_find(e->env.sessions, req->wire.header->session, &slot) == ATTN_OK)
        return account_of(e, session_at(e->env.sessions, slot)->tenant);
    const char *name = req->principal.tenant; /* a hello's, or of a session that has ended */
    return name[0] == '\0' ? NOBODY : account_of(e, tenants_find(t, name));
}

/* Nothing of the account waits or is in work. */
static bool is_idle(const struct engine *e, uint32_t of)
{
    const struct tenant *who = tenant_at(e, of);
    const struct turn_list *lines = e->turns.of[of].lines;
    return TAILQ_EMPTY(&lines[TURN_ENGINE]) && (who == NULL || who->n_steps == 0);
}

uint64_t turn_begin(struct engine *e)
{
    uint64_t now_ns = clock_now_ns(), spent_ns = e->turns.spent_ns;
    e->turns.is_serving = true;
    e->turns.clear_bytes = 0;
    e->turns.over_ns = now_ns + (spent_ns < TURN_NS ? TURN_NS - spent_ns : 0);
    return now_ns;
}

bool turn_is_over(const struct engine *e)
{
    return clock_now_ns() >= e->turns.over_ns;
}

void turn_end(struct engine *e, uint32_t of, uint64_t began_ns, bool steps_wait)
{
    uint64_t took_ns = clock_now_ns() - began_ns;
    struct turn_queue *q = &e->turns.of[of];
    e->turns.is_serving = e->turns.may_clear = false;
    e->turns.spent_ns += took_ns;
    if (is_idle(e, of))
        flow_begin(flow_at(e, of), e->flow_clock);
    flow_charge(flow_at(e, of), &e->flow_clock, took_ns);
    q->ahead_ns = steps_wait ? q->ahead_ns + (int64_t)took_ns : 0;
}

void turns_note_batch(struct engine *e, const struct tenant *who, uint64_t took_ns)
{
    struct turn_queue *q = &e->turns.of[account_of(e, who)];
    if (TAILQ_EMPTY(&q->lines[TURN_ENGINE]))
        return;
    q->ahead_ns -= took_ns < (uint64_t)MOST_AHEAD_NS ? (int64_t)took_ns : MOST_AHEAD_NS;
    q->ahead_ns = q->ahead_ns < -MOST_AHEAD_NS ? -MOST_AHEAD_NS : q->ahead_ns;
}

/* --- lines ------------------------------------------------------------------------------------ */

bool turns_must_wait(const struct engine *e)
{
    const struct turns *t = &e->turns;
    return !t->is_serving && (t->n > t->n_memory || t->spent_ns >= TURN_NS);
}

void session_hold(struct engine *e, uint32_t session)
{
    session_at(e->env.sessions, session)->n_held++;
    if (!is_primary(e))
        atomic_fetch_add(&e->peers->held[session], 1);
}

void session_unhold(struct engine *e, uint32_t session)
{
    struct session *s = session_at(e->env.sessions, session);
    s->n_held--;
    if (!is_primary(e))
        atomic_fetch_sub(&e->peers->held[session], 1);
    if (s->id != 0) /* it has not ended */
        session_renew(e->env.sessions, session, e->turn_ns);
}

static void add(struct engine *e, struct request *req, enum turn_line line, bool is_first)
{
    uint32_t of = turns_of(e, req);
    struct turn_list *list = &e->turns.of[of].lines[line];
    if (line == TURN_ENGINE && is_idle(e, of))
        flow_begin(flow_at(e, of), e->flow_clock);
    req->turn_of = of;
    req->turn_line = line;
    if (req->task != NULL ||
        session_find(e->env.sessions, req->wire.header->session, &req->turn_session) != ATTN_OK)
        req->turn_session = SESSION_NONE;
    else
        session_hold(e, req->turn_session);
    if (is_first)
        TAILQ_INSERT_HEAD(list, req, turn);
    else
        TAILQ_INSERT_TAIL(list, req, turn);
    e->turns.n++;
    e->turns.n_memory += line == TURN_MEMORY;
    if (of != NOBODY)
        tenant_at(e, of)->n_turns++;
    if (req->deadline_ns < e->next_deadline_ns)
        e->next_deadline_ns = req->deadline_ns;
}

void turns_add(struct engine *e, struct request *req, struct task *task)
{
    req->task = task;
    add(e, req, TURN_ENGINE, false);
}

void turns_add_first(struct engine *e, struct request *req, struct task *task)
{
    req->task = task;
    add(e, req, TURN_ENGINE, true);
}

void turns_remove(struct engine *e, struct request *req)
{
    struct turns *t = &e->turns;
    TAILQ_REMOVE(&t->of[req->turn_of].lines[req->turn_line], req, turn);
    t->n--;
    t->n_memory -= req->turn_line == TURN_MEMORY;
    if (req->turn_of != NOBODY)
        tenant_at(e, req->turn_of)->n_turns--;
    if (req->turn_session != SESSION_NONE)
        session_unhold(e, req->turn_session);
    if (t->clearing == req)
        t->clearing = NULL;
}

/* The account that is next among those with requests in the line; NOBODY + 1: there are none. */
static uint32_t next_account(struct engine *e, enum turn_line line)
{
    uint32_t best = NOBODY + 1;
    uint64_t best_start = 0;
    for (uint32_t i = 0; i <= NOBODY; i++) {
        struct turn_queue *q = &e->turns.of[i];
        if (TAILQ_EMPTY(&q->lines[line]))
            continue;
        uint64_t start = line == TURN_ENGINE ? flow_at(e, i)->end : q->memory.end;
        if (best <= NOBODY && start >= best_start)
            continue;
        best = i;
        best_start = start;
    }
    return best;
}

/* Whether a batch of the payer's goes before the account's next request. */
static bool steps_are_first(struct engine *e, const struct tenant *payer, uint32_t of)
{
    uint32_t other = account_of(e, payer);
    if (other == of)
        return e->turns.of[of].ahead_ns > 0;
    return other == NOBODY || flow_at(e, other)->end <= flow_at(e, of)->end;
}

struct request *turns_next(struct engine *e, bool steps_wait, const struct tenant *payer)
{
    if (e->turns.n == e->turns.n_memory || e->turns.spent_ns >= TURN_NS)
        return NULL;
    uint32_t of = next_account(e, TURN_ENGINE);
    if (steps_wait && steps_are_first(e, payer, of))
        return NULL;
    struct request *req = TAILQ_FIRST(&e->turns.of[of].lines[TURN_ENGINE]);
    turns_remove(e, req);
    return req;
}

static uint64_t line_expire(struct engine *e, struct turn_list *line, uint64_t now_ns)
{
    uint64_t next_ns = UINT64_MAX;
    for (struct request *req = TAILQ_FIRST(line), *next; req != NULL; req = next) {
        next = TAILQ_NEXT(req, turn);
        if (req->task != NULL) /* that of its task counts */
            continue;
        if (req->deadline_ns > now_ns) {
            next_ns = req->deadline_ns < next_ns ? req->deadline_ns : next_ns;
            continue;
        }
        turns_remove(e, req);
        engine_refuse(e, req, ATTN_EDEADLINE, "%" PRIu64 " us passed before its turn came",
                      (now_ns - req->received_ns) / 1000);
    }
    return next_ns;
}

uint64_t turns_expire(struct engine *e, uint64_t now_ns)
{
    uint64_t next_ns = UINT64_MAX;
    for (uint32_t i = 0; e->turns.n > 0 && i <= NOBODY; i++)
        for (uint32_t k = 0; k < TURN_N_LINES; k++) {
            uint64_t ns = line_expire(e, &e->turns.of[i].lines[k], now_ns);
            next_ns = ns < next_ns ? ns : next_ns;
        }
    return next_ns;
}

void turns_refuse_of(struct engine *e, uint32_t session, attn_status st, const char *why)
{
    for (uint32_t i = 0; e->turns.n > 0 && i <= NOBODY; i++)
        for (uint32_t k = 0; k < TURN_N_LINES; k++) {
            struct turn_list *line = &e->turns.of[i].lines[k];
            for (struct request *req = TAILQ_FIRST(line), *next; req != NULL; req = next) {
                next = TAILQ_NEXT(req, turn);
                if (req->turn_session != session)
                    continue;
                turns_remove(e, req);
                engine_refuse(e, req, st, "%s", why);
            }
        }
}

/* --- memory ----------------------------------------------------------------------------------- */

bool turns_await_memory(struct engine *e, const struct pool *p, bool is_new)
{
    struct turns *t = &e->turns;
    bool may_ask = t->may_clear || t->n_memory == 0;
    if (p->ops->memory_ready == NULL || !is_primary(e) || !t->is_serving ||
        (may_ask && p->ops->memory_ready(p->backend, is_new ? NULL : p->device, &p->config)))
        return false;
    t->clear_bytes = p->ops->pool_bytes(p->backend, &p->config);
    return true;
}

bool turns_park(struct engine *e, struct request *req)
{
    struct turns *t = &e->turns;
    if (t->clear_bytes == 0)
        return false;
    uint32_t of = turns_of(e, req);
    struct turn_queue *q = &t->of[of];
    bool is_new = req->turn_line != TURN_MEMORY;
    q->memory.share = flow_at(e, of)->share;
    if (TAILQ_EMPTY(&q->lines[TURN_MEMORY]) && is_new)
        flow_begin(&q->memory, t->memory_clock);
    if (is_new)
        flow_charge(&q->memory, &t->memory_clock, t->clear_bytes >> 10);
    t->clear_bytes = 0;
    req->task = NULL;
    add(e, req, TURN_MEMORY, !is_new);
    if (t->may_clear || t->n_memory == 1)
        t->clearing = req;
    return true;
}

struct request *turns_next_of_memory(struct engine *e, uint64_t now_ns)
{
    struct turns *t = &e->turns;
    if (t->n_memory == 0 || now_ns - t->memory_at_ns < MEMORY_LOOK_NS)
        return NULL;
    t->memory_at_ns = now_ns;
    struct request *req = t->clearing;
    if (req == NULL)
        req = TAILQ_FIRST(&t->of[next_account(e, TURN_MEMORY)].lines[TURN_MEMORY]);
    turns_remove(e, req);
    t->may_clear = true;
    return req;
}

uint64_t turns_nap_ns(const struct engine *e, uint64_t ns)
{
    return e->turns.n_memory > 0 && ns > MEMORY_LOOK_NS ? MEMORY_LOOK_NS : ns;
}
