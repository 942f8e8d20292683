/* process.h: CPU time, memory and descriptors of this process, under the names that Prometheus
 * clients use. */
#ifndef ATTND_DAEMON_BASE_PROCESS_H
#define ATTND_DAEMON_BASE_PROCESS_H

#include <stdio.h>

struct process_usage {
    double cpu_seconds, start_unix_seconds;
    double virtual_bytes, resident_bytes;
    double max_fds;
    double max_locked_bytes; /* INFINITY: no limit */
};

/* A value that can't be read is 0. Any thread. */
void process_usage_read(struct process_usage *out);
/* Its start_unix_seconds alone. */
double process_start_unix_seconds(void);
/* Writes process_cpu_seconds_total and the others in Prometheus text format. */
void process_write_prometheus(FILE *f);

#endif
