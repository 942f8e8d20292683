/* tenants.c: the table of tenants: identifies them, and counts what they have used of their
 * quotas. */
#include "daemon/request/tenant.h"

#include <inttypes.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/stats.h"
#include "daemon/request/tenant_internal.h"

static const char *const quota_names[TENANT_N_QUOTAS] = {
    "blocks", "sequences",  "sessions",   "bytes_in_flight",
    "pools",  "host_bytes", "disk_bytes", "table_bytes"};

bool tenant_hash(const char *text, uint8_t out[TENANT_HASH_BYTES])
{
    return EVP_Digest(text, strlen(text), out, NULL, EVP_sha256(), NULL) == 1;
}

/* --- what is used ----------------------------------------------------------------------------- */

struct book *tenant_book_new(void)
{
    struct book *b = calloc(1, sizeof *b);
    if (b == NULL)
        return NULL;
    atomic_init(&b->n_refs, 1);
    pthread_mutex_init(&b->lock, NULL);
    return b;
}

static void book_unref(struct book *b)
{
    if (b == NULL || atomic_fetch_sub(&b->n_refs, 1) > 1)
        return;
    for (struct book_entry *e; (e = SLIST_FIRST(&b->entries)) != NULL;) {
        SLIST_REMOVE_HEAD(&b->entries, link);
        free(e);
    }
    pthread_mutex_destroy(&b->lock);
    free(b);
}

_Atomic uint64_t *tenant_book_find(struct book *b, uint32_t id)
{
    pthread_mutex_lock(&b->lock);
    struct book_entry *e;
    SLIST_FOREACH(e, &b->entries, link)
        if (e->id == id)
            break;
    if (e == NULL && (e = calloc(1, sizeof *e)) != NULL) {
        e->id = id;
        SLIST_INSERT_HEAD(&b->entries, e, link);
    }
    pthread_mutex_unlock(&b->lock);
    return e == NULL ? NULL : e->used;
}

/* --- the table -------------------------------------------------------------------------------- */

void tenants_close(struct tenants *t)
{
    if (t != NULL)
        book_unref(t->book);
    free(t);
}

attn_status tenants_copy(const struct tenants *t, struct tenants **out_t)
{
    *out_t = NULL;
    if (t == NULL)
        return ATTN_OK;
    struct tenants *copy = malloc(sizeof *copy);
    if (copy == NULL)
        return ATTN_ENOMEM;
    *copy = *t;
    atomic_fetch_add(&copy->book->n_refs, 1);
    for (uint32_t i = 0; i < copy->n; i++) {
        copy->list[i].flow.end = 0;
        copy->list[i].n_steps = copy->list[i].n_turns = 0;
    }
    *out_t = copy;
    return ATTN_OK;
}

uint32_t tenant_id_of_name(const char *name)
{
    uint8_t hash[TENANT_HASH_BYTES];
    uint32_t id = TENANT_OPERATOR;
    if (name[0] != '\0' && tenant_hash(name, hash))
        memcpy(&id, hash, sizeof id);
    return id;
}

/* ---- another file ---- */

static bool has_anything(const struct tenant *who)
{
    for (int i = 0; i < TENANT_N_QUOTAS; i++)
        if (who->used[i] > 0)
            return true;
    return who->n_steps + who->n_turns > 0;
}

/* The entry of the tenant with this id, else a free one. NULL: none is free. */
static struct tenant *place_of(struct tenants *t, uint32_t id)
{
    struct tenant *free_one = t->n < TENANT_MAX ? &t->list[t->n] : NULL;
    for (uint32_t i = 1; i < t->n; i++) {
        if (t->list[i].id == id)
            return &t->list[i];
        if (t->list[i].is_gone && !has_anything(&t->list[i]))
            free_one = &t->list[i];
    }
    return free_one;
}

bool tenants_update(struct tenants *t, struct tenants *now)
{
    bool is_all = true;
    for (uint32_t i = 1; i < t->n; i++) {
        struct tenant *who = &t->list[i];
        who->is_gone = true;
        who->has_token = false;
        who->n_users = 0;
    }
    for (uint32_t i = 1; i < now->n; i++) {
        struct tenant *place = place_of(t, now->list[i].id);
        if (place == NULL) {
            is_all = false;
            continue;
        }
        struct tenant next = now->list[i];
        next.used = tenant_book_find(t->book, next.id);
        if (next.used == NULL) {
            is_all = false;
            continue;
        }
        if (place < &t->list[t->n] && place->id == next.id) {
            next.flow.end = place->flow.end;
            next.n_steps = place->n_steps;
            next.n_turns = place->n_turns;
        }
        t->n += place == &t->list[t->n];
        *place = next;
    }
    tenants_close(now);
    return is_all;
}

/* ---- identification -------------------------------------------------------------------------- */

static struct tenant *of_token(struct tenants *t, const char *token)
{
    uint8_t hash[TENANT_HASH_BYTES];
    struct tenant *found = NULL;
    if (!tenant_hash(token, hash))
        return NULL;
    for (uint32_t i = 1; i < t->n; i++)
        if (CRYPTO_memcmp(t->list[i].token_hash, hash, sizeof hash) == 0 && t->list[i].has_token)
            found = &t->list[i];
    return found;
}

