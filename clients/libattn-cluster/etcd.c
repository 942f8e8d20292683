/* etcd.c: etcd by its v3 JSON gateway, as clients/cluster/src/attnd_cluster/registry/etcd.py.
 *
 * Members are read whole each time, by a linearizable range: what it gives a majority has, and a
 * member of etcd that was cut off gives nothing. A request goes to the endpoint that answered last,
 * after a failure to the next.
 */
#include <curl/curl.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "record.h"
#include "registry.h"

#define MAX_ENDPOINTS 16
#define MAX_ANSWER (64u << 20)
#define FATE_TTL "86400" /* seconds that a fate is kept */

struct etcd {
    struct registry registry;
    const atomic_bool *ends;
    CURL *curl;
    struct curl_slist *headers;
    char *text; /* the endpoints lie in it */
    const char *endpoints[MAX_ENDPOINTS];
    size_t n, next;
    char prefix[128]; /* of all keys, ends with / */
};

struct answer {
    char *data;
    size_t bytes;
};

static size_t take(char *data, size_t size, size_t n, void *to)
{
    struct answer *a = to;
    size_t bytes = size * n;
    char *grown = a->bytes + bytes > MAX_ANSWER ? NULL : realloc(a->data, a->bytes + bytes);
    if (grown == NULL)
        return 0;
    memcpy(grown + a->bytes, data, bytes);
    a->data = grown;
    a->bytes += bytes;
    return bytes;
}

static int look(void *ends, curl_off_t a, curl_off_t b, curl_off_t c, curl_off_t d)
{
    (void)a, (void)b, (void)c, (void)d;
    return atomic_load((const atomic_bool *)ends);
}

/* One endpoint's answer, an object; NULL: none, and why. */
static json_t *ask_one(struct etcd *e, const char *path, const char *body, long timeout_ms,
                       char why[WHY_BYTES])
{
    char url[512];
    struct answer a = {0};
    long code = 0;
    json_error_t wrong;
    snprintf(url, sizeof url, "http://%s/v3/%s", e->endpoints[e->next], path);
    curl_easy_setopt(e->curl, CURLOPT_URL, url);
    curl_easy_setopt(e->curl, CURLOPT_POSTFIELDS, body);
    curl_easy_setopt(e->curl, CURLOPT_TIMEOUT_MS, timeout_ms);
    curl_easy_setopt(e->curl, CURLOPT_WRITEDATA, &a);
    CURLcode rc = curl_easy_perform(e->curl);
    curl_easy_getinfo(e->curl, CURLINFO_RESPONSE_CODE, &code);
    json_t *answer =
        rc == CURLE_OK ? json_loadb(a.data != NULL ? a.data : "", a.bytes, 0, &wrong) : NULL;
    if (rc != CURLE_OK || code != 200 || !json_is_object(answer)) {
        snprintf(why, WHY_BYTES, "etcd at %.100s: %.120s", e->endpoints[e->next],
                 rc != CURLE_OK                     ? curl_easy_strerror(rc)
                 : text_of(answer, "error")[0] != 0 ? text_of(answer, "error")
                                                    : "not an answer of etcd");
        json_decref(answer);
        answer = NULL;
    }
    free(a.data);
    return answer;
}

/* Of one endpoint after the other, each for its share of the time. Takes body. */
static json_t *ask(struct etcd *e, const char *path, json_t *body, uint64_t timeout_us,
                   char why[WHY_BYTES])
{
    char *text = body != NULL ? json_dumps(body, JSON_COMPACT) : NULL;
    json_t *answer = NULL;
    snprintf(why, WHY_BYTES, "no memory");
    for (size_t i = 0; text != NULL && answer == NULL && i < e->n && !atomic_load(e->ends); i++) {
        answer = ask_one(e, path, text, (long)(timeout_us / e->n / 1000) + 1, why);
        if (answer == NULL)
            e->next = (e->next + 1) % e->n;
    }
    free(text);
    json_decref(body);
    return answer;
}

