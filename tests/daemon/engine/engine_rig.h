/* engine_rig.h: an engine without a thread, on a backend, a transport and a clock that the test
 * controls. Requests go through the real codec. Everything happens inside rig_run and rig_turn.
 */
#ifndef TESTS_DAEMON_ENGINE_RIG_H
#define TESTS_DAEMON_ENGINE_RIG_H

#include "daemon/engine/core/queue.h"
#include "tests/daemon/engine/engine_fixture.h"

enum {
    RIG_LAYERS = 4,
    RIG_Q_HEADS = 4,
    RIG_KV_HEADS = 2,
    RIG_DIM = 8,
    RIG_BLOCK_TOKENS = 8,
    RIG_SPLIT_TOKENS = 16, /* of blocks that are split by tokens */
    RIG_MAX_HELD_MOVES = 64,
    RIG_MAX_LOGGED = 4096,
    RIG_MAX_ROWS = 256,
    RIG_MAX_ROW_BLOCKS = 514,
    RIG_MAX_GIVEN = 128,
    RIG_UID = 5000,
};

/* one item as it reached the backend */
struct rig_item {
    uint32_t row, layer, pos, n_tokens, flags;
    uint32_t n_listed, first_listed; /* of lists: tokens, and the first of them */
    uint32_t n_chosen, key_base, ahead;
};
struct rig_batch {
    uint32_t first_item, n_items, n_patches;
    uint32_t first_copy, n_copies;
    uint32_t n_made, n_given; /* extremes */
};

/* The fake backend (rig_backend.c). Computes out = pos + t + 1 in every element and lse = -(pos +
 * t). */
struct rig;
struct backend {
    LIST_HEAD(, backend_pool) pools;
    const struct rig *rig; /* its cache is what patches are compared with */
    uint64_t kv_bytes;
    uint32_t max_in_flight;
    bool is_held; /* poll gives nothing back */
    bool is_right; /* outputs are those of a cache of zeros, which block_read gives; else not */
    uint32_t features; /* BACKEND_HAS_... */
    bool lacks_lists, lacks_choice, lacks_parts;
    attn_status fail_register; /* of host memory */
    uint32_t n_registered;
    uint64_t launch_ns, batch_ns, item_ns; /* by the engine's clock: to a start; of a batch */
    attn_status fail_submit, fail_batch; /* of the next one; then ATTN_OK again */
    uint32_t n_spared; /* so many come before that */
    uint32_t n_in_flight;
    struct backend_batch *in_flight[BACKEND_MAX_IN_FLIGHT];
    uint64_t end_ns[BACKEND_MAX_IN_FLIGHT]; /* of each in flight */
    uint64_t idle_ns; /* the device was without a batch between two */
    uint64_t last_end_ns;
    uint64_t used_bytes, last_place;
    uint32_t n_pools, max_pools; /* opened; 0: any number */
    attn_status over_max_pools; /* what opening one more gives */
    uint32_t n_written, n_read_now; /* blocks; by the engine itself */
    uint64_t block_ns; /* by the engine's clock: that takes */
    bool is_clearing; /* memory of new and larger pools */
    uint32_t n_asked; /* whether it is */
    attn_status fail_read, fail_write; /* of blocks */
    attn_status fail_resize; /* of pools */
    bool holds_moves; /* they come when rig_moves_come says so */
    struct backend_moves *held_moves[RIG_MAX_HELD_MOVES];
    uint32_t n_held_moves, n_move_groups;
    /* what it saw */
    struct rig_item items[RIG_MAX_LOGGED];
    struct rig_batch batches[RIG_MAX_LOGGED];
    struct backend_copy copies[RIG_MAX_LOGGED];
    struct backend_token_copy token_copies[RIG_MAX_LOGGED];
    attn_status fail_token_copy; /* of the next one; then ATTN_OK again */
    uint32_t n_items, n_batches, n_copies, n_token_copies;
    bool has_conflict; /* two appends of one (row, layer) were in flight together */
    bool has_patch_conflict; /* a patch named another block than the cache has there */
    /* a batch that fails has applied no table, and those behind it fail, too */
    bool fails_unpatched;
    uint32_t n_unpatched; /* batches in flight that will fail for that */
    /* block tables as it was told, one more each */
    uint32_t mirror[RIG_MAX_ROWS][RIG_MAX_ROW_BLOCKS];
    bool has_table_conflict; /* an item's table was another one */
    bool given[RIG_MAX_GIVEN][RIG_LAYERS]; /* blocks whose extremes it has, of all stripes */
    bool has_choice_conflict; /* a query had the choice of others, or they were of one stripe */
};

