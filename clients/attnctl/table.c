/* table.c: the words of the command line: the table of commands, the options, and the help that is
 * printed from them. Each entry of the table names the function that does the command.
 */
#include <stdio.h>

#include "clients/attnctl/attnctl.h"

const struct option options[] = {
    {"endpoint", required_argument, NULL, OPT_ENDPOINT},
    {"timeout", required_argument, NULL, OPT_TIMEOUT},
    {"wait", required_argument, NULL, OPT_WAIT},
    {"json", no_argument, NULL, OPT_JSON},
    {"interval", required_argument, NULL, OPT_INTERVAL},
    {"count", required_argument, NULL, OPT_COUNT},
    {"seconds", required_argument, NULL, OPT_SECONDS},
    {"hold", required_argument, NULL, OPT_HOLD},
    {"tenant", required_argument, NULL, OPT_TENANT},
    {"pool", required_argument, NULL, OPT_POOL},
    {"as", required_argument, NULL, OPT_AS},
    {"layers", required_argument, NULL, OPT_LAYERS},
    {"q-heads", required_argument, NULL, OPT_Q_HEADS},
    {"kv-heads", required_argument, NULL, OPT_KV_HEADS},
    {"head-dim", required_argument, NULL, OPT_HEAD_DIM},
    {"dtype", required_argument, NULL, OPT_DTYPE},
    {"kv-dtype", required_argument, NULL, OPT_KV_DTYPE},
    {"block-tokens", required_argument, NULL, OPT_BLOCK_TOKENS},
    {"blocks", required_argument, NULL, OPT_BLOCKS},
    {"window", required_argument, NULL, OPT_WINDOW},
    {"soft-cap", required_argument, NULL, OPT_SOFT_CAP},
    {"batch-invariant", no_argument, NULL, OPT_BATCH_INVARIANT},
    {"split", required_argument, NULL, OPT_SPLIT},
    {"help", no_argument, NULL, OPT_HELP},
    {"version", no_argument, NULL, OPT_VERSION},
    {NULL, 0, NULL, 0},
};

/* Reached only where other options stand before the word: main gives keys the rest of the line. */
static int run_keys(const struct arguments *a)
{
    (void)a;
    fputs("attnctl: keys comes first, then its own options (attnctl keys --help)\n", stderr);
    return 2;
}

static int run_cluster(const struct arguments *a)
{
    (void)a;
    fputs("attnctl: cluster comes first, then its own options (attnctl cluster --help)\n", stderr);
    return 2;
}

static int complete(const struct arguments *a)
{
    return print_completion(a->operands[0]);
}

/* Commands of one noun stand together. */
const struct command commands[] = {
    {NULL, "ping", NULL, "one round trip: version, backend, time", .ask = ask_ping},
    {NULL, "status", NULL, "ready or draining, for how long, and the counters to look at first",
     .ask = ask_status, .is_admin = true},
    {NULL, "info", NULL, "the limits of a session", .ask = ask_info},
    {NULL, "stats", NULL, "the counters", .ask = ask_stats, .is_admin = true},
    {NULL, "top", NULL, "what the daemon does, again every --interval", .live = run_top,
     .is_admin = true},
    {NULL, "latency", NULL, "percentiles of the times of steps, by stage", .ask = ask_latency,
     .print = print_latency, .is_admin = true},
    {NULL, "slow", NULL, "the latest steps above stats.slow_step, with their stages",
     .ask = ask_slow, .print = print_table, .is_admin = true},
    {NULL, "pools", NULL, "as pool list", .ask = ask_pools, .print = print_table},
    {NULL, "sessions", NULL, "the workers that are there", .ask = ask_sessions,
     .print = print_table, .is_admin = true},
    {NULL, "sequences", NULL, "the sequences that are open", .ask = ask_sequences,
     .print = print_table, .is_admin = true},
    {NULL, "tenants", NULL, "who shares the daemon, and how much of each quota is used",
     .ask = ask_tenants, .print = print_table, .is_admin = true},
    {NULL, "cache", NULL, "blocks by state, per pool and of all", .ask = ask_cache,
     .print = print_cache, .is_admin = true},
    {NULL, "trace", "FILE", "the requests of --seconds, for attnload --trace", .live = run_trace,
     .is_admin = true},
    {"kill", "session", "ID", "end a session with its sequences, as sessions names it",
     .ask = ask_kill_session, .is_admin = true},
    {"kill", "sequence", "NUMBER", "free one sequence, of --tenant where there are tenants",
     .ask = ask_kill_sequence, .is_admin = true},
    {"sequence", "export", "NUMBER FILE", "write a sequence to a file; it goes on meanwhile",
     .ask = ask_sequence_export},
    {"sequence", "import", "FILE", "a sequence out of a file, for a worker to adopt",
     .ask = ask_sequence_import},
    {"sequence", "move", "NUMBER URL", "to another daemon, while it decodes",
     .ask = ask_sequence_move},
    {"sequence", "place", "NUMBER CARD", "on another card of the daemon, while it decodes",
     .ask = ask_sequence_place, .is_admin = true},
    {NULL, "watch", NULL, "what is logged, as it happens", .live = run_watch, .is_admin = true},
    {"pool", "list", NULL, "all pools", .ask = ask_pools, .print = print_table},
    {"pool", "create", "NAME", "make a pool; geometry below", .ask = ask_pool_create},
    {"pool", "describe", "NAME", "geometry, blocks, free blocks", .ask = ask_pool_describe},
    {"pool", "drop", "NAME", "forget a pool that no sequence lives in", .ask = ask_pool_drop,
     .is_admin = true},
    {"pool", "resize", "NAME BLOCKS", "more blocks for a pool, or fewer, while it is used",
     .ask = ask_pool_resize, .is_admin = true},
    {"config", "list", NULL, "every setting, its value and where it is from", .ask = ask_config,
     .print = print_table, .is_admin = true},
    {"config", "get", "NAME", "one setting", .ask = ask_config_get, .is_admin = true},
    {"config", "set", "NAME VALUE", "change one until the settings are read again",
     .ask = ask_config_set, .is_admin = true},
    {NULL, "reload", NULL, "read the settings again, as SIGHUP does", .ask = ask_reload,
     .is_admin = true},
    {NULL, "drain", NULL, "take no new sessions and sequences, end when the work is done",
     .ask = ask_drain, .is_admin = true},
    {NULL, "keys", "DIR",
     "make certificates and tokens\n"
     "                               (--host NAME... --tenant NAME... --days N)",
     .local = run_keys},
    {NULL, "cluster", "COMMAND",
     "many daemons behind one name, by attnd-cluster\n"
     "                               (members, top, where, move, evacuate, rebalance, quotas)",
     .local = run_cluster},
    {NULL, "doctor", NULL, "what may be wrong with this machine, and what to do",
     .local = run_doctor},
    {NULL, "completion", "SHELL", "what bash, zsh or fish needs to complete these words",
     .local = complete},
};
const size_t n_commands = sizeof commands / sizeof commands[0];

