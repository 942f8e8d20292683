/* attnbench_options.c: what attnbench is asked for, and what it says of its options. */
#include "kernels/bench/attnbench_options.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "attnbench: times attention of one decode step over a paged KV cache\n"
    "\n"
    "  --backend NAME    cpu, cuda or hip (default cpu)\n"
    "  --grid GRID       paged     16 cells: batch 1, 8, 16, 32 x context 256, 2048 x\n"
    "                              (q heads, kv heads, head_dim) (64,1,256), (64,8,128)\n"
    "                    long      those and 22 more, to 4 GiB of KV, one skewed batch\n"
    "                    variants  every step of the kernel's ladder on three cells\n"
    "                    prompt    42 causal prompts of 512 to 16,384 tokens, and 512 and 2,048\n"
    "                              tokens over 8,192 and 32,768 cached ones\n"
    "                    latent    latent attention (MLA, 576 elements a token, V in K) of 128\n"
    "                              query heads, then 16, to 4 GiB of KV\n"
    "                    dilated   LongNet's attention, fp32 and bf16, as whole sequences, over "
    "the\n"
    "                              heads of a token, and in shards: rows of its own\n"
    "                    cpu       batch 1, 16 x context 4096, 16384 x (32,8,128) (default)\n"
    "                    sweep     whole attention calls over contiguous tensors, 512 to 16,384\n"
    "                              tokens, by rungs: naive, vectorised, fused and tuned\n"
    "                    ladder    all rungs on 64 to 1,024 tokens, then as the attention of a\n"
    "                              small encoder, ten batches of it\n"
    "  --cell Q,KV,DIM,BATCH,CONTEXT\n"
    "                    this cell, no grid: q heads, kv heads, head_dim, sequences, tokens of\n"
    "                    each (512), of all but the first (512+1x131072), or spread evenly over a\n"
    "                    range and mixed (512..8192); may be repeated. DIM 576/512: V is the\n"
    "                    first 512 elements of K\n"
    "  --new N           with --cell: query tokens of each sequence, its last ones (default 1)\n"
    "  --prompts N       with --new: of the first N sequences only, the others decode one token\n"
    "  --shared N        with --cell: all sequences begin with the same N tokens, a multiple of "
    "16;\n"
    "                    cells are measured by the way that computes each for itself, too (apart)\n"
    "  --kv TYPE         with --cell: K and V as bf16 (default), fp8_e4m3, int8, nvfp4 or mxfp4\n"
    "  --match TEXT      only cells whose name contains TEXT, as in 64,8,128,b16,c2048\n"
    "  --csv FILE        also write the rows as CSV\n"
    "  --runs N          timed runs a cell (default 50)\n"
    "  --devices A,B     decode cells on the first of these cards, and split over all of them by "
    "kv\n"
    "                    heads and by tokens: each card's part is timed alone, the slowest counts\n"
    "  --alone           cuda, hip: wait for each run before the next is enqueued; else what is\n"
    "                    submitted meanwhile makes batches take up to 1 us longer, and reads as\n"
    "                    much or more. Builds compare best with it, 'public' without it\n"
    "  --naive-runs N    timed runs of the naive variant, paged grid only (default 5, 0: none)\n"
    "  --threads N       cpu: threads including the caller (default: one a processor)\n"
    "  --memory GIB      KV memory to take (default: what the largest cell needs)\n"
    "  --max-tokens N    sweep, ladder: no lengths above N, a multiple of 64; below 512 the\n"
    "                    encoder has one layer of one head\n"
    "  --rung RUNG       sweep, ladder: this rung only (naive, ..., tuned)\n"
    "  --type TYPE       sweep, ladder: bf16 or f32 only (default: both)\n"
    "\n"
    "What is timed. bf16, blocks of 16 tokens, block tables shuffled over the whole pool, random\n"
    "data, one query token a sequence; nothing is appended. Each run takes the next layer of a\n"
    "pool of at least two layers, so that successive runs read different bytes, and caches are\n"
    "cold: the backend empties them between runs, outside the timed window. That holds a batch:\n"
    "  cpu        on the calling thread, from a batch in host memory to the last output in host\n"
    "             memory: the split plan, waking the threads, attention, the merge\n"
    "  cuda, hip  device time of one graph launch, event to event: the attention kernel with its\n"
    "             merge; plan, block tables and graphs are on the device already\n"
    "Prompts, the sequences' last N tokens, are timed in bursts of 50 ms, each after 0.25 s of\n"
    "rest, for what runs longer heats the device, which then slows down.\n"
    "Figures are medians. 'cold read' is the best plain read of as many bytes by the same backend\n"
    "in the same run, of one place of the KV memory after the other; 'x read' is the batch's time\n"
    "over it. An empty launch (cpu: waking the threads) is printed first. Before it is timed each\n"
    "cell is checked: outputs are poisoned with NaN, two layers are computed, every output must\n"
    "be finite, and a sample of rows (all of them in small cells) is compared with a float64\n"
    "reference; 'rows' says how many of how many. 'public' is the best public kernel's time on\n"
    "one NVIDIA H200, measured the same way; it means something beside times of that card only.\n"
    "\n"
    "sweep and ladder: attention without a mask, as many kv heads as query heads; averages of\n"
    "up to --runs runs (at least 2, up to 1 s), cold caches, bursts as above. 'share' is of a\n"
    "large matrix product's rate in the same run: cuBLAS's where it is found (LD_LIBRARY_PATH),\n"
    "else our own.\n"
    "'scratch' is MiB of scores that a rung holds. Each rung's output is poisoned first, must be\n"
    "finite everywhere, and is compared with float64: sampled rows, all where they are few.\n";

