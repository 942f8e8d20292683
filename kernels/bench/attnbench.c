/* attnbench.c: benchmark of the attention kernels, all backends through the daemon's own vtable.
 * Prints a table and geometric means, writes a CSV if asked. Asserts no speed; exits 1 if an output
 * was wrong, 2 on bad arguments, 69 if the backend cannot be opened.
 */
#include "kernels/bench/attnbench.h"
#include "kernels/bench/tables.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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
    "                    range and mixed (512..8192); may be repeated\n"
    "  --new N           with --cell: query tokens of each sequence, its last ones (default 1)\n"
    "  --prompts N       with --new: of the first N sequences only, the others decode one token\n"
    "  --kv TYPE         with --cell: K and V as bf16 (default), fp8_e4m3 or int8\n"
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

static const char csv_header[] =
    "Timestamp,BatchSize,ContextLen,NumQHeads,NumKVHeads,HeadSize,Naive_Time_us,Custom_Time_us,"
    "Speedup,KV_Bytes,TB_per_s,Cold_Read_us,Share_of_Cold_Read,Max_Abs_Error,Relative_L2_Error,"
    "Allclose_0.01,Rows_Checked,Rows,Empty_Launch_us,Best_Public_us,First_ContextLen,Min_us,"
    "Backend,"
    "Variant,Max_ContextLen,Is_Alone,New_Tokens,TFLOP_per_s\n";

enum { MAX_GIVEN = 64 }; /* cells by --cell */

struct program {
    struct bench bench;
    const char *grid, *match;
    FILE *csv;
    double empty_us;
    bool is_wrong, has_prompts;
};

/* One cell's line; naive_us 0: not measured. */
struct row {
    const struct bench_cell *cell;
    const char *variant;
    double us, min_us, naive_us, read_us;
    struct bench_error error;
    bool is_supported;
};

void bench_cell_name(const struct bench_cell *c, char *out, size_t bytes)
{
    snprintf(out, bytes, "%u,%u,%u,b%u,c%u", c->g->num_q_heads, c->g->num_kv_heads,
             c->g->head_dim_k, c->batch, c->context);
    if (c->max_context > 0)
        snprintf(out + strlen(out), bytes - strlen(out), "..%u", c->max_context);
    if (c->first_context > 0)
        snprintf(out + strlen(out), bytes - strlen(out), "+1x%u", c->first_context);
    if (c->new_tokens > 0)
        snprintf(out + strlen(out), bytes - strlen(out), ",n%u", c->new_tokens);
    if (c->n_prompts > 0)
        snprintf(out + strlen(out), bytes - strlen(out), "x%u", c->n_prompts);
    if (c->kv_dtype != ATTN_DTYPE_NONE)
        snprintf(out + strlen(out), bytes - strlen(out), ",%s", attn_dtype_name(c->kv_dtype));
}

static void print_header(const struct program *p)
{
    struct backend_info info;
    p->bench.ops->info(p->bench.b, &info);
    printf("%s: %s, %u processors; empty launch %.1f us; medians of %u runs%s, cold caches\n\n",
           info.name, info.device, info.n_processors, p->empty_us, p->bench.options.runs,
           p->bench.options.is_alone ? ", each alone" : "");
    if (p->has_prompts)
        printf("%-30s %10s %10s %8s %10s %9s %9s %9s %-12s\n", "q,kv,dim,batch,context,new", "us",
               "least us", "TFLOP/s", "public", "us/public", "max abs", "rel L2", "rows");
    else
        printf("%-26s %-11s %11s %10s %10s %7s %8s %8s %9s %9s %-12s\n", "q,kv,dim,batch,context",
               "variant", "KV bytes", "us", "cold read", "x read", "GB/s", "public", "max abs",
               "rel L2", "rows");
}

static void print_prompt(const struct row *r)
{
    char name[64], rows[48], public_us[32] = "-", over[32] = "-";
    bench_cell_name(r->cell, name, sizeof name);
    if (r->cell->best_public_us > 0) {
        snprintf(public_us, sizeof public_us, "%.1f", (double)r->cell->best_public_us);
        snprintf(over, sizeof over, "%.3f", r->us / (double)r->cell->best_public_us);
    }
    snprintf(rows, sizeof rows, "%llu/%llu", (unsigned long long)r->error.n_rows_checked,
             (unsigned long long)r->error.n_rows);
    printf("%-30s %10.2f %10.2f %8.1f %10s %9s %9.1e %9.1e %-12s%s\n", name, r->us, r->min_us,
           bench_flops(r->cell) / r->us / 1e6, public_us, over, r->error.max_abs, r->error.l2, rows,
           r->error.is_allclose ? "" : " WRONG");
    fflush(stdout);
}

