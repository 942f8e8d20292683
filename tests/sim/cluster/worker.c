/* worker.c: workers and their sequences, as clients/cluster has them: a sequence that was moved is
 * found where its daemon says, one whose daemon was declared dead is adopted elsewhere or made anew
 * from what was acknowledged. Each token's K and V follow from sequence, layer and position. And
 * those that go on with handles that are over, by a way that no cut touches. */
#include <stdlib.h>
#include <string.h>

#include "cluster.h"

enum { N_WORKERS = 2, MAX_OLD = 48, GARBAGE = 1 << 20 };

struct link {
    uint64_t session, registration; /* 0: none */
    uint32_t pool;
    struct ask *ask; /* on its way */
};

enum state { HOMELESS, SEARCHING, OPENING, READY, MISSING, CLOSING, CLOSED };

struct seq {
    uint32_t number, worker;
    uint64_t seed;
    enum state state;
    struct handle *at; /* NULL: nowhere */
    uint32_t len[C_LAYERS]; /* acknowledged */
    uint32_t have[C_LAYERS]; /* of them at this place */
    uint32_t maybe[C_LAYERS]; /* an append up to there may have been, or be, carried out */
    struct ask *ask; /* on its way */
    uint64_t since_ns; /* it is missing */
    struct node *where; /* that is asked for it */
    uint64_t name; /* of the copy that is searched for */
    uint32_t n_searched;
    bool has_read;
    struct note note;
};

static struct seq seqs[C_MAX_SEQS];
static struct link links[N_WORKERS][C_MAX_NODES];
static bool is_known[C_MAX_NODES]; /* a member, as the workers know */
static struct {
    struct handle *h;
    const struct seq *s;
    uint32_t pos;
} old[MAX_OLD];
static uint32_t n_old;
static bool is_quiet, is_closing;

/* --- tokens ----------------------------------------------------------------------------------- */

static void make_kv(uint64_t seed, uint32_t layer, uint32_t pos, float *k, float *v)
{
    uint64_t x = sim_mix(seed ^ ((uint64_t)layer << 40 | pos));
    for (uint32_t i = 0; i < C_KV_FLOATS; i++) {
        x = sim_mix(x + i + 1);
        k[i] = (float)(x >> 40) * 0x1p-24f;
        v[i] = (float)(x & 0xffffff) * 0x1p-24f;
    }
}

static void make_seen(const struct seq *s, uint32_t layer, uint32_t head, uint32_t n, uint64_t *out)
{
    for (uint32_t pos = 0; pos < n; pos++) {
        float k[C_KV_FLOATS], v[C_KV_FLOATS];
        make_kv(s->seed, layer, pos, k, v);
        out[pos] =
            device_token(k + head * C_DIM, C_DIM * sizeof *k, v + head * C_DIM, C_DIM * sizeof *v);
    }
}

/* What rows for q at [pos, pos + n) have to be. */
static float *expected(const struct seq *s, uint32_t layer, uint32_t pos, uint32_t n,
                       const float *q)
{
    float *out = sim_alloc((size_t)n * C_Q_FLOATS * sizeof *out);
    size_t group = C_GROUP * C_DIM;
    for (uint32_t h = 0; h < C_KV_HEADS; h++) {
        uint64_t seen[C_MAX_LEN + 8];
        make_seen(s, layer, h, pos + n, seen);
        for (uint32_t t = 0; t < n; t++) {
            size_t at = (t * C_KV_HEADS + h) * group;
            device_attend(seen, pos + t + 1, q + at, group * sizeof *q, false, (uint32_t)group,
                          C_GROUP, out + at, NULL);
        }
    }
    return out;
}

/* --- links ------------------------------------------------------------------------------------ */

void cluster_spec(Attnd__PoolSpec *spec)
{
    static Attnd__LayerSpec layer, *layers[] = {&layer};
    attnd__layer_spec__init(&layer);
    layer.scale = 1;
    spec->name = "pool";
    spec->num_layers = C_LAYERS;
    spec->num_q_heads = C_Q_HEADS;
    spec->num_kv_heads = C_KV_HEADS;
    spec->head_dim_k = C_DIM;
    spec->block_tokens = C_BLOCK;
    spec->n_blocks = C_BLOCKS;
    spec->q_dtype = ATTND__DTYPE__F32;
    spec->n_layers = 1;
    spec->layers = layers;
}

