/* test_kv_kill.c: a kill between any two instructions of an operation leaves a recoverable truth.
 *
 * A child runs random operations on an arena that this process also maps. During an operation the
 * child is stepped instruction by instruction; whenever a step has changed a byte of the arena, a
 * copy is opened as a successor would open it: kv_check must pass, and all sequences, lengths,
 * tables and the cells that the tables point to must be those of the model either before or after
 * the operation. So what was committed is there, what was not acknowledged happened completely or
 * not at all, and no table names a block whose copy was not committed. Skipped where tracing is not
 * allowed.
 */
#define _GNU_SOURCE
#include "cache/kv_tier.h"
#include "tests/cache/model.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_OPS (M_PAGES > 0 ? 172 : 156)

/* Written by the child, read by the parent while the child is stopped. */
struct stage {
    struct model before, after; /* the operation under way */
    struct device device;
    struct op op;
    attn_status status, expected;
    char error[256];
    uint32_t n_moved; /* blocks, by resizes */
    uint64_t number; /* of the latest event before the operation */
};

static struct stage *stage;
static uint8_t *arena, *last; /* the child's arena, and its bytes at the previous step */
static size_t arena_bytes;
static int copy_fd;
static uint64_t n_seeds = M_PAGES > 0 ? 3 : 2; /* or the first argument */
static uint64_t n_states, n_steps, n_old, n_new, n_moved;

/* Begins the first run, so that each kind of truth is in flight: of trees whose first block is
 * shared paths are committed that move within a block and between blocks, stay where they are, and
 * are empty, a tree is cancelled and another truncated; copies of two blocks are committed,
 * cancelled and closed away, notes are set, and a truncation cuts two layers. */
