/* keys.c: makes the keys, certificates and tokens that keys.h promises. Keys are of the curve
 * P-256, which every TLS library has; a token is 32 random bytes, of which the daemon keeps the
 * SHA-256. */
#include "clients/attnctl/keys.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CA_DAYS = 3650, TOKEN_BYTES = 32, HEX_BYTES = 2 * TOKEN_BYTES + 1, DAY_S = 86400 };

struct maker {
    const struct keys_wanted *wanted;
    X509 *ca;
    EVP_PKEY *ca_key;
    char *why;
    size_t why_bytes;
};

__attribute__((format(printf, 2, 3))) static bool fail(struct maker *m, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(m->why, m->why_bytes, format, args);
    va_end(args);
    return false;
}

static bool fail_openssl(struct maker *m, const char *what)
{
    const char *text = ERR_reason_error_string(ERR_peek_last_error());
    return fail(m, "%s: %s", what, text != NULL ? text : "OpenSSL gives no reason");
}

/* ---- files ---- */

static void path_of(const struct maker *m, const char *name, const char *end, char out[PATH_MAX])
{
    snprintf(out, PATH_MAX, "%s/%s%s", m->wanted->dir, name, end);
}

static bool exists(const struct maker *m, const char *name, const char *end)
{
    char path[PATH_MAX];
    path_of(m, name, end, path);
    return access(path, F_OK) == 0;
}

/* Opens a file that only its owner can read: a new one, or one to add to. A pipe would be waited
 * for, a device forgets. */
static FILE *create(struct maker *m, const char *name, const char *end, bool is_more)
{
    char path[PATH_MAX];
    struct stat info;
    path_of(m, name, end, path);
    if (is_more && stat(path, &info) == 0 && !S_ISREG(info.st_mode)) {
        fail(m, "%s is no regular file", path);
        return NULL;
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | (is_more ? O_APPEND : O_EXCL), 0600);
    FILE *f = fd >= 0 ? fdopen(fd, is_more ? "a" : "w") : NULL;
    if (f == NULL)
        fail(m, "%s: %s", path, strerror(errno));
    return f;
}

static bool finish(struct maker *m, FILE *f, bool is_written, const char *name, const char *end)
{
    bool is_closed = fclose(f) == 0;
    return (is_written && is_closed) ||
           fail(m, "%s/%s%s: cannot be written: %s", m->wanted->dir, name, end, strerror(errno));
}

static bool write_pair(struct maker *m, const char *name, X509 *cert, EVP_PKEY *key)
{
    FILE *f = create(m, name, ".key", false);
    if (f == NULL ||
        !finish(m, f, PEM_write_PrivateKey(f, key, NULL, NULL, 0, NULL, NULL) == 1, name, ".key"))
        return false;
    f = create(m, name, ".crt", false);
    return f != NULL && finish(m, f, PEM_write_X509(f, cert) == 1, name, ".crt");
}

/* ---- certificates ---- */

static bool add_extension(X509 *cert, X509 *issuer, int nid, const char *value)
{
    X509V3_CTX context;
    X509V3_set_ctx_nodb(&context);
    X509V3_set_ctx(&context, issuer, cert, NULL, NULL, 0);
    X509_EXTENSION *e = X509V3_EXT_conf_nid(NULL, &context, nid, value);
    bool is_added = e != NULL && X509_add_ext(cert, e, -1) == 1;
    X509_EXTENSION_free(e);
    return is_added;
}

static bool set_random_serial(X509 *cert)
{
    unsigned char bytes[16];
    if (RAND_bytes(bytes, sizeof bytes) != 1)
        return false;
    bytes[0] = (bytes[0] & 0x7f) | 0x40; /* positive */
    BIGNUM *n = BN_bin2bn(bytes, sizeof bytes, NULL);
    bool is_set = n != NULL && BN_to_ASN1_INTEGER(n, X509_get_serialNumber(cert)) != NULL;
    BN_free(n);
    return is_set;
}

/* A certificate of the CA, or the CA's own if there is none yet; usage NULL: the CA's. names: its
 * alternative names, NULL none. */