static void take_link(struct ask *a, const struct wire_reply *w)
{
    struct link *l = a->arg;
    const Attnd__Reply *r = w->header;
    if (l->ask != a)
        return;
    l->ask = NULL;
    if (r->status != ATTN_OK)
        *l = (struct link){0};
    else if (a->kind == ATTND__REQUEST__BODY_HELLO)
        l->session = r->hello->session;
    else
        l->pool = r->pool->pool;
}

/* Whether there is a session with a pool; if not, it is on its way. */
static struct link *link_ready(uint32_t worker, struct node *n)
{
    struct link *l = &links[worker][node_number(n)];
    Attnd__Hello hello = ATTND__HELLO__INIT;
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate create = ATTND__POOL_CREATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    if (l->registration != registry_number(n))
        *l = (struct link){.registration = registry_number(n)};
    if (l->pool != 0)
        return l;
    if (l->ask != NULL)
        return NULL;
    if (l->session == 0) {
        hello.protocol_version = 1;
        hello.client_name = "worker";
        hello.nonce = sim_random() | 1;
        h.body_case = ATTND__REQUEST__BODY_HELLO;
        h.hello = &hello;
    } else {
        cluster_spec(&spec);
        create.spec = &spec;
        h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
        h.pool_create = &create;
    }
    l->ask = ask_of(n, &h, l->session, NULL, 0, take_link, l);
    ask_send(l->ask);
    return NULL;
}

/* --- places ----------------------------------------------------------------------------------- */

/* A handle that is over; others go on with it. */
static void leave(struct seq *s, int state)
{
    struct handle *h = s->at;
    if (s->ask != NULL)
        s->ask->is_over = true; /* copies of it may still arrive */
    s->ask = NULL;
    s->at = NULL;
    if (h == NULL)
        return;
    h->state = state;
    if (h->is_late)
        return;
    uint32_t i = n_old < MAX_OLD ? n_old++ : sim_below(MAX_OLD);
    old[i].h = h;
    old[i].s = s;
    old[i].pos = s->have[0];
}

static void arrive(struct seq *s, struct node *n, const struct link *l, uint64_t name,
                   uint32_t epoch)
{
    struct handle *h = sim_alloc(sizeof *h);
    *h = (struct handle){.node = n,
                         .registration = l->registration,
                         .session = l->session,
                         .name = name,
                         .pool = l->pool,
                         .epoch = epoch,
                         .is_late = !registry_has(n)};
    s->at = h;
    s->note.is_lost |= s->state == SEARCHING;
    s->note.is_asked = true;
    s->state = READY;
}

static struct ask *ask_for(struct seq *s, struct node *n, const struct link *l, Attnd__Request *h,
                           uint64_t name, const void *payload, size_t payload_bytes,
                           void (*take)(struct ask *, const struct wire_reply *))
{
    struct ask *a = s->ask = ask_of(n, h, l->session, payload, payload_bytes, take, s);
    a->name = name;
    return a;
}

static void go_missing(struct seq *s)
{
    s->state = MISSING;
    s->since_ns = sim_now_ns;
    s->where = s->at->node;
}

static void make_anew(struct seq *s)
{
    s->state = HOMELESS;
    memset(s->have, 0, sizeof s->have);
    memcpy(s->maybe, s->len, sizeof s->maybe);
    note_begin(&s->note);
}

static bool is_session_gone(const Attnd__Reply *r)
{
    return r->status == ATTN_ENOTFOUND && strstr(r->message, "session") != NULL;
}

/* --- opening, closing ------------------------------------------------------------------------- */

static void take_open(struct ask *a, const struct wire_reply *w)
{
    struct seq *s = a->arg;
    const Attnd__Reply *r = w->header;
    struct link *l = &links[s->worker][node_number(a->node)];
    if (r->status == ATTN_EOVERLOAD || r->status == ATTN_EDEADLINE) {
        a->is_over = false; /* and so it is sent again: a copy may still be carried out */
        return;
    }
    s->ask = NULL;
    if (is_session_gone(r))
        *l = (struct link){0};
    if (r->status != ATTN_OK) {
        s->state = HOMELESS;
        return;
    }
    cluster_counts.rebuilt += s->len[0] + s->len[1] > 0;
    arrive(s, a->node, l, a->name, r->seq->epoch);
}