static json_t *base64(const char *text)
{
    size_t n = strlen(text);
    unsigned char *coded = malloc(4 * (n / 3 + 1) + 1);
    if (coded == NULL)
        return NULL;
    EVP_EncodeBlock(coded, (const unsigned char *)text, (int)n);
    json_t *value = json_string((char *)coded);
    free(coded);
    return value;
}

/* Ends with a zero byte; NULL: it is no base64. Freed by the caller. */
static char *decoded(const char *coded)
{
    size_t n = strlen(coded);
    unsigned char *text = calloc(1, 3 * (n / 4) + 4);
    int bytes = text != NULL ? EVP_DecodeBlock(text, (const unsigned char *)coded, (int)n) : -1;
    if (bytes < 0) {
        free(text);
        return NULL;
    }
    for (size_t i = n; i > 0 && coded[i - 1] == '='; i--)
        text[--bytes] = '\0';
    return (char *)text;
}

/* The key below the prefix, in base64; past: the one behind all that begin with it. */
static json_t *key(const struct etcd *e, const char *folder, const char *name, bool is_past)
{
    char text[512];
    int n = snprintf(text, sizeof text, "%s%s%s", e->prefix, folder, name);
    if (n < 1 || (size_t)n >= sizeof text)
        return NULL;
    text[n - 1] = (char)(text[n - 1] + is_past);
    return base64(text);
}

static json_t *read_members(struct registry *r, uint64_t timeout_us, char store[64],
                            char why[WHY_BYTES])
{
    struct etcd *e = (struct etcd *)r;
    json_t *answer = ask(e, "kv/range",
                         json_pack("{s:o,s:o}", "key", key(e, "members/", "", false), "range_end",
                                   key(e, "members/", "", true)),
                         timeout_us, why);
    if (answer == NULL)
        return NULL;
    json_t *found = json_object(), *kv;
    size_t i, skip = strlen(e->prefix) + strlen("members/");
    snprintf(store, 64, "%s", text_of(json_object_get(answer, "header"), "cluster_id"));
    json_array_foreach(json_object_get(answer, "kvs"), i, kv)
    {
        char *name = decoded(text_of(kv, "key")), *value = decoded(text_of(kv, "value"));
        json_t *record = value != NULL ? json_loads(value, 0, NULL) : NULL;
        if (name != NULL && strlen(name) > skip && record_is_member(record)) {
            json_object_set_new(record, "name", json_string(name + skip));
            json_object_set(found, name + skip, record);
        }
        json_decref(record);
        free(name);
        free(value);
    }
    json_decref(answer);
    return found;
}

static bool read_fate(struct etcd *e, const char *registration, uint64_t timeout_us,
                      char out_fate[FATE_BYTES])
{
    char why[WHY_BYTES];
    json_t *answer =
        ask(e, "kv/range", json_pack("{s:o}", "key", key(e, "fates/", registration, false)),
            timeout_us, why);
    json_t *kv = json_array_get(json_object_get(answer, "kvs"), 0);
    char *fate = kv != NULL ? decoded(text_of(kv, "value")) : NULL;
    if (fate != NULL)
        snprintf(out_fate, FATE_BYTES, "%s", fate);
    bool is_known = fate != NULL;
    free(fate);
    json_decref(answer);
    return is_known;
}

static bool decide(struct registry *r, const char *registration, uint64_t timeout_us,
                   char out_fate[FATE_BYTES])
{
    struct etcd *e = (struct etcd *)r;
    char why[WHY_BYTES];
    if (read_fate(e, registration, timeout_us, out_fate)) /* no lease is taken that nobody needs */
        return true;
    json_t *lease = ask(e, "lease/grant", json_pack("{s:s}", "TTL", FATE_TTL), timeout_us, why);
    json_t *answer = NULL;
    if (lease != NULL)
        answer = ask(e, "kv/txn",
                     json_pack("{s:[{s:o,s:s,s:s,s:s}],s:[{s:{s:o,s:o,s:s}}]}", "compare", "key",
                               key(e, "fates/", registration, false), "target", "CREATE", "result",
                               "EQUAL", "create_revision", "0", "success", "request_put", "key",
                               key(e, "fates/", registration, false), "value", base64("dead"),
                               "lease", text_of(lease, "ID")),
                     timeout_us, why);
    bool is_made = json_is_true(json_object_get(answer, "succeeded"));
    bool is_answered = answer != NULL;
    json_decref(lease);
    json_decref(answer);
    if (is_made)
        strcpy(out_fate, "dead");
    return is_made || (is_answered && read_fate(e, registration, timeout_us, out_fate));
}

