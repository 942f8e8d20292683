/* config_rig.h: settings as tests load them: from an environment, a file and flags of their own. */
#ifndef TESTS_DAEMON_CONFIG_RIG_H
#define TESTS_DAEMON_CONFIG_RIG_H

#include "daemon/config/config.h"

extern char config_file[64]; /* of config_given_file() */

void config_given_environment(const char *name, const char *value);
const char *config_given_file(const char *text); /* its path */
int config_reset(void **state); /* before each test: no settings and no mistakes */
int config_cleanup(void **state); /* after all: the file is gone */

#define ARGS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define NO_ARGS ((const char *const[]){NULL})

/* args: ARGS(...), without the program's name. */
attn_status config_try(struct config *c, enum config_action *action, struct config_fault *fault,
                       const char *const *args);
void config_expect_ok(struct config *c, const char *const *args);
/* The load fails and its sentence has all parts (separated by |). */
void config_expect_failure(const char *parts, const char *const *args);

#endif
