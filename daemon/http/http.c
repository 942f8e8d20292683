/* http.c: the pages of the stats endpoint. Answers are rendered whole into memory, on the thread of
 * http/listener.c, a page once for all who ask in one of its turns: so the next who asks waits for
 * one rendering of each page at most, however many ask before. */
#include "daemon/http/http.h"

#include <inttypes.h>
#include <microhttpd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/health.h"
#include "daemon/base/stats.h"
#include "daemon/http/listener.h"
#include "daemon/keeper/keep.h"
#include "daemon/keeper/sockets.h"

/* dashboard.html, which the build turns into an array (embed.cmake). */
extern const unsigned char dashboard_html[];
extern const size_t dashboard_html_bytes;

enum { N_PAGES = 9 };

struct http {
    struct http_listener *listener;
    _Atomic uint64_t stall_timeout_ns;
    uint16_t port;
    struct rendered {
        struct MHD_Response *response; /* NULL: nobody has asked in this turn */
        unsigned status;
    } rendered[N_PAGES]; /* of the listener's thread */
};

/* Writes a page's body; returns its HTTP status. */
typedef unsigned (*page_fn)(const struct http *h, FILE *f);

static unsigned page_dashboard(const struct http *h, FILE *f)
{
    (void)h;
    fwrite(dashboard_html, 1, dashboard_html_bytes, f);
    return MHD_HTTP_OK;
}

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

static unsigned page_livez(const struct http *h, FILE *f)
{
    (void)h;
    fprintf(f, "ok\n");
    return MHD_HTTP_OK;
}

