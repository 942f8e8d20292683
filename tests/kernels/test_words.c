/* test_words.c: batches that wait for a word and write one (backend.h): nothing begins before the
 * word is there, inputs are read after it, outputs are there before the signal, and what cannot be
 * is refused by name.
 *
 *     test_words [NAME [TESTS]]        NAME cpu, cuda (the default), hip or a module of the
 *     executor
 *
 * Exit code 77: the backend cannot be opened here.
 */
#include "proto/attn_time.h"
#include "tests/gpu/rig.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#define LOOKS 3000 /* of poll, while it must find nothing */
#define WAIT_NS 60000000000u

enum { N_TOKENS = 4, N_HEADS = 8, DIM = 64 }; /* as the tuned kernels take them, too */
enum { OUT_BYTES = N_TOKENS * N_HEADS * DIM * 2 };

static const struct backend_ops *ops;
static uint64_t seed;
static const struct attn_layer_spec plain[1] = {{.scale = 0.125f}};

static struct backend_info info_of(const struct rig *r)
{
    struct backend_info info;
    r->ops->info(r->b, &info);
    return info;
}

/* false: this backend has no words. */
static bool open_rig(struct rig *r)
{
    struct backend_pool_config c = rig_config(plain, 1);
    assert_int_equal(c.num_q_heads, N_HEADS);
    assert_int_equal(c.head_dim_v, DIM);
    rig_open(r, ops, &c, 0, -1);
    rig_begin(r);
    if (info_of(r).features & BACKEND_HAS_WORDS)
        return true;
    rig_close(r);
    return false;
}

/* The n items that were added last. */
static struct backend_batch batch_of(const struct rig *r, uint32_t n, uint32_t first_patch)
{
    return (struct backend_batch){.pool = r->pool,
                                  .items = r->items + r->n_items - n,
                                  .n_items = n,
                                  .patches = r->patches + first_patch,
                                  .n_patches = r->n_patches - first_patch};
}

static void submit(struct rig *r, struct backend_batch *batch)
{
    if (r->ops->submit(r->b, batch) != ATTN_OK)
        fail_msg("submit: %s", r->ops->last_error(r->b));
}

static void poll(struct rig *r, struct backend_batch *want)
{
    assert_ptr_equal(r->ops->poll(r->b, WAIT_NS), want);
    assert_int_equal(want->status, ATTN_OK);
}

static uint32_t *take_word(struct rig *r, uint32_t value)
{
    uint32_t *w = rig_take(r, sizeof *w);
    *w = value;
    return w;
}

static uint32_t read_word(const uint32_t *w)
{
    return __atomic_load_n(w, __ATOMIC_ACQUIRE);
}

static void write_word(uint32_t *w, uint32_t value)
{
    __atomic_store_n(w, value, __ATOMIC_RELEASE);
}

static void assert_is_poison(const void *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(((const uint8_t *)p)[i], 0xff);
}

/* Swaps an item's tensors with what was kept of them, so that a batch that begins early reads
 * something else. */
static void swap_inputs(const struct backend_item *it, uint8_t *kept)
{
    const struct {
        const void *p;
        size_t bytes;
    } parts[] = {{it->q, OUT_BYTES}, {it->k, OUT_BYTES / 4}, {it->v, OUT_BYTES / 4}};
    for (int i = 0; i < 3; i++) {
        uint8_t *p = (uint8_t *)(uintptr_t)parts[i].p;
        for (size_t k = 0; k < parts[i].bytes; k++, kept++) {
            uint8_t x = p[k];
            p[k] = *kept;
            *kept = x;
        }
    }
}

/* `before` does not reach `value`, `after` does. */
static void check_wait(uint32_t before, uint32_t value, uint32_t after)
{
    static struct rig r, other;
    static uint8_t kept[OUT_BYTES * 3 / 2];
    uint64_t a = seed, b = seed;
    if (!open_rig(&r))
        skip();
    open_rig(&other);
    struct backend_item *it = rig_step(&r, 0, 0, 0, N_TOKENS, 3, &a);
    const struct backend_item *want = rig_step(&other, 0, 0, 0, N_TOKENS, 3, &b);
    rig_run(&other);

    const struct backend_word wait = {take_word(&r, before), value};
    const struct backend_word signal = {take_word(&r, 3), 9};
    struct backend_batch batch = batch_of(&r, 1, 0);
    batch.wait = &wait;
    batch.signals = &signal;
    batch.n_signals = 1;
    memset(kept, 0xff, sizeof kept);
    swap_inputs(it, kept);
    submit(&r, &batch);
    for (int i = 0; i < LOOKS; i++)
        assert_null(r.ops->poll(r.b, 0));
    assert_null(r.ops->poll(r.b, 1000000)); /* looks for errors meanwhile */
    assert_is_poison(it->out, OUT_BYTES);
    assert_int_equal(read_word(signal.word), 3);

    swap_inputs(it, kept);
    write_word(wait.word, after);
    poll(&r, &batch);
    assert_int_equal(read_word(signal.word), 9);
    assert_memory_equal(it->out, want->out, OUT_BYTES);
    rig_close(&r);
    rig_close(&other);
}