static struct tenant *of_name(struct tenants *t, const char *name)
{
    for (uint32_t i = 1; i < t->n; i++)
        if (!t->list[i].is_gone && strcmp(t->list[i].name, name) == 0)
            return &t->list[i];
    return NULL;
}

static struct tenant *of_user(struct tenants *t, uid_t uid)
{
    for (uint32_t i = 1; i < t->n; i++)
        for (uint32_t u = 0; u < t->list[i].n_users; u++)
            if (t->list[i].users[u] == uid)
                return &t->list[i];
    return uid == 0 || uid == geteuid() ? &t->list[TENANT_OPERATOR] : NULL;
}

attn_status tenants_identify(struct tenants *t, const struct principal *p, const char *token,
                             struct tenant **out, char *why, size_t why_bytes)
{
    *out = NULL;
    if (t == NULL)
        return ATTN_OK;
    bool has_cert = p->certificate[0] != '\0';
    struct tenant *by_cert = has_cert ? of_name(t, p->certificate) : NULL;
    if (token[0] != '\0') {
        *out = of_token(t, token);
        if (*out == NULL)
            snprintf(why, why_bytes, "hello.token is refused: it is no tenant's");
        else if (has_cert && by_cert != *out) {
            snprintf(why, why_bytes,
                     "hello.token is refused: the connection's certificate is "
                     "another tenant's");
            *out = NULL;
        }
    } else if (has_cert) {
        *out = by_cert;
        if (*out == NULL)
            snprintf(why, why_bytes, "the certificate's common name \"%s\" is no tenant's",
                     p->certificate);
    } else if (p->kind == PRINCIPAL_USER) {
        *out = of_user(t, p->uid);
        if (*out == NULL)
            snprintf(why, why_bytes, "hello has no token, and uid %lu is no tenant's user",
                     (unsigned long)p->uid);
    } else {
        snprintf(why, why_bytes, "hello has no token (libattn: ATTND_KEY_FILE)");
    }
    return *out != NULL ? ATTN_OK : ATTN_EAUTH;
}

struct tenant *tenants_of_id(struct tenants *t, uint32_t id)
{
    for (uint32_t i = 0; t != NULL && i < t->n; i++)
        if (t->list[i].id == id)
            return &t->list[i];
    return NULL;
}

const struct tenant *tenants_at(const struct tenants *t, uint32_t i)
{
    return t != NULL && i < t->n ? &t->list[i] : NULL;
}

uint32_t tenants_index(const struct tenants *t, const struct tenant *who)
{
    return (uint32_t)(who - t->list);
}

struct tenant *tenants_find(struct tenants *t, const char *name)
{
    if (t == NULL || name[0] == '\0')
        return t == NULL ? NULL : &t->list[TENANT_OPERATOR];
    return of_name(t, name);
}

/* ---- what it has ---- */

const char *tenant_quota_name(enum tenant_quota what)
{
    return quota_names[what];
}

uint32_t tenants_busy_shares(const struct tenants *t)
{
    uint32_t sum = 0;
    for (uint32_t i = 0; i < t->n; i++)
        sum += t->list[i].n_steps > 0 ? t->list[i].flow.share : 0;
    return sum;
}

uint32_t tenant_id(const struct tenant *who)
{
    return who == NULL ? TENANT_OPERATOR : who->id;
}

bool tenant_is_operator(const struct tenant *who)
{
    return tenant_id(who) == TENANT_OPERATOR;
}

static void publish(const struct tenant *who, enum tenant_quota what)
{
    uint64_t n;
    if (tenant_is_operator(who))
        return;
    do { /* repeated if another card's engine has changed it meanwhile */
        n = who->used[what];
        atomic_store(&stats.tenants[who->stats].used[what], n);
    } while (n != who->used[what]);
}

uint64_t tenant_left(const struct tenant *who, enum tenant_quota what)
{
    if (who == NULL || who->most[what] == 0)
        return UINT64_MAX;
    uint64_t used = who->used[what];
    return who->most[what] > used ? who->most[what] - used : 0;
}

attn_status tenant_take(struct tenant *who, enum tenant_quota what, uint64_t n, char *why,
                        size_t why_bytes)
{
    uint64_t used = who == NULL ? 0 : who->used[what];
    if (who == NULL)
        return ATTN_OK;
    do {
        uint64_t left = who->most[what] == 0     ? UINT64_MAX
                        : who->most[what] > used ? who->most[what] - used
                                                 : 0;
        if (n <= left)
            continue;
        snprintf(why, why_bytes,
                 "tenant %s has %" PRIu64 " of its %" PRIu64 " %s and asks for %" PRIu64 " more",
                 who->name, used, who->most[what], quota_names[what], n);
        return ATTN_EQUOTA;
    } while (!atomic_compare_exchange_weak(&who->used[what], &used, used + n));
    publish(who, what);
    return ATTN_OK;
}

void tenant_count(struct tenant *who, enum tenant_quota what, uint64_t n)
{
    if (who == NULL)
        return;
    atomic_fetch_add(&who->used[what], n);
    publish(who, what);
}

void tenant_give(struct tenant *who, enum tenant_quota what, uint64_t n)
{
    if (who == NULL)
        return;
    atomic_fetch_sub(&who->used[what], n);
    publish(who, what);
}
