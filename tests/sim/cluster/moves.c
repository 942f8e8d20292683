/* moves.c: who takes a sequence from one daemon to another, for somebody else: it adopts the
 * sequence, so that its worker is refused, copies all blocks and its note, and closes it at the
 * source with the place where it goes on. What does not come so far leaves it where it is, and
 * closes the copy. */
#include <string.h>

#include "cluster.h"

struct link {
    uint64_t session; /* 0: none */
    uint32_t pool;
};

enum step {
    FROM_HELLO,
    FROM_POOL,
    TO_HELLO,
    TO_POOL,
    ADOPT,
    READ_NOTE,
    EXPORT,
    OPEN,
    WRITE_NOTE,
    IMPORT,
    CLOSE,
    DONE
};

struct move {
    struct node *from, *to;
    uint64_t name;
    enum step step;
    uint32_t epoch, to_epoch, lens[C_LAYERS];
    uint8_t *blocks, note[C_NOTE_BYTES];
    size_t n_bytes, n_note;
    uint64_t sums[2 * (C_MAX_LEN / C_BLOCK + 1)]; /* old handles may have appended one more */
    size_t n_sums;
    uint64_t attention;
    uint32_t layout;
};

static struct link links[C_MAX_NODES][C_MAX_NODES]; /* [who moves][to whom] */
static uint32_t n_running;

static struct link *link_to(const struct move *m, const struct node *n)
{
    return &links[node_number(m->from)][node_number(n)];
}

static void go_on(struct move *m);
static void take(struct ask *a, const struct wire_reply *w);

static void send(struct move *m, struct node *n, Attnd__Request *h, const void *payload,
                 size_t payload_bytes)
{
    struct ask *a = ask_of(n, h, link_to(m, n)->session, payload, payload_bytes, take, m);
    a->from = n == m->from ? NULL : m->from;
    a->goes_round = n == m->from;
    a->name = m->name;
    if (m->step == CLOSE) {
        a->at_epoch = m->epoch;
        a->moved_to = m->to;
        a->moved_id = m->name;
        a->moved_epoch = m->to_epoch;
    }
    ask_send(a);
}

static void ended(struct move *m, bool is_done)
{
    n_running--;
    cluster_counts.moves += is_done;
    cluster_counts.moves_given_up += !is_done;
    m->step = DONE;
}

/* What is at the target is no use any more. */
static void give_up(struct move *m, const Attnd__Reply *r)
{
    sim_say("a move of %04x is given up: %s", (unsigned)(m->name & 0xffff), r->message);
    if (m->to_epoch != 0) {
        Attnd__Close b = ATTND__CLOSE__INIT;
        Attnd__Request h = ATTND__REQUEST__INIT;
        b.seq = m->name;
        b.epoch = m->to_epoch;
        h.body_case = ATTND__REQUEST__BODY_CLOSE;
        h.close = &b;
        struct ask *a = ask_of(m->to, &h, link_to(m, m->to)->session, NULL, 0, NULL, NULL);
        a->from = m->from;
        a->name = m->name;
        ask_send(a);
    }
    ended(m, false);
}

static void hello(struct move *m, struct node *n)
{
    Attnd__Hello b = ATTND__HELLO__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.protocol_version = 1;
    b.client_name = "mover";
    b.nonce = sim_random() | 1;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &b;
    *link_to(m, n) = (struct link){0};
    send(m, n, &h, NULL, 0);
}

static void pool(struct move *m, struct node *n)
{
    Attnd__PoolSpec spec = ATTND__POOL_SPEC__INIT;
    Attnd__PoolCreate b = ATTND__POOL_CREATE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    cluster_spec(&spec);
    b.spec = &spec;
    h.body_case = ATTND__REQUEST__BODY_POOL_CREATE;
    h.pool_create = &b;
    send(m, n, &h, NULL, 0);
}

static void import(struct move *m)
{
    Attnd__Content content = ATTND__CONTENT__INIT;
    Attnd__Import b = ATTND__IMPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    content.num_kv_heads = C_KV_HEADS;
    content.head_dim_k = content.head_dim_v = C_DIM;
    content.block_tokens = C_BLOCK;
    content.kv_dtype = ATTND__DTYPE__F32;
    content.attention = m->attention;
    b.seq = m->name;
    b.epoch = m->to_epoch;
    b.layout = m->layout;
    b.n_layer_len = C_LAYERS;
    b.layer_len = m->lens;
    b.n_sums = m->n_sums;
    b.sums = m->sums;
    b.content = &content;
    h.body_case = ATTND__REQUEST__BODY_IMPORT;
    h.import = &b;
    send(m, m->to, &h, m->blocks, m->n_bytes);
}

static uint32_t n_blocks(const struct move *m)
{
    uint32_t most = 0;
    for (uint32_t l = 0; l < C_LAYERS; l++)
        most = m->lens[l] > most ? m->lens[l] : most;
    return (most + C_BLOCK - 1) / C_BLOCK;
}