struct rig_answer {
    struct rig_answer *next;
    struct request *req;
    struct wire_arena arena;
    struct wire_reply reply;
};

/* a message as it was sent */
struct rig_sent {
    struct rig_sent *next;
    uint64_t id;
    size_t n_bytes;
    uint8_t bytes[];
};

struct rig {
    struct config cfg;
    struct backend backend;
    struct iobuf_pool *bufs;
    /* is_kept: tweak may say that a successor will take the cache up */
    struct engine_fixture fixture;
    struct kv *kv; /* of own, as the next */
    struct session_table *sessions;
    struct engine *engine;
    /* Another card, whose engine rig_run turns, too: where tweak sets has_second. */
    bool has_second;
    struct engine_fixture second_fixture;
    struct backend second_backend;
    struct engine *second; /* NULL: none */
    struct rig_answer *answers;
    struct principal principal; /* of requests made from now on */
    bool is_admin; /* requests come over the admin socket from now on */
    struct share *share; /* of requests made from now on: the connection that they come over */
    bool keeps_sent; /* for rig_resend */
    struct rig_sent *sent;
    uint64_t next_id;
    uint64_t session; /* of the requests made by the helpers below */
    uint32_t pool;
    uint32_t head_dim; /* of pools and steps that are made from now on; rig_open: RIG_DIM */
    uint32_t epoch; /* that the helpers name; 0: the sequence's at that moment */
};

extern const struct backend_ops rig_backend_ops;
void rig_backend_free_pools(struct backend *b); /* as a backend's close does */
extern uint64_t rig_now_ns; /* the engine's clock */
extern uint64_t rig_look_ns; /* what passes each time it is looked at; rig_open: 0 */

/* The device has done what is in flight and says so to all but the engine, up to n words. */
void rig_device_signals(struct rig *r, uint32_t n);
void rig_moves_come(struct rig *r); /* those that the backend holds are done */
/* Limits small enough to reach; tweak may change r->cfg and r->backend before the engine opens. */
void rig_open(struct rig *r, void (*tweak)(struct rig *r));
void rig_forget(struct rig *r); /* the replies so far, whose buffers others may have then */
/* For tweak: tenants t0, t1, ... with these shares, whose users are RIG_UID, RIG_UID + 1, ... They
 * are the fixture's, to be closed after rig_close. */
void rig_tenants(struct rig *r, uint32_t n, const uint32_t *shares);
/* Checks on the way out: nothing held, cache consistent, steps conserved. */
void rig_close(struct rig *r);
/* Between them the log goes nowhere, from LOG_LEVEL_INFO on, and its lines are counted. */
void rig_log_begin(void);
uint32_t rig_log_end(void);
/* Ends the engine and opens another one on the arena, which the test may change in between. */
attn_status rig_try_to_succeed(struct rig *r, void (*change)(struct rig *r),
                               struct engine_kept *out_kept);
/* The same of an engine that has worked, with success. */
struct engine_kept rig_succeed(struct rig *r, void (*change)(struct rig *r));
void rig_run(struct rig *r); /* turns until nothing is left to do */

