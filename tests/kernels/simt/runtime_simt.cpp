/* runtime_simt.cpp: runtime.h without a device: device memory is heap memory of exact size, filled
 * with NaN, a stream is a list of work that simt.h runs on the host.
 *
 * When a stream works follows from ATTND_SIMT_ORDER (0 to 2, see simt.h; default 0): at once with
 * 0, else not before somebody waits for it or, piece by piece, asks after it, which shows host
 * memory that changed too early. Of a backend's two streams the second works as late as it may with
 * 1 (when what follows it must begin, or the first has nothing left to do), with 2 before or in the
 * middle of the first's next kernel, one piece or as many as can, or at once where the first has
 * nothing to do. ATTND_SIMT_PROCESSORS (default 4) decides how work is cut. ATTND_SIMT_MATRIX=0
 * takes the matrix units away; ATTND_SIMT_FAIL=N lets the N-th call that can fail do so, and all
 * after it.
 */
#include "kernels/gpu/vendor/runtime.h"
#include "tests/kernels/simt/gpu_simt.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

struct piece {
    std::function<void()> work;
    std::shared_ptr<bool> after; /* what it waits for, or none */
    runtime_stream *home; /* of after */
    const uint32_t *word; /* waits until this has reached value, or NULL */
    uint32_t value;
};
using work_list = std::list<piece>;

struct runtime_graph {
    work_list work;
    std::vector<runtime_stream *> followers; /* streams that are captured with it */
};

struct runtime_stream {
    work_list work;
    runtime_graph *capture; /* what is enqueued goes here instead */
    runtime_stream *first, *second; /* the other one of the backend, whichever this is */
    bool is_following; /* in the middle of it */
    bool is_first; /* its work comes before others', in order 2 */
};

struct runtime_event {
    uint64_t ns;
    runtime_stream *home; /* where it was recorded last */
    std::shared_ptr<bool> is_met; /* what was recorded then is done */
};

static constexpr uint64_t device_bytes = (uint64_t)4 << 30;
static thread_local char last_error[256] = "no error";
/* Every backend opens two on one thread, one behind the other; its threads that move blocks open
 * one each, and that stays alone. */
static thread_local runtime_stream *without_second;
/* The device does one thing at a time, whoever asks: a stream that follows another works it off,
 * and threads that move blocks may follow the same one. */
static std::recursive_mutex device;
static long calls_left = -1; /* until failure; below 0: none is wanted */

static int fail(const char *words)
{
    snprintf(last_error, sizeof last_error, "%s", words);
    return 1;
}

