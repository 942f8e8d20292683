/* peer.c: the clients' lives: connecting, sending with all that a bad network does to messages,
 * repeating what is not answered as libattn does, and choosing what to do next. */
#include <arpa/inet.h>
#include <string.h>

#include "daemon/transport/sp_frame.h"
#include "model.h"

struct peer *peers[MAX_PEERS];
uint32_t n_peers;

static uint32_t n_ops; /* begun, of all peers */
static bool is_asking;

static const uint8_t our_handshake[SP_HANDSHAKE_BYTES] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};

/* --- the connection --------------------------------------------------------------------------- */

static void cut(struct peer *p)
{
    if (p->conn == NULL)
        return;
    sim_say("peer %u is cut", p->number);
    net_close(p->conn, true);
    p->conn = NULL;
    p->connect_ns = sim_now_ns + sim_between(100 * SIM_US, 20 * SIM_MS);
}

static void connect_again(struct peer *p)
{
    if (sim_now_ns < p->connect_ns || !net_may_connect())
        return;
    p->conn = net_connect(p);
    p->has_shaken = false;
    p->in = (struct bytes){0};
    net_send(p->conn, our_handshake, sizeof our_handshake);
    if (p->session != 0 && sim_chance(700))
        ask_hello(p);
    for (uint64_t i = p->n_asks < 64 ? 0 : p->n_asks - 64; i < p->n_asks; i++)
        if (!p->asks[i]->is_answered)
            p->asks[i]->again_ns = sim_now_ns;
}

void peer_gone(struct peer *p, struct conn *c)
{
    if (p->conn != c)
        return;
    p->conn = NULL;
    p->connect_ns = sim_now_ns + sim_between(100 * SIM_US, 10 * SIM_MS);
}

bool peer_reads(struct peer *p)
{
    return !sim_has_faults || !p->is_slow || sim_chance(100);
}

/* One whole message of the framing; false: more must come. */
static bool take_message(struct peer *p)
{
    const uint8_t *b = p->in.p + p->in.first;
    uint32_t high, low;
    if (!p->has_shaken) {
        if (p->in.n < SP_HANDSHAKE_BYTES)
            return false;
        if (memcmp(b, sp_handshake, SP_HANDSHAKE_BYTES) != 0)
            sim_fail("peer %u: the daemon's handshake is none", p->number);
        p->has_shaken = true;
        bytes_take(&p->in, SP_HANDSHAKE_BYTES);
        return true;
    }
    if (p->in.n < 9)
        return false;
    memcpy(&high, b + 1, 4);
    memcpy(&low, b + 5, 4);
    uint64_t n = (uint64_t)ntohl(high) << 32 | ntohl(low);
    if (b[0] != 1 || n < 4 || n > (1 << 20))
        sim_fail("peer %u: a message of type %u and %llu bytes", p->number, b[0],
                 (unsigned long long)n);
    if (p->in.n < 9 + n)
        return false;
    uint8_t *message = sim_alloc(n); /* aligned */
    memcpy(message, b + 13, n - 4);
    bytes_take(&p->in, 9 + n);
    if (sim_has_faults && sim_chance(sim_plan.drop)) {
        sim_counts.dropped++;
        return true;
    }
    answer_take(p, message, n - 4);
    return true;
}

void peer_take(struct peer *p, struct conn *c, const uint8_t *bytes, size_t n)
{
    if (p->conn != c)
        return;
    bytes_add(&p->in, bytes, n);
    while (p->conn == c && take_message(p)) {
    }
}

/* --- sending ---------------------------------------------------------------------------------- */

static void put(struct ask *a)
{
    struct peer *p = a->peer;
    uint8_t head[13] = {1};
    uint64_t n = a->n_bytes + 4;
    uint32_t high = htonl((uint32_t)(n >> 32)), low = htonl((uint32_t)n);
    uint32_t word = htonl(0x80000000u | (uint32_t)a->id);
    if (p->conn == NULL || p->is_dead)
        return;
    memcpy(head + 1, &high, 4);
    memcpy(head + 5, &low, 4);
    memcpy(head + 9, &word, 4);
    a->n_sent++;
    sim_say("peer %u -> %llu", p->number, (unsigned long long)a->id);
    net_send(p->conn, head, sizeof head);
    net_send(p->conn, a->bytes, a->n_bytes);
}

