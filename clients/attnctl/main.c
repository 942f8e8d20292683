/* attnctl.c: the operator's command line, over libattn: options, the table of commands, exit codes.
 * One sentence on stderr and exit code 1 when the daemon, the way to it or stdout fails, 2 for
 * wrong usage.
 */
#include "clients/attnctl/attnctl.h"
#include "clients/attnctl/keys.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Reached only where other options stand before the word: see keys_command. */
static int run_keys(const struct arguments *a)
{
    (void)a;
    fputs("attnctl: keys comes first, then its own options (attnctl keys --help)\n", stderr);
    return 2;
}

/* Commands of one noun stand together. */
const struct command commands[] = {
    {NULL, "ping", NULL, "one round trip: version, backend, time", .ask = ask_ping},
    {NULL, "status", NULL, "ready or draining, for how long, and the counters to look at first",
     .ask = ask_status},
    {NULL, "info", NULL, "the limits of a session", .ask = ask_info},
    {NULL, "stats", NULL, "the counters", .ask = ask_stats},
    {NULL, "top", NULL, "what the daemon does, again every --interval", .live = run_top},
    {NULL, "latency", NULL, "percentiles of the times of steps, by stage", .ask = ask_latency,
     .print = print_latency},
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
    {NULL, "doctor", NULL, "what may be wrong with this machine, and what to do",
     .local = run_doctor},
    {NULL, "completion", "SHELL", "what bash, zsh or fish needs to complete these words",
     .local = run_completion},
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
    "                           drain goes to the admin socket beside it, URL.admin, if it can\n"
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
    "  --dtype f32|f16|bf16 (default bf16)  --kv-dtype TYPE (default: dtype)\n"
    "  --block-tokens N (default 16)  --blocks N (default: half of what is left)\n"
    "  --window N  --soft-cap X  --batch-invariant\n"
    "  --split whole|heads|tokens: over the daemon's cards (default: whole, if --blocks fit one)\n";

static void print_help(void)
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

enum {
    OPT_ENDPOINT = 256,
    OPT_TIMEOUT,
    OPT_WAIT,
    OPT_JSON,
    OPT_INTERVAL,
    OPT_COUNT,
    OPT_SECONDS,
    OPT_TENANT,
    OPT_POOL,
    OPT_AS,
    OPT_LAYERS, /* from here to split: pool create's */
    OPT_Q_HEADS,
    OPT_KV_HEADS,
    OPT_HEAD_DIM,
    OPT_DTYPE,
    OPT_KV_DTYPE,
    OPT_BLOCK_TOKENS,
    OPT_BLOCKS,
    OPT_WINDOW,
    OPT_SOFT_CAP,
    OPT_BATCH_INVARIANT,
    OPT_SPLIT,
    OPT_HELP,
    OPT_VERSION,
};

const struct option options[] = {
    {"endpoint", required_argument, NULL, OPT_ENDPOINT},
    {"timeout", required_argument, NULL, OPT_TIMEOUT},
    {"wait", required_argument, NULL, OPT_WAIT},
    {"json", no_argument, NULL, OPT_JSON},
    {"interval", required_argument, NULL, OPT_INTERVAL},
    {"count", required_argument, NULL, OPT_COUNT},
    {"seconds", required_argument, NULL, OPT_SECONDS},
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

__attribute__((format(printf, 1, 2))) static int usage(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("attnctl: ", stderr);
    vfprintf(stderr, format, args);
    fputs(" (attnctl --help)\n", stderr);
    va_end(args);
    return EXIT_USAGE;
}

int failed(attn_status st)
{
    fprintf(stderr, "attnctl: %s: %s\n", attn_status_message(st), attn_last_error()->message);
    return EXIT_FAILED;
}

int printed(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return EXIT_DONE;
    fprintf(stderr, "attnctl: write to stdout: %s\n", strerror(errno));
    return EXIT_FAILED;
}

static bool parse_number(const char *text, double max, double *out)
{
    char *end;
    errno = 0;
    *out = strtod(text, &end);
    return errno == 0 && end != text && *end == '\0' && *out >= 0 && *out <= max;
}

static bool parse_u32(const char *text, uint32_t *out)
{
    double x;
    if (!parse_number(text, UINT32_MAX, &x) || x != (uint32_t)x)
        return false;
    *out = (uint32_t)x;
    return true;
}

static bool parse_u64(const char *text, uint64_t *out)
{
    char *end;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return errno == 0 && text[0] >= '0' && text[0] <= '9' && *end == '\0';
}

static bool parse_dtype(const char *text, attn_dtype *out)
{
    *out = attn_dtype_parse(text);
    return *out != ATTN_DTYPE_NONE;
}

static bool parse_option(struct arguments *a, int opt)
{
    double x = 0;
    switch (opt) {
    case OPT_ENDPOINT:
        a->endpoint = optarg;
        return true;
    case OPT_TIMEOUT:
        if (!parse_number(optarg, 1e6, &x) || x == 0)
            return false;
        a->timeout_us = (uint64_t)(x * 1e6);
        return true;
    case OPT_WAIT:
        if (!parse_number(optarg, 1e6, &x))
            return false;
        a->wait_us = (uint64_t)(x * 1e6);
        return true;
    case OPT_JSON:
        a->is_json = true;
        return true;
    case OPT_INTERVAL:
        if (!parse_number(optarg, 1e6, &x))
            return false;
        a->interval_us = (uint64_t)(x * 1e6);
        return true;
    case OPT_COUNT:
        return parse_u32(optarg, &a->count) && a->count > 0;
    case OPT_SECONDS:
        if (!parse_number(optarg, 86400, &x) || x == 0)
            return false;
        a->record_us = (uint64_t)(x * 1e6);
        return true;
    case OPT_TENANT:
        a->tenant = optarg;
        return true;
    case OPT_POOL:
        a->pool = optarg;
        return true;
    case OPT_AS:
        a->has_as = true;
        return parse_u64(optarg, &a->as);
    case OPT_LAYERS:
        return parse_u32(optarg, &a->spec.num_layers);
    case OPT_Q_HEADS:
        return parse_u32(optarg, &a->spec.num_q_heads);
    case OPT_KV_HEADS:
        return parse_u32(optarg, &a->spec.num_kv_heads);
    case OPT_HEAD_DIM:
        return parse_u32(optarg, &a->spec.head_dim_k);
    case OPT_DTYPE:
        return parse_dtype(optarg, &a->spec.q_dtype);
    case OPT_KV_DTYPE:
        return parse_dtype(optarg, &a->spec.kv_dtype);
    case OPT_BLOCK_TOKENS:
        return parse_u32(optarg, &a->spec.block_tokens);
    case OPT_BLOCKS:
        return parse_u32(optarg, &a->spec.n_blocks);
    case OPT_WINDOW:
        return parse_u32(optarg, &a->layer.window_tokens);
    case OPT_SOFT_CAP:
        if (!parse_number(optarg, 1e6, &x))
            return false;
        a->layer.soft_cap = (float)x;
        return true;
    case OPT_BATCH_INVARIANT:
        a->spec.is_batch_invariant = 1;
        return true;
    case OPT_SPLIT:
        return attn_split_parse(optarg, &a->spec.split);
    default:
        return false;
    }
}

/* ---- one command ---- */

static size_t n_operands(const struct command *c)
{
    size_t n = c->operands != NULL;
    for (const char *p = c->operands; p != NULL && *p != '\0'; p++)
        n += *p == ' ';
    return n;
}

/* "pool list, pool create NAME": what a noun may be followed by */
static const char *forms_of(const char *noun, char *out, size_t out_bytes)
{
    size_t n = 0;
    out[0] = '\0';
    for (size_t i = 0; i < n_commands && n < out_bytes; i++) {
        const struct command *c = &commands[i];
        if (c->noun != NULL && strcmp(c->noun, noun) == 0)
            n += (size_t)snprintf(out + n, out_bytes - n, "%s%s %s%s%s", n > 0 ? ", " : "", noun,
                                  c->verb, c->operands != NULL ? " " : "",
                                  c->operands != NULL ? c->operands : "");
    }
    return out;
}

/* Finds the command and what it takes. 0, or usage's 2. */
static int choose(char **words, int n, struct arguments *a, const struct command **out_command)
{
    char forms[256];
    if (n == 0)
        return usage("missing command");
    bool is_noun = false;
    const struct command *c = NULL;
    for (size_t i = 0; i < n_commands; i++) {
        const struct command *k = &commands[i];
        bool is_of_noun = k->noun != NULL && strcmp(k->noun, words[0]) == 0;
        is_noun |= is_of_noun;
        if (is_of_noun ? n > 1 && strcmp(k->verb, words[1]) == 0
                       : k->noun == NULL && strcmp(k->verb, words[0]) == 0)
            c = k;
    }
    if (c == NULL && is_noun)
        return usage("expected %s", forms_of(words[0], forms, sizeof forms));
    if (c == NULL)
        return usage("unknown command: %s", words[0]);
    int n_words = is_noun ? 2 : 1, wanted = (int)n_operands(c);
    if (n - n_words > wanted && wanted == 0)
        return usage("%s takes no argument: %s", c->verb, words[n_words]);
    if (n - n_words != wanted)
        return usage("expected %s%s%s %s", is_noun ? c->noun : "", is_noun ? " " : "", c->verb,
                     c->operands);
    for (int i = 0; i < wanted; i++)
        a->operands[i] = words[n_words + i];
    const struct attn_pool_spec *s = &a->spec;
    bool is_create = c->ask == ask_pool_create;
    if (a->geometry != NULL && !is_create)
        return usage("--%s is an option of pool create alone", a->geometry);
    if (a->live != NULL && c->live == NULL)
        return usage("--%s is an option of top, watch and trace", a->live);
    if (a->tenant != NULL && c->ask != ask_kill_sequence && c->ask != ask_sequence_place &&
        c->ask != ask_pool_drop && c->ask != ask_pool_resize)
        return usage("--tenant is an option of kill sequence, sequence place, pool drop and pool "
                     "resize");
    if (c->ask == ask_pool_resize && (!parse_u32(a->operands[1], &a->n_blocks)))
        return usage("pool resize: \"%s\" is no number of blocks", a->operands[1]);
    if (a->pool != NULL && c->ask != ask_sequence_import && c->ask != ask_sequence_move)
        return usage("--pool is an option of sequence import and move");
    if (a->has_as && c->ask != ask_sequence_import)
        return usage("--as is an option of sequence import");
    bool is_of_seq = c->operands != NULL && strncmp(c->operands, "NUMBER", 6) == 0;
    if (is_of_seq && !parse_u64(a->operands[0], &a->seq))
        return usage("%s %s: \"%s\" is no number", c->noun, c->verb, a->operands[0]);
    if (c->ask == ask_sequence_place &&
        (!parse_u64(a->operands[1], &a->card) || a->card > UINT32_MAX))
        return usage("sequence place: \"%s\" is no card's number", a->operands[1]);
    if (is_create &&
        (s->num_layers == 0 || s->num_q_heads == 0 || s->num_kv_heads == 0 || s->head_dim_k == 0))
        return usage("pool create needs --layers, --q-heads, --kv-heads and --head-dim");
    a->is_admin = c->is_admin;
    *out_command = c;
    return 0;
}

/* The admin socket beside an ipc endpoint; false: the endpoint has none. */
static bool admin_endpoint(const char *endpoint, char *out, size_t out_bytes)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    bool is_user = geteuid() != 0 && runtime != NULL && runtime[0] != '\0';
    if (endpoint == NULL)
        endpoint = getenv("ATTND_ENDPOINT");
    if (endpoint != NULL && strncmp(endpoint, "ipc://", 6) != 0)
        return false;
    int n = endpoint != NULL ? snprintf(out, out_bytes, "%s.admin", endpoint)
                             : snprintf(out, out_bytes, "ipc://%s/attnd.sock.admin",
                                        is_user ? runtime : "/run/attnd");
    return n < (int)out_bytes;
}

/* What is for operators goes to the daemon's admin socket; where that can't be reached, to the
 * endpoint, which lets the daemon decide. */
attn_status connect_to(const struct arguments *a, attn_client **out_client)
{
    struct attn_client_options o = {
        .struct_size = sizeof o, .client_name = "attnctl", .is_hasty = 1, .has_no_keeper = 1};
    char admin[256];
    uint64_t open_us = a->wait_us > a->timeout_us ? a->wait_us : a->timeout_us;
    if (a->is_admin && admin_endpoint(a->endpoint, admin, sizeof admin) &&
        attn_client_open(admin, &o, a->timeout_us, out_client) == ATTN_OK)
        return ATTN_OK;
    o.is_hasty = a->wait_us == 0;
    return attn_client_open(a->endpoint, &o, open_us, out_client);
}

static int ask(const struct command *command, attn_client *c, const struct arguments *a)
{
    json_t *result = NULL;
    attn_status st = command->ask(c, a, &result);
    if (st != ATTN_OK)
        return failed(st);
    if (result == NULL) {
        fprintf(stderr, "attnctl: no memory for the result, or an answer that is no JSON\n");
        return EXIT_FAILED;
    }
    if (a->is_json)
        print_json(result);
    else if (command->print != NULL)
        command->print(result);
    else
        print_flat(result);
    json_decref(result);
    return printed();
}

static int run(const struct command *command, const struct arguments *a)
{
    attn_client *c;
    if (command->local != NULL)
        return command->local(a);
    attn_status st = connect_to(a, &c);
    if (st != ATTN_OK)
        return failed(st);
    int rc = command->live != NULL ? command->live(c, a) : ask(command, c, a);
    attn_client_close(c);
    return rc;
}

int main(int argc, char **argv)
{
    struct arguments a = {.endpoint = attn_default_url(),
                          .timeout_us = 5000000,
                          .interval_us = 1000000,
                          .record_us = 10000000,
                          .spec = {.struct_size = sizeof a.spec,
                                   .layer_struct_size = sizeof a.layer,
                                   .q_dtype = ATTN_BF16}};
    int opt, index = 0;
    int n_before = argc > 1 && strcmp(argv[1], "--json") == 0; /* keys has its own options */
    if (argc > 1 + n_before && strcmp(argv[1 + n_before], "keys") == 0)
        return keys_command(argc - 1 - n_before, argv + 1 + n_before, n_before > 0);
    while ((opt = getopt_long(argc, argv, "h", options, &index)) != -1) {
        if (opt == OPT_HELP || opt == 'h') {
            print_help();
            return printed();
        }
        if (opt == OPT_VERSION) {
            printf("attnctl %s\n", attn_version());
            return printed();
        }
        if (opt == '?')
            return EXIT_USAGE; /* getopt has said why */
        if (!parse_option(&a, opt))
            return usage("--%s: \"%s\" cannot be used", options[index].name, optarg);
        if (opt >= OPT_LAYERS)
            a.geometry = options[index].name;
        else if (opt >= OPT_INTERVAL && opt <= OPT_SECONDS)
            a.live = options[index].name;
    }
    const struct command *command = NULL;
    int rc = choose(argv + optind, argc - optind, &a, &command);
    if (rc != 0)
        return rc;
    return run(command, &a);
}
