/* tenant.h: tenants, which may use the daemon, and their quotas: listen.tenants, a file with a
 * section for each tenant:
 *
 *   [research]                     its name: letters, digits, '.', '_' and '-'
 *   token_sha256 = 9f86d0...       of the token that its workers send in hello (attnctl keys)
 *   users = alice 1007             these users on Unix sockets are the tenant, too
 *   blocks = 100000                most that its pools may have, together; so below; 0: no bound
 *   sequences = 1000
 *   sessions = 64
 *   pools = 4
 *   bytes_in_flight = 64M          of steps that are not answered
 *   host_bytes = 8G                of its evicted blocks in host memory (cache.host_memory)
 *   disk_bytes = 100G              the same in the file behind it (cache.disk_path)
 *   share = 3                      of device time: three times that of a tenant with 1; default 1
 *
 * A certificate whose common name is a tenant's name is that tenant's. Names of pools, sequences
 * and sessions belong to their tenant. Without a file nobody is asked, and all is tenant 0's, the
 * operator's; with one, root and the daemon's own user on Unix sockets are the operator.
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
    TENANT_N_QUOTAS
};

struct tenant {
    char name[TENANT_NAME_BYTES]; /* "" the operator's */
    uint32_t id; /* of the name, the same in every process; what the cache knows it by */
    uint32_t stats; /* its place in stats.tenants */
    bool is_gone; /* it was in the file; what it has ends */
    bool has_token;
    uint8_t token_hash[TENANT_HASH_BYTES];
    uid_t users[TENANT_MAX_USERS];
    uint32_t n_users;
    uint64_t most[TENANT_N_QUOTAS]; /* 0: no bound */
    _Atomic uint64_t *used; /* [TENANT_N_QUOTAS] of all cards together */
    struct flow flow; /* its device time; the engine's, as what follows */
    uint32_t n_steps; /* admitted and not answered */
};

/* The tenants of one engine. What they have used is shared by all engines' copies. */
struct tenants;

/* Reads the file (credential.h); "": there are no tenants, NULL. ATTN_EINVAL: why names file, line
 * and value; ATTN_ENOMEM. */
attn_status tenants_open(const char *file, struct tenants **out_t, char *why, size_t why_bytes);
void tenants_close(struct tenants *t); /* NULL is fine */
/* The same for another card's engine, with nothing in work; of NULL: NULL. ATTN_ENOMEM. */
attn_status tenants_copy(const struct tenants *t, struct tenants **out_t);
/* What tenant_id gives for one of this name. Any thread. */
uint32_t tenant_id_of_name(const char *name);
/* Takes over from `now`, which is closed: new tenants, changed tokens, users and quotas, removed
 * tenants; those that stay keep their struct. false: some do not fit until everything of removed
 * tenants has ended. Engine thread. */
bool tenants_update(struct tenants *t, struct tenants *now);

/* Identifies the tenant of a request by token, else by certificate, else by user; t NULL: the
 * operator, out NULL. Compares every token with all hashes, in constant time. ATTN_EAUTH: no tenant
 * matches, or two of them contradict; why says so without details. */
attn_status tenants_identify(struct tenants *t, const struct principal *p, const char *token,
                             struct tenant **out, char *why, size_t why_bytes);
/* NULL: none has this id, or t is NULL. */
struct tenant *tenants_of_id(struct tenants *t, uint32_t id);

/* Those of the file, from 1 on; NULL: there are no more. */
const struct tenant *tenants_at(const struct tenants *t, uint32_t i);
/* By name, "" the operator; NULL: none has it, or t is NULL. */
struct tenant *tenants_find(struct tenants *t, const char *name);

/* As the file spells it. */
const char *tenant_quota_name(enum tenant_quota what);
/* who NULL: there are no tenants, nothing is counted. */
uint32_t tenant_id(const struct tenant *who);
bool tenant_is_operator(const struct tenant *who);
/* Sum of the shares of tenants with steps in the engine. */
uint32_t tenants_busy_shares(const struct tenants *t);
/* How much it may still take of this. */
uint64_t tenant_left(const struct tenant *who, enum tenant_quota what);
/* Takes n of it. ATTN_EQUOTA: nothing is taken, why names tenant, setting and numbers. */
attn_status tenant_take(struct tenant *who, enum tenant_quota what, uint64_t n, char *why,
                        size_t why_bytes);
/* The same whether there is room or not: what a predecessor gave out. */
void tenant_count(struct tenant *who, enum tenant_quota what, uint64_t n);
void tenant_give(struct tenant *who, enum tenant_quota what, uint64_t n);

#endif
