/* ask.c: requests as bytes, with what their answers must be. */
#include <string.h>

#include "model.h"

const char *const ask_kinds[] = {
    "hello",  "pool", "open",           "fork",   "truncate", "close", "adopt", "tokens", "export",
    "import", "kill", "end of session", "resize", "reserve",  "plan",  "step",  "gap",    "stale"};

bool seq_is_quiet(const struct seq *s)
{
    bool is_quiet = s->control == NULL && s->n_readers == 0;
    for (uint32_t l = 0; l < N_LAYERS; l++)
        is_quiet &= s->step[l] == NULL;
    return is_quiet;
}

struct ask *ask_new(struct peer *p, enum ask_kind kind)
{
    if (p->n_asks == MAX_ASKS)
        return NULL;
    struct ask *a = sim_alloc(sizeof *a);
    a->peer = p;
    a->kind = kind;
    p->asks[p->n_asks++] = a;
    a->id = p->n_asks;
    sim_counts.requests++;
    return a;
}

static void say(const struct ask *a, const Attnd__Request *h)
{
    char line[256] = "";
    int n = 0;
    if (!sim_is_verbose)
        return;
    for (uint32_t i = 0; i < a->n_items; i++)
        n += snprintf(line + n, sizeof line - (size_t)n, " %04x/%u:%u+%u",
                      (unsigned)(a->of[i]->name & 0xffff), h->step->epoch[i], a->pos[i],
                      a->n_tokens[i]);
    if (a->seq != NULL)
        snprintf(line, sizeof line, " %04x/%u len %u", (unsigned)(a->seq->name & 0xffff),
                 a->seq->epoch, a->len);
    sim_say("peer %u: request %llu is %s%s%s", a->peer->number, (unsigned long long)a->id,
            ask_kinds[a->kind], line, a->n_items > 0 && (a->flags & 1) ? " append" : "");
}

static uint8_t *message(const struct ask *a, const Attnd__Request *h, const void *payload,
                        size_t payload_bytes, size_t *out_bytes)
{
    size_t head = wire_request_head_bytes(h);
    uint8_t *bytes = sim_alloc(head + payload_bytes);
    wire_request_head_encode(h, a->id, payload_bytes, bytes);
    if (payload_bytes > 0)
        memcpy(bytes + head, payload, payload_bytes);
    *out_bytes = head + payload_bytes;
    return bytes;
}

struct ask *ask_send(struct ask *a, Attnd__Request *h, const void *payload, size_t payload_bytes)
{
    static const uint32_t timeouts_us[] = {500, 3000, 20000};
    h->session = a->kind == ASK_HELLO ? 0 : a->peer->session;
    if (sim_has_faults && sim_chance(60))
        h->timeout_us = timeouts_us[sim_below(3)];
    a->bytes = message(a, h, payload, payload_bytes, &a->n_bytes);
    say(a, h);
    peer_send(a);
    return a;
}

struct ask *ask_hello(struct peer *p)
{
    Attnd__Hello b = ATTND__HELLO__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    char name[32];
    struct ask *a = ask_new(p, ASK_HELLO);
    if (a == NULL)
        return NULL;
    snprintf(name, sizeof name, "peer %u", p->number);
    b.protocol_version = 1;
    b.client_name = name;
    b.resume_session = p->session;
    b.nonce = p->session == 0 ? sim_random() | 1 : 0;
    a->is_resuming = p->session != 0;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &b;
    return ask_send(a, &h, NULL, 0);
}

struct ask *ask_pool(struct peer *p)
{
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__LayerSpec layer = ATTND__LAYER_SPEC__INIT, *layers[] = {&layer};
    Attnd__PoolCreate b = ATTND__POOL_CREATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    struct ask *a = ask_new(p, ASK_POOL);
    if (a == NULL)
        return NULL;
    spec.name = "pool";
    spec.num_layers = N_LAYERS;
    spec.num_q_heads = Q_HEADS;
    spec.num_kv_heads = KV_HEADS;
    spec.head_dim_k = HEAD_DIM;
    spec.block_tokens = BLOCK_TOKENS;
    spec.n_blocks = sim_plan.n_blocks;
    spec.q_dtype = ATTND__DTYPE__F32;
    layer.scale = sim_plan.is_sum ? SIM_SCALE_SUM : 1;
    spec.n_layers = 1;
    spec.layers = layers;
    spec.split = (Attnd__Split)sim_plan.split;
    b.spec = &spec;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &b;
    return ask_send(a, &h, NULL, 0);
}

