/* registry.c: who is there: registrations under leases, and the agents that keep them, as
 * attnd_cluster.agent does. A lease that ends is a death at once: the registry itself is never
 * away here. An agent that comes back raises the epochs of what its daemon has, or frees it, before
 * it registers again; in strict mode it lets the daemon append only while the lease can't have
 * ended. */
#include <string.h>

#include "cluster.h"

enum { MAX_LISTED = 128 };
#define TICK_NS (100 * SIM_MS)

struct agent {
    struct node *node;
    uint64_t session; /* 0: none yet */
    uint64_t number; /* of its latest registration */
    uint64_t lease_end_ns, kept_ns;
    uint64_t cut_until_ns, stopped_until_ns;
    bool is_member, believes; /* as the registry has it, as the agent does */
    uint32_t n_left; /* sequences that are being freed or retired */
    bool has_cleared;
    struct ask *hello;
};

static struct agent agents[C_MAX_NODES];
static uint64_t n_registrations;

bool registry_has(const struct node *n)
{
    const struct agent *a = &agents[node_number(n)];
    return a->is_member && sim_now_ns < a->lease_end_ns;
}

uint64_t registry_number(const struct node *n)
{
    return agents[node_number(n)].number;
}

static void on_lost(void *arg, uint64_t word)
{
    (void)word;
    workers_lose(arg);
}

static void on_found(void *arg, uint64_t word)
{
    (void)word;
    workers_find(arg);
}

static void on_expiry(void *arg, uint64_t lease_end_ns)
{
    struct agent *a = arg;
    if (!a->is_member || a->lease_end_ns != lease_end_ns)
        return;
    sim_say("daemon %u is declared dead", node_number(a->node));
    cluster_counts.deaths++;
    a->is_member = false;
    sim_at(cluster_ms(0, 5), SIM_WORLD, on_lost, a->node, 0);
}

static void keep_lease(struct agent *a)
{
    a->kept_ns = sim_now_ns;
    a->lease_end_ns = sim_now_ns + C_TTL_NS;
    sim_at(C_TTL_NS, SIM_WORLD, on_expiry, a, a->lease_end_ns);
}

static void take_hello(struct ask *ask, const struct wire_reply *w)
{
    struct agent *a = ask->arg;
    a->hello = NULL;
    if (w->header->status == ATTN_OK)
        a->session = w->header->hello->session;
}

static struct ask *operators(struct agent *a, Attnd__Request *h,
                             void (*take)(struct ask *, const struct wire_reply *))
{
    struct ask *ask = ask_of(a->node, h, a->session, NULL, 0, take, a);
    ask->goes_round = ask->is_operators = true;
    return ask;
}

static void say_hello(struct agent *a)
{
    Attnd__Hello b = ATTND__HELLO__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.protocol_version = 1;
    b.client_name = "agent";
    b.nonce = sim_random() | 1;
    h.body_case = ATTND__REQUEST__BODY_HELLO;
    h.hello = &b;
    a->session = 0;
    a->hello = operators(a, &h, take_hello);
    ask_send(a->hello);
}

static bool lose_session(struct agent *a, const struct wire_reply *w)
{
    bool is_gone =
        w->header->status == ATTN_ENOTFOUND && strstr(w->header->message, "session") != NULL;
    if (is_gone)
        a->session = 0;
    return is_gone;
}

static void take_fence(struct ask *ask, const struct wire_reply *w)
{
    lose_session(ask->arg, w);
}

/* One answer lost is not sent again: the next one comes soon. */
static void fence(struct agent *a)
{
    Attnd__Fence b = ATTND__FENCE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    if (!cluster_plan.is_strict || sim_now_ns + C_FENCE_NS > a->kept_ns + C_TTL_NS)
        return;
    b.sent_ns = sim_now_ns;
    h.body_case = ATTND__REQUEST__BODY_FENCE;
    h.fence = &b;
    ask_send(operators(a, &h, take_fence));
}