static void on_late(void *arg, uint64_t word)
{
    struct ask *a = arg;
    (void)word;
    put(a);
}

void peer_send(struct ask *a)
{
    struct peer *p = a->peer;
    if (a->first_sent_ns == 0)
        a->first_sent_ns = sim_now_ns;
    a->sent_ns = sim_now_ns;
    a->again_ns = sim_now_ns + sim_between(100 * SIM_MS, 400 * SIM_MS);
    if (!sim_has_faults) {
        put(a);
        return;
    }
    if (sim_chance(sim_plan.drop)) {
        sim_counts.dropped++;
        a->n_sent++;
    } else if (sim_chance(sim_plan.hold)) {
        sim_counts.held++;
        a->n_sent++;
        sim_at(sim_between(SIM_MS, 1500 * SIM_MS), SIM_WORLD, on_late, a, 0);
    } else {
        put(a);
    }
    if (sim_chance(sim_plan.twice)) {
        sim_counts.copies++;
        put(a);
    }
    if (sim_chance(sim_plan.late)) {
        sim_counts.late++;
        sim_at(sim_between(SIM_MS, 3 * SIM_S), SIM_WORLD, on_late, a, 0);
    }
    if (sim_chance(sim_plan.cut)) {
        sim_counts.cuts++;
        cut(p);
    }
}

/* Repeats what is due; returns how many are not answered. */
static uint32_t repeat_unanswered(struct peer *p)
{
    uint32_t n = 0;
    for (uint64_t i = p->n_asks < 256 ? 0 : p->n_asks - 256; i < p->n_asks; i++) {
        struct ask *a = p->asks[i];
        if (a->is_answered)
            continue;
        n++;
        if (p->conn != NULL && sim_now_ns >= a->again_ns)
            peer_send(a);
    }
    return n;
}

/* --- life ------------------------------------------------------------------------------------- */

void peer_lose_session(struct peer *p)
{
    sim_say("peer %u has lost its session", p->number);
    sim_counts.sessions_lost++;
    for (uint64_t i = 0; i < p->n_asks; i++) {
        p->asks[i]->is_void = true;
        if (!p->asks[i]->is_answered)
            ask_release(p->asks[i]);
    }
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        if (p->seqs[i] != NULL)
            p->seqs[i]->is_gone = true;
        p->seqs[i] = NULL;
    }
    if (p->plan != NULL)
        plan_end(p->plan, false);
    p->session = 0;
    p->pool = 0;
    p->is_killed = false;
}

static void on_tick(void *arg, uint64_t word);

static struct peer *peer_new(void)
{
    if (n_peers == MAX_PEERS)
        return NULL;
    struct peer *p = sim_alloc(sizeof *p);
    p->number = n_peers;
    p->is_slow = sim_chance(sim_plan.slow_readers);
    peers[n_peers++] = p;
    sim_at(sim_between(0, 5 * SIM_MS), SIM_WORLD, on_tick, p, 0);
    return p;
}

/* If the client ended now, nobody would know whose the sequence is, or whether it lives. */
static bool is_adopting(const struct peer *p)
{
    for (uint32_t i = 0; i < MAX_SEQS; i++)
        if (p->seqs[i] != NULL && p->seqs[i]->control != NULL &&
            p->seqs[i]->control->kind == ASK_ADOPT)
            return true;
    return false;
}

/* Its process is gone: it says nothing any more, and another one comes. */
static void die(struct peer *p)
{
    bool is_ending = false; /* something of others */
    for (uint64_t i = 0; i < p->n_asks; i++)
        is_ending |= !p->asks[i]->is_answered &&
                     (p->asks[i]->kind == ASK_KILL || p->asks[i]->kind == ASK_KILL_SESSION);
    if (n_peers == MAX_PEERS || is_ending || is_adopting(p))
        return;
    for (uint64_t i = 0; i < p->n_asks; i++)
        if (!p->asks[i]->is_answered && p->asks[i]->kind == ASK_EXPORT)
            ask_release(p->asks[i]);
    sim_say("peer %u dies", p->number);
    p->is_dead = true;
    lane_leave(p);
    if (p->conn != NULL)
        net_close(p->conn, sim_chance(500));
    p->conn = NULL;
    peer_new();
}

/* --- what to do next -------------------------------------------------------------------------- */

