/* attnctl.c: the operator's command line, over libattn. One request per call; results on stdout as
 * lines or, with --json, as one object; one sentence on stderr and exit code 1 when the daemon, the
 * way to it or stdout fails, 2 for wrong usage. Each command makes a JSON object; lines are printed
 * from that.
 */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/attn.h"

static const char help[] =
    "usage: attnctl [OPTIONS] COMMAND\n"
    "\n"
    "commands:\n"
    "  ping                     one round trip: version, backend, time\n"
    "  info                     the session's limits\n"
    "  stats                    the daemon's counters\n"
    "  pool create NAME         make a pool; geometry below\n"
    "  pool describe NAME       geometry, blocks, free blocks\n"
    "  drain                    take no new sessions and sequences, end when the work is done\n"
    "\n"
    "options:\n"
    "  --endpoint URL           ipc://PATH, tcp://HOST:PORT or shm://PATH\n"
    "                           (default: $ATTND_ENDPOINT, else ipc:///run/attnd/attnd.sock)\n"
    "  --timeout SECONDS        for the daemon's answer (default 5)\n"
    "  --wait SECONDS           for a daemon to come up, where there is none yet (default 0: say "
    "at\n"
    "                           once why there is no connection)\n"
    "  --json                   the result as one JSON object\n"
    "  --help, --version\n"
    "\n"
    "exit codes, of every command: 0 done; 1 no connection, refused, failed, or stdout could not "
    "be\n"
    "written (the reason is on stderr); 2 wrong usage\n"
    "\n"
    "geometry of pool create:\n"
    "  --layers N --q-heads N --kv-heads N --head-dim N\n"
    "  --dtype f32|f16|bf16 (default bf16)  --kv-dtype TYPE (default: dtype)\n"
    "  --block-tokens N (default 16)  --blocks N (default: what is left)\n"
    "  --window N  --soft-cap X  --batch-invariant\n";

enum {
    OPT_ENDPOINT = 256,
    OPT_TIMEOUT,
    OPT_WAIT,
    OPT_JSON,
    OPT_LAYERS, /* from here to batch-invariant: pool create's */
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
    OPT_HELP,
    OPT_VERSION,
};

static const struct option options[] = {
    {"endpoint", required_argument, NULL, OPT_ENDPOINT},
    {"timeout", required_argument, NULL, OPT_TIMEOUT},
    {"wait", required_argument, NULL, OPT_WAIT},
    {"json", no_argument, NULL, OPT_JSON},
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
    {"help", no_argument, NULL, OPT_HELP},
    {"version", no_argument, NULL, OPT_VERSION},
    {NULL, 0, NULL, 0},
};

struct arguments {
    const char *endpoint;
    const char *name; /* of a pool */
    const char *geometry; /* an option of pool create's that is given, NULL: none */
    uint64_t timeout_us, wait_us;
    bool is_json;
    struct attn_pool_spec spec;
    struct attn_layer layer;
};

__attribute__((format(printf, 1, 2))) static int usage(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("attnctl: ", stderr);
    vfprintf(stderr, format, args);
    fputs(" (attnctl --help)\n", stderr);
    va_end(args);
    return 2;
}

static int failed(attn_status st)
{
    fprintf(stderr, "attnctl: %s: %s\n", attn_status_message(st), attn_last_error()->message);
    return 1;
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
    default:
        return false;
    }
}

/* ---- commands: each gives its result as an object ---- */

static attn_status run_ping(attn_client *c, const struct arguments *a, json_t **out)
{
    struct attn_client_info info = {.struct_size = sizeof info};
    uint64_t ns;
    attn_status st = attn_client_ping(c, a->timeout_us, &ns);
    if (st == ATTN_OK)
        st = attn_client_info(c, &info);
    if (st == ATTN_OK)
        *out = json_pack("{s:s, s:s, s:f}", "server_version", info.server_version, "backend",
                         info.backend, "seconds", (double)ns * 1e-9);
    return st;
}