static bool parse_kv(const char *text, attn_dtype *out)
{
    static const attn_dtype types[] = {ATTN_BF16, ATTN_FP8_E4M3, ATTN_INT8, ATTN_NVFP4, ATTN_MXFP4};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(text, attn_dtype_name(types[i])) == 0) {
            *out = types[i];
            return true;
        }
    fprintf(stderr, "attnbench: --kv is '%s', must be bf16, fp8_e4m3, int8, nvfp4 or mxfp4\n",
            text);
    return false;
}

static bool parse_count(const char *name, const char *text, uint32_t min, uint32_t *out)
{
    char *end;
    unsigned long v = strtoul(text, &end, 10);
    if (*end != 0 || end == text || v < min || v > 100000) {
        fprintf(stderr, "attnbench: --%s is '%s', must be a number from %u\n", name, text, min);
        return false;
    }
    *out = (uint32_t)v;
    return true;
}

static bool parse_cell(const char *text, struct case_geometry *g, struct bench_cell *out)
{
    int end = 0, more = 0;
    *g = (struct case_geometry){.name = "given", .block_tokens = BENCH_BLOCK_TOKENS};
    *out = (struct bench_cell){.g = g};
    g->is_v_in_k = sscanf(text, "%5u,%5u,%5u/%5u,%5u,%7u%n", &g->num_q_heads, &g->num_kv_heads,
                          &g->head_dim_k, &g->head_dim_v, &out->batch, &out->context, &end) == 6;
    bool ok =
        (g->is_v_in_k || sscanf(text, "%5u,%5u,%5u,%5u,%7u%n", &g->num_q_heads, &g->num_kv_heads,
                                &g->head_dim_k, &out->batch, &out->context, &end) == 5) &&
        strchr(text, '-') == NULL && g->num_kv_heads > 0 && out->batch > 0 &&
        out->batch <= BENCH_MAX_BATCH && out->context > 0;
    if (!g->is_v_in_k)
        g->head_dim_v = g->head_dim_k;
    if (ok && sscanf(text + end, "..%7u%n", &out->max_context, &more) == 1)
        ok = out->max_context > out->context;
    else if (ok && sscanf(text + end, "+1x%7u%n", &out->first_context, &more) == 1)
        ok = out->first_context > 0;
    ok = ok && text[end + more] == 0;
    if (!ok)
        fprintf(stderr,
                "attnbench: --cell is '%s', must be five numbers from 1: q heads, kv heads, "
                "head_dim (576/512: V is the first 512 elements of K), sequences (up to %d) and "
                "tokens, as 512, 512+1x131072 or 512..8192\n",
                text, BENCH_MAX_BATCH);
    return ok;
}

static bool parse_tokens(const char *text, uint32_t *out)
{
    if (!parse_count("max-tokens", text, 64, out))
        return false;
    if (*out % 64 == 0)
        return true;
    fprintf(stderr, "attnbench: --max-tokens is '%s', must be a multiple of 64\n", text);
    return false;
}

static bool parse_type(const char *text, const char **out)
{
    *out = text;
    if (strcmp(text, "bf16") == 0 || strcmp(text, "f32") == 0)
        return true;
    fprintf(stderr, "attnbench: --type is '%s', must be bf16 or f32\n", text);
    return false;
}

static bool parse_devices(const char *text, struct bench_devices *out)
{
    if (bench_devices_parse(text, out))
        return true;
    fprintf(stderr, "attnbench: --devices is '%s', must be two to %d numbers\n", text,
            BENCH_MAX_DEVICES);
    return false;
}

static bool add_cell(struct bench_request *q, const char *text)
{
    if (q->n_given == BENCH_MAX_GIVEN) {
        fprintf(stderr, "attnbench: more than %d times --cell: '%s'\n", BENCH_MAX_GIVEN, text);
        return false;
    }
    const uint32_t i = q->n_given++;
    return parse_cell(text, &q->geometries[i], &q->given[i]);
}

