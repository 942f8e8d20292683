/* test_attnload.c: the parts of attnload that need no daemon. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "clients/attnload/arrivals.h"
#include "clients/attnload/data.h"
#include "clients/attnload/histogram.h"
#include "clients/attnload/preset.h"
#include "clients/attnload/run.h"
#include "clients/attnload/trace.h"
#include "clients/attnload/verify.h"
#include "clients/libattn/core/core.h"
#include "kernels/reference.h"

/* ---- percentiles ---- */

static void percentiles_are_nearest_ranks(void **state)
{
    (void)state;
    struct histogram h = {0};
    assert_int_equal(histogram_percentile(&h, 0.5), 0);
    for (uint64_t i = 0; i < 1000; i++)
        histogram_add(&h, (i * 7919) % 1000 + 1); /* 1 to 1000, shuffled */
    assert_int_equal(histogram_percentile(&h, 0), 1);
    assert_int_equal(histogram_percentile(&h, 0.5), 500);
    assert_int_equal(histogram_percentile(&h, 0.9), 900);
    assert_int_equal(histogram_percentile(&h, 0.99), 990);
    assert_int_equal(histogram_percentile(&h, 0.999), 999);
    assert_int_equal(histogram_percentile(&h, 0.9991), 1000);
    assert_int_equal(histogram_percentile(&h, 1), 1000);
    histogram_fini(&h);
    histogram_add(&h, 42);
    assert_int_equal(histogram_percentile(&h, 0.001), 42);
    assert_int_equal(histogram_percentile(&h, 0.999), 42);
    histogram_fini(&h);
}

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void percentiles_are_of_any_time_to_three_digits(void **state)
{
    (void)state;
    enum { N = 20000 };
    static uint64_t all[N];
    struct histogram h = {0};
    for (uint64_t i = 0; i < N; i++) { /* of all magnitudes: 0, 1, ... to 2^64 - 1 */
        uint64_t x = data_mix(i);
        all[i] = x >> (data_mix(x) % 65 % 64);
        histogram_add(&h, all[i]);
    }
    all[7] = UINT64_MAX;
    histogram_add(&h, UINT64_MAX);
    qsort(all, N, sizeof *all, by_size);
    for (uint32_t i = 1; i < 1000; i++) {
        double share = i / 1000.0;
        uint64_t got = histogram_percentile(&h, share);
        size_t rank = (size_t)(share * N); /* one sample more or less is let pass */
        assert_true(got >= all[rank - 2] && (got - got / 1024) / 2 <= all[rank + 2] / 2);
    }
    assert_true(histogram_percentile(&h, 1) == UINT64_MAX);
    histogram_fini(&h);
}

static void joined_histograms_count_all(void **state)
{
    (void)state;
    struct histogram a = {0}, b = {0}, none = {0}, whole = {0};
    for (uint64_t i = 0; i < 5000; i++) {
        histogram_add(i % 3 == 0 ? &a : &b, i * i);
        histogram_add(&whole, i * i);
    }
    histogram_join(&a, &b);
    histogram_join(&a, &none);
    histogram_join(&none, &a);
    assert_int_equal(a.n, 5000);
    for (uint32_t i = 0; i <= 100; i++) {
        assert_int_equal(histogram_percentile(&a, i / 100.0),
                         histogram_percentile(&whole, i / 100.0));
        assert_int_equal(histogram_percentile(&none, i / 100.0),
                         histogram_percentile(&whole, i / 100.0));
    }
    histogram_fini(&a);
    histogram_fini(&b);
    histogram_fini(&none);
    histogram_fini(&whole);
}

static void a_share_counts_from_its_bound_on(void **state)
{
    (void)state;
    struct histogram h = {0};
    assert_true(histogram_share_from(&h, 0) == 0);
    for (uint64_t i = 0; i < 200; i++)
        histogram_add(&h, (i * 37) % 200 / 2); /* each of 0 to 99 twice */
    assert_true(histogram_share_from(&h, 0) == 1);
    assert_true(histogram_share_from(&h, 99) == 0.01);
    assert_true(histogram_share_from(&h, 98) == 0.02);
    assert_true(histogram_share_from(&h, 100) == 0);
    assert_true(histogram_share_from(&h, UINT64_MAX) == 0);
    histogram_fini(&h);
}

/* ---- arrivals ---- */

