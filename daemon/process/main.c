/* main.c: the entry point: attnd serves, supervises, or prints something and ends. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>

#include "commit.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/config/config.h"
#include "daemon/config/settings.h"
#include "daemon/keeper/keep.h"
#include "daemon/keeper/supervise.h"
#include "daemon/process/daemon.h"
#include "daemon/process/device.h"
#include "daemon/process/last_good.h"

static void print_version(void)
{
    printf("attnd %s (commit %s)\n", ATTND_VERSION, ATTND_COMMIT);
}

static int self_test(const struct config *cfg)
{
    print_version();
    attn_status st = device_self_test(cfg, stdout);
    return st == ATTN_OK ? EX_OK : st == ATTN_ENOTSUP ? EX_UNAVAILABLE : EX_SOFTWARE;
}

/* Opens closed standard descriptors as /dev/null, or the next file opened would get their number
 * and log lines would go there. Ignores SIGPIPE, so that the process does not end with the reader
 * of stderr. */
static void standard_files_init(void)
{
    signal(SIGPIPE, SIG_IGN);
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
            _exit(EX_OSERR);
}

/* Flushes stdout; returns EX_OK if all that was printed could be written, or an exit code. */
static int printed(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return EX_OK;
    log_error("write to stdout: %s", strerror(errno));
    return EX_IOERR;
}

int main(int argc, char **argv)
{
    struct config cfg;
    enum config_action action;
    struct last_good last_good;
    standard_files_init();
    stats_set_commit(ATTND_COMMIT);
    log_init(LOG_LEVEL_INFO, LOG_FORMAT_LOGFMT);
    keep_begin();
    int code = last_good_choose(argc, argv, &last_good, &cfg, &action);
    if (code != EX_OK)
        return code;
    switch (action) {
    case CONFIG_HELP:
        config_help(stdout);
        code = printed();
        break;
    case CONFIG_VERSION:
        print_version();
        code = printed();
        break;
    case CONFIG_PRINT:
        config_print(&cfg, stdout);
        code = printed();
        break;
    case CONFIG_CHECK:
        break;
    case CONFIG_SELF_TEST:
        code = self_test(&cfg);
        break;
    case CONFIG_SUPERVISE:
        settings_publish(&cfg);
        code = supervise_run(argc, argv);
        break;
    case CONFIG_RUN:
        code = daemon_run(&cfg, argc, argv, &last_good);
        break;
    }
    last_good_fini(&last_good);
    config_fini(&cfg);
    return code;
}
