/* attnbench.c: benchmark of the attention kernels, all backends through the daemon's own vtable.
 * Prints a table and geometric means, writes a CSV if asked. Asserts no speed; exits 1 if an output
 * was wrong, 2 on bad arguments, 69 if the backend cannot be opened.
 */
#include "kernels/bench/attnbench_options.h"
#include "kernels/bench/tables.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char csv_header[] =
    "Timestamp,BatchSize,ContextLen,NumQHeads,NumKVHeads,HeadSize,Naive_Time_us,Custom_Time_us,"
    "Speedup,KV_Bytes,TB_per_s,Cold_Read_us,Share_of_Cold_Read,Max_Abs_Error,Relative_L2_Error,"
    "Allclose_0.01,Rows_Checked,Rows,Empty_Launch_us,Best_Public_us,First_ContextLen,Min_us,"
    "Backend,"
    "Variant,Max_ContextLen,Is_Alone,New_Tokens,TFLOP_per_s\n";

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
    if (ok && c->shared_tokens > 0) {
        struct row r;
        ok = measure(p, &s, "apart", read.median_us, 0, &r);
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

static int run_tables_of(const struct bench_request *q, FILE *csv)
{
    const struct tables_options to = {.backend = q->o.backend,
                                      .match = q->match,
                                      .rung = q->rung,
                                      .runs = q->o.runs,
                                      .n_threads = q->o.n_threads,
                                      .max_tokens = q->max_tokens,
                                      .has_bf16 = q->type == NULL || q->type[0] == 'b',
                                      .has_f32 = q->type == NULL || q->type[0] == 'f',
                                      .csv = csv};
    return run_tables(&to, q->grid);
}

/* Bytes of the largest cell that matches, 0 if none does; o learns how many tokens a batch has. */
static uint64_t largest_of(struct bench_request *q, const struct bench_cell *cells, uint32_t n)
{
    uint64_t largest = 0;
    for (uint32_t i = 0; i < n; i++) {
        char name[64];
        bench_cell_name(&cells[i], name, sizeof name);
        if (q->match != NULL && strstr(name, q->match) == NULL)
            continue;
        const uint64_t bytes = bench_setup_bytes(&cells[i]);
        const uint32_t tokens = cells[i].batch * bench_new_tokens(&cells[i]);
        largest = bytes > largest ? bytes : largest;
        q->o.max_tokens = tokens > q->o.max_tokens ? tokens : q->o.max_tokens;
    }
    if (largest == 0)
        fprintf(stderr, "attnbench: no cell matches '%s'\n", q->match);
    return largest;
}

static int run_cells(struct bench_request *q, const struct bench_cell *cells, uint32_t n)
{
    struct program p = {.grid = q->grid, .match = q->match, .has_prompts = cells[0].new_tokens > 0};
    const uint64_t largest = largest_of(q, cells, n);
    if (largest == 0)
        return 2;
    if (q->devices.n > 0 && (p.has_prompts || q->match != NULL || q->csv != NULL)) {
        fprintf(stderr, "attnbench: --devices is for decode cells, without --match and --csv\n");
        return 2;
    }
    if (q->devices.n > 0)
        return bench_devices(&q->o, &q->devices, cells, n);
    if (!open_csv(q->csv, &p.csv))
        return 2;
    int rc = 69;
    if (bench_open(&p.bench, &q->o, largest))
        rc = run_grid(&p, cells, n);
    else
        fprintf(stderr, "attnbench: %s\n", p.bench.error);
    bench_close(&p.bench);
    return close_csv(p.csv, q->csv, rc);
}

int main(int argc, char **argv)
{
    static struct bench_request q;
    int rc = bench_request_parse(&q, argc, argv);
    if (rc >= 0)
        return rc;
    const bool is_dilated = strcmp(q.grid, "dilated") == 0;
    uint32_t n_cells = q.n_given;
    const struct bench_cell *cells = n_cells > 0 ? q.given : bench_cells(q.grid, &n_cells);
    if ((cells == NULL && !q.is_tables && !is_dilated) || q.extra != NULL) {
        fprintf(stderr, "attnbench: %s '%s' (--help)\n",
                q.extra != NULL ? "what is" : "no grid is called",
                q.extra != NULL ? q.extra : q.grid);
        return 2;
    }
    if (!q.is_tables && !is_dilated)
        return run_cells(&q, cells, n_cells);
    FILE *csv;
    if (!open_csv(q.csv, &csv))
        return 2;
    rc = q.is_tables ? run_tables_of(&q, csv) : bench_dilated(&q.o, q.match, csv);
    return close_csv(csv, q.csv, rc);
}