static void open_somewhere(struct seq *s)
{
    Attnd__Open b = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    struct node *n = node_at(sim_below(n_nodes));
    if (!is_known[node_number(n)])
        return;
    const struct link *l = link_ready(s->worker, n);
    if (l == NULL)
        return;
    b.seq = sim_random();
    b.pool = l->pool;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &b;
    s->state = OPENING;
    ask_send(ask_for(s, n, l, &h, b.seq, NULL, 0, take_open));
}

static void take_close(struct ask *a, const struct wire_reply *w)
{
    struct seq *s = a->arg;
    attn_status st = (attn_status)w->header->status;
    s->ask = NULL;
    if (st == ATTN_EOVERLOAD || st == ATTN_EDEADLINE)
        return;
    if (st == ATTN_ESTALE || st == ATTN_EMOVED) {
        go_missing(s); /* it is closed where it is */
        return;
    }
    leave(s, REPLACED);
    if (is_closing) {
        s->state = CLOSED;
        return;
    }
    s->seed = sim_random();
    memset(s->len, 0, sizeof s->len);
    make_anew(s);
}

static struct link *link_of(const struct seq *s)
{
    return &links[s->worker][node_number(s->at->node)];
}

static void close_it(struct seq *s)
{
    Attnd__Close b = ATTND__CLOSE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = s->at->name;
    b.epoch = s->at->epoch;
    h.body_case = ATTND__REQUEST__BODY_CLOSE;
    h.close = &b;
    ask_send(ask_for(s, s->at->node, link_of(s), &h, b.seq, NULL, 0, take_close));
}

/* --- finding ---------------------------------------------------------------------------------- */

/* Whether what was adopted is all that was acknowledged; where is_sure it must be. */
static bool is_whole(struct seq *s, const Attnd__Reply *r, bool is_sure)
{
    for (uint32_t l = 0; l < C_LAYERS; l++) {
        uint32_t got = r->seq->layer_len[l];
        if (got < s->have[l] && is_sure)
            sim_fail("sequence %u: layer %u had %u tokens, and %u are left", s->number, l,
                     s->have[l], got);
        if (got > s->maybe[l] && got > s->have[l])
            sim_fail("sequence %u: layer %u has %u tokens, and nobody has appended more than %u",
                     s->number, l, got, s->maybe[l]);
        if (got < s->len[l] && !is_sure)
            return false;
    }
    return true;
}

static void take_adopt(struct ask *a, const struct wire_reply *w)
{
    struct seq *s = a->arg;
    const Attnd__Reply *r = w->header;
    struct link *l = &links[s->worker][node_number(a->node)];
    s->ask = NULL;
    if (is_session_gone(r))
        *l = (struct link){0};
    if (s->state == SEARCHING && r->status != ATTN_OK)
        return; /* the next one is asked */
    if (r->status == ATTN_EMOVED || r->status == ATTN_ENOTFOUND) {
        leave(s, REPLACED);
        make_anew(s);
        return;
    }
    if (r->status != ATTN_OK)
        return;
    bool was_searching = s->state == SEARCHING;
    if (!is_whole(s, r, !was_searching)) { /* what a move has left: nobody's */
        Attnd__Close b = ATTND__CLOSE__INIT;
        Attnd__Request h = ATTND__REQUEST__INIT;
        b.seq = a->name;
        b.epoch = r->seq->epoch;
        h.body_case = ATTND__REQUEST__BODY_CLOSE;
        h.close = &b;
        struct ask *c = ask_of(a->node, &h, l->session, NULL, 0, NULL, NULL);
        c->name = a->name;
        ask_send(c);
        return;
    }
    leave(s, REPLACED);
    for (uint32_t i = 0; i < C_LAYERS; i++) {
        s->have[i] = r->seq->layer_len[i];
        s->len[i] = s->len[i] > s->have[i] ? s->len[i] : s->have[i];
        s->maybe[i] = s->len[i];
    }
    cluster_counts.found_moved++;
    arrive(s, a->node, l, a->name, r->seq->epoch);
}

