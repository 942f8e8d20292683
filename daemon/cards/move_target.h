/* move_target.h: a move between the engines of two cards (cards/move.c), and the target's part in
 * it. One thread has the move at a time.
 */
#ifndef ATTND_DAEMON_CARDS_MOVE_TARGET_H
#define ATTND_DAEMON_CARDS_MOVE_TARGET_H

#include "cache/kv_move.h"
#include "daemon/cards/internal.h"
#include "daemon/engine/core/message.h"

enum { CARD_MOVE_BLOCKS = 1024 }; /* most blocks copied together */

enum move_state {
    MOVE_COMES, /* target: reserve the blocks and copy their bytes */
    MOVE_BROUGHT, /* target: the copy is done, or has failed */
    MOVE_ASKED, /* source: the target has the blocks, or has failed */
    MOVE_LEFT, /* target: the sequence is now its own */
    MOVE_DROPPED, /* target: the move is off; drop everything */
};

struct card_move {
    struct engine_message message; /* first; on_message is card_move_step on both sides */
    struct cards *cards;
    struct engine *from, *to;
    struct seq_name name;
    uint32_t pool;
    const struct backend_pool *peer; /* the source's pool */
    enum move_state state;
    uint32_t first, n; /* blocks of the sequence that are asked for */
    uint32_t blocks[CARD_MOVE_BLOCKS]; /* their numbers in the source's table */
    struct backend_move list[CARD_MOVE_BLOCKS];
    struct backend_moves moves;
    uint8_t *staging; /* [staging_bytes] host memory; NULL: the backends copy directly */
    size_t staging_bytes;
    bool is_last; /* these are the last blocks; the sequence is stopped */
    struct kv_seq_export left; /* the sequence as it was then */
    struct trace_entry trace;
    /* the target's */
    struct kv_seq_import *import;
    kv_seq_id landed;
    bool has_landed;
    attn_status status;
    char why[WHY_BYTES];
    struct request *req; /* of the operator who asked for it; NULL: none did */
    uint64_t begun_ns, n_bytes;
};

/* Passes the move in this state to an engine, which has it from then on. Any thread. */
void card_move_notify(struct engine *e, struct card_move *m, enum move_state state);
/* Starts to copy m->list; the target is notified when that is done. false: it did not start, and
 * m->status and m->why say why. */
bool card_move_copy(struct engine *e, struct card_move *m);
/* NULL is fine. */
void card_move_free(struct card_move *m);

/* The target's handlers for the states that it is notified of; card_move_landed is MOVE_LEFT's. */
void card_move_comes(struct engine *e, struct card_move *m);
void card_move_brought(struct engine *e, struct card_move *m);
void card_move_dropped(struct engine *e, struct card_move *m);
void card_move_landed(struct engine *e, struct card_move *m);

static inline bool card_has_ended(const struct engine *e)
{
    return engine_health(e) != ATTN_OK || atomic_load(&e->is_stopping);
}

#endif
