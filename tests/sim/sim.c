/* sim.c: runs of the simulation: what a seed decides, the phases of a run, the command line. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model.h"

enum { MAX_SEED_S = 300 }; /* a run takes milliseconds; one that hangs is ended */
enum phase { BUSY, QUIET, READ_BACK, CLOSE_ALL, LEASES, STOP };
static const char *const phase_names[] = {
    "busy", "quiet", "reading back", "closing all", "waiting for leases", "stopping"};
static const uint64_t most_ns[] = {60 * SIM_S, 60 * SIM_S, 60 * SIM_S,
                                   60 * SIM_S, 60 * SIM_S, 60 * SIM_S};

int sim_bug; /* of plant.cmake; 0: none */

static enum phase phase;
static uint64_t phase_ns; /* when it began */
static uint64_t running; /* seed */

/* Of two in seven seeds: more sequences than there are blocks for. Nothing is drawn for it, so the
 * other seeds' runs are what they would be without. */
static void plan_idle(void)
{
    uint64_t n = running % 7;
    sim_plan.idle_memory = n == 1 ? "128K" : n == 3 ? "2M" : "0";
    if (n != 1 && n != 3)
        return;
    sim_plan.n_blocks = 16 + running / 7 % 24;
    sim_plan.n_seqs = MAX_SEQS;
    sim_plan.long_appends = 500;
}

/* Of one in five, in the same way: clients that set blocks aside. */
static void plan_reserves(void)
{
    if (running % 5 == 2)
        sim_plan.reserves = 30;
}

/* Of one in four: names that several clients know, and open again once they have ended. */
static void plan_names(void)
{
    if (running % 4 != 3)
        return;
    sim_plan.names_again = 500;
    sim_plan.closes = 100;
}

static void plan(void)
{
    bool is_calm = sim_chance(100);
    sim_plan = (struct sim_plan){
        .n_peers = 2 + sim_below(4),
        .n_ops = 200 + sim_below(1500),
        .has_keeper = sim_chance(800),
        .max_in_flight = 1 + sim_chance(800),
        .n_blocks = sim_chance(300) ? 20 + sim_below(30) : 100 + sim_below(150),
        .pins = sim_chance(300) ? 100 : 0,
        .n_seqs = MAX_SEQS,
        .n_prompts = 3,
        .prompts = 500,
        .long_appends = 60,
        .block_tokens = 8,
        .n_cards = sim_chance(700) ? 1 : 2 + sim_chance(300),
        .split = ATTND__SPLIT__SPLIT_WHOLE,
        .host_memory = "0",
        .disk_size = "0",
        .idle_memory = "0",
    };
    sim_plan.has_lanes = sim_chance(400);
    if (sim_chance(250)) {
        sim_plan.forks = 200;
        sim_plan.closes = 80;
    }
    if (sim_plan.n_cards == 2 && sim_chance(700)) {
        sim_plan.is_sum = sim_chance(500);
        sim_plan.block_tokens = sim_plan.is_sum ? 16 : 8; /* a card's part has 8 at least */
        sim_plan.split = sim_plan.is_sum ? ATTND__SPLIT__SPLIT_TOKENS : ATTND__SPLIT__SPLIT_HEADS;
    }
    if (sim_chance(500)) { /* tiers, and what they are for */
        sim_plan.n_blocks = 20 + sim_below(40);
        sim_plan.n_peers = 2 + sim_chance(300);
        sim_plan.n_seqs = 1 + sim_below(2);
        sim_plan.n_ops = 600 + sim_below(1500);
        sim_plan.n_prompts = MAX_PROMPTS;
        sim_plan.prompts = 900;
        sim_plan.long_appends = 500;
        sim_plan.closes = 60;
        sim_plan.host_memory = sim_chance(500) ? "48K" : "512K";
        sim_plan.disk_size = sim_chance(500) ? "0" : sim_chance(500) ? "64K" : "2M";
    }
    plan_idle();
    plan_reserves();
    plan_names();
    if (is_calm)
        return;
    sim_plan.drop = sim_below(60);
    sim_plan.twice = sim_below(100);
    sim_plan.hold = sim_below(100);
    sim_plan.late = sim_below(200);
    sim_plan.cut = sim_below(15);
    sim_plan.fail_batch = sim_chance(500) ? sim_below(80) : 0;
    sim_plan.stop = sim_chance(500) || sim_plan.n_cards > 1 ? 1 + sim_below(5) : 0;
    sim_plan.fail_move = sim_chance(500) ? sim_below(200) : 0;
    if (sim_plan.n_cards == 1)
        sim_plan.lose_device = sim_chance(200) ? sim_below(5) : 0;
    sim_plan.slow_batch = sim_below(50);
    sim_plan.fail_alloc = sim_chance(300) ? sim_below(300) : 0;
    sim_plan.n_loops = sim_chance(500) ? 1 : 2 + sim_below(2);
    sim_plan.n_kills = sim_chance(700) ? sim_below(8) : 0;
    sim_plan.n_aimed = sim_chance(500) ? sim_below(4) : 0;
    sim_plan.n_upgrades = sim_chance(300) ? sim_below(3) : 0;
    sim_plan.slow_readers = sim_chance(300) ? 300 : 0;
}

