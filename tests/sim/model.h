/* model.h: clients and what each knows: sequences token by token, and every request it has ever
 * sent with the answer that it must have. peer.c (connections, faults, life), ask.c (making
 * requests) and answer.c (judging replies) share it. */
#ifndef TESTS_SIM_MODEL_H
#define TESTS_SIM_MODEL_H

#include "net.h"
#include "proto/wire.h"

enum {
    N_LAYERS = 2,
    Q_HEADS = 8,
    KV_HEADS = 2,
    HEAD_DIM = 16,
    Q_FLOATS = Q_HEADS * HEAD_DIM,
    KV_FLOATS = KV_HEADS * HEAD_DIM,
    GROUP_HEADS = Q_HEADS / KV_HEADS, /* of queries that share a KV head */
    GROUP_FLOATS = GROUP_HEADS * HEAD_DIM,
    MAX_LEN = 200,
    MAX_CUTS = 8,
    MAX_PROMPTS = 11, /* the last one parts from the others close to MAX_LEN */
    MAX_SEQS = 6, /* of a client */
    MAX_ITEMS = 4, /* of a step */
    MAX_ASKS = 4096, /* of a client */
    MAX_OPEN_ASKS = 8, /* unanswered ones of a client */
    MAX_PEERS = 24, /* those that died included */
};
#define BLOCK_TOKENS sim_plan.block_tokens
#define LEASE_NS (10 * SIM_S)
/* On the wire an epoch has the card in its lowest bits: of two or three cards. */
#define EPOCH_STEP (sim_plan.n_cards == 1 ? 1u : sim_plan.n_cards == 2 ? 2u : 4u)

struct ask;

/* What device_token makes of it. */
struct token {
    uint64_t of_head[KV_HEADS];
};

/* A sequence as its owner knows it. */
struct seq {
    uint64_t name;
    struct peer *owner;
    uint32_t epoch;
    uint32_t prompt; /* that its tokens are, of 1 to sim_plan.n_prompts; 0: tokens like no others */
    uint32_t len[N_LAYERS];
    struct token token[N_LAYERS][MAX_LEN];
    struct ask *step[N_LAYERS]; /* on its way */
    uint32_t n_readers; /* steps on their way that only attend */
    struct ask *control; /* on its way: open, fork, truncate, close, adopt */
    bool is_open; /* the daemon has said so */
    bool is_gone;
    uint64_t closed_ns; /* an answer has said so; 0: none has, or another has the name now */
    uint32_t older_epoch[4]; /* by card, of those that had the name before; 0: none had */
    bool is_doomed; /* somebody has asked for its end, and maybe never had an answer */
    bool is_unsure; /* an append was given up: it must be truncated to sure_len */
    uint32_t sure_len;
    struct cut {
        uint32_t epoch, len;
    } cuts[MAX_CUTS]; /* its latest truncations, that the daemon has answered; a ring */
    uint32_t n_cuts;
};

enum ask_kind {
    ASK_HELLO,
    ASK_POOL,
    ASK_OPEN,
    ASK_FORK,
    ASK_TRUNCATE,
    ASK_CLOSE,
    ASK_ADOPT,
    ASK_TOKENS,
    ASK_EXPORT,
    ASK_IMPORT,
    ASK_KILL, /* a sequence */
    ASK_KILL_SESSION,
    ASK_RESIZE, /* the pool */
    ASK_RESERVE, /* blocks of it */
    ASK_PLAN, /* of a lane */
    ASK_STEP,
    ASK_GAP, /* steps that must be refused: past the end, at an epoch that is over */
    ASK_STALE,
};

extern const char *const ask_kinds[];

struct ask {
    struct peer *peer;
    uint64_t id;
    enum ask_kind kind;
    uint8_t *bytes;
    size_t n_bytes;
    uint32_t n_sent, n_refused;
    uint64_t first_sent_ns, sent_ns, again_ns; /* again: when it is to be repeated */
    bool is_answered; /* for good, or given up */
    bool is_void; /* its session is over, or it was given up: late answers say nothing */
    attn_status status; /* of the answer */
    uint32_t epoch, n_cached; /* that the answer has told */