static const struct op script[] = {
    {.kind = OP_OPEN, .slot = 0, .n = 12},
    {.kind = OP_RESERVE, .slot = 0, .layer = 0, .pos = 0, .n = 6, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 0, .layer = 0, .pos = 0, .n = 6},
    {.kind = OP_RESERVE, .slot = 0, .layer = 1, .pos = 0, .n = 6, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 0, .layer = 1, .pos = 0, .n = 6},
    {.kind = OP_FORK, .slot = 0, .to_slot = 1, .n = 6},
    {.kind = OP_TREE, .slot = 0, .layer = 0, .pos = 6, .n = 7},
    {.kind = OP_CANCEL, .slot = 0, .layer = 0, .pos = 6, .n = 7},
    {.kind = OP_TREE, .slot = 0, .layer = 0, .pos = 6, .n = 7, .tree_seed = 9, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 0, .layer = 0, .pos = 6, .n = 7},
    {.kind = OP_TREE, .slot = 0, .layer = 1, .pos = 6, .n = 7, .tree_seed = 9, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 0, .layer = 1, .pos = 6, .n = 7},
    {.kind = OP_RECOVER},
    {.kind = OP_PATH, .slot = 0, .pos = 7, .tree_seed = 9},
    {.kind = OP_TREE, .slot = 1, .layer = 1, .pos = 6, .n = 2, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 1, .layer = 1, .pos = 6, .n = 2},
    {.kind = OP_FORK, .slot = 1, .to_slot = 2, .n = 6},
    {.kind = OP_TREE, .slot = 1, .layer = 0, .pos = 6, .n = 2, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 1, .layer = 0, .pos = 6, .n = 2},
    {.kind = OP_PATH, .slot = 1, .pos = 2},
    {.kind = OP_TREE, .slot = 1, .layer = 0, .pos = 7, .n = 6, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 1, .layer = 0, .pos = 7, .n = 6},
    {.kind = OP_TREE, .slot = 1, .layer = 1, .pos = 7, .n = 6, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 1, .layer = 1, .pos = 7, .n = 6},
    {.kind = OP_PATH, .slot = 1, .pos = 1},
    {.kind = OP_TREE, .slot = 1, .layer = 0, .pos = 8, .n = 3, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 1, .layer = 0, .pos = 8, .n = 3},
    {.kind = OP_PATH, .slot = 1, .pos = 0},
    {.kind = OP_TREE, .slot = 1, .layer = 0, .pos = 8, .n = 3, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 1, .layer = 0, .pos = 8, .n = 3},
    /* notes: beside each other, of all bytes that there may be, repeated, and at another epoch */
    {.kind = OP_NOTE, .slot = 1, .n = 40, .request = 1},
    {.kind = OP_NOTE, .slot = 1, .n = 24, .request = 2},
    {.kind = OP_NOTE, .slot = 1, .n = 40, .request = 2},
    {.kind = OP_NOTE, .slot = 1, .n = KV_MAX_NOTE_BYTES, .request = 3},
    {.kind = OP_NOTE, .slot = 1, .n = 0, .request = 4},
    {.kind = OP_TRUNCATE, .slot = 1, .n = 5},
    {.kind = OP_NOTE, .slot = 1, .n = 17, .request = 2},
    {.kind = OP_CLOSE, .slot = 0},
    {.kind = OP_CLOSE, .slot = 1},
    {.kind = OP_CLOSE, .slot = 2},
    {.kind = OP_OPEN, .slot = 0},
    {.kind = OP_RESERVE, .slot = 0, .layer = 0, .pos = 0, .n = 7, .will_commit = true},
    {.kind = OP_RESERVE, .slot = 0, .layer = 1, .pos = 0, .n = 6, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 0, .layer = 1, .pos = 0, .n = 6},
    {.kind = OP_COMMIT, .slot = 0, .layer = 0, .pos = 0, .n = 7},
    {.kind = OP_FORK, .slot = 0, .to_slot = 1, .n = 6},
    {.kind = OP_FORK, .slot = 1, .to_slot = 2, .n = 5},
    {.kind = OP_RESERVE, .slot = 1, .layer = 0, .pos = 3, .n = 6},
    {.kind = OP_CANCEL, .slot = 1, .layer = 0, .pos = 3, .n = 6},
    {.kind = OP_RESERVE, .slot = 1, .layer = 0, .pos = 3, .n = 6, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 1, .layer = 0, .pos = 3, .n = 6},
    {.kind = OP_TRUNCATE, .slot = 1, .n = 2},
    {.kind = OP_RESERVE, .slot = 2, .layer = 1, .pos = 2, .n = 4},
    {.kind = OP_CLOSE, .slot = 2},
    {.kind = OP_FORK, .slot = 0, .to_slot = 2, .n = 6},
    {.kind = OP_RESERVE, .slot = 0, .layer = 0, .pos = 0, .n = 7, .will_commit = true},
    {.kind = OP_RECOVER},
    {.kind = OP_ADOPT, .slot = 0, .owner = 1},
    {.kind = OP_CLOSE, .slot = 0},
    /* blocks are published by a commit, and by ids that come later; one is taken back and published
     * again, one is written by a sequence that shares it, and all are evicted */
    {.kind = OP_OPEN, .slot = 3, .n = 9},
    {.kind = OP_RESERVE, .slot = 3, .layer = 0, .pos = 0, .n = 13, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 3, .layer = 0, .pos = 0, .n = 13},
    {.kind = OP_RESERVE, .slot = 3, .layer = 1, .pos = 0, .n = 13, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 3, .layer = 1, .pos = 0, .n = 13},
    {.kind = OP_TOKENS, .slot = 3, .pos = 9, .n = 4},
    {.kind = OP_TRUNCATE, .slot = 3, .n = 6},
    {.kind = OP_TOKENS, .slot = 3, .pos = 6, .n = 7},
    {.kind = OP_RESERVE, .slot = 3, .layer = 0, .pos = 6, .n = 7, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 3, .layer = 0, .pos = 6, .n = 7},
    {.kind = OP_RESERVE, .slot = 3, .layer = 1, .pos = 6, .n = 7, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 3, .layer = 1, .pos = 6, .n = 7},
    {.kind = OP_OPEN, .slot = 4, .n = 16},
    {.kind = OP_RESERVE, .slot = 4, .layer = 0, .pos = 7, .n = 8, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 0, .pos = 7, .n = 8},
    {.kind = OP_CLOSE, .slot = 3},
    {.kind = OP_CLOSE, .slot = 4},
    {.kind = OP_OPEN, .slot = 0},
    {.kind = OP_RESERVE, .slot = 0, .layer = 0, .pos = 0, .n = 24, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 0, .layer = 0, .pos = 0, .n = 24},
    {.kind = OP_CLOSE, .slot = 1},
    {.kind = OP_OPEN, .slot = 4},
    {.kind = OP_RESERVE, .slot = 4, .layer = 0, .pos = 0, .n = 24, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 0, .pos = 0, .n = 24},
    {.kind = OP_RECOVER},
#if M_WINDOW > 0
    /* blocks that nobody sees go, are shared, go again from one of two, and a truncation to the
     * kept ones ends the hole */
    {.kind = OP_CLOSE, .slot = 0},
    {.kind = OP_RESERVE, .slot = 4, .layer = 1, .pos = 0, .n = 18, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 1, .pos = 0, .n = 18},
    {.kind = OP_RESERVE, .slot = 4, .layer = 1, .pos = 18, .n = 4, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 1, .pos = 18, .n = 4},
    {.kind = OP_RESERVE, .slot = 4, .layer = 0, .pos = 14, .n = 8, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 0, .pos = 14, .n = 8},
    {.kind = OP_UNSEEN, .slot = 4},
    {.kind = OP_CLOSE, .slot = 2},
    {.kind = OP_RESIZE, .n = 5},
    {.kind = OP_RESIZE, .n = 14},
    {.kind = OP_FORK, .slot = 4, .to_slot = 1, .n = 20},
    {.kind = OP_RESERVE, .slot = 4, .layer = 0, .pos = 20, .n = 4, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 0, .pos = 20, .n = 4},
    {.kind = OP_UNSEEN, .slot = 4},
    {.kind = OP_RECOVER},
    {.kind = OP_TRUNCATE, .slot = 4, .n = 2},
    {.kind = OP_CLOSE, .slot = 1},
    /* one that comes with its hole, which becomes longer */
    {.kind = OP_CLOSE, .slot = 4},
    {.kind = OP_OPEN, .slot = 4},
    {.kind = OP_RESERVE, .slot = 4, .layer = 0, .pos = 0, .n = 4, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 0, .pos = 0, .n = 4},
    {.kind = OP_RESERVE, .slot = 4, .layer = 1, .pos = 0, .n = 4, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 1, .pos = 0, .n = 4},
    {.kind = OP_FREE_TO, .slot = 4, .pos = M_KEPT_BLOCKS, .n = 3},
    {.kind = OP_RESERVE,
     .slot = 4,
     .layer = 0,
     .pos = 12,
     .n = 8,
     .will_commit = true,
     .is_copied = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 0, .pos = 12, .n = 8},
    {.kind = OP_RESERVE,
     .slot = 4,
     .layer = 1,
     .pos = 12,
     .n = 5,
     .will_commit = true,
     .is_copied = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 1, .pos = 12, .n = 5},
    {.kind = OP_FREE_TO, .slot = 4, .pos = M_KEPT_BLOCKS, .n = 4},
    {.kind = OP_RECOVER},
    {.kind = OP_TRUNCATE, .slot = 4, .n = 2},
#elif M_PAGES == 0
    /* of a pool that shrinks, a sequence's own, shared and published blocks are moved; then cached
     * ones, as far as they are not evicted */
    {.kind = OP_CLOSE, .slot = 0},
    {.kind = OP_CLOSE, .slot = 2},
    {.kind = OP_RESERVE, .slot = 4, .layer = 1, .pos = 0, .n = 24, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 1, .pos = 0, .n = 24},
    {.kind = OP_TOKENS, .slot = 4, .pos = 0, .n = 11},
    {.kind = OP_FORK, .slot = 4, .to_slot = 1, .n = 20},
    {.kind = OP_RESERVE, .slot = 1, .layer = 0, .pos = 20, .n = 2, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 1, .layer = 0, .pos = 20, .n = 2},
    {.kind = OP_FORK, .slot = 4, .to_slot = 2, .n = 14},
    {.kind = OP_RESIZE, .n = 8},
    {.kind = OP_RESIZE, .n = 14},
    {.kind = OP_OPEN, .slot = 0},
    {.kind = OP_RESERVE, .slot = 0, .layer = 0, .pos = 0, .n = 24, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 0, .layer = 0, .pos = 0, .n = 24},
    {.kind = OP_CLOSE, .slot = 1},
    {.kind = OP_CLOSE, .slot = 2},
    {.kind = OP_CLOSE, .slot = 4},
    {.kind = OP_RESIZE, .n = 8},
    {.kind = OP_RESIZE, .n = 7},
    {.kind = OP_RESIZE, .n = 9},
    {.kind = OP_RECOVER},
    {.kind = OP_RESIZE, .n = 14},
#endif
#if M_PAGES > 0
    /* blocks go, some of them in two parts, come back, and are released while they are paged out
     * and on their way */
    {.kind = OP_MOVE_OUT, .slot = 4, .n = 4},
    {.kind = OP_MOVE_END, .slot = 4, .will_commit = true},
    {.kind = OP_CLOSE, .slot = 0},
    {.kind = OP_RESIZE, .n = 6}, /* what is not paged out moves */
    {.kind = OP_RESIZE, .n = 14},
    {.kind = OP_MOVE_OUT, .slot = 4, .n = 6},
    {.kind = OP_MOVE_END, .slot = 4, .will_commit = true},
    {.kind = OP_RECOVER},
    {.kind = OP_MOVE_IN, .slot = 4, .n = 3},
    {.kind = OP_MOVE_END, .slot = 4, .will_commit = true},
    {.kind = OP_TRUNCATE, .slot = 4, .n = 14},
    {.kind = OP_MOVE_IN, .slot = 4, .n = 6},
    {.kind = OP_TRUNCATE, .slot = 4, .n = 13},
    {.kind = OP_MOVE_END, .slot = 4, .will_commit = true},
    {.kind = OP_MOVE_OUT, .slot = 4, .n = 6},
    {.kind = OP_ADOPT, .slot = 4, .owner = 1},
    {.kind = OP_MOVE_END, .slot = 4, .will_commit = true},
    /* entries that are named come and go beside appends, one to a
     * block that is on its way out */
    {.kind = OP_MOVE_IN, .slot = 4, .n = 1, .listed = M_LISTED | 3},
    {.kind = OP_MOVE_END, .slot = 4, .will_commit = true},
    {.kind = OP_RESERVE, .slot = 4, .layer = 0, .pos = 13, .n = 3, .will_commit = true},
    {.kind = OP_MOVE_IN, .slot = 4, .n = 2, .listed = M_LISTED | 1 | 2 << 3},
    {.kind = OP_COMMIT, .slot = 4, .layer = 0, .pos = 13, .n = 3},
    {.kind = OP_MOVE_END, .slot = 4, .will_commit = true},
    {.kind = OP_MOVE_OUT, .slot = 4, .n = 2, .listed = M_LISTED | 2 | 1 << 3},
    {.kind = OP_RESERVE, .slot = 4, .layer = 0, .pos = 5, .n = 1, .will_commit = true},
    {.kind = OP_MOVE_END, .slot = 4, .will_commit = true},
    {.kind = OP_COMMIT, .slot = 4, .layer = 0, .pos = 5, .n = 1},
    {.kind = OP_RESERVE, .slot = 4, .layer = 0, .pos = 16, .n = 6},
    {.kind = OP_RECOVER},
    {.kind = OP_CLOSE, .slot = 4},
#endif
};
#define N_SCRIPT (sizeof script / sizeof script[0])

