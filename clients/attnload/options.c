/* options.c: the command line of attnload. One table lists the options; --help is printed from it,
 * and combinations that make no sense are refused here. */
#include "clients/attnload/options.h"

#include <errno.h>
#include <getopt.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_VERIFY 256
#define SLO_SECONDS 5

static const char intro[] =
    "usage: attnload [OPTIONS]\n"
    "\n"
    "Loads an attnd with the attention of a language model, on random data.\n"
    "\n"
    "Closed loop (the default): each worker makes a token of all its sequences at once: one "
    "message\n"
    "a layer carries them all, and the next follows its answer. A sequence grows from --context "
    "by\n"
    "--steps tokens, then writes the same ones again from --context on. They begin evenly spread\n"
    "over that way, filled so far.\n"
    "Open loop (--rate): tokens of single sequences come at times that are fixed before "
    "(--arrivals,\n"
    "--seed), and latencies count from then on. A token that is sent late, because the load "
    "generator or\n"
    "all sequences are busy, shows in the line \"late\"; where more than 1 % are late by 1 ms, "
    "percentiles\n"
    "from p99 on are n/a. Trace (--trace): requests arrive, send their prompt in chunks, make\n"
    "their tokens, and leave.\n"
    "\n"
    "Exit code 0: done and every verified output within its bound; 1: not, no connection, or "
    "stdout could\n"
    "not be written; 2: wrong usage.\n"
    "\n";

enum option_id {
    OPT_ENDPOINT = 256,
    OPT_PRESET,
    OPT_LAYERS,
    OPT_DTYPE,
    OPT_KV_DTYPE,
    OPT_SPLIT,
    OPT_BLOCK_TOKENS,
    OPT_WORKERS,
    OPT_SEQUENCES,
    OPT_CONTEXT,
    OPT_CHUNK,
    OPT_PROMPT,
    OPT_HEADS,
    OPT_TOP_K,
    OPT_CHOOSE_BLOCKS,
    OPT_POOL_BLOCKS,
    OPT_STEPS,
    OPT_DURATION,
    OPT_RATE,
    OPT_ARRIVALS,
    OPT_SLO,
    OPT_TRACE,
    OPT_SPEED,
    OPT_LENGTH_SCALE,
    OPT_REQUESTS,
    OPT_VERIFY,
    OPT_SEED,
    OPT_TIMEOUT,
    OPT_WAIT,
    OPT_JSON,
    OPT_CSV,
    OPT_COMPARE,
    OPT_HELP,
    OPT_VERSION,
};

/* NUMBER and REAL go to a uint32_t and a double of struct options, within min and max; the others
 * are set_other's. */
enum option_type { TYPE_FLAG, TYPE_OTHER, TYPE_NUMBER, TYPE_REAL };
#define AT(field) offsetof(struct options, field)

