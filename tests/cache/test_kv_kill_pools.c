/* test_kv_kill_pools.c: kills like those of test_kv_kill.c, for what that test leaves out: creating
 * and dropping pools, owners, retention, and blocks that come back from a tier.
 *
 * A child runs the steps below on an arena that this process also maps, and is stepped instruction
 * by instruction. Whenever a step has changed a byte of the arena, a copy is opened as a successor
 * would open it: kv_check must pass, nothing may be damaged, and pools, owners and sequences must
 * be those from before or after the step. Skipped where tracing is not allowed.
 */
#define _GNU_SOURCE
#include "tests/cache/kv_test.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/kv_internal.h"

enum { BLOCK_TOKENS = 4, TOKENS = 17, N_VIEWS = 4096, VIEW_BYTES = 2048 };

static const struct kv_config config = {.max_pools = 3,
                                        .max_blocks = 24,
                                        .max_sequences = 4,
                                        .max_seq_blocks = 8,
                                        .max_seq_tokens = 32,
                                        .max_block_tokens = BLOCK_TOKENS,
                                        .max_layers = 2,
                                        .max_owners = 2,
                                        .block_layout = 1};
static uint32_t ids[TOKENS];
static struct test_fx t;
static uint64_t next_serial = 1;
static uint32_t answered_value;

static kv_pool_id pool_named(struct kv *kv, const char *name)
{
    kv_pool_id pool = {UINT32_MAX};
    kv_pool_find(kv, 0, name, &pool);
    return pool;
}

static kv_seq_id seq_named(struct kv *kv, uint64_t name)
{
    kv_seq_id seq = {UINT32_MAX};
    kv_seq_find(kv, 0, name, &seq);
    return seq;
}

/* --- steps; of the child ---------------------------------------------------------------------- */

static void make_a(struct kv *kv)
{
    test_pool(kv, "a", 2, BLOCK_TOKENS, 8);
}

static void make_b(struct kv *kv)
{
    test_pool(kv, "b", 1, BLOCK_TOKENS, 6);
}

static void make_c(struct kv *kv)
{
    test_pool(kv, "c", 2, BLOCK_TOKENS, 7);
}

static void drop_a(struct kv *kv)
{
    kv_pool_drop(kv, pool_named(kv, "a"));
}

static void drop_c(struct kv *kv)
{
    kv_pool_drop(kv, pool_named(kv, "c"));
}

static void grow_c(struct kv *kv)
{
    kv_pool_grow(kv, pool_named(kv, "c"), 8); /* as far as b */
}

static void shrink_c(struct kv *kv)
{
    struct kv_shrink s;
    if (kv_pool_shrink_begin(kv, pool_named(kv, "c"), 2, &s) != ATTN_OK)
        return;
    kv_pool_shrink_end(kv, &s);
    kv_shrink_fini(&s);
}

static void begin_owner(struct kv *kv)
{
    kv_owner_begin(kv, 0, 4711, 0, "a worker");
}

static void begin_another(struct kv *kv)
{
    kv_owner_begin(kv, 0, 815, 0, "who follows it");
}

static void end_owner(struct kv *kv)
{
    kv_owner_end(kv, 0);
}

static void reserve(struct kv *kv)
{
    kv_reserve(kv, 0, pool_named(kv, "a"), 3);
}

static void reserve_more(struct kv *kv)
{
    kv_reserve(kv, 0, pool_named(kv, "a"), 6);
    kv_reserve(kv, 0, pool_named(kv, "a"), 9); /* refused: it has 8 */
}

static void reserve_less(struct kv *kv)
{
    kv_reserve(kv, 0, pool_named(kv, "a"), 0);
}

static void reserve_in_c(struct kv *kv)
{
    kv_reserve(kv, 0, pool_named(kv, "c"), 2);
}

static void open_in(struct kv *kv, const char *pool, uint64_t name)
{
    struct kv_tokens tokens = {.ids = ids, .n = TOKENS};
    kv_seq_id seq;
    kv_seq_open_with(kv, 0, name, pool_named(kv, pool), 0, KV_NO_REQUEST, &tokens, &t.fx, &seq);
}

static void open_in_a(struct kv *kv)
{
    open_in(kv, "a", 1);
}

static void open_in_b(struct kv *kv)
{
    open_in(kv, "b", 2);
}