static bool names(const struct ask *a, uint64_t name)
{
    bool does = (a->seq != NULL && a->seq->name == name) ||
                (a->new_seq != NULL && a->new_seq->name == name);
    for (uint32_t i = 0; i < a->n_items; i++)
        does |= a->of[i]->name == name;
    return does;
}

/* Whether the daemon may still carry it out, or a copy of it, whatever epoch its sequence has. */
static bool may_come_late(const struct ask *a)
{
    bool makes = a->kind == ASK_OPEN || a->kind == ASK_FORK || a->kind == ASK_ADOPT;
    return !a->is_answered || a->kind == ASK_KILL || (makes && a->status != ATTN_OK);
}

static bool is_name_free(uint64_t name)
{
    for (uint32_t i = 0; i < n_peers; i++)
        for (uint64_t k = 0; k < peers[i]->n_asks; k++)
            if (names(peers[i]->asks[k], name) && may_come_late(peers[i]->asks[k]))
                return false;
    return true;
}

/* Any client's sequence that was closed, whose name another one takes, once; NULL: none. */
static struct seq *name_again(void)
{
    uint32_t n = n_peers * MAX_SEQS, first = sim_below(n);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = (first + i) % n;
        struct seq *s = peers[at / MAX_SEQS]->seqs[at % MAX_SEQS];
        if (s != NULL && s->closed_ns > process_empty_since_ns() && is_name_free(s->name))
            return s;
    }
    return NULL;
}

static struct seq *seq_new(struct peer *p)
{
    for (uint32_t i = 0; i < sim_plan.n_seqs; i++) {
        if (p->seqs[i] != NULL && !p->seqs[i]->is_gone)
            continue;
        bool is_again = sim_plan.names_again > 0 && sim_chance(sim_plan.names_again);
        struct seq *was = is_again ? name_again() : NULL;
        struct seq *s = sim_alloc(sizeof *s);
        s->name = was != NULL ? was->name : sim_random();
        if (was != NULL) {
            memcpy(s->older_epoch, was->older_epoch, sizeof s->older_epoch);
            s->older_epoch[was->epoch & (EPOCH_STEP - 1)] = was->epoch;
            was->closed_ns = 0;
        }
        s->owner = p;
        p->seqs[i] = s;
        return s;
    }
    return NULL;
}

/* Prompt n parts from those above it after 16 n + 3 tokens, inside of a block. */
static uint32_t way_of(uint32_t prompt, uint32_t pos)
{
    return pos >= 16 * prompt + 3 ? prompt : 0;
}

uint32_t prompt_like(uint32_t prompt, uint32_t len)
{
    uint32_t other = 1 + sim_below(sim_plan.n_prompts);
    bool is_like = len == 0 || way_of(other, len - 1) == way_of(prompt, len - 1);
    return prompt != 0 && is_like ? other : prompt;
}

static const uint32_t *ids_of(uint32_t prompt)
{
    static uint32_t ids[MAX_LEN];
    for (uint32_t i = 0; i < MAX_LEN; i++)
        ids[i] = i * 1000003 + way_of(prompt, i);
    return ids;
}

static struct token token_of(const float *k, const float *v)
{
    struct token t;
    for (uint32_t h = 0; h < KV_HEADS; h++)
        t.of_head[h] = device_token(k + h * HEAD_DIM, HEAD_DIM * sizeof *k, v + h * HEAD_DIM,
                                    HEAD_DIM * sizeof *v);
    return t;
}

struct token prompt_token(uint32_t prompt, uint32_t layer, uint32_t pos, float *k, float *v)
{
    float own[2][KV_FLOATS];
    float *to[] = {k != NULL ? k : own[0], v != NULL ? v : own[1]};
    uint64_t x = ((uint64_t)layer << 40) + (way_of(prompt, pos) << 20) + pos;
    for (uint32_t part = 0; part < 2; part++)
        for (uint32_t i = 0; i < KV_FLOATS; i++)
            to[part][i] = (float)((x = sim_mix(x + 1)) & 0xffff);
    return token_of(to[0], to[1]);
}

struct ask *ask_open(struct peer *p)
{
    Attnd__Open b = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    struct seq *s = seq_new(p);
    struct ask *a = s == NULL ? NULL : ask_new(p, ASK_OPEN);
    if (a == NULL)
        return NULL;
    b.seq = s->name;
    b.pool = p->pool;
    s->prompt = sim_chance(sim_plan.prompts) ? 1 + sim_below(sim_plan.n_prompts) : 0;
    if (s->prompt != 0 && sim_chance(800)) {
        b.n_tokens = a->len = sim_chance(500) ? MAX_LEN : sim_below(MAX_LEN + 1);
        b.tokens = (uint32_t *)(uintptr_t)ids_of(s->prompt);
    }
    a->seq = s;
    s->control = a;
    h.body_case = ATTND__REQUEST__BODY_OPEN;
    h.open = &b;
    return ask_send(a, &h, NULL, 0);
}

