/* client.c: opening and closing a client, and what it knows of itself; operator.c has the requests
 * of operators. */
#include "clients/libattn/core/core.h"
#include "clients/libattn/memory/memory.h"

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef ATTN_VERSION
#error "the build gives ATTN_VERSION"
#endif

/* attn_client_options without what it grew by */
#define OPTIONS_OLD_BYTES (uint32_t) offsetof(struct attn_client_options, fail_fast)
#define OPTIONS_0_1_BYTES (uint32_t) offsetof(struct attn_client_options, token_file)
#define TOKEN_BYTES 256
#define INFO_OLD_BYTES (uint32_t) offsetof(struct attn_client_info, boot_id)

static const struct client_transport_ops *const transports[] = {&transport_sp_ops,
                                                                &transport_shm_ops};

/* Of the clients' lists of sockets, whose owners may end after the client. */
static pthread_mutex_t sockets_lock = PTHREAD_MUTEX_INITIALIZER;

static const struct client_transport_ops *find_transport(const char *url)
{
    for (size_t i = 0; i < sizeof transports / sizeof transports[0]; i++) {
        for (const char *const *s = transports[i]->schemes; *s != NULL; s++) {
            if (strncmp(url, *s, strlen(*s)) == 0 && url[strlen(*s)] != '\0')
                return transports[i];
        }
    }
    return NULL;
}

const char *attn_default_url(void)
{
    static _Thread_local char url[256];
    const char *endpoint = getenv("ATTND_ENDPOINT"), *runtime = getenv("XDG_RUNTIME_DIR");
    if (endpoint != NULL && endpoint[0] != '\0')
        return endpoint;
    if (geteuid() != 0 && runtime != NULL && runtime[0] != '\0') {
        int n = snprintf(url, sizeof url, "ipc://%s/attnd.sock", runtime);
        if (n > 0 && (size_t)n < sizeof url && access(url + strlen("ipc://"), F_OK) == 0)
            return url;
    }
    return "ipc:///run/attnd/attnd.sock";
}

/* A file's name, from the options or the environment; NULL: none. */
static const char *given(const char *option, const char *variable)
{
    const char *name = option != NULL ? option : getenv(variable);
    return name != NULL && name[0] != '\0' ? name : NULL;
}

/* The first line of a file, without its end; *out is the caller's. No file, no token. */
static attn_status token_read(const char *file, char **out, char *why, size_t why_bytes)
{
    char line[TOKEN_BYTES + 2] = "";
    if (file == NULL)
        return ATTN_OK;
    FILE *f = fopen(file, "re");
    bool is_read = f != NULL && fgets(line, sizeof line, f) != NULL;
    int error = errno;
    if (f != NULL)
        fclose(f);
    line[strcspn(line, "\r\n")] = '\0';
    if (!is_read || line[0] == '\0' || strlen(line) > TOKEN_BYTES) {
        snprintf(why, why_bytes, "token_file %.150s (ATTND_KEY_FILE): %s", file,
                 f == NULL ? strerror(error) : "its first line is no token");
        return ATTN_EINVAL;
    }
    *out = strdup(line);
    return *out != NULL ? ATTN_OK : ATTN_ENOMEM;
}

