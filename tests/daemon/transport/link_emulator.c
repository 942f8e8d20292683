/* link_emulator.c: a link between two network namespaces, for kernels without netem.
 *
 *   link_emulator NAMESPACE_A NAMESPACE_B DELAY_US LOSS_PERCENT
 *
 * Makes the device link0 in both; what goes into one comes out of the other DELAY_US later, one
 * packet of 100 / LOSS_PERCENT never. Says "ready" and goes on until it is killed; the devices go
 * with it. Needs root and /dev/net/tun. Not a test: scripts/bench-network runs it.
 */
#define _GNU_SOURCE /* setns, ppoll */
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 16384, PACKET_BYTES = 2048 }; /* packets under way, each direction */

/* Packets that have come out of one device, until they go into the other. */
struct way {
    int from, to;
    uint32_t first, n;
    struct packet {
        uint64_t due_ns;
        ssize_t bytes;
        uint8_t data[PACKET_BYTES];
    } * packets; /* [MOST], a ring */
};

static uint64_t delay_ns;
static double loss;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static int open_device(const char *name_space)
{
    char path[128];
    struct ifreq r = {.ifr_name = "link0"};
    snprintf(path, sizeof path, "/run/netns/%s", name_space);
    int ns = open(path, O_RDONLY | O_CLOEXEC);
    if (ns < 0 || setns(ns, CLONE_NEWNET) != 0)
        return -1;
    close(ns);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    r.ifr_flags = IFF_TUN | IFF_NO_PI;
    return fd >= 0 && ioctl(fd, TUNSETIFF, &r) == 0 ? fd : -1;
}

/* Takes what has come; a full ring drops, as a full queue of a link does. */
static void take(struct way *w)
{
    for (int i = 0; i < 64 && w->n < MOST; i++) {
        struct packet *p = &w->packets[(w->first + w->n) % MOST];
        p->bytes = read(w->from, p->data, sizeof p->data);
        if (p->bytes <= 0)
            return;
        if (drand48() >= loss) {
            p->due_ns = now_ns() + delay_ns;
            w->n++;
        }
    }
}

static void give(struct way *w)
{
    while (w->n > 0 && w->packets[w->first].due_ns <= now_ns()) {
        struct packet *p = &w->packets[w->first];
        if (write(w->to, p->data, (size_t)p->bytes) < 0 && errno == EAGAIN)
            return;
        w->first = (w->first + 1) % MOST;
        w->n--;
    }
}

static void run(struct way ways[2])
{
    struct pollfd fds[2] = {{.fd = ways[0].from, .events = POLLIN},
                            {.fd = ways[1].from, .events = POLLIN}};
    for (;;) {
        uint64_t due_ns = UINT64_MAX, now = now_ns();
        for (int i = 0; i < 2; i++)
            if (ways[i].n > 0 && ways[i].packets[ways[i].first].due_ns < due_ns)
                due_ns = ways[i].packets[ways[i].first].due_ns;
        uint64_t wait_ns = due_ns > now ? due_ns - now : 0;
        wait_ns = wait_ns < 1000000000 ? wait_ns : 1000000000;
        struct timespec t = {.tv_sec = (time_t)(wait_ns / 1000000000),
                             .tv_nsec = (long)(wait_ns % 1000000000)};
        ppoll(fds, 2, &t, NULL);
        for (int i = 0; i < 2; i++) {
            take(&ways[i]);
            give(&ways[i]);
        }
    }
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: link_emulator NAMESPACE_A NAMESPACE_B DELAY_US LOSS_PERCENT\n");
        return 2;
    }
    delay_ns = strtoull(argv[3], NULL, 10) * 1000;
    loss = strtod(argv[4], NULL) / 100;
    prctl(PR_SET_TIMERSLACK, 1); /* or each delay is 50 us longer */
    int a = open_device(argv[1]), b = a < 0 ? -1 : open_device(argv[2]);
    struct way ways[2] = {{.from = a, .to = b}, {.from = b, .to = a}};
    for (int i = 0; i < 2; i++)
        ways[i].packets = calloc(MOST, sizeof *ways[i].packets);
    if (b < 0 || ways[0].packets == NULL || ways[1].packets == NULL) {
        fprintf(stderr, "link_emulator: %s\n", strerror(errno));
        return 1;
    }
    puts("ready");
    fflush(stdout);
    run(ways);
}