static void print_row(const struct program *p, const struct row *r)
{
    char name[64], rows[48], public_us[16] = "-";
    if (p->has_prompts && r->is_supported) {
        print_prompt(r);
        return;
    }
    bench_cell_name(r->cell, name, sizeof name);
    if (!r->is_supported) {
        printf("%-26s %-11s not for this geometry or device\n", name, r->variant);
        return;
    }
    snprintf(rows, sizeof rows, "%llu/%llu", (unsigned long long)r->error.n_rows_checked,
             (unsigned long long)r->error.n_rows);
    if (r->cell->best_public_us > 0 && strcmp(p->grid, "cpu") != 0)
        snprintf(public_us, sizeof public_us, "%.1f", (double)r->cell->best_public_us);
    double bytes = (double)bench_kv_bytes(r->cell);
    printf("%-26s %-11s %11.0f %10.2f %10.2f %7.3f %8.1f %8s %9.1e %9.1e %-12s%s", name, r->variant,
           bytes, r->us, r->read_us, r->us / r->read_us, bytes / r->us / 1e3, public_us,
           r->error.max_abs, r->error.l2, rows, r->error.is_allclose ? "" : " WRONG");
    if (r->naive_us > 0)
        printf(" naive %.1f us, %.1fx", r->naive_us, r->naive_us / r->us);
    printf("\n");
    fflush(stdout);
}

static void write_csv(const struct program *p, const struct row *r)
{
    const struct bench_cell *c = r->cell;
    char when[32], naive[48] = ",", public_us[16] = "";
    time_t now = time(NULL);
    struct tm tm;
    if (p->csv == NULL || !r->is_supported)
        return;
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    if (c->best_public_us > 0)
        snprintf(public_us, sizeof public_us, "%.1f", (double)c->best_public_us);
    double bytes = (double)bench_kv_bytes(c);
    fprintf(p->csv, "%s,%u,%u,%u,%u,%u,", when, c->batch, c->context, c->g->num_q_heads,
            c->g->num_kv_heads, c->g->head_dim_k);
    if (r->naive_us > 0)
        snprintf(naive, sizeof naive, "%.3f,", r->naive_us);
    fprintf(p->csv, "%s%.3f,", naive, r->us);
    if (r->naive_us > 0)
        fprintf(p->csv, "%.3f", r->naive_us / r->us);
    fprintf(
        p->csv, ",%.0f,%.4f,%.3f,%.4f,%.3e,%.3e,%s,%llu,%llu,%.3f,%s,%u,%.3f,%s,%s,%u,%s,%u,%.2f\n",
        bytes, bytes / r->us / 1e6, r->read_us, r->read_us / r->us, r->error.max_abs, r->error.l2,
        r->error.is_allclose ? "true" : "false", (unsigned long long)r->error.n_rows_checked,
        (unsigned long long)r->error.n_rows, p->empty_us, public_us, bench_context(c, 0), r->min_us,
        p->bench.ops->name, r->variant, c->max_context ? c->max_context : c->context,
        p->bench.options.is_alone ? "true" : "false", bench_new_tokens(c),
        bench_flops(c) / r->us / 1e6);
    fflush(p->csv);
}

static bool measure(struct program *p, struct bench_setup *s, const char *variant, double read_us,
                    uint32_t naive_runs, struct row *r)
{
    struct bench *x = &p->bench;
    struct bench_times t;
    bool has_naive;
    *r = (struct row){.cell = s->cell, .variant = variant ? variant : "full", .read_us = read_us};
    /* timing one run first says whether the variant knows the geometry */
    if (!bench_time(x, s, variant, 1, &t, &r->is_supported))
        return false;
    if (!r->is_supported)
        return true;
    if (!bench_check(x, s, variant, &r->error))
        return false;
    uint32_t runs = variant && strcmp(variant, "naive") == 0 && x->options.naive_runs > 0
                        ? x->options.naive_runs
                        : x->options.runs;
    if (!bench_time(x, s, variant, runs, &t, &r->is_supported))
        return false;
    r->us = t.median_us;
    r->min_us = t.min_us;
    if (naive_runs > 0) {
        if (!bench_time(x, s, "naive", naive_runs, &t, &has_naive))
            return false;
        r->naive_us = has_naive ? t.median_us : 0;
    }
    p->is_wrong = p->is_wrong || !r->error.is_allclose;
    return true;
}

