/* runtime_simt.cpp: runtime.h without a device: device memory is heap memory of exact size, filled with NaN,
 * a stream is a list of work that simt.h runs on the host.
 *
 * When a stream works follows from ATTND_SIMT_ORDER (0 to 2, see simt.h; default 0): at once with 0,
 * else not before somebody waits for it or, piece by piece, asks after it, which shows host memory that
 * changed too early. Of two streams the one opened later works as late as it may with 1 (when what follows
 * it must begin), at once with 2, ahead of everything before it on the other. ATTND_SIMT_PROCESSORS (default
 * 4) decides how work is cut. ATTND_SIMT_MATRIX=0 takes the matrix units away; ATTND_SIMT_FAIL=N lets the
 * N-th call that can fail do so, and all after it.
 */
#include "kernels/gpu/runtime.h"
#include "tests/kernels/simt/gpu_simt.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

using work_list = std::list<std::function<void()>>;

struct runtime_graph {
    work_list work;
};

struct runtime_stream {
    work_list work;
    runtime_graph *capture; /* what is enqueued goes here instead */
    bool is_first;
};

struct runtime_event {
    uint64_t ns;
    runtime_stream *home; /* where it was recorded last */
    unsigned long n_recorded, n_met;
};

static thread_local char last_error[256] = "no error";
static int n_streams;
static long calls_left = -1; /* until failure; below 0: none is wanted */

static int fail(const char *words)
{
    snprintf(last_error, sizeof last_error, "%s", words);
    return 1;
}

/* Is it this call's turn to fail? */
static bool is_planted(const char *call)
{
    if (calls_left < 0 || (calls_left > 0 && --calls_left > 0))
        return false;
    snprintf(last_error, sizeof last_error, "%s: planted failure", call);
    return true;
}

static long setting(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text ? strtol(text, nullptr, 10) : otherwise;
}