static void append_to(struct kv *kv, uint64_t name, uint32_t n_layers)
{
    kv_seq_id seq = seq_named(kv, name);
    for (uint32_t l = 0; l < n_layers; l++) {
        kv_append_reserve(kv, seq, l, 0, TOKENS, &t.fx);
        kv_append_commit(kv, seq, l, 0, TOKENS);
    }
}

static void append_in_a(struct kv *kv)
{
    append_to(kv, 1, 2);
}

static void append_in_b(struct kv *kv)
{
    append_to(kv, 2, 1);
}

/* Appends that a device answers before they are committed: to a fork whose last block is copied. */
static void fork_in_a(struct kv *kv)
{
    kv_seq_id child;
    kv_seq_fork(kv, seq_named(kv, 1), 3, 10, 0, KV_NO_REQUEST, &child);
}

static void launch(struct kv *kv, uint32_t pos)
{
    kv_seq_id seq = seq_named(kv, 3);
    for (uint32_t l = 0; l < (pos == 10 ? 1 : 2); l++) { /* one that copies is alone */
        kv_append_reserve(kv, seq, l, pos, 2, &t.fx);
        kv_early_add(kv, 1, seq, l, pos, 2);
    }
    answered_value = kv_early_begin(kv, 1);
}

static void launch_at_10(struct kv *kv)
{
    launch(kv, 10);
}

static void launch_at_8(struct kv *kv)
{
    launch(kv, 8);
}

static void device_signals(struct kv *kv)
{
    size_t bytes;
    kv_publish32(&kv_early_words(kv, &bytes)[1], answered_value);
}

static void commit_at_10(struct kv *kv)
{
    kv_append_commit(kv, seq_named(kv, 3), 0, 10, 2);
    kv_early_end(kv, 1);
}

static void commit_at_8(struct kv *kv)
{
    for (uint32_t l = 0; l < 2; l++)
        kv_append_commit(kv, seq_named(kv, 3), l, 8, 2);
}

static void cancel_at_8(struct kv *kv)
{
    kv_early_end(kv, 1);
    for (uint32_t l = 0; l < 2; l++)
        kv_append_cancel(kv, seq_named(kv, 3), l, 8, 2, &t.fx);
}

static void truncate_fork(struct kv *kv)
{
    uint32_t epoch;
    kv_seq_truncate(kv, seq_named(kv, 3), 8, KV_NO_REQUEST, &epoch);
}

static void end_early(struct kv *kv)
{
    kv_early_end(kv, 1);
}

static void close_fork(struct kv *kv)
{
    kv_seq_close(kv, seq_named(kv, 3));
}

static void close_in_a(struct kv *kv)
{
    kv_seq_close(kv, seq_named(kv, 1));
}

static void retain(struct kv *kv)
{
    static const struct kv_retention r[] = {{0, 3, 60, 0}, {8, -2, 0, 0}, {12, 0, 0, 1}};
    kv_seq_retain(kv, seq_named(kv, 2), r, 3);
}

static void retain_otherwise(struct kv *kv)
{
    static const struct kv_retention r[] = {{4, 1, 5, 1}};
    kv_seq_retain(kv, seq_named(kv, 2), r, 1);
}

static bool is_in_tier(void *arg, struct kv_content *c)
{
    (void)arg;
    c->serial = next_serial++; /* as the publications of another process */
    return true;
}

static void promote_in_a(struct kv *kv)
{
    struct kv_tokens tokens = {.ids = ids, .n = TOKENS};
    kv_set_tier_ops(kv, &(struct kv_tier_ops){.find = is_in_tier});
    struct kv_promote *f = kv_promote_begin(kv, pool_named(kv, "a"), 0, 0, &tokens, 4);
    if (f != NULL)
        kv_promote_end(kv, f, 3); /* of four */
}

