/* cluster_internal.h: what a cluster knows: members as the registry says, and a host for each. */
#ifndef CLUSTER_INTERNAL_H
#define CLUSTER_INTERNAL_H

#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>

#include "attn_cluster.h"
#include "record.h"
#include "registry.h"

struct pool_handle {
    struct pool_handle *next;
    attn_pool *pool;
    bool is_retired; /* its session or pool is gone; a worker may still have it */
    char name[];
};

/* What a layer of the pools of a name is given: the caller's bytes. */
struct layer_weights {
    struct layer_weights *next;
    uint32_t layer;
    const void *bytes;
    uint64_t n_bytes;
    char pool[];
};

/* A member as one registration of it, with those that go on with that: when it is gone and another
 * comes, that is another host. All are kept until the cluster is closed, since workers have their
 * clients. */
struct host {
    struct host *next;
    char *name, *url;
    /* of the cluster's lock */
    json_t *record; /* as it was last */
    bool is_gone;
    double backlog; /* as a candidate's (place.h) */
    /* of its own, which is held while it is connected and pools are made */
    pthread_mutex_t lock;
    _Atomic(attn_client *) client;
    struct pool_handle *pools;
    _Atomic uint64_t failed_at_ns; /* when it last did not answer; 0: it did */
};

struct attn_cluster {
    struct attn_client_options client;
    uint64_t timeout_us, idle_us, probe_us;
    attn_status (*rebuild)(void *user, const struct attn_cluster_seq *s,
                           const struct attn_tokens *t);
    void *user;
    char *url;
    struct registry *registry; /* the thread's */
    pthread_t thread;
    atomic_bool ends;

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    struct host *hosts;
    struct layer_weights *weights;
    double mean_prompt; /* tokens, of those that were placed lately */
    json_t *now; /* members by name; replaced, not changed */
    json_t *suspects; /* members whose lease ended and whose fate is not decided */
    bool is_known, is_frozen; /* the registry was read once; was not the last time */
    char why[WHY_BYTES];
};

/* ---- call.c ---- */

/* The calling thread's last error. */
attn_status fail(attn_status st, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* libattn's, with the member's name before it. */
attn_status fail_at(const struct host *h);
uint64_t until_of(const struct attn_cluster *c, uint64_t timeout_us); /* in ns */
uint64_t left_us(uint64_t until_ns); /* at least 1 */
bool seq_is_known(const struct attn_cluster_seq *s); /* by its struct_size */

/* ---- watch.c ---- */

void *watch_run(void *cluster);
/* Until something has changed, at most so long; with the lock. */
void watch_wait(struct attn_cluster *c, uint64_t us);

/* ---- host.c ---- */

void host_free(struct host *h);
/* The host of a member that is there; made if it is new. With the cluster's lock. NULL: no
 * memory. */
struct host *host_of(struct attn_cluster *c, const char *name, json_t *record);
/* All of this name are gone. With the cluster's lock. */
void host_end(struct attn_cluster *c, const char *name);
/* Its pool of this spec; connects and makes it where that is missing. */
attn_status host_pool(struct attn_cluster *c, struct host *h, const struct attn_pool_spec *spec,
                      uint64_t timeout_us, attn_pool **out_pool);
/* What a short call to it gave, and whether one got no answer within the last second. */
void host_answered(struct host *h, attn_status st);
bool host_is_silent(const struct host *h);
/* After a call with this pool failed: whether that was since its session or the pool is gone, and
 * the next host_pool gives another one. */
bool host_begin_anew(struct host *h, attn_pool *seen, uint64_t timeout_us);

/* ---- weights.c ---- */

/* All that the pools of this name were given; with the host's lock. Errors: libattn's. */
attn_status weights_give(struct attn_cluster *c, const char *name, attn_pool *pool);
void weights_free(struct attn_cluster *c);

#endif
