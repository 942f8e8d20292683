/* tenant.h: the tenants that may use the daemon, and their quotas, from the file listen.tenants. It
 * has a section for each tenant:
 *
 *   [research]                     its name: letters, digits, '.', '_' and '-'
 *   token_sha256 = 9f86d0...       of the token that its workers send in hello (attnctl keys)
 *   users = alice 1007             these users on Unix sockets are the tenant, too
 *   blocks = 100000                most that its pools may have, together; so below; 0: no bound
 *   sequences = 1000
 *   sessions = 64
 *   pools = 4
 *   bytes_in_flight = 64M          of steps that are not answered; 64K at least
 *   host_bytes = 8G                of its evicted blocks in host memory (cache.host_memory)
 *   disk_bytes = 100G              the same in the file behind it (cache.disk_path)
 *   table_bytes = 64M              of token ids and block tables (cache.table_memory)
 *   share = 3                      of device time: three times that of a tenant with 1; default 1
 *
 * A certificate with a tenant's name as common name identifies that tenant. Each tenant has its own
 * namespace of pools, sequences and sessions. Without a file no client is asked who it is, and
 * everything belongs to tenant 0, the operator; with one, root and the daemon's own user on Unix
 * sockets are the operator.
 */
#ifndef ATTND_DAEMON_REQUEST_TENANT_H
#define ATTND_DAEMON_REQUEST_TENANT_H

#include <stdatomic.h>

#include "daemon/base/principal.h"
#include "daemon/request/flow.h"
#include "proto/attn_types.h"

enum { TENANT_MAX = 64, TENANT_OPERATOR = 0, TENANT_MAX_USERS = 32, TENANT_HASH_BYTES = 32 };

/* A sequence as clients name it. */
struct seq_name {
    uint32_t tenant; /* tenant_id */
    uint64_t name;
};

enum tenant_quota {
    TENANT_BLOCKS,
    TENANT_SEQUENCES,
    TENANT_SESSIONS,
    TENANT_BYTES,
    TENANT_POOLS,
    TENANT_HOST_BYTES,
    TENANT_DISK_BYTES,
    TENANT_TABLE_BYTES,
    TENANT_N_QUOTAS
};

struct tenant {
    char name[TENANT_NAME_BYTES]; /* "" for the operator */
    uint32_t id; /* made from the name, so the same in every process; used in the cache */
    uint32_t stats; /* its index in stats.tenants */
    bool is_gone; /* it was removed from the file: what it has is being ended */
    bool has_token;
    uint8_t token_hash[TENANT_HASH_BYTES];
    uid_t users[TENANT_MAX_USERS];
    uint32_t n_users;
    uint64_t most[TENANT_N_QUOTAS]; /* 0: no bound */
    _Atomic uint64_t *used; /* [TENANT_N_QUOTAS] summed over all cards */
    /* its device time, and what its other requests take of the engine's thread; this and what
     * follows is per engine */
    struct flow flow;
    uint32_t n_steps; /* admitted and not answered */
    uint32_t n_turns; /* other requests that wait for their turn (engine/core/turns.h) */
};

/* The tenants of one engine. All engines' copies share what tenants have used. */
struct tenants;

/* Reads the file (credential.h); "": there are no tenants, *out_t is NULL. ATTN_EINVAL: why names
 * file, line and value; ATTN_ENOMEM. */
attn_status tenants_open(const char *file, struct tenants **out_t, char *why, size_t why_bytes);
void tenants_close(struct tenants *t); /* NULL is fine */
/* Makes a copy for another card's engine, with no steps; a copy of NULL is NULL. ATTN_ENOMEM. */
attn_status tenants_copy(const struct tenants *t, struct tenants **out_t);
/* The id of a tenant of this name. Any thread. */
uint32_t tenant_id_of_name(const char *name);
/* Takes over the tenants, tokens, users and quotas of `now`, and closes it; tenants that stay keep
 * their struct. false: some new ones do not fit until everything of removed tenants has ended.
 * Engine thread. */
bool tenants_update(struct tenants *t, struct tenants *now);

/* Identifies the tenant of a request by token, else by certificate, else by user. t NULL: *out is
 * NULL, the operator. Compares a token with all hashes, in constant time. ATTN_EAUTH: no tenant
 * matches, or token and certificate are of different tenants; why has no secrets. */
attn_status tenants_identify(struct tenants *t, const struct principal *p, const char *token,
                             struct tenant **out, char *why, size_t why_bytes);
/* The tenant with this id; NULL: there is none, or t is NULL. */
struct tenant *tenants_of_id(struct tenants *t, uint32_t id);

/* The i-th tenant of the file, counted from 1; NULL: there are no more. */
const struct tenant *tenants_at(const struct tenants *t, uint32_t i);
/* Its place in the table, below TENANT_MAX; it keeps it while it has anything. */
uint32_t tenants_index(const struct tenants *t, const struct tenant *who);
/* The tenant with this name, "" the operator; NULL: there is none, or t is NULL. */
struct tenant *tenants_find(struct tenants *t, const char *name);

/* The quota's key in the file. */
const char *tenant_quota_name(enum tenant_quota what);
/* From here on who may be NULL: there are no tenants, and nothing is counted. */
uint32_t tenant_id(const struct tenant *who);
bool tenant_is_operator(const struct tenant *who);
/* Sum of the shares of tenants with steps in the engine. */
uint32_t tenants_busy_shares(const struct tenants *t);
/* How much more it may take of this; UINT64_MAX: no bound. */
uint64_t tenant_left(const struct tenant *who, enum tenant_quota what);
/* Takes n of this quota. ATTN_EQUOTA: nothing is taken; why names tenant, setting and numbers. */
attn_status tenant_take(struct tenant *who, enum tenant_quota what, uint64_t n, char *why,
                        size_t why_bytes);
/* Takes n even beyond the quota, for what a predecessor has given out. */
void tenant_count(struct tenant *who, enum tenant_quota what, uint64_t n);
void tenant_give(struct tenant *who, enum tenant_quota what, uint64_t n);

#endif