/* Of some of them the parts are acknowledged one by one: sequences may be seen between. */
static const struct step {
    const char *name;
    void (*run)(struct kv *kv);
    bool has_parts;
    enum { ANYTHING, STAYS, CHANGES } what; /* that is seen */
} steps[] = {
    {"make a", make_a, false, ANYTHING},
    {"an owner begins", begin_owner, false, ANYTHING},
    {"reserve in a", reserve, false, CHANGES},
    {"reserve more in a", reserve_more, false, CHANGES},
    {"reserve less in a", reserve_less, false, CHANGES},
    {"make b", make_b, false, ANYTHING},
    {"open in a", open_in_a, false, ANYTHING},
    {"append in a", append_in_a, true, ANYTHING},
    {"fork in a", fork_in_a, false, ANYTHING},
    {"launch", launch_at_10, false, STAYS},
    {"the device answers", device_signals, false, CHANGES},
    {"commit what was answered", commit_at_10, false, STAYS},
    {"truncate the fork", truncate_fork, false, ANYTHING},
    {"launch for two layers", launch_at_8, false, STAYS},
    {"cancel what was not answered", cancel_at_8, false, STAYS},
    {"launch for two layers again", launch_at_8, false, STAYS},
    {"the device answers for both", device_signals, false, CHANGES},
    {"commit both", commit_at_8, false, STAYS},
    {"truncate what was answered", truncate_fork, false, CHANGES},
    {"the batch ends", end_early, false, STAYS},
    {"close the fork", close_fork, false, ANYTHING},
    {"open in b", open_in_b, false, ANYTHING},
    {"append in b", append_in_b, true, ANYTHING},
    {"retain", retain, false, ANYTHING},
    {"retain otherwise", retain_otherwise, false, ANYTHING},
    {"drop a, which has a sequence", drop_a, false, ANYTHING},
    {"close in a", close_in_a, false, ANYTHING},
    {"drop a, which has cached blocks", drop_a, false, ANYTHING},
    {"make c where a was", make_c, false, ANYTHING},
    {"reserve in c", reserve_in_c, false, CHANGES},
    {"c grows", grow_c, false, CHANGES},
    {"c cannot grow", grow_c, false, STAYS},
    {"c shrinks", shrink_c, false, CHANGES},
    {"c grows again", grow_c, false, CHANGES},
    {"an owner ends", end_owner, false, ANYTHING},
    {"another begins", begin_another, false, ANYTHING},
    {"it reserves", reserve_in_c, false, CHANGES},
    {"drop c, of which some is reserved", drop_c, true, ANYTHING}, /* that goes first */
    {"make a again", make_a, false, ANYTHING},
    {"blocks come back", promote_in_a, false, ANYTHING},
    {"open in a with them", open_in_a, false, ANYTHING},
    {"the other one ends", end_owner, false, ANYTHING},
    {"close again", close_in_a, false, ANYTHING},
    {"drop a again", drop_a, false, ANYTHING},
};
#define N_STEPS (sizeof steps / sizeof steps[0])

/* --- what is seen; of the parent -------------------------------------------------------------- */

static uint8_t *arena, *last;
static size_t arena_bytes;
static int copy_fd;
static char (*views)[VIEW_BYTES];
static uint32_t n_views, n_states, n_steps;

