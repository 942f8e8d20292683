/* option.h: the table of settings, and reading and writing one setting as text. Private to config/
 * and tests. */
#ifndef ATTND_DAEMON_CONFIG_OPTION_H
#define ATTND_DAEMON_CONFIG_OPTION_H

#include "daemon/config/config.h"

enum option_type {
    OPTION_COUNT, /* uint32_t */
    OPTION_BYTES, /* uint64_t: 64M; K, M, G, T are powers of 1024 */
    OPTION_TIME, /* uint64_t microseconds: 250ms; us, ms, s, m, h */
    OPTION_CHOICE, /* char[], one of choices */
    OPTION_TEXT, /* char *, owned */
    OPTION_FILE, /* the same: a file, or the name of a systemd credential */
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
/* The names "section.key", and ATTND_SECTION_KEY. */
void config_option_name(const struct config_option *o, char out[CONFIG_NAME_BYTES]);
void config_option_variable(const struct config_option *o, char out[CONFIG_NAME_BYTES]);
/* Finds an option by its name, as "listen.address"; NULL: there is none. */
const struct config_option *config_option_find(const char *name);
/* Levenshtein distance; long texts are compared by their beginning. */
uint32_t config_name_distance(const char *a, const char *b);
/* Whether a name at this distance from `name` is likely to be what was meant. */
bool config_name_is_near(const char *name, uint32_t distance);
/* The option whose name is nearest to name; also compares the key alone, for the right key in a
 * wrong section. NULL: none is near. */
const struct config_option *config_option_nearest(const char *name);
/* The path where workers connect by default; false: there is none, which why explains. */
bool config_default_path(char *out, size_t out_bytes, char *why, size_t why_bytes);
/* Checks settings that must agree. ATTN_EINVAL: why names the settings, their values and the
 * origins of those. */
attn_status config_check(const struct config *c, char *why, size_t why_bytes);
/* Parses text and stores it as the option's value (appends it to a list). ATTN_EINVAL, ATTN_ENOMEM:
 * why gets the reason without the option's name ("is out of range 1 to 64"). */
attn_status config_option_parse(const struct config_option *o, const char *text, struct config *c,
                                char *why, size_t why_bytes);
/* Empties a list or text. */
void config_option_clear(const struct config_option *o, struct config *c);
/* Writes the value (of a list one entry) as text that config_option_parse reads back. */
void config_option_format(const struct config_option *o, const struct config *c, uint32_t entry,
                          char *out, size_t out_bytes);
/* Whether a and b have the same value, or list. */
bool config_option_is_equal(const struct config_option *o, const struct config *a,
                            const struct config *b);
/* Copies the value of an option that takes effect at once. */
void config_option_copy(const struct config_option *o, struct config *to,
                        const struct config *from);
/* Writes what values are allowed: "1 to 65536", "auto, cpu, cuda or hip"; "" if any is. */
void config_option_range(const struct config_option *o, char *out, size_t out_bytes);

#endif