static struct seq *any_seq(const struct peer *p)
{
    struct seq *s = p->seqs[sim_below(MAX_SEQS)];
    return s != NULL && s->is_open && !s->is_gone ? s : NULL;
}

static void read_something(struct seq *s)
{
    uint32_t l = sim_below(N_LAYERS);
    if (s->control != NULL || s->is_unsure || s->len[l] == 0)
        return;
    uint32_t n = 1 + sim_below(s->len[l] < 5 ? s->len[l] : 5);
    ask_attend(s, l, sim_below(s->len[l] - n + 1), n);
}

static uint32_t longest(const struct seq *s)
{
    uint32_t most = 0;
    for (uint32_t l = 0; l < N_LAYERS; l++)
        most = s->len[l] > most ? s->len[l] : most;
    return most;
}

/* Often to where prompts part, so that others' tokens follow. */
static uint32_t truncation_of(const struct seq *s)
{
    uint32_t most = longest(s), parting = 16 * (1 + sim_below(sim_plan.n_prompts)) + sim_below(4);
    return s->prompt != 0 && parting <= most && sim_chance(700) ? parting : sim_below(most + 1);
}

/* Another client's sequence that has nothing on its way, or only steps if that client is dead. */
static void adopt_something(struct peer *p)
{
    const struct peer *from = peers[sim_below(n_peers)];
    struct seq *s = any_seq(from);
    if (s == NULL || from == p || s->control != NULL || s->is_unsure ||
        (!from->is_dead && !seq_is_quiet(s)) ||
        sim_now_ns - from->renewed_ns > LEASE_NS - 3 * SIM_S || from->session == 0 ||
        process_empty_since_ns() > from->known_since_ns || from->is_killed || p->is_killed ||
        process_empty_since_ns() > p->known_since_ns)
        return; /* the last: its session is gone, and the sequence would stay whose it was */
    ask_adopt(p, s);
}

/* The same of a client whose sequence is adopted, if its session ended. */
static bool is_in_adoption(const struct peer *p)
{
    bool is = is_adopting(p);
    for (uint32_t i = 0; i < n_peers; i++)
        for (uint32_t k = 0; k < MAX_SEQS; k++) {
            const struct seq *s = peers[i]->seqs[k];
            is |= s != NULL && s->control != NULL && s->control->former == p;
        }
    return is;
}

/* Anybody's that lives. */
static void look_at_others(struct peer *p, uint32_t what)
{
    struct peer *from = peers[sim_below(n_peers)];
    struct seq *s = any_seq(from);
    if (from->is_dead || from->is_killed || from->session == 0)
        return;
    if (what < 2 && from != p && !is_in_adoption(from) && sim_chance(200))
        ask_kill_session(p, from);
    else if (s != NULL && !s->is_unsure && what < 10)
        ask_kill(p, s);
    else if (s != NULL)
        ask_export(p, s);
}

static void do_something(struct peer *p)
{
    struct seq *s = any_seq(p);
    uint32_t what = sim_below(1000);
    n_ops++;
    if (s != NULL && s->is_unsure) {
        if (sim_chance(500))
            ask_truncate(s, s->sure_len);
        else
            ask_close(s);
    } else if (s != NULL && s->len[0] == 0 && s->prompt == 0 && sim_chance(500)) {
        ask_import(s);
    } else if (sim_plan.reserves > 0 && sim_chance(sim_plan.reserves)) {
        ask_reserve(p, sim_chance(300) ? 0 : sim_below(sim_plan.n_blocks / 2));
    } else if (s != NULL && sim_chance(sim_plan.closes)) {
        ask_close(s);
    } else if (s != NULL && sim_chance(sim_plan.forks)) {
        ask_fork(p, s);
    } else if (sim_plan.has_lanes && sim_chance(300)) {
        ask_plan(p);
    } else if (what < 480 || (what < 840 && sim_chance(sim_plan.long_appends))) {
        ask_append(p, NULL);
    } else if (what < 560) {
        if (s != NULL)
            read_something(s);
    } else if (what < 640 || s == NULL) {
        ask_open(p);
    } else if (what < 680) {
        look_at_others(p, what - 640);
    } else if (what < 710) {
        ask_import(s);
    } else if (what < 760) {
        ask_fork(p, s);
    } else if (what < 840) {
        ask_truncate(s, truncation_of(s));
    } else if (what < 870) {
        ask_tokens(s);
    } else if (what < 915) {
        ask_close(s);
    } else if (what < 950) {
        adopt_something(p);
    } else if (what < 970) {
        ask_wrong(s, what < 960 ? ASK_GAP : ASK_STALE);
    } else if (what < 975) {
        die(p);
    } else if (what < 990) {
        ask_hello(p);
    } else {
        ask_resize(p);
    }
}

