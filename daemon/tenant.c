/* tenant.c: see tenant.h. */
#include "daemon/tenant.h"

#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <inttypes.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/credential.h"
#include "daemon/stats.h"

/* What a tenant has used. Stays as long as any table of it: a tenant that is gone may come back. */
struct book_entry {
    struct book_entry *next;
    uint32_t id;
    _Atomic uint64_t used[TENANT_N_QUOTAS];
};

/* Those of all tenants, for the tables of all cards. */
struct book {
    _Atomic uint32_t n_refs;
    pthread_mutex_t lock; /* of the list */
    struct book_entry *first;
};

struct tenants {
    uint32_t n;
    struct book *book;
    struct tenant list[TENANT_MAX]; /* the first is the operator */
};

static const char *const quota_names[TENANT_N_QUOTAS] = {
    "blocks", "sequences", "sessions", "bytes_in_flight", "pools", "host_bytes", "disk_bytes"};

/* ---- what is used ---- */

static struct book *book_new(void)
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
    for (struct book_entry *e = b->first, *next; e != NULL; e = next) {
        next = e->next;
        free(e);
    }
    pthread_mutex_destroy(&b->lock);
    free(b);
}

/* NULL: no memory. */
static _Atomic uint64_t *book_find(struct book *b, uint32_t id)
{
    pthread_mutex_lock(&b->lock);
    struct book_entry *e = b->first;
    while (e != NULL && e->id != id)
        e = e->next;
    if (e == NULL && (e = calloc(1, sizeof *e)) != NULL) {
        e->id = id;
        e->next = b->first;
        b->first = e;
    }
    pthread_mutex_unlock(&b->lock);
    return e == NULL ? NULL : e->used;
}

/* ---- the file ---- */

struct reader {
    struct tenants *t;
    char why[256];
};

__attribute__((format(printf, 2, 3))) static int refuse(struct reader *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (r->why[0] == '\0') /* the first mistake is the one to tell */
        vsnprintf(r->why, sizeof r->why, format, args);
    va_end(args);
    return 0;
}

static bool hash_of(const char *text, uint8_t out[TENANT_HASH_BYTES])
{
    return EVP_Digest(text, strlen(text), out, NULL, EVP_sha256(), NULL) == 1;
}

/* The section's tenant; NULL: refused. */
static struct tenant *section(struct reader *r, const char *name)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    struct tenants *t = r->t;
    uint8_t hash[TENANT_HASH_BYTES];
    struct tenant new = {0};
    for (uint32_t i = 1; i < t->n; i++)
        if (strcmp(t->list[i].name, name) == 0)
            return &t->list[i];
    size_t n = strlen(name);
    if (n == 0 || n >= TENANT_NAME_BYTES || strspn(name, allowed) != n)
        return refuse(r, "[%.64s]: a tenant's name has 1 to 63 letters, digits, '.', '_' and '-'",
                      name),
               NULL;
    if (t->n == TENANT_MAX)
        return refuse(r, "[%s] is one tenant too many, at most %d", name, TENANT_MAX - 1), NULL;
    snprintf(new.name, sizeof new.name, "%s", name);
    new.flow.share = 1;
    if (!hash_of(name, hash))
        return refuse(r, "SHA-256 is not to be had"), NULL;
    memcpy(&new.id, hash, sizeof new.id);
    new.used = book_find(t->book, new.id);
    if (new.used == NULL)
        return refuse(r, "[%s]: no memory", name), NULL;
    for (uint32_t i = 0; i < t->n; i++)
        if (t->list[i].id == new.id) /* one in four thousand million */
            return refuse(r, "[%s] has the number of [%s]; choose another name", name,
                          t->list[i].name),
                   NULL;
    t->list[t->n] = new;
    return &t->list[t->n++];
}

static int set_token(struct reader *r, struct tenant *who, const char *value)
{
    if (strlen(value) != 2 * TENANT_HASH_BYTES || who->has_token)
        return refuse(r, "[%s] token_sha256 is %s", who->name,
                      who->has_token ? "given twice" : "not 64 hexadecimal digits");
    for (int i = 0; i < TENANT_HASH_BYTES; i++) {
        char digits[3] = {value[2 * i], value[2 * i + 1], '\0'}, *end;
        who->token_hash[i] = (uint8_t)strtoul(digits, &end, 16);
        if (!isxdigit((unsigned char)digits[0]) || *end != '\0')
            return refuse(r, "[%s] token_sha256 is not 64 hexadecimal digits", who->name);
    }
    for (uint32_t i = 1; i < r->t->n; i++)
        if (&r->t->list[i] != who && r->t->list[i].has_token &&
            memcmp(r->t->list[i].token_hash, who->token_hash, TENANT_HASH_BYTES) == 0)
            return refuse(r, "[%s] token_sha256 is also that of [%s]", who->name,
                          r->t->list[i].name);
    who->has_token = true;
    return 1;
}

static int set_users(struct reader *r, struct tenant *who, const char *value)
{
    char copy[256], *rest = copy, *name;
    snprintf(copy, sizeof copy, "%s", value);
    while ((name = strsep(&rest, " \t,")) != NULL) {
        char *end;
        if (name[0] == '\0')
            continue;
        unsigned long uid = strtoul(name, &end, 10);
        const struct passwd *pw = *end != '\0' ? getpwnam(name) : NULL;
        if (*end != '\0' && pw == NULL)
            return refuse(r, "[%s] users: there is no user %.64s", who->name, name);
        uid = pw != NULL ? pw->pw_uid : uid;
        for (uint32_t i = 1; i < r->t->n; i++)
            for (uint32_t u = 0; u < r->t->list[i].n_users; u++)
                if (r->t->list[i].users[u] == uid)
                    return refuse(r, "[%s] users: %.64s is also of [%s]", who->name, name,
                                  r->t->list[i].name);
        if (who->n_users == TENANT_MAX_USERS)
            return refuse(r, "[%s] users: more than %d", who->name, TENANT_MAX_USERS);
        who->users[who->n_users++] = (uid_t)uid;
    }
    return 1;
}