static const char usage_head[] = "usage: attnctl [OPTIONS] COMMAND\n"
                                 "\n"
                                 "commands:\n";
static const char usage_tail[] =
    "\n"
    "options:\n"
    "  --endpoint URL           ipc://PATH, shm://PATH, tcp://HOST:PORT or tls+tcp://HOST:PORT\n"
    "                           (default: $ATTND_ENDPOINT, else ipc:///run/attnd/attnd.sock);\n"
    "                           what is for operators goes to the admin socket beside it,\n"
    "                           URL.admin, and all else, too, where that alone is there\n"
    "  --timeout SECONDS        for the daemon's answer (default 5)\n"
    "  --wait SECONDS           for a daemon to come up, where there is none yet (default 0: say "
    "at\n"
    "                           once why there is no connection)\n"
    "  --json                   the result as one JSON object; of top and watch, one per line\n"
    "  --help, --version\n"
    "\n"
    "of top, watch and trace:\n"
    "  --interval SECONDS       between two looks of top (default 1)\n"
    "  --count N                end after so many looks, events or requests (default: go on)\n"
    "  --seconds N              how long trace records (default 10)\n"
    "\n"
    "of drain:\n"
    "  --hold SECONDS           serve open sequences for so long, so that they can move away\n"
    "\n"
    "of kill sequence, sequence place, pool drop and pool resize:\n"
    "  --tenant NAME            whose sequence or pool it is\n"
    "\n"
    "of sequence import and move:\n"
    "  --pool NAME              the pool it goes to (default: of the name of the one it was in)\n"
    "  --as NUMBER              of import: the sequence's number (default: the one it had)\n"
    "\n"
    "top fills a terminal (NO_COLOR: without colours) and prints a line per look into a pipe.\n"
    "What shows or changes other people's work answers root and the daemon's user alone.\n"
    "\n"
    "exit codes, of every command: 0 done; 1 no connection, refused, failed, or stdout could not "
    "be\n"
    "written (the reason is on stderr); 2 wrong usage\n"
    "\n"
    "geometry of pool create:\n"
    "  --layers N --q-heads N --kv-heads N --head-dim N\n"
    "  --dtype f32|f16|bf16 (default bf16)\n"
    "  --kv-dtype f32|f16|bf16|fp8_e4m3|int8|nvfp4|mxfp4 (default: dtype)\n"
    "  --block-tokens N (default 16)  --blocks N (default: half of what is left)\n"
    "  --window N  --soft-cap X  --batch-invariant\n"
    "  --split whole|heads|tokens: over the daemon's cards (default: whole, if --blocks fit one)\n";

void print_help(void)
{
    fputs(usage_head, stdout);
    for (size_t i = 0; i < n_commands; i++) {
        const struct command *c = &commands[i];
        char words[64];
        snprintf(words, sizeof words, "%s%s%s%s%s", c->noun != NULL ? c->noun : "",
                 c->noun != NULL ? " " : "", c->verb, c->operands != NULL ? " " : "",
                 c->operands != NULL ? c->operands : "");
        printf("  %-28s %s\n", words, c->help);
    }
    fputs(usage_tail, stdout);
}