static const struct {
    const char *name;
    enum option_id id;
    enum option_type type;
    const char *metavar, *text;
    size_t offset;
    double min, max;
} table[] = {
    {"endpoint", OPT_ENDPOINT, TYPE_OTHER, "URL",
     "ipc://PATH, shm://PATH, tcp://HOST:PORT or tls+tcp://HOST:PORT (default:\n"
     "                             $ATTND_ENDPOINT, else ipc:///run/attnd/attnd.sock)",
     0, 0, 0},
    {"preset", OPT_PRESET, TYPE_OTHER, "NAME", "geometry (default llama3-8b)", 0, 0, 0},
    {"layers", OPT_LAYERS, TYPE_OTHER, "one|all|N", "of the model, the first ones (one)", 0, 0, 0},
    {"dtype", OPT_DTYPE, TYPE_OTHER, "TYPE", "f32, f16 or bf16 of q, k, v and out (bf16)", 0, 0, 0},
    {"kv-dtype", OPT_KV_DTYPE, TYPE_OTHER, "TYPE",
     "as cached: fp8_e4m3, int8, nvfp4, mxfp4 or as --dtype (the default)", 0, 0, 0},
    {"split", OPT_SPLIT, TYPE_OTHER, "KIND",
     "over the daemon's cards: whole, heads, tokens (default: whole, if it fits one)", 0, 0, 0},
    {"block-tokens", OPT_BLOCK_TOKENS, TYPE_NUMBER, "N", "tokens a block (16)", AT(block_tokens), 8,
     256},
    {"workers", OPT_WORKERS, TYPE_NUMBER, "N", "threads, each with a client of its own (1)",
     AT(n_workers), 1, 1024},
    {"sequences", OPT_SEQUENCES, TYPE_NUMBER, "N", "a worker's; of a trace: at once, more wait (1)",
     AT(n_sequences), 1, 4096},
    {"context", OPT_CONTEXT, TYPE_NUMBER, "N", "tokens a sequence begins with (1024)", AT(context),
     0, 1u << 26},
    {"chunk", OPT_CHUNK, TYPE_NUMBER, "N", "tokens of a prompt chunk (256)", AT(chunk), 1, 65536},
    {"prompt", OPT_PROMPT, TYPE_OTHER, "append|attend",
     "prompt chunks only fill the cache, or also attend (append; of a trace: attend)", 0, 0, 0},
    {"heads", OPT_HEADS, TYPE_FLAG, NULL,
     "steps carry heads as a model of latent attention has them, which attnd projects to\n"
     "                             latents and back (latents)",
     0, 0, 0},
    {"top-k", OPT_TOP_K, TYPE_NUMBER, "N",
     "sparse steps: a query visits N random tokens of those that it sees (all)", AT(top_k), 1,
     65536},
    {"choose-blocks", OPT_CHOOSE_BLOCKS, TYPE_NUMBER, "N",
     "a query visits, for each kv head, N blocks that attnd chooses (all); --verify then\n"
     "                             tells what share of the softmax they hold",
     AT(choose_blocks), 1, 65536},
    {"pool-blocks", OPT_POOL_BLOCKS, TYPE_NUMBER, "N",
     "the pool has N blocks (as many as the sequences can take); the others are in the\n"
     "                             daemon's cache.idle_memory, and chosen ones that come back are "
     "counted",
     AT(pool_blocks), 1, 1u << 26},
    {"steps", OPT_STEPS, TYPE_NUMBER, "N", "tokens a sequence makes (100)", AT(steps), 1, 1u << 26},
    {"duration", OPT_DURATION, TYPE_REAL, "SECONDS",
     "go on so long, instead of until each sequence has made --steps tokens; what is\n"
     "                             not answered a second later is given up",
     AT(duration_s), 1e-3, 1e6},
    {"rate", OPT_RATE, TYPE_REAL, "R", "open loop: tokens a second of all workers", AT(rate), 1e-3,
     1e9},
    {"arrivals", OPT_ARRIVALS, TYPE_OTHER, "KIND",
     "of the open loop: poisson (the default), constant, gamma=CV (coefficient of\n"
     "                             variation of the gaps), burst=N (at once)",
     0, 0, 0},
    {"slo", OPT_SLO, TYPE_OTHER, "pNN=TIME",
     "search, from --rate on, the highest rate at which this percentile of the\n"
     "                             tokens' times is at most so long (p99=5ms); each rate runs for\n"
     "                             --duration (5)",
     0, 0, 0},
    {"trace", OPT_TRACE, TYPE_OTHER, "FILE",
     "replay requests, Mooncake's JSON lines; blocks of equal hash_ids are shared", 0, 0, 0},
    {"speed", OPT_SPEED, TYPE_REAL, "X", "arrivals X times faster; 0: all at once (1)", AT(speed),
     0, 1e9},
    {"length-scale", OPT_LENGTH_SCALE, TYPE_REAL, "X", "of inputs and outputs (1)",
     AT(length_scale), 1e-6, 1e3},
    {"requests", OPT_REQUESTS, TYPE_NUMBER, "N", "the trace's first N (all)", AT(n_requests), 1,
     1u << 30},
    {"verify", OPT_VERIFY, TYPE_NUMBER, "[=N]",
     "recompute about N random outputs and their lse in float64 after the run (256)", AT(n_verify),
     1, 1u << 20},
    {"seed", OPT_SEED, TYPE_NUMBER, "N", "of the data and the arrivals (1)", AT(seed), 0,
     UINT32_MAX},
    {"timeout", OPT_TIMEOUT, TYPE_REAL, "SECONDS", "of each request (60)", AT(timeout_s), 1e-3,
     1e6},
    {"wait", OPT_WAIT, TYPE_REAL, "SECONDS",
     "for a daemon to come up, where there is none yet (0: say at once why)", AT(wait_s), 0, 1e6},
    {"json", OPT_JSON, TYPE_FLAG, NULL, "results as one JSON object", 0, 0, 0},
    {"csv", OPT_CSV, TYPE_FLAG, NULL, "results as a line of names and a line of values", 0, 0, 0},
    {"compare", OPT_COMPARE, TYPE_OTHER, "FILE", "results beside those of an earlier run's --json",
     0, 0, 0},
    {"help", OPT_HELP, TYPE_FLAG, NULL, "this text", 0, 0, 0},
    {"version", OPT_VERSION, TYPE_FLAG, NULL, "the version", 0, 0, 0},
};
#define N_OPTIONS (sizeof table / sizeof table[0])

