/* options.c: one table of options; --help follows it. */
#include "clients/attnload/options.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_VERIFY 256

static const char intro[] =
    "usage: attnload [OPTIONS]\n"
    "\n"
    "Loads an attnd with the attention of a language model, on random data.\n"
    "\n"
    "Closed loop (the default): each worker fills its sequences with --context tokens, then makes\n"
    "--steps tokens for all of them: one message a layer carries all its sequences, and the next\n"
    "follows its answer. Open loop (--rate): tokens of single sequences come at random times, and\n"
    "latencies count from when a token was due. Trace (--trace): requests arrive, send their "
    "prompt in\n"
    "chunks, make their tokens, and leave.\n"
    "\n"
    "Exit code 0: done and every verified output within its bound; 1: not; 2: wrong usage.\n"
    "\n";

enum option_id {
    OPT_ENDPOINT = 256,
    OPT_PRESET,
    OPT_LAYERS,
    OPT_DTYPE,
    OPT_KV_DTYPE,
    OPT_BLOCK_TOKENS,
    OPT_WORKERS,
    OPT_SEQUENCES,
    OPT_CONTEXT,
    OPT_CHUNK,
    OPT_PROMPT,
    OPT_STEPS,
    OPT_DURATION,
    OPT_RATE,
    OPT_TRACE,
    OPT_SPEED,
    OPT_LENGTH_SCALE,
    OPT_REQUESTS,
    OPT_VERIFY,
    OPT_SEED,
    OPT_TIMEOUT,
    OPT_JSON,
    OPT_HELP,
    OPT_VERSION,
};

static const struct {
    const char *name;
    int argument;
    enum option_id id;
    const char *metavar, *text;
} table[] = {
    {"endpoint", required_argument, OPT_ENDPOINT, "URL",
     "ipc://PATH, tcp://HOST:PORT or shm://PATH (default: $ATTND_ENDPOINT, else\n"
     "                             ipc:///run/attnd/attnd.sock)"},
    {"preset", required_argument, OPT_PRESET, "NAME", "geometry (default llama3-8b)"},
    {"layers", required_argument, OPT_LAYERS, "one|all|N", "of the model, the first ones (one)"},
    {"dtype", required_argument, OPT_DTYPE, "TYPE", "f32, f16 or bf16 of q, k, v and out (bf16)"},
    {"kv-dtype", required_argument, OPT_KV_DTYPE, "TYPE",
     "as cached: fp8_e4m3, int8 or as --dtype (the default)"},
    {"block-tokens", required_argument, OPT_BLOCK_TOKENS, "N", "tokens a block (16)"},
    {"workers", required_argument, OPT_WORKERS, "N", "threads, each with a client of its own (1)"},
    {"sequences", required_argument, OPT_SEQUENCES, "N",
     "a worker's; of a trace: at once, more wait (1)"},
    {"context", required_argument, OPT_CONTEXT, "N", "tokens cached before the run (1024)"},
    {"chunk", required_argument, OPT_CHUNK, "N", "tokens of a prompt chunk (256)"},
    {"prompt", required_argument, OPT_PROMPT, "append|attend",
     "prompt chunks only fill the cache, or also attend (append; of a trace: attend)"},
    {"steps", required_argument, OPT_STEPS, "N", "tokens a sequence makes (100)"},
    {"duration", required_argument, OPT_DURATION, "SECONDS",
     "go on so long; sequences start again from their context every --steps"},
    {"rate", required_argument, OPT_RATE, "R", "open loop: tokens a second of all workers"},
    {"trace", required_argument, OPT_TRACE, "FILE", "replay requests, Mooncake's JSON lines"},
    {"speed", required_argument, OPT_SPEED, "X", "arrivals X times faster; 0: all at once (1)"},
    {"length-scale", required_argument, OPT_LENGTH_SCALE, "X", "of inputs and outputs (1)"},
    {"requests", required_argument, OPT_REQUESTS, "N", "the trace's first N (all)"},
    {"verify", optional_argument, OPT_VERIFY, "[=N]",
     "recompute about N random outputs and their lse in float64 after the run (256)"},
    {"seed", required_argument, OPT_SEED, "N", "of the data and the arrivals (1)"},
    {"timeout", required_argument, OPT_TIMEOUT, "SECONDS", "of each request (60)"},
    {"json", no_argument, OPT_JSON, NULL, "results as one JSON object"},
    {"help", no_argument, OPT_HELP, NULL, "this text"},
    {"version", no_argument, OPT_VERSION, NULL, "the version"},
};
#define N_OPTIONS (sizeof table / sizeof table[0])

static void print_help(void)
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
        if (p->window_tokens > 0)
            printf(", window %u in %u of %u layers", p->window_tokens, p->full_every - 1,
                   p->full_every);
        putchar('\n');
    }
}

static bool parse_double(const char *text, double min, double max, double *out)
{
    char *end;
    errno = 0;
    double x = strtod(text, &end);
    if (errno != 0 || end == text || *end != '\0' || !(x >= min && x <= max))
        return false;
    *out = x;
    return true;
}

static bool parse_u32(const char *text, uint32_t min, uint32_t max, uint32_t *out)
{
    double x;
    if (!parse_double(text, min, max, &x) || x != (uint32_t)x)
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
        return parse_u32(text, 1, PRESET_MAX_LAYERS, out);
    return true;
}

