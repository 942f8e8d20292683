/* test_engine_tiers.c: blocks on their way between pools, host memory and the file: who waits for
 * them and who does not, and what fails. The rig compares every patch with the tables, and holds
 * moves back until it is told to let them come; the file is a real one, whose reads and writes fail
 * where the test says.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/engine/tier/disk.h"
#include "daemon/engine/tier/mover.h"
#include "daemon/engine/tier/tier.h"
#include "tests/daemon/engine/engine_rig.h"

enum {
    PER_SEQ = 5,
    N_IDS = PER_SEQ * RIG_BLOCK_TOKENS,
    ALL = N_IDS - RIG_BLOCK_TOKENS,
    N_BLOCKS = 64
};

static struct rig r;
static uint32_t ids[N_IDS];
static uint64_t next_name = 1000;

/* The n-th read or write from now on fails, in one of these ways, and all behind it with
 * `stays`. */
enum fault { NO_FAULT, FAULT_EIO, FAULT_ENOSPC, FAULT_SHORT, FAULT_FLIP };
static _Atomic int fault, calls_left, n_faults;
static bool stays;

static enum fault fault_now(void)
{
    int left = atomic_fetch_sub(&calls_left, 1);
    if (fault == NO_FAULT || left > 0 || (left < 0 && !stays))
        return NO_FAULT;
    atomic_fetch_add(&n_faults, 1);
    return fault;
}

ssize_t __real_pread(int fd, void *p, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *p, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *p, size_t n, off_t at)
{
    enum fault f = fault_now();
    if (f == FAULT_EIO || f == FAULT_ENOSPC) {
        errno = EIO;
        return -1;
    }
    ssize_t got = __real_pread(fd, p, n, at);
    if (f == FAULT_FLIP && got > 0)
        ((uint8_t *)p)[7] ^= 0x10;
    return f == FAULT_SHORT ? got / 3 : got;
}

ssize_t __real_pwrite(int fd, const void *p, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *p, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *p, size_t n, off_t at)
{
    enum fault f = fault == FAULT_FLIP ? NO_FAULT : fault_now(); /* bits flip as they are read */
    if (f == FAULT_EIO || f == FAULT_ENOSPC) {
        errno = f == FAULT_EIO ? EIO : ENOSPC;
        return -1;
    }
    return __real_pwrite(fd, p, f == FAULT_SHORT ? n / 3 : n, at);
}

static void ids_make(uint32_t prompt)
{
    for (uint32_t i = 0; i < N_IDS; i++)
        ids[i] = prompt * 1000003u + i * 2654435761u;
}

static uint64_t send_open(uint64_t name, uint32_t prompt)
{
    ids_make(prompt);
    return rig_send_open_with(&r, name, &(struct kv_tokens){.ids = ids, .n = N_IDS});
}

/* Turns until the request is answered: what the file has to do takes its time. */
static const Attnd__Reply *await(uint64_t request)
{
    while (rig_reply(&r, request) == NULL) {
        rig_run(&r);
        sched_yield();
    }
    return rig_answer(&r, request);
}

/* Prompt i, computed or taken from the cache, and closed; what it began with. */
static uint32_t run_prompt(uint32_t prompt)
{
    uint64_t name = ++next_name;
    const Attnd__Reply *reply = await(send_open(name, prompt));
    assert_int_equal(reply->status, ATTN_OK);
    uint32_t n = reply->seq->cached_tokens;
    r.epoch = reply->seq->epoch;
    for (uint32_t l = 0; l < RIG_LAYERS; l++) {
        uint64_t request = rig_send_item(&r, name, l, n, N_IDS - n);
        assert_int_equal(await(request)->status, ATTN_OK);
    }
    assert_int_equal(rig_close_seq(&r, name, r.epoch), ATTN_OK);
    r.epoch = 0;
    assert_int_equal(kv_check(r.kv), ATTN_OK);
    rig_forget(&r);
    return n;
}

