/* schemes.c: finds the transport for a url by its scheme. */
#include "daemon/transport/transport.h"

#include <string.h>

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
