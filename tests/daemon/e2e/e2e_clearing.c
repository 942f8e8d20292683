/* e2e_clearing.c: what a tenant's dropped pool leaves in the KV memory is gone before another
 * tenant has its place, in the same process and in a successor after SIGKILL. The memory itself is
 * looked at: the keeper of the real daemon has its descriptor.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/certs.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { N_TOKENS = 40, FEW_BLOCKS = 24, MANY_BLOCKS = 60 };
enum { ROW_BYTES = 2 * E2E_KV_HEADS * E2E_DIM * 4, ALL_ROWS = E2E_LAYERS * N_TOKENS };

static struct e2e d;

/* Words that are not 0 in all KV memory that the keeper holds. */
static uint64_t n_words_left(void)
{
    uint64_t n = 0;
    uint32_t n_memories = 0;
    for (int fd = 0; fd < 64; fd++) {
        char path[64], target[64] = "";
        struct stat sb;
        snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)d.pid, fd);
        if (readlink(path, target, sizeof target - 1) < 0 ||
            strncmp(target, "/memfd:attnd-kv ", 16) != 0)
            continue;
        int copy = open(path, O_RDONLY | O_CLOEXEC);
        assert_int_equal(fstat(copy, &sb), 0);
        const uint32_t *words = mmap(NULL, (size_t)sb.st_size, PROT_READ, MAP_SHARED, copy, 0);
        assert_ptr_not_equal(words, MAP_FAILED);
        for (size_t i = 0; i < (size_t)sb.st_size / sizeof *words; i++)
            n += words[i] != 0;
        munmap((void *)(uintptr_t)words, (size_t)sb.st_size);
        close(copy);
        n_memories++;
    }
    assert_true(n_memories > 0);
    return n;
}

static void enter(struct e2e_client *c, const char *tenant)
{
    char name[64], token[256] = "";
    snprintf(name, sizeof name, "%s.token", tenant);
    char *path = certs_file(CERTS_GOOD, name);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_non_null(fgets(token, sizeof token, f));
    fclose(f);
    free(path);
    token[strcspn(token, "\n")] = '\0';
    e2e_connect_tls(c, &d);
    assert_int_equal(e2e_hello(c, token)->status, ATTN_OK);
}

/* A tenant writes into a pool of its own. */
static void write_rows(const char *tenant)
{
    static struct e2e_seq s;
    struct e2e_client c;
    enter(&c, tenant);
    e2e_make_pool(&c, ATTN_F32, FEW_BLOCKS);
    assert_int_equal(e2e_open_seq(&c, &s, 7, 1), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        struct e2e_item it = {&s, 0, N_TOKENS};
        e2e_step(&c, layer, &it, 1);
    }
    assert_int_equal(e2e_close_seq(&c, &s), ATTN_OK);
    e2e_disconnect(&c);
}

static void drop_pool(const char *tenant)
{
    struct e2e_client c;
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolDrop drop = ATTND__POOL_DROP__INIT;
    e2e_connect_badly(&c, &d, 0);
    drop.tenant = (char *)(uintptr_t)tenant;
    drop.name = (char *)(uintptr_t) "e2e";
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_DROP;
    h.pool_drop = &drop;
    const Attnd__Reply *r = e2e_call(&c, &h);
    if (r->status != ATTN_OK)
        fail_msg("%s", r->message);
    e2e_disconnect(&c);
}

static void begin(void)
{
    char *tenants = certs_file(CERTS_GOOD, "tenants.conf");
    const char *const flags[] = {"--supervise", "--listen.tenants", tenants, NULL};
    e2e_start(&d, flags);
    free(tenants);
    write_rows("alpha");
    assert_true(n_words_left() > ALL_ROWS * ROW_BYTES / 4 * 9 / 10);
    drop_pool("alpha");
}

static void another_tenant_gets_memory_without_what_was_left(void **state)
{
    struct e2e_client c;
    (void)state;
    begin();
    enter(&c, "beta");
    e2e_make_pool(&c, ATTN_F32, MANY_BLOCKS);
    assert_int_equal(n_words_left(), 0);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void nor_has_a_pool_that_grows_into_it(void **state)
{
    struct e2e_client c;
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__PoolResize resize = ATTND__POOL_RESIZE__INIT;
    (void)state;
    char *tenants = certs_file(CERTS_GOOD, "tenants.conf");
    const char *const flags[] = {"--supervise", "--listen.tenants", tenants, NULL};
    e2e_start(&d, flags);
    free(tenants);
    enter(&c, "beta");
    e2e_make_pool(&c, ATTN_F32, 8);
    write_rows("alpha"); /* behind it */
    drop_pool("alpha");
    assert_true(n_words_left() > ALL_ROWS * ROW_BYTES / 4 * 9 / 10);
    resize.name = "e2e";
    resize.n_blocks = MANY_BLOCKS;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_POOL_RESIZE;
    h.pool_resize = &resize;
    const Attnd__Reply *r = e2e_call(&c, &h);
    if (r->status != ATTN_OK)
        fail_msg("%s", r->message);
    assert_int_equal(n_words_left(), 0);
    resize.tenant = "alpha"; /* which is another's */
    r = e2e_call(&c, &h);
    assert_int_equal(r->status, ATTN_EAUTH);
    assert_non_null(strstr(r->message, "pool_resize.tenant is alpha: only root"));
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void nor_does_a_successor_give_it_away(void **state)
{
    struct e2e_client c;
    (void)state;
    begin();
    e2e_kill_child(&d);
    e2e_await_log(&d, "kept: ");
    enter(&c, "beta");
    e2e_make_pool(&c, ATTN_F32, FEW_BLOCKS); /* the same place and size, and another's */
    assert_int_equal(n_words_left(), 0);
    e2e_disconnect(&c);
    write_rows("beta");
    e2e_stop(&d);
}

int main(void)
{
    setenv("E2E_TRANSPORT", "tls", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_tenant_gets_memory_without_what_was_left),
        cmocka_unit_test(nor_has_a_pool_that_grows_into_it),
        cmocka_unit_test(nor_does_a_successor_give_it_away),
    };
    return cmocka_run_group_tests_name("clearing", tests, NULL, NULL);
}
