/* note.h: what an engine tells another card's, or has it do.
 *
 * A note is pushed before the reply that it belongs to; an engine takes its inbox first and its
 * notes then, and looks at the notes first: so a note is known before whatever its reply led to.
 */
#ifndef ATTND_DAEMON_CARDS_NOTE_H
#define ATTND_DAEMON_CARDS_NOTE_H

#include "daemon/engine/core/state.h"

struct card_note {
    struct card_note *next;
    /* On the thread of the engine that it was pushed to; the note is its own from then on. */
    void (*heard)(struct engine *e, struct card_note *n);
};

/* Any thread. */
void card_note_push(struct engine *e, struct card_note *n);
/* All that was pushed, the oldest first; NULL: nothing. Its engine's thread, as the next. */
struct card_note *card_notes_take(struct engine *e);
void card_notes_hear(struct engine *e, struct card_note *first);

/* Has fn run on the engine's thread and waits for it. ATTN_ETIMEDOUT: it did not; ATTN_ENOMEM. */
attn_status cards_ask(struct engine *e, void (*fn)(struct engine *e, void *arg), void *arg);

#endif