attn_status attn_client_open(const char *url, const struct attn_client_options *o,
                             uint64_t timeout_us, attn_client **out_client)
{
    struct attn_client_options all = {.struct_size = OPTIONS_OLD_BYTES};
    if (out_client == NULL)
        return error_set(ATTN_EINVAL, "out_client is NULL");
    if (url == NULL)
        url = attn_default_url();
    if (o != NULL && o->struct_size != sizeof *o && o->struct_size != OPTIONS_0_1_BYTES &&
        o->struct_size != OPTIONS_OLD_BYTES)
        return error_set(ATTN_EINVAL, "attn_client_options.struct_size %u: this library knows %zu",
                         o->struct_size, sizeof *o);
    if (o != NULL)
        memcpy(&all, o, o->struct_size);
    o = &all;
    const struct client_transport_ops *ops = find_transport(url);
    if (ops == NULL)
        return error_set(ATTN_EINVAL,
                         "url \"%s\": expected ipc://PATH, tcp://HOST:PORT, tls+tcp://HOST:PORT or "
                         "shm://PATH",
                         url);

    char why[ATTN_MESSAGE_BYTES] = "";
    attn_status st = ATTN_ENOMEM;
    struct attn_client *c = calloc(1, sizeof *c);
    if (c == NULL)
        return error_set(ATTN_ENOMEM, "no memory for a client");
    c->url = strdup(url);
    c->name = strdup(o->client_name != NULL ? o->client_name : program_invocation_short_name);
    pthread_mutex_init(&c->lock, NULL);
    TAILQ_INIT(&c->in_flight);
    LIST_INIT(&c->waiters);
    LIST_INIT(&c->holds);
    LIST_INIT(&c->sockets);
    c->default_timeout_us = o->timeout_us != 0 ? o->timeout_us : CLIENT_DEFAULT_TIMEOUT_US;
    c->max_retries = o->max_retries;
    c->fork_generation = client_fork_generation();
    for (uint32_t i = 0; i < ATTN_MAX_IN_FLIGHT; i++)
        c->free_slots[i] = ATTN_MAX_IN_FLIGHT - 1 - i;
    c->n_free_slots = ATTN_MAX_IN_FLIGHT;
    if (c->url == NULL || c->name == NULL) {
        error_set(st, "no memory for a client");
        goto fail;
    }
    struct client_credentials files = {
        .ca_file = given(o->ca_file, "ATTND_CA_FILE"),
        .cert_file = given(o->cert_file, "ATTND_TLS_CERT_FILE"),
        .cert_key_file = given(o->cert_key_file, "ATTND_TLS_CERT_KEY_FILE"),
    };
    st = token_read(given(o->token_file, "ATTND_KEY_FILE"), &c->token, why, sizeof why);
    if (st == ATTN_OK)
        st = ops->open(url, &files, &c->t, why, sizeof why);
    if (st != ATTN_OK) {
        error_set(st, "%s", why);
        goto fail;
    }
    ops->set_max_message(c->t, CLIENT_HELLO_REPLY_BYTES);
    c->fail_fast = o->fail_fast != 0;
    st = session_begin(c, o->resume_session, timeout_us);
    c->fail_fast = false;
    if (st == ATTN_OK && o->has_no_keeper == 0)
        st = keeper_start(c);
    if (st != ATTN_OK)
        goto fail;
    *out_client = c;
    return ATTN_OK;
fail:
    attn_client_close(c);
    return st;
}

attn_status client_socket_add(struct attn_client *c, struct client_socket *s)
{
    pthread_mutex_lock(&sockets_lock);
    pthread_mutex_lock(&c->lock);
    bool is_given_up = c->is_given_up;
    pthread_mutex_unlock(&c->lock);
    if (!is_given_up) {
        s->client = c;
        LIST_INSERT_HEAD(&c->sockets, s, link);
    }
    pthread_mutex_unlock(&sockets_lock);
    return is_given_up ? error_set(ATTN_ECONN, "%.80s was given up", c->url) : ATTN_OK;
}

static void remove_locked(struct client_socket *s)
{
    LIST_REMOVE(s, link);
    s->client = NULL;
}

void client_socket_remove(struct client_socket *s)
{
    pthread_mutex_lock(&sockets_lock);
    if (s->client != NULL)
        remove_locked(s);
    pthread_mutex_unlock(&sockets_lock);
}