/* Writes a line per thread, for people. */
static unsigned page_health_verbose(const struct http *h, FILE *f)
{
    unsigned status = MHD_HTTP_OK;
    for (enum health_thread who = 0; who < HEALTH_N_THREADS; who++) {
        uint64_t silent_ns;
        if (!health_is_there(who))
            continue;
        bool is_stalled = health_is_stalled(who, h->stall_timeout_ns, &silent_ns);
        fprintf(f, "%s %s\n", is_stalled ? "[-]" : "[+]", health_thread_name(who));
        status = is_stalled ? MHD_HTTP_SERVICE_UNAVAILABLE : status;
    }
    uint64_t n_wrong = health_n_wrong();
    fprintf(f, "%s canary: %" PRIu64 " of %" PRIu64 " outputs wrong\n", n_wrong > 0 ? "[-]" : "[+]",
            n_wrong, stats_get(canary_items));
    status = n_wrong > 0 ? MHD_HTTP_SERVICE_UNAVAILABLE : status;
    fprintf(f, "%s settings\n", health_settings_are_good() ? "[+]" : "[-]");
    fprintf(f, "%s ready%s\n", health_is_ready() ? "[+]" : "[-]",
            health_is_draining() ? ", draining" : "");
    return status;
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
    if (health_n_wrong() > 0) {
        fprintf(f, "the canary has found %" PRIu64 " outputs wrong\n", health_n_wrong());
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
    fprintf(f, "no such page; there are /, /metrics, /stats, /livez, /healthz and /readyz\n");
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
    const char *path; /* NULL: it is not asked for by a path */
    const char *content_type;
    page_fn write;
} pages[N_PAGES] = {
    {"/", "text/html; charset=utf-8", page_dashboard},
    {"/metrics", "text/plain; version=0.0.4; charset=utf-8", page_metrics},
    {"/stats", "application/json", page_stats},
    {"/livez", text_plain, page_livez},
    {"/healthz", text_plain, page_healthz},
    {"/readyz", text_plain, page_readyz},
    {NULL, text_plain, page_health_verbose},
    {NULL, text_plain, page_not_found},
    {NULL, text_plain, page_bad_method},
};
static const struct page *const health_verbose = &pages[N_PAGES - 3];
static const struct page *const not_found = &pages[N_PAGES - 2];
static const struct page *const bad_method = &pages[N_PAGES - 1];

static const struct page *page_of(struct MHD_Connection *connection, const char *url,
                                  const char *method)
{
    const struct page *page = not_found;
    for (size_t i = 0; i < N_PAGES; i++)
        if (pages[i].path != NULL && strcmp(url, pages[i].path) == 0)
            page = &pages[i];
    bool is_verbose =
        MHD_get_connection_values(connection, MHD_GET_ARGUMENT_KIND, NULL, NULL) > 0 &&
        MHD_lookup_connection_value_n(connection, MHD_GET_ARGUMENT_KIND, "verbose", 7, NULL, NULL);
    if (page->write == page_healthz && is_verbose)
        page = health_verbose;
    if (page != not_found && strcmp(method, MHD_HTTP_METHOD_GET) != 0 &&
        strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        page = bad_method;
    return page;
}

/* Renders a page; false: no memory. */
static bool render(const struct http *h, const struct page *page, struct rendered *out)
{
    char *body = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&body, &n);
    if (f == NULL)
        return false;
    unsigned status = page->write(h, f);
    if (fclose(f) != 0) {
        free(body);
        return false;
    }
    struct MHD_Response *response = MHD_create_response_from_buffer(n, body, MHD_RESPMEM_MUST_FREE);
    if (response == NULL) {
        free(body);
        return false;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, page->content_type);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    if (page->write == page_dashboard) /* load from this server only, whatever a name in it says */
        MHD_add_response_header(response, "Content-Security-Policy",
                                "default-src 'none'; style-src 'unsafe-inline'; "
                                "script-src 'unsafe-inline'; connect-src 'self'");
    if (page == bad_method)
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    *out = (struct rendered){response, status};
    return true;
}

static void begin_turn(void *user)
{
    struct http *h = user;
    for (size_t i = 0; i < N_PAGES; i++) {
        if (h->rendered[i].response != NULL)
            MHD_destroy_response(h->rendered[i].response); /* who sends it holds a reference */
        h->rendered[i].response = NULL;
    }
}

static enum MHD_Result on_request(void *user, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_bytes, void **state)
{
    (void)version;
    (void)upload;
    static char is_seen;
    if (*state == NULL) { /* only the header has come: answer after the body */
        *state = &is_seen;
        return MHD_YES;
    }
    if (*upload_bytes != 0) { /* the body of a method that will be refused is dropped */
        *upload_bytes = 0;
        return MHD_YES;
    }
    struct http *h = user;
    const struct page *page = page_of(connection, url, method);
    struct rendered *r = &h->rendered[page - pages];
    if (r->response == NULL && !render(h, page, r))
        return MHD_NO;
    return MHD_queue_response(connection, r->status, r->response);
}

static uint16_t port_of(int fd)
{
    struct sockaddr_storage bound;
    socklen_t n = sizeof(bound);
    if (getsockname(fd, (struct sockaddr *)&bound, &n) != 0)
        return 0;
    return ntohs(bound.ss_family == AF_INET ? ((struct sockaddr_in *)(void *)&bound)->sin_port
                                            : ((struct sockaddr_in6 *)(void *)&bound)->sin6_port);
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
    char what[KEEP_NAME_BYTES];
    int fd; /* our own socket, so that a failure can be reported with its reason */
    snprintf(what, sizeof(what), "http://%s", host_port);
    if (socket_listen(what, &a, SOMAXCONN, &fd, reason, sizeof(reason)) != ATTN_OK) {
        snprintf(why, why_bytes, "listen.http %s: %s", host_port, reason);
        free(h);
        return ATTN_EINVAL;
    }
    h->port = port_of(fd);
    attn_status st = http_listener_open(fd, on_request, begin_turn, h, &h->listener);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "listen.http %s: its thread cannot be started: %s", host_port,
                 attn_status_message(st));
        free(h);
        return st;
    }
    *out_http = h;
    return ATTN_OK;
}

void http_set_stall_timeout(struct http *h, uint64_t stall_timeout_us)
{
    if (h != NULL)
        h->stall_timeout_ns = stall_timeout_us * 1000;
}

uint16_t http_port(const struct http *h)
{
    return h->port;
}

void http_close(struct http *h)
{
    if (h == NULL)
        return;
    http_listener_close(h->listener);
    begin_turn(h); /* lets go of what the last one rendered */
    free(h);
}
