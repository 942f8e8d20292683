/* test_wire_codes.c: q, k and v as codes of 8 bits, against the nearest of all codes in float64. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/wire_codes.h"
#include "tests/random.h"

enum { GROUP = WIRE_CODES_GROUP, MANY = 5 * GROUP + 77 };

static double value(uint16_t bf16)
{
    uint32_t bits = (uint32_t)bf16 << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return (double)x;
}

/* Of E4M3, by its definition. */
static double of_code(unsigned code)
{
    const int exponent = (int)(code >> 3 & 15);
    const double fraction = code & 7;
    const double size = exponent == 0 ? ldexp(fraction, -9) : ldexp(8 + fraction, exponent - 10);
    return (code & 0x7f) == 0x7f ? NAN : code & 0x80 ? -size : size;
}

/* The distance from x to the nearest code. */
static double least_error(double x)
{
    double best = INFINITY;
    for (unsigned code = 0; code < 256; code++)
        if (!isnan(of_code(code)) && fabs(of_code(code) - x) < best)
            best = fabs(of_code(code) - x);
    return best;
}

static uint16_t any_bf16(uint64_t *seed, int kind)
{
    uint16_t x = (uint16_t)random_next(seed);
    if (kind == 0)
        return x; /* any bits */
    /* sizes around 1, or around what is small beside the largest */
    return (uint16_t)((x & 0x807f) | (uint32_t)(127 - (int)random_below(seed, kind == 1 ? 4 : 24))
                                         << 7);
}

static void check_group(const uint16_t *x, const uint8_t *codes, size_t n)
{
    double most = 0;
    float scale;
    memcpy(&scale, codes, sizeof scale);
    codes += sizeof scale;
    for (size_t i = 0; i < n; i++)
        if (isfinite(value(x[i])) && fabs(value(x[i])) > most)
            most = fabs(value(x[i]));
    if (most < 0x1p-100)
        most = 0;
    assert_true(fabs((double)scale - most / 448) <= most / 448 * 0x1p-23);
    for (size_t i = 0; i < n; i++) {
        const double v = value(x[i]), is = of_code(codes[i]);
        if (!isfinite(v)) {
            assert_true(isnan(is));
        } else if (most == 0) {
            assert_true(is == 0);
        } else {
            const double wanted = v / most * 448;
            assert_true(fabs(is - wanted) <= least_error(wanted) + fabs(wanted) * 0x1p-20);
        }
    }
}

static void each_element_becomes_the_nearest_code_of_its_group(void **state)
{
    (void)state;
    uint64_t seed = 1;
    for (int round = 0; round < 60; round++) {
        uint16_t x[MANY], back[MANY];
        uint8_t codes[2 * MANY];
        const size_t n = 1 + random_below(&seed, MANY);
        for (size_t i = 0; i < n; i++)
            x[i] = any_bf16(&seed, round % 3);
        if (round % 7 == 0)
            memset(x, 0,
                   GROUP * sizeof *x < n * sizeof *x ? sizeof(uint16_t) * GROUP : n * sizeof *x);
        memset(codes, 0xa5, sizeof codes);
        memset(back, 0x5a, sizeof back);
        wire_codes_put(x, n, codes);
        for (size_t at = 0, from = 0; at < n; at += GROUP, from += GROUP + sizeof(float))
            check_group(x + at, codes + from, n - at < GROUP ? n - at : GROUP);
        for (size_t i = wire_codes_bytes(n); i < sizeof codes; i++)
            assert_int_equal(codes[i], 0xa5);
        wire_codes_get(codes, n, back);
        for (size_t i = 0; i < n; i++) {
            const size_t group = i / GROUP * (GROUP + sizeof(float));
            float scale;
            memcpy(&scale, codes + group, sizeof scale);
            const double wanted = of_code(codes[group + sizeof scale + i % GROUP]) * (double)scale;
            if (isnan(wanted))
                assert_true(isnan(value(back[i])));
            else /* half of the last bit of bf16, whose least is 2^-133 */
                assert_true(fabs(value(back[i]) - wanted) <= fabs(wanted) * 0x1p-8 + 0x1p-134);
        }
        for (size_t i = n; i < MANY; i++)
            assert_int_equal(back[i], 0x5a5a);
    }
}

/* So what a pool of fp8 makes of its rows is what it made of them without. */
static void codes_of_what_came_from_codes_are_the_same(void **state)
{
    (void)state;
    uint64_t seed = 2;
    for (int round = 0; round < 200; round++) {
        uint16_t x[GROUP], back[GROUP];
        uint8_t first[GROUP + 4], second[GROUP + 4];
        for (size_t i = 0; i < GROUP; i++)
            x[i] = any_bf16(&seed, 1 + round % 2);
        wire_codes_put(x, GROUP, first);
        wire_codes_get(first, GROUP, back);
        wire_codes_put(back, GROUP, second);
        assert_memory_equal(first, second, sizeof first);
    }
}

static void codes_may_lie_where_the_elements_were(void **state)
{
    (void)state;
    uint64_t seed = 3;
    for (size_t n = 1; n <= MANY; n += 61) {
        uint16_t x[MANY];
        uint8_t apart[2 * MANY];
        for (size_t i = 0; i < n; i++)
            x[i] = any_bf16(&seed, 1);
        wire_codes_put(x, n, apart);
        wire_codes_put(x, n, (uint8_t *)x);
        assert_memory_equal(x, apart, wire_codes_bytes(n));
    }
}

static void sizes_that_no_codes_have_are_known(void **state)
{
    (void)state;
    size_t n = 0, got, n_sizes = 0;
    for (size_t bytes = 0; bytes < 3000; bytes++) {
        bool is_one = wire_codes_bytes(n) == bytes;
        got = 77;
        assert_int_equal(wire_codes_count(bytes, &got), is_one);
        assert_int_equal(got, is_one ? n : 77);
        n += is_one;
        n_sizes += is_one;
    }
    assert_true(n_sizes > 2800);
}

static void hostile_codes_are_numbers_or_nan(void **state)
{
    (void)state;
    static const float scales[] = {-1, NAN, -NAN, INFINITY, -INFINITY, 3e38f, 1e-45f, -0.0f};
    for (size_t s = 0; s < sizeof scales / sizeof scales[0]; s++) {
        uint8_t codes[GROUP + 4];
        uint16_t out[GROUP];
        memcpy(codes, &scales[s], sizeof(float));
        for (int i = 0; i < GROUP; i++)
            codes[4 + i] = (uint8_t)(i * 2 + 1);
        wire_codes_get(codes, GROUP, out);
        for (int i = 0; i < GROUP; i++)
            if (!(scales[s] >= 0) || isinf(scales[s]) || (codes[4 + i] & 0x7f) == 0x7f)
                assert_true(isnan(value(out[i])));
            else
                assert_false(isnan(value(out[i])));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_element_becomes_the_nearest_code_of_its_group),
        cmocka_unit_test(codes_of_what_came_from_codes_are_the_same),
        cmocka_unit_test(codes_may_lie_where_the_elements_were),
        cmocka_unit_test(sizes_that_no_codes_have_are_known),
        cmocka_unit_test(hostile_codes_are_numbers_or_nan),
    };
    return cmocka_run_group_tests_name("wire_codes", tests, NULL, NULL);
}
