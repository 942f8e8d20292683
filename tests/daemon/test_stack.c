/* test_stack.c: what is pushed by many threads is taken once each, every thread's in its order. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "daemon/base/stack.h"

enum { THREADS = 4, EACH = 20000 };

struct node {
    struct node *next;
    uint32_t thread, number;
};

static _Atomic(struct node *) head;
static _Atomic uint32_t n_first; /* pushes that found the stack empty */

static void what_is_pushed_first_is_taken_first(void **state)
{
    (void)state;
    struct node nodes[3] = {{.number = 0}, {.number = 1}, {.number = 2}};
    assert_null(stack_take_all(&head));
    assert_true(stack_is_empty(&head));
    for (int i = 0; i < 3; i++)
        assert_int_equal(stack_push(&head, &nodes[i]), i == 0);
    assert_false(stack_is_empty(&head));
    struct node *list = stack_take_all(&head);
    for (uint32_t i = 0; i < 3; i++, list = list->next)
        assert_int_equal(list->number, i);
    assert_null(list);
    assert_true(stack_is_empty(&head));
    assert_true(stack_push(&head, &nodes[1]));
    assert_ptr_equal(stack_take_all(&head), &nodes[1]);
    assert_null(nodes[1].next);
}

static void *push_many(void *arg)
{
    for (uint32_t i = 0; i < EACH; i++) {
        struct node *n = malloc(sizeof *n);
        *n = (struct node){.thread = (uint32_t)(uintptr_t)arg, .number = i};
        if (stack_push(&head, n))
            atomic_fetch_add(&n_first, 1);
    }
    return NULL;
}

static void threads_lose_nothing_and_keep_their_order(void **state)
{
    (void)state;
    pthread_t threads[THREADS];
    uint32_t n_taken = 0, n_batches = 0, number[THREADS] = {0};
    for (uintptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, push_many, (void *)i), 0);
    while (n_taken < THREADS * EACH) {
        struct node *list = stack_take_all(&head);
        n_batches += list != NULL;
        if (list == NULL)
            sched_yield();
        while (list != NULL) {
            struct node *n = list;
            list = n->next;
            assert_int_equal(n->number, number[n->thread]++);
            free(n); /* the pusher may touch it no more */
            n_taken++;
        }
    }
    for (uint32_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_true(stack_is_empty(&head));
    assert_int_equal(atomic_load(&n_first), n_batches); /* each batch had one to wake for */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_pushed_first_is_taken_first),
        cmocka_unit_test(threads_lose_nothing_and_keep_their_order),
    };
    return cmocka_run_group_tests_name("stack", tests, NULL, NULL);
}