static const char *const kinds[] = {"poisson", "constant", "gamma=0.3",
                                    "gamma=1", "gamma=3",  "burst=8"};

static void a_schedule_is_the_same_for_any_number_of_workers(void **state)
{
    (void)state;
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        struct arrivals_spec spec;
        struct arrivals one, part[3], other;
        assert_true(arrivals_parse(kinds[k], &spec));
        arrivals_init(&one, &spec, 500, 7, 0, 1);
        arrivals_init(&other, &spec, 500, 8, 0, 1);
        for (uint32_t i = 0; i < 3; i++)
            arrivals_init(&part[i], &spec, 500, 7, i, 3);
        uint64_t before = 0;
        bool differs = false;
        for (uint32_t i = 0; i < 3000; i++) {
            uint64_t at = arrivals_next(&one);
            assert_int_equal(arrivals_next(&part[i % 3]), at);
            differs |= arrivals_next(&other) != at;
            assert_true(at >= before);
            before = at;
        }
        assert_int_equal(differs, spec.kind != ARRIVALS_CONSTANT && spec.kind != ARRIVALS_BURST);
    }
}

/* Mean and spread of the gaps, over so many that four sigma are some percent. */
static void gaps_have_the_rate_and_the_spread_asked_for(void **state)
{
    (void)state;
    static const double cvs[] = {1, 0, 0.3, 1, 3, 2.6457513}; /* burst: sqrt(8 - 1) */
    enum { N = 200000 };
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        struct arrivals_spec spec;
        struct arrivals a;
        double sum = 0, sum2 = 0;
        assert_true(arrivals_parse(kinds[k], &spec));
        arrivals_init(&a, &spec, 1000, 3, 0, 1);
        uint64_t before = spec.kind == ARRIVALS_BURST ? arrivals_next(&a) : 0;
        for (int i = 0; i < N; i++) {
            uint64_t at = arrivals_next(&a);
            double gap = (double)(at - before) * 1e-6; /* of 1, in the mean */
            before = at;
            sum += gap;
            sum2 += gap * gap;
        }
        double mean = sum / N, cv = sqrt(fmax(sum2 / N - mean * mean, 0)) / mean;
        if (fabs(mean - 1) > 0.04 || fabs(cv - cvs[k]) > 0.05 * cvs[k] + 1e-4)
            fail_msg("%s: mean %g, variation %g", kinds[k], mean, cv);
    }
}

static void wrong_arrivals_are_refused(void **state)
{
    (void)state;
    static const char *const wrong[] = {"",          "uniform",  "poisson=1", "gamma",
                                        "gamma=",    "gamma=0",  "gamma=x",   "burst=0",
                                        "burst=1.5", "constant "};
    struct arrivals_spec spec = {.value = 42};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_false(arrivals_parse(wrong[i], &spec));
    assert_true(spec.value == 42);
}

static void arrivals_are_told_as_they_were_asked_for(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        struct arrivals_spec spec;
        char text[ARRIVALS_BYTES];
        assert_true(arrivals_parse(kinds[i], &spec));
        arrivals_format(&spec, text);
        assert_string_equal(text, kinds[i]);
    }
}

/* ---- the search for a rate ---- */

static void the_knee_is_found_from_either_side(void **state)
{
    (void)state;
    static const double starts[] = {0.01, 1, 99, 100, 101, 5e6};
    for (size_t i = 0; i < sizeof starts / sizeof starts[0]; i++) {
        struct knee k = {.rate = starts[i]};
        while (knee_next(&k, k.rate <= 100))
            ;
        assert_true(k.good <= 100 && k.bad > 100 && k.bad <= 1.05 * k.good);
        assert_true(k.n_tried < 35);
    }
    struct knee never = {.rate = 100}, always = never;
    while (knee_next(&never, false))
        ;
    assert_true(never.good == 0 && never.n_tried < 40);
    while (knee_next(&always, true))
        ;
    assert_true(always.bad == 0 && always.good > 1e8);
}

/* ---- traces ---- */

static char path[64];

static const char *write_trace(const char *text)
{
    snprintf(path, sizeof path, "/tmp/attnload_trace_%d.jsonl", (int)getpid());
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    return path;
}

static int remove_trace(void **state)
{
    (void)state;
    unlink(path);
    return 0;
}

