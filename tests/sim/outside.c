/* outside.c: the kernel's and the keeper's services as the daemon uses them: in place of keep.c,
 * listener.c and notify.c, and (by the linker's --wrap) of some functions of libc and the daemon's
 * look at the machine. Descriptors are real ones; those of a process that is gone are closed. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/stack.h"
#include "daemon/engine/core/state.h"
#include "daemon/keeper/keep.h"
#include "daemon/keeper/notify.h"
#include "daemon/keeper/sockets.h"
#include "daemon/process/memory.h"
#include "daemon/request/request.h"
#include "kernels/backend.h"
#include "net.h"

enum { KEPT_FDS = 400 };

static struct kept {
    char name[KEEP_NAME_BYTES];
    int fd;
    bool is_given; /* to this process, and not taken */
} kept[KEEP_MAX_FDS];
static uint32_t n_kept;
static int first_fd = -1; /* the process's are from here on, below KEPT_FDS */

/* --- the keeper ------------------------------------------------------------------------------- */

void keep_begin(void)
{
    for (uint32_t i = 0; i < n_kept; i++)
        kept[i].is_given = true;
}

bool keep_is_there(void)
{
    return sim_plan.has_keeper;
}

static struct kept *keep_of(const char *name)
{
    for (uint32_t i = 0; i < n_kept; i++)
        if (strcmp(kept[i].name, name) == 0)
            return &kept[i];
    return NULL;
}

int keep_take(const char *name)
{
    struct kept *k = keep_of(name);
    process_point();
    if (k == NULL || !k->is_given)
        return -1;
    k->is_given = false;
    return fcntl(k->fd, F_DUPFD_CLOEXEC, first_fd);
}

bool keep_find(const char *prefix, char out_name[KEEP_NAME_BYTES])
{
    for (uint32_t i = 0; i < n_kept; i++) {
        if (!kept[i].is_given || strncmp(kept[i].name, prefix, strlen(prefix)) != 0)
            continue;
        memcpy(out_name, kept[i].name, KEEP_NAME_BYTES);
        return true;
    }
    return false;
}

int outside_keep_fd(int fd)
{
    return fcntl(fd, F_DUPFD_CLOEXEC, KEPT_FDS);
}

bool keep_put(const char *name, int fd)
{
    process_point();
    if (!sim_plan.has_keeper || n_kept == KEEP_MAX_FDS)
        return false;
    struct kept *k = &kept[n_kept++];
    *k = (struct kept){.fd = outside_keep_fd(fd)};
    memcpy(k->name, name, strlen(name) + 1);
    process_point();
    return true;
}

static void release(struct kept *k)
{
    close(k->fd);
    *k = kept[--n_kept];
}

/* The cache is whole in every run, so nobody has a reason to give it up. */
void keep_drop(const char *name)
{
    sim_fail("the daemon has given up what was kept: %s", name);
}

/* Half of a pair: its process died before it had served. */
void keep_drop_rest(void)
{
    process_point();
    for (uint32_t i = 0; i < n_kept;) {
        if (kept[i].is_given)
            release(&kept[i]);
        else
            i++;
    }
}

bool outside_has_kept(void)
{
    return n_kept >= 2;
}

/* --- sockets, systemd, the machine ------------------------------------------------------------ */

attn_status socket_listen(const char *what, const struct address *a, int backlog, int *out_fd,
                          char *why, size_t why_bytes)
{
    (void)what, (void)a, (void)backlog, (void)why, (void)why_bytes;
    *out_fd = SIM_LISTEN_FD;
    return ATTN_OK;
}

void socket_unlisten(int fd, const struct address *a)
{
    (void)fd, (void)a;
}

void notify_send(const char *state)
{
    (void)state;
}

bool notify_send_fd(const char *state, int fd)
{
    (void)state, (void)fd;
    return false;
}

void notify_wait_until_read(void)
{
}

uint64_t notify_watchdog_us(void)
{
    return 0;
}

attn_status __wrap_memory_check(const char *root, const struct memory_need *need,
                                struct memory_fit *out_fit, char *why, size_t why_bytes);
attn_status __wrap_memory_check(const char *root, const struct memory_need *need,
                                struct memory_fit *out_fit, char *why, size_t why_bytes)
{
    (void)root, (void)need, (void)why, (void)why_bytes;
    *out_fit = (struct memory_fit){.left_bytes = UINT64_MAX};
    return ATTN_OK;
}

attn_status __wrap_backend_load(const char *name, const struct backend_ops **out_ops, char *why,
                                size_t why_bytes);
attn_status __wrap_backend_load(const char *name, const struct backend_ops **out_ops, char *why,
                                size_t why_bytes)
{
    (void)name, (void)why, (void)why_bytes;
    *out_ops = &device_ops;
    return ATTN_OK;
}

