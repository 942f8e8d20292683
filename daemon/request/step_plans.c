/* request/step_plans.c: see request/step_plans.h. Sessions that have plans are in a table by their
 * numbers, which are random. */
#include "daemon/request/step_plans.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_CHAINS = 4096 };

struct step_plan {
    uint64_t request;
    size_t bytes;
    uint32_t n_layers;
    const uint32_t *layers; /* [n_layers] behind the struct, as the arrays of: */
    Attnd__Step step;
};

/* A session's plans, the oldest first. */
struct holder {
    struct holder *next; /* of its chain */
    uint64_t session, latest; /* the highest request that made one */
    uint32_t n;
    struct step_plan *plans[STEP_PLANS_OF_SESSION];
};

struct step_plans {
    pthread_mutex_t lock; /* of all below */
    size_t bytes;
    struct holder *chains[N_CHAINS];
};

struct step_plans *step_plans_open(void)
{
    struct step_plans *s = calloc(1, sizeof *s);
    if (s != NULL)
        pthread_mutex_init(&s->lock, NULL);
    return s;
}

/* Where the pointer to the session's holder is, or would be. */
static struct holder **holder_at(struct step_plans *s, uint64_t session)
{
    struct holder **at = &s->chains[session % N_CHAINS];
    while (*at != NULL && (*at)->session != session)
        at = &(*at)->next;
    return at;
}

static void holder_free(struct step_plans *s, struct holder **at)
{
    struct holder *h = *at;
    *at = h->next;
    for (uint32_t i = 0; i < h->n; i++) {
        s->bytes -= h->plans[i]->bytes;
        free(h->plans[i]);
    }
    free(h);
}