/* Measures one cell and keeps the full kernel's row in *out. */
static bool run_cell(struct program *p, const struct bench_cell *c, struct row *out)
{
    struct bench *x = &p->bench;
    struct bench_setup s;
    struct bench_times read = {0};
    bool ok = bench_setup_open(x, c, &s) &&
              (c->new_tokens > 0 || bench_time_read(x, bench_kv_bytes(c), &read));
    bool is_ladder = strcmp(p->grid, "variants") == 0;
    for (uint32_t i = 0; ok && is_ladder && x->own->variants[i] != NULL; i++) {
        struct row r;
        ok = measure(p, &s, x->own->variants[i], read.median_us, 0, &r);
        if (ok) {
            print_row(p, &r);
            write_csv(p, &r);
        }
    }
    if (ok) {
        uint32_t naive_runs = strcmp(p->grid, "paged") == 0 ? x->options.naive_runs : 0;
        ok = measure(p, &s, NULL, read.median_us, naive_runs, out);
        if (ok) {
            print_row(p, out);
            write_csv(p, out);
        }
    }
    bench_setup_close(x, &s);
    return ok;
}

static bool is_any(const struct bench_cell *c, uint32_t index)
{
    (void)c, (void)index;
    return true;
}

static bool is_paged(const struct bench_cell *c, uint32_t index)
{
    (void)c;
    return index < BENCH_PAGED_CELLS;
}

static bool is_large(const struct bench_cell *c, uint32_t index)
{
    (void)index;
    return bench_kv_bytes(c) >= (uint64_t)128 << 20;
}

static bool is_one_kv_head(const struct bench_cell *c, uint32_t index)
{
    (void)index;
    return c->g->num_q_heads == 64 && c->g->num_kv_heads == 1 && c->g->head_dim_k == 256;
}

static void print_means(const struct program *p, const struct row *rows, uint32_t n)
{
    static const struct {
        const char *name;
        bool (*has)(const struct bench_cell *c, uint32_t index);
    } groups[] = {
        {"all", is_any},
        {"the 16 paged", is_paged},
        {"128 MiB and more", is_large},
        {"(64,1,256)", is_one_kv_head},
    };
    bool is_paged_table = strcmp(p->grid, "paged") == 0 || strcmp(p->grid, "long") == 0;
    printf("\ngeometric means of time over cold read:\n");
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
        double ours = 0, public = 0;
        uint32_t count = 0, n_public = 0;
        for (uint32_t i = 0; i < n; i++) {
            const struct row *r = &rows[i];
            if (r->cell == NULL || !r->is_supported || !groups[g].has(r->cell, i) ||
                (groups[g].has == is_paged && !is_paged_table))
                continue;
            ours += log(r->us / r->read_us);
            count++;
            if (r->cell->best_public_us > 0) {
                public += log((double)r->cell->best_public_us / r->us);
                n_public++;
            }
        }
        if (count == 0)
            continue;
        printf("  %-18s %3u cells  %.3f", groups[g].name, count, exp(ours / count));
        if (n_public == count && strcmp(p->bench.ops->name, "cuda") == 0)
            printf("   best public kernel on an H200 over ours: %.3f", exp(public / n_public));
        printf("\n");
    }
}

static int run_grid(struct program *p, const struct bench_cell *cells, uint32_t n)
{
    char name[64];
    struct row *rows = calloc(n, sizeof *rows);
    struct bench_times empty;
    bool ok = rows != NULL && bench_time_read(&p->bench, 0, &empty);
    if (ok) {
        p->empty_us = empty.median_us;
        print_header(p);
        if (p->csv != NULL)
            fputs(csv_header, p->csv);
    }
    for (uint32_t i = 0; ok && i < n; i++) {
        bench_cell_name(&cells[i], name, sizeof name);
        if (p->match == NULL || strstr(name, p->match) != NULL)
            ok = run_cell(p, &cells[i], &rows[i]);
    }
    if (ok && !p->has_prompts)
        print_means(p, rows, n);
    else if (!ok)
        fprintf(stderr, "attnbench: %s\n", p->bench.error);
    free(rows);
    return ok && !p->is_wrong ? 0 : 1;
}

static int run_tables(const struct tables_options *o, const char *grid)
{
    struct tables t;
    int rc = 69;
    bool has_rung = false, is_open = tables_open(&t, o);
    for (uint32_t i = 0; is_open && i < TABLE_RUNGS; i++)
        has_rung |= table_has_rung(&t, i);
    if (is_open && !has_rung) {
        fprintf(stderr, "attnbench: no rung is called '%s' here\n", o->rung);
        rc = 2;
    } else if (is_open) {
        bool ok =
            strcmp(grid, "sweep") == 0 ? tables_sweep(&t) : tables_ladder(&t) && tables_encoder(&t);
        rc = ok && !t.is_wrong ? 0 : 1;
        if (!ok)
            fprintf(stderr, "attnbench: %s\n", t.error);
    } else {
        fprintf(stderr, "attnbench: %s\n", t.error);
    }
    tables_close(&t);
    return rc;
}

