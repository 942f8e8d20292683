/* attnctl.h: the operator's command line. A command makes a JSON object; what people see is printed
 * from that.
 *
 * The files, from the top; each calls only those below it:
 *
 *   main.c         reads the command line, runs a command, exit codes
 *   table.c        the table of commands, the options, the help
 *   completion.c   completion of bash, zsh and fish, from the table and of what the daemon has
 *   doctor.c       what may be wrong with this machine
 *   keys_command.c keys, with a command line of its own; keys.c makes the files
 *   record.c       trace
 *   live.c         top and watch
 *   sequence.c     sequences to files and to other daemons
 *   latency.c      percentiles of the histograms in /stats
 *   command.c      commands of one request
 *   connect.c      the connection that a command asks over
 *   print.c        results as lines, tables or JSON, and errors
 */
#ifndef ATTND_CLIENTS_ATTNCTL_H
#define ATTND_CLIENTS_ATTNCTL_H

#include <getopt.h>
#include <jansson.h>

#include "clients/libattn/attn.h"

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, MAX_OPERANDS = 2 };

struct arguments {
    bool is_admin; /* of the command */
    const char *endpoint;
    const char *operands[MAX_OPERANDS]; /* as the command's usage has them */
    const char *geometry; /* an option of pool create's that is given, NULL: none */
    const char *live; /* the same of top's, watch's and trace's */
    uint64_t hold_us; /* of drain */
    const char *tenant; /* of kill sequence, sequence place, pool drop, resize */
    uint64_t card; /* of sequence place */
    uint32_t n_blocks; /* of pool resize */
    uint64_t seq; /* an operand that is a sequence's number */
    const char *pool; /* of sequence import and move */
    uint64_t as; /* of sequence import, if has_as */
    bool has_as;
    uint64_t record_us; /* of trace */
    uint64_t timeout_us, wait_us, interval_us;
    uint32_t count; /* of top, watch and trace; 0: without end */
    bool is_json;
    struct attn_pool_spec spec;
    struct attn_layer layer;
};

struct command {
    const char *noun, *verb; /* noun NULL: the command is one word */
    const char *operands; /* "NAME VALUE"; NULL: none */
    const char *help;
    /* One of these. ask gives its result; an object that is NULL: no memory. */
    attn_status (*ask)(attn_client *c, const struct arguments *a, json_t **out);
    int (*live)(attn_client *c, const struct arguments *a); /* prints by itself; an exit code */
    int (*local)(const struct arguments *a); /* the same, without a daemon */
    /* how people see the result; NULL: a name and a value per line */
    void (*print)(const json_t *result);
    bool is_admin; /* goes to the admin socket */
};
/* What getopt_long returns for each option. */
enum {
    OPT_ENDPOINT = 256,
    OPT_TIMEOUT,
    OPT_WAIT,
    OPT_JSON,
    OPT_INTERVAL,
    OPT_COUNT,
    OPT_SECONDS,
    OPT_HOLD,
    OPT_TENANT,
    OPT_POOL,
    OPT_AS,
    OPT_LAYERS, /* from here to split: pool create's */
    OPT_Q_HEADS,
    OPT_KV_HEADS,
    OPT_HEAD_DIM,
    OPT_DTYPE,
    OPT_KV_DTYPE,
    OPT_BLOCK_TOKENS,
    OPT_BLOCKS,
    OPT_WINDOW,
    OPT_SOFT_CAP,
    OPT_BATCH_INVARIANT,
    OPT_SPLIT,
    OPT_HELP,
    OPT_VERSION,
};

/* table.c */
extern const struct command commands[];
extern const size_t n_commands;
extern const struct option options[]; /* ends with a zero */
void print_help(void);

/* connect.c */

/* A client as the options want it. */
attn_status connect_to(const struct arguments *a, attn_client **out_client);

/* command.c */
attn_status ask_ping(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_info(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_status(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_stats(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_drain(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_reload(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_pools(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_pool_create(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_pool_describe(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_pool_drop(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_pool_resize(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_sessions(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_sequences(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_tenants(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_cache(attn_client *c, const struct arguments *a, json_t **out);
void print_cache(const json_t *result);
attn_status ask_kill_session(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_kill_sequence(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_sequence_place(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_slow(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_config(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_config_get(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_config_set(attn_client *c, const struct arguments *a, json_t **out);
/* One request for a list; the object is the daemon's. */
attn_status inspect(attn_client *c, const char *topic, uint64_t after, uint64_t timeout_us,
                    json_t **out);

/* print.c */

/* A sentence on stderr, and EXIT_FAILED. */
int failed(attn_status st);
/* EXIT_DONE if all that was printed has arrived, else a sentence and EXIT_FAILED. */
int printed(void);
void print_flat(const json_t *object);
/* The list in the object as columns under their names. */
void print_table(const json_t *object);
void print_json(const json_t *object); /* one line */

/* latency.c */
attn_status ask_latency(attn_client *c, const struct arguments *a, json_t **out);
void print_latency(const json_t *result);
/* {"count", "mean", "p50", "p90", "p99"} of what a histogram of /stats has more than an earlier one
 * (NULL: all), in seconds; without steps, the times are null. */
json_t *latency_of(const json_t *histogram, const json_t *before);

/* live.c */
void pause_for(uint64_t us);
/* Of the signal that ended top or watch, if one did; after the client is closed. */
void die_of_signal(void);
int run_top(attn_client *c, const struct arguments *a);
int run_watch(attn_client *c, const struct arguments *a);

/* record.c: the requests of some seconds, into a file that attnload --trace replays. */
int run_trace(attn_client *c, const struct arguments *a);

/* sequence.c */
attn_status ask_sequence_export(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_sequence_import(attn_client *c, const struct arguments *a, json_t **out);
attn_status ask_sequence_move(attn_client *c, const struct arguments *a, json_t **out);

/* doctor.c */
int run_doctor(const struct arguments *a);

/* completion.c */

/* The words that are completed: commands [n_commands]; options end with a zero. */
struct vocabulary {
    const struct command *commands;
    size_t n_commands;
    const struct option *options;
};
/* Prints what a word may become, a line each, behind words [n] that are no options; option NULL, or
 * the name of the one in front of it. */
int complete_word(const struct vocabulary *all, const struct arguments *a, char **words, size_t n,
                  const char *option, const char *word);
/* Prints a shell's script. EXIT_USAGE: not one of the three shells. */
int print_completion(const char *shell);

#endif
