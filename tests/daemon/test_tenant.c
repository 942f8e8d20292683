/* test_tenant.c: the file of tenants, every mistake in it, and who somebody is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/credential.h"
#include "daemon/request/tenant.h"

/* of the tokens "one" and "two" */
#define ONE "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
#define TWO "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3"

static char path[64];

static const char *given_file(const char *text, mode_t mode)
{
    snprintf(path, sizeof path, "/tmp/attnd_tenants_%ld.conf", (long)getpid());
    unlink(path);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    assert_int_equal(chmod(path, mode), 0);
    return path;
}

static struct tenants *load(const char *text)
{
    struct tenants *t = NULL;
    char why[512] = "";
    if (tenants_open(given_file(text, 0600), &t, why, sizeof why) != ATTN_OK)
        fail_msg("%s", why);
    return t;
}

static void expect_mistake(const char *text, const char *part)
{
    struct tenants *t = NULL;
    char why[512] = "";
    assert_int_equal(tenants_open(given_file(text, 0600), &t, why, sizeof why), ATTN_EINVAL);
    assert_null(t);
    if (strstr(why, part) == NULL || strstr(why, path) == NULL)
        fail_msg("\"%s\" does not say \"%s\" and the file", why, part);
}

/* Whose it is; NULL: refused, and why says part. */
static struct tenant *identify(struct tenants *t, const struct principal *p, const char *token,
                               const char *part)
{
    struct tenant *who = (struct tenant *)8;
    char why[256] = "";
    attn_status st = tenants_identify(t, p, token, &who, why, sizeof why);
    assert_int_equal(st, who != NULL ? ATTN_OK : ATTN_EAUTH);
    if (strstr(why, part) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", why, part);
    return who;
}

static void every_mistake_is_named_with_its_line(void **state)
{
    (void)state;
    expect_mistake("", "names no tenant");
    expect_mistake("[a]\ntoken = x\n", ":2: [a] token is none of token_sha256, users, blocks");
    expect_mistake("[a]\nblocks = 1\n[b c]\nblocks = 1\n", ":4: [b c]: a tenant's name");
    expect_mistake("blocks = 1\n", ":1: []: a tenant's name");
    expect_mistake("[a]\ntoken_sha256 = 12\n", ":2: [a] token_sha256 is not 64 hex");
    expect_mistake("[a]\ntoken_sha256 = " ONE "0\n", "is not 64 hex");
    expect_mistake("[a]\ntoken_sha256 = x" ONE "\n", "is not 64 hex");
    expect_mistake("[a]\ntoken_sha256 = " ONE "\ntoken_sha256 = " TWO "\n", ":3: [a] token_sha256");
    expect_mistake("[a]\ntoken_sha256 = " ONE "\n[b]\ntoken_sha256 = " ONE "\n",
                   ":4: [b] token_sha256 is also that of [a]");
    expect_mistake("[a]\nusers = nobody-of-this-name\n", ":2: [a] users: there is no user");
    expect_mistake("[a]\nusers = 7\n[b]\nusers = 8 7\n", ":4: [b] users: 7 is also of [a]");
    expect_mistake("[a]\nblocks = -1\n", ":2: [a] blocks = -1 is not a whole number");
    expect_mistake("[a]\nblocks = 1K\n", "is not a whole number");
    expect_mistake("[a]\nbytes_in_flight = 64X\n", "is not a size");
    expect_mistake("[a]\nbytes_in_flight = 1\n", "[a] bytes_in_flight = 1 is less than 64K");
    expect_mistake("[a]\nbytes_in_flight = 65535\n", "65535 is less than 64K");
    expect_mistake("[a]\ntable_bytes = many\n", "table_bytes = many is not a size");
    expect_mistake("[a]\nbytes_in_flight = 99999999T\n", "is not a size");
    expect_mistake("[a]\ndisk_bytes = 1P\n", "disk_bytes = 1P is not a size");
    expect_mistake("[a]\nshare = 0\n", ":2: [a] share = 0 is not a whole number from 1 to 1000");
    expect_mistake("[a]\nshare = 1001\n", "share = 1001 is not");
    expect_mistake("[a]\nshare = 3x\n", "share = 3x is not");
    expect_mistake("[a]\nwords\n", ":2: is neither [tenant] nor key = value");
}

static void files_that_others_can_read_are_refused(void **state)
{
    (void)state;
    char why[512] = "";
    struct tenants *t = NULL;
    given_file("[a]\nblocks = 1\n", 0644);
    assert_int_equal(tenants_open(path, &t, why, sizeof why), ATTN_EINVAL);
    assert_non_null(strstr(why, "has mode 0644"));
    assert_non_null(strstr(why, path));
    assert_int_equal(tenants_open("/nowhere/t", &t, why, sizeof why), ATTN_EINVAL);
    assert_non_null(strstr(why, "/nowhere/t: No such file"));
}

static void names_are_credentials_of_systemd(void **state)
{
    (void)state;
    char why[512] = "", name[64];
    given_file("[a]\nblocks = 1\n", 0400);
    snprintf(name, sizeof name, "%s", strrchr(path, '/') + 1);
    unsetenv("CREDENTIALS_DIRECTORY");
    assert_null(credential_open(name, true, why, sizeof why));
    assert_non_null(strstr(why, "LoadCredential"));
    setenv("CREDENTIALS_DIRECTORY", "/tmp", 1);
    FILE *f = credential_open(name, true, why, sizeof why);
    unsetenv("CREDENTIALS_DIRECTORY");
    assert_non_null(f);
    fclose(f);
}

static void who_somebody_is(void **state)
{
    (void)state;
    struct tenants *t = load("[a]\ntoken_sha256 = " ONE "\nusers = 4242\n[b]\ntoken_sha256 = " TWO
                             "\n[c]\nblocks = 5\n");
    struct principal network = {.kind = PRINCIPAL_ANONYMOUS};
    struct principal user = {.kind = PRINCIPAL_USER, .uid = 4242};
    struct principal stranger = {.kind = PRINCIPAL_USER, .uid = 4243};
    struct principal root = {.kind = PRINCIPAL_USER, .uid = 0};
    struct principal cert = {.kind = PRINCIPAL_ANONYMOUS, .certificate = "c"};
    struct principal foreign = {.kind = PRINCIPAL_ANONYMOUS, .certificate = "d"};
    assert_string_equal(identify(t, &network, "one", "")->name, "a");
    assert_string_equal(identify(t, &network, "two", "")->name, "b");
    assert_null(identify(t, &network, "three", "no tenant's"));
    assert_null(identify(t, &network, "", "no token"));
    assert_string_equal(identify(t, &user, "", "")->name, "a");
    assert_string_equal(identify(t, &user, "two", "")->name, "b");
    assert_null(identify(t, &stranger, "", "uid 4243"));
    assert_true(tenant_is_operator(identify(t, &root, "", "")));
    assert_string_equal(identify(t, &cert, "", "")->name, "c");
    assert_null(identify(t, &cert, "one", "another tenant's"));
    assert_null(identify(t, &foreign, "", "\"d\""));
    tenants_close(t);

    struct tenant *who;
    char why[64];
    assert_int_equal(tenants_identify(NULL, &network, "", &who, why, sizeof why), ATTN_OK);
    assert_null(who);
}

/* The cache of one process is read by the next, whose file may have other lines. */
static void numbers_are_those_of_the_names(void **state)
{
    (void)state;
    struct tenants *t = load("[a]\nblocks = 1\n[b]\nblocks = 1\n");
    struct principal a = {.kind = PRINCIPAL_ANONYMOUS, .certificate = "a"};
    uint32_t id = tenant_id(identify(t, &a, "", ""));
    assert_int_not_equal(id, TENANT_OPERATOR);
    tenants_close(t);
    t = load("[b]\nblocks = 1\n[x]\nblocks = 3\n[a]\nblocks = 2\n");
    assert_int_equal(tenant_id(identify(t, &a, "", "")), id);
    assert_string_equal(tenants_of_id(t, id)->name, "a");
    assert_null(tenants_of_id(t, id ^ 1));
    tenants_close(t);
}

static void quotas_are_exact(void **state)
{
    (void)state;
    char why[256];
    struct tenants *t = load("[a]\nblocks = 10\nbytes_in_flight = 64K\nhost_bytes = 3M\n");
    struct principal a = {.kind = PRINCIPAL_ANONYMOUS, .certificate = "a"};
    struct tenant *who = identify(t, &a, "", "");
    assert_int_equal(tenant_take(who, TENANT_BLOCKS, 10, why, sizeof why), ATTN_OK);
    assert_int_equal(tenant_take(who, TENANT_BLOCKS, 1, why, sizeof why), ATTN_EQUOTA);
    assert_string_equal(why, "tenant a has 10 of its 10 blocks and asks for 1 more");
    assert_int_equal(tenant_left(who, TENANT_BLOCKS), 0);
    tenant_give(who, TENANT_BLOCKS, 4);
    assert_int_equal(tenant_take(who, TENANT_BLOCKS, UINT64_MAX, why, sizeof why), ATTN_EQUOTA);
    assert_int_equal(tenant_take(who, TENANT_BLOCKS, 4, why, sizeof why), ATTN_OK);
    assert_int_equal(tenant_left(who, TENANT_BYTES), 65536);
    assert_int_equal(tenant_left(who, TENANT_HOST_BYTES), 3 << 20);
    assert_true(tenant_left(who, TENANT_DISK_BYTES) == UINT64_MAX);
    assert_true(tenant_left(who, TENANT_SESSIONS) == UINT64_MAX);
    tenant_count(who, TENANT_BLOCKS, 90); /* a successor with a smaller quota */
    assert_int_equal(tenant_left(who, TENANT_BLOCKS), 0);
    assert_int_equal(tenant_take(NULL, TENANT_BLOCKS, 1, why, sizeof why), ATTN_OK);
    tenants_close(t);
}

static void another_file_changes_who_somebody_is_and_not_what_he_has(void **state)
{
    (void)state;
    struct principal p = {.kind = PRINCIPAL_ANONYMOUS};
    char why[256];
    struct tenants *t = load("[a]\ntoken_sha256 = " ONE "\nblocks = 5\n[b]\nusers = 12345\n");
    struct tenant *a = identify(t, &p, "one", "");
    assert_int_equal(tenant_take(a, TENANT_BLOCKS, 4, why, sizeof why), ATTN_OK);
    a->n_steps = 2;
    a->flow.end = 4711;

    assert_true(tenants_update(
        t, load("[c]\nblocks = 1\n[a]\ntoken_sha256 = " TWO "\nblocks = 3\nshare = 5\n")));
    assert_int_equal(a->n_steps, 2); /* steps that will be answered, and device time it has had */
    assert_int_equal(a->flow.end, 4711);
    assert_int_equal(a->flow.share, 5);
    assert_null(identify(t, &p, "one", "is refused"));
    assert_ptr_equal(identify(t, &p, "two", ""), a);
    assert_int_equal(a->used[TENANT_BLOCKS], 4);
    assert_int_equal(tenant_left(a, TENANT_BLOCKS), 0);
    p = (struct principal){.kind = PRINCIPAL_USER, .uid = 12345};
    assert_null(identify(t, &p, "", "no tenant's user"));
    assert_non_null(tenants_find(t, "c"));
    assert_null(tenants_find(t, "b"));
    uint32_t a_id = a->id;

    assert_true(tenants_update(t, load("[b]\nusers = 12345\n")));
    assert_true(a->is_gone);
    assert_ptr_equal(tenants_of_id(t, a_id), a); /* to whom what he has is given back */
    assert_non_null(identify(t, &p, "", ""));
    tenant_give(a, TENANT_BLOCKS, 4);
    tenants_close(t);
}

static void those_who_are_gone_make_room_when_they_have_nothing_left(void **state)
{
    (void)state;
    char many[8192] = "", others[8192] = "", why[256];
    for (int i = 1; i < TENANT_MAX; i++) {
        snprintf(many + strlen(many), 128, "[m%d]\nblocks = 9\n", i);
        snprintf(others + strlen(others), 128, "[o%d]\nblocks = 9\n", i);
    }
    struct tenants *t = load(many);
    struct tenant *m = tenants_find(t, "m7");
    assert_int_equal(tenant_take(m, TENANT_SEQUENCES, 1, why, sizeof why), ATTN_OK);
    assert_false(tenants_update(t, load(others)));
    assert_string_equal(m->name, "m7");
    tenant_give(m, TENANT_SEQUENCES, 1);
    assert_true(tenants_update(t, load(others)));
    for (int i = 1; i < TENANT_MAX; i++) {
        char name[16];
        snprintf(name, sizeof name, "o%d", i);
        assert_non_null(tenants_find(t, name));
    }
    tenants_close(t);
}

static int cleanup(void **state)
{
    (void)state;
    unlink(path);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mistake_is_named_with_its_line),
        cmocka_unit_test(files_that_others_can_read_are_refused),
        cmocka_unit_test(names_are_credentials_of_systemd),
        cmocka_unit_test(who_somebody_is),
        cmocka_unit_test(numbers_are_those_of_the_names),
        cmocka_unit_test(quotas_are_exact),
        cmocka_unit_test(another_file_changes_who_somebody_is_and_not_what_he_has),
        cmocka_unit_test(those_who_are_gone_make_room_when_they_have_nothing_left),
    };
    return cmocka_run_group_tests(tests, NULL, cleanup);
}
