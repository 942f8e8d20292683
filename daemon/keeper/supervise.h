/* supervise.h: attnd --supervise: a small parent that keeps what outlives the daemon (keep.h) where
 * there is no systemd: it holds the descriptors, starts attnd as its child, and starts it again.
 *
 *   the child                                   what happens
 *   dies by a signal, or exits with 75          it is started again with what is kept, at once;
 *                                               later if it keeps dying
 *   exits with another code after it served     the same, if the code is not 0
 *   shows no life (WATCHDOG=1) for a minute     it is killed, as above
 *   exits with 0, or before it ever served      this process ends with its code
 *   is told to end (SIGTERM, SIGINT here)       this process ends with its code
 *
 * SIGHUP is passed on, and so is SIGUSR2, after which the binary that is on disk then takes over.
 * A cache with which the child dies before it serves, several times in a row, is dropped.
 */
#ifndef ATTND_DAEMON_KEEPER_SUPERVISE_H
#define ATTND_DAEMON_KEEPER_SUPERVISE_H

/* Until the end; its exit code. argv: of this process, --supervise included. */
int supervise_run(int argc, char **argv);

#endif
