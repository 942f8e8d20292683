/* test_void.c: batches that are submitted before their tensors are there and may be called off
 * (backend.h, may_be_void): they begin when the word is their value and no other, with what the
 * tensors are then; one that was called off has written nothing, and can be submitted again.
 *
 *     test_void [NAME [TESTS]]         as test_words
 */
#include "tests/gpu/rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#define LOOKS 300 /* of poll, while it must find nothing */

static const struct backend_ops *ops;
static uint64_t seed;
static const struct attn_layer_spec plain[2] = {{.scale = 0.1f}, {.scale = 0.2f}};

/* What each of the kernels that may be called off computes. */
static const struct shape {
    uint32_t num_q_heads, num_kv_heads, dim, n_items, context;
} shapes[] = {
    {8, 2, 128, 1, 30},   {8, 2, 128, 3, 40}, {8, 2, 64, 2, 70},
    {8, 2, 128, 40, 30},  {8, 8, 64, 40, 20}, {32, 1, 128, 2, 50},
    {64, 1, 128, 1, 200}, {4, 2, 256, 2, 60}, {8, 2, 128, 5, 300},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

/* The same step in two backends: `plain` computes it as ever. */
struct pair {
    struct rig r, plain;
    const struct shape *shape;
    struct backend_word wait, signal;
    struct backend_batch batch;
    size_t in_bytes, out_bytes; /* of all items, which lie behind one another */
    uint8_t *in, *kept;
};

static struct backend_pool_config config_of(const struct shape *s)
{
    struct backend_pool_config c = rig_config(plain, 2);
    c.num_q_heads = s->num_q_heads;
    c.num_kv_heads = s->num_kv_heads;
    c.head_dim_k = c.head_dim_v = s->dim;
    return c;
}

static void add_context(struct rig *r, const struct shape *s, uint64_t *state)
{
    for (uint32_t layer = 0; layer < 2; layer++) {
        rig_begin(r);
        for (uint32_t i = 0; i < s->n_items; i++)
            rig_step(r, i, layer, 0, s->context, BACKEND_APPEND, state);
        rig_run(r);
    }
    rig_begin(r);
}

static void add_step(struct rig *r, const struct shape *s, uint32_t layer, uint64_t *state)
{
    for (uint32_t i = 0; i < s->n_items; i++)
        rig_step(r, i, layer, s->context, 1, BACKEND_APPEND | BACKEND_ATTEND, state);
}

/* false: this backend can't. */
static bool pair_open(struct pair *p, const struct shape *s)
{
    struct backend_pool_config c = config_of(s);
    struct backend_info info;
    uint64_t a = seed, b = seed;
    p->shape = s;
    rig_open(&p->r, ops, &c, 0, -1);
    ops->info(p->r.b, &info);
    if (!(info.features & BACKEND_CAN_GIVE_UP)) {
        rig_close(&p->r);
        return false;
    }
    rig_open(&p->plain, ops, &c, 0, -1);
    add_context(&p->r, s, &a);
    add_context(&p->plain, s, &b);
    add_step(&p->r, s, 0, &a);
    add_step(&p->plain, s, 0, &b);
    rig_run(&p->plain);
    p->in = (uint8_t *)(uintptr_t)p->r.items[0].q;
    p->in_bytes = p->r.memory_used;
    p->kept = malloc(p->in_bytes);
    memcpy(p->kept, p->in, p->in_bytes);
    p->wait = (struct backend_word){rig_take(&p->r, 4), 7};
    p->signal = (struct backend_word){rig_take(&p->r, 4), 9};
    *p->wait.word = 6;
    *p->signal.word = 3;
    p->batch = (struct backend_batch){.pool = p->r.pool,
                                      .items = p->r.items,
                                      .n_items = p->r.n_items,
                                      .patches = p->r.patches,
                                      .n_patches = p->r.n_patches,
                                      .wait = &p->wait,
                                      .signals = &p->signal,
                                      .n_signals = 1,
                                      .may_be_void = true};
    return true;
}

static void pair_close(struct pair *p)
{
    free(p->kept);
    rig_close(&p->r);
    rig_close(&p->plain);
}

/* Until tensors_come nothing that matters is in them. false: its kernels can't be called off. */
static bool submit_early(struct pair *p)
{
    memset(p->in, 0xff, p->in_bytes);
    attn_status st = ops->submit(p->r.b, &p->batch);
    if (st == ATTN_ENOTSUP) {
        assert_non_null(strstr(ops->last_error(p->r.b), "may_be_void"));
        assert_null(ops->poll(p->r.b, 0));
        return false;
    }
    if (st != ATTN_OK)
        fail_msg("submit: %s", ops->last_error(p->r.b));
    return true;
}

static void tensors_come(struct pair *p)
{
    memcpy(p->in, p->kept, p->in_bytes);
}

static void write_word(const struct backend_word *w, uint32_t value)
{
    __atomic_store_n(w->word, value, __ATOMIC_RELEASE);
}

static void assert_nothing_comes(struct pair *p)
{
    for (int i = 0; i < LOOKS; i++)
        assert_null(ops->poll(p->r.b, 0));
    assert_null(ops->poll(p->r.b, 300000));
}

static void take(struct pair *p, struct backend_batch *want, bool is_void)
{
    assert_ptr_equal(ops->poll(p->r.b, RIG_POLL_NS), want);
    assert_int_equal(want->status, ATTN_OK);
    assert_int_equal(want->is_void, is_void);
}

/* What it has made is what is made of the same step without a word. */
static void assert_is_right(struct pair *p)
{
    const struct backend_pool_config *c = &p->r.config;
    size_t bytes = (size_t)c->num_q_heads * c->head_dim_v * 2;
    for (uint32_t i = 0; i < p->shape->n_items; i++) {
        assert_memory_equal(p->r.items[i].out, p->plain.items[i].out, bytes);
        assert_memory_equal(p->r.items[i].lse, p->plain.items[i].lse, c->num_q_heads * 4);
    }
    rig_compare_blocks(&p->r, &p->plain, "blocks", seed);
}

static void assert_is_untouched(struct pair *p)
{
    for (size_t i = 0; i < p->in_bytes; i++)
        assert_int_equal(p->in[i], 0xff); /* outputs lie between inputs */
    assert_int_equal(*p->signal.word, 3);
}

static void submit_again(struct pair *p)
{
    tensors_come(p);
    p->batch.wait = NULL;
    p->batch.may_be_void = false;
    assert_int_equal(ops->submit(p->r.b, &p->batch), ATTN_OK);
    take(p, &p->batch, false);
    assert_is_right(p);
    assert_int_equal(*p->signal.word, 9);
}

/* Runs check for every shape that can be; what was compared before is skipped where none can. */
static void for_each_shape(void (*check)(struct pair *p))
{
    static struct pair p;
    uint32_t n = 0;
    for (int i = 0; i < N_SHAPES; i++) {
        if (!pair_open(&p, &shapes[i]))
            break;
        if (submit_early(&p)) {
            n++;
            check(&p);
        }
        pair_close(&p);
    }
    if (n == 0)
        skip();
}

static void check_begin(struct pair *p)
{
    assert_nothing_comes(p);
    tensors_come(p);
    write_word(&p->wait, 7);
    take(p, &p->batch, false);
    assert_is_right(p);
    assert_int_equal(*p->signal.word, 9);
}

static void it_begins_when_the_word_is_its_value(void **state)
{
    (void)state;
    for_each_shape(check_begin);
}

static void check_beyond(struct pair *p)
{
    write_word(&p->wait, 8);
    assert_nothing_comes(p);
    ops->give_up(p->r.b);
    take(p, &p->batch, true);
    assert_is_untouched(p);
}

static void a_word_that_is_beyond_begins_nothing(void **state)
{
    (void)state;
    for_each_shape(check_beyond);
}

static void check_give_up(struct pair *p)
{
    ops->give_up(p->r.b);
    take(p, &p->batch, true);
    assert_is_untouched(p);
    write_word(&p->wait, 7); /* too late */
    assert_nothing_comes(p);
    assert_is_untouched(p);
    submit_again(p);
}

static void what_was_called_off_has_written_nothing(void **state)
{
    (void)state;
    for_each_shape(check_give_up);
}

static void check_late_give_up(struct pair *p)
{
    tensors_come(p);
    write_word(&p->wait, 7);
    struct backend_batch *back = ops->poll(p->r.b, RIG_POLL_NS);
    ops->give_up(p->r.b); /* there is none left */
    assert_ptr_equal(back, &p->batch);
    assert_false(back->is_void);
    assert_is_right(p);
}

static void what_is_done_is_not_called_off(void **state)
{
    (void)state;
    for_each_shape(check_late_give_up);
}

/* The second layer of the same sequences, behind the first. */
static void check_two(struct pair *p)
{
    uint64_t a = seed + 1;
    struct backend_info info;
    ops->info(p->r.b, &info);
    if (info.max_in_flight < 2) {
        check_give_up(p);
        return;
    }
    uint32_t n = p->r.n_items, n_patches = p->r.n_patches;
    add_step(&p->r, p->shape, 1, &a);
    struct backend_word wait = {p->wait.word, 8}, signal = {p->signal.word, 10};
    struct backend_batch second = {.pool = p->r.pool,
                                   .items = p->r.items + n,
                                   .n_items = p->r.n_items - n,
                                   .patches = p->r.patches + n_patches,
                                   .n_patches = p->r.n_patches - n_patches,
                                   .wait = &wait,
                                   .signals = &signal,
                                   .n_signals = 1,
                                   .may_be_void = true};
    assert_int_equal(ops->submit(p->r.b, &second), ATTN_OK);
    assert_nothing_comes(p);
    ops->give_up(p->r.b);
    take(p, &p->batch, true);
    take(p, &second, true);
    assert_int_equal(ops->submit(p->r.b, &p->batch), ATTN_OK);
    assert_int_equal(ops->submit(p->r.b, &second), ATTN_OK);
    tensors_come(p);
    write_word(&p->wait, 7);
    take(p, &p->batch, false);
    assert_is_right(p);
    ops->give_up(p->r.b);
    write_word(&p->wait, 8);
    take(p, &second, true);
    assert_int_equal(*p->signal.word, 9);
    p->r.n_items = n;
}

static void layers_follow_one_another(void **state)
{
    (void)state;
    for_each_shape(check_two);
}

/* block_read would wait for ever behind it. */
static void check_read(struct pair *p)
{
    uint8_t *bytes = malloc(1 << 20);
    assert_int_equal(ops->block_read(p->r.pool, 0, bytes), ATTN_OK);
    free(bytes);
    take(p, &p->batch, true);
    assert_is_untouched(p);
    submit_again(p);
}

static void what_is_ordered_with_batches_calls_them_off(void **state)
{
    (void)state;
    for_each_shape(check_read);
}

static void one_without_a_word_is_refused(void **state)
{
    (void)state;
    static struct pair p;
    if (!pair_open(&p, &shapes[0]))
        skip();
    p.batch.wait = NULL;
    assert_int_equal(ops->submit(p.r.b, &p.batch), ATTN_EINVAL);
    assert_non_null(strstr(ops->last_error(p.r.b), "may_be_void"));
    assert_null(ops->poll(p.r.b, 0));
    pair_close(&p);
}

int main(int argc, char **argv)
{
    int code = rig_start(argc, argv, &ops, &seed);
    if (code != 0)
        return code;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_begins_when_the_word_is_its_value),
        cmocka_unit_test(a_word_that_is_beyond_begins_nothing),
        cmocka_unit_test(what_was_called_off_has_written_nothing),
        cmocka_unit_test(what_is_done_is_not_called_off),
        cmocka_unit_test(layers_follow_one_another),
        cmocka_unit_test(what_is_ordered_with_batches_calls_them_off),
        cmocka_unit_test(one_without_a_word_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
