/* test_reference.c: the oracle itself, by hand-computed cases and against a second formula. */
#include "kernels/reference.h"
#include "tests/random.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#define assert_near(a, b, eps) assert_true(fabs((a) - (b)) <= (eps))

static uint64_t rng = 7;

static float random_value(void)
{
    return (float)(random_mixed(&rng) >> 40) / (1 << 23) - 1.0f + 1e-5f;
}

static void one_key_gives_its_value(void **state)
{
    (void)state;
    float q[2] = {3, -1}, k[2] = {0.5f, 2}, v[2] = {7, -9};
    struct attn_layer_spec spec = {.scale = 0.5f};
    double out[2], lse;
    assert_int_equal(reference_attend(&spec, 1, 1, 2, 2, ATTN_F32, q, 1, 0, k, v, 1, out, &lse), 0);
    assert_near(out[0], 7, 1e-12);
    assert_near(out[1], -9, 1e-12);
    assert_near(lse, 0.5 * (1.5 - 2), 1e-12);
}

static void two_keys_weigh_by_the_exponent_of_their_scores(void **state)
{
    (void)state;
    /* scores ln 3 and 0: weights 3/4 and 1/4 */
    float q[1] = {1}, k[2] = {(float)log(3), 0}, v[2] = {8, 4};
    struct attn_layer_spec spec = {.scale = 1};
    double out[1], lse;
    reference_attend(&spec, 1, 1, 1, 1, ATTN_F32, q, 1, 1, k, v, 2, out, &lse);
    assert_near(out[0], 7, 1e-6);
    assert_near(lse, log(4), 1e-6);
}

static void a_sink_logit_takes_weight_and_gives_no_value(void **state)
{
    (void)state;
    float q[1] = {1}, k[1] = {0}, v[1] = {8}, sink[1] = {(float)log(3)};
    struct attn_layer_spec spec = {.scale = 1, .sink_logits = sink};
    double out[1], lse;
    reference_attend(&spec, 1, 1, 1, 1, ATTN_F32, q, 1, 0, k, v, 1, out, &lse);
    assert_near(out[0], 2, 1e-6);
    assert_near(lse, log(4), 1e-6);
}

static void no_key_gives_zero_and_minus_infinity(void **state)
{
    (void)state;
    float q[1] = {1}, sink[1] = {2};
    struct attn_layer_spec spec = {.scale = 1};
    double out[1] = {NAN}, lse = NAN;
    reference_attend(&spec, 1, 1, 1, 1, ATTN_F32, q, 1, 0, NULL, NULL, 0, out, &lse);
    assert_true(out[0] == 0 && lse == -INFINITY);
    spec.sink_logits = sink;
    reference_attend(&spec, 1, 1, 1, 1, ATTN_F32, q, 1, 0, NULL, NULL, 0, out, &lse);
    assert_true(out[0] == 0 && lse == 2);
}

static void masks_choose_the_keys_that_are_averaged(void **state)
{
    (void)state;
    /* equal scores: the output is the mean of the visible values 1, 2, 4, 8, .. */
    float q[3] = {0, 0, 0}, k[8] = {0}, v[8];
    double out[3];
    struct attn_layer_spec spec = {.scale = 1};
    for (int i = 0; i < 8; i++)
        v[i] = (float)(1 << i);
    reference_attend(&spec, 1, 1, 1, 1, ATTN_F32, q, 3, 5, k, v, 8, out, NULL);
    assert_near(out[0], 63.0 / 6, 1e-12);
    assert_near(out[2], 255.0 / 8, 1e-12);
    spec.window_tokens = 2;
    reference_attend(&spec, 1, 1, 1, 1, ATTN_F32, q, 3, 5, k, v, 8, out, NULL);
    assert_near(out[0], (16 + 32) / 2.0, 1e-12);
    spec.sink_tokens = 1;
    reference_attend(&spec, 1, 1, 1, 1, ATTN_F32, q, 3, 5, k, v, 8, out, NULL);
    assert_near(out[0], (1 + 16 + 32) / 3.0, 1e-12);
    spec = (struct attn_layer_spec){.scale = 1, .is_full = true};
    reference_attend(&spec, 1, 1, 1, 1, ATTN_F32, q, 3, 5, k, v, 8, out, NULL);
    assert_near(out[0], 255.0 / 8, 1e-12);
}