static void adopt(struct seq *s, struct node *n, uint64_t name)
{
    Attnd__Adopt b = ATTND__ADOPT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    const struct link *l = link_ready(s->worker, n);
    if (l == NULL)
        return;
    b.seq = name;
    h.body_case = ATTND__REQUEST__BODY_ADOPT;
    h.adopt = &b;
    ask_send(ask_for(s, n, l, &h, name, NULL, 0, take_adopt));
}

static void take_locate(struct ask *a, const struct wire_reply *w)
{
    struct seq *s = a->arg;
    const Attnd__Reply *r = w->header;
    s->ask = NULL;
    if (is_session_gone(r))
        links[s->worker][node_number(a->node)] = (struct link){0};
    if (r->status == ATTN_ENOTFOUND && !is_session_gone(r)) {
        leave(s, REPLACED);
        make_anew(s);
    }
    if (r->status != ATTN_OK)
        return;
    struct node *to = node_of_url(r->moved->url);
    if (to != NULL)
        s->where = to;
    else if (a->node == s->at->node && sim_now_ns - s->since_ns > SIM_S)
        adopt(s, a->node, s->at->name); /* whoever has adopted it does not go on */
}

/* One that its daemon refuses: where it is now, or that it is nowhere. */
static void find(struct seq *s)
{
    Attnd__Locate b = ATTND__LOCATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    struct node *n = s->where;
    if (n != s->at->node) {
        if (is_known[node_number(n)])
            adopt(s, n, s->at->name);
        else if (sim_now_ns - s->since_ns > 3 * SIM_S) {
            leave(s, REPLACED); /* it was there, and that daemon is dead */
            make_anew(s);
        }
        return;
    }
    const struct link *l = link_ready(s->worker, n);
    if (l == NULL)
        return;
    b.seq = s->at->name;
    b.epoch = s->at->epoch;
    h.body_case = ATTND__REQUEST__BODY_LOCATE;
    h.locate = &b;
    ask_send(ask_for(s, n, l, &h, b.seq, NULL, 0, take_locate));
}

/* One whose daemon is dead: may be that it was moved before. What that daemon has itself, if it
 * comes back, is no more what was acknowledged: old handles may have appended to it. */
static void search(struct seq *s)
{
    while (s->n_searched < n_nodes) {
        struct node *n = node_at(s->n_searched);
        bool is_asked = is_known[s->n_searched] && n != s->where;
        if (is_asked && link_ready(s->worker, n) == NULL)
            return;
        s->n_searched++;
        if (is_asked) {
            adopt(s, n, s->name);
            return;
        }
    }
    make_anew(s);
}

void workers_lose(struct node *n)
{
    uint32_t at = node_number(n);
    is_known[at] = false;
    for (uint32_t w = 0; w < N_WORKERS; w++) {
        if (links[w][at].ask != NULL)
            links[w][at].ask->is_over = true;
        links[w][at] = (struct link){0};
    }
    for (uint32_t i = 0; i < cluster_plan.n_seqs; i++) {
        struct seq *s = &seqs[i];
        bool is_asking = s->ask != NULL && s->ask->node == n;
        if (is_asking) {
            s->ask->is_over = true;
            s->ask = NULL;
        }
        if (s->state == OPENING && is_asking)
            s->state = HOMELESS;
        if (s->at == NULL || s->at->node != n || (s->state == MISSING && s->where != n))
            continue; /* the last: it has moved, and is about to be adopted there */
        s->name = s->at->name;
        s->where = n;
        leave(s, LOST);
        if (s->state == CLOSING && is_closing) {
            s->state = CLOSED;
            continue;
        }
        s->state = SEARCHING;
        /* without a fence old handles may have appended to what a move has brought elsewhere */
        s->n_searched = cluster_plan.is_strict && sim_chance(500) ? 0 : n_nodes;
    }
}

void workers_find(struct node *n)
{
    is_known[node_number(n)] = registry_has(n);
}

/* --- steps ------------------------------------------------------------------------------------ */