static attn_status run_info(attn_client *c, const struct arguments *a, json_t **out)
{
    struct attn_client_info info = {.struct_size = sizeof info};
    (void)a;
    attn_status st = attn_client_info(c, &info);
    if (st == ATTN_OK)
        *out = json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I}", "server_version",
                         info.server_version, "backend", info.backend, "protocol_version",
                         (json_int_t)info.protocol_version, "lease_us", (json_int_t)info.lease_us,
                         "max_message_bytes", (json_int_t)info.max_message_bytes, "max_step_items",
                         (json_int_t)info.max_step_items, "max_step_tokens",
                         (json_int_t)info.max_step_tokens, "max_seq_tokens",
                         (json_int_t)info.max_seq_tokens);
    return st;
}

static attn_status run_stats(attn_client *c, const struct arguments *a, json_t **out)
{
    char *text = NULL;
    attn_status st = attn_client_stats(c, a->timeout_us, &text);
    if (st == ATTN_OK)
        *out = json_loads(text, 0, NULL);
    attn_free(text);
    return st;
}

static attn_status run_drain(attn_client *c, const struct arguments *a, json_t **out)
{
    attn_status st = attn_client_drain(c, a->timeout_us);
    if (st == ATTN_OK)
        *out = json_pack("{s:b}", "draining", 1);
    return st;
}

/* Closes the handle. */
static json_t *pool_object(attn_pool *p)
{
    const struct attn_pool_spec *s = attn_pool_spec_of(p);
    json_t *o = json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:s, s:b, s:s, s:s}", "name", s->name,
        "layers", (json_int_t)s->num_layers, "q_heads", (json_int_t)s->num_q_heads, "kv_heads",
        (json_int_t)s->num_kv_heads, "head_dim_k", (json_int_t)s->head_dim_k, "head_dim_v",
        (json_int_t)s->head_dim_v, "block_tokens", (json_int_t)s->block_tokens, "blocks",
        (json_int_t)s->n_blocks, "free_blocks", (json_int_t)attn_pool_free_blocks(p), "dtype",
        attn_dtype_name(s->q_dtype), "kv_dtype", attn_dtype_name(s->kv_dtype), "batch_invariant",
        (int)s->is_batch_invariant, "model", s->model, "rope", s->rope);
    attn_pool_close(p);
    return o;
}

static attn_status run_create(attn_client *c, const struct arguments *a, json_t **out)
{
    struct attn_pool_spec spec = a->spec;
    attn_pool *p;
    spec.name = a->name;
    spec.layers = &a->layer;
    spec.n_layers = 1;
    attn_status st = attn_pool_create(c, &spec, a->timeout_us, &p);
    if (st == ATTN_OK)
        *out = pool_object(p);
    return st;
}

static attn_status run_describe(attn_client *c, const struct arguments *a, json_t **out)
{
    attn_pool *p;
    attn_status st = attn_pool_describe(c, a->name, a->timeout_us, &p);
    if (st == ATTN_OK)
        *out = pool_object(p);
    return st;
}

/* ---- results ---- */

/* One "name value" a line; names of nested objects are joined by dots. */
static void print_flat(const char *prefix, json_t *object)
{
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        char name[256];
        snprintf(name, sizeof name, "%s%s%s", prefix, prefix[0] != '\0' ? "." : "", key);
        for (char *c = name; *c != '\0'; c++)
            *c = *c == ' ' ? '_' : *c; /* a status, "out of blocks" */
        if (json_is_object(value)) {
            print_flat(name, value);
        } else if (json_is_string(value)) {
            printf("%s %s\n", name, json_string_value(value));
        } else {
            char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9) | JSON_COMPACT);
            printf("%s %s\n", name, text != NULL ? text : "?");
            free(text);
        }
    }
}

/* What was printed has arrived, or exit code 1. */
static int printed(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return 0;
    fprintf(stderr, "attnctl: write to stdout: %s\n", strerror(errno));
    return 1;
}

