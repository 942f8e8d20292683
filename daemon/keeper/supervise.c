/* supervise.c: the loop of the supervising parent: one thread with one poll; signals come through a
 * descriptor. */
#include "daemon/keeper/supervise.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <sysexits.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/keeper/supervise_store.h"

enum {
    MS = 1000000, /* nanoseconds */
    SHORT_LIFE_MS = 100, /* a child that serves for less died young */
    FREE_RESTARTS = 5, /* short lives in a row before there is a delay */
    MIN_DELAY_MS = 100,
    MAX_DELAY_MS = 10000,
    MAX_TURN_MESSAGES = 64, /* bounded, so that a flood of messages does not delay signals */
    MAX_UNREADY = 3, /* deaths before READY in a row before the cache is dropped */
};

struct supervisor {
    char path[PATH_MAX]; /* of the binary */
    char **argv; /* of the child */
    struct store store;
    int signal_fd;
    sigset_t before; /* the signal mask as it was */
    pid_t child; /* 0: none */
    uint64_t ready_ns, start_at_ns; /* when it was ready (0: not yet); when the next one starts */
    uint64_t n_beats, beat_ns; /* the store's count as last seen, and when it changed */
    uint32_t n_short, n_unready; /* children in a row that died young, or before they were ready */
    bool has_served; /* a child was ready at least once */
    bool is_ending, wants_upgrade, wants_reload;
};

static bool paths_init(struct supervisor *s, int argc, char **argv)
{
    ssize_t n = readlink("/proc/self/exe", s->path, sizeof s->path - 1);
    s->argv = calloc((size_t)argc + 1, sizeof *s->argv);
    if (n <= 0 || s->argv == NULL)
        return false;
    s->path[n] = '\0';
    for (int i = 0, to = 0; i < argc; i++)
        if (i == 0 || strcmp(argv[i], "--supervise") != 0)
            s->argv[to++] = argv[i];
    return true;
}

static bool signals_init(struct supervisor *s)
{
    sigset_t mine;
    sigemptyset(&mine);
    const int numbers[] = {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGUSR2};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        sigaddset(&mine, numbers[i]);
    if (sigprocmask(SIG_BLOCK, &mine, &s->before) != 0)
        return false;
    s->signal_fd = signalfd(-1, &mine, SFD_CLOEXEC | SFD_NONBLOCK);
    return s->signal_fd >= 0;
}

/* --- the child -------------------------------------------------------------------------------- */

static void child_start(struct supervisor *s)
{
    s->store.is_ready = false;
    s->ready_ns = 0;
    pid_t parent = getpid();
    s->child = fork();
    if (s->child > 0) {
        log_info("attnd is process %d", (int)s->child);
        return;
    }
    if (s->child < 0) {
        log_error("fork: %s", strerror(errno));
        s->child = 0;
        s->start_at_ns = clock_now_ns() + (uint64_t)MAX_DELAY_MS * MS;
        return;
    }
    sigprocmask(SIG_SETMASK, &s->before, NULL);
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* ends with the parent, which keeps its cache */
    if (getppid() == parent && store_hand_over(&s->store))
        execv(s->path, s->argv);
    log_error("%s can't be started: %s", s->path, strerror(errno));
    _exit(EX_OSERR);
}

/* Sets when the next child starts: at once, or after a growing delay if children keep dying
 * young. */
static void plan_start(struct supervisor *s)
{
    uint64_t now_ns = clock_now_ns(), delay_ms = 0;
    bool is_short = s->ready_ns == 0 || now_ns - s->ready_ns < (uint64_t)SHORT_LIFE_MS * MS;
    s->n_short = is_short ? s->n_short + 1 : 0;
    if (s->n_short > FREE_RESTARTS) {
        delay_ms = MIN_DELAY_MS;
        for (uint32_t n = FREE_RESTARTS + 1; n < s->n_short && delay_ms < MAX_DELAY_MS; n++)
            delay_ms *= 2;
        delay_ms = delay_ms < MAX_DELAY_MS ? delay_ms : MAX_DELAY_MS;
    }
    s->start_at_ns = now_ns + delay_ms * MS;
}

