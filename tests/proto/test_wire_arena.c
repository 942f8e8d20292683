/* test_wire_arena.c: limits of the arena, and decoding when memory ends at any allocation. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "samples.h"

/* The linker sends malloc and free of this program's own objects here (--wrap). */
static long mallocs_until_failure = -1; /* -1: never */
static long n_live;
void *__real_malloc(size_t n);
void *__wrap_malloc(size_t n);
void __real_free(void *p);
void __wrap_free(void *p);

void *__wrap_malloc(size_t n)
{
    if (mallocs_until_failure == 0)
        return NULL;
    if (mallocs_until_failure > 0)
        mallocs_until_failure--;
    n_live++;
    return __real_malloc(n);
}

void __wrap_free(void *p)
{
    n_live -= p != NULL;
    __real_free(p);
}

static void allocations_are_aligned_and_apart(void **state)
{
    (void)state;
    uint8_t base[1000], *blocks[400];
    for (size_t skew = 0; skew < 16; skew++) {
        struct wire_arena a;
        wire_arena_init(&a, base + skew, sizeof base - skew, 1 << 20);
        for (size_t i = 0; i < 400; i++) {
            size_t n = i * 37 % 301;
            blocks[i] = wire_arena_alloc(&a, n);
            assert_non_null(blocks[i]);
            assert_int_equal((uintptr_t)blocks[i] % 16, 0);
            memset(blocks[i], (int)i, n);
        }
        for (size_t i = 0; i < 400; i++)
            for (size_t k = 0; k < i * 37 % 301; k++)
                assert_int_equal(blocks[i][k], (uint8_t)i);
        wire_arena_reset(&a);
        assert_int_equal(n_live, 0);
        assert_ptr_equal(wire_arena_alloc(&a, 1),
                         base + skew + (16 - (uintptr_t)(base + skew) % 16) % 16);
    }
}

static void an_arena_never_takes_more_than_its_limit(void **state)
{
    (void)state;
    static const size_t limits[] = {0, 1, 47, 48, 100, 4096, 16384, 16385, 100000};
    uint8_t base[256];
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        struct wire_arena a;
        size_t sum = 0;
        wire_arena_init(&a, base, sizeof base, limits[i]);
        while (wire_arena_alloc(&a, 24) != NULL)
            sum += 24;
        assert_in_range(sum, 0, limits[i]);
        assert_in_range(a.capacity_bytes + a.chunk_bytes, 0, limits[i]);
        assert_true(a.is_over_limit);
        assert_false(a.is_out_of_memory);
        wire_arena_reset(&a);
        assert_false(a.is_over_limit);
        assert_int_equal(n_live, 0);
    }
}

static void a_size_that_would_wrap_around_is_refused(void **state)
{
    (void)state;
    struct wire_arena a;
    uint8_t base[64];
    for (size_t less = 0; less < 64; less++) {
        wire_arena_init(&a, base + 1, sizeof base - 1, SIZE_MAX);
        mallocs_until_failure = 0;
        assert_null(wire_arena_alloc(&a, SIZE_MAX - less));
        mallocs_until_failure = -1;
        assert_int_equal(a.used_bytes, 0);
        wire_arena_reset(&a);
    }
}

/* Every sample under every limit: each allocation in turn is the one that fails. */
static void decoding_stops_cleanly_at_any_limit(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_samples; i++) {
        size_t n, limit = 0;
        uint8_t *msg = sample_build(&samples[i], &n);
        attn_status st = ATTN_EPROTO;
        long live = n_live;
        for (; st != ATTN_OK; limit += 8) {
            struct wire_arena a;
            struct wire_request q;
            struct wire_reply r;
            char why[256] = "";
            wire_arena_init(&a, NULL, 0, limit);
            st = samples[i].is_reply ? wire_reply_decode(msg, n, &a, &r, why, sizeof why)
                                     : wire_request_decode(msg, n, &a, &q, why, sizeof why);
            if (st != ATTN_OK) {
                assert_int_equal(st, ATTN_EPROTO);
                assert_non_null(strstr(why, "unpacked"));
                assert_true(a.is_over_limit);
                assert_int_equal(samples[i].is_reply ? r.request_id : q.request_id,
                                 SAMPLE_REQUEST_ID);
            }
            wire_arena_reset(&a);
            assert_int_equal(n_live, live);
            assert_in_range(limit, 0, 16384);
        }
        free(msg);
    }
}

/* A step of 4096 items, whose arrays need chunks of their own: each malloc in turn fails. */
static void decoding_stops_cleanly_at_any_failed_malloc(void **state)
{
    (void)state;
    enum { N = WIRE_MAX_STEP_ITEMS };
    static uint64_t seq[N];
    static uint32_t words[N];
    Attnd__Step step = ATTND__STEP__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    step.n_seq = step.n_epoch = step.n_pos = step.n_n_tokens = N;
    step.seq = seq;
    step.epoch = step.pos = step.n_tokens = words;
    h.body_case = ATTND__REQUEST__BODY_STEP;
    h.step = &step;
    size_t n = wire_request_head_bytes(&h);
    uint8_t *msg = aligned_alloc(WIRE_ALIGN, n);
    wire_request_head_encode(&h, 3, 0, msg);

    attn_status st = ATTN_ENOMEM;
    long live = n_live, nth = 0;
    for (; st != ATTN_OK; nth++) {
        struct wire_arena a;
        struct wire_request q;
        char why[256] = "";
        wire_arena_init(&a, NULL, 0, WIRE_ARENA_LIMIT_BYTES);
        mallocs_until_failure = nth;
        st = wire_request_decode(msg, n, &a, &q, why, sizeof why);
        mallocs_until_failure = -1;
        if (st != ATTN_OK) {
            assert_int_equal(st, ATTN_ENOMEM);
            assert_non_null(strstr(why, "no memory"));
            assert_int_equal(q.request_id, 3);
            assert_null(q.header);
        } else {
            assert_int_equal(q.header->step->n_seq, N);
        }
        wire_arena_reset(&a);
        assert_int_equal(n_live, live);
    }
    assert_in_range(nth, 4, 100);
    free(msg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(allocations_are_aligned_and_apart),
        cmocka_unit_test(an_arena_never_takes_more_than_its_limit),
        cmocka_unit_test(a_size_that_would_wrap_around_is_refused),
        cmocka_unit_test(decoding_stops_cleanly_at_any_limit),
        cmocka_unit_test(decoding_stops_cleanly_at_any_failed_malloc),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
