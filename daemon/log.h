/* log.h: one line a message to stderr, with systemd's <priority> prefix when stderr is the journal.
 * Any thread. Libraries never log; only the daemon does. */
#ifndef ATTND_DAEMON_LOG_H
#define ATTND_DAEMON_LOG_H

enum log_level { LOG_LEVEL_ERROR = 3, LOG_LEVEL_WARN = 4, LOG_LEVEL_INFO = 6, LOG_LEVEL_DEBUG = 7 };

/* 0, or -1 if text is not error, warn, info or debug. */
int log_level_parse(const char *text, enum log_level *out_level);
void log_init(enum log_level max_level);
void log_write(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_write(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(...) log_write(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(...) log_write(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_write(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