static struct kv_stats counts(void)
{
    struct kv_stats s;
    kv_stats_read(r.kv, &s);
    return s;
}

static void with_host(struct rig *rig)
{
    rig->cfg.host_memory_bytes = 4 << 20;
}

static void an_item_waits_for_room_and_its_batch_goes_without_it(void **state)
{
    (void)state;
    rig_open(&r, with_host);
    for (uint32_t i = 0; i < N_BLOCKS / PER_SEQ; i++)
        run_prompt(i); /* all but a few blocks are cached now */
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    assert_int_equal(rig_open_seq(&r, 2), ATTN_OK);
    assert_int_equal(rig_item(&r, 2, 0, 0, 1), ATTN_OK);
    r.backend.holds_moves = true;
    uint64_t waits = rig_send_item(&r, 1, 0, 0, 16 * RIG_BLOCK_TOKENS);
    uint64_t goes = rig_send_item(&r, 2, 0, 1, 1); /* in a block that it has */
    rig_run(&r);
    assert_null(rig_reply(&r, waits));
    assert_int_equal(rig_answer(&r, goes)->status, ATTN_OK);
    assert_true(r.backend.n_held_moves > 0);
    uint64_t n_evicted = counts().evictions;
    while (rig_reply(&r, waits) == NULL) {
        assert_true(r.backend.n_held_moves > 0);
        rig_moves_come(&r);
        rig_run(&r);
    }
    assert_int_equal(rig_answer(&r, waits)->status, ATTN_OK);
    assert_true(counts().evictions > n_evicted);
    assert_true(stats.host_waits > 0);
    r.backend.holds_moves = false;
    rig_moves_come(&r);
    rig_run(&r);
    rig_close(&r);
}

static void out_of_blocks_is_for_what_can_never_fit(void **state)
{
    (void)state;
    rig_open(&r, with_host);
    for (uint32_t i = 0; i < N_BLOCKS / PER_SEQ; i++)
        run_prompt(i);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    assert_int_equal(rig_open_seq(&r, 2), ATTN_OK);
    uint32_t n = 0; /* blocks */
    for (attn_status st; (st = rig_item(&r, 1 + n % 2, 0, n / 2 * RIG_BLOCK_TOKENS,
                                        RIG_BLOCK_TOKENS)) != ATTN_ENOBLOCKS;
         n++)
        assert_int_equal(st, ATTN_OK);
    assert_int_equal(n, N_BLOCKS);
    rig_close(&r);
}

static void what_can_never_fit_does_not_wait_for_blocks_that_go(void **state)
{
    (void)state;
    rig_open(&r, with_host);
    for (uint32_t i = 0; i < N_BLOCKS / PER_SEQ; i++)
        run_prompt(i);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    assert_int_equal(rig_open_seq(&r, 2), ATTN_OK);
    for (uint32_t n = 0; n < N_BLOCKS - 14; n++) {
        r.backend.holds_moves = n + 1 == N_BLOCKS - 14;
        assert_int_equal(rig_item(&r, 1, 0, n * RIG_BLOCK_TOKENS, RIG_BLOCK_TOKENS), ATTN_OK);
    }
    uint64_t fits = rig_send_item(&r, 2, 0, 0, 14 * RIG_BLOCK_TOKENS);
    rig_run(&r);
    assert_true(r.backend.n_held_moves > 0);
    assert_null(rig_reply(&r, fits));
    assert_int_equal(rig_open_seq(&r, 3), ATTN_OK);
    uint64_t never = rig_send_item(&r, 3, 0, 0, 15 * RIG_BLOCK_TOKENS);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, never)->status, ATTN_ENOBLOCKS);
    r.backend.holds_moves = false;
    while (rig_reply(&r, fits) == NULL) {
        rig_moves_come(&r);
        rig_run(&r);
    }
    assert_int_equal(rig_answer(&r, fits)->status, ATTN_OK);
    rig_close(&r);
}