/* The child has ended. true: this process ends, too, with *out_code. */
static bool child_ended(struct supervisor *s, int status, int *out_code)
{
    bool is_exit = WIFEXITED(status);
    int code = is_exit ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    s->child = 0;
    s->has_served |= s->store.is_ready;
    bool is_over =
        s->is_ending || (is_exit && (code == EX_OK || (!s->has_served && code != EX_TEMPFAIL)));
    if (is_over) {
        *out_code = code;
        return true;
    }
    if (is_exit && code == EX_TEMPFAIL)
        log_info("attnd has ended for its successor");
    else if (is_exit)
        log_warn("attnd ended with code %d and is started again", code);
    else
        log_warn("attnd was ended by signal %d (%s) and is started again", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    s->n_unready = s->store.is_ready ? 0 : s->n_unready + 1;
    if (!is_exit && s->n_unready >= MAX_UNREADY) {
        log_error("attnd died %" PRIu32 " times before it served: it starts without its cache",
                  s->n_unready);
        store_drop(&s->store, "arena-");
        store_drop(&s->store, "memory-");
        s->n_unready = 0;
    }
    plan_start(s);
    return false;
}

/* --- signals ---------------------------------------------------------------------------------- */

static void pass_on(const struct supervisor *s, int number)
{
    if (s->child != 0)
        kill(s->child, number);
}

/* Passes a signal on once the child is ready, because before that it has no handler. */
static void pass_on_if_ready(const struct supervisor *s, int number, bool *wants)
{
    if (!*wants || s->child == 0 || !s->store.is_ready)
        return;
    *wants = false;
    pass_on(s, number);
}

/* Handles signals, and a child that has ended. true: this process ends with *out_code. */
static bool take_signals(struct supervisor *s, int *out_code)
{
    struct signalfd_siginfo info;
    while (read(s->signal_fd, &info, sizeof info) == sizeof info) {
        switch (info.ssi_signo) {
        case SIGTERM:
        case SIGINT:
            s->is_ending = true;
            pass_on(s, (int)info.ssi_signo);
            break;
        case SIGHUP:
            s->wants_reload = true;
            break;
        case SIGUSR2:
            s->wants_upgrade = true;
            break;
        default:
            break;
        }
    }
    int status;
    if (s->child == 0 || waitpid(s->child, &status, WNOHANG) != s->child)
        return false;
    while (store_read(&s->store, s->child)) /* its last words */
        ;
    return child_ended(s, status, out_code);
}

/* --- life ------------------------------------------------------------------------------------- */

/* Kills a child that serves and then sends no WATCHDOG=1 for the watchdog's time. */
static void look_for_life(struct supervisor *s)
{
    uint64_t now_ns = clock_now_ns();
    if (s->child == 0 || !s->store.is_ready)
        return;
    if (s->ready_ns == 0 || s->n_beats != s->store.n_beats)
        s->beat_ns = now_ns;
    if (s->ready_ns == 0)
        s->ready_ns = now_ns;
    s->n_beats = s->store.n_beats;
    if (now_ns - s->beat_ns < s->store.watchdog_us * 1000)
        return;
    log_error("attnd has shown no life for %" PRIu64 " ms", (now_ns - s->beat_ns) / MS);
    kill(s->child, SIGKILL);
    s->beat_ns = now_ns;
}

static int wait_ms(const struct supervisor *s)
{
    if (s->child != 0 && s->ready_ns == 0)
        return -1;
    uint64_t now_ns = clock_now_ns(), until_ns = s->start_at_ns;
    if (s->child != 0)
        until_ns = s->beat_ns + s->store.watchdog_us * 1000;
    return now_ns >= until_ns ? 0 : (int)((until_ns - now_ns) / MS + 1);
}

static int run(struct supervisor *s)
{
    int code = EX_OK;
    for (;;) {
        if (s->child == 0 && s->is_ending)
            return code;
        if (s->child == 0 && clock_now_ns() >= s->start_at_ns)
            child_start(s);
        struct pollfd p[] = {{.fd = s->signal_fd, .events = POLLIN},
                             {.fd = s->store.notify_fd, .events = POLLIN}};
        (void)poll(p, 2, wait_ms(s));
        for (int n = 0; n < MAX_TURN_MESSAGES && store_read(&s->store, s->child); n++)
            ;
        look_for_life(s);
        if (take_signals(s, &code))
            return code;
        pass_on_if_ready(s, SIGHUP, &s->wants_reload);
        pass_on_if_ready(s, SIGUSR2, &s->wants_upgrade);
    }
}

int supervise_run(int argc, char **argv)
{
    struct supervisor s = {.signal_fd = -1};
    int code = EX_OSERR;
    if (!paths_init(&s, argc, argv) || !signals_init(&s) || store_open(&s.store) != ATTN_OK)
        log_error("attnd can't be supervised: %s", strerror(errno));
    else
        code = run(&s);
    store_close(&s.store);
    if (s.signal_fd >= 0)
        close(s.signal_fd);
    free(s.argv);
    return code;
}
