/* test_gpu_export.c: KV memory that outlives its maker: a child makes and fills it, hands its
 * descriptor over and is killed. Usage as test_gpu.
 */
#include "kernels/kv_layout.h"
#include "kernels/load.h"
#include "tests/gpu/rig.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static const struct backend_ops *gpu;

static const struct attn_layer_spec plain[2] = {{.scale = 0.125f}, {.scale = 0.1f}};

enum { kept_blocks = 64 };

static void kept_pattern(uint32_t block, unsigned char *x, uint64_t bytes)
{
    uint64_t s = 77 + block;
    for (uint64_t i = 0; i + 4 <= bytes; i += 4) {
        uint32_t u = rig_random(&s);
        memcpy(x + i, &u, 4);
    }
}

/* With the place of the pool in the memory. */
static bool fd_send(int socket, int fd, uint64_t place)
{
    char space[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec v = {&place, sizeof place};
    struct msghdr m = {
        .msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    *h = (struct cmsghdr){CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(h), &fd, sizeof fd);
    return sendmsg(socket, &m, 0) == sizeof place;
}

static int fd_receive(int socket, uint64_t *out_place)
{
    int fd = -1;
    char space[CMSG_SPACE(sizeof fd)];
    struct iovec v = {out_place, sizeof *out_place};
    struct msghdr m = {
        .msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    if (recvmsg(socket, &m, 0) != sizeof *out_place || !CMSG_FIRSTHDR(&m))
        return -1;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    return fd;
}

/* The child: makes memory, writes it, hands its descriptor over, waits to be killed. */
static int maker(int socket)
{
    struct backend_pool_config c = rig_config(plain, 2);
    c.n_blocks = kept_blocks;
    struct backend_config bc = {.kv_bytes = gpu->pool_bytes(NULL, &c),
                                .max_batch_items = 8,
                                .max_batch_tokens = 64,
                                .import_fd = -1};
    struct backend *b;
    struct backend_pool *p;
    uint64_t bytes = kv_layout_of(&c).block_bytes;
    unsigned char *x = malloc(bytes);
    int fd = -1;
    if (gpu->open(&bc, &b) != ATTN_OK || gpu->pool_open(b, &c, &p) != ATTN_OK)
        return 1;
    for (uint32_t i = 0; i < kept_blocks; i++) {
        kept_pattern(i, x, bytes);
        if (gpu->block_write(p, i, x) != ATTN_OK)
            return 1;
    }
    if (gpu->export_memory(b, &fd) != ATTN_OK || !fd_send(socket, fd, gpu->pool_place(p)))
        return 1;
    for (;;)
        pause();
}

static void exported_memory_outlives_a_killed_process(void **state)
{
    (void)state;
    int pair[2], status;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    char number[16];
    snprintf(number, sizeof number, "%d", pair[1]);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        close(pair[0]);
        execl("/proc/self/exe", "test_gpu_export", gpu->name, "--maker", number, (char *)NULL);
        _exit(127);
    }
    close(pair[1]);
    uint64_t place = 0;
    int fd = fd_receive(pair[0], &place);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(fd >= 0);

    struct backend_pool_config c = rig_config(plain, 2);
    c.n_blocks = kept_blocks;
    c.kv_place = place;
    static struct rig r;
    rig_open(&r, gpu, &c, 0, fd);
    uint64_t bytes = kv_layout_of(&c).block_bytes;
    unsigned char *x = malloc(bytes), *want = malloc(bytes);
    for (uint32_t i = 0; i < kept_blocks; i++) {
        kept_pattern(i, want, bytes);
        assert_int_equal(gpu->block_read(r.pool, i, x), ATTN_OK);
        assert_memory_equal(x, want, bytes);
    }
    free(x);
    free(want);
    rig_close(&r);
    close(fd);
    close(pair[0]);
}

int main(int argc, char **argv)
{
    char why[512];
    if (argc > 3 && strcmp(argv[2], "--maker") == 0)
        return backend_load(argv[1], &gpu, why, sizeof why) == ATTN_OK ? maker(atoi(argv[3])) : 1;
    uint64_t seed;
    int code = rig_start(argc, argv, &gpu, &seed);
    if (code != 0)
        return code;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exported_memory_outlives_a_killed_process),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
