/* test_log.c: a line of the log as others read it: each is a JSON object whose members keep their
 * type, whatever values the line is made of. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "tests/random.h"

/* The member of the object that the line with these pairs makes. */
static json_t *member(const char *name, const char *pairs)
{
    static struct log_record kept[LOG_KEPT];
    uint64_t before = log_count();
    log_event(LOG_LEVEL_ERROR, "tried", "%s", pairs);
    assert_int_equal(log_read(before, kept), 1);
    json_error_t error;
    json_t *object = json_loads(kept[0].json, JSON_REJECT_DUPLICATES, &error);
    if (object == NULL)
        fail_msg("%s: %s", kept[0].json, error.text);
    json_t *value = json_incref(json_object_get(object, name));
    json_decref(object);
    assert_non_null(value);
    return value;
}

static void is_text(const char *name, const char *value)
{
    char pairs[256];
    snprintf(pairs, sizeof pairs, "%s=%s layer=3", name, value);
    json_t *is = member(name, pairs);
    assert_true(json_is_string(is));
    assert_string_equal(json_string_value(is), value);
    json_decref(is);
}

static void is_number(const char *value, double want)
{
    char pairs[256];
    snprintf(pairs, sizeof pairs, "total=%s peer=\"p q\"", value);
    json_t *is = member("total", pairs);
    assert_true(json_is_number(is));
    assert_true(json_number_value(is) == want);
    json_decref(is);
}

/* 73e12345 is a session like any other, not a number beyond all bounds. */
static void names_made_of_digits_stay_names(void **state)
{
    (void)state;
    static const char *const sessions[] = {"73e12345", "12345678", "00000000", "deadbeef",
                                           "1e000000", "4e4e4e4e", "99999999"};
    for (size_t i = 0; i < sizeof sessions / sizeof sessions[0]; i++)
        is_text("session", sessions[i]);
    is_text("sequence", "18446744073709551615");
    is_text("sequence", "7");
    is_text("request", "9223372036854775808");
}

static void random_sessions_make_lines_that_can_be_read(void **state)
{
    (void)state;
    uint64_t seed = 0x9e3779b9;
    for (int i = 0; i < 20000; i++) {
        char label[16];
        uint32_t x = (uint32_t)random_mixed(&seed);
        snprintf(label, sizeof label, "%08" PRIx32, x);
        if (i % 2 == 0) { /* those that look like numbers */
            for (int d = 0; d < 8; d++)
                label[d] = (char)('0' + (x >> (4 * d)) % 10);
            label[1 + (x >> 20) % 6] = 'e';
        }
        is_text("session", label);
    }
}

static void numbers_are_numbers_and_nothing_else_is(void **state)
{
    (void)state;
    is_number("0", 0);
    is_number("-1", -1);
    is_number("0.015625", 0.015625);
    is_number("-2.5", -2.5);
    is_number("1.5e-07", 1.5e-07);
    is_number("3e+20", 3e+20);
    is_number("123456789012345", 123456789012345);
    static const char *const others[] = {
        "-",     "nan", "-nan",      "inf", "-inf", "1.",
        ".5",    "01",  "1e",        "1e+", "0x12", "-0x1",
        "1.2.3", "--1", "1e+999999", "1_0", "12ab", "123456789012345678901"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        is_text("total", others[i]);
}

static void what_is_no_utf8_is_replaced(void **state)
{
    (void)state;
    static const struct {
        const char *in, *out;
    } cases[] = {
        {"\"gr\xc3\xbc\xc3\x9f \xf0\x9f\x90\x9d\"", "gr\xc3\xbc\xc3\x9f \xf0\x9f\x90\x9d"},
        {"\"cut \xe2\x82\"", "cut ??"},
        {"\"long \xc0\xaf\"", "long ??"},
        {"\"half \xed\xa0\x80\"", "half ???"},
        {"\"far \xf4\x90\x80\x80\"", "far ????"},
        {"\"lone \x80\xff\"", "lone ??"},
        {"\"two\nlines\x1b\"", "two?lines?"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char pairs[256];
        snprintf(pairs, sizeof pairs, "client=%s layer=1", cases[i].in);
        json_t *is = member("client", pairs);
        assert_string_equal(json_string_value(is), cases[i].out);
        json_decref(is);
    }
}

/* Values are cut where a line is full, perhaps between a backslash and what it escapes. */
static void a_line_cut_anywhere_can_be_read(void **state)
{
    (void)state;
    char pairs[1200];
    for (size_t n_plain = 990; n_plain < 1030; n_plain++) {
        int at = snprintf(pairs, sizeof pairs, "layer=3 client=\"");
        memset(pairs + at, 'x', n_plain);
        strcpy(pairs + at + n_plain, "\\\\\\\"\\\"end\" items=5");
        json_t *is = member("layer", pairs);
        assert_int_equal(json_integer_value(is), 3);
        json_decref(is);
    }
}

int main(void)
{
    log_init(LOG_LEVEL_ERROR, LOG_FORMAT_JSON);
    assert_non_null(freopen("/dev/null", "w", stderr));
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_made_of_digits_stay_names),
        cmocka_unit_test(random_sessions_make_lines_that_can_be_read),
        cmocka_unit_test(numbers_are_numbers_and_nothing_else_is),
        cmocka_unit_test(what_is_no_utf8_is_replaced),
        cmocka_unit_test(a_line_cut_anywhere_can_be_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
