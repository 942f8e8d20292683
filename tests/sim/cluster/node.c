/* node.c: the daemons: an engine without a thread on the virtual device (tests/sim/device.c), its
 * end and its successor on the same arena; requests as messages that are lost, doubled and late.
 * Every answer is judged as it is made, whether it arrives or not. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache/kv_owner.h"
#include "cache/kv_seq.h"
#include "cluster.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/state.h"
#include "tests/daemon/engine/engine_fixture.h"

enum { MAX_ASKS = 1 << 16, MAX_NAMES = 1 << 12 };

struct node {
    uint32_t number;
    char url[32];
    struct config cfg;
    struct backend *backend;
    struct iobuf_pool *bufs;
    struct engine_fixture fixture;
    struct engine *engine; /* NULL: between two processes */
    uint64_t turn; /* the one that is due: others that were are not taken */
    int memory_fd;
    uint64_t stopped_until_ns, cut_until_ns;
    struct request *done; /* answered, and not yet freed */
};

/* What a daemon has said of a name: where its latest move went, and whether it is open there. */
struct said {
    const struct node *node, *to;
    uint64_t name, id;
    uint32_t epoch, at_epoch;
    bool is_open;
};

uint32_t n_nodes;
static struct node nodes[C_MAX_NODES];
static struct node *answering;
static struct ask *asks[MAX_ASKS];
static uint64_t n_asks;
static struct said said[MAX_NAMES];
static uint32_t n_said;
static bool is_closing; /* the device's time does not wait */

struct node *node_at(uint32_t i)
{
    return &nodes[i];
}

uint32_t node_number(const struct node *n)
{
    return n->number;
}

const char *node_url(const struct node *n)
{
    return n->url;
}

struct node *node_of_url(const char *url)
{
    for (uint32_t i = 0; i < n_nodes; i++)
        if (strcmp(nodes[i].url, url) == 0)
            return &nodes[i];
    return NULL;
}

/* --- judgement -------------------------------------------------------------------------------- */

static struct said *said_of(const struct node *n, uint64_t name)
{
    for (uint32_t i = n_said; i-- > 0;)
        if (said[i].node == n && said[i].name == name)
            return &said[i];
    if (n_said == MAX_NAMES)
        sim_fail("too many names");
    said[n_said] = (struct said){.node = n, .name = name};
    return &said[n_said++];
}

static _Noreturn void is_wrong(const struct ask *a, const Attnd__Reply *r, const char *what)
{
    sim_fail("daemon %u, request %llu of %04x: %s; the answer is %s \"%s\"", a->node->number,
             (unsigned long long)a->id, (unsigned)(a->name & 0xffff), what,
             attn_status_name((attn_status)r->status), r->message);
}

/* A sequence's place that a daemon tells is that of its latest move from there. */
static void judge_place(const struct ask *a, const Attnd__Reply *r)
{
    const struct said *s = said_of(a->node, a->name);
    char place[96];
    if (s->to == NULL)
        is_wrong(a, r, "it has never moved from here");
    snprintf(place, sizeof place, "%s: %llu, epoch %u", s->to->url, (unsigned long long)s->id,
             s->epoch);
    const Attnd__Moved *m = r->body_case == ATTND__REPLY__BODY_MOVED ? r->moved : NULL;
    bool is_latest =
        m != NULL ? strcmp(m->url, s->to->url) == 0 && m->seq == s->id && m->epoch == s->epoch
                  : strstr(r->message, place) != NULL;
    if (!is_latest)
        is_wrong(a, r, "an older place is named");
}

static void judge_append(const struct ask *a, const Attnd__Reply *r)
{
    const struct handle *h = a->appends;
    if (h->state == IN_FORCE || (h->state == LOST && h->is_late))
        return;
    bool is_refused = r->status != ATTN_OK;
    cluster_counts.old_refused += is_refused;
    cluster_counts.fenced += r->status == ATTN_EFENCED;
    if (is_refused)
        return;
    if (h->state == REPLACED)
        is_wrong(a, r, "a handle that was replaced appends: two copies live");
    if (registry_number(h->node) != h->registration)
        is_wrong(a, r, "a handle of before its daemon was declared dead appends: two copies live");
    cluster_counts.old_before_registered++; /* in strict mode: see submit */
}

