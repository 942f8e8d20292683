/* simt.h: runs GPU kernels on the host, one fiber a thread, one thread block at a time.
 *
 * Lanes of a warp meet at each collective (shuffle, matrix instruction, warp barrier), all threads of a
 * block at each block barrier. Between two meetings a lane runs alone, so what a missing barrier lets
 * through shows as a wrong result in one of the orders: 0 all warps in turn, 1 the lowest warp as far
 * as it gets, 2 the highest, lanes and thread blocks backwards. Lanes that meet at different
 * collectives, or not at all, end the program with words. Dynamic shared memory is one heap block of
 * the size the launch gave, filled with NaN.
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

struct thread {
    dim3 index;
    int lane;
    void *stack_pointer; /* while it does not run */
    const char *what; /* the collective it waits at */
    const void *argument;
    int line;
    struct copy {
        void *dst;
        const void *src;
        int bytes, group;
    };
    std::vector<copy> copies; /* asked for and not made, oldest first */
    int group; /* of the next copy */
    enum { READY, AT_WARP, AT_BLOCK, DONE } state;
};

extern thread *current;
extern dim3 block_index, block_dim, grid_dim;
extern int width; /* of a warp: set once, by the spelling */
extern int order; /* 0 to 2 */
extern int planted; /* the bug to have, in sources that plant.cmake made; 0: none */

/* Dynamic shared memory of the running block. */
void *shared();

/* A collective of a warp: when all its lanes are here, combine sees their arguments by lane, once; then all
 * go on. Arguments live on the lanes' stacks. */
using combine_fn = void (*)(const void *const *arguments, int n_lanes);
void meet(const char *what, const void *argument, combine_fn combine);

/* A barrier of the block; true if v was true in any thread. */
bool barrier(int line, bool v);

/* Asynchronous copies of up to 16 bytes by the running thread, made when it waits for them; in order 1 at
 * once. src nullptr: zeroes. copy_wait makes all but the newest `pending` groups. */
void copy(void *dst, const void *src, int bytes);
void copy_commit();
void copy_wait(int pending);

/* Runs body in every thread of every block. Not from within a kernel. */
void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body);

} // namespace simt
#endif