static bool parse_kv(const char *text, attn_dtype *out)
{
    static const attn_dtype types[] = {ATTN_BF16, ATTN_FP8_E4M3, ATTN_INT8};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(text, attn_dtype_name(types[i])) == 0) {
            *out = types[i];
            return true;
        }
    fprintf(stderr, "attnbench: --kv is '%s', must be bf16, fp8_e4m3 or int8\n", text);
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
    bool ok = sscanf(text, "%5u,%5u,%5u,%5u,%7u%n", &g->num_q_heads, &g->num_kv_heads,
                     &g->head_dim_k, &out->batch, &out->context, &end) == 5 &&
              strchr(text, '-') == NULL && g->num_kv_heads > 0 && out->batch > 0 &&
              out->batch <= BENCH_MAX_BATCH && out->context > 0;
    g->head_dim_v = g->head_dim_k;
    if (ok && sscanf(text + end, "..%7u%n", &out->max_context, &more) == 1)
        ok = out->max_context > out->context;
    else if (ok && sscanf(text + end, "+1x%7u%n", &out->first_context, &more) == 1)
        ok = out->first_context > 0;
    ok = ok && text[end + more] == 0;
    if (!ok)
        fprintf(stderr,
                "attnbench: --cell is '%s', must be five numbers from 1: q heads, kv heads, "
                "head_dim, sequences (up to %d) and tokens, as 512, 512+1x131072 or 512..8192\n",
                text, BENCH_MAX_BATCH);
    return ok;
}

/* path NULL: none is asked for. */
static bool open_csv(const char *path, FILE **out_f)
{
    *out_f = path != NULL ? fopen(path, "w") : NULL;
    if (path == NULL || *out_f != NULL)
        return true;
    perror(path);
    return false;
}

/* Gives rc, or 1 if what was written is not there. */
static int close_csv(FILE *f, const char *path, int rc)
{
    if (f == NULL || fclose(f) == 0)
        return rc;
    perror(path);
    return 1;
}

