/* test_iobuf.c: the buddy allocator against what a caller sees: alignment, no overlap, nothing
 * lost. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "daemon/base/iobuf.h"
#include "tests/daemon/engine/fake_host.h"
#include "tests/random.h"

static struct iobuf_pool *pool_of(size_t bytes)
{
    struct iobuf_pool *p = NULL;
    assert_int_equal(iobuf_pool_open(&fake_host, NULL, bytes, &p), ATTN_OK);
    return p;
}

/* Every buffer has come back: all of it can be had at once. */
static void assert_whole(struct iobuf_pool *p, size_t bytes)
{
    struct iobuf *all = iobuf_acquire(p, NULL, bytes);
    assert_non_null(all);
    assert_int_equal(all->capacity_bytes, bytes);
    iobuf_release(all);
}

static void total_is_rounded_up_to_a_power_of_two(void **state)
{
    (void)state;
    struct iobuf_pool *p = pool_of(3 * 4096 + 1);
    assert_whole(p, 4 * 4096);
    assert_null(iobuf_acquire(p, NULL, 4 * 4096 + 1));
    iobuf_pool_close(p);
    iobuf_pool_close(NULL);
}

static void buffers_have_the_size_asked_for_and_are_page_aligned(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 4095, 4096, 4097, 8192, 8193, 65536 + 64, 1 << 20};
    struct iobuf_pool *p = pool_of(8 << 20);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct iobuf *b = iobuf_acquire(p, NULL, sizes[i]);
        assert_non_null(b);
        assert_int_equal(b->n_bytes, sizes[i]);
        assert_true(b->capacity_bytes >= sizes[i] && b->capacity_bytes >= 4096);
        assert_true(b->capacity_bytes < 2 * sizes[i] || b->capacity_bytes == 4096);
        assert_int_equal((uintptr_t)b->data % 4096, 0);
        iobuf_release(b);
    }
    assert_whole(p, 8 << 20);
    iobuf_pool_close(p);
}

static void the_whole_region_can_be_taken_in_pages_and_then_at_once(void **state)
{
    (void)state;
    enum { N = 256 };
    struct iobuf_pool *p = pool_of(N * 4096);
    struct iobuf *b[N];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++)
            assert_non_null(b[i] = iobuf_acquire(p, NULL, 4096));
        assert_null(iobuf_acquire(p, NULL, 1));
        for (int i = 0; i < N; i++)
            iobuf_release(b[(i * 37 + round) % N]);
        /* kept small buffers must not stand in the way of a large one */
        struct iobuf *all = iobuf_acquire(p, NULL, N * 4096);
        assert_non_null(all);
        assert_null(iobuf_acquire(p, NULL, 1));
        iobuf_release(all);
    }
    assert_null(iobuf_acquire(p, NULL, N * 4096 + 1));
    assert_null(iobuf_acquire(p, NULL, SIZE_MAX));
    iobuf_pool_close(p);
}

static void random_buffers_never_overlap_and_all_memory_comes_back(void **state)
{
    (void)state;
    enum { N = 300, ROUNDS = 40000 };
    uint64_t seed = (uint64_t)time(NULL) | 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    struct iobuf_pool *p = pool_of(16 << 20);
    struct iobuf *held[N] = {0};
    uint8_t mark[N];
    for (int r = 0; r < ROUNDS; r++) {
        uint64_t x = random_mixed(&seed);
        int i = (int)(x % N);
        if (held[i] != NULL) {
            /* first, last and a middle byte still carry the owner's mark */
            assert_int_equal(held[i]->data[0], mark[i]);
            assert_int_equal(held[i]->data[held[i]->n_bytes / 2], mark[i]);
            assert_int_equal(held[i]->data[held[i]->n_bytes - 1], mark[i]);
            iobuf_release(held[i]);
            held[i] = NULL;
        } else {
            size_t n = 1 + (size_t)((x >> 20) % (1u << (4 + (x >> 50) % 17)));
            held[i] = iobuf_acquire(p, NULL, n);
            if (held[i] == NULL)
                continue;
            mark[i] = (uint8_t)(x >> 32);
            memset(held[i]->data, mark[i], n);
        }
    }
    for (int i = 0; i < N; i++)
        iobuf_release(held[i]);
    assert_whole(p, 16 << 20);
    iobuf_pool_close(p);
}

static void *churn(void *arg)
{
    struct iobuf_pool *p = arg;
    uint64_t seed = (uint64_t)(uintptr_t)&seed | 1;
    for (int i = 0; i < 20000; i++) {
        size_t n = 8 + (size_t)(random_mixed(&seed) % 20000);
        struct iobuf *b = iobuf_acquire(p, NULL, n);
        if (b == NULL)
            continue;
        uint64_t token = random_mixed(&seed);
        memcpy(b->data + n - 8, &token, 8);
        memcpy(b->data, &token, 8);
        if (memcmp(b->data + n - 8, &token, 8) != 0 && n >= 16)
            return "overlap";
        iobuf_release(b);
    }
    return NULL;
}

static void threads_share_the_pool(void **state)
{
    (void)state;
    struct iobuf_pool *p = pool_of(256 << 10);
    pthread_t t[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&t[i], NULL, churn, p), 0);
    for (int i = 0; i < 4; i++) {
        void *failure = NULL;
        pthread_join(t[i], &failure);
        assert_null(failure);
    }
    assert_whole(p, 256 << 10);
    iobuf_pool_close(p);
}

static void a_heap_buffer_is_released_like_any_other(void **state)
{
    (void)state;
    struct iobuf *b = iobuf_heap_new(1000);
    assert_non_null(b);
    assert_true(b->capacity_bytes >= 1000 && b->n_bytes == 1000 && b->pool == NULL);
    memset(b->data, 1, 1000);
    iobuf_release(b);
    iobuf_release(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(total_is_rounded_up_to_a_power_of_two),
        cmocka_unit_test(buffers_have_the_size_asked_for_and_are_page_aligned),
        cmocka_unit_test(the_whole_region_can_be_taken_in_pages_and_then_at_once),
        cmocka_unit_test(random_buffers_never_overlap_and_all_memory_comes_back),
        cmocka_unit_test(threads_share_the_pool),
        cmocka_unit_test(a_heap_buffer_is_released_like_any_other),
    };
    return cmocka_run_group_tests_name("iobuf", tests, NULL, NULL);
}
