/* note.c: see note.h. */
#include "daemon/cards/note.h"

#include <semaphore.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/base/stack.h"

#define PATIENCE_NS (30 * UINT64_C(1000000000))

void card_note_push(struct engine *e, struct card_note *n)
{
    stack_push(&e->notes, n);
    engine_wake(e);
}

struct card_note *card_notes_take(struct engine *e)
{
    return stack_take_all(&e->notes);
}

void card_notes_hear(struct engine *e, struct card_note *first)
{
    stack_for_each(struct card_note, n, first)
        n->heard(e, n);
}

/* --- calls ------------------------------------------------------------------------------------ */

enum call_state { CALL_WAITS, CALL_RUNS, CALL_IS_LEFT }; /* left: nobody waits for it any more */

struct call {
    struct card_note note; /* first */
    void (*fn)(struct engine *e, void *arg);
    void *arg;
    _Atomic int state;
    sem_t done;
};

static void call_free(struct call *c)
{
    sem_destroy(&c->done);
    free(c);
}

static void call_run(struct engine *e, struct card_note *n)
{
    struct call *c = (struct call *)n;
    int waits = CALL_WAITS;
    if (!atomic_compare_exchange_strong(&c->state, &waits, CALL_RUNS)) {
        call_free(c);
        return;
    }
    c->fn(e, c->arg);
    sem_post(&c->done); /* it is the caller's again */
}

attn_status cards_ask(struct engine *e, void (*fn)(struct engine *e, void *arg), void *arg)
{
    if (!e->has_thread) {
        fn(e, arg);
        return ATTN_OK;
    }
    struct call *c = calloc(1, sizeof *c);
    if (c == NULL)
        return ATTN_ENOMEM;
    *c = (struct call){.note.heard = call_run, .fn = fn, .arg = arg};
    sem_init(&c->done, 0, 0);
    card_note_push(e, &c->note);
    while (!clock_wait(&c->done, PATIENCE_NS)) {
        int waits = CALL_WAITS;
        if (atomic_compare_exchange_strong(&c->state, &waits, CALL_IS_LEFT))
            return ATTN_ETIMEDOUT;
        /* it is at work with what is ours */
    }
    call_free(c);
    return ATTN_OK;
}