static bool take_option(struct bench_request *q, int opt, const char *text)
{
    switch (opt) {
    case 'b':
        q->o.backend = text;
        return true;
    case 'g':
        q->grid = text;
        return true;
    case 'm':
        q->match = text;
        return true;
    case 'c':
        q->csv = text;
        return true;
    case 'R':
        q->rung = text;
        return true;
    case 'a':
        return q->o.is_alone = true;
    case 'C':
        return add_cell(q, text);
    case 'N':
        return parse_count("new", text, 1, &q->new_tokens);
    case 'P':
        return parse_count("prompts", text, 1, &q->n_prompts);
    case 'S':
        return parse_count("shared", text, BENCH_BLOCK_TOKENS, &q->shared_tokens);
    case 'k':
        return parse_kv(text, &q->kv_dtype);
    case 'r':
        return parse_count("runs", text, 1, &q->o.runs);
    case 'n':
        return parse_count("naive-runs", text, 0, &q->o.naive_runs);
    case 't':
        return parse_count("threads", text, 1, &q->o.n_threads);
    case 'M':
        return parse_count("memory", text, 1, &q->gib);
    case 'T':
        return parse_tokens(text, &q->max_tokens);
    case 'y':
        return parse_type(text, &q->type);
    case 'D':
        return parse_devices(text, &q->devices);
    default:
        return false;
    }
}

/* Options that do not go together, and the cells' that are given behind them. */
static bool settle(struct bench_request *q)
{
    if (q->n_given > 0 && q->grid != NULL) {
        fprintf(stderr, "attnbench: --cell and --grid exclude each other\n");
        return false;
    }
    if (q->grid == NULL)
        q->grid = q->n_given > 0 ? "cell" : "cpu";
    q->is_tables = strcmp(q->grid, "sweep") == 0 || strcmp(q->grid, "ladder") == 0;
    const char *of_tables = q->type != NULL     ? "type"
                            : q->rung != NULL   ? "rung"
                            : q->max_tokens > 0 ? "max-tokens"
                                                : NULL;
    if (of_tables != NULL && !q->is_tables) {
        fprintf(stderr, "attnbench: --%s is for the grids sweep and ladder\n", of_tables);
        return false;
    }
    for (uint32_t i = 0; i < q->n_given; i++) {
        struct bench_cell *c = &q->given[i];
        c->kv_dtype = q->kv_dtype;
        c->new_tokens = q->new_tokens;
        c->n_prompts = q->new_tokens > 0 ? q->n_prompts : 0;
        if (q->new_tokens > c->context) {
            fprintf(stderr, "attnbench: --new is %u, but a cell has %u tokens\n", q->new_tokens,
                    c->context);
            return false;
        }
        c->shared_tokens = q->shared_tokens;
        if (q->shared_tokens % BENCH_BLOCK_TOKENS != 0 ||
            q->shared_tokens > c->context - bench_new_tokens(c) ||
            (q->shared_tokens > 0 && c->first_context > 0)) {
            fprintf(stderr,
                    "attnbench: --shared is %u, must be a multiple of %d below the tokens of all "
                    "sequences, which are %u\n",
                    q->shared_tokens, BENCH_BLOCK_TOKENS, c->context);
            return false;
        }
    }
    q->o.memory_bytes = (uint64_t)q->gib << 30;
    return true;
}

int bench_request_parse(struct bench_request *q, int argc, char **argv)
{
    static const struct option options[] = {
        {"backend", required_argument, NULL, 'b'},
        {"grid", required_argument, NULL, 'g'},
        {"cell", required_argument, NULL, 'C'},
        {"match", required_argument, NULL, 'm'},
        {"csv", required_argument, NULL, 'c'},
        {"runs", required_argument, NULL, 'r'},
        {"new", required_argument, NULL, 'N'},
        {"prompts", required_argument, NULL, 'P'},
        {"shared", required_argument, NULL, 'S'},
        {"kv", required_argument, NULL, 'k'},
        {"alone", no_argument, NULL, 'a'},
        {"devices", required_argument, NULL, 'D'},
        {"naive-runs", required_argument, NULL, 'n'},
        {"threads", required_argument, NULL, 't'},
        {"memory", required_argument, NULL, 'M'},
        {"max-tokens", required_argument, NULL, 'T'},
        {"rung", required_argument, NULL, 'R'},
        {"type", required_argument, NULL, 'y'},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    *q = (struct bench_request){.o = {.backend = "cpu", .runs = 50, .naive_runs = 5},
                                .kv_dtype = ATTN_DTYPE_NONE};
    int opt;
    while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        if (opt == 'h') {
            fputs(help, stdout);
            return 0;
        }
        if (!take_option(q, opt, optarg))
            return 2;
    }
    q->extra = optind < argc ? argv[optind] : NULL;
    return settle(q) ? -1 : 2;
}
