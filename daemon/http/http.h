/* http.h: the stats endpoint, on a thread of its own.
 *
 *   /          the dashboard
 *   /metrics   Prometheus text
 *   /stats     the same as JSON
 *   /livez     200 while this thread answers
 *   /healthz   200 while loop and engine show life, else 503; ?verbose: a line per thread
 *   /readyz    200 while steps are served, else 503
 *
 * It depends on neither the event loop nor the engines (stats.h, health.h), so it answers while
 * they are stuck.
 */
#ifndef ATTND_DAEMON_HTTP_HTTP_H
#define ATTND_DAEMON_HTTP_HTTP_H

#include "proto/attn_types.h"

struct http;

/* Listens on host_port ("127.0.0.1:9470"; port 0 takes a free one) and starts the thread.
 * stall_timeout_us: how long a thread may be silent before /healthz fails. ATTN_EINVAL: why names
 * address and reason. */
attn_status http_open(const char *host_port, uint64_t stall_timeout_us, struct http **out_http,
                      char *why, size_t why_bytes);
/* Changes stall_timeout_us. Any thread; NULL is fine. */
void http_set_stall_timeout(struct http *h, uint64_t stall_timeout_us);
/* The port it listens on. */
uint16_t http_port(const struct http *h);
/* Stops the thread and frees h; NULL is fine. */
void http_close(struct http *h);

#endif