static void a_batch_begins_when_its_word_is_written(void **state)
{
    (void)state;
    check_wait(4, 5, 5);
}

static void an_early_word_may_wrap(void **state)
{
    (void)state;
    check_wait(0xfffffffe, 1, 7);
}

/* The second batch's q is the first's output. Their rows are apart, so that a device that may run
 * them side by side has nothing but the word to order them by. */
static void a_signal_comes_after_the_outputs(void **state)
{
    (void)state;
    static struct rig r, other;
    if (!open_rig(&r))
        skip();
    open_rig(&other);
    struct rig *rigs[] = {&other, &r};
    const void *out[2];
    for (int k = 0; k < 2; k++) {
        struct rig *x = rigs[k];
        uint64_t s = seed;
        rig_step(x, 1, 0, 0, N_TOKENS, BACKEND_APPEND, &s);
        rig_run(x);
        x->n_patches = 0;
        struct backend_item *first = rig_step(x, 0, 0, 0, N_TOKENS, 3, &s);
        struct backend_batch one = batch_of(x, 1, 0);
        uint32_t n_patches = x->n_patches;
        struct backend_item *second = rig_step(x, 1, 0, 0, N_TOKENS, BACKEND_ATTEND, &s);
        second->q = first->out;
        struct backend_batch two = batch_of(x, 1, n_patches);
        const struct backend_word word = {take_word(x, 0), 1};
        bool is_beside = k == 1 && info_of(x).max_in_flight > 1;
        if (k == 1) {
            one.signals = &word;
            one.n_signals = 1;
            two.wait = &word;
        }
        submit(x, &one);
        if (is_beside)
            submit(x, &two);
        poll(x, &one);
        if (!is_beside)
            submit(x, &two);
        poll(x, &two);
        out[k] = second->out;
    }
    assert_memory_equal(out[0], out[1], OUT_BYTES);
    rig_close(&r);
    rig_close(&other);
}

/* Somebody who watches the word, and no poll. */
struct watcher {
    const struct backend_word *signal;
    const void *out;
    uint8_t seen[OUT_BYTES];
};

static void *watch(void *arg)
{
    struct watcher *w = arg;
    while (read_word(w->signal->word) != w->signal->value)
        attn_cpu_pause();
    memcpy(w->seen, w->out, OUT_BYTES);
    return NULL;
}

static void who_sees_the_signal_sees_the_outputs(void **state)
{
    (void)state;
    static struct rig r;
    static struct watcher w;
    uint64_t s = seed;
    if (!open_rig(&r))
        skip();
    for (uint32_t i = 0; i < 8; i++) {
        rig_begin(&r);
        struct backend_item *it = rig_step(&r, i, 0, 0, N_TOKENS, 3, &s);
        const struct backend_word signal = {take_word(&r, i), i + 1};
        struct backend_batch batch = batch_of(&r, 1, 0);
        batch.signals = &signal;
        batch.n_signals = 1;
        w = (struct watcher){.signal = &signal, .out = it->out};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, watch, &w), 0);
        submit(&r, &batch);
        poll(&r, &batch);
        pthread_join(thread, NULL);
        assert_memory_equal(w.seen, it->out, OUT_BYTES);
    }
    rig_close(&r);
}

/* As many as a kernel tells by itself, and more. */
static void all_signals_of_a_batch_are_written(void **state)
{
    (void)state;
    static struct rig r;
    uint64_t s = seed;
    if (!open_rig(&r))
        skip();
    for (uint32_t n = 1; n <= 19; n += 3) {
        struct backend_word signals[20];
        rig_begin(&r);
        struct backend_item *it = rig_step(&r, n, 0, 0, N_TOKENS, 3, &s);
        for (uint32_t i = 0; i < 20; i++)
            signals[i] = (struct backend_word){take_word(&r, 5), 100 * n + i};
        struct backend_batch batch = batch_of(&r, 1, 0);
        batch.signals = signals;
        batch.n_signals = n;
        submit(&r, &batch);
        poll(&r, &batch);
        for (uint32_t i = 0; i < 20; i++)
            assert_int_equal(read_word(signals[i].word), i < n ? 100 * n + i : 5);
        assert_int_equal(((uint16_t *)it->out)[0] == 0xffff, 0);
    }
    rig_close(&r);
}

