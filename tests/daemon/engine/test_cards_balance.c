/* test_cards_balance.c: which card gives to which: arithmetic, no engine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/cards/balance.h"
#include "tests/random.h"

static uint64_t seed = 3;

static void a_card_gives_only_where_it_is_short_and_another_is_not(void **state)
{
    (void)state;
    struct balance_card cards[3] = {{.n_blocks = 100, .n_free = 10},
                                    {.n_blocks = 100, .n_free = 30},
                                    {.n_blocks = 1000, .n_free = 900}};
    struct balance_move m = balance_room(cards, 3, 0);
    assert_int_equal(m.to, 2);
    assert_int_equal(m.n_blocks, (100 * 900 - 1000 * 10) / 1100); /* as free as each other then */
    assert_int_equal(balance_room(cards, 3, 1).n_blocks, 0); /* it is not short */
    assert_int_equal(balance_room(cards, 3, 2).n_blocks, 0);
    cards[2].is_lost = true;
    assert_int_equal(balance_room(cards, 3, 0).n_blocks, 0); /* the gap to the other is small */
    cards[1].n_free = 60;
    assert_int_equal(balance_room(cards, 3, 0).to, 1);
    assert_int_equal(balance_room(cards, 1, 0).n_blocks, 0);
    cards[0] = (struct balance_card){0}; /* a card without the pool */
    assert_int_equal(balance_room(cards, 3, 0).n_blocks, 0);
}

static void a_busy_card_gives_half_the_gap_of_what_is_active(void **state)
{
    (void)state;
    struct balance_card cards[2] = {{.n_blocks = 100, .n_free = 50, .busy_permille = 900},
                                    {.n_blocks = 100, .n_free = 80, .busy_permille = 300}};
    struct balance_move m = balance_load(cards, 2, 0, 60);
    assert_int_equal(m.to, 1);
    assert_int_equal(m.n_blocks, 60 * 600 / 1800);
    assert_int_equal(balance_load(cards, 2, 1, 60).n_blocks, 0);
    cards[1].busy_permille = 500;
    assert_int_equal(balance_load(cards, 2, 0, 60).n_blocks, 0); /* both have work */
    cards[1].busy_permille = 0;
    cards[1].n_free = 6;
    assert_int_equal(balance_load(cards, 2, 0, 60).n_blocks, 3); /* and room for more than that */
    cards[0].busy_permille = 700;
    assert_int_equal(balance_load(cards, 2, 0, 60).n_blocks, 0);
}

/* Sequences of any size are given as long as somebody wants to: it ends, and nobody
 * gives back to whom it has got from. */
static void what_was_given_is_not_given_back(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 2000; round++) {
        uint32_t n_cards = 2 + random_below(&seed, 3), n_moves = 0;
        struct balance_card cards[4] = {0};
        bool has_given[4][4] = {{false}};
        for (uint32_t i = 0; i < n_cards; i++) {
            cards[i].n_blocks = 1 + random_below(&seed, 1000);
            cards[i].n_free = random_below(&seed, (uint32_t)cards[i].n_blocks + 1);
        }
        for (uint32_t quiet = 0; quiet < n_cards;) {
            uint32_t from = random_below(&seed, n_cards);
            struct balance_move m = balance_room(cards, n_cards, from);
            if (m.n_blocks == 0) {
                quiet++;
                continue;
            }
            uint64_t n = 1 + random_below(&seed, (uint32_t)m.n_blocks);
            quiet = 0;
            assert_true(n <= cards[m.to].n_free && n <= cards[from].n_blocks - cards[from].n_free);
            cards[from].n_free += n;
            cards[m.to].n_free -= n;
            has_given[from][m.to] = true;
            assert_false(has_given[m.to][from]);
            assert_true(++n_moves < 4000);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_card_gives_only_where_it_is_short_and_another_is_not),
        cmocka_unit_test(a_busy_card_gives_half_the_gap_of_what_is_active),
        cmocka_unit_test(what_was_given_is_not_given_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