/* Sends; the reply is looked up by the id returned. payload may be NULL. */
uint64_t rig_send(struct rig *r, Attnd__Request *h, const void *payload, size_t payload_bytes);
/* Sends the same message again, which r->keeps_sent has kept. */
void rig_resend(struct rig *r, uint64_t id);
/* NULL: not answered yet. Belongs to the rig. */
const Attnd__Reply *rig_reply(struct rig *r, uint64_t id);
const struct wire_reply *rig_wire_reply(struct rig *r, uint64_t id);
const Attnd__Reply *rig_answer(struct rig *r, uint64_t id); /* which must be there */
void rig_assert_says(const Attnd__Reply *reply, attn_status st, const char *part);
/* Sends, runs, and gives the reply, which must be there. */
const Attnd__Reply *rig_call(struct rig *r, Attnd__Request *h);

/* The requests (rig_requests.c). */
uint64_t rig_hello(struct rig *r, const char *name); /* a session */
uint32_t rig_pool(struct rig *r, const char *name, uint32_t n_blocks);
uint32_t rig_pool_of_split(struct rig *r, const char *name, uint32_t n_blocks, Attnd__Split split);
/* All of its layers have this window, and see these first tokens. */
uint32_t rig_pool_of_windows(struct rig *r, const char *name, uint32_t n_blocks,
                             uint32_t window_tokens, uint32_t sink_tokens);
uint64_t rig_send_open_with(struct rig *r, uint64_t seq, const struct kv_tokens *t);
const Attnd__Reply *rig_make_pool(struct rig *r, const char *name); /* the whole reply */
/* each returns the status of the reply */
attn_status rig_open_seq(struct rig *r, uint64_t seq);
attn_status rig_tokens(struct rig *r, uint64_t seq, uint32_t pos, const uint32_t *ids, uint32_t n);
attn_status rig_close_seq(struct rig *r, uint64_t seq, uint32_t epoch);
attn_status rig_fork(struct rig *r, uint64_t seq, uint64_t new_seq, uint32_t len);
attn_status rig_truncate(struct rig *r, uint64_t seq, uint32_t len);

/* A step of the rig's pool; epochs are rig_epoch's unless given. */
struct rig_step {
    uint32_t layer, flags, n_items;
    const uint64_t *seq;
    const uint32_t *pos, *n_tokens, *epoch;
    uint64_t timeout_us;
    const int32_t *parents; /* of all tokens; NULL: no trees */
    const int32_t *indices; /* [tokens][n_indices] of a sparse one */
    uint32_t n_indices, index_tokens;
    uint32_t choose_blocks;
    const uint32_t *key_base, *n_keys; /* of a step of parts */
};
uint64_t rig_send_step(struct rig *r, const struct rig_step *s);
/* One item, append and attend. */
uint64_t rig_send_item(struct rig *r, uint64_t seq, uint32_t layer, uint32_t pos,
                       uint32_t n_tokens);
attn_status rig_item(struct rig *r, uint64_t seq, uint32_t layer, uint32_t pos, uint32_t n_tokens);
uint32_t rig_epoch(struct rig *r, uint64_t seq); /* of a sequence that is not open: 1 */
/* Committed length. */
uint32_t rig_len(struct rig *r, uint64_t seq, uint32_t layer);

/* For brevity: sequences first, first + 1, ...; requests sent and not awaited; whole replies. */
void rig_open_many(struct rig *r, uint64_t first, uint64_t n);
uint64_t rig_send_wide(struct rig *r, uint64_t first, uint32_t n_items, uint32_t pos_of_all);
uint64_t rig_send_truncate(struct rig *r, uint64_t seq, uint32_t len);
uint64_t rig_send_commit(struct rig *r, uint64_t seq, const uint32_t *nodes, uint32_t n);
uint64_t rig_send_close(struct rig *r, uint64_t seq);
uint64_t rig_send_open(struct rig *r, uint64_t seq);
uint64_t rig_send_fork(struct rig *r, uint64_t seq, uint64_t new_seq); /* all of it */
uint64_t rig_send_adopt(struct rig *r, uint64_t seq);
const Attnd__Reply *rig_hello_with(struct rig *r, uint64_t resume, const char *feature);
const Attnd__Reply *rig_adopt(struct rig *r, uint64_t seq);

#endif