static bool is_size(enum tenant_quota what)
{
    return what == TENANT_BYTES || what == TENANT_HOST_BYTES || what == TENANT_DISK_BYTES;
}

static int set_quota(struct reader *r, struct tenant *who, enum tenant_quota what,
                     const char *value)
{
    char *end;
    errno = 0;
    uint64_t n = strtoull(value, &end, 10), factor = 1;
    const char *units = "KMGT", *unit = *end != '\0' ? strchr(units, *end) : NULL;
    if (unit != NULL && is_size(what)) {
        factor = UINT64_C(1) << (10 * (unit - units + 1));
        end++;
    }
    if (!isdigit((unsigned char)value[0]) || *end != '\0' || errno != 0 ||
        __builtin_mul_overflow(n, factor, &who->most[what]))
        return refuse(r, "[%s] %s = %.64s is not %s", who->name, quota_names[what], value,
                      is_size(what) ? "a size (such as 512K, 64M, 2G)" : "a whole number");
    return 1;
}

static int set_share(struct reader *r, struct tenant *who, const char *value)
{
    char *end;
    unsigned long n = strtoul(value, &end, 10);
    if (!isdigit((unsigned char)value[0]) || *end != '\0' || n == 0 || n > PACE_MAX_SHARE)
        return refuse(r, "[%s] share = %.64s is not a whole number from 1 to %d", who->name, value,
                      PACE_MAX_SHARE);
    who->flow.share = (uint32_t)n;
    return 1;
}

static int handle_line(void *user, const char *name, const char *key, const char *value)
{
    struct reader *r = user;
    struct tenant *who = section(r, name);
    if (who == NULL)
        return 0;
    if (strcmp(key, "token_sha256") == 0)
        return set_token(r, who, value);
    if (strcmp(key, "users") == 0)
        return set_users(r, who, value);
    if (strcmp(key, "share") == 0)
        return set_share(r, who, value);
    for (int i = 0; i < TENANT_N_QUOTAS; i++)
        if (strcmp(key, quota_names[i]) == 0)
            return set_quota(r, who, (enum tenant_quota)i, value);
    return refuse(r,
                  "[%s] %.64s is none of token_sha256, users, blocks, sequences, sessions, pools, "
                  "bytes_in_flight, host_bytes, disk_bytes and share",
                  name, key);
}

attn_status tenants_open(const char *file, struct tenants **out_t, char *why, size_t why_bytes)
{
    char reason[256];
    *out_t = NULL;
    if (file[0] == '\0')
        return ATTN_OK;
    FILE *f = credential_open(file, true, reason, sizeof reason);
    if (f == NULL) {
        snprintf(why, why_bytes, "listen.tenants: %s", reason);
        return ATTN_EINVAL;
    }
    struct reader r = {.t = calloc(1, sizeof *r.t)};
    if (r.t != NULL && (r.t->book = book_new()) != NULL)
        r.t->list[TENANT_OPERATOR].used = book_find(r.t->book, TENANT_OPERATOR);
    if (r.t == NULL || r.t->list[TENANT_OPERATOR].used == NULL) {
        fclose(f);
        tenants_close(r.t);
        snprintf(why, why_bytes, "no memory for tenants");
        return ATTN_ENOMEM;
    }
    r.t->n = 1;
    r.t->list[TENANT_OPERATOR].flow.share = 1;
    int line = ini_parse_file(f, handle_line, &r);
    fclose(f);
    if (line != 0 || r.t->n == 1) {
        if (line != 0)
            snprintf(why, why_bytes, "listen.tenants: %s:%d: %s", file, line,
                     r.why[0] != '\0' ? r.why : "is neither [tenant] nor key = value");
        else
            snprintf(why, why_bytes, "listen.tenants: %s names no tenant", file);
        tenants_close(r.t);
        return ATTN_EINVAL;
    }
    for (uint32_t i = 1; i < r.t->n; i++)
        r.t->list[i].stats = stats_tenant_add(r.t->list[i].name);
    *out_t = r.t;
    return ATTN_OK;
}

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
        copy->list[i].n_steps = 0;
    }
    *out_t = copy;
    return ATTN_OK;
}

uint32_t tenant_id_of_name(const char *name)
{
    uint8_t hash[TENANT_HASH_BYTES];
    uint32_t id = TENANT_OPERATOR;
    if (name[0] != '\0' && hash_of(name, hash))
        memcpy(&id, hash, sizeof id);
    return id;
}

/* ---- another file ---- */

static bool has_anything(const struct tenant *who)
{
    for (int i = 0; i < TENANT_N_QUOTAS; i++)
        if (who->used[i] > 0)
            return true;
    return who->n_steps > 0;
}

/* The place of a tenant of this id; else one that is free. NULL: none is. */
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
        next.used = book_find(t->book, next.id);
        if (next.used == NULL) {
            is_all = false;
            continue;
        }
        if (place < &t->list[t->n] && place->id == next.id) {
            next.flow.end = place->flow.end;
            next.n_steps = place->n_steps;
        }
        t->n += place == &t->list[t->n];
        *place = next;
    }
    tenants_close(now);
    return is_all;
}

/* ---- who it is ---- */

static struct tenant *of_token(struct tenants *t, const char *token)
{
    uint8_t hash[TENANT_HASH_BYTES];
    struct tenant *found = NULL;
    if (!hash_of(token, hash))
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
    do { /* another card's may change it meanwhile */
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
