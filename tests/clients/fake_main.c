/* fake_main.c: the fake daemon as a process, for tests of programs: wrong answers on purpose. */
#include <signal.h>
#include <stdio.h>

#include "tests/clients/fake_daemon.h"

int main(int argc, char **argv)
{
    static struct fake_daemon f;
    sigset_t set;
    int sig;
    if (argc != 2) {
        fprintf(stderr, "usage: fake_attnd URL\n");
        return 2;
    }
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    fake_daemon_start(&f, argv[1]);
    sigwait(&set, &sig);
    fake_daemon_stop(&f);
    return 0;
}
