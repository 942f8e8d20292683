/* bench_flood.c: not a test: how long a good tenant's decode steps take beside another tenant's
 * flood of each kind of request, on the cpu backend. Prints a table: its times alone and beside,
 * and what of the flood was answered. scripts/bench-flood runs it.
 */
#include <arpa/inet.h>
#include <openssl/ssl.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/attn_time.h"
#include "proto/tls_stream.h"
#include "tests/daemon/e2e/e2e.h"

enum {
    CONTEXT = 256, /* tokens that a good step attends to */
    MAX_TIMES = 1 << 18,
    MAX_FLOODERS = 256,
    NAMES = 4096,
    N_IDS = 65536, /* token ids of a long sequence */
    BIG_HEADS = 8, /* pool of the flood, of blocks of 1 MiB */
    BIG_DIM = 128,
    BIG_LAYERS = 16,
    BIG_TOKENS = 128, /* in a sequence of it, in one layer */
    BIG_EXPORT = 8, /* blocks of an export or import */
    RESIZE_TO = 600, /* blocks */
    THIN_DIM = 8, /* of a pool whose blocks are small: of a head and a layer */
    THIN_STEP = 2048, /* tokens */
};
#define GOOD_TOKEN "bench-flood-good"
#define BAD_TOKEN "bench-flood-bad"

static const char tenants_text[] =
    "[good]\ntoken_sha256 = b07f0a49ba2f1185d0bce55cc9b69a00ff8a7e06628bcac39d89e8b4d173ac21\n"
    "[bad]\ntoken_sha256 = 322f8f57a4ebfdc6a51ee5fa5afa5046ac25adb57a135e58d9a80fcf72c5bbd3\n";

static struct e2e d;
static int n_connections = 4, n_in_flight = 64;
static uint32_t ids[N_IDS];

/* What a flooding process has been answered; shared with it. */
static struct answered {
    _Atomic uint64_t n_ok, n_other, bytes;
    _Atomic int last_other; /* status */
    _Atomic bool is_ready;
} * answered;

/* One connection of the flood. */
struct flooder {
    struct e2e_client c;
    uint32_t of; /* its kind and number */
    uint64_t seq, n_sent;
    uint32_t epoch, made; /* made: names used for new sequences */
    uint32_t thin_pool; /* in which all ids are published */
    /* sequences to close: what was opened or forked */
    uint64_t close_name[NAMES], name_of[NAMES]; /* by request */
    uint32_t close_epoch[NAMES], n_close;
    uint64_t pool_request; /* to release */
    uint32_t pool_made;
    struct wire_reply exported;
    uint8_t *payload; /* its blocks */
};

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
         x.token = BAD_TOKEN; x.resume_session = f->c.session);
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
             x.token = BAD_TOKEN);
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
    return f->name_of[f->c.next_id % NAMES] = (uint64_t)f->of << 32 | ++f->made;
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
             x.tokens = ids; x.n_tokens = N_IDS);
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
         x.tokens = ids; x.n_tokens = BIG_TOKENS);
}

static void flood_probe(struct flooder *f)
{
    SEND(Attnd__Probe, ATTND__PROBE__INIT, probe, PROBE, x.pool = f->c.pool; x.tokens = ids;
         x.n_tokens = BIG_TOKENS);
}

static void flood_probe_long(struct flooder *f)
{
    SEND(Attnd__Probe, ATTND__PROBE__INIT, probe, PROBE, x.pool = f->c.pool; x.tokens = ids;
         x.n_tokens = N_IDS);
}

static void flood_probe_known(struct flooder *f)
{
    SEND(Attnd__Probe, ATTND__PROBE__INIT, probe, PROBE, x.pool = f->thin_pool; x.tokens = ids;
         x.n_tokens = N_IDS);
}

/* As many probes as one message takes. */
static void flood_calls(struct flooder *f)
{
    static Attnd__Call call[WIRE_MAX_CALLS], *calls[WIRE_MAX_CALLS];
    Attnd__Probe probe = ATTND__PROBE__INIT;
    probe.pool = f->c.pool;
    probe.tokens = ids;
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
         x.n_tokens = N_IDS);
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

/* --- kinds of connections --------------------------------------------------------------------- */