static void soft_cap_and_alibi_follow_the_scale_in_that_order(void **state)
{
    (void)state;
    float q[1] = {4}, k[2] = {3, 1}, v[2] = {1, 0}, slope[1] = {0.25f};
    struct attn_layer_spec spec = {.scale = 0.5f, .soft_cap = 2, .alibi_slopes = slope};
    double out[1], s0 = 2 * tanh(6.0 / 2) - 0.25, s1 = 2 * tanh(2.0 / 2);
    reference_attend(&spec, 1, 1, 1, 1, ATTN_F32, q, 1, 1, k, v, 2, out, NULL);
    assert_near(out[0], exp(s0) / (exp(s0) + exp(s1)), 1e-12);
}

static void a_nan_value_reaches_only_the_queries_that_see_it(void **state)
{
    (void)state;
    float q[2] = {1, 1}, k[2] = {1, 2}, v[2] = {3, NAN};
    struct attn_layer_spec spec = {.scale = 1};
    double out[2];
    reference_attend(&spec, 1, 1, 1, 1, ATTN_F32, q, 2, 0, k, v, 2, out, NULL);
    assert_true(out[0] == 3 && isnan(out[1]));
    k[1] = NAN, v[1] = 4;
    reference_attend(&spec, 1, 1, 1, 1, ATTN_F32, q, 2, 0, k, v, 2, out, NULL);
    assert_true(out[0] == 3 && isnan(out[1]));
}

/* The same sum without a maximum, head by head over gathered arrays, another loop order. */
static void random_groups_equal_the_plain_quotient_of_sums(void **state)
{
    (void)state;
    enum { HQ = 6, HK = 2, DK = 8, DV = 16, N = 19, T = 3 };
    float q[T * HQ * DK], k[N * HK * DK], v[N * HK * DV];
    double out[T * HQ * DV], lse[T * HQ];
    for (size_t i = 0; i < sizeof q / 4; i++)
        q[i] = random_value();
    for (size_t i = 0; i < sizeof k / 4; i++)
        k[i] = random_value();
    for (size_t i = 0; i < sizeof v / 4; i++)
        v[i] = random_value();
    struct attn_layer_spec spec = {.scale = 0.7f, .window_tokens = 9, .sink_tokens = 2};
    reference_attend(&spec, HQ, HK, DK, DV, ATTN_F32, q, T, N - T, k, v, N, out, lse);
    for (int h = 0; h < HQ; h++) {
        for (int t = 0; t < T; t++) {
            double num[DV] = {0}, den = 0;
            int p = N - T + t;
            for (int j = p; j >= 0; j--) {
                if (j <= p - 9 && j >= 2)
                    continue;
                double dot = 0;
                for (int d = DK - 1; d >= 0; d--)
                    dot += (double)q[(t * HQ + h) * DK + d] * k[(j * HK + h / 3) * DK + d];
                double w = exp(dot * (double)0.7f);
                den += w;
                for (int d = 0; d < DV; d++)
                    num[d] += w * v[(j * HK + h / 3) * DV + d];
            }
            assert_near(lse[t * HQ + h], log(den), 1e-9);
            for (int d = 0; d < DV; d++)
                assert_near(out[(t * HQ + h) * DV + d], num[d] / den, 1e-9);
        }
    }
}

static void every_half_survives_a_round_trip(void **state)
{
    (void)state;
    attn_dtype types[] = {ATTN_F16, ATTN_BF16};
    for (int i = 0; i < 2; i++)
        for (uint32_t bits = 0; bits < 0x10000; bits++) {
            uint16_t in = (uint16_t)bits, back;
            double x = reference_get(types[i], &in, 0);
            reference_put(types[i], &back, 0, x);
            if (isnan(x))
                assert_true(isnan(reference_get(types[i], &back, 0)));
            else
                assert_int_equal(in, back);
        }
}