    struct seq *seq, *new_seq; /* of requests that are no steps */
    uint32_t len; /* of fork and truncate; of open and tokens: of how many it told the ids */
    bool is_resuming; /* hello */
    struct peer *victim; /* whose session is to end */
    struct peer *former; /* whose the sequence was that is adopted */
    uint32_t first_block, n_blocks, len_before[N_LAYERS]; /* export; n_blocks also of reserve */
    uint32_t len_after[N_LAYERS]; /* import, with `tokens` of each layer in turn */
    /* a step */
    uint32_t layer, flags, n_items;
    struct seq *of[MAX_ITEMS];
    uint32_t pos[MAX_ITEMS], n_tokens[MAX_ITEMS];
    struct token *tokens; /* [all tokens]: what is appended */
    float *out, *lse; /* [all tokens][Q_FLOATS], [Q_HEADS]: what must come back */
};

struct peer {
    uint32_t number;
    bool is_dead; /* it never comes back */
    struct conn *conn; /* NULL: none */
    bool is_slow; /* reads now and then */
    bool has_shaken; /* the daemon's handshake has come */
    uint64_t connect_ns; /* when to try again */
    struct bytes in;
    uint64_t session, known_since_ns;
    uint64_t renewed_ns; /* the session lived then, by what was answered */
    bool is_killed; /* somebody has asked for the session's end */
    uint32_t pool; /* 0: not asked for yet */
    struct shared_lane *lane; /* lanes.c; NULL: none */
    struct ask *plan; /* whose bells are being rung; NULL: none */
    uint32_t first_bell;
    bool is_rung; /* for the plan's layer */
    struct ask *asks[MAX_ASKS];
    uint64_t n_asks; /* ids are 1 to n_asks */
    struct seq *seqs[MAX_SEQS];
    uint64_t looked_ns;
};

/* What import has to say of blocks: an export's answer told it. 0: none has yet. */
extern uint64_t attention_digest;
extern struct peer *peers[MAX_PEERS];
extern uint32_t n_peers;

/* ask.c: each makes a request and sends it. NULL: it is not possible now. */
struct ask *ask_hello(struct peer *p);
struct ask *ask_pool(struct peer *p);
struct ask *ask_open(struct peer *p);
struct ask *ask_tokens(struct seq *s);
struct ask *ask_fork(struct peer *p, struct seq *src);
struct ask *ask_truncate(struct seq *s, uint32_t len);
struct ask *ask_close(struct seq *s);
struct ask *ask_adopt(struct peer *p, struct seq *s);
struct ask *ask_append(struct peer *p, struct seq *first); /* NULL: of any sequences */
/* ask_blocks.c: whole blocks, and what operators do */
struct ask *ask_export(struct peer *p, struct seq *s);
struct ask *ask_import(struct seq *s);
struct ask *ask_kill(struct peer *p, struct seq *s);
struct ask *ask_kill_session(struct peer *p, struct peer *victim);
struct ask *ask_resize(struct peer *p);
struct ask *ask_reserve(struct peer *p, uint32_t n_blocks);
void check_export(const struct ask *a, const Attnd__ExportReply *r, const uint8_t *payload,
                  size_t payload_bytes);
void take_import(struct ask *a);
/* lanes.c */
struct ask *ask_plan(struct peer *p);
void plan_end(struct ask *a, bool is_sure);
void lane_tick(struct peer *p);
void lane_leave(struct peer *p);
/* What a step's message has behind its header, and what must come back: tokens, out, lse of a. */
uint8_t *step_payload(struct ask *a, struct wire_step_layout *out_l);
/* The step has been carried out. */
void take_step(struct ask *a);
/* An output is what the model says; sums are merged in another order than it adds. */
bool is_as_expected(float a, float b);
/* of all: a request that h says and that is a's */
struct ask *ask_new(struct peer *p, enum ask_kind kind);
struct ask *ask_send(struct ask *a, Attnd__Request *h, const void *payload, size_t payload_bytes);
struct ask *ask_attend(struct seq *s, uint32_t layer, uint32_t pos, uint32_t n);
struct ask *ask_wrong(struct seq *s, enum ask_kind kind);
/* What a token of a prompt is in a layer; k and v may be NULL. */
struct token prompt_token(uint32_t prompt, uint32_t layer, uint32_t pos, float *k, float *v);
/* A prompt that begins with the same len tokens. */
uint32_t prompt_like(uint32_t prompt, uint32_t len);
bool seq_is_quiet(const struct seq *s); /* nothing of it is on its way */

/* answer.c */
void answer_take(struct peer *p, uint8_t *message, size_t n);
/* What belongs to the request is free for others. */
void ask_release(struct ask *a);

/* peer.c */
void peer_send(struct ask *a);
void peer_lose_session(struct peer *p); /* begins anew with nothing */

#endif
