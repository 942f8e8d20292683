/* http.c: see http.h. libmicrohttpd polls on its own thread; answers are rendered whole into
 * memory.
 */
#include "daemon/http.h"

#include <errno.h>
#include <inttypes.h>
#include <microhttpd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/address.h"
#include "daemon/health.h"
#include "daemon/stats.h"

enum { MAX_CONNECTIONS = 64, CONNECTION_TIMEOUT_S = 10, MEMORY_BYTES = 16 << 10 };

struct http {
    struct MHD_Daemon *daemon;
    uint64_t stall_timeout_ns;
    uint16_t port;
};

/* Writes a page's body; returns its HTTP status. */
typedef unsigned (*page_fn)(const struct http *h, FILE *f);

static unsigned page_metrics(const struct http *h, FILE *f)
{
    (void)h;
    stats_write_prometheus(f);
    return MHD_HTTP_OK;
}

static unsigned page_stats(const struct http *h, FILE *f)
{
    (void)h;
    return stats_write_json(f) == ATTN_OK ? MHD_HTTP_OK : MHD_HTTP_INTERNAL_SERVER_ERROR;
}

static unsigned page_healthz(const struct http *h, FILE *f)
{
    unsigned status = MHD_HTTP_OK;
    for (enum health_thread who = 0; who < HEALTH_N_THREADS; who++) {
        uint64_t silent_ns;
        if (!health_is_stalled(who, h->stall_timeout_ns, &silent_ns))
            continue;
        fprintf(f, "the %s has shown no life for %" PRIu64 " ms\n", health_thread_name(who),
                silent_ns / 1000000);
        status = MHD_HTTP_SERVICE_UNAVAILABLE;
    }
    if (status == MHD_HTTP_OK)
        fprintf(f, "ok\n");
    return status;
}

static unsigned page_readyz(const struct http *h, FILE *f)
{
    if (health_is_draining()) {
        fprintf(f, "draining\n");
        return MHD_HTTP_SERVICE_UNAVAILABLE;
    }
    if (!health_is_ready()) {
        fprintf(f, "not ready\n");
        return MHD_HTTP_SERVICE_UNAVAILABLE;
    }
    return page_healthz(h, f);
}

static unsigned page_not_found(const struct http *h, FILE *f)
{
    (void)h;
    fprintf(f, "no such page; there are /metrics, /stats, /healthz and /readyz\n");
    return MHD_HTTP_NOT_FOUND;
}

static unsigned page_bad_method(const struct http *h, FILE *f)
{
    (void)h;
    fprintf(f, "only GET and HEAD are answered\n");
    return MHD_HTTP_METHOD_NOT_ALLOWED;
}

static const char text_plain[] = "text/plain; charset=utf-8";
static const struct page {
    const char *path, *content_type;
    page_fn write;
} pages[] = {
    {"/metrics", "text/plain; version=0.0.4; charset=utf-8", page_metrics},
    {"/stats", "application/json", page_stats},
    {"/healthz", text_plain, page_healthz},
    {"/readyz", text_plain, page_readyz},
};
static const struct page not_found = {NULL, text_plain, page_not_found};
static const struct page bad_method = {NULL, text_plain, page_bad_method};

static enum MHD_Result on_request(void *user, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_bytes, void **state)
{
    (void)version;
    (void)upload;
    static char is_seen;
    if (*state == NULL) { /* the header alone: answering now would skip a body's end */
        *state = &is_seen;
        return MHD_YES;
    }
    if (*upload_bytes != 0) { /* of a method that is refused; dropped */
        *upload_bytes = 0;
        return MHD_YES;
    }
    const struct page *page = &not_found;
    for (size_t i = 0; i < sizeof(pages) / sizeof(pages[0]); i++)
        if (strcmp(url, pages[i].path) == 0)
            page = &pages[i];
    if (page != &not_found && strcmp(method, MHD_HTTP_METHOD_GET) != 0 &&
        strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        page = &bad_method;

    char *body = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&body, &n);
    if (f == NULL)
        return MHD_NO;
    unsigned status = page->write(user, f);
    if (fclose(f) != 0) {
        free(body);
        return MHD_NO;
    }
    struct MHD_Response *response = MHD_create_response_from_buffer(n, body, MHD_RESPMEM_MUST_FREE);
    if (response == NULL) {
        free(body);
        return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, page->content_type);
    if (page == &bad_method)
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    enum MHD_Result rc = MHD_queue_response(connection, status, response);
    MHD_destroy_response(response);
    return rc;
}

/* A listening socket of our own, so that a failure has a reason to tell. */
static int listen_on(const struct address *a, uint16_t *out_port)
{
    struct sockaddr_storage bound;
    socklen_t n = a->sa.any.sa_family == AF_INET ? sizeof(a->sa.in) : sizeof(a->sa.in6);
    int one = 1;
    int fd = socket(a->sa.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, &a->sa.any, n) == 0 && listen(fd, MAX_CONNECTIONS) == 0) {
        n = sizeof(bound);
        if (getsockname(fd, (struct sockaddr *)&bound, &n) == 0) {
            *out_port = ntohs(bound.ss_family == AF_INET
                                  ? ((struct sockaddr_in *)(void *)&bound)->sin_port
                                  : ((struct sockaddr_in6 *)(void *)&bound)->sin6_port);
            return fd;
        }
    }
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

attn_status http_open(const char *host_port, uint64_t stall_timeout_us, struct http **out_http,
                      char *why, size_t why_bytes)
{
    struct address a;
    char reason[256];
    if (address_parse_host_port(host_port, &a, reason, sizeof(reason)) != ATTN_OK) {
        snprintf(why, why_bytes, "listen.http %s: %s", host_port, reason);
        return ATTN_EINVAL;
    }
    struct http *h = calloc(1, sizeof(*h));
    if (h == NULL) {
        snprintf(why, why_bytes, "listen.http %s: out of memory", host_port);
        return ATTN_ENOMEM;
    }
    h->stall_timeout_ns = stall_timeout_us * 1000;
    int fd = listen_on(&a, &h->port);
    if (fd < 0) {
        snprintf(why, why_bytes, "listen.http %s: cannot listen: %s", host_port, strerror(errno));
        free(h);
        return ATTN_EINVAL;
    }
    h->daemon = MHD_start_daemon(
        MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL, 0, NULL, NULL, on_request, h,
        MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, (unsigned)MAX_CONNECTIONS,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)CONNECTION_TIMEOUT_S,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)MEMORY_BYTES, MHD_OPTION_END);
    if (h->daemon == NULL) {
        snprintf(why, why_bytes, "listen.http %s: its thread cannot be started", host_port);
        close(fd);
        free(h);
        return ATTN_EINTERNAL;
    }
    *out_http = h;
    return ATTN_OK;
}

uint16_t http_port(const struct http *h)
{
    return h->port;
}

void http_close(struct http *h)
{
    if (h == NULL)
        return;
    MHD_stop_daemon(h->daemon); /* closes the socket, too */
    free(h);
}