static void on_tick(void *arg, uint64_t word)
{
    struct peer *p = arg;
    (void)word;
    if (p->is_dead)
        return;
    if (p->conn == NULL)
        connect_again(p);
    lane_tick(p);
    uint32_t n = repeat_unanswered(p);
    if (p->conn == NULL) {
        /* later */
    } else if (p->session == 0) {
        if (n == 0)
            ask_hello(p);
    } else if (p->pool == 0) {
        if (n == 0)
            ask_pool(p);
    } else if (is_asking && n_ops < sim_plan.n_ops && n < MAX_OPEN_ASKS) {
        do_something(p);
    } else if (n == 0 && sim_now_ns - p->looked_ns > 2 * SIM_S) {
        p->looked_ns = sim_now_ns;
        ask_hello(p); /* so that the lease goes on */
    }
    sim_at(sim_between(200 * SIM_US, 4 * SIM_MS), SIM_WORLD, on_tick, p, 0);
}

/* --- the run's end ---------------------------------------------------------------------------- */

void peers_begin(void)
{
    n_peers = 0;
    attention_digest = 0;
    n_ops = 0;
    is_asking = true;
    for (uint32_t i = 0; i < sim_plan.n_peers; i++)
        peer_new();
}

bool peers_are_done(void)
{
    return n_ops >= sim_plan.n_ops;
}

bool peers_are_idle(void)
{
    for (uint32_t i = 0; i < n_peers; i++) {
        const struct peer *p = peers[i];
        for (uint64_t k = 0; !p->is_dead && k < p->n_asks; k++)
            if (!p->asks[k]->is_answered && p->asks[k]->kind != ASK_HELLO)
                return false;
        if (!p->is_dead && (p->session == 0 || p->pool == 0 || p->plan != NULL))
            return false;
    }
    return true;
}

bool peers_are_answered(void)
{
    for (uint32_t i = 0; i < n_peers; i++)
        for (uint64_t k = 0; !peers[i]->is_dead && k < peers[i]->n_asks; k++)
            if (!peers[i]->asks[k]->is_answered)
                return false;
    return true;
}

void peers_say_unanswered(void)
{
    for (uint32_t i = 0; i < n_peers; i++) {
        const struct peer *p = peers[i];
        for (uint64_t k = 0; !p->is_dead && k < p->n_asks; k++)
            if (!p->asks[k]->is_answered)
                fprintf(stderr, "peer %u: request %llu, sent %u times, has no answer\n", p->number,
                        (unsigned long long)p->asks[k]->id, p->asks[k]->n_sent);
        if (!p->is_dead && (p->session == 0 || p->pool == 0))
            fprintf(stderr, "peer %u has no session or pool\n", p->number);
    }
}

void peers_stop_asking(void)
{
    is_asking = false;
}

/* So that forks and adoptions find room, and nothing is left. */
void peers_unreserve(void)
{
    for (uint32_t i = 0; sim_plan.reserves > 0 && i < n_peers; i++)
        if (!peers[i]->is_dead && peers[i]->session != 0 && peers[i]->pool != 0)
            ask_reserve(peers[i], 0);
}

static void of_each_seq(void (*what)(struct seq *s))
{
    for (uint32_t i = 0; i < n_peers; i++)
        for (uint32_t k = 0; !peers[i]->is_dead && k < MAX_SEQS; k++) {
            struct seq *s = peers[i]->seqs[k];
            if (s != NULL && s->is_open && !s->is_gone)
                what(s);
        }
}

/* The last row depends on all tokens before it. */
static void read_back(struct seq *s)
{
    for (uint32_t l = 0; l < N_LAYERS; l++)
        if (s->len[l] > 0 && !s->is_unsure)
            ask_attend(s, l, s->len[l] - 1, 1);
}

void peers_read_back(void)
{
    of_each_seq(read_back);
}

static void close_one(struct seq *s)
{
    ask_close(s);
}

void peers_close_all(void)
{
    of_each_seq(close_one);
}
