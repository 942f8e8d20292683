/* move_target.h: a move on its way between two cards' engines (cards/move.c): what it is, and what
 * both do with it. It is in the hands of one thread at a time.
 */
#ifndef ATTND_DAEMON_CARDS_MOVE_TARGET_H
#define ATTND_DAEMON_CARDS_MOVE_TARGET_H

#include "cache/kv_move.h"
#include "daemon/cards/internal.h"
#include "daemon/engine/core/message.h"

enum { CARD_MOVE_BLOCKS = 1024 }; /* that are copied together */

enum move_state {
    MOVE_COMES, /* target: a place for the blocks asked for, and their bytes */
    MOVE_BROUGHT, /* target: the bytes are there, or why not */
    MOVE_ASKED, /* source: so has the target done */
    MOVE_LEFT, /* target: the sequence is its own */
    MOVE_DROPPED, /* target: nothing comes of it */
};

struct card_move {
    /* first; run by the source's cards/move.c, whoever has the move */
    struct engine_message message;
    struct cards *cards;
    struct engine *from, *to;
    struct seq_name name;
    uint32_t pool;
    const struct backend_pool *peer; /* the source's */
    enum move_state state;
    uint32_t first, n; /* that are asked for */
    uint32_t blocks[CARD_MOVE_BLOCKS]; /* the source's, as in its table */
    struct backend_move list[CARD_MOVE_BLOCKS];
    struct backend_moves moves;
    uint8_t *staging; /* [staging_bytes]; NULL: the backends are of one module */
    size_t staging_bytes;
    bool is_last;
    struct kv_seq_export left; /* of the last: as it is then */
    struct trace_entry trace;
    /* the target's */
    struct kv_seq_import *import;
    kv_seq_id landed;
    bool has_landed;
    attn_status status;
    char why[WHY_BYTES];
    struct request *req; /* an operator's; NULL */
    uint64_t begun_ns, n_bytes;
};

/* Has the engine go on with it in this state; it is that engine's from then on. Any thread. */
void card_move_notify(struct engine *e, struct card_move *m, enum move_state state);
/* Copies m->list; the target is notified when it is there. false: m->status says why nothing was
 * begun. */
bool card_move_copy(struct engine *e, struct card_move *m);
/* NULL is fine. */
void card_move_free(struct card_move *m);

/* The target's: it goes on with a move that it was notified of. */
void card_move_comes(struct engine *e, struct card_move *m);
void card_move_brought(struct engine *e, struct card_move *m);
void card_move_dropped(struct engine *e, struct card_move *m);
void card_move_landed(struct engine *e, struct card_move *m);

static inline bool card_has_ended(const struct engine *e)
{
    return engine_health(e) != ATTN_OK || atomic_load(&e->is_stopping);
}

#endif
