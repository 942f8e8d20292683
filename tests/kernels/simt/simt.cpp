/* simt.cpp: see simt.h. */
#include "tests/kernels/simt/simt.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <vector>

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define SIMT_ASAN 1
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt
{

thread *current;
std::vector<thread> threads;
std::vector<block> blocks;
dim3 block_dim, grid_dim;
bool (*deliver)();
std::function<void()> beside;
int width = 32, order, planted;
size_t shared_limit;
static void thread_leaves();

namespace
{

constexpr size_t stack_bytes = 256 << 10, max_threads = 8 * 1024;

struct warp {
    int first, n_lanes, n_ready, n_waiting;
};

char *stacks; /* [max_threads][stack_bytes] */
std::vector<warp> warps;
const std::function<void()> *kernel;
std::vector<gate *> full; /* gates to open */
int n_done, n_to_cluster; /* threads that have left; that the cluster's barrier waits for */
uint32_t cluster_phase;
bool is_chained;
void *scheduler_stack_pointer;
#ifdef SIMT_ASAN
const void *scheduler_stack;
size_t scheduler_stack_bytes;
#endif

/* ---- fibers: a switch saves what the calling convention says a callee must keep */

#if defined(__x86_64__)
asm(R"(
.text
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, . - simt_switch
)");
constexpr int n_saved = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.type simt_switch, @function
simt_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size simt_switch, . - simt_switch
)");
#else
#error "simt: no fiber switch for this processor"
#endif
extern "C" void simt_switch(void **out_from, void *to);

void to_scheduler(bool is_last)
{
    thread *me = current;
#ifdef SIMT_ASAN
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(is_last ? nullptr : &fake, scheduler_stack,
                                   scheduler_stack_bytes);
#else
    (void)is_last;
#endif
    simt_switch(&me->stack_pointer, scheduler_stack_pointer);
#ifdef SIMT_ASAN
    __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

extern "C" void simt_thread_main()
{
#ifdef SIMT_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
    (*kernel)();
    thread_leaves();
    current->state = thread::DONE;
    to_scheduler(true);
}

char *stack_of(const thread *t)
{
    return stacks + (size_t)(t - threads.data()) * stack_bytes;
}

void start(thread *t)
{
    /* as if simt_switch had been called by the entry, whose own return address is never used */
    void **top = (void **)(stack_of(t) + stack_bytes);
#if defined(__x86_64__)
    *--top = nullptr;
    *--top = (void *)simt_thread_main;
    for (int i = 0; i < n_saved; i++)
        *--top = nullptr;
#else
    top -= 20;
    memset(top, 0, 160);
    top[11] = (void *)simt_thread_main;
#endif
    t->stack_pointer = top;
}

void run_thread(thread *t)
{
    current = t;
#ifdef SIMT_ASAN
    void *fake;
    __sanitizer_start_switch_fiber(&fake, stack_of(t), stack_bytes);
#endif
    simt_switch(&scheduler_stack_pointer, t->stack_pointer);
#ifdef SIMT_ASAN
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    current = nullptr;
}

/* ---- a thread block */

warp &warp_of(const thread *t)
{
    return warps[t->warp];
}

void run_warp(warp &w)
{
    for (int i = 0; i < w.n_lanes; i++) {
        thread &t = threads[w.first + (order == 2 ? w.n_lanes - 1 - i : i)];
        if (t.state == thread::READY)
            run_thread(&t);
    }
}

/* Lets all warps run until none can; the caller looks at why. */
void run_warps()
{
    int n = (int)warps.size();
    for (bool ran = true; ran;) {
        ran = false;
        for (int i = 0; i < n; i++) {
            warp &w = warps[order == 2 ? n - 1 - i : i];
            if (w.n_ready == 0)
                continue;
            run_warp(w);
            ran = true;
            while (order != 0 && w.n_ready)
                run_warp(w);
        }
    }
}

void open_gates()
{
    for (gate *g : full) {
        g->result = g->any;
        g->any = false;
        g->n_here = g->line = 0;
    }
    for (gate *g : full)
        wake(g);
    full.clear();
}

/* All blocks of a cluster. */
void run_blocks()
{
    int n = (int)threads.size(), a_block = n / (int)blocks.size();
    n_done = 0;
    n_to_cluster = n;
    warps.clear();
    for (int i = 0; i < n; i++) {
        thread &t = threads[i];
        int in_block = i % a_block;
        t.home = &blocks[i / a_block];
        t.what = nullptr;
        t.line = t.group = 0;
        t.copies.clear();
        t.stores.clear();
        t.products.clear();
        t.n_commits = 0;
        t.barriers.clear();
        t.may_multiply = t.may_copy_bulk = t.has_chain_waited = t.is_at_cluster = false;
        t.has_met_cluster = false;
        t.index = dim3(in_block, 0, 0);
        t.lane = in_block % width;
        t.state = thread::READY;
        start(&t);
        if (t.lane == 0) {
            int lanes = a_block - in_block < width ? a_block - in_block : width;
            warps.push_back({i, lanes, lanes, 0});
        }
        t.warp = (int)warps.size() - 1;
    }
    for (;;) {
        run_warps();
        if (!full.empty()) {
            open_gates();
            continue;
        }
        if (deliver && deliver()) {
            if (n_done == n)
                die("left while copies are under way", threads[0]);
            continue;
        }
        if (n_done == n)
            return;
        for (const thread &t : threads)
            if (t.state != thread::DONE)
                die(t.state == thread::AT_WARP ? "part of a warp waits at a collective for ever"
                                               : "waits for ever",
                    t);
    }
}

} // namespace

void die(const char *words, const thread &t)
{
    fprintf(stderr, "simt: %s: block %u,%u,%u thread %u", words, t.home->index.x, t.home->index.y,
            t.home->index.z, t.index.x);
    if (t.what)
        fprintf(stderr, ", at %s", t.what);
    if (t.line)
        fprintf(stderr, " in line %d", t.line);
    fprintf(stderr, " (order %d)\n", order);
    abort();
}

void die(const char *words)
{
    die(words, current ? *current : threads[0]);
}

void *shared()
{
    return current->home->shared;
}

uint32_t shared_base()
{
    return order == 2 ? 1024 + 128 : 1024;
}

uint32_t shared_address(const void *p)
{
    return (uint32_t)((const char *)p - current->home->shared) + shared_base();
}

char *shared_pointer(uint32_t address, uint32_t bytes, block **out_home)
{
    uint32_t rank = address >> 24, at = (address & 0xffffff) - shared_base();
    if (rank > blocks.size())
        die("an address of no block of the cluster");
    block *home = rank ? &blocks[rank - 1] : current->home;
    if (at >= home->shared_bytes || bytes > home->shared_bytes - at)
        die("an address outside of shared memory");
    if (address % (bytes < 16 ? bytes : 16))
        die("an address that is not aligned");
    if (out_home)
        *out_home = home;
    return home->shared + at;
}

void meet(const char *what, const void *argument, combine_fn combine)
{
    thread *me = current;
    warp &w = warp_of(me);
    me->what = what;
    me->argument = argument;
    me->state = thread::AT_WARP;
    w.n_ready--;
    if (++w.n_waiting < w.n_lanes) {
        to_scheduler(false);
        return;
    }
    const void *arguments[max_width];
    for (int i = 0; i < w.n_lanes; i++) {
        thread &t = threads[w.first + i];
        if (t.what != what)
            die("lanes of a warp wait at different collectives", t);
        arguments[i] = t.argument;
        t.state = thread::READY;
    }
    w.n_waiting = 0;
    w.n_ready = w.n_lanes;
    combine(arguments, w.n_lanes);
}

void wait_for(const void *what_for, const char *what)
{
    thread *me = current;
    me->argument = what_for;
    me->what = what;
    me->state = thread::WAITING;
    warp_of(me).n_ready--;
    to_scheduler(false);
}

void wake(const void *what_for)
{
    for (warp &w : warps) {
        if (w.n_ready == w.n_lanes)
            continue;
        for (int i = 0; i < w.n_lanes; i++) {
            thread &t = threads[w.first + i];
            if (t.state == thread::WAITING && t.argument == what_for) {
                t.state = thread::READY;
                t.line = 0;
                w.n_ready++;
            }
        }
    }
}

static void come_to(gate *g, int n, int line, bool v)
{
    if (g->n_here == 0) {
        g->n_wanted = n;
        g->line = line;
    }
    if (g->n_here == g->n_wanted)
        die("more threads come to a barrier than it counts");
    if (g->n_wanted != n || g->line != line)
        die("threads wait at different barriers");
    g->any |= v;
    if (++g->n_here == n)
        full.push_back(g);
}

void arrive_at(gate *g, int n)
{
    come_to(g, n, 0, false);
}

bool wait_at(gate *g, int n, const char *what, int line, bool v)
{
    come_to(g, n, line, v);
    current->line = line;
    wait_for(g, what);
    return g->result;
}

bool barrier(int line, bool v)
{
    return wait_at(&current->home->all, (int)block_dim.x, "the block's barrier", line, v);
}

static void cluster_arrived()
{
    if (--n_to_cluster > 0)
        return;
    cluster_phase++;
    n_to_cluster = (int)threads.size() - n_done;
    for (thread &t : threads)
        t.is_at_cluster = false;
    wake(&cluster_phase);
}

static void thread_leaves()
{
    if (is_chained && !current->has_chain_waited)
        die("left without waiting for the kernel before");
    n_done++;
    current->home->n_done++;
    warp_of(current).n_ready--;
    if (!current->is_at_cluster)
        cluster_arrived();
}

void cluster_arrive()
{
    if (current->is_at_cluster)
        die("arrives twice at the cluster's barrier");
    current->is_at_cluster = true;
    current->cluster_phase = cluster_phase;
    cluster_arrived();
}

void cluster_wait()
{
    if (cluster_phase == current->cluster_phase) {
        if (!current->is_at_cluster)
            die("waits at the cluster's barrier where it has not arrived");
        wait_for(&cluster_phase, "the cluster's barrier");
    }
    current->has_met_cluster = true;
}

void note_store(char *at, uint32_t bytes)
{
    block *b = current->home;
    if (b->shared_async && at >= b->shared && at < b->shared + b->shared_bytes) {
        current->stores.push_back({at, bytes});
        b->n_stores++;
    }
}

void copy(void *dst, const void *src, int bytes)
{
    if ((uintptr_t)dst % bytes || (uintptr_t)src % bytes)
        die("a copy that is not aligned", *current);
    current->copies.push_back({dst, src, bytes, current->group});
    if (order == 1) /* as early as can be: all groups */
        copy_wait(-1);
}

void copy_commit()
{
    current->group++;
}

void copy_wait(int pending)
{
    std::vector<thread::copy> &copies = current->copies;
    size_t n = 0;
    for (; n < copies.size() && copies[n].group < current->group - pending; n++) {
        if (copies[n].src)
            memcpy(copies[n].dst, copies[n].src, copies[n].bytes);
        else
            memset(copies[n].dst, 0, copies[n].bytes);
        note_store((char *)copies[n].dst, (uint32_t)copies[n].bytes);
    }
    copies.erase(copies.begin(), copies.begin() + (ptrdiff_t)n);
}

static char *poisoned(size_t bytes)
{
    void *p = nullptr;
    if (bytes && posix_memalign(&p, 128, bytes) != 0)
        abort();
    if (p)
        memset(p, 0xff, bytes);
    return (char *)p;
}

void run(const launch &l, const std::function<void()> &body)
{
    size_t n = (size_t)l.block.x * l.cluster;
    if (current || l.block.y != 1 || l.block.z != 1 || n > max_threads || l.block.x > 1024 ||
        l.cluster > 8 || l.grid.x % l.cluster != 0) {
        fprintf(stderr, "simt: a block of %u x %u x %u threads, %u a cluster, %u along x\n",
                l.block.x, l.block.y, l.block.z, l.cluster, l.grid.x);
        abort();
    }
    if (!stacks) {
        void *p = mmap(nullptr, max_threads * stack_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED)
            abort();
        stacks = (char *)p;
    }
    threads.resize(n);
    grid_dim = l.grid;
    block_dim = l.block;
    is_chained = l.is_chained;
    kernel = &body;
    uint64_t n_clusters = (uint64_t)l.grid.x * l.grid.y * l.grid.z / l.cluster;
    for (uint64_t i = 0; i < n_clusters; i++) {
        if (beside && i == n_clusters / 2) {
            std::function<void()> other = std::move(beside);
            beside = nullptr;
            dim3 grid = grid_dim, block = block_dim;
            bool was_chained = is_chained;
            other();
            threads.resize(n);
            grid_dim = grid;
            block_dim = block;
            is_chained = was_chained;
            kernel = &body;
        }
        uint64_t first = (order == 2 ? n_clusters - 1 - i : i) * l.cluster;
        blocks.assign(l.cluster, block{});
        for (unsigned r = 0; r < l.cluster; r++) {
            block &b = blocks[r];
            uint64_t at = first + r;
            b.index = dim3((unsigned)(at % l.grid.x), (unsigned)(at / l.grid.x % l.grid.y),
                           (unsigned)(at / l.grid.x / l.grid.y));
            b.rank = (int)r;
            b.shared_bytes = (uint32_t)l.shared_bytes;
            b.shared = poisoned(l.shared_bytes);
            b.shared_async = l.has_async ? poisoned(l.shared_bytes) : nullptr;
        }
        run_blocks();
        for (block &b : blocks) {
            free(b.shared);
            free(b.shared_async);
        }
        blocks.clear();
    }
}

} // namespace simt
