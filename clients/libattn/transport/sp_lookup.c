/* sp_lookup.c: asks the name service for a host's addresses, on a thread of its own, because it may
 * take seconds to answer. The thread and the connection share a struct, which the last of them
 * frees; so a connection is closed without waiting.
 */
#include <netdb.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/transport/sp_address.h"

struct sp_lookup {
    char host[sizeof((struct sp_address *)0)->host], port[sizeof((struct sp_address *)0)->port];
    atomic_uint n_users;
    atomic_bool is_done; /* what follows is written */
    int rc; /* of getaddrinfo */
    struct addrinfo *found;
};

static void leave(struct sp_lookup *l)
{
    if (atomic_fetch_sub(&l->n_users, 1) > 1)
        return;
    if (l->found != NULL)
        freeaddrinfo(l->found);
    free(l);
}

static void *look_up(void *arg)
{
    struct sp_lookup *l = arg;
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    l->rc = getaddrinfo(l->host, l->port, &hints, &l->found);
    atomic_store(&l->is_done, true);
    leave(l);
    return NULL;
}

struct sp_lookup *sp_lookup_start(const struct sp_address *a)
{
    struct sp_lookup *l = calloc(1, sizeof *l);
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t all, before;
    if (l == NULL)
        return NULL;
    memcpy(l->host, a->host, sizeof l->host);
    memcpy(l->port, a->port, sizeof l->port);
    atomic_init(&l->n_users, 2);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &attr, look_up, l);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    if (error == 0)
        return l;
    free(l);
    return NULL;
}

bool sp_lookup_take(struct sp_lookup *l, struct sp_address *out, const char **out_why)
{
    if (!atomic_load(&l->is_done))
        return false;
    *out_why = l->rc != 0 ? gai_strerror(l->rc) : NULL;
    if (l->rc == 0)
        sp_address_set(out, l->found);
    leave(l);
    return true;
}

void sp_lookup_end(struct sp_lookup *l)
{
    if (l != NULL)
        leave(l);
}