static void etcd_close(struct registry *r)
{
    struct etcd *e = (struct etcd *)r;
    if (e->curl != NULL)
        curl_easy_cleanup(e->curl);
    curl_slist_free_all(e->headers);
    free(e->text);
    free(e);
}

static bool is_host_and_port(const char *text)
{
    const char *port = strrchr(text, ':');
    return port != NULL && port > text && port[1] != '\0' &&
           strspn(port + 1, "0123456789") == strlen(port + 1) && strlen(text) < 256;
}

/* etcd://HOST:PORT[,HOST:PORT...][/PREFIX] */
static bool read_url(struct etcd *e, const char *url)
{
    e->text = strdup(url + strlen("etcd://"));
    char *prefix = e->text != NULL ? strchr(e->text, '/') : NULL, *kept = NULL;
    if (e->text == NULL || strchr(url, '?') != NULL)
        return false;
    if (prefix != NULL) {
        *prefix++ = '\0';
        prefix += strspn(prefix, "/");
        for (size_t n = strlen(prefix); n > 0 && prefix[n - 1] == '/'; n--)
            prefix[n - 1] = '\0';
    }
    prefix = prefix != NULL && *prefix != '\0' ? prefix : "attnd";
    if (snprintf(e->prefix, sizeof e->prefix, "%s/", prefix) >= (int)sizeof e->prefix)
        return false;
    for (char *host = strtok_r(e->text, ",", &kept); host != NULL;
         host = strtok_r(NULL, ",", &kept)) {
        if (!is_host_and_port(host) || e->n == MAX_ENDPOINTS)
            return false;
        e->endpoints[e->n++] = host;
    }
    return e->n > 0;
}

static void begin_curl(void)
{
    curl_global_init(CURL_GLOBAL_DEFAULT);
}

attn_status etcd_open(const char *url, const atomic_bool *ends, struct registry **out,
                      char why[WHY_BYTES])
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, begin_curl);
    struct etcd *e = calloc(1, sizeof *e);
    if (e == NULL)
        return ATTN_ENOMEM;
    e->registry = (struct registry){.read = read_members, .decide = decide, .close = etcd_close};
    e->ends = ends;
    if (!read_url(e, url)) {
        snprintf(why, WHY_BYTES,
                 "url is cluster+%.100s, expected "
                 "cluster+etcd://HOST:PORT[,HOST:PORT...][/PREFIX], of up"
                 " to %d hosts",
                 url, MAX_ENDPOINTS);
        etcd_close(&e->registry);
        return ATTN_EINVAL;
    }
    e->curl = curl_easy_init();
    e->headers = curl_slist_append(NULL, "Content-Type: application/json");
    if (e->curl == NULL || e->headers == NULL) {
        etcd_close(&e->registry);
        return ATTN_ENOMEM;
    }
    curl_easy_setopt(e->curl, CURLOPT_HTTPHEADER, e->headers);
    curl_easy_setopt(e->curl, CURLOPT_WRITEFUNCTION, take);
    curl_easy_setopt(e->curl, CURLOPT_XFERINFOFUNCTION, look);
    curl_easy_setopt(e->curl, CURLOPT_XFERINFODATA, ends);
    curl_easy_setopt(e->curl, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(e->curl, CURLOPT_NOSIGNAL, 1L); /* the worker's signals are its own */
    curl_easy_setopt(e->curl, CURLOPT_PROXY, ""); /* none, whatever the environment says */
    *out = &e->registry;
    return ATTN_OK;
}
