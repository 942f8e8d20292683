/* completion.c: scripts with which bash, zsh and fish complete attnctl's words, made from its table
 * of commands and its options.
 */
#include <stdio.h>
#include <string.h>

#include "clients/attnctl/attnctl.h"

/* The first words, each once; for a noun its verbs. */
static void print_words(const struct vocabulary *w, const char *noun, const char *separator)
{
    const char *last = "";
    for (size_t i = 0; i < w->n_commands; i++) {
        const struct command *c = &w->commands[i];
        if (noun != NULL && (c->noun == NULL || strcmp(c->noun, noun) != 0))
            continue;
        const char *word = noun == NULL && c->noun != NULL ? c->noun : c->verb;
        if (strcmp(word, last) != 0)
            printf("%s%s", last[0] != '\0' ? separator : "", word);
        last = word;
    }
}

static void print_options(const struct vocabulary *w, const char *separator)
{
    for (const struct option *o = w->options; o->name != NULL; o++)
        printf("%s--%s", o > w->options ? separator : "", o->name);
}

/* Is this the first command of its noun? */
static bool begins_noun(const struct vocabulary *w, size_t i)
{
    return w->commands[i].noun != NULL &&
           (i == 0 || w->commands[i - 1].noun == NULL ||
            strcmp(w->commands[i - 1].noun, w->commands[i].noun) != 0);
}

/* Patterns of the options that take a value, which is no word of the command. */
static void print_valued(const struct vocabulary *w)
{
    const char *separator = "";
    for (const struct option *o = w->options; o->name != NULL; o++) {
        if (o->has_arg != required_argument)
            continue;
        printf("%s--%s", separator, o->name);
        separator = "|";
    }
}

/* A case for each $said that is gone on with a word; the words stand between before and after. */
static void print_cases(const struct vocabulary *w, const char *before, const char *after)
{
    printf("  '') %s", before);
    print_words(w, NULL, " ");
    printf("%s ;;\n", after);
    for (size_t i = 0; i < w->n_commands; i++) {
        if (!begins_noun(w, i))
            continue;
        printf("  ' %s') %s", w->commands[i].noun, before);
        print_words(w, w->commands[i].noun, " ");
        printf("%s ;;\n", after);
    }
    printf("  ' completion') %sbash zsh fish%s ;;\n", before, after);
}

/* Bash cuts words at colons, so the parts of a URL come one by one. */
static void print_bash(const struct vocabulary *w)
{
    printf("_attnctl() {\n"
           "  local word=${COMP_WORDS[COMP_CWORD]} said= i\n"
           "  case $word in\n  -*) COMPREPLY=($(compgen -W '");
    print_options(w, " ");
    printf("' -- \"$word\")); return ;;\n  esac\n"
           "  for ((i = 1; i < COMP_CWORD; i++)); do\n    case ${COMP_WORDS[i]} in\n    ");
    print_valued(w);
    printf("|:|=) i=$((i + 1)) ;;\n    -*) ;;\n    *) said+=\" ${COMP_WORDS[i]}\" ;;\n    esac\n"
           "  done\n"
           "  ((i == COMP_CWORD)) || return 0 # the value of an option\n"
           "  case $said in\n");
    print_cases(w, "COMPREPLY=($(compgen -W '", "' -- \"$word\"))");
    printf("  esac\n}\ncomplete -o default -F _attnctl attnctl\n");
}

static void print_zsh(const struct vocabulary *w)
{
    printf("#compdef attnctl\nlocal -a next\nlocal said= i\n"
           "for ((i = 2; i < CURRENT; i++)); do\n  case ${words[i]} in\n  ");
    print_valued(w);
    printf(") i=$((i + 1)) ;;\n  -*) ;;\n  *) said+=\" ${words[i]}\" ;;\n  esac\ndone\n"
           "if ((i > CURRENT)); then # the value of an option\n  _files\n  return\nfi\n"
           "if [[ ${words[CURRENT]} == -* ]]; then\n  compadd -- ");
    print_options(w, " ");
    printf("\n  return\nfi\ncase $said in\n");
    print_cases(w, "next=(", ")");
    printf("*) _files; return ;;\nesac\ncompadd -- $next\n");
}

static void print_fish(const struct vocabulary *w)
{
    printf("complete -c attnctl -f\n");
    for (size_t i = 0; i < w->n_commands; i++) {
        const struct command *c = &w->commands[i];
        if (begins_noun(w, i))
            printf("complete -c attnctl -n __fish_use_subcommand -a %s\n", c->noun);
        if (c->noun == NULL) {
            printf("complete -c attnctl -n __fish_use_subcommand -a %s -d '%s'\n", c->verb,
                   c->help);
            continue;
        }
        printf("complete -c attnctl -n '__fish_seen_subcommand_from %s; and not "
               "__fish_seen_subcommand_from ",
               c->noun);
        print_words(w, c->noun, " ");
        if (strcmp(c->noun, "kill") != 0)
            printf(" kill"); /* a sequence is also what is killed */
        printf("' -a %s -d '%s'\n", c->verb, c->help);
    }
    printf("complete -c attnctl -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'\n"
           "complete -c attnctl -n '__fish_seen_subcommand_from trace keys export import' -F\n");
    for (const struct option *o = w->options; o->name != NULL; o++)
        printf("complete -c attnctl -l %s%s\n", o->name, o->has_arg == no_argument ? "" : " -r");
}

int run_completion(const char *shell, const struct vocabulary *w)
{
    if (strcmp(shell, "bash") == 0) {
        print_bash(w);
    } else if (strcmp(shell, "zsh") == 0) {
        print_zsh(w);
    } else if (strcmp(shell, "fish") == 0) {
        print_fish(w);
    } else {
        fprintf(stderr, "attnctl: completion: \"%s\" is not bash, zsh or fish\n", shell);
        return EXIT_USAGE;
    }
    return printed();
}
