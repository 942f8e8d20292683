/* net.c: connections as two streams of bytes with delays. Messages are lost, doubled, held back and
 * cut by those who send them (peer.c); here they arrive in pieces of any size, and connections end
 * in the middle of one. */
#include <string.h>

#include "net.h"

enum { MAX_CONNS = 4096 };

static struct conn *first_waiting, **last_waiting;
static bool is_listening; /* by a process, or kept for the next one */
static struct conn *conns[MAX_CONNS];
static uint32_t n_conns;

void bytes_add(struct bytes *b, const void *p, size_t n)
{
    if (b->first + b->n + n > b->room) {
        size_t room = 2 * (b->n + n) < 4096 ? 4096 : 2 * (b->n + n);
        uint8_t *more = room > b->room ? sim_alloc(room) : b->p;
        if (b->n > 0)
            memmove(more, b->p + b->first, b->n);
        b->room = room > b->room ? room : b->room;
        b->p = more;
        b->first = 0;
    }
    memcpy(b->p + b->first + b->n, p, n);
    b->n += n;
}

void bytes_take(struct bytes *b, size_t n)
{
    b->first += n;
    b->n -= n;
}

static uint64_t latency(void)
{
    return sim_has_faults && sim_chance(30) ? sim_between(SIM_MS, 40 * SIM_MS)
                                            : sim_between(2 * SIM_US, 200 * SIM_US);
}

void net_begin(void)
{
    first_waiting = NULL;
    last_waiting = &first_waiting;
    is_listening = false;
    n_conns = 0;
}

bool net_may_connect(void)
{
    return is_listening && n_conns < MAX_CONNS;
}

static void on_connect(void *arg, uint64_t word)
{
    struct conn *c = arg;
    (void)word;
    if (c->is_over)
        return;
    *last_waiting = c;
    last_waiting = &c->next;
    if (process_is_up())
        uv_conn_waits();
}

struct conn *net_connect(struct peer *p)
{
    struct conn *c = sim_alloc(sizeof *c);
    c->peer = p;
    c->number = n_conns;
    c->window = sim_chance(800) ? 200 << 10 : (size_t)sim_between(64, 8192);
    conns[n_conns++] = c;
    sim_at(latency(), SIM_WORLD, on_connect, c, 0);
    return c;
}

bool net_has_waiting(void)
{
    while (first_waiting != NULL && first_waiting->is_over) {
        first_waiting = first_waiting->next;
        if (first_waiting == NULL)
            last_waiting = &first_waiting;
    }
    return first_waiting != NULL;
}

struct conn *net_accept(void)
{
    if (!net_has_waiting())
        return NULL;
    struct conn *c = first_waiting;
    first_waiting = c->next;
    if (first_waiting == NULL)
        last_waiting = &first_waiting;
    c->is_accepted = true;
    return c;
}

struct conn *net_conn(uint64_t number)
{
    return conns[number];
}

void net_listen(bool is)
{
    is_listening = is;
}

/* --- to the daemon ---------------------------------------------------------------------------- */

static void on_arrival(void *arg, uint64_t word)
{
    struct conn *c = arg;
    (void)word;
    c->in_is_due = false;
    if (!c->is_over && c->stream != NULL)
        uv_conn_has_input(c->stream);
}

static void input_changed(struct conn *c)
{
    if (c->in_is_due)
        return;
    c->in_is_due = true;
    sim_at(latency(), SIM_WORLD, on_arrival, c, 0);
}

void net_send(struct conn *c, const void *bytes, size_t n)
{
    if (c->is_over || c->client_ended)
        return;
    bytes_add(&c->in, bytes, n);
    input_changed(c);
}

void net_close(struct conn *c, bool is_cut)
{
    c->peer = NULL;
    c->client_ended = true;
    c->is_cut |= is_cut;
    if (is_cut && c->in.n > 0)
        c->in.n = sim_below((uint32_t)c->in.n + 1); /* the rest never arrives */
    input_changed(c);
}

/* --- to the client ---------------------------------------------------------------------------- */

static void on_output(void *arg, uint64_t word)
{
    struct conn *c = arg;
    (void)word;
    c->out_is_due = false;
    if (c->peer == NULL)
        return;
    if (!peer_reads(c->peer)) {
        c->out_is_due = true;
        sim_at(SIM_MS, SIM_WORLD, on_output, c, 0);
        return;
    }
    if (c->out.n > 0) {
        size_t n = sim_chance(700) ? c->out.n : 1 + sim_below((uint32_t)c->out.n);
        const uint8_t *p = c->out.p + c->out.first;
        bytes_take(&c->out, n);
        peer_take(c->peer, c, p, n);
        if (c->stream != NULL && !c->is_over)
            uv_conn_has_room(c->stream);
    }
    if (c->peer == NULL)
        return;
    if (c->out.n > 0) {
        net_flush(c);
    } else if (c->daemon_ended || c->is_over) {
        struct peer *p = c->peer;
        c->peer = NULL;
        c->client_ended = true;
        peer_gone(p, c);
        input_changed(c);
    }
}

void net_flush(struct conn *c)
{
    if (c->out_is_due)
        return;
    c->out_is_due = true;
    sim_at(latency(), SIM_WORLD, on_output, c, 0);
}

void net_daemon_closed(struct conn *c)
{
    bool is_reset = c->in.n > 0 && sim_chance(500);
    c->stream = NULL;
    c->is_over = true;
    if (is_reset) /* closed with unread bytes: what was on its way back may be lost */
        c->out.n = sim_below((uint32_t)c->out.n + 1);
    net_flush(c);
}

void net_process_gone(bool listener_is_kept)
{
    is_listening = listener_is_kept;
    for (uint32_t i = 0; i < n_conns; i++) {
        struct conn *c = conns[i];
        bool is_waiting = !c->is_accepted && !c->is_over;
        if (c->is_over || (is_waiting && listener_is_kept))
            continue;
        c->stream = NULL;
        c->is_over = true;
        net_flush(c);
    }
}