/* A connection on its way that begins with these bytes. RST ends it, so that ports suffice. */
static int connection_begin(int epoll, const void *bytes, size_t n)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct linger at_once = {.l_onoff = 1};
    to.sin_port = htons((uint16_t)atoi(strrchr(d.tls_url, ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct epoll_event ev = {.events = EPOLLIN, .data.fd = fd};
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) != 0 ||
        connect(fd, (struct sockaddr *)&to, sizeof to) != 0 ||
        (n > 0 && send(fd, bytes, n, MSG_NOSIGNAL) < 0) ||
        epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &ev) != 0) {
        perror("bench_flood: connection");
        _exit(1);
    }
    return fd;
}

/* The same hello again and again, each on a connection of its own that ends with the answer: costs
 * this side next to nothing, and the daemon a key exchange and a signature. */
static void flood_handshakes(struct answered *a)
{
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    struct tls_stream *tls = tls_stream_new(context, "localhost");
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    size_t n_hello;
    (void)tls_stream_handshake(tls);
    const uint8_t *hello = tls_stream_pending(tls, &n_hello);
    for (int i = 0; i < n_in_flight; i++)
        connection_begin(epoll, hello, n_hello);
    atomic_store(&a->is_ready, true);
    for (;;) {
        struct epoll_event ready[64];
        int n = epoll_wait(epoll, ready, 64, -1);
        for (int i = 0; i < n; i++) {
            uint8_t answer[8192];
            ssize_t got = recv(ready[i].data.fd, answer, sizeof answer, 0);
            atomic_fetch_add(got > 0 ? &a->n_ok : &a->n_other, 1);
            atomic_fetch_add(&a->bytes, got > 0 ? (uint64_t)got : 0);
            close(ready[i].data.fd);
            connection_begin(epoll, hello, n_hello);
        }
    }
}

/* Connections that end at once. */
static void flood_connections(struct answered *a)
{
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    atomic_store(&a->is_ready, true);
    for (;;) {
        close(connection_begin(epoll, NULL, 0));
        atomic_fetch_add(&a->n_ok, 1);
    }
}

static const struct kind {
    const char *name;
    void (*send)(struct flooder *f);
    int most_in_flight; /* 0: as many as asked for */
    void (*connect)(struct answered *a); /* instead of send; over TLS */
} kinds[] = {
    {"nothing", NULL, 0, NULL},
    {"hello", flood_hello, 0, NULL},
    {"hello, goodbye", flood_goodbye, 0, NULL},
    {"step: decode", flood_decode, 0, NULL},
    {"step: 128 tokens", flood_prompt, 0, NULL},
    {"step: no such sequence", flood_bad_step, 0, NULL},
    {"plan: no such lane", flood_plan, 0, NULL},
    {"pool_create: found", flood_pool_same, 0, NULL},
    {"pool_create: 0.5 GiB", flood_pool_anew, 1, NULL},
    {"pool_describe", flood_describe, 0, NULL},
    {"pool_release", flood_release, 0, NULL},
    {"pool_resize: 0.6 GiB", flood_resize, 0, NULL},
    {"stats", flood_stats, 0, NULL},
    {"open, close", flood_open, 0, NULL},
    {"open, close: 65,536 ids", flood_open_long, 4, NULL},
    {"open, close: 65,536 ids, known", flood_open_known, 4, NULL},
    {"fork, close", flood_fork, 0, NULL},
    {"truncate", flood_truncate, 0, NULL},
    {"tokens: 128 ids", flood_tokens, 0, NULL},
    {"probe: 128 ids", flood_probe, 0, NULL},
    {"probe: 65,536 ids", flood_probe_long, 4, NULL},
    {"probe: 65,536 ids, known", flood_probe_known, 4, NULL},
    {"calls: 128 probes of 128 ids", flood_calls, 0, NULL},
    {"close: no such", flood_close, 0, NULL},
    {"adopt", flood_adopt, 0, NULL},
    {"export: head", flood_export_head, 0, NULL},
    {"export: 65,536 ids", flood_export_ids, 0, NULL},
    {"export: 8 MiB", flood_export_blocks, 0, NULL},
    {"import: 8 MiB", flood_import, 4, NULL},
    {"inspect", flood_inspect, 0, NULL},
    {"configure: no such", flood_configure, 0, NULL},
    {"pool_drop: no such", flood_drop, 0, NULL},
    {"kill: no such", flood_kill, 0, NULL},
    {"move: no such", flood_move, 0, NULL},
    {"TLS connections", NULL, 0, flood_connections},
    {"TLS handshakes", NULL, 0, flood_handshakes},
};
enum { N_KINDS = sizeof kinds / sizeof kinds[0] };