void step_plans_close(struct step_plans *s)
{
    if (s == NULL)
        return;
    for (uint32_t i = 0; i < N_CHAINS; i++)
        while (s->chains[i] != NULL)
            holder_free(s, &s->chains[i]);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static const struct step_plan *plan_find(const struct holder *h, uint64_t request)
{
    for (uint32_t i = 0; h != NULL && i < h->n; i++)
        if (h->plans[i]->request == request)
            return h->plans[i];
    return NULL;
}

/* --- plans come ------------------------------------------------------------------------------- */

static size_t items_bytes(size_t n_items)
{
    return n_items * (sizeof(uint64_t) + 3 * sizeof(uint32_t));
}

/* to gets what of says, its arrays in memory of items_bytes. */
static void copy_step(Attnd__Step *to, const Attnd__Step *of, void *memory)
{
    size_t n = of->n_seq;
    uint64_t *seq = memory;
    uint32_t *epoch = (uint32_t *)(seq + n), *pos = epoch + n, *n_tokens = pos + n;
    memcpy(seq, of->seq, n * sizeof *seq);
    memcpy(epoch, of->epoch, n * sizeof *epoch);
    memcpy(pos, of->pos, n * sizeof *pos);
    memcpy(n_tokens, of->n_tokens, n * sizeof *n_tokens);
    to->pool = of->pool;
    to->flags = of->flags;
    to->dtype = of->dtype;
    to->n_seq = to->n_epoch = to->n_pos = to->n_n_tokens = n;
    to->seq = seq;
    to->epoch = epoch;
    to->pos = pos;
    to->n_tokens = n_tokens;
}

static size_t plan_bytes(const Attnd__Plan *h)
{
    return sizeof(struct step_plan) + items_bytes(h->step->n_seq) + h->n_layers * sizeof(uint32_t);
}

static struct step_plan *plan_new(const struct request *req)
{
    const Attnd__Plan *h = req->wire.header->plan;
    struct step_plan *p = malloc(plan_bytes(h));
    if (p == NULL)
        return NULL;
    uint32_t *layers = (uint32_t *)((uint8_t *)(p + 1) + items_bytes(h->step->n_seq));
    memcpy(layers, h->layers, h->n_layers * sizeof *layers);
    *p = (struct step_plan){
        .request = req->wire.request_id,
        .bytes = plan_bytes(h),
        .n_layers = (uint32_t)h->n_layers,
        .layers = layers,
    };
    attnd__step__init(&p->step);
    copy_step(&p->step, h->step, p + 1);
    return p;
}

/* The plan may be put there; room: bytes that its session's oldest makes free for it. */
static attn_status may_put(const struct step_plans *s, const struct holder *h,
                           const struct request *req, char *why, size_t why_bytes)
{
    size_t room = h != NULL && h->n == STEP_PLANS_OF_SESSION ? h->plans[0]->bytes : 0;
    if (h != NULL && req->wire.request_id <= h->latest) {
        snprintf(why, why_bytes, "plan: request %" PRIu64 " is over, a later plan has been taken",
                 req->wire.request_id);
        return ATTN_EINVAL;
    }
    if (s->bytes - room + plan_bytes(req->wire.header->plan) > STEP_PLANS_MAX_BYTES) {
        snprintf(why, why_bytes, "all plans have %zu bytes, the most is %d: send whole steps",
                 s->bytes, STEP_PLANS_MAX_BYTES);
        return ATTN_EOVERLOAD;
    }
    return ATTN_OK;
}

static void put(struct step_plans *s, struct holder *h, struct step_plan *p)
{
    if (h->n == STEP_PLANS_OF_SESSION) {
        s->bytes -= h->plans[0]->bytes;
        free(h->plans[0]);
        memmove(h->plans, h->plans + 1, --h->n * sizeof h->plans[0]);
    }
    h->plans[h->n++] = p;
    h->latest = p->request;
    s->bytes += p->bytes;
}

attn_status step_plans_put(struct step_plans *s, const struct request *req, char *why,
                           size_t why_bytes)
{
    uint64_t session = req->wire.header->session;
    pthread_mutex_lock(&s->lock);
    struct holder **at = holder_at(s, session);
    struct step_plan *p = NULL;
    attn_status st = ATTN_OK;
    if (plan_find(*at, req->wire.request_id) != NULL)
        goto out;
    st = may_put(s, *at, req, why, why_bytes);
    if (st != ATTN_OK)
        goto out;
    p = plan_new(req);
    if (p != NULL && *at == NULL && (*at = calloc(1, sizeof **at)) != NULL)
        (*at)->session = session;
    if (p == NULL || *at == NULL) {
        free(p);
        snprintf(why, why_bytes, "no memory for a plan of %zu items",
                 req->wire.header->plan->step->n_seq);
        st = ATTN_ENOMEM;
        goto out;
    }
    put(s, *at, p);
out:
    pthread_mutex_unlock(&s->lock);
    return st;
}

uint64_t step_plans_latest(struct step_plans *s, uint64_t session)
{
    pthread_mutex_lock(&s->lock);
    const struct holder *h = *holder_at(s, session);
    uint64_t latest = h != NULL ? h->latest : 0;
    pthread_mutex_unlock(&s->lock);
    return latest;
}

void step_plans_end(struct step_plans *s, uint64_t session)
{
    pthread_mutex_lock(&s->lock);
    struct holder **at = holder_at(s, session);
    if (*at != NULL)
        holder_free(s, at);
    pthread_mutex_unlock(&s->lock);
}

/* --- steps of them ---------------------------------------------------------------------------- */

static bool has_layer(const struct step_plan *p, uint32_t layer)
{
    if (layer < p->n_layers && p->layers[layer] == layer) /* as most plans have it */
        return true;
    for (uint32_t i = 0; i < p->n_layers; i++)
        if (p->layers[i] == layer)
            return true;
    return false;
}

attn_status step_plans_fill(struct step_plans *s, struct request *req, char *why, size_t why_bytes)
{
    const Attnd__Request *h = req->wire.header;
    Attnd__Step *step = (Attnd__Step *)(uintptr_t)h->step; /* in the request's arena */
    attn_status st = ATTN_OK;
    pthread_mutex_lock(&s->lock);
    const struct step_plan *p = plan_find(*holder_at(s, h->session), step->plan);
    void *memory = NULL;
    if (p == NULL) {
        snprintf(why, why_bytes,
                 "step.plan is %" PRIu64 ", no such plan (any more): send the whole step",
                 step->plan);
        st = ATTN_ENOPLAN;
    } else if (!has_layer(p, step->layer)) {
        snprintf(why, why_bytes, "step.layer is %" PRIu32 ", plan %" PRIu64 " does not have it",
                 step->layer, step->plan);
        st = ATTN_EINVAL;
    } else if ((memory = wire_arena_alloc(&req->arena, items_bytes(p->step.n_seq))) == NULL) {
        snprintf(why, why_bytes, "no memory for a step of %zu items", p->step.n_seq);
        st = ATTN_ENOMEM;
    } else {
        copy_step(step, &p->step, memory);
    }
    pthread_mutex_unlock(&s->lock);
    return st;
}
