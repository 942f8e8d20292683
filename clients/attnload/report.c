/* report.c: prints a run's results. Times are in microseconds for people, in seconds in JSON and
 * CSV. */
#include "clients/attnload/report.h"
#include "clients/attnload/compare.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double shares[] = {0.5, 0.9, 0.99, 0.999, 1};
static const char *const share_names[] = {"p50", "p90", "p99", "p99.9", "max"};
#define N_SHARES (sizeof shares / sizeof shares[0])
#define LATE_NS 1000000u
#define MAX_LATE_SHARE 0.01
#define FIRST_REFUSED 0.99

static const struct line {
    const char *name, *text;
    bool is_planned; /* counts from a plan that may not have been kept */
} lines[TALLY_N_TIMES] = {
    [TIME_TOTAL] = {"total", "step, as the worker sees it", true},
    [TIME_QUEUE] = {"queue", "waiting in the daemon", false},
    [TIME_DEVICE] = {"device", "of the batch on the device", false},
    [TIME_ADDED] = {"added", "total without device", true},
    [TIME_TOKEN] = {"token", "all layers, from due to done", true},
    [TIME_TTFT] = {"ttft", "arrival to the prompt's end", true},
    [TIME_LATE] = {"late", "from planned to sent", false},
};

double report_late_share(const struct report *r)
{
    const struct tally *t = &r->tally;
    const struct histogram *late = &t->times[TIME_LATE];
    double n_late = (double)late->n * histogram_share_from(late, LATE_NS) + (double)t->n_unsent;
    double n = (double)late->n + (double)t->n_unsent;
    return n > 0 ? n_late / n : 0;
}

/* What the slowest took says then more of the load generator than of the daemon. */
bool report_is_late(const struct report *r, double share)
{
    return share >= FIRST_REFUSED && report_late_share(r) > MAX_LATE_SHARE;
}

static bool is_refused(const struct report *r, size_t line, double share)
{
    return lines[line].is_planned && report_is_late(r, share);
}

static double per_second(double n, double s)
{
    return s > 0 ? n / s : 0;
}

/* What share of the chosen blocks was on the device. */
static double hit_ratio(const struct report *r)
{
    return r->n_chosen_here / (r->n_chosen_here + r->n_chosen_away);
}

/* Tokens made: a token is an item in every layer. */
static double n_tokens_of(const struct report *r)
{
    return (double)r->tally.n_items / r->o->n_layers;
}

static const char *mode_of(const struct options *o)
{
    return o->trace != NULL ? "trace" : o->rate > 0 ? "open loop" : "closed loop";
}

static void print_times(const struct report *r)
{
    const struct histogram *times = r->tally.times;
    printf("time, us ");
    for (size_t j = 0; j < N_SHARES; j++)
        printf(" %10s", share_names[j]);
    putchar('\n');
    for (size_t i = 0; i < TALLY_N_TIMES; i++) {
        if (times[i].n == 0)
            continue;
        printf("  %-7s", lines[i].name);
        for (size_t j = 0; j < N_SHARES; j++) {
            if (is_refused(r, i, shares[j]))
                printf(" %10s", "n/a");
            else
                printf(" %10.1f", (double)histogram_percentile(&times[i], shares[j]) * 1e-3);
        }
        printf("  %s\n", lines[i].text);
    }
}

bool report_is_good(const struct report *r)
{
    bool is_checked = r->o->n_verify == 0 || r->verified.n_verified > 0;
    return r->failure[0] == '\0' && r->verified.n_mismatched == 0 && is_checked;
}

