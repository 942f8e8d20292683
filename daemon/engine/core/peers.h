/* peers.h: the one seam between an engine and what stands above the engines of a daemon with
 * several devices.
 *
 * A device's engine knows its peers, the engines of all devices of the daemon, and speaks to them
 * by messages (message.h). Everything that is decided above them stands in a table that cards/
 * fills: which engine a request is for, where sequences are, what a session is to all of them, and
 * what moves. With one device the table is empty: the functions below then say what is true of an
 * engine that is alone, and cost a look at a pointer.
 *
 * The engine's thread, unless said otherwise.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_PEERS_H
#define ATTND_DAEMON_ENGINE_CORE_PEERS_H

#include "daemon/engine/core/health.h"
#include "daemon/engine/core/state.h"

struct answer;

/* The backend over the backends of all devices, for pools that are split over them. */
struct split_ops {
    const struct backend_ops *backend; /* pools, blocks and submit; batches come back from poll */
    struct split *(*open)(struct engine *e); /* the engine's share of it; NULL: no memory */
    void (*close)(struct split *s); /* NULL is fine */
    struct backend *(*backend_of)(struct split *s, attn_split how);
    struct backend_batch *(*poll)(struct split *s); /* the primary's; NULL: none is done */
    bool (*has_work)(const struct split *s); /* something has come from another device */
    /* Puts work of the primary's batches on this device. false: there is none, or no place. */
    bool (*launch)(struct split *s);
    void (*done)(struct split *s, struct backend_batch *d); /* it came back from this device */
};

struct peers_ops {
    const struct split_ops *split;

    /* --- requests */
    /* A transport's request goes to the engine that it is for. Any thread. */
    void (*submit)(struct engine *e, struct request *req);
    /* The devices but the primary that have sequences of the plan's step, a bit each. */
    uint32_t (*others_of_plan)(struct engine *e, const struct request *plan);

    /* --- sequences */
    /* A sequence of this name is open on some device; on another than the engine's. Any thread. */
    bool (*know)(struct engine *e, struct seq_name name);
    bool (*know_elsewhere)(struct engine *e, struct seq_name name);
    /* One is open here now; it has another epoch, and maybe fewer blocks; it is about to close. */
    void (*seq_opened)(struct engine *e, kv_seq_id seq);
    void (*seq_epoch)(struct engine *e, kv_seq_id seq);
    void (*seq_closes)(struct engine *e, kv_seq_id seq);

    /* --- sessions */
    /* The primary has begun one, or ended it: so do the others. ATTN_ENOMEM: none has begun it. */
    attn_status (*session_begin)(struct engine *e, uint32_t slot, uint64_t id, uint32_t tenant,
                                 const char *client);
    void (*session_end)(struct engine *e, uint32_t slot, uint64_t id);
    /* Nothing of an ended session is left here. false: the primary waits for other devices. */
    bool (*session_release)(struct engine *e, uint32_t slot);
    /* A request has been carried out: a repetition must not be, by another device either. */
    void (*request_done)(struct engine *e, uint32_t slot, uint64_t session, uint64_t request);

    /* --- one device's share of a step whose sequences are on several; req->part is set */
    bool (*step_counts)(const struct request *req); /* this one counts the message */
    bool (*item_is_foreign)(const struct request *req, uint32_t item);
    /* Outputs go where those of the other shares do, behind `head` bytes. As step_reserve_reply. */
    attn_status (*step_reserve)(struct task *t, size_t head);
    /* All items are done: their statuses are noted. What the share is answered with. */
    attn_status (*step_done)(struct task *t);

    /* --- sequences that move to another device */
    bool (*turn)(struct engine *e); /* at each turn, first: what can go on goes on; true: it did */
    void (*stop)(struct engine *e); /* the engine stops: what moves stays where it is */
    /* The request must wait until a sequence has left: it is held back. Requests are asked in
     * order. */
    bool (*hold)(struct engine *e, struct request *req);
    struct request *(*held)(struct engine *e); /* held back and not any more, oldest first */
    /* An operator's request: answered when the sequence is there, or why not. */
    attn_status (*move)(struct engine *e, struct request *req, kv_seq_id seq, struct answer *a);
    /* Blocks of the pool are being copied. Any thread. */
    bool (*moves_pool)(struct engine *e, uint32_t pool);
    /* The sequence is on its way; the target has all of one, which leaves at the next turn. */
    bool (*moves_seq)(const struct engine *e, uint32_t seq);
    bool (*is_there)(const struct engine *e);
    /* Blocks of the pool are held since they are being read: there is more room in a moment. */
    bool (*reads_pool)(const struct engine *e, uint32_t pool);
};

