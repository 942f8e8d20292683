/* config_defaults.h: settings for tests of other parts: the option table's defaults, whatever the
 * machine has in files and variables. config_fini frees them. */
#ifndef TESTS_DAEMON_CONFIG_DEFAULTS_H
#define TESTS_DAEMON_CONFIG_DEFAULTS_H

#include <stdlib.h>
#include <string.h>

#include "daemon/config/option.h"

static inline void config_defaults(struct config *c)
{
    char why[256];
    memset(c, 0, sizeof *c);
    for (size_t i = 0; i < config_n_options; i++)
        if (config_options[i].type != OPTION_URLS &&
            config_option_parse(&config_options[i], config_options[i].default_text, c, why,
                                sizeof why) != ATTN_OK)
            abort();
}

#endif