static void an_open_waits_for_its_blocks_and_others_do_not(void **state)
{
    (void)state;
    rig_open(&r, with_host);
    for (uint32_t i = 0; i < 20; i++)
        run_prompt(i);
    r.backend.holds_moves = true;
    uint64_t first = send_open(1, 0), same = send_open(2, 0), other = send_open(3, 19);
    uint64_t fresh = send_open(4, 500);
    rig_run(&r);
    assert_null(rig_reply(&r, first));
    assert_null(rig_reply(&r, same)); /* it waits for the same blocks */
    assert_int_equal(rig_answer(&r, other)->seq->cached_tokens, ALL); /* on the device */
    assert_int_equal(rig_answer(&r, fresh)->seq->cached_tokens, 0);
    assert_int_equal(kv_check(r.kv), ATTN_OK); /* in the middle of it, too */
    uint32_t n_written = r.backend.n_written;
    while (rig_reply(&r, same) == NULL) {
        rig_moves_come(&r);
        rig_run(&r);
    }
    assert_int_equal(rig_answer(&r, first)->seq->cached_tokens, ALL);
    assert_int_equal(rig_answer(&r, same)->seq->cached_tokens, ALL);
    assert_int_equal(r.backend.n_written, n_written); /* moved once */
    r.backend.holds_moves = false;
    rig_moves_come(&r);
    rig_run(&r);
    rig_close(&r);
}

static void an_open_waits_until_what_makes_way_has_a_copy(void **state)
{
    enum { N = 6 };
    uint64_t request[N];
    (void)state;
    rig_open(&r, with_host);
    for (uint32_t i = 0; i < 20; i++)
        run_prompt(i);
    r.backend.holds_moves = true;
    r.backend.n_read_now = 0;
    for (uint32_t i = 0; i < N; i++) /* more blocks than were copied ahead */
        request[i] = send_open(1 + i, i);
    rig_run(&r);
    uint64_t fresh = send_open(100, 500); /* nothing of it is elsewhere: it does not wait */
    rig_run(&r);
    assert_int_equal(rig_answer(&r, fresh)->seq->cached_tokens, 0);
    for (uint32_t i = 0; i < N; i++) {
        while (rig_reply(&r, request[i]) == NULL) {
            assert_true(r.backend.n_held_moves > 0);
            rig_moves_come(&r);
            rig_run(&r);
        }
        assert_int_equal(rig_answer(&r, request[i])->seq->cached_tokens, ALL);
        assert_int_equal(kv_check(r.kv), ATTN_OK);
    }
    assert_int_equal(r.backend.n_read_now, 0);
    r.backend.holds_moves = false;
    rig_moves_come(&r);
    rig_run(&r);
    for (uint32_t i = 20 - N; i < 20; i++) /* what has made way is elsewhere */
        assert_int_equal(run_prompt(i), ALL);
    rig_close(&r);
}

/* The tokens are computed anew, or the open is refused when its time is over; a promotion that
 * nobody waits for any more is finished all the same. */
static void an_open_whose_blocks_do_not_come_in_time_is_refused(void **state)
{
    (void)state;
    rig_open(&r, with_host);
    for (uint32_t i = 0; i < 20; i++)
        run_prompt(i);
    r.backend.holds_moves = true;
    uint64_t request = send_open(1, 0);
    rig_run(&r);
    assert_null(rig_reply(&r, request));
    rig_now_ns += r.cfg.max_timeout_us * 1000 + 1;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, request)->status, ATTN_EDEADLINE);
    rig_moves_come(&r);
    rig_run(&r);
    r.backend.holds_moves = false;
    assert_int_equal(kv_check(r.kv), ATTN_OK);
    assert_int_equal(run_prompt(0), ALL);
    rig_close(&r);
}

