/* cluster.h: several daemons in a world that one number decides. Real is each daemon's engine with
 * its cache, and the codec; requests arrive as messages, without a transport. Around them stand a
 * registry with leases, an agent for each daemon, moves between daemons, and workers whose
 * sequences go on wherever they are, as clients/cluster does it. README.md says what is checked.
 *
 * One thread, one queue of events (world.c), a clock of whole milliseconds: what is due at the same
 * instant happens in either order, so limits are met to the instant.
 */
#ifndef TESTS_SIM_CLUSTER_H
#define TESTS_SIM_CLUSTER_H

#include "proto/wire.h"
#include "tests/sim/sim.h"

enum {
    C_LAYERS = 2,
    C_Q_HEADS = 4,
    C_KV_HEADS = 2,
    C_DIM = 8,
    C_KV_FLOATS = C_KV_HEADS * C_DIM,
    C_Q_FLOATS = C_Q_HEADS * C_DIM,
    C_GROUP = C_Q_HEADS / C_KV_HEADS,
    C_BLOCK = 8,
    C_BLOCKS = 500,
    C_MAX_LEN = 64,
    C_MAX_NODES = SIM_MAX_CARDS,
    C_MAX_SEQS = 10,
    C_NOTE_BYTES = 4096,
};
#define C_TTL_NS (1000 * SIM_MS) /* of a registration */
#define C_FENCE_NS (600 * SIM_MS) /* engine.fence, in strict mode */
#define C_LEASE_NS (8 * SIM_S) /* engine.lease */

/* What a seed decides. */
struct cluster_plan {
    uint32_t n_nodes, n_seqs, n_cuts;
    bool is_strict; /* engine.fence */
    bool retires; /* an agent raises the epochs of what was declared dead; else it frees it */
    uint32_t drop, twice, late; /* per mille of messages */
    uint32_t moves; /* per mille of what a sequence does */
    uint64_t busy_ns;
};
extern struct cluster_plan cluster_plan;

/* --- daemons (node.c) ------------------------------------------------------------------------- */

struct node;
extern uint32_t n_nodes;
void nodes_begin(void);
void nodes_end(void);
struct node *node_at(uint32_t i);
uint32_t node_number(const struct node *n);
const char *node_url(const struct node *n);
struct node *node_of_url(const char *url);
void node_kill(struct node *n); /* another process goes on with its arena */
void node_stop(struct node *n, uint64_t ns); /* SIGSTOP, SIGCONT */
bool node_is_up(const struct node *n);
/* Names of the sequences that are open, as inspect lists them; how many. */
uint32_t node_list(const struct node *n, uint64_t *names, uint32_t most);
void nodes_check(void); /* the caches' books */
/* For who hears of both ends: cuts the workers' links to it, and the other daemons'. */
void node_cut(struct node *n, uint64_t ns);

/* --- requests (node.c) ------------------------------------------------------------------------ */

/* A sequence as somebody has it. */
struct handle {
    struct node *node;
    uint64_t registration; /* of the daemon, then */
    uint64_t session, name;
    uint32_t pool, epoch;
    /* Nobody may append with it any more: it is somewhere else, or was adopted; or its daemon was
     * declared dead. */
    enum { IN_FORCE, REPLACED, LOST } state;
    bool is_late; /* made when its daemon was declared dead, by a worker that had not heard of it */
};