int main(int argc, char **argv)
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
    struct program p = {0};
    struct bench_options o = {.backend = "cpu", .runs = 50, .naive_runs = 5};
    const char *csv = NULL;
    struct bench_cell given[MAX_GIVEN];
    struct case_geometry geometries[MAX_GIVEN];
    struct bench_cards cards = {0};
    const char *type = NULL, *rung = NULL;
    attn_dtype kv_dtype = ATTN_DTYPE_NONE;
    uint32_t gib = 0, new_tokens = 0, n_prompts = 0, n_given = 0, max_tokens = 0, n_cells;
    int opt;
    while ((opt = getopt_long(argc, argv, "h", options, NULL)) != -1) {
        bool ok = true;
        switch (opt) {
        case 'b':
            o.backend = optarg;
            break;
        case 'g':
            p.grid = optarg;
            break;
        case 'C':
            if (n_given == MAX_GIVEN) {
                fprintf(stderr, "attnbench: more than %d times --cell: '%s'\n", MAX_GIVEN, optarg);
                return 2;
            }
            ok = parse_cell(optarg, &geometries[n_given], &given[n_given]);
            n_given++;
            break;
        case 'N':
            ok = parse_count("new", optarg, 1, &new_tokens);
            break;
        case 'P':
            ok = parse_count("prompts", optarg, 1, &n_prompts);
            break;
        case 'k':
            ok = parse_kv(optarg, &kv_dtype);
            break;
        case 'm':
            p.match = optarg;
            break;
        case 'c':
            csv = optarg;
            break;
        case 'r':
            ok = parse_count("runs", optarg, 1, &o.runs);
            break;
        case 'a':
            o.is_alone = true;
            break;
        case 'D':
            ok = bench_cards_parse(optarg, &cards);
            if (!ok)
                fprintf(stderr, "attnbench: --devices is '%s', must be two to %d numbers\n", optarg,
                        BENCH_MAX_CARDS);
            break;
        case 'n':
            ok = parse_count("naive-runs", optarg, 0, &o.naive_runs);
            break;
        case 't':
            ok = parse_count("threads", optarg, 1, &o.n_threads);
            break;
        case 'M':
            ok = parse_count("memory", optarg, 1, &gib);
            break;
        case 'T':
            ok = parse_count("max-tokens", optarg, 64, &max_tokens) && max_tokens % 64 == 0;
            if (!ok)
                fprintf(stderr, "attnbench: --max-tokens is '%s', must be a multiple of 64\n",
                        optarg);
            break;
        case 'R':
            rung = optarg;
            break;
        case 'y':
            type = optarg;
            ok = strcmp(type, "bf16") == 0 || strcmp(type, "f32") == 0;
            if (!ok)
                fprintf(stderr, "attnbench: --type is '%s', must be bf16 or f32\n", type);
            break;
        case 'h':
            fputs(help, stdout);
            return 0;
        default:
            ok = false;
        }
        if (!ok)
            return 2;
    }
    if (n_given > 0 && p.grid != NULL) {
        fprintf(stderr, "attnbench: --cell and --grid exclude each other\n");
        return 2;
    }
    if (p.grid == NULL)
        p.grid = n_given > 0 ? "cell" : "cpu";
    const bool is_tables = strcmp(p.grid, "sweep") == 0 || strcmp(p.grid, "ladder") == 0;
    if ((type != NULL || rung != NULL || max_tokens > 0) && !is_tables) {
        fprintf(stderr, "attnbench: --%s is for the grids sweep and ladder\n",
                type != NULL   ? "type"
                : rung != NULL ? "rung"
                               : "max-tokens");
        return 2;
    }
    if (is_tables) {
        if (!open_csv(csv, &p.csv))
            return 2;
        const struct tables_options to = {.backend = o.backend,
                                          .match = p.match,
                                          .rung = rung,
                                          .runs = o.runs,
                                          .n_threads = o.n_threads,
                                          .max_tokens = max_tokens,
                                          .has_bf16 = type == NULL || type[0] == 'b',
                                          .has_f32 = type == NULL || type[0] == 'f',
                                          .csv = p.csv};
        return close_csv(p.csv, csv, run_tables(&to, p.grid));
    }
    if (strcmp(p.grid, "dilated") == 0 && optind == argc) {
        if (!open_csv(csv, &p.csv))
            return 2;
        return close_csv(p.csv, csv, bench_dilated(&o, p.match, p.csv));
    }
    n_cells = n_given;
    const struct bench_cell *cells = n_given > 0 ? given : bench_cells(p.grid, &n_cells);
    if (cells == NULL || optind < argc) {
        fprintf(stderr, "attnbench: %s '%s' (--help)\n", cells ? "what is" : "no grid is called",
                cells ? argv[optind] : p.grid);
        return 2;
    }
    for (uint32_t i = 0; i < n_given; i++)
        given[i].kv_dtype = kv_dtype;
    for (uint32_t i = 0; new_tokens > 0 && i < n_given; i++) {
        given[i].new_tokens = new_tokens;
        given[i].n_prompts = n_prompts;
        if (new_tokens > given[i].context) {
            fprintf(stderr, "attnbench: --new is %u, but a cell has %u tokens\n", new_tokens,
                    given[i].context);
            return 2;
        }
    }
    p.has_prompts = cells[0].new_tokens > 0;
    uint64_t largest = 0;
    for (uint32_t i = 0; i < n_cells; i++) {
        char name[64];
        bench_cell_name(&cells[i], name, sizeof name);
        if (p.match != NULL && strstr(name, p.match) == NULL)
            continue;
        largest = bench_setup_bytes(&cells[i]) > largest ? bench_setup_bytes(&cells[i]) : largest;
        uint32_t tokens = cells[i].batch * bench_new_tokens(&cells[i]);
        o.max_tokens = tokens > o.max_tokens ? tokens : o.max_tokens;
    }
    if (largest == 0) {
        fprintf(stderr, "attnbench: no cell matches '%s'\n", p.match);
        return 2;
    }
    o.memory_bytes = (uint64_t)gib << 30;
    if (cards.n > 0 && (p.has_prompts || p.match != NULL || csv != NULL)) {
        fprintf(stderr, "attnbench: --devices is for decode cells, without --match and --csv\n");
        return 2;
    }
    if (cards.n > 0)
        return bench_cards(&o, &cards, cells, n_cells);
    if (!open_csv(csv, &p.csv))
        return 2;
    int rc = 69;
    if (bench_open(&p.bench, &o, largest))
        rc = run_grid(&p, cells, n_cells);
    else
        fprintf(stderr, "attnbench: %s\n", p.bench.error);
    bench_close(&p.bench);
    return close_csv(p.csv, csv, rc);
}
