/* lists.h: the lists that operators ask for: each topic of the request inspect. */
#ifndef ATTND_DAEMON_ENGINE_OPERATOR_LISTS_H
#define ATTND_DAEMON_ENGINE_OPERATOR_LISTS_H

#include <jansson.h>

#include "daemon/engine/core/state.h"

struct topic {
    const char *name;
    bool is_for_all; /* who may send steps may see it */
    json_t *(*list)(struct engine *e, const Attnd__Inspect *ask); /* NULL: no memory */
};

/* Whose engine answers: lists of sequences go through the cards by their pages. */
uint32_t list_device(const struct engine *e, const Attnd__Inspect *ask);
/* NULL: there is no such topic. */
const struct topic *topic_find(const char *name);

#endif