/* What one backend exports is the same memory in another; k and v come from it, out goes to it. */
static void a_region_is_one_memory_for_both(void **state)
{
    (void)state;
    static struct rig r, other;
    struct backend_region made, mapped = {0}, none = {0};
    char why[256] = "";
    uint64_t s = seed;
    int fd = -1;
    if (!open_rig(&r))
        skip();
    open_rig(&other);
    if ((info_of(&r).features & BACKEND_HAS_REGIONS) == 0) {
        rig_close(&r);
        rig_close(&other);
        skip();
    }
    const uint64_t bytes = BACKEND_REGION_ALIGN;
    assert_int_equal(ops->region_open(r.b, bytes, -1, &made, why, sizeof why), ATTN_OK);
    assert_int_equal(made.bytes, bytes);
    assert_int_equal(ops->region_export(r.b, &made, &fd), ATTN_OK);
    assert_int_not_equal(ops->region_open(other.b, 2 * bytes, fd, &mapped, why, sizeof why),
                         ATTN_OK);
    assert_string_not_equal(why, "");
    assert_int_equal(ops->region_open(other.b, bytes, fd, &mapped, why, sizeof why), ATTN_OK);
    close(fd);

    struct backend_item *first = rig_step(&r, 0, 0, 0, N_TOKENS, 3, &s);
    void *const plain_out = first->out;
    struct backend_batch batch = batch_of(&r, 1, 0);
    submit(&r, &batch);
    poll(&r, &batch);
    first->out = made.p + 64; /* the same step again, its output in the region */
    batch.n_patches = 0;
    submit(&r, &batch);
    poll(&r, &batch);

    rig_begin(&other);
    struct backend_item *it = rig_step(&other, 0, 0, 0, N_TOKENS, BACKEND_APPEND, &s);
    struct backend_batch append = batch_of(&other, 1, 0);
    submit(&other, &append);
    poll(&other, &append);
    it = rig_step(&other, 0, 0, 0, N_TOKENS, BACKEND_ATTEND, &s);
    it->q = mapped.p + 64;
    struct backend_batch attend = batch_of(&other, 1, other.n_patches);
    submit(&other, &attend);
    poll(&other, &attend);
    void *from_region = it->out;
    it->q = plain_out;
    it->out = rig_take(&other, OUT_BYTES);
    submit(&other, &attend);
    poll(&other, &attend);
    assert_memory_equal(from_region, it->out, OUT_BYTES);

    ops->region_close(other.b, &mapped);
    ops->region_close(r.b, &made);
    ops->region_close(r.b, &none);
    rig_close(&r);
    rig_close(&other);
}

static void words_that_cannot_be_are_refused_by_name(void **state)
{
    (void)state;
    static struct rig r;
    uint64_t s = seed;
    struct backend_pool_config c = rig_config(plain, 1);
    rig_open(&r, ops, &c, 0, -1);
    rig_begin(&r);
    struct backend_item *it = rig_step(&r, 0, 0, 0, N_TOKENS, 3, &s);
    struct backend_batch batch = batch_of(&r, 1, 0);
    struct backend_word word = {(uint32_t *)(void *)((char *)take_word(&r, 0) + 2), 0};
    const bool has_words = info_of(&r).features & BACKEND_HAS_WORDS;
    for (int i = 0; i < 2; i++) {
        batch.wait = i == 0 ? &word : NULL;
        batch.signals = &word;
        batch.n_signals = i == 1;
        assert_int_equal(r.ops->submit(r.b, &batch), has_words ? ATTN_EINVAL : ATTN_ENOTSUP);
        assert_non_null(strstr(r.ops->last_error(r.b), i == 0 ? "wait" : "signal"));
        assert_non_null(strstr(r.ops->last_error(r.b), has_words ? "multiple of 4" : ops->name));
        assert_null(r.ops->poll(r.b, 0));
    }
    assert_is_poison(it->out, OUT_BYTES);
    rig_close(&r);
}

int main(int argc, char **argv)
{
    int code = rig_start(argc, argv, &ops, &seed);
    if (code != 0)
        return code;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_batch_begins_when_its_word_is_written),
        cmocka_unit_test(an_early_word_may_wrap),
        cmocka_unit_test(a_signal_comes_after_the_outputs),
        cmocka_unit_test(who_sees_the_signal_sees_the_outputs),
        cmocka_unit_test(all_signals_of_a_batch_are_written),
        cmocka_unit_test(a_region_is_one_memory_for_both),
        cmocka_unit_test(words_that_cannot_be_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
