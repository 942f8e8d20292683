/* log.h: the daemon's log, one line per message. It goes to stderr, as logfmt or JSON with a time
 * stamp. Where stderr is systemd's journal, it goes to the journal with a field per value
 * (base/journal.h), or if that fails to stderr with a <priority> and no time stamp. Only the daemon
 * logs, libraries never do. Any thread. */
#ifndef ATTND_DAEMON_BASE_LOG_H
#define ATTND_DAEMON_BASE_LOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum log_level { LOG_LEVEL_ERROR = 3, LOG_LEVEL_WARN = 4, LOG_LEVEL_INFO = 6, LOG_LEVEL_DEBUG = 7 };
enum log_format { LOG_FORMAT_LOGFMT, LOG_FORMAT_JSON };

/* 0, or -1 if text is not error, warn, info or debug. */
int log_level_parse(const char *text, enum log_level *out_level);
/* 0, or -1 if text is not logfmt or json. */
int log_format_parse(const char *text, enum log_format *out_format);
void log_init(enum log_level max_level, enum log_format format);
/* Logs a sentence. */
void log_write(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Logs a fixed message with its values, as key=value pairs in logfmt: a value with blanks, quotes
 * or '=' must be quoted (log_quote). */
void log_event(enum log_level level, const char *msg, const char *pairs, ...)
    __attribute__((format(printf, 3, 4)));
/* Writes text as a quoted logfmt value: quotes inside are escaped, and it is cut to out_bytes.
 * Returns out. */
const char *log_quote(const char *text, char *out, size_t out_bytes);

#define log_error(...) log_write(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(...) log_write(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(...) log_write(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_write(LOG_LEVEL_DEBUG, __VA_ARGS__)

/* The latest LOG_KEPT lines are kept in memory, as JSON objects. */
enum { LOG_KEPT = 128, LOG_RECORD_BYTES = 1536 };
struct log_record {
    uint64_t number; /* counts all lines, from 1 */
    char json[LOG_RECORD_BYTES];
};
/* Copies those with a number above `after`, oldest first; returns how many. */
uint32_t log_read(uint64_t after, struct log_record out[LOG_KEPT]);
/* The number of the latest line. */
uint64_t log_count(void);
/* Called for each line, on the thread that logs; must not log or block. NULL: none. On return the
 * previous listener is no longer running. */
void log_set_listener(void (*tell)(void *user), void *user);

/* A message that clients can cause at will is limited to LOG_LIMIT lines per second; then
 * log_flush_left_out logs how many more there were. Each such message has one static limit, zeros
 * but for name and level. */
enum { LOG_LIMIT = 10 };
struct log_limit {
    const char *name;
    enum log_level level;
    struct log_limit *next; /* in log.c's list of limits, which only grows */
    _Atomic bool is_known;
    _Atomic uint64_t second;
    _Atomic uint32_t n;
};
/* Counts a line; true: it may be written. */
bool log_limit_pass(struct log_limit *l);
/* Logs how many lines were left out in seconds that are over. Call it a few times per second. */
void log_flush_left_out(void);

/* log_limited("peers cut", LOG_LEVEL_INFO, log_write, ...) calls log_write(LOG_LEVEL_INFO, ...)
 * within a limit of its own; log_event likewise. */
#define log_limited(what, at_level, call, ...)                                                     \
    do {                                                                                           \
        static struct log_limit limit = {.name = what, .level = at_level};                         \
        if (log_limit_pass(&limit))                                                                \
            call(at_level, __VA_ARGS__);                                                           \
    } while (0)

#endif
