/* tenant_file.c: reads the file of tenants that listen.tenants names. */
#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/credential.h"
#include "daemon/base/stats.h"
#include "daemon/request/tenant_internal.h"

enum { MIN_BYTES_IN_FLIGHT = 64 << 10 }; /* as listen.max_message */

struct reader {
    struct tenants *t;
    char why[256];
};

__attribute__((format(printf, 2, 3))) static int refuse(struct reader *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (r->why[0] == '\0') /* report the first mistake */
        vsnprintf(r->why, sizeof r->why, format, args);
    va_end(args);
    return 0;
}

/* The tenant of a section, added if it is new; NULL: the section is refused. */
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
    if (!tenant_hash(name, hash))
        return refuse(r, "SHA-256 is not to be had"), NULL;
    memcpy(&new.id, hash, sizeof new.id);
    new.used = tenant_book_find(t->book, new.id);
    if (new.used == NULL)
        return refuse(r, "[%s]: no memory", name), NULL;
    for (uint32_t i = 0; i < t->n; i++)
        if (t->list[i].id == new.id) /* happens for one pair of names in 2^32 */
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
    return what == TENANT_BYTES || what == TENANT_HOST_BYTES || what == TENANT_DISK_BYTES ||
           what == TENANT_TABLE_BYTES;
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
        return refuse(r, "[%s] %s = %.64s is not %s", who->name, tenant_quota_name(what), value,
                      is_size(what) ? "a size (such as 512K, 64M, 2G)" : "a whole number");
    if (what == TENANT_BYTES && who->most[what] > 0 && who->most[what] < MIN_BYTES_IN_FLIGHT)
        return refuse(r, "[%s] bytes_in_flight = %.64s is less than 64K, too little for a step",
                      who->name, value);
    return 1;
}

static int set_share(struct reader *r, struct tenant *who, const char *value)
{
    char *end;
    unsigned long n = strtoul(value, &end, 10);
    if (!isdigit((unsigned char)value[0]) || *end != '\0' || n == 0 || n > FLOW_MAX_SHARE)
        return refuse(r, "[%s] share = %.64s is not a whole number from 1 to %d", who->name, value,
                      FLOW_MAX_SHARE);
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
        if (strcmp(key, tenant_quota_name((enum tenant_quota)i)) == 0)
            return set_quota(r, who, (enum tenant_quota)i, value);
    return refuse(r,
                  "[%s] %.64s is none of token_sha256, users, blocks, sequences, sessions, pools, "
                  "bytes_in_flight, host_bytes, disk_bytes, table_bytes and share",
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
    if (r.t != NULL && (r.t->book = tenant_book_new()) != NULL)
        r.t->list[TENANT_OPERATOR].used = tenant_book_find(r.t->book, TENANT_OPERATOR);
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