/* Other runs have random operations alone, of an empty pool. */
static uint32_t first_op(uint64_t seed)
{
    return seed == 1 ? 0 : N_SCRIPT;
}

static void child_run(struct kv *kv, uint64_t seed)
{
    static struct test_fx t;
    uint64_t random = seed * UINT64_C(0x9e3779b97f4a7c15);
    model_device = &stage->device;
    for (uint32_t i = first_op(seed); i < N_OPS; i++) {
        stage->op = i < N_SCRIPT ? script[i] : model_op(&stage->before, &random);
        if (i < N_SCRIPT)
            stage->op.value_seed = (uint32_t)seed * 6; /* a failed batch copies none of 1, 2, 3 */
        stage->after = stage->before;
        stage->expected = model_apply(&stage->after, &stage->op);
        stage->number = kv_events_number(kv);
        test_fx_reset(&t);
        raise(SIGUSR1); /* stepped from here */
        stage->status = model_kv_apply(kv, &stage->op, &t, NULL);
        const char *wrong =
            stage->status == ATTN_OK ? model_learn(&stage->after, kv, &stage->op) : "";
        if (wrong[0] != '\0')
            stage->status = ATTN_EINTERNAL;
        raise(SIGUSR2); /* to here */
        snprintf(stage->error, sizeof stage->error, "%s", kv_last_error(kv));
        if (stage->status == ATTN_OK && (stage->op.kind == OP_RESERVE || stage->op.kind == OP_TREE))
            model_device_run(&stage->device, kv, &stage->after, &stage->op, &t);
        stage->before = stage->after;
        stage->n_moved = model_n_moved;
    }
}