static void halves_round_to_nearest_even_and_overflow_to_infinity(void **state)
{
    (void)state;
    struct {
        attn_dtype type;
        double in, out;
    } cases[] = {
        {ATTN_F16, 1 + 1.0 / 2048, 1},
        {ATTN_F16, 1 + 3.0 / 2048, 1 + 2.0 / 1024},
        {ATTN_F16, 65519, 65504},
        {ATTN_F16, 65520, INFINITY},
        {ATTN_F16, 0x1p-25, 0},
        {ATTN_F16, 0x1.8p-24, 0x1p-23},
        {ATTN_BF16, 1 + 1.0 / 256, 1},
        {ATTN_BF16, 1 + 3.0 / 256, 1 + 2.0 / 128},
        {ATTN_BF16, -3.39e38, -0x1.fep127},
        {ATTN_BF16, -3.4028234e38, -INFINITY},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint16_t h;
        reference_put(cases[i].type, &h, 0, cases[i].in);
        assert_true(reference_get(cases[i].type, &h, 0) == cases[i].out);
    }
}

static void quantised_rows_keep_their_maximum_and_round_the_rest(void **state)
{
    (void)state;
    double row[8] = {1, -2, 0.5, 0.25, 0, 1.9, -0.01, 0.003}, back[8];
    uint8_t codes[8];
    float scale;
    attn_dtype types[] = {ATTN_INT8, ATTN_FP8_E4M3};
    for (int i = 0; i < 2; i++) {
        reference_quantise(types[i], row, 8, codes, &scale);
        assert_true(scale == 2.0f / (i == 0 ? 127.0f : 448.0f));
        reference_dequantise(types[i], codes, &scale, 8, back);
        for (int j = 0; j < 8; j++)
            assert_near(back[j], row[j],
                        (i == 0 ? 0.5 * scale : fabs(row[j]) / 16 + 0x1p-10 * scale) * 1.0001);
        assert_near(back[1], -2, 1e-6);
    }
    /* every finite e4m3 code is its own value */
    for (int code = 0; code < 0x7f; code++) {
        uint8_t in[2] = {(uint8_t)code, 0x7e}, out[2];
        double x[2];
        reference_dequantise(ATTN_FP8_E4M3, in, &(float){1}, 2, x);
        reference_quantise(ATTN_FP8_E4M3, x, 2, out, &scale);
        assert_true(scale == 1);
        assert_memory_equal(in, out, 2);
    }
}

static void zero_rows_have_scale_zero_and_rows_with_nan_read_as_nan(void **state)
{
    (void)state;
    double zero[2] = {0, 0}, nan_row[2] = {1, NAN}, inf_row[2] = {-INFINITY, 2}, back[2];
    uint8_t codes[2];
    float scale;
    reference_quantise(ATTN_INT8, zero, 2, codes, &scale);
    assert_true(scale == 0 && codes[0] == 0 && codes[1] == 0);
    reference_quantise(ATTN_FP8_E4M3, nan_row, 2, codes, &scale);
    reference_dequantise(ATTN_FP8_E4M3, codes, &scale, 2, back);
    assert_true(isnan(back[0]) && isnan(back[1]));
    reference_quantise(ATTN_INT8, inf_row, 2, codes, &scale);
    reference_dequantise(ATTN_INT8, codes, &scale, 2, back);
    assert_true(isnan(back[0]) && isnan(back[1]));
}

