/* test_split_extremes.c: which blocks' extremes are joined for a pool that is split by tokens, and
 * their join. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/cards/split/extremes.h"
#include "kernels/reference.h"
#include "tests/random.h"

enum { BLOCK_TOKENS = 16, N_BLOCKS = 200, N_ROWS = 6, N_LAYERS = 3, ROW_BLOCKS = 24 };

static const struct backend_pool_config whole = {.num_layers = N_LAYERS,
                                                 .num_q_heads = 4,
                                                 .num_kv_heads = 2,
                                                 .head_dim_k = 24,
                                                 .block_tokens = BLOCK_TOKENS,
                                                 .n_blocks = N_BLOCKS,
                                                 .n_table_rows = N_ROWS,
                                                 .max_row_blocks = ROW_BLOCKS};
static uint64_t random_state = 5;

static struct backend_item query(uint32_t row, uint32_t layer, const uint32_t *table, uint32_t pos,
                                 uint32_t n, bool appends)
{
    return (struct backend_item){.flags = BACKEND_ATTEND | (appends ? BACKEND_APPEND : 0),
                                 .table_row = row,
                                 .layer = layer,
                                 .block_table = table,
                                 .pos = pos,
                                 .n_tokens = n,
                                 .n_chosen = 3};
}

/* Finds what a batch of the item lacks, and gives it; returns how many. */
static uint32_t join(struct split_extremes *x, struct extremes_list *list,
                     const struct backend_item *item, const struct backend_patch *patches,
                     uint32_t n_patches)
{
    const struct backend_batch batch = {
        .items = item, .n_items = 1, .patches = patches, .n_patches = n_patches};
    assert_int_equal(extremes_find(x, &whole, &batch, list), ATTN_OK);
    extremes_note(x, &whole, list);
    return list->n;
}

/* The test changes entries behind the pool's back: a step that looked would find other blocks. */
static void a_step_looks_at_new_blocks_only(void **state)
{
    (void)state;
    uint32_t table[ROW_BLOCKS];
    struct split_extremes x = {0};
    struct extremes_list list = {0};
    for (uint32_t i = 0; i < ROW_BLOCKS; i++)
        table[i] = i;
    struct backend_item item = query(1, 2, table, 160, 1, true);
    assert_int_equal(join(&x, &list, &item, NULL, 0), 9); /* all but the first and the newest */
    for (uint32_t i = 0; i < 8; i++)
        table[i] = 100 + i;
    item.pos = 161;
    assert_int_equal(join(&x, &list, &item, NULL, 0), 0);
    item.pos = 176;
    assert_int_equal(join(&x, &list, &item, NULL, 0), 1);
    assert_int_equal(list.list[0].block, 10);
    const struct backend_patch patch = {1, 6, 106};
    item.pos = 177;
    assert_int_equal(join(&x, &list, &item, &patch, 1), 2); /* entries 6 and 7 */
    item = query(1, 2, table, 80, 2, true); /* writes entry 5 */
    assert_int_equal(join(&x, &list, &item, NULL, 0), 0);
    item = query(1, 2, table, 177, 1, false);
    assert_int_equal(join(&x, &list, &item, NULL, 0), 1);
    assert_int_equal(list.list[0].block, 105);
    extremes_forget(&x, &whole, 3); /* as it is in some row, all are looked at */
    assert_int_equal(join(&x, &list, &item, NULL, 0), 4);
    extremes_forget_all(&x);
    free(list.list);
}

/* A model that looks at all blocks each time. Rows share blocks until they write to them. */
struct model {
    bool has[N_BLOCKS][N_LAYERS];
    uint32_t table[N_ROWS][ROW_BLOCKS];
    uint32_t n_blocks[N_ROWS], n_users[N_BLOCKS];
};

static uint32_t block_take(struct model *m)
{
    uint32_t block = random_below(&random_state, N_BLOCKS);
    while (m->n_users[block] > 0)
        block = (block + 1) % N_BLOCKS;
    m->n_users[block] = 1;
    return block;
}

static void entry_set(struct model *m, struct backend_batch *batch, struct backend_patch *patches,
                      uint32_t row, uint32_t index, uint32_t block)
{
    m->table[row][index] = block;
    patches[batch->n_patches++] = (struct backend_patch){row, index, block};
}

/* The row becomes empty, or the beginning of another one. */
static void row_begin(struct model *m, struct backend_batch *batch, struct backend_patch *patches,
                      uint32_t row)
{
    const uint32_t of = random_below(&random_state, N_ROWS);
    while (m->n_blocks[row] > 0)
        m->n_users[m->table[row][--m->n_blocks[row]]]--;
    const uint32_t n = random_below(&random_state, m->n_blocks[of] + 1);
    for (uint32_t i = 0; i < n; i++) {
        entry_set(m, batch, patches, row, i, m->table[of][i]);
        m->n_users[m->table[of][i]]++;
    }
    m->n_blocks[row] = n;
}

