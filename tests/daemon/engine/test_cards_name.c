/* test_cards_name.c: which card has a name: a table, no engine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "daemon/cards/names.h"

static bool is_short; /* of memory */

void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes)
{
    return is_short ? NULL : __real_calloc(n, bytes);
}

static struct seq_name name_of(uint64_t name)
{
    return (struct seq_name){.tenant = 3, .name = name};
}

static void a_name_without_memory_is_not_taken_for_another_cards(void **state)
{
    (void)state;
    struct cards *c;
    assert_int_equal(cards_open(2, 4, 4, &c), ATTN_OK);
    assert_int_equal(cards_opened(c, 1, name_of(7), 0, 3), ATTN_OK);
    assert_int_equal(cards_opened(c, 0, name_of(7), 0, 2), ATTN_EEXIST);
    is_short = true;
    assert_int_equal(cards_opened(c, 0, name_of(8), 0, 2), ATTN_ENOMEM);
    assert_int_equal(cards_opened(c, 0, name_of(7), 0, 2), ATTN_EEXIST);
    is_short = false;
    assert_int_equal(cards_opened(c, 0, name_of(8), 0, 2), ATTN_OK);
    assert_int_equal(cards_of_name(c, name_of(8)), 0);
    assert_int_equal(cards_of_name(c, name_of(7)), 1);
    cards_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_name_without_memory_is_not_taken_for_another_cards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
