/* peers.h: the only interface between an engine and the code above the engines of a daemon with
 * several devices.
 *
 * An engine knows its peers, the engines of all devices, and sends them messages (message.h). What
 * is decided above them is in a table that cards/ fills in: which engine serves a request, where
 * sequences are, the sessions of all devices, and what moves between devices. With one device there
 * is no table, and the functions below return what holds for a single engine at the cost of testing
 * a pointer.
 *
 * All on the engine's thread, unless said otherwise.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_PEERS_H
#define ATTND_DAEMON_ENGINE_CORE_PEERS_H

#include "daemon/engine/core/health.h"
#include "daemon/engine/core/state.h"

struct answer;

/* The backend over the backends of all devices, for split pools. */
struct split_ops {
    const struct backend_ops *backend; /* pools, blocks and submit; batches come back from poll */
    struct split *(*open)(struct engine *e); /* the engine's share; NULL: no memory */
    void (*close)(struct split *s); /* NULL is fine */
    struct backend *(*backend_of)(struct split *s, attn_split how);
    /* a finished batch of the primary; NULL: none */
    struct backend_batch *(*poll)(struct split *s);
    bool (*has_work)(const struct split *s); /* whether another device has sent something */
    /* Puts work of the primary's batches on this device. false: there was none, or no room. */
    bool (*launch)(struct split *s);
    /* the shard came back from this device */
    void (*done)(struct split *s, struct backend_batch *d);
};

struct peers_ops {
    const struct split_ops *split;

    /* --- requests */
    /* Passes a transport's request to the engine that serves it. Any thread. */
    void (*submit)(struct engine *e, struct request *req);
    /* The devices other than the primary that have sequences of the plan's step, one bit each. */
    uint32_t (*others_of_plan)(struct engine *e, const struct request *plan);

    /* --- sequences */
    /* Whether a sequence of this name is open on any device; on one other than the engine's. Any
     * thread. */
    bool (*know)(struct engine *e, struct seq_name name);
    bool (*know_elsewhere)(struct engine *e, struct seq_name name);
    /* The sequence was opened here; its epoch has changed, and maybe it has fewer blocks; it is
     * about to be closed. */
    void (*seq_opened)(struct engine *e, kv_seq_id seq);
    void (*seq_epoch)(struct engine *e, kv_seq_id seq);
    void (*seq_closes)(struct engine *e, kv_seq_id seq);

    /* --- sessions */
    /* The primary has begun or ended a session: the others follow. ATTN_ENOMEM: none has begun
     * it. */
    attn_status (*session_begin)(struct engine *e, uint32_t slot, uint64_t id, uint32_t tenant,
                                 const char *client);
    void (*session_end)(struct engine *e, uint32_t slot, uint64_t id);
    /* Call when nothing of an ended session is left here. false: the primary must wait for other
     * devices. */
    bool (*session_release)(struct engine *e, uint32_t slot);
    /* Call before a request is carried out that request_done is to be called for. false: no
     * memory. */
    bool (*request_begin)(struct engine *e);
    /* Notes that a request was carried out: no device may carry out a repetition. */
    void (*request_done)(struct engine *e, uint32_t slot, uint64_t session, uint64_t request);

    /* --- one device's share of a step whose sequences are on several; req->shard is set */
    bool (*step_counts)(const struct request *req); /* whether this share counts the message */
    bool (*item_is_foreign)(const struct request *req, uint32_t item);
    /* Places outputs with those of the other shares, behind `head` bytes. Like
     * step_reserve_reply. */
    attn_status (*step_reserve)(struct task *t, size_t head);
    /* Notes the statuses of the share's items, which are all done. Returns the share's own
     * status. */
    attn_status (*step_done)(struct task *t);

    /* --- sequences that move to another device */
    /* Continues moves; first in each turn. true: something was done */
    bool (*turn)(struct engine *e);
    void (*stop)(struct engine *e); /* the engine stops: what moves stays where it is */
    /* Whether the request must wait until a sequence has left; if so, it is held back. Called in
     * order of arrival. */
    bool (*hold)(struct engine *e, struct request *req);
    struct request *(*held)(struct engine *e); /* list of those no longer held back, oldest first */
    /* Moves a sequence for an operator: the request is answered when it has arrived, or with the
     * reason why not. */
    attn_status (*move)(struct engine *e, struct request *req, kv_seq_id seq, struct answer *a);
    /* Whether blocks of the pool are being copied. Any thread. */
    bool (*moves_pool)(struct engine *e, uint32_t pool);
    /* Whether the sequence is moving; whether the target has all of one, which leaves at the next
     * turn. */
    bool (*moves_seq)(const struct engine *e, uint32_t seq);
    bool (*is_there)(const struct engine *e);
    /* Whether blocks of the pool are held because they are being read: there will be more room
     * soon. */
    bool (*reads_pool)(const struct engine *e, uint32_t pool);
};

/* --- which engines ---------------------------------------------------------------------------- */

/* Open peers, including the engine itself; the primary is at 0. Any thread. */
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

/* Whether both use the same backend module, which can copy between its devices. Any thread. */
static inline bool peers_are_alike(const struct engine *a, const struct engine *b)
{
    return a->env.ops->moves_submit == b->env.ops->moves_submit;
}

/* Whether any device is not lost; whether none is lost. Any thread. */
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

static inline bool peers_request_begin(struct engine *e)
{
    return is_alone(e) || e->peers->ops->request_begin(e);
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
