/* simt.h: runs GPU kernels on the host, one fiber a thread, one thread block (or cluster) at a
 * time.
 *
 * Lanes of a warp meet at each collective (shuffle, matrix instruction, warp barrier), all threads
 * of a block at each block barrier. Between two meetings a lane runs alone, so what a missing
 * barrier lets through shows as a wrong result in one of the orders: 0 all warps in turn, 1 the
 * lowest warp as far as it gets, 2 the highest, lanes and thread blocks backwards. Barriers open,
 * and what was asked for asynchronously arrives (sm90.h), when no thread can run. Lanes that meet
 * at different collectives, or not at all, and threads that wait for ever end the program with
 * words. Dynamic shared memory is one heap block of the size the launch gave, filled with NaN; it
 * is named by pointers, or by 32-bit addresses as on a device, which are checked.
 *
 * Thread     one: the host's engine thread.
 */
#ifndef ATTND_TESTS_SIMT_H
#define ATTND_TESTS_SIMT_H

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

namespace simt
{

constexpr int max_width = 64;

/* Where a known number of threads wait for each other. */
struct gate {
    int n_here, n_wanted, line; /* line: of the source, the same for all; 0: any */
    bool any, result;
};

struct block {
    dim3 index;
    int rank; /* in its cluster */
    char *shared;
    char *shared_async; /* as asynchronous copies and wgmma see it: sm90.h */
    uint32_t shared_bytes;
    uint32_t n_stores; /* in its threads' lists */
    int n_done;
    gate all, some[16], groups[8];
};

/* A matrix product of four warps that was asked for: see wgmma in sm90.h. */
struct product {
    float *d;
    int n; /* columns */
    bool is_bf16, is_turned, is_added; /* is_turned: B lies by columns */
    uint64_t a, b;
    uint32_t a_words[4]; /* A as the thread has it in registers, where a is 0 */
    const uint32_t
        *a_registers; /* where they are: nobody may change them before the product is made */
    uint32_t group; /* commits of the thread before it */
    std::vector<float> sums; /* d as it was; empty: a product asked for before it adds to d, too */
};

struct thread {
    dim3 index;
    int lane, warp; /* warp: of the whole cluster */
    block *home;
    void *stack_pointer; /* while it does not run */
    const char *what; /* the collective it waits at */
    const void *argument; /* of the collective, or what it waits for */
    int line;
    struct copy {
        void *dst;
        const void *src;
        int bytes, group;
    };
    std::vector<copy> copies; /* asked for and not made, oldest first */
    int group; /* of the next copy */
    struct store {
        char *at;
        uint32_t bytes;
    };
    std::vector<store> stores; /* to shared memory, that no proxy fence has ordered */
    std::vector<product> products; /* asked for and not made */
    uint32_t n_commits; /* of groups of products */
    std::vector<char *> barriers; /* initialised, and not fenced */
    bool may_multiply, may_copy_bulk, has_chain_waited, is_at_cluster, has_met_cluster;
    uint32_t cluster_phase; /* when it arrived */
    enum { READY, AT_WARP, WAITING, DONE } state;
};

struct launch {
    dim3 grid, block;
    size_t shared_bytes;
    unsigned cluster = 1; /* thread blocks, along x */
    bool is_chained = false; /* every thread must wait for the kernel before */
    bool has_async = false; /* give shared_async */
};

extern thread *current;
extern std::vector<thread> threads; /* of the running cluster, block by block */
extern std::vector<block> blocks;
extern dim3 block_dim, grid_dim;
/* Makes one asynchronous arrival, false if there is none. NULL: none ever. */
extern bool (*deliver)();
extern int width; /* of a warp: set once, by the spelling */
extern int order; /* 0 to 2 */
extern size_t shared_limit; /* bytes of a thread block: the device opens with it */
extern int planted; /* the bug to have, in sources that plant.cmake made; 0: none */

/* Dynamic shared memory of the running block. Its addresses begin at shared_base: right for
 * swizzled layouts, or wrong by 128 bytes in order 2, so that a kernel must align by itself. A rank
 * of the cluster plus 1 in the top byte names another block's. */
void *shared();
uint32_t shared_base();
uint32_t shared_address(const void *p);
char *shared_pointer(uint32_t address, uint32_t bytes, block **out_home = nullptr);

[[noreturn]] void die(const char *words, const thread &t);
[[noreturn]] void die(const char *words); /* in the running thread */

/* A collective of a warp: when all its lanes are here, combine sees their arguments by lane, once;
 * then all go on. Arguments live on the lanes' stacks. */
using combine_fn = void (*)(const void *const *arguments, int n_lanes);
void meet(const char *what, const void *argument, combine_fn combine);

/* Waits at a gate for n threads; true if v was true in any of them. */
bool wait_at(gate *g, int n, const char *what, int line, bool v);
/* Counts as one of the n, and goes on. */
void arrive_at(gate *g, int n);
/* A barrier of the block. */
bool barrier(int line, bool v);
/* Waits until somebody wakes those who wait for `what_for`. */
void wait_for(const void *what_for, const char *what);
void wake(const void *what_for);

/* The barrier of the cluster. Threads that have left count as arrived. */
void cluster_arrive();
void cluster_wait();

/* Records a store that only a proxy fence shows to asynchronous copies and wgmma. */
void note_store(char *at, uint32_t bytes);

/* Asynchronous copies of up to 16 bytes by the running thread, made when it waits for them; in
 * order 1 at once. src nullptr: zeroes. copy_wait makes all but the newest `pending` groups. */
void copy(void *dst, const void *src, int bytes);
void copy_commit();
void copy_wait(int pending);

/* What runs beside the next kernel: when half of that one's clusters are done. Set for one. */
extern std::function<void()> beside;

/* Runs body in every thread of every block. Not from within a kernel. */
void run(const launch &l, const std::function<void()> &body);

} // namespace simt
#endif