/* Or it was, and there was no buffer for the answer: whoever repeats it is told so. */
static bool is_carried_out(const Attnd__Reply *r)
{
    return r->status == ATTN_OK || strstr(r->message, "buffer is left for the reply") != NULL;
}

static void judge(const struct ask *a, const Attnd__Reply *r)
{
    struct said *s;
    if (r->status == ATTN_EMOVED)
        judge_place(a, r);
    switch (a->kind) {
    case ATTND__REQUEST__BODY_STEP:
        if (a->appends != NULL)
            judge_append(a, r);
        break;
    case ATTND__REQUEST__BODY_NOTE:
        if (a->sets_note != NULL && a->sets_note->state == REPLACED && r->status == ATTN_OK)
            is_wrong(a, r, "a handle that was replaced sets a note");
        break;
    case ATTND__REQUEST__BODY_OPEN:
        if (is_carried_out(r))
            said_of(a->node, a->name)->is_open = true;
        break;
    case ATTND__REQUEST__BODY_KILL:
        if (is_carried_out(r))
            said_of(a->node, a->name)->is_open = false;
        break;
    case ATTND__REQUEST__BODY_CLOSE:
        s = said_of(a->node, a->name);
        if (!is_carried_out(r))
            break;
        if (a->moved_to != NULL && !s->is_open)
            is_wrong(a, r, "a move is acknowledged twice");
        s->is_open = false;
        if (a->moved_to != NULL) {
            s->to = a->moved_to;
            s->id = a->moved_id;
            s->epoch = a->moved_epoch;
            s->at_epoch = a->at_epoch;
        }
        break;
    case ATTND__REQUEST__BODY_LOCATE:
        if (r->status == ATTN_OK && r->moved->url[0] != '\0') {
            cluster_counts.located++;
            judge_place(a, r);
        }
        break;
    default:
        break;
    }
}

/* --- answers ---------------------------------------------------------------------------------- */

static bool is_lost(uint32_t per_mille)
{
    bool is = sim_has_faults && sim_chance(per_mille);
    cluster_counts.dropped += is;
    return is;
}

/* Of the way that it and its answer take; 0: it is not cut. */
static uint64_t cut_until_ns(const struct ask *a)
{
    uint64_t ns = a->goes_round ? 0 : a->node->cut_until_ns;
    return a->from != NULL && a->from->cut_until_ns > ns ? a->from->cut_until_ns : ns;
}

struct answer {
    struct ask *ask;
    size_t n_bytes;
    uint8_t *bytes;
};

