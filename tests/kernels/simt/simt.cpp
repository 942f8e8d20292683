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
dim3 block_index, block_dim, grid_dim;
int width = 32, order, planted;

namespace
{

constexpr size_t stack_bytes = 256 << 10, max_threads = 1024;

struct warp {
    int first, n_lanes, n_ready, n_waiting;
};

char *stacks; /* [max_threads][stack_bytes] */
std::vector<thread> threads;
std::vector<warp> warps;
const std::function<void()> *kernel;
char *shared_memory;
bool any_true, barrier_result;
int n_at_block, n_done;
void *scheduler_stack_pointer;
#ifdef SIMT_ASAN
const void *scheduler_stack;
size_t scheduler_stack_bytes;
#endif

[[noreturn]] void die(const char *words, const thread &t)
{
    fprintf(stderr, "simt: %s: block %u,%u thread %u", words, block_index.x, block_index.y,
            t.index.x);
    if (t.what)
        fprintf(stderr, ", at %s", t.what);
    if (t.state == thread::AT_BLOCK)
        fprintf(stderr, ", at the barrier in line %d", t.line);
    fprintf(stderr, " (order %d)\n", order);
    abort();
}

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

void run_block()
{
    n_at_block = n_done = 0;
    any_true = false;
    int n = (int)threads.size();
    for (int i = 0; i < n; i++) {
        thread &t = threads[i];
        t.what = nullptr;
        t.line = t.group = 0;
        t.copies.clear();
        t.index = dim3(i, 0, 0);
        t.lane = i % width;
        t.state = thread::READY;
        start(&t);
    }
    warps.clear();
    for (int i = 0; i < n; i += width) {
        int lanes = n - i < width ? n - i : width;
        warps.push_back({i, lanes, lanes, 0});
    }
    for (;;) {
        run_warps();
        if (n_done == n)
            return;
        for (const thread &t : threads) {
            if (t.state == thread::AT_WARP)
                die("part of a warp waits at a collective for ever", t);
            if (t.state == thread::DONE && n_at_block)
                die("left while others wait at a barrier", t);
            if (t.line != threads[0].line)
                die("threads wait at different barriers", t);
        }
        barrier_result = any_true;
        any_true = false;
        n_at_block = 0;
        for (thread &t : threads)
            t.state = thread::READY;
        for (warp &w : warps)
            w.n_ready = w.n_lanes;
    }
}

} // namespace

void *shared()
{
    return shared_memory;
}

void meet(const char *what, const void *argument, combine_fn combine)
{
    thread *me = current;
    warp &w = warps[(me - threads.data()) / width];
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

bool barrier(int line, bool v)
{
    thread *me = current;
    me->line = line;
    me->what = nullptr;
    me->state = thread::AT_BLOCK;
    any_true |= v;
    n_at_block++;
    warps[(me - threads.data()) / width].n_ready--;
    to_scheduler(false);
    return barrier_result;
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
    for (; n < copies.size() && copies[n].group < current->group - pending; n++)
        if (copies[n].src)
            memcpy(copies[n].dst, copies[n].src, copies[n].bytes);
        else
            memset(copies[n].dst, 0, copies[n].bytes);
    copies.erase(copies.begin(), copies.begin() + (ptrdiff_t)n);
}

void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body)
{
    size_t n = block.x;
    if (current || block.y != 1 || block.z != 1 || n > max_threads) {
        fprintf(stderr, "simt: a block of %u x %u x %u threads\n", block.x, block.y, block.z);
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
    grid_dim = grid;
    block_dim = block;
    std::function<void()> counted = [&] {
        body();
        n_done++;
        warps[(current - threads.data()) / width].n_ready--;
    };
    kernel = &counted;
    uint64_t n_blocks = (uint64_t)grid.x * grid.y * grid.z;
    for (uint64_t i = 0; i < n_blocks; i++) {
        uint64_t at = order == 2 ? n_blocks - 1 - i : i;
        block_index = dim3((unsigned)(at % grid.x), (unsigned)(at / grid.x % grid.y),
                           (unsigned)(at / grid.x / grid.y));
        void *p = nullptr;
        if (shared_bytes && posix_memalign(&p, 128, shared_bytes) != 0)
            abort();
        if (p)
            memset(p, 0xff, shared_bytes);
        shared_memory = (char *)p;
        run_block();
        free(shared_memory);
        shared_memory = nullptr;
    }
}

} // namespace simt