struct ask *ask_tokens(struct seq *s)
{
    Attnd__Retention r = ATTND__RETENTION__INIT, *range = &r;
    Attnd__Tokens b = ATTND__TOKENS__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    if (s->prompt == 0 || s->control != NULL || s->is_unsure)
        return NULL;
    struct ask *a = ask_new(s->owner, ASK_TOKENS);
    if (a == NULL)
        return NULL;
    b.seq = s->name;
    b.epoch = s->epoch;
    if (sim_chance(300)) { /* what is to go first, or never */
        r.first_token = sim_below(MAX_LEN);
        r.priority = (int32_t)sim_below(7) - 3;
        r.time_to_live_s = sim_below(3);
        r.is_pinned = sim_chance(sim_plan.pins);
        sim_counts.pins += r.is_pinned;
        b.n_retention = 1;
        b.retention = &range;
    } else {
        b.n_tokens = a->len = 1 + sim_below(MAX_LEN);
        b.tokens = (uint32_t *)(uintptr_t)ids_of(s->prompt);
    }
    a->seq = s;
    s->control = a;
    h.body_case = ATTND__REQUEST__BODY_TOKENS;
    h.tokens = &b;
    return ask_send(a, &h, NULL, 0);
}

struct ask *ask_fork(struct peer *p, struct seq *src)
{
    Attnd__Fork b = ATTND__FORK__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint32_t least = MAX_LEN;
    bool is_quiet = seq_is_quiet(src);
    if (src->control != NULL || src->is_unsure)
        return NULL;
    struct seq *s = seq_new(p);
    struct ask *a = s == NULL ? NULL : ask_new(p, ASK_FORK);
    if (a == NULL)
        return NULL;
    for (uint32_t l = 0; l < N_LAYERS; l++)
        least = src->len[l] < least ? src->len[l] : least;
    b.seq = src->name;
    b.epoch = src->epoch;
    b.new_seq = s->name;
    b.has_len = !is_quiet || sim_chance(500); /* steps on their way may make it longer */
    b.len = b.has_len ? sim_below(least + 1) : 0;
    a->len = b.has_len ? b.len : least;
    a->seq = src;
    a->new_seq = s;
    src->control = s->control = a;
    h.body_case = ATTND__REQUEST__BODY_FORK;
    h.fork = &b;
    return ask_send(a, &h, NULL, 0);
}

struct ask *ask_truncate(struct seq *s, uint32_t len)
{
    Attnd__Truncate b = ATTND__TRUNCATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    struct ask *a = seq_is_quiet(s) ? ask_new(s->owner, ASK_TRUNCATE) : NULL;
    if (a == NULL)
        return NULL;
    b.seq = s->name;
    b.epoch = s->epoch;
    b.len = a->len = len;
    a->seq = s;
    s->control = a;
    h.body_case = ATTND__REQUEST__BODY_TRUNCATE;
    h.truncate = &b;
    return ask_send(a, &h, NULL, 0);
}

struct ask *ask_close(struct seq *s)
{
    Attnd__Close b = ATTND__CLOSE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    struct ask *a = seq_is_quiet(s) ? ask_new(s->owner, ASK_CLOSE) : NULL;
    if (a == NULL)
        return NULL;
    b.seq = s->name;
    b.epoch = s->epoch;
    a->seq = s;
    s->control = a;
    h.body_case = ATTND__REQUEST__BODY_CLOSE;
    h.close = &b;
    return ask_send(a, &h, NULL, 0);
}

/* From another client, which knows of it, or is dead. */
struct ask *ask_adopt(struct peer *p, struct seq *s)
{
    Attnd__Adopt b = ATTND__ADOPT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    uint32_t i = 0, was = 0;
    struct peer *from = s->owner;
    while (i < MAX_SEQS && p->seqs[i] != NULL && !p->seqs[i]->is_gone)
        i++;
    while (from->seqs[was] != s)
        was++;
    struct ask *a = i < MAX_SEQS ? ask_new(p, ASK_ADOPT) : NULL;
    if (a == NULL)
        return NULL;
    from->seqs[was] = NULL;
    p->seqs[i] = s;
    s->owner = p;
    s->control = a;
    s->n_readers = 0;
    a->seq = s;
    a->former = from;
    b.seq = s->name;
    h.body_case = ATTND__REQUEST__BODY_ADOPT;
    h.adopt = &b;
    return ask_send(a, &h, NULL, 0);
}

