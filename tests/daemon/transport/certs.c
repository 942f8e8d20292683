/* certs.c: makes all certificates at once with attnctl's code, in a folder of /tmp that the process
 * which made them removes at exit.
 */
#define _GNU_SOURCE /* nftw */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/daemon/transport/certs.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clients/attnctl/keys.h"

static char root[64];
static pid_t owner;

static int remove_one(const char *path, const struct stat *sb, int type, struct FTW *at)
{
    (void)sb, (void)type, (void)at;
    return remove(path);
}

static void remove_all(void)
{
    if (getpid() == owner)
        nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static void make_all(void)
{
    static const char *const tenants[] = {"alpha", "beta"};
    const char *here[] = {"localhost", "127.0.0.1"}, *elsewhere[] = {"other.example"};
    snprintf(root, sizeof root, "/tmp/attnd_certs_%ld", (long)getpid());
    mkdir(root, 0700);
    owner = getpid();
    atexit(remove_all);
    for (int c = 0; c < N_CERTS; c++) {
        char dir[96], command[256], why[512];
        struct keys_wanted w = {
            .dir = dir, .hosts = here, .n_hosts = 2, .tenants = tenants, .n_tenants = 2, .days = 7};
        snprintf(dir, sizeof dir, "%s/%d", root, c);
        mkdir(dir, 0700);
        if (c == CERTS_EXPIRED || c == CERTS_OTHER_HOST) { /* of the good CA */
            snprintf(command, sizeof command, "cp %s/%d/ca.* %s", root, CERTS_GOOD, dir);
            assert_int_equal(system(command), 0);
        }
        if (c == CERTS_EXPIRED)
            w.days = -1;
        if (c == CERTS_OTHER_HOST) {
            w.hosts = elsewhere;
            w.n_hosts = 1;
        }
        if (!keys_make(&w, why, sizeof why))
            fail_msg("%s", why);
    }
}

char *certs_file(enum certs c, const char *name)
{
    char path[128];
    if (root[0] == '\0')
        make_all();
    snprintf(path, sizeof path, "%s/%d/%s", root, (int)c, name);
    return strdup(path);
}

static void set(char **setting, char *file)
{
    free(*setting);
    *setting = file;
}

void certs_configure(struct config *cfg, enum certs server, bool has_client_ca)
{
    set(&cfg->tls_cert, certs_file(server, "server.crt"));
    set(&cfg->tls_key, certs_file(server, "server.key"));
    if (has_client_ca)
        set(&cfg->tls_ca, certs_file(CERTS_GOOD, "ca.crt"));
}
