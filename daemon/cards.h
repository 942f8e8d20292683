/* cards.h: what is above the engines of a daemon with several cards: which request goes to which,
 * where sequences are, and what engines tell each other. A daemon with one card has none of it.
 *
 * The first card's engine is the lead: doors give it everything, and engine_submit comes here. An
 * epoch on the wire has the card in its lowest bits, so a request that names one is sent on without
 * a look at anything; a request that only has a sequence's name needs the table of names.
 *
 * Any thread, unless said otherwise.
 */
#ifndef ATTND_DAEMON_CARDS_H
#define ATTND_DAEMON_CARDS_H

#include "daemon/engine.h"

enum { CARDS_MAX = 8 };

struct backend_batch;
struct cards;
struct engine;
struct pool;
struct request;

/* For n engines, which join in engine_open. ATTN_ENOMEM, also of random bytes. */
attn_status cards_open(uint32_t n, uint32_t max_pools, uint32_t max_sessions,
                       struct cards **out_cards);
void cards_close(struct cards *c); /* after all engines; NULL is fine */
/* An engine is open; the lead is the first. Main thread. */
void cards_join(struct cards *c, struct engine *e);
uint32_t cards_n(const struct cards *c);
/* How many there are to be. */
uint32_t cards_n_all(const struct cards *c);
struct engine *cards_engine(const struct cards *c, uint32_t card);
/* Bits of an epoch on the wire that name the card. */
uint32_t cards_epoch_bits(const struct cards *c);
/* Some card is not lost. */
bool cards_live(const struct cards *c);

/* Sends a request that a door gave the lead to whom it is for. */
void cards_submit(struct cards *c, struct request *req);

/* --- one card's part of a step that several compute; its engine's thread ---------------------- */

struct task;
/* Whether the item is of another card. */
bool cards_step_is_foreign(const struct request *req, uint32_t item);
/* The step's message is counted with this part of it. */
bool cards_step_counts(const struct request *req);
/* The outputs go where those of the other parts do, behind `head` bytes. As step_reserve_reply. */
attn_status cards_step_reserve(struct task *t, size_t head);
/* All items are done: their statuses are noted. What the part is answered with. */
attn_status cards_step_part_done(struct task *t);

/* --- batches of split pools (cards_part.c) ---------------------------------------------------- */

struct batch;
/* The lead's batches get parts. ATTN_ENOMEM. */
attn_status parts_init(struct engine *e);
void parts_fini(struct engine *e); /* of a half-opened engine, too */
/* The lead: sends each card its part of a batch, its own too. What the device is to be told of the
 * batch as a whole stands in b->device. */
void parts_submit(struct engine *e, struct batch *b);
/* The lead: a batch whose parts are all back, its outcome in b->device and b->why; NULL: none. */
struct batch *parts_take_back(struct engine *e);
/* Puts the next part that was sent to this engine on its device. false: there is none, or no
 * place. */
bool parts_launch(struct engine *e);
/* What this engine's device gave back was a part. */
void part_leave(struct engine *e, struct backend_batch *d);
/* A block of a split pool, all of it, from or to all cards. The lead's thread. */
attn_status cards_block_move(struct engine *lead, const struct pool *p, uint32_t block,
                             uint8_t *bytes, bool is_write, char *why, size_t why_bytes);
/* No card is lost. */
bool cards_are_whole(const struct cards *c);

/* When the oldest request that any of them holds came; 0: none is held. */
uint64_t cards_oldest_at_ns(const struct cards *c);

/* --- names ------------------------------------------------------------------------------------ */

/* A sequence of this name is open on some card. */
bool cards_know(struct cards *c, struct seq_name name);
/* The same, and that card is another than this one. */
bool cards_are_elsewhere(struct cards *c, uint32_t card, struct seq_name name);
/* A sequence is open on this card, or is no more. Its engine's thread. false: it is open on another
 * card, or there is no memory. */
bool cards_opened(struct cards *c, uint32_t card, struct seq_name name, uint32_t pool,
                  uint32_t epoch);
/* One that is open there has another epoch. */
void cards_epoch(struct cards *c, uint32_t card, struct seq_name name, uint32_t epoch);
void cards_closed(struct cards *c, uint32_t card, struct seq_name name);
/* A request that was placed by a name leaves. */
void cards_settle(struct cards *c, struct request *req);

