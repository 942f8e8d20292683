/* completion.c: what shells need to complete attnctl's words, from its tables. */
#include <stdio.h>
#include <string.h>

#include "clients/attnctl/attnctl.h"

/* The first words, each once; for a noun its verbs. */
static void print_words(const char *noun, const char *separator)
{
    const char *last = "";
    for (size_t i = 0; i < n_commands; i++) {
        const struct command *c = &commands[i];
        if (noun != NULL && (c->noun == NULL || strcmp(c->noun, noun) != 0))
            continue;
        const char *word = noun == NULL && c->noun != NULL ? c->noun : c->verb;
        if (strcmp(word, last) != 0)
            printf("%s%s", last[0] != '\0' ? separator : "", word);
        last = word;
    }
}

static void print_options(const char *separator)
{
    for (const struct option *o = options; o->name != NULL; o++)
        printf("%s--%s", o > options ? separator : "", o->name);
}

/* Is this the first command of its noun? */
static bool begins_noun(size_t i)
{
    return commands[i].noun != NULL && (i == 0 || commands[i - 1].noun == NULL ||
                                        strcmp(commands[i - 1].noun, commands[i].noun) != 0);
}

static void print_bash(void)
{
    printf("_attnctl() {\n"
           "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}\n"
           "  case $word in\n  -*) COMPREPLY=($(compgen -W '");
    print_options(" ");
    printf("' -- \"$word\")); return ;;\n  esac\n  case $before in\n");
    for (size_t i = 0; i < n_commands; i++)
        if (begins_noun(i)) {
            printf("  %s) COMPREPLY=($(compgen -W '", commands[i].noun);
            print_words(commands[i].noun, " ");
            printf("' -- \"$word\")) ;;\n");
        }
    printf("  completion) COMPREPLY=($(compgen -W 'bash zsh fish' -- \"$word\")) ;;\n"
           "  *) COMPREPLY=($(compgen -W '");
    print_words(NULL, " ");
    printf("' -- \"$word\")) ;;\n  esac\n}\ncomplete -F _attnctl attnctl\n");
}

static void print_zsh(void)
{
    printf("#compdef attnctl\nlocal -a words_of_attnctl\ncase ${words[CURRENT-1]} in\n");
    for (size_t i = 0; i < n_commands; i++)
        if (begins_noun(i)) {
            printf("%s) words_of_attnctl=(", commands[i].noun);
            print_words(commands[i].noun, " ");
            printf(") ;;\n");
        }
    printf("completion) words_of_attnctl=(bash zsh fish) ;;\n*) words_of_attnctl=(");
    print_words(NULL, " ");
    printf(" ");
    print_options(" ");
    printf(") ;;\nesac\ncompadd -- $words_of_attnctl\n");
}

static void print_fish(void)
{
    printf("complete -c attnctl -f\n");
    for (size_t i = 0; i < n_commands; i++) {
        const struct command *c = &commands[i];
        if (begins_noun(i))
            printf("complete -c attnctl -n __fish_use_subcommand -a %s\n", c->noun);
        if (c->noun != NULL)
            printf("complete -c attnctl -n '__fish_seen_subcommand_from %s' -a %s -d '%s'\n",
                   c->noun, c->verb, c->help);
        else
            printf("complete -c attnctl -n __fish_use_subcommand -a %s -d '%s'\n", c->verb,
                   c->help);
    }
    for (const struct option *o = options; o->name != NULL; o++)
        printf("complete -c attnctl -l %s%s\n", o->name, o->has_arg == no_argument ? "" : " -r");
}

int run_completion(const struct arguments *a)
{
    const char *shell = a->operands[0];
    if (strcmp(shell, "bash") == 0) {
        print_bash();
    } else if (strcmp(shell, "zsh") == 0) {
        print_zsh();
    } else if (strcmp(shell, "fish") == 0) {
        print_fish();
    } else {
        fprintf(stderr, "attnctl: completion: \"%s\" is not bash, zsh or fish\n", shell);
        return EXIT_USAGE;
    }
    return printed();
}