static void print_text(const struct report *r)
{
    const struct options *o = r->o;
    const struct tally *t = &r->tally;
    printf("load      %s, %u of %u layers, %s, cached as %s; %s, %u workers x %u sequences\n",
           o->preset->name, o->n_layers, o->preset->num_layers, attn_dtype_name(o->dtype),
           attn_dtype_name(o->kv_dtype), mode_of(o), o->n_workers, o->n_sequences);
    printf("daemon    attnd %s, backend %s, at %s\n", r->info.server_version, r->info.backend,
           o->endpoint);
    if (o->top_k > 0)
        printf("sparse    a query visits %u tokens\n", o->top_k);
    if (o->choose_blocks > 0)
        printf("chosen    a query visits %u blocks for each kv head\n", o->choose_blocks);
    if (o->rate > 0) {
        char arrivals[ARRIVALS_BYTES];
        arrivals_format(&o->arrivals, arrivals);
        printf("arrivals  %s, %.6g tokens/s, seed %u\n", arrivals, o->rate, o->seed);
    }
    if (t->n_prompt_tokens > 0 && o->trace == NULL)
        printf("prompts   %" PRIu64 " tokens in %.3f s: %.0f tokens/s\n", t->n_prompt_tokens,
               r->prompt_s, per_second((double)t->n_prompt_tokens, r->prompt_s));
    if (o->trace != NULL)
        printf("requests  %" PRIu64 " done, %" PRIu64 " prompt tokens, %" PRIu64
               " more (%.1f %%) were cached\n",
               t->n_requests, t->n_prompt_tokens, t->n_cached_tokens,
               100 * per_second((double)t->n_cached_tokens,
                                (double)(t->n_prompt_tokens + t->n_cached_tokens)));
    printf("run       %" PRIu64 " steps, %.0f tokens in %.3f s: %.1f steps/s, %.1f tokens/s, "
           "KV %.3f GB/s\n",
           t->n_steps, n_tokens_of(r), r->run_s, per_second((double)t->n_steps, r->run_s),
           per_second(n_tokens_of(r), r->run_s), per_second((double)t->kv_bytes, r->run_s) * 1e-9);
    if (r->n_batches > 0)
        printf("batches   %.0f, %.2f items each\n", r->n_batches, r->n_batch_items / r->n_batches);
    if (r->n_chosen_here + r->n_chosen_away > 0)
        printf("hits      of %.0f chosen blocks %.4f were on the device\n",
               r->n_chosen_here + r->n_chosen_away, hit_ratio(r));
    if (t->times[TIME_TOTAL].n > 0)
        print_times(r);
    if (report_late_share(r) > MAX_LATE_SHARE)
        printf("n/a       %.1f %% of %" PRIu64 " sends were 1 ms late or more: more --sequences or "
               "--workers, or "
               "a lower rate\n",
               100 * report_late_share(r), t->times[TIME_LATE].n + t->n_unsent);
    if (o->slo.share > 0 && r->good_rate > 0)
        printf("knee      %.6g tokens/s keep %s of a token within %g s; too many are %.6g\n",
               r->good_rate, o->slo.name, o->slo.seconds, r->bad_rate);
    if (t->n_unfinished + t->n_unsent > 0)
        printf("cut       when the time was over, %" PRIu64 " tokens were not sent and %" PRIu64
               " steps not answered\n",
               t->n_unsent, t->n_unfinished);
    for (int i = 1; i < TALLY_N_STATUS; i++) {
        if (t->refused[i] > 0)
            printf("refused   %" PRIu64 " x %s\n", t->refused[i],
                   attn_status_message((attn_status)-i));
    }
    const struct verify_result *v = &r->verified;
    if (o->n_verify > 0 && o->choose_blocks > 0) {
        printf("recall    of %" PRIu64
               " outputs: the blocks hold %.4f of the softmax, %.4f at least, "
               "%" PRIu64 " mismatches\n",
               v->n_verified, v->n_rows > 0 ? v->sum_recall / (double)v->n_rows : 0, v->min_recall,
               v->n_mismatched);
    } else if (o->n_verify > 0) {
        printf("verified  %" PRIu64 " outputs, %" PRIu64
               " mismatches, max error %.3g, max relative "
               "L2 %.3g, max error of lse %.3g\n",
               v->n_verified, v->n_mismatched, v->max_error, v->max_l2, v->max_lse_error);
    }
    if (o->n_verify > 0 && v->n_mismatched > 0)
        printf("mismatch  %s\n", v->first);
    if (r->failure[0] != '\0')
        printf("failed    %s\n", r->failure);
}

