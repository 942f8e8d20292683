/* dashboard.h: daemon/http/dashboard.html, as the build has turned it into an array
 * (embed.cmake). */
#ifndef ATTND_DAEMON_HTTP_DASHBOARD_H
#define ATTND_DAEMON_HTTP_DASHBOARD_H

#include <stddef.h>

extern const unsigned char dashboard_html[];
extern const size_t dashboard_html_bytes;

#endif
