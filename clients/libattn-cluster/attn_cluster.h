/* attn_cluster.h: many daemons behind one name, for workers that use libattn (attn.h).
 *
 * One noun: attn_cluster, who is there and a client for each. It places a sequence on one of the
 * daemons and finds it again where it is later. Between the two the sequence is libattn's: steps
 * and all other calls take the client, the pool and the handle that stand in attn_cluster_seq, and
 * go to its daemon as if there was no cluster.
 *
 *     attn_cluster_connect("cluster+etcd://10.0.0.1:2379/attnd", &options, &cluster);
 *     attn_cluster_place(cluster, &spec, &prompt, 0, &s);
 *     ... append from s.n_cached on, decode: attn_step(s.pool, ..{s.seq}..); after a status that
 *     attn_cluster_may_follow() takes:
 *     attn_cluster_follow(cluster, &spec, &tokens, 0, &s);
 *     ... and the token that was under way again, from its first layer on.
 *
 * Members   A thread of its own reads the registry, all signals blocked; it calls nothing of the
 *           worker's. While the registry does not answer, members stay as they were.
 *           When a member is lost, steps and calls that wait for it end with ATTN_ECONN.
 * Threads   Every function may be called from any thread, several at once;
 *           attn_cluster_close must be the last. An attn_cluster_seq is plain data of the caller's.
 *           After fork the child calls none of them.
 * Errors    Calls return a status, ATTN_EINVAL where an argument is NULL that may not be;
 *           attn_cluster_last_error has the sentence. Outputs are written only on success.
 * Time      in microseconds. 0: attn_cluster_options.timeout_us.
 * ABI       as attn.h: set struct_size, zero the rest.
 */
#ifndef ATTN_CLUSTER_H
#define ATTN_CLUSTER_H

#include <attn.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct attn_cluster attn_cluster;

/* A sequence and where it is. */
struct attn_cluster_seq {
    uint32_t struct_size;
    uint32_t n_cached; /* tokens that every layer had when it was placed or found */
    attn_client *client; /* of its daemon; these two are the cluster's until its close */
    attn_pool *pool;
    struct attn_seq seq; /* update it as libattn does: attn_seq_truncate raises its epoch */
    char member[128]; /* the daemon's name */
};

struct attn_cluster_options {
    uint32_t struct_size;
    uint32_t reserved;
    /* of each daemon's client, but for fail_fast; borrowed until attn_cluster_close. NULL:
     * libattn's defaults */
    const struct attn_client_options *client;
    uint64_t timeout_us; /* of calls that give 0; 0: 10 seconds */
    uint64_t idle_us; /* between two looks at the registry; 0: 1 second */
    uint64_t
        probe_us; /* a daemon that takes longer to say what it has is left out; 0: 0.5 seconds */
    /* Appends K and V of t->ids from s->n_cached to t->n in every layer of s->pool: s was opened
     * anew, since its daemon was lost. On the thread that called attn_cluster_follow, which returns
     * what this does; no lock is held. NULL: attn_cluster_follow gives ATTN_ENOTFOUND instead. */
    attn_status (*rebuild)(void *user, const struct attn_cluster_seq *s,
                           const struct attn_tokens *t);
    void *user;
};

/* attn_cluster_connect: reads who is there, and waits until there is a member.
 *
 * url      cluster+etcd://HOST:PORT[,HOST:PORT...][/PREFIX], cluster+file:///PATH. Kubernetes
 *          (cluster+k8s://) and etcd over TLS (cluster+etcds://) are the Python client's alone
 * Errors   ATTN_EINVAL url or options; ATTN_ENOTSUP a registry that this library does not read;
 *          ATTN_ECONN no member in time, and why; ATTN_ENOMEM
 * Owner    the caller owns *out_cluster until attn_cluster_close; o may be NULL */
ATTN_API attn_status attn_cluster_connect(const char *url, const struct attn_cluster_options *o,
                                          attn_cluster **out_cluster);

/* Ends the thread and disconnects from all daemons, as attn_client_close does; every client and
 * pool of an attn_cluster_seq is gone then. Takes up to a second for each daemon that does not
 * answer, and for the registry. NULL is fine. */
ATTN_API void attn_cluster_close(attn_cluster *c);

/* Why the calling thread's latest failed call failed. Never NULL; valid until its next. */
ATTN_API const struct attn_error *attn_cluster_last_error(void);

/* Who is there, as JSON: {"members": {NAME: RECORD}, "is_frozen": BOOL, "why": "..."}. Frozen: the
 * registry was not read the last time, and why. Free with attn_free. */
ATTN_API attn_status attn_cluster_members(attn_cluster *c, char **out_json);

/* attn_cluster_place: a new sequence on the daemon that has most of its tokens and least to do, by
 * the rule of docs/cluster.md ("Placement"): the Python client places it on the same one.
 *
 * spec     of the pool, made there if it is missing, as attn_pool_create does; borrowed
 * t        as attn_seq_open_with; n may be 0
 * Time     four daemons are asked, one after the other; of those that do not answer each takes
 *          probe_us, and is left out for a second
 * Errors   ATTN_ECONN no daemon takes sequences; those of attn_pool_create, attn_seq_open_with
 * Owner    out_seq->struct_size is set by the caller; attn_seq_close ends the sequence */
ATTN_API attn_status attn_cluster_place(attn_cluster *c, const struct attn_pool_spec *spec,
                                        const struct attn_tokens *t, uint64_t timeout_us,
                                        struct attn_cluster_seq *out_seq);

/* attn_cluster_weights: attn_pool_weights for the pools of this name on all daemons, those that are
 * made later, too: each is sent them when a step finds none there. All clients of the pool, on
 * whichever daemon, give the same: attn_pool_spec.model stands for them.
 *
 * Shapes   weights, n_bytes: as attn_pool_weights
 * Owner    weights stay the caller's, and as they are until attn_cluster_close
 * Errors   ATTN_EINVAL what attn_pool_weights says, of a pool that is there; of one that is made
 *          later, by attn_cluster_place or attn_cluster_follow; ATTN_ENOMEM */
ATTN_API attn_status attn_cluster_weights(attn_cluster *c, const char *pool, uint32_t layer,
                                          const void *weights, uint64_t n_bytes);

/* Whether attn_cluster_follow may help after this status of a libattn call on a sequence:
 * ATTN_ENOTFOUND, ATTN_ESTALE, ATTN_EMOVED, ATTN_ECONN, ATTN_ETIMEDOUT. */
ATTN_API bool attn_cluster_may_follow(attn_status st);

/* attn_cluster_follow: finds a sequence where it is now, after a call on it failed.
 *
 * t        the tokens that every layer is known to have: a copy that lacks one is not taken.
 *          Repeat what was appended behind them, in all layers: that is harmless where it is there
 * seq      where it was; says where it is, perhaps as before. Forks are followed by themselves
 * A sequence that was moved is adopted where it is. One that is nowhere, since its daemon was lost
 * or was restarted without its cache, is placed anew, under another id, and given to rebuild.
 * Errors   nothing changed: ATTN_ENOTFOUND it is lost, and there is no rebuild; ATTN_ESTALE another
 *          worker has adopted it; ATTN_ETIMEDOUT its daemon does not answer and is a member all the
 *          same: call again; those of attn_cluster_place and of rebuild */
ATTN_API attn_status attn_cluster_follow(attn_cluster *c, const struct attn_pool_spec *spec,
                                         const struct attn_tokens *t, uint64_t timeout_us,
                                         struct attn_cluster_seq *seq);

#ifdef __cplusplus
}
#endif
#endif