static void take_cleared(struct ask *ask, const struct wire_reply *w)
{
    struct agent *a = ask->arg;
    attn_status st = (attn_status)w->header->status;
    bool is_gone = lose_session(a, w); /* and nothing was done */
    if (is_gone || (st != ATTN_OK && st != ATTN_ENOTFOUND && st != ATTN_EMOVED))
        a->has_cleared = false; /* once more */
    a->n_left--;
    cluster_counts.retired += st == ATTN_OK;
}

/* All that its daemon has. */
static void clear(struct agent *a)
{
    uint64_t names[MAX_LISTED];
    uint32_t n = node_list(a->node, names, MAX_LISTED);
    a->has_cleared = true;
    for (uint32_t i = 0; i < n; i++) {
        Attnd__Kill kill = ATTND__KILL__INIT;
        Attnd__Retire retire = ATTND__RETIRE__INIT;
        Attnd__Request h = ATTND__REQUEST__INIT;
        kill.seq = retire.seq = names[i];
        if (cluster_plan.retires) {
            h.body_case = ATTND__REQUEST__BODY_RETIRE;
            h.retire = &retire;
        } else {
            h.body_case = ATTND__REQUEST__BODY_KILL;
            h.kill = &kill;
        }
        struct ask *ask = operators(a, &h, take_cleared);
        ask->name = names[i];
        a->n_left++;
        ask_send(ask);
    }
}

static void enroll(struct agent *a)
{
    a->number = ++n_registrations;
    a->is_member = a->believes = true;
    a->has_cleared = false;
    keep_lease(a);
    sim_say("daemon %u is registered, number %llu", node_number(a->node),
            (unsigned long long)a->number);
    sim_at(cluster_ms(0, 5), SIM_WORLD, on_found, a->node, 0);
}

static void act(struct agent *a)
{
    bool is_cut = a->cut_until_ns > sim_now_ns;
    if (a->session == 0) {
        if (a->hello == NULL)
            say_hello(a);
        return;
    }
    if (!is_cut && a->believes && registry_has(a->node))
        keep_lease(a);
    else if (!is_cut)
        a->believes = false;
    if (a->believes) {
        fence(a);
    } else if (a->n_left == 0 && !a->has_cleared && node_is_up(a->node)) {
        clear(a);
    } else if (a->n_left == 0 && a->has_cleared && !is_cut) {
        enroll(a);
        fence(a);
    }
}

static void on_tick(void *arg, uint64_t word)
{
    struct agent *a = arg;
    (void)word;
    if (a->stopped_until_ns <= sim_now_ns)
        act(a);
    uint64_t next_ns =
        a->stopped_until_ns > sim_now_ns ? a->stopped_until_ns - sim_now_ns : TICK_NS;
    sim_at(next_ns, SIM_WORLD, on_tick, a, 0);
}

void registry_cut(struct node *n, uint64_t ns)
{
    sim_say("the agent of daemon %u is cut off for %llu ms", node_number(n),
            (unsigned long long)(ns / SIM_MS));
    agents[node_number(n)].cut_until_ns = sim_now_ns + ns;
}

void agent_stop(struct node *n, uint64_t ns)
{
    sim_say("the agent of daemon %u is stopped for %llu ms", node_number(n),
            (unsigned long long)(ns / SIM_MS));
    agents[node_number(n)].stopped_until_ns = sim_now_ns + ns;
}

bool agents_are_registered(void)
{
    bool are = true;
    for (uint32_t i = 0; i < n_nodes; i++)
        are &= registry_has(node_at(i)) && agents[i].believes;
    return are;
}

void registry_begin(void)
{
    memset(agents, 0, sizeof agents);
    n_registrations = 0;
    for (uint32_t i = 0; i < n_nodes; i++) {
        agents[i].node = node_at(i);
        agents[i].has_cleared = true; /* it has had nothing */
        sim_at(cluster_ms(0, 100), SIM_WORLD, on_tick, &agents[i], 0);
    }
}
