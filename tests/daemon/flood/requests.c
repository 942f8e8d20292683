/* requests.c: every kind of request that a flood is made of, and what each needs to be there. */
#include "tests/daemon/flood/flood.h"

#include <stdlib.h>

enum {
    BIG_HEADS = 8, /* pool of the flood, of blocks of 1 MiB */
    BIG_DIM = 128,
    BIG_LAYERS = 16,
    BIG_TOKENS = 128, /* in a sequence of it, in one layer */
    BIG_EXPORT = 8, /* blocks of an export or import */
    RESIZE_TO = 600, /* blocks */
    THIN_DIM = 8, /* of a pool whose blocks are small: of a head and a layer */
    THIN_STEP = 2048, /* tokens */
};

uint32_t flood_ids[FLOOD_IDS];

static uint64_t send_body(struct flooder *f, Attnd__Request *h, Attnd__Request__BodyCase body)
{
    h->session = f->c.session;
    h->body_case = body;
    f->n_sent++;
    return e2e_send(&f->c, h, NULL, 0);
}

/* --- kinds of requests ------------------------------------------------------------------------ */

#define SEND(Type, INIT, FIELD, BODY, ...)                                                         \
    do {                                                                                           \
        Type x = INIT;                                                                             \
        Attnd__Request h = ATTND__REQUEST__INIT;                                                   \
        h.FIELD = &x;                                                                              \
        __VA_ARGS__;                                                                               \
        send_body(f, &h, ATTND__REQUEST__BODY_##BODY);                                             \
    } while (0)

static void big_spec(Attnd__PoolSpec *s, const char *name, uint32_t n_blocks)
{
    attnd__pool_spec__init(s);
    s->name = (char *)(uintptr_t)name;
    s->num_layers = BIG_LAYERS;
    s->num_q_heads = s->num_kv_heads = BIG_HEADS;
    s->head_dim_k = BIG_DIM;
    s->block_tokens = 16;
    s->n_blocks = n_blocks;
    s->q_dtype = ATTND__DTYPE__F16;
}

static void flood_hello(struct flooder *f)
{
    SEND(Attnd__Hello, ATTND__HELLO__INIT, hello, HELLO, x.protocol_version = 1;
         x.token = FLOOD_TOKEN; x.resume_session = f->c.session);
}

/* Sessions of its own, which end at once. */
static void flood_goodbye(struct flooder *f)
{
    uint64_t own = f->c.session;
    if (f->n_close > 0) {
        f->c.session = f->close_name[--f->n_close];
        SEND(Attnd__Goodbye, ATTND__GOODBYE__INIT, goodbye, GOODBYE, (void)0);
    } else {
        f->c.session = 0;
        SEND(Attnd__Hello, ATTND__HELLO__INIT, hello, HELLO, x.protocol_version = 1;
             x.token = FLOOD_TOKEN);
    }
    f->c.session = own;
}

/* Where a step's tokens go. */
struct target {
    uint32_t pool, n_heads, head_dim;
    uint64_t seq;
    uint32_t epoch;
};

static void send_step(struct flooder *f, struct target to, uint32_t pos, uint32_t n_tokens,
                      uint32_t flags)
{
    static uint8_t zeros[BIG_TOKENS * 3 * BIG_HEADS * BIG_DIM * 2 + 4096];
    Attnd__Step x = ATTND__STEP__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    struct wire_step_layout l;
    char why[256];
    x.pool = to.pool;
    x.flags = flags;
    x.dtype = ATTND__DTYPE__F16;
    x.n_seq = x.n_epoch = x.n_pos = x.n_n_tokens = 1;
    x.seq = &to.seq;
    x.epoch = &to.epoch;
    x.pos = &pos;
    x.n_tokens = &n_tokens;
    if (wire_step_layout_of(&x,
                            &(struct wire_shape){to.n_heads, to.n_heads, to.head_dim, to.head_dim,
                                                 false, ATTN_F16, 0, 0},
                            &l, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    assert_true(l.request_bytes <= sizeof zeros);
    h.session = f->c.session;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &x;
    f->n_sent++;
    e2e_send(&f->c, &h, zeros, l.request_bytes);
}

static void send_tokens(struct flooder *f, uint32_t pos, uint32_t n_tokens, uint32_t flags)
{
    send_step(f, (struct target){f->c.pool, BIG_HEADS, BIG_DIM, f->seq, f->epoch}, pos, n_tokens,
              flags);
}

static void flood_decode(struct flooder *f)
{
    send_tokens(f, BIG_TOKENS - 1, 1, E2E_BOTH);
}

static void flood_prompt(struct flooder *f)
{
    send_tokens(f, BIG_TOKENS - 128, 128, E2E_BOTH);
}

static void flood_bad_step(struct flooder *f)
{
    uint64_t seq = f->seq;
    f->seq = 12345; /* of none */
    send_tokens(f, 0, 1, E2E_BOTH);
    f->seq = seq;
}

static void flood_pool_same(struct flooder *f)
{
    Attnd__PoolSpec spec;
    big_spec(&spec, "big", 256);
    SEND(Attnd__PoolCreate, ATTND__POOL_CREATE__INIT, pool_create, POOL_CREATE, x.spec = &spec);
}

/* Pools of half a GiB, made and let go. */
static void flood_pool_anew(struct flooder *f)
{
    Attnd__PoolSpec spec;
    if (f->pool_made != 0) {
        SEND(Attnd__PoolRelease, ATTND__POOL_RELEASE__INIT, pool_release, POOL_RELEASE,
             x.pool = f->pool_made;
             x.request = f->pool_request);
        f->pool_made = 0;
        return;
    }
    f->pool_request = f->c.next_id;
    big_spec(&spec, "anew", 500 + (uint32_t)(f->n_sent / 2 % 2));
    SEND(Attnd__PoolCreate, ATTND__POOL_CREATE__INIT, pool_create, POOL_CREATE, x.spec = &spec);
}

static void flood_describe(struct flooder *f)
{
    SEND(Attnd__PoolDescribe, ATTND__POOL_DESCRIBE__INIT, pool_describe, POOL_DESCRIBE,
         x.name = "big");
}

static void flood_release(struct flooder *f)
{
    SEND(Attnd__PoolRelease, ATTND__POOL_RELEASE__INIT, pool_release, POOL_RELEASE,
         x.pool = f->c.pool;
         x.request = 1);
}

static void flood_resize(struct flooder *f)
{
    SEND(Attnd__PoolResize, ATTND__POOL_RESIZE__INIT, pool_resize, POOL_RESIZE, x.name = "last";
         x.n_blocks = f->n_sent % 2 == 0 ? 8 : RESIZE_TO);
}

static void flood_stats(struct flooder *f)
{
    SEND(Attnd__Stats, ATTND__STATS__INIT, stats, STATS, (void)0);
}

static void send_close(struct flooder *f)
{
    SEND(Attnd__Close, ATTND__CLOSE__INIT, close, CLOSE, x.seq = f->close_name[--f->n_close];
         x.epoch = f->close_epoch[f->n_close]);
}

static uint64_t new_name(struct flooder *f)
{
    return f->name_of[f->c.next_id % FLOOD_NAMES] = (uint64_t)f->of << 32 | ++f->made;
}

static void flood_open(struct flooder *f)
{
    if (f->n_close > 0)
        send_close(f);
    else
        SEND(Attnd__Open, ATTND__OPEN__INIT, open, OPEN, x.seq = new_name(f); x.pool = f->c.pool);
}

static void flood_open_long(struct flooder *f)
{
    if (f->n_close > 0)
        send_close(f);
    else
        SEND(Attnd__Open, ATTND__OPEN__INIT, open, OPEN, x.seq = new_name(f); x.pool = f->c.pool;
             x.tokens = flood_ids; x.n_tokens = FLOOD_IDS);
}

static void flood_open_known(struct flooder *f)
{
    uint32_t pool = f->c.pool;
    f->c.pool = f->thin_pool;
    flood_open_long(f);
    f->c.pool = pool;
}

static void flood_fork(struct flooder *f)
{
    if (f->n_close > 0)
        send_close(f);
    else
        SEND(Attnd__Fork, ATTND__FORK__INIT, fork, FORK, x.seq = f->seq; x.epoch = f->epoch;
             x.new_seq = new_name(f); x.has_len = true; x.len = 0);
}

static void flood_truncate(struct flooder *f)
{
    SEND(Attnd__Truncate, ATTND__TRUNCATE__INIT, truncate, TRUNCATE, x.seq = f->seq;
         x.epoch = f->epoch; x.len = BIG_TOKENS);
}

static void flood_tokens(struct flooder *f)
{
    SEND(Attnd__Tokens, ATTND__TOKENS__INIT, tokens, TOKENS, x.seq = f->seq; x.epoch = f->epoch;
         x.tokens = flood_ids; x.n_tokens = BIG_TOKENS);
}

static void flood_probe(struct flooder *f)
{
    SEND(Attnd__Probe, ATTND__PROBE__INIT, probe, PROBE, x.pool = f->c.pool; x.tokens = flood_ids;
         x.n_tokens = BIG_TOKENS);
}

static void flood_probe_long(struct flooder *f)
{
    SEND(Attnd__Probe, ATTND__PROBE__INIT, probe, PROBE, x.pool = f->c.pool; x.tokens = flood_ids;
         x.n_tokens = FLOOD_IDS);
}

static void flood_probe_known(struct flooder *f)
{
    SEND(Attnd__Probe, ATTND__PROBE__INIT, probe, PROBE, x.pool = f->thin_pool;
         x.tokens = flood_ids; x.n_tokens = FLOOD_IDS);
}

/* As many probes as one message takes. */
static void flood_calls(struct flooder *f)
{
    static Attnd__Call call[WIRE_MAX_CALLS], *calls[WIRE_MAX_CALLS];
    Attnd__Probe probe = ATTND__PROBE__INIT;
    probe.pool = f->c.pool;
    probe.tokens = flood_ids;
    probe.n_tokens = BIG_TOKENS;
    for (uint32_t i = 0; i < WIRE_MAX_CALLS; i++) {
        attnd__call__init(&call[i]);
        call[i].body_case = ATTND__CALL__BODY_PROBE;
        call[i].probe = &probe;
        calls[i] = &call[i];
    }
    SEND(Attnd__Calls, ATTND__CALLS__INIT, calls, CALLS, x.calls = calls;
         x.n_calls = WIRE_MAX_CALLS);
}

static void flood_close(struct flooder *f)
{
    SEND(Attnd__Close, ATTND__CLOSE__INIT, close, CLOSE, x.seq = 12345; x.epoch = 1);
}

static void flood_adopt(struct flooder *f)
{
    SEND(Attnd__Adopt, ATTND__ADOPT__INIT, adopt, ADOPT, x.seq = f->seq);
}

static void flood_export_head(struct flooder *f)
{
    SEND(Attnd__Export, ATTND__EXPORT__INIT, export, EXPORT, x.seq = f->seq);
}

static void flood_export_ids(struct flooder *f)
{
    SEND(Attnd__Export, ATTND__EXPORT__INIT, export, EXPORT, x.seq = f->seq + 1;
         x.n_tokens = FLOOD_IDS);
}

static void flood_export_blocks(struct flooder *f)
{
    SEND(Attnd__Export, ATTND__EXPORT__INIT, export, EXPORT, x.seq = f->seq;
         x.n_blocks = BIG_EXPORT);
}

/* A repeat of what is there: all sums are compared. */
static void flood_import(struct flooder *f)
{
    Attnd__Import x = ATTND__IMPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    const Attnd__ExportReply *of = f->exported.header->export;
    x.seq = f->seq;
    x.epoch = f->epoch;
    x.layout = of->layout;
    x.layer_len = of->layer_len;
    x.n_layer_len = of->n_layer_len;
    x.sums = of->sums;
    x.n_sums = of->n_sums;
    x.content = of->content;
    h.session = f->c.session;
    h.body_case = ATTND__REQUEST__BODY_IMPORT;
    h.import = &x;
    f->n_sent++;
    e2e_send(&f->c, &h, f->payload, f->exported.payload_bytes);
}

static void flood_inspect(struct flooder *f)
{
    SEND(Attnd__Inspect, ATTND__INSPECT__INIT, inspect, INSPECT, x.topic = "sequences");
}

static void flood_configure(struct flooder *f)
{
    SEND(Attnd__Configure, ATTND__CONFIGURE__INIT, configure, CONFIGURE, x.name = "no.such";
         x.value = "1");
}

static void flood_drop(struct flooder *f)
{
    SEND(Attnd__PoolDrop, ATTND__POOL_DROP__INIT, pool_drop, POOL_DROP, x.name = "none");
}

static void flood_kill(struct flooder *f)
{
    SEND(Attnd__Kill, ATTND__KILL__INIT, kill, KILL, x.seq = 12345);
}

static void flood_move(struct flooder *f)
{
    SEND(Attnd__Move, ATTND__MOVE__INIT, move, MOVE, x.seq = 12345);
}

static void flood_plan(struct flooder *f)
{
    SEND(Attnd__Plan, ATTND__PLAN__INIT, plan, PLAN, x.lane = 7);
}

/* --- what they need --------------------------------------------------------------------------- */

/* Sends, waits, and gives the reply. */
static const struct wire_reply *call(struct flooder *f, void (*send)(struct flooder *f))
{
    uint64_t id = f->c.next_id;
    send(f);
    const struct wire_reply *r = e2e_await(&f->c, id);
    if (r->header->status != ATTN_OK)
        fail_msg("%s: %s", attn_status_name((attn_status)r->header->status), r->header->message);
    return r;
}

static void open_own(struct flooder *f)
{
    SEND(Attnd__Open, ATTND__OPEN__INIT, open, OPEN, x.seq = f->seq; x.pool = f->c.pool);
}

static void open_ids(struct flooder *f)
{
    SEND(Attnd__Open, ATTND__OPEN__INIT, open, OPEN, x.seq = f->seq + 1; x.pool = f->c.pool;
         x.tokens = flood_ids; x.n_tokens = FLOOD_IDS);
}

static void fill_own(struct flooder *f)
{
    send_tokens(f, 0, BIG_TOKENS, WIRE_STEP_APPEND);
}

static void take_last(struct flooder *f)
{
    Attnd__PoolSpec spec;
    big_spec(&spec, "last", 8);
    SEND(Attnd__PoolCreate, ATTND__POOL_CREATE__INIT, pool_create, POOL_CREATE, x.spec = &spec);
}

static void export_all(struct flooder *f)
{
    SEND(Attnd__Export, ATTND__EXPORT__INIT, export, EXPORT, x.seq = f->seq;
         x.n_blocks = BIG_TOKENS / 16);
}

static void open_thin(struct flooder *f)
{
    SEND(Attnd__Open, ATTND__OPEN__INIT, open, OPEN, x.seq = f->seq + 2; x.pool = f->thin_pool;
         x.tokens = flood_ids; x.n_tokens = FLOOD_IDS);
}

static void make_thin(struct flooder *f)
{
    Attnd__PoolSpec spec;
    big_spec(&spec, "thin", 4 * FLOOD_IDS / 16);
    spec.num_layers = spec.num_q_heads = spec.num_kv_heads = 1;
    spec.head_dim_k = THIN_DIM;
    SEND(Attnd__PoolCreate, ATTND__POOL_CREATE__INIT, pool_create, POOL_CREATE, x.spec = &spec);
}

/* Has all flood_ids published, unless another connection has. */
static void fill_thin(struct flooder *f)
{
    f->thin_pool = call(f, make_thin)->header->pool->pool;
    const Attnd__SeqReply *seq = call(f, open_thin)->header->seq;
    struct target to = {f->thin_pool, 1, THIN_DIM, f->seq + 2, seq->epoch};
    for (uint32_t pos = seq->cached_tokens, n; pos < FLOOD_IDS; pos += n) {
        n = FLOOD_IDS - pos < THIN_STEP ? FLOOD_IDS - pos : THIN_STEP;
        uint64_t id = f->c.next_id;
        send_step(f, to, pos, n, WIRE_STEP_APPEND);
        const Attnd__Reply *r = e2e_await(&f->c, id)->header;
        if (r->status != ATTN_OK)
            fail_msg("the flood_ids are not published: %s", r->message);
    }
}

void flood_prepare(struct flooder *f, const struct flood_kind *k)
{
    f->seq = (uint64_t)f->of << 32 | UINT64_C(1) << 31;
    f->c.pool = call(f, flood_pool_same)->header->pool->pool;
    f->epoch = call(f, open_own)->header->seq->epoch;
    call(f, fill_own);
    if (k->send == flood_open_known || k->send == flood_probe_known)
        fill_thin(f);
    if (k->send == flood_export_ids)
        call(f, open_ids);
    if (k->send == flood_resize)
        call(f, take_last);
    if (k->send == flood_import) {
        f->exported = *call(f, export_all);
        f->payload = (uint8_t *)(uintptr_t)f->exported.payload;
    }
}

/* --- all kinds -------------------------------------------------------------------------------- */

const struct flood_kind flood_kinds[] = {
    {"nothing", .send = NULL},
    {"hello", .send = flood_hello},
    {"hello, goodbye", .send = flood_goodbye, .then = FLOOD_GOODBYE},
    {"step: decode", .send = flood_decode},
    {"step: 128 tokens", .send = flood_prompt},
    {"step: no such sequence", .send = flood_bad_step},
    {"plan: no such lane", .send = flood_plan},
    {"pool_create: found", .send = flood_pool_same},
    {"pool_create: 0.5 GiB", .send = flood_pool_anew, .most_in_flight = 1},
    {"pool_describe", .send = flood_describe},
    {"pool_release", .send = flood_release},
    {"pool_resize: 0.6 GiB", .send = flood_resize},
    {"stats", .send = flood_stats},
    {"open, close", .send = flood_open, .then = FLOOD_CLOSE},
    {"open, close: 65,536 ids", .send = flood_open_long, .most_in_flight = 4, .then = FLOOD_CLOSE},
    {"open, close: 65,536 ids, known", .send = flood_open_known, .most_in_flight = 4,
     .then = FLOOD_CLOSE},
    {"fork, close", .send = flood_fork, .then = FLOOD_CLOSE},
    {"truncate", .send = flood_truncate},
    {"tokens: 128 ids", .send = flood_tokens},
    {"probe: 128 ids", .send = flood_probe},
    {"probe: 65,536 ids", .send = flood_probe_long, .most_in_flight = 4},
    {"probe: 65,536 ids, known", .send = flood_probe_known, .most_in_flight = 4},
    {"calls: 128 probes of 128 ids", .send = flood_calls},
    {"close: no such", .send = flood_close},
    {"adopt", .send = flood_adopt},
    {"export: head", .send = flood_export_head},
    {"export: 65,536 ids", .send = flood_export_ids},
    {"export: 8 MiB", .send = flood_export_blocks},
    {"import: 8 MiB", .send = flood_import, .most_in_flight = 4},
    {"inspect", .send = flood_inspect},
    {"configure: no such", .send = flood_configure},
    {"pool_drop: no such", .send = flood_drop},
    {"kill: no such", .send = flood_kill},
    {"move: no such", .send = flood_move},
    {"TLS connections", .connect = flood_connections},
    {"TLS handshakes", .connect = flood_handshakes},
};
const uint32_t flood_n_kinds = sizeof flood_kinds / sizeof flood_kinds[0];
