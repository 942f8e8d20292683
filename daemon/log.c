/* log.c: one write(2) a line, so that lines of several threads never mix.
 */
#include "daemon/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_LINE_BYTES = 1024 };

static _Atomic int max_level = LOG_LEVEL_INFO;
static _Atomic bool is_journal;

static const struct {
    enum log_level level;
    const char *text;
} levels[] = {
    {LOG_LEVEL_ERROR, "error"},
    {LOG_LEVEL_WARN, "warn"},
    {LOG_LEVEL_INFO, "info"},
    {LOG_LEVEL_DEBUG, "debug"},
};

int log_level_parse(const char *text, enum log_level *out_level)
{
    for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++)
        if (strcmp(text, levels[i].text) == 0) {
            *out_level = levels[i].level;
            return 0;
        }
    return -1;
}

/* systemd sets JOURNAL_STREAM to "device:inode" of the stream it made for us; a redirected stderr
 * is another file. */
static bool stderr_is_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long dev, ino;
    struct stat sb;
    if (stream == NULL || sscanf(stream, "%llu:%llu", &dev, &ino) != 2)
        return false;
    return fstat(STDERR_FILENO, &sb) == 0 && sb.st_dev == dev && sb.st_ino == ino;
}

void log_init(enum log_level level)
{
    atomic_store(&max_level, (int)level);
    atomic_store(&is_journal, stderr_is_journal());
}

void log_write(enum log_level level, const char *format, ...)
{
    if ((int)level > atomic_load_explicit(&max_level, memory_order_relaxed))
        return;
    char line[MAX_LINE_BYTES];
    size_t n;
    if (atomic_load_explicit(&is_journal, memory_order_relaxed)) {
        n = (size_t)snprintf(line, sizeof(line), "<%d>", (int)level);
    } else {
        const char *text = "";
        for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++)
            if (levels[i].level == level)
                text = levels[i].text;
        n = (size_t)snprintf(line, sizeof(line), "attnd: %s: ", text);
    }
    va_list args;
    va_start(args, format);
    int m = vsnprintf(line + n, sizeof(line) - n - 1, format, args);
    va_end(args);
    if (m < 0)
        return;
    size_t end = n + (size_t)m;
    if (end > sizeof(line) - 2)
        end = sizeof(line) - 2;
    /* names come from clients: no line may pretend to be two, or move a terminal's cursor */
    for (size_t i = n; i < end; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            line[i] = '?';
    line[end++] = '\n';
    for (size_t at = 0; at < end;) {
        ssize_t k = write(STDERR_FILENO, line + at, end - at);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return; /* nowhere left to complain */
        at += (size_t)k;
    }
}
