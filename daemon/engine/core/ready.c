/* ready.c: a pool's ready tasks by age. New tasks arrive in order of age and go to a plain list;
 * tasks that become ready again after an item had to wait go to a pairing heap. Both are intrusive:
 * nothing is allocated, and a task whose deadline passes can be removed anywhere.
 */
#include "daemon/engine/core/ready.h"

static bool is_older(const struct task *a, const struct task *b)
{
    return a->stamp < b->stamp;
}

/* heap_child is the first child, heap_next the next sibling, heap_prev the previous sibling or, for
 * a first child, the parent. */
static struct task *meld(struct task *a, struct task *b)
{
    if (a == NULL || b == NULL)
        return a == NULL ? b : a;
    if (is_older(b, a)) {
        struct task *swap = a;
        a = b;
        b = swap;
    }
    b->heap_prev = a;
    b->heap_next = a->heap_child;
    if (b->heap_next != NULL)
        b->heap_next->heap_prev = b;
    a->heap_child = b;
    return a;
}

/* Melds a list of siblings: in pairs from the left, then all pairs from the right. */
static struct task *meld_siblings(struct task *t)
{
    struct task *pairs = NULL;
    while (t != NULL) {
        struct task *a = t, *b = t->heap_next;
        t = b == NULL ? NULL : b->heap_next;
        a->heap_next = a->heap_prev = NULL;
        if (b != NULL)
            b->heap_next = b->heap_prev = NULL;
        a = meld(a, b);
        a->heap_next = pairs;
        pairs = a;
    }
    struct task *root = NULL;
    while (pairs != NULL) {
        struct task *next = pairs->heap_next;
        pairs->heap_next = NULL;
        root = meld(root, pairs);
        pairs = next;
    }
    return root;
}

void ready_init(struct ready_queue *q)
{
    *q = (struct ready_queue){0};
    TAILQ_INIT(&q->fresh);
}

struct task *ready_first(const struct ready_queue *q)
{
    struct task *f = TAILQ_FIRST(&q->fresh), *w = q->woken_root;
    if (f == NULL || w == NULL)
        return f == NULL ? w : f;
    return is_older(w, f) ? w : f;
}

void ready_push_fresh(struct ready_queue *q, struct task *t)
{
    t->place = TASK_FRESH;
    TAILQ_INSERT_TAIL(&q->fresh, t, fresh);
}

void ready_push_woken(struct ready_queue *q, struct task *t)
{
    t->place = TASK_WOKEN;
    t->heap_prev = t->heap_next = t->heap_child = NULL;
    q->woken_root = meld(q->woken_root, t);
}

static void heap_remove(struct ready_queue *q, struct task *t)
{
    if (t == q->woken_root) {
        q->woken_root = meld_siblings(t->heap_child);
        return;
    }
    if (t->heap_prev->heap_child == t)
        t->heap_prev->heap_child = t->heap_next;
    else
        t->heap_prev->heap_next = t->heap_next;
    if (t->heap_next != NULL)
        t->heap_next->heap_prev = t->heap_prev;
    q->woken_root = meld(q->woken_root, meld_siblings(t->heap_child));
}

void ready_remove(struct ready_queue *q, struct task *t)
{
    if (t->place == TASK_FRESH)
        TAILQ_REMOVE(&q->fresh, t, fresh);
    else if (t->place == TASK_WOKEN)
        heap_remove(q, t);
    t->place = TASK_NOWHERE;
}