static struct ask *step(struct seq *s, const struct handle *at, uint32_t layer, uint32_t pos,
                        uint32_t n, bool appends, bool attends, uint64_t seed,
                        void (*take)(struct ask *, const struct wire_reply *), void *arg)
{
    Attnd__Step b = ATTND__STEP__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    struct wire_step_layout l;
    char why[256];
    uint64_t name = at->name;
    uint32_t epoch = at->epoch;
    b.pool = at->pool;
    b.layer = layer;
    b.flags = (appends ? WIRE_STEP_APPEND : 0) | (attends ? WIRE_STEP_ATTEND : 0);
    b.dtype = ATTND__DTYPE__F32;
    b.n_seq = b.n_epoch = b.n_pos = b.n_n_tokens = 1;
    b.seq = &name;
    b.epoch = &epoch;
    b.pos = &pos;
    b.n_tokens = &n;
    if (wire_step_layout_of(
            &b, &(struct wire_shape){C_Q_HEADS, C_KV_HEADS, C_DIM, C_DIM, false, ATTN_F32, 0, 0},
            &l, why, sizeof why) != ATTN_OK)
        sim_fail("a step of a worker's is none: %s", why);
    uint8_t *payload = sim_alloc(l.request_bytes + 1);
    float *k = (float *)(void *)(payload + l.k_offset),
          *v = (float *)(void *)(payload + l.v_offset);
    for (uint32_t t = 0; t < n && appends; t++)
        make_kv(seed, layer, pos + t, k + t * C_KV_FLOATS, v + t * C_KV_FLOATS);
    float *q = (float *)(void *)(payload + l.q_offset);
    for (uint32_t i = 0; i < n * C_Q_FLOATS && attends; i++)
        q[i] = (float)sim_below(1 << 20) * 0x1p-20f;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &b;
    struct ask *a = ask_of(at->node, &h, at->session, payload, l.request_bytes, take, arg);
    a->name = name;
    a->appends = appends ? at : NULL;
    a->layer = layer;
    a->pos = pos;
    a->n = n;
    a->out = attends && s != NULL ? expected(s, layer, pos, n, q) : NULL;
    return a;
}

static void check_rows(const struct ask *a, const struct wire_reply *w)
{
    size_t bytes = (size_t)a->n * C_Q_FLOATS * sizeof(float);
    if (a->out == NULL)
        return;
    if (w->payload_bytes != bytes || memcmp(w->payload, a->out, bytes) != 0)
        sim_fail("daemon %u, request %llu of %04x: rows of layer %u from %u on are wrong",
                 node_number(a->node), (unsigned long long)a->id, (unsigned)(a->name & 0xffff),
                 a->layer, a->pos);
    cluster_counts.rows += a->n;
}

static void take_step(struct ask *a, const struct wire_reply *w)
{
    struct seq *s = a->arg;
    const Attnd__Reply *r = w->header;
    uint32_t past = a->pos + a->n;
    s->ask = NULL;
    switch (r->status) {
    case ATTN_OK:
        check_rows(a, w);
        s->has_read = true;
        if (a->appends == NULL)
            return;
        cluster_counts.appends += a->n;
        s->have[a->layer] = past;
        s->len[a->layer] = past > s->len[a->layer] ? past : s->len[a->layer];
        s->maybe[a->layer] = s->len[a->layer];
        return;
    case ATTN_ESTALE:
    case ATTN_EMOVED:
    case ATTN_ENOTFOUND:
        if (is_session_gone(r))
            *link_of(s) = (struct link){0};
        go_missing(s);
        return;
    case ATTN_EFENCED:
        cluster_counts.fenced++;
        return;
    case ATTN_EDEADLINE:
    case ATTN_EOVERLOAD:
    case ATTN_EINTERNAL:
        return; /* again */
    default:
        sim_fail("sequence %u: a step is answered %s \"%s\"", s->number,
                 attn_status_name((attn_status)r->status), r->message);
    }
}