/* --- steps ------------------------------------------------------------------------------------ */

static void fill(float *rows, size_t n)
{
    for (size_t i = 0; i < n; i += 2) {
        uint64_t x = sim_random();
        rows[i] = (float)(x & 0xffff);
        rows[i + 1] = (float)(x >> 48);
    }
}

/* What every row of item i gives, by the tokens of its sequence and those that the step appends. */
static void expect_rows(struct ask *a, uint32_t i, uint32_t row, const float *q)
{
    const struct seq *s = a->of[i];
    bool has_own = a->flags & WIRE_STEP_APPEND;
    for (uint32_t h = 0; h < KV_HEADS; h++) {
        uint64_t seen[MAX_LEN + 8] = {0};
        for (uint32_t pos = 0; pos < a->pos[i] + a->n_tokens[i]; pos++)
            seen[pos] = has_own && pos >= a->pos[i] ? a->tokens[row + pos - a->pos[i]].of_head[h]
                                                    : s->token[a->layer][pos].of_head[h];
        for (uint32_t t = 0; t < a->n_tokens[i]; t++) {
            size_t at = (size_t)(row + t) * KV_HEADS + h;
            device_attend(seen, a->pos[i] + t + 1, q + at * GROUP_FLOATS, GROUP_FLOATS * sizeof *q,
                          sim_plan.is_sum, GROUP_FLOATS, GROUP_HEADS, a->out + at * GROUP_FLOATS,
                          a->lse + at * GROUP_HEADS);
        }
    }
}

static struct token make_token(const struct seq *s, uint32_t layer, uint32_t pos, float *k,
                               float *v)
{
    if (s->prompt != 0)
        return prompt_token(s->prompt, layer, pos, k, v);
    fill(k, KV_FLOATS);
    fill(v, KV_FLOATS);
    return token_of(k, v);
}

uint8_t *step_payload(struct ask *a, struct wire_step_layout *out_l)
{
    Attnd__Step b = ATTND__STEP__INIT;
    struct wire_step_layout l;
    char why[256];
    uint64_t names[MAX_ITEMS] = {0};
    uint32_t epochs[MAX_ITEMS] = {0}, n = 0;
    for (uint32_t i = 0; i < a->n_items; i++)
        n += a->n_tokens[i];
    b.flags = a->flags;
    b.dtype = ATTND__DTYPE__F32;
    b.n_seq = b.n_epoch = b.n_pos = b.n_n_tokens = a->n_items;
    b.seq = names;
    b.epoch = epochs;
    b.pos = a->pos;
    b.n_tokens = a->n_tokens;
    if (wire_step_layout_of(
            &b, &(struct wire_shape){Q_HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, false, ATTN_F32, 0, 0},
            &l, why, sizeof why) != ATTN_OK)
        sim_fail("a step of a client's is none: %s", why);
    uint8_t *payload = sim_alloc(l.request_bytes);
    a->tokens = sim_alloc(n * sizeof *a->tokens);
    a->out = sim_alloc((size_t)n * Q_FLOATS * sizeof *a->out);
    a->lse = sim_alloc((size_t)n * Q_HEADS * sizeof *a->lse);
    if (a->flags & WIRE_STEP_APPEND) {
        float *k = (float *)(void *)(payload + l.k_offset);
        float *v = (float *)(void *)(payload + l.v_offset);
        for (uint32_t i = 0, t = 0; i < a->n_items; i++)
            for (uint32_t pos = a->pos[i]; pos < a->pos[i] + a->n_tokens[i]; pos++, t++)
                a->tokens[t] =
                    make_token(a->of[i], a->layer, pos, k + t * KV_FLOATS, v + t * KV_FLOATS);
    }
    if (a->flags & WIRE_STEP_ATTEND) {
        float *q = (float *)(void *)(payload + l.q_offset);
        fill(q, (size_t)n * Q_FLOATS);
        for (uint32_t i = 0, row = 0; i < a->n_items; row += a->n_tokens[i++])
            expect_rows(a, i, row, q);
    }
    *out_l = l;
    return payload;
}