/* A commit lets its copies stand one by one before it moves the length; blocks go to idle memory
 * and come back one by one. */
static bool is_piecemeal(enum op_kind kind)
{
    return kind == OP_COMMIT || kind == OP_MOVE_END;
}

/* Opens a copy of the arena as it is now. must_be: NULL, or the only state allowed. */
static void check_state(uint64_t seed, uint32_t i, const struct model *must_be)
{
    memcpy(last, arena, arena_bytes);
    if (pwrite(copy_fd, last, arena_bytes, 0) != (ssize_t)arena_bytes)
        fail_msg("cannot write the copy");
    struct kv *kv = test_kv_open(&model_config, copy_fd);
    struct kv_stats stats;
    kv_stats_read(kv, &stats);
    struct model before = stage->before, after = stage->after;
    model_recover(&before);
    model_recover(&after);
    char text[2][256] = {"", ""};
    if (kv_check(kv) != ATTN_OK)
        fail_msg("seed %llu op %u, %s: kv_check: %s", (unsigned long long)seed, i,
                 op_text(&stage->op), kv_last_error(kv));
    /* A commit lets its copies stand one by one before it moves the length. A pool that shrinks
     * has shared blocks in two places meanwhile. */
    snprintf(text[0], sizeof text[0], "%s",
             (is_piecemeal(stage->op.kind) || stage->op.kind == OP_RESIZE) && must_be == NULL
                 ? model_visible_difference(kv, &before, &stage->device)
                 : model_difference(kv, &before, &stage->device));
    snprintf(text[1], sizeof text[1], "%s", model_difference(kv, &after, &stage->device));
    const char *published =
        model_published_difference(kv, must_be == &stage->after ? &after : &before,
                                   must_be == &stage->before ? &before : &after, &stage->device);
    bool is_on_its_way = stage->op.kind == OP_MOVE_END && must_be == NULL;
    if (published[0] != '\0' && !is_on_its_way)
        fail_msg("seed %llu op %u, %s: %s", (unsigned long long)seed, i, op_text(&stage->op),
                 published);
    bool is_before = text[0][0] == '\0', is_after = text[1][0] == '\0';
    if (stats.damaged != 0 || stats.pools != 1 || (must_be == NULL && !is_before && !is_after) ||
        (must_be == &stage->before && !is_before) || (must_be == &stage->after && !is_after))
        fail_msg("seed %llu op %u, %s: %u dropped; from before: \"%s\", from after: \"%s\"",
                 (unsigned long long)seed, i, op_text(&stage->op), (unsigned)stats.damaged, text[0],
                 text[1]);
    if (kv_events_has(kv, stage->number) || kv_events_number(kv) <= stage->number)
        fail_msg("seed %llu op %u, %s: who has read event %llu goes on with a successor",
                 (unsigned long long)seed, i, op_text(&stage->op),
                 (unsigned long long)stage->number);
    n_states++;
    n_old += is_before && !is_after;
    n_new += is_after && !is_before;
    kv_close(kv);
}