/* Each value of both types of group is found again, and what lies between goes to the nearest. */
static void fp4_groups_keep_what_they_can_and_round_the_rest(void **state)
{
    (void)state;
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    /* of each two neighbours what is half way between, and the even one of them */
    static const double ties[7][2] = {{0.25, 0}, {0.75, 1}, {1.25, 1}, {1.75, 2},
                                      {2.5, 2},  {3.5, 4},  {5, 4}};
    const attn_dtype types[] = {ATTN_NVFP4, ATTN_MXFP4};
    for (int i = 0; i < 2; i++) {
        double row[64], back[64];
        uint8_t codes[32], scales[8];
        for (int at = 0; at < 64; at++)
            row[at] = at % 16 < 8 ? values[at % 8] : -values[at % 8];
        for (int at = 1; at < 8; at++) /* beside the group's 6 and -6 */
            row[at] = ties[at - 1][0] * (at % 2 ? 1 : -1);
        row[0] = 6;
        for (int at = 32; at < 64; at++)
            row[at] /= 64;
        reference_quantise(types[i], row, 64, codes, scales);
        reference_dequantise(types[i], codes, scales, 64, back);
        for (int at = 1; at < 8; at++)
            assert_near(back[at], ties[at - 1][1] * (at % 2 ? 1 : -1), 1e-6);
        for (int at = 8; at < 64; at++)
            assert_near(back[at], row[at], fabs(row[at]) * 1e-6);
    }
}

/* Of mxfp4: an exponent is that of the largest value, one more from 1.75 times that power of two
 * on. What is above 6 then is 6. */
static void mxfp4_scales_are_powers_of_two(void **state)
{
    (void)state;
    static const struct {
        double max;
        uint8_t scale;
        double back;
    } cases[] = {
        {6, 127, 6}, {6.9, 127, 6},           {7, 128, 8},      {7.9, 128, 8},
        {8, 128, 8}, {0x1p-126, 0, 0x1p-126}, {0x1p-149, 0, 0}, {0x1.fep127, 252, 0x1.8p127},
        {0, 0, 0},   {65504, 141, 65536}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double row[32] = {0}, back[32];
        uint8_t codes[16], scales[4] = {9, 9, 9, 9};
        row[31] = -cases[i].max;
        reference_quantise(ATTN_MXFP4, row, 32, codes, scales);
        reference_dequantise(ATTN_MXFP4, codes, scales, 32, back);
        assert_int_equal(scales[0], cases[i].scale);
        assert_int_equal(scales[1] | scales[2] | scales[3], 0);
        assert_true(back[31] == -cases[i].back);
    }
}

static void fp4_rows_of_zeros_read_as_zeros_and_rows_with_nan_as_nan(void **state)
{
    (void)state;
    const attn_dtype types[] = {ATTN_NVFP4, ATTN_MXFP4};
    for (int i = 0; i < 8; i++) {
        const attn_dtype type = types[i % 2];
        double row[64] = {0}, back[64];
        uint8_t codes[32], scales[8];
        if (i >= 2 && i < 6) /* in one group only */
            row[40] = i < 4 ? NAN : -INFINITY;
        if (i >= 6) /* a group of zeros beside one of values */
            row[3] = 5;
        reference_quantise(type, row, 64, codes, scales);
        reference_dequantise(type, codes, scales, 64, back);
        for (int d = 0; d < 64; d++)
            if (i >= 2 && i < 6)
                assert_true(isnan(back[d]));
            else if (d != 3)
                assert_true(back[d] == 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_key_gives_its_value),
        cmocka_unit_test(two_keys_weigh_by_the_exponent_of_their_scores),
        cmocka_unit_test(a_sink_logit_takes_weight_and_gives_no_value),
        cmocka_unit_test(no_key_gives_zero_and_minus_infinity),
        cmocka_unit_test(masks_choose_the_keys_that_are_averaged),
        cmocka_unit_test(fp4_groups_keep_what_they_can_and_round_the_rest),
        cmocka_unit_test(mxfp4_scales_are_powers_of_two),
        cmocka_unit_test(fp4_rows_of_zeros_read_as_zeros_and_rows_with_nan_as_nan),
        cmocka_unit_test(soft_cap_and_alibi_follow_the_scale_in_that_order),
        cmocka_unit_test(a_nan_value_reaches_only_the_queries_that_see_it),
        cmocka_unit_test(random_groups_equal_the_plain_quotient_of_sums),
        cmocka_unit_test(every_half_survives_a_round_trip),
        cmocka_unit_test(halves_round_to_nearest_even_and_overflow_to_infinity),
        cmocka_unit_test(quantised_rows_keep_their_maximum_and_round_the_rest),
        cmocka_unit_test(zero_rows_have_scale_zero_and_rows_with_nan_read_as_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
