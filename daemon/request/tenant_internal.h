/* tenant_internal.h: the table of tenants, shared by tenants.c and tenant_file.c. */
#ifndef ATTND_DAEMON_REQUEST_TENANT_INTERNAL_H
#define ATTND_DAEMON_REQUEST_TENANT_INTERNAL_H

#include <pthread.h>
#include <sys/queue.h>

#include "daemon/request/tenant.h"

/* What a tenant has used. Kept as long as any table exists, since a removed tenant may come
 * back. */
struct book_entry {
    SLIST_ENTRY(book_entry) link;
    uint32_t id;
    _Atomic uint64_t used[TENANT_N_QUOTAS];
};

/* The entries of all tenants, shared by the tables of all cards. */
struct book {
    _Atomic uint32_t n_refs;
    pthread_mutex_t lock; /* protects the list */
    SLIST_HEAD(, book_entry) entries;
};

struct tenants {
    uint32_t n;
    struct book *book;
    struct tenant list[TENANT_MAX]; /* the first is the operator */
};

struct book *tenant_book_new(void); /* NULL: no memory */
/* What a tenant has used; an entry is made if there is none. NULL: no memory. */
_Atomic uint64_t *tenant_book_find(struct book *b, uint32_t id);
/* SHA-256 of text. false: OpenSSL does not provide it. */
bool tenant_hash(const char *text, uint8_t out[TENANT_HASH_BYTES]);

#endif