/* Whether the daemon listens where this kind comes. */
static bool is_possible(const struct kind *k)
{
    return k->connect == NULL || d.tls_url[0] != '\0';
}

/* --- a flooding process ----------------------------------------------------------------------- */

static void enter(struct e2e_client *c, const char *token)
{
    struct e2e by = d;
    if (by.tls_url[0] == '\0') /* libattn's socket, which may be used after a fork */
        snprintf(by.tls_url, sizeof by.tls_url, "%s", d.url);
    e2e_connect_tls(c, &by);
    const Attnd__Reply *r = e2e_hello(c, token);
    if (r->status != ATTN_OK)
        fail_msg("no session: %s", r->message);
}

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
         x.tokens = ids; x.n_tokens = N_IDS);
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
         x.tokens = ids; x.n_tokens = N_IDS);
}

static void make_thin(struct flooder *f)
{
    Attnd__PoolSpec spec;
    big_spec(&spec, "thin", 4 * N_IDS / 16);
    spec.num_layers = spec.num_q_heads = spec.num_kv_heads = 1;
    spec.head_dim_k = THIN_DIM;
    SEND(Attnd__PoolCreate, ATTND__POOL_CREATE__INIT, pool_create, POOL_CREATE, x.spec = &spec);
}

/* Has all ids published, unless another connection has. */
static void fill_thin(struct flooder *f)
{
    f->thin_pool = call(f, make_thin)->header->pool->pool;
    const Attnd__SeqReply *seq = call(f, open_thin)->header->seq;
    struct target to = {f->thin_pool, 1, THIN_DIM, f->seq + 2, seq->epoch};
    for (uint32_t pos = seq->cached_tokens, n; pos < N_IDS; pos += n) {
        n = N_IDS - pos < THIN_STEP ? N_IDS - pos : THIN_STEP;
        uint64_t id = f->c.next_id;
        send_step(f, to, pos, n, WIRE_STEP_APPEND);
        const Attnd__Reply *r = e2e_await(&f->c, id)->header;
        if (r->status != ATTN_OK)
            fail_msg("the ids are not published: %s", r->message);
    }
}

static void prepare(struct flooder *f, const struct kind *k)
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

static void take(struct flooder *f, struct answered *a, const struct wire_reply *r)
{
    const Attnd__Reply *h = r->header;
    atomic_fetch_add(h->status == ATTN_OK ? &a->n_ok : &a->n_other, 1);
    atomic_fetch_add(&a->bytes, r->payload_bytes);
    if (h->status != ATTN_OK)
        atomic_store(&a->last_other, (int)h->status);
    else if (h->body_case == ATTND__REPLY__BODY_POOL && r->request_id == f->pool_request)
        f->pool_made = h->pool->pool;
}

static void flood(const struct kind *k, uint32_t of, struct answered *a)
{
    static struct flooder f;
    int most =
        k->most_in_flight != 0 && k->most_in_flight < n_in_flight ? k->most_in_flight : n_in_flight;
    uint64_t n_answered = 0;
    f.of = of;
    enter(&f.c, BAD_TOKEN);
    prepare(&f, k);
    if (k->send != flood_import) /* whose message is still needed */
        e2e_forget(&f.c);
    else
        f.c.replies = NULL;
    n_answered = f.n_sent;
    atomic_store(&a->is_ready, true);
    for (;;) {
        while (f.n_sent - n_answered < (uint64_t)most)
            k->send(&f);
        e2e_await_ms(&f.c, 0, 1);
        for (struct e2e_reply *r = f.c.replies; r != NULL; r = r->next, n_answered++) {
            const Attnd__Reply *h = r->wire.header;
            take(&f, a, &r->wire);
            bool opens = k->send == flood_open || k->send == flood_open_long ||
                         k->send == flood_open_known || k->send == flood_fork;
            if (h->status != ATTN_OK || f.n_close == NAMES)
                continue;
            if (opens && h->body_case == ATTND__REPLY__BODY_SEQ) {
                f.close_name[f.n_close] = f.name_of[r->wire.request_id % NAMES];
                f.close_epoch[f.n_close++] = h->seq->epoch;
            } else if (k->send == flood_goodbye && h->body_case == ATTND__REPLY__BODY_HELLO) {
                f.close_name[f.n_close++] = h->hello->session;
            }
        }
        e2e_forget(&f.c);
    }
}