static const char three[] =
    "{\"timestamp\": 3000, \"input_length\": 100, \"output_length\": 7, \"hash_ids\": [1, 2]}\n"
    "\n"
    "{\"timestamp\": 1000, \"input_length\": 3, \"output_length\": 1, \"hash_ids\": []}\n"
    "{\"output_length\": 50, \"timestamp\": 2000.5, \"input_length\": 20, \"more\": {\"x\": 1}}";

static void a_trace_is_read_in_order_of_arrival(void **state)
{
    (void)state;
    char why[160];
    struct trace t;
    struct trace_scaling s = {.speed = 1, .length = 1};
    assert_int_equal(trace_load(write_trace(three), &s, &t, why, sizeof why), ATTN_OK);
    assert_int_equal(t.n, 3);
    assert_int_equal(t.requests[0].arrival_us, 0);
    assert_int_equal(t.requests[1].arrival_us, 1000500);
    assert_int_equal(t.requests[2].arrival_us, 2000000);
    assert_int_equal(t.requests[0].n_input, 3);
    assert_int_equal(t.requests[1].n_output, 50);
    assert_int_equal(t.requests[2].n_input, 100);
    assert_int_equal(t.block_tokens, 512);
    assert_int_equal(t.requests[0].n_blocks + t.requests[1].n_blocks, 0);
    assert_int_equal(t.requests[2].n_blocks, 2);
    assert_int_equal(t.blocks[t.requests[2].first_block + 1], 2);
    trace_fini(&t);
}

static void a_trace_is_scaled_and_cut(void **state)
{
    (void)state;
    char why[160];
    struct trace t;
    struct trace_scaling s = {.speed = 10, .length = 0.1, .max_requests = 2};
    assert_int_equal(trace_load(write_trace(three), &s, &t, why, sizeof why), ATTN_OK);
    assert_int_equal(t.n, 2);
    assert_int_equal(t.requests[1].arrival_us, 200000);
    assert_int_equal(t.requests[1].n_input, 10);
    assert_int_equal(t.requests[1].n_output, 1); /* 0.7 */
    assert_int_equal(t.requests[0].n_input, 1); /* 0.3: never none */
    trace_fini(&t);
    s.speed = 0;
    assert_int_equal(trace_load(path, &s, &t, why, sizeof why), ATTN_OK);
    assert_int_equal(t.requests[1].arrival_us, 0);
    trace_fini(&t);
}

static void a_broken_trace_is_named_by_line_and_member(void **state)
{
    (void)state;
    static const struct {
        const char *line, *named;
    } cases[] = {
        {"{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [-1]}",
         "hash_ids"},
        {"{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": 3}",
         "hash_ids"},
        {"{\"timestamp\": 1, \"input_length\": 2}", "output_length"},
        {"{\"timestamp\": 1, \"output_length\": 2}", "input_length"},
        {"{\"input_length\": 1, \"output_length\": 2}", "timestamp"},
        {"{\"timestamp\": -1, \"input_length\": 1, \"output_length\": 2}", "timestamp"},
        {"{\"timestamp\": 1, \"input_length\": 1e12, \"output_length\": 2}", "input_length"},
        {"{\"timestamp\": 1, \"input_length\": \"1\", \"output_length\": 2}", "input_length"},
        {"[1, 2, 3]", "JSON object"},
        {"{\"timestamp\": 1, \"input_len", "JSON object"},
        {"hello", "JSON object"},
    };
    char text[512], why[160];
    struct trace t = {0};
    struct trace_scaling s = {.speed = 1, .length = 1};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        snprintf(text, sizeof text, "%s\n%s\n", three, cases[i].line);
        assert_int_equal(trace_load(write_trace(text), &s, &t, why, sizeof why), ATTN_EINVAL);
        assert_non_null(strstr(why, cases[i].named));
        assert_non_null(strstr(why, "line 5"));
        assert_null(t.requests);
    }
    assert_int_equal(trace_load(write_trace("\n\n"), &s, &t, why, sizeof why), ATTN_EINVAL);
    assert_int_equal(trace_load("/nowhere/x", &s, &t, why, sizeof why), ATTN_ENOTFOUND);
    assert_non_null(strstr(why, "/nowhere/x"));
}

/* ---- data ---- */

#define N 6
#define HEADS 3
#define DIM 20 /* no multiple of the generator's eight */