static void add(char *view, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add(char *view, const char *format, ...)
{
    size_t n = strlen(view);
    va_list args;
    va_start(args, format);
    int more = vsnprintf(view + n, VIEW_BYTES - n, format, args);
    va_end(args);
    assert_true(more >= 0 && n + (size_t)more < VIEW_BYTES);
}

static void look(struct kv *kv, char *view)
{
    view[0] = '\0';
    for (uint32_t i = 0; i < config.max_pools; i++) {
        const struct kv_pool_rec *p = kv_pool_live(kv, i);
        if (p != NULL)
            add(view, "pool %u %s %u at %u; ", i, p->name, p->n_blocks, p->first_block);
    }
    for (uint32_t i = 0; i < config.max_owners; i++)
        if (kv_owner_id(kv, i) != 0)
            add(view, "owner %u %llu %s; ", i, (unsigned long long)kv_owner_id(kv, i),
                kv_owner_label(kv, i));
    for (uint32_t i = 0; i < config.max_owners * config.max_pools; i++) {
        kv_pool_id pool = {i % config.max_pools};
        if (kv_reserved(kv, i / config.max_pools, pool) > 0)
            add(view, "owner %u has reserved %u of %u; ", i / config.max_pools,
                kv_reserved(kv, i / config.max_pools, pool), pool.index);
    }
    for (kv_seq_id id = {0}; kv_seq_next(kv, UINT32_MAX, &id) == ATTN_OK; id.index++) {
        struct kv_seq_info info;
        kv_seq_info(kv, id, &info);
        add(view, "seq %llu in %u: %u ids, tokens %u %u, blocks", (unsigned long long)info.name,
            info.pool.index, info.n_ids, info.layer_len[0], info.layer_len[1]);
        for (uint32_t i = 0; i < info.n_blocks; i++)
            add(view, " %u", info.block_table[i]);
        add(view, "; ");
    }
}

/* Opens a copy of the arena as it is now. */
static void see(const struct step *s)
{
    memcpy(last, arena, arena_bytes);
    if (pwrite(copy_fd, last, arena_bytes, 0) != (ssize_t)arena_bytes)
        fail_msg("cannot write the copy");
    struct kv *kv = test_kv_open(&config, copy_fd);
    struct kv_stats stats;
    kv_stats_read(kv, &stats);
    if (kv_check(kv) != ATTN_OK)
        fail_msg("%s: kv_check: %s", s->name, kv_last_error(kv));
    if (stats.damaged != 0)
        fail_msg("%s: %u damaged", s->name, (unsigned)stats.damaged);
    assert_true(n_views < N_VIEWS);
    look(kv, views[n_views]);
    n_views += n_views == 0 || strcmp(views[n_views], views[n_views - 1]) != 0;
    n_states++;
    kv_close(kv);
}

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

static void follow(pid_t child, const struct step *s)
{
    n_views = 0;
    see(s);
    for (int sig = SIGTRAP; sig != SIGUSR2; n_steps++) {
        if (sig != SIGTRAP)
            fail_msg("%s: the child got signal %d", s->name, sig);
        if (ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) != 0)
            fail_msg("PTRACE_SINGLESTEP failed");
        sig = wait_stop(child);
        if (memcmp(arena, last, arena_bytes) != 0)
            see(s);
    }
    see(s);
    const char *before = views[0], *after = views[n_views - 1];
    for (uint32_t i = 0; i < n_views && !s->has_parts; i++)
        if (strcmp(views[i], before) != 0 && strcmp(views[i], after) != 0)
            fail_msg("%s: \"%s\" is neither \"%s\" nor \"%s\"", s->name, views[i], before, after);
    if (s->what != ANYTHING && (strcmp(before, after) != 0) != (s->what == CHANGES))
        fail_msg("%s: \"%s\", then \"%s\"", s->name, before, after);
}

static void a_kill_leaves_pools_and_owners_as_before_or_after(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < TOKENS; i++)
        ids[i] = i * 2654435761u;
    struct kv *kv = test_kv_open(&config, -1);
    struct stat sb;
    assert_int_equal(fstat(kv_fd(kv), &sb), 0);
    arena_bytes = (size_t)sb.st_size;
    arena = mmap(NULL, arena_bytes, PROT_READ, MAP_SHARED, kv_fd(kv), 0);
    assert_true(arena != MAP_FAILED);
    last = calloc(1, arena_bytes);
    views = calloc(N_VIEWS, sizeof *views);
    copy_fd = memfd_create("copy", MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(copy_fd, sb.st_size), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
            _exit(77);
        for (size_t i = 0; i < N_STEPS; i++) {
            test_fx_reset(&t);
            raise(SIGUSR1); /* stepped from here */
            steps[i].run(kv);
            raise(SIGUSR2); /* to here */
        }
        _exit(0);
    }
    size_t i = 0;
    for (int sig = wait_stop(child); sig != 0; sig = wait_stop(child)) {
        if (sig == SIGUSR1)
            follow(child, &steps[i++]);
        if (ptrace(PTRACE_CONT, child, NULL, NULL) != 0)
            fail_msg("PTRACE_CONT failed");
    }
    assert_int_equal(i, N_STEPS);
    print_message("%u instructions, %u states recovered\n", n_steps, n_states);
    assert_true(n_states > 20 * N_STEPS);
    free(last);
    free(views);
    munmap(arena, arena_bytes);
    close(copy_fd);
    kv_close(kv);
}

int main(void)
{
    int status = 0;
    pid_t child = fork();
    if (child == 0)
        _exit(ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0 && raise(SIGUSR1) == 0 ? 0 : 77);
    bool may = child > 0 && waitpid(child, &status, 0) == child && WIFSTOPPED(status);
    if (may) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
    }
    if (!may) {
        fprintf(stderr, "skipped: this system does not let a process trace its child\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_kill_leaves_pools_and_owners_as_before_or_after),
    };
    return cmocka_run_group_tests_name("kv_kill_pools", tests, NULL, NULL);
}