static pid_t start_flood(const struct kind *k, uint32_t of, struct answered *a)
{
    *a = (struct answered){0};
    fflush(stdout);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sched_setscheduler(0, SCHED_OTHER, &(struct sched_param){0});
    if (k->connect != NULL)
        k->connect(a);
    else
        flood(k, of, a);
    _exit(1);
}

/* --- the good tenant -------------------------------------------------------------------------- */

static struct e2e_client good;
static struct e2e_seq own;
static double ms[MAX_TIMES];

static int by_time(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct times {
    size_t n, n_failed;
    char why[96]; /* of the first that failed */
    double p50, p99, most;
};

/* A step every millisecond or so, one at a time. */
static struct times measure(double seconds)
{
    struct times t = {0};
    struct e2e_item item = {&own, CONTEXT - 1, 1};
    uint64_t until_ns = attn_now_ns() + (uint64_t)(seconds * 1e9), sent_ns;
    while ((sent_ns = attn_now_ns()) < until_ns && t.n < MAX_TIMES) {
        const struct wire_reply *r = e2e_await(&good, e2e_send_zeros(&good, 0, &item, 0));
        ms[t.n++] = (double)(attn_now_ns() - sent_ns) * 1e-6;
        if (r->header->status != ATTN_OK && t.n_failed++ == 0)
            snprintf(t.why, sizeof t.why, " (%s)", r->header->message);
        e2e_forget(&good);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    qsort(ms, t.n, sizeof *ms, by_time);
    t.p50 = ms[t.n / 2];
    t.p99 = ms[t.n * 99 / 100];
    t.most = ms[t.n - 1];
    return t;
}

static pid_t flooders[MAX_FLOODERS];
static uint32_t n_started;

static void begin_flood(const struct kind *k, uint32_t first)
{
    bool is_none = (k->send == NULL && k->connect == NULL) || !is_possible(k);
    int n = is_none ? 0 : n_connections;
    for (int i = 0; i < n; i++)
        flooders[first + (uint32_t)i] = start_flood(k, ++n_started, &answered[first + (uint32_t)i]);
    for (int i = 0; i < n; i++)
        while (!atomic_load(&answered[first + (uint32_t)i].is_ready)) {
            if (waitpid(flooders[first + (uint32_t)i], NULL, WNOHANG) != 0)
                fail_msg("%s: the flood did not begin", k->name);
            measure(0.01); /* whose session is kept alive */
        }
}

static void end_flood(uint32_t first)
{
    for (uint32_t i = first; i < first + (uint32_t)n_connections; i++)
        if (flooders[i] > 0) {
            kill(flooders[i], SIGKILL);
            waitpid(flooders[i], NULL, 0);
            flooders[i] = 0;
        }
}

static void sum_up(uint32_t first, uint32_t n, double seconds, const uint64_t before[3])
{
    uint64_t sum[3] = {0};
    int other = 0;
    for (uint32_t i = first; i < first + n; i++) {
        sum[0] += answered[i].n_ok;
        sum[1] += answered[i].n_other;
        sum[2] += answered[i].bytes;
        other = answered[i].last_other != 0 ? answered[i].last_other : other;
    }
    printf(" %8.0f | %8.0f %s", (double)(sum[0] - before[0]) / seconds,
           (double)(sum[1] - before[1]) / seconds,
           other != 0 ? attn_status_name((attn_status)other) : "");
}

static void print_line(const char *name, const struct times *alone, const struct times *beside)
{
    bool is_within = beside->p99 <= 3 * alone->p99 + 2;
    printf("| %-24s | %7.3f | %7.3f | %7.3f | %7.3f | %8.2f | %s%s |", name, alone->p50, alone->p99,
           beside->p50, beside->p99, beside->most, is_within ? "yes" : "NO", beside->why);
}

static void run_kind(const struct kind *k, double seconds)
{
    uint64_t before[3] = {0};
    struct times alone = measure(seconds);
    begin_flood(k, 0);
    measure(0.3);
    for (int i = 0; i < n_connections; i++) {
        before[0] += answered[i].n_ok;
        before[1] += answered[i].n_other;
    }
    uint64_t from_ns = attn_now_ns();
    struct times beside = measure(seconds);
    print_line(k->name, &alone, &beside);
    sum_up(0, (uint32_t)n_connections, (double)(attn_now_ns() - from_ns) * 1e-9, before);
    printf(" |\n");
    fflush(stdout);
    end_flood(0);
    measure(0.5); /* what is queued is done */
}

static void run_all(double seconds)
{
    uint64_t before[3] = {0};
    struct times alone = measure(5);
    n_connections = 1;
    for (uint32_t i = 1; i < N_KINDS; i++)
        begin_flood(&kinds[i], i);
    struct times beside = measure(seconds);
    print_line("all at once", &alone, &beside);
    sum_up(1, N_KINDS - 1, seconds, before);
    printf(" |\n");
    for (uint32_t i = 1; i < N_KINDS; i++) {
        before[0] = before[1] = 0;
        printf("  %-24s", kinds[i].name);
        sum_up(i, 1, seconds, before);
        printf("\n");
        end_flood(i);
    }
}

/* --- the run ---------------------------------------------------------------------------------- */

static void begin(const char *threads)
{
    char file[64];
    snprintf(file, sizeof file, "/tmp/attnd_flood_%ld", (long)getpid());
    FILE *f = fopen(file, "w");
    assert_non_null(f);
    fchmod(fileno(f), 0600);
    fputs(tenants_text, f);
    fclose(f);
    const char *const flags[] = {"--listen.tenants",
                                 file,
                                 "--device.threads",
                                 threads,
                                 "--device.kv_memory",
                                 "1536M",
                                 "--cache.io_memory",
                                 "512M",
                                 "--engine.lease",
                                 "3s",
                                 "--engine.max_queue",
                                 "512M",
                                 "--cache.max_seq_tokens",
                                 "131072",
                                 NULL};
    e2e_start(&d, flags);
    unlink(file);
    for (uint32_t i = 0; i < N_IDS; i++)
        ids[i] = i * 7919 % 128000;
    enter(&good, GOOD_TOKEN);
    e2e_make_pool(&good, ATTN_F16, 64);
    struct e2e_item all = {&own, 0, CONTEXT};
    if (e2e_open_seq(&good, &own, 1, 1) != ATTN_OK ||
        e2e_await(&good, e2e_send_step(&good, 0, WIRE_STEP_APPEND, &all, 1, 0))->header->status !=
            ATTN_OK)
        fail_msg("the good tenant has no sequence");
    e2e_forget(&good);
    measure(1); /* the memory's pages are taken by now, or soon */
}

static const char usage[] =
    "usage: bench_flood [--seconds S] [--all S] [--only NAME] [--connections N] [--in-flight N]\n"
    "                   [--threads N] [--tls] [--alone]\n";

int main(int argc, char **argv)
{
    double seconds = 3, all_seconds = 0;
    const char *only = NULL, *threads = "2";
    bool is_alone = false;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--tls") == 0)
            setenv("E2E_TRANSPORT", "tls", 1);
        else if (strcmp(argv[i], "--alone") == 0)
            is_alone = true;
        else if (strcmp(argv[i], "--seconds") == 0)
            seconds = atof(value), i++;
        else if (strcmp(argv[i], "--all") == 0)
            all_seconds = atof(value), i++;
        else if (strcmp(argv[i], "--only") == 0)
            only = value, i++;
        else if (strcmp(argv[i], "--connections") == 0)
            n_connections = atoi(value), i++;
        else if (strcmp(argv[i], "--in-flight") == 0)
            n_in_flight = atoi(value), i++;
        else if (strcmp(argv[i], "--threads") == 0)
            threads = value, i++;
        else
            return fputs(usage, stderr), 2;
    }
    if (n_connections < 1 || n_connections > MAX_FLOODERS || n_in_flight < 1 || seconds <= 0)
        return fputs(usage, stderr), 2;
    answered = mmap(NULL, MAX_FLOODERS * sizeof *answered, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (is_alone &&
        sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 10}) != 0)
        return perror("bench_flood: --alone"), 1;
    begin(threads);
    printf(
        "A good tenant's decode steps beside a flood of %d connections with %d requests in "
        "flight, ms.\n\n| flood | alone p50 | p99 | beside p50 | p99 | most | p99 <= 3 x alone + "
        "2 | done/s | refused/s |\n|---|---|---|---|---|---|---|---|---|\n",
        n_connections, n_in_flight);
    for (size_t i = 0; i < N_KINDS && all_seconds == 0; i++)
        if (is_possible(&kinds[i]) && (only == NULL || strstr(kinds[i].name, only) != NULL))
            run_kind(&kinds[i], seconds);
    if (all_seconds > 0)
        run_all(all_seconds);
    e2e_disconnect(&good);
    e2e_stop(&d);
    return 0;
}
