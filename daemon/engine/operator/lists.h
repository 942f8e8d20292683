/* lists.h: the lists that operators ask for, one per topic of the request inspect. */
#ifndef ATTND_DAEMON_ENGINE_OPERATOR_LISTS_H
#define ATTND_DAEMON_ENGINE_OPERATOR_LISTS_H

#include <jansson.h>

#include "daemon/engine/core/state.h"

struct topic {
    const char *name;
    bool is_for_all; /* any client may see it */
    json_t *(*list)(struct engine *e, const Attnd__Inspect *ask); /* NULL: no memory */
};

/* The card whose engine answers; lists of sequences visit the cards page by page. */
uint32_t list_device(const struct engine *e, const Attnd__Inspect *ask);
/* Finds a topic by name. NULL: none. */
const struct topic *topic_find(const char *name);

#endif