static json_t *number(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static json_t *times_of(const struct report *r, size_t line)
{
    const struct histogram *h = &r->tally.times[line];
    json_t *o = json_object();
    for (size_t j = 0; j < N_SHARES; j++)
        json_object_set_new(o, share_names[j],
                            h->n == 0 || is_refused(r, line, shares[j])
                                ? json_null()
                                : number((double)histogram_percentile(h, shares[j]) * 1e-9));
    json_object_set_new(o, "count", json_integer((json_int_t)h->n));
    return o;
}

/* Null, each of it, where no --slo was asked for: every run has the same members. */
static json_t *slo_of(const struct report *r)
{
    const struct slo *slo = &r->o->slo;
    bool is_asked = slo->share > 0;
    return json_pack("{s:o, s:o, s:o, s:o}", "percentile",
                     is_asked ? json_string(slo->name) : json_null(), "seconds",
                     is_asked ? number(slo->seconds) : json_null(), "good_rate",
                     is_asked ? number(r->good_rate) : json_null(), "bad_rate",
                     is_asked ? number(r->bad_rate) : json_null());
}

static json_t *object_of(const struct report *r)
{
    const struct options *o = r->o;
    const struct tally *t = &r->tally;
    char arrivals[ARRIVALS_BYTES];
    uint64_t n_refused = 0;
    arrivals_format(&o->arrivals, arrivals);
    json_t *root = json_object(), *times = json_object(), *refused = json_object();
    json_object_set_new(root, "mode", json_string(mode_of(o)));
    json_object_set_new(root, "endpoint", json_string(o->endpoint));
    json_object_set_new(root, "backend", json_string(r->info.backend));
    json_object_set_new(root, "preset", json_string(o->preset->name));
    json_object_set_new(root, "layers", json_integer(o->n_layers));
    json_object_set_new(root, "dtype", json_string(attn_dtype_name(o->dtype)));
    json_object_set_new(root, "kv_dtype", json_string(attn_dtype_name(o->kv_dtype)));
    json_object_set_new(root, "workers", json_integer(o->n_workers));
    json_object_set_new(root, "sequences", json_integer(o->n_sequences));
    json_object_set_new(root, "context", json_integer(o->context));
    json_object_set_new(root, "top_k", o->top_k > 0 ? json_integer(o->top_k) : json_null());
    json_object_set_new(root, "choose_blocks",
                        o->choose_blocks > 0 ? json_integer(o->choose_blocks) : json_null());
    json_object_set_new(root, "rate", o->rate > 0 ? number(o->rate) : json_null());
    json_object_set_new(root, "arrivals", o->rate > 0 ? json_string(arrivals) : json_null());
    json_object_set_new(root, "seed", json_integer((json_int_t)o->seed));
    json_object_set_new(root, "prompt_tokens", json_integer((json_int_t)t->n_prompt_tokens));
    json_object_set_new(root, "cached_tokens", json_integer((json_int_t)t->n_cached_tokens));
    json_object_set_new(root, "prompt_seconds", number(r->prompt_s));
    json_object_set_new(root, "requests", json_integer((json_int_t)t->n_requests));
    json_object_set_new(root, "steps", json_integer((json_int_t)t->n_steps));
    json_object_set_new(root, "tokens", number(n_tokens_of(r)));
    json_object_set_new(root, "seconds", number(r->run_s));
    json_object_set_new(root, "steps_per_second", number(per_second((double)t->n_steps, r->run_s)));
    json_object_set_new(root, "tokens_per_second", number(per_second(n_tokens_of(r), r->run_s)));
    json_object_set_new(root, "kv_bytes", json_integer((json_int_t)t->kv_bytes));
    json_object_set_new(root, "kv_bytes_per_second",
                        number(per_second((double)t->kv_bytes, r->run_s)));
    json_object_set_new(root, "mean_batch_items",
                        r->n_batches > 0 ? number(r->n_batch_items / r->n_batches) : json_null());
    for (size_t i = 0; i < TALLY_N_TIMES; i++)
        json_object_set_new(times, lines[i].name, times_of(r, i));
    json_object_set_new(root, "times", times);
    json_object_set_new(root, "chosen_hit_ratio",
                        r->n_chosen_here + r->n_chosen_away > 0 ? number(hit_ratio(r))
                                                                : json_null());
    json_object_set_new(root, "late_share", number(report_late_share(r)));
    json_object_set_new(root, "slo", slo_of(r));
    json_object_set_new(root, "unsent", json_integer((json_int_t)t->n_unsent));
    json_object_set_new(root, "unfinished", json_integer((json_int_t)t->n_unfinished));
    for (int i = 1; i < TALLY_N_STATUS; i++) {
        n_refused += t->refused[i];
        if (t->refused[i] > 0)
            json_object_set_new(refused, attn_status_name((attn_status)-i),
                                json_integer((json_int_t)t->refused[i]));
    }
    json_object_set_new(root, "refused", refused);
    json_object_set_new(root, "refused_total", json_integer((json_int_t)n_refused));
    json_object_set_new(root, "verified", json_integer((json_int_t)r->verified.n_verified));
    json_object_set_new(root, "mismatched", json_integer((json_int_t)r->verified.n_mismatched));
    json_object_set_new(root, "max_error", number(r->verified.max_error));
    json_object_set_new(root, "max_relative_l2", number(r->verified.max_l2));
    json_object_set_new(root, "max_lse_error", number(r->verified.max_lse_error));
    json_object_set_new(root, "recall",
                        r->verified.n_rows > 0
                            ? number(r->verified.sum_recall / (double)r->verified.n_rows)
                            : json_null());
    json_object_set_new(root, "failure",
                        r->failure[0] != '\0' ? json_string(r->failure) : json_null());
    return root;
}

void report_print(const struct report *r)
{
    json_t *root = object_of(r);
    if (r->o->format == FORMAT_CSV) {
        compare_print_csv(root);
    } else if (r->o->format == FORMAT_JSON) {
        if (r->old != NULL)
            json_object_set_new(root, "change", compare_change(r->old, root));
        json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        putchar('\n');
    } else {
        print_text(r);
        if (r->old != NULL)
            compare_print(r->old, root);
    }
    json_decref(root);
}