static void go_on(struct move *m)
{
    Attnd__Adopt adopt = ATTND__ADOPT__INIT;
    Attnd__Export export = ATTND__EXPORT__INIT;
    Attnd__Open open = ATTND__OPEN__INIT;
    Attnd__Close close = ATTND__CLOSE__INIT;
    Attnd__Moved moved = ATTND__MOVED__INIT;
    Attnd__Note note = ATTND__NOTE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    note.seq = adopt.seq = export.seq = open.seq = close.seq = moved.seq = m->name;
    switch (m->step) {
    case FROM_HELLO:
        hello(m, m->from);
        break;
    case FROM_POOL:
        pool(m, m->from);
        break;
    case TO_HELLO:
        hello(m, m->to);
        break;
    case TO_POOL:
        pool(m, m->to);
        break;
    case ADOPT:
        h.body_case = ATTND__REQUEST__BODY_ADOPT;
        h.adopt = &adopt;
        send(m, m->from, &h, NULL, 0);
        break;
    case READ_NOTE:
    case WRITE_NOTE:
        note.epoch = m->step == READ_NOTE ? m->epoch : m->to_epoch;
        note.has_note = m->step == WRITE_NOTE;
        note.note = (ProtobufCBinaryData){note.has_note ? m->n_note : 0, m->note};
        h.body_case = ATTND__REQUEST__BODY_NOTE;
        h.note = &note;
        send(m, m->step == READ_NOTE ? m->from : m->to, &h, NULL, 0);
        break;
    case EXPORT:
        export.epoch = m->epoch;
        export.n_blocks = n_blocks(m);
        h.body_case = ATTND__REQUEST__BODY_EXPORT;
        h.export = &export;
        send(m, m->from, &h, NULL, 0);
        break;
    case OPEN:
        open.pool = link_to(m, m->to)->pool;
        h.body_case = ATTND__REQUEST__BODY_OPEN;
        h.open = &open;
        send(m, m->to, &h, NULL, 0);
        break;
    case IMPORT:
        import(m);
        break;
    case CLOSE:
        moved.url = (char *)(uintptr_t)node_url(m->to);
        moved.epoch = m->to_epoch;
        close.epoch = m->epoch;
        close.moved = &moved;
        h.body_case = ATTND__REQUEST__BODY_CLOSE;
        h.close = &close;
        send(m, m->from, &h, NULL, 0);
        break;
    case DONE:
        break;
    }
}

static void keep_export(struct move *m, const struct wire_reply *w)
{
    const Attnd__ExportReply *r = w->header->export;
    m->n_bytes = w->payload_bytes;
    m->blocks = sim_alloc(w->payload_bytes + 1);
    memcpy(m->blocks, w->payload, w->payload_bytes);
    m->n_sums = r->n_sums;
    if (r->n_sums > sizeof m->sums / sizeof *m->sums)
        sim_fail("an export has %zu checksums", r->n_sums);
    memcpy(m->sums, r->sums, r->n_sums * sizeof *m->sums);
    m->attention = r->content->attention;
    m->layout = r->layout;
    for (uint32_t l = 0; l < C_LAYERS; l++)
        if (r->layer_len[l] != m->lens[l])
            sim_fail("a sequence that was adopted has grown at epoch %u", m->epoch);
}

/* A close that is repeated may find that it was carried out: the sequence has moved, to there. */
static bool is_closed(const struct move *m, const Attnd__Reply *r)
{
    char place[96];
    snprintf(place, sizeof place, "%s: %llu, epoch %u", node_url(m->to),
             (unsigned long long)m->name, m->to_epoch);
    return r->status == ATTN_OK || (r->status == ATTN_EMOVED && strstr(r->message, place) != NULL);
}

static void take(struct ask *a, const struct wire_reply *w)
{
    struct move *m = a->arg;
    const Attnd__Reply *r = w->header;
    attn_status st = (attn_status)r->status;
    if (m->step == CLOSE) {
        if (is_closed(m, r))
            ended(m, true);
        else if (st == ATTN_EDEADLINE || st == ATTN_EOVERLOAD)
            go_on(m);
        else
            give_up(m, r);
        return;
    }
    if (st == ATTN_ENOTFOUND && strstr(r->message, "session") != NULL)
        *link_to(m, a->node) = (struct link){0};
    if (st != ATTN_OK) {
        give_up(m, r);
        return;
    }
    switch (m->step) {
    case FROM_HELLO:
    case TO_HELLO:
        link_to(m, a->node)->session = r->hello->session;
        break;
    case FROM_POOL:
    case TO_POOL:
        link_to(m, a->node)->pool = r->pool->pool;
        break;
    case ADOPT:
        m->epoch = r->seq->epoch;
        memcpy(m->lens, r->seq->layer_len, sizeof m->lens);
        break;
    case READ_NOTE:
        m->n_note = r->note->note.len;
        if (m->n_note > 0)
            memcpy(m->note, r->note->note.data, m->n_note);
        break;
    case EXPORT:
        keep_export(m, w);
        break;
    case OPEN:
        m->to_epoch = r->seq->epoch;
        break;
    default:
        break;
    }
    m->step++;
    if (m->step == EXPORT && n_blocks(m) == 0)
        m->step = OPEN;
    if (m->step == WRITE_NOTE && m->n_note == 0)
        m->step = IMPORT;
    if (m->step == IMPORT && n_blocks(m) == 0)
        m->step = CLOSE;
    if (m->step == TO_HELLO && link_to(m, m->to)->pool != 0)
        m->step = ADOPT;
    go_on(m);
}

void move_begin(struct node *from, uint64_t name, struct node *to)
{
    struct move *m = sim_alloc(sizeof *m);
    *m = (struct move){.from = from, .to = to, .name = name};
    sim_say("%04x is to move from %u to %u", (unsigned)(name & 0xffff), node_number(from),
            node_number(to));
    n_running++;
    if (link_to(m, from)->pool != 0)
        m->step = link_to(m, to)->pool != 0 ? ADOPT : TO_HELLO;
    go_on(m);
}

uint32_t moves_running(void)
{
    return n_running;
}

void moves_begin(void)
{
    memset(links, 0, sizeof links);
    n_running = 0;
}
