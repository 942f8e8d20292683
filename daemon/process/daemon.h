/* daemon.h: runs attnd as a service. */
#ifndef ATTND_DAEMON_PROCESS_DAEMON_H
#define ATTND_DAEMON_PROCESS_DAEMON_H

#include "daemon/config/config.h"

/* Serves until a signal or a drain ends it. Once per process, on the main thread. Returns an exit
 * code of sysexits.h; 75 (EX_TEMPFAIL): a restart may help. cfg stays the caller's and may change
 * while it runs; argc and argv are what it was loaded from. */
int daemon_run(struct config *cfg, int argc, char **argv);

#endif