static bool make_cert(struct maker *m, const char *common_name, const char *usage,
                      const char *names, X509 **out_cert, EVP_PKEY **out_key)
{
    bool is_ca = usage == NULL;
    long days = is_ca ? CA_DAYS : m->wanted->days;
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *cert = X509_new();
    X509 *issuer = is_ca ? cert : m->ca;
    bool ok = key != NULL && cert != NULL && X509_set_version(cert, X509_VERSION_3) == 1 &&
              set_random_serial(cert);
    X509_NAME *subject = ok ? X509_get_subject_name(cert) : NULL;
    ok = ok &&
         X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8,
                                    (const unsigned char *)common_name, -1, -1, 0) == 1 &&
         X509_set_issuer_name(cert, X509_get_subject_name(issuer)) == 1 &&
         /* clocks differ: good since yesterday, and longer than that if it is to be over already */
         X509_gmtime_adj(X509_getm_notBefore(cert), (days < 0 ? 2 * days : -1) * DAY_S) != NULL &&
         X509_gmtime_adj(X509_getm_notAfter(cert), days * DAY_S) != NULL &&
         X509_set_pubkey(cert, key) == 1 &&
         add_extension(cert, issuer, NID_basic_constraints,
                       is_ca ? "critical,CA:TRUE,pathlen:0" : "critical,CA:FALSE") &&
         add_extension(cert, issuer, NID_key_usage,
                       is_ca ? "critical,keyCertSign,cRLSign" : "critical,digitalSignature") &&
         add_extension(cert, issuer, NID_subject_key_identifier, "hash") &&
         (is_ca || (add_extension(cert, issuer, NID_authority_key_identifier, "keyid") &&
                    add_extension(cert, issuer, NID_ext_key_usage, usage))) &&
         (names == NULL || add_extension(cert, issuer, NID_subject_alt_name, names)) &&
         X509_sign(cert, is_ca ? key : m->ca_key, EVP_sha256()) > 0;
    if (!ok) {
        X509_free(cert);
        EVP_PKEY_free(key);
        return fail_openssl(m, common_name);
    }
    *out_cert = cert;
    *out_key = key;
    return true;
}

static bool make_pair(struct maker *m, const char *name, const char *usage, const char *names)
{
    X509 *cert;
    EVP_PKEY *key;
    if (!make_cert(m, name, usage, names, &cert, &key))
        return false;
    bool is_written = write_pair(m, name, cert, key);
    X509_free(cert);
    EVP_PKEY_free(key);
    return is_written;
}

static bool load_ca(struct maker *m)
{
    char path[PATH_MAX];
    path_of(m, "ca", ".crt", path);
    FILE *f = fopen(path, "re");
    m->ca = f != NULL ? PEM_read_X509(f, NULL, NULL, NULL) : NULL;
    if (f != NULL)
        fclose(f);
    path_of(m, "ca", ".key", path);
    f = fopen(path, "re");
    m->ca_key = f != NULL ? PEM_read_PrivateKey(f, NULL, NULL, NULL) : NULL;
    if (f != NULL)
        fclose(f);
    return (m->ca != NULL && m->ca_key != NULL) ||
           fail(m, "%s: ca.crt and ca.key are not both there to be read", m->wanted->dir);
}

static bool make_ca(struct maker *m)
{
    if (exists(m, "ca", ".crt") || exists(m, "ca", ".key"))
        return load_ca(m);
    return make_cert(m, "attnd CA", NULL, NULL, &m->ca, &m->ca_key) &&
           write_pair(m, "ca", m->ca, m->ca_key);
}

/* The alternative names of the daemon's certificate. */
static bool names_of(struct maker *m, size_t out_bytes, char *out)
{
    size_t n = 0;
    out[0] = '\0';
    for (size_t i = 0; i < m->wanted->n_hosts; i++) {
        const char *host = m->wanted->hosts[i];
        unsigned char address[16];
        bool is_address =
            inet_pton(AF_INET, host, address) == 1 || inet_pton(AF_INET6, host, address) == 1;
        if (host[0] == '\0' || strpbrk(host, ",= \t") != NULL || n + strlen(host) + 8 > out_bytes)
            return fail(m, "host \"%.100s\" is neither a name nor an address", host);
        n += (size_t)snprintf(out + n, out_bytes - n, "%s%s:%s", n > 0 ? "," : "",
                              is_address ? "IP" : "DNS", host);
    }
    return true;
}

/* ---- tenants ---- */

