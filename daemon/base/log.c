/* log.c: formats log lines and writes each with one write(2), so that lines of several threads
 * never mix.
 */
#include "daemon/base/log.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/journal.h"
#include "daemon/base/stack.h"

enum { MAX_TEXT_BYTES = 1024, MAX_LINE_BYTES = 2 * MAX_TEXT_BYTES + 128 };

static _Atomic int max_level = LOG_LEVEL_INFO, line_format = LOG_FORMAT_LOGFMT;
static _Atomic bool is_journal;
static _Atomic(struct log_limit *) limits;
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;
static struct log_record kept[LOG_KEPT];
static _Atomic uint64_t n_kept;
static void (*listener)(void *user);
static void *listener_user;

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

int log_format_parse(const char *text, enum log_format *out_format)
{
    bool is_json = strcmp(text, "json") == 0;
    if (!is_json && strcmp(text, "logfmt") != 0)
        return -1;
    *out_format = is_json ? LOG_FORMAT_JSON : LOG_FORMAT_LOGFMT;
    return 0;
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

void log_init(enum log_level level, enum log_format format)
{
    atomic_store(&max_level, (int)level);
    atomic_store(&line_format, (int)format);
    bool has_journal = stderr_is_journal();
    if (has_journal)
        journal_open();
    atomic_store(&is_journal, has_journal);
}

/* --- one line --------------------------------------------------------------------------------- */

struct line {
    char text[MAX_LINE_BYTES];
    size_t n;
};

static void put_char(struct line *l, char c)
{
    if (l->n < sizeof l->text - 2) /* a quote and the line's end always fit */
        l->text[l->n++] = c;
}

static void put_bytes(struct line *l, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        put_char(l, text[i]);
}

static void put(struct line *l, const char *text)
{
    put_bytes(l, text, strlen(text));
}

/* Writes text quoted and escaped in the way that logfmt and JSON share. */
static void put_quoted(struct line *l, const char *text, size_t n)
{
    put_char(l, '"');
    for (size_t i = 0; i < n; i++) {
        if (text[i] == '"' || text[i] == '\\')
            put_char(l, '\\');
        put_char(l, text[i]);
    }
    l->text[l->n++] = '"';
}

static size_t n_digits(const char *text)
{
    return strspn(text, "0123456789");
}

/* Whether text is a number in JSON that a double holds exactly, or that printf made of one. */
static bool is_number(const char *text, size_t n)
{
    enum { MAX_DIGITS = 15, MAX_EXPONENT_DIGITS = 2 };
    const char *p = text + (*text == '-');
    size_t n_whole = n_digits(p);
    if (n_whole == 0 || n_whole > MAX_DIGITS || (*p == '0' && n_whole > 1))
        return false;
    p += n_whole;
    if (*p == '.') {
        size_t n_fraction = n_digits(p + 1);
        if (n_fraction == 0)
            return false;
        p += 1 + n_fraction;
    }
    if (*p == 'e') { /* with a sign, as printf writes it */
        size_t n_exponent = p[1] == '+' || p[1] == '-' ? n_digits(p + 2) : 0;
        if (n_exponent == 0 || n_exponent > MAX_EXPONENT_DIGITS)
            return false;
        p += 2 + n_exponent;
    }
    return p == text + n;
}

/* Whether values of this key are identifiers, to be quoted even if they look like numbers. */
static bool is_name(const char *key, size_t n)
{
    static const char *const names[] = {"session", "sequence", "request"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (strlen(names[i]) == n && memcmp(names[i], key, n) == 0)
            return true;
    return false;
}

/* Whether the n bytes, which begin with a quote, end in the first half of an escape. */
static bool is_half_escape(const char *p, size_t n)
{
    size_t n_backslashes = 0;
    while (n_backslashes + 1 < n && p[n - 1 - n_backslashes] == '\\')
        n_backslashes++;
    return n_backslashes % 2 == 1;
}

/* key=value pairs as JSON members. */
static void put_members(struct line *l, const char *p)
{
    while (*(p += strspn(p, " ")) != '\0') {
        size_t n = strcspn(p, "= ");
        bool has_name = is_name(p, n);
        put(l, ",");
        put_quoted(l, p, n);
        put(l, ":");
        p += n + (p[n] == '=');
        if (*p == '"') {
            n = 1;
            while (p[n] != '\0' && p[n] != '"')
                n += p[n] == '\\' && p[n + 1] != '\0' ? 2 : 1;
            bool is_cut = p[n] == '\0' && is_half_escape(p, n);
            put_bytes(l, p, n - is_cut); /* escaped already */
            put(l, "\"");
            n += p[n] == '"';
        } else {
            n = strcspn(p, " ");
            if (!has_name && is_number(p, n))
                put_bytes(l, p, n);
            else
                put_quoted(l, p, n);
        }
        p += n;
    }
}

static void put_time(struct line *l)
{
    struct timespec now = clock_wall();
    struct tm utc;
    char text[40];
    gmtime_r(&now.tv_sec, &utc);
    size_t n = strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(text + n, sizeof text - n, ".%03dZ", (int)(now.tv_nsec / 1000000));
    put(l, text);
}

static const char *level_name(enum log_level level)
{
    for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++)
        if (levels[i].level == level)
            return levels[i].text;
    return "";
}

static void make_json(struct line *l, enum log_level level, const char *msg, const char *pairs)
{
    put(l, "{\"ts\":\"");
    put_time(l);
    put(l, "\",\"level\":\"");
    put(l, level_name(level));
    put(l, "\",\"msg\":");
    put_quoted(l, msg, strlen(msg));
    put_members(l, pairs);
    put(l, "}");
}

static void make_line(struct line *l, enum log_level level, const char *msg, const char *pairs)
{
    char priority[8];
    if (atomic_load_explicit(&is_journal, memory_order_relaxed)) {
        snprintf(priority, sizeof priority, "<%d>", (int)level);
        put(l, priority);
        put(l, msg);
    } else if (atomic_load_explicit(&line_format, memory_order_relaxed) == LOG_FORMAT_JSON) {
        make_json(l, level, msg, pairs);
        return;
    } else {
        put(l, "ts=");
        put_time(l);
        put(l, " level=");
        put(l, level_name(level));
        put(l, " msg=");
        put_quoted(l, msg, strlen(msg));
    }
    if (pairs[0] != '\0')
        put(l, " ");
    put(l, pairs);
}

/* How many bytes the UTF-8 character at p has; 0: invalid or incomplete. */
static size_t utf8_bytes(const unsigned char *p)
{
    static const uint32_t first[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t n = p[0] < 0x80 ? 1 : p[0] >> 5 == 6 ? 2 : p[0] >> 4 == 14 ? 3 : p[0] >> 3 == 30 ? 4 : 0;
    uint32_t c = n == 1 ? p[0] : p[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if (p[i] >> 6 != 2)
            return 0;
        c = c << 6 | (p[i] & 0x3f);
    }
    bool is_surrogate = c >> 11 == 0x1b;
    return n > 0 && c >= first[n] && c <= 0x10ffff && !is_surrogate ? n : 0;
}

/* Replaces control characters and invalid UTF-8. Names come from clients: none may split a line,
 * move a terminal's cursor or break the JSON. */
static void clean(char *text)
{
    for (size_t n; *text != '\0'; text += n) {
        n = utf8_bytes((unsigned char *)text);
        if (n == 0 || (unsigned char)*text < 0x20 || *text == 0x7f) {
            *text = '?';
            n = 1;
        }
    }
}

static bool is_wanted(enum log_level level)
{
    return (int)level <= atomic_load_explicit(&max_level, memory_order_relaxed);
}

/* Keeps the line for log_read; of one that is too long only the message. */
static void keep(enum log_level level, const char *msg, const char *pairs)
{
    struct line l = {.n = 0};
    make_json(&l, level, msg, pairs);
    if (l.n >= LOG_RECORD_BYTES) {
        char cut[LOG_RECORD_BYTES / 2 - 128];
        snprintf(cut, sizeof cut, "%s", msg);
        clean(cut);
        l.n = 0;
        make_json(&l, level, cut, "");
    }
    pthread_mutex_lock(&kept_lock);
    struct log_record *r = &kept[n_kept % LOG_KEPT];
    r->number = n_kept + 1;
    memcpy(r->json, l.text, l.n);
    r->json[l.n] = '\0';
    n_kept++;
    if (listener != NULL)
        listener(listener_user);
    pthread_mutex_unlock(&kept_lock);
}

uint32_t log_read(uint64_t after, struct log_record out[LOG_KEPT])
{
    uint32_t n = 0;
    pthread_mutex_lock(&kept_lock);
    uint64_t first = n_kept < LOG_KEPT ? 0 : n_kept - LOG_KEPT;
    for (uint64_t i = after > first ? after : first; i < n_kept; i++)
        out[n++] = kept[i % LOG_KEPT];
    pthread_mutex_unlock(&kept_lock);
    return n;
}

uint64_t log_count(void)
{
    return n_kept;
}

void log_set_listener(void (*tell)(void *user), void *user)
{
    pthread_mutex_lock(&kept_lock);
    listener = tell;
    listener_user = user;
    pthread_mutex_unlock(&kept_lock);
}

static void write_line(enum log_level level, const char *msg, const char *pairs)
{
    keep(level, msg, pairs);
    if (atomic_load_explicit(&is_journal, memory_order_relaxed) &&
        journal_send((int)level, msg, pairs))
        return;
    struct line l = {.n = 0};
    make_line(&l, level, msg, pairs);
    l.text[l.n++] = '\n';
    for (size_t at = 0; at < l.n;) {
        ssize_t k = write(STDERR_FILENO, l.text + at, l.n - at);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return; /* nowhere left to complain */
        at += (size_t)k;
    }
}

/* --- messages --------------------------------------------------------------------------------- */

void log_write(enum log_level level, const char *format, ...)
{
    char msg[MAX_TEXT_BYTES];
    if (!is_wanted(level))
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(msg, sizeof msg, format, args);
    va_end(args);
    clean(msg);
    write_line(level, msg, "");
}

void log_event(enum log_level level, const char *msg, const char *pairs, ...)
{
    char text[MAX_TEXT_BYTES];
    if (!is_wanted(level))
        return;
    va_list args;
    va_start(args, pairs);
    vsnprintf(text, sizeof text, pairs, args);
    va_end(args);
    clean(text);
    write_line(level, msg, text);
}

const char *log_quote(const char *text, char *out, size_t out_bytes)
{
    size_t n = 0;
    out[n++] = '"';
    for (; *text != '\0' && n + 4 < out_bytes; text++) {
        if (*text == '"' || *text == '\\')
            out[n++] = '\\';
        out[n++] = *text;
    }
    out[n++] = '"';
    out[n] = '\0';
    return out;
}

/* --- limits ----------------------------------------------------------------------------------- */

static void tell(const struct log_limit *l, uint32_t n)
{
    char name[64];
    if (n > LOG_LIMIT)
        log_event(l->level, "lines left out", "of=%s n=%u", log_quote(l->name, name, sizeof name),
                  (unsigned)(n - LOG_LIMIT));
}

/* A second has passed: the first caller afterwards logs how many lines were left out. */
static void turn(struct log_limit *l, uint64_t second)
{
    uint64_t then = atomic_load(&l->second);
    if (then != second && atomic_compare_exchange_strong(&l->second, &then, second))
        tell(l, atomic_exchange(&l->n, 0));
}

bool log_limit_pass(struct log_limit *l)
{
    if (!is_wanted(l->level))
        return false;
    if (!atomic_load(&l->is_known) && !atomic_exchange(&l->is_known, true))
        stack_push(&limits, l);
    turn(l, clock_now_ns() / 1000000000u);
    return atomic_fetch_add(&l->n, 1) < LOG_LIMIT;
}

void log_flush_left_out(void)
{
    uint64_t second = clock_now_ns() / 1000000000u;
    for (struct log_limit *l = atomic_load(&limits); l != NULL; l = l->next)
        turn(l, second);
}
