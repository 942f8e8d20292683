/* daemon.h: runs attnd as a service. */
#ifndef ATTND_DAEMON_PROCESS_DAEMON_H
#define ATTND_DAEMON_PROCESS_DAEMON_H

#include "daemon/process/last_good.h"

/* Serves until a signal or a drain ends it. Once per process, on the main thread. Returns an exit
 * code of sysexits.h; 75 (EX_TEMPFAIL): a restart may help. cfg stays the caller's and may change
 * while it runs, as g does, which says where cfg is from; argc and argv are what it reads again. */
int daemon_run(struct config *cfg, int argc, char **argv, struct last_good *g);

#endif
