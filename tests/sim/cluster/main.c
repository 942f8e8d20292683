/* main.c: runs of several daemons: what a seed decides, what is cut, stopped and killed when, the
 * phases of a run, the command line. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cluster.h"

enum { MAX_SEED_S = 300 };
enum phase { BUSY, QUIET, LEASES, READ_BACK, CLOSE_ALL, OVER };
static const char *const phase_names[] = {"busy",         "quiet",       "waiting for leases",
                                          "reading back", "closing all", "over"};

int sim_bug; /* of plant.cmake; 0: none */
struct cluster_plan cluster_plan;
struct cluster_counts cluster_counts;

static enum phase phase;
static uint64_t phase_ns, running;

uint64_t cluster_ms(uint64_t least, uint64_t most)
{
    return sim_between(least, most) * SIM_MS;
}

static void plan(void)
{
    sim_plan = (struct sim_plan){.max_in_flight = 2, .n_cards = 1};
    cluster_plan = (struct cluster_plan){
        .n_nodes = 2 + sim_below(2),
        .n_seqs = 2 + sim_below(C_MAX_SEQS - 1),
        .n_cuts = 4 + sim_below(16),
        .is_strict = sim_chance(500),
        .retires = sim_chance(500),
        .moves = sim_chance(800) ? sim_below(40) : 0,
        .busy_ns = cluster_ms(4000, 12000),
    };
    if (sim_chance(100))
        return;
    cluster_plan.drop = sim_below(60);
    cluster_plan.twice = sim_below(100);
    cluster_plan.late = sim_below(100);
    sim_plan.fail_batch = sim_chance(300) ? sim_below(60) : 0;
    sim_plan.fail_move = sim_chance(300) ? sim_below(60) : 0;
}

/* A link, a daemon, an agent; shorter than a lease, or longer. */
static void on_cut(void *arg, uint64_t word)
{
    struct node *n = node_at(sim_below(n_nodes));
    uint64_t ns = sim_chance(300) ? cluster_ms(5, 900) : cluster_ms(900, 2500);
    (void)arg, (void)word;
    if (phase != BUSY)
        return;
    cluster_counts.cuts++;
    switch (sim_below(6)) {
    case 0:
    case 1:
        registry_cut(n, ns);
        break;
    case 2:
        registry_cut(n, ns);
        node_cut(n, ns);
        break;
    case 3:
        sim_chance(500) ? node_cut(n, ns / 4) : agent_stop(n, ns);
        break;
    case 4: /* its host */
        node_stop(n, ns);
        agent_stop(n, ns);
        break;
    case 5:
        node_kill(n);
        break;
    }
}

static void enter(enum phase next)
{
    sim_say("-- %s", phase_names[next]);
    phase = next;
    phase_ns = sim_now_ns;
    if (next == QUIET) {
        sim_has_faults = false;
        workers_quiesce();
    } else if (next == READ_BACK) {
        workers_check_places();
        workers_read_back();
    } else if (next == CLOSE_ALL) {
        workers_close();
    } else if (next == OVER) {
        workers_check_places();
        nodes_check();
    }
}

static bool is_done(void)
{
    uint64_t ns = sim_now_ns - phase_ns;
    switch (phase) {
    case BUSY:
        return ns >= cluster_plan.busy_ns;
    case QUIET: /* and what is late has come */
        return ns > 6 * SIM_S && moves_running() == 0 && agents_are_registered() &&
               workers_are_quiet();
    case LEASES: /* of sessions that nobody has any more, and their sequences */
        return ns > C_LEASE_NS + 2 * SIM_S && workers_are_quiet();
    case READ_BACK:
        return workers_have_read();
    case CLOSE_ALL:
        return workers_have_closed() && ns > SIM_S;
    case OVER:
        return true;
    }
    return false;
}

static void on_look(void *arg, uint64_t word)
{
    (void)arg, (void)word;
    nodes_check();
    if (phase == OVER)
        return;
    if (is_done())
        enter((enum phase)(phase + 1));
    else if (sim_now_ns - phase_ns > 60 * SIM_S)
        sim_fail("after a minute of virtual time the run is still %s", phase_names[phase]);
    sim_at(10 * SIM_MS, SIM_WORLD, on_look, NULL, 0);
}

static void run(uint64_t seed, bool is_verbose)
{
    running = seed;
    alarm(MAX_SEED_S);
    sim_begin(seed, is_verbose);
    plan();
    sim_has_faults = true;
    nodes_begin();
    registry_begin();
    moves_begin();
    workers_begin();
    phase = BUSY;
    phase_ns = sim_now_ns;
    sim_at(0, SIM_WORLD, on_look, NULL, 0);
    for (uint32_t i = 0; i < cluster_plan.n_cuts; i++)
        sim_at(cluster_ms(200, cluster_plan.busy_ns / SIM_MS), SIM_WORLD, on_cut, NULL, 0);
    while (phase != OVER)
        if (!sim_step(sim_now_ns + 60 * SIM_S))
            sim_fail("nothing happens any more");
    nodes_end();
    sim_end();
}

/* A crash is a finding, too: its seed is said. */
static void on_crash(int number)
{
    char line[128];
    int n = snprintf(line, sizeof line, "\nseed %llu FAILED: signal %d\n",
                     (unsigned long long)running, number);
    if (n > 0 && write(STDERR_FILENO, line, (size_t)n) < 0)
        _Exit(1);
    signal(number, SIG_DFL);
    raise(number);
}

int main(int argc, char **argv)
{
    uint64_t first = 1, last = 200;
    bool is_verbose = false;
    const char *bug = getenv("SIM_BUG");
    sim_bug = bug == NULL ? 0 : atoi(bug);
    if (argc == 3 && strcmp(argv[1], "--seed") == 0) {
        first = last = strtoull(argv[2], NULL, 10);
        is_verbose = true;
    } else if (argc == 3 && strcmp(argv[1], "--seeds") == 0) {
        char *end;
        first = strtoull(argv[2], &end, 10);
        last = strncmp(end, "..", 2) == 0 ? strtoull(end + 2, NULL, 10) : first;
    } else if (argc != 1) {
        fprintf(stderr, "usage: sim_cluster [--seed N | --seeds A..B]\n");
        return 2;
    }
    signal(SIGABRT, on_crash);
    signal(SIGALRM, on_crash);
#ifndef __SANITIZE_ADDRESS__
    signal(SIGSEGV, on_crash);
#endif
    for (uint64_t seed = first; seed <= last; seed++)
        run(seed, is_verbose);
    printf("%llu seeds:", (unsigned long long)(last - first + 1));
#define X(field) printf(" %s %llu", #field, (unsigned long long)cluster_counts.field);
    CLUSTER_COUNTS(X)
#undef X
    printf("\n");
    return 0;
}
