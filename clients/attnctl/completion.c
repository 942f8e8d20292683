/* completion.c: how bash, zsh and fish complete attnctl's words: each asks `attnctl --complete
 * WORDS`, which prints what the last word may become, a line each, with a tab before what is said
 * of it. What has names of its own (pools, settings) the daemon is asked for.
 */
#include <stdio.h>
#include <string.h>

#include "clients/attnctl/attnctl.h"

static const uint64_t ANSWER_US = 1000000; /* who types does not wait longer */

struct typed {
    const struct vocabulary *all;
    const struct arguments *a; /* the options before it */
    const char *word; /* what is typed of the word */
};

static void offer(const struct typed *t, const char *word, const char *help)
{
    if (word != NULL && strncmp(word, t->word, strlen(t->word)) == 0)
        printf("%s\t%.*s\n", word, (int)strcspn(help, "\n"), help);
}

/* What the daemon lists, by that member; nothing where it does not answer. */
static void offer_listed(const struct typed *t, const char *topic, const char *member)
{
    struct arguments a = *t->a;
    attn_client *c;
    json_t *page = NULL, *one;
    size_t i;
    a.is_admin = true;
    a.wait_us = 0;
    a.timeout_us = ANSWER_US;
    if (connect_to(&a, &c) != ATTN_OK)
        return;
    inspect(c, topic, 0, a.timeout_us, &page);
    json_array_foreach(json_object_get(page, topic), i, one)
    {
        offer(t, json_string_value(json_object_get(one, member)), "");
    }
    json_decref(page);
    attn_client_close(c);
}

/* The first words, each once; or the verbs of a noun. */
static void offer_words(const struct typed *t, const char *noun)
{
    const char *last = "";
    for (size_t i = 0; i < t->all->n_commands; i++) {
        const struct command *c = &t->all->commands[i];
        if (noun != NULL && (c->noun == NULL || strcmp(c->noun, noun) != 0))
            continue;
        bool is_noun = noun == NULL && c->noun != NULL;
        const char *word = is_noun ? c->noun : c->verb;
        if (strcmp(word, last) != 0)
            offer(t, word, is_noun ? "" : c->help);
        last = word;
    }
}

static void offer_value(const struct typed *t, const struct option *o)
{
    switch (o->val) {
    case OPT_DTYPE:
    case OPT_KV_DTYPE:
        for (attn_dtype d = ATTN_F32; d <= (o->val == OPT_DTYPE ? ATTN_BF16 : ATTN_MXFP4); d++)
            offer(t, attn_dtype_name(d), "");
        break;
    case OPT_SPLIT:
        for (attn_split s = ATTN_SPLIT_AUTO; s <= ATTN_SPLIT_TOKENS; s++)
            offer(t, attn_split_name(s), "");
        break;
    case OPT_POOL:
        offer_listed(t, "pools", "name");
        break;
    case OPT_TENANT:
        offer_listed(t, "tenants", "tenant");
        break;
    default:
        break; /* a number or a path */
    }
}

static void offer_operand(const struct typed *t, const struct command *c, size_t n)
{
    const char *operand = c->operands;
    for (; operand != NULL && n > 0; n--) {
        operand = strchr(operand, ' ');
        operand = operand != NULL ? operand + 1 : NULL;
    }
    if (operand == NULL)
        return;
    bool is_name = strncmp(operand, "NAME", 4) == 0;
    if (is_name && strcmp(c->noun, "config") == 0)
        offer_listed(t, "config", "name");
    else if (is_name && strcmp(c->verb, "create") != 0)
        offer_listed(t, "pools", "name");
    else if (strcmp(operand, "ID") == 0)
        offer_listed(t, "sessions", "session");
    else if (strncmp(operand, "NUMBER", 6) == 0)
        offer_listed(t, "sequences", "sequence");
    else if (strcmp(operand, "SHELL") == 0)
        for (const char *const *s = (const char *const[]){"bash", "zsh", "fish", NULL}; *s != NULL;
             s++)
            offer(t, *s, "");
}

int complete_word(const struct vocabulary *all, const struct arguments *a, char **words, size_t n,
                  const char *option, const char *word)
{
    const struct typed t = {all, a, word};
    for (const struct option *o = all->options; option != NULL && o->name != NULL; o++) {
        if (strcmp(option, o->name) != 0 || o->has_arg != required_argument)
            continue;
        offer_value(&t, o);
        return printed();
    }
    if (word[0] == '-') {
        char name[64];
        for (const struct option *o = all->options; o->name != NULL; o++) {
            snprintf(name, sizeof name, "--%s", o->name);
            offer(&t, name, "");
        }
        return printed();
    }
    if (n == 0)
        offer_words(&t, NULL);
    else if (n == 1)
        offer_words(&t, words[0]);
    for (size_t i = 0; n > 0 && i < all->n_commands; i++) {
        const struct command *c = &all->commands[i];
        size_t n_own = c->noun != NULL ? 2 : 1;
        if (n >= n_own && strcmp(words[0], c->noun != NULL ? c->noun : c->verb) == 0 &&
            (c->noun == NULL || strcmp(words[1], c->verb) == 0))
            offer_operand(&t, c, n - n_own);
    }
    return printed();
}

/* Bash cuts words at colons and equals signs, so the line is cut here. */
static const char bash[] = "_attnctl() {\n"
                           "  local line=${COMP_LINE:0:COMP_POINT} words\n"
                           "  read -ra words <<<\"$line\"\n"
                           "  [[ $line != *[[:space:]] ]] || words+=('')\n"
                           "  mapfile -t COMPREPLY < <(\"${words[0]}\" --complete "
                           "\"${words[@]:1}\" 2>/dev/null)\n"
                           "  COMPREPLY=(\"${COMPREPLY[@]%%$'\\t'*}\")\n"
                           "}\n"
                           "complete -o default -F _attnctl attnctl\n";
static const char zsh[] = "#compdef attnctl\n"
                          "local -a next\n"
                          "next=(${(f)\"$(\"${(Q)words[1]}\" --complete "
                          "\"${(@Q)words[2,CURRENT]}\" 2>/dev/null)\"})\n"
                          "if ((${#next})); then\n"
                          "  compadd -- \"${(@)next%%$'\\t'*}\"\n"
                          "else\n"
                          "  _files\n"
                          "fi\n";
static const char fish[] =
    "function __attnctl_complete\n"
    "  set -l words (commandline -opc)\n"
    "  set -l next ($words[1] --complete $words[2..-1] (commandline -ct) 2>/dev/null)\n"
    "  if test (count $next) -gt 0\n"
    "    printf '%s\\n' $next\n"
    "  else\n"
    "    __fish_complete_path (commandline -ct)\n"
    "  end\n"
    "end\n"
    "complete -c attnctl -f -a '(__attnctl_complete)'\n";

int print_completion(const char *shell)
{
    const char *script = strcmp(shell, "bash") == 0   ? bash
                         : strcmp(shell, "zsh") == 0  ? zsh
                         : strcmp(shell, "fish") == 0 ? fish
                                                      : NULL;
    if (script == NULL) {
        fprintf(stderr, "attnctl: completion: \"%s\" is not bash, zsh or fish\n", shell);
        return EXIT_USAGE;
    }
    fputs(script, stdout);
    return printed();
}