/* Makes room for what the item writes: shared blocks are copied, new ones are added. */
static void write_room(struct model *m, struct backend_batch *batch, struct backend_patch *patches,
                       struct backend_copy *copies, const struct backend_item *d)
{
    const uint32_t row = d->table_row, end = (d->pos + d->n_tokens - 1) / BLOCK_TOKENS + 1;
    for (uint32_t k = d->pos / BLOCK_TOKENS; k < end; k++) {
        const uint32_t old = m->table[row][k];
        if (k < m->n_blocks[row] && m->n_users[old] == 1)
            continue;
        const uint32_t block = block_take(m);
        entry_set(m, batch, patches, row, k, block);
        if (k >= m->n_blocks[row])
            continue;
        m->n_users[old]--;
        copies[batch->n_copies++] = (struct backend_copy){old, block};
        memset(m->has[block], 0, sizeof m->has[block]);
    }
    m->n_blocks[row] = end > m->n_blocks[row] ? end : m->n_blocks[row];
    for (uint32_t k = d->pos / BLOCK_TOKENS; k < end; k++)
        m->has[m->table[row][k]][d->layer] = false;
}

static void model_check(struct model *m, const struct backend_item *d,
                        const struct extremes_list *list)
{
    const uint32_t end = (d->pos + d->n_tokens - 1) / BLOCK_TOKENS;
    uint32_t n = 0;
    for (uint32_t k = 1; end + 1 > d->n_chosen && k < end; k++) {
        const uint32_t block = m->table[d->table_row][k];
        if (m->has[block][d->layer])
            continue;
        assert_true(n < list->n);
        assert_int_equal(list->list[n].block, block);
        assert_int_equal(list->list[n++].layer, d->layer);
    }
    assert_int_equal(n, list->n);
    for (uint32_t i = 0; i < n; i++)
        m->has[list->list[i].block][list->list[i].layer] = true;
}

static void what_is_found_is_what_a_look_at_all_blocks_finds(void **state)
{
    (void)state;
    static struct model m;
    struct split_extremes x = {0};
    struct extremes_list list = {0};
    uint32_t n_found = 0;
    for (uint32_t i = 0; i < 20000; i++) {
        struct backend_patch patches[4 * ROW_BLOCKS];
        struct backend_copy copies[ROW_BLOCKS];
        struct backend_batch batch = {.patches = patches, .copies = copies, .n_items = 1};
        const uint32_t row = random_below(&random_state, N_ROWS);
        const uint32_t most = ROW_BLOCKS * BLOCK_TOKENS;
        if (random_below(&random_state, 40) == 0)
            row_begin(&m, &batch, patches, row);
        const uint32_t tokens = m.n_blocks[row] * BLOCK_TOKENS;
        const bool appends = tokens == 0 || random_below(&random_state, 3) > 0;
        uint32_t n = 1 + random_below(&random_state, 30),
                 pos = random_below(&random_state, tokens + 1);
        if (random_below(&random_state, 4) > 0 || pos + n > most)
            pos = tokens > 20 ? tokens - random_below(&random_state, 20) : 0;
        n = pos + n > (appends ? most : tokens) ? (appends ? most : tokens) - pos : n;
        const struct backend_item item =
            query(row, random_below(&random_state, N_LAYERS), m.table[row], pos, n, appends);
        batch.n_items = n > 0; /* patches go even so */
        if (n > 0 && appends)
            write_room(&m, &batch, patches, copies, &item);
        batch.items = &item;
        assert_int_equal(extremes_find(&x, &whole, &batch, &list), ATTN_OK);
        extremes_note(&x, &whole, &list);
        if (n > 0)
            model_check(&m, &item, &list);
        n_found += list.n;
        if (random_below(&random_state, 200) == 0) { /* as one that comes from elsewhere */
            const uint32_t block = random_below(&random_state, N_BLOCKS);
            extremes_forget(&x, &whole, block);
            memset(m.has[block], 0, sizeof m.has[block]);
        }
    }
    assert_true(n_found > 1000);
    extremes_forget_all(&x);
    free(list.list);
}

static void joined_are_the_largest_and_the_smallest_of_all_cards(void **state)
{
    (void)state;
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
    enum { N = 5, N_CARDS = 3 };
    for (uint32_t d = 0; d < 3; d++) {
        struct backend_pool_config c = whole;
        c.q_dtype = c.kv_dtype = dtypes[d];
        const uint32_t n = N * c.num_kv_heads * 2 * c.head_dim_k;
        void *bytes[N_CARDS];
        double *want = calloc(n, sizeof *want);
        for (uint32_t k = 0; k < N_CARDS; k++) {
            bytes[k] = calloc(n, 4);
            for (uint32_t i = 0; i < n; i++) {
                const uint64_t bits = random_mixed(&random_state);
                const double value = bits % 11 == 0 ? (bits & 64 ? INFINITY : -INFINITY)
                                                    : ldexp((double)(int32_t)bits, -30);
                reference_put(c.q_dtype, bytes[k], i, value);
                const double stored = reference_get(c.q_dtype, bytes[k], i);
                const bool is_max = i / c.head_dim_k % 2 == 0;
                if (k == 0 || (stored > want[i]) == is_max)
                    want[i] = stored;
            }
        }
        extremes_join(&c, bytes, N_CARDS, N);
        for (uint32_t k = 0; k < N_CARDS; k++) {
            for (uint32_t i = 0; i < n; i++)
                assert_true(reference_get(c.q_dtype, bytes[k], i) == want[i]);
            free(bytes[k]);
        }
        free(want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_looks_at_new_blocks_only),
        cmocka_unit_test(what_is_found_is_what_a_look_at_all_blocks_finds),
        cmocka_unit_test(joined_are_the_largest_and_the_smallest_of_all_cards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