/* The signal that stopped the child; 0 when it has exited well. */
static int wait_stop(pid_t child)
{
    int status;
    if (waitpid(child, &status, 0) != child)
        fail_msg("waitpid failed");
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 0;
    if (!WIFSTOPPED(status))
        fail_msg("the child ended with wait status %x", (unsigned)status);
    return WSTOPSIG(status);
}

static void step_operation(pid_t child, uint64_t seed, uint32_t i)
{
    check_state(seed, i, &stage->before);
    bool is_stepped = stage->expected == ATTN_OK && (stage->op.kind != OP_RECOVER || i < 100);
    for (int sig = SIGTRAP; is_stepped && sig != SIGUSR2; n_steps++) {
        if (sig != SIGTRAP)
            fail_msg("seed %llu op %u: the child got signal %d", (unsigned long long)seed, i, sig);
        if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) != 0)
            fail_msg("PTRACE_SINGLESTEP failed");
        sig = wait_stop(child);
        if (memcmp(arena, last, arena_bytes) != 0)
            check_state(seed, i, NULL);
    }
    if (!is_stepped) { /* refused, and then nothing may have changed */
        if (ptrace(PTRACE_CONT, child, NULL, NULL) != 0 || wait_stop(child) != SIGUSR2)
            fail_msg("seed %llu op %u: the child did not come to the end", (unsigned long long)seed,
                     i);
    }
    if (stage->status != stage->expected || (i < N_SCRIPT && stage->status != ATTN_OK))
        fail_msg("seed %llu op %u, %s: %s, not %s", (unsigned long long)seed, i,
                 op_text(&stage->op), attn_status_name(stage->status),
                 attn_status_name(stage->expected));
    check_state(seed, i, &stage->after);
}

