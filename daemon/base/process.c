/* process.c: cpu time, memory and descriptors of this process, from /proc/self. */
#include "daemon/base/process.h"

#include <dirent.h>
#include <math.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/base/clock.h"

/* Reads /proc/self/stat (proc(5)), from behind the program's name, which may hold any character. */
static void read_stat(struct process_usage *u)
{
    char line[1024];
    unsigned long user = 0, system = 0, virtual_bytes = 0;
    unsigned long long start = 0;
    long resident = 0;
    double ticks = (double)sysconf(_SC_CLK_TCK);
    FILE *f = fopen("/proc/self/stat", "re");
    size_t n = f == NULL ? 0 : fread(line, 1, sizeof line - 1, f);
    if (f != NULL)
        fclose(f);
    line[n] = '\0';
    const char *behind = strrchr(line, ')');
    if (behind == NULL || sscanf(behind + 2,
                                 "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu %*d %*d %*d "
                                 "%*d %*d %*d %llu %lu %ld",
                                 &user, &system, &start, &virtual_bytes, &resident) != 5)
        return;
    u->cpu_seconds = (double)(user + system) / ticks;
    u->start_unix_seconds = clock_boot_unix_seconds() + (double)start / ticks;
    u->virtual_bytes = (double)virtual_bytes;
    u->resident_bytes = (double)resident * (double)sysconf(_SC_PAGESIZE);
}

void process_usage_read(struct process_usage *out)
{
    struct rlimit limit;
    *out = (struct process_usage){0};
    read_stat(out);
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
        out->max_fds = (double)limit.rlim_cur;
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0)
        out->max_locked_bytes = limit.rlim_cur == RLIM_INFINITY ? INFINITY : (double)limit.rlim_cur;
}

/* How many descriptors are open; takes the longer the more there are. */
static double open_fds(void)
{
    double n = 0;
    DIR *d = opendir("/proc/self/fd");
    if (d == NULL)
        return 0;
    for (const struct dirent *entry; (entry = readdir(d)) != NULL;)
        n += entry->d_name[0] != '.';
    closedir(d);
    return n - 1; /* the folder's own */
}

double process_start_unix_seconds(void)
{
    struct process_usage u = {0};
    read_stat(&u);
    return u.start_unix_seconds;
}

void process_write_prometheus(FILE *f)
{
    struct process_usage u;
    process_usage_read(&u);
    const struct {
        const char *name, *type, *help;
        double value;
    } metrics[] = {
        {"cpu_seconds_total", "counter", "User and system time", u.cpu_seconds},
        {"start_time_seconds", "gauge", "When the process began, since 1970", u.start_unix_seconds},
        {"virtual_memory_bytes", "gauge", "Address space", u.virtual_bytes},
        {"resident_memory_bytes", "gauge", "Memory in use", u.resident_bytes},
        {"open_fds", "gauge", "Open descriptors", open_fds()},
        {"max_fds", "gauge", "Most descriptors", u.max_fds},
    };
    for (size_t i = 0; i < sizeof metrics / sizeof metrics[0]; i++)
        fprintf(f, "# HELP process_%s %s.\n# TYPE process_%s %s\nprocess_%s %.17g\n",
                metrics[i].name, metrics[i].help, metrics[i].name, metrics[i].type, metrics[i].name,
                metrics[i].value);
}