static void append(struct seq *s)
{
    uint32_t l = sim_below(C_LAYERS);
    if (s->have[l] >= C_MAX_LEN || s->have[1 - l] == 0)
        l = 1 - l;
    bool is_again = s->have[l] < s->len[l];
    uint32_t most = is_again ? s->len[l] - s->have[l] : C_MAX_LEN - s->have[l];
    uint32_t n = 1 + sim_below(is_again ? 24 : 4);
    n = n < most ? n : most;
    if (s->maybe[l] > s->len[l])
        n = s->maybe[l] - s->have[l]; /* one that failed is repeated as it was */
    if (n == 0)
        return;
    if (s->have[l] + n > s->maybe[l])
        s->maybe[l] = s->have[l] + n;
    s->ask = step(s, s->at, l, s->have[l], n, true, sim_chance(800), s->seed, take_step, s);
    ask_send(s->ask);
}

static void read(struct seq *s)
{
    uint32_t l = sim_below(C_LAYERS);
    if (s->have[l] == 0)
        return;
    s->ask = step(s, s->at, l, s->have[l] - 1, 1, false, true, 0, take_step, s);
    ask_send(s->ask);
}

/* --- notes ------------------------------------------------------------------------------------ */

static void take_note(struct ask *a, const struct wire_reply *w)
{
    struct seq *s = a->arg;
    const Attnd__Reply *r = w->header;
    s->ask = NULL;
    if (r->status == ATTN_OK) {
        note_is_said(&s->note, a, &r->note->note);
        s->note.is_asked = s->note.is_lost = false;
    } else if (r->status == ATTN_ESTALE || r->status == ATTN_EMOVED ||
               r->status == ATTN_ENOTFOUND) {
        if (is_session_gone(r))
            *link_of(s) = (struct link){0};
        go_missing(s);
    }
}

/* Sets another note, or asks for what is there. */
static struct ask *note(struct seq *s, const struct handle *at, const uint8_t *bytes, size_t n)
{
    Attnd__Note b = ATTND__NOTE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.seq = at->name;
    b.epoch = at->epoch;
    b.has_note = bytes != NULL;
    b.note = (ProtobufCBinaryData){n, (uint8_t *)(uintptr_t)bytes}; /* packing only reads it */
    h.body_case = ATTND__REQUEST__BODY_NOTE;
    h.note = &b;
    struct ask *a = ask_of(at->node, &h, at->session, NULL, 0, s != NULL ? take_note : NULL, s);
    a->name = at->name;
    a->sets_note = bytes != NULL ? at : NULL;
    return a;
}

static void set_note(struct seq *s)
{
    uint8_t bytes[C_NOTE_BYTES];
    size_t n = note_next(&s->note, bytes);
    ask_send(s->ask = note(s, s->at, bytes, n));
}

static bool is_behind(const struct seq *s)
{
    return s->have[0] < s->len[0] || s->have[1] < s->len[1];
}

static void go_on(struct seq *s)
{
    if (is_closing) {
        s->state = CLOSING;
    } else if (s->note.is_lost) {
        set_note(s);
    } else if (s->note.is_asked) {
        ask_send(s->ask = note(s, s->at, NULL, 0));
    } else if (!is_quiet && sim_chance(60)) {
        set_note(s);
    } else if (is_behind(s)) {
        append(s);
    } else if (is_quiet && s->have[0] > 0 && s->have[1] > 0) {
        if (sim_chance(20)) /* so that its session lives */
            read(s);
    } else if (s->len[0] == C_MAX_LEN && s->len[1] == C_MAX_LEN) {
        close_it(s);
    } else if (sim_chance(cluster_plan.moves) && moves_running() < 4) {
        struct node *to = node_at(sim_below(n_nodes));
        if (to != s->at->node && is_known[node_number(to)])
            move_begin(s->at->node, s->at->name, to);
    } else if (sim_chance(800)) {
        append(s);
    } else {
        read(s);
    }
}

static void on_tick(void *arg, uint64_t word)
{
    struct seq *s = arg;
    (void)word;
    if (s->ask == NULL && s->state == READY)
        go_on(s);
    else if (s->ask == NULL && s->state == HOMELESS)
        open_somewhere(s);
    else if (s->ask == NULL && s->state == MISSING)
        find(s);
    else if (s->ask == NULL && s->state == SEARCHING)
        search(s);
    else if (s->ask == NULL && s->state == CLOSING)
        close_it(s);
    if (s->state != CLOSED)
        sim_at(cluster_ms(1, s->state == MISSING ? 30 : 12), SIM_WORLD, on_tick, s, 0);
}