static int print_result(json_t *result, bool is_json)
{
    if (!is_json) {
        print_flat("", result);
    } else {
        json_dumpf(result, stdout, JSON_REAL_PRECISION(9));
        putchar('\n');
    }
    return printed();
}

struct command {
    const char *noun, *verb; /* noun NULL: the command is one word */
    attn_status (*run)(attn_client *, const struct arguments *, json_t **out); /* NULL: no memory */
};

static const struct command commands[] = {
    {NULL, "ping", run_ping},   {NULL, "info", run_info},       {NULL, "stats", run_stats},
    {NULL, "drain", run_drain}, {"pool", "create", run_create}, {"pool", "describe", run_describe},
};

/* Finds the command and what it takes. 0, or usage's 2. */
static int choose(char **words, int n, struct arguments *a, const struct command **out_command)
{
    const struct command *c = commands, *end = commands + sizeof commands / sizeof commands[0];
    if (n == 0)
        return usage("missing command");
    bool is_pool = strcmp(words[0], "pool") == 0;
    if (is_pool && n != 3)
        return usage("expected pool create NAME or pool describe NAME");
    while (c < end &&
           ((c->noun != NULL) != is_pool || strcmp(c->verb, words[is_pool ? 1 : 0]) != 0))
        c++;
    if (c == end)
        return usage("unknown command: %s%s%s", words[0], is_pool ? " " : "",
                     is_pool ? words[1] : "");
    if (!is_pool && n > 1)
        return usage("%s takes no argument: %s", words[0], words[1]);
    a->name = is_pool ? words[2] : NULL;
    const struct attn_pool_spec *s = &a->spec;
    bool is_create = c->run == run_create;
    if (a->geometry != NULL && !is_create)
        return usage("--%s is an option of pool create alone", a->geometry);
    if (is_create &&
        (s->num_layers == 0 || s->num_q_heads == 0 || s->num_kv_heads == 0 || s->head_dim_k == 0))
        return usage("pool create needs --layers, --q-heads, --kv-heads and --head-dim");
    *out_command = c;
    return 0;
}

static int run(const struct command *command, const struct arguments *a)
{
    struct attn_client_options o = {.struct_size = sizeof o,
                                    .client_name = "attnctl",
                                    .is_hasty = a->wait_us == 0,
                                    .has_no_keeper = 1};
    attn_client *c;
    json_t *result = NULL;
    uint64_t open_us = a->wait_us > a->timeout_us ? a->wait_us : a->timeout_us;
    attn_status st = attn_client_open(a->endpoint, &o, open_us, &c);
    if (st != ATTN_OK)
        return failed(st);
    st = command->run(c, a, &result);
    int rc = st != ATTN_OK ? failed(st) : 1;
    if (st == ATTN_OK && result == NULL)
        fprintf(stderr, "attnctl: no memory for the result, or stats that are no JSON\n");
    else if (st == ATTN_OK)
        rc = print_result(result, a->is_json);
    json_decref(result);
    attn_client_close(c);
    return rc;
}

int main(int argc, char **argv)
{
    struct arguments a = {.endpoint = attn_default_url(),
                          .timeout_us = 5000000,
                          .spec = {.struct_size = sizeof a.spec,
                                   .layer_struct_size = sizeof a.layer,
                                   .q_dtype = ATTN_BF16}};
    int opt, index = 0;
    while ((opt = getopt_long(argc, argv, "h", options, &index)) != -1) {
        if (opt == OPT_HELP || opt == 'h') {
            fputs(help, stdout);
            return printed();
        }
        if (opt == OPT_VERSION) {
            printf("attnctl %s\n", attn_version());
            return printed();
        }
        if (opt == '?')
            return 2; /* getopt has said why */
        if (!parse_option(&a, opt))
            return usage("--%s: \"%s\" cannot be used", options[index].name, optarg);
        if (opt >= OPT_LAYERS)
            a.geometry = options[index].name;
    }
    const struct command *command = NULL;
    int rc = choose(argv + optind, argc - optind, &a, &command);
    if (rc != 0)
        return rc;
    return run(command, &a);
}