extern "C" {

const char *runtime_last_error(void)
{
    return last_error;
}

int runtime_check(const char *call, int code)
{
    if (code != 0 && code != 2) /* 2: enqueue has left words */
        snprintf(last_error, sizeof last_error, "%s: error %d", call, code);
    return code;
}

int runtime_device_open(int index, struct runtime_device *out)
{
    simt::order = (int)setting("ATTND_SIMT_ORDER", 0);
    simt::planted = (int)setting("ATTND_SIMT_PLANT", 0);
    calls_left = setting("ATTND_SIMT_FAIL", -1);
    if (index != 0)
        return fail("device_index: there is one device");
    if (is_planted("device"))
        return 1;
    *out = runtime_device{};
    snprintf(out->name, sizeof out->name, "simulated device, warps of %d, order %d", SIMT_WIDTH,
             simt::order);
    out->n_processors = (uint32_t)setting("ATTND_SIMT_PROCESSORS", 4);
    out->capability = 90;
    out->has_matrix_units = setting("ATTND_SIMT_MATRIX", 1) != 0;
    out->l2_bytes = 4096;
    out->total_bytes = out->free_bytes = (uint64_t)4 << 30;
    return 0;
}

int runtime_device_use(int index)
{
    return index == 0 ? 0 : fail("device_index: there is one device");
}

int runtime_alloc(void **out_p, size_t bytes)
{
    void *p = nullptr;
    if (is_planted("alloc"))
        return 1;
    if (posix_memalign(&p, 256, bytes) != 0)
        return fail("out of memory");
    memset(p, 0xff, bytes);
    *out_p = p;
    return 0;
}

void runtime_free(void *p)
{
    free(p);
}

int runtime_host_alloc(void **out_p, size_t bytes)
{
    void *p = nullptr;
    if (is_planted("host_alloc"))
        return 1;
    if (posix_memalign(&p, 4096, bytes) != 0)
        return fail("out of memory");
    memset(p, 0xff, bytes);
    *out_p = p;
    return 0;
}

void runtime_host_free(void *p)
{
    free(p);
}

int runtime_host_register(void *p, size_t bytes)
{
    (void)p, (void)bytes;
    return is_planted("host_register") ? 1 : 0;
}

int runtime_host_unregister(void *p)
{
    (void)p;
    return 0;
}

/* ---- streams, events, graphs */

static void work_once(runtime_stream *s)
{
    std::function<void()> work = std::move(s->work.front());
    s->work.pop_front();
    work();
}

static void work_off(runtime_stream *s)
{
    while (!s->work.empty())
        work_once(s);
}

static int add(const char *call, runtime_stream *s, std::function<void()> work)
{
    if (is_planted(call))
        return 2;
    (s->capture ? s->capture->work : s->work).push_back(std::move(work));
    if (!s->capture && (simt::order == 0 || (simt::order == 2 && !s->is_first)))
        work_off(s);
    return 0;
}

int runtime_stream_open(runtime_stream **out_s)
{
    if (is_planted("stream_open"))
        return 1;
    *out_s = new runtime_stream{};
    (*out_s)->is_first = n_streams++ == 0;
    return 0;
}

void runtime_stream_close(runtime_stream *s)
{
    n_streams -= s != nullptr;
    delete s;
}

int runtime_stream_wait(runtime_stream *s)
{
    if (is_planted("stream_wait")) {
        s->work.clear();
        return 1;
    }
    work_off(s);
    return 0;
}

/* Time passes: one piece of work is done, so that a batch is back while the one behind it is not. */
int runtime_stream_check(runtime_stream *s)
{
    if (is_planted("stream_check")) {
        s->work.clear();
        return 1;
    }
    if (!s->work.empty() && (s->is_first || simt::order == 2))
        work_once(s);
    return 0;
}

int runtime_copy(void *dst, const void *src, size_t bytes, runtime_stream *s)
{
    return add("copy", s, [=] { memcpy(dst, src, bytes); });
}

int runtime_fill(void *dst, int byte, size_t bytes, runtime_stream *s)
{
    return add("fill", s, [=] { memset(dst, byte, bytes); });
}

int runtime_event_open(runtime_event **out_e)
{
    if (is_planted("event_open"))
        return 1;
    *out_e = new runtime_event{};
    return 0;
}

void runtime_event_close(runtime_event *e)
{
    delete e;
}

int runtime_event_record(runtime_event *e, runtime_stream *s)
{
    unsigned long n = ++e->n_recorded;
    e->home = s;
    return add("event_record", s, [=] {
        e->ns = gpu::time_ns();
        e->n_met = n;
    });
}

int runtime_stream_follow(runtime_stream *s, runtime_event *e)
{
    runtime_stream *home = e->home;
    unsigned long n = e->n_recorded;
    return add("stream_follow", s, [=] {
        while (e->n_met < n && !home->work.empty())
            work_once(home);
    });
}

int runtime_event_ns(runtime_event *from, runtime_event *to, uint64_t *out_ns)
{
    if (is_planted("event_ns"))
        return 1;
    *out_ns = to->ns - from->ns;
    return 0;
}

int runtime_graph_begin(runtime_stream *s)
{
    if (is_planted("graph_begin"))
        return 1;
    s->capture = new runtime_graph{};
    return 0;
}

int runtime_graph_end(runtime_stream *s, runtime_graph **out_g)
{
    runtime_graph *g = s->capture;
    s->capture = nullptr;
    if (is_planted("graph_end")) {
        delete g;
        return 1;
    }
    *out_g = g;
    return 0;
}

int runtime_graph_launch(runtime_graph *g, runtime_stream *s)
{
    return add("graph_launch", s, [=] {
        for (const std::function<void()> &work : g->work)
            work();
    });
}

void runtime_graph_close(runtime_graph *g)
{
    delete g;
}

/* ---- the range that outlives the process */

int runtime_range_open(int index, uint64_t bytes, int import_fd, struct runtime_range *out)
{
    (void)index;
    *out = runtime_range{};
    if (is_planted("range_open"))
        return 1;
    int fd = import_fd < 0 ? memfd_create("simt", MFD_CLOEXEC) : dup(import_fd);
    if (fd < 0)
        return fail("no descriptor for the range");
    out->handle = (uint64_t)fd;
    out->has_handle = true;
    out->bytes = (bytes + 4095) / 4096 * 4096;
    if (import_fd < 0 ? ftruncate(fd, (off_t)out->bytes) != 0
                      : lseek(fd, 0, SEEK_END) != (off_t)out->bytes)
        return fail("the range has another size");
    out->p = mmap(nullptr, out->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (out->p == MAP_FAILED)
        return fail("the range cannot be mapped");
    out->is_mapped = true;
    if (import_fd < 0)
        memset(out->p, 0xff, out->bytes); /* as the last owner may have left it */
    return 0;
}

int runtime_range_export(const struct runtime_range *r, int *out_fd)
{
    int fd = is_planted("range_export") ? -1 : dup((int)r->handle);
    if (fd < 0)
        return 1;
    *out_fd = fd;
    return 0;
}

void runtime_range_close(struct runtime_range *r)
{
    if (r->is_mapped)
        munmap(r->p, r->bytes);
    if (r->has_handle)
        close((int)r->handle);
    *r = runtime_range{};
}
}

int simt::enqueue(void *stream, std::function<void()> work)
{
    return add("launch", (runtime_stream *)stream, std::move(work));
}
