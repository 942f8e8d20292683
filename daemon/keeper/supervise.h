/* supervise.h: attnd --supervise: a small parent process that is the keeper (keep.h) where there is
 * no systemd: it holds the descriptors, starts attnd as its child, and restarts it.
 *
 *   the child                                   what happens
 *   dies by a signal, or exits with 75          it is started again with what is kept: at once, or
 *                                               after a delay if it keeps dying young
 *   exits with another code after it served     the same, if the code is not 0
 *   shows no life (WATCHDOG=1) for a minute     it is killed, as above
 *   exits with 0, or before it ever served      this process ends with its code
 *   ends after SIGTERM or SIGINT came here      this process ends with its code
 *
 * SIGHUP and SIGUSR2 are passed on; after SIGUSR2 the next child runs the binary that is then on
 * disk. If the child dies several times in a row before it serves, the kept cache is dropped.
 */
#ifndef ATTND_DAEMON_KEEPER_SUPERVISE_H
#define ATTND_DAEMON_KEEPER_SUPERVISE_H

/* Supervises until the end; returns this process's exit code. argv: of this process, including
 * --supervise. */
int supervise_run(int argc, char **argv);

#endif