/* Sends a step whose items, layer and flags are set; epoch_off is added to the epochs. */
static struct ask *send_step(struct ask *a, uint32_t epoch_off)
{
    Attnd__Step b = ATTND__STEP__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    struct wire_step_layout l;
    uint64_t names[MAX_ITEMS];
    uint32_t epochs[MAX_ITEMS];
    for (uint32_t i = 0; i < a->n_items; i++) {
        names[i] = a->of[i]->name;
        epochs[i] = a->of[i]->epoch + epoch_off;
    }
    b.pool = a->peer->pool;
    b.layer = a->layer;
    b.flags = a->flags;
    b.dtype = ATTND__DTYPE__F32;
    b.n_seq = b.n_epoch = b.n_pos = b.n_n_tokens = a->n_items;
    b.seq = names;
    b.epoch = epochs;
    b.pos = a->pos;
    b.n_tokens = a->n_tokens;
    uint8_t *payload = step_payload(a, &l);
    sim_counts.steps++;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &b;
    return ask_send(a, &h, payload, l.request_bytes);
}

static bool may_append(const struct seq *s, uint32_t layer)
{
    return s != NULL && s->is_open && !s->is_gone && !s->is_unsure && s->control == NULL &&
           s->step[layer] == NULL && s->len[layer] < MAX_LEN;
}

/* Where prompts are to be published, mostly the layer that is behind. */
static uint32_t append_layer(const struct peer *p)
{
    uint32_t layer = sim_below(N_LAYERS);
    const struct seq *s = p->seqs[sim_below(sim_plan.n_seqs)];
    for (uint32_t l = 0; s != NULL && sim_chance(2 * sim_plan.long_appends) && l < N_LAYERS; l++)
        layer = s->len[l] < s->len[layer] ? l : layer;
    return layer;
}

struct ask *ask_append(struct peer *p, struct seq *first)
{
    struct seq *found[MAX_SEQS];
    uint32_t layer = append_layer(p), n = 0, left = 100;
    for (uint32_t i = 0; i < MAX_SEQS; i++)
        if (may_append(p->seqs[i], layer))
            found[n++] = p->seqs[i];
    for (uint32_t i = 1; i < n; i++)
        if (found[i] == first) {
            found[i] = found[0];
            found[0] = first;
        }
    struct ask *a = n == 0 ? NULL : ask_new(p, ASK_STEP);
    if (a == NULL)
        return NULL;
    static const uint32_t flags[] = {1, 3, 3, 7};
    a->layer = layer;
    a->flags = flags[sim_below(4)];
    a->n_items = 1 + sim_below(n < MAX_ITEMS ? n : MAX_ITEMS);
    for (uint32_t i = 0; i < a->n_items; i++) {
        uint32_t pick = i == 0 && found[0] == first ? 0 : i + sim_below(n - i);
        struct seq *s = found[pick];
        found[pick] = found[i];
        uint32_t most = MAX_LEN - s->len[layer] < left ? MAX_LEN - s->len[layer] : left;
        uint32_t want = sim_chance(sim_plan.long_appends) ? 1 + sim_below(70) : 1 + sim_below(5);
        a->of[i] = s;
        a->pos[i] = s->len[layer];
        a->n_tokens[i] = want < most ? want : most;
        left -= a->n_tokens[i] < left ? a->n_tokens[i] : left - 1;
        s->step[layer] = a;
    }
    return send_step(a, 0);
}

struct ask *ask_attend(struct seq *s, uint32_t layer, uint32_t pos, uint32_t n)
{
    struct ask *a = ask_new(s->owner, ASK_STEP);
    if (a == NULL)
        return NULL;
    a->layer = layer;
    a->flags = WIRE_STEP_ATTEND | (sim_chance(500) ? WIRE_STEP_LSE : 0);
    a->n_items = 1;
    a->of[0] = s;
    a->pos[0] = pos;
    a->n_tokens[0] = n;
    s->n_readers++;
    return send_step(a, 0);
}

struct ask *ask_wrong(struct seq *s, enum ask_kind kind)
{
    uint32_t layer = sim_below(N_LAYERS);
    if (!may_append(s, layer) || s->len[layer] + 8 > MAX_LEN ||
        (kind == ASK_STALE && s->epoch < 2 * EPOCH_STEP))
        return NULL;
    struct ask *a = ask_new(s->owner, kind);
    if (a == NULL)
        return NULL;
    a->layer = layer;
    a->flags = WIRE_STEP_APPEND;
    a->n_items = 1;
    a->of[0] = s;
    a->pos[0] = s->len[layer] + (kind == ASK_GAP ? 1 + sim_below(4) : 0);
    a->n_tokens[0] = 1;
    s->step[layer] = a;
    return send_step(a, kind == ASK_STALE ? 0 - EPOCH_STEP : 0);
}
