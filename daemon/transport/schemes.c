/* schemes.c: what concerns all transports: finds the one for a url by its scheme, and says what
 * connections may take. */
#include <string.h>

#include "daemon/transport/sp_internal.h"

static const struct transport_ops *const transports[] = {
    &transport_ipc_ops,   &transport_tcp_ops, &transport_tls_ops,
    &transport_admin_ops, &transport_shm_ops, &transport_gpu_ops,
};

const struct transport_ops *transport_find(const char *url)
{
    for (size_t i = 0; i < sizeof transports / sizeof transports[0]; i++)
        if (strncmp(url, transports[i]->scheme, strlen(transports[i]->scheme)) == 0)
            return transports[i];
    return NULL;
}

uint64_t transport_client_bytes(const struct config *c)
{
    uint64_t a_peer = sizeof(struct sp_peer) + 2 * sizeof(struct share) + SP_LOOP_BYTES;
    uint64_t n_messages = (uint64_t)c->max_queue_requests + c->max_peers;
    for (uint32_t i = 0; i < c->n_listen; i++)
        if (transport_find(c->listen[i]) == &transport_tls_ops) {
            a_peer += SP_TLS_BYTES;
            break;
        }
    uint64_t n_loops = c->loops > 0 ? c->loops : loops_of_cores();
    return c->max_peers * a_peer + n_loops * (c->n_listen + 1) * SP_READING_BYTES +
           n_messages * (sizeof(struct request) + sizeof(struct iobuf) + REQUEST_MIN_MSG_BYTES);
}