void attn_client_close(attn_client *c)
{
    if (c == NULL)
        return;
    bool is_ours = client_is_ours(c);
    struct client_transport *t = c->t;
    if (is_ours) {
        pthread_mutex_lock(&sockets_lock);
        while (!LIST_EMPTY(&c->sockets))
            remove_locked(LIST_FIRST(&c->sockets));
        pthread_mutex_unlock(&sockets_lock);
        keeper_stop(c);
        client_request_fail_all(c);
        session_end(c);
    }
    for (uint32_t i = 0; i < ATTN_MAX_IN_FLIGHT; i++) { /* not waited for; all, in a forked child */
        bool has_message = c->slots[i] != NULL && c->slots[i]->message != NULL;
        if (has_message && (is_ours || !t->ops->is_shared)) /* the child can't take shm's lock */
            t->ops->message_free(t, c->slots[i]->message);
        free(c->slots[i]);
    }
    if (t != NULL && is_ours)
        t->ops->close(t);
    else if (t != NULL)
        t->ops->abandon(t);
    while (!LIST_EMPTY(&c->holds)) {
        struct client_hold *h = LIST_FIRST(&c->holds);
        LIST_REMOVE(h, link);
        free(h);
    }
    free(atomic_load(&c->spare));
    free(c->url);
    free(c->name);
    free(c->token);
    free(c);
}

void attn_client_give_up(attn_client *c)
{
    if (c == NULL || !client_is_ours(c))
        return;
    pthread_mutex_lock(&c->lock);
    c->is_given_up = true;
    c->next_wake_ns = 0;
    pthread_mutex_unlock(&c->lock);
    c->t->ops->wake(c->t); /* whoever reads */
    struct client_socket *s;
    pthread_mutex_lock(&sockets_lock);
    LIST_FOREACH(s, &c->sockets, link)
        shutdown(s->fd, SHUT_RDWR); /* as if the daemon had hung up */
    pthread_mutex_unlock(&sockets_lock);
}

attn_status attn_client_info(const attn_client *c, struct attn_client_info *out)
{
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    if (out == NULL || (out->struct_size != sizeof *out && out->struct_size != INFO_OLD_BYTES))
        return error_set(ATTN_EINVAL, "attn_client_info.struct_size: this library knows %zu",
                         sizeof *out);
    struct attn_client_info info = client_info((attn_client *)c);
    info.struct_size = out->struct_size;
    memcpy(out, &info, out->struct_size);
    return ATTN_OK;
}

attn_status attn_client_pin(attn_client *c)
{
    char why[ATTN_MESSAGE_BYTES] = "";
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    const struct lane_memory_ops *ops = lane_memory_find_cuda(why, sizeof why);
    st = ops != NULL ? c->t->ops->pin(c->t, ops, why, sizeof why) : ATTN_ENOTSUP;
    return st == ATTN_OK ? ATTN_OK : error_set(st, "%s", why);
}

attn_status attn_client_counters(attn_client *c, struct attn_client_counters *out)
{
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    if (out == NULL || out->struct_size != sizeof *out)
        return error_set(ATTN_EINVAL, "attn_client_counters.struct_size: this library knows %zu",
                         sizeof *out);
    pthread_mutex_lock(&c->lock);
    *out = c->counters;
    pthread_mutex_unlock(&c->lock);
    out->struct_size = sizeof *out;
    return ATTN_OK;
}

int attn_client_fd(attn_client *c)
{
    return client_check(c) == ATTN_OK ? c->t->ops->fd(c->t) : -1;
}

attn_status attn_client_poll(attn_client *c, uint64_t timeout_us, uint32_t *out_n_completed)
{
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    if (!client_request_may_wait(c))
        return error_set(ATTN_EINVAL, "a call that waits was made inside a completion callback");
    uint64_t ns = timeout_us > INT64_MAX / 1000000 ? INT64_MAX / 1000 : timeout_us * 1000u;
    client_request_poll(c, attn_now_ns() + ns, out_n_completed);
    return ATTN_OK;
}

void attn_free(void *p)
{
    free(p);
}

const char *attn_version(void)
{
    return ATTN_VERSION;
}
