/* connect.c: the connection that a command asks over: to the daemon's admin socket where the
 * command is for operators, and how long to wait for a daemon to come up.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clients/attnctl/attnctl.h"

/* The admin socket beside an ipc endpoint; false: the endpoint has none. */
static bool admin_endpoint(const char *endpoint, char *out, size_t out_bytes)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    bool is_user = geteuid() != 0 && runtime != NULL && runtime[0] != '\0';
    if (endpoint == NULL)
        endpoint = getenv("ATTND_ENDPOINT");
    if (endpoint != NULL && strncmp(endpoint, "ipc://", 6) != 0)
        return false;
    int n = endpoint != NULL ? snprintf(out, out_bytes, "%s.admin", endpoint)
                             : snprintf(out, out_bytes, "ipc://%s/attnd.sock.admin",
                                        is_user ? runtime : "/run/attnd");
    return n < (int)out_bytes;
}

/* What is for operators goes to the daemon's admin socket; where that can't be reached, to the
 * endpoint, which lets the daemon decide. */
attn_status connect_to(const struct arguments *a, attn_client **out_client)
{
    struct attn_client_options o = {
        .struct_size = sizeof o, .client_name = "attnctl", .fail_fast = 1, .has_no_keeper = 1};
    char admin[256];
    uint64_t open_us = a->wait_us > a->timeout_us ? a->wait_us : a->timeout_us;
    if (a->is_admin && admin_endpoint(a->endpoint, admin, sizeof admin) &&
        attn_client_open(admin, &o, a->timeout_us, out_client) == ATTN_OK)
        return ATTN_OK;
    o.fail_fast = a->wait_us == 0;
    return attn_client_open(a->endpoint, &o, open_us, out_client);
}
