/* main.c: reads the command line, finds the command in the table, runs it and gives the exit
 * code: 1, with one sentence on stderr, when the daemon, the connection to it or stdout fails; 2
 * for wrong usage.
 */
#include "clients/attnctl/attnctl.h"
#include "clients/attnctl/keys.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* At least 1. */
static bool parse_count(const char *text, uint32_t *out)
{
    return parse_u32(text, out) && *out > 0;
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
        return parse_count(optarg, &a->count);
    case OPT_SECONDS:
        if (!parse_number(optarg, 86400, &x) || x == 0)
            return false;
        a->record_us = (uint64_t)(x * 1e6);
        return true;
    case OPT_HOLD:
        if (!parse_number(optarg, 86400, &x) || x == 0)
            return false;
        a->hold_us = (uint64_t)(x * 1e6);
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
        return parse_count(optarg, &a->spec.num_layers);
    case OPT_Q_HEADS:
        return parse_count(optarg, &a->spec.num_q_heads);
    case OPT_KV_HEADS:
        return parse_count(optarg, &a->spec.num_kv_heads);
    case OPT_HEAD_DIM:
        return parse_count(optarg, &a->spec.head_dim_k);
    case OPT_DTYPE:
        return parse_dtype(optarg, &a->spec.q_dtype) && a->spec.q_dtype <= ATTN_BF16;
    case OPT_KV_DTYPE:
        return parse_dtype(optarg, &a->spec.kv_dtype);
    case OPT_BLOCK_TOKENS:
        return parse_count(optarg, &a->spec.block_tokens);
    case OPT_BLOCKS:
        return parse_count(optarg, &a->spec.n_blocks);
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

/* What an option takes, where parse_option has refused a value. */
static const char *wanted_of(int opt)
{
    switch (opt) {
    case OPT_TIMEOUT:
    case OPT_SECONDS:
    case OPT_HOLD:
        return opt == OPT_TIMEOUT ? "a number of seconds above 0, 1000000 at most"
                                  : "a number of seconds above 0, 86400 at most";
    case OPT_WAIT:
    case OPT_INTERVAL:
        return "a number of seconds from 0 to 1000000";
    case OPT_AS:
        return "a whole number from 0";
    case OPT_DTYPE:
        return "f32, f16 or bf16";
    case OPT_KV_DTYPE:
        return "f32, f16, bf16, fp8_e4m3, int8, nvfp4 or mxfp4";
    case OPT_WINDOW:
        return "a whole number from 0 to 4294967295";
    case OPT_SOFT_CAP:
        return "a number from 0 to 1000000";
    case OPT_SPLIT:
        return "auto, whole, heads or tokens";
    default:
        return "a whole number from 1 to 4294967295";
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
    if (a->hold_us != 0 && c->ask != ask_drain)
        return usage("--hold is an option of drain");
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
    const char *missing = s->num_layers == 0     ? "layers"
                          : s->num_q_heads == 0  ? "q-heads"
                          : s->num_kv_heads == 0 ? "kv-heads"
                          : s->head_dim_k == 0   ? "head-dim"
                                                 : NULL;
    if (is_create && missing != NULL)
        return usage("pool create needs --%s", missing);
    a->is_admin = c->is_admin;
    *out_command = c;
    return 0;
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
    die_of_signal();
    return rc;
}

/* attnctl --complete WORDS: what a shell asks for. argv[0] is "--complete"; the last word is what
 * is completed. */
static int complete(int argc, char **argv, struct arguments *a)
{
    const struct vocabulary all = {commands, n_commands, options};
    const char *word = argc > 1 ? argv[argc - 1] : "";
    const char *before = argc > 2 ? argv[argc - 2] : "";
    int n = argc > 1 ? argc - 1 : argc, opt;
    opterr = 0;
    while ((opt = getopt_long(n, argv, "h", options, NULL)) != -1)
        if (opt != '?')
            parse_option(a, opt);
    return complete_word(&all, a, argv + optind, (size_t)(n - optind),
                         strncmp(before, "--", 2) == 0 ? before + 2 : NULL, word);
}

/* attnctl cluster WORDS: attnd-cluster, which is Python, since it asks the registry and agents. */
static int cluster_command(char **argv)
{
    argv[0] = "attnd-cluster";
    execvp(argv[0], argv);
    fprintf(stderr, "attnctl: cluster is the program attnd-cluster, of clients/cluster: %s\n",
            strerror(errno));
    return EXIT_FAILED;
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
    if (argc > 1 && strcmp(argv[1], "cluster") == 0)
        return cluster_command(argv + 1);
    if (argc > 1 && strcmp(argv[1], "--complete") == 0)
        return complete(argc - 1, argv + 1, &a);
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
            return usage("--%s: \"%s\" is not %s", options[index].name, optarg, wanted_of(opt));
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
