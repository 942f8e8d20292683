/* sp_proxy.c: the proxy's thread: after the handshake it reads whole messages of either direction
 * and draws for each what becomes of it.
 */
#include "tests/daemon/transport/sp_proxy.h"
#include "tests/random.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { HANDSHAKE_BYTES = 8, HEAD_BYTES = 9, N_OLD = 256, MAX_HELD = 16, TICK_MS = 2 };

struct message {
    uint8_t *bytes; /* NULL: none */
    size_t n;
    uint32_t wait; /* ticks or messages that it is still held back for */
};

struct way {
    int from, to;
    struct message held[MAX_HELD], old[N_OLD];
    uint32_t n_seen;
};

static int socket_at(const char *path, bool is_listener)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(sa.sun_path, sizeof sa.sun_path, "%s", path);
    if (is_listener ? bind(fd, (struct sockaddr *)&sa, sizeof sa) == 0 && listen(fd, 8) == 0
                    : connect(fd, (struct sockaddr *)&sa, sizeof sa) == 0)
        return fd;
    abort();
}

static bool read_all(int fd, uint8_t *out, size_t n)
{
    for (ssize_t k; n > 0; out += k, n -= (size_t)k)
        if ((k = recv(fd, out, n, 0)) <= 0)
            return false;
    return true;
}

static bool write_all(int fd, const uint8_t *bytes, size_t n)
{
    for (ssize_t k; n > 0; bytes += k, n -= (size_t)k)
        if ((k = send(fd, bytes, n, MSG_NOSIGNAL)) <= 0)
            return false;
    return true;
}

static bool read_message(int fd, struct message *out)
{
    uint8_t head[HEAD_BYTES];
    size_t n = 0;
    if (!read_all(fd, head, sizeof head))
        return false;
    for (int i = 1; i < HEAD_BYTES; i++)
        n = n << 8 | head[i];
    *out = (struct message){.bytes = malloc(HEAD_BYTES + n), .n = HEAD_BYTES + n};
    memcpy(out->bytes, head, sizeof head);
    return read_all(fd, out->bytes + HEAD_BYTES, n);
}

static void drop(struct message *m)
{
    free(m->bytes);
    *m = (struct message){0};
}

static void remember(struct way *w, const struct message *m)
{
    struct message *slot = &w->old[w->n_seen++ % N_OLD];
    drop(slot);
    *slot = (struct message){.bytes = malloc(m->n), .n = m->n};
    memcpy(slot->bytes, m->bytes, m->n);
}

/* A tick has passed: what was held back long enough goes. */
static bool release_held(struct way *w)
{
    bool is_up = true;
    for (uint32_t i = 0; i < MAX_HELD; i++) {
        struct message *m = &w->held[i];
        if (m->bytes == NULL || --m->wait > 0)
            continue;
        is_up &= write_all(w->to, m->bytes, m->n);
        drop(m);
    }
    return is_up;
}

static enum sp_harm choose(struct sp_proxy *p)
{
    uint64_t r = random_mixed(&p->random) % 1000;
    for (enum sp_harm h = SP_DROP; h < SP_N_HARMS; h++) {
        if (r < p->per_mille[h])
            return h;
        r -= p->per_mille[h];
    }
    return SP_PASS;
}

/* Takes one message. false: the connection is to end. */
static bool pass(struct sp_proxy *p, struct way *w)
{
    struct message m = {0};
    if (!read_message(w->from, &m)) {
        drop(&m);
        return false;
    }
    remember(w, &m);
    enum sp_harm harm = choose(p);
    atomic_fetch_add(&p->n[harm], 1);
    bool is_up = harm != SP_CUT;
    if (harm == SP_HOLD) {
        struct message *slot = &w->held[random_mixed(&p->random) % MAX_HELD];
        drop(slot);
        *slot = m;
        slot->wait = 1 + (uint32_t)(random_mixed(&p->random) % 30);
        return release_held(w);
    }
    if (harm == SP_PASS || harm == SP_TWICE || harm == SP_OLD)
        is_up = write_all(w->to, m.bytes, m.n);
    if (is_up && harm == SP_TWICE)
        is_up = write_all(w->to, m.bytes, m.n);
    const struct message *old = &w->old[random_mixed(&p->random) % N_OLD];
    if (is_up && harm == SP_OLD && old->bytes != NULL)
        is_up = write_all(w->to, old->bytes, old->n);
    drop(&m);
    return is_up && release_held(w);
}

static bool greet(int from, int to)
{
    uint8_t hand[HANDSHAKE_BYTES];
    return read_all(from, hand, sizeof hand) && write_all(to, hand, sizeof hand);
}

static void serve(struct sp_proxy *p, struct way ways[2])
{
    bool is_up = greet(ways[0].from, ways[0].to) && greet(ways[1].from, ways[1].to);
    while (is_up && !atomic_load(&p->is_over)) {
        struct pollfd at[2] = {{ways[0].from, POLLIN, 0}, {ways[1].from, POLLIN, 0}};
        bool is_tick = poll(at, 2, TICK_MS) == 0;
        for (int i = 0; i < 2 && is_up; i++) {
            if (is_tick)
                is_up = release_held(&ways[i]);
            else if (at[i].revents != 0)
                is_up = pass(p, &ways[i]);
        }
    }
}

static void *run(void *arg)
{
    struct sp_proxy *p = arg;
    static struct way ways[2]; /* to the daemon, to the client; what is old outlives a connection */
    memset(ways, 0, sizeof ways);
    while (!atomic_load(&p->is_over)) {
        struct pollfd at = {p->listener, POLLIN, 0};
        if (poll(&at, 1, TICK_MS) <= 0)
            continue;
        int client = accept(p->listener, NULL, NULL), daemon = socket_at(p->daemon_path, false);
        ways[0].from = ways[1].to = client;
        ways[0].to = ways[1].from = daemon;
        serve(p, ways);
        close(client);
        close(daemon);
    }
    for (int i = 0; i < 2; i++) {
        for (uint32_t k = 0; k < N_OLD; k++)
            drop(&ways[i].old[k]);
        for (uint32_t k = 0; k < MAX_HELD; k++)
            drop(&ways[i].held[k]);
    }
    return NULL;
}

void sp_proxy_start(struct sp_proxy *p)
{
    p->listener = socket_at(p->path, true);
    if (pthread_create(&p->thread, NULL, run, p) != 0)
        abort();
}

void sp_proxy_stop(struct sp_proxy *p)
{
    atomic_store(&p->is_over, true);
    pthread_join(p->thread, NULL);
    close(p->listener);
    unlink(p->path);
}