static void what_is_on_its_way_at_the_end_is_waited_for(void **state)
{
    (void)state;
    rig_open(&r, with_host);
    for (uint32_t i = 0; i < 20; i++)
        run_prompt(i);
    r.backend.holds_moves = true;
    uint64_t request = send_open(1, 0);
    rig_run(&r);
    assert_null(rig_reply(&r, request));
    r.backend.holds_moves = false;
    rig_moves_come(&r); /* done, and not looked at */
    rig_close(&r);
}

/* --- the file --------------------------------------------------------------------------------- */

static char folder[] = "/tmp/attnd-tiers.XXXXXX";

static void with_disk(struct rig *rig)
{
    rig->cfg.host_memory_bytes = 128 << 10; /* 32 places */
    rig->cfg.disk_path = folder;
    rig->cfg.disk_bytes = 8 << 20;
}

/* So many prompts that most are only in the file; whether any came from there. */
static void many_prompts(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        run_prompt(i);
        do { /* the file catches up */
            rig_run(&r);
            sched_yield();
        } while (r.engine->tier.spill.group.is_under_way ||
                 r.engine->tier.demote.group.is_under_way);
        assert_null(tier_store_check(r.engine->tier.blocks));
        assert_null(tier_store_check(r.engine->tier.disk_blocks));
    }
}

static void open_with_disk(void)
{
    fault = NO_FAULT;
    n_faults = 0;
    rig_open(&r, with_disk);
}

static void what_host_memory_has_no_room_for_comes_back_from_the_file(void **state)
{
    (void)state;
    open_with_disk();
    many_prompts(30); /* 150 blocks; 64 on the device, half as many in host memory */
    assert_true(stats.disk_out_bytes > 0);
    uint32_t n_hits = 0;
    for (uint32_t i = 0; i < 30; i++)
        n_hits += run_prompt(i) != 0;
    assert_true(n_hits > 0);
    assert_true(stats.disk_in_bytes > 0);
    rig_close(&r);
}

enum { UID = 5000, HOST_QUOTA = 10 * 4096, DISK_QUOTA = 20 * 4096 };

