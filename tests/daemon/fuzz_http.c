/* fuzz_http.c: fuzz target: what somebody writes to the stats endpoint, requests or not. Every
 * answer is HTTP, and the endpoint still answers afterwards. */
#include "tests/proto/fuzz.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/health.h"
#include "daemon/http/http.h"
#include "proto/attn_time.h"

enum {
    PATIENCE_MS = 300000,
    SILENCE_MS = 2, /* after which an input is taken for half a request */
    ANSWER_BYTES = 1 << 20,
};

static struct http *http;
static char answer[ANSWER_BYTES + 1];

static int connection(void)
{
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons(http_port(http))};
    sa.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    uint64_t until_ns = attn_now_ns() + PATIENCE_MS * UINT64_C(1000000);
    while (attn_now_ns() < until_ns) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0)
            abort();
        if (connect(fd, (struct sockaddr *)&sa, sizeof sa) == 0)
            return fd;
        close(fd);
        if (errno != EADDRNOTAVAIL) /* all ports are those of connections that just ended */
            abort();
        sched_yield();
    }
    abort();
}

/* What comes back for these bytes until there is silence, as a string. */
static size_t ask(const void *bytes, size_t n, int silence_ms)
{
    int fd = connection();
    size_t has = 0;
    if (n > 0)
        (void)send(fd, bytes, n, MSG_NOSIGNAL); /* it may have hung up on the first of them */
    shutdown(fd, SHUT_WR);
    for (;;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ssize_t got = 0;
        if (poll(&p, 1, silence_ms) > 0)
            got = read(fd, answer + has, ANSWER_BYTES - has);
        if (got <= 0)
            break;
        has += (size_t)got;
    }
    struct linger at_once = {.l_onoff = 1};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once); /* the port is free again */
    close(fd);
    answer[has] = '\0';
    return has;
}

static bool is_http(void)
{
    unsigned minor, status;
    return sscanf(answer, "HTTP/1.%1u %3u ", &minor, &status) == 2 && status >= 100 && status < 600;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char good[] = "GET /readyz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    static unsigned n_inputs;
    char why[256];
    if (http == NULL) {
        health_set_ready(true);
        if (http_open("127.0.0.1:0", 1000000, &http, why, sizeof why) != ATTN_OK)
            abort();
    }
    if (ask(data, n, SILENCE_MS) > 0 && !is_http())
        abort();
    if (n_inputs++ % 16 == 0 && (ask(good, sizeof good - 1, PATIENCE_MS) == 0 || !is_http()))
        abort();
    return 0;
}

size_t fuzz_seed(size_t i, uint8_t *out, size_t out_bytes)
{
    static const char *const seeds[] = {
        "GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        "GET /healthz?verbose HTTP/1.0\r\n\r\n",
        "GET /healthz?x=%41%zz&&y HTTP/1.1\r\nHost: a\r\n\r\nHEAD /livez HTTP/1.1\r\n\r\n",
        "POST /stats HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nCookie: a=b\r\n\r\n",
    };
    if (i >= sizeof seeds / sizeof seeds[0] || strlen(seeds[i]) > out_bytes)
        return 0;
    memcpy(out, seeds[i], strlen(seeds[i]));
    return strlen(seeds[i]);
}
