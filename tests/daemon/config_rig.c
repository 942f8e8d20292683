/* config_rig.c: loads settings from an environment cleared of the machine's own ATTND_ variables
 * and a file in /tmp, and asserts what a load gives or refuses.
 */
#include "tests/daemon/config_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

enum { MAX_ARGS = 16 };

char config_file[64];

/* The environment and the file of one load. */
void config_given_environment(const char *name, const char *value)
{
    assert_int_equal(setenv(name, value, 1), 0);
}

const char *config_given_file(const char *text)
{
    snprintf(config_file, sizeof(config_file), "/tmp/attnd_config_%ld.conf", (long)getpid());
    FILE *f = fopen(config_file, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    return config_file;
}

int config_reset(void **state)
{
    (void)state;
    for (char **e = environ; *e != NULL;) {
        char name[256];
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(*e, "="), *e);
        if (strncmp(name, "ATTND_", 6) == 0) {
            unsetenv(name);
            e = environ;
        } else {
            e++;
        }
    }
    /* no settings and no mistakes */
    setenv("ATTND_MODULE_DIR", "/nowhere", 1);
    setenv("ATTND_CPU_ISA", "avx2", 1);
    setenv("ATTND_ENDPOINT", "tcp://127.0.0.1:1", 1);
    setenv("ATTND_TEST_SEED", "5", 1);
    setenv("RUNTIME_DIRECTORY", "/run/test:/run/other", 1);
    return 0;
}

attn_status config_try(struct config *c, enum config_action *action, struct config_fault *fault,
                       const char *const *args)
{
    char *argv[MAX_ARGS + 1] = {(char *)(uintptr_t) "attnd"};
    int argc = 1;
    for (; args[argc - 1] != NULL; argc++)
        argv[argc] = (char *)(uintptr_t)args[argc - 1];
    memset(c, 0xee, sizeof(*c));
    memset(fault, 0x55, sizeof(*fault));
    *action = CONFIG_RUN;
    return config_load(argc, argv, c, action, fault);
}

void config_expect_ok(struct config *c, const char *const *args)
{
    struct config_fault fault;
    enum config_action action;
    if (config_try(c, &action, &fault, args) != ATTN_OK)
        fail_msg("%s", fault.why);
}

/* The load fails and its sentence has all parts (separated by |). */
void config_expect_failure(const char *parts, const char *const *args)
{
    char copy[512];
    struct config_fault fault;
    enum config_action action;
    struct config c;
    if (config_try(&c, &action, &fault, args) == ATTN_OK) {
        config_fini(&c);
        fail_msg("accepted, expected \"%s\"", parts);
    }
    snprintf(copy, sizeof(copy), "%s", parts);
    for (char *part = strtok(copy, "|"); part != NULL; part = strtok(NULL, "|"))
        if (strstr(fault.why, part) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", fault.why, part);
    /* the texts about flags begin so, and no others */
    assert_int_equal(fault.is_flag,
                     strncmp(fault.why, "flag", 4) == 0 || strstr(fault.why, "(flag ") != NULL);
    static const struct config empty;
    assert_memory_equal(&c, &empty, sizeof(c));
}

int config_cleanup(void **state)
{
    (void)state;
    unlink(config_file);
    return 0;
}