static void data_are_the_same_however_they_are_asked_for(void **state)
{
    (void)state;
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
    struct data_stream s = {.seed = 5, .stream = 9};
    for (int d = 0; d < 3; d++) {
        size_t e = attn_dtype_bytes(dtypes[d]);
        uint8_t all[N * HEADS * DIM * 4], one[DIM * 4];
        for (int which = DATA_Q; which <= DATA_V; which++) {
            data_fill(&s, 2, (enum data_which)which, 10, N, 0, HEADS, DIM, dtypes[d], all, NULL);
            for (uint32_t t = 0; t < N; t++) {
                for (uint32_t h = 0; h < HEADS; h++) {
                    memset(one, 0xff, sizeof one);
                    data_fill(&s, 2, (enum data_which)which, 10 + t, 1, h, 1, DIM, dtypes[d], one,
                              NULL);
                    assert_memory_equal(one, all + (t * HEADS + h) * DIM * e, DIM * e);
                }
            }
        }
    }
}

/* Random shapes at random places: a streaming client's rows are a plain fill's, and nothing else is
 * written. */
static void data_are_the_same_however_they_are_stored(void **state)
{
    (void)state;
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
    enum { ROOM = 64, MAX = 4 * 3 * 160 * 4 };
    static _Alignas(64) uint8_t plain[MAX + 2 * ROOM], streamed[MAX + 2 * ROOM];
    const struct attn_client client = {.is_streaming = true};
    const uint64_t seed = 20260401;
    uint32_t n_aligned = 0;
    for (uint64_t i = 0, random = seed; i < 2000; i++) {
        random = data_mix(random);
        attn_dtype dtype = dtypes[random % 3];
        uint32_t e = attn_dtype_bytes(dtype), dim = (uint32_t)(random >> 8) % 160 + 1;
        uint32_t n_tokens = (uint32_t)(random >> 20) % 4 + 1, n_heads = (random >> 30) % 3 + 1;
        size_t at = (random >> 40) % ROOM / e * e;
        if (random >> 63 != 0) { /* what models have */
            dim = (dim + 7) / 8 * 8;
            at = at / 16 * 16;
        }
        n_aligned += at % 16 == 0 && dim * e % 16 == 0;
        struct data_stream s = {.seed = seed, .stream = i};
        memset(plain, 0xa5, sizeof plain);
        memset(streamed, 0xa5, sizeof streamed);
        data_fill(&s, 1, DATA_K, 5, n_tokens, 0, n_heads, dim, dtype, plain + at, NULL);
        data_fill(&s, 1, DATA_K, 5, n_tokens, 0, n_heads, dim, dtype, streamed + at, &client);
        if (memcmp(plain, streamed, sizeof plain) != 0)
            fail_msg("seed %llu, fill %llu: dim %u, offset %zu", (unsigned long long)seed,
                     (unsigned long long)i, dim, at);
    }
    assert_in_range(n_aligned, 500, 1900); /* both ways were taken */
}

static void data_are_the_same_number_in_every_dtype(void **state)
{
    (void)state;
    struct data_stream s = {.seed = 1, .stream = 2};
    float f32[256];
    uint16_t f16[256], bf16[256];
    data_fill(&s, 0, DATA_V, 0, 1, 0, 1, 256, ATTN_F32, f32, NULL);
    data_fill(&s, 0, DATA_V, 0, 1, 0, 1, 256, ATTN_F16, f16, NULL);
    data_fill(&s, 0, DATA_V, 0, 1, 0, 1, 256, ATTN_BF16, bf16, NULL);
    double sum = 0, sum2 = 0;
    for (size_t i = 0; i < 256; i++) {
        assert_true(reference_get(ATTN_F16, f16, i) == f32[i]);
        assert_true(reference_get(ATTN_BF16, bf16, i) == f32[i]);
        sum += f32[i];
        sum2 += f32[i] * f32[i];
    }
    assert_true(fabs(sum / 256) < 0.3); /* about centred, about unit size */
    assert_true(sum2 / 256 > 0.8 && sum2 / 256 < 2);
}

