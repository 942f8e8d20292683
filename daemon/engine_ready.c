/* engine_ready.c: ready tasks of a pool by age. New tasks come in order of age and go to a plain list;
 * tasks that become ready again (an item of theirs had to wait) go to a pairing heap. Both are
 * intrusive: nothing is allocated, and a task whose deadline passes is taken out from the middle.
 */
#include "daemon/engine_internal.h"

static bool is_older(const struct task *a, const struct task *b)
{
    return a->stamp < b->stamp;
}

/* In the heap, ready_child is the first child, ready_next the next sibling, ready_prev the sibling
 * before or, of a first child, the parent. */
static struct task *meld(struct task *a, struct task *b)
{
    if (a == NULL || b == NULL)
        return a == NULL ? b : a;
    if (is_older(b, a)) {
        struct task *swap = a;
        a = b;
        b = swap;
    }
    b->ready_prev = a;
    b->ready_next = a->ready_child;
    if (b->ready_next != NULL)
        b->ready_next->ready_prev = b;
    a->ready_child = b;
    return a;
}

/* One heap of a list of siblings: pairs from the left, then all from the right. */
static struct task *meld_siblings(struct task *t)
{
    struct task *pairs = NULL;
    while (t != NULL) {
        struct task *a = t, *b = t->ready_next;
        t = b == NULL ? NULL : b->ready_next;
        a->ready_next = a->ready_prev = NULL;
        if (b != NULL)
            b->ready_next = b->ready_prev = NULL;
        a = meld(a, b);
        a->ready_next = pairs;
        pairs = a;
    }
    struct task *root = NULL;
    while (pairs != NULL) {
        struct task *next = pairs->ready_next;
        pairs->ready_next = NULL;
        root = meld(root, pairs);
        pairs = next;
    }
    return root;
}

struct task *ready_first(const struct ready_queue *q)
{
    struct task *f = q->fresh_head, *w = q->woken_root;
    if (f == NULL || w == NULL)
        return f == NULL ? w : f;
    return is_older(w, f) ? w : f;
}

void ready_push_fresh(struct ready_queue *q, struct task *t)
{
    t->place = TASK_FRESH;
    t->ready_next = t->ready_child = NULL;
    t->ready_prev = q->fresh_tail;
    if (q->fresh_tail == NULL)
        q->fresh_head = t;
    else
        q->fresh_tail->ready_next = t;
    q->fresh_tail = t;
}

void ready_push_woken(struct ready_queue *q, struct task *t)
{
    t->place = TASK_WOKEN;
    t->ready_prev = t->ready_next = t->ready_child = NULL;
    q->woken_root = meld(q->woken_root, t);
}

void ready_remove(struct ready_queue *q, struct task *t)
{
    if (t->place == TASK_FRESH) {
        if (t->ready_prev == NULL)
            q->fresh_head = t->ready_next;
        else
            t->ready_prev->ready_next = t->ready_next;
        if (t->ready_next == NULL)
            q->fresh_tail = t->ready_prev;
        else
            t->ready_next->ready_prev = t->ready_prev;
    } else if (t->place == TASK_WOKEN) {
        if (t != q->woken_root) {
            if (t->ready_prev->ready_child == t)
                t->ready_prev->ready_child = t->ready_next;
            else
                t->ready_prev->ready_next = t->ready_next;
            if (t->ready_next != NULL)
                t->ready_next->ready_prev = t->ready_prev;
            q->woken_root = meld(q->woken_root, meld_siblings(t->ready_child));
        } else {
            q->woken_root = meld_siblings(t->ready_child);
        }
    }
    t->place = TASK_NOWHERE;
}