static enum options_action print_help(void)
{
    fputs(intro, stdout);
    for (size_t i = 0; i < N_OPTIONS; i++) {
        char left[64];
        const char *metavar = table[i].metavar != NULL ? table[i].metavar : "";
        snprintf(left, sizeof left, "--%s%s%s", table[i].name,
                 metavar[0] != '\0' && metavar[0] != '[' ? " " : "", metavar);
        printf("  %-26s %s\n", left, table[i].text);
    }
    printf("\npresets:\n");
    for (uint32_t i = 0; i < n_presets; i++) {
        const struct preset *p = &presets[i];
        printf("  %-12s %3u layers, %u q heads, %u kv heads, head_dim %u", p->name, p->num_layers,
               p->num_q_heads, p->num_kv_heads, p->head_dim);
        if (p->kv_lora_rank > 0)
            printf(", V its first %u", p->kv_lora_rank);
        if (p->window_tokens > 0)
            printf(", window %u in %u of %u layers", p->window_tokens, p->full_every - 1,
                   p->full_every);
        putchar('\n');
    }
    return output_is_written() ? OPTIONS_EXIT_OK : OPTIONS_EXIT_FAILED;
}

static bool parse_real(const char *text, double min, double max, double *out)
{
    char *end;
    errno = 0;
    double x = strtod(text, &end);
    if (errno != 0 || end == text || *end != '\0' || !(x >= min && x <= max))
        return false;
    *out = x;
    return true;
}

static bool parse_number(const char *text, double min, double max, uint32_t *out)
{
    double x;
    if (!parse_real(text, min, max, &x) || x != (uint32_t)x)
        return false;
    *out = (uint32_t)x;
    return true;
}

static bool parse_layers(const char *text, uint32_t *out)
{
    if (strcmp(text, "one") == 0)
        *out = 1;
    else if (strcmp(text, "all") == 0)
        *out = UINT32_MAX;
    else
        return parse_number(text, 1, PRESET_MAX_LAYERS, out);
    return true;
}

/* p50=300us, p99.9=5ms, p90=1s */
static bool parse_slo(const char *text, struct slo *out)
{
    static const struct {
        const char *name;
        double seconds;
    } units[] = {{"us", 1e-6}, {"ms", 1e-3}, {"s", 1}};
    char *end;
    size_t n = strcspn(text, "=");
    double percent = text[0] == 'p' ? strtod(text + 1, &end) : 0;
    if (text[0] != 'p' || text[n] == '\0' || n >= sizeof out->name || end != text + n ||
        !(percent > 0 && percent < 100))
        return false;
    double x = strtod(text + n + 1, &end);
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (strcmp(end, units[i].name) != 0 || !(x > 0 && x < 1e9))
            continue;
        *out = (struct slo){.share = percent / 100, .seconds = x * units[i].seconds};
        memcpy(out->name, text, n);
        return true;
    }
    return false;
}