static void enter(enum phase next)
{
    sim_say("-- %s", phase_names[next]);
    phase = next;
    phase_ns = sim_now_ns;
    if (next == QUIET) {
        sim_has_faults = false;
        peers_stop_asking();
        peers_unreserve();
    } else if (next == READ_BACK) {
        peers_read_back();
    } else if (next == CLOSE_ALL) {
        peers_close_all();
    } else if (next == STOP) {
        process_check_is_empty();
        process_stop();
    }
}

/* Is all done that the phase is for? */
static bool is_done(void)
{
    uint64_t ns = sim_now_ns - phase_ns;
    switch (phase) {
    case BUSY:
        return peers_are_done();
    case QUIET: /* long enough for what the network still holds back */
        return peers_are_idle() && ns > 4 * SIM_S;
    case READ_BACK:
    case CLOSE_ALL:
        return peers_are_idle();
    case LEASES: /* of clients that died */
        return peers_are_answered() && ns > 22 * SIM_S;
    case STOP:
        return process_is_over();
    }
    return false;
}

static void on_look(void *arg, uint64_t word)
{
    (void)arg, (void)word;
    if (phase != STOP && is_done()) {
        enter((enum phase)(phase + 1));
    } else if (sim_now_ns - phase_ns > most_ns[phase]) {
        peers_say_unanswered();
        sim_fail("after %llu s of virtual time the run is still %s",
                 (unsigned long long)(most_ns[phase] / SIM_S), phase_names[phase]);
    }
    sim_at(2 * SIM_MS, SIM_WORLD, on_look, NULL, 0);
}

static void run(uint64_t seed, bool is_verbose)
{
    running = seed;
    alarm(MAX_SEED_S);
    sim_begin(seed, is_verbose);
    plan();
    sim_has_faults = true;
    net_begin();
    memory_begin();
    peers_begin();
    process_begin();
    phase = BUSY;
    phase_ns = sim_now_ns;
    sim_at(0, SIM_WORLD, on_look, NULL, 0);
    while (!process_is_over())
        if (!sim_step(sim_now_ns + 60 * SIM_S) && phase == STOP)
            sim_fail("the process does not end");
    outside_forget();
    sim_end();
}

/* A crash is a finding, too: its seed is said. */
static void on_crash(int number)
{
    char line[128];
    int n = snprintf(line, sizeof line, "\nseed %llu FAILED: signal %d\nreplay: sim --seed %llu\n",
                     (unsigned long long)running, number, (unsigned long long)running);
    if (n > 0 && write(STDERR_FILENO, line, (size_t)n) < 0)
        _Exit(1);
    signal(number, SIG_DFL);
    raise(number);
}

static void print_counts(uint64_t n_seeds)
{
    printf("%llu seeds:", (unsigned long long)n_seeds);
#define X(field) printf(" %s %llu", #field, (unsigned long long)sim_counts.field);
    SIM_COUNTS(X)
#undef X
    printf("\n");
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
        fprintf(stderr,
                "usage: sim [--seed N | --seeds A..B]\n"
                "  --seed N      one run, with its history\n"
                "  --seeds A..B  runs, ending with the first that fails (default 1..200)\n");
        return 2;
    }
    signal(SIGABRT, on_crash);
    signal(SIGFPE, on_crash);
    signal(SIGALRM, on_crash);
#ifndef __SANITIZE_ADDRESS__
    signal(SIGSEGV, on_crash);
#endif
    for (uint64_t seed = first; seed <= last; seed++)
        run(seed, is_verbose);
    print_counts(last - first + 1);
    return 0;
}