static void to_hex(const unsigned char *bytes, char out[HEX_BYTES])
{
    for (size_t i = 0; i < TOKEN_BYTES; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

static bool make_token(struct maker *m, const char *tenant)
{
    unsigned char bytes[TOKEN_BYTES], hash[EVP_MAX_MD_SIZE];
    char token[HEX_BYTES], digest[HEX_BYTES];
    if (RAND_bytes(bytes, sizeof bytes) != 1)
        return fail_openssl(m, "random bytes for a token");
    to_hex(bytes, token);
    if (EVP_Digest(token, strlen(token), hash, NULL, EVP_sha256(), NULL) != 1)
        return fail_openssl(m, "SHA-256");
    to_hex(hash, digest);
    FILE *f = create(m, tenant, ".token", false);
    if (f == NULL || !finish(m, f, fprintf(f, "%s\n", token) > 0, tenant, ".token"))
        return false;
    OPENSSL_cleanse(token, sizeof token);
    f = create(m, "tenants", ".conf", true);
    if (f != NULL && finish(m, f, fprintf(f, "[%s]\ntoken_sha256 = %s\n\n", tenant, digest) > 0,
                            "tenants", ".conf"))
        return true;
    char path[PATH_MAX];
    path_of(m, tenant, ".token", path);
    unlink(path); /* nobody knows it: the next call makes another */
    return false;
}

static bool check_tenant(struct maker *m, const char *tenant)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t n = strlen(tenant);
    if (n == 0 || n > 63 || tenant[0] == '.' || strspn(tenant, allowed) != n ||
        strcmp(tenant, "ca") == 0 || strcmp(tenant, "server") == 0)
        return fail(m,
                    "tenant \"%.100s\": a name has 1 to 63 letters, digits, '.', '_' and '-', and "
                    "is not ca or server",
                    tenant);
    return true;
}

static bool make_tenant(struct maker *m, const char *tenant)
{
    if (!exists(m, tenant, ".crt") && !make_pair(m, tenant, "clientAuth", NULL))
        return false;
    return exists(m, tenant, ".token") || make_token(m, tenant);
}

/* Makes the folder of the keys, for its owner alone, and the one that it is in. */
static bool make_folder(const char *dir)
{
    const char *slash = strrchr(dir, '/');
    char above[4096];
    if (slash != NULL && slash > dir && slash[1] != '\0' && slash - dir < (int)sizeof above) {
        snprintf(above, sizeof above, "%.*s", (int)(slash - dir), dir);
        (void)mkdir(above, 0755); /* why it can't be made, the next one says, too */
    }
    return mkdir(dir, 0700) == 0 || errno == EEXIST;
}

bool keys_make(const struct keys_wanted *w, char *why, size_t why_bytes)
{
    struct maker m = {.wanted = w, .why = why, .why_bytes = why_bytes};
    char names[4096];
    bool ok = names_of(&m, sizeof names, names);
    for (size_t i = 0; ok && i < w->n_tenants; i++)
        ok = check_tenant(&m, w->tenants[i]);
    if (ok && !make_folder(w->dir))
        return fail(&m, "%s: %s", w->dir, strerror(errno));
    ok = ok && make_ca(&m);
    if (ok && !exists(&m, "server", ".crt"))
        ok = make_pair(&m, "server", "serverAuth", names);
    for (size_t i = 0; ok && i < w->n_tenants; i++)
        ok = make_tenant(&m, w->tenants[i]);
    X509_free(m.ca);
    EVP_PKEY_free(m.ca_key);
    return ok;
}

/* As a URL has it. false: it is neither a DNS name nor an address. */
static bool host_of(const GENERAL_NAME *name, char *out, size_t out_bytes)
{
    int type;
    char text[INET6_ADDRSTRLEN];
    const ASN1_STRING *value = GENERAL_NAME_get0_value(name, &type);
    const unsigned char *bytes = ASN1_STRING_get0_data(value);
    int n = ASN1_STRING_length(value);
    if (type == GEN_DNS)
        return snprintf(out, out_bytes, "%.*s", n, (const char *)bytes) < (int)out_bytes;
    if (type != GEN_IPADD || (n != 4 && n != 16) ||
        inet_ntop(n == 4 ? AF_INET : AF_INET6, bytes, text, sizeof text) == NULL)
        return false;
    return snprintf(out, out_bytes, n == 4 ? "%s" : "[%s]", text) < (int)out_bytes;
}

/* The name that workers have to use: the first of the daemon's certificate, which may be of an
 * earlier call. */
static void host_of_daemon(const struct keys_wanted *w, char *out, size_t out_bytes)
{
    char path[PATH_MAX];
    path_of(&(struct maker){.wanted = w}, "server", ".crt", path);
    FILE *f = fopen(path, "re");
    X509 *cert = f != NULL ? PEM_read_X509(f, NULL, NULL, NULL) : NULL;
    GENERAL_NAMES *names =
        cert != NULL ? X509_get_ext_d2i(cert, NID_subject_alt_name, NULL, NULL) : NULL;
    if (names == NULL || sk_GENERAL_NAME_num(names) == 0 ||
        !host_of(sk_GENERAL_NAME_value(names, 0), out, out_bytes))
        snprintf(out, out_bytes, "%s", w->hosts[0]);
    GENERAL_NAMES_free(names);
    X509_free(cert);
    if (f != NULL)
        fclose(f);
}

void keys_explain(const struct keys_wanted *w, FILE *f)
{
    char real[PATH_MAX], host[256];
    host_of_daemon(w, host, sizeof host);
    const char *dir = realpath(w->dir, real) != NULL ? real : w->dir;
    fprintf(f,
            "# attnd.conf (the files must be readable by attnd's user: chown, or LoadCredential=)\n"
            "[listen]\n"
            "address = tls+tcp://*:7471\n"
            "tls_cert = %s/server.crt\n"
            "tls_key = %s/server.key\n"
            "tenants = %s/tenants.conf\n"
            "# certificates of workers instead of tokens, or as well:\n"
            "# tls_ca = %s/ca.crt\n",
            dir, dir, dir, dir);
    for (size_t i = 0; i < w->n_tenants; i++)
        fprintf(f,
                "\n# environment of the workers of %s (copy ca.crt and %s.token to them; ca.key "
                "stays)\n"
                "export ATTND_ENDPOINT=tls+tcp://%s:7471\n"
                "export ATTND_CA_FILE=%s/ca.crt\n"
                "export ATTND_KEY_FILE=%s/%s.token\n"
                "# export ATTND_TLS_CERT_FILE=%s/%s.crt ATTND_TLS_CERT_KEY_FILE=%s/%s.key\n",
                w->tenants[i], w->tenants[i], host, dir, dir, w->tenants[i], dir, w->tenants[i],
                dir, w->tenants[i]);
}