/* --- sequences that move (cards_move.c); the engine's thread ---------------------------------- */

/* An operator's request: answered when the sequence is there, or why not. */
void cards_move_ask(struct engine *e, struct request *req, kv_seq_id seq);
/* At each turn, before anything of it is looked at: what can go on goes on. true: it did. */
bool cards_move_turn(struct engine *e);
/* The request must wait until a sequence has left: it is held back. Requests are asked in order. */
bool cards_move_holds(struct engine *e, struct request *req);
/* What was held back and is not any more, oldest first. */
struct request *cards_move_held(struct engine *e);
/* A sequence was cut to its first n_blocks, or is closed. */
void cards_move_cut(struct engine *e, uint32_t seq, uint32_t n_blocks);
void cards_move_closed(struct engine *e, uint32_t seq);
/* Blocks of this pool are being copied. */
bool cards_move_is_of(const struct cards *c, uint32_t pool);
/* The engine stops: what moves stays where it is. */
void cards_move_stop(struct engine *e);

/* --- sessions --------------------------------------------------------------------------------- */

/* The lead has begun or ended one: so do the others. The lead's thread. */
attn_status cards_session_begin(struct cards *c, uint32_t slot, uint64_t id, uint32_t tenant,
                                const char *client);
/* Whose a session is that requests will name; and that it is over. ATTN_ENOMEM. */
attn_status cards_tenant_set(struct cards *c, uint64_t session, uint32_t tenant);
void cards_tenant_forget(struct cards *c, uint64_t session);
void cards_session_end(struct cards *c, uint32_t slot, uint64_t id);
/* This card has nothing of an ended session left. false: the lead must wait for others. */
bool cards_session_let_go(struct engine *e, uint32_t slot);
/* A session of a predecessor: n_cards have something of it. Before the engines have threads. */
void cards_session_kept(struct cards *c, uint32_t slot, uint32_t n_cards);
/* Requests of a session's, by slot, that are inside engines other than the lead. */
_Atomic uint32_t *cards_held(const struct cards *c);
/* The request has been carried out: a repetition must not be, by another card either. */
void cards_saw(struct engine *e, uint32_t slot, uint64_t session, uint64_t request);

/* --- pools ------------------------------------------------------------------------------------ */

struct pool_count {
    uint64_t blocks, free, cached, sequences, bytes; /* free: and those that are cached, too */
};
/* What this card's pools have now. The engine's thread. */
void cards_publish(struct engine *e);
/* The least that any card but this engine's has left of its KV memory, if that is less than
 * most. */
uint64_t cards_least_free_bytes(const struct cards *c, const struct engine *but, uint64_t most);
/* Of all cards but e's own, as they last said; all cards: e is NULL. */
struct pool_count cards_pool_count(const struct cards *c, const struct engine *but, uint32_t index);
/* What the caches of the cards but this engine's count, added. */
void cards_stats_add(const struct cards *c, const struct engine *but, struct kv_stats *sum);
/* The lead has made a pool, or is about to drop it: so do the others. All or none. The lead's
 * thread. */
attn_status cards_pool_create(struct engine *lead, const struct pool *p,
                              const Attnd__PoolSpec *asked, char *why, size_t why_bytes);
attn_status cards_pool_drop(struct engine *lead, const struct pool *p, char *why, size_t why_bytes);

/* --- between engines -------------------------------------------------------------------------- */

/* Takes what others have told this engine. After its inbox was taken, before that is looked at. */
void cards_listen(struct engine *e);
/* Nobody has told it anything. */
bool cards_is_quiet(const struct engine *e);
/* Makes what the arenas of a predecessor say agree: of pools, before any engine takes up sequences;
 * then of sessions, and learns the names. Main thread, before any engine has a thread. */
attn_status cards_restore_pools(struct cards *c, char *why, size_t why_bytes);
void cards_restore(struct cards *c);
/* A card is lost: its sequences go; or, is_split, those of the lead that are split over it. Their
 * engine's thread; may be repeated. */
void cards_drop_sequences(struct engine *e, bool is_split);

#endif