static bool parse_seconds(const char *text, double *out)
{
    return parse_double(text, 1e-3, 1e6, out);
}

static bool set_option(struct options *o, enum option_id id, const char *text)
{
    double x;
    switch (id) {
    case OPT_ENDPOINT:
        o->endpoint = text;
        return true;
    case OPT_PRESET:
        o->preset = preset_find(text);
        return o->preset != NULL;
    case OPT_LAYERS:
        return parse_layers(text, &o->n_layers);
    case OPT_DTYPE:
        o->dtype = attn_dtype_parse(text);
        return o->dtype == ATTN_F32 || o->dtype == ATTN_F16 || o->dtype == ATTN_BF16;
    case OPT_KV_DTYPE:
        o->kv_dtype = attn_dtype_parse(text);
        return o->kv_dtype != ATTN_DTYPE_NONE;
    case OPT_BLOCK_TOKENS:
        return parse_u32(text, 8, 256, &o->block_tokens);
    case OPT_WORKERS:
        return parse_u32(text, 1, 1024, &o->n_workers);
    case OPT_SEQUENCES:
        return parse_u32(text, 1, 4096, &o->n_sequences);
    case OPT_CONTEXT:
        return parse_u32(text, 0, 1u << 26, &o->context);
    case OPT_CHUNK:
        return parse_u32(text, 1, 65536, &o->chunk);
    case OPT_PROMPT:
        o->is_prompt_attended = strcmp(text, "attend") == 0;
        return o->is_prompt_attended || strcmp(text, "append") == 0;
    case OPT_STEPS:
        return parse_u32(text, 1, 1u << 26, &o->steps);
    case OPT_DURATION:
        return parse_seconds(text, &o->duration_s);
    case OPT_RATE:
        return parse_double(text, 1e-3, 1e9, &o->rate);
    case OPT_TRACE:
        o->trace = text;
        return true;
    case OPT_SPEED:
        return parse_double(text, 0, 1e9, &o->speed);
    case OPT_LENGTH_SCALE:
        return parse_double(text, 1e-6, 1e3, &o->length_scale);
    case OPT_REQUESTS:
        return parse_u32(text, 1, 1u << 30, &o->n_requests);
    case OPT_VERIFY:
        o->n_verify = DEFAULT_VERIFY;
        return text == NULL || parse_u32(text, 1, 1u << 20, &o->n_verify);
    case OPT_SEED:
        if (!parse_double(text, 0, 9007199254740992.0, &x))
            return false;
        o->seed = (uint64_t)x;
        return true;
    case OPT_TIMEOUT:
        if (!parse_seconds(text, &x))
            return false;
        o->timeout_us = (uint64_t)(x * 1e6);
        return true;
    case OPT_JSON:
        o->is_json = true;
        return true;
    case OPT_HELP:
    case OPT_VERSION:
        break;
    }
    return false;
}

/* What is wrong with the combination, NULL if nothing. */
static const char *check(struct options *o, bool is_prompt_given)
{
    if (o->kv_dtype == ATTN_DTYPE_NONE)
        o->kv_dtype = o->dtype;
    if (o->n_layers == UINT32_MAX)
        o->n_layers = o->preset->num_layers;
    if (o->n_layers > o->preset->num_layers)
        return "--layers: the preset has fewer";
    if (o->trace != NULL && (o->rate > 0 || o->duration_s > 0))
        return "--trace goes without --rate and --duration";
    if (o->trace == NULL && (o->speed != 1 || o->length_scale != 1 || o->n_requests != 0))
        return "--speed, --length-scale and --requests need --trace";
    if (!is_prompt_given)
        o->is_prompt_attended = o->trace != NULL;
    if ((uint64_t)o->context + o->steps > UINT32_MAX / 2)
        return "--context and --steps: too many tokens";
    return NULL;
}

enum options_action options_parse(int argc, char **argv, struct options *o)
{
    struct option longs[N_OPTIONS + 1] = {0};
    bool is_prompt_given = false;
    for (size_t i = 0; i < N_OPTIONS; i++)
        longs[i] = (struct option){table[i].name, table[i].argument, NULL, (int)table[i].id};
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
                          .timeout_us = 60000000,
                          .speed = 1,
                          .length_scale = 1};
    for (int id, index = 0; (id = getopt_long(argc, argv, "", longs, &index)) != -1;) {
        if (id == '?')
            return OPTIONS_EXIT_USAGE;
        if (id == OPT_HELP) {
            print_help();
            return OPTIONS_EXIT_OK;
        }
        if (id == OPT_VERSION) {
            printf("attnload %s\n", attn_version());
            return OPTIONS_EXIT_OK;
        }
        is_prompt_given |= id == OPT_PROMPT;
        if (!set_option(o, (enum option_id)id, optarg)) {
            fprintf(stderr, "attnload: --%s: cannot use \"%s\" (attnload --help)\n",
                    longs[index].name, optarg != NULL ? optarg : "");
            return OPTIONS_EXIT_USAGE;
        }
    }
    const char *bad =
        optind < argc ? "arguments are not understood, only options" : check(o, is_prompt_given);
    if (bad == NULL)
        return OPTIONS_RUN;
    fprintf(stderr, "attnload: %s (attnload --help)\n", bad);
    return OPTIONS_EXIT_USAGE;
}