static void data_differ_by_every_part_of_their_name(void **state)
{
    (void)state;
    struct data_stream a = {.seed = 1, .stream = 1}, seed = {.seed = 2, .stream = 1},
                       stream = {.seed = 1, .stream = 2};
    float x[64], y[64];
    data_fill(&a, 0, DATA_K, 7, 1, 1, 1, 64, ATTN_F32, x, NULL);
#define DIFFERS(...)                                                                               \
    do {                                                                                           \
        data_fill(__VA_ARGS__, 1, 64, ATTN_F32, y, NULL);                                          \
        assert_memory_not_equal(x, y, sizeof x);                                                   \
    } while (0)
    DIFFERS(&seed, 0, DATA_K, 7, 1, 1);
    DIFFERS(&stream, 0, DATA_K, 7, 1, 1);
    DIFFERS(&a, 1, DATA_K, 7, 1, 1);
    DIFFERS(&a, 0, DATA_V, 7, 1, 1);
    DIFFERS(&a, 0, DATA_K, 8, 1, 1);
    DIFFERS(&a, 0, DATA_K, 7, 1, 2);
#undef DIFFERS
}

/* ---- presets ---- */

static void gemma_slides_in_five_of_six_layers(void **state)
{
    (void)state;
    const struct preset *p = preset_find("gemma3-27b");
    assert_non_null(p);
    uint32_t n_full = 0;
    for (uint32_t i = 0; i < p->num_layers; i++) {
        struct attn_layer l = preset_layer(p, i);
        n_full += l.window_tokens == 0;
        assert_int_equal(l.window_tokens, i % 6 == 5 ? 0 : 1024);
        assert_true(fabsf(l.scale * l.scale * 168 - 1) < 1e-6f);
    }
    assert_int_equal(n_full, 10);
    assert_int_equal(preset_visible(p, 0, 10), 11);
    assert_int_equal(preset_visible(p, 0, 5000), 1024);
    assert_int_equal(preset_visible(p, 5, 5000), 5001);
    assert_null(preset_find("gpt-17"));
}

/* ---- verification ---- */

static struct options options_of_test(void)
{
    return (struct options){
        .preset = preset_find("bytelm"), .n_layers = 1, .dtype = ATTN_F32, .kv_dtype = ATTN_F32};
}

/* What a perfect daemon answers for the query at pos. */
static void right_answer(const struct options *o, const struct data_stream *s, uint32_t pos,
                         float *out, float *lse)
{
    const struct preset *p = o->preset;
    struct attn_layer_spec spec = {.scale = 1 / sqrtf((float)p->head_dim)};
    size_t q_n = p->num_q_heads * p->head_dim, kv_n = p->num_kv_heads * p->head_dim * (pos + 1);
    float *q = malloc(q_n * 4), *k = malloc(kv_n * 4), *v = malloc(kv_n * 4);
    double *want = malloc(q_n * sizeof *want), *want_lse = malloc(p->num_q_heads * sizeof *want);
    data_fill(s, 0, DATA_Q, pos, 1, 0, p->num_q_heads, p->head_dim, ATTN_F32, q, NULL);
    data_fill(s, 0, DATA_K, 0, pos + 1, 0, p->num_kv_heads, p->head_dim, ATTN_F32, k, NULL);
    data_fill(s, 0, DATA_V, 0, pos + 1, 0, p->num_kv_heads, p->head_dim, ATTN_F32, v, NULL);
    assert_int_equal(reference_attend(&spec, p->num_q_heads, p->num_kv_heads, p->head_dim,
                                      p->head_dim, ATTN_F32, q, 1, pos, k, v, pos + 1, want,
                                      want_lse),
                     ATTN_OK);
    for (size_t i = 0; i < q_n; i++)
        out[i] = (float)want[i];
    for (uint32_t i = 0; i < p->num_q_heads; i++)
        lse[i] = (float)want_lse[i];
    free(q);
    free(k);
    free(v);
    free(want);
    free(want_lse);
}