/* --- old handles ------------------------------------------------------------------------------ */

static void on_old(void *arg, uint64_t word)
{
    (void)arg, (void)word;
    if (is_quiet)
        return;
    if (n_old > 0) {
        uint32_t i = sim_chance(700) && n_old < MAX_OLD ? n_old - 1 : sim_below(n_old);
        struct ask *a = sim_chance(200) ? note(NULL, old[i].h, (const uint8_t *)"old", 3)
                                        : step(NULL, old[i].h, 0, old[i].pos, 1, true, false,
                                               GARBAGE + i, NULL, NULL);
        a->goes_round = true;
        cluster_counts.old_handles++;
        ask_send(a);
    }
    sim_at(cluster_ms(1, 15), SIM_WORLD, on_old, NULL, 0);
}

/* --- the run ---------------------------------------------------------------------------------- */

uint64_t worker_name_at(const struct node *n)
{
    uint32_t first = sim_below(cluster_plan.n_seqs);
    for (uint32_t i = 0; i < cluster_plan.n_seqs; i++) {
        const struct seq *s = &seqs[(first + i) % cluster_plan.n_seqs];
        if (s->at != NULL && s->at->node == n)
            return s->at->name;
    }
    return 0;
}

void workers_begin(void)
{
    memset(seqs, 0, sizeof seqs);
    memset(links, 0, sizeof links);
    memset(is_known, 0, sizeof is_known);
    n_old = 0;
    is_quiet = is_closing = false;
    for (uint32_t i = 0; i < cluster_plan.n_seqs; i++) {
        seqs[i] = (struct seq){.number = i, .worker = i % N_WORKERS, .seed = sim_random()};
        note_begin(&seqs[i].note);
        sim_at(cluster_ms(0, 50), SIM_WORLD, on_tick, &seqs[i], 0);
    }
    sim_at(0, SIM_WORLD, on_old, NULL, 0);
}

void workers_quiesce(void)
{
    is_quiet = true;
}

bool workers_are_quiet(void)
{
    for (uint32_t i = 0; i < cluster_plan.n_seqs; i++)
        if (seqs[i].state != READY || seqs[i].ask != NULL || is_behind(&seqs[i]))
            return false;
    return true;
}

void workers_read_back(void)
{
    for (uint32_t i = 0; i < cluster_plan.n_seqs; i++) {
        seqs[i].has_read = seqs[i].len[0] + seqs[i].len[1] == 0;
        seqs[i].note.is_asked = true;
        if (seqs[i].state == READY && seqs[i].ask == NULL)
            read(&seqs[i]);
    }
}

bool workers_have_read(void)
{
    bool have = true;
    for (uint32_t i = 0; i < cluster_plan.n_seqs; i++)
        have &= seqs[i].has_read && !seqs[i].note.is_asked;
    return have && workers_are_quiet();
}

void workers_close(void)
{
    is_closing = true;
}

bool workers_have_closed(void)
{
    bool have = true;
    for (uint32_t i = 0; i < cluster_plan.n_seqs; i++)
        have &= seqs[i].state == CLOSED;
    return have;
}

void workers_check_places(void)
{
    for (uint32_t i = 0; i < n_nodes; i++) {
        uint64_t names[128];
        uint32_t n = node_list(node_at(i), names, 128), n_mine = 0;
        for (uint32_t k = 0; k < cluster_plan.n_seqs; k++)
            n_mine += seqs[k].at != NULL && seqs[k].at->node == node_at(i);
        for (uint32_t j = 0; j < n; j++) {
            bool is_mine = false;
            for (uint32_t k = 0; k < cluster_plan.n_seqs; k++)
                is_mine |= seqs[k].at != NULL && seqs[k].at->node == node_at(i) &&
                           seqs[k].at->name == names[j];
            if (!is_mine)
                sim_fail("daemon %u has %04x, and no worker has", i, (unsigned)(names[j] & 0xffff));
        }
        if (n != n_mine)
            sim_fail("daemon %u has %u sequences, workers have %u there", i, n, n_mine);
    }
}