static void run_seed(uint64_t seed)
{
    struct kv *kv = model_kv_open();
    struct stat sb;
    assert_int_equal(fstat(kv_fd(kv), &sb), 0);
    arena_bytes = (size_t)sb.st_size;
    arena = mmap(NULL, arena_bytes, PROT_READ, MAP_SHARED, kv_fd(kv), 0);
    assert_true(arena != MAP_FAILED);
    last = calloc(1, arena_bytes);
    copy_fd = memfd_create("copy", MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(copy_fd, sb.st_size), 0);
    memset(stage, 0, sizeof *stage);

    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
            _exit(77);
        child_run(kv, seed);
        _exit(0);
    }
    uint32_t i = first_op(seed);
    for (int sig = wait_stop(child); sig != 0; sig = wait_stop(child)) {
        if (sig == SIGUSR1)
            step_operation(child, seed, i++);
        if (ptrace(PTRACE_CONT, child, NULL, NULL) != 0)
            fail_msg("PTRACE_CONT failed");
    }
    assert_int_equal(i, N_OPS);
    n_moved += stage->n_moved;
    free(last);
    munmap(arena, arena_bytes);
    close(copy_fd);
    kv_close(kv);
}

static void a_kill_at_any_instruction_leaves_the_state_before_or_after(void **state)
{
    (void)state;
    stage = mmap(NULL, sizeof *stage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(stage != MAP_FAILED);
    for (uint64_t seed = 1; seed <= n_seeds; seed++)
        run_seed(seed);
    munmap(stage, sizeof *stage);
    print_message("%llu steps, %llu states recovered: %llu from before, %llu from after\n",
                  (unsigned long long)n_steps, (unsigned long long)n_states,
                  (unsigned long long)n_old, (unsigned long long)n_new);
    assert_true(n_old > N_OPS && n_new > N_OPS && (M_PAGES > 0 || n_moved > 1));
}

static bool may_trace(void)
{
    int status = 0;
    pid_t child = fork();
    if (child == 0)
        _exit(ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0 && raise(SIGUSR1) == 0 ? 0 : 77);
    bool may = child > 0 && waitpid(child, &status, 0) == child && WIFSTOPPED(status);
    if (may)
        may = ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0;
    if (child > 0 && WIFSTOPPED(status)) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
    }
    return may;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        n_seeds = strtoull(argv[1], NULL, 10);
    if (!may_trace()) {
        fprintf(stderr, "skipped: this system does not let a process trace its child\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_kill_at_any_instruction_leaves_the_state_before_or_after),
    };
    return cmocka_run_group_tests_name("kv_kill", tests, NULL, NULL);
}