/* What was expected instead, NULL if the value is good. */
static const char *set_other(struct options *o, enum option_id id, const char *text)
{
    switch (id) {
    case OPT_ENDPOINT:
        o->endpoint = text;
        return NULL;
    case OPT_PRESET:
        o->preset = preset_find(text);
        return o->preset != NULL ? NULL : "a preset of attnload --help";
    case OPT_LAYERS:
        return parse_layers(text, &o->n_layers) ? NULL : "one, all or a number of layers";
    case OPT_DTYPE:
        o->dtype = attn_dtype_parse(text);
        return o->dtype == ATTN_F32 || o->dtype == ATTN_F16 || o->dtype == ATTN_BF16
                   ? NULL
                   : "f32, f16 or bf16";
    case OPT_SPLIT:
        return attn_split_parse(text, &o->split) ? NULL : "whole, heads, tokens or auto";
    case OPT_KV_DTYPE:
        o->kv_dtype = attn_dtype_parse(text);
        return o->kv_dtype != ATTN_DTYPE_NONE ? NULL
                                              : "fp8_e4m3, int8, nvfp4, mxfp4 or what --dtype is";
    case OPT_PROMPT:
        o->is_prompt_attended = strcmp(text, "attend") == 0;
        return o->is_prompt_attended || strcmp(text, "append") == 0 ? NULL : "append or attend";
    case OPT_ARRIVALS:
        return arrivals_parse(text, &o->arrivals) ? NULL
                                                  : "poisson, constant, gamma=CV (0.01 to 100) or "
                                                    "burst=N (1 to 1000000)";
    case OPT_SLO:
        return parse_slo(text, &o->slo) ? NULL : "a percentile and a time, as p99=5ms";
    case OPT_COMPARE:
        o->compare = text;
        return NULL;
    default: /* OPT_TRACE */
        o->trace = text;
        return NULL;
    }
}

/* Sets option i; false: said on stderr what is wrong with its value. */
static bool set_option(struct options *o, size_t i, const char *text)
{
    char range[64];
    const char *expected = NULL;
    void *at = (char *)o + table[i].offset;
    double min = table[i].min, max = table[i].max;
    if (table[i].id == OPT_HEADS)
        o->has_heads = true;
    else if (table[i].type == TYPE_FLAG)
        o->format = table[i].id == OPT_CSV ? FORMAT_CSV : FORMAT_JSON;
    else if (table[i].type == TYPE_OTHER)
        expected = set_other(o, table[i].id, text);
    else if (text == NULL) /* --verify */
        o->n_verify = DEFAULT_VERIFY;
    else if (table[i].type == TYPE_NUMBER ? !parse_number(text, min, max, at)
                                          : !parse_real(text, min, max, at)) {
        snprintf(range, sizeof range, "%s from %.10g to %.10g",
                 table[i].type == TYPE_NUMBER ? "a whole number" : "a number", min, max);
        expected = range;
    }
    if (expected == NULL)
        return true;
    fprintf(stderr, "attnload: --%s: \"%s\" is not %s\n", table[i].name, text, expected);
    return false;
}

static bool is_given(uint64_t given, enum option_id id)
{
    return (given >> (id - OPT_ENDPOINT) & 1) != 0;
}