static void with_quotas(struct rig *rig)
{
    char path[64], why[256];
    snprintf(path, sizeof path, "/tmp/attnd_tiers_%ld", (long)getpid());
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fchmod(fileno(f), 0600), 0);
    fprintf(f, "[t]\nusers = %d\nhost_bytes = %d\ndisk_bytes = %d\n", UID, HOST_QUOTA, DISK_QUOTA);
    fclose(f);
    if (tenants_open(path, &rig->fixture.tenants, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    unlink(path);
    rig->principal = (struct principal){.kind = PRINCIPAL_USER, .uid = UID};
    with_disk(rig);
}

/* Some moves fail: what they were charged comes back, too. */
static void a_tenant_has_its_quotas_of_host_memory_and_of_the_file_and_no_more(void **state)
{
    static const enum fault kinds[] = {NO_FAULT, FAULT_EIO, NO_FAULT, FAULT_SHORT, FAULT_FLIP};
    (void)state;
    fault = NO_FAULT;
    stays = false;
    n_faults = 0;
    rig_open(&r, with_quotas);
    const struct tenant *who = tenants_find(r.engine->env.tenants, "t");
    uint64_t most[2] = {0};
    assert_non_null(who);
    for (uint32_t i = 0; i < 40; i++) {
        rig_now_ns += 2000000000; /* what has failed is tried again */
        calls_left = i % 3;
        fault = kinds[i % 5];
        many_prompts(1 + i % 30); /* from the first on: some come back */
        const enum tenant_quota of[2] = {TENANT_HOST_BYTES, TENANT_DISK_BYTES};
        for (int q = 0; q < 2; q++)
            most[q] = who->used[of[q]] > most[q] ? who->used[of[q]] : most[q];
        assert_in_range(who->used[TENANT_HOST_BYTES], 0, HOST_QUOTA);
        assert_in_range(who->used[TENANT_DISK_BYTES], 0, DISK_QUOTA);
    }
    fault = NO_FAULT;
    assert_int_equal(most[0], HOST_QUOTA);
    assert_int_equal(most[1], DISK_QUOTA);
    assert_true(stats.disk_in_bytes > 0);
    assert_true(n_faults > 5);
    mover_drain(r.engine, NULL);
    tier_forget_pool(r.engine, r.engine->pools[0].id);
    assert_int_equal(who->used[TENANT_HOST_BYTES], 0);
    assert_int_equal(who->used[TENANT_DISK_BYTES], 0);
    struct tenants *t = r.fixture.tenants;
    rig_close(&r);
    tenants_close(t);
}

/* Each kind of failure, at each of the first calls, once and from then on: nothing but blocks is
 * lost. */
static void the_file_fails_at_each_turn(void **state)
{
    static const enum fault kinds[] = {FAULT_EIO, FAULT_ENOSPC, FAULT_SHORT, FAULT_FLIP};
    (void)state;
    uint64_t n_damaged = 0, n_errors = 0, n_all_faults = 0;
    for (uint32_t k = 0; k < 4; k++)
        for (int n = 0; n < 16; n = n * 2 + 1) {
            open_with_disk();
            calls_left = n;
            stays = n % 4 == 3;
            fault = kinds[k];
            for (uint32_t round = 0; round < 2; round++)
                many_prompts(24);
            rig_run(&r);
            if (kinds[k] == FAULT_FLIP) {
                assert_int_equal(stats.disk_errors, 0);
                n_damaged += stats.host_damaged;
            } else {
                assert_int_equal(stats.host_damaged, 0);
                n_errors += stats.disk_errors;
            }
            n_all_faults += (uint64_t)n_faults;
            rig_close(&r);
        }
    assert_true(n_all_faults > 0 && n_damaged > 0 && n_errors > 0);
    print_message("%llu faults, %llu blocks damaged, %llu errors\n",
                  (unsigned long long)n_all_faults, (unsigned long long)n_damaged,
                  (unsigned long long)n_errors);
}

static void a_file_that_cannot_be_had_is_refused_by_its_setting(void **state)
{
    (void)state;
    struct tier_disk *d = NULL;
    char why[256];
    assert_int_equal(tier_disk_open("/nonexistent/folder", 1 << 20, &d, why, sizeof why),
                     ATTN_EINVAL);
    assert_non_null(strstr(why, "cache.disk_path = /nonexistent/folder: "));
    assert_int_equal(tier_disk_open(folder, UINT64_C(1) << 62, &d, why, sizeof why), ATTN_EINVAL);
    assert_non_null(strstr(why, "cache.disk_size: "));
    assert_null(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_item_waits_for_room_and_its_batch_goes_without_it),
        cmocka_unit_test(out_of_blocks_is_for_what_can_never_fit),
        cmocka_unit_test(what_can_never_fit_does_not_wait_for_blocks_that_go),
        cmocka_unit_test(an_open_waits_for_its_blocks_and_others_do_not),
        cmocka_unit_test(an_open_waits_until_what_makes_way_has_a_copy),
        cmocka_unit_test(an_open_whose_blocks_do_not_come_in_time_is_refused),
        cmocka_unit_test(what_is_on_its_way_at_the_end_is_waited_for),
        cmocka_unit_test(what_host_memory_has_no_room_for_comes_back_from_the_file),
        cmocka_unit_test(a_tenant_has_its_quotas_of_host_memory_and_of_the_file_and_no_more),
        cmocka_unit_test(the_file_fails_at_each_turn),
        cmocka_unit_test(a_file_that_cannot_be_had_is_refused_by_its_setting),
    };
    if (mkdtemp(folder) == NULL)
        return 1;
    int n = cmocka_run_group_tests_name("engine_tiers", tests, NULL, NULL);
    return rmdir(folder) == 0 ? n : 1; /* nothing is left there */
}
