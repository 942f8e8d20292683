/* option.h: the table of settings, and how one setting is read from and written as text.
 * Private to config/ and tests. */
#ifndef ATTND_DAEMON_CONFIG_OPTION_H
#define ATTND_DAEMON_CONFIG_OPTION_H

#include "daemon/config/config.h"

enum option_type {
    OPTION_COUNT, /* uint32_t */
    OPTION_BYTES, /* uint64_t: 64M; K, M, G, T are powers of 1024 */
    OPTION_TIME, /* uint64_t microseconds: 250ms; us, ms, s, m, h */
    OPTION_CHOICE, /* char[], one of choices */
    OPTION_TEXT, /* char *, owned */
    OPTION_FILE, /* the same: a file's name, see credential.h */
    OPTION_URLS, /* config.listen: urls, added one by one */
};

/* What SIGHUP does with a new value. */
enum option_effect { AT_ONCE, RESTART };

struct config_option {
    const char *section, *key;
    enum option_type type;
    enum option_effect effect; /* AT_ONCE: numbers and choices only */
    size_t offset; /* in struct config */
    const char *default_text;
    uint64_t min, max; /* in base units; numbers only */
    const char *choices; /* "auto cpu cuda hip"; choices only */
    const char *help; /* sentences; lines are broken where the text breaks them */
};

extern const struct config_option config_options[];
extern const size_t config_n_options;

enum { CONFIG_NAME_BYTES = 64 };
/* "section.key", and ATTND_SECTION_KEY. */
void config_option_name(const struct config_option *o, char out[CONFIG_NAME_BYTES]);
void config_option_variable(const struct config_option *o, char out[CONFIG_NAME_BYTES]);
/* "listen.address"; NULL: there is none of this name. */
const struct config_option *config_option_find(const char *name);
/* Levenshtein distance; long texts are compared by their beginning. */
uint32_t config_name_distance(const char *a, const char *b);
/* Is a name that differs by so much from this one likely to be what was meant? */
bool config_name_is_near(const char *name, uint32_t distance);
/* The known name nearest to name; also looks at the key alone, for the right key in a wrong
 * section. NULL: none is near. */
const struct config_option *config_option_nearest(const char *name);
/* What is right alone may be wrong together. ATTN_EINVAL: why names the settings, their values and
 * where those are from. */
attn_status config_check(const struct config *c, char *why, size_t why_bytes);
/* Stores text as the option's value (a list grows by it). why gets the reason without the option's
 * name ("is out of range 1 to 64"). ATTN_EINVAL, ATTN_ENOMEM. */
attn_status config_option_parse(const struct config_option *o, const char *text, struct config *c,
                                char *why, size_t why_bytes);
/* Empties a list or text. */
void config_option_clear(const struct config_option *o, struct config *c);
/* The value as text that config_option_parse reads back; one entry of a list. */
void config_option_format(const struct config_option *o, const struct config *c, uint32_t entry,
                          char *out, size_t out_bytes);
/* The same value, or list. */
bool config_option_is_equal(const struct config_option *o, const struct config *a,
                            const struct config *b);
/* Copies the value of an option that takes effect at once. */
void config_option_copy(const struct config_option *o, struct config *to,
                        const struct config *from);
/* "1 to 65536", "auto, cpu, cuda or hip", ...; empty if there is nothing to say. */
void config_option_range(const struct config_option *o, char *out, size_t out_bytes);

#endif
