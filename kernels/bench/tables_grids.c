/* tables_grids.c: the grids `sweep` and `ladder`. */
#include "kernels/bench/tables.h"

#include <string.h>
#include <time.h>

static const char csv_header[] =
    "Kernel,Tier,Q_N,K_N,head_dim,heads,batch,avg_ms,std_ms,min_ms,TFLOP_per_s,Share_of_matmul,"
    "Relative_L2_error,Max_abs_error,Rows_checked,Rows,Type,Runs,Scratch_MiB,Backend,Device,"
    "Matmul,Matmul_TFLOP_per_s,Streams,Attention_share,Timestamp\n";

/* The names under which the forward sweep is asked for, and our rungs of these names. */
struct tier {
    const char *kernel;
    uint32_t rung;
};

static const struct tier sweep_tiers[] = {
    {"scaled_dot_prod_attention", RUNG_NAIVE},
    {"vectorized", RUNG_VECTORISED},
    {"compiled", RUNG_MATRIX},
    {"flash", RUNG_TUNED},
};
static const struct tier ladder_tiers[] = {
    {"naive", RUNG_NAIVE}, {"vectorised", RUNG_VECTORISED}, {"shared", RUNG_SHARED},
    {"warp", RUNG_WARP},   {"matrix", RUNG_MATRIX},         {"tuned", RUNG_TUNED},
};

struct shape {
    uint32_t batch, heads, dim;
};
static const struct shape sweep_shapes[] = {{1, 12, 64}, {8, 12, 64}, {1, 12, 128}, {2, 24, 256}};
static const struct shape ladder_shapes[] = {{2, 12, 64}};

struct grid {
    const struct tier *tiers;
    uint32_t n_tiers;
    const struct shape *shapes;
    uint32_t n_shapes, least_tokens, most_tokens; /* lengths double */
    bool is_ladder;
};

static void name_of(const struct table_cell *c, char *out, size_t bytes)
{
    snprintf(out, bytes, "n%u,d%u,h%u,b%u,%s", c->n, c->dim, c->heads, c->batch,
             c->is_f32 ? "f32" : "bf16");
}

static void print_row(const struct tables *t, const struct grid *g, const struct tier *tier,
                      const struct table_cell *c, const struct table_result *x)
{
    char name[64], rows[48];
    const char *rung = table_rung_name(t, tier->rung), *wrong = x->is_right ? "" : " WRONG";
    name_of(c, name, sizeof name);
    snprintf(rows, sizeof rows, "%llu/%llu", (unsigned long long)x->rows_checked,
             (unsigned long long)x->rows);
    if (g->is_ladder)
        printf("[BENCH] %-10s %-24s %10.5f avg ms/call  least %.5f  %7.2f TFLOP/s  rel L2 %.1e  "
               "rows %s%s\n",
               rung, name, x->avg_ms, x->min_ms, x->tflops, x->l2, rows, wrong);
    else
        printf("%-26s %-10s %-26s %11.4f %9.4f %11.4f %8.2f %6.3f %9.1e %8.1f %-14s%s\n",
               tier->kernel, rung, name, x->avg_ms, x->std_ms, x->min_ms, x->tflops,
               x->tflops / t->matmul_tflops[c->is_f32], x->l2, (double)x->scratch_bytes / (1 << 20),
               rows, wrong);
    fflush(stdout);
}

static void table_write_header(const struct tables *t)
{
    if (t->options.csv != NULL)
        fputs(csv_header, t->options.csv);
}

void table_write(const struct tables *t, const char *kernel, uint32_t rung,
                 const struct table_cell *c, const struct table_result *x)
{
    char when[32];
    const time_t now = time(NULL);
    const double rate = t->matmul_tflops[c->is_f32];
    struct tm tm;
    if (t->options.csv == NULL)
        return;
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    fprintf(t->options.csv,
            "%s,%s,%u,%u,%u,%u,%u,%.6f,%.6f,%.6f,%.4f,%.5f,%.3e,%.3e,%llu,%llu,%s,%u,%.2f,%s,"
            "\"%s\",%s,%.2f,%u,%.4f,%s\n",
            kernel, table_rung_name(t, rung), c->n, c->n, c->dim, c->heads, c->batch, x->avg_ms,
            x->std_ms, x->min_ms, x->tflops, x->tflops / rate, x->l2, x->max_abs,
            (unsigned long long)x->rows_checked, (unsigned long long)x->rows,
            c->is_f32 ? "f32" : "bf16", x->runs, (double)x->scratch_bytes / (1 << 20), t->ops->name,
            t->device, t->ops->matmul_name(t->r), rate, x->streams, x->attention_share, when);
    fflush(t->options.csv);
}

static bool run_cell(struct tables *t, const struct grid *g, const struct table_cell *c)
{
    struct table_setup s;
    bool ok = table_setup_open(t, c, &s);
    for (uint32_t i = 0; ok && i < g->n_tiers; i++) {
        struct table_result x;
        if (!table_has_rung(t, g->tiers[i].rung))
            continue;
        ok = table_measure(t, &s, g->tiers[i].rung, &x);
        if (ok) {
            print_row(t, g, &g->tiers[i], c, &x);
            table_write(t, g->tiers[i].kernel, g->tiers[i].rung, c, &x);
        }
    }
    table_setup_close(t, &s);
    return ok;
}

static void print_header(const struct tables *t, const struct grid *g)
{
    printf("%s: %s; full attention, cold caches, averages of up to %u runs in bursts after rest\n",
           t->ops->name, t->device, t->options.runs);
    for (int is_f32 = 0; is_f32 < 2; is_f32++)
        if (is_f32 ? t->options.has_f32 : t->options.has_bf16)
            printf("matrix product of %u^3, %s, %s: %.2f TFLOP/s\n", t->ops->matmul_size(t->r),
                   is_f32 ? "f32" : "bf16", t->ops->matmul_name(t->r), t->matmul_tflops[is_f32]);
    printf("\n");
    if (!g->is_ladder)
        printf("%-26s %-10s %-26s %11s %9s %11s %8s %6s %9s %8s %-14s\n", "kernel", "rung",
               "tokens,dim,heads,batch", "avg ms", "std ms", "least ms", "TFLOP/s", "share",
               "rel L2", "scratch", "rows checked");
    table_write_header(t);
}

static bool run_grid(struct tables *t, const struct grid *g)
{
    const uint32_t most = t->options.max_tokens ? t->options.max_tokens : g->most_tokens;
    const uint32_t least = most < g->least_tokens ? most : g->least_tokens;
    bool ok = true;
    print_header(t, g);
    for (uint32_t i = 0; ok && i < g->n_shapes; i++)
        for (uint32_t n = least; ok && n <= most && n <= g->most_tokens; n *= 2)
            for (int is_f32 = 0; ok && is_f32 < 2; is_f32++) {
                const struct shape *s = &g->shapes[i];
                const struct table_cell c = {s->batch, s->heads, s->dim, n, is_f32};
                char name[64];
                name_of(&c, name, sizeof name);
                if (!(is_f32 ? t->options.has_f32 : t->options.has_bf16) ||
                    (t->options.match != NULL && strstr(name, t->options.match) == NULL))
                    continue;
                ok = run_cell(t, g, &c);
            }
    return ok;
}

bool tables_sweep(struct tables *t)
{
    const struct grid g = {sweep_tiers, 4, sweep_shapes, 4, 512, 16384, false};
    return run_grid(t, &g);
}

bool tables_ladder(struct tables *t)
{
    const struct grid g = {ladder_tiers, 6, ladder_shapes, 1, 64, 1024, true};
    return run_grid(t, &g);
}