static void right_answers_pass_and_wrong_ones_are_found(void **state)
{
    (void)state;
    struct options o = options_of_test();
    struct data_stream s = {.seed = 3, .stream = 4};
    float out[8 * 64], lse[8];
    struct verify v;
    struct verify_result r = {0};
    assert_int_equal(verify_init(&v, &o, NULL, 20, 1), ATTN_OK);
    for (uint32_t pos = 0; pos < 20; pos++) {
        right_answer(&o, &s, pos, out, lse);
        verify_offer(&v, &s, 0, pos, out, lse);
    }
    assert_int_equal(verify_run(&v, &r), ATTN_OK);
    assert_int_equal(r.n_verified, 20);
    assert_int_equal(r.n_mismatched, 0);
    assert_true(r.max_error < 1e-6 && r.max_lse_error < 1e-6);
    verify_fini(&v);

    for (int kind = 0; kind < 8; kind++) {
        struct verify_result bad = {0};
        bool is_lse = kind >= 4;
        assert_int_equal(verify_init(&v, &o, NULL, 1, 1), ATTN_OK);
        right_answer(&o, &s, kind == 2 ? 9 : 10, out, lse); /* 2: the answer of another position */
        for (int i = 0; i < 8 * 64; i++) {
            if (kind == 0)
                out[i] += 1e-3f;
            else if (kind == 1)
                out[i] = NAN;
            else if (kind == 3)
                out[i] = 0;
        }
        for (int i = 0; i < 8; i++) {
            if (kind == 4)
                lse[i] += 2e-3f;
            else if (kind == 5)
                lse[i] = NAN; /* never written */
            else if (kind == 6)
                lse[i] *= 1.442695f; /* base 2 */
            else if (kind == 7)
                lse[i] = -INFINITY;
        }
        verify_offer(&v, &s, 0, 10, out, lse);
        assert_int_equal(verify_run(&v, &bad), ATTN_OK);
        assert_int_equal(bad.n_mismatched, 1);
        assert_non_null(strstr(bad.first, "pos 10"));
        assert_non_null(strstr(bad.first, is_lse ? " lse " : " element "));
        assert_true(!is_lse || bad.max_error < 1e-6);
        verify_join(&r, &bad);
        verify_fini(&v);
    }
    assert_int_equal(r.n_verified, 28);
    assert_int_equal(r.n_mismatched, 8);
    assert_true(isnan(r.max_error) && isnan(r.max_lse_error));
}

static void every_output_is_as_likely_to_be_kept(void **state)
{
    (void)state;
    struct options o = options_of_test();
    struct data_stream s = {.seed = 3, .stream = 4};
    float out[8 * 64] = {0}, lse[8] = {0};
    uint32_t n_late = 0;
    for (uint64_t seed = 0; seed < 200; seed++) {
        struct verify v;
        assert_int_equal(verify_init(&v, &o, NULL, 10, data_mix(seed)), ATTN_OK);
        for (uint32_t pos = 0; pos < 100; pos++)
            verify_offer(&v, &s, 0, pos, out, lse);
        assert_int_equal(v.n, 10);
        for (uint32_t i = 0; i < 10; i++)
            n_late += v.samples[i].pos >= 50;
        verify_fini(&v);
    }
    assert_in_range(n_late, 850, 1150); /* of 2000, expected 1000, sigma 21 */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(percentiles_are_nearest_ranks),
        cmocka_unit_test(percentiles_are_of_any_time_to_three_digits),
        cmocka_unit_test(joined_histograms_count_all),
        cmocka_unit_test(a_share_counts_from_its_bound_on),
        cmocka_unit_test(a_schedule_is_the_same_for_any_number_of_workers),
        cmocka_unit_test(gaps_have_the_rate_and_the_spread_asked_for),
        cmocka_unit_test(wrong_arrivals_are_refused),
        cmocka_unit_test(arrivals_are_told_as_they_were_asked_for),
        cmocka_unit_test(the_knee_is_found_from_either_side),
        cmocka_unit_test_teardown(a_trace_is_read_in_order_of_arrival, remove_trace),
        cmocka_unit_test_teardown(a_trace_is_scaled_and_cut, remove_trace),
        cmocka_unit_test_teardown(a_broken_trace_is_named_by_line_and_member, remove_trace),
        cmocka_unit_test(data_are_the_same_however_they_are_asked_for),
        cmocka_unit_test(data_are_the_same_however_they_are_stored),
        cmocka_unit_test(data_are_the_same_number_in_every_dtype),
        cmocka_unit_test(data_differ_by_every_part_of_their_name),
        cmocka_unit_test(gemma_slides_in_five_of_six_layers),
        cmocka_unit_test(right_answers_pass_and_wrong_ones_are_found),
        cmocka_unit_test(every_output_is_as_likely_to_be_kept),
    };
    return cmocka_run_group_tests_name("attnload", tests, NULL, NULL);
}