/* Fills in what others decide. Returns what is wrong with the combination, NULL if nothing. */
static const char *check(struct options *o, uint64_t given)
{
    static const enum option_id not_of_traces[] = {OPT_CONTEXT, OPT_STEPS, OPT_DURATION, OPT_RATE};
    static const enum option_id of_traces[] = {OPT_SPEED, OPT_LENGTH_SCALE, OPT_REQUESTS};
    if (o->kv_dtype == ATTN_DTYPE_NONE)
        o->kv_dtype = o->dtype;
    if (o->n_layers == UINT32_MAX)
        o->n_layers = o->preset->num_layers;
    if (o->n_layers > o->preset->num_layers)
        return "--layers: the preset has fewer";
    if (o->has_heads && o->preset->kv_lora_rank == 0)
        return "--heads: the preset has no latents";
    for (size_t i = 0; o->trace != NULL && i < sizeof not_of_traces / sizeof not_of_traces[0]; i++)
        if (is_given(given, not_of_traces[i]))
            return "--trace goes without --context, --steps, --duration and --rate";
    for (size_t i = 0; o->trace == NULL && i < sizeof of_traces / sizeof of_traces[0]; i++)
        if (is_given(given, of_traces[i]))
            return "--speed, --length-scale and --requests need --trace";
    if (is_given(given, OPT_JSON) && is_given(given, OPT_CSV))
        return "--json and --csv: one of them";
    if (is_given(given, OPT_CSV) && o->compare != NULL)
        return "--compare goes without --csv";
    if (is_given(given, OPT_SLO) && !is_given(given, OPT_RATE))
        return "--slo needs --rate, to begin with";
    if (is_given(given, OPT_SLO) && !is_given(given, OPT_DURATION))
        o->duration_s = SLO_SECONDS;
    if (is_given(given, OPT_ARRIVALS) && !is_given(given, OPT_RATE))
        return "--arrivals needs --rate";
    if (!is_given(given, OPT_PROMPT))
        o->is_prompt_attended = o->trace != NULL;
    if ((uint64_t)o->context + o->steps > UINT32_MAX / 2)
        return "--context and --steps: too many tokens";
    return NULL;
}

enum options_action options_parse(int argc, char **argv, struct options *o)
{
    struct option longs[N_OPTIONS + 1] = {0};
    uint64_t given = 0;
    for (size_t i = 0; i < N_OPTIONS; i++) {
        int argument = table[i].type == TYPE_FLAG  ? no_argument
                       : table[i].id == OPT_VERIFY ? optional_argument
                                                   : required_argument;
        longs[i] = (struct option){table[i].name, argument, NULL, (int)table[i].id};
    }
    *o = (struct options){.endpoint = attn_default_url(),
                          .preset = &presets[0],
                          .n_layers = 1,
                          .n_workers = 1,
                          .n_sequences = 1,
                          .context = 1024,
                          .steps = 100,
                          .chunk = 256,
                          .block_tokens = 16,
                          .dtype = ATTN_BF16,
                          .seed = 1,
                          .timeout_s = 60,
                          .speed = 1,
                          .length_scale = 1};
    for (int id, index = 0; (id = getopt_long(argc, argv, "h", longs, &index)) != -1;) {
        if (id == '?')
            return OPTIONS_EXIT_USAGE;
        if (id == OPT_HELP || id == 'h') {
            return print_help();
        }
        if (id == OPT_VERSION) {
            printf("attnload %s\n", attn_version());
            return output_is_written() ? OPTIONS_EXIT_OK : OPTIONS_EXIT_FAILED;
        }
        given |= 1ull << (id - OPT_ENDPOINT);
        if (!set_option(o, (size_t)index, optarg))
            return OPTIONS_EXIT_USAGE;
    }
    o->timeout_us = (uint64_t)(o->timeout_s * 1e6);
    if (optind < argc) {
        fprintf(stderr, "attnload: \"%s\" is no option (--verify takes its number as --verify=N)\n",
                argv[optind]);
        return OPTIONS_EXIT_USAGE;
    }
    const char *bad = check(o, given);
    if (bad == NULL)
        return OPTIONS_RUN;
    fprintf(stderr, "attnload: %s\n", bad);
    return OPTIONS_EXIT_USAGE;
}

bool output_is_written(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return true;
    fprintf(stderr, "attnload: write to stdout: %s\n", strerror(errno));
    return false;
}