/* Is it this call's turn to fail? */
static bool is_planted(const char *call)
{
    const std::lock_guard<std::recursive_mutex> one(device);
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

uint32_t runtime_n_devices(void)
{
    return 1;
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
    out->memory_bytes_per_s = 1000000000;
    out->capability = 90;
    out->has_words = true;
    out->is_shared = true;
    out->has_matrix_units = setting("ATTND_SIMT_MATRIX", 1) != 0;
    simt::shared_limit = (size_t)setting("ATTND_SIMT_SHARED_KIB", SIMT_WIDTH == 32 ? 227 : 64)
                         << 10;
    out->shared_bytes = (uint32_t)simt::shared_limit;
    out->l2_bytes = 4096;
    out->total_bytes = out->free_bytes = device_bytes;
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
    if (bytes > device_bytes || posix_memalign(&p, 256, bytes) != 0)
        return fail("out of memory");
    memset(p, 0xff, bytes);
    *out_p = p;
    return 0;
}

void runtime_free(void *p)
{
    free(p);
}

/* Page-locked memory, by its beginning. A copy is of one of them, as a vendor's runtime has it. */
static std::map<const char *, size_t> locked;
static std::mutex locked_lock;

static void lock_pages(const void *p, size_t bytes)
{
    const std::lock_guard<std::mutex> one(locked_lock);
    locked[(const char *)p] = bytes;
}

static void unlock_pages(const void *p)
{
    const std::lock_guard<std::mutex> one(locked_lock);
    locked.erase((const char *)p);
}

static bool is_across(const void *p, size_t bytes)
{
    const std::lock_guard<std::mutex> one(locked_lock);
    auto next = locked.upper_bound((const char *)p);
    if (next == locked.begin())
        return false;
    const char *end = std::prev(next)->first + std::prev(next)->second;
    return (const char *)p < end && (const char *)p + bytes > end;
}

int runtime_host_alloc(void **out_p, size_t bytes)
{
    void *p = nullptr;
    if (is_planted("host_alloc"))
        return 1;
    if (posix_memalign(&p, 4096, bytes) != 0)
        return fail("out of memory");
    memset(p, 0xff, bytes);
    lock_pages(p, bytes);
    *out_p = p;
    return 0;
}

void runtime_host_free(void *p)
{
    unlock_pages(p);
    free(p);
}

int runtime_host_register(void *p, size_t bytes)
{
    if (is_planted("host_register"))
        return 1;
    lock_pages(p, bytes);
    return 0;
}

int runtime_host_unregister(void *p)
{
    unlock_pages(p);
    return 0;
}

/* ---- streams, events, graphs */

static void work_once(runtime_stream *s);

/* Does what comes next wait for a word that the host, or another stream, has not written? There are
 * two streams: one that waits for the other, which waits for the one, waits for no word. */
static bool is_stuck(const runtime_stream *s)
{
    for (int n = 0; n < 2 && s && !s->work.empty(); n++) {
        const piece &p = s->work.front();
        if (p.word && (int32_t)(__atomic_load_n(p.word, __ATOMIC_ACQUIRE) - p.value) < 0)
            return true;
        s = p.after && !*p.after && p.home != s ? p.home : nullptr;
    }
    return false;
}

/* 0 to 7. */
static unsigned draw()
{
    static unsigned n;
    return n++ * 2654435761u >> 29;
}

/* Works as long as nothing must be waited for, n pieces at most. */
static void work_free(runtime_stream *s, unsigned n)
{
    while (n-- > 0 && !s->is_following && !s->work.empty() && !is_stuck(s) &&
           (!s->work.front().after || *s->work.front().after))
        work_once(s);
}

static void work_once(runtime_stream *s)
{
    const piece p = std::move(s->work.front());
    const std::function<void()> &work = p.work;
    const bool is_follow = p.after != nullptr; /* works the other stream itself */
    s->work.pop_front();
    if (simt::order == 2 && !is_follow && s->second && !s->second->work.empty()) {
        const unsigned n = draw();
        auto cross = [other = s->second, n] { work_free(other, n & 1 ? 1 : 100); };
        if (n < 2)
            cross();
        else if (n < 7)
            simt::beside = cross;
    }
    work();
    if (is_follow && !*p.after) /* the other stream is stuck */
        s->work.push_front(p);
    if (simt::beside) /* it was no kernel */
        std::exchange(simt::beside, nullptr)();
}

static void work_off(runtime_stream *s)
{
    while (!s->work.empty() && !is_stuck(s))
        work_once(s);
}

static int add_piece(const char *call, runtime_stream *s, piece p)
{
    const std::lock_guard<std::recursive_mutex> one(device);
    if (is_planted(call))
        return 2;
    (s->capture ? s->capture->work : s->work).push_back(std::move(p));
    bool is_free = simt::order == 2 && (s->is_first || (s->first && s->first->work.empty()));
    if (!s->capture && (simt::order == 0 || is_free))
        work_off(s);
    return 0;
}

static int add(const char *call, runtime_stream *s, std::function<void()> work)
{
    return add_piece(call, s, {std::move(work), nullptr, nullptr, nullptr, 0});
}

int runtime_stream_open(runtime_stream **out_s)
{
    if (is_planted("stream_open"))
        return 1;
    *out_s = new runtime_stream{};
    if (without_second == nullptr) {
        without_second = *out_s;
    } else {
        (*out_s)->first = without_second;
        without_second->second = *out_s;
        without_second = nullptr;
    }
    return 0;
}

/* It belongs to no pair: its work is done when another follows it, or at once. */
int runtime_stream_open_first(runtime_stream **out_s)
{
    if (is_planted("stream_open_first"))
        return 1;
    *out_s = new runtime_stream{};
    (*out_s)->is_first = true;
    return 0;
}

void runtime_stream_close(runtime_stream *s)
{
    if (s == without_second)
        without_second = nullptr;
    if (s && s->first)
        s->first->second = nullptr;
    if (s && s->second)
        s->second->first = nullptr;
    delete s;
}

void *runtime_stream_native(runtime_stream *s)
{
    return s;
}

int runtime_stream_wait(runtime_stream *s)
{
    const std::lock_guard<std::recursive_mutex> one(device);
    if (is_planted("stream_wait")) {
        s->work.clear();
        return 1;
    }
    work_off(s);
    for (runtime_stream *other : {s->first, s->second}) /* may write what s waits for */
        if (other && is_stuck(s)) {
            work_off(other);
            work_off(s);
        }
    return is_stuck(s) ? fail("stream_wait: a word that nobody writes") : 0;
}

/* Time passes: one piece of work is done (with 2 by chance, less often of the second stream), so
 * that a batch is back while the one behind it is not. */
int runtime_stream_check(runtime_stream *s)
{
    const std::lock_guard<std::recursive_mutex> one(device);
    if (is_planted("stream_check")) {
        s->work.clear();
        return 1;
    }
    const bool is_behind = s->first && !s->first->work.empty() && !is_stuck(s->first);
    if (!s->work.empty() && !is_stuck(s) &&
        (simt::order == 2 ? draw() < (s->first ? 1 : 4) : !is_behind))
        work_once(s);
    return 0;
}

int runtime_copy(void *dst, const void *src, size_t bytes, runtime_stream *s)
{
    if (is_across(dst, bytes) || is_across(src, bytes))
        return fail("copy: of two pieces of page-locked memory");
    return add("copy", s, [=] { memcpy(dst, src, bytes); });
}

int runtime_copy_rows(void *dst, size_t dst_step, const void *src, size_t src_step,
                      size_t row_bytes, size_t n, runtime_stream *s)
{
    return add("copy_rows", s, [=] {
        for (size_t i = 0; i < n; i++)
            memcpy((char *)dst + i * dst_step, (const char *)src + i * src_step, row_bytes);
    });
}

/* The last first: no order is promised. */
int runtime_copies(void *const *dst, const void *const *src, const size_t *bytes, uint32_t n,
                   runtime_stream *s)
{
    int code = 0;
    for (uint32_t i = n; i > 0 && code == 0; i--)
        code = runtime_copy(dst[i - 1], src[i - 1], bytes[i - 1], s);
    return code;
}

/* There is one device. */
int runtime_copy_peer(void *dst, int, const void *src, int, size_t bytes, runtime_stream *s)
{
    return runtime_copy(dst, src, bytes, s);
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
    auto is_met = std::make_shared<bool>(false);
    e->home = s;
    e->is_met = is_met;
    return add("event_record", s, [=] {
        e->ns = gpu::time_ns();
        *is_met = true;
    });
}

int runtime_stream_follow(runtime_stream *s, runtime_event *e)
{
    runtime_stream *home = e->home;
    std::shared_ptr<bool> is_met = e->is_met;
    if (home->capture && !s->capture) { /* it is captured with the other, until that one's end */
        s->capture = home->capture;
        s->capture->followers.push_back(s);
    }
    auto work = [=] {
        s->is_following = true;
        while (!*is_met && !home->work.empty() && !is_stuck(home))
            work_once(home);
        s->is_following = false;
    };
    return add_piece("stream_follow", s, {work, is_met, home, nullptr, 0});
}

int runtime_stream_wait_word(runtime_stream *s, const uint32_t *word, uint32_t value)
{
    return add_piece("stream_wait_word", s, {[] {}, nullptr, nullptr, word, value});
}

int runtime_stream_write_word(runtime_stream *s, uint32_t *word, uint32_t value)
{
    return add("stream_write_word", s, [=] { __atomic_store_n(word, value, __ATOMIC_RELEASE); });
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
    for (runtime_stream *f : g->followers)
        f->capture = nullptr;
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
        for (const piece &p : g->work)
            p.work();
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

int runtime_range_reach(const struct runtime_range *, int, int)
{
    return is_planted("range_reach") ? 1 : 0;
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

/* For bugs planted in the host's C sources. */
extern "C" int simt_has_bug(int bug)
{
    return simt::planted == bug;
}