static void on_answer(void *arg, uint64_t word)
{
    struct answer *m = arg;
    struct ask *a = m->ask;
    (void)word;
    uint64_t until_ns = cut_until_ns(a);
    if (until_ns > sim_now_ns) {
        if (sim_chance(500))
            sim_at(until_ns - sim_now_ns, SIM_WORLD, on_answer, m, 0);
        return;
    }
    if (a->is_over)
        return;
    struct wire_arena arena;
    struct wire_reply w;
    char why[256];
    wire_arena_init(&arena, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    if (wire_reply_decode(m->bytes, m->n_bytes, &arena, &w, why, sizeof why) != ATTN_OK)
        sim_fail("a reply does not decode: %s", why);
    a->is_over = true;
    if (a->take != NULL)
        a->take(a, &w);
    wire_arena_reset(&arena);
}

static void reply(struct request *req)
{
    struct node *n = answering;
    struct iobuf *b = req->reply;
    struct answer *m = sim_alloc(sizeof *m);
    struct wire_arena arena;
    struct wire_reply w;
    char why[256];
    m->n_bytes = b->n_bytes;
    m->bytes = sim_alloc(b->n_bytes);
    memcpy(m->bytes, b->data + b->offset, b->n_bytes);
    req->peer = n->done;
    n->done = req;
    if (is_closing)
        return; /* its process is gone */
    wire_arena_init(&arena, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
    uint8_t *copy = sim_alloc(b->n_bytes);
    memcpy(copy, m->bytes, b->n_bytes);
    if (wire_reply_decode(copy, m->n_bytes, &arena, &w, why, sizeof why) != ATTN_OK)
        sim_fail("a reply does not decode: %s", why);
    struct ask *a = m->ask = asks[w.request_id];
    sim_say("daemon %u answers %llu (%04x): %s %s", n->number, (unsigned long long)a->id,
            (unsigned)(a->name & 0xffff), attn_status_name((attn_status)w.header->status),
            w.header->message);
    judge(a, w.header);
    wire_arena_reset(&arena);
    if (!is_lost(cluster_plan.drop))
        sim_at(cluster_ms(0, 3), SIM_WORLD, on_answer, m, 0);
}

static const struct transport_ops transport = {.label = STATS_IPC, .reply = reply};
static const struct transport_ops admin = {.label = STATS_IPC, .reply = reply, .is_admin = true};

/* --- turns ------------------------------------------------------------------------------------ */

static void free_done(struct node *n)
{
    while (n->done != NULL) {
        struct request *req = n->done;
        n->done = req->peer;
        request_free(req);
    }
}

static void on_turn(void *arg, uint64_t turn);

static void turn_at(struct node *n, uint64_t delay_ns)
{
    sim_at(delay_ns, SIM_WORLD, on_turn, n, ++n->turn);
}

static void on_turn(void *arg, uint64_t turn)
{
    struct node *n = arg;
    if (n->turn != turn || n->engine == NULL)
        return;
    if (n->stopped_until_ns > sim_now_ns) {
        turn_at(n, n->stopped_until_ns - sim_now_ns);
        return;
    }
    answering = n;
    bool is_busy = false;
    for (int i = 0; i < 8 && engine_turn(n->engine, 0); i++)
        is_busy = true;
    free_done(n);
    turn_at(n, is_busy ? SIM_MS : 20 * SIM_MS);
}

/* --- requests --------------------------------------------------------------------------------- */

static void on_arrival(void *arg, uint64_t word)
{
    struct ask *a = arg;
    struct node *n = a->node;
    char why[256];
    (void)word;
    uint64_t until_ns = cut_until_ns(a);
    if (until_ns > sim_now_ns || n->engine == NULL) {
        if (until_ns > sim_now_ns && sim_chance(500)) /* it was under way, and comes after all */
            sim_at(until_ns - sim_now_ns + cluster_ms(0, 3), SIM_WORLD, on_arrival, a, 0);
        return;
    }
    struct request *req =
        request_new(a->is_operators ? &admin : &transport, NULL, NULL, n->bufs, a->n_bytes);
    if (req == NULL)
        return; /* no buffer: it is sent again */
    memcpy(req->msg->data, a->bytes, a->n_bytes);
    if (request_decode(req, sim_now_ns, n->cfg.default_timeout_us, n->cfg.max_timeout_us,
                       UINT64_MAX, why, sizeof why) != ATTN_OK)
        sim_fail("a request does not decode: %s", why);
    req->principal = (struct principal){.kind = PRINCIPAL_USER};
    answering = n;
    engine_submit(n->engine, req);
    turn_at(n, 0);
}

static void on_again(void *arg, uint64_t word)
{
    struct ask *a = arg;
    (void)word;
    if (!a->is_over)
        ask_send(a);
}

void ask_send(struct ask *a)
{
    if (!is_lost(cluster_plan.drop))
        sim_at(cluster_ms(0, 3), SIM_WORLD, on_arrival, a, 0);
    if (sim_has_faults && sim_chance(cluster_plan.twice)) {
        cluster_counts.copies++;
        sim_at(cluster_ms(0, 20), SIM_WORLD, on_arrival, a, 0);
    }
    if (sim_has_faults && sim_chance(cluster_plan.late)) {
        cluster_counts.copies++;
        sim_at(cluster_ms(50, 4000), SIM_WORLD, on_arrival, a, 0);
    }
    sim_at(cluster_ms(100, 300), SIM_WORLD, on_again, a, 0);
}

struct ask *ask_of(struct node *n, Attnd__Request *h, uint64_t session, const void *payload,
                   size_t payload_bytes, void (*take)(struct ask *, const struct wire_reply *),
                   void *arg)
{
    struct ask *a = sim_alloc(sizeof *a);
    if (n_asks + 1 == MAX_ASKS)
        sim_fail("too many requests");
    a->id = ++n_asks;
    asks[a->id] = a;
    a->node = n;
    a->kind = (int)h->body_case;
    a->take = take;
    a->arg = arg;
    h->session = session;
    size_t head = wire_request_head_bytes(h);
    a->n_bytes = head + payload_bytes;
    a->bytes = sim_alloc(a->n_bytes);
    wire_request_head_encode(h, a->id, payload_bytes, a->bytes);
    if (payload_bytes > 0)
        memcpy(a->bytes + head, payload, payload_bytes);
    cluster_counts.requests++;
    return a;
}

/* --- processes -------------------------------------------------------------------------------- */

static attn_status (*real_submit)(struct backend *b, struct backend_batch *batch);
static struct backend_ops ops;

/* In strict mode nothing is appended that begins at or after the lease's end. */
static attn_status submit(struct backend *b, struct backend_batch *batch)
{
    const struct node *n = answering;
    bool appends = false;
    for (uint32_t i = 0; i < batch->n_items; i++)
        appends |= batch->items[i].flags & BACKEND_APPEND;
    if (appends && cluster_plan.is_strict && !registry_has(n) && !is_closing)
        sim_fail("daemon %u appends, and its lease has ended: two copies may live", n->number);
    return real_submit(b, batch);
}

static void configure(struct node *n)
{
    n->cfg = (struct config){
        .max_sequences = 128,
        .max_seq_tokens = 256,
        .max_pools = 2,
        .max_layers = 4,
        .max_message_bytes = 1 << 20,
        .io_memory_bytes = 4 << 20,
        .max_batch_items = 16,
        .max_batch_tokens = 128,
        .max_step_items = 16,
        .max_step_tokens = 128,
        .max_queue_requests = 256,
        .max_queue_bytes = 2 << 20,
        .default_timeout_us = 2000000,
        .max_timeout_us = 10000000,
        .max_sessions = 32,
        .lease_us = C_LEASE_NS / 1000,
        .fence_us = cluster_plan.is_strict ? C_FENCE_NS / 1000 : 0,
    };
}

/* arena_fd: a predecessor's, -1: none. */
static void node_open(struct node *n, int arena_fd)
{
    char why[512] = "";
    struct backend_config c = {.kv_bytes = 2 << 20,
                               .max_batch_items = n->cfg.max_batch_items,
                               .max_batch_tokens = n->cfg.max_batch_tokens,
                               .device_index = (int32_t)n->number,
                               .import_fd = arena_fd < 0 ? -1 : n->memory_fd};
    if (ops.open(&c, &n->backend) != ATTN_OK ||
        iobuf_pool_open(&ops, n->backend, n->cfg.io_memory_bytes, &n->bufs) != ATTN_OK)
        sim_fail("no device");
    if (arena_fd < 0 && ops.export_memory(n->backend, &n->memory_fd) != ATTN_OK)
        sim_fail("no descriptor");
    n->fixture = (struct engine_fixture){.is_kept = true};
    if (engine_fixture_take_over(&n->fixture, arena_fd, &n->cfg, &ops, n->backend, n->bufs,
                                 &n->engine, why, sizeof why) != ATTN_OK)
        sim_fail("daemon %u does not open: %s", n->number, why);
    struct engine_kept kept;
    if (arena_fd >= 0 && (engine_restore_pools(n->engine, &kept) != ATTN_OK ||
                          engine_restore(n->engine, &kept) != ATTN_OK))
        sim_fail("daemon %u does not restore what it was left", n->number);
    turn_at(n, 0);
}

/* What is in flight on the device is carried out; nobody hears of it. */
static void node_close(struct node *n)
{
    is_closing = true;
    answering = n;
    n->turn++;
    if (engine_close(n->engine) != ATTN_OK)
        sim_fail("an engine does not close");
    n->engine = NULL;
    free_done(n);
    engine_fixture_close(&n->fixture);
    idle_memory_close(&n->fixture.idle);
    iobuf_pool_close(n->bufs);
    ops.close(n->backend);
    is_closing = false;
}

static int copy_of(int fd)
{
    struct stat s;
    int copy = memfd_create("sim-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    uint8_t *p = NULL;
    if (copy < 0 || fstat(fd, &s) != 0 || ftruncate(copy, s.st_size) != 0)
        sim_fail("no memory for an arena");
    p = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED || pwrite(copy, p, (size_t)s.st_size, 0) != s.st_size)
        sim_fail("no copy of an arena");
    munmap(p, (size_t)s.st_size);
    return copy;
}

static void on_start(void *arg, uint64_t fd)
{
    node_open(arg, (int)fd);
    close((int)fd);
}

void node_kill(struct node *n)
{
    if (n->engine == NULL)
        return;
    int fd = copy_of(kv_fd(n->fixture.kv)); /* as it is at this instant */
    sim_say("daemon %u is killed", n->number);
    cluster_counts.kills++;
    node_close(n);
    sim_at(cluster_ms(1, 40), SIM_WORLD, on_start, n, (uint64_t)fd);
}

void node_stop(struct node *n, uint64_t ns)
{
    sim_say("daemon %u is stopped for %llu ms", n->number, (unsigned long long)(ns / SIM_MS));
    n->stopped_until_ns = sim_now_ns + ns;
}

void node_cut(struct node *n, uint64_t ns)
{
    sim_say("daemon %u is cut off for %llu ms", n->number, (unsigned long long)(ns / SIM_MS));
    n->cut_until_ns = sim_now_ns + ns;
}

bool node_is_up(const struct node *n)
{
    return n->engine != NULL && n->stopped_until_ns <= sim_now_ns;
}

uint32_t node_list(const struct node *n, uint64_t *names, uint32_t most)
{
    uint32_t n_found = 0;
    if (n->engine == NULL)
        return 0;
    for (kv_seq_id seq = {0};
         n_found < most && kv_seq_next(n->fixture.kv, UINT32_MAX, &seq) == ATTN_OK; seq.index++) {
        struct kv_seq_info i;
        kv_seq_info(n->fixture.kv, seq, &i);
        names[n_found++] = i.name;
    }
    return n_found;
}

void nodes_check(void)
{
    for (uint32_t i = 0; i < n_nodes; i++)
        if (nodes[i].engine != NULL && kv_check(nodes[i].fixture.kv) != ATTN_OK)
            sim_fail("daemon %u: the cache's books are wrong: %s", i,
                     kv_last_error(nodes[i].fixture.kv));
}

static uint64_t now_ns(void)
{
    return sim_now_ns;
}

void nodes_begin(void)
{
    memset(&stats, 0, sizeof stats);
    memset(nodes, 0, sizeof nodes);
    log_init(LOG_LEVEL_ERROR, LOG_FORMAT_LOGFMT);
    clock_use(now_ns);
    ops = device_ops;
    real_submit = device_ops.submit;
    ops.submit = submit;
    n_asks = 0;
    n_said = 0;
    n_nodes = cluster_plan.n_nodes;
    for (uint32_t i = 0; i < n_nodes; i++) {
        nodes[i].number = i;
        snprintf(nodes[i].url, sizeof nodes[i].url, "tcp://daemon%u:7471", i);
        configure(&nodes[i]);
        node_open(&nodes[i], -1);
    }
}

void nodes_end(void)
{
    for (uint32_t i = 0; i < n_nodes; i++) {
        node_close(&nodes[i]);
        close(nodes[i].memory_fd);
    }
}

/* --- memory of world.c: no daemon has its own here ------------------------------------------- */

void *__real_malloc(size_t n);
void *__real_realloc(void *p, size_t n);
void __real_free(void *p);

void *__real_malloc(size_t n)
{
    return malloc(n);
}

void *__real_realloc(void *p, size_t n)
{
    return realloc(p, n);
}

void __real_free(void *p)
{
    free(p);
}

/* --- the log: a part of the history ----------------------------------------------------------- */

void __wrap_log_write(enum log_level level, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void __wrap_log_write(enum log_level level, const char *format, ...)
{
    char line[512];
    va_list args;
    (void)level;
    if (!sim_is_verbose)
        return;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    sim_say("daemon %u: %s", answering == NULL ? 0 : answering->number, line);
}

void __wrap_log_event(enum log_level level, const char *msg, const char *pairs, ...)
    __attribute__((format(printf, 3, 4)));
void __wrap_log_event(enum log_level level, const char *msg, const char *pairs, ...)
{
    (void)level, (void)pairs;
    sim_say("daemon %u: %s", answering == NULL ? 0 : answering->number, msg);
}

/* --- what device.c asks of a process, which here has no threads ------------------------------- */

uint64_t sim_life;

void process_point(void)
{
}

void process_may_be_killed(uint32_t of_thousand)
{
    (void)of_thousand;
}

void threads_run(void)
{
}

/* Until a batch is done, where the process that waits for it ends. */
bool thread_wait(bool (*is_ready)(void *arg), void *arg, uint64_t until_ns)
{
    (void)is_ready, (void)arg;
    if (is_closing && until_ns > sim_now_ns)
        sim_now_ns = until_ns;
    return false;
}

void thread_sleep(uint64_t ns)
{
    (void)ns;
}

bool memory_fails(void)
{
    return false;
}