/* --- who they are ----------------------------------------------------------------------------- */

/* Peers that are open, the engine itself among them; at 0 the primary. Any thread. */
static inline uint32_t peers_n(const struct engine *e)
{
    return e->peers->n_open;
}

static inline struct engine *peers_at(const struct engine *e, uint32_t device)
{
    return e->peers->at[device];
}

static inline bool is_alone(const struct engine *e)
{
    return e->peers->ops == NULL;
}

static inline bool is_primary(const struct engine *e)
{
    return e->env.card == 0;
}

/* Their backends are of one module: it knows how its devices reach each other. Any thread. */
static inline bool peers_are_alike(const struct engine *a, const struct engine *b)
{
    return a->env.ops->moves_submit == b->env.ops->moves_submit;
}

/* Some device is not lost; none is. Any thread. */
static inline bool peers_any_live(const struct engine *e)
{
    for (uint32_t i = 0; i < peers_n(e); i++)
        if (engine_health(peers_at(e, i)) == ATTN_OK)
            return true;
    return false;
}

static inline bool peers_all_live(const struct engine *e)
{
    for (uint32_t i = 0; i < peers_n(e); i++)
        if (engine_health(peers_at(e, i)) != ATTN_OK)
            return false;
    return true;
}

/* --- the table -------------------------------------------------------------------------------- */

static inline uint32_t peers_of_plan(struct engine *e, const struct request *plan)
{
    return is_alone(e) ? 0 : e->peers->ops->others_of_plan(e, plan);
}

static inline bool peers_know(struct engine *e, struct seq_name name)
{
    return !is_alone(e) && e->peers->ops->know(e, name);
}

static inline bool peers_know_elsewhere(struct engine *e, struct seq_name name)
{
    return !is_alone(e) && e->peers->ops->know_elsewhere(e, name);
}

static inline void peers_seq_opened(struct engine *e, kv_seq_id seq)
{
    if (!is_alone(e))
        e->peers->ops->seq_opened(e, seq);
}

static inline void peers_seq_epoch(struct engine *e, kv_seq_id seq)
{
    if (!is_alone(e))
        e->peers->ops->seq_epoch(e, seq);
}

static inline void peers_seq_closes(struct engine *e, kv_seq_id seq)
{
    if (!is_alone(e))
        e->peers->ops->seq_closes(e, seq);
}

static inline attn_status peers_session_begin(struct engine *e, uint32_t slot, uint64_t id,
                                              uint32_t tenant, const char *client)
{
    return is_alone(e) ? ATTN_OK : e->peers->ops->session_begin(e, slot, id, tenant, client);
}

static inline void peers_session_end(struct engine *e, uint32_t slot, uint64_t id)
{
    if (!is_alone(e))
        e->peers->ops->session_end(e, slot, id);
}

static inline bool peers_session_release(struct engine *e, uint32_t slot)
{
    return is_alone(e) || e->peers->ops->session_release(e, slot);
}

static inline void peers_request_done(struct engine *e, uint32_t slot, uint64_t session,
                                      uint64_t request)
{
    if (!is_alone(e))
        e->peers->ops->request_done(e, slot, session, request);
}

static inline bool peers_turn(struct engine *e)
{
    return !is_alone(e) && e->peers->ops->turn(e);
}

static inline bool peers_hold(struct engine *e, struct request *req)
{
    return !is_alone(e) && e->peers->ops->hold(e, req);
}

static inline bool peers_move_pool(struct engine *e, uint32_t pool)
{
    return !is_alone(e) && e->peers->ops->moves_pool(e, pool);
}

static inline bool peers_move_seq(const struct engine *e, uint32_t seq)
{
    return !is_alone(e) && e->peers->ops->moves_seq(e, seq);
}

static inline bool peers_move_is_there(const struct engine *e)
{
    return !is_alone(e) && e->peers->ops->is_there(e);
}

static inline bool peers_read_pool(const struct engine *e, uint32_t pool)
{
    return !is_alone(e) && e->peers->ops->reads_pool(e, pool);
}

#endif