void __wrap_log_write(enum log_level level, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void __wrap_log_write(enum log_level level, const char *format, ...)
{
    char line[1024];
    va_list args;
    (void)level;
    if (!sim_is_verbose)
        return;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    sim_say("    attnd: %s", line);
}

void __wrap_log_event(enum log_level level, const char *msg, const char *pairs, ...)
    __attribute__((format(printf, 3, 4)));
void __wrap_log_event(enum log_level level, const char *msg, const char *pairs, ...)
{
    char text[256];
    va_list ap;
    (void)level;
    va_start(ap, pairs);
    vsnprintf(text, sizeof text, pairs, ap);
    va_end(ap);
    sim_say("    attnd: %s %s", msg, text);
}

bool __wrap_log_limit_pass(struct log_limit *l);
bool __wrap_log_limit_pass(struct log_limit *l)
{
    (void)l;
    return sim_is_verbose;
}

void __wrap_log_flush_left_out(void);
void __wrap_log_flush_left_out(void)
{
}

/* Every client is an operator, too. */
bool __wrap_request_may_administer(const struct request *req);
bool __wrap_request_may_administer(const struct request *req)
{
    (void)req;
    return true;
}

/* The file of the disk tier is memory that takes its time, and fails. */
int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    int mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(args, int) : 0;
    va_end(args);
    if (strcmp(path, SIM_DISK) != 0)
        return __real_open(path, flags, mode);
    process_point();
    return memfd_create("sim-disk", MFD_CLOEXEC);
}

/* Between the bytes of the file others go on. */
static bool file_fails(void)
{
    process_point();
    thread_sleep(sim_between(10 * SIM_US, sim_chance(50) ? 30 * SIM_MS : 300 * SIM_US));
    bool fails = sim_has_faults && sim_chance(sim_plan.fail_move);
    errno = fails ? EIO : errno;
    sim_counts.failed_moves += fails;
    return fails;
}

ssize_t __real_pread(int fd, void *p, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *p, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *p, size_t n, off_t at)
{
    if (!thread_is_one())
        return __real_pread(fd, p, n, at);
    sim_counts.file_reads++;
    return file_fails() ? -1 : __real_pread(fd, p, n, at);
}

ssize_t __real_pwrite(int fd, const void *p, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *p, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *p, size_t n, off_t at)
{
    if (!thread_is_one())
        return __real_pwrite(fd, p, n, at);
    return file_fails() ? -1 : __real_pwrite(fd, p, n, at);
}

_Noreturn void __wrap__exit(int code);
_Noreturn void __wrap__exit(int code)
{
    process_exit(code);
}

ssize_t __wrap_getrandom(void *p, size_t n, unsigned flags);
ssize_t __wrap_getrandom(void *p, size_t n, unsigned flags)
{
    uint8_t *bytes = p;
    (void)flags;
    process_point();
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)sim_random();
    return (ssize_t)n;
}

/* An engine sleeps until somebody wakes it. */
struct sleep {
    int fd, n, n_ready;
    struct epoll_event *events;
    const struct engine *engine; /* whose it is; NULL: it has no thread yet */
};

int __real_epoll_wait(int fd, struct epoll_event *events, int n, int timeout_ms);
int __wrap_epoll_wait(int fd, struct epoll_event *events, int n, int timeout_ms);

static bool is_woken(void *arg)
{
    struct sleep *s = arg;
    if (s->engine != NULL && atomic_load(&s->engine->is_asleep) != 0)
        return false; /* nobody has tried; spares a system call per event */
    if (s->n_ready == 0)
        s->n_ready = __real_epoll_wait(s->fd, s->events, s->n, 0);
    return s->n_ready != 0;
}

int __wrap_epoll_wait(int fd, struct epoll_event *events, int n, int timeout_ms)
{
    struct sleep s = {.fd = fd, .n = n, .events = events};
    for (uint32_t i = 0; i < sim_n_engines; i++)
        if (sim_engines[i]->epoll_fd == fd)
            s.engine = sim_engines[i];
    process_point();
    if (thread_wait(is_woken, &s, sim_now_ns + (uint64_t)timeout_ms * SIM_MS))
        return s.n_ready;
    for (uint32_t i = 0; i < sim_n_engines; i++)
        if (sim_engines[i]->epoll_fd == fd && !stack_is_empty(&sim_engines[i]->inbox))
            sim_fail("an engine has slept its time out over a request");
    return 0;
}

/* --- of a process and of a run ---------------------------------------------------------------- */

void outside_begin(void)
{
    if (first_fd >= 0)
        return;
    first_fd = dup(STDERR_FILENO);
    close(first_fd);
}

void outside_end(void)
{
    close_range((unsigned)first_fd, KEPT_FDS - 1, 0);
    while (!sim_plan.has_keeper && n_kept > 0)
        release(&kept[0]);
}

void outside_forget(void)
{
    while (n_kept > 0)
        release(&kept[0]);
}