struct ask {
    uint64_t id;
    struct node *node;
    const struct node *from; /* whose host asks: it can be cut off, too; NULL: a worker's */
    bool goes_round; /* by a way that is never cut: the daemon's own host */
    bool is_operators;
    bool is_over; /* answered, or nobody waits for it */
    uint8_t *bytes;
    size_t n_bytes;
    /* the first answer; NULL: nobody wants it */
    void (*take)(struct ask *a, const struct wire_reply *w);
    void *arg;
    /* what those have to know who judge an answer */
    int kind; /* h->body_case */
    const struct handle *appends; /* an append by it */
    const struct handle *sets_note; /* a note that it sets */
    uint64_t name, at_epoch; /* of the sequence; of a close or locate */
    const struct node *moved_to; /* of a close that ends a move */
    uint64_t moved_id;
    uint32_t moved_epoch, layer, pos, n;
    float *out; /* [n][C_Q_FLOATS] what a step's answer has to be */
};
/* Sends it, and again until it is answered or over. */
struct ask *ask_of(struct node *n, Attnd__Request *h, uint64_t session, const void *payload,
                   size_t payload_bytes, void (*take)(struct ask *, const struct wire_reply *),
                   void *arg);
void ask_send(struct ask *a);

/* --- the registry and the agents (registry.c) ------------------------------------------------- */

void registry_begin(void);
bool registry_has(const struct node *n); /* its lease is kept */
uint64_t registry_number(const struct node *n); /* of its latest registration */
void registry_cut(struct node *n, uint64_t ns); /* its agent's link */
void agent_stop(struct node *n, uint64_t ns);
bool agents_are_registered(void);

/* --- moves (moves.c) -------------------------------------------------------------------------- */

/* Takes the sequence from one daemon to another, as attn_seq_move does, on behalf of nobody who has
 * it. Ends by itself. */
void move_begin(struct node *from, uint64_t name, struct node *to);
uint32_t moves_running(void);
void moves_begin(void);

/* --- notes (notes.c) -------------------------------------------------------------------------- */

/* Of a sequence: its notes have rising numbers, from 1 on; 0: none. */
struct note {
    uint64_t seed;
    uint64_t latest; /* that was sent */
    uint64_t least; /* that has to be there: it was acknowledged, or read */
    bool is_asked; /* it is to be read next */
    bool is_lost; /* it is to be set next: a copy was found, and who wrote beside it is not known */
};
void note_begin(struct note *n); /* of a sequence that is made */
size_t note_next(struct note *n, uint8_t *out); /* another one's bytes, how many */
/* Judges what an answer says. */
void note_is_said(struct note *n, const struct ask *a, const ProtobufCBinaryData *b);

/* --- workers (worker.c) ----------------------------------------------------------------------- */

void workers_begin(void);
void workers_quiesce(void); /* no moves, no old handles any more */
bool workers_are_quiet(void); /* each sequence is somewhere, and has nothing on its way */
void workers_read_back(void);
bool workers_have_read(void);
void workers_close(void);
bool workers_have_closed(void);
/* Told by the registry: it was declared dead, or is there. */
void workers_lose(struct node *n);
void workers_find(struct node *n);
uint64_t worker_name_at(const struct node *n); /* any of a sequence that is there; 0: none */
void workers_check_places(void); /* nothing else is open anywhere */

/* --- counts ----------------------------------------------------------------------------------- */

#define CLUSTER_COUNTS(X)                                                                          \
    X(requests)                                                                                    \
    X(copies)                                                                                      \
    X(dropped)                                                                                     \
    X(cuts)                                                                                        \
    X(kills)                                                                                       \
    X(deaths)                                                                                      \
    X(retired)                                                                                     \
    X(appends)                                                                                     \
    X(rows)                                                                                        \
    X(moves)                                                                                       \
    X(moves_given_up)                                                                              \
    X(found_moved)                                                                                 \
    X(rebuilt)                                                                                     \
    X(old_handles)                                                                                 \
    X(old_refused)                                                                                 \
    X(old_before_registered)                                                                       \
    X(fenced)                                                                                      \
    X(located)                                                                                     \
    X(notes)
struct cluster_counts {
#define X(field) uint64_t field;
    CLUSTER_COUNTS(X)
#undef X
};
extern struct cluster_counts cluster_counts;

/* The one pool of all daemons. */
void cluster_spec(Attnd__PoolSpec *spec);
uint64_t cluster_ms(uint64_t least, uint64_t most); /* a random time, in whole milliseconds */

#endif
